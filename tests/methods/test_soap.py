"""SOAP against the published algorithm, written out anew for one matrix, in NumPy."""

import copy
import importlib.util
import math
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import (
    SOAP,
    Blocked,
    Chain,
    Method,
    Momentum,
    Muon,
    Orthogonalise,
    SOAPMuon,
    SOAPNorMuon,
)
from soframe.methods.soap import independent_rms
from soframe.solvers import Basis
from soframe.specs import FactorSpec
from soframe.testing import check_method, compare
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.methods import stages

Matrix = NDArray[np.float64]


def graded(factor: Matrix) -> Matrix:
    """A factor whose eigenvalues differ, see `Basis`."""
    size = len(factor)
    return factor + np.trace(factor) / size * 1e-4 * np.diag(np.linspace(1, 2, size))


def first_basis(factor: Matrix) -> Matrix:
    """Eigenvectors in descending order, and one QR of the graded factor."""
    return np.linalg.qr(graded(factor) @ np.linalg.eigh(factor)[1][:, ::-1])[0]


class Published:
    """Algorithm 3 of Vyas et al. (2024): one matrix, each side with a factor or the identity."""

    def __init__(self, options: SOAP, every: int, sides: str = "LR", gather: int = 1) -> None:
        self.options, self.every, self.sides, self.gathers = options, every, sides, gather
        self.count, self.began = 0, False
        self.factors: dict[str, Matrix] = {}
        self.bases: dict[str, Matrix] = {}

    def rotate(self, x: Matrix, *, back: bool = False) -> Matrix:
        left = self.bases.get("L", np.eye(len(x)))
        right = self.bases.get("R", np.eye(x.shape[1]))
        return left @ x @ right.T if back else left.T @ x @ right

    def step(self, gradient: Matrix, given: Matrix | None = None) -> Matrix:
        """The direction of one step, to be multiplied by the learning rate and subtracted.

        Args:
            gradient: The gradient.
            given: What is directed, if it is another.
        """
        o = self.options
        given = gradient if given is None else given
        if not self.began:
            self.began = True
            self.mean, self.square = np.zeros_like(gradient), np.zeros_like(gradient)
            sizes = dict(zip("LRP", gradient.shape, strict=False))
            self.factors = {side: np.zeros((sizes[side],) * 2) for side in self.sides}
            self.gather(gradient)
            for side, factor in self.factors.items():
                self.bases[side] = first_basis(factor)
            return np.zeros_like(gradient)
        self.count += 1
        self.mean = o.betas[0] * self.mean + (1 - o.betas[0]) * given
        self.square = o.betas[1] * self.square + (1 - o.betas[1]) * self.rotate(gradient) ** 2
        ratio = self.rotate(self.mean) / (np.sqrt(self.square) + o.eps)
        direction = self.rotate(ratio, back=True)
        if o.normalise:
            direction = direction / np.sqrt(np.mean(direction**2))
        if o.correct_bias:
            direction = direction * np.sqrt(1 - o.betas[1] ** self.count)
            direction = direction / (1 - o.betas[0] ** self.count)
        if self.count % self.gathers == 0:
            self.gather(gradient)
        if self.count % self.every == 0:
            self.refresh()
        return direction

    def gather(self, gradient: Matrix) -> None:
        moments = {"L": gradient @ gradient.T, "R": gradient.T @ gradient}
        for side in self.factors:
            kept = self.options.shampoo_beta
            self.factors[side] = kept * self.factors[side] + (1 - kept) * moments[side]

    def refresh(self) -> None:
        for side, plain in self.factors.items():
            basis, factor = self.bases[side], graded(plain)
            values = [column @ factor @ column for column in basis.T]
            order = np.argsort(values)[::-1]
            self.reorder(side, order)
            self.bases[side] = np.linalg.qr(factor @ basis[:, order])[0]

    def reorder(self, side: str, order: NDArray[np.int64]) -> None:
        self.square = self.square[order] if side == "L" else self.square[:, order]


