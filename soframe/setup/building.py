"""Construction: a model is registered and placed, once all ranks have agreed."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from soframe import combinations
from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.registration import Choices, Registration
from soframe.blocks.survey import plain_name
from soframe.capture.hooks import Capture
from soframe.checks.warning import warn
from soframe.comm.agreement import compare_ranks, say_failed
from soframe.comm.base import Backend
from soframe.comm.stages import Stages
from soframe.methods.base import Method
from soframe.registry import describe
from soframe.setup.choosing import methods
from soframe.setup.grouping import grouping
from soframe.setup.parts import Parts
from soframe.solvers.base import Solver
from soframe.strategies.base import Circumstances, Strategy
from soframe.strategies.placement import Placement, complete
from soframe.strategies.work import BlockWork

LATE = 1_000_000
"""A step at which schedules of intervals have come to rest."""


def meet_stages(
    model: nn.Module, stages: Stages, backend: Backend, settings: Sequence[object]
) -> nn.Module | None:
    """Compare settings between stages; return the module with the model's head, if it is here."""
    copies = f"copies of each stage: {backend.world_size}"
    try:
        return stages.meet(model, "\n".join(map(describe, (*settings, copies))))
    except Exception as error:  # of any kind: the copies of this stage wait in `build`
        say_failed(backend, error)
        raise


def averaged_tensors(model: nn.Module, gradients: str) -> str:
    """Describe the parameters whose gradients ranks average, with a block or without."""
    if gradients != "local":
        return "averaged gradients"
    # All ranks must average the same parameters in the same order.
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    digest = hashlib.sha256(describe(shapes).encode()).hexdigest()[:16]
    return f"local gradients of {len(shapes)} parameters, names and shapes {digest}"


def _remedy_without_blocks(named: Sequence[tuple[str, nn.Parameter]], choices: Choices) -> str:
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    if not trained or not any(method.captures for method in methods(choices.method)):
        return ""
    return (
        "\nsoframe.Optimizer(model, method='soap', lr=3e-3) trains these parameters, too: it "
        "reads gradients alone"
    )


def register(model: nn.Module, choices: Choices) -> Registration:
    """Register an unwrapped model; raise ValueError if it cannot be preconditioned."""
    sharding.reshard(sharding.sharded_modules(model))
    named = list(model.named_parameters())
    sharding.require_model(model, named, choices.ranks)
    choices.home.check(named)
    registration = Registration(model, named, choices)
    # A stage of a pipeline may have no block of its own.
    if not registration.blocks and not choices.staged:
        remedy = _remedy_without_blocks(named, choices)
        raise ValueError(
            f"there is nothing to precondition in {type(model).__name__}:\n"
            f"{registration.report.reasons()}{remedy}"
        )
    if choices.observed and not any(block.captured for block in registration.blocks):
        raise ValueError(
            "this Fisher makes statistics of calls, and no block's method reads any: leave fisher= "
            "out, or choose a method of calls, such as 'kfac', for some layers"
        )
    covered = _identities(registration.blocks)
    parameters = [(name, p) for name, p in named if id(p) in covered]
    # A model that is on the meta device as a whole can be planned.
    if not all(parameter.is_meta for _, parameter in parameters):
        require_materialised(parameters)
    return registration


def _identities(blocks: Sequence[Block]) -> set[int]:
    """Return the identities of the parameters of blocks."""
    return set(map(id, chain.from_iterable([block.parameters.values() for block in blocks])))


def place(strategy: Strategy, blocks: Sequence[Block], ranks: int) -> Placement:
    """Place blocks by a strategy; raise ValueError if its placement is not valid for them."""
    # Equal numbers stand for equal methods and solvers: only such blocks are stacked.
    kinds: list[tuple[Method, Solver]] = []
    works: list[BlockWork] = []
    for block in blocks:
        kind = (block.method, block.solver)
        if kind not in kinds:
            kinds.append(kind)
        works.append(block.work(kinds.index(kind)))
    work = tuple(works)
    placement = complete(strategy.place(work, ranks))
    placement.validate()
    if (placement.work, placement.world_size) != (work, ranks):
        raise ValueError(
            f"strategy {placement.strategy!r} placed other work, or for other ranks, than it was "
            f"given"
        )
    return placement


def require_in(optimizer: Optimizer | None, model: nn.Module, blocks: Sequence[Block]) -> None:
    """Raise ValueError if an optimizer lacks a parameter of a block."""
    if optimizer is None or not blocks:
        return
    if (groups := grouping(optimizer)) is not None:
        groups.group(blocks)
    optimised = set(map(id, chain.from_iterable(blocks[0].home.groups(optimizer))))
    missing = _identities(blocks) - optimised
    if not missing:
        return
    if missing == _identities(blocks):
        # An optimizer that shards parameters replaces them, and reads gradients of its own.
        remedy = (
            "It has no parameter of any block: it is another model's, or one that shares "
            "parameters out over ranks and does not read what a Preconditioner writes into .grad"
        )
    else:
        remedy = (
            "Add it to a parameter group, or skip the module (skip=); where another optimizer has "
            "it, leave optimizer= out"
        )
    name = next(name for name, p in model.named_parameters() if id(p) in missing)
    raise ValueError(f"{plain_name(name)} is not in the given optimizer. {remedy}")


