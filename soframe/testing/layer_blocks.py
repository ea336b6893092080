"""The exact block of one layer, in the order of the layer's gradient matrix.

soframe packs a layer's gradient as a *layer matrix* ``[out, in(+1)] = [weight | bias]``, vectorised
row by row, so that a block indexed by ``(o, i)`` compares with ``kron(G, A)``. The features of a
convolution's weight are in the order kernel position, channel. Autograd gives the flat vector
``[weight.flatten(), bias]`` instead; ``layer_matrix_basis`` maps the one to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from soframe.testing.dense import Kind, Loss, Reduction, dense_fisher


def layer_parameters(model: nn.Module, layer: str) -> tuple[str, ...]:
    """Return the names of one module's own trainable parameters, weight and bias first.

    Args:
        model: The network.
        layer: The module's qualified name; ``""`` is the network itself.

    Returns:
        Qualified names, of the weight, the bias, then any others in the order of registration.
    """
    parameters = dict(model.get_submodule(layer).named_parameters(recurse=False))
    prefix = f"{layer}." if layer else ""
    order = sorted(parameters, key=lambda name: {"weight": 0, "bias": 1}.get(name, 2))
    return tuple(f"{prefix}{name}" for name in order if parameters[name].requires_grad)


def layer_matrix_basis(
    module: nn.Module, *, weight: bool | None = None, bias: bool | None = None
) -> Tensor:
    """Return the index in a layer's flat parameter vector of each entry of its gradient matrix.

    With ``basis = layer_matrix_basis(module)`` and ``flat`` the concatenation of the flattened
    weight and bias: ``flat[basis]`` is the gradient as ``[groups, out/groups, in(+1)]``,
    ``flat[basis[g]] = matrix`` writes group ``g`` back, and with ``order = basis[g].flatten()``
    ``F[order][:, order]`` is the block of group ``g`` over ``(o, i)``, row-major.

    Args:
        module: A Linear, or a convolution of 1 to 3 dimensions, with weight ``[out, in/groups,
            *kernel]``. Input features are in the order kernel position (the last kernel axis
            fastest), then channel.
        weight: Whether the flat vector holds the weight; by default whether it is trainable.
        bias: The same for the bias.

    Returns:
        Indices ``[groups, out/groups, in(+1)]``, int64; the bias is the last column.

    Raises:
        TypeError: If the module is none of these.
        ValueError: If the flat vector holds neither parameter.
    """
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(f"no layer matrix is defined for {type(module).__name__}")
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    out, fan_in = module.weight.shape[0], module.weight[0].numel()
    if weight is None:
        weight = module.weight.requires_grad
    if bias is None:
        bias = module.bias is not None and module.bias.requires_grad
    if not (weight or bias):
        raise ValueError("a layer matrix needs the weight, the bias or both")
    rows, offset = torch.arange(out).unsqueeze(1), 0
    columns: list[Tensor] = []
    if weight:
        places = torch.arange(fan_in).reshape(module.weight.shape[1:]).movedim(0, -1).flatten()
        columns.append(fan_in * rows + places)
        offset = out * fan_in
    if bias:
        columns.append(offset + rows)
    return torch.cat(columns, 1).reshape(groups, out // groups, -1)


def layer_fisher(
    model: nn.Module,
    layer: str,
    inputs: Any,
    loss: Loss,
    targets: Any = None,
    *,
    kind: Kind = "empirical",
    reduction: Reduction = "mean",
) -> list[Tensor]:
    """Return one layer's block per group, ordered like its gradient matrix ``[out, in(+1)]``.

    ``layer`` is the qualified name of a Linear or convolution; `dense_fisher`
    describes the other arguments and the errors.

    Returns:
        For each group the block over ``(o, i)``, row-major, float64: the matrix that ``kron(G, A)``
        approximates. Frozen parameters have no column.
    """
    basis = layer_matrix_basis(model.get_submodule(layer))
    names = layer_parameters(model, layer)
    block = dense_fisher(
        model, inputs, loss, targets, parameters=names, kind=kind, reduction=reduction
    )
    blocks: list[Tensor] = []
    for group in basis:
        order = group.flatten().to(block.device)
        blocks.append(block[order][:, order])
    return blocks
