"""Registration: from a model to its blocks and the report on every parameter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from soframe.blocks import sharding
from soframe.blocks.block import Block, factor_dtype
from soframe.blocks.home import GradientHome
from soframe.blocks.report import FROZEN, Report, ReportRow
from soframe.damping.policies import DampingPolicy
from soframe.layers.base import LayerHelper
from soframe.layers.experts import are_experts
from soframe.layers.layout import CutLayout, GroupedLayout, Layout, PlainLayout, parameter_of
from soframe.layers.recurrent import without_helper
from soframe.methods.base import Candidate, Method
from soframe.methods.returned import require_declared
from soframe.registry import KINDS, first_match
from soframe.solvers.base import Solver
from soframe.solvers.relative import Relative
from soframe.specs import FactorSpec

Choice = Any
"""A name, a class, an instance, or a mapping from patterns on module names to one of these."""


@dataclass(frozen=True)
class Choices:
    """What the user chose per layer.

    Attributes:
        method: The curvature method.
        solver: The solver.
        home: Where gradients live.
        layers: Helper classes by patterns on module names, before the registry is asked; or
            ``"all"``, for every helper that there is rather than those of the default.
        skip: Patterns of modules to leave alone.
        dtype: The dtype of factors; None for the parameters', at least float32.
        forward_only: Whether the factors of the outputs are the identity.
        damping: The damping policy, which may put a solver around each block's.
        scaling: The convention of scale, for which not every method is defined.
        auxiliary: The method of every parameter that no other has; None to leave them alone.
        observed: Whether the Fisher is one that is observed, which only methods of calls need.
        draws: Whether that Fisher draws targets, on every rank others.
        ranks: The global ranks of the group in which blocks are placed.
        cut: Into how many parts matrices are cut along their outputs, by patterns on module names;
            for methods that read gradients alone.
        staged: Whether the model is some stages of a pipeline: patterns may be for others.
        head_in: Of such a model, the module that has the head of the whole; None where another
            stage has it.
    """

    method: Choice
    solver: Choice
    home: GradientHome
    layers: Mapping[str, type[LayerHelper] | Literal["all"]] = field(default_factory=dict)
    skip: Sequence[str] = ()
    dtype: torch.dtype | None = None
    forward_only: bool = False
    damping: DampingPolicy | None = None
    scaling: str = "fisher"
    auxiliary: Choice = None
    observed: bool = False
    draws: bool = False
    ranks: tuple[int, ...] = ()
    cut: Mapping[str, int] = field(default_factory=dict)
    staged: bool = False
    head_in: nn.Module | None = None


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


_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""What torch's ``checkpoint_wrapper`` and ``torch.compile`` call the module that they wrap."""


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter as it is without wrappers around single modules.

    A block keeps its name, and with it its statistics and its state, when its layer is wrapped; and
    a state is the same with and without.

    Args:
        name: A name of ``named_modules`` or ``named_parameters``.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_REMEDY = "a method that reads gradients alone, such as 'soap', takes it"

_UNCALLED: Mapping[str, tuple[str, ...]] = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "transformers.models.mamba.modeling_mamba.MambaMixer": ("conv1d", "dt_proj"),
}
"""Modules that use parameters of submodules without calling these, by name, and which ones."""


