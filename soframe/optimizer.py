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

import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from soframe.blocks import home, sharding
from soframe.blocks.block import Block, Stack
from soframe.blocks.registration import Choice, unwrap
from soframe.blocks.report import Report
from soframe.blocks.survey import plain_name
from soframe.checks.arguments import check_model, keywords
from soframe.checks.values import require_numbers
from soframe.checks.warning import warn
from soframe.diagnostics.metrics import Spectra
from soframe.diagnostics.norms import changes, copies
from soframe.estimate.updates import by_parameter
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS, describe
from soframe.settings import require_known
from soframe.setup.choosing import methods
from soframe.state import checksums
from soframe.state.bound import OfModel
from soframe.step import fused_adam, moving
from soframe.step.engine import untraced
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

    Frozen parameters keep their group and, with the memory that they take, their moments, as in
    torch's optimizers; layers that are frozen as a whole keep statistics of calls, too. Parameters
    that are thawed or added to the model later join the group of their method, or begin one at the
    first learning rate, with a warning if a schedule has changed the rates of the others.

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
            decay. Vectors, such as biases and gains of norms, are not constrained. None for none.
        auxiliary: The method of all other trainable parameters.
        auxiliary_lr: Its learning rate; None for a multiple of ``lr`` that suits the method
            (`soframe.methods.Method.auxiliary_ratio`): a fifth for Muon and its variants.
        auxiliary_weight_decay: Its weight decay; None for ``weight_decay``.
        auxiliary_weight_decay_kind: Its kind of weight decay; None for ``weight_decay_kind``.
        auxiliary_constraint: Its constraint; by default none, with any ``constraint``.
        param_groups: Dicts with ``"params"`` and settings of their own, as for torch's optimizers:
            each of the nine above by its name. Together they have every trainable parameter; None
            for one group of all.
        **preconditioner: Further settings of `soframe.Preconditioner`, such as ``strategy``.

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
        known = keywords(Optimizer) | keywords(Preconditioner) - {"optimizer"}
        require_known("soframe.Optimizer", preconditioner, known)
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
            Move.of(settings, prefix)  # checks them
        self._model = unwrap(model)
        chosen = _trained_of(self._model) if param_groups is None else param_groups
        super().__init__(chosen, {})
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
        self.defaults.update(_momentum_default(self._settings_of_methods()))
        _require_norms(self._constrained(), self.preconditioner)

    def group(self, blocks: Sequence[Block]) -> None:
        """Put parameters of blocks that are in no param group into one, as given and by method.

        Raises:
            ValueError: If groups were given without one of them.
        """
        sharding.require_own_step(self._model.parameters())
        self._find_names()
        # Blocks with a replaced parameter are made anew at the next step.
        known = self._names.keys()
        current = [b for b in blocks if known >= set(map(id, b.parameters.values()))]
        self._join(current)
        options = {"momentum"}
        for method in {id(block.method): block.method for block in blocks}.values():
            options.update(method.settings())
        self._options = sorted(options)
        self._current = current
        self.__dict__.pop("_balls", None)
        members = _members(self.param_groups)
        self._others = [p for p in self._model.parameters() if id(p) not in members]

    @cached_property
    def _balls(self) -> list[Ball]:
        """The matrices whose norms a constraint may keep, also while they are frozen."""
        balls = [Ball(block, self._names) for block in self._current]
        return [ball for ball in balls if ball.matrices]

    def _find_names(self) -> None:
        """Read the names of parameters, and take replaced ones out of the param groups."""
        former, named = self._names, _named(self._model)
        self._names = {id(p): name for name, p in named.items()}
        for group in self.param_groups + self._given:
            parameters: list[nn.Parameter] = []
            for p in group["params"]:
                # Where a parameter was replaced, as by fully_shard, the new one has its place.
                name = self._names.get(id(p), former.get(id(p)))
                if name in named:
                    parameters.append(named[name])
            group["params"] = parameters

    def _join(self, blocks: Sequence[Block]) -> None:
        """Put the trained parameters of blocks that are in no param group into one."""
        grouped = _members(self.param_groups)
        number_of: dict[int, int] = {}  # of the given group of a parameter, by identity
        for number, group in enumerate(self._given):
            group["params"] = [p for p in group["params"] if id(p) not in grouped]
            number_of.update(dict.fromkeys(map(id, group["params"]), number))
        missing: list[tuple[Block, nn.Parameter]] = []
        for block in blocks:
            missing += [(block, p) for p in _trained(block) if id(p) not in grouped]
        lost = [self._names[id(p)] for _, p in missing if id(p) not in number_of]
        if lost and not self._adopts:
            raise ValueError(
                f"{', '.join(lost)} in no param group: give it to one, by param_groups= or "
                f"add_param_group, or freeze it"
            )
        self._assign(missing, number_of)

    def _assign(
        self, missing: Sequence[tuple[Block, nn.Parameter]], number_of: Mapping[int, int]
    ) -> None:
        """Put parameters into the group of their method, within the group they were given in."""
        groups: dict[tuple[int, str], dict[str, Any]] = {}
        for group in self.param_groups:
            groups.setdefault((group.get("given", 0), group.get("method", "")), group)
        names: dict[tuple[int, bool], str] = {}  # of the methods, which many blocks share
        for block, parameter in missing:
            kind = id(block.method), block.auxiliary
            if kind not in names:
                names[kind] = self._method_name(block)
            number, method = number_of.get(id(parameter), 0), names[kind]
            key = number, method
            if key not in groups:
                groups[key] = self._begin(number, method, block)
            groups[key]["params"].append(parameter)

    def _method_name(self, block: Block) -> str:
        """Return the name of a block's method in its param group."""
        text = describe(block.method)
        if text not in self._method_names:
            name = KINDS["method"].name_of(type(block.method))
            kinds = [known.split()[0] for known in self._method_names.values()]
            if name in kinds:
                name = f"{name} {kinds.count(name) + 1}"
            self._method_names[text] = name
        name = self._method_names[text]
        if block.auxiliary:
            name = f"auxiliary: {name}"
        return name

    def _of_method(self, settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the settings of a param group, from the constructor's."""
        of_method: dict[str, Any] = {}
        for name in SETTINGS:
            value = settings.get(prefix + name)
            if value is None and name == "lr":
                value = settings["lr"] * self._ratio
            elif value is None and name != "constraint":  # of the auxiliary method alone
                value = settings[name]
            of_method[name] = value
        return of_method

    def _begin(self, number: int, method: str, block: Block) -> dict[str, Any]:
        """Add a param group without parameters."""
        chosen = dict(self._given[number])
        chosen.pop("params")
        chosen.pop("param_names", None)
        prefix = "auxiliary_" if block.auxiliary else ""
        settings = self._of_method({**self._settings, **chosen}, prefix)
        rest = {name: chosen[name] for name in chosen.keys() - self._settings.keys()}
        options = block.method.settings()
        if "momentum" not in options:
            rest.pop("momentum", None)  # another method's, which `_hand` would take for a beta
        group = {**settings, **options, **rest, "method": method, "given": number, "params": []}
        Move.of(group)  # checks them
        self.param_groups.append(group)
        self._new.append(group)
        return group

    def _warn_of_new(self) -> None:
        """Warn of groups that begin where a schedule has changed the rates of the others."""
        new, self._new = self._new, []
        numbers = set(map(id, new))
        has_scheduler, rates_now = False, set[float]()  # of the others
        for group in self.param_groups:
            if id(group) not in numbers:
                has_scheduler |= "initial_lr" in group
                rates_now.add(float(group["lr"]))
        if has_scheduler or not rates_now <= self._first_rates():
            rates = "; ".join(f"{group['method']} at lr={group['lr']}" for group in new)
            warn(
                f"param group(s) of soframe.Optimizer begin, since parameters were thawed "
                f"or added: {rates}. No schedule has changed this rate, as it has others, and a "
                f"scheduler of torch that is there already may raise. Build the optimizer and its "
                f"schedulers while the parameters are trained, and freeze them afterwards; or set "
                f"optimizer.param_groups[...]['lr'], and make the schedulers anew"
            )

    def _first_rates(self) -> set[float]:
        """Return the learning rates that param groups begin with."""
        rates: set[float] = set()
        for chosen in self._given:
            for prefix in ("", "auxiliary_"):
                settings = self._of_method({**self._settings, **chosen}, prefix)
                rates.add(float(settings["lr"]))
        return rates

    def _constrained(self) -> Iterator[tuple[Ball, float]]:
        """Yield the matrices whose norms are kept, with the rate of the first of each block."""
        rates: dict[int, float] = {}
        for group in self.param_groups:
            if group["constraint"] is not None:
                rates.update(dict.fromkeys(map(id, group["params"]), float(group["lr"])))
        if not rates:
            return
        for ball in self._balls:
            first = id(next(iter(ball.matrices.values())))
            if first in rates and ball.trained:
                yield ball, rates[first]

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
        model = set(map(id, self._model.parameters()))
        if not model.issuperset(map(id, group["params"])):
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
        engine = self.preconditioner.engine
        with self.preconditioner.curvature.stepping():
            engine.step()
        self._moved = {}
        good = engine.verdict.good
        if good is not None or engine.verdict.taken:
            before: Mapping[nn.Parameter, Tensor] = {}
            if engine.measuring.norms:
                before = copies(self.preconditioner.blocks)
            with self.preconditioner.backend.phases("move"):
                self._move(good)
            if before:
                self._moved = changes(before, self.preconditioner.blocks)
        if self._new:
            self._warn_of_new()
        return loss

    def moves(self, stacks: Sequence[Stack]) -> Sequence[Stack]:
        """Return the stacks that torch's fused kernel moves in this step."""
        if self._stacks is not stacks:
            backend = self.preconditioner.backend
            self._stacks = stacks
            served = [stack for stack in stacks if fused_adam.serves(stack, backend)]
            self._adam = {stack: fused_adam.Adam(stack) for stack in served}
        groups, moves = self._group_of, self._moves
        return [stack for stack, adam in self._adam.items() if adam.complete(groups, moves)]

    def _move(self, good: Tensor | None) -> None:
        """Move all parameters along their updates, or where ``good`` is false none of them."""
        curvature = self.preconditioner.curvature
        where, moved = curvature.parts.home, set[int]()
        parameters, values = by_parameter(self.preconditioner.engine.take_updates())
        updates = dict(zip(map(id, parameters), values, strict=True))
        bad: Tensor | None = None
        if good is not None:
            bad = torch.empty((), device=good.device, dtype=torch.float32)
            torch.logical_not(good, out=bad)
        for stack in curvature.averaged_gradients.left_to_optimizer:
            self._adam[stack].move(self._group_of, self._moves, bad)
            moved.update(map(id, stack.parameters))
        for ball, rate in self._constrained():
            ball.move(where, self._radii[ball.key], rate, updates)
            moved.update(map(id, ball.matrices.values()))
        for group, move in zip(self.param_groups, self._moves, strict=True):
            # A parameter that was frozen after its backward pass still has a gradient.
            free = [p for p in group["params"] if id(p) not in moved and p.requires_grad]
            if free:
                moving.descend(free, where, move, updates, bad)

    def selects(self) -> bool:
        """Return whether weights can stay where they are without the host."""
        return moving.selects(self.param_groups, self._moves)

    def check_settings(self) -> None:
        """Check the param groups before a step.

        Raises:
            ValueError: If a setting is out of range, or a parameter is not in one group.
        """
        self._moves = [Move.of(group) for group in self.param_groups]
        members = [list(map(id, group["params"])) for group in self.param_groups]
        settings = self._settings_of_methods()
        placement = self.preconditioner.curvature.placement
        same = self._placed is placement and self._read == (members, settings)
        if not same and not self.preconditioner.changed:
            self._hand(settings)
            self._placed, self._read = placement, (members, settings)
        for ball, _ in self._constrained():
            if ball.key not in self._radii:  # it becomes constrained
                self._radii[ball.key] = ball.norms()

    def _settings_of_methods(self) -> list[dict[str, Any]]:
        """Return the settings of methods in each param group."""
        settings: list[dict[str, Any]] = []
        for group in self.param_groups:
            of_group: dict[str, Any] = {}
            for name in self._options:
                if name in group:
                    value = group[name]
                    if isinstance(value, list):
                        value = tuple(value)
                    of_group[name] = value
            settings.append(of_group)
        return settings

    def _hand(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Check that blocks are in one group each, and hand its settings to their methods."""
        numbers_of: dict[int, list[int]] = {}
        self._group_of = {}
        for number, group in enumerate(self.param_groups):
            for identity in map(id, group["params"]):
                numbers_of.setdefault(identity, []).append(number)
                self._group_of.setdefault(identity, number)
        methods: dict[tuple[int, str], Method] = {}
        texts = list(map(repr, settings))
        for block in self.preconditioner.blocks:
            if not (trained := _trained(block)):
                continue
            _require_one_group(trained, numbers_of, self._names)
            # A block has one method: the group of its first parameter decides.
            number = self._group_of[id(next(iter(block.parameters.values())))]
            key = (id(block.method), texts[number])
            if key not in methods:
                methods[key] = _with_settings(block.method, settings[number])
            block.act(methods[key])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters of the model, wherever they live.

        This includes parameters that were frozen since their backward pass.

        Args:
            set_to_none: Whether gradients are None afterwards, rather than zero.
        """
        parameters = _parameters(self.param_groups)
        # A walk through the model takes a while.
        if self.preconditioner.changed:
            parameters += self._model.parameters()
        else:
            parameters += self._others
        home.empty(self.preconditioner.home, parameters, set_to_none=set_to_none)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        Every rank must call it if `soframe.Preconditioner.state_dict` requires that.

        Returns:
            The param groups, as in any optimizer, and the preconditioner's state.
        """
        saved = super().state_dict()
        # Parameters may have been replaced since the last step, as by fully_shard.
        present = {id(p): plain_name(name) for name, p in self._model.named_parameters()}
        names = {**self._names, **present}
        for saved_group, group in zip(saved["param_groups"], self.param_groups, strict=True):
            saved_group["names"] = [names[id(p)] for p in group["params"]]
        # Norms of matrices that are gone are not saved.
        radii: dict[str, Tensor] = {}
        if self._radii:
            for ball in self._balls:
                if ball.key in self._radii:
                    radii[ball.key] = self._radii[ball.key].clone()
        groups = list(map(_without_params, saved["param_groups"]))
        sealed = checksums.seal({"radii": radii, "groups": groups})
        buffer = io.BytesIO()
        torch.save({"own": sealed, "preconditioner": self.preconditioner.state_dict()}, buffer)
        # Bytes: torch.distributed.checkpoint reads into the tensors of a state, and before its
        # first step an optimizer has few. It wants an entry for each trained parameter, and a
        # tensor in it.
        steps, where = [self.preconditioner.steps], self.preconditioner.home
        state: dict[int, dict[str, Any]] = {}
        for number, p in enumerate(_parameters(self.param_groups)):
            if p.requires_grad:
                state[number] = {"step": torch.tensor(steps, device=where.local(p).device)}
        next(iter(state.values()), {})[KEY] = buffer.getvalue()
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
        named = _named(self._model)
        frozen = {name for name, p in named.items() if not p.requires_grad}
        balls = {ball.key: ball for ball in self._balls}
        saved, radii = dict[str, Any](), dict[str, Tensor]()

        def check() -> None:
            saved.update(_read(state_dict))
            for key, norms in saved["own"]["radii"].items():
                # A layer that was frozen before this was built has no block.
                if key in balls or not frozen.issuperset(key.split(", ")):
                    radii[key] = norms
            moving.require_radii(radii, list(balls.values()))
            names: set[str] = set()
            for group in saved["own"]["groups"]:
                names.update(group["names"])
            if strange := sorted(names - named.keys()):
                raise ValueError(f"this model has no {', '.join(strange)}, which the state groups")

        # Ranks agree before anything changes: all load the state, or none does.
        agree = self.preconditioner.curvature.agree_on_state
        agree(check, lambda: checksums.text(saved["own"][checksums.KEY]))
        self.preconditioner.load_state_dict(saved["preconditioner"])
        self._radii = {key: balls[key].loaded(norms) for key, norms in radii.items()}
        self._load_groups(saved["own"]["groups"], named)

    def _load_groups(
        self, groups: Iterable[Mapping[str, Any]], named: Mapping[str, nn.Parameter]
    ) -> None:
        """Make the param groups of a state the present ones."""
        blocks = self.preconditioner.blocks
        block_of: dict[int, Block] = {}
        for block in blocks:
            block_of.update(dict.fromkeys(map(id, block.parameters.values()), block))
        self.param_groups = []
        for saved_group in groups:
            group = {**saved_group, "params": [named[name] for name in saved_group["names"]]}
            del group["names"]
            blocks_of_group = [block_of[id(p)] for p in group["params"] if id(p) in block_of]
            if blocks_of_group:  # a state may have another name of the same method
                group["method"] = self._method_name(blocks_of_group[0])
            self.param_groups.append(group)
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

        For the arguments see `soframe.Preconditioner.metrics`.

        Returns:
            The same; ``"param_groups"``, the settings of each; and for each block
            ``"update_norm"``, the distance that its weights moved, in a step that measures norms:
            for this it keeps a copy of the weights while they move.
        """
        metrics = self.preconditioner.metrics(spectra=spectra, all_ranks=all_ranks)
        moved: dict[str, float] = {}
        if self.preconditioner.updated:
            moved = {name: float(norm) for name, norm in self._moved.items()}
        for name, block in metrics["blocks"].items():
            block["update_norm"] = moved.get(name)
        metrics["norms"]["update_norm"] = None
        if moved.keys() == metrics["blocks"].keys():
            metrics["norms"]["update_norm"] = math.hypot(*moved.values())
        groups: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self.param_groups):
            name = group["method"]
            if name in groups:
                name = f"{number}: {name}"
            groups[name] = {key: group[key] for key in SETTINGS}
            groups[name]["lr"] = float(group["lr"])
        return {**metrics, "param_groups": groups}

    def __repr__(self) -> str:
        lines: list[str] = []
        for group in self.param_groups:
            settings = ", ".join(f"{name}={group[name]!r}" for name in SETTINGS)
            count = len(group["params"])
            lines.append(f"  {group['method']}: {settings}, {count} parameter(s)\n")
        preconditioner = repr(self.preconditioner).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n{''.join(lines)}  preconditioner: {preconditioner}\n)"

    def close(self) -> None:
        """See `soframe.Preconditioner.close`."""
        self.preconditioner.close()


