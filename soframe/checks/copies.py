"""Copies of what belongs to one model: they say what they are once they are used.

A copied, or pickled, optimizer has no hooks on the copied model, no ranks and no thread. torch's
own `Optimizer.__getstate__` keeps param groups and states alone. That a module which has one as an
attribute is copied, as for a running average of its weights, is no error; that the copy steps is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Uncopied:
    """A base of classes whose copies have nothing, and say so."""

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy gets none of what this has."""
        return {}

    if not TYPE_CHECKING:

        def __setstate__(self, state: dict[str, Any]) -> None:
            """Have nothing; or what torch loads, whose optimizers hand a state on to this.

            Args:
                state: Nothing for a copy.
            """
            if state:
                super().__setstate__(state)

        def __getattr__(self, name: str) -> Any:
            """Say of what there is not whether that is since this is a copy.

            Raises:
                AttributeError: Always: what there is is found without.
            """
            kind = type(self).__name__
            if "_model" in self.__dict__:
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(
                f"there is no {name!r}: this is a copy of a soframe.{kind}, or of a pickle, and "
                f"belongs to no model. Build one for the copied model, and let it load the "
                f"state_dict() of the original"
            )
