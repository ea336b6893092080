"""Building a preconditioner: what is checked and chosen before the first collective."""

from __future__ import annotations

import gc
import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from soframe import combinations
from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.registration import Choices, Registration
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
from soframe.step.rates import LearningRates
from soframe.step.refresh import Refresh
from soframe.step.solves import Solves
from soframe.strategies.base import Strategy
from soframe.strategies.placement import Placement, complete


def choose_backend(choice: str | type[Backend] | Backend | None) -> Backend:
    """Return the communication backend.

    Args:
        choice: A name, class or instance; None for torch.distributed where it is initialised.

    Returns:
        The backend.
    """
    return choose_backends(choice, None)[0]


def choose_backends(
    choice: str | type[Backend] | Backend | None, pipeline: object
) -> tuple[Backend, Stages]:
    """Return the communication backend, and the stages of a pipeline.

    Args:
        choice: A name, class or instance; None for torch.distributed where it is initialised, but
            for one process where the ranks have stages of a pipeline instead.
        pipeline: See `soframe.parallel.pipeline.Pipeline`; None for none.

    Returns:
        Both.
    """
    of_stages = _stages_of(pipeline)
    return _backend_of(choice, of_stages), of_stages


def _stages_of(pipeline: object) -> Stages:
    if pipeline is None:
        return ALONE
    from soframe.parallel.pipeline import Pipeline  # which few models have

    return Pipeline(pipeline)


def _backend_of(choice: str | type[Backend] | Backend | None, stages: Stages) -> Backend:
    if choice is None and stages.backend is not None:
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
    """Let the stages of a model meet, before any of them is registered.

    Args:
        model: The modules of this rank's stages.
        stages: The stages.
        backend: The backend of the copies of a stage.
        settings: What all stages must have in common.

    Returns:
        The module that has the head of the whole model; None where another stage has it.

    Raises:
        ValueError: If settings differ, or a stage cannot start.
    """
    copies = f"copies of each stage: {backend.world_size}"
    try:
        return stages.meet(model, "\n".join(map(describe, (*settings, copies))))
    except Exception as error:  # whatever it is: the copies wait, and must be told
        say_failed(backend, error)
        raise


@contextmanager
def starting(backend: Callable[[], Backend], stages: Stages | None = None) -> Iterator[None]:
    """Let an error on this rank be one on all ranks, which wait for it in `build`.

    Args:
        backend: Returns the backend, where there is an error to tell.
        stages: The stages of a pipeline, where the ranks have one.

    Yields:
        Nothing; what is done meanwhile starts no collective.
    """
    try:
        yield
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        if stages is not None:
            stages.say_failed(error)
        say_failed(backend(), error)
        raise


def averaged_tensors(model: nn.Module, gradients: str) -> str:
    """Return of which parameters, with a block or without, ranks average the gradients.

    Args:
        model: The model, unwrapped.
        gradients: ``"local"`` where soframe does it.
    """
    if gradients != "local":
        return "averaged gradients"
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    digest = hashlib.sha256(describe(shapes).encode()).hexdigest()[:16]
    return f"local gradients of {len(shapes)} parameters, names and shapes {digest}"


def choose_damping(choice: DampingChoice) -> DampingPolicy:
    """Return the damping policy of a preconditioner.

    Args:
        choice: A number, a callable of the step, or a policy.

    Returns:
        The policy.

    Raises:
        ValueError: If it waits for reduction ratios, which nobody measures here.
    """
    policy = adopted(damping_policy(choice))
    if policy.interval > 0:
        raise ValueError(
            f"{policy!r} follows the reduction ratio, which soframe.TrustRegion measures; a "
            f"Preconditioner takes a number, a callable of the step, or a policy without it"
        )
    return policy


def register(model: nn.Module, choices: Choices) -> Registration:
    """Register a model.

    Args:
        model: The model, unwrapped.
        choices: What the user chose.

    Returns:
        The registration, with at least one block, unless the model is some stages of a pipeline.

    Raises:
        ValueError: If there is nothing to precondition, or parameters are shared out or without
            values.
    """
    sharding.reshard(sharding.sharded_modules(model))
    sharding.require_model(model, choices.ranks)
    choices.home.check(model.named_parameters())
    registration = Registration(model, choices)
    if not registration.blocks and not choices.staged:
        raise ValueError(
            f"there is nothing to precondition in {type(model).__name__}:\n{registration.report}"
        )
    if choices.observed and not any(block.captured for block in registration.blocks):
        raise ValueError(
            "this Fisher makes statistics of calls, and no block's method reads any: leave fisher= "
            "out, or choose a method of calls, such as 'kfac', for some layers"
        )
    for block in registration.blocks:
        named = block.parameters.items()
        require_materialised((f"{block.name}.{name}", p) for name, p in named)
    return registration


def place(strategy: Strategy, blocks: Sequence[Block], ranks: int) -> Placement:
    """Place blocks, and check what the strategy answers.

    Args:
        strategy: The strategy.
        blocks: The blocks.
        ranks: The number of ranks.

    Returns:
        A valid placement of these blocks.

    Raises:
        ValueError: If the strategy's placement is not one.
    """
    kinds: list[tuple[Method, Solver]] = []
    each = []
    for block in blocks:
        kind = (block.method, block.solver)
        if kind not in kinds:
            kinds.append(kind)
        each.append(replace(block.work, kind=kinds.index(kind)))
    work = tuple(each)
    placement = complete(strategy.place(work, ranks))
    placement.validate()
    if (placement.work, placement.world_size) != (work, ranks):
        raise ValueError(
            f"strategy {placement.strategy!r} placed other work, or for other ranks, than it was "
            f"given"
        )
    return placement


