"""Settings that every recipe has, and the optimizers that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import soframe
from experiments.optimizers import factor


@dataclass(frozen=True)
class Common:
    """Settings of every recipe."""

    rates: ClassVar[Mapping[str, float]] = {}
    """The learning rate of each optimizer that the recipe supports."""

    data: Path = Path("data")
    """Folder or file of the data."""
    output: Path = Path("runs/recipe")
    """Folder of checkpoints, metrics.jsonl, run.json and TensorBoard's files."""
    epochs: int = 1
    """Passes through the training set."""
    steps: int | None = None
    """Optimizer steps of the run, instead of epochs."""
    batch_size: int = 128
    """Samples of a step, over all ranks and micro-batches."""
    accumulate: int = 1
    """Micro-batches of a step on each rank."""
    optimizer: Literal["soframe", "sgd", "adamw"] = "soframe"
    """soframe, or its first-order counterpart."""
    method: str = "kfac"
    """Method of soframe; see `soframe components`."""
    base: Literal["sgd", "adamw", "lamb"] | None = "sgd"
    """Optimizer behind a soframe.Preconditioner; None for a soframe.Optimizer."""
    strategy: str = "comm-opt"
    """Distribution strategy of soframe on several ranks."""
    lr: float | None = None
    """Learning rate at its peak; None for the recipe's rate of the optimizer."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether SGD's momentum is Nesterov's."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    weight_decay: float = 0.0
    """Weight decay; AdamW and soframe.Optimizer apply it to matrices alone."""
    clip: float | None = None
    """Bound on the norm of gradients, for first-order optimizers, and of LAMB's behind soframe;
    None for no clip."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "linear"
    """Decay of the rate after the warm-up: to zero on a line, half a cosine or the square root of
    a line, or to a tenth at each milestone."""
    milestones: tuple[int, ...] = ()
    """Epochs at which the schedule `milestones` divides the rate by ten."""
    warmup: float = 0.0
    """Fraction of the run in which the rate grows from zero on a line."""
    damping: float | None = None
    """Damping of a soframe.Preconditioner; None for soframe's default."""
    kl_clip: float | None = None
    """Bound of its KL clip, of a step at the peak of the rate; None for soframe's default."""
    decay: float | None = None
    """Decay of its running factors; None for soframe's default."""
    rows: float = 1.0
    """Part of the rows of each call that enter its statistics."""
    solver: str | None = None
    """Solver of soframe, such as `eigen`; None for its default."""
    statistics_every: int | None = None
    """Steps between statistics; None for soframe's default."""
    solve_every: int | None = None
    """Steps between solves; None for soframe's default."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto` for CUDA where it is available."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Floating type of autocast; fp16 scales the loss."""
    tf32: bool = False
    """Multiply float32 matrices in TensorFloat-32 on GPUs."""
    channels_last: bool = False
    """Keep images, and the kernels of convolutions, with the channels last."""
    processes: int = 1
    """Local processes over Gloo on CPUs; for GPUs use torchrun."""
    workers: int = 0
    """Processes of the data loader, for each rank."""
    init: Path | None = None
    """Output folder of another run: the model begins with the weights of its last checkpoint."""
    resume: bool = False
    """Go on from the last checkpoint of `output`, if it has one."""
    save_every: int | None = None
    """Steps between checkpoints; None for an epoch."""
    evaluate_every: int | None = None
    """Steps between evaluations; None for an epoch."""
    tensorboard: bool = True
    """Write TensorBoard's files, if it is installed."""

    #: Settings that may differ between a run and its continuation.
    FREE: ClassVar = frozenset(
        {"data", "output", "device", "processes", "workers", "init", "resume", "save_every"}
        | {"evaluate_every", "tensorboard", "strategy", "accumulate"}
    )

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("steps", "save_every", "evaluate_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a fraction of the run, not {self.warmup}")
        if self.workers < 0:
            raise ValueError(f"workers must not be negative, but is {self.workers}")

    @property
    def rate(self) -> float:
        """The learning rate of the run.

        Raises:
            ValueError: If it is not given, and the recipe has none for the optimizer.
        """
        rate = self.rates.get(self.optimizer) if self.lr is None else self.lr
        if rate is None:
            known = ", ".join(self.rates)
            raise ValueError(f"no rate for {self.optimizer} here (only {known}): pass --lr")
        return rate

    def factor(self, step: int, steps: int, epoch: float) -> float:
        """Return the learning rate of a step, over that of the peak.

        Args:
            step: Steps taken.
            steps: Steps of the whole run.
            epoch: Epochs taken.
        """
        if self.schedule == "milestones" and step >= self.warmup * steps:
            return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        return factor(self.schedule, step, steps, self.warmup)


