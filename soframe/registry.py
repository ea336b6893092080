"""One registry for every kind of component.

A component is chosen by name (``strategy="mem-opt"``), by class, or by instance with its options
(``strategy=MemOpt(...)``); layer helpers are looked up by module type along the MRO. Packages that
are installed add components through entry points in the groups ``soframe.layer``,
``soframe.method``, ``soframe.solver``, ``soframe.strategy``, ``soframe.backend``, ``soframe.loss``,
``soframe.damping`` and ``soframe.clip``: the entry point's name is the key and its object the class
(for layers, importing the object must register it, since the key is a type).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


@cache
def _installed(path: tuple[str, ...]) -> Any:
    """Return the entry points of all packages on a path; their metadata are read once."""
    del path
    return entry_points()  # of one type in Python 3.11, and of another since 3.12


class Registry:
    """The components of one kind, by name or, with ``key_type=type``, by module type."""

    def __init__(self, kind: str, key_type: type = str) -> None:
        self.kind = kind
        self.key_type = key_type
        self._components: dict[Any, type] = {}
        self._optional: dict[Any, type] = {}
        self._discovered = False

    @property
    def group(self) -> str:
        """The entry-point group through which other packages add to this registry."""
        return f"soframe.{self.kind}"

    def register(self, key: Any, *, override: bool = False) -> Callable[[C], C]:
        """Return a class decorator that adds the class under ``key``."""
        # A type's package need not be installed if its qualified name is the key.
        is_qualified = self.key_type is type and isinstance(key, str) and "." in key
        if not is_qualified and not isinstance(key, self.key_type):
            raise TypeError(
                f"a {self.kind} is registered under a {self.key_type.__name__}, not {key!r}"
            )

        def add(component: C) -> C:
            self._add(key, component, override=override)
            return component

        return add

    def register_optional(self, *keys: type | str) -> Callable[[C], C]:
        """Return a class decorator that adds the class for ``layers="all"``."""

        # Keys are module types or their qualified names.
        def add(component: C) -> C:
            self._optional.update(dict.fromkeys(keys, component))
            return component

        return add

    def _add(self, key: Any, component: type, *, override: bool = False) -> None:
        known = self._components.get(key, component)
        # The same class from a reloaded module (a notebook, importlib.reload) replaces itself.
        if self._show(known) != self._show(component) and not override:
            raise ValueError(
                f"{self.kind} {self._show(key)} is already {self._show(known)}; choose another key "
                f"or pass override=True (registered: {self._list()})"
            )
        self._components[key] = component

    def discover(self) -> None:
        """Import the components of installed packages, once; errors name the entry point."""
        if self._discovered:
            return
        self._discovered = True
        try:
            for point in _installed(tuple(sys.path)).select(group=self.group):
                self._load(point)
        except BaseException:
            self._discovered = False  # the next call fails with the same error
            raise

    def _load(self, point: EntryPoint) -> None:
        what = f"entry point {point.name!r} of {self.group} ({point.value})"
        try:
            component = point.load()
            if not isinstance(component, type):
                raise TypeError(f"it is {component!r}, not a class")
            if component in self._components.values():
                return
            if self.key_type is not str:
                raise ValueError(
                    f"it registers itself for no module type: decorate it with "
                    f"@soframe.register({self.kind!r}, ModuleType)"
                )
            self._add(point.name, component)
        except Exception as error:  # any error, with the name of the package
            raise ValueError(f"{what} cannot be used: {error}") from error

    def available(self) -> dict[Any, type]:
        """Return every component by key, with the components of installed packages."""
        self.discover()
        return dict(self._components)

    def get(self, key: Any) -> type:
        """Return the class under ``key``; the error lists the keys that exist."""
        self.discover()
        try:
            return self._components[key]
        except KeyError:
            raise ValueError(
                f"no {self.kind} {self._show(key)}; registered: {self._list()}"
            ) from None

    def name_of(self, component: type) -> str:
        """Return the name under which a class is registered, or its own name."""
        for name, registered in self.available().items():
            if registered is component:
                return str(name)
        return component.__name__

    def lookup(self, module_type: type, *, optional: bool = False) -> type | None:
        """Return the class of the nearest registered type along a module type's MRO, or None."""
        self.discover()
        known = self._components
        if optional:
            known = self._optional | known
        for base in module_type.__mro__:
            for key in (base, self._show(base)):
                if key in known:
                    return known[key]
        return None

    def has(self, module_type: type) -> bool:
        """Return whether a module type is itself a key, optional ones included."""
        keys = self._optional.keys() | self._components.keys()
        return not keys.isdisjoint((module_type, self._show(module_type)))

    def build(self, choice: Any, base: type) -> Any:
        """Return an instance of ``base`` from a registered name, a class or an instance."""
        if isinstance(choice, str):
            component = self.get(choice)()
            if not isinstance(component, base):
                raise TypeError(
                    f"{self.kind} {choice!r} is registered as {component!r}, which is not a "
                    f"{base.__name__}"
                )
            return component
        if isinstance(choice, base):
            return choice
        if isinstance(choice, type) and issubclass(choice, base):
            return choice()
        raise TypeError(
            f"a {self.kind} is a name ({self._list()}), a {base.__name__} class or an instance "
            f"of one, not {choice!r}"
        )

    def _show(self, key: Any) -> str:
        return repr(key) if isinstance(key, str) else f"{key.__module__}.{key.__qualname__}"

    def _list(self) -> str:
        return ", ".join(sorted(self._show(key) for key in self._components)) or "none"


