"""Settings of a `soframe.Preconditioner` that few runs change, in three groups.

Every setting has one place, its group or the constructor::

    soframe.Preconditioner(model, statistics=soframe.Statistics(fisher="type-2", loss="mse"))
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from soframe.blocks.home import GradientHome
from soframe.capture.counting import Samples
from soframe.capture.sampling import Rows
from soframe.comm.base import Backend
from soframe.kernels.precision import Precision
from soframe.losses.base import Loss
from soframe.methods.scaling import LossAverage, Scaling
from soframe.schedules import Falling, Schedule


@dataclass(frozen=True)
class Statistics:
    """The statistics: the choice of Fisher, rows and scale.

    Attributes:
        fisher: The source of the output gradients in the statistics: ``"empirical"`` (the loss's
            own), ``"monte-carlo"``, ``"type-2"`` or ``"forward-only"`` (none: the identity stands
            for the factor of the outputs). Monte-Carlo and type-2 need `Preconditioner.observe`.
            None is ``"empirical"``, or ``"monte-carlo"`` where ``loss`` is given, and the choice
            of a `soframe.TrustRegion`.
        loss: The loss, for its own Fisher: a name, class or instance.
        loss_average: How the loss averages samples: ``"local"`` (each backward pass over its own
            samples), ``"global"`` (over all samples of all passes and ranks) or ``"sum"`` (a sum).
            See `soframe.methods.scaling`.
        samples: The terms that the loss averages over: ``"batch"`` (the samples), ``"positions"``
            (every token has its own term), or a callable that returns the number of terms of the
            backward pass under way. None decides by the model's inputs and outputs: tokens where
            integers ``[N, T]`` become outputs ``[N, T, V]`` and V is the size of an embedding
            (but not in a pipeline), else samples; an uncertain number gives one warning.
            `Preconditioner.observe` reads it from the outputs; if the loss ignores terms, use
            `Preconditioner.count`.
        rows: The fraction (float) or the number (int) of the rows of every call that enter the
            statistics, drawn at random and scaled. See `soframe.capture.sampling` for the error.
        scaling: ``"fisher"``, or ``"kaisa"`` for the constants of kfac-pytorch.
        dtype: The dtype of factors and second-order data; None for the parameters', at least
            float32. With bfloat16 running factors take half the memory, rounded up or down in
            turns; statistics, solves and second-order data are in float32. Rounded factors have
            negative eigenvalues, so that ``"eigen"``, which clamps them, is then the default.
        state_dtype: The dtype in which methods' states, such as momenta, are kept between steps:
            bfloat16 halves their memory. Updates are computed in the factors' dtype, and states
            are rounded up or down in turns, so that slow averages do not stall. None for the
            factors'.
        offload: Whether running factors are kept in the host's memory between the steps that
            average or solve them, for blocks on a GPU: each of these steps moves them there and
            back. For rare statistics; plans and `memory_usage` count them as on the GPU.
        cut: The parts into which fused matrices are split along their outputs, by patterns on
            module names: a number of equal parts, ``{"attn.c_attn": 3}`` for queries, keys and
            values, or their sizes, ``{"qkv_proj": [4096, 1024, 1024]}`` for grouped queries;
            ``3 * heads`` for each head by itself. For methods that read gradients alone;
            vectors stay whole. Methods that orthogonalise split the fused projections that are
            known (`soframe.blocks.fused`), unless a pattern matches: 1 leaves them whole.
        precision: How NVIDIA's GPUs multiply float32 in statistics and updates, whatever torch's
            setting: ``"fast"`` in TF32, ``"full"`` in float32. Solves are always in float32.
    """

    fisher: str | None = None
    loss: str | type[Loss] | Loss | None = None
    loss_average: LossAverage = "local"
    samples: Samples = None
    rows: Rows = 1.0
    scaling: Scaling = "fisher"
    dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    offload: bool = False
    cut: Mapping[str, int | Sequence[int]] | None = None
    precision: Precision = "fast"


@dataclass(frozen=True)
class Distribution:
    """The ranks: how they communicate, where gradients live, and how solves are spread over steps.

    Attributes:
        backend: The communication backend: a name, class or instance; None for torch.distributed if
            it is initialised, else one process. Its ranks are then the ones over which the model's
            DistributedDataParallel averages gradients, or all.
        gradients: The contents of ``.grad`` before a step: ``"averaged"`` over ranks, as DDP does,
            or ``"local"``, this rank's own, which the step averages
            (`soframe.comm.leave_gradients`).
        home: Where gradients live, for frameworks that keep them elsewhere than in ``.grad``; None
            for ``.grad``. The same on every rank.
        pipeline: The schedule of ``torch.distributed.pipelining`` that runs the model, which then
            has the modules of this rank's stage or stages alone; or, for pipelines of another kind,
            the process group or the dimension of a `DeviceMesh` over which stages are spread.
            ``backend`` then connects the copies of a stage.
        stagger: Whether the solves of an interval are spread over its steps, balanced by cost.
    """

    backend: str | type[Backend] | Backend | None = None
    gradients: Literal["averaged", "local"] = "averaged"
    home: GradientHome | None = None
    pipeline: object = None
    stagger: bool = False


@dataclass(frozen=True)
class Clips:
    """The clips other than ``kl_clip``.

    Attributes:
        norm_clip: Bound on the length of the updates together, where that of a layer is the root of
            the mean square over its outputs; None turns it off. Without ``clips=`` it is 0.2 if
            ``kl_clip`` has its default, and off if not.
        further: Bounds of other clips by their registered names, see `soframe.Clip`.
    """

    norm_clip: Schedule | None = None
    further: Mapping[str, Schedule] = field(default_factory=dict)


DAMPING = Falling(0.05, 0.01, factor=0.99)
"""The default of ``damping``."""

KL_CLIP = 0.2
"""The default of ``kl_clip``."""

USUAL_CLIPS = Clips(norm_clip=0.2)
"""The clips beside the default of ``kl_clip``."""

Group = Statistics | Distribution | Clips
GROUPS: dict[str, type[Group]] = {
    "statistics": Statistics,
    "distribution": Distribution,
    "clips": Clips,
}
"""The groups, by the names of their arguments."""


def group_of(name: str, settings: Mapping[str, Any]) -> Any:
    """Return a group of the arguments of a constructor, or its defaults."""
    kind, group = GROUPS[name], settings.get(name)
    if group is None:
        return kind()
    if not isinstance(group, kind):
        raise TypeError(f"{name} must be a soframe.{kind.__name__}, not {group!r}")
    return group


def require_known(owner: str, settings: Iterable[str], known: Collection[str]) -> None:
    """Raise a TypeError if a setting does not exist, with its group or the nearest name."""
    for name in settings:
        if name in known:
            continue
        hint = "."
        for nearest in difflib.get_close_matches(name, known, 1):
            hint = f"; did you mean {nearest!r}?"
        for argument, kind in GROUPS.items():
            if name in inspect.signature(kind).parameters:
                hint = f": pass {argument}=soframe.{kind.__name__}({name}=...)."
        raise TypeError(
            f"{owner} has no setting {name!r}{hint} What a method takes is given to the method: "
            f"method=soframe.methods.SOAP(betas=(0.9, 0.95)), for example. The settings are "
            f"{', '.join(sorted(known))}"
        )


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their own names, with the groups replaced by their fields."""
    alone = {name: value for name, value in settings.items() if name not in GROUPS}
    for name in GROUPS:
        alone |= vars(group_of(name, settings))
    return alone


def defaults(constructor: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a constructor with these groups, by the settings' own names."""
    parameters = inspect.signature(constructor).parameters.values()
    return flat({p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD})


def grouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a constructor from settings by their own names, as in a command line."""
    arguments = dict(settings)
    for name, kind in GROUPS.items():
        group: dict[str, Any] = {}
        for entry in dataclasses.fields(kind):
            if entry.name in arguments:
                group[entry.name] = arguments.pop(entry.name)
        # A group that is given whole stays as it is.
        if not group:
            continue
        if settings.get(name) is not None:
            raise TypeError(f"{', '.join(sorted(group))} stands beside {name}=, and is part of it")
        arguments[name] = kind(**group)
    return arguments
