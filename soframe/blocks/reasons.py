"""Why a module or a parameter has no block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from soframe.blocks import sharding
from soframe.layers.base import LayerHelper
from soframe.layers.experts import are_experts
from soframe.layers.recurrent import without_helper
from soframe.registry import KINDS


class Reason(StrEnum):
    """Why a parameter has no block; ``format`` fills in the names."""

    SKIPPED = "skipped by {!r}"
    OPTIONAL = "no layer helper by default; layers='all' adds {}"
    UNKNOWN = "no layer helper; register one with @soframe.register('layer', {})"
    MATRIX = (
        "no layer helper; if {0} computes x W^T + b, soframe.register('layer', {0})("
        "soframe.layers.LinearHelper), else register a helper of its own"
    )
    CONTAINER = "no layer helper: a {} is not called, and others use its parameters; {}"
    KERNEL = "no layer helper: {}"
    COMPUTED = "no layer helper: a weight is computed from it; {}"
    SORTED = "no layer helper: tokens are sorted by expert within {}; {}"
    OVERRIDDEN = (
        "no layer helper: {module} overrides {known}.{forward}, so {helper} may not have its rows; "
        "if it computes what {known} does, soframe.register('layer', {module})({path}), else "
        "register a helper of its own"
    )
    SCRIPTED = "no layer helper: TorchScript runs it; {}"
    EMPTY = "it has parameters without elements: {}"
    UNCALLED = "{} uses its weight without calling it"
    SHARED = "its weight is shared with {}, which has no block: {}"
    GEOMETRY = "its weight is shared with a layer of another geometry; {}"
    APART = "this {} and the rest of its layer are not shared by the same modules"
    WEIGHT_ALONE = "its method takes the layer's weight alone"
    LEFT_OUT = "{}.names() leaves it out"
    NO_METHOD = "no pattern of method= matches its module"
    NO_BLOCK = "its layer has no block"
    SPARSE = "{}: sparse=True makes sparse gradients; build it with sparse=False"


REMEDY = "a method that reads gradients alone, such as 'soap', takes it"

_UNCALLED: Mapping[str, tuple[str, ...]] = {
    "torch.nn.modules.activation.MultiheadAttention": ("out_proj",),
    "transformers.models.mamba.modeling_mamba.MambaMixer": ("conv1d", "dt_proj"),
}
"""Modules that use parameters of submodules without calling these, by name, and which ones."""


def reasons_of_uncalled(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return the reason why each submodule that is never called has no block, by its name."""
    reasons: dict[str, str] = {}
    for name, module in modules:
        for base in type(module).__mro__:
            kind = f"{base.__module__}.{base.__qualname__}"
            for child in _UNCALLED.get(kind, ()):
                shown = base.__name__
                if kind.startswith("torch.nn."):
                    shown = f"nn.{shown}"
                reasons[f"{name}.{child}".removeprefix(".")] = Reason.UNCALLED.format(shown)
    return reasons


def find_override(module: nn.Module, helper: type[LayerHelper]) -> str | None:
    """Return why the helper of a class does not serve a subclass that overrides its forward."""
    kind, registry = type(module), KINDS["layer"]
    known = next(base for base in kind.__mro__ if registry.has(base))
    for step in ("forward", "_conv_forward"):  # torch's convolutions compute in the second
        if getattr(kind, step, None) is not getattr(known, step, None):
            path = helper.__name__
            if helper.__module__.startswith("soframe.layers."):
                path = f"soframe.layers.{path}"
            return Reason.OVERRIDDEN.format(
                module=sharding.class_name(module),
                known=known.__name__,
                forward=step,
                helper=helper.__name__,
                path=path,
            )
    return None


def why_no_helper(module: nn.Module) -> str:
    """Return why a module has no helper."""
    kind = type(module).__name__
    if (known := KINDS["layer"].lookup(type(module), optional=True)) is not None:
        return Reason.OPTIONAL.format(known.__name__)
    if (why := without_helper(module)) is not None:
        return Reason.KERNEL.format(why)
    if isinstance(module, torch.jit.ScriptModule):
        return Reason.SCRIPTED.format(REMEDY)
    if isinstance(module, ParametrizationList):
        return Reason.COMPUTED.format(REMEDY)
    if are_experts(module):
        return Reason.SORTED.format(kind, REMEDY)
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return Reason.CONTAINER.format(kind, REMEDY)
    if _has_matrix(module):
        return Reason.MATRIX.format(kind)
    return Reason.UNKNOWN.format(kind)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module itself, by name."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module has a weight ``[out, in]``, perhaps a bias ``[out]``, and no more."""
    shapes = {name: parameter.shape for name, parameter in parameters_of(module).items()}
    weight = shapes.pop("weight", torch.Size())
    bias = shapes.pop("bias", weight[:1])
    return len(weight) == 2 and bias == weight[:1] and not shapes


def sparse(modules: Iterable[nn.Module]) -> str | None:
    """Return the reason if the gradient of a parameter of some modules is sparse, else None."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return Reason.SPARSE.format(type(module).__name__)
    return None
