"""The kind of a model, from the classes and shapes of its layers; their names are not read.

Attention is a class of torch's, or a module whose linear layers have the shapes of queries, keys
and values. From a width d, with h features of queries and g of keys and of values, where g divides
h, these are ``d -> h + 2 g`` in one layer, ``d -> h`` and ``d -> 2 g``, or three layers; ``h -> d``
leads back.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from soframe.layers.linear import TransposedLinearHelper
from soframe.registry import KINDS

Shape = tuple[int, int]  # outputs and inputs of a linear layer

SIGNS = {
    nn.Embedding: "tables",
    nn.LayerNorm: "norms",
    nn.RMSNorm: "norms",
    nn.RNNBase: "recurrence",
    nn.RNNCellBase: "recurrence",
}
"""The signs of classes of torch."""

RULES: tuple[tuple[set[str], set[str], str], ...] = (
    ({"recurrence"}, {"attention"}, "recurrent"),
    # Tokens are words, or patches of an image, which meet in attention or between norms.
    ({"attention", "patches"}, set(), "transformer"),
    ({"norms", "patches"}, set(), "transformer"),
    ({"attention"}, {"kernels"}, "transformer"),
    ({"norms", "tables"}, {"kernels"}, "transformer"),
    ({"kernels"}, set(), "convolutional"),
    ({"overlaps"}, set(), "convolutional"),
    ({"tables"}, set(), "dense"),
    ({"one output"}, set(), "regression"),
    (set(), set(), "dense"),
)
"""Signs that a kind has, signs that it has not, and the kind; the first that fits counts."""


def kind_of(model: nn.Module) -> str:
    """Return the kind of a model: a name of `soframe.Recommendation`."""
    if _trains_adapters(model):
        return "adapters"
    signs = _signs(model)
    kinds = (kind for has, lacks, kind in RULES if has <= signs and signs.isdisjoint(lacks))
    return next(kinds)


def _trains_adapters(model: nn.Module) -> bool:
    """Return whether most parameters are frozen, and the trained matrices are several thin ones."""
    frozen = trained = matrices = thin = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
            if parameter.dim() > 1:
                short, long = sorted(parameter.shape[:2])
                matrices += 1
                thin += long > 4 * short
        else:
            frozen += parameter.numel()
    if trained >= frozen:
        return False
    return thin == matrices != 1  # one alone is a new head


def _signs(model: nn.Module) -> set[str]:
    """Return the signs in the modules of a model by which `RULES` tell its kind."""
    modules = list(model.modules())
    signs: set[str] = set()
    outputs = 0  # of the last linear layer
    for module in modules:
        signs |= _signs_of(module)
        if isinstance(module, nn.Linear):
            outputs = module.out_features
    if outputs == 1:
        signs.add("one output")
    if _is_most_convolutional(model):
        signs.add("kernels")
    if "strides" in signs and "overlaps" not in signs:  # as in a vision transformer
        signs.add("patches")
    has_tokens = not signs.isdisjoint(("tables", "norms"))
    if any(_attends(module, has_tokens=has_tokens) for module in modules):
        signs.add("attention")
    return signs


def _signs_of(module: nn.Module) -> set[str]:
    signs = {sign for kind, sign in SIGNS.items() if isinstance(module, kind)}
    if type(module).__name__.lower().endswith(("layernorm", "rmsnorm")):  # not torch's alone
        signs.add("norms")
    if isinstance(module, _ConvNd):
        if max(module.stride) > 1:
            signs.add("strides")
        if any(map(operator.gt, module.kernel_size, module.stride)):
            signs.add("overlaps")
    return signs


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
        if parameter.dim() < 2:
            continue
        if id(parameter) in kernels:
            in_kernels += parameter.numel()
        elif id(parameter) not in tables:
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
        layers = _linear_layers(child)
        if len(layers) > 1:
            return False
        shapes += layers
    candidates = _candidates(shapes, has_tokens=has_tokens)
    return any(itertools.starmap(_are_projections, candidates))


def _candidates(shapes: list[Shape], *, has_tokens: bool) -> Iterator[tuple[list[int], int]]:
    """Yield the outputs of layers that may be queries, keys and values, and the size of queries."""
    for index, back in enumerate(shapes):
        for outs in _led_back(back, shapes[:index] + shapes[index + 1 :], has_tokens=has_tokens):
            yield outs, back[1]
    # No layer leads back. Three equal layers may be a perceptron's, but for tokens.
    inputs = {into for _, into in shapes}
    if has_tokens and len(shapes) == 3 and len(inputs) == 1:
        outs = [out for out, _ in shapes]
        yield outs, max(outs)


def _led_back(back: Shape, layers: list[Shape], *, has_tokens: bool) -> Iterator[list[int]]:
    """Yield the outputs of layers before attention, if one more layer leads back from it."""
    width, hidden = back
    inputs = {hidden} | {into for _, into in layers}
    outs = [out for out, into in layers if into == width]
    for out in set(outs).difference(inputs):  # an output that no layer reads may be split
        yield [out]
    if len(outs) < len(layers):
        return
    if len(outs) == 3 and has_tokens:
        yield outs
    # Keys and values in one layer are split before they are used.
    if len(outs) == 2 and not set(back).issuperset(outs):
        yield outs


def _are_projections(outs: Sequence[int], queries: int) -> bool:
    """Return whether layers of these outputs make queries of a size, and keys and values."""
    rest = list(outs)
    if len(outs) == 1:
        rest = [outs[0] - queries]
    elif queries in rest:
        rest.remove(queries)
    else:
        return False
    match rest:
        case [keys, values] if keys == values:
            return queries % keys == 0
        # Gated perceptrons have h -> d behind two times d -> h, in one layer or in two.
        case [both] if both > 0 and both % 2 == 0 and both != queries:
            return queries % (both // 2) == 0
        case _:
            return False


def _linear_layers(module: nn.Module) -> list[Shape]:
    """Return the shapes of the linear layers in a module."""
    shapes: list[Shape] = []
    for layer in module.modules():
        helper = KINDS["layer"].lookup(type(layer), optional=True)
        if isinstance(layer, nn.Linear):
            shapes.append((layer.out_features, layer.in_features))
        elif helper is not None and issubclass(helper, TransposedLinearHelper):
            into, out = layer.get_parameter("weight").shape
            shapes.append((out, into))
    return shapes
