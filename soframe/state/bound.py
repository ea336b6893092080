"""Objects that are tied to a model: saved by their state, and not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self


class OfModel:
    """An object that is tied to a model: it is saved by its state, and not copied."""

    _remedy: ClassVar[str] = (
        "save its state_dict(), build another one for the other model, and load the state there"
    )

    def __getstate__(self) -> NoReturn:
        """Refuse a pickle, which would lack the state."""
        raise TypeError(self._not("pickled"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse a copy; in the copy of a module that holds this, return an object without use."""
        if not memo:  # it is copied by itself
            raise TypeError(self._not("copied"))
        return object.__new__(type(self))

    def _not(self, done: str) -> str:
        return f"{type(self).__name__} belongs to its model and is not {done}: {self._remedy}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain why a copy has no attributes."""
            if not self.__dict__:
                raise AttributeError(self._not("copied"))
            return object.__getattribute__(self, name)  # raises
