"""The trust region goes on from any step, and on several ranks, as if nothing had happened."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe import checkpoint
from soframe.losses import CrossEntropy
from soframe.strategies import Sharded
from soframe.testing import compare
from soframe.trust_region import AdaptiveDamping, ConstantDamping, LevenbergMarquardt
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import deep, labels, trust_region, vector

STEPS = 7


def net() -> nn.Module:
    """Layers with and without a block."""
    layers = [nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3)]
    return fill(nn.Sequential(*layers))


class DrawnByItself(CrossEntropy):
    """Draws each sample's label by its own logits, so that it is the same on whichever rank."""

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        probabilities = outputs.softmax(1)
        share = (1e3 * outputs.square().sum(1, keepdim=True)).frac()
        drawn = (probabilities.cumsum(1)[:, :-1] < share).sum(1)
        return probabilities - F.one_hot(drawn, outputs.shape[1])


def optimizer_of(
    model: nn.Module, loss: str | CrossEntropy = "cross-entropy", **settings: Any
) -> soframe.TrustRegion:
    damping = LevenbergMarquardt(1.0, omega=0.7, interval=2)
    return trust_region(model, loss, damping, weight_decay=1e-3, **settings)


def batch(step: int, part: slice = slice(None), samples: int = 8) -> tuple[Tensor, Tensor]:
    return randn(samples, 2, 3, 3, seed=step)[part], labels(samples, seed=step)[part]


def train(
    model: nn.Module,
    own: soframe.TrustRegion,
    first: int,
    last: int,
    part: slice = slice(None),
    scale: float = 1.0,
    samples: int = 8,
) -> list[bytes]:
    """Train, and return what a script would have saved before every step."""
    saved = []
    for step in range(first, last):
        file = io.BytesIO()
        everything = {
            "model": model.state_dict(),
            "optimizer": own.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(everything, file)
        saved.append(file.getvalue())
        x, y = batch(step, part, samples)
        # Too long a step now and then, so that some are rejected.
        own.param_groups[0]["lr"] = 40.0 if step == 3 else 1.0
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y) * scale)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"fisher": "monte-carlo", "burn_in": 2},
        {"preconditioner_damping": AdaptiveDamping(interval=2), "solver": "inverse"},
        {"full_batch": True},
        {"method": "ekfac", "solver": "eigen", "solve_every": 3},
    ],
    ids=str,
)
def test_training_goes_on_bit_by_bit_from_every_step(settings: dict[str, Any]) -> None:
    whole = net()
    first = optimizer_of(whole, **copy.deepcopy(settings))
    saved = train(whole, first, 0, STEPS)
    assert settings.get("burn_in") or first.counters["rejected_steps"] > 0
    for step in (0, 3, 4, 6):  # before a step that is rejected, after it, and at the end
        file, model = saved[step], fill(net(), seed=1)
        own = optimizer_of(model, **copy.deepcopy(settings))
        everything = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
        torch.set_rng_state(everything["random"])
        train(model, own, step, STEPS)
        assert torch.equal(vector(model), vector(whole)), f"from step {step}"
        assert own.damping == first.damping
        assert own.damping.at(0) == first.damping.at(0)
        assert own.counters == first.counters


def test_a_run_goes_back_to_a_state_that_it_has_kept() -> None:
    """The state is a copy: the next steps do not write into it."""
    model = net()
    own = optimizer_of(model, full_batch=True)
    train(model, own, 0, 3)
    state, weights = own.state_dict(), copy.deepcopy(model.state_dict())
    train(model, own, 3, 5)
    after = vector(model)
    model.load_state_dict(weights)
    own.load_state_dict(state)
    train(model, own, 3, 5)
    assert torch.equal(vector(model), after)