def build(
    parts: Parts, choices: Choices, strategy: Strategy, capture: Capture, settings: Sequence[object]
) -> tuple[Registration, Placement, Strategy]:
    """Register a model, place its blocks and hook its modules, once all ranks have agreed."""
    model, backend, refresh = parts.model, parts.backend, parts.refresh
    draws = parts.fisher.kind == "monte-carlo"

    def unfit(placement: Placement) -> str | None:
        """Return an error if a placement does not go with the model and the settings, or None."""
        blocks = registration.blocks
        why = combinations.refused(blocks, placement, solve_every=refresh.solve_every.value)
        return why or sharding.refused_together(model, blocks, placement, draws=draws)

    def placed(strategy: Strategy) -> Placement:
        placement = place(strategy, registration.blocks, backend.world_size)
        if why := unfit(placement):
            raise ValueError(why)
        return placement

    try:
        registration = register(model, choices)
        require_in(parts.optimizer, model, registration.blocks)
        require_averaged(registration.blocks, parts.gradients)
        placement = placed(strategy)
        parts.stages.require_served(model, registration.blocks)
    except Exception as error:  # of any kind: the other ranks wait in `compare_ranks`
        say_failed(backend, error)
        raise
    described = describe_settings(registration.blocks, *settings, parts.solves, refresh)
    compare_ranks(backend, placement, described)
    settled = strategy
    if type(strategy).settled is not Strategy.settled:  # others need not walk the model for it
        settled = strategy.settled(_circumstances(parts, registration.blocks, placement, unfit))
    if settled is not strategy:
        placement = placed(settled)
        compare_ranks(backend, placement, described)
    if not parts.keeps_hooks:
        modules: list[nn.Module] = []
        for block in registration.blocks:
            modules += [helper.module for helper in block.helpers]
        take_over(capture, modules)
    # Process groups are created by all ranks together, so only after they agree.
    backend.prepare(placement.groups())
    return registration, placement, settled


def _circumstances(
    parts: Parts,
    blocks: Sequence[Block],
    placement: Placement,
    refused: Callable[[Placement], str | None],
) -> Circumstances:
    """Return the circumstances in which a strategy settles."""
    return Circumstances(
        blocks=blocks,
        work=placement.work,
        parameters=[p for p in parts.model.parameters() if p.requires_grad],
        backend=parts.backend,
        local=parts.gradients == "local",
        background=parts.solves.delay,
        stagger=parts.refresh.stagger,
        statistics_every=parts.refresh.statistics_every.at(LATE),
        solve_every=parts.refresh.solve_every.at(LATE),
        refused=refused,
    )


# Weak on both sides: neither a module nor a capture is kept alive by this table.
_hooked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]] = weakref.WeakKeyDictionary()


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector rest: it takes half of the time in which many objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def silent(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let preconditioners of these modules take no statistics meanwhile."""
    with ExitStack() as paused:
        for module in modules:
            if module not in _hooked:
                continue
            capture = _hooked[module]()
            if capture is not None and capture.enabled:
                paused.enter_context(capture.paused())
        yield


def take_over(capture: Capture, modules: Sequence[nn.Module]) -> None:
    """Remove the hooks of older preconditioners of these modules, with a warning."""
    reference = weakref.ref(capture)
    if any(_hooked.get(module, reference) is not reference for module in modules):
        gc.collect()  # an unreachable one gives no warning
    for module in modules:
        older = _hooked.get(module, reference)()
        _hooked[module] = reference
        if older is None or older is capture or older.closed:
            continue
        if module not in {helper.module for helper in older.names}:
            continue  # the older one no longer has this module
        older.close()
        warn(
            f"a new preconditioner of the same {type(module).__name__} replaces an older "
            f"one, whose hooks are removed; close() the older one first to be rid of this warning"
        )


def describe_settings(blocks: Sequence[Block], *settings: object) -> str:
    """Return the settings that all ranks must share, except the placement: one per line."""
    # Many blocks have the same components, which are described once.
    components: dict[object, tuple[object, ...]] = {}
    for block in reversed(blocks):
        key = (id(block.method), id(block.solver), block.dtypes)
        components[key] = (block.method, block.solver, *block.dtypes)
    of_blocks = dict.fromkeys(map(describe, components.values()))
    return "\n".join(map(describe, (*settings, *of_blocks)))


def require_averaged(blocks: Sequence[Block], gradients: str) -> None:
    """Raise ValueError if gradients of sharded parameters are declared to be each rank's own."""
    for block in blocks:
        if gradients == "local" and block.shards:
            raise ValueError(
                f"{block.name} is sharded over ranks, and gradients='local' is for those that are "
                f"each rank's own: the framework averages them (and those of a tensor-parallel "
                f"plan are of the same batch), so pass Distribution(gradients='averaged')"
            )


def require_materialised(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise a ValueError if a named parameter is on the meta device."""
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(
                f"the parameter {name} is on the meta device, where it has no values: call "
                f"model.to_empty(device=...) and load or initialise the weights, then build the "
                f"Preconditioner"
            )