def gradients(shape: tuple[int, int], steps: int) -> list[Tensor]:
    """Gradients whose scale and spectrum change, so that the order of the basis does."""
    each = []
    for step in range(steps):
        rows = torch.linspace(1.0, 3.0, shape[0]).double().roll(step // 2)[:, None]
        each.append(randn(*shape, seed=step) * rows * (1 + step % 3))
    return each


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.9, 0.8), "shampoo_beta": 0.6},
        {"betas": (0.0, 0.5), "eps": 0.1, "shampoo_beta": 0.0},
        {"correct_bias": False, "normalise": True},
    ],
    ids=str,
)
def test_soap_is_the_published_algorithm(options: dict[str, Any], every: int) -> None:
    method = SOAP(**options)
    reference = Published(method, every)
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
    orders = set()
    with closing(stages.preconditioner(model, method, solve_every=every)) as own:
        for step, gradient in enumerate(gradients((4, 4), 10)):
            model[0].weight.grad = gradient.clone()
            own.step()
            expected = torch.from_numpy(reference.step(gradient.numpy()))
            compare(model[0].weight.grad, expected, f"step {step}", rtol=1e-9)
            orders.add(str(own.blocks[0].second_order["L"]["order"].tolist()))
    assert len(orders) > 1


class OfKernel(Published):
    """The same for a kernel ``[out, channels, positions]``, with a factor for each dimension."""

    def rotate(self, x: Matrix, *, back: bool = False) -> Matrix:
        bases = [self.bases[side].T if back else self.bases[side] for side in "LRP"]
        return np.einsum("ai,bj,ck,abc->ijk", *bases, x)

    def gather(self, gradient: Matrix) -> None:
        kept = self.options.shampoo_beta
        for side, dim in DIMS.items():
            rows = np.moveaxis(gradient, dim, 0).reshape(gradient.shape[dim], -1)
            moment = rows @ rows.T
            self.factors[side] = kept * self.factors[side] + (1 - kept) * moment

    def reorder(self, side: str, order: NDArray[np.int64]) -> None:
        self.square = np.take(self.square, order, DIMS[side])


DIMS = {"L": 0, "R": 1, "P": 2}


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv1d(3, 4, 5, bias=False), nn.Conv2d(6, 8, (2, 3), groups=2, bias=False)],
    ids=["1d", "2d in groups"],
)
def test_each_dimension_of_a_convolution_has_a_factor(convolution: Any) -> None:
    method, groups = SOAP(), convolution.groups
    references = [OfKernel(method, 2, "LRP") for _ in range(groups)]
    model = nn.Sequential(copy.deepcopy(convolution)).double()
    positions = prod(convolution.kernel_size)
    with closing(stages.preconditioner(model, method, solve_every=2)) as own:
        orders: dict[str, set[str]] = {"R": set(), "P": set()}
        for step, gradient in enumerate(gradients((4 * groups, 3 * positions), 10)):
            kernels = gradient.view(groups, 4, 3, positions)
            # Other scales for channels and positions, too: the order of their bases changes.
            channels = torch.linspace(1.0, 3.0, 3).double().roll(step // 2)
            kernels = kernels * channels.view(3, 1)
            kernels = kernels * torch.linspace(1.0, 3.0, positions).double().roll(step // 2)
            model[0].weight.grad = kernels.reshape(convolution.weight.shape).clone()
            own.step()
            steps = zip(references, kernels, strict=True)
            expected = np.stack([reference.step(kernel.numpy()) for reference, kernel in steps])
            found = model[0].weight.grad.view(kernels.shape)
            compare(found, torch.from_numpy(expected), f"step {step}", rtol=1e-9)
            for side, seen in orders.items():
                seen.add(str(own.blocks[0].second_order[side]["order"].tolist()))
    assert all(len(seen) > 1 for seen in orders.values())


@pytest.mark.distributed
def test_ranks_and_micro_batches() -> None:
    check_method(SOAP(), ranks=(2,), strategies=("mem-opt",), launch=run_ranks, solve_every=2)


def test_squared_overlaps_carry_the_state_of_a_convolution() -> None:
    """In the basis of Kronecker products, as for a matrix of three sides."""
    method = SOAP(carry="rotate").of_kernel(5)
    state = {"square": randn(2, 4, 15, seed=1).square()}
    bases = []
    for seed in (2, 3):
        sides = zip("LRP", (4, 3, 5), strict=True)
        bases.append(
            {n: {"vectors": torch.linalg.qr(randn(2, s, s, seed=seed))[0]} for n, s in sides}
        )
    overlaps = [(bases[1][n]["vectors"].mT @ bases[0][n]["vectors"]).square() for n in "LRP"]
    square = state["square"].view(2, 4, 5, 3)  # by position, then channel
    expected = torch.einsum("gai,gbj,gck,gikj->gacb", *overlaps, square)
    compare(
        method.rebase(state, *bases)["square"], expected.reshape(2, 4, 15), "square", rtol=1e-12
    )


def test_state_of_convolutions_is_small() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, bias=False), nn.Conv2d(16, 32, 3, bias=False))
    model.append(nn.Linear(32, 32, bias=False))
    with closing(soframe.Optimizer(model, "soap", lr=0.1)) as own:
        weights = 16 * 16 * 9 + 16 * 32 * 9 + 32 * 32
        sides = 3 * 16**2 + 3 * 32**2 + 2 * 9**2
        planned = own.preconditioner.placement.memory(0)
        assert planned["factors"] == 4 * sides
        assert planned["state"] == 4 * 2 * weights
        assert [group["method"] for group in own.param_groups] == ["soap"]


