"""Where statistics come from and when they are reduced: the same factors, or of fewer data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import LayerHelper, Preconditioner
from soframe.comm import Recording
from soframe.estimate.averages import pack
from soframe.layers.base import FEW
from soframe.settings import grouped
from soframe.solvers import Inverse
from soframe.strategies import (
    BlockPlacement,
    MemOpt,
    OwnerLocal,
    Placement,
    Sharded,
    Strategy,
)
from soframe.testing import compare, dense_preconditioned
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, Shards, backward, batch, make_net, mean_over

pytestmark = pytest.mark.distributed

Factors = dict[str, dict[str, Tensor]]
UNEVEN: Shards = ((5,), (0,), (4, 3))


@dataclass(frozen=True)
class Deferring(Strategy):
    """KAISA's replication, deferred: every rank holds every factor."""

    def place(self, work, ranks):
        everyone = tuple(range(ranks))
        blocks = tuple(
            BlockPlacement(b.name, (i % ranks,) * 2, everyone, everyone, deferred=True)
            for i, b in enumerate(work)
        )
        return Placement("deferring", ranks, tuple(work), blocks)


@dataclass(frozen=True)
class Apart(Strategy):
    """Every factor of a block has an owner of its own; two ranks hold it, two solve with it."""

    deferred: bool = False

    def place(self, work, ranks):
        def pair(rank: int) -> tuple[int, ...]:
            return tuple(sorted({rank % ranks, (rank + 1) % ranks}))

        blocks = tuple(
            BlockPlacement(
                b.name,
                owners=(i % ranks, (i + 1) % ranks),
                gradient_workers=(0,),
                sources=(0,) * ranks,
                contributors=((*range(ranks),),) * 2,
                holders=(pair(i), pair(i + 1)),
                deferred=self.deferred,
                packed=bool(i % 2),
            )
            for i, b in enumerate(work)
        )
        return Placement("apart", ranks, tuple(work), blocks)


def state_of(own: Preconditioner) -> Factors:
    blocks = own.state_dict()["blocks"]
    return {name: dict(block["factors"]) for name, block in blocks.items()}


# -- deferred is eager ---------------------------------------------------------------------------

EAGER_AND_DEFERRED: dict[str, Strategy] = {
    "mem": MemOpt(),
    "sharded": Sharded(group=None),
    "deferred": Sharded(group=None, deferred=True),
    "deferred everywhere": Deferring(),
    "apart": Apart(),
    "apart, deferred": Apart(deferred=True),
}


def history(
    rank: int, ranks: int, options: dict[str, Any], names: list[str]
) -> dict[str, list[Factors]]:
    """The factors after every step, under some strategies.

    The windows: uneven shards, one of them empty; at step 2 a gradient that is not finite on one
    rank; at odd steps a layer that one rank alone uses.
    """

    def disturb(run: Run) -> None:
        step = run.preconditioner.curvature.steps
        if step % 2 and rank == 2:
            run.model.unused(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        run.model.unused.zero_grad()
        if step == 2 and rank == 2:
            run.model.head.bias.grad[0] = float("nan")

    found = {}
    for name in names:
        strategy = EAGER_AND_DEFERRED[name]
        schedule = {"decay": lambda step: (0.5, 0.9, 0.3, 0.8)[step % 4], "solve_every": 3}
        case = Case({"strategy": strategy, **schedule, **options}, UNEVEN)
        run = Run(case, rank, ranks, average=mean_over())
        run.optimizer.param_groups[0]["lr"] = 0.0
        found[name] = []
        for step in range(5):
            run.step(step, disturb)
            found[name].append(state_of(run.preconditioner))
            for block in run.preconditioner.blocks:
                for spec in block.factors if not block.record.pending else ():
                    if (stored := block.running.get(spec.name)) is not None:
                        saved = found[name][-1][block.name][spec.name]
                        compare(pack(stored, spec), saved, "every holder's")
        assert run.preconditioner.counters["skipped_statistics"] == 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({}, 1e-12),
        *(
            pytest.param(options, rtol, marks=pytest.mark.thorough)
            for options, rtol in (
                ({"dtype": torch.float32}, 1e-6),
                ({"scaling": "kaisa"}, 1e-12),
                ({"solver": Inverse()}, 1e-12),
                ({"statistics_every": 2}, 1e-12),
            )
        ),
    ],
    ids=["fisher", "float32", "kaisa", "inverse", "every other"],
)
def test_when_statistics_are_reduced_makes_no_difference(options, rtol):
    names = list(EAGER_AND_DEFERRED)
    for rank, own in enumerate(run_ranks(history, 3, options, names)):
        for name, steps in own.items():
            for step, (blocks, expected) in enumerate(zip(steps, own["mem"], strict=True)):
                for block, factors in expected.items():
                    assert set(blocks[block]) == set(factors), (rank, name, step, block)
                    for factor, tensor in factors.items():
                        what = f"{factor} of {block} after step {step}, {name}, rank {rank}"
                        compare(blocks[block][factor], tensor, what, rtol=rtol)


