"""Sums of losses: their Hessian is the sum of the terms', over one output and over several."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from soframe.capture.fisher import Fisher
from soframe.losses import Loss, SquaredError, SumLoss, Term
from soframe.testing import compare, dense_preconditioned, kron, layer_fisher
from soframe.trust_region import LevenbergMarquardt
from tests.curvature import (
    blocks,
    closing,
    factors,
    fill,
    gradient_matrix,
    half_square,
    preconditioner,
    randn,
)
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.trust_region import kit

Criterion = Callable[[Tensor, Tensor], Tensor]


def mixed(f: Tensor, y: Tensor) -> Tensor:
    """The closure's loss for `PARTS`: a mean over samples."""
    labels = y[:, 0].abs().long() % 3
    return (
        F.cross_entropy(f[:, :3], labels)
        + 0.5 * F.mse_loss(f[:, 3:], y[:, 3:])
        + 2.0 * half_square(f[:, 2:4], y[:, 2:4])
    )


# Three terms, the last of which overlaps the others.
PARTS = SumLoss(
    [
        Term("cross-entropy", slice(0, 3)),
        Term("mse", slice(3, None), weight=0.5),
        Term(SquaredError(), slice(-3, -1), weight=2.0),
    ]
)


def heads_criterion(f: Tensor, y: Tensor) -> Tensor:
    """The closure's loss for `HEADS`, on the concatenated outputs."""
    return 0.3 * half_square(f[:, :2], y[:, :2]) + F.cross_entropy(f[:, 2:], y[:, 0].long() % 3)


HEADS = SumLoss([Term("cross-entropy", output=1), Term(SquaredError(), weight=0.3)])


def dense(outputs: Tensor, y: Tensor, criterion: Criterion) -> Tensor:
    """The Hessian of every sample's own loss: ``[N, K, K]``."""
    rows = []
    for n in range(len(outputs)):
        own = torch.func.hessian(lambda f, t=y[n : n + 1]: criterion(f[None], t))(outputs[n])
        rows.append(own)
    return torch.stack(rows)


@given(samples=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=examples(8))
def test_one_output(samples: int, seed: int) -> None:
    f, y, v = (randn(samples, 5, seed=seed + i) for i in range(3))
    hessian = dense(f, y, mixed)
    compare(PARTS.hessian_product(f, v), (hessian @ v[..., None])[..., 0], "product")
    columns = torch.stack(list(PARTS.half_factor(f)))
    compare(torch.einsum("kni,knj->nij", columns, columns), hessian, "half-factor")


def test_several_outputs() -> None:
    f, y = randn(3, 5), randn(3, 5, seed=1)
    heads = [f[:, :2], f[:, 2:]]
    columns = []
    for vector in HEADS.half_factors(heads):
        parts = zip(vector, heads, strict=True)
        columns.append(torch.cat([torch.zeros_like(h) if v is None else v for v, h in parts], 1))
    s = torch.stack(columns)
    compare(torch.einsum("kni,knj->nij", s, s), dense(f, y, heads_criterion), "half-factor")


class LopsidedError(SquaredError):
    """Its samples have the right second moment, and a mean that is far from zero."""

    def sample(self, outputs: Tensor, generator: Any = None) -> Tensor:
        return outputs.new_zeros(outputs.shape).index_fill(1, torch.tensor([0]), 1.0)