@dataclass(frozen=True)
class OnCanvases(Common):
    """Settings of recipes on canvases of digits (`experiments.canvases`)."""

    steps: int | None = 160
    """Optimizer steps."""
    warmup: float = 0.1
    """Fraction of the run in which the rate grows."""
    base: Literal["sgd", "adamw", "lamb"] | None = "adamw"
    """Optimizer behind a soframe.Preconditioner."""
    damping: float | None = 3e-3
    """Damping (`soframe.recommend`, for nets with batch norm)."""
    kl_clip: float | None = 3.6e-4
    """Bound of the KL clip: soframe's 0.4 (`soframe.recommend`) at a rate of 0.03."""
    decay: float | None = 0.95
    """Decay of the running factors."""
    statistics_every: int | None = 10
    """Steps between statistics."""
    solve_every: int | None = 50
    """Steps between solves."""
    evaluate_every: int | None = 50
    """Steps between evaluations."""
    save_every: int | None = 1000
    """Steps between checkpoints."""
    channels_last: bool = True
    """Keep images, and the kernels of convolutions, with the channels last."""
    canvases: int = 3000
    """Training canvases."""
    test_canvases: int = 400
    """Canvases of held-out digits."""


PASSED = ("method", "solver", "strategy", "statistics_every", "solve_every")
"""Settings that soframe takes by the same names."""

Built = tuple[torch.optim.Optimizer, soframe.Preconditioner | None]
"""An optimizer, and the preconditioner in front of it, if it has one."""


def optimizer(model: nn.Module, settings: Common, **more: Any) -> Built:
    """Return the optimizer of the settings, and the preconditioner in front of it or None.

    Args:
        model: The model.
        settings: The settings.
        **more: Further settings of soframe, such as ``grad_scaler`` or ``skip``.

    Raises:
        ValueError: If soframe refuses a setting.
    """
    by_soframe = settings.optimizer == "soframe"
    more = {**{name: getattr(settings, name) for name in PASSED}, **more}
    if by_soframe and settings.base is None:
        options = {"lr": settings.rate, "weight_decay": settings.weight_decay}
        return soframe.Optimizer(model, **{**options, **more}), None
    name = settings.base if by_soframe else settings.optimizer
    assert name is not None
    base = first_order(model, settings, name)
    if not by_soframe:
        return base, None
    chosen: dict[str, Any] = {"optimizer": base}
    for setting in ("damping", "decay"):
        if (value := getattr(settings, setting)) is not None:
            chosen[setting] = value
    if settings.rows != 1:
        chosen["statistics"] = soframe.Statistics(rows=settings.rows)
    if settings.kl_clip is not None:
        chosen["kl_clip"] = settings.kl_clip / settings.rate**2  # soframe bounds updates
    return base, soframe.Preconditioner(model, **{**chosen, **more})


def _groups(trained: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return param groups of matrices, which decay, and of vectors, which do not."""
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = []
    for parameters, decay in ((matrices, weight_decay), (vectors, 0.0)):
        if parameters:
            groups.append({"params": parameters, "weight_decay": decay})
    return groups


def first_order(model: nn.Module, settings: Common, name: str) -> torch.optim.Optimizer:
    """Return SGD, AdamW or LAMB with the settings' rate.

    Raises:
        MissingLibraryError: If LAMB is chosen, and pytorch_optimizer is not installed.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(
            trained,
            lr=settings.rate,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
    groups = _groups(trained, settings.weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.rate, betas=settings.betas)
    from experiments.libraries import require

    clip = {} if settings.clip is None else {"pre_norm": True, "max_grad_norm": settings.clip}
    lamb: torch.optim.Optimizer = require("pytorch_optimizer").Lamb(
        groups, lr=settings.rate, betas=settings.betas, **clip
    )
    return lamb