@pytest.mark.parametrize("method", ["kl-soap", "soap-muon", Blocked("soap", 64), SOAP(max_size=3)])
def test_other_methods_keep_the_sides_of_convolutions(method: Any) -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 2, bias=False), nn.Conv2d(16, 2, 1, bias=False))
    with closing(stages.preconditioner(model, method)) as own:
        sizes = {factor.name: factor.size for factor in own.blocks[0].factors}
        if isinstance(method, SOAP):
            assert sizes == {}
        else:
            assert (sizes["L"], sizes["R"]) == (16, 16)


def test_kernels_of_one_channel_or_position_are_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 2, bias=False), nn.Conv2d(3, 5, 1, bias=False))
    model.append(nn.ConvTranspose2d(5, 2, 2, bias=False))
    with closing(stages.preconditioner(model, "soap")) as own:
        sides = [[factor.size for factor in block.factors] for block in own.blocks]
    assert sides == [[3, 4], [5, 3], [2, 20]]


@pytest.mark.parametrize("method", ["soap", "shampoo"])
def test_statistics_have_an_interval(method: str) -> None:
    """It is 1 by default; longer ones are the published loop without the gradients between."""
    found = []
    for interval in (None, 1, 2, 10):
        reference = Published(SOAP(), 2, gather=interval or 1)
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        own = stages.preconditioner(model, method, statistics_every=interval, solve_every=2)
        with closing(own):
            assert own.statistics_every == (interval or 1)
            assert f"statistics_every: {interval or 1}" in repr(own)
            for step, gradient in enumerate(gradients((4, 4), 15)):
                model[0].weight.grad = gradient.clone()
                own.step()
                if method == "soap":
                    expected = torch.from_numpy(reference.step(gradient.numpy()))
                    compare(model[0].weight.grad, expected, f"{interval}, step {step}")
            found.append(model[0].weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[1], found[2])
    assert not torch.allclose(found[2], found[3])


def test_statistics_of_calls_keep_their_interval() -> None:
    methods = {"0": "kfac", "": "soap"}
    with closing(soframe.Preconditioner(stages.network(), methods, kl_clip=None)) as own:
        assert own.statistics_every == 10


@pytest.mark.parametrize("every", [1, 3])
def test_what_it_is_given_may_be_another_matrix_than_the_gradient(every: int) -> None:
    """A stage that passes on a copy changes nothing: the copy is rotated by itself."""
    found = []
    for method in (SOAP(), Chain((Momentum(0.0), SOAP()))):
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        with closing(stages.preconditioner(model, method, solve_every=every)) as own:
            for gradient in gradients((4, 4), 7):
                model[0].weight.grad = gradient.clone()
                own.step()
        found.append(model[0].weight.grad)
    compare(*found, "direction", rtol=1e-12)


