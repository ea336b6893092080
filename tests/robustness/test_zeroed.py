"""What a step is given: gradients zeroed since the last one, of whole parameters with values."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from tests.distributed.harness import RankFailure, run_ranks
from tests.robustness.test_no_effect import Network, backward, batch, build

ADDED = r"has added to the gradient that the last step\(\) preconditioned.*sync_gradients"


def in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def together(model: nn.Module) -> None:
    if there := [p.grad for p in model.parameters() if p.grad is not None]:
        torch._foreach_zero_(there)


ZEROES = (in_place, to_none, together)


@pytest.mark.parametrize("micro_batches", [0, 1, 2])
def test_a_step_in_every_micro_batch(micro_batches: int) -> None:
    """As in a loop of Accelerate's without its gate, or twice in a row; no gradient is changed."""
    model = Network()
    own = build(model)
    backward(model)
    own.step()
    for number in range(micro_batches):
        backward(model, number)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError, match=ADDED if micro_batches else "no backward pass has come"):
        own.step()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    model.zero_grad()
    own.reset_batch()
    backward(model)
    own.step()


@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_zeroed(zero: Callable[[nn.Module], None], fused: bool) -> None:
    """Whichever way, with clipping, several passes, unused layers and penalties afterwards."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    own = build(model, statistics_every=2, solve_every=2)
    for step in range(8):
        zero(model)
        for number in range(1 + step % 3):
            backward(model, number, head=step > 4)
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        own.step()
        if step % 4 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if step % 4 == 3:  # added on purpose to what was preconditioned
            sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    own.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_pass_between_the_step_and_the_zeroing() -> None:
    """A measurement leaves its gradients; they are zeroed before the batch, that does without."""
    model = Network()
    own = build(model)
    for zero in (in_place, to_none, in_place):
        backward(model)
        own.step()
        backward(model)
        zero(model)
        if zero is to_none:
            backward(model)
        own.step()
        zero(model)


# -- batches that are given up, and optimizers that step first -------------------------------------


def running(own: soframe.Preconditioner) -> dict[str, torch.Tensor]:
    return {f"{b.name} {k}": f.clone() for b in own.blocks for k, f in b.running.items()}


def same(own: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    for mine, other in zip(own, expected, strict=True):
        assert mine.keys() == other.keys()
        for name, factor in mine.items():
            torch.testing.assert_close(factor, other[name], rtol=1e-6, atol=0)


def given_up(
    rank: int,
    world_size: int,
    zero: Callable[[nn.Module], None],
    when: str,
    ddp: dict[str, Any] | None,
    losses: list[float],
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    """Return factors after each step of two passes, before which others come that are given up.

    Args:
        rank: Of this process.
        world_size: How many there are.
        zero: Zeroes gradients.
        when: Whether before the forward pass or after it.
        ddp: The settings of DistributedDataParallel; None for no wrapper.
        losses: What multiplies the loss of each pass that is given up.
        **options: Of the preconditioner.
    """
    torch.manual_seed(0)
    model = Network()
    model.head.requires_grad_(False)
    run = model if ddp is None else DistributedDataParallel(model, **ddp)
    own = build(model, **options)
    found = []
    for step in range(2):
        passes = [(7, factor, True) for factor in losses] + [(0, 0.5, True), (1, 0.5, False)]
        for number, factor, zeroed in passes:
            if zeroed and when == "before":
                zero(model)
            loss = factor * run(batch(8 * step + number)).square().mean()
            if zeroed and when == "after":
                zero(model)
            loss.backward()
        own.step()
        found.append(running(own))
    return found


GIVEN_UP = [1.0, 2.0, torch.nan]


@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_batch_that_is_given_up_does_not_count(
    zero: Callable[[nn.Module], None], when: str
) -> None:
    """Nor do steps that an optimizer takes alone, before preconditioning begins."""
    same(given_up(0, 1, zero, when, None, GIVEN_UP), given_up(0, 1, zero, when, None, []))


def given_up_on_ranks(rank: int, world_size: int) -> None:
    for zero in (in_place, to_none):
        for ddp in ({}, {"gradient_as_bucket_view": True}):
            expected = given_up(rank, world_size, zero, "before", ddp, [])
            same(given_up(rank, world_size, zero, "before", ddp, GIVEN_UP), expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.thorough])]
)
def test_a_batch_that_all_ranks_give_up_does_not_count(ranks: int) -> None:
    run_ranks(given_up_on_ranks, ranks)


def test_micro_batches_that_are_clipped_or_cloned_are_not_given_up() -> None:
    """Their gradients change between the passes, and are there still."""

    def factors(change: Callable[[nn.Module], object]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Network()
        own = build(model)
        for number in range(3):
            backward(model, number)
            change(model)
        own.step()
        return running(own)

    def clone(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad.clone()

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    plain, *changed = (factors(change) for change in (lambda model: None, clip, clone))
    for own in changed:
        assert all(torch.equal(factor, plain[name]) for name, factor in own.items())


def test_gradients_that_others_hooks_take_are_not_given_up() -> None:
    """They are kept elsewhere, and come back before the step."""
    results = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        model = Network()
        model.head.requires_grad_(False)
        own = build(model)
        taken: dict[nn.Parameter, torch.Tensor] = {}

        def take(p: nn.Parameter, taken: dict[nn.Parameter, torch.Tensor] = taken) -> None:
            taken[p] = p.grad + taken.get(p, 0)
            p.grad = None

        if elsewhere:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(take) if p.requires_grad else None
        for number in range(2):
            backward(model, number)
        for p, gradient in taken.items():
            p.grad = gradient
        own.step()
        results.append(running(own))
    plain, own_place = results
    assert all(torch.equal(factor, plain[name]) for name, factor in own_place.items())


class Wrapper(torch.optim.Optimizer):
    """An optimizer by its class alone, as trainers have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Delegate:
    """A wrapper that is no optimizer, and has whatever its own one has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize(
    "wrap", [lambda one: one, Wrapper, lambda one: Wrapper(Wrapper(one)), Delegate]
)
@pytest.mark.parametrize("every", [1, 3])
def test_an_optimizer_that_steps_first(wrap: Callable[[Any], Any], every: int) -> None:
    """It has used the raw gradient, whether statistics are due or not."""
    model = Network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(sgd)
    own = build(model, optimizer=optimizer, statistics_every=every, solve_every=every)
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        if step in (0, 3):
            own.step()
            optimizer.step()
            continue
        optimizer.step()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(RuntimeError, match=r"first: optimizer\.step\(\) came between the back"):
            own.step()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
    own.close()
    assert not sgd._optimizer_step_post_hooks


def steps_of(optimizer: Any, own: soframe.Preconditioner, model: nn.Module, count: int) -> None:
    for step in range(count):
        model.zero_grad()
        backward(model, step)
        own.step()
        optimizer.step()


def test_another_optimizer_that_steps_is_told() -> None:
    """One that is made anew for the next phase of training has other learning rates."""
    model = Network()
    first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01))
    own = build(model, optimizer=first)
    steps_of(first, own, model, 4)
    with pytest.warns(UserWarning, match="has taken none of the last 3 steps") as warned:
        steps_of(second, own, model, 8)
    assert len(warned) == 1


def test_an_optimizer_whose_steps_have_another_name_is_the_right_one() -> None:
    model = Network()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)  # as SAM, whose second_step() steps it
    steps_of(base, build(model, optimizer=outer), model, 6)


def test_an_optimizer_that_skips_steps_is_the_right_one() -> None:
    """Whether nothing changes meanwhile, or something else does, once or twice."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = build(model, optimizer=optimizer)
    for changes in (False, True):
        for _ in range(3):
            for step in range(3 if changes else 5):
                model.zero_grad()
                backward(model, step)
                own.step()
                if changes:
                    nn.init.normal_(model.first.weight, std=0.1)
            optimizer.step()


