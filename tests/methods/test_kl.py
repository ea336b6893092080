"""KL-Shampoo and KL-SOAP against the divergence that they minimise, and written out anew."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

from soframe.checkpoint import seal
from soframe.comm.packing import pack_triangle
from soframe.layers.layout import BlockShape
from soframe.methods import KFAC, KLSOAP, SOAP, Chain, KLShampoo, Method, Shampoo
from soframe.solvers import Basis, Eigen, Root
from soframe.specs import VALUE, FactorSpec
from soframe.strategies import MemOpt, Sharded
from soframe.testing import compare
from soframe.testing.methods import Training, train
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.methods import stages
from tests.methods.test_soap import first_basis, graded

Matrix = NDArray[np.float64]
SHAMPOO = KLShampoo(decay=0.7, epsilon=0.01)
SOAPS = KLSOAP((0.9, 0.8), shampoo_beta=0.6, epsilon=0.01)


# -- the fixed point ------------------------------------------------------------------------------


def data_of(method: Method, factors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What the method's statistics are made with, of factors that are solved exactly."""
    data: dict[str, dict[str, Tensor]] = {}
    for name, matrix in factors.items():
        if isinstance(method, KLShampoo):
            data[name] = Root(-0.5, 0.0).solve(matrix, torch.zeros(1))
        else:
            values, vectors = torch.linalg.eigh(matrix)
            data |= {name: {"vectors": vectors}, f"{name}_values": {VALUE: values}}
    return data


