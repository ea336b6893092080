"""Settings that belong together, as one argument each.

A `soframe.Preconditioner` takes every setting by a name of its own, and these groups besides::

    soframe.Preconditioner(model, cadence=soframe.Cadence(solves=100), clips=soframe.Clips(kl=None))

A setting is given once: in its group, or by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

from soframe.capture.counting import Samples
from soframe.capture.sampling import Rows
from soframe.losses.base import Loss
from soframe.methods.scaling import LossAverage, Scaling
from soframe.schedules import Interval, Schedule
from soframe.step.rates import ClipLR


@dataclass(frozen=True)
class Cadence:
    """When statistics are taken and factors are solved.

    Attributes:
        statistics: Interval of statistics steps (``statistics_every``).
        solves: Interval of solves (``solve_every``).
        stagger: Whether the solves of an interval are spread over its steps.
        background: After how many steps solves are put to use.
    """

    statistics: Interval = 10
    solves: Interval = 10
    stagger: bool = False
    background: int | Literal["ready"] = 0

    names: ClassVar[Mapping[str, str]] = {
        "statistics": "statistics_every",
        "solves": "solve_every",
        "stagger": "stagger",
        "background": "background",
    }


@dataclass(frozen=True)
class Clips:
    """How long a step may be.

    Attributes:
        kl: Bound on about twice its KL divergence (``kl_clip``).
        norm: Bound on its Euclidean length (``norm_clip``).
        lr: Which learning rates count (``clip_lr``).
    """

    kl: Schedule | None = 1e-4
    norm: Schedule | None = None
    lr: ClipLR = "live"

    names: ClassVar[Mapping[str, str]] = {"kl": "kl_clip", "norm": "norm_clip", "lr": "clip_lr"}


@dataclass(frozen=True)
class Curvature:
    """What statistics are of, and how they are averaged.

    Attributes:
        fisher: Whose output gradients make them.
        loss: What the Fisher is of, where it is not empirical.
        loss_average: What the loss is a mean of.
        samples: What it averages over.
        rows: The fraction of the rows of every call that is taken, or their number.
        decay: What running factors keep of their past.
        scaling: The convention of scale.
        dtype: The dtype of factors and second-order data.
    """

    fisher: str = "empirical"
    loss: str | type[Loss] | Loss | None = None
    loss_average: LossAverage = "local"
    samples: Samples = "batch"
    rows: Rows = 1.0
    decay: Schedule = 0.95
    scaling: Scaling = "fisher"
    dtype: torch.dtype | None = None

    names: ClassVar[Mapping[str, str]] = {
        "fisher": "fisher",
        "loss": "loss",
        "loss_average": "loss_average",
        "samples": "samples",
        "rows": "rows",
        "decay": "decay",
        "scaling": "scaling",
        "dtype": "dtype",
    }


Group = TypeVar("Group", Cadence, Clips, Curvature)


def merged(name: str, kind: type[Group], group: Group | None, given: Mapping[str, Any]) -> Group:
    """Return settings that belong together, from their group or from names of their own.

    Args:
        name: The name of the group.
        kind: Its class.
        group: What the user gave as the group; None for nothing.
        given: What the user gave by the settings' own names, or their defaults.

    Returns:
        All of them.

    Raises:
        TypeError: If the group is none, or a setting is given twice.
    """
    of_field = {field: given[keyword] for field, keyword in kind.names.items()}
    if group is None:
        return kind(**of_field)
    if not isinstance(group, kind):
        raise TypeError(f"{name} must be a soframe.{kind.__name__}, not {group!r}")
    default = kind()
    for field, value in of_field.items():
        usual = getattr(default, field)
        if value is not usual and value != usual:
            raise TypeError(
                f"{kind.names[field]}= is part of {name}=: give {kind.__name__}({field}=...), or "
                f"{kind.names[field]}= and no {name}="
            )
    return group