def _uncalled(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of a class and of a submodule, for each that the module does not call."""
    for base in type(module).__mro__:
        for child in _UNCALLED.get(f"{base.__module__}.{base.__qualname__}", ()):
            prefix = "nn." if base.__module__.startswith("torch.nn.") else ""
            yield f"{prefix}{base.__name__}", child


def head_of(model: nn.Module, part: nn.Module) -> tuple[nn.Parameter | None, bool]:
    """Return the weight of the head: tied to an embedding, or else the last Linear's.

    Args:
        model: The model.
        part: The part of it in which the head is.

    Returns:
        The weight, None where there is no Linear; and whether it is tied.
    """
    linear = [module for module in part.modules() if isinstance(module, nn.Linear)]
    weights = [w for m in linear if (w := m._parameters.get("weight")) is not None]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = [weight for weight in weights if id(weight) in embeddings]
    every = tied or weights
    return (every[-1] if every else None), bool(tied)


def warn_unused(patterns: Sequence[str], stacklevel: int) -> None:
    """Warn of patterns that match nothing.

    Args:
        patterns: The patterns.
        stacklevel: That of ``warnings.warn``, seen from the caller.
    """
    warnings.warn(
        f"soframe: no module matches the pattern(s) {', '.join(map(repr, patterns))}; names are "
        f"those of model.named_modules(), without what checkpoint_wrapper and torch.compile put in "
        f"between, patterns regular expressions",
        stacklevel=stacklevel,
    )


class Registration:
    """The blocks of a model, and why the other parameters have none.

    Args:
        model: The model, unwrapped.
        choices: What the user chose.

    Attributes:
        blocks: The blocks, in the order of ``named_modules``.
        report: Every parameter.
        unused: The patterns that match no module.

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
            if helper == "all":
                continue
            if not isinstance(helper, type) or not issubclass(helper, LayerHelper):
                raise TypeError(
                    f"layers[{pattern!r}] must be a LayerHelper class or 'all', not {helper!r}"
                )
        self._methods = _PerLayer("method", choices.method, Method)
        self._solvers = _PerLayer("solver", choices.solver, Solver)
        self._auxiliary: Method | None = None
        if choices.auxiliary is not None:
            self._auxiliary = KINDS["method"].build(choices.auxiliary, Method)
        for method in (*self._methods.all(), *filter(None, [self._auxiliary])):
            _require_direction(method)
        self.blocks: list[Block] = []
        self._last = self._find_head()
        self._register()
        self._register_parameters()
        self.report = self._make_report()
        given_patterns = {*choices.skip, *choices.layers, *choices.cut}
        self.unused = sorted(given_patterns - self._used)
        self.unused += self._methods.unused() + self._solvers.unused()
        if self.unused and not choices.staged:
            warn_unused(self.unused, stacklevel=8)

    # -- modules ------------------------------------------------------------------------------

    def _register(self) -> None:
        modules = [(plain_name(n), m) for n, m in self._model.named_modules() if m._parameters]
        for name, module in self._model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(plain_name(name))
        sharers: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    if self._skipping(module) is None:
                        _require_initialised(name, module, parameter)
                    sharers.setdefault(id(parameter), []).append((name, module))
        uncalled = {
            f"{n}.{child}" if n else child: f"{kind} uses its weight without calling it"
            for n, m in modules
            for kind, child in _uncalled(m)
        }
        self._sharers = sharers
        self._in_block: dict[int, Block] = {}
        done: set[int] = set()
        for name, module in modules:
            if id(module) in done or not self._is_observed(name):
                continue
            helper = self._helper_class(name, module)
            if helper is not None and self._reason(name, module, uncalled) is None:
                names = helper.names(module)
                if not set(names) <= {"weight", "bias"} or _chooses(helper):
                    done.update(self._add_blocks(name, module, helper, names))
                    continue
            weight = module._parameters.get("weight")
            tied = sharers[id(weight)] if weight is not None else [(name, module)]
            tied = list({id(m): (n, m) for n, m in tied}.values())  # one has it by two names
            done.update(id(m) for _, m in tied)
            reasons = [(n, m, self._reason(n, m, uncalled)) for n, m in tied]
            refused = [(n, m, r) for n, m, r in reasons if r is not None]
            if not refused:
                self._add_block(tied)
                continue
            other, _, why = refused[0]
            shared = f"its weight is shared with {other}, which has no block: {why}"
            for _, m, reason in reasons:
                self._explain(m, f"{type(m).__name__}: {reason}" if reason else shared)

    def _reason(self, name: str, module: nn.Module, uncalled: Mapping[str, str]) -> str | None:
        """Return why a module has no block, or None if it can have one."""
        pattern = self._skipping(module)
        if pattern is not None:
            return f"skipped by {pattern!r}"
        helper = self._helper_class(name, module)
        if helper is None:
            kind = type(module).__name__
            if (known := KINDS["layer"].lookup(type(module), optional=True)) is not None:
                return f"no layer helper by default; layers='all' adds {known.__name__}"
            if (why := without_helper(module)) is not None:
                return f"no layer helper: {why}"
            if isinstance(module, ParametrizationList):
                return f"no layer helper: a weight is computed of it; {_REMEDY}"
            if are_experts(module):
                return f"no layer helper: tokens are sorted by expert within {kind}; {_REMEDY}"
            return f"no layer helper; register one with @soframe.register('layer', {kind})"
        empty = [n for n, p in module._parameters.items() if p is not None and p.numel() == 0]
        if empty:
            return f"it has parameters without elements: {', '.join(empty)}"
        if name in uncalled:
            return uncalled[name]
        why = helper.unsupported(module)
        if why is None and not helper.names(module):
            raise _nameless(name, module, helper)
        return why

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
            chosen = self._choices.layers[pattern]
            if chosen != "all":
                return chosen
        found = KINDS["layer"].lookup(type(module), optional=pattern is not None)
        assert found is None or issubclass(found, LayerHelper)
        return found

    def _add_block(self, tied: Sequence[tuple[str, nn.Module]]) -> None:
        name, module = tied[0]
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
        self._explain_parts(weight, biases, one_bias=one_bias)
        if not use_weight and not use_bias:
            return
        method: Method = self._methods.choose(name)
        if use_bias and not method.joint:
            self._reasons[id(biases[0])] = "its method takes the layer's weight alone"
            use_bias = False
            if not use_weight:
                return
        helpers = []
        for other_name, other in tied:
            helper_class = self._helper_class(other_name, other)
            assert helper_class is not None
            helpers.append(helper_class(other, weight=use_weight, bias=use_bias))
            _require_own_parameters(other_name, helpers[-1])
        if not _same_matrix(helpers):
            for _, other in tied:
                self._explain(
                    other, f"its weight is shared with a layer of another geometry; {_REMEDY}"
                )
            return
        if (reason := self._unsuited(name, method, helpers[0])) is not None:
            for _, other in tied:
                self._explain(other, reason)
            return
        if len(tied) > 1:
            self._notes[name] = "shared by " + ", ".join(n for n, _ in tied)
        self._append(name, method, tuple(helpers))

    def _explain_parts(
        self, weight: nn.Parameter, biases: Sequence[nn.Parameter | None], *, one_bias: bool
    ) -> None:
        """Say which of a layer's parameters cannot be in its block, and why."""
        for parameter in (weight, *biases):
            if parameter is not None and not parameter.requires_grad:
                self._reasons[id(parameter)] = FROZEN
            elif parameter is not None and parameter is not weight and not one_bias:
                self._reasons[id(parameter)] = (
                    "this bias and its weight are not shared by the same modules"
                )

    def _add_blocks(
        self, name: str, module: nn.Module, helper: type[LayerHelper], names: Sequence[str]
    ) -> list[int]:
        """Add the blocks of a module whose helper names its parameters.

        Returns:
            The modules that need no further look.

        Raises:
            ValueError: If the helper names what the module has not, or one parameter twice.
        """
        method: Method = self._methods.choose(name)
        trained = []
        for key, parameter in module._parameters.items():
            if parameter is not None and key not in names:
                left_out = f"{helper.__name__}.names() leaves it out"
                self._reasons[id(parameter)] = left_out if parameter.requires_grad else FROZEN
        for key in names:
            parameter = parameter_of(module, key)
            if parameter is None:
                raise ValueError(
                    f"module {name!r}: {helper.__name__}.names() has {key!r}, and "
                    f"{type(module).__name__} has no such parameter"
                )
            owners = {id(owner) for _, owner in self._sharers[id(parameter)]}
            if not parameter.requires_grad:
                self._reasons[id(parameter)] = FROZEN
            elif len(owners) > 1:
                self._reasons[id(parameter)] = (
                    f"{key} is shared with another module, and {helper.__name__} sees this one's "
                    f"calls alone"
                )
            else:
                trained.append(key)
        for one in helper.of(module, trained, joint=method.joint):
            _require_own_parameters(name, one)
            for parameter in one.parameters.values():
                if id(parameter) in self._in_block:
                    raise ValueError(f"{name}: {helper.__name__}.of() has a parameter twice")
            full = f"{name}.{one.part}" if one.part else name
            reason = self._unsuited(full, method, one)
            if reason is None:
                self._append(full, method, (one,))
                continue
            for parameter in one.parameters.values():
                self._reasons.setdefault(id(parameter), reason)
        inner = {key.rpartition(".")[0] for key in names}
        return [id(module), *(id(module.get_submodule(path)) for path in inner if path)]

    def _append(
        self,
        name: str,
        method: Method,
        helpers: tuple[LayerHelper, ...],
        layout: Layout | None = None,
        *,
        auxiliary: bool = False,
    ) -> None:
        """Add a block."""
        damping = self._choices.damping
        # Methods that read gradients alone choose their solvers themselves, as a rule.
        asked = method.captures or self._solvers.find(name) is not None
        solver = self._solvers.choose(name) if asked else _eigen()
        of_calls = layout is None
        layout = helpers[0] if layout is None else layout
        cut = first_match(self._choices.cut, *self._names[id(layout.module)])
        if of_calls and cut is not None:
            raise ValueError(
                f"{name}: cut[{cut!r}] is for methods that read gradients alone, and {method!r} "
                f"reads calls: choose another method for this module by a pattern of method=, or "
                f"leave it out of cut="
            )
        if self._choices.forward_only and method.captures:
            method = method.forward_only()
        self._require_defined(name, method)
        block = Block(
            name=name or sharding.class_name(layout.module),
            helpers=helpers,
            method=method,
            solver=solver if damping is None else damping.solver(solver),
            dtype=factor_dtype(list(layout.parameters.values()), self._choices.dtype),
            layout=layout,
            home=self._choices.home,
            ranks=self._choices.ranks,
            auxiliary=auxiliary,
        )
        for one in helpers:
            _require_matrix(block.name, one)
        require_declared(method, block.factors, block.shape)
        self._require_solvable(block)
        diagonal = [factor.name for factor in block.factors if factor.kind == "diagonal"]
        if diagonal and helpers:
            notes = (self._notes.get(block.name, ""), f"{', '.join(diagonal)} diagonal")
            self._notes[block.name] = "; ".join(filter(None, notes))
        self.blocks.append(block)
        self._in_block.update({id(p): block for p in block.parameters.values()})

    def _require_defined(self, name: str, method: Method) -> None:
        """Raise if a method is not defined under the scaling, or for the Fisher."""
        if self._choices.scaling not in method.scalings:
            raise ValueError(
                f"{name}: {method!r} is not defined under scaling={self._choices.scaling!r}: pass "
                f"scaling='fisher', or skip the module"
            )
        if self._choices.observed and method.captures and method.empirical_only:
            raise ValueError(
                f"{name}: {method!r} takes means of output gradients, which are those of the loss "
                f"alone: pass fisher='empirical', or skip the module"
            )

    def _require_solvable(self, block: Block) -> None:
        """Raise if a solver, the damping or the scaling does not serve the factors of a block."""
        damping = self._choices.damping
        for chosen, numbers in block.solvers:
            mine = [block.solved_here[number][1] for number in numbers]
            if (why := chosen.unsupported(mine)) is not None:
                raise ValueError(
                    f"{block.name}: {chosen!r} cannot solve the factors of {block.method!r}: {why}"
                )
        if block.captured and not block.solved_here and damping is not None and damping.per_block:
            raise ValueError(
                f"{block.name}: {damping!r} is relative to factors that are solved, and "
                f"{block.method!r} has none: pass a number for damping=, or skip the module"
            )
        odd = [f for f in block.captured if f.kind == "diagonal" or f.mean_over == "group rows"]
        if odd and self._choices.scaling != "fisher":
            raise ValueError(
                f"{block.name}: scaling={self._choices.scaling!r} knows no diagonal factors, nor "
                f"means over the rows of each group ({', '.join(f.name for f in odd)}): pass "
                f"scaling='fisher', or skip the module"
            )

    # -- parameters whose gradients alone are read --------------------------------------------

    def _is_observed(self, name: str) -> bool:
        """Return whether the calls of a module are to be observed, if it can have a block."""
        method: Method | None = self._methods.find(name)
        return self._auxiliary is None if method is None else method.captures

    def _register_parameters(self) -> None:
        """Add blocks of single parameters, for methods that read gradients alone."""
        owners = {id(m): plain_name(n) for n, m in self._model.named_modules()}
        for name_now, parameter in self._model.named_parameters():
            if id(parameter) in self._in_block:
                continue
            full = plain_name(name_now)
            sharers = self._sharers.get(id(parameter), [])
            if not parameter.requires_grad:
                self._reasons.setdefault(id(parameter), FROZEN)
                continue
            name, module = sharers[0] if sharers else (full.rpartition(".")[0], self._model)
            name = owners.get(id(module), name)
            reason = self._add_parameter(full, parameter, name, module)
            if reason is None:
                continue
            if self._auxiliary is None:
                self._reasons.setdefault(id(parameter), reason)
                continue
            self._require_trainable(full, parameter)
            if (why := self._sparse(parameter)) is not None:
                raise ValueError(f"{full}: {why}, or freeze it")
            layout = PlainLayout(module, full.rpartition(".")[2])
            self._notes[full] = self._reasons.get(id(parameter), reason)
            self._append(full, self._auxiliary, (), self._cut(name, full, layout), auxiliary=True)

    def _add_parameter(
        self,
        full: str,
        parameter: nn.Parameter,
        name: str,
        module: nn.Module,
    ) -> str | None:
        """Add the block of a parameter, or return why it has none."""
        pattern = self._skipping(module)
        if pattern is not None:
            return f"skipped by {pattern!r}"
        method: Method | None = self._methods.find(name)
        if method is None:
            return "no pattern of method= matches its module"
        if method.captures:
            return self._reasons.get(id(parameter), "its layer has no block")
        self._methods.choose(name)  # its pattern has matched, whether or not the method takes it
        self._require_trainable(full, parameter)
        if (reason := self._sparse(parameter)) is not None:
            return reason
        layout = self._cut(name, full, self._layout(name, module, full.rpartition(".")[2]))
        if (reason := self._unsuited(full, method, layout)) is not None:
            return reason
        sharers = [n for n, _ in self._sharers[id(parameter)]]
        if len(set(sharers)) > 1:
            self._notes[full] = "shared by " + ", ".join(dict.fromkeys(sharers))
        self._append(full, self._methods.choose(name), (), layout)
        return None

    def _unsuited(self, name: str, method: Method, layout: Layout) -> str | None:
        """Return why a method does not take a block, or None if it does."""
        parameters = layout.parameters
        embeds = any(
            isinstance(module, nn.Embedding)
            for parameter in parameters.values()
            for _, module in self._sharers.get(id(parameter), ())
        )
        candidate = Candidate(
            name=name,
            module=layout.module,
            parameters=tuple(parameters),
            shape=layout.shape,
            last=embeds or any(p is self._last for p in parameters.values()),
        )
        return method.unsuited(candidate)

    def _layout(self, name: str, module: nn.Module, key: str) -> Layout:
        """Return the layout of one parameter: its layer's, where that has another shape."""
        if are_experts(module) and module.get_parameter(key).dim() > 1:
            return GroupedLayout(module, key)
        plain = PlainLayout(module, key)
        helper = self._helper_class(name, module)
        if helper is None:
            known = KINDS["layer"].lookup(type(module), optional=True)
            if known is not None and issubclass(known, LayerHelper) and known.transposed:
                helper = known
        if helper is None or key not in helper.names(module) or helper.unsupported(module):
            return plain
        for one in helper.of(module, [key], joint=False):
            if set(one.parameters) != {key}:
                continue
            if helper.transposed or tuple(one.shape) != tuple(plain.shape):
                return one
        return plain

    def _cut(self, name: str, full: str, layout: Layout) -> Layout:
        """Return a layout in parts, where a pattern says so of its module; vectors stay whole."""
        pattern = first_match(self._choices.cut, name)
        if pattern is None or layout.shape.in_features == 1:
            return layout
        self._used.add(pattern)
        parts = self._choices.cut[pattern]
        try:
            cut = CutLayout(layout, parts)
        except ValueError as error:
            raise ValueError(f"{full}: cut[{pattern!r}]={parts}: {error}") from None
        self._notes[full] = f"cut into {parts}"
        return cut

    def _find_head(self) -> nn.Parameter | None:
        """Return the weight of the model's head."""
        choices = self._choices
        if not choices.staged:
            return head_of(self._model, self._model)[0]
        return None if choices.head_in is None else head_of(self._model, choices.head_in)[0]

    def _require_trainable(self, full: str, parameter: nn.Parameter) -> None:
        """Check that a parameter can have a block of its own."""
        if parameter.is_complex() or parameter.numel() == 0:
            what = "is complex" if parameter.is_complex() else "has no elements"
            raise ValueError(f"{full} {what}, which no method takes: freeze it")

    def _sparse(self, parameter: nn.Parameter) -> str | None:
        """Return why the gradient of a parameter is no matrix, if it is sparse."""
        for _, module in self._sharers.get(id(parameter), ()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                kind = type(module).__name__
                return f"{kind}: sparse=True makes sparse gradients; build it with sparse=False"
        return None

    def _explain(self, module: nn.Module, reason: str) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                frozen = not parameter.requires_grad
                self._reasons.setdefault(id(parameter), FROZEN if frozen else reason)

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
                rows.append(ReportRow(plain_name(name), shape, None, reason=reason))
            else:
                solvers = [_name(solver) for _, _, solver in block.solved_here]
                method = " / ".join(dict.fromkeys([_name(block.method), *solvers]))
                note = self._notes.get(block.name, "")
                rows.append(ReportRow(plain_name(name), shape, block.name, method, note=note))
        return Report(tuple(rows))


class _PerLayer:
    """A component, or one per pattern of the module's name."""

    def __init__(self, kind: str, choice: Choice, base: type) -> None:
        self._kind = kind
        registry = KINDS[kind]
        patterns = choice if isinstance(choice, Mapping) else {"": choice}
        self._by_pattern = {key: registry.build(value, base) for key, value in patterns.items()}
        self._used: set[str] = set()

    def all(self) -> list[Any]:
        return list(self._by_pattern.values())

    def find(self, name: str) -> Any | None:
        """Return the component of a module, if a pattern matches its name."""
        pattern = first_match(self._by_pattern, name)
        return None if pattern is None else self._by_pattern[pattern]

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


def _eigen() -> Solver:
    """Return the solver of blocks that no pattern of ``solver=`` names, and that may need none."""
    solver: Solver = KINDS["solver"].build("eigen", Solver)
    return solver


def _same_matrix(helpers: Sequence[LayerHelper]) -> bool:
    """Return whether helpers make the same matrix of the same parameters, with the same factors.

    A square table that an embedding and a linear layer share has one shape, and two matrices.
    """
    first, *others = helpers
    if any(one.shape != first.shape for one in others):
        return False
    sides = (FactorSpec("A", "right", 1, 1), FactorSpec("G", "left", 1, 1))
    numbers = {
        name: torch.arange(p.numel(), dtype=torch.float64, device="cpu").view(p.shape)
        for name, p in first.parameters.items()
    }
    return all(
        [one.factor(side) for side in sides] == [first.factor(side) for side in sides]
        and torch.equal(one.pack(numbers), first.pack(numbers))
        for one in others
    )


def _nameless(name: str, module: nn.Module, helper: type[LayerHelper]) -> ValueError:
    names = ", ".join(n for n, p in module._parameters.items() if p is not None)
    return ValueError(
        f"module {name!r} ({type(module).__name__}) has no parameter 'weight' but {names}, "
        f"while {helper.__name__}.unsupported() accepts it: let {helper.__name__}.names() "
        f"return the names of its parameters, let unsupported() return a reason, or skip the "
        f"module (skip=[{name!r}])"
    )


def _chooses(helper: type[LayerHelper]) -> bool:
    """Return whether a helper says itself which parameters it takes, or in which blocks."""
    return any(
        getattr(getattr(helper, name), "__func__", None)
        is not getattr(getattr(LayerHelper, name), "__func__", None)
        for name in ("names", "of")
    )


def _require_own_parameters(name: str, helper: LayerHelper) -> None:
    """Check that a helper names parameters as the module does: hooks find them by that."""
    for key, parameter in helper.parameters.items():
        if parameter_of(helper.module, key) is not parameter:
            raise ValueError(
                f"module {name!r}: {type(helper).__name__}.parameters has {key!r}, which is not "
                f"what the module has under that name ({', '.join(helper.module._parameters)}): "
                f"use the module's names, or skip the module (skip=[{name!r}])"
            )


def _require_matrix(name: str, helper: LayerHelper) -> None:
    """Check that a helper makes the matrix that it says, and parameters of it; without values."""
    given = {key: torch.empty(p.shape, device="meta") for key, p in helper.parameters.items()}
    matrix = helper.pack(given)
    if matrix.shape != torch.Size(helper.shape):
        raise ValueError(
            f"{name}: {type(helper).__name__}.pack() gives a matrix {tuple(matrix.shape)}, and "
            f"its shape says {tuple(helper.shape)}, [groups, out, in]"
        )
    shapes = {key: tuple(tensor.shape) for key, tensor in helper.unpack(matrix).items()}
    wanted = {key: tuple(tensor.shape) for key, tensor in given.items()}
    if shapes != wanted:
        raise ValueError(
            f"{name}: {type(helper).__name__}.unpack() gives {shapes}, and the parameters are "
            f"{wanted}"
        )


def _require_direction(method: Method) -> None:
    """Check that a method says what becomes of a gradient."""
    kind = type(method)
    if kind.direct is Method.direct and kind.precondition is Method.precondition:
        raise TypeError(
            f"method {kind.__name__} has neither direct() nor precondition(): write one"
        )


def _name(component: object) -> str:
    if isinstance(component, Relative):
        return f"{_name(component.solver)}, relative damping"
    for kind in ("method", "solver"):
        for key, registered in KINDS[kind].available().items():
            if type(component) is registered:
                return str(key)
    return type(component).__name__