def test_what_nobody_has_any_more_goes_with_its_hooks() -> None:
    """At once, and not with the next collection of garbage."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = build(model, optimizer=optimizer)
    backward(model)
    own.step()
    gc.collect()
    gc.disable()
    try:
        there = weakref.ref(own)
        del own
        assert there() is None
    finally:
        gc.enable()
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_copies_have_no_hooks() -> None:
    model = Network()
    own = build(model)
    backward(model)
    own.step()
    twin = copy.deepcopy(model)
    backward(twin)
    twin.first.weight.grad.zero_()
    assert not any(p._post_accumulate_grad_hooks for p in twin.parameters())


@pytest.mark.slow
def test_one_graph_under_the_compiler() -> None:
    """Hooks on parameters are none of the compiler's business."""
    torch._dynamo.reset()
    model = Network()
    own = build(model, statistics_every=2)
    backward(model)
    own.step()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    backward(compiled)
    own.step()
    torch._dynamo.reset()


def on_ranks(rank: int, world_size: int, gate: bool, ddp: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Network()
    model.head.requires_grad_(False)
    wrapped = DistributedDataParallel(model, **ddp)
    own = build(wrapped)
    for step in range(6):
        if gate or step == 0:
            wrapped.zero_grad(set_to_none=step < 2)
        backward(wrapped, step)
        own.step()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("gate", "ddp"),
    [
        (False, {}),
        (False, {"static_graph": True}),
        (True, {}),
        (True, {"static_graph": True}),
        (True, {"gradient_as_bucket_view": True}),  # without the gate this one is not noticed
    ],
)
def test_ranks(gate: bool, ddp: dict[str, Any]) -> None:
    for result in run_ranks(on_ranks, 2, gate, ddp, check=False):
        assert isinstance(result, RankFailure) != gate
        assert gate or "has added to the gradient" in result.summary


