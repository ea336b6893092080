"""A side above ``max_size`` has the diagonal of its factor, and large heads plan megabytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.blocks.block import Block
from soframe.methods import EKFAC, FOOF, KFAC, SOAP, TNT, Chain, KFACReduce, NewtonMuon
from soframe.testing import compare
from tests import kit
from tests.curvature import closing, fill, gradient_matrix, half_square, preconditioner, randn
from tests.examples import examples

DAMPING = 0.3
SIDES = {"A": ("in", 1), "G": ("out", 0), "R": ("in", 1), "L": ("out", 0)}


def rows_of(model: nn.Sequential, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs ``[N, T, in]`` and gradients of each sample's loss ``[N, T, out]``, by autograd."""
    (layer,) = model
    images = isinstance(layer, nn.Conv2d)
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(len(inputs) * half_square(outputs, targets), outputs)
    if images:
        rows = nn.functional.unfold(inputs, layer.kernel_size).mT
        # Channels first there, last in the gradient matrix.
        rows = rows.unflatten(2, (layer.in_channels, -1)).mT.flatten(2)
        gradient = gradient.flatten(2).mT
    else:
        rows = inputs
    if layer.bias is not None:
        rows = torch.cat([rows, torch.ones_like(rows[..., :1])], 2)
    return rows, gradient


