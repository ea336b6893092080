"""An optimizer that owns the step of any method, distributed as a preconditioner is.

::

    optimizer = soframe.Optimizer(model, method="soap-muon", lr=0.02, auxiliary="adamw",
                                  auxiliary_lr=3e-3, strategy="sharded")
    ...
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Every trainable parameter belongs to a block: of ``method``, or of ``auxiliary``. The updates of the
methods are exchanged as in a `soframe.Preconditioner`; then each parameter takes its step,
``p <- (1 - lr weight_decay) p - lr update`` (decoupled weight decay: Loshchilov and Hutter, 2019),
or one that `soframe.step.moving` defines: cautious decay, a constraint.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import home, sharding
from soframe.blocks.block import Block
from soframe.blocks.registration import Choice, plain_name, unwrap
from soframe.blocks.report import Report
from soframe.capture.untraced import untraced
from soframe.checks.arguments import check_model
from soframe.checks.numbers import require_numbers
from soframe.diagnostics.metrics import Spectra
from soframe.diagnostics.norms import changes
from soframe.preconditioner import Preconditioner
from soframe.registry import describe
from soframe.state import checksums
from soframe.step import moving
from soframe.step.moving import Ball, Constraint, Move, WeightDecayKind
from soframe.strategies.placement import Placement

PRECONDITIONER = "soframe"
"""The key of the preconditioner's state in an optimizer's state."""
RADII = "radii"
"""The key of the norms that a constraint keeps."""


class Optimizer(torch.optim.Optimizer):
    """Updates the parameters of a model with any method.

    Param groups are made by soframe, one for each method, in the order of their first parameters in
    the model: ``group["method"]`` is the name of the method, with the prefix ``"auxiliary: "`` for
    ``auxiliary``. Learning rates and weight decays may be changed there at any time, as schedulers
    do; so may ``"weight_decay_kind"`` and ``"constraint"``, alike on all ranks.

    A group is made once one of its parameters is trained. For gradual unfreezing build the
    optimizer and its schedulers first, and freeze parameters afterwards: their group stays, empty,
    and follows the schedule. A group that is made later begins at ``lr`` or ``auxiliary_lr``, with
    a warning if a schedule changes the rates of the others.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through.
        method: The method: a name, class, instance, or a mapping from patterns on module names to
            one of these. Parameters that match no pattern, or that the method does not support, are
            ``auxiliary``'s: for orthogonalisation embeddings, vectors and the head.
        lr: The learning rate of ``method``.
        weight_decay: The weight decay of ``method``; a step takes ``lr * weight_decay`` of it.
        weight_decay_kind: ``"decoupled"``; or ``"cautious"``, which leaves out the entries that the
            update moves away from zero (Chen et al., 2025).
        constraint: ``"hyperball"`` lets every matrix of ``method``, in each of its groups, keep the
            Frobenius norm that it has at the first step (Wen et al., 2026): ``lr`` is then an
            angle, of the order of 0.01, the length of updates does not matter, and weights do not
            decay. Vectors, such as biases and gains of norms, move without. None for none.
        auxiliary: The method of all other trainable parameters.
        auxiliary_lr: Its learning rate; None for ``lr``.
        auxiliary_weight_decay: Its weight decay; None for ``weight_decay``.
        auxiliary_weight_decay_kind: Its kind of weight decay; None for ``weight_decay_kind``.
        auxiliary_constraint: Its constraint; by default none, with any ``constraint``.
        **preconditioner: Further settings of `soframe.Preconditioner`, such as ``strategy``,
            ``solver``, ``damping``, ``solve_every``, ``gradients``.

    Attributes:
        preconditioner: The preconditioner that makes the updates: its ``report``, ``memory_usage``,
            ``traffic``, ``placement`` and ``observe`` are of use here, too.

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
        weight_decay_kind: WeightDecayKind = "decoupled",
        constraint: Constraint | None = None,
        auxiliary: Choice = "adamw",
        auxiliary_lr: float | None = None,
        auxiliary_weight_decay: float | None = None,
        auxiliary_weight_decay_kind: WeightDecayKind | None = None,
        auxiliary_constraint: Constraint | None = None,
        **preconditioner: Any,
    ) -> None:
        check_model(model)
        if "optimizer" in preconditioner:
            raise TypeError("optimizer= is this optimizer's own; leave it out")
        _require_known(preconditioner)
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
        kind = auxiliary_weight_decay_kind
        self._moves = {
            "": Move(
                lr=float(lr),
                weight_decay=float(weight_decay),
                kind=weight_decay_kind,
                constraint=constraint,
            ),
            "auxiliary_": Move(
                lr=float(rates["auxiliary_lr"]),
                weight_decay=float(rates["auxiliary_weight_decay"]),
                kind=weight_decay_kind if kind is None else kind,
                constraint=auxiliary_constraint,
            ),
        }
        for prefix, move in self._moves.items():
            moving.check(move, name="", prefix=prefix)
        # torch's constructor calls `add_param_group`, which refuses once this is True.
        self._ready = False
        self._model = unwrap(model)
        every = [p for p in self._model.parameters() if p.requires_grad]
        sharding.require_own_step(every)
        super().__init__(every, _settings(self._moves[""]))
        self.preconditioner = Preconditioner(
            model, method=method, auxiliary=auxiliary, optimizer=self, **preconditioner
        )
        self._radii: dict[str, Tensor] = {}
        self._moved: Mapping[str, Tensor] = {}
        self._rebuilt = False
        self._group()
        try:
            # An error on one stage of a pipeline is raised on all of them.
            with self.preconditioner.together():
                for ball in self._constrained():
                    ball.norms()  # raises if a norm is zero or not finite
        except Exception:
            self.preconditioner.close()
            raise
        self._ready = True

    def _group(self) -> list[dict[str, Any]]:
        """Give every method a param group of its own, and return the new groups."""
        params_of: dict[str, list[nn.Parameter]] = {}
        for block in self.preconditioner.blocks:
            params_of.setdefault(_group_of(block), []).extend(block.parameters.values())
        # An existing group keeps its settings and its index, by which schedulers address it.
        groups = {group["method"]: group for group in self.param_groups if "method" in group}
        self.param_groups.clear()
        for name in {**groups, **params_of}:
            prefix = "auxiliary_" if name.startswith("auxiliary: ") else ""
            group = groups.get(name, {**_settings(self._moves[prefix]), "method": name})
            self.param_groups.append({**self.defaults, **group, "params": params_of.get(name, [])})
        self._grouped = self.preconditioner.placement
        self._find_balls()
        return [group for group in self.param_groups if group["method"] not in groups]

    def _first_rate(self, group: Mapping[str, Any]) -> float:
        """Return the initial learning rate of a group."""
        return self._moves["auxiliary_" * group["method"].startswith("auxiliary: ")].lr

    def _warn_of_new(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Warn of groups that begin where a schedule has changed the rates of the others."""
        others = [g for g in self.param_groups if not any(g is one for one in new)]
        scheduler = any("initial_lr" in group for group in others)  # wraps step()
        if new and (scheduler or any(float(g["lr"]) != self._first_rate(g) for g in others)):
            said = "; ".join(f"{group['method']} at lr={group['lr']}" for group in new)
            warnings.warn(
                f"soframe: param group(s) of soframe.Optimizer begin, since parameters were thawed "
                f"or added: {said}. No schedule has changed this rate, as it has others, and a "
                f"scheduler of torch that is there already may raise. Build the optimizer and its "
                f"schedulers while the parameters are trained, and freeze them afterwards; or set "
                f"optimizer.param_groups[...]['lr'], and make the schedulers anew",
                stacklevel=8 if scheduler else 7,
            )

    def _find_balls(self) -> None:
        """Collect the matrices that a constraint could keep on spheres, by group."""
        names = {id(p): plain_name(name) for name, p in self._model.named_parameters()}
        self._balls: dict[str, list[Ball]] = {g["method"]: [] for g in self.param_groups}
        for block in self.preconditioner.blocks:
            ball = Ball(block, names)
            if ball.matrices:
                self._balls[_group_of(block)].append(ball)

    def _constrained(self) -> Iterator[Ball]:
        """Yield the matrices whose norms are kept."""
        for group in self.param_groups:
            if group["constraint"] is not None:
                yield from self._balls[group["method"]]

    def _measure(self) -> None:
        """Measure the norms of matrices that become constrained."""
        for ball in self._constrained():
            if ball.key not in self._radii:
                self._radii[ball.key] = ball.norms()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: soframe makes the groups, and every parameter of the model is in one.

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
    @untraced
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: Zeroes the gradients, runs the model and the backward pass, and returns the
                loss; None if that has been done.

        Returns:
            The loss that the closure returned; None without a closure.

        Raises:
            RuntimeError: See `soframe.Preconditioner.step`.
            ValueError: See `soframe.Preconditioner.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A step that raised may have rebuilt the blocks without regrouping the parameters.
        former = self._grouped is not self.preconditioner.placement
        self._rebuilt = self.preconditioner.changed or former
        if self._rebuilt:
            sharding.require_own_step(self._model.parameters())
            # When blocks are rebuilt, `LearningRates.check` needs every parameter in a group.
            known = {id(p) for group in self.param_groups for p in group["params"]}
            trained = [p for p in self._model.parameters() if p.requires_grad]
            self.param_groups[0]["params"] += [p for p in trained if id(p) not in known]
        self.preconditioner.step()
        new: list[dict[str, Any]] = []
        if self._rebuilt:
            new = self._group()
            self._measure()
        self._moved = {}
        if self.preconditioner.updated:
            blocks, before = self.preconditioner.blocks, {}
            if self.preconditioner.measures_norms:
                # Copies of all weights, to measure how far they move.
                every = (p for block in blocks for p in block.parameters.values())
                before = {p: p.detach().clone() for p in every}
            one = self.preconditioner
            with one.backend.phases("move"):
                for group in self.param_groups:
                    self._move(group)
            self._moved = changes(before, blocks) if before else {}
        self._warn_of_new(new)
        return loss

    def _move(self, group: Mapping[str, Any]) -> None:
        """Move the parameters of a group along their updates, which are stored as gradients."""
        move, where = Move.of(group), self.preconditioner.home
        if move.constraint is None:
            moving.descend(group["params"], where, move)
            return
        kept: set[nn.Parameter] = set()
        for ball in self._balls[group["method"]]:
            ball.move(where, self._radii[ball.key], move.lr)
            kept.update(ball.matrices.values())
        moving.descend([p for p in group["params"] if p not in kept], where, move)

    def check_settings(self) -> None:
        """Raise a ValueError if a setting of a param group is out of range, before a step.

        :meta private:
        """
        for group in self.param_groups:
            Move.of(group)
        if not self._rebuilt:  # else the new blocks are known only after the step
            self._measure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters of the model, wherever they live.

        This includes parameters that were frozen since their backward pass.

        Args:
            set_to_none: Whether gradients are None afterwards, rather than zero.
        """
        super().zero_grad(set_to_none)
        grouped = [p for group in self.param_groups for p in group["params"]]
        known = {id(p) for p in grouped}
        others = (p for p in self._model.parameters() if id(p) not in known)
        home.empty(self.preconditioner.home, grouped, others, set_to_none=set_to_none)
        self.preconditioner.gradients_were_zeroed()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        Every rank must call it if `soframe.Preconditioner.state_dict` requires that.

        Returns:
            The param groups, as in any optimizer, and the preconditioner's state.
        """
        # Norms of matrices that are frozen or gone are not saved.
        keys = {ball.key for balls in self._balls.values() for ball in balls}
        radii = {key: radius.clone() for key, radius in self._radii.items() if key in keys}
        return {
            **super().state_dict(),
            RADII: checksums.seal({RADII: radii}),
            PRECONDITIONER: self.preconditioner.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, on every rank, from a state, perhaps of another world size or strategy.

        The param groups become the saved ones, in the saved order, by which schedulers address
        them.

        Args:
            state_dict: The state that `state_dict` returned.

        Raises:
            ValueError: If it is not of this optimizer, or damaged; nothing has changed then.
        """
        balls = {ball.key: ball for balls in self._balls.values() for ball in balls}

        def check() -> None:
            if PRECONDITIONER not in state_dict:
                raise ValueError("this is not the state of a soframe.Optimizer")
            for group in state_dict.get("param_groups", ()):
                if "method" in group:
                    Move.of({**self.defaults, **group})
            saved = _sizes(state_dict.get("param_groups", ()))
            if saved != _sizes(self.param_groups):
                raise ValueError(
                    f"the state has param groups {saved} (method: parameters), and this optimizer "
                    f"{_sizes(self.param_groups)}"
                )
            if RADII in state_dict:  # absent in states from before constraints existed
                checksums.verify(state_dict[RADII], "the state of constraints")
                moving.require_radii(state_dict[RADII].get(RADII), list(balls.values()))

        def common() -> str:
            sums = state_dict.get(RADII, {}).get(checksums.KEY, {})
            return checksums.text(sums)

        # Ranks agree before anything changes: all load the state, or none does.
        self.preconditioner.agree_on_state(check, common)
        self.preconditioner.load_state_dict(state_dict[PRECONDITIONER])
        radii = state_dict.get(RADII, {}).get(RADII, {})
        self._radii = {key: balls[key].loaded(radius) for key, radius in radii.items()}
        self._take_groups(state_dict["param_groups"])

    def _take_groups(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Replace the param groups by saved ones, in their order, by which schedulers address them.

        Groups with parameters are the same on both sides. A saved group without parameters that is
        missing here is added, for parameters that are thawed later; a group that the state lacks is
        removed.
        """
        groups = {group["method"]: group for group in self.param_groups}
        self.param_groups.clear()
        for method, settings in {group["method"]: group for group in saved}.items():
            group = groups.get(method, {**self.defaults, "params": []})
            group.update({key: value for key, value in settings.items() if key != "params"})
            self.param_groups.append(group)
        self._find_balls()

    # -- inspection ---------------------------------------------------------------------------

    def observe(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """See `soframe.Preconditioner.observe`."""
        self.preconditioner.observe(outputs)

    def report(self) -> Report:
        """See `soframe.Preconditioner.report`: every parameter, with its method."""
        return self.preconditioner.report()

    @property
    def placement(self) -> Placement:
        """See `soframe.Preconditioner.placement`."""
        return self.preconditioner.placement

    def metrics(self, *, spectra: Spectra = False, all_ranks: bool = False) -> dict[str, Any]:
        """Return the settings in force and the outcome of the last step, by block and overall.

        Args:
            spectra: See `soframe.Preconditioner.metrics`.
            all_ranks: See `soframe.Preconditioner.metrics`.

        Returns:
            See `soframe.Preconditioner.metrics`; ``"param_groups"``, the settings of each; and for
            each block ``"update_norm"``, the distance that its weights moved, in a step that
            measures norms: for this it keeps a copy of the weights while they move.
        """
        metrics = self.preconditioner.metrics(spectra=spectra, all_ranks=all_ranks)
        moved = {name: float(norm) for name, norm in self._moved.items()}
        for name, block in metrics["blocks"].items():
            block["update_norm"] = moved.get(name)
        known = set(moved) == set(metrics["blocks"])
        metrics["norms"]["update_norm"] = math.hypot(*moved.values()) if known else None
        groups = {
            group["method"]: {name: group[name] for name in _settings(self._moves[""])}
            for group in self.param_groups
        }
        for group in groups.values():
            group["lr"] = float(group["lr"])
        return {**metrics, "param_groups": groups}

    def __repr__(self) -> str:
        groups = [
            f"  {group['method']}: "
            + ", ".join(f"{name}={group[name]!r}" for name in _settings(self._moves[""]))
            + f", {len(group['params'])} parameter(s)\n"
            for group in self.param_groups
        ]
        preconditioner = repr(self.preconditioner).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n{''.join(groups)}  preconditioner: {preconditioner}\n)"

    def close(self) -> None:
        """See `soframe.Preconditioner.close`."""
        self.preconditioner.close()


def _require_known(names: Iterable[str]) -> None:
    """Raise if a setting is neither this optimizer's nor a preconditioner's."""
    parameters = inspect.signature(Preconditioner.__init__).parameters
    known = sorted(set(parameters) - {"self", "model", "method", "auxiliary", "optimizer", "lr"})
    for name in names:
        if name not in known:
            raise TypeError(
                f"soframe.Optimizer has no setting {name!r}. What a method takes is given to the "
                f"method: method=soframe.methods.SOAP(betas=(0.9, 0.95)), for example. There are "
                f"the optimizer's own settings, and {', '.join(known)}"
            )


def _sizes(groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of parameters of each method that has any."""
    sizes = {str(group.get("method")): len(group.get("params", ())) for group in groups}
    return {method: size for method, size in sizes.items() if size > 0}


def _group_of(block: Block) -> str:
    """Return the name of a block's param group."""
    return f"{'auxiliary: ' * block.auxiliary}{describe(block.method)}"


def _settings(move: Move) -> dict[str, Any]:
    """Return the settings of a param group."""
    return {
        "lr": move.lr,
        "weight_decay": move.weight_decay,
        "weight_decay_kind": move.kind,
        "constraint": move.constraint,
    }
