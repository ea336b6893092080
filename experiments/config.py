"""Settings of one training run, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import soframe

ScheduleName = Literal["constant", "cosine", "linear"]
ClockName = Literal["wall", "cpu"]

#: Run without tuning: their learning rate multiplies the lengths that they find.
TRUST_REGIONS = ("trust-region", "stochastic-trust-region")

#: SGD behind `soframe.Preconditioner` with the method of that name.
PRECONDITIONED = ("kfac", "ekfac")

#: Optimizers of pytorch_optimizer that find their learning rate, or need no schedule.
UNTUNED_PEERS = ("prodigy", "dadapt-adam", "schedule-free")
PEERS = ("soap", "muon", "shampoo", "kfac-pytorch", *UNTUNED_PEERS)

LABELS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "kfac": "K-FAC",
    "ekfac": "EKFAC",
    "trust-region": "K-FAC, trust region",
    "stochastic-trust-region": "Stochastic trust region",
    "soap": "SOAP",
    "muon": "Muon",
    "shampoo": "Shampoo",
    "kfac-pytorch": "kfac-pytorch",
    "oracle": "exact Gauss-Newton",
    "prodigy": "Prodigy",
    "dadapt-adam": "D-Adaptation",
    "schedule-free": "schedule-free AdamW",
}
OPTIMIZERS = tuple(LABELS)

OWN = "soframe:"
"""Prefix of the name of a method, as in ``"soframe:soap-muon"``."""
AND = "+"
"""Separator of the stages of a chain, as in ``"soframe:kfac+momentum+graft"``."""


def method_of(optimizer: str) -> str | None:
    """Return the method of `soframe.Optimizer`, or None for an optimizer of another kind.

    Raises:
        ValueError: If no optimizer has this name.
    """
    if optimizer in OPTIMIZERS:
        return None
    methods = sorted(soframe.available("method"))
    stages = optimizer.removeprefix(OWN)
    if optimizer.startswith(OWN) and all(stage in methods for stage in stages.split(AND)):
        return stages
    hint = f"; did you mean {OWN}{optimizer}?" if optimizer in methods else ""
    raise ValueError(
        f"no optimizer {optimizer!r}; there are: {', '.join(OPTIMIZERS)}; and {OWN} with a method, "
        f"or several as stages with {AND} between them: {', '.join(methods)}{hint}"
    )


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        workload: The name of a workload.
        optimizer: "sgd" (Nesterov momentum); "adamw"; "kfac" or "ekfac", the same SGD
            behind a `soframe.Preconditioner`; "trust-region", `soframe.TrustRegion`;
            "stochastic-trust-region", `soframe.StochasticTrustRegion`; "soframe:" and the name of a
            method, `soframe.Optimizer`; "oracle", `soframe.testing.Oracle`; or a peer: "muon",
            one of `PEERS` from the package pytorch_optimizer, or "kfac-pytorch", the SGD of "kfac"
            behind the package kfac.
        lr: The learning rate.
        momentum: Momentum of "sgd", "kfac", "ekfac", "kfac-pytorch", "oracle" and "muon".
        betas: Betas of "adamw", "soap" and "shampoo".
        weight_decay: Weight decay, for all optimizers.
        schedule: The learning rate is constant, half a cosine to zero, or a line to zero.
        schedule_steps: Length of the schedule in steps; the budget in steps if None.
        schedule_seconds: Length of the schedule in seconds of training, instead.
        warmup: Fraction of the schedule in which the learning rate grows from zero on a line.
        strategy: Strategy of the preconditioner, for optimizers with one.
        preconditioner: Further arguments of `soframe.Preconditioner`, for "kfac" and "ekfac".
        options: Further arguments of a trust region, of `soframe.Optimizer`, or of a peer.
        method: Arguments of the method; for a chain, the arguments of each stage by its name.
        modules: Pattern of module names, for `soframe.Optimizer` and "soap": only these are theirs.
        targets: Losses to reach, descending; the workload's if None.
        seconds: Training stops at the first evaluation after this many seconds of training.
        steps: Training stops after this many steps.
        stop_at_target: Whether training also stops once the lowest target is reached.
        batch_size: Examples per step over all processes; the workload's if None.
        evaluate_every: Steps between evaluations; the workload's if None.
        evaluate_seconds: Seconds of training between evaluations, instead; of one process.
        seed: Seed of initial weights, order of the examples and split of the data.
        dtype: "float32" or "float64".
        threads: Torch threads per process.
        clock: "wall", or "cpu" for the processor time of rank 0, which other work on the machine
            stretches less; it leaves out the time spent waiting for other processes.
    """

    workload: str
    optimizer: str
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: ScheduleName = "constant"
    schedule_steps: int | None = None
    schedule_seconds: float | None = None
    warmup: float = 0.0
    strategy: str = "comm-opt"
    preconditioner: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)
    modules: str | None = None
    targets: tuple[float, ...] | None = None
    seconds: float | None = None
    steps: int | None = None
    stop_at_target: bool = True
    batch_size: int | None = None
    evaluate_every: int | None = None
    evaluate_seconds: float | None = None
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    threads: int = 1
    clock: ClockName = "wall"

    def __post_init__(self) -> None:
        self._require_known()
        if self.seconds is None and self.steps is None:
            raise ValueError("a run needs a budget: seconds, steps or both")
        lengths = (self.schedule_steps, self.schedule_seconds, self.steps)
        if (self.schedule != "constant" or self.warmup) and not any(lengths):
            raise ValueError(
                f"a {self.schedule} schedule needs its length: schedule_steps or steps"
            )
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a fraction of the schedule, not {self.warmup}")
        for name in ("lr", "seconds", "steps", "batch_size", "evaluate_every", "schedule_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN included
                raise ValueError(f"{name} must be positive, not {value}")
        self._require_taken()

    def _require_known(self) -> None:
        """Raise a ValueError if a name is not among those that there are."""
        for name, known in (
            ("schedule", get_args(ScheduleName)),
            ("clock", get_args(ClockName)),
            ("strategy", sorted(soframe.available("strategy"))),
        ):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"no {name} {value!r}; there are: {', '.join(known)}")

    def _require_taken(self) -> None:
        """Raise a ValueError if an argument is given that the optimizer does not take."""
        by_soframe = method_of(self.optimizer) is not None
        trust = self.optimizer in TRUST_REGIONS
        for name, taken in (
            ("strategy", by_soframe or self.optimizer in (*PRECONDITIONED, "trust-region")),
            ("preconditioner", self.optimizer in PRECONDITIONED),
            ("options", by_soframe or trust or self.optimizer in (*PEERS, "oracle")),
            ("method", by_soframe),
            ("modules", by_soframe or self.optimizer == "soap"),
        ):
            value = getattr(self, name)
            if value not in (None, {}, "comm-opt") and not taken:
                raise ValueError(f"{self.optimizer} takes no {name}: leave out {value!r}")

    @property
    def label(self) -> str:
        """The optimizer's name in tables and plots."""
        name = method_of(self.optimizer) or LABELS[self.optimizer]
        shown = self.optimizer in PRECONDITIONED or self.strategy != "comm-opt"
        return f"{name}, {self.strategy}" if shown else name

    def but(self, **changes: Any) -> RunConfig:
        """Return the same run with some fields changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RunConfig:
        """Return the inverse of `as_dict`; JSON's lists may stand for tuples."""
        values = dict(fields)
        for name in ("betas", "targets"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)