def build(
    model: nn.Module,
    choices: Choices,
    rates: LearningRates,
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
) -> tuple[Registration, Placement]:
    """Register a model, place its blocks and prepare for them, once all ranks have agreed.

    A rank that cannot start says so to the others.

    Args:
        model: The model, unwrapped.
        choices: What the user chose.
        rates: The learning rates, which have to know the blocks' parameters.
        strategy: The strategy.
        backend: The backend.
        background: What is solved in the background, one of the settings.
        refresh: When blocks are solved, another one.
        settings: The others that all ranks must have in common.
        capture: Hooks the modules; see `take_over`.
        gradients: What a step is given, one of the settings.
        stages: The pipeline of which this model is some stages.
        beside: Whether another preconditioner keeps its hooks on the same modules.

    Returns:
        The registration, and the placement of its blocks.

    Raises:
        ValueError: See `register`, `place`, `require_averaged`, `compare_ranks`,
            `soframe.combinations` and `soframe.blocks.sharding.require_together`.
    """
    try:
        registration = register(model, choices)
        rates.check(registration.blocks)
        require_averaged(registration.blocks, gradients)
        placement = place(strategy, registration.blocks, backend.world_size)
        combinations.check_blocks(
            registration.blocks,
            placement,
            background=background.on,
            solve_every=refresh.solve_every.value,
        )
        sharding.require_together(model, registration.blocks, placement, draws=choices.draws)
        stages.require_served(model, registration.blocks)
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        say_failed(backend, error)
        raise
    settings_of_rank = describe_settings(registration.blocks, *settings, background, refresh)
    compare_ranks(backend, placement, settings_of_rank)
    if not beside:
        modules = (helper.module for block in registration.blocks for helper in block.helpers)
        take_over(capture, modules)
    backend.prepare(placement.groups())
    return registration, placement


_hooked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Capture]] = weakref.WeakKeyDictionary()


def take_over(capture: Capture, modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of older preconditioners of these modules, with a warning."""
    reference, modules = weakref.ref(capture), list(modules)
    if any(_hooked.get(module, reference) is not reference for module in modules):
        gc.collect()  # one that only waits for the collector is not replaced
    for module in modules:
        older = _hooked.get(module, reference)()
        _hooked[module] = reference
        if older is None or older is capture or older.closed:
            continue
        if module not in {helper.module for helper in older.names}:
            continue  # it has left the older one's model
        older.close()
        warnings.warn(
            f"soframe: a new preconditioner of the same {type(module).__name__} replaces an older "
            f"one, whose hooks are removed; close() the older one first to be rid of this warning",
            stacklevel=6,
        )


def describe_settings(blocks: Sequence[Block], *settings: object) -> str:
    """Return what all ranks must have in common besides the placement.

    Args:
        blocks: The blocks.
        *settings: Further settings.

    Returns:
        One line each.
    """
    of_blocks = {describe((b.method, b.solver, b.dtype)): None for b in blocks}
    return "\n".join(map(describe, (*settings, *of_blocks)))


def require(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check a setting that is one of a few words.

    Args:
        name: The setting's name.
        value: Its value.
        allowed: The words.

    Raises:
        ValueError: If it is none of them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings that are words or numbers of rows, by their own names."""
    require("scaling", settings["scaling"], ("fisher", "kaisa"))
    require("loss_average", settings["loss_average"], ("local", "global", "sum"))
    if not callable(settings["samples"]):
        require("samples", settings["samples"], ("batch", "positions"))
    require("clip_lr", settings["clip_lr"], ("live", "initial"))
    require("gradients", settings["gradients"], tuple(averaging.GRADIENTS))
    combinations.check_settings(settings)
    check_rows(settings["rows"])


def describe_samples(samples: Samples) -> str:
    """Return what ranks must have in common of the setting ``samples``.

    What a callable returns need not be the same: every rank counts its own.

    Args:
        samples: The setting.
    """
    return f"samples={'a callable' if callable(samples) else repr(samples)}"


def check_home(home: object) -> None:
    """Check that gradients live in a home.

    Args:
        home: The home, or None.

    Raises:
        TypeError: If it is none.
    """
    if home is not None and not isinstance(home, GradientHome):
        raise TypeError(f"home must be a soframe.GradientHome, not {home!r}")


def check_cut(cut: object) -> None:
    """Check what matrices are cut into.

    Args:
        cut: A mapping from patterns to numbers of parts.

    Raises:
        TypeError: If it is none.
        ValueError: If a number is not positive.
    """
    if not isinstance(cut, Mapping):
        raise TypeError(
            f"cut is a mapping from patterns on module names to numbers of parts, such as "
            f"{{'c_attn': 3}}, not {cut!r}"
        )
    for pattern, number in cut.items():
        require_integer(f"cut[{pattern!r}]", number, 1)


def check_count(terms: bool, samples: Samples, scaling: str) -> None:
    """Check that something may be said of a batch.

    Args:
        terms: Whether the number of terms is said.
        samples: What is said of all batches.
        scaling: The scaling convention.

    Raises:
        ValueError: If it contradicts a setting.
    """
    if scaling == "kaisa":
        raise ValueError("count() needs scaling='fisher': with 'kaisa' every call is its own mean")
    if terms and callable(samples):
        raise ValueError(
            "count(terms) and samples= a callable both say what the loss is a mean over; use one"
        )


def require_averaged(blocks: Sequence[Block], gradients: str) -> None:
    """Check that gradients of which ranks have parts are averaged.

    Args:
        blocks: The blocks.
        gradients: What they are said to be.

    Raises:
        ValueError: If they are said to be each rank's own.
    """
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