_NAMED = ("method", "solver", "strategy", "backend", "loss", "damping", "clip")

KINDS = {"layer": Registry("layer", type)} | {kind: Registry(kind) for kind in _NAMED}


def _kind(kind: str) -> Registry:
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r} of component; there are: {', '.join(KINDS)}")
    return KINDS[kind]


def register(kind: str, key: Any, *, override: bool = False) -> Callable[[C], C]:
    """Return a class decorator that registers a component.

    Args:
        kind: ``"layer"``, ``"method"``, ``"solver"``, ``"strategy"``, ``"backend"``, ``"loss"``,
            ``"damping"`` or ``"clip"``.
        key: The component's name; for ``"layer"`` the module type that it serves, or the type's
            qualified name, such as ``"transformers.pytorch_utils.Conv1D"``.
        override: Replace a component that is registered under the same key.

    Returns:
        The decorator; it returns the class unchanged.

    Raises:
        ValueError: If the kind does not exist or the key is taken.
        TypeError: If the key is of the wrong type.

    Example:
        >>> @soframe.register("solver", "my-solver")
        ... class MySolver(soframe.Solver): ...
    """
    return _kind(kind).register(key, override=override)


def available(kind: str) -> dict[Any, type]:
    """Return the registered components of a kind, by key.

    Args:
        kind: ``"layer"``, ``"method"``, ``"solver"``, ``"strategy"``, ``"backend"``, ``"loss"``,
            ``"damping"`` or ``"clip"``.

    Returns:
        The classes by name (by module type for layers), installed packages' included.

    Raises:
        ValueError: If the kind does not exist.
    """
    return _kind(kind).available()


_BRACKETS: dict[type, str] = {tuple: "({})", list: "[{}]"}


def describe(component: object) -> str:
    """Return a component's ``repr`` without addresses, the same in every process."""
    # Without a ``repr`` of its own: the public attributes that are numbers, texts or tuples.
    text = repr(component)
    if " at 0x" not in text:
        return text
    if type(component) in _BRACKETS:
        inner = ", ".join(map(describe, component))  # type: ignore[call-overload]  # it is one
        return _BRACKETS[type(component)].format(inner)
    if type(component) is dict:
        return f"{{{', '.join(f'{k!r}: {describe(v)}' for k, v in component.items())}}}"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    if type(component).__repr__ is not object.__repr__:
        return text
    shown: list[str] = []
    for name, value in getattr(component, "__dict__", {}).items():
        if _is_plain(value) and not name.startswith("_"):
            shown.append(f"{name}={value!r}")
    return f"{text}({', '.join(shown)})" if shown else text


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def first_match(patterns: Iterable[str], *names: str) -> str | None:
    """Return the first pattern that ``re.search`` finds in one of the names, or None."""
    for pattern in patterns:
        for name in names:
            if not pattern or re.search(pattern, name):  # the empty one is in every name
                return pattern
    return None
