"""An optimizer that owns the step of any method, distributed as a preconditioner is.

::

    optimizer = soframe.Optimizer(model, method="soap-muon", lr=0.02, auxiliary="adamw",
                                  auxiliary_lr=3e-3, strategy="sharded")
    ...
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Every trainable parameter belongs to a block: of ``method``, or of ``auxiliary``. What the methods
make of the gradients is exchanged as a `soframe.Preconditioner` exchanges it; then each parameter
takes its step, ``p <- (1 - lr weight_decay) p - lr direction`` (decoupled weight decay: Loshchilov
and Hutter, 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import home
from soframe.blocks.home import GradientHome
from soframe.blocks.registration import Choice, unwrap
from soframe.blocks.report import Report
from soframe.checks.numbers import require_numbers
from soframe.preconditioner import Preconditioner
from soframe.registry import describe
from soframe.strategies.placement import Placement

PRECONDITIONER = "soframe"
"""Where the state of an optimizer has that of its preconditioner."""


class Optimizer(torch.optim.Optimizer):
    """Updates the parameters of a model by directions of any method.

    Param groups are made by soframe, one for each method, in the order of their first parameters in
    the model: ``group["method"]`` says which, and begins with ``"auxiliary: "`` for that. Learning
    rates and weight decays may be changed there at any time, and schedulers do.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through.
        method: The method: a name, class, instance, or a mapping from patterns on module names to
            one of these. What no pattern matches, and what a method does not suit, is
            ``auxiliary``'s: for orthogonalisation embeddings, vectors and the head.
        lr: The learning rate of ``method``.
        weight_decay: The decoupled weight decay of ``method``.
        auxiliary: The method of all other trainable parameters.
        auxiliary_lr: Its learning rate; None for ``lr``.
        auxiliary_weight_decay: Its weight decay; None for ``weight_decay``.
        optimizer: Not to be given: this is the optimizer.
        **preconditioner: Further settings of `soframe.Preconditioner`, such as ``strategy``,
            ``solver``, ``damping``, ``solve_every``, ``gradients``.

    Attributes:
        preconditioner: What makes the directions: its ``report``, ``memory_usage``, ``traffic``,
            ``placement`` and ``observe`` are of use here, too.

    Raises:
        ValueError: If a setting is out of range, or a component does not exist.
        TypeError: If a setting has the wrong type or does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Choice = "soap-muon",
        *,
        lr: float,
        weight_decay: float = 0.0,
        auxiliary: Choice = "adamw",
        auxiliary_lr: float | None = None,
        auxiliary_weight_decay: float | None = None,
        **preconditioner: Any,
    ) -> None:
        for name in ("optimizer", "lr"):
            if name in preconditioner:
                raise TypeError(f"{name}= is this optimizer's own; leave it out")
        if auxiliary is None:
            raise TypeError(
                "auxiliary= names the method of parameters that method= leaves out; freeze those "
                "that are not to be trained"
            )
        rates = {
            "lr": lr,
            "weight_decay": weight_decay,
            "auxiliary_lr": lr if auxiliary_lr is None else auxiliary_lr,
            "auxiliary_weight_decay": (
                weight_decay if auxiliary_weight_decay is None else auxiliary_weight_decay
            ),
        }
        require_numbers("soframe.Optimizer", **rates)
        for name, value in rates.items():
            if not 0 <= float(value) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {value!r}")
        self._ready = False
        self._model = unwrap(model)
        every = [p for p in self._model.parameters() if p.requires_grad]
        super().__init__(every, {"lr": float(lr), "weight_decay": float(weight_decay)})
        self.preconditioner = Preconditioner(
            model, method=method, auxiliary=auxiliary, optimizer=self, **preconditioner
        )
        self._rates = {name: float(value) for name, value in rates.items()}
        self._group()
        self._ready = True

    def _group(self) -> None:
        """Let every method have a param group of its own.

        A group that is there keeps its settings and its place, by which schedulers know it.
        """
        params_of: dict[str, list[nn.Parameter]] = {}
        for block in self.preconditioner.blocks:
            name = f"{'auxiliary: ' * block.auxiliary}{describe(block.method)}"
            params_of.setdefault(name, []).extend(block.parameters.values())
        groups = {group["method"]: group for group in self.param_groups if "method" in group}
        self.param_groups.clear()
        for name in {**groups, **params_of}:
            prefix = "auxiliary_" if name.startswith("auxiliary: ") else ""
            made = {
                "lr": self._rates[f"{prefix}lr"],
                "weight_decay": self._rates[f"{prefix}weight_decay"],
                "method": name,
            }
            group = groups.get(name, made)
            self.param_groups.append({**self.defaults, **group, "params": params_of.get(name, [])})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: groups are the methods', and every parameter of the model is in one.

        Raises:
            ValueError: Always, once the optimizer is built.
        """
        if getattr(self, "_ready", False):
            raise ValueError(
                "soframe.Optimizer makes its param groups itself, one for each method: choose "
                "methods by patterns, method={'pattern': ...}, and freeze or thaw parameters of "
                "the model"
            )
        super().add_param_group(param_group)

    # -- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Zeroes the gradients, runs the model and the backward pass, and returns the
                loss; None where that has been done.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: See `soframe.Preconditioner.step`.
            ValueError: See `soframe.Preconditioner.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = self.preconditioner.changed
        if changed:
            # Every trainable parameter must be in a group when blocks are made anew.
            known = {id(p) for group in self.param_groups for p in group["params"]}
            trained = [p for p in self._model.parameters() if p.requires_grad]
            self.param_groups[0]["params"] += [p for p in trained if id(p) not in known]
        self.preconditioner.step()
        if changed:
            self._group()
        if self.preconditioner.updated:
            for group in self.param_groups:
                _move(
                    group["params"],
                    self.preconditioner.home,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, wherever they live.

        Args:
            set_to_none: Whether parameters have none afterwards.
        """
        super().zero_grad(set_to_none)
        every = (p for group in self.param_groups for p in group["params"])
        home.empty(self.preconditioner.home, every, set_to_none=set_to_none)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        Every rank must call it where `soframe.Preconditioner.state_dict` asks for that.

        Returns:
            The param groups, as any optimizer has them, and the preconditioner's state.
        """
        return {**super().state_dict(), PRECONDITIONER: self.preconditioner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, on every rank, from a state, perhaps of another world size or strategy.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not of this optimizer, or damaged; nothing has changed then.
        """
        if PRECONDITIONER not in state_dict:
            raise ValueError("this is not the state of a soframe.Optimizer")
        saved = _sizes(state_dict.get("param_groups", ()))
        if saved != _sizes(self.param_groups):
            raise ValueError(
                f"the state has param groups {saved} (method: parameters), and this optimizer "
                f"{_sizes(self.param_groups)}"
            )
        self.preconditioner.load_state_dict(state_dict[PRECONDITIONER])
        by_method = {group["method"]: group for group in state_dict["param_groups"]}
        for group in self.param_groups:
            settings = by_method.get(group["method"], {})
            group.update({key: value for key, value in settings.items() if key != "params"})

    # -- what users ask -----------------------------------------------------------------------

    def observe(self, outputs: Tensor) -> None:
        """See `soframe.Preconditioner.observe`."""
        self.preconditioner.observe(outputs)

    def report(self) -> Report:
        """See `soframe.Preconditioner.report`: every parameter, with its method."""
        return self.preconditioner.report()

    @property
    def placement(self) -> Placement:
        """See `soframe.Preconditioner.placement`."""
        return self.preconditioner.placement

    def close(self) -> None:
        """See `soframe.Preconditioner.close`."""
        self.preconditioner.close()


def _sizes(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many parameters each method has, where it has any."""
    sizes = {str(group.get("method")): len(group.get("params", ())) for group in groups}
    return {method: size for method, size in sizes.items() if size > 0}


def _move(
    parameters: Sequence[nn.Parameter],
    gradients_in: GradientHome,
    *,
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """Take a step along what gradients hold."""
    by_device: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in parameters:
        direction = gradients_in.read(parameter)
        if direction is not None:
            same = by_device.setdefault((parameter.device, parameter.dtype), ([], []))
            same[0].append(parameter)
            same[1].append(direction)
    rate = float(lr)
    for weights, directions in by_device.values():
        if weight_decay:
            torch._foreach_mul_(weights, 1 - rate * weight_decay)
        torch._foreach_add_(weights, directions, alpha=-rate)