def test_a_side_that_is_many_times_as_long_has_no_factor() -> None:
    method = SOAP(max_ratio=3.0)
    for out, into, names in ((2, 5, "LR"), (2, 6, "L"), (5, 2, "LR"), (6, 2, "R"), (1, 9, "")):
        factors = method.factors(BlockShape(1, out, into))
        assert "".join(factor.name for factor in factors) == names, (out, into)
    assert SOAPMuon(max_ratio=3.0).stages[1] == replace(SOAPMuon().stages[1], max_ratio=3.0)


@pytest.mark.parametrize(("shape", "sides"), [((5, 3), "R"), ((3, 5), "L"), ((5, 5), "")], ids=str)
def test_long_sides_have_no_factor(shape: tuple[int, int], sides: str) -> None:
    method = SOAP(max_size=3)
    reference = Published(method, 2, sides)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)).double()
    with closing(stages.preconditioner(model, method, solve_every=2)) as own:
        assert "".join(factor.name for factor in own.blocks[0].factors) == sides
        for step, gradient in enumerate(gradients(shape, 6)):
            model[0].weight.grad = gradient.clone()
            own.step()
            expected = torch.from_numpy(reference.step(gradient.numpy()))
            compare(model[0].weight.grad, expected, f"step {step}")


def test_without_factors_it_is_adam() -> None:
    """Vectors, and, where nothing is skipped, from the first step on."""
    model = nn.Sequential(nn.Linear(1, 4, bias=False)).double()
    other = nn.Parameter(model[0].weight.detach().clone())
    peer = torch.optim.Adam([other], lr=1.0, betas=(0.9, 0.7), eps=1e-12)
    method = SOAP((0.9, 0.7), eps=1e-12, skip_first=False)
    with closing(stages.preconditioner(model, method)) as own:
        assert not own.blocks[0].factors
        for gradient in gradients((4, 1), 5):
            model[0].weight.grad, other.grad = gradient.clone(), gradient.clone()
            before = other.detach().clone()
            own.step()
            peer.step()
            compare(model[0].weight.grad, before - other.detach(), "direction", rtol=1e-8)


def test_the_first_gradient_may_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False)).double()
    other = nn.Sequential(nn.Linear(3, 3, bias=False)).double()
    with (
        closing(stages.preconditioner(model, SOAP())) as skipping,
        closing(stages.preconditioner(other, SOAP(skip_first=False))) as passing,
    ):
        for step, gradient in enumerate(gradients((3, 3), 4)):
            model[0].weight.grad, other[0].weight.grad = gradient.clone(), gradient.clone()
            skipping.step()
            passing.step()
            if step == 0:
                assert not model[0].weight.grad.any()
                size = gradient.square().mean().sqrt() + SOAP().eps
                compare(other[0].weight.grad, gradient / size, "first")
            else:
                assert torch.equal(model[0].weight.grad, other[0].weight.grad)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-25, 1e-20])
