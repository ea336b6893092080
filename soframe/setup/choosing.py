"""Choices and checks of settings, before the first collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from soframe.blocks.registration import Choice, averaging_group
from soframe.capture.counting import Samples
from soframe.capture.sampling import check_rows
from soframe.checks.values import require_integer, require_word
from soframe.comm.agreement import say_failed
from soframe.comm.base import Backend, SingleProcess
from soframe.comm.distributed import TorchDistributed
from soframe.comm.stages import ALONE, Stages
from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy
from soframe.estimate import gradients as averaging
from soframe.methods.base import Method
from soframe.registry import KINDS


def choose_stages(pipeline: object) -> Stages:
    """Return the stages of a `Pipeline`; None for a whole model."""
    if pipeline is None:
        return ALONE
    from soframe.parallel.pipeline import Pipeline  # imported by few models

    return Pipeline.of(pipeline)


def choose_backend(
    choice: str | type[Backend] | Backend | None, model: nn.Module, stages: Stages = ALONE
) -> Backend:
    """Return the communication backend.

    None chooses torch.distributed if it is initialised: the ranks over which the model's
    DistributedDataParallel averages gradients, or else all.
    """
    if choice is not None:
        backend: Backend = KINDS["backend"].build(choice, Backend)
        stages.require_backend(backend)
        return backend
    if stages.backend is not None:
        # Without a backend for the copies of a stage, this rank has the only copy.
        stages.require_backend(None)
        return SingleProcess()
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed(averaging_group(model))
    return SingleProcess()


@contextmanager
def starting(backend: Callable[[], Backend], stages: Stages = ALONE) -> Iterator[None]:
    """If this rank raises in here, send the error to the other ranks, which wait in `build`."""
    try:
        # No collective may start in here: the other ranks' next one is in `build`.
        yield
    except Exception as error:  # of any kind: the other ranks wait
        stages.say_failed(error)
        say_failed(backend(), error)
        raise


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
    choices = choice.values() if isinstance(choice, Mapping) else (choice,)
    return [KINDS["method"].build(component, Method) for component in choices]


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings that are words or numbers of rows, by their own names."""
    require_word("scaling", settings["scaling"], ("fisher", "kaisa"))
    require_word("loss_average", settings["loss_average"], ("local", "global", "sum"))
    if not (settings["samples"] is None or callable(settings["samples"])):
        require_word("samples", settings["samples"], ("batch", "positions"))
    require_word("precision", settings["precision"], ("fast", "full"))
    require_word("gradients", settings["gradients"], averaging.GRADIENTS)
    if settings["gradients"] == "local" and settings["grad_scaler"] is not None:
        raise ValueError(
            "gradients='local' does not go with a GradScaler: ranks would skip steps apart"
        )
    if settings["solve_every"] == "demand" and (settings["background"] or settings["stagger"]):
        raise ValueError(
            "solve_every='demand' solves at once: there is no interval over which stagger= spreads "
            "solves, and nothing for background=. Leave them out, or pass a number"
        )
    check_rows(settings["rows"])


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