def divergence(gradients: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The KL divergence of ``N(0, L ⊗ R)`` from the Gaussian of the gradients, dense."""
    flat = gradients.flatten(1)
    zeros = torch.zeros(flat.shape[1], dtype=flat.dtype)
    seen = MultivariateNormal(zeros, flat.T @ flat / len(flat))
    return kl_divergence(seen, MultivariateNormal(zeros, torch.kron(left, right)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [KLShampoo(epsilon=0.0), KLSOAP(epsilon=0.0)], ids=("kl-shampoo", "kl-soap")
)
@settings(max_examples=examples(8), deadline=None)
@given(out=st.integers(2, 4), into=st.integers(2, 4), seed=st.integers(0, 999))
def test_the_fixed_point_minimises_the_divergence(
    method: Method, out: int, into: int, seed: int
) -> None:
    """The averages over a fixed set of gradients, of which there are more than entries."""
    gradients = randn(3 * out * into, out, into, seed=seed)
    mixes = randn(1, out, out, seed=seed + 1), randn(1, into, into, seed=seed + 2)
    # The divergence is a difference of large numbers where entries are nearly dependent.
    assume(all(float(torch.linalg.cond(mix)) < 100 for mix in mixes))
    gradients = mixes[0] @ gradients @ mixes[1]
    factors = {"L": torch.eye(out)[None].double(), "R": torch.eye(into)[None].double()}
    for _ in range(300):
        data = data_of(method, factors)
        shared = {
            factor: {name: t.expand(len(gradients), *t.shape[1:]) for name, t in tensors.items()}
            for factor, tensors in data.items()
        }
        each = method.observe(gradients, shared)  # a group for each
        factors = {
            name: (factor + each[name].mean(0, keepdim=True)) / 2
            for name, factor in factors.items()
        }
    left, right = factors["L"][0], factors["R"][0]
    rows = torch.stack([g @ torch.linalg.inv(right) @ g.T for g in gradients]).mean(0) / into
    columns = torch.stack([g.T @ torch.linalg.inv(left) @ g for g in gradients]).mean(0) / out
    compare(left, rows, "L", rtol=1e-8)
    compare(right, columns, "R", rtol=1e-8)
    slopes = {}
    for what, scale in (("there", 1.0), ("elsewhere", 1.1)):
        point = [(scale * left).requires_grad_(), right.clone().requires_grad_()]
        grads = torch.autograd.grad(divergence(gradients, *point), point)
        # Along the point itself, so that neither the scales nor the sizes of the factors count.
        slopes[what] = [float((p.detach() @ g).norm()) for p, g in zip(point, grads, strict=True)]
    assert max(slopes["there"]) < 1e-6, slopes
    assert min(slopes["elsewhere"]) > 1e-2, slopes


@pytest.mark.parametrize("method", [SHAMPOO, SOAPS], ids=("kl-shampoo", "kl-soap"))
def test_one_side_is_held_to_the_identity(method: Method) -> None:
    """The optimum of one factor alone is the plain average, over the length of the other side."""
    gradient = randn(2, 3, 5)
    sides = {"sides": "right"} if isinstance(method, KLShampoo) else {"max_size": 4}
    one = dataclasses.replace(method, **sides)  # type: ignore[type-var]
    (factor,) = one.factors(BlockShape(2, 3, 5))
    square, length = {
        "R": (gradient.mT @ gradient, 3),
        "L": (gradient @ gradient.mT, 5),
    }[factor.name]
    anything = {factor.name: {"root": randn(2, 9, 9), "vectors": randn(2, 9, 9)}}
    for data in ({}, anything):
        (found,) = one.observe(gradient, data).values()
        compare(found, square / length, factor.name)


# -- the algorithms, written out anew -------------------------------------------------------------


def inverse_root(factor: Matrix, epsilon: float) -> Matrix:
    damped = factor + epsilon * np.linalg.norm(factor, 2) * np.eye(len(factor))
    values, vectors = np.linalg.eigh(damped)
    return vectors @ np.diag(values**-0.5) @ vectors.T


class PlainShampoo:
    """KL-Shampoo of one matrix with both factors: the roots are those of the last solve."""

    def __init__(self, options: KLShampoo, every: int, shape: tuple[int, int]) -> None:
        self.options, self.every, self.count = options, every, 0
        self.left, self.right = (options.start * np.eye(size) for size in shape)
        self.roots = [np.eye(size) / np.sqrt(options.start) for size in shape]

    def step(self, gradient: Matrix) -> Matrix:
        out, into = gradient.shape
        kept = self.options.decay
        inverse_left, inverse_right = (root @ root for root in self.roots)
        rows = gradient @ inverse_right @ gradient.T / into
        columns = gradient.T @ inverse_left @ gradient / out
        self.left = kept * self.left + (1 - kept) * rows
        self.right = kept * self.right + (1 - kept) * columns
        if self.count % self.every == 0:
            self.roots = [inverse_root(f, self.options.epsilon) for f in (self.left, self.right)]
        self.count += 1
        return self.roots[0] @ gradient @ self.roots[1]


class PlainSOAP:
    """KL-SOAP of one matrix with both factors."""

    def __init__(self, options: KLSOAP, every: int, shape: tuple[int, int]) -> None:
        self.options, self.every, self.count = options, every, 0
        self.left, self.right = np.zeros((shape[0],) * 2), np.zeros((shape[1],) * 2)
        self.l, self.r = (np.full(size, options.start) for size in shape)
        self.mean, self.square = np.zeros(shape), np.zeros(shape)

    def step(self, gradient: Matrix) -> Matrix:
        o = self.options
        if self.count == 0:
            out, into = gradient.shape
            self.add(
                gradient @ gradient.T / (o.start * into), gradient.T @ gradient / (o.start * out)
            )
            q, p = (first_basis(f) for f in (self.left, self.right))
            self.q, self.p = q, p
            self.count = 1
            return np.zeros_like(gradient)
        first, second = o.betas
        self.mean = first * self.mean + (1 - first) * gradient
        self.square = second * self.square + (1 - second) * (self.q.T @ gradient @ self.p) ** 2
        ratio = (self.q.T @ self.mean @ self.p) / (np.sqrt(self.square) + o.eps)
        direction = self.q @ ratio @ self.p.T
        direction *= np.sqrt(1 - second**self.count) / (1 - first**self.count)
        self.gather(gradient)
        if self.count % self.every == 0:
            self.q = np.linalg.qr(graded(self.left) @ self.q)[0]
            self.p = np.linalg.qr(graded(self.right) @ self.p)[0]
        self.count += 1
        return direction

    def add(self, rows: Matrix, columns: Matrix) -> None:
        kept = self.options.shampoo_beta
        self.left = kept * self.left + (1 - kept) * rows
        self.right = kept * self.right + (1 - kept) * columns

    def gather(self, gradient: Matrix) -> None:
        out, into = gradient.shape
        kept, epsilon = self.options.shampoo_beta, self.options.epsilon
        inverse_left = self.q @ np.diag(1 / (self.l + epsilon * self.l.max())) @ self.q.T
        inverse_right = self.p @ np.diag(1 / (self.r + epsilon * self.r.max())) @ self.p.T
        rows = gradient @ inverse_right @ gradient.T / into
        columns = gradient.T @ inverse_left @ gradient / out
        self.add(rows, columns)
        self.l = kept * self.l + (1 - kept) * np.diag(self.q.T @ rows @ self.q)
        self.r = kept * self.r + (1 - kept) * np.diag(self.p.T @ columns @ self.p)


def gradient_at(step: int, shape: tuple[int, int]) -> Tensor:
    """Gradients whose scale and spectrum change, so that a basis turns."""
    rows = torch.linspace(1.0, 3.0, shape[0]).double().roll(step // 2)[:, None]
    return randn(*shape, seed=step) * rows * (1 + step % 3)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        (SHAMPOO, (3, 3)),
        (SHAMPOO, (2, 4)),
        (KLShampoo(0.9, start=2.0), (4, 3)),
        (SOAPS, (4, 4)),
        (KLSOAP(shampoo_beta=0.7, start=2.0, epsilon=0.1), (3, 3)),
        (KLSOAP(), (3, 4)),
    ],
    ids=str,
)
def test_plain_algorithms(method: Any, shape: tuple[int, int], every: int) -> None:
    plain = PlainShampoo if isinstance(method, KLShampoo) else PlainSOAP
    reference = plain(method, every, shape)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)).double()
    with closing(stages.preconditioner(model, method, solve_every=every)) as own:
        for step in range(9):
            gradient = gradient_at(step, shape)
            model[0].weight.grad = gradient.clone()
            own.step()
            expected = torch.from_numpy(reference.step(gradient.numpy()))
            compare(model[0].weight.grad, expected, f"step {step}", rtol=1e-9)


def test_singular_averages_are_never_inverted() -> None:
    """Of few gradients of rank one: eigenvalues are at least what is left of the start."""
    model = nn.Sequential(nn.Linear(6, 1, bias=False)).double()
    method = KLShampoo(0.9, start=0.5)
    with closing(stages.preconditioner(model, method)) as own:
        for step in range(6):
            gradient = 1e-2 * randn(1, 6, seed=step)
            model[0].weight.grad = gradient.clone()
            own.step()
            least = 0.5 * 0.9 ** (step + 1)
            for name in ("L", "R"):
                values = torch.linalg.eigvalsh(own.blocks[0].running[name])
                assert float(values.min()) >= least * (1 - 1e-12), name
            assert model[0].weight.grad.norm() <= gradient.norm() / least


# -- where the data are ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", [SHAMPOO, SOAPS, Chain(("momentum", SHAMPOO))], ids=repr)
def test_lost_data_are_waited_for(method: Method) -> None:
    """Of a state without its data: no statistics with the identity in their place."""
    model = stages.network()
    with closing(stages.preconditioner(model, method)) as own:
        stages.train(model, own, range(3))
        saved = own.state_dict()
    for block in saved["blocks"].values():
        block["second_order"] = {}
    with closing(stages.preconditioner(model, method)) as own:
        own.load_state_dict(seal(saved))
        with_factors = [block for block in own.blocks if block.factors]
        assert with_factors
        assert all(block.has_lost_data for block in with_factors)
        stages.train(model, own, range(3, 4), lr=0.0)
        for block in with_factors:
            before = saved["blocks"][block.name]["factors"]
            for factor in block.factors:
                kept = block.running.matrix(factor)
                if factor.kind == "psd":
                    kept = pack_triangle(kept)
                assert torch.equal(kept, before[factor.name]), (block.name, factor.name)
            assert block.solved
        data = {
            block: copy.deepcopy(block.stack.data_of((block.member,))) for block in with_factors
        }
        old = {block: {n: t.clone() for n, t in block.running.items()} for block in with_factors}
        model.zero_grad()
        stages.loss_of(model, 4).backward()
        gradients = {block: block.gradient() for block in with_factors}
        model.zero_grad()
        stages.train(model, own, range(4, 5), lr=0.0)
        for block in with_factors:
            assert gradients[block] is not None
            new = block.method.observe(gradients[block], data[block])
            for factor in block.factors:
                name = factor.name
                expected = torch.lerp(old[block][name], new[name], 1 - factor.decay)
                mass = block.record.masses[name][0]
                if factor.start is None:  # freed of its start
                    expected = torch.lerp(old[block][name], new[name], (1 - factor.decay) / mass)
                compare(block.running[name], expected, f"{block.name}.{name}")


def test_beside_factors_of_calls() -> None:
    """Whose statistics are there before: the others begin at the first step all the same."""
    model = stages.network()
    chain = Chain((KFAC(), SHAMPOO))
    with closing(stages.preconditioner(model, chain, scaling="fisher")) as own:
        stages.train(model, own, range(2))
        for block in own.blocks:
            assert {"A", "G", "L", "R"} == set(block.running)
            assert block.solved


@pytest.mark.distributed
@pytest.mark.parametrize("method", [SHAMPOO, SOAPS], ids=("kl-shampoo", "kl-soap"))
def test_in_the_background(method: Method) -> None:
    """What lands later is in the statistics of the same step on every rank."""
    one = Training(method, options={"background": 2})
    whole = train(0, 1, one)
    strategies: tuple[Any, ...] = ("comm-opt", MemOpt(), Sharded(deferred=True))
    runs = [dataclasses.replace(one, strategy=strategy) for strategy in strategies]
    for trained in run_ranks(train_each, 2, runs):
        for run, weights in zip(runs, trained, strict=True):
            for name, weight in weights.items():
                compare(weight, whole.weights[name], f"{run.strategy!r}: {name}", rtol=1e-9)
    at_once = train(0, 1, Training(method))
    assert not torch.equal(at_once.weights["first.weight"], whole.weights["first.weight"])


def train_each(rank: int, ranks: int, runs: list[Training]) -> list[dict[str, Tensor]]:
    return [train(rank, ranks, run).weights for run in runs]


# -- settings -------------------------------------------------------------------------------------


def test_settings_are_checked() -> None:
    for options in ({"power": -0.25}, {"start": 0.0}, {"decay": 1.0}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            KLShampoo(**options)  # type: ignore[arg-type]
    for options in ({"start": float("inf")}, {"epsilon": -1.0}, {"shampoo_beta": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            KLSOAP(**options)  # type: ignore[arg-type]
    assert KLShampoo(power=-0.5).solver(FactorSpec("L", "left", 1, 2), Eigen()) == Root(-0.5)
    with pytest.raises(ValueError, match="KLShampoo: decay"):
        KLShampoo(decay=1.0)
    with pytest.raises(ValueError, match="reads='gradient'"):
        FactorSpec("A", "right", 1, 3, start=1.0)
    assert not Shampoo().observes_with_data
    assert Chain(("momentum", KLSOAP())).observes_with_data


def test_a_basis_whose_columns_stay() -> None:
    factor = torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None].double()
    basis = Basis(ordered=False)
    spec = FactorSpec("L", "left", 1, 3, reads="gradient")
    assert basis.tensors(spec).keys() == {"vectors"}
    first = basis.solve(factor, torch.zeros(1))
    assert first.keys() == {"vectors"}
    shuffled = {"vectors": first["vectors"][..., [2, 0, 1]]}
    again = basis.solve_again(factor, torch.zeros(1), shuffled)
    assert again.keys() == {"vectors"}
    compare(again["vectors"].abs(), shuffled["vectors"].abs(), "the same columns")
    state = {"square": randn(1, 3, 3)}
    assert torch.equal(SOAP().rebase(state, {"L": first}, {"L": again})["square"], state["square"])
