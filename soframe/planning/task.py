"""The task of a plan: a model's blocks and calls, from its modules and the shapes of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from soframe.blocks.block import Block
from soframe.blocks.registration import unwrap
from soframe.comm.recording import Recording
from soframe.layers.base import LayerHelper
from soframe.planning.pricing import tensors_in, without_numbers
from soframe.preconditioner import Preconditioner
from soframe.settings import Distribution
from soframe.setup.building import LATE
from soframe.strategies.work import BlockWork


@dataclass(frozen=True)
class LayerShapes:
    """One call of a layer: the shapes and dtypes of its tensor arguments and of its output."""

    helper: LayerHelper
    inputs: tuple[Tensor, ...]  # meta tensors; layers that read one tensor have the same
    output: Tensor  # a meta tensor


@dataclass(frozen=True)
class Task:
    """A model with the settings under which it is preconditioned, without numbers.

    Attributes:
        blocks: Its blocks.
        work: Their work, for strategies.
        parameters: The model's trainable parameters.
        model: The model; None if it is not run.
        inputs: The arguments of its forward pass, on the meta device; None if unknown.
        calls: The calls of layers in a forward pass.
        activations: Bytes that the forward pass keeps for the backward pass.
        intervals: The method's intervals of statistics and of solves, late in training.
        frozen: Bytes of the model's frozen parameters and buffers.
    """

    blocks: Sequence[Block]
    work: Sequence[BlockWork]
    parameters: Sequence[nn.Parameter]
    model: nn.Module | None = None
    inputs: tuple[Any, ...] | None = None
    calls: Sequence[LayerShapes] = field(default_factory=list)
    activations: int = 0
    intervals: tuple[int, int] = (10, 100)
    frozen: int = 0

    @classmethod
    def of(cls, model: nn.Module, inputs: Sequence[Any] | None = None, **settings: Any) -> Task:
        """Register a model as a preconditioner would, and run it once without numbers.

        Args:
            model: The model, on any device; it does not change.
            inputs: The arguments of its forward pass, for their shapes and dtypes alone; None to
                leave passes and statistics of calls without a price.
            settings: Settings of `soframe.Preconditioner`.

        Returns:
            The task.
        """
        model = unwrap(model)
        paper = Distribution(backend=Recording())
        preconditioner = OnPaper(model, distribution=paper, kl_clip=None, **settings)
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = _bytes(itertools.chain(model.parameters(), model.buffers())) - _bytes(trained)
        task = cls(
            preconditioner.blocks,
            preconditioner.placement.work,
            trained,
            intervals=preconditioner.intervals,
            frozen=frozen,
        )
        preconditioner.close()
        if inputs is None:
            return task
        meta_inputs = tree_map_only(Tensor, _meta, tuple(inputs))
        calls, activations = _calls(model, meta_inputs, task.blocks)
        return replace(task, model=model, inputs=meta_inputs, calls=calls, activations=activations)

    @property
    def size(self) -> int:
        """The bytes of the trainable parameters."""
        return _bytes(self.parameters)

    def unpriced(self) -> tuple[str, ...]:
        """Return the parts that a plan leaves without a price, each with the reason."""
        captured = [block for block in self.blocks if block.captured]
        if self.inputs is None:
            what = "passes and statistics of calls" if captured else "passes"
            return (f"no price for {what}: pass the shapes of the inputs (--input)",)
        seen = {call.helper for call in self.calls}
        missed = [block.name for block in captured if seen.isdisjoint(block.helpers)]
        if not missed:
            return ()
        which = f"the statistics of {len(missed)} block(s), such as {missed[0]}"
        return (f"no price for {which}: no call of theirs was seen",)

    def run(self, new: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """Return a forward and backward pass, on tensors that ``new`` makes from those here."""
        assert self.model is not None
        inputs = tree_map_only(Tensor, new, self.inputs)
        run = partial(torch.func.functional_call, self.model, _tensors_of(self.model, new), inputs)

        def passes() -> None:
            with torch.enable_grad(), _Attention():
                _sum(run()).backward()

        return passes


class OnPaper(Preconditioner):
    """A preconditioner that leaves another one's hooks on the model, and gives its blocks."""

    _keeps_hooks = True

    @property
    def intervals(self) -> tuple[int, int]:
        """The intervals of statistics and of solves, late in training."""
        refresh, placed = self.curvature.parts.refresh, self.curvature.placed
        return refresh.interval(placed, LATE), refresh.solve_every.at(LATE)


def _calls(
    model: nn.Module, inputs: tuple[Any, ...], blocks: Sequence[Block]
) -> tuple[list[LayerShapes], int]:
    """Run a forward pass on the meta device; return the calls of layers, and the bytes kept."""
    calls: list[LayerShapes] = []
    kept: dict[int, int] = {}

    def record(
        helper: LayerHelper, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        # Products inside a module are found by its own parameters, which these are not.
        if isinstance(output, Tensor) and type(helper).observe is LayerHelper.observe:
            calls.append(LayerShapes(helper, tuple(helper.inputs(args, kwargs)), output.detach()))

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    tensors = _tensors_of(model, _meta)
    known = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
    hooks = []
    for helper in itertools.chain.from_iterable(block.helpers for block in blocks):
        hook = partial(record, helper)
        hooks.append(helper.module.register_forward_hook(hook, with_kwargs=True))
    try:
        with (
            torch.enable_grad(),
            _Attention(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
            without_numbers("the forward pass", "other inputs, or none"),
        ):
            torch.func.functional_call(model, tensors, inputs)
    finally:
        for handle in hooks:
            handle.remove()
    return calls, sum(kept.values())


class _Attention(TorchFunctionMode):
    """Runs attention as the fused kernels do, which keep no matrix of scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args[:3]
        heads = query.shape[-3] // key.shape[-3]
        if heads > 1:  # grouped queries
            key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
        causal = bool(kwargs.get("is_causal", False))
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        return fused(query, key, value, 0.0, causal)[0]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _meta(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="meta")
    return copy.requires_grad_(tensor.requires_grad)


def _tensors_of(model: nn.Module, new: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return parameters and buffers by name; ``functional_call`` ties the others to these."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: new(tensor) for name, tensor in named}


def _sum(output: Any) -> Tensor:
    """Return a real number to differentiate; raise a ValueError if no output has a gradient."""
    sums: list[Tensor] = []
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            sums.append(real.sum())
    if not sums:
        raise ValueError(
            "the forward pass returns no tensor with a gradient, so a plan has no backward pass: "
            "let it return outputs or a loss, or leave the inputs out"
        )
    return torch.stack(sums).sum()
