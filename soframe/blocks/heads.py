"""The heads of a model: the layers that make its outputs, found only where the model shows them.

Methods such as Muon are for hidden layers. Blocks are built before the first forward pass, so a
head is a layer

- that has the weight of an embedding;
- that the model names: ``get_output_embeddings`` (transformers), ``get_classifier`` (timm);
- at the end of an ``nn.Sequential``, or of the only child that has parameters;
- in a child called ``head``, ``heads``, ``..._head``, ``classifier``, ``output`` or ``score``;
- or that is the only Linear of a model and its last child, as in ResNets.

Where none of these holds, no layer is taken for a head, and the report asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

_NAMED = re.compile(r"(\w+_)?heads?|classifier|output|score")
_GIVEN = ("get_output_embeddings", "get_classifier")


def heads_of(model: nn.Module, part: nn.Module) -> tuple[list[nn.Parameter], bool]:
    """Return the weights of the heads in a part of a model, and whether an embedding has one."""
    modules = list(model.modules())
    embeddings = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    within = modules if part is model else part.modules()
    linear = [m for m in within if isinstance(m, nn.Linear)]
    tied = [m for m in linear if id(m.weight) in embeddings]
    # A weight that is computed of others, by a parametrization, is no parameter.
    weights = [m._parameters.get("weight") for m in tied or _ends(part)]
    return [weight for weight in weights if weight is not None], bool(tied)


def _ends(module: nn.Module) -> Iterator[nn.Linear | _ConvNd]:
    """Yield the layers that make a module's outputs."""
    if isinstance(module, nn.Linear | _ConvNd):
        yield module
        return
    for last in _last(module):
        yield from _ends(last)


def _last(module: nn.Module) -> list[nn.Module]:
    """Return the children, or layers, that make a module's outputs; none if that is not certain."""
    for getter in _GIVEN:
        found = getattr(module, getter)() if callable(getattr(module, getter, None)) else None
        # timm's distilled models have two.
        every = [m for m in (found if isinstance(found, tuple) else (found,)) if m is not None]
        if every:
            return every
    named = {n: m for n, m in module.named_children() if _has_parameters(m)}
    children, lists = list(named.values()), nn.ModuleList | nn.ModuleDict
    # DeepSpeed's PipelineModule runs its children by their numbers.
    in_order = len(children) == 1 or all(map(str.isdigit, named))
    if in_order and not isinstance(module, lists) and not module._parameters:
        return children[-1:]
    heads: list[nn.Module] = [child for name, child in named.items() if _NAMED.fullmatch(name)]
    if not heads:
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        heads = children[-1:] if linear == children[-1:] else []
    return [m for head in heads for m in (head.children() if isinstance(head, lists) else [head])]


def _has_parameters(module: nn.Module) -> bool:
    own = module._parameters.values()  # first: walking over modules takes a while
    return any(p is not None for p in own) or next(module.parameters(), None) is not None