@pytest.mark.slow
def test_a_resumed_step_is_judged_with_the_rounding_of_its_loss() -> None:
    """A change below it says nothing, and undoes no step."""
    model = fill(nn.Linear(3, 2)).float()
    x, y = randn(16, 3).float(), randn(16, 2, seed=1).float()

    def closure(factor: float = 1.0) -> Tensor:
        return F.mse_loss(model(x), y) * factor

    own = soframe.TrustRegion(model, "mse", full_batch=True)
    for _ in range(12):
        own.step(closure)
    state = own.state_dict()
    own.close()
    resumed = soframe.TrustRegion(model, "mse", full_batch=True)
    resumed.load_state_dict(state)
    assert resumed.settle(lambda: closure(1 + 3e-7))
    assert resumed._reduction.silent


def test_foreign_states_are_refused() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not the state of a TrustRegion"):
        own.load_state_dict(sgd.state_dict())
    other = trust_region(deep(), "cross-entropy", ConstantDamping(1.0))
    with pytest.raises(ValueError, match="another damping policy than LevenbergMarquardt"):
        own.load_state_dict(other.state_dict())


def part_of(rank: int, ranks: int, samples: int = 8) -> slice:
    return slice(rank * samples // ranks, (rank + 1) * samples // ranks)


def adaptive(**settings: Any) -> dict[str, Any]:
    damping = AdaptiveDamping(interval=2)
    return {"solver": "inverse", "preconditioner_damping": damping, **settings}


RANK_CASES: dict[str, dict[str, Any]] = {
    "tied damping": {},
    "comm-opt": adaptive(strategy="comm-opt"),
    "full batch": adaptive(full_batch=True),
    "mem-opt": adaptive(strategy="mem-opt"),
    "hybrid-opt": adaptive(strategy="hybrid-opt"),
    "uneven": adaptive(strategy="hybrid-opt", loss_average="global"),
    "monte-carlo": adaptive(loss=DrawnByItself(), fisher="monte-carlo", loss_average="global"),
    "sharded": adaptive(strategy="sharded"),
    "deferred": adaptive(
        strategy=Sharded(deferred=True), statistics_every=1, solve_every=2, decay=0.5
    ),
}


def train_rank(
    rank: int, ranks: int, case: str, samples: int = 8
) -> tuple[Tensor, dict[str, float], dict[str, int]]:
    model = net()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    own = optimizer_of(wrapped, **copy.deepcopy(RANK_CASES[case]))
    part = part_of(rank, ranks, samples)
    # Losses whose mean over ranks is that of all samples.
    scale = (part.stop - part.start) * ranks / samples
    train(wrapped, own, 0, 6, part, scale, samples)
    own.close()
    return vector(model), own.last, own.counters


RANKS = [
    ("full batch", 2, 8),
    ("uneven", 3, 8),
    *(
        pytest.param(case, ranks, samples, marks=pytest.mark.thorough)
        for case, ranks, samples in (
            *((case, 2, 8) for case in RANK_CASES if case != "full batch"),
            ("monte-carlo", 3, 8),
            ("hybrid-opt", 4, 8),
            ("hybrid-opt", 6, 12),
        )
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "ranks", "samples"), RANKS)
def test_ranks_are_one_process(case: str, ranks: int, samples: int) -> None:
    weights, last, counters = train_rank(0, 1, case, samples)
    assert counters["rejected_steps"] > 0
    found = run_ranks(train_rank, ranks, case, samples, timeout=120)
    for own_weights, own_last, own_counters in found:
        compare(own_weights, weights, "weights")
        assert own_last == pytest.approx(last, rel=1e-7)
        assert own_counters == counters


def leg_on_rank(
    rank: int, ranks: int, case: str, steps: range, saved: bytes
) -> tuple[bytes, Tensor]:
    """Train from what was saved, if anything, and return what is saved in the end."""
    model = net()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    own = optimizer_of(wrapped, **copy.deepcopy(RANK_CASES[case]))
    if saved:
        everything = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
    train(wrapped, own, steps.start, steps.stop, part_of(rank, ranks))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": own.state_dict()}, file)
    own.close()
    return file.getvalue(), vector(model)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "cut"), [("full batch", 4), pytest.param("mem-opt", 3, marks=pytest.mark.thorough)]
)
@pytest.mark.thorough
def test_other_ranks_go_on(case: str, cut: int) -> None:
    """Also while a step waits for its verdict, which is that it did harm."""
    _, expected = leg_on_rank(0, 1, case, range(6), b"")
    before = run_ranks(leg_on_rank, 4, case, range(cut), b"", timeout=120)
    after = run_ranks(leg_on_rank, 2, case, range(cut, 6), before[-1][0], timeout=120)
    for _, weights in after:
        compare(weights, expected, f"{case}, from step {cut}")


