"""What the settings of a trust region, and the states that it goes on from, may be."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soframe.checks.arguments import check_model
from soframe.checks.numbers import is_number, require_flag, require_integer
from soframe.damping.adaptive import AdaptiveDamping
from soframe.damping.policies import DampingChoice, DampingPolicy, damping_policy
from soframe.damping.saved import check_damping
from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.schedules import WarmInterval
from soframe.state import checksums
from soframe.trust_region import lengths
from soframe.trust_region.candidates import Methods
from soframe.trust_region.watch import WINDOW

KEYS = ("curvature", "trust_region")
"""What a trust region adds to the state of an optimizer."""

FURTHER = "further_methods"
"""Where it has the states of methods beside the first, if there are any."""

BEFORE = "before"
"""Where it has those of all methods before a step that waits, if they remember gradients."""

VERSION = 2
"""The version of a trust region's own state."""

WAITING = {"moved", "before", "decay"}
"""What is remembered of a parameter while a step waits for its verdict."""

COUNTERS = ("rejected_steps", "skipped_steps")

PRECONDITIONER: dict[str, Any] = {
    "solver": "inverse",
    "decay": 0.5,
    "statistics_every": 3,
    "solve_every": 3,
}
"""What differs from the preconditioner's own defaults: on large batches curvature may be fresh."""


def unscaled() -> float:
    """Return what the loss is multiplied by: the step runs the backward pass itself."""
    return 1.0


FISHER = "monte-carlo"
"""What methods that read calls read by default."""

REFUSED = {
    "kl_clip": "the quadratic model chooses the length of a step",
    "norm_clip": "the quadratic model chooses the length of a step",
    "clip_lr": "the quadratic model chooses the length of a step",
    "optimizer": "it is an optimizer itself",
    "pipeline": "it runs the whole model itself, and its parts are in other processes",
    "grad_scaler": "it runs the backward pass itself, of the loss as the closure returns it",
}
"""Settings of a preconditioner that have no meaning here."""


@dataclass(frozen=True)
class OwnSettings:
    """A trust region's own settings, besides its param groups; all ranks must have the same.

    Attributes:
        damping: The damping policy.
        momentum: Whether the last update is a direction of the model.
        parts: How many runs of layers have coefficients of their own.
        preconditioner_damping: The damping within the preconditioner.
        reject: Whether a step after which the objective rose is undone.
        full_batch: Whether the next step's loss measures the ratio.
        max_increase: How much a loss may grow.
        model_every: Steps from one model to the next.
        burn_in: Batches that only give statistics.
        reuse_activations: Whether derivatives follow a tape.
        flush_denormals: Whether denormal numbers are zero.
        methods: What makes directions.
    """

    damping: DampingPolicy
    momentum: bool
    parts: int
    preconditioner_damping: AdaptiveDamping | float
    reject: bool
    full_batch: bool
    max_increase: float | None
    model_every: int
    burn_in: int
    reuse_activations: bool
    flush_denormals: bool
    methods: Methods

    def __post_init__(self) -> None:
        flags = ("momentum", "reject", "full_batch", "reuse_activations", "flush_denormals")
        for name in flags:
            require_flag(name, getattr(self, name))
        require_integer("burn_in", self.burn_in, 0)
        require_integer("model_every", self.model_every, 1)
        if self.full_batch and self.model_every > 1:
            raise ValueError(
                f"model_every={self.model_every} is for mini-batches, whose models say little of "
                f"the next batch: with full_batch=True every step is judged by its model; pass "
                f"model_every=1"
            )
        damping = self.preconditioner_damping
        if not isinstance(damping, AdaptiveDamping) and not (
            is_number(damping) and 0 < damping < math.inf
        ):
            raise ValueError(
                f"preconditioner_damping must be positive, not {damping!r}: an AdaptiveDamping, or "
                f"a multiple of the policy's"
            )


class PreconditionersDamping:
    """The damping of the preconditioner, as a callable of the step whose text ranks compare.

    Args:
        damping: Returns the damping of a step.
        settings: All settings of the trust region.
    """

    def __init__(self, damping: Callable[[int], float], *settings: object) -> None:
        self._damping, self._settings = damping, settings

    def __call__(self, step: int) -> float:
        """Return the damping of a step."""
        return self._damping(step)

    def __repr__(self) -> str:
        return f"TrustRegion{self._settings!r}"


