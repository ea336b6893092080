"""A rejected step leaves what one pass of the closure leaves, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.losses import CrossEntropy
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt
from tests.curvature import Batch, fill, randn
from tests.trust_region.kit import (
    Measured,
    classes_of,
    closures,
    deep,
    labels,
    trust_region,
    vector,
)

SIZES = {"one batch": [8], "micro-batches": [5, 3]}


def noisy() -> nn.Module:
    """With buffers and random numbers, which each pass changes."""
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)]
    return fill(nn.Sequential(*layers))


def batches_of(sizes: list[int], seed: int = 0) -> list[Batch]:
    return [(randn(n, 3, seed=seed + n), labels(n, seed=seed + n)) for n in sizes]


def one_pass(
    model: nn.Module, batches: list[Batch], sample: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Buffers and random state after a pass over each batch, the Fisher's samples drawn or not."""
    twin, random = noisy(), torch.get_rng_state()
    twin.load_state_dict(model.state_dict())
    for x, _ in batches:
        output = twin(x)
        if sample:
            CrossEntropy().sample(output.detach())
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    return dict(twin.named_buffers()), after


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fisher": "monte-carlo"},
        {"fisher": "monte-carlo", "statistics_every": 2},
        {"preconditioner_damping": AdaptiveDamping(interval=1), "solver": "inverse"},
        {"weight_decay": 1e-2},
    ],
    ids=str,
)
def test_it_leaves_what_one_pass_leaves(settings: dict[str, Any], sizes: list[int]) -> None:
    model = noisy()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(1.0, interval=1), **settings)
    torch.manual_seed(0)
    for seed, lr, rejected in ((0, 1e-3, 0), (1, 300.0, 1)):
        batches = batches_of(sizes, 20 * seed)
        sampled = settings.get("fisher") == "monte-carlo"
        sampled &= seed % settings.get("statistics_every", 1) == 0
        buffers, random = one_pass(model, batches, sampled)
        before = vector(model)
        last = [own.state[p]["update"].clone() for p in model.parameters()] if rejected else []
        own.param_groups[0]["lr"] = lr
        own.step(closures(model, batches, F.cross_entropy))
        assert own.counters == {"rejected_steps": rejected, "skipped_steps": 0}
        assert torch.equal(vector(model), before) == bool(rejected)
        assert buffers.keys() == dict(model.named_buffers()).keys()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        assert torch.equal(torch.get_rng_state(), random)
    assert model[1].num_batches_tracked == 2 * len(sizes)
    for parameter, update in zip(model.parameters(), last, strict=True):
        assert own.state[parameter].keys() == {"update"}
        assert torch.equal(own.state[parameter]["update"], update)


def test_the_next_step_is_that_of_a_run_without_it() -> None:
    """With statistics of that step alone, and a damping that does not change."""
    found = []
    for lrs in ([1.0, 300.0, 1.0], [1.0, 1.0]):
        model = deep()
        own = trust_region(model, "cross-entropy", Measured(1.0), decay=0.0)
        for lr in lrs:
            own.param_groups[0]["lr"] = lr
            own.step(closures(model, [classes_of(0)], F.cross_entropy))
        found.append((vector(model), own.counters["rejected_steps"]))
    (rejecting, one), (plain, none) = found
    assert (one, none) == (1, 0)
    assert torch.equal(rejecting, plain)