# -- fewer data ----------------------------------------------------------------------------------

FEWER: dict[str, Strategy] = {
    "owner-local": OwnerLocal(),
    "pairs": Sharded(group=2),
    "pairs, deferred": Sharded(group=2, deferred=True),
    "pairs, together": Sharded(group=2, colocate=True),
}
QUARTERS: Shards = ((2,), (1, 2), (4,), (3,))


def of_contributors(contributors: tuple[int, ...], case: Case) -> Factors:
    """The factors of some ranks' data, by one process on one batch, with no mean but its own.

    Where the mean is over passes and ranks, samples have different weights; so they are repeated.
    """
    model = make_net()
    own = Preconditioner(model, kl_clip=None, statistics_every=1, **grouped(case.options))
    assert case.shards is not None
    for step in range(2):
        x, y = batch(step)
        index: list[int] = []
        for rank in contributors:
            start = sum(map(sum, case.shards[:rank]))
            for size in case.shards[rank]:
                times = 144 // (size * len(case.shards[rank]))
                index += [*range(start, start + size)] * (
                    times if case.loss_average == "local" else 1
                )
                start += size
        model.zero_grad()
        (model(x[index]) - y[index]).square().sum(1).mean().backward()
        own.step()
    return state_of(own)


def with_fewer(
    rank: int, ranks: int, case: Case, names: list[str]
) -> list[tuple[Placement, Factors, dict[str, Tensor], dict[str, Tensor], dict[str, int]]]:
    found = []
    for name in names:
        own = case.with_options(strategy=FEWER[name], kl_clip=None)
        run = Run(own, rank, ranks, average=mean_over())
        for step in range(2):
            run.optimizer.zero_grad()
            backward(run.model, own, step, rank, ranks, run.average)
            raw = {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}
            run.preconditioner.step()
        now = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        traffic = run.preconditioner.traffic().get("reduce", {"bytes": 0, "calls": 0})
        state = state_of(run.preconditioner)
        found.append((run.preconditioner.placement, state, raw, now, traffic))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loss_average", ["local", "global"])
def test_statistics_are_those_of_the_contributors_data(loss_average):
    exact = {"solver": "eigen", "damping": 0.02}
    case = Case({"decay": 0.7, "solve_every": 1, **exact}, QUARTERS, loss_average)
    results = run_ranks(with_fewer, 4, case, list(FEWER))
    reference = functools.cache(functools.partial(of_contributors, case=case))
    seen = set()
    for rank, own in enumerate(results):
        for name, (placement, state, raw, now, traffic) in zip(FEWER, own, strict=True):
            assert (traffic["calls"] == 0) == (name == "owner-local")
            for work, place in zip(placement.work, placement.blocks, strict=True):
                if work.name == "unused":
                    continue
                (contributors,) = set(place.contributors)
                seen.add(contributors)
                expected = reference(contributors)[work.name]
                for factor, tensor in expected.items():
                    what = f"{factor} of {work.name}, {name}, rank {rank}"
                    compare(state[work.name][factor], tensor, what)
                if work.name == "hidden":
                    a, g = (unpacked(expected[k])[0] for k in "AG")
                    v = torch.cat([raw["hidden.weight"], raw["hidden.bias"][:, None]], 1)
                    dense = dense_preconditioned(torch.kron(g, a), v, 0.02)
                    got = torch.cat([now["hidden.weight"], now["hidden.bias"][:, None]], 1)
                    compare(got, dense, f"gradient of {work.name}, {name}, rank {rank}")
    assert {(0, 1), (2, 3)} < seen
    assert len([members for members in seen if len(members) == 1]) > 1


def unpacked(packed: Tensor) -> Tensor:
    from soframe.comm import unpack_triangle

    numel = packed.shape[-1]
    return unpack_triangle(packed, int((8 * numel + 1) ** 0.5 / 2))


