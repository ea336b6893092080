"""Registration: from a model to its blocks and the report on every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soframe.blocks.block import Block, factor_dtype
from soframe.blocks.report import Report, ReportRow
from soframe.damping.policies import DampingPolicy
from soframe.layers.base import LayerHelper
from soframe.methods.base import Method
from soframe.registry import KINDS, first_match
from soframe.solvers.base import Solver
from soframe.solvers.relative import Relative

Choice = Any
"""A name, a class, an instance, or a mapping from patterns on module names to one of these."""


@dataclass(frozen=True)
class Choices:
    """What the user chose per layer.

    Attributes:
        method: The curvature method.
        solver: The solver.
        layers: Helper classes by patterns on module names, before the registry is asked.
        skip: Patterns of modules to leave alone.
        dtype: The dtype of factors; None for the parameters', at least float32.
        forward_only: Whether the factors of the outputs are the identity.
        damping: The damping policy, which may put a solver around each block's.
    """

    method: Choice
    solver: Choice
    layers: Mapping[str, type[LayerHelper]] = field(default_factory=dict)
    skip: Sequence[str] = ()
    dtype: torch.dtype | None = None
    forward_only: bool = False
    damping: DampingPolicy | None = None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model without the wrappers that only prefix its names.

    Args:
        model: A model, perhaps in DistributedDataParallel or compiled.

    Returns:
        The innermost module.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


class Registration:
    """The blocks of a model, and why the other parameters have none.

    Args:
        model: The model, unwrapped.
        choices: What the user chose.

    Attributes:
        blocks: The blocks, in the order of ``named_modules``.
        report: Every parameter.

    Raises:
        ValueError: If a component does not exist or a module cannot be registered yet.
        TypeError: If a component is not of its kind.
    """

    def __init__(self, model: nn.Module, choices: Choices) -> None:
        self._model = model
        self._choices = choices
        self._used: set[str] = set()
        self._names: dict[int, list[str]] = {}
        self._reasons: dict[int, str] = {}
        self._notes: dict[str, str] = {}
        given: Mapping[str, object] = choices.layers
        for pattern, helper in given.items():
            if not isinstance(helper, type) or not issubclass(helper, LayerHelper):
                raise TypeError(f"layers[{pattern!r}] must be a LayerHelper class, not {helper!r}")
        self._methods = _PerLayer("method", choices.method, Method)
        self._solvers = _PerLayer("solver", choices.solver, Solver)
        self.blocks: list[Block] = []
        self._register()
        self.report = self._make_report()
        self._warn_unused()

    # -- modules ------------------------------------------------------------------------------

    def _register(self) -> None:
        modules = [(n, m) for n, m in self._model.named_modules() if m._parameters]
        for name, module in self._model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)
        sharers: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    if self._skipping(module) is None:
                        _require_initialised(name, module, parameter)
                    sharers.setdefault(id(parameter), []).append((name, module))
        attention = [n for n, m in modules if isinstance(m, nn.MultiheadAttention)]
        self._sharers = sharers
        done: set[int] = set()
        for name, module in modules:
            if id(module) in done:
                continue
            weight = module._parameters.get("weight")
            tied = sharers[id(weight)] if weight is not None else [(name, module)]
            tied = list({id(m): (n, m) for n, m in tied}.values())  # one has it by two names
            done.update(id(m) for _, m in tied)
            reasons = [(n, m, self._reason(n, m, attention)) for n, m in tied]
            refused = [(n, m, r) for n, m, r in reasons if r is not None]
            if not refused:
                self._add_block(tied)
                continue
            other, _, why = refused[0]
            shared = f"its weight is shared with {other}, which has no block: {why}"
            for n, m, reason in reasons:
                self._explain(m, f"{type(m).__name__}: {reason}" if reason else shared, n)

    def _reason(self, name: str, module: nn.Module, attention: Sequence[str]) -> str | None:
        """Return why a module has no block, or None if it can have one."""
        pattern = self._skipping(module)
        if pattern is not None:
            return f"skipped by {pattern!r}"
        helper = self._helper_class(name, module)
        if helper is None:
            kind = type(module).__name__
            return f"no layer helper; register one with @soframe.register('layer', {kind})"
        empty = [n for n, p in module._parameters.items() if p is not None and p.numel() == 0]
        if empty:
            return f"it has parameters without elements: {', '.join(empty)}"
        if name.rpartition(".")[0] in attention and name.endswith("out_proj"):
            return "nn.MultiheadAttention uses its weight without calling it"
        return helper.unsupported(module)

    def _skipping(self, module: nn.Module) -> str | None:
        """Return the first pattern that skips a module, by any of its names or by its class's."""
        names = (*self._names[id(module)], type(module).__name__)
        pattern = first_match(self._choices.skip, *names)
        if pattern is not None:
            self._used.add(pattern)
        return pattern

    def _helper_class(self, name: str, module: nn.Module) -> type[LayerHelper] | None:
        pattern = first_match(self._choices.layers, name)
        if pattern is not None:
            self._used.add(pattern)
            return self._choices.layers[pattern]
        found = KINDS["layer"].lookup(type(module))
        assert found is None or issubclass(found, LayerHelper)
        return found

    def _add_block(self, tied: Sequence[tuple[str, nn.Module]]) -> None:
        name, module = tied[0]
        for other_name, other in tied:
            self._require_known_names(other_name, other)
        weight = module._parameters["weight"]
        biases = [m._parameters.get("bias") for _, m in tied]
        # A bias belongs to the block only if the block has all of its gradient.
        owners = {id(m) for _, m in tied}
        one_bias = all(bias is biases[0] for bias in biases) and (
            biases[0] is None or {id(m) for _, m in self._sharers[id(biases[0])]} <= owners
        )
        assert weight is not None
        use_weight = weight.requires_grad
        use_bias = one_bias and biases[0] is not None and biases[0].requires_grad
        for parameter in (weight, *biases):
            if parameter is not None and not parameter.requires_grad:
                self._reasons[id(parameter)] = "frozen"
            elif parameter is not None and parameter is not weight and not one_bias:
                self._reasons[id(parameter)] = (
                    "this bias and its weight are not shared by the same modules"
                )
        if not use_weight and not use_bias:
            return
        helpers = []
        for other_name, other in tied:
            helper_class = self._helper_class(other_name, other)
            assert helper_class is not None
            helpers.append(helper_class(other, weight=use_weight, bias=use_bias))
            _require_own_parameters(other_name, helpers[-1])
        shapes = {helper.shape for helper in helpers}
        if len(shapes) > 1:
            for _, other in tied:
                self._explain(other, "its weight is shared with a layer of another geometry")
            return
        parameters = list(helpers[0].parameters.values())
        method: Method = self._methods.choose(name)
        solver: Solver = self._solvers.choose(name)
        damping = self._choices.damping
        if len(tied) > 1:
            self._notes[name] = "shared by " + ", ".join(n for n, _ in tied)
        block = Block(
            name or type(module).__name__,
            tuple(helpers),
            method.forward_only() if self._choices.forward_only else method,
            solver if damping is None else damping.solver(solver),
            factor_dtype(parameters, self._choices.dtype),
        )
        if (why := block.solver.unsupported(block.factors)) is not None:
            raise ValueError(
                f"{block.name}: {block.solver!r} cannot solve the factors of {block.method!r}: "
                f"{why}"
            )
        self.blocks.append(block)

    def _require_known_names(self, name: str, module: nn.Module) -> None:
        """Check that a module which a helper says it serves has what blocks are made of."""
        if module._parameters.get("weight") is None:
            own = ", ".join(n for n, p in module._parameters.items() if p is not None)
            helper = self._helper_class(name, module)
            assert helper is not None
            raise ValueError(
                f"module {name!r} ({type(module).__name__}) has no parameter 'weight' but {own}, "
                f"while {helper.__name__}.unsupported() accepts it: blocks are made of parameters "
                f"named 'weight' and 'bias'. Let unsupported() return a reason, skip the module "
                f"(skip=[{name!r}]), or give the parameters these names"
            )

    def _explain(self, module: nn.Module, reason: str, name: str = "") -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                frozen = not parameter.requires_grad
                self._reasons.setdefault(id(parameter), "frozen" if frozen else reason)

    # -- report -------------------------------------------------------------------------------

    def _make_report(self) -> Report:
        block_of = {id(p): block for block in self.blocks for p in block.parameters.values()}
        rows = []
        for name, parameter in self._model.named_parameters():
            block = block_of.get(id(parameter))
            lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
            shape = () if lazy else tuple(parameter.shape)
            if block is None:
                reason = self._reasons[id(parameter)]
                rows.append(ReportRow(name, shape, None, reason=reason))
            else:
                method = f"{_name(block.method)} / {_name(block.solver)}"
                note = self._notes.get(block.name, "")
                rows.append(ReportRow(name, shape, block.name, method, note=note))
        return Report(tuple(rows))

    def _warn_unused(self) -> None:
        given = {*self._choices.skip, *self._choices.layers}
        unused = sorted(given - self._used) + self._methods.unused() + self._solvers.unused()
        if unused:
            warnings.warn(
                f"soframe: no module matches the pattern(s) {', '.join(map(repr, unused))}; "
                f"names are those of model.named_modules(), patterns regular expressions",
                stacklevel=7,
            )