def _ratio(method: Choice) -> float:
    """Return the auxiliary learning rate over the method's; the least of several methods."""
    return min(component.auxiliary_ratio for component in methods(method))


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the present parameters of a model by name."""
    return {plain_name(name): p for name, p in model.named_parameters()}


def _parameters(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of param groups, in their order."""
    parameters: list[nn.Parameter] = []
    for group in groups:
        parameters += group["params"]
    return parameters


def _trained(block: Block) -> list[nn.Parameter]:
    """Return the parameters of a block that are not frozen."""
    return [parameter for parameter in block.parameters.values() if parameter.requires_grad]


def _trained_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that are not frozen; raise ValueError if all are."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "the model has no trainable parameter: build it, or thaw a part by "
            "requires_grad_(), before its soframe.Optimizer"
        )
    return trained


def _members(groups: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the identities of the parameters of param groups."""
    return set(map(id, _parameters(groups)))


def _momentum_default(settings: Sequence[Mapping[str, Any]]) -> dict[str, None]:
    """Return the default that names the momentum, for schedulers that cycle it."""
    # OneCycleLR and CyclicLR change "betas" of all groups if it is a default, else "momentum".
    counts = Counter(itertools.chain.from_iterable(settings))
    if counts["betas"] == len(settings) and counts["momentum"] == 0:
        return {"betas": None}
    if counts["betas"] + counts["momentum"] == 0:
        return {}
    return {"momentum": None}


def _require_norms(
    constrained: Iterable[tuple[Ball, float]], preconditioner: Preconditioner
) -> None:
    """Raise a ValueError if a norm that is to be kept is zero or not finite."""
    try:
        # An error on one stage of a pipeline is raised on all of them.
        with preconditioner.curvature.parts.stages.together():
            for ball, _ in constrained:
                ball.norms()
    except Exception:
        preconditioner.close()
        raise


def _require_one_group(
    parameters: Iterable[nn.Parameter],
    numbers_of: Mapping[int, Sequence[int]],
    names: Mapping[int, str],
) -> None:
    """Raise a ValueError if a parameter is in no param group, or in several."""
    for parameter in parameters:
        count = len(numbers_of.get(id(parameter), ()))
        if count != 1:
            raise ValueError(
                f"{names[id(parameter)]} is in {count or 'no'} param group(s): every "
                f"trainable parameter is in one, so give it to one by add_param_group, or "
                f"freeze it"
            )


def _with_settings(method: Method, settings: Mapping[str, Any]) -> Method:
    """Return a method with the settings of its param group."""
    is_of_another = "momentum" in settings and "momentum" not in method.settings()
    if is_of_another and "betas" in settings:
        # As schedulers write it that cycle the momentum of all groups by one name.
        settings = {**settings, "betas": (settings["momentum"], *settings["betas"][1:])}
    return method.with_settings(settings)


@checksums.reading()
def _read(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the optimizer, and of its preconditioner, once it is intact."""
    parts = [entry[KEY] for entry in state_dict.get("state", {}).values() if KEY in entry]
    if not parts:
        raise ValueError("this is not the state of a soframe.Optimizer")
    saved: dict[str, Any] = torch.load(io.BytesIO(parts[0]), map_location="cpu", weights_only=True)
    checksums.verify(saved["own"], "the state of the optimizer")
    by_names = {tuple(group["names"]): group for group in saved["own"]["groups"]}
    for group in map(_without_params, state_dict.get("param_groups", ())):
        # DCP leaves out entries that the loading optimizer lacks, such as a scheduler's.
        saved_group = by_names.get(tuple(group.get("names", ())), {})
        if _sealed(group) != _sealed({key: saved_group.get(key) for key in group}):
            raise ValueError(
                "the state is damaged: its param groups were changed after saving; to "
                "change one, load the state first, then change optimizer.param_groups"
            )
    return saved


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _sealed(group: Mapping[str, Any]) -> object:
    """Return the checksums of a param group, with lists for tuples, as DCP makes them."""
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items()}
    return checksums.seal(plain)[checksums.KEY]
