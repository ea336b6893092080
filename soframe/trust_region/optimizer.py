"""The optimizer that owns the step: K-FAC with a trust region (Martens and Grosse, 2015).

The preconditioned gradient says where to go; the exact quadratic model says how far, and how much
of the last update to add. Levenberg-Marquardt damping says how far that model is to be trusted. So
there is no learning rate to tune::

    optimizer = soframe.TrustRegion(model, loss="cross-entropy")
    ...
    def closure():
        return criterion(model(inputs), targets)  # no backward

    loss = optimizer.step(closure)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe import registration
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.trust_region.damping import DampingPolicy
from soframe.trust_region.denormals import flushed_denormals
from soframe.trust_region.quadratic import (
    Closure,
    Direction,
    Forward,
    Outputs,
    Quadratic,
    curvature_along,
    require_only_through,
)
from soframe.trust_region.replay import Replay

COUNTERS = ("rejected_steps", "skipped_steps")


class TrustRegion(torch.optim.Optimizer):
    """K-FAC with damping, step length and momentum from the exact quadratic model.

    Args:
        model: The model; it returns one tensor. Wrapped in DistributedDataParallel on several
            ranks: the closure calls the wrapper.
        loss: What the Fisher is of: a name (``"mse"``, ``"cross-entropy"``, ...), class or
            instance. It must be the loss of the closure; the first step checks it.
        damping: The damping policy: a name, class or instance.
        weight_decay: Coefficient of ``1/2 ||parameters||^2`` in the objective.
        momentum: Whether the last update is a direction of the model.
        lr: Multiplies the update; 1 is the minimum of the model.
        fisher: ``"monte-carlo"`` or ``"type-2"``.
        preconditioner_damping: The damping within the preconditioner, as a multiple of the
            policy's.
        reject: Undo a step, at those steps that measure the reduction ratio, if the objective rose.
        burn_in: Batches that only give statistics, before the first update.
        flush_denormals: Treat denormal numbers as zero within the preconditioner and the quadratic
            model's own arithmetic (CPU). The user's forward and backward passes keep their mode.
        **preconditioner: Further settings of `soframe.Preconditioner`; ``statistics_every`` is 1
            unless given.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | type[Loss] | Loss,
        *,
        damping: str | type[DampingPolicy] | DampingPolicy = "levenberg-marquardt",
        weight_decay: float = 0.0,
        momentum: bool = True,
        lr: float = 1.0,
        fisher: str = "monte-carlo",
        preconditioner_damping: float = 1.0,
        reject: bool = True,
        burn_in: int = 0,
        flush_denormals: bool = True,
        **preconditioner: Any,
    ) -> None:
        for name, value in (("lr", lr), ("preconditioner_damping", preconditioner_damping)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value!r}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
        if fisher == "empirical":
            raise ValueError("TrustRegion needs fisher='monte-carlo' or 'type-2'")
        if preconditioner.get("gradients", "averaged") != "averaged":
            raise ValueError(
                "TrustRegion needs gradients='averaged': its model has a slope in them"
            )
        self._model = registration.unwrap(model)
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        super().__init__(trainable, {"lr": lr, "weight_decay": weight_decay})
        self.damping: DampingPolicy = KINDS["damping"].build(damping, DampingPolicy)
        self._momentum, self._reject, self._burn_in = momentum, reject, burn_in
        self._flush = flush_denormals
        self._steps = 0
        self._checked = preconditioner.get("loss_average") == "global"  # a scale nobody declares
        self._factor = preconditioner_damping
        self.preconditioner = Preconditioner(
            self._model,
            fisher=fisher,
            loss=loss,
            damping=self._preconditioner_damping,
            kl_clip=None,
            **{"statistics_every": 1, **preconditioner},
        )
        self._outputs = Outputs(self._model)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.last: dict[str, float] = {}

    def _preconditioner_damping(self, step: int) -> float:
        del step  # it counts burn-in too
        return self._factor * (self.damping.at(self._steps) + self._weight_decay())

    # -- the step -----------------------------------------------------------------------------

    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Runs the model on a batch and returns the loss, a scalar that depends on the
                parameters through the model's output alone; it does not call ``backward``. For
                micro-batches a list of closures whose losses add up to the batch's
                (``loss / len(closures)`` for means).

        Returns:
            The loss before the update, averaged over ranks.

        Raises:
            ValueError: If the closure's loss is not the declared one.
            RuntimeError: If a closure does not run the model once, or its loss has terms that do
                not go through the model's output.
        """
        closures = list(closure) if isinstance(closure, Sequence) else [closure]
        forwards, loss = self._forward_backward(closures)
        parameters = self._parameters()
        gradients = self._gradients(parameters)
        skipped = self.preconditioner.counters["skipped_updates"]
        with flushed_denormals(self._flush):
            self.preconditioner.step()
        if self._burn_in > 0:
            self._burn_in -= 1
        elif not math.isfinite(loss) or self.preconditioner.counters["skipped_updates"] > skipped:
            self._step_back(parameters)
        else:
            directions = self._directions(parameters, gradients)
            with flushed_denormals(self._flush):
                quadratic = self._quadratic(forwards, parameters, gradients, directions)
            if quadratic.finite():
                self._move(forwards, parameters, loss, directions, quadratic)
            else:
                self._step_back(parameters)
        return torch.tensor(loss)

    def _forward_backward(self, closures: Sequence[Closure]) -> tuple[list[Forward], float]:
        """Run the closures and their backward passes, and the Fisher's where it is due."""
        self.zero_grad()
        self.preconditioner.reset_batch()  # a step whose closure raised has left its statistics
        parameters = self._parameters()
        forwards = []
        total = 0.0
        for closure in closures:
            replay = Replay(self._model)
            with torch.enable_grad():
                output, loss = self._outputs.of(closure)
                (gradient,) = torch.autograd.grad(loss, output, create_graph=True)
                require_only_through(output, loss, parameters)
                self.preconditioner.observe(output)
                # From the output, not the loss: the Hessian needs the graph in between again.
                output.backward(gradient.detach())
            forwards.append(Forward(closure, replay, output, gradient))
            total += float(loss.detach())
        if not self._checked and math.isfinite(total):
            self._check_loss(forwards)
        return forwards, self._mean(torch.tensor([total], dtype=torch.float64)).item()

    def _move(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        loss: float,
        directions: Sequence[Direction],
        quadratic: Quadratic,
    ) -> None:
        """Take the step that minimises the model, and measure what it brought if that is due."""
        coefficients = quadratic.minimise() * self.param_groups[0]["lr"]
        predicted = quadratic.change(coefficients)
        update = _combine(directions, coefficients)
        measure = self._is_due()
        before = [p.detach().clone() for p in parameters] if measure else []
        objective = loss + self._penalty(parameters)
        with torch.no_grad():
            torch._foreach_add_(list(parameters), update)
        self.last = {"loss": loss, "damping": self.damping.at(self._steps), "predicted": predicted}
        accepted = True
        if measure:
            change = self._evaluate(forwards, parameters) - objective
            ratio = change / predicted if math.isfinite(change) and predicted else -math.inf
            self.last.update(change=change, ratio=ratio)
            self.damping.observe(ratio)
            accepted = change <= 0 or not (self._reject or not math.isfinite(change))
        if accepted:
            for parameter, moved in zip(parameters, update, strict=True):
                self.state[parameter]["update"] = moved
        else:
            self.counters["rejected_steps"] += 1
            with torch.no_grad():
                torch._foreach_copy_(list(parameters), before)
        self._steps += 1

    def _step_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Undo the last update: either it, or this batch, made something that is not finite."""
        self.counters["skipped_steps"] += 1
        self.damping.observe(-math.inf)
        for parameter in parameters:
            last = self.state[parameter].pop("update", None)
            if last is not None:
                with torch.no_grad():
                    parameter.sub_(last)

    # -- pieces -------------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of the objective, and leave them in ``.grad`` too."""
        decay = self._weight_decay()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if decay:
                parameter.grad.add_(parameter.detach(), alpha=decay)
        return [p.grad.clone() for p in parameters if p.grad is not None]

    def _directions(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> list[Direction]:
        """Return the preconditioned gradient, the last update, and what has no curvature."""
        covered = self.preconditioner.covered()
        zeros = [torch.zeros_like(p) for p in parameters]
        directions: list[Direction] = [
            [
                -p.grad if p in covered and p.grad is not None else zero
                for p, zero in zip(parameters, zeros, strict=True)
            ]
        ]
        if any(p not in covered for p in parameters):
            directions.append(
                [
                    zero if p in covered else -g
                    for p, g, zero in zip(parameters, gradients, zeros, strict=True)
                ]
            )
        if self._momentum and any("update" in self.state[p] for p in parameters):
            directions.append(
                [
                    self.state[p].get("update", zero)
                    for p, zero in zip(parameters, zeros, strict=True)
                ]
            )
        return directions

    def _quadratic(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        directions: Sequence[Direction],
    ) -> Quadratic:
        own = curvature_along(self._model, forwards, self._outputs, parameters, directions)
        curvature = self._mean(own)
        damping = self.damping.at(self._steps) + self._weight_decay()
        for i, one in enumerate(directions):
            for j, other in enumerate(directions):
                curvature[i, j] += damping * _dot(one, other)
        slope = torch.tensor([_dot(gradients, one) for one in directions], dtype=torch.float64)
        return Quadratic(curvature, slope)

    def _evaluate(self, forwards: Sequence[Forward], parameters: Sequence[nn.Parameter]) -> float:
        """Return the objective on the same batch, at the parameters of now."""
        total = 0.0
        for forward in forwards:
            with torch.no_grad(), forward.replay.again():
                total += float(forward.closure())
        mean = self._mean(torch.tensor([total], dtype=torch.float64)).item()
        return mean + self._penalty(parameters)

    def _penalty(self, parameters: Sequence[nn.Parameter]) -> float:
        decay = self._weight_decay()
        return 0.5 * decay * _dot(parameters, parameters) if decay else 0.0

    def _weight_decay(self) -> float:
        return float(self.param_groups[0]["weight_decay"])

    def _is_due(self) -> bool:
        interval = self.damping.interval
        return interval > 0 and (self._steps + 1) % interval == 0

    def _mean(self, tensor: Tensor) -> Tensor:
        return self.preconditioner.mean_over_ranks(tensor)

    def _check_loss(self, forwards: Sequence[Forward]) -> None:
        """Hold the declared loss against the closure's: most mistakes here are ones of scale."""
        self._checked = True
        forward, declared = forwards[0], self.preconditioner.loss
        assert declared is not None
        output = forward.output.detach()
        generator = torch.Generator(output.device).manual_seed(0)  # the user's stays as it is
        tangent = torch.randn(
            output.shape, generator=generator, dtype=output.dtype, device=output.device
        )
        per_sample = declared.hessian_product(output, tangent)
        expected = float((tangent * per_sample).sum())
        actual = float((tangent * forward.hessian_product(tangent)).sum())
        actual *= len(output) * len(forwards)
        # Saturated outputs leave a curvature that is all rounding, which says nothing of a scale.
        rounding = 16 * torch.finfo(output.dtype).eps
        noise = rounding * float(tangent.square().sum())
        if not math.isclose(actual, expected, rel_tol=max(1e-3, rounding), abs_tol=noise):
            times = actual / expected if expected else math.inf
            raise ValueError(
                f"the closure's loss has {times:.4g} times the curvature of "
                f"loss={declared!r}, as a mean over {len(output)} samples and "
                f"{len(forwards)} closure(s); declare the loss that the closure returns"
            )

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the preconditioner's and the damping's.

        Returns:
            For ``torch.save``; see `soframe.Preconditioner.state_dict` for when to call it.
        """
        return {
            **super().state_dict(),
            "curvature": self.preconditioner.state_dict(),
            "trust_region": {
                "steps": self._steps,
                "burn_in": self._burn_in,
                "damping": self.damping.state(),
                "counters": dict(self.counters),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not the state of a TrustRegion on such a model.
        """
        missing = {"curvature", "trust_region"} - set(state_dict)
        if missing:
            raise ValueError(f"not the state of a TrustRegion: it lacks {sorted(missing)}")
        rest = {k: v for k, v in state_dict.items() if k not in ("curvature", "trust_region")}
        own = state_dict["trust_region"]
        if set(own["damping"]) != set(self.damping.state()):
            raise ValueError(f"the state is that of another damping policy than {self.damping!r}")
        self.preconditioner.load_state_dict(state_dict["curvature"])
        super().load_state_dict(rest)
        self._steps, self._burn_in = own["steps"], own["burn_in"]
        self.damping.load(own["damping"])
        self.counters = dict(own["counters"])

    def close(self) -> None:
        """Remove every hook."""
        self.preconditioner.close()
        self._outputs.close()


def _dot(one: Direction, other: Direction) -> float:
    """Return the inner product, added up in float64."""
    pairs = zip(one, other, strict=True)
    parts = [torch.dot(a.detach().flatten(), b.detach().flatten()) for a, b in pairs]
    return float(torch.stack([part.double() for part in parts]).sum())


def _combine(directions: Sequence[Direction], coefficients: Tensor) -> list[Tensor]:
    total = [d * float(coefficients[0]) for d in directions[0]]
    for direction, coefficient in zip(directions[1:], coefficients[1:], strict=True):
        torch._foreach_add_(total, list(direction), alpha=float(coefficient))
    return total
