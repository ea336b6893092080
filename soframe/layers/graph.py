"""Search an autograd graph for products with given parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

# Node of a product -> attribute with the saved input, and index of the weight among the arguments.
PRODUCTS = {
    "AddmmBackward0": ("_saved_mat1", 2),
    "MmBackward0": ("_saved_self", 1),
    "BmmBackward0": ("_saved_self", 1),
    "LinearBackward0": ("_saved_input", 1),
    "MkldnnLinearBackward0": ("_saved_self", 1),
}
# Nodes that may stand between a product and its parameter.
VIEWS = {
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ExpandBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ToCopyBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
}


def products(
    start: Any, weights: Mapping[int, int], out: int, inputs: Sequence[Tensor]
) -> Iterator[tuple[Any, int, int]]:
    """Yield the node of each product of a weight, its first group and the number of its groups.

    The search runs from the output's node ``start`` to the module's ``inputs``. ``weights``
    maps the id of each weight to its first group; ``out`` is the number of rows of a projection.
    """
    ends = [x.grad_fn for x in inputs if x.grad_fn is not None]
    seen = set[Any](ends)  # nodes, not ids: a freed id may be reused
    open_nodes = [start]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_nodes += [following for following, _ in node.next_functions]
        if node.name() in PRODUCTS:
            _, place = PRODUCTS[node.name()]
            parameter, offset = _source(node.next_functions[place])
            if id(parameter) in weights:
                size = node._input_metadata[0].shape[-1] // out
                yield node, weights[id(parameter)] + offset // out, size


def _source(edge: tuple[Any, int]) -> tuple[Tensor | None, int]:
    """Return the parameter behind a view, and the row of it at which the view begins."""
    (node, number), offset = edge, 0
    while node is not None and node.name() in VIEWS:
        if node.name() == "SplitBackward0":
            offset += number * node._saved_split_size
        elif node.name() == "SplitWithSizesBackward0":
            offset += sum(node._saved_split_sizes[:number])
        node, number = node.next_functions[0]
    return getattr(node, "variable", None), offset
