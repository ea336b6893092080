"""Building a preconditioner: what is checked and chosen before the first collective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from soframe.blocks import claims, dtensors, stacks
from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.registration import Choices, Registration
from soframe.capture.counting import Samples
from soframe.capture.sampling import check_rows
from soframe.checks.numbers import require_integer
from soframe.comm.agreement import compare_ranks, describe_error, say_failed
from soframe.comm.base import Backend
from soframe.comm.board import Board
from soframe.comm.distributed import TorchDistributed
from soframe.comm.single import SingleProcess
from soframe.comm.stages import Stages
from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy
from soframe.gradients import averaging
from soframe.gradients.rates import LearningRates
from soframe.registry import KINDS, describe
from soframe.settings import Cadence, Clips, Curvature
from soframe.setup import pipelines
from soframe.setup.pipelines import Pipeline
from soframe.solving.background import Background, require_able
from soframe.solving.refresh import Refresh, require_followable, require_served
from soframe.statistics.running import require_eager
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
) -> tuple[Backend, Pipeline]:
    """Return the communication backend, and the pipeline whose stages there are.

    Args:
        choice: A name, class or instance; None for torch.distributed where it is initialised, but
            for one process where the ranks have stages of a pipeline instead.
        pipeline: See `soframe.setup.pipelines.Pipeline`.

    Returns:
        Both.
    """
    notes = Board.of_world()
    if notes is not None:
        notes.begin()
    try:
        of_stages = Pipeline(pipeline)
        backend = _backend_of(choice, of_stages.backend)
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        if notes is not None:
            notes.say_start(describe_error(error), failed=True)
        raise
    alone = (backend.world_size == 1 or backend.on_paper) and of_stages.backend is None
    if notes is not None and alone:
        notes.say_start(describe(choice), failed=False)
    return backend, of_stages


def _backend_of(choice: str | type[Backend] | Backend | None, pipe: Backend | None) -> Backend:
    if choice is None and pipe is not None:
        pipelines.require_alone(pipe)
        return SingleProcess()
    if choice is None:
        distributed = dist.is_available() and dist.is_initialized()
        return TorchDistributed() if distributed else SingleProcess()
    backend = KINDS["backend"].build(choice, Backend)
    assert isinstance(backend, Backend)
    if pipe is not None:
        pipelines.require_apart(backend, pipe)
    return backend


def meet_stages(
    model: nn.Module, pipeline: Pipeline, backend: Backend, settings: Sequence[object]
) -> nn.Module | None:
    """Let the stages of a model meet, before any of them is registered.

    Args:
        model: The modules of this rank's stages.
        pipeline: The pipeline.
        backend: The backend of the copies of a stage.
        settings: What all stages must have in common.

    Returns:
        The module that has the head of the whole model; None where another stage has it.

    Raises:
        ValueError: If settings differ, or a stage cannot start.
    """
    copies = f"copies of each stage: {backend.world_size}"
    try:
        pipeline.stages.compare("\n".join(map(describe, (*settings, copies))))
    except Exception as error:  # whatever it is: the copies wait, and must be told
        say_failed(backend, error)
        raise
    return pipeline.find_head(model)


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
    dtensors.reshard(dtensors.units(model))
    stacks.require_plans(model, choices.ranks)
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
        stacks.require_materialised((f"{block.name}.{name}", p) for name, p in named)
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
    work = tuple(block.work for block in blocks)
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
    background: Background,
    refresh: Refresh,
    settings: Sequence[object],
    *,
    owner: object,
    gradients: str,
    pipeline: Pipeline,
    first: bool = True,
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
        owner: Whose the modules are to be; they may be nobody else's.
        gradients: What a step is given, one of the settings.
        pipeline: The pipeline of which this model is some stages.
        first: Whether the ranks first meet here; otherwise they come from a step.

    Returns:
        The registration, and the placement of its blocks.

    Raises:
        ValueError: See `register`, `place`, `require_own_gradients`, `require_averaged`,
            `require_able`, `require_served`, `require_followable`, `require_eager`,
            `require_together`, `compare_ranks` and `soframe.blocks.claims.require_free`.
    """
    try:
        registration = register(model, choices)
        rates.check(registration.blocks)
        require_own_gradients(registration.blocks)
        require_averaged(registration.blocks, gradients)
        require_able(registration.blocks, background)
        require_served(registration.blocks, refresh.solve_every)
        placement = place(strategy, registration.blocks, backend.world_size)
        require_followable(registration.blocks, placement)
        require_eager(registration.blocks, placement)
        require_together(model, registration.blocks, placement, draws=choices.draws)
        modules = {h.module: block.name for block in registration.blocks for h in block.helpers}
        claims.require_free(owner, modules)
        pipeline.require_served(model, registration.blocks)
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        say_failed(backend, error, first=first)
        raise
    settings_of_rank = describe_settings(registration.blocks, *settings, background, refresh)
    compare_ranks(backend, placement, settings_of_rank, first=first)
    claims.claim(owner, modules)
    backend.prepare(placement.groups())
    return registration, placement


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


