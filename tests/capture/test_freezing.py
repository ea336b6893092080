"""Parameters that are frozen, thawed or replaced: before construction, after it, within a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from soframe.testing import compare
from tests.capture.kit import (
    WORLDS,
    CalledTwice,
    Case,
    Recorder,
    check,
    precondition,
    snapshot,
    softplus,
    vectors,
)

PARTS = {"weight": ["weight"], "bias": ["bias"], "layer": ["weight", "bias"]}


def train_only(part: str, trainable: bool, model: nn.Module) -> None:
    for name in PARTS[part]:
        getattr(model.first, name).requires_grad_(trainable)


def freeze_at(part: str, steps: tuple[int, ...], model: nn.Module, step: int) -> None:
    """Freeze at the first step given, thaw at the second, and so on."""
    if step in steps:
        train_only(part, bool(steps.index(step) % 2), model)


Schedule = Callable[[str], Case]
UNUSED = {"find_unused_parameters": True}


def before(part: str) -> Case:
    return Case(CalledTwice, prepare=partial(train_only, part, False))


def begin(part: str, *steps: int) -> Case:
    return Case(CalledTwice, begin=partial(freeze_at, part, steps), ddp=UNUSED)


def between(part: str, *steps: int) -> Case:
    return Case(CalledTwice, change=partial(freeze_at, part, steps), ddp=UNUSED)


SCHEDULES: dict[str, Schedule] = {
    "before construction": before,
    "before the first forward": lambda part: begin(part, 0),
    "before a later forward": lambda part: begin(part, 1),
    "between the first backward and step": lambda part: between(part, 0),
    "between a later backward and step": lambda part: between(part, 1),
    "and thawed": lambda part: begin(part, 0, 1),
    "and thawed between backward and step": lambda part: between(part, 0, 1),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.covering(together=2)
def test_freezing(schedule: str, part: str, world_size: int) -> None:
    """A block that gains a parameter begins anew: its gradient is raw for that one step."""
    check(SCHEDULES[schedule](part), world_size)


def thaw(part: str, model: nn.Module, step: int) -> None:
    if step == 1:
        train_only(part, True, model)


@pytest.mark.parametrize("part", PARTS)
def test_thawed_after_construction(part: str) -> None:
    prepare = partial(train_only, part, False)
    check(Case(CalledTwice, prepare=prepare, begin=partial(thaw, part)), 1)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_window_of_a_change_is_not_lost(part: str) -> None:
    """The next statistics may be far off: those of this window must enter."""
    case = between(part, 0)
    model, twin = case.build(), case.twin()
    recorder, preconditioner = Recorder(twin), precondition(model, statistics_every=100)
    for each in (model, twin):
        softplus(each(vectors(0))).backward()
        case.change(each, 0)
    preconditioner.step()
    recorder.step(len(vectors(0)))
    got = snapshot(model, preconditioner)
    for block, factors in recorder.factors().items():
        for kind, factor in factors.items():
            compare(got[kind][block], factor, f"{kind} of {block}")


def test_thawed_layer_does_not_wait_for_the_interval() -> None:
    """It gathers statistics in the window after, though no statistics are due then."""
    model = Case(CalledTwice, prepare=partial(train_only, "layer", False)).build()
    preconditioner = precondition(model, statistics_every=100, solve_every=100)
    for step in range(3):
        model.zero_grad()
        if step == 1:
            train_only("layer", True, model)
        softplus(model(vectors(step))).backward()
        raw = model.first.weight.grad.clone() if step else None
        preconditioner.step()
        if step == 1:
            assert torch.equal(model.first.weight.grad, raw)
    assert preconditioner.blocks[0].running
    assert not torch.equal(model.first.weight.grad, raw)
    twin = Case(CalledTwice).twin()
    recorder = Recorder(twin)
    softplus(twin(vectors(2))).backward()
    recorder.step(len(vectors(2)))
    compare(model.first.weight.grad, twin.first.weight.grad, "the third step")


def test_graph_from_before_a_change_is_ignored() -> None:
    """A forward from before the layer changed, whose backward comes after the step that saw it."""
    model = Case(CalledTwice).build()
    preconditioner = precondition(model)
    late = softplus(model(vectors(1)))
    softplus(model(vectors(0))).backward()
    train_only("bias", False, model)
    preconditioner.step()
    tallies = preconditioner.curvature.statistics.window.tallies
    before = [tallies[b].counts.calls for b in preconditioner.blocks]
    late.backward()
    assert [tallies[b].counts.calls for b in preconditioner.blocks] == before


def replace(model: nn.Module) -> None:
    """Put another tensor in the place of a parameter, as some checkpoint loaders do."""
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def test_replaced_parameter() -> None:
    """Its first window cannot be captured; from the next one on it is preconditioned as before."""
    model, twin = Case(CalledTwice).build(), Case(CalledTwice).twin()
    preconditioner, recorder = precondition(model), Recorder(twin)
    for step in range(3):
        for each in (model, twin):
            each.zero_grad()
            if step == 1:
                replace(each)
            softplus(each(vectors(step))).backward()
        if step == 1:
            recorder.forget("first")
        preconditioner.step()
        recorder.step(len(vectors(step)))
        for name, parameter in twin.named_parameters():
            compare(model.get_parameter(name).grad, parameter.grad, f"step {step}: {name}")


@pytest.mark.parametrize("part", PARTS)
def test_dampings_of_single_blocks_stay(part: str) -> None:
    """`Preconditioner.damp` holds from then on, for blocks that lose a parameter and for others."""
    model = CalledTwice().double()
    own = precondition(model)
    own.damp(dict.fromkeys((block.name for block in own.blocks), 0.7))
    for step in range(2):
        train_only(part, step == 0, model)
        model.zero_grad()
        softplus(model(vectors(step))).backward()
        own.step()
    assert {block.damped_with(own.damping) for block in own.blocks} == {0.7}
    own.close()