def check(model: object, loss: object, params: object, preconditioner: Mapping[str, Any]) -> Loss:
    """Check what a trust region is given, besides its own settings and its param groups.

    Args:
        model: The model.
        loss: The loss.
        params: Parameters or param groups; None for all of the model's.
        preconditioner: Settings of the preconditioner.

    Returns:
        The loss, built.

    Raises:
        TypeError: If one has the wrong type, or there is no such setting.
        ValueError: If one is out of range, or has no meaning here.
    """
    check_model(model)
    if params is not None and not isinstance(params, Iterable):
        raise TypeError(f"params must be parameters or param groups, not {params!r}")
    known = set(inspect.signature(Preconditioner.__init__).parameters) - {"self", "model"}
    for name in preconditioner:
        if name in REFUSED:
            raise ValueError(f"TrustRegion takes no {name}=: {REFUSED[name]}")
        if name not in known:
            raise TypeError(
                f"TrustRegion has no setting {name!r}, nor has Preconditioner; there are its own, "
                f"and {', '.join(sorted(known - set(REFUSED)))}"
            )
    if preconditioner.get("fisher") == "empirical":
        raise ValueError("TrustRegion needs fisher='monte-carlo', 'type-2' or 'forward-only'")
    if preconditioner.get("gradients", "averaged") != "averaged":
        raise ValueError("TrustRegion needs gradients='averaged': slopes are made of them")
    background: object = preconditioner.get("background", 0)
    if not isinstance(background, int) or background != 0:
        raise ValueError("TrustRegion needs background=0: its damping is that of the step")
    if preconditioner.get("loss_average", "local") not in ("local", "global"):
        raise ValueError(
            f"TrustRegion needs loss_average='local' or 'global': closures return means, or shares "
            f"of one, not {preconditioner['loss_average']!r}"
        )
    built: Loss = KINDS["loss"].build(loss, Loss)
    if built.expected and isinstance(built, SumLoss):
        raise ValueError(
            f"loss={built!r}: the Hessian of a term depends on targets, and what the closure's "
            f"loss counts cannot be told from a sum: declare that term alone, or let the model "
            f"return natural parameters"
        )
    return built


def whole_model_damping(choice: DampingChoice) -> DampingPolicy:
    """Return a damping policy that has one damping for the whole model.

    Args:
        choice: The policy's name, class or instance, or a number or a callable of the step.

    Returns:
        The policy.

    Raises:
        ValueError: If its blocks have dampings of their own.
    """
    policy = damping_policy(choice)
    if policy.per_block:
        raise ValueError(
            f"TrustRegion needs one damping for the whole model, which {policy!r} has not"
        )
    return policy


def damping_within(choice: AdaptiveDamping | float | None, damped: bool) -> AdaptiveDamping | float:
    """Return the damping within the preconditioner.

    Args:
        choice: What was chosen: dampings that are tried, or a multiple of the policy's damping.
        damped: Whether there is a method whose directions are made of one gradient alone.

    Returns:
        Dampings of this trust region's own, at their beginning; or the multiple. Of no choice
        dampings where they serve a method, and else the policy's itself.

    Raises:
        ValueError: If there are dampings to try and nothing to damp.
    """
    if choice is None and not damped:
        return 1.0
    damping = AdaptiveDamping() if choice is None else choice
    if not isinstance(damping, AdaptiveDamping):
        return damping
    damping = copy.copy(damping)  # an instance may serve many optimizers
    damping.restart()
    if not damped:
        raise ValueError(
            f"preconditioner_damping={damping!r} tries dampings on one gradient, and every method "
            f"here remembers earlier ones: pass a multiple of the policy's damping, "
            f"preconditioner_damping=1.0, or add a method such as 'kfac'"
        )
    return damping


def of_preconditioner(given: Mapping[str, Any], burn_in: int) -> dict[str, Any]:
    """Return the settings of the preconditioner.

    Args:
        given: Those in place of `PRECONDITIONER`.
        burn_in: Steps that take statistics and solve, before the first update.
    """
    settings = {**PRECONDITIONER, "grad_scaler": unscaled, **given}
    for name in ("method", "auxiliary", "backend"):
        settings.pop(name, None)
    for name in ("statistics_every", "solve_every"):
        if burn_in > 0 and isinstance(settings[name], int):
            settings[name] = WarmInterval(settings[name], first=1, steps=burn_in + 1)
    return settings