@pytest.mark.parametrize(
    ("loss", "outputs", "hessian"),
    [
        (PARTS, [randn(2, 5)], dense(randn(2, 5), randn(2, 5, seed=1), mixed)),
        (
            HEADS,
            list(randn(2, 5).split([2, 3], 1)),
            dense(randn(2, 5), randn(2, 5, seed=1), heads_criterion),
        ),
        (
            SumLoss(
                [Term(LopsidedError(), slice(0, 1)), Term(LopsidedError(), slice(1, 2), weight=4.0)]
            ),
            [randn(2, 2)],
            torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64)).expand(2, 2, 2),
        ),
    ],
    ids=["parts", "heads", "biased"],
)
def test_the_second_moment_of_samples(loss: SumLoss, outputs: list[Tensor], hessian: Any) -> None:
    errors = []
    for samples, seeds in ((400, 8), (40000, 8)):
        squares = []
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            many = [output.repeat_interleave(samples, 0) for output in outputs]
            v = torch.cat(loss.samples(many, generator), 1).reshape(2, samples, -1)
            moment = torch.einsum("nsi,nsj->nij", v, v) / samples
            squares.append(float((moment - hessian).norm() / hessian.norm()) ** 2)
        errors.append((sum(squares) / seeds) ** 0.5)
    assert errors[1] < 0.03
    assert 0.05 < errors[1] / errors[0] < 0.2


def test_the_floor_is_the_weighted_sum_of_the_floors() -> None:
    class ShiftedError(SquaredError):
        floor = 3.0

    terms = [Term(ShiftedError(), weight=0.5), Term(ShiftedError(), weight=2.0)]
    assert SumLoss(terms).floor == 7.5


