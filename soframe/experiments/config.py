"""Everything that decides one training run, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import soframe

OptimizerName = str
ScheduleName = Literal["constant", "cosine", "linear"]
ClockName = Literal["wall", "cpu"]

TRUST_REGIONS: tuple[OptimizerName, ...] = ("trust-region", "stochastic-trust-region")
"""Need no learning rate: theirs multiplies the lengths that they find."""

OPTIMIZERS: tuple[OptimizerName, ...] = (
    *("sgd", "adamw", "kfac"),
    *TRUST_REGIONS,
    *("soap", "muon", "shampoo"),
)

OWN = "soframe:"
"""What stands before the name of a method, as in ``"soframe:soap-muon"``."""
AND = "+"
"""What stands between the stages of a chain, as in ``"soframe:kfac+momentum+graft"``."""


def method_of(optimizer: OptimizerName) -> str | None:
    """Return the method that `soframe.Optimizer` is to use.

    Args:
        optimizer: The name of an optimizer.

    Returns:
        The name of the method, or those of the stages of a chain with `AND` between them; None for
        an optimizer of another kind.

    Raises:
        ValueError: If there is no such optimizer.
    """
    if optimizer in OPTIMIZERS:
        return None
    methods = sorted(soframe.available("method"))
    stages = optimizer.removeprefix(OWN)
    if optimizer.startswith(OWN) and all(stage in methods for stage in stages.split(AND)):
        return stages
    raise ValueError(
        f"no optimizer {optimizer!r}; there are: {', '.join(OPTIMIZERS)}; and {OWN} with a method, "
        f"or several as stages with {AND} between them: {', '.join(methods)}"
    )


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        workload: The name of a workload.
        optimizer: "sgd" (Nesterov momentum); "adamw"; "kfac", the same SGD behind a
            `soframe.Preconditioner`; "trust-region", `soframe.TrustRegion`;
            "stochastic-trust-region", `soframe.StochasticTrustRegion`; "soframe:" and the name of a
            method, `soframe.Optimizer`; or a peer: "muon", and "soap" and "shampoo", which need the
            package pytorch_optimizer.
        lr: The learning rate.
        momentum: Of "sgd", "kfac" and "muon".
        betas: Of "adamw", "soap" and "shampoo".
        weight_decay: Of all optimizers.
        schedule: Of the learning rate: constant, half a cosine to zero, or a line to zero.
        schedule_steps: The length of the schedule in steps; the budget in steps if None.
        strategy: Of the preconditioner, where there is one.
        preconditioner: Further arguments of `soframe.Preconditioner`. Those left out keep the
            library's defaults.
        options: Further arguments of the optimizer, where it is a trust region, soframe's of a
            method, or a peer.
        method: Arguments of the method, where the optimizer is soframe's of a method; of a chain
            those of each stage by its name.
        modules: A pattern on names of modules, where the optimizer is soframe's of a method, or
            "soap": only what is within these is for it. All that it suits if None.
        targets: Training losses to reach, descending; the workload's if None.
        seconds: Training stops at the first evaluation after so many seconds of training.
        steps: Training stops after so many steps.
        stop_at_target: Whether training also stops once the lowest target is reached.
        batch_size: Examples per step over all processes; the workload's if None, which for
            "trust-region" may be all of them.
        evaluate_every: Steps between evaluations; the workload's if None.
        seed: Of the initial weights, the order of the examples and the split of the data.
        dtype: "float32" or "float64".
        threads: Torch threads per process.
        clock: What seconds are: "wall", or "cpu" for the processor time of rank 0. On an idle
            machine the two agree for one process of one thread; on a busy one only the second
            can be repeated. Waiting for other processes counts in the first alone.
    """

    workload: str
    optimizer: OptimizerName
    lr: float
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: ScheduleName = "constant"
    schedule_steps: int | None = None
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
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    threads: int = 1
    clock: ClockName = "wall"

    def __post_init__(self) -> None:
        of_soframe = method_of(self.optimizer) is not None
        for name, known in (
            ("schedule", get_args(ScheduleName)),
            ("clock", get_args(ClockName)),
            ("dtype", ("float32", "float64")),
            ("strategy", sorted(soframe.available("strategy"))),
        ):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"no {name} {value!r}; there are: {', '.join(known)}")
        if self.seconds is None and self.steps is None:
            raise ValueError("a run needs a budget: seconds, steps or both")
        endless = self.schedule_steps is None and self.steps is None
        if self.schedule != "constant" and endless:
            raise ValueError(
                f"a {self.schedule} schedule needs its length: schedule_steps or steps"
            )
        for name in ("lr", "seconds", "steps", "batch_size", "evaluate_every", "schedule_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # a NaN is no budget
                raise ValueError(f"{name} must be positive, not {value}")
        if self.strategy != "comm-opt" and not self._has_strategy:
            raise ValueError(
                f"{self.optimizer} has no strategy, and {self.strategy!r} would have no effect: "
                f"leave it out"
            )
        peer = self.optimizer in ("soap", "muon", "shampoo")
        for name, taken in (
            ("preconditioner", self.optimizer == "kfac"),
            ("options", of_soframe or peer or self.optimizer in TRUST_REGIONS),
            ("method", of_soframe),
            ("modules", of_soframe or self.optimizer == "soap"),
        ):
            if getattr(self, name) and not taken:
                raise ValueError(
                    f"{self.optimizer} takes no {name}, which would have no effect: "
                    f"{getattr(self, name)!r}"
                )

    @property
    def _has_strategy(self) -> bool:
        own = method_of(self.optimizer) is not None
        return own or self.optimizer in ("kfac", "trust-region")

    @property
    def label(self) -> str:
        """What tables and plots call the optimizer."""
        if method := method_of(self.optimizer):
            return f"{method}, {self.strategy}" if self.strategy != "comm-opt" else method
        names = {
            "sgd": "SGD",
            "adamw": "AdamW",
            "kfac": f"K-FAC, {self.strategy}",
            "trust-region": "K-FAC, trust region",
            "stochastic-trust-region": "Stochastic trust region",
            "soap": "SOAP",
            "muon": "Muon",
            "shampoo": "Shampoo",
        }
        return names[self.optimizer]

    def but(self, **changes: Any) -> RunConfig:
        """The same run with some fields changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)


def from_dict(fields: Mapping[str, Any]) -> RunConfig:
    """The inverse of `RunConfig.as_dict`.

    Args:
        fields: Field names and values; JSON's lists may stand for tuples.

    Returns:
        The configuration.

    Raises:
        TypeError: If a field does not exist.
    """
    values = dict(fields)
    for name in ("betas", "targets"):
        if values.get(name) is not None:
            values[name] = tuple(values[name])
    return RunConfig(**values)
