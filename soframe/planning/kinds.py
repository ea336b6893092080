"""The kind of a model, from the classes and shapes of its layers; their names are not read.

Attention is a class of torch's, or a module whose linear layers have the shapes of queries, keys
and values. From a width d, with h features of queries and g of keys and of values, where g divides
h, these are ``d -> h + 2 g`` in one layer, ``d -> h`` and ``d -> 2 g``, or three layers; ``h -> d``
leads back.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from soframe.layers.linear import TransposedLinearHelper
from soframe.registry import KINDS

Shape = tuple[int, int]
"""Outputs and inputs of a linear layer."""


def kind_of(model: nn.Module) -> str:
    """Return the kind of a model: a name of `soframe.Recommendation`."""
    if _is_mostly_frozen(model):
        return "adapters"
    modules = list(model.modules())
    has_attention = _has_attention(modules)
    if _has_any(modules, nn.RNNBase, nn.RNNCellBase) and not has_attention:
        return "recurrent"
    has_patches = _embed_patches(modules)
    is_convolutional = _is_most_convolutional(model)
    has_tokens = has_attention or _has_tokens(modules, has_patches=has_patches)
    if has_tokens and (has_patches or not is_convolutional):
        return "transformer"
    if is_convolutional or _overlap(modules):
        return "convolutional"
    has_tables = _has_any(modules, nn.Embedding)
    return "regression" if _has_one_output(modules) and not has_tables else "dense"


def _is_mostly_frozen(model: nn.Module) -> bool:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained < sum(p.numel() for p in model.parameters()) / 2


def _has_any(modules: Sequence[nn.Module], *classes: type[nn.Module]) -> bool:
    return any(isinstance(module, classes) for module in modules)


def _has_attention(modules: Sequence[nn.Module]) -> bool:
    has_tokens = _has_any(modules, nn.Embedding) or _has_norms(modules)
    return any(_attends(module, has_tokens=has_tokens) for module in modules)


def _has_tokens(modules: Sequence[nn.Module], *, has_patches: bool) -> bool:
    has_embedding = has_patches or _has_any(modules, nn.Embedding)
    return has_embedding and _has_norms(modules)


def _has_one_output(modules: Sequence[nn.Module]) -> bool:
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    return bool(linear) and linear[-1].out_features == 1


def _has_norms(modules: Sequence[nn.Module]) -> bool:
    """Return whether a module is a layer norm or an RMS norm, torch's or another."""
    names = [type(module).__name__.lower() for module in modules]
    is_named = any(name.endswith(("layernorm", "rmsnorm")) for name in names)
    return is_named or _has_any(modules, nn.LayerNorm, nn.RMSNorm)


def _overlap(modules: Sequence[nn.Module]) -> bool:
    """Return whether neighbouring outputs of some convolution share inputs."""
    for module in modules:
        if isinstance(module, _ConvNd):
            pairs = zip(module.kernel_size, module.stride, strict=True)
            if any(kernel > stride for kernel, stride in pairs):
                return True
    return False


def _embed_patches(modules: Sequence[nn.Module]) -> bool:
    """Return whether convolutions have strides and none overlap, as in a vision transformer."""
    strides = [max(module.stride) for module in modules if isinstance(module, _ConvNd)]
    return max(strides, default=1) > 1 and not _overlap(modules)


def _is_most_convolutional(model: nn.Module) -> bool:
    """Return whether convolutions have most of the matrices' entries, tables apart."""
    tables, kernels = set[int](), set[int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables.add(id(module.weight))
        elif isinstance(module, _ConvNd):
            kernels.update(map(id, module.parameters(recurse=False)))
    in_kernels, elsewhere = 0, 0
    for parameter in model.parameters():
        if parameter.dim() > 1 and id(parameter) in kernels:
            in_kernels += parameter.numel()
        elif parameter.dim() > 1 and id(parameter) not in tables:
            elsewhere += parameter.numel()
    return in_kernels > elsewhere


def _attends(module: nn.Module, *, has_tokens: bool) -> bool:
    """Return whether a module is attention; three layers for queries, keys, values need tokens."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    shapes: list[Shape] = []
    for child in module.children():
        linear = [shape for part in child.modules() if (shape := _shape(part)) is not None]
        if len(linear) > 1:
            return False
        shapes += linear
    return _has_fused(shapes) or _are_separate(shapes, has_tokens=has_tokens)


def _has_fused(shapes: Sequence[Shape]) -> bool:
    """Return whether one of some layers makes queries, keys and values, and one leads back."""
    inputs = {into for _, into in shapes}
    for out, into in shapes:
        # An output that no layer reads unchanged may be split.
        backs = [hidden for width, hidden in shapes if width == into and out not in inputs]
        if any(_are_projections([out], hidden) for hidden in backs):
            return True
    return False


def _are_separate(shapes: Sequence[Shape], *, has_tokens: bool) -> bool:
    """Return whether layers are those of queries, keys and values, perhaps with a way back."""
    # Three equal layers may be a perceptron's.
    if has_tokens and _are_three_projections(shapes):
        return True
    return any(_leads_back(shapes, index, has_tokens) for index in range(len(shapes)))


def _leads_back(shapes: Sequence[Shape], index: int, has_tokens: bool) -> bool:
    """Return whether one of some layers leads back, and the others are queries, keys, values."""
    width, hidden = shapes[index]
    projections = [*shapes[:index], *shapes[index + 1 :]]
    if any(into != width for _, into in projections):
        return False
    outs = [out for out, _ in projections]
    # Keys and values in one layer are split before they are used.
    is_split = len(outs) == 2 and not {width, hidden}.issuperset(outs)
    is_complete = is_split or (len(outs) == 3 and has_tokens)
    return is_complete and _are_projections(outs, hidden)


def _are_three_projections(shapes: Sequence[Shape]) -> bool:
    """Return whether three layers make queries, keys and values, without a way back."""
    if len(shapes) != 3 or len({into for _, into in shapes}) > 1:
        return False
    outs = [out for out, _ in shapes]
    return _are_projections(outs, max(outs))


def _are_projections(outs: Sequence[int], queries: int) -> bool:
    """Return whether layers of these outputs make queries of a size, and keys and values."""
    rest = list(outs)
    if len(outs) == 1:
        rest = [outs[0] - queries]
    elif queries in rest:
        rest.remove(queries)
    else:
        return False
    if len(rest) == 1:
        keys, odd = divmod(rest[0], 2)
        # Gated perceptrons have h -> d behind two times d -> h, in one layer or in two.
        is_gate = rest[0] == queries
        return keys > 0 and not odd and not is_gate and queries % keys == 0
    return len(rest) == 2 and rest[0] == rest[1] and queries % rest[0] == 0


def _shape(module: nn.Module) -> Shape | None:
    """Return the outputs and inputs of a linear layer, or None for another module."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    helper = KINDS["layer"].lookup(type(module), optional=True)
    if isinstance(helper, type) and issubclass(helper, TransposedLinearHelper):
        into, out = module.get_parameter("weight").shape
        return out, into
    return None
