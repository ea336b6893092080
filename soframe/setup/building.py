"""Construction of a preconditioner: checks and choices before the first collective."""

from __future__ import annotations

import gc
import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from soframe import combinations
from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.registration import Choice, Choices, Registration
from soframe.capture.counting import Samples
from soframe.capture.hooks import Capture
from soframe.capture.sampling import check_rows
from soframe.checks.numbers import require_integer
from soframe.comm.agreement import compare_ranks, say_failed
from soframe.comm.base import Backend
from soframe.comm.distributed import TorchDistributed
from soframe.comm.single import SingleProcess
from soframe.comm.stages import ALONE, Stages
from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy
from soframe.methods.base import Method
from soframe.registry import KINDS, describe
from soframe.solvers.base import Solver
from soframe.step import gradients as averaging
from soframe.step.moving import grouping
from soframe.step.refresh import Refresh
from soframe.step.solves import Solves
from soframe.strategies.base import Circumstances, Strategy
from soframe.strategies.placement import Placement, complete

LATE = 10**6
"""A step at which schedules of intervals have come to rest."""


def choose_backend(choice: str | type[Backend] | Backend | None) -> Backend:
    """Return the communication backend; None chooses torch.distributed if it is initialised."""
    return choose_backends(choice, None)[0]


def choose_backends(
    choice: str | type[Backend] | Backend | None, pipeline: object
) -> tuple[Backend, Stages]:
    """Return the communication backend, and the stages of a `Pipeline` (None for none)."""
    if pipeline is None:
        return _backend_of(choice, ALONE), ALONE
    from soframe.parallel.pipeline import Pipeline  # imported by few models

    stages = Pipeline(pipeline)
    return _backend_of(choice, stages), stages


def _backend_of(choice: str | type[Backend] | Backend | None, stages: Stages) -> Backend:
    if choice is None and stages.backend is not None:
        # Without a backend for the copies of a stage, this rank has the only copy.
        stages.require_backend(None)
        return SingleProcess()
    if choice is None:
        distributed = dist.is_available() and dist.is_initialized()
        return TorchDistributed() if distributed else SingleProcess()
    backend = KINDS["backend"].build(choice, Backend)
    assert isinstance(backend, Backend)
    stages.require_backend(backend)
    return backend


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


@contextmanager
def starting(backend: Callable[[], Backend], stages: Stages | None = None) -> Iterator[None]:
    """If this rank raises in here, send the error to the other ranks, which wait in `build`."""
    try:
        # No collective may start in here: the other ranks' next one is in `build`.
        yield
    except Exception as error:  # of any kind: the other ranks wait
        if stages is not None:
            stages.say_failed(error)
        say_failed(backend(), error)
        raise


def averaged_tensors(model: nn.Module, gradients: str) -> str:
    """Describe the parameters whose gradients ranks average, with a block or without."""
    if gradients != "local":
        return "averaged gradients"
    # All ranks must average the same parameters in the same order.
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    digest = hashlib.sha256(describe(shapes).encode()).hexdigest()[:16]
    return f"local gradients of {len(shapes)} parameters, names and shapes {digest}"


def choose_damping(choice: DampingChoice) -> DampingPolicy:
    """Return a damping policy; raise ValueError if it needs reduction ratios."""
    policy = adopted(damping_policy(choice))
    if policy.interval > 0:
        raise ValueError(
            f"{policy!r} follows the reduction ratio, which soframe.TrustRegion measures; a "
            f"Preconditioner takes a number, a callable of the step, or a policy without it"
        )
    return policy


def methods(choice: Choice) -> list[Method]:
    """Return the methods of a choice."""
    every = choice.values() if isinstance(choice, Mapping) else (choice,)
    return [KINDS["method"].build(one, Method) for one in every]