def other_loss_rank(rank: int, ranks: int) -> tuple[str, bool]:
    """What a rank says where rank 1 alone forgot to divide by the number of its samples."""
    model = net()
    before = vector(model)
    wrapped = DistributedDataParallel(model)
    own = optimizer_of(wrapped)
    x, y = batch(0, part_of(rank, ranks))
    reduction = "sum" if rank == 1 else "mean"
    try:
        own.step(lambda: F.cross_entropy(wrapped(x), y, reduction=reduction))
    except ValueError as error:
        return str(error), torch.equal(vector(model), before)
    return "", False


@pytest.mark.distributed
def test_a_loss_that_is_another_one_on_one_rank_stops_all() -> None:
    (told, stood), (own, also_stood) = run_ranks(other_loss_rank, 2)
    assert told == (
        "the closure's loss is not the declared one on 1 other rank(s): see their own error"
    )
    assert own.startswith("the closure's loss has 4 times the curvature")
    assert (stood, also_stood) == (True, True)


def resume_rank(rank: int, ranks: int, folder: Path) -> tuple[Tensor, Tensor, int]:
    """Train with a stop in between, from a sharded checkpoint, and without one."""
    settings = RANK_CASES["sharded"]
    found = []
    for stop in (False, True):
        model = net()
        wrapped = DistributedDataParallel(model)
        own = optimizer_of(wrapped, **copy.deepcopy(settings))
        train(wrapped, own, 0, 5, part_of(rank, ranks))
        if stop:
            state = {
                "model": model.state_dict(),
                "optimizer": own.state_dict(curvature=False),
                "preconditioner": checkpoint.part(own.preconditioner),
            }
            curvature = state["optimizer"]["curvature"]
            assert curvature is None
            mine = io.BytesIO()  # momentum and damping are every rank's own copy
            torch.save((state.pop("model"), state.pop("optimizer")), mine)
            dcp.save(state, checkpoint_id=folder)
            own.close()
            model = fill(net(), seed=1)
            wrapped = DistributedDataParallel(model)
            own = optimizer_of(wrapped, **copy.deepcopy(settings))
            weights, optimizer = torch.load(io.BytesIO(mine.getvalue()), weights_only=True)
            model.load_state_dict(weights)
            own.load_state_dict(optimizer)
            checkpoint.load(own.preconditioner, folder)
        train(wrapped, own, 5, STEPS + 2, part_of(rank, ranks))
        found.append(vector(model))
        own.close()
    return found[0], found[1], own.counters["rejected_steps"]


def test_what_is_drawn_by_itself_is_drawn_from_the_model() -> None:
    outputs = randn(3000, 3)
    exact = CrossEntropy().sample(outputs, torch.Generator().manual_seed(0))
    drawn = DrawnByItself().sample(outputs)
    for found in (exact, drawn):
        assert found.mean(0).abs().max() < 0.03  # the mean of a score is zero
    assert not torch.equal(exact, drawn)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_it_goes_on_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    for whole, resumed, rejected in run_ranks(resume_rank, 2, tmp_path):
        assert torch.equal(whole, resumed)
        assert rejected > 0  # the counters are those of the whole run
