"""Registration: from a model to its blocks, and the report on every parameter.

Two passes. The first collects candidates: modules that share a weight, each with its helper or the
reason why it has none. The second decides on each candidate, and then, for methods that read
gradients alone, on every parameter that is in no block of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soframe.blocks import sharding
from soframe.blocks.block import Block, factor_dtype
from soframe.blocks.fused import fused_sizes
from soframe.blocks.home import GradientHome
from soframe.blocks.reasons import (
    REMEDY,
    Reason,
    find_override,
    parameters_of,
    reasons_of_uncalled,
    sparse,
    why_no_helper,
)
from soframe.blocks.report import FROZEN, Report, ReportRow
from soframe.blocks.survey import Survey
from soframe.checks.warning import warn
from soframe.damping.policies import DampingPolicy
from soframe.layers.base import LayerHelper
from soframe.layers.layout import (
    BlockShape,
    CutLayout,
    Layout,
    PlainLayout,
    parameter_of,
    plain_layout,
    positions_of,
)
from soframe.layers.parameter import ParameterHelper
from soframe.layers.tied import tables_and_heads
from soframe.methods.base import SMALL, Candidate, Method
from soframe.methods.blocked import CutRows
from soframe.methods.kfac import TiedKFAC
from soframe.methods.orthogonal import orthogonalises
from soframe.methods.returned import require_declared
from soframe.registry import KINDS, first_match
from soframe.solvers.base import Solver
from soframe.solvers.scaled import Relative, Rooted
from soframe.specs import FactorSpec

Choice = Any
"""A name, a class, an instance, or a mapping from patterns on module names to one of these."""


@dataclass(frozen=True)
class Choices:
    """The user's choices per layer, see `soframe.Preconditioner` and its groups."""

    method: Choice
    solver: Choice  # None for "inverse", or "eigen" if a method needs it
    home: GradientHome
    layers: Mapping[str, type[LayerHelper] | Literal["all"]]
    skip: Sequence[str]
    dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    offload: bool
    forward_only: bool  # whether the factors of the outputs are the identity
    damping: DampingPolicy
    scaling: str
    auxiliary: Choice
    observed: bool  # whether the Fisher needs `observe`, for methods that read calls
    ranks: tuple[int, ...]  # the global ranks of the group in which blocks are placed
    cut: Mapping[str, int | Sequence[int]]
    of_samples: bool  # whether the auxiliary method may read gradients of samples, as in a fit
    staged: bool  # whether it is a part of a pipeline: patterns may match other stages
    kept: frozenset[int] = frozenset()  # parameters by identity whose block outlasts a freeze
    head_in: nn.Module | None = None  # of a staged model: the module with the head of the whole one


_POSSIBLE_HEAD = (
    "is this layer, or another, the head? The model does not show it, so {} takes all of them: "
    "leave the head out by name, as in skip=[{!r}]"
)
"""The report's question where the model shows no head: of a method's name and of a pattern."""


_GUESSED_HEAD = (
    "it comes last, so it is taken for the head: is it? For a hidden layer name it, as in "
    "method={{{0!r}: {1!r}, '': {1!r}}}"
)
"""The question for a layer that comes last: of its pattern and of the method's name."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's model without DistributedDataParallel and the wrapper of torch.compile."""
    *_, inner = _unwrapped(model)
    return inner