@pytest.mark.parametrize("method", [SOAP(skip_first=False), SOAPMuon()], ids=["soap", "soap-muon"])
def test_the_first_update_of_a_vanishing_gradient_vanishes(method: Method, scale: float) -> None:
    """As later ones do, by eps; the squares of float32 are zero from 1e-23 on."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    with closing(stages.preconditioner(model, method)) as own:
        for step in range(3):
            model[0].weight.grad = scale * randn(6, 6, seed=step).float()
            own.step()
            assert model[0].weight.grad.norm() <= 1e-6


def test_basis() -> None:
    rows = randn(2, 9, 4)
    plain = rows.mT @ rows
    data = Basis().solve(plain, torch.zeros(2))
    values = data["vectors"].mT @ plain @ data["vectors"]
    diagonal = values.diagonal(dim1=1, dim2=2)
    compare(
        torch.diag_embed(diagonal), values, "diagonal", rtol=2e-4
    )  # as far as the grade lets it
    assert (diagonal.diff() < 0).all()
    assert data["order"].tolist() == [[0, 1, 2, 3]] * 2
    assert Basis().continues
    shuffled = {"vectors": data["vectors"][..., [2, 0, 3, 1]], "order": data["order"]}
    again = Basis().solve_again(plain, torch.zeros(2), shuffled)
    assert again["order"].tolist() == [[1, 3, 0, 2]] * 2
    signs = (again["vectors"] * data["vectors"]).sum(-2, keepdim=True)
    compare(again["vectors"] * signs, data["vectors"], "the same basis", rtol=2e-4)
    captured = FactorSpec("A", "right", 1, 3)
    assert "eigen" in str(Basis().unsupported([captured]))
    with pytest.raises(NotImplementedError):
        Basis().apply(plain, left=data, right=data, damping=0.1)
    with pytest.raises(ValueError, match="eigen"):
        stages.preconditioner(stages.network(), "kfac", solver="basis")


def test_second_moments_rotate() -> None:
    """The diagonal, in a new basis, of a matrix that is diagonal in the old one."""
    out, into = 3, 4
    square = randn(2, out, into).square()
    bases = [
        {
            "L": {"vectors": torch.linalg.qr(randn(2, out, out, seed=seed))[0]},
            "R": {"vectors": torch.linalg.qr(randn(2, into, into, seed=seed + 5))[0]},
        }
        for seed in (1, 2)
    ]
    found = SOAP(carry="rotate").rebase({"square": square}, *bases)["square"]
    for group in range(2):
        whole = [
            torch.kron(b["L"]["vectors"][group].contiguous(), b["R"]["vectors"][group].contiguous())
            for b in bases
        ]
        dense = whole[0] @ torch.diag(square[group].flatten()) @ whole[0].T
        expected = (whole[1].T @ dense @ whole[1]).diagonal().view(out, into)
        compare(found[group], expected, f"group {group}")


def test_second_moments_that_rotate_are_carried() -> None:
    """They differ from permuted ones, and by less the less the basis turns."""
    results = []
    for carry in ("permute", "rotate"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        with closing(stages.preconditioner(model, SOAP(carry=carry))) as own:  # type: ignore[arg-type]
            for gradient in gradients((4, 4), 5):
                model[0].weight.grad = gradient.clone()
                own.step()
            results.append(own.blocks[0].state["square"])
    total = [float(square.sum()) for square in results]
    assert total[0] == pytest.approx(total[1], rel=1e-9)
    assert not torch.allclose(*results, rtol=1e-3)


@pytest.mark.parametrize("background", [2, "ready"])
def test_bases_from_the_background(background: Any) -> None:
    """The second moments are in the basis that is in use, whenever it lands."""
    model = stages.network()
    method = SOAP(carry="rotate")
    with closing(stages.preconditioner(model, method, background=background, solve_every=3)) as own:
        stages.train(model, own, range(8))
        (block,) = [block for block in own.blocks if block.name == "2.weight"]
        assert block.state["square"].isfinite().all()
        assert (block.state["square"] >= 0).all()
    if background == 2:
        stages.check_resume(method, background=0, solve_every=3)


def test_soap_muon_is_its_stages() -> None:
    """SOAP's direction of the momentum, orthogonalised and shortened: the first step is Muon's."""
    beta = 0.95
    full = nesterov_rms(beta)
    short = 0
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).double()
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).double()
    reference = Published(SOAP((0.0, beta)), 1)
    buffer = torch.zeros(4, 4, dtype=torch.float64)
    with (
        closing(stages.preconditioner(model, SOAPMuon(beta, steps=5))) as own,
        closing(stages.preconditioner(other, Muon())) as muon,
    ):
        assert [block.name for block in own.blocks] == ["0.weight"]
        for step, gradient in enumerate(gradients((4, 4), 5)):
            model[0].weight.grad, other[0].weight.grad = gradient.clone(), gradient.clone()
            own.step()
            muon.step()
            buffer = beta * buffer + (1 - beta) * gradient
            ahead = (beta * buffer + (1 - beta) * gradient).numpy()
            if step == 0:
                compare(model[0].weight.grad, other[0].weight.grad, "first", rtol=1e-6)
                reference.step(gradient.numpy())
                continue
            x = torch.from_numpy(reference.step(gradient.numpy(), ahead))
            share = min(1.0, float(x.square().mean().sqrt()) / full)
            short += share < 1
            compare(model[0].weight.grad, share * by_polynomials(x), f"step {step}", rtol=1e-9)
    assert short


def nesterov_rms(beta: float) -> float:
    """Of independent gradients, from the buffers and updates of a gradient 1, then zeros."""
    buffer, squares = 0.0, 0.0
    for step in range(2000):
        gradient = float(step == 0)
        buffer = beta * buffer + (1 - beta) * gradient
        squares += (beta * buffer + (1 - beta) * gradient) ** 2
    return math.sqrt(squares)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.85, 0.99])
def test_independent_gradients_have_the_full_length(beta: float) -> None:
    assert independent_rms(beta) == pytest.approx(nesterov_rms(beta), rel=1e-9)


@pytest.mark.parametrize(
    ("decay", "sign", "least", "most"),
    [(1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 0.5, 0.9), (0.8, 1.0, 0.0, 0.3)],
    ids=["agree", "cancel", "fade"],
)
def test_updates_are_short_where_gradients_cancel_or_fade(
    decay: float, sign: float, least: float, most: float
) -> None:
    """Beside updates of the full length, at any scale of the loss."""
    method = SOAPMuon()
    always = [replace(s, full_rms=0) if isinstance(s, Orthogonalise) else s for s in method.stages]
    mean, *noise = gradients((6, 6), 31)
    parts = []
    for scale in (1.0, 1e-3):
        short, full = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double() for _ in range(2))
        with (
            closing(stages.preconditioner(short, method)) as own,
            closing(stages.preconditioner(full, Chain(tuple(always)))) as other,
        ):
            for step, change in enumerate(noise):
                gradient = scale * (decay * sign) ** step * (mean + 0.3 * change)
                short[0].weight.grad, full[0].weight.grad = gradient.clone(), gradient.clone()
                own.step()
                other.step()
        update = short[0].weight.grad
        parts.append(float(update.norm() / full[0].weight.grad.norm()))
        compare(update, parts[-1] * full[0].weight.grad, "direction", rtol=1e-9)
    assert parts[0] == pytest.approx(parts[1], rel=0.01)
    assert least <= parts[0] <= most


@pytest.mark.parametrize("kind", [SOAPMuon, SOAPNorMuon])
def test_another_momentum_has_another_full_length(kind: type[SOAPMuon]) -> None:
    method = kind(0.9)
    assert method.with_settings({"momentum": 0.9}) is method
    assert method.with_settings({"momentum": 0.5}).stages == kind(0.5).stages


def by_polynomials(matrix: Tensor) -> Tensor:
    """Muon's five steps, on singular values."""
    u, s, v = torch.linalg.svd(matrix)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_settings_are_checked() -> None:
    for options in (
        {"betas": (1.0, 0.5)},
        {"shampoo_beta": -1.0},
        {"eps": 0.0},
        {"max_size": 0},
        {"max_ratio": 1.0},
        {"carry": "drop"},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            SOAP(**options)  # type: ignore[arg-type]
    names = [type(stage).__name__ for stage in SOAPMuon().stages]
    assert names == ["Momentum", "SOAP", "Orthogonalise", "MatchRMS"]
    with pytest.raises(ValueError, match="after the update"):
        Chain((SOAP(), "shampoo"))


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_soap_is_pytorch_optimizers() -> None:
    import pytorch_optimizer

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    other = nn.Parameter(model[0].weight.detach().clone())
    peer = pytorch_optimizer.SOAP(
        [other], lr=1.0, betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=1
    )
    exact = copy.deepcopy(model).double()
    with (
        closing(stages.preconditioner(model, SOAP())) as own,
        closing(stages.preconditioner(exact, SOAP())) as twin,
    ):
        for gradient in gradients((4, 4), 6):
            model[0].weight.grad, other.grad = gradient.float(), gradient.float()
            before = other.detach().clone()
            exact[0].weight.grad = gradient.clone()
            own.step()
            twin.step()
            peer.step()
            # It decomposes in single precision, even in float64; soframe's single does not show.
            compare(model[0].weight.grad, exact[0].weight.grad, "single and double", rtol=1e-5)
            compare(model[0].weight.grad, before - other.detach(), "direction", rtol=1e-3)