# -- parameters without values, and parameters that are shared out -------------------------------


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Network()
    with pytest.raises(ValueError, match=r"first\.weight is on the meta device.*to_empty"):
        build(model)
    with pytest.raises(ValueError, match="meta device"):
        soframe.TrustRegion(model, "mse")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    own = build(model)
    backward(model)
    own.step()


def test_a_part_on_the_meta_device() -> None:
    model = Network()
    model.head = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match=r"head\.weight is on the meta device"):
        build(model)
    build(model, skip=["head"]).close()


@pytest.mark.parametrize("mark", ["_fsdp_flattened", "ds_id", "_hp_mapping"])
def test_marks_of_frameworks(mark: str) -> None:
    """What frameworks leave on parameters they shard, without the frameworks: before, and after."""
    model = Network()
    own = build(model)
    for parameter in model.parameters():
        setattr(parameter, mark, 1)
    backward(model)
    with pytest.raises(ValueError, match=r"first\.weight belongs to .*DistributedDataParallel"):
        own.step()
    own.close()
    with pytest.raises(ValueError, match=r"parameter scale belongs to .*DistributedDataParallel"):
        build(model)


def shard(model: nn.Module, kind: str) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        model, use_orig_params=kind == "original", device_id=torch.device("cpu")
    )


def sharded(rank: int, world_size: int, kind: str, before: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    own = build(model) if before else None
    wrapped = shard(model, kind)
    own = own or build(wrapped)
    wrapped(torch.randn(3, 4)).square().mean().backward()
    own.step()


@pytest.mark.distributed
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["original", "flat"])
def test_sharded_models(kind: str, before: bool) -> None:
    """Refused at construction; by the step, where the model was sharded after it.

    Models that fully_shard or a tensor-parallel plan has cut up are served (tests/compatibility).
    """
    for failure in run_ranks(sharded, 2, kind, before, check=False):
        assert isinstance(failure, RankFailure)
        assert failure.exception is not None
        assert "FullyShardedDataParallel, in whose flat buffers" in str(failure.exception)
        assert "shard the model by torch.distributed.fsdp.fully_shard" in str(failure.exception)


def test_an_optimizer_that_shares_parameters_out() -> None:
    """The remedy is not lr=: nothing would read what the step writes."""
    model = Network()
    flat = torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1)
    with pytest.raises(ValueError, match=r"no parameter of any block.*lr= would not change that"):
        build(model, optimizer=flat)
    part = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"last\.weight .*another optimizer has it, pass lr="):
        build(model, optimizer=part)
