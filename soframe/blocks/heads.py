"""The heads of a model: the layers that make its outputs, found only where the model shows them.

Methods such as Muon are for hidden layers. Blocks are built before the first forward pass, so a
head is a layer

- that has the weight of an embedding;
- that the model names: ``get_output_embeddings`` (transformers), ``get_classifier`` (timm);
- in a child called ``head``, ``heads``, ``..._head``, ``classifier``, ``output`` or ``score``;
- at the end of an ``nn.Sequential``, or of the only child that has parameters;
- or that is the only Linear of a model and its last child, as in ResNets.

The last two are guesses, since a body without a head ends alike: the report has a question there,
and a pattern of ``method=`` on the layer's name takes it. Where none of these holds, no layer is
taken for a head, and the report has a question, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

_NAMED = re.compile(r"(\w+_)?heads?|classifier|output|score")
_GETTERS = ("get_output_embeddings", "get_classifier")
_LISTS = nn.ModuleList | nn.ModuleDict


@dataclass(frozen=True)
class Heads:
    """The weights of heads."""

    weights: list[nn.Parameter] = field(default_factory=list)
    tied: bool = False  # whether an embedding has one
    guessed: bool = False  # whether their layers come last, and nothing else shows that


class _End(NamedTuple):
    """A layer that makes outputs, and whether it is taken for a head for no other reason."""

    layer: nn.Linear | _ConvNd
    guessed: bool


def heads_of(model: nn.Module, part: nn.Module | None) -> Heads:
    """Return the heads in a part of a model; none without a part."""
    if part is None:
        return Heads()
    tied = list(_tied(model, part))
    # A weight that is computed of others, by a parametrization, is no parameter.
    candidates = tied or _ends(part)
    ends = [end for end in candidates if end.layer._parameters.get("weight") is not None]
    weights = [end.layer.get_parameter("weight") for end in ends]
    return Heads(weights, tied=bool(tied), guessed=all(end.guessed for end in ends))


def _tied(model: nn.Module, part: nn.Module) -> Iterator[_End]:
    """Yield the layers of a part that have the weight of an embedding of the model."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for layer in part.modules():
        if isinstance(layer, nn.Linear) and id(layer.weight) in embeddings:
            yield _End(layer, guessed=False)


def _ends(module: nn.Module, *, guessed: bool = True) -> Iterator[_End]:
    """Yield the layers that make a module's outputs."""
    if isinstance(module, nn.Linear | _ConvNd):
        yield _End(module, guessed)
        return
    children, is_guess = _named_heads(module), False
    if not children:
        children, is_guess = _last(module)
    for child in children:
        yield from _ends(child, guessed=guessed and is_guess)


def _named_heads(module: nn.Module) -> list[nn.Module]:
    """Return the heads that a module names by a method."""
    for getter in _GETTERS:
        get = getattr(module, getter, None)
        if not callable(get):
            continue
        heads = get()
        # timm's distilled models have two.
        if not isinstance(heads, tuple):
            heads = (heads,)
        present = [head for head in heads if head is not None]
        if present:
            return present
    return []


def _last(module: nn.Module) -> tuple[list[nn.Module], bool]:
    """Return the children, or layers, that make a module's outputs, and whether it is a guess."""
    named = _with_parameters(module)
    last = list(named.values())[-1:]
    if _runs_in_order(module, named):
        return last, True
    layers: list[nn.Module] = []
    for name, child in named.items():
        if not _NAMED.fullmatch(name):
            continue
        if isinstance(child, _LISTS):
            layers += child.children()
        else:
            layers.append(child)
    if layers:
        return layers, False
    if last == [layer for layer in module.modules() if isinstance(layer, nn.Linear)]:
        return last, True
    return [], True


def _runs_in_order(module: nn.Module, named: Collection[str]) -> bool:
    """Return whether a module runs its children, of these names, one after another."""
    if isinstance(module, _LISTS) or module._parameters:
        return False
    # DeepSpeed's PipelineModule runs its children by their numbers.
    return len(named) == 1 or all(map(str.isdigit, named))


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children that have parameters, by name."""
    named: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None:
            named[name] = child
    return named