def averaging_group(model: nn.Module) -> Any:
    """Return the process group of a model's DistributedDataParallel, or None without one."""
    for module in _unwrapped(model):
        if isinstance(module, DistributedDataParallel):
            return module.process_group
    return None


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the models within its wrappers, from the outermost one on."""
    while True:
        yield model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return


def warn_unused(patterns: Sequence[str]) -> None:
    """Warn of patterns that match nothing."""
    warn(
        f"no module matches the pattern(s) {', '.join(map(repr, patterns))}; names are "
        f"those of model.named_modules(), without what checkpoint_wrapper and torch.compile put in "
        f"between, patterns regular expressions"
    )


@dataclass(frozen=True)
class _Candidate:
    """One of the modules of a layer; several share a weight."""

    name: str
    module: nn.Module
    helper: type[LayerHelper] | None
    reason: str | None  # why it has no block; None if it may have one


class Registration:
    """The blocks of an unwrapped model, and why the other parameters have none."""

    def __init__(
        self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], choices: Choices
    ) -> None:
        _require_helpers(choices.layers)
        self._choices = choices
        self._build_components()
        self._survey = Survey.of(model, named, choices.head_in if choices.staged else model)
        # Where neither the model nor the choices show the head, any layer may be it.
        self._shows_head = any((self._survey.shows_head, choices.skip, choices.staged))
        self._used: set[str] = set()  # patterns of `skip`, `layers` and `cut` that match a module
        self._match_skip()
        self._uncalled = reasons_of_uncalled(self._survey.modules)
        self._register()
        self.others = [p for _, p in self._survey.parameters if id(p) not in self._in_block]
        is_default_used = any(b.method.captures and b.tensors for b in self._kinds.values())
        # The user's choice; if it was left open, the name of the default, if any block has it.
        self.solver: Choice = choices.solver
        if self._default and is_default_used:
            self.solver = self._default
        self.report = self._make_report()
        patterns = set(choices.skip).union(choices.layers, choices.cut)
        self.unused = sorted(patterns - self._used)
        self.unused += self._methods.unused() + self._solvers.unused()
        if self.unused and not choices.staged:
            warn_unused(self.unused)

    def _build_components(self) -> None:
        """Build the methods and solvers that the user has chosen, and the default ones."""
        choices = self._choices
        self._methods = _ByPattern("method", choices.method, Method)
        if choices.forward_only:
            self._methods.replace_each(lambda m: m.forward_only() if m.captures else m)
        choice, self._default = choices.solver, ""
        if choice is None:
            # All blocks alike. Where both were measured Cholesky takes no more steps than
            # eigendecompositions, and a sixth to a tenth of their time for long sides. But factors
            # of half precision are not positive definite: eigenvalues can be clamped.
            choice = self._default = "eigen" if choices.dtype == torch.bfloat16 else "inverse"
        self._solvers = self._build_solvers(choice)
        self._eigen = self._build_solvers("eigen").choose("")
        self._auxiliary = _auxiliary(choices.auxiliary, of_samples=choices.of_samples)
        methods = self._methods.all()
        if self._auxiliary is not None:
            methods.append(self._auxiliary)
        for method in methods:
            _require_direction(method)
        # By method, whether it reads calls: a property that makes factors, read for each module.
        self._captures: dict[int, bool] = {id(method): method.captures for method in methods}

    def _build_solvers(self, choice: Choice) -> _ByPattern:
        """Return solvers; the damping policy may put others around them."""
        solvers = _ByPattern("solver", choice, Solver)
        solvers.replace_each(self._choices.damping.solver)
        return solvers

    def _register(self) -> None:
        """Add the blocks of layers, then of single parameters, and keep why others have none."""
        self.blocks: list[Block] = []
        self._kinds: dict[object, Block] = {}  # the first block of each kind
        self._in_block: set[int] = set()  # parameters, by identity
        # By a method's identity and the positions of a kernel, see `Method.of_kernel`.
        self._of_kernels: dict[tuple[int, int], Method] = {}
        self._reasons: dict[int, str] = {}  # why a parameter has no block, by identity
        self._notes: dict[str, str] = {}  # additions of the report to a block, by its name
        self._possible_head = ""  # the last block that its method would not take if it were a head
        self._overridden: dict[tuple[type, type], str | None] = {}
        # Patterns of `layers` whose helper has made a block; and why one has not, at first.
        self._served: set[str] = set()
        self._unserved: dict[str, str] = {}
        for layer in self._collect():
            self._decide(layer)
        self._register_layouts()
        self._register_parameters()
        for pattern, why in self._unserved.items():
            chosen = self._choices.layers[pattern]
            if chosen != "all" and pattern not in self._served:
                raise ValueError(
                    f"layers[{pattern!r}]={chosen.__name__} changes nothing, since methods that "
                    f"read gradients alone take parameters one by one: {why}. Leave it out"
                )

    # -- candidates -----------------------------------------------------------------------------

    def _match_skip(self) -> None:
        """Note the patterns of ``skip`` that match a module; a lazy module has to be skipped."""
        for name, module in self._survey.modules:
            if self._skipped_by(module) is None and module in self._survey.lazy:
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) is lazy and not initialised yet: "
                    f"run one forward pass before building the Preconditioner, or skip the module"
                )

    def _collect(self) -> list[list[_Candidate]]:
        """Return the layers of methods that read calls: the modules that share a weight."""
        overrides_names = cache(_overrides_names)
        layers: list[list[_Candidate]] = []
        done: set[int] = set()
        for name, module in self._survey.modules:
            if id(module) in done or not self._reads_calls(name):
                continue
            candidate = self._candidate(name, module)
            helper = candidate.helper
            if helper is not None and candidate.reason is None and overrides_names(helper):
                # It may have parameters of submodules, which then are no layers of their own.
                layer = [candidate]
                paths = {key.rpartition(".")[0] for key in helper.names(module)}
                done.update(id(module.get_submodule(path)) for path in paths)
            else:
                layer = self._layer(candidate)
            done.update(id(member.module) for member in layer)
            layers.append(layer)
        return layers

    def _layer(self, candidate: _Candidate) -> list[_Candidate]:
        """Return the modules that share a candidate's weight, itself among them."""
        weight = parameter_of(candidate.module, "weight")
        if weight is None:
            return [candidate]
        layer: list[_Candidate] = []
        for module, name in self._survey.sharers[id(weight)].items():
            if module is candidate.module:
                layer.append(candidate)
            else:
                layer.append(self._candidate(name, module))
        return layer

    def _candidate(self, name: str, module: nn.Module) -> _Candidate:
        helper = self._helper_class(name, module)
        return _Candidate(name, module, helper, self._reason(name, module, helper))

    def _reason(self, name: str, module: nn.Module, helper: type[LayerHelper] | None) -> str | None:
        """Return why a module has no block, or None if it can have one."""
        if (pattern := self._skipped_by(module)) is not None:
            return Reason.SKIPPED.format(pattern)
        if helper is None:
            return why_no_helper(module)
        empty = [key for key, p in parameters_of(module).items() if p.numel() == 0]
        if empty:
            return Reason.EMPTY.format(", ".join(empty))
        if name in self._uncalled:
            return self._uncalled[name]
        if (why := helper.unsupported(module)) is not None:
            return why
        if helper is self._chosen_helper(name):
            return None
        key = (type(module), helper)  # `find_override` depends on no more
        if key not in self._overridden:
            self._overridden[key] = find_override(module, helper)
        return self._overridden[key]

    def _skipped_by(self, module: nn.Module) -> str | None:
        """Return the first pattern that skips a module, by any of its names or by its class's."""
        names = self._survey.names[id(module)]
        pattern = first_match(self._choices.skip, type(module).__name__, *names)
        if pattern is not None:
            self._used.add(pattern)
        return pattern

    def _chosen_helper(self, name: str) -> type[LayerHelper] | Literal["all"] | None:
        """Return the choice of ``layers`` for a module: a helper, "all" known ones, or None."""
        pattern = first_match(self._choices.layers, name)
        if pattern is None:
            return None
        self._used.add(pattern)
        return self._choices.layers[pattern]

    def _helper_class(self, name: str, module: nn.Module) -> type[LayerHelper] | None:
        chosen = self._chosen_helper(name)
        if chosen is not None and chosen != "all":
            return chosen
        return KINDS["layer"].lookup(type(module), optional=chosen == "all")

    def _reads_calls(self, name: str) -> bool:
        """Return whether the method of a module reads its calls.

        A module without a method is taken for a layer, which is an error, unless there is an
        auxiliary method for its parameters.
        """
        method: Method | None = self._methods.find(name)
        if method is None:
            return self._auxiliary is None
        return self._captures[id(method)]

    # -- decisions ------------------------------------------------------------------------------

    def _decide(self, layer: Sequence[_Candidate]) -> None:
        """Add the blocks of a layer, or note why it has none."""
        refused = next((member for member in layer if member.reason is not None), None)
        if refused is None:
            if trained := self._trained(layer):
                self._build_all_of_layer(layer, trained)
            return
        for candidate in layer:
            why = f"{type(candidate.module).__name__}: {candidate.reason}"
            if candidate.reason is None:
                why = Reason.SHARED.format(refused.name, refused.reason)
            for parameter in parameters_of(candidate.module).values():
                self._reasons.setdefault(id(parameter), why if parameter.requires_grad else FROZEN)

    def _build_all_of_layer(self, layer: Sequence[_Candidate], trained: Sequence[str]) -> None:
        """Build the blocks of a layer, of parameters that are trained."""
        name = layer[0].name
        method: Method = self._methods.choose(name)
        helpers_of_modules = []  # by module: a helper for each block
        for candidate in layer:
            assert candidate.helper is not None  # it is not refused
            helpers = candidate.helper.of(candidate.module, trained, joint=method.joint)
            helpers_of_modules.append(helpers)
        for block_helpers in zip(*helpers_of_modules, strict=True):
            for candidate, helper in zip(layer, block_helpers, strict=True):
                _require_own_parameters(candidate.name, helper)
            self._build_of_layer(name, layer, method, block_helpers)
        if method.joint:
            return
        for key in trained:
            parameter = parameter_of(layer[0].module, key)
            if id(parameter) not in self._in_block:
                self._reasons.setdefault(id(parameter), Reason.WEIGHT_ALONE)

    def _trained(self, layer: Sequence[_Candidate]) -> list[str]:
        """Return the names of the parameters that a layer's blocks can have, and explain others."""
        trained = []
        for candidate in layer:
            helper, module = candidate.helper, candidate.module
            assert helper is not None
            names = helper.names(module)
            if not names:
                raise _nameless(candidate.name, module, helper)
            for key in dict.fromkeys(chain(names, module._parameters)):
                parameter = parameter_of(module, key)
                if parameter is None:
                    if key in names:
                        raise ValueError(
                            f"module {candidate.name!r}: {helper.__name__}.names() has {key!r}, "
                            f"and {type(module).__name__} has no such parameter"
                        )
                    continue
                if self._is_frozen(parameter):
                    self._reasons[id(parameter)] = FROZEN
                elif key not in names:
                    self._reasons[id(parameter)] = Reason.LEFT_OUT.format(helper.__name__)
                elif _is_apart(layer, key, self._survey.sharers[id(parameter)]):
                    self._reasons[id(parameter)] = Reason.APART.format(key)
                elif candidate is layer[0]:
                    trained.append(key)
        return trained

    def _is_frozen(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is frozen, and no block of it outlasts that."""
        return not parameter.requires_grad and id(parameter) not in self._choices.kept

    def _build_of_layer(
        self,
        name: str,
        layer: Sequence[_Candidate],
        method: Method,
        helpers: tuple[LayerHelper, ...],
    ) -> None:
        """Build one block of a layer if its method takes it, or keep why it does not."""
        first = helpers[0]
        full = f"{name}.{first.part}" if first.part else name
        if not self._in_block.isdisjoint(map(id, first.parameters.values())):
            raise ValueError(f"{name}: {type(first).__name__}.of() has a parameter twice")
        shared = _of_shared_weight(method, helpers)
        reason: str | None = Reason.GEOMETRY.format(REMEDY)
        if shared is not None:
            method, helpers = shared
            reason = self._unsuited(full, method, first)
        if reason is not None:
            for helper in helpers:
                for parameter in helper.parameters.values():
                    self._reasons.setdefault(id(parameter), reason)
            return
        if len(layer) > 1:
            self._notes[full] = f"shared by {', '.join(member.name for member in layer)}"
        if (pattern := first_match(self._choices.layers, name)) is not None:
            self._served.add(pattern)
        self._build(full, method, helpers, helpers[0])

    def _build(
        self,
        name: str,
        method: Method,
        helpers: tuple[LayerHelper, ...],
        layout: Layout,
        *,
        auxiliary: bool = False,
    ) -> None:
        """Build a block with its solver and its dtypes, and admit it."""
        if helpers:
            cut = first_match(self._choices.cut, *self._survey.names[id(layout.module)])
            if cut is not None:
                raise ValueError(
                    f"{name}: cut[{cut!r}] is for methods that read gradients alone, and "
                    f"{method!r} reads calls: choose another method for this module by a pattern "
                    f"of method=, or leave it out of cut="
                )
        elif (positions := positions_of(layout.module, layout)) > 1:
            key = id(method), positions
            method = self._of_kernels.setdefault(key, method.of_kernel(positions))
        dtype = factor_dtype(list(layout.parameters.values()), self._choices.dtype)
        is_chosen = not self._default and self._solvers.find(name) is not None
        solver: Solver = self._eigen  # the default of methods that read gradients alone
        if helpers or is_chosen:
            solver = self._solvers.choose(name)
        block = Block(
            name=name or sharding.class_name(layout.module),
            helpers=helpers,
            method=method,
            solver=solver,
            dtype=dtype,
            state_dtype=self._choices.state_dtype or dtype,
            factor_dtype=self._choices.dtype or dtype,
            offload=self._choices.offload,
            layout=layout,
            home=self._choices.home,
            ranks=self._choices.ranks,
            auxiliary=auxiliary,
        )
        self._admit(block)
        self._in_block.update(map(id, block.parameters.values()))

    def _admit(self, block: Block) -> None:
        """Keep a block; the first of its kind is checked, and the others share its specs."""
        first = self._kinds.setdefault(block.kind, block)
        if first is not block:
            block.share(first)
            self.blocks.append(block)
            return
        for helper in block.helpers:
            _require_matrix(block.name, helper)
        require_declared(block.method, block.factors, block.shape)
        try:
            # A method that needs eigenvectors raises an error itself, when it is asked for solvers.
            if (why := next(_refusals(block, self._choices), None)) is not None:
                raise ValueError(f"{block.name}: {why}")
        except ValueError:
            if self._default != "inverse" or not block.method.captures:
                raise
            self._admit_with_eigen([*self.blocks, block])
        else:
            self.blocks.append(block)

    def _admit_with_eigen(self, blocks: Sequence[Block]) -> None:
        """Take "eigen" as the default of all blocks, and admit them anew."""
        self._default = "eigen"
        self._solvers = self._build_solvers("eigen")
        self.blocks, self._kinds = [], {}
        for block in blocks:
            solver = self._solvers.choose("") if block.method.captures else block.solver
            self._admit(replace(block, solver=solver))

    # -- parameters whose gradients alone are read --------------------------------------------

    def _register_layouts(self) -> None:
        """Add the blocks of several parameters that methods of gradients alone ask for."""
        for name, module in self._survey.by_name.items():
            method = self._methods.find(name)
            if method is None or self._captures[id(method)]:
                continue
            for layout in method.layouts(module):
                is_free = all(map(self._is_free, layout.parameters.values()))
                if not is_free or self._skipped_by(module) is not None:
                    continue
                if self._unsuited(name, method, layout) is None:
                    self._methods.choose(name)
                    self._build(name, method, (), layout)

    def _is_free(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is trained, in no block, and not shared by several modules."""
        is_single = len(self._survey.sharers[id(parameter)]) == 1
        return is_single and id(parameter) not in self._in_block and not self._is_frozen(parameter)

    def _register_parameters(self) -> None:
        """Add blocks of single parameters, for methods that read gradients alone."""
        for full, parameter in self._survey.parameters:
            key = id(parameter)
            if key in self._in_block:
                continue
            if self._is_frozen(parameter):
                self._reasons.setdefault(key, FROZEN)
                continue
            sharers = self._survey.sharers[key]
            module, name = next(iter(sharers.items()))
            if (reason := self._build_of_parameter(full, parameter, name, module)) is None:
                continue
            self._reasons.setdefault(key, reason)
            if self._auxiliary is not None:
                self._build_auxiliary(full, parameter, module, name, self._auxiliary)

    def _build_auxiliary(
        self, full: str, parameter: nn.Parameter, module: nn.Module, name: str, method: Method
    ) -> None:
        """Build the block of a parameter that no other method takes."""
        is_of_samples = self._captures[id(method)]
        if is_of_samples and self._skipped_by(module) is not None:
            return  # a fit leaves it out
        _require_elements(full, parameter)
        if (why := sparse(self._survey.sharers[id(parameter)])) is not None:
            raise ValueError(f"{full}: {why}, or freeze it")
        key = full.rpartition(".")[2]
        layout: Layout = PlainLayout(module, key)
        if parameter.is_complex() and method.factors(layout.shape):
            raise ValueError(f"{full} is complex: choose auxiliary='adamw', or freeze it")
        self._notes[full] = self._reasons[id(parameter)]
        if not is_of_samples:
            method, layout = self._cut(name, full, method, layout)
            self._build(full, method, (), layout, auxiliary=True)
            return
        helper = ParameterHelper(module, key)
        self._build(full, method, (helper,), helper, auxiliary=True)

    def _build_of_parameter(
        self, full: str, parameter: nn.Parameter, name: str, module: nn.Module
    ) -> str | None:
        """Build the block of a parameter if its method takes it, or return why it does not."""
        if (pattern := self._skipped_by(module)) is not None:
            return Reason.SKIPPED.format(pattern)
        if (method := self._methods.find(name)) is None:
            return Reason.NO_METHOD
        if self._captures[id(method)]:
            return Reason.NO_BLOCK
        self._methods.choose(name)  # used, whether or not it takes the parameter
        _require_elements(full, parameter)
        sharers = self._survey.sharers[id(parameter)]
        if (reason := sparse(sharers)) is not None:
            return reason
        layout = self._layout(name, module, full.rpartition(".")[2])
        method, layout = self._cut(name, full, method, layout)
        if (reason := self._unsuited(full, method, layout)) is not None:
            return reason
        if note := _flattened(parameter, layout):
            self._notes.setdefault(full, note)
        names = dict.fromkeys(sharers.values())
        if len(names) > 1:
            self._notes[full] = f"shared by {', '.join(names)}"
        self._build(full, method, (), layout)
        return None

    def _unsuited(self, name: str, method: Method, layout: Layout) -> str | None:
        """Return why a method does not take a block, or None if it does."""
        parameters = layout.parameters
        if any(p.is_complex() for p in parameters.values()) and method.factors(layout.shape):
            return "it is complex, and factors are of real matrices"
        layer = self._survey.names[id(layout.module)][0]
        ids = set(map(id, parameters.values()))
        is_guess = not self._survey.guessed_heads.isdisjoint(ids)
        is_last = not self._survey.ends.isdisjoint(ids)
        if is_guess:  # a pattern for the layer answers the question
            is_last = not self._methods.is_by_name(layer)
        candidate = Candidate(
            name=name,
            module=layout.module,
            parameters=tuple(parameters),
            shape=BlockShape(*layout.shape),
            last=is_last,
        )
        reason = method.unsuited(candidate)
        if reason is None:
            as_head = replace(candidate, last=True)
            if not self._shows_head and method.unsuited(as_head) is not None:
                self._possible_head = name
        elif is_guess and method.unsuited(replace(candidate, last=False)) is None:
            return _GUESSED_HEAD.format(f"^{re.escape(layer)}$", _name(method))
        return reason

    def _layout(self, name: str, module: nn.Module, key: str) -> Layout:
        """Return the layout of a parameter: its helper's if that transposes or reshapes it."""
        plain = plain_layout(module, key)
        helper = self._helper_class(name, module)
        if helper is None:
            helper = KINDS["layer"].lookup(type(module), optional=True)
            if helper is None or not helper.transposed:
                return plain
        alone, why = _helper_of_parameter(helper, module, key)
        if (pattern := first_match(self._choices.layers, name)) is not None:
            if why:
                self._unserved.setdefault(pattern, f"{name}.{key}: {why}")
            else:
                self._served.add(pattern)
        if alone is None:
            return plain
        if helper.transposed or alone.shape != plain.shape:
            return alone
        return plain

    def _cut(self, name: str, full: str, method: Method, layout: Layout) -> tuple[Method, Layout]:
        """Cut a matrix as a pattern of ``cut`` or a known module asks; vectors stay whole."""
        groups, out, into = layout.shape
        if into == 1:
            return method, layout
        pattern = first_match(self._choices.cut, name)
        parts: int | Sequence[int] | None = None
        source, note = "", ""
        if pattern is not None:
            self._used.add(pattern)
            parts, source = self._choices.cut[pattern], f"cut[{pattern!r}]"
        elif orthogonalises(method) and groups == 1:
            # A known module has the fused weight in a child, or as a parameter of its own.
            owner, _, fused = full.rpartition(".")
            if fused == "weight":
                owner, _, fused = name.rpartition(".")
            module = self._survey.by_name[owner]
            parts, source = fused_sizes(module, fused, out), f"as {type(module).__name__}"
            note = f", {source}"
        if parts is None:
            return method, layout
        try:
            method, layout = _cut_into(parts, method, layout)
        except ValueError as error:
            raise ValueError(f"{full}: {source}={parts}: {error}") from None
        self._notes[full] = f"cut into {parts}{note}"
        return method, layout

    # -- report -------------------------------------------------------------------------------

    def _make_report(self) -> Report:
        block_of: dict[int, Block] = {}
        for block in self.blocks:
            block_of.update(dict.fromkeys(map(id, block.parameters.values()), block))
        # Blocks of one kind share their specs, and with them these texts.
        texts = {id(first.tensors): _TextsOfKind.of(first) for first in self._kinds.values()}
        rows: list[ReportRow] = []
        for name, parameter in self._survey.parameters:
            shape: tuple[int, ...] = ()
            if not isinstance(parameter, nn.parameter.UninitializedParameter):
                shape = tuple(parameter.shape)
            owner = block_of.get(id(parameter))
            if owner is None:
                reason = self._reasons[id(parameter)]
                rows.append(ReportRow(name, shape, None, reason=reason))
                continue
            text = texts[id(owner.tensors)]
            notes = [self._notes.get(owner.name, ""), *text.notes]
            if owner.name == self._possible_head:
                pattern = f"^{self._survey.names[id(owner.layout.module)][0]}$"
                notes.append(_POSSIBLE_HEAD.format(_name(owner.method), pattern))
            if not parameter.requires_grad:
                notes.append(FROZEN)
            note = "; ".join(filter(None, notes))
            rows.append(ReportRow(name, shape, owner.name, text.method, note=note))
        solver_note = ""
        if self.solver is not self._choices.solver:
            solver_note = f"solver {self.solver!r} by default"
            if self.solver != "inverse":
                solver_note += ", since a method does not take 'inverse'"
        return Report(tuple(rows), solver=solver_note)


@dataclass(frozen=True)
class _TextsOfKind:
    """The texts of the report on blocks of one kind."""

    method: str  # the names of the method and of the solvers
    notes: list[str]  # on factors that are diagonal, or left out

    @classmethod
    def of(cls, block: Block) -> _TextsOfKind:
        names = [_name(block.method)]
        names += [_name(solver) for _, _, solver in block.solved_factors]
        return cls(" / ".join(dict.fromkeys(names)), list(_reduced(block)))


def _flattened(parameter: nn.Parameter, layout: Layout) -> str:
    """Return the matrices that a parameter of more dimensions is taken as; empty for others."""
    groups, out, into = layout.shape
    if parameter.dim() <= 2 or min(out, into) <= 1:
        return ""
    if groups > 1:
        return f"taken as {groups} matrices {out}x{into}"
    return f"flattened to a matrix {out}x{into}"


def _cut_into(parts: int | Sequence[int], method: Method, layout: Layout) -> tuple[Method, Layout]:
    """Return the method and the layout of a matrix that is cut into parts of its outputs."""
    groups, out, _ = layout.shape
    if isinstance(parts, int):
        return method, CutLayout(layout, parts)
    if sum(parts) != out:
        raise ValueError(f"they add up to {sum(parts)}, and it has {out} outputs")
    if len(set(parts)) == 1:
        return method, CutLayout(layout, groups * len(parts))
    return CutRows(method, tuple(parts)), layout


class _ByPattern:
    """The components of modules, by patterns of their names; the empty one matches all."""

    def __init__(self, kind: str, choice: Choice, base: type) -> None:
        self._kind = kind
        patterns = choice if isinstance(choice, Mapping) else {"": choice}
        self._by_pattern: dict[str, Any] = {}
        for pattern, value in patterns.items():
            self._by_pattern[pattern] = KINDS[kind].build(value, base)
        self._used: set[str] = set()

    def replace_each(self, change: Callable[[Any], Any]) -> None:
        """Replace each component by another one."""
        for pattern, component in self._by_pattern.items():
            self._by_pattern[pattern] = change(component)

    def all(self) -> list[Any]:
        return list(self._by_pattern.values())

    def find(self, name: str) -> Any | None:
        """Return the component of a module, if a pattern matches its name."""
        pattern = first_match(self._by_pattern, name)
        return None if pattern is None else self._by_pattern[pattern]

    def choose(self, name: str) -> Any:
        """Return the component of a module, and mark its pattern as used."""
        pattern = first_match(self._by_pattern, name)
        if pattern is None:
            raise ValueError(
                f"{self._kind}: no pattern of the mapping matches the module {name!r}; add "
                f"'.*' as the last pattern, or skip the module"
            )
        self._used.add(pattern)
        return self._by_pattern[pattern]

    def is_by_name(self, name: str) -> bool:
        """Return whether a module has its component by a pattern other than those for all."""
        return first_match(self._by_pattern, name) not in (None, "", ".*")

    def unused(self) -> list[str]:
        return sorted(set(self._by_pattern) - self._used - {"", ".*"})


def _require_helpers(layers: Mapping[str, object]) -> None:
    """Check the values of ``layers``."""
    for pattern, helper in layers.items():
        if helper == "all":
            continue
        if not (isinstance(helper, type) and issubclass(helper, LayerHelper)):
            raise TypeError(
                f"layers[{pattern!r}] must be a LayerHelper class or 'all', not {helper!r}"
            )


def _auxiliary(choice: Choice, *, of_samples: bool) -> Method | None:
    """Return the auxiliary method; without a fit it reads gradients alone."""
    if choice is None:
        return None
    method: Method = KINDS["method"].build(choice, Method)
    if method.captures and not of_samples:
        raise ValueError(
            f"auxiliary={choice!r} reads calls of layers, but the auxiliary "
            f"method updates single parameters from their gradients: choose it for layers "
            f"by patterns of method=, and pass auxiliary='adamw', for example"
        )
    return method


def _helper_of_parameter(
    helper: type[LayerHelper], module: nn.Module, key: str
) -> tuple[LayerHelper | None, str]:
    """Return the helper of a single parameter; without one, None and why."""
    if key not in helper.names(module):
        return None, f"names() leaves out {key}"
    if why := helper.unsupported(module):
        return None, why
    for part in helper.of(module, [key], joint=False):
        if set(part.parameters) == {key}:
            return part, ""
    return None, "it has no block of this parameter alone"


def _refusals(block: Block, choices: Choices) -> Iterator[str]:
    """Yield why the method or its solvers do not serve the chosen settings."""
    method = block.method
    if choices.scaling not in method.scalings:
        yield (
            f"{method!r} is not defined under scaling={choices.scaling!r}: pass "
            f"Statistics(scaling='fisher'), or skip the module"
        )
    if choices.observed and method.captures and method.empirical_only:
        yield (
            f"{method!r} takes means of output gradients, which are those of the loss alone: "
            f"pass Statistics(fisher='empirical'), or skip the module"
        )
    for solver, numbers in block.solvers:
        factors = [block.solved_factors[number].factor for number in numbers]
        if (why := solver.unsupported(factors)) is not None:
            yield f"{solver!r} cannot solve the factors of {method!r}: {why}"
    yield from _refusals_of_factors(block, choices)


def _refusals_of_factors(block: Block, choices: Choices) -> Iterator[str]:
    """Yield why the factors of a method do not serve the chosen settings."""
    method, damping = block.method, choices.damping
    if damping.per_block and block.captured and not block.solved_factors:
        yield (
            f"{damping!r} is relative to factors that are solved, and {method!r} has none: "
            f"pass a number for damping=, or skip the module"
        )
    if choices.scaling != "fisher" and (names := _beyond_kaisa(block)):
        yield (
            f"scaling={choices.scaling!r} knows no diagonal factors, nor means over the rows "
            f"of each group ({', '.join(names)}): pass Statistics(scaling='fisher'), or skip "
            f"the module"
        )


def _beyond_kaisa(block: Block) -> list[str]:
    """Return the factors that kfac-pytorch's scaling does not define."""
    counted = any(helper.counts_inputs for helper in block.helpers)
    names: list[str] = []
    for factor in block.captured:
        is_count = counted and factor.kind == "diagonal"
        if is_count or factor.mean_over == "group rows":
            names.append(factor.name)
    return names


def _require_elements(full: str, parameter: nn.Parameter) -> None:
    """Check that a parameter has elements."""
    if parameter.numel() == 0:
        raise ValueError(f"{full} has no elements, which no method takes: freeze it")


def _is_apart(layer: Sequence[_Candidate], key: str, sharers: Collection[nn.Module]) -> bool:
    """Return whether a parameter is not shared by the same modules as the layer's weight."""
    # A block has a parameter only if it has all of its gradient.
    members = {candidate.module for candidate in layer}
    if len(sharers) > 1 and not members.issuperset(sharers):
        return True
    return len({id(parameter_of(candidate.module, key)) for candidate in layer}) > 1


def _of_shared_weight(
    method: Method, helpers: tuple[LayerHelper, ...]
) -> tuple[Method, tuple[LayerHelper, ...]] | None:
    """Return the method and the helpers of modules that share a weight; None if none serves."""
    if _same_matrix(helpers):
        return method, helpers
    tied, both = method.tied(), tables_and_heads(helpers)
    if tied is None or not both:
        return None
    return tied, both


def _same_matrix(helpers: Sequence[LayerHelper]) -> bool:
    """Return whether helpers make the same matrix of the same parameters, with the same factors.

    A square table that an embedding and a linear layer share has one shape, and two matrices.
    """
    first = helpers[0]
    # Most layers have one. To number the entries of their weights, too, would take half a minute at
    # 7B.
    if len(helpers) == 1:
        return True
    sides = (FactorSpec("A", "right", 1, 1), FactorSpec("G", "left", 1, 1))
    # Each entry gets a number, to be found in the same place of every matrix.
    numbers = {
        name: torch.arange(p.numel(), dtype=torch.float64, device="cpu").view(p.shape)
        for name, p in first.parameters.items()
    }
    factors, matrix = list(map(first.factor, sides)), first.pack(numbers)
    for helper in helpers[1:]:
        if helper.shape != first.shape or list(map(helper.factor, sides)) != factors:
            return False
        if not torch.equal(helper.pack(numbers), matrix):
            return False
    return True


def _reduced(block: Block) -> Iterator[str]:
    """Yield notes on the factors that are diagonal, or left out for their size, for the report."""
    for factor in block.factors:
        if factor.kind == "diagonal":
            yield f"{factor.name} diagonal ({factor.size} rows)"
    _, out, into = block.shape
    # Only methods of gradients do so, and of matrices alone.
    if min(out, into) == 1 or block.captured:
        return
    sides_of_small: set[str] = set()
    for shape in SMALL:
        sides_of_small |= _sides(block.method.factors(shape))
    lengths = {"left": f"{out} outputs", "right": f"{into} inputs"}
    for side in sorted(sides_of_small - _sides(block.factors)):
        yield f"no factor of its {lengths[side]}"


def _sides(factors: Sequence[FactorSpec]) -> set[str]:
    """Return the sides of the factors that are matrices."""
    return {factor.side for factor in factors if factor.kind == "psd"}


def _nameless(name: str, module: nn.Module, helper: type[LayerHelper]) -> ValueError:
    names = ", ".join(parameters_of(module))
    return ValueError(
        f"module {name!r} ({type(module).__name__}) has no parameter 'weight' but {names}, "
        f"while {helper.__name__}.unsupported() accepts it: let {helper.__name__}.names() "
        f"return the names of its parameters, let unsupported() return a reason, or skip the "
        f"module (skip=[{name!r}])"
    )


def _overrides_names(helper: type[LayerHelper]) -> bool:
    """Return whether a helper class overrides ``names`` or ``of``."""
    return any(
        getattr(getattr(helper, name), "__func__", None)
        is not getattr(getattr(LayerHelper, name), "__func__", None)
        for name in ("names", "of")
    )


def _require_own_parameters(name: str, helper: LayerHelper) -> None:
    """Check that a helper uses the module's parameter names, by which hooks find parameters."""
    for key, parameter in helper.parameters.items():
        if parameter_of(helper.module, key) is not parameter:
            raise ValueError(
                f"module {name!r}: {type(helper).__name__}.parameters has {key!r}, which is not "
                f"what the module has under that name ({', '.join(helper.module._parameters)}): "
                f"use the module's names, or skip the module (skip=[{name!r}])"
            )


def _require_matrix(name: str, helper: LayerHelper) -> None:
    """Check the shapes of ``pack`` and ``unpack`` on meta tensors."""
    tensors: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, parameter in helper.parameters.items():
        tensors[key] = torch.empty(parameter.shape, device="meta")
        shapes[key] = tuple(parameter.shape)
    matrix = helper.pack(tensors)
    if matrix.shape != torch.Size(helper.shape):
        raise ValueError(
            f"{name}: {type(helper).__name__}.pack() gives a matrix {tuple(matrix.shape)}, and "
            f"its shape says {tuple(helper.shape)}, [groups, out, in]"
        )
    unpacked = {key: tuple(tensor.shape) for key, tensor in helper.unpack(matrix).items()}
    if unpacked != shapes:
        raise ValueError(
            f"{name}: {type(helper).__name__}.unpack() gives {unpacked}, and the parameters are "
            f"{shapes}"
        )


def _require_direction(method: Method) -> None:
    """Check that a method overrides ``direct`` or ``precondition``."""
    kind = type(method)
    if kind.direct is Method.direct and kind.precondition is Method.precondition:
        raise TypeError(
            f"method {kind.__name__} has neither direct() nor precondition(): write one"
        )


def _name(component: object) -> str:
    """Return the name of a method or solver for the report, without its wrappers."""
    if isinstance(component, Rooted):
        return _name(component.solver)
    if isinstance(component, TiedKFAC):
        return "kfac"
    if isinstance(component, Relative):
        return f"{_name(component.solver)}, relative damping"
    if isinstance(component, CutRows):
        return _name(component.method)
    kind = "method" if isinstance(component, Method) else "solver"
    return KINDS[kind].name_of(type(component))