def check_settings(
    cadence: Cadence, clips: Clips, curvature: Curvature, *, gradients: str, scaled: bool
) -> None:
    """Check settings that are no components.

    Args:
        cadence: When work is done.
        clips: How long a step may be.
        curvature: What statistics are of.
        gradients: What a step is given.
        scaled: Whether a ``GradScaler`` is in use.
    """
    require("scaling", curvature.scaling, ("fisher", "kaisa"))
    require("loss_average", curvature.loss_average, ("local", "global", "sum"))
    if not callable(curvature.samples):
        require("samples", curvature.samples, ("batch", "positions"))
    require("clip_lr", clips.lr, ("live", "initial"))
    check_gradients(gradients, scaled=scaled)
    check_turns(cadence.stagger, curvature.fisher)
    check_rows(curvature.rows)


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
        hint = "; pass an instance of the class" if isinstance(home, type) else ""
        raise TypeError(f"home must be a soframe.GradientHome, not {home!r}{hint}")


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


def check_turns(stagger: object, fisher: str) -> None:
    """Check that layers may take turns with their statistics.

    Args:
        stagger: What is spread over the steps of an interval.
        fisher: Whose output gradients make the statistics.

    Raises:
        ValueError: If every turn would take a backward pass of its own.
    """
    if stagger is True and fisher in ("monte-carlo", "type-2"):
        raise ValueError(
            f"stagger=True spreads statistics over all steps, and fisher={fisher!r} would send "
            f"vectors backward at each of them; pass stagger='solves'"
        )


def require_own_gradients(blocks: Sequence[Block]) -> None:
    """Check that gradients are those of the backward passes which are seen.

    Opacus keeps the gradient of each sample at the parameter, and makes a private one of these
    within its optimizer's step.

    Args:
        blocks: The blocks.

    Raises:
        ValueError: If it does so with a parameter whose method reads the layer's calls.
    """
    for block in blocks:
        if block.method.captures and any(
            hasattr(parameter, "grad_sample") for parameter in block.parameters.values()
        ):
            raise ValueError(
                f"{block.name} has a gradient for each sample, by Opacus, which makes a private "
                f"one of these within its optimizer's step(), over what is preconditioned; and "
                f"statistics of the layer's calls are not private. Give make_private() a "
                f"soframe.Optimizer with a method that reads gradients alone, such as 'soap', "
                f"'muon' or 'shampoo'"
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
                f"each rank's own: the stack averages them (and those of a tensor-parallel plan "
                f"are of the same batch), so pass gradients='averaged'"
            )


def require_together(
    model: nn.Module, blocks: Sequence[Block], placement: Placement, *, draws: bool
) -> None:
    """Check that all ranks of a tensor-parallel plan make the same statistics of the same calls.

    Args:
        model: The model.
        blocks: Its blocks.
        placement: Their placement.
        draws: Whether the Fisher draws targets.

    Raises:
        ValueError: If some ranks would not take part where the rows of a call are brought together,
            or if each would draw targets of its own.
    """
    planned = {id(one.parameter): one.name for one in dtensors.planned(model)}
    if planned and draws:
        raise ValueError(
            f"fisher='monte-carlo' draws other targets on every rank, and the ranks of the "
            f"tensor-parallel plan of {next(iter(planned.values()))} have one batch together: pass "
            f"fisher='type-2', or 'empirical'"
        )
    for block, place in zip(blocks, placement.blocks, strict=True):
        if not any(id(p) in planned for p in block.parameters.values()):
            continue
        captured = [index for index, factor in enumerate(block.factors) if factor.captured]
        ranks = range(placement.world_size)
        if not all(place.contributes(rank, index) for rank in ranks for index in captured):
            raise ValueError(
                f"{block.name} belongs to a tensor-parallel plan, all ranks of which bring the "
                f"rows of a call together, and under strategy {placement.strategy!r} some ranks "
                f"take no statistics of it: pass strategy='comm-opt', "
                f"'mem-opt' or Sharded(group=None)"
            )


def check_gradients(gradients: str, *, scaled: bool) -> None:
    """Check what is said of the gradients that a step is given.

    Args:
        gradients: What they are.
        scaled: Whether a ``GradScaler`` is in use.

    Raises:
        ValueError: If it is nothing that is known, or does not go with a ``GradScaler``.
    """
    require("gradients", gradients, tuple(averaging.GRADIENTS))
    if gradients == "local" and scaled:
        raise ValueError(
            "gradients='local' does not go with a GradScaler: ranks would skip steps apart"
        )
