"""Multi-head attention: the projections within ``nn.MultiheadAttention``.

The projections are products inside one function, where module hooks do not see their inputs and
outputs. So the autograd graph is searched, from the module's output up to its inputs, for products
with one of its weights. Their inputs are the tensors that autograd saved for them, and their output
gradients are captured at their graph nodes.

``in_proj_weight`` and its bias are one block with three groups: the projections of queries, keys
and values are three independent layers, whose inputs may differ. If their weights are separate
parameters (``kdim`` or ``vdim``), each is a block, and the common bias is another one. The output
projection is a block with weight and bias. All rows are positions, in the *expand* setting, as with
an ``nn.Linear`` for each projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from soframe.kernels.devices import sent
from soframe.layers.base import BlockShape, InnerCall, Inputs, LayerHelper, Unit
from soframe.layers.graph import PRODUCTS, products
from soframe.layers.layout import parameter_of
from soframe.registry import KINDS
from soframe.specs import FactorSpec

SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_WITH_BIAS = (*SEPARATE, "in_proj_bias")


@KINDS["layer"].register_optional(nn.MultiheadAttention)
class AttentionHelper(LayerHelper):
    """One block of an ``nn.MultiheadAttention``: any ``batch_first``, masks and ``need_weights``.

    Args:
        module: The module.
        weights: The names of the weights whose products have the block's rows, mapped to the first
            group of each.
        weight: The name of the weight in the block; empty without one.
        bias: The name of the bias in the block; empty without one.
        groups: The number of projections in the block.
    """

    module: nn.MultiheadAttention
    unit: ClassVar[Unit | None] = "row"

    def __init__(
        self,
        module: nn.Module,
        *,
        weights: Mapping[str, int],
        weight: str,
        bias: str,
        groups: int,
    ) -> None:
        super().__init__(module, weight=False, bias=False)
        self._weights, self.groups = dict(weights), groups
        self._keys = (weight, bias)
        self.weight = parameter_of(module, weight)
        self.bias = parameter_of(module, bias)
        multiplied = parameter_of(module, next(iter(self._weights)))
        assert multiplied is not None
        self._into = multiplied.shape[1]
        self._out = self.module.embed_dim

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        if not isinstance(module, nn.MultiheadAttention):
            return f"{cls.__name__} serves nn.MultiheadAttention, not {type(module).__name__}"
        if module.bias_k is not None or module.bias_v is not None:
            return "bias_k and bias_v (add_bias_kv=True) belong to no projection"
        if "weight" not in module.out_proj._parameters:
            return "the weight of its out_proj is not a parameter of its own"
        return None

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        keys = ("in_proj_weight", *SEPARATE, "in_proj_bias", "out_proj.weight", "out_proj.bias")
        return tuple(key for key in keys if parameter_of(module, key) is not None)

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> Sequence[LayerHelper]:
        helpers: list[LayerHelper] = []
        chosen = set(trained)
        if not joint:
            chosen -= {"in_proj_bias", "out_proj.bias"}

        def add(weight: str, bias: str, groups: int) -> None:
            if weight not in chosen:
                return  # a bias whose weight is frozen is in no block
            if bias not in chosen:
                bias = ""
            helpers.append(
                cls(module, weights={weight: 0}, weight=weight, bias=bias, groups=groups)
            )

        add("in_proj_weight", "in_proj_bias", 3)
        for name in SEPARATE:
            add(name, "", 1)
        if chosen.issuperset(_WITH_BIAS) and _trained_together(module):
            weights = {name: group for group, name in enumerate(SEPARATE)}
            helpers.append(cls(module, weights=weights, weight="", bias="in_proj_bias", groups=3))
        add("out_proj.weight", "out_proj.bias", 1)
        return helpers

    @property
    def part(self) -> str:
        """The name of the first parameter."""
        return next(iter(self.parameters)).replace(".", "_")

    @cached_property
    def shape(self) -> BlockShape:
        return self._shape(self.groups, self._out, self._into)

    def factor(self, spec: FactorSpec) -> FactorSpec:
        # The three projections may see different rows.
        return spec.by_group() if self.groups > 1 else spec

    # -- rows -----------------------------------------------------------------------------------

    def observe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sequence[InnerCall]:
        """Find the products with the block's weights in the graph of the output."""
        first = output[0] if isinstance(output, tuple) else output
        # Each weight's first group, by id.
        groups: dict[int, int] = {}
        is_trained = first.requires_grad
        for name, group in self._weights.items():
            weight = parameter_of(self.module, name)
            groups[id(weight)] = group
            # The products with a frozen weight are not found. Its block changes in this step.
            is_trained &= weight is not None and weight.requires_grad
        if not is_trained:
            return []
        arguments = itertools.chain(args, kwargs.values())
        inputs = [x for x in arguments if isinstance(x, Tensor)]
        batch = self._batch(args[0] if args else kwargs["query"])
        calls, seen = [], [0] * self.groups
        for node, group, size in products(first.grad_fn, groups, self._out, inputs):
            for index in range(group, group + size):
                seen[index] += 1
            calls.append(self._call(node, group, size, batch))
        if seen != [1] * self.groups:
            raise RuntimeError(
                f"{type(self).__name__} finds the projections {', '.join(self._weights)} "
                f"{seen} time(s) in the graph of {type(self.module).__name__}, not once each: if "
                f"the module is compiled, exempt it with torch.compiler.disable, or skip it"
            )
        return calls

    def _batch(self, query: Tensor) -> int:
        if query.dim() == 2:
            return 1
        if self.module.batch_first:
            return len(query)
        return query.shape[1]

    def _call(self, node: Any, group: int, size: int, batch: int) -> InnerCall:
        name, _ = PRODUCTS[node.name()]
        meta = node._input_metadata[0]
        groups, out, into = self.groups, self._out, self._into
        positions = torch.Size(meta.shape[:-1]).numel() // max(batch, 1)
        reaches = torch.zeros(groups, dtype=torch.bool, device="cpu")
        reaches[group : group + size] = True

        def read() -> Inputs:
            x = getattr(node, name).detach()
            return (x.reshape(positions, batch, x.shape[-1]).transpose(0, 1), reaches)

        def like() -> Inputs:
            element = torch.empty(1, dtype=meta.dtype, device=meta.device)
            return (element.expand(batch, positions, into), reaches)

        return InnerCall(
            edge=GradientEdge(node, 0),
            read=like if self.weight is None else read,
            like=like,
            arrange=_arranging(positions, batch, (group * out, (groups - group - size) * out)),
        )

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Return the same rows for all projections of the call, zeros for the others."""
        x, reaches = inputs
        rows = x.unsqueeze(0).expand(self.groups, *x.shape)
        return _reached(rows, reaches)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        # The features of the projections are concatenated.
        batch, shared, _ = grad_output.shape
        return grad_output.view(batch, shared, self.groups, self._out).permute(2, 0, 1, 3)

    def block_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        # Projections outside the call have no ones for the bias either.
        rows, reaches = super().block_rows(inputs, output_rows), inputs[1]
        return _reached(rows, reaches)

    def mask(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        """Exclude projections outside the call."""
        reaches = inputs[1]
        if bool(reaches.all()):
            return None
        reached = _mask(reaches, output_rows) != 0
        return reached.view(-1, 1, 1).expand(output_rows.shape[:3])

    def group_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        # Counted on the host, without a synchronisation.
        reaches = inputs[1]
        if bool(reaches.all()):
            return None
        _, batch, shared, _ = output_rows.shape
        return reaches * (batch * shared)

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        x, reaches = inputs
        if unit == "row":
            x = x.reshape(-1, 1, x.shape[-1])
        return x[index], reaches

    def mean_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        rows, reaches = super().mean_rows(inputs, output_rows), inputs[1]
        return _reached(rows, reaches)

    def input_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        # Computed once for all projections of the call.
        if self.groups == 1:
            return super().input_moment(inputs, output_rows, total, scale)
        x, reaches = inputs
        moment = self._once.input_moment((x, reaches[:1] | True), output_rows[:1], None, scale)
        if total is None:
            total = moment.new_zeros(tuple(self.shape)[:1] + moment.shape[1:])
        total += moment * _mask(reaches, moment).view(-1, 1, 1)
        return total

    @property
    def _once(self) -> AttentionHelper:
        """The helper of one projection of the block."""
        helper = object.__new__(type(self))
        helper.__dict__.update(self.__dict__, groups=1, shape=self.shape._replace(groups=1))
        return helper


def _trained_together(module: nn.Module) -> bool:
    """Return whether separate projections and their bias are all trained, or all frozen."""
    states: set[bool] = set()
    for name in _WITH_BIAS:
        parameter = parameter_of(module, name)
        if parameter is not None:
            states.add(parameter.requires_grad)
    return len(states) == 1


def _reached(rows: Tensor, reaches: Tensor) -> Tensor:
    """Return rows ``[groups, ...]``, with zeros for the projections outside the call."""
    if bool(reaches.all()):
        return rows
    return rows * _mask(reaches, rows).view(-1, 1, 1, 1)


def _mask(reaches: Tensor, like: Tensor) -> Tensor:
    """Convert the mask of a call's projections to another tensor's dtype and device."""
    return sent(reaches.float().tolist(), like)


def _arranging(positions: int, batch: int, around: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """Return a function from a gradient ``[..., out]``, positions first, to ``[N, T, groups out]``.

    ``around`` counts the features of other projections before and after, which are zeros.
    """

    def arrange(gradient: Tensor) -> Tensor:
        rows = gradient.reshape(positions, batch, gradient.shape[-1]).transpose(0, 1)
        return torch.nn.functional.pad(rows, around) if any(around) else rows

    return arrange