WITHOUT_BLOCKS = (
    "soframe.Optimizer(model, method='soap', lr=3e-3) trains these parameters, too: it reads "
    "gradients alone"
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
        reads_calls = any(method.captures for method in methods(choices.method))
        is_trained = any(parameter.requires_grad for _, parameter in named)
        remedy = f"\n{WITHOUT_BLOCKS}" if reads_calls and is_trained else ""
        raise ValueError(
            f"there is nothing to precondition in {type(model).__name__}:\n"
            f"{registration.report.reasons()}{remedy}"
        )
    if choices.observed and not any(block.captured for block in registration.blocks):
        raise ValueError(
            "this Fisher makes statistics of calls, and no block's method reads any: leave fisher= "
            "out, or choose a method of calls, such as 'kfac', for some layers"
        )
    every = [(f"{b.name}.{n}", p) for b in registration.blocks for n, p in b.parameters.items()]
    # A model that is on the meta device as a whole can be planned.
    if not all(parameter.is_meta for _, parameter in every):
        require_materialised(every)
    return registration


def place(strategy: Strategy, blocks: Sequence[Block], ranks: int) -> Placement:
    """Place blocks by a strategy; raise ValueError if its placement is not valid for them."""
    # Equal numbers stand for equal methods and solvers: only such blocks are stacked.
    kinds: list[tuple[Method, Solver]] = []
    numbers: dict[tuple[int, int], int] = {}
    for block in blocks:
        kind = (block.method, block.solver)
        if (id(block.method), id(block.solver)) not in numbers:
            kinds += [kind] if kind not in kinds else []
            numbers[id(block.method), id(block.solver)] = kinds.index(kind)
    work = tuple(block.work(numbers[id(block.method), id(block.solver)]) for block in blocks)
    placement = complete(strategy.place(work, ranks))
    placement.validate()
    if (placement.work, placement.world_size) != (work, ranks):
        raise ValueError(
            f"strategy {placement.strategy!r} placed other work, or for other ranks, than it was "
            f"given"
        )
    return placement


def require_in(optimizer: Optimizer | None, blocks: Sequence[Block]) -> None:
    """Raise ValueError if an optimizer lacks a parameter of a block."""
    if optimizer is None or not blocks:
        return
    if (groups := grouping(optimizer)) is not None:
        groups.group(blocks)
    home = blocks[0].home
    held = {id(p) for parameters in home.groups(optimizer) for p in parameters}
    parameters = {
        f"{block.name}.{name}": parameter
        for block in blocks
        for name, parameter in block.parameters.items()
    }
    missing = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if not missing:
        return
    if len(missing) == len(parameters):
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
    raise ValueError(f"{missing[0]} is not in the given optimizer. {remedy}")


def build(
    model: nn.Module,
    choices: Choices,
    optimizer: Optimizer | None,
    strategy: Strategy,
    backend: Backend,
    background: Solves,
    refresh: Refresh,
    settings: Sequence[object],
    *,
    capture: Capture,
    gradients: str,
    stages: Stages,
    beside: bool = False,
) -> tuple[Registration, Placement, Strategy]:
    """Register a model, place its blocks and hook its modules, once all ranks have agreed."""

    def unfit(placement: Placement) -> str | None:
        """Return an error if a placement does not go with the model and the settings, or None."""
        blocks, every = registration.blocks, refresh.solve_every.value
        why = combinations.refused(blocks, placement, solve_every=every)
        return why or sharding.refused_together(model, blocks, placement, draws=choices.draws)

    def placed(strategy: Strategy) -> Placement:
        placement = place(strategy, registration.blocks, backend.world_size)
        if why := unfit(placement):
            raise ValueError(why)
        return placement

    try:
        registration = register(model, choices)
        require_in(optimizer, registration.blocks)
        require_averaged(registration.blocks, gradients)
        placement = placed(strategy)
        stages.require_served(model, registration.blocks)
    except Exception as error:  # of any kind: the other ranks wait in `compare_ranks`
        say_failed(backend, error)
        raise
    settings_of_rank = describe_settings(registration.blocks, *settings, background, refresh)
    compare_ranks(backend, placement, settings_of_rank)
    settled = strategy
    if type(strategy).settled is not Strategy.settled:
        settled = strategy.settled(
            Circumstances(
                blocks=registration.blocks,
                work=placement.work,
                parameters=[p for p in model.parameters() if p.requires_grad],
                backend=backend,
                local=gradients == "local",
                background=background.delay,
                stagger=refresh.stagger,
                statistics_every=refresh.statistics_every.at(LATE),
                solve_every=refresh.solve_every.at(LATE),
                refused=unfit,
            )
        )
    if settled is not strategy:
        placement = placed(settled)
        compare_ranks(backend, placement, settings_of_rank)
    if not beside:
        modules = (helper.module for block in registration.blocks for helper in block.helpers)
        take_over(capture, modules)
    # Process groups are created by all ranks together, so only after they agree.
    backend.prepare(placement.groups())
    return registration, placement, settled


# Weak on both sides: neither a module nor a capture is kept alive by this table.
_hooked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]] = weakref.WeakKeyDictionary()