def expected_factors(method: Any, rows: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """The factors by their definitions, with the long ones cut down to their diagonals."""
    samples, shared, _ = rows.shape
    each = torch.einsum("nto,nti->noi", gradient, rows)
    if isinstance(method, TNT):
        found = {"L": (each @ each.mT).sum(0), "R": (each.mT @ each).sum(0)}
    elif isinstance(method, KFACReduce):
        mean, total = rows.mean(1), gradient.sum(1)
        found = {"A": mean.T @ mean, "G": total.T @ total}
    else:
        a, g = rows.flatten(0, 1), gradient.flatten(0, 1)
        found = {"A": a.T @ a, "G": g.T @ g / shared}
    found = {name: matrix / samples for name, matrix in found.items()}
    if isinstance(method, FOOF):
        del found["G"]
    return {
        name: matrix.diag().diag() if len(matrix) > method.max_size else matrix
        for name, matrix in found.items()
    }


def expected_direction(
    method: Any, factors: dict[str, Tensor], each: Tensor, matrix: Tensor
) -> Tensor:
    """``(right ⊗ left + damping I)^-1`` of the gradient; EKFAC's scale from sample gradients."""
    right = factors.get("A", factors.get("R"))
    left = factors.get("G", factors.get("L", torch.eye(len(matrix), dtype=matrix.dtype)))
    block = torch.kron(left, right)  # rows by output, then input
    if isinstance(method, TNT):
        block = block / left.trace()
    if isinstance(method, EKFAC):
        # Long sides are not rotated: any basis of a diagonal would do, and the method takes e_i.
        bases = [
            torch.eye(len(f), dtype=f.dtype)
            if len(f) > method.max_size
            else torch.linalg.eigh(f)[1]
            for f in (left, right)
        ]
        turned = bases[0].T @ each @ bases[1]
        scale = turned.square().mean(0)
        return bases[0] @ ((bases[0].T @ matrix @ bases[1]) / (scale + DAMPING)) @ bases[1].T
    damped = block + DAMPING * torch.eye(len(block), dtype=block.dtype)
    return torch.linalg.solve(damped, matrix.flatten()).view_as(matrix)


def stored(block: Block, name: str) -> Tensor:
    """A running factor as a matrix."""
    spec = next(factor for factor in block.factors if factor.name == name)
    tensor = block.running.matrix(spec)[0]
    return tensor.diag() if spec.kind == "diagonal" else tensor


@pytest.mark.parametrize("kind", [KFAC, KFACReduce, EKFAC, FOOF, TNT])
@given(
    out=st.integers(2, 7),
    into=st.integers(2, 7),
    positions=st.integers(1, 3),
    bias=st.booleans(),
    image=st.booleans(),
    max_size=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(25))
def test_long_sides_keep_the_diagonal(
    kind: Any,
    out: int,
    into: int,
    positions: int,
    bias: bool,
    image: bool,
    max_size: int,
    seed: int,
) -> None:
    layer: nn.Module = nn.Linear(into, out, bias=bias)
    inputs = randn(4, positions, into, seed=seed)
    if image:
        layer = nn.Conv2d(into, out, (1, 2), bias=bias)
        inputs = randn(4, into, 1, positions + 1, seed=seed)
    model = fill(nn.Sequential(layer), seed)
    targets = torch.zeros_like(model(inputs))
    method = kind(max_size=max_size)
    rows, gradient = rows_of(model, inputs, targets)
    expected = expected_factors(method, rows, gradient)
    each = torch.einsum("nto,nti->noi", gradient, rows)
    with closing(preconditioner(model, method=method, damping=DAMPING, solve_every=9)) as own:
        # EKFAC's scale begins with the data of the first solve.
        kit.train(model, lambda net, _: half_square(net(inputs), targets), range(2), own)
        (block,) = own.blocks
        for name, matrix in expected.items():
            compare(stored(block, name), matrix, name, atol=1e-12)
            long = len(matrix) > max_size
            assert (f"{name} diagonal ({len(matrix)} rows)" in str(own.report())) == long
        result = expected_direction(method, expected, each, each.mean(0))
        compare(gradient_matrix(block)[0], result, "direction", atol=1e-12)


@pytest.mark.parametrize("method", [KFAC(max_size=3), TNT(max_size=3), KFACReduce(max_size=3)])
def test_an_embedding_of_long_rows(method: Any) -> None:
    """Its inputs are indices, whose diagonal it makes itself; its outputs are long here."""
    model = fill(nn.Sequential(nn.Embedding(5, 4)))
    indices = torch.tensor([[0, 1], [4, 1], [3, 3]])
    wide = type(method)(max_size=9)
    found = []
    settings = {"layers": "all", "damping": DAMPING, "samples": "batch"}
    for one in (method, wide):
        with closing(preconditioner(model, method=one, **settings)) as own:
            model.zero_grad()
            half_square(model(indices), torch.ones(3, 2, 4, dtype=torch.float64)).backward()
            own.step()
            (block,) = own.blocks
            found.append({f.name: block.running.matrix(f)[0] for f in block.factors})
    short, full = found
    for name, tensor in full.items():
        compare(short[name], tensor.diag() if tensor.dim() == 2 else tensor, name)
        assert short[name].dim() == 1


def test_stages_have_sizes_of_their_own() -> None:
    """Two stages of one chain, of which one keeps a matrix and the other its diagonal."""
    model = fill(nn.Sequential(nn.Linear(4, 3, bias=False)))
    inputs = randn(5, 4)
    chain = Chain((FOOF(max_size=3), FOOF()))
    with closing(preconditioner(model, method=chain)) as own:
        half_square(model(inputs), torch.ones(5, 3, dtype=torch.float64)).backward()
        own.step()
        (block,) = own.blocks
        second = inputs.T @ inputs / 5
        compare(block.running["0.A"][0], second.diag(), "short")
        compare(stored(block, "1.A"), second, "long", atol=1e-12)


def test_diagonals_also_under_the_constants_of_kfac_pytorch() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 3, bias=False)))
    inputs = randn(5, 4)
    with closing(preconditioner(model, method=KFAC(3), scaling="kaisa", decay=0.5)) as own:
        half_square(model(inputs), torch.ones(5, 3, dtype=torch.float64)).backward()
        own.step()
        (block,) = own.blocks
        mean = inputs.square().mean(0)
        compare(block.running["A"][0], (1 + mean) / 2, "A, from ones")


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("kfac", (64, 300_000)),
        ("kfac", (25_088, 32)),
        ("kfac-reduce", (64, 50_257)),
        ("foof", (25_088, 32)),
        (NewtonMuon(), (25_088, 32)),
        (SOAP(), (64, 50_257)),
    ],
    ids=str,
)
def test_defaults_plan_megabytes(method: Any, sizes: tuple[int, int], solver: str) -> None:
    into, out = sizes
    model = nn.Sequential(nn.Linear(into, out), nn.Linear(4, 4))
    every = {"solver": solver} if method != SOAP() else {}
    with closing(soframe.Preconditioner(model, method, kl_clip=None, **every)) as own:
        own_memory = own.placement.memory(0)
        assert own_memory["factors"] + own_memory["second_order"] < 4e6
        assert str(own.report()).splitlines()[1].startswith("at most ")


@pytest.mark.parametrize("method", ["ekfac", "tnt"])
def test_methods_of_sample_gradients_too(method: str) -> None:
    model = nn.Sequential(nn.Linear(16, 50_257))
    with closing(preconditioner(model, method=method, solve_every=9)) as own:
        elements = 50_257 * 17
        assert own.placement.memory(0)["total"] < 4 * (elements + 4 * 50_257)


def test_a_head_of_many_classes_trains() -> None:
    """Statistics, solve and update of a side that no matrix would fit in memory for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 300_000))
    inputs, labels = torch.randn(2, 4), torch.tensor([3, 299_999])
    with closing(kit.precondition(model)) as own:
        before = nn.functional.cross_entropy(model(inputs), labels)
        before.backward()
        own.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
        assert nn.functional.cross_entropy(model(inputs), labels) < before


def test_the_report_names_a_side_without_a_factor() -> None:
    with closing(kit.precondition(nn.Sequential(nn.Linear(6, 3)), SOAP(max_size=4))) as own:
        notes = {row.parameter: row.note for row in own.report()}
    assert notes == {"0.weight": "no factor of its 6 inputs", "0.bias": ""}
