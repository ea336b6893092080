"""Saving and loading a preconditioner; `soframe.state.saving` has the state of its blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import Tensor

from soframe.blocks.registration import plain_name
from soframe.comm.stages import STAGES
from soframe.damping.policies import check_damping
from soframe.diagnostics.metrics import Measuring
from soframe.registry import describe
from soframe.state import checksums
from soframe.state import saving as state
from soframe.step.engine import Engine


class OfModel:
    """An object that is tied to a model: it is saved by its state, and not copied."""

    def __getstate__(self) -> NoReturn:
        """Refuse a pickle, which would lack the state."""
        raise TypeError(self._not("pickled"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse a copy; in the copy of a module that holds this, return an object without use."""
        if not memo:  # it is copied by itself
            raise TypeError(self._not("copied"))
        return object.__new__(type(self))

    def _not(self, done: str) -> str:
        return (
            f"{type(self).__name__} belongs to its model and is not {done}: save its "
            f"state_dict(), build another one for the other model, and load the state there"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain why a copy has no attributes."""
            if not self.__dict__:
                raise AttributeError(self._not("copied"))
            return object.__getattribute__(self, name)  # raises


class Stateful(OfModel, Engine):
    """An engine with ``state_dict`` and ``load_state_dict``, on one rank or many."""

    _measuring: Measuring
    _dampings: dict[str, float | None]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, independent of world size and strategy.

        If the strategy stores factors or second-order data on some ranks only (all but
        ``comm-opt``), call it on every rank. The statistics of the window under way are not part of
        the state. With ``background=``, solves under way are installed first: then every rank must
        call it, with any strategy.

        Returns:
            Tensors, numbers and strings in dicts, for ``torch.save``.
        """
        self._land("Preconditioner.state_dict()")
        return checksums.seal(state.save(self._placed, self.header()))

    def header(self) -> dict[str, Any]:
        """Return the state without its tensors: numbers and strings, the same on every rank.

        :meta private:
        """
        policy = self._damping.state()
        return {
            "format": state.FORMAT,
            "version": state.VERSION,
            "step": self._steps,
            "owed_statistics": self._refresh.owed,
            "scaling": self._scaling,
            "counters": dict(self.counters),
            "blocks": {block.name: state.of_block(block) for block in self.blocks},
            "history": state.history(self._blocks),
            "dampings": state.dampings(self._blocks, self._dampings),
            **({"damping": policy} if policy else {}),  # most policies have nothing to keep
            **({"late": late} if (late := self._statistics.late()) else {}),
            **({STAGES: self.stage} if self.stage else {}),
        }

    def check_header(self, saved: Any) -> None:
        """Raise ValueError unless a state, perhaps without its tensors, can be loaded.

        :meta private:
        """
        named = self._model.named_parameters()
        frozen = {plain_name(name) for name, p in named if not p.requires_grad}
        state.check_header(saved, self._blocks, self._scaling, frozen)
        if self._damping.state() and "damping" in saved:
            check_damping(saved["damping"], self._damping, saved["step"])

    @property
    def stage(self) -> str:
        """The stages of a pipeline on this rank, such as ``"0, 2 of 4"``; empty without one."""
        return self._stages.name

    def _land(self, what: str) -> None:
        """Install all background solves; every rank must call."""
        self._solves.land(self._placed, self.counters, what)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue, on every rank, from a state, perhaps of another world size or strategy.

        Args:
            saved: A result of `state_dict`; on stages of a pipeline this rank's own, or the result
                of `soframe.checkpoint.merge` for the states of all.

        Raises:
            ValueError: If the state is foreign, truncated, damaged or of another model, or another
                rank's is, or the ranks' states differ; nothing has changed then, on any rank.
        """

        def check() -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
            part = self._stages.own_part(saved)
            # A part of a merged state: its checksums were made for the whole.
            if part is not saved:
                checksums.verify(saved)
                part = checksums.seal(part)
            self.check_header(part)
            tensors = dict(checksums.tensors_of(part["blocks"]))  # such as "head/factors/A"
            state.check(part, tensors, self._placed, everywhere=True)
            return part, tensors

        self._load(check)

    def together(self) -> AbstractContextManager[None]:
        """Return a context that raises an error of all copies of one stage on all stages.

        :meta private:
        """
        return self._stages.together()

    def agree_on_state(self, check: Callable[[], object], common: Callable[[], str]) -> None:
        """Raise on all copies of all stages if one rank cannot load its state, so that none does.

        :meta private:
        """
        state.agree(self.backend, check, common, self._stages)

    def _load(self, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]) -> None:
        saved = state.load(check, self._placed, self._stages)
        frozen = saved["blocks"].keys() - {block.name for block in self._blocks}
        if lost := [name for name in frozen if saved["blocks"][name]["updates"]]:
            warnings.warn(
                f"soframe: moments of {', '.join(sorted(lost))} are not loaded, which were frozen "
                f"before this was built: they begin anew if they are thawed. To load them, build "
                f"while they are trained, and freeze them afterwards",
                stacklevel=3,
            )
        # Solves under way are of factors that are replaced now.
        self._solves.drop()
        self._steps = saved["step"]
        self._refresh.owe(saved["owed_statistics"])
        self.outcome.load(saved["counters"])
        if "damping" in saved and self._damping.state():
            self._damping.load(saved["damping"])
        elif self._damping.state():
            warnings.warn(
                f"soframe: the state has nothing of {describe(self._damping)}: it begins anew",
                stacklevel=3,
            )
        state.load_history(saved["history"], self._blocks)
        if "dampings" in saved:  # states of earlier versions lack them
            self._dampings = dict(saved["dampings"])
            for block in self._blocks:
                block.damp(self._dampings.get(block.name))
        self._placed.errors.clear()
        # The metrics of the last step are of another run.
        self._measuring.note(None)
        self._begin(saved.get("late", ()))
