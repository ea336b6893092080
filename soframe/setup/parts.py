"""The parts of a curvature, made from its settings and checked before the model is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from soframe.blocks.home import GradientHome, PlainGrad
from soframe.blocks.registration import Choices, unwrap
from soframe.capture.counting import Samples
from soframe.capture.fisher import Fisher
from soframe.capture.loss_scale import LossScale
from soframe.capture.sampling import Sampler
from soframe.checks import arguments
from soframe.comm.base import Backend
from soframe.comm.stages import ALONE, Stages
from soframe.damping.policies import DampingPolicy
from soframe.estimate.refresh import Refresh
from soframe.estimate.solves import Solves
from soframe.kernels.precision import Precision
from soframe.losses.base import Loss
from soframe.methods.scaling import LossAverage, Scaling
from soframe.registry import KINDS
from soframe.schedules import Scheduled, decay_of
from soframe.setup import choosing
from soframe.strategies.base import Strategy


@dataclass(eq=False)
class Parts:
    """The parts of a curvature."""

    model: nn.Module  # unwrapped
    optimizer: Optimizer | None  # that must have the parameters of every block
    backend: Backend
    stages: Stages  # of a pipeline
    home: GradientHome  # where gradients live
    gradients: str  # "averaged" over ranks, or "local"
    strategy: Strategy  # which may settle on another
    damping: DampingPolicy
    decay: Scheduled  # of running factors
    refresh: Refresh  # the steps of statistics and solves
    solves: Solves  # under way
    fisher: Fisher  # with its loss
    sampler: Sampler  # takes some of the rows of a call
    loss_scale: LossScale  # the factor by which the loss is multiplied
    samples: Samples  # the terms that the loss averages over
    scaling: Scaling
    loss_average: LossAverage  # how the loss averages samples
    precision: Precision  # how a GPU multiplies float32
    choices: Choices  # of the first registration
    keeps_hooks: bool  # whether the hooks of another curvature may stay on the model
    common: tuple[object, ...]  # further settings that all ranks must share
    means: bool  # whether factors are means over data, rather than followed in training


def parts_of(
    model: nn.Module,
    settings: Mapping[str, Any],
    backend: Backend,
    stages: Stages = ALONE,
    *,
    keeps_hooks: bool = False,
    common: tuple[object, ...] = (),
    means: bool = False,
) -> Parts:
    """Check the settings of a `soframe.Preconditioner`, and return the parts that they describe."""
    choosing.check_settings(settings)
    layers, cut = settings["layers"], settings["cut"]
    if layers == "all":
        layers = {"": "all"}
    elif layers is None:
        layers = {}
    if cut is None:
        cut = {}
    choosing.check_cut(cut)
    method, solver = settings["method"], settings["solver"]
    optimizer, grad_scaler = settings["optimizer"], settings["grad_scaler"]
    arguments.check(
        model=model,
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        dtype=settings["dtype"],
        state_dtype=settings["state_dtype"],
        skip=settings["skip"],
        mappings={"layers": layers, "method": method, "solver": solver, "cut": cut},
    )
    home = settings["home"]
    if home is None:
        home = PlainGrad(model, optimizer)
    elif not isinstance(home, GradientHome):
        raise TypeError(f"home must be a soframe.GradientHome, not {home!r}")
    damping = choosing.choose_damping(settings["damping"])
    fisher = _fisher(settings["fisher"], settings["loss"])
    stages.require_settings(probed=fisher.probed, scaled=grad_scaler is not None)
    samples: Samples = settings["samples"]
    if not samples and stages.backend is not None:
        samples = "batch"  # a stage of a pipeline sees inputs or outputs of the model, not both
    choices = Choices(
        method=method,
        solver=solver,
        home=home,
        layers=dict(layers),
        skip=tuple(settings["skip"]),
        dtype=settings["dtype"],
        state_dtype=settings["state_dtype"],
        offload=settings["offload"],
        forward_only=fisher.kind == "forward-only",
        damping=damping,
        scaling=settings["scaling"],
        auxiliary=settings["auxiliary"],
        observed=fisher.probed,
        ranks=backend.global_ranks,
        cut=dict(cut),
        of_samples=means,
        staged=stages.backend is not None,
    )
    reads_calls = all(chosen.captures for chosen in choosing.methods(method))
    return Parts(
        model=unwrap(model),
        optimizer=optimizer,
        backend=backend,
        stages=stages,
        home=home,
        gradients=settings["gradients"],
        strategy=KINDS["strategy"].build(settings["strategy"], Strategy),
        damping=damping,
        decay=Scheduled("decay", decay_of(settings["decay"]), high=1.0),
        refresh=Refresh.of(
            settings["statistics_every"],
            settings["solve_every"],
            settings["stagger"],
            reads_calls=reads_calls,
        ),
        solves=Solves(settings["background"], overlap=backend.overlap),
        fisher=fisher,
        sampler=Sampler(settings["rows"], backend.rank),
        loss_scale=LossScale(grad_scaler),
        samples=samples,
        scaling=settings["scaling"],
        loss_average=settings["loss_average"],
        precision=settings["precision"],
        choices=choices,
        keeps_hooks=keeps_hooks,
        common=common,
        means=means,
    )


def _fisher(kind: str | None, loss: object) -> Fisher:
    """Return the Fisher; None is Monte-Carlo's of a loss that is named, else the empirical one."""
    if loss is None:
        return Fisher(kind or "empirical")  # type: ignore[arg-type]  # checked there
    return Fisher(kind or "monte-carlo", KINDS["loss"].build(loss, Loss))  # type: ignore[arg-type]
