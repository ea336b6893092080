"""An optimizer that owns the step of any method, distributed as a preconditioner is.

::

    optimizer = soframe.Optimizer(model, method="soap-normuon", lr=0.04, strategy="sharded")
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
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from soframe.blocks import home, sharding
from soframe.blocks.block import Block
from soframe.blocks.registration import Choice, plain_name, unwrap
from soframe.blocks.report import Report
from soframe.blocks.stack import Stack
from soframe.capture.untraced import untraced
from soframe.checks.arguments import check_model
from soframe.checks.numbers import require_numbers
from soframe.diagnostics.metrics import Spectra
from soframe.diagnostics.norms import changes
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS, describe
from soframe.setup.choosing import methods
from soframe.state import checksums
from soframe.state.bound import OfModel
from soframe.step import fused_adam, moving
from soframe.step.moving import Ball, Constraint, Move, WeightDecayKind
from soframe.strategies.placement import Placement

KEY = "soframe"
"""The key of all state but param groups, in the state of the first trained parameter."""
SETTINGS = ("lr", "weight_decay", "weight_decay_kind", "constraint", "decay_vectors")
"""The settings of a param group that say how its parameters move."""


class Optimizer(OfModel, torch.optim.Optimizer):
    """Updates the parameters of a model with any method.

    Each entry of ``param_groups`` is divided by method into groups: ``group["method"]`` is the
    registered name of the method, with a number from the second instance of a class on, and with
    the prefix ``"auxiliary: "`` for ``auxiliary``. All settings in a group
    are read at every step, and may be changed there at any time, alike on all ranks. Groups may be
    split, merged, reordered and added, too: every trainable parameter has to be in one group, which
    is saved by the names of its parameters.

    Frozen parameters keep their group, and the moments of methods that read gradients alone, as in
    torch's optimizers; statistics of calls begin anew if they are thawed. Parameters that are
    thawed or added to the model later join the group of their method, or begin one at the first
    learning rate, with a warning if a schedule has changed the rates of the others.

    Args:
        model: The model; DistributedDataParallel and compiled wrappers are looked through.
        method: The method: a name, class, instance, or a mapping from patterns on module names to
            one of these. Parameters that match no pattern, or that the method does not support, are
            ``auxiliary``'s: for orthogonalisation embeddings, vectors and the head.
        lr: The learning rate of ``method``.
        weight_decay: The weight decay of ``method``; a step takes ``lr * weight_decay`` of it.
        weight_decay_kind: ``"decoupled"``; or ``"cautious"``, which leaves out the entries that the
            update moves away from zero (Chen et al., 2025).
        decay_vectors: Whether vectors, such as biases and gains of norms, decay as well as matrices
            and tables; torch's optimizers let them, most recipes for training do not.
        constraint: ``"hyperball"`` lets every matrix of ``method``, in each of its groups, keep the
            Frobenius norm that it has at the first step (Wen et al., 2026): ``lr`` is then an
            angle, of the order of 0.01, the length of updates does not matter, and weights do not
            decay. Vectors, such as biases and gains of norms, move without. None for none.
        auxiliary: The method of all other trainable parameters.
        auxiliary_lr: Its learning rate; None for a multiple of ``lr`` that suits the method
            (`soframe.methods.Method.auxiliary_ratio`): a fifth for Muon and its kin.
        auxiliary_weight_decay: Its weight decay; None for ``weight_decay``.
        auxiliary_weight_decay_kind: Its kind of weight decay; None for ``weight_decay_kind``.
        auxiliary_constraint: Its constraint; by default none, with any ``constraint``.
        param_groups: Dicts with ``"params"`` and settings of their own, as for torch's optimizers:
            each of the nine above by its name. Together they have every trainable parameter; None
            for one group of all.
        **preconditioner: Further settings of `soframe.Preconditioner`, such as ``strategy``,
            ``solver``, ``damping``, ``solve_every``, ``gradients``.

    Attributes:
        preconditioner: The preconditioner that makes the updates: its ``report``, ``memory_usage``,
            ``traffic``, ``placement`` and ``observe`` are of use here, too.

    Raises:
        ValueError: If a setting is out of range, a component does not exist, or a trainable
            parameter is in no group.
        TypeError: If a setting has the wrong type or does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Choice = "soap-normuon",
        *,
        lr: float,
        weight_decay: float = 0.0,
        weight_decay_kind: WeightDecayKind = "decoupled",
        decay_vectors: bool = False,
        constraint: Constraint | None = None,
        auxiliary: Choice = "adamw",
        auxiliary_lr: float | None = None,
        auxiliary_weight_decay: float | None = None,
        auxiliary_weight_decay_kind: WeightDecayKind | None = None,
        auxiliary_constraint: Constraint | None = None,
        param_groups: Iterable[dict[str, Any]] | None = None,
        **preconditioner: Any,
    ) -> None:
        self._settings = {
            name: value
            for name, value in locals().items()
            if name.removeprefix("auxiliary_") in SETTINGS
        }
        check_model(model)
        if "optimizer" in preconditioner:
            raise TypeError("optimizer= is this optimizer's own; leave it out")
        _require_known(preconditioner)
        if auxiliary is None:
            raise TypeError(
                "auxiliary= names the method of parameters that method= leaves out; freeze those "
                "that are not to be trained"
            )
        self._ratio = _ratio(method)
        for prefix in ("", "auxiliary_"):
            settings = self._of_method(self._settings, prefix)
            rates = {prefix + name: settings[name] for name in ("lr", "weight_decay")}
            require_numbers("soframe.Optimizer", **rates)
            moving.check(Move.of(settings), name="", prefix=prefix)
        self._model = unwrap(model)
        every = [p for p in self._model.parameters() if p.requires_grad]
        super().__init__(every if param_groups is None else param_groups, {})
        self._adopts = param_groups is None  # parameters that are added to the model later
        # As given; `group` makes the param groups of them, once the methods are known.
        self._given, self.param_groups = self.param_groups, []
        self._names: dict[int, str] = {}
        self._method_names: dict[str, str] = {}  # by the description of a method
        self._radii: dict[str, Tensor] = {}
        self._stacks: Sequence[Stack] = ()
        self._adam: dict[Stack, fused_adam.Adam] = {}  # of these, those of Adam
        self._moves: list[Move] = []  # of the param groups, at this step
        self._group_of: dict[int, int] = {}  # the number of each parameter's group, by identity
        self._moved: Mapping[str, Tensor] = {}
        self._new: list[dict[str, Any]] = []
        self._placed: Placement | None = None
        self._read: tuple[object, ...] = ()
        cast(dict[Any, Any], self.state)[KEY] = {}  # until it is cleared
        self.preconditioner = Preconditioner(
            model, method=method, auxiliary=auxiliary, optimizer=self, **preconditioner
        )
        self._new.clear()
        self.defaults.update(self._of_method(self._settings, ""))
        # OneCycleLR and CyclicLR change "betas" of all groups if it is a default, else "momentum".
        of_groups = self._settings_of_methods()
        if all("betas" in of and "momentum" not in of for of in of_groups):
            self.defaults["betas"] = None
        elif any("betas" in of or "momentum" in of for of in of_groups):
            self.defaults["momentum"] = None
        try:
            # An error on one stage of a pipeline is raised on all of them.
            with self.preconditioner.together():
                for ball in self._constrained():
                    ball.norms()  # raises if a norm is zero or not finite
        except Exception:
            self.preconditioner.close()
            raise

    def group(self, blocks: Sequence[Block]) -> None:
        """Put parameters of blocks that are in no param group into one, as given and by method.

        Raises:
            ValueError: If groups were given without one of them.

        :meta private:
        """
        sharding.require_own_step(self._model.parameters())
        former = self._names
        named = {plain_name(name): p for name, p in self._model.named_parameters()}
        self._names = {id(p): name for name, p in named.items()}
        for group in (*self.param_groups, *self._given):
            # Where a parameter was replaced, as by fully_shard, the new one has its place.
            now = [
                p if id(p) in self._names else named.get(former.get(id(p), ""))
                for p in group["params"]
            ]
            group["params"] = [p for p in now if p is not None]
        replaced = set()  # blocks that are made anew at the next step
        for block in blocks:
            for parameter in block.parameters.values():
                if id(parameter) not in self._names:
                    replaced.add(block)
        current = [block for block in blocks if block not in replaced]
        grouped = {id(p) for group in self.param_groups for p in group["params"]}
        for group in self._given:
            group["params"] = [p for p in group["params"] if id(p) not in grouped]
        given = {id(p): i for i, group in enumerate(self._given) for p in group["params"]}
        missing = [
            (block, p)
            for block in current
            for p in block.parameters.values()
            if p.requires_grad and id(p) not in grouped
        ]
        lost = [self._names[id(p)] for _, p in missing if id(p) not in given and not self._adopts]
        if lost:
            raise ValueError(
                f"{', '.join(lost)} in no param group: give it to one, by param_groups= or "
                f"add_param_group, or freeze it"
            )
        for block, parameter in missing:
            key = (given.get(id(parameter), 0), self._method_name(block))
            same = [g for g in self.param_groups if (g.get("given"), g.get("method")) == key]
            group = same[0] if same else self._begin(*key, block)
            group["params"].append(parameter)
        methods = {id(block.method): block.method for block in blocks}.values()
        self._options = sorted({"momentum", *(k for one in methods for k in one.settings())})
        self._balls = [ball for block in current if (ball := Ball(block, self._names)).trained]
        members = {id(p) for group in self.param_groups for p in group["params"]}
        self._others = [p for p in self._model.parameters() if id(p) not in members]

    def _method_name(self, block: Block) -> str:
        """Return the name of a block's method in its param group."""
        text = describe(block.method)
        if text not in self._method_names:
            registered = KINDS["method"].name_of(type(block.method))
            same = [name for name in self._method_names.values() if name.split()[0] == registered]
            name = f"{registered} {len(same) + 1}" if same else registered
            self._method_names[text] = name
        name = self._method_names[text]
        return f"auxiliary: {name}" if block.auxiliary else name

    def _of_method(self, settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the settings of a param group, from the constructor's."""
        own = {name: settings.get(f"{prefix}{name}") for name in SETTINGS}
        if own["lr"] is None:
            own["lr"] = settings["lr"] * self._ratio
        # The auxiliary method is constrained by a setting of its own alone.
        return {k: settings[k] if v is None and k != "constraint" else v for k, v in own.items()}

    def _begin(self, number: int, method: str, block: Block) -> dict[str, Any]:
        """Add a param group without parameters."""
        given = {k: v for k, v in self._given[number].items() if k not in ("params", "param_names")}
        settings = self._of_method({**self._settings, **given}, "auxiliary_" * block.auxiliary)
        rest = {name: given[name] for name in given.keys() - self._settings.keys()}
        options = block.method.settings()
        if "momentum" not in options:
            rest.pop("momentum", None)  # another method's, which `_hand` would take for a beta
        own = {**options, **rest}
        group = {**settings, **own, "method": method, "given": number, "params": []}
        Move.of(group)  # checks them
        self.param_groups.append(group)
        self._new.append(group)
        return group

    def _warn_of_new(self) -> None:
        """Warn of groups that begin where a schedule has changed the rates of the others."""
        new, self._new = self._new, []
        if not new:
            return
        others = [g for g in self.param_groups if not any(g is one for one in new)]
        scheduler = any("initial_lr" in group for group in others)  # wraps step()
        first = {
            float(self._of_method({**self._settings, **given}, prefix)["lr"])
            for given in self._given
            for prefix in ("", "auxiliary_")
        }
        if scheduler or any(float(group["lr"]) not in first for group in others):
            said = "; ".join(f"{group['method']} at lr={group['lr']}" for group in new)
            warnings.warn(
                f"soframe: param group(s) of soframe.Optimizer begin, since parameters were thawed "
                f"or added: {said}. No schedule has changed this rate, as it has others, and a "
                f"scheduler of torch that is there already may raise. Build the optimizer and its "
                f"schedulers while the parameters are trained, and freeze them afterwards; or set "
                f"optimizer.param_groups[...]['lr'], and make the schedulers anew",
                stacklevel=8 if scheduler else 7,
            )

    def _constrained(self) -> Iterator[Ball]:
        """Yield the matrices whose norms are kept, by the group of the first of each block."""
        kept = {
            id(p) for g in self.param_groups if g["constraint"] is not None for p in g["params"]
        }
        for ball in self._balls if kept else ():
            if id(next(iter(ball.matrices.values()))) in kept:
                yield ball

    def _measure(self) -> None:
        """Measure the norms of matrices that become constrained."""
        for ball in self._constrained():
            if ball.key not in self._radii:
                self._radii[ball.key] = ball.norms()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model that are in none; it is divided by method.

        Parameters that are new in the model, or thawed after it was built, are in it from the next
        step on.

        Args:
            param_group: ``"params"``, and settings as for ``param_groups`` of the constructor.

        Raises:
            ValueError: If a parameter is not of the model, or in another group.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "preconditioner"):
            return  # called by torch's constructor
        group = self.param_groups.pop()
        model = {id(p) for p in self._model.parameters()}
        if any(id(p) not in model for p in group["params"]):
            raise ValueError(
                "add_param_group takes parameters of the model that soframe.Optimizer has: add the "
                "module to the model first"
            )
        for name in ("betas", "momentum"):
            if group.get(name) is None:
                group.pop(name, None)  # torch's, from the defaults that schedulers look for
        self._given.append(group)
        self.group(self.preconditioner.blocks)

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
        if not self.state:  # cleared, to begin anew
            self.preconditioner.forget()
            cast(dict[Any, Any], self.state)[KEY] = {}
        sharding.require_own_step(self._model.parameters())
        self.preconditioner.step()
        self._moved = {}
        good = self.preconditioner.good
        if good is not None or self.preconditioner.updated:
            blocks: Sequence[Block] = ()
            before: dict[nn.Parameter, Tensor] = {}
            if self.preconditioner.measures_norms:
                # Copies of all weights, to measure how far they move.
                blocks = self.preconditioner.blocks
                every = (p for block in blocks for p in block.parameters.values())
                before = {p: p.detach().clone() for p in every}
            with self.preconditioner.backend.phases("move"):
                self._move(good)
            self._moved = changes(before, blocks) if before else {}
        self._warn_of_new()
        return loss

    def moves(self, stacks: Sequence[Stack]) -> Sequence[Stack]:
        """Return the stacks that torch's fused kernel moves in this step.

        :meta private:
        """
        if self._stacks is not stacks:
            backend = self.preconditioner.backend
            self._stacks = stacks
            self._adam = {
                stack: fused_adam.Adam(stack)
                for stack in stacks
                if fused_adam.serves(stack, backend)
            }
        complete = fused_adam.complete
        return [stack for stack in self._adam if complete(stack, self._group_of, self._moves)]

    def _move(self, good: Tensor | None) -> None:
        """Move all parameters along their updates, which are stored as gradients."""
        where, kept = self.preconditioner.home, set[int]()
        for stack in self.preconditioner.apart:
            self._adam[stack].move(self._group_of, self._moves, good)
            kept.update(map(id, stack.parameters))
        rates = {id(p): g["lr"] for g in self.param_groups if g["constraint"] for p in g["params"]}
        for ball in self._constrained() if rates else ():
            first, *_ = ids = [id(p) for p in ball.matrices.values()]
            ball.move(where, self._radii[ball.key], float(rates[first]))
            kept.update(ids)
        for group, move in zip(self.param_groups, self._moves, strict=True):
            # A parameter that was frozen after its backward pass still has a gradient.
            free = [p for p in group["params"] if p.requires_grad and id(p) not in kept]
            if free:
                moving.descend(free, where, move, good)

    def selects(self) -> bool:
        """Return whether weights can stay where they are without the host.

        :meta private:
        """
        return moving.selects(self.param_groups)

    def check_settings(self) -> None:
        """Check the param groups before a step.

        Raises:
            ValueError: If a setting is out of range, or a parameter is not in one group.

        :meta private:
        """
        self._moves = [Move.of(group) for group in self.param_groups]
        members = [list(map(id, group["params"])) for group in self.param_groups]
        settings = self._settings_of_methods()
        same = self._placed is self.preconditioner.placement and self._read == (members, settings)
        if not same and not self.preconditioner.changed:
            self._hand(settings)
            self._placed, self._read = self.preconditioner.placement, (members, settings)
        self._measure()

    def _settings_of_methods(self) -> list[dict[str, Any]]:
        """Return the settings of methods in each param group."""
        return [
            {
                name: tuple(group[name]) if isinstance(group[name], list) else group[name]
                for name in self._options
                if name in group
            }
            for group in self.param_groups
        ]

    def _hand(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Check that blocks are in one group each, and hand its settings to their methods."""
        group_of: dict[int, list[int]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                group_of.setdefault(id(parameter), []).append(number)
        self._group_of = {key: numbers[0] for key, numbers in group_of.items()}
        made: dict[tuple[int, str], Method] = {}
        texts = list(map(repr, settings))
        for block in self.preconditioner.blocks:
            trained = [p for p in block.parameters.values() if p.requires_grad]
            for p in trained:
                numbers = group_of.get(id(p), [])
                if len(numbers) != 1:
                    raise ValueError(
                        f"{self._names[id(p)]} is in {len(numbers) or 'no'} param group(s): every "
                        f"trainable parameter is in one, so give it to one by add_param_group, or "
                        f"freeze it"
                    )
            if not trained:
                continue
            # A block has one method: the group of its first parameter decides.
            number = group_of[id(next(iter(block.parameters.values())))][0]
            key = (id(block.method), texts[number])
            if key not in made:
                values, own = settings[number], block.method.settings()
                if "momentum" in values and "momentum" not in own and "betas" in values:
                    # As schedulers write it that cycle the momentum of all groups by one name.
                    values = {**values, "betas": (values["momentum"], *values["betas"][1:])}
                made[key] = block.method.with_settings(values)
            block.act(made[key])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters of the model, wherever they live.

        This includes parameters that were frozen since their backward pass.

        Args:
            set_to_none: Whether gradients are None afterwards, rather than zero.
        """
        grouped = [p for group in self.param_groups for p in group["params"]]
        # A walk through the model takes a while.
        others = list(self._model.parameters()) if self.preconditioner.changed else self._others
        home.empty(self.preconditioner.home, [*grouped, *others], set_to_none=set_to_none)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        Every rank must call it if `soframe.Preconditioner.state_dict` requires that.

        Returns:
            The param groups, as in any optimizer, and the preconditioner's state.
        """
        saved = super().state_dict()
        # Parameters may have been replaced since the last step, as by fully_shard.
        now = {id(p): plain_name(name) for name, p in self._model.named_parameters()}
        names = {**self._names, **now}
        for group, own in zip(saved["param_groups"], self.param_groups, strict=True):
            group["names"] = [names[id(p)] for p in own["params"]]
        # Norms of matrices that are frozen or gone are not saved.
        keys = {ball.key for ball in self._balls}
        radii = {key: radius.clone() for key, radius in self._radii.items() if key in keys}
        groups = list(map(_without_params, saved["param_groups"]))
        own = checksums.seal({"radii": radii, "groups": groups})
        whole = io.BytesIO()
        torch.save({"own": own, "preconditioner": self.preconditioner.state_dict()}, whole)
        # Bytes: torch.distributed.checkpoint reads into the tensors of a state, and before its
        # first step an optimizer has few. It wants an entry for each trained parameter, and a
        # tensor in it.
        grouped = [p for group in self.param_groups for p in group["params"]]
        steps, where = [self.preconditioner.steps], self.preconditioner.home
        state: dict[int, dict[str, Any]] = {
            number: {"step": torch.tensor(steps, device=where.local(p).device)}
            for number, p in enumerate(grouped)
            if p.requires_grad
        }
        next(iter(state.values()), {})[KEY] = whole.getvalue()
        return {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, on every rank, from a state, perhaps of another world size or strategy.

        The param groups become the saved ones, in the saved order, by which schedulers address
        them.

        Args:
            state_dict: The state that `state_dict` returned.

        Raises:
            ValueError: If it is not of this optimizer, or damaged; nothing has changed then.
        """
        named = {plain_name(name): p for name, p in self._model.named_parameters()}
        balls = {ball.key: ball for ball in self._balls}
        found: dict[str, Any] = {}

        def check() -> None:
            entries = (e for e in state_dict.get("state", {}).values() if isinstance(e, Mapping))
            whole = next((entry[KEY] for entry in entries if KEY in entry), None)
            if whole is None:
                raise ValueError("this is not the state of a soframe.Optimizer")
            try:
                found.update(torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True))
            except Exception as error:  # of any kind: these are bytes of a file
                raise ValueError(f"the state is damaged: {error}") from error
            own = found["own"]
            checksums.verify(own, "the state of the optimizer")
            by_names = {tuple(group["names"]): group for group in own["groups"]}
            for group in map(_without_params, state_dict.get("param_groups", ())):
                # DCP leaves out entries that the loading optimizer lacks, such as a scheduler's.
                saved = by_names.get(tuple(group.get("names", ())), {})
                if _sealed(group) != _sealed({key: saved.get(key) for key in group}):
                    raise ValueError(
                        "the state is damaged: its param groups were changed after saving; to "
                        "change one, load the state first, then change optimizer.param_groups"
                    )
            moving.require_radii(own["radii"], list(balls.values()))
            names = {name for group in own["groups"] for name in group["names"]}
            if strange := sorted(names - named.keys()):
                raise ValueError(f"this model has no {', '.join(strange)}, which the state groups")

        # Ranks agree before anything changes: all load the state, or none does.
        self.preconditioner.agree_on_state(
            check, lambda: checksums.text(found["own"][checksums.KEY])
        )
        self.preconditioner.load_state_dict(found["preconditioner"])
        own = found["own"]
        self._radii = {key: balls[key].loaded(radius) for key, radius in own["radii"].items()}
        self.param_groups = [
            {**group, "params": [named[name] for name in group["names"]]} for group in own["groups"]
        ]
        blocks = self.preconditioner.blocks
        block_of = {id(p): block for block in blocks for p in block.parameters.values()}
        for group in self.param_groups:
            del group["names"]
            of_group = [block_of[id(p)] for p in group["params"] if id(p) in block_of]
            if of_group:  # a state may have another name of the same method
                group["method"] = self._method_name(of_group[0])
        self.group(blocks)
        self._new.clear()

    # -- inspection ---------------------------------------------------------------------------

    def observe(self, outputs: Tensor | Sequence[Tensor], *, weight: float = 1.0) -> None:
        """See `soframe.Preconditioner.observe`."""
        self.preconditioner.observe(outputs, weight=weight)

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
        each = self._moved if self.preconditioner.updated else {}
        moved = {name: float(norm) for name, norm in each.items()}
        for name, block in metrics["blocks"].items():
            block["update_norm"] = moved.get(name)
        known = set(moved) == set(metrics["blocks"])
        metrics["norms"]["update_norm"] = math.hypot(*moved.values()) if known else None
        groups: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self.param_groups):
            name = (
                group["method"] if group["method"] not in groups else f"{number}: {group['method']}"
            )
            groups[name] = {**{key: group[key] for key in SETTINGS}, "lr": float(group["lr"])}
        return {**metrics, "param_groups": groups}

    def __repr__(self) -> str:
        groups = [
            f"  {group['method']}: "
            + ", ".join(f"{name}={group[name]!r}" for name in SETTINGS)
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


def _ratio(method: Choice) -> float:
    """Return the auxiliary learning rate over the method's; the least of several methods."""
    return min(one.auxiliary_ratio for one in methods(method))


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _sealed(group: Mapping[str, Any]) -> object:
    """Return the checksums of a param group, with lists for tuples, as DCP makes them."""
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items()}
    return checksums.seal(plain)[checksums.KEY]