def used_by_one(rank: int, ranks: int) -> list[tuple[bool, bool, Tensor]]:
    """Per user of a layer: whether it contributes, whether the layer is known then, the weights."""
    found = []
    for user in range(ranks):
        case = Case({"strategy": Sharded(group=2), "solve_every": 1})
        run = Run(case, rank, ranks, average=mean_over())

        def use(run: Run, user: int = user) -> None:
            if rank == user:
                run.model.unused(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            for parameter in run.model.unused.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                mean_over()(parameter.grad)

        for step in range(2):
            run.step(step, use)
        names = [block.name for block in run.preconditioner.blocks]
        place = run.preconditioner.placement.blocks[names.index("unused")]
        known = bool(state_of(run.preconditioner)["unused"])
        found.append((place.contributes(user, 0), known, run.weights()))
    return found


@pytest.mark.slow
def test_a_layer_that_contributors_do_not_use_stays_unknown():
    results = run_ranks(used_by_one, 4)
    for own in results:
        assert sorted(contributes for contributes, _, _ in own) == [False, False, True, True]
        for (contributes, known, weights), (_, _, others) in zip(own, results[0], strict=True):
            assert known == contributes
            assert torch.equal(weights, others)


# -- what is not needed --------------------------------------------------------------------------


def test_other_ranks_keep_no_inputs_and_compute_no_moments(monkeypatch):
    """Of a block that a rank does not contribute to, it counts samples."""
    computed: list[tuple[str, int]] = []
    for side in ("input_moment", "output_moment"):
        original = getattr(LayerHelper, side)

        def spy(self, *args, side=side, original=original):
            computed.append((side, self.module.in_features))
            return original(self, *args)

        monkeypatch.setattr(LayerHelper, side, spy)
    rows = 1 + FEW // 5  # fewer are copied, and no moment is computed at a call
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(n, n + 1, dtype=torch.float64) for n in range(5, 9)])
    own = Preconditioner(
        model,
        strategy="owner-local",
        distribution=soframe.Distribution(backend=Recording(rank=1, world_size=3)),
        kl_clip=None,
        statistics_every=1,
    )
    kept = []

    def sink(call):
        kept.append((call.helper.module.in_features, len(call.inputs)))
        return add(call)

    add, own.curvature.capture.sink = own.curvature.capture.sink, sink
    model(torch.ones(rows, 5, dtype=torch.float64)).square().mean().backward()
    mine = [int(place.block) + 5 for place in own.placement.blocks if 1 in place.contributing(0)]
    assert 0 < len(mine) < 4
    assert sorted(computed) == [(s, n) for s in ("input_moment", "output_moment") for n in mine]
    assert sorted(kept) == [(n, int(n in mine)) for n in range(5, 9)]
    window = own.curvature.statistics.window
    assert [block.stack in window.sums for block in own.blocks] == [n in mine for n in range(5, 9)]
    assert own.memory_usage()["statistics"] == own.placement.window(1)

    def settle(placed, members):
        held.extend(bool(window.sums) for _ in members)

    held: list[bool] = []
    monkeypatch.setattr("soframe.estimate.solves.settle", settle)
    own.step()
    assert held == [False] * 4, "the window's sums are freed before anything is solved"


@pytest.mark.parametrize("settings", [{"scaling": "kaisa"}, {"method": "kl-shampoo"}], ids=str)
def test_an_average_begins_before_its_statistics_on_its_holders_alone(settings):
    model = nn.Sequential(*[nn.Linear(n, n + 1) for n in range(4, 8)])
    backend = Recording(rank=1, world_size=3)
    own = Preconditioner(
        model,
        strategy=Sharded(),
        kl_clip=None,
        **grouped({"backend": backend, "statistics_every": 1, **settings}),
    )
    model(torch.ones(2, 4)).square().mean().backward()
    own.step()
    held, others = own.memory_usage()["factors"], (own.placement.memory(rank) for rank in (0, 2))
    assert held == own.placement.memory(1)["factors"] > 0
    assert all(other["factors"] > 0 for other in others)


# -- on the wire ---------------------------------------------------------------------------------


def on_the_wire(rank: int, ranks: int, strategies: list[Strategy]) -> list[Factors]:
    found = []
    for strategy in strategies:
        case = Case({"strategy": strategy, "solve_every": 1, "decay": 0.5})
        run = Run(case, rank, ranks, average=mean_over())
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.train(range(2))
        found.append(state_of(run.preconditioner))
    return found


def test_a_short_wire_costs_its_digits_and_no_more():
    """Each rank rounds its part, and every addition its sum, to the wire's 8 bits."""
    ranks = 3
    pairs = [Sharded(), *(Sharded(deferred=d, wire="bfloat16") for d in (False, True))]
    exact, *rounded = run_ranks(on_the_wire, ranks, pairs)[0]
    unit = torch.finfo(torch.bfloat16).eps / 2
    for name, factors in ((n, f) for n, f in exact.items() if f):
        for key, tensor in factors.items():
            size = tensor.abs().max()
            for other in rounded:
                error = float((other[name][key] - tensor).abs().max() / size)
                # Parts may be larger than their sum where they differ in sign.
                assert error < 4 * ranks * unit, (name, key, error)
                assert error > unit / 16, "nothing was rounded"