def check_state(
    state_dict: Any,
    damping: DampingPolicy,
    adaptive: AdaptiveDamping | None,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Check that an optimizer can go on from a state; nothing has been loaded yet.

    Args:
        state_dict: That of the optimizer. What it has under ``"curvature"`` is the preconditioner's
            to check.
        damping: The damping policy that goes on from it.
        adaptive: The preconditioner's, if it has one of its own.
        groups: The param groups that do.

    Raises:
        ValueError: If it is not the state of a TrustRegion, or of one with another policy or other
            groups, or it is truncated or damaged.
    """
    check_keys(state_dict, {*KEYS, "state", "param_groups"}, "a TrustRegion")
    saved = _mapping("trust_region", state_dict["trust_region"])
    version = saved.get("version", 1)
    if version != VERSION:
        raise ValueError(
            f"the state of the TrustRegion has version {version!r}; this soframe reads version "
            f"{VERSION}: load it with the soframe that wrote it"
        )
    keys = ["burn_in", "counters", "damping", "preconditioner_damping", "steps"]
    keys += ["losses", "reduction", checksums.KEY]
    if missing := sorted(set(keys) - set(saved)):
        raise ValueError(f"the state is truncated: trust_region lacks {missing}")
    check_groups(state_dict["param_groups"], groups)
    waits = _check_parameters(state_dict["state"], groups)
    for key in ("steps", "burn_in"):
        _check_count(key, saved[key])
    counters = _mapping("counters", saved["counters"])
    for key in {*COUNTERS, *counters}:
        _check_count(f"counter {key!r}", counters.get(key))
    check_damping(saved["damping"], damping, saved["steps"])
    if adaptive is not None:
        adaptive.check_state(saved["preconditioner_damping"])
    _check_losses(saved.get("losses", []))
    if not _is_number(saved.get("eps", 0.0)) or not 0 <= saved.get("eps", 0.0) < 1:
        raise ValueError(f"the state is damaged: the rounding of the loss is {saved['eps']!r}")
    lengths.check(saved.get("lengths", {}))
    _check_reduction(saved.get("reduction", {}), waits)
    checksums.verify({**sealed_part(state_dict), checksums.KEY: saved[checksums.KEY]})


def of_methods(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the state of each method's preconditioner.

    Args:
        state_dict: That of the optimizer.

    Returns:
        The first may be None, where it was saved elsewhere.
    """
    return [state_dict["curvature"], *state_dict.get(FURTHER, ())]


def check_methods(
    state_dict: Mapping[str, Any],
    count: int,
    *,
    remembers: bool,
    checks: Sequence[Callable[[Any], object]],
) -> None:
    """Check that methods can go on from a state.

    Args:
        state_dict: That of the optimizer, which `check_state` has looked at.
        count: How many preconditioners go on from it.
        remembers: Whether any of their methods remembers gradients.
        checks: Raise if a preconditioner cannot load its part; one for each.

    Raises:
        ValueError: If it is of other methods, truncated or damaged.
    """
    for key in (FURTHER, BEFORE):
        if not isinstance(state_dict.get(key, []), list):
            raise ValueError(f"the state is damaged: {key} is {type(state_dict[key]).__name__}")
    every = of_methods(state_dict)
    if len(every) != count:
        raise ValueError(f"the state is of {len(every)} method(s), this TrustRegion has {count}")
    waits = state_dict["trust_region"].get("reduction", {}).get("waiting") is not None
    if (BEFORE in state_dict) != (waits and remembers):
        raise ValueError(
            f"the state is {'damaged' if BEFORE in state_dict else 'truncated'}: methods that "
            f"remember gradients need what they had before a step that waits, and no other step"
        )
    before = state_dict.get(BEFORE, every)
    if len(before) != count:
        raise ValueError(f"the state is damaged: {BEFORE} is of {len(before)} method(s)")
    for check, now, then in zip(checks, every, before, strict=True):
        if now is None and not remembers and count == 1:
            continue
        check(now)
        if then is not now:
            check(then)


def sealed_part(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checksums of a trust region's state are of.

    Args:
        state_dict: The state; what it has under ``"curvature"`` has checksums of its own.
    """
    kept = {k: v for k, v in state_dict["trust_region"].items() if k != checksums.KEY}
    # What the optimizer's hooks add is not the trust region's.
    return {**{key: state_dict[key] for key in ("state", "param_groups")}, "trust_region": kept}


def _mapping(what: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the state is damaged: {what} is {type(value).__name__}, not a dict")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"the state is damaged: {what} is {value!r}")


def check_keys(state: Any, keys: set[str], what: str) -> None:
    """Check that a part of a state has everything in it.

    Args:
        state: The part.
        keys: What it must have.
        what: Whose state it is to be.

    Raises:
        ValueError: If it lacks something, or is no dict.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"not the state of {what}: it is {type(state).__name__}")
    if missing := sorted(keys - set(state)):
        raise ValueError(f"not the state of {what}: it lacks {missing}")


def check_groups(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that param groups can go on from saved ones.

    Args:
        saved: Those of a state.
        groups: Those that do.

    Raises:
        ValueError: If they have other numbers of parameters, or are damaged.
    """
    if not isinstance(saved, list):
        raise ValueError(f"the state is damaged: param_groups is {type(saved).__name__}")
    for number, group in enumerate(saved):
        where = f"param group {number}"
        if missing := sorted({"params", "lr", "weight_decay"} - set(_mapping(where, group))):
            raise ValueError(f"the state is truncated: {where} lacks {missing}")
        if not isinstance(group["params"], list):
            raise ValueError(f"the state is damaged: params of {where} is {group['params']!r}")
        for key in ("lr", "weight_decay", "initial_lr"):
            value = group.get(key, 0.0)
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ValueError(f"the state is damaged: {key} of {where} is {value!r}")
    sizes, now = ([len(group["params"]) for group in each] for each in (saved, groups))
    if sizes != now:
        raise ValueError(f"the state has param groups of {sizes} parameters, TrustRegion of {now}")
    numbers = [number for group in saved for number in group["params"]]
    if numbers != list(range(len(numbers))):
        raise ValueError(f"the state is damaged: its parameters are numbered {numbers}")


def _check_parameters(saved: Any, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Check what is remembered of each parameter; return whether a step waits for its verdict."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    waits = False
    for number, remembered in _mapping("state", saved).items():
        where = f"parameter {number}"
        _check_count("the number of a parameter", number)
        if number >= len(parameters):
            raise ValueError(f"the state is damaged: there is no {where}")
        shape = tuple(parameters[number].shape)
        known = set(_mapping(where, remembered))
        if known - {"update", *WAITING} or known & WAITING not in (set(), WAITING):
            raise ValueError(f"the state is damaged: of {where} it has {sorted(map(str, known))}")
        waits = waits or "moved" in remembered
        for key, value in remembered.items():
            if key == "decay":
                good = _is_number(value) and 0 <= value < math.inf
            else:
                good = isinstance(value, Tensor) and tuple(value.shape) == shape
                good = good and value.is_floating_point() and not value.is_meta
                good = good and value.layout == torch.strided and bool(value.isfinite().all())
            if not good:
                raise ValueError(
                    f"the state is damaged: {key} of {where} is not "
                    f"{'a weight decay' if key == 'decay' else f'finite and of shape {shape}'}"
                )
    return waits


def _check_losses(saved: Any) -> None:
    good = isinstance(saved, list) and len(saved) <= WINDOW
    if not good or not all(_is_number(loss) and math.isfinite(loss) for loss in saved):
        raise ValueError(f"the state is damaged: the last losses are {saved!r}")


def _check_reduction(saved: Any, waits: bool) -> None:
    waiting = _mapping("reduction", saved).get("waiting")
    if waiting is not None:
        good = isinstance(waiting, list | tuple) and len(waiting) == 2
        if not good or not all(_is_number(value) and math.isfinite(value) for value in waiting):
            raise ValueError(f"the state is damaged: the step that waits has {waiting!r}")
    if waits != (waiting is not None):
        raise ValueError(
            "the state is damaged: a step waits for its verdict by one part of it, and does not by "
            "another"
        )
    last = _mapping("the last verdict", saved.get("last", {}))
    if not all(isinstance(key, str) and _is_number(value) for key, value in last.items()):
        raise ValueError(f"the state is damaged: the last verdict is {dict(last)!r}")