@contextmanager
def silent(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let preconditioners of these modules take no statistics meanwhile."""
    with ExitStack() as paused:
        for module in modules:
            capture = _hooked[module]() if module in _hooked else None
            if capture is not None and capture.enabled:
                paused.enter_context(capture.paused())
        yield


def take_over(capture: Capture, modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of older preconditioners of these modules, with a warning."""
    reference, modules = weakref.ref(capture), list(modules)
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
        warnings.warn(
            f"soframe: a new preconditioner of the same {type(module).__name__} replaces an older "
            f"one, whose hooks are removed; close() the older one first to be rid of this warning",
            stacklevel=6,
        )


def describe_settings(blocks: Sequence[Block], *settings: object) -> str:
    """Return the settings that all ranks must share, except the placement: one per line."""
    # A dict as an ordered set: many blocks have the same components.
    parts = {(id(b.method), id(b.solver), *b.dtypes): b for b in reversed(blocks)}
    of_blocks = {describe((b.method, b.solver, *b.dtypes)): None for b in parts.values()}
    return "\n".join(map(describe, (*settings, *of_blocks)))


def require(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError if a setting is not one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings that are words or numbers of rows, by their own names."""
    require("scaling", settings["scaling"], ("fisher", "kaisa"))
    require("loss_average", settings["loss_average"], ("local", "global", "sum"))
    if not (settings["samples"] is None or callable(settings["samples"])):
        require("samples", settings["samples"], ("batch", "positions"))
    require("precision", settings["precision"], ("fast", "full"))
    require("gradients", settings["gradients"], tuple(averaging.GRADIENTS))
    combinations.check_settings(settings)
    check_rows(settings["rows"])


def describe_samples(samples: Samples) -> str:
    """Describe ``samples`` for other ranks; a callable may differ: each rank counts its own."""
    return f"samples={'a callable' if callable(samples) else repr(samples)}"


def check_home(home: object) -> None:
    """Raise TypeError unless a home is a `GradientHome` or None."""
    if home is not None and not isinstance(home, GradientHome):
        raise TypeError(f"home must be a soframe.GradientHome, not {home!r}")


def check_cut(cut: object) -> None:
    """Raise TypeError or ValueError unless this maps patterns to numbers of parts, or sizes."""
    if not isinstance(cut, Mapping):
        raise TypeError(
            f"cut is a mapping from patterns on module names to numbers of parts, such as "
            f"{{'c_attn': 3}}, or to their sizes, not {cut!r}"
        )
    for pattern, parts in cut.items():
        for number in parts if isinstance(parts, list | tuple) else (parts,):
            require_integer(f"cut[{pattern!r}]", number, 1)


def check_count(terms: bool, samples: Samples, scaling: str) -> None:
    """Raise ValueError if a declaration by `count` contradicts a setting."""
    if scaling == "kaisa":
        raise ValueError("count() needs scaling='fisher': with 'kaisa' every call is its own mean")
    if terms and callable(samples):
        raise ValueError(
            "count(terms) and samples= a callable both say what the loss is a mean over; use one"
        )


def require_averaged(blocks: Sequence[Block], gradients: str) -> None:
    """Raise ValueError if gradients of sharded parameters are declared to be each rank's own."""
    for block in blocks if gradients == "local" else ():
        if block.shards:
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
