"""Recurrent cells: two products, of the input and of the state, inside one function.

The gates of ``nn.LSTMCell``, ``nn.GRUCell`` and ``nn.RNNCell`` are functions of ``x W_ih^T + b_ih``
and ``h W_hh^T + b_hh``; each product is a block, like an ``nn.Linear``. A step of the sequence is a
call, and the calls in one backward pass are positions of the same samples, in the *expand* setting:
steps are treated as independent (Martens, Ba and Johnson, 2018, model their dependence).

Whole layers such as ``nn.LSTM`` are one kernel on most devices, and the graph lacks its products.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from soframe.layers.base import BlockShape, InnerCall, Inputs, LayerHelper, Unit
from soframe.layers.graph import PRODUCTS, products
from soframe.layers.layout import parameter_of
from soframe.registry import KINDS


@KINDS["layer"].register_optional(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
class RecurrentCellHelper(LayerHelper):
    """One of the two products of a cell, with its bias.

    Args:
        module: The cell.
        part: ``"ih"`` for the product with the input, ``"hh"`` for the product with the state.
        bias: Whether the bias is part of the block.
    """

    module: nn.RNNCellBase
    unit: ClassVar[Unit | None] = "row"

    def __init__(self, module: nn.Module, *, part: str, bias: bool) -> None:
        super().__init__(module, bias=bias, keys=(f"weight_{part}", f"bias_{part}"))
        self._part = part

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if not isinstance(module, nn.RNNCellBase):
            return f"{cls.__name__} serves recurrent cells, not {type(module).__name__}"
        if not {"weight_ih", "weight_hh"} <= set(module._parameters):
            return "its weights are not parameters of its own (parametrised or computed)"
        return None

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(dict(module.named_parameters(recurse=False, remove_duplicate=False)))

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> Sequence[LayerHelper]:
        helpers: list[LayerHelper] = []
        for part in ("ih", "hh"):
            if f"weight_{part}" in trained:  # a bias whose weight is frozen is in no block
                helpers.append(cls(module, part=part, bias=joint and f"bias_{part}" in trained))
        return helpers

    @property
    def part(self) -> str:
        """The name of the weight."""
        return f"weight_{self._part}"

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the weight, which stacks all gates, with the bias column."""
        assert self.weight is not None
        out, into = self.weight.shape
        return BlockShape(1, out, into + (self.bias is not None))

    def observe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sequence[InnerCall]:
        """Find the product with the block's weight in the graph of the output."""
        first = output[0] if isinstance(output, tuple) else output
        weight = parameter_of(self.module, self.part)  # gathered, under fully_shard
        if weight is None or not (first.requires_grad and weight.requires_grad):
            return []
        arguments = dict(zip(("input", "hx"), args, strict=False), **kwargs)
        inputs, state = [arguments["input"]], arguments.get("hx")
        if isinstance(state, tuple):
            inputs += state
        elif state is not None:
            inputs.append(state)
        calls: list[InnerCall] = []
        for node, _, _ in products(first.grad_fn, {id(weight): 0}, len(weight), inputs):
            calls.append(_call(node, weight.shape[1]))
        if len(calls) != 1:
            raise RuntimeError(
                f"{type(self).__name__} finds the product of weight_{self._part} {len(calls)} "
                f"time(s) in the graph of {type(self.module).__name__}, not once: if the module is "
                f"compiled, exempt it with torch.compiler.disable, or skip it"
            )
        return calls

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return inputs[0].unsqueeze(1).unsqueeze(0)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return grad_output.unsqueeze(1).unsqueeze(0)


def without_helper(module: nn.Module) -> str | None:
    """Return the reason why a recurrent layer has no helper, with a remedy; None for others."""
    if not isinstance(module, nn.RNNBase):
        return None
    return (
        "its products are inside one kernel, which shows none of them: loop over a cell "
        f"(nn.{module.mode.partition('_')[0]}Cell, layers='all'), or choose a method that reads "
        "gradients alone for it, such as method={'name of the module': 'soap', '': 'kfac'}"
    )


def _call(node: Any, into: int) -> InnerCall:
    """Describe a product by its graph node."""
    saved, _ = PRODUCTS[node.name()]
    meta = node._input_metadata[0]

    def read() -> Inputs:
        return (getattr(node, saved).detach(),)

    def like() -> Inputs:
        element = torch.empty(1, dtype=meta.dtype, device=meta.device)
        return (element.expand(meta.shape[0], into),)

    return InnerCall(edge=GradientEdge(node, 0), read=read, like=like, arrange=lambda g: g)