class _PerLayer:
    """A component, or one per pattern of the module's name."""

    def __init__(self, kind: str, choice: Choice, base: type) -> None:
        self._kind = kind
        registry = KINDS[kind]
        patterns = choice if isinstance(choice, Mapping) else {"": choice}
        self._by_pattern = {key: registry.build(value, base) for key, value in patterns.items()}
        self._used: set[str] = set()

    def choose(self, name: str) -> Any:
        pattern = first_match(self._by_pattern, name)
        if pattern is None:
            raise ValueError(
                f"{self._kind}: no pattern of the mapping matches the module {name!r}; add "
                f"'.*' as the last pattern, or skip the module"
            )
        self._used.add(pattern)
        return self._by_pattern[pattern]

    def unused(self) -> list[str]:
        return sorted(set(self._by_pattern) - self._used - {"", ".*"})


def _require_initialised(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"module {name!r} ({type(module).__name__}) is lazy and not initialised yet: run one "
            f"forward pass before building the Preconditioner, or skip the module"
        )


def _require_own_parameters(name: str, helper: LayerHelper) -> None:
    """Check that a helper names parameters as the module does: it finds their tensors by that."""
    own = helper.module._parameters
    for key, parameter in helper.parameters.items():
        if key not in ("weight", "bias") or own.get(key) is not parameter:
            raise ValueError(
                f"module {name!r}: {type(helper).__name__}.parameters has {key!r}, which is no "
                f"'weight' or 'bias' of the module's own ({', '.join(own)}): use the module's "
                f"names, or skip the module (skip=[{name!r}])"
            )


def _name(component: object) -> str:
    if isinstance(component, Relative):
        return f"{_name(component.solver)}, relative damping"
    for kind in ("method", "solver"):
        for key, registered in KINDS[kind].available().items():
            if type(component) is registered:
                return str(key)
    return type(component).__name__