def test_samples_come_from_the_generator() -> None:
    f = randn(5, 5)
    before = torch.get_rng_state()
    one, same, other = (PARTS.sample(f, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# -- through the preconditioner ----------------------------------------------------------------


class Net(nn.Module):
    """A trunk and two heads, whose outputs are joined or not; ``heads[1]`` is called for both."""

    def __init__(self, joined: bool, activation: nn.Module) -> None:
        super().__init__()
        self.trunk, self.activation, self.joined = nn.Linear(3, 4), activation, joined
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Any:
        hidden = self.activation(self.trunk(x))
        outputs = tuple(head(hidden) for head in self.heads)
        return torch.cat(outputs, 1) if self.joined else outputs


def squares(f: Tensor, y: Tensor) -> Tensor:
    return half_square(f[:, :2], y[:, :2]) + 3.0 * half_square(f[:, 2:], y[:, 2:])


SQUARES = {
    True: SumLoss(
        [Term(SquaredError(), slice(0, 2)), Term(SquaredError(), slice(2, 5), weight=3.0)]
    ),
    False: SumLoss([Term(SquaredError()), Term(SquaredError(), weight=3.0, output=1)]),
}
JOINED_HEADS = SumLoss([Term("cross-entropy", slice(2, 5)), Term(SquaredError(), slice(0, 2), 0.3)])
CASES = {
    "one datum": (nn.Tanh(), heads_criterion, {True: JOINED_HEADS, False: HEADS}, (1,)),
    "deep linear": (nn.Identity(), squares, SQUARES, (2, 3)),
}


def observe(
    model: nn.Module, own: Any, sizes: Sequence[int], criterion: Criterion, rows: Any = slice(None)
) -> list[tuple[Tensor, Tensor]]:
    batches = [(randn(n, 3, seed=i), randn(n, 5, seed=9 + i)) for i, n in enumerate(sizes)]
    for x, y in batches:
        output = model(x[rows])
        own.observe(output)
        joined = output if isinstance(output, Tensor) else torch.cat(output, 1)
        (criterion(joined, y[rows]) / len(batches)).backward()
    return batches


@pytest.mark.parametrize("joined", [True, False], ids=["one output", "two outputs"])
@pytest.mark.parametrize("name", CASES)
def test_the_blocks_are_the_dense_ones(name: str, joined: bool) -> None:
    activation, criterion, losses, sizes = CASES[name]
    model = fill(Net(joined, activation))
    with closing(preconditioner(model, fisher="type-2", loss=losses[joined])) as own:
        batches = observe(model, own, sizes, criterion)
        raw = {n: gradient_matrix(b).clone() for n, b in blocks(own).items()}
        own.step()
        model.joined = True
        for layer, block in blocks(own).items():
            exact = [
                layer_fisher(model, layer, x, criterion, y, kind="type-2")[0] for x, y in batches
            ]
            fisher = torch.stack(exact).mean(0)
            a, g = factors(own, layer)
            compare(kron(g[0], a[0]), fisher, f"{layer}: kron(G, A)")
            expected = dense_preconditioned(fisher, raw[layer][0], 0.1)
            compare(gradient_matrix(block)[0], expected, f"{layer}: preconditioned gradient")


def test_two_outputs_are_one_joined() -> None:
    """Also where K-FAC is not exact: a batch of a net that is not linear."""
    found = []
    for joined, loss in ((True, JOINED_HEADS), (False, HEADS)):
        model = fill(Net(joined, nn.Tanh()))
        with closing(preconditioner(model, fisher="type-2", loss=loss)) as own:
            observe(model, own, (4, 2), heads_criterion)
            own.step()
            found.append([t for name in blocks(own) for t in factors(own, name)])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


@pytest.mark.slow
def test_monte_carlo_sends_one_pass_for_all_heads_and_tends_to_type_2() -> None:
    def running(fisher: Fisher) -> tuple[list[Tensor], int]:
        model = fill(Net(False, nn.Tanh()))
        with closing(preconditioner(model, fisher="type-2", loss=HEADS)) as own:
            own.curvature.parts.fisher = fisher
            passes = sum(1 for _ in fisher.vectors(model(randn(1, 3))))
            observe(model, own, (4,), heads_criterion)
            own.step()
            return [factors(own, name)[1] for name in blocks(own)], passes

    exact, columns = running(Fisher("type-2", HEADS))
    assert columns == 5
    errors = []
    for samples in (4, 400):
        generator = torch.Generator().manual_seed(3)
        own, passes = running(Fisher("monte-carlo", HEADS, samples, generator))
        assert passes == samples
        pairs = zip(own, exact, strict=True)
        errors.append(sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(exact))
    assert 4 * errors[1] < errors[0]
    assert errors[1] < 0.15


def rank_factors(rank: int, ranks: int) -> list[Tensor]:
    model = fill(Net(False, nn.Tanh()))
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    with closing(preconditioner(model, fisher="type-2", loss=HEADS)) as own:
        rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        observe(wrapped, own, (4,), heads_criterion, rows)
        own.step()
        return [p.grad.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_are_one_process() -> None:
    alone = rank_factors(0, 1)
    for own in run_ranks(rank_factors, 2):
        for one, other in zip(own, alone, strict=True):
            compare(one, other, "preconditioned gradient")


def test_the_trust_region_takes_parts_of_one_output() -> None:
    """K-FAC is exact for one layer of squared errors: the step is the minimum, densely solved."""
    model, x, y = fill(nn.Linear(3, 5)), randn(6, 3), randn(6, 5, seed=1)
    f, g = kit.fisher(model, [(x, y)], squares), kit.gradient(model, [(x, y)], squares)
    expected = -torch.linalg.solve(f + 0.1 * torch.eye(len(f), dtype=torch.float64), g)
    before = kit.vector(model)
    own = kit.trust_region(model, SQUARES[True])
    own.step(kit.closures(model, [(x, y)], squares))
    own.close()
    compare(kit.vector(model) - before, expected, "the step")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: Pair(*pair)])
@pytest.mark.slow
def test_the_trust_region_takes_several_outputs_as_one_joined(kind: Callable[..., Any]) -> None:
    class Kind(Net):
        def forward(self, x: Tensor) -> Any:
            outputs = super().forward(x)
            return outputs if self.joined else kind(outputs)

    batches = [(randn(n, 3, seed=n), randn(n, 5, seed=9 + n)) for n in (4, 2)]
    found = []
    for joined, loss in ((True, JOINED_HEADS), (False, HEADS)):
        model = fill(Kind(joined, nn.Tanh()))
        own = kit.trust_region(model, loss, damping=LevenbergMarquardt(interval=2), fisher="type-2")

        def joined_outputs(output: Any, y: Tensor) -> Tensor:
            whole = output if isinstance(output, Tensor) else torch.cat(list(output), 1)
            return heads_criterion(whole, y)

        for _ in range(4):
            own.step(kit.closures(model, batches, joined_outputs))
        found.append((kit.vector(model), own.last["predicted"], own.last["ratio"]))
        own.close()
    one, other = found
    compare(other[0], one[0], "weights")
    assert one[1:] == pytest.approx(other[1:], rel=1e-9)


# -- errors ----------------------------------------------------------------------------------


def test_the_trust_region_names_the_remedy_for_several_outputs() -> None:
    model = fill(Net(False, nn.Tanh()))
    own = kit.trust_region(model, "mse")
    with pytest.raises(TypeError, match=r"the model returns 2 tensors, .* declare a"):
        own.step(lambda: sum(part.square().mean() for part in model(randn(2, 3))))
    own.close()
    own = kit.trust_region(model, "mse", fisher="forward-only")  # which asks no loss for samples
    with pytest.raises(TypeError, match=r"2 tensors, .*declare a .*SumLoss with a Term for each"):
        own.step(lambda: sum(part.square().mean() for part in model(randn(2, 3))))
    own.close()


@pytest.mark.parametrize("output", [{"logits": 1}, [torch.ones(2), None]], ids=["dict", "None"])
def test_outputs_without_gradients_are_refused_by_the_trust_region(output: Any) -> None:
    class Odd(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return output

    own = kit.trust_region(model := fill(Odd(nn.Linear(3, 2))), "mse")
    with pytest.raises(TypeError, match=r"Odd returns (dict|list) without a tensor that needs"):
        own.step(lambda: model(randn(2, 3)))
    own.close()


def test_a_wrong_weight_is_noticed_by_the_trust_region() -> None:
    model, x, y = fill(Net(True, nn.Tanh())), randn(5, 3), randn(5, 5, seed=1)
    own = kit.trust_region(model, SQUARES[True])
    with pytest.raises(ValueError, match="not the mean of loss=SumLoss"):
        own.step(lambda: half_square(model(x), y))
    own.close()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (SumLoss, ValueError, "SumLoss needs terms"),
        (lambda: SumLoss(["mse"]), TypeError, r"a term is a soframe.losses.Term, not 'mse'"),
        (lambda: Term("mse", weight=0.0), ValueError, "weight must be positive, not 0.0"),
        (lambda: Term("mse", weight=float("nan")), ValueError, "weight must be positive, not nan"),
        (lambda: Term("mse", output=-1), ValueError, "output must not be negative, not -1"),
        (lambda: Term("hinge"), ValueError, "no loss 'hinge'"),
    ],
)
def test_terms_that_are_none(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("part", [slice(0, 6), slice(5, None), slice(-6, None), slice(2, 2)])
def test_parts_that_the_output_lacks(part: slice) -> None:
    loss = SumLoss([Term("mse", part)])
    with pytest.raises(ValueError, match=r"the output \(2, 5\) lacks these features"):
        loss.hessian_product(randn(2, 5), randn(2, 5))


@pytest.mark.parametrize(
    ("loss", "outputs", "error", "message"),
    [
        (SquaredError(), (randn(2, 2), randn(2, 3)), TypeError, r"SumLoss\(\[Term\(.*output=0"),
        (HEADS, (randn(2, 2),), ValueError, r"terms of the outputs \[0, 1\], and the model 1"),
        (SQUARES[True], (randn(2, 5), randn(2, 3)), ValueError, "every output needs a term"),
        (HEADS, (randn(2, 2), randn(3, 3)), ValueError, r"different batches: \[2, 3\] samples"),
        (HEADS, {"a": randn(2, 2)}, TypeError, "observe takes the tensors .* not dict"),
        (HEADS, (randn(2, 2), "b"), TypeError, "observe takes the tensors .* not tuple"),
    ],
)
def test_outputs_that_do_not_fit(
    loss: Loss, outputs: Any, error: type[Exception], message: str
) -> None:
    model = fill(nn.Linear(3, 2))
    with closing(preconditioner(model, fisher="type-2", loss=loss)) as own:
        model(randn(2, 3))
        with pytest.raises(error, match=message):
            own.observe(outputs)
