"""Whether a step has an effect: that gradients reach the blocks, and statistics too.

Hooks can be left out without a word: by code that was compiled before they were there, by calls
that pass their module by, by frameworks that own the parameters. Gradients can be gone before the
step: taken by an optimizer that steps within the backward pass. The weights would then be the
optimizer's own, and nothing would tell. So in every window in which statistics are due the ranks
say what they saw of each block, in the poll, and all of them raise where a step would be none:

- A block has a gradient that the window's backward passes brought, on any rank, and statistics on
  none. The loss depends on its parameters, and the hooks do not know how.
- Blocks have statistics, and none of them has a gradient.
- A block has statistics, and hooks that are not ours have taken its gradient.
- Other parameters have gradients, no block has one, and none has ever had statistics.

A block with neither gradient nor statistics is unused: that is no error, and stands in the report.
So is one whose gradient is zero, as backward passes and ``zero_grad(set_to_none=False)`` leave it
in a module that was not called; or a multiple of its parameters, as a penalty on weights makes it;
or the very tensor that the last step left, which nobody zeroed and nothing was added to. Where a
block that has had statistics was called under its hook and a backward pass brought no gradient to
its output, the loss is of the model's derivatives (a gradient penalty by itself): it keeps its
factors.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.capture.hooks import Capture
from soframe.gradients.accumulation import Accumulation, consumes_gradients

_SHOWN = 8


class Effect:
    """What this rank sees of its blocks in the windows in which statistics are due.

    Args:
        model: The model.
        blocks: Its blocks, in the placement's order.
        capture: Its hooks.
        accumulation: Tells whether autograd itself has added to gradients.
        home: Where gradients live.
        rebuilt: Whether the model changed in the window under way, of which the hooks then may not
            have seen everything.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        capture: Capture,
        accumulation: Accumulation,
        *,
        home: GradientHome,
        rebuilt: bool,
    ) -> None:
        self._model, self._blocks, self._capture = model, blocks, capture
        self._accumulation, self._home = accumulation, home
        self._parameters = {block: list(block.parameters.values()) for block in blocks}
        of_blocks = {p for parameters in self._parameters.values() for p in parameters}
        self._others = [p for p in model.parameters() if p not in of_blocks]
        self._partial = rebuilt
        self._before: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def begin(self, due: Collection[Block]) -> None:
        """Begin a window: what is in ``.grad`` now is nothing that it brought.

        Args:
            due: The blocks that take statistics in it.
        """
        self._partial = False
        self._accumulation.begin()
        read = self._home.read
        self._before = {
            p: (weakref.ref(gradient), gradient._version)
            for block in due
            for p in self._parameters[block]
            if (gradient := read(p)) is not None
        }

    def check(self, due: Collection[Block]) -> None:
        """Check that the parameters have not come to belong to a framework that shards them.

        Args:
            due: The blocks that take statistics in the window; nothing is checked without any.
        """
        for block in self._blocks if due else ():
            parameters = block.parameters.items()
            self._home.check((f"{block.name}.{name}", p) for name, p in parameters)

    def said(self, due: Collection[Block]) -> list[float]:
        """Return what this rank says of the window.

        Args:
            due: The blocks that take statistics in it, the same on every rank.

        Returns:
            Whether any block has a gradient; whether any other parameter has; and, for every block
            that is due, whether it has statistics, whether it has a gradient and no statistics, and
            whether its gradient was taken. Nothing, where nothing is to be judged.
        """
        if not due or self._partial:
            return []
        blocks = self._of(due)
        taken = self._taken([block for block in blocks if block.window.counts.calls])
        missed = self._reached([block for block in blocks if not self._seen(block)])
        given = any(
            self._home.has(p) for parameters in self._parameters.values() for p in parameters
        )
        others = not given and any(map(self._home.has, self._others))
        numbers = [float(given), float(others)]
        for block in blocks:
            numbers += [float(self._seen(block)), float(block in missed), float(block in taken)]
        return numbers

    def nothing_said(self, due: Collection[Block]) -> list[float]:
        """Return as many numbers as `said` does, without a look at any gradient.

        Args:
            due: As for `said`.
        """
        return [] if not due or self._partial else [0.0] * (2 + 3 * len(self._of(due)))

    def require(self, due: Collection[Block], sums: Sequence[float]) -> None:
        """Check that the step will have an effect.

        Args:
            due: As for `said`.
            sums: What all ranks said, added up.

        Raises:
            RuntimeError: On every rank, if it will not.
        """
        if not sums:
            return
        given, others, *each = sums
        blocks = self._of(due)
        rows = list(zip(blocks, each[::3], each[1::3], each[2::3], strict=True))
        missed = [block for block, seen, reached, _ in rows if reached > 0 and seen == 0]
        taken = [block for block, _, _, gone in rows if gone > 0]
        if missed:
            raise RuntimeError(self._without_statistics(missed))
        if taken or (given == 0 and any(seen > 0 for _, seen, _, _ in rows)):
            raise RuntimeError(self._without_gradients(taken or blocks))
        if given == 0 and others > 0 and all(block.mass == 0 for block in self._blocks):
            raise RuntimeError(
                f"no block has a gradient or statistics, while other parameters have gradients: "
                f"the backward pass has reached {_names(blocks)} in no way, and the preconditioner "
                f"would do nothing. {self._remedies(blocks)}"
            )

    def _of(self, due: Collection[Block]) -> list[Block]:
        return [block for block in self._blocks if block in due]

    def _seen(self, block: Block) -> bool:
        """Return whether the hooks of a block work."""
        if block.window.counts.calls:
            return True
        called = any(helper in self._capture.called for helper in block.helpers)
        derived = called and self._accumulation.any and not self._capture.probing
        return derived and block.mass > 0

    def _taken(self, blocks: Sequence[Block]) -> set[Block]:
        """Return the blocks with statistics whose gradients others' hooks have taken."""
        hooked = [b for b in blocks if any(map(consumes_gradients, self._parameters[b]))]
        gone = {b for b in hooked if not any(map(self._home.has, self._parameters[b]))}
        stepped = [b for b in hooked if b not in gone and self._moved(b)]
        there = _not_zero({b: self._home.of(self._parameters[b]) for b in stepped})
        return gone | (set(stepped) - there)

    def _moved(self, block: Block) -> bool:
        """Return whether a parameter has changed since the forward pass."""
        called = self._capture.called
        return any(
            called.get(helper) not in (None, p._version)
            for helper in block.helpers
            for p in list(helper.parameters.values())[:1]
        )

    def _reached(self, blocks: Sequence[Block]) -> set[Block]:
        """Return the blocks to which this window's backward passes have brought a gradient.

        The host waits for the device once, if there is anything to look at.
        """
        fresh: dict[Block, list[Tensor]] = {}
        for block in blocks:
            present = [
                (p, gradient)
                for p in self._parameters[block]
                if (gradient := self._home.read(p)) is not None
            ]
            if present and not all(self._is_left(p, gradient) for p, gradient in present):
                fresh[block] = [_beside(self._home.local(p), g) for p, g in present]
        return _not_zero(fresh)

    def _is_left(self, parameter: nn.Parameter, gradient: Tensor) -> bool:
        """Return whether a gradient is what the last step has left."""
        reference, version = self._before.get(parameter, (None, 0))
        return reference is not None and reference() is gradient and gradient._version == version

    # -- what is said of it -------------------------------------------------------------------

    def _without_statistics(self, blocks: Sequence[Block]) -> str:
        old = any(block.mass > 0 for block in blocks)
        return (
            f"gradients without statistics: the backward passes since the last step have reached "
            f"the parameters of {_names(blocks)}, and no hook saw how, on any rank, so their "
            f"gradients would {'meet old curvature' if old else 'stay as they are'}. No gradient "
            f"was changed. {self._remedies(blocks)}"
        )

    def _remedies(self, blocks: Sequence[Block]) -> str:
        if self._capture.probing:
            return (
                "This Fisher needs preconditioner.observe(outputs) between the model's forward "
                "pass and loss.backward(), at every step with preconditioner.takes_statistics, and "
                "with every output that the loss is of (soframe.losses.SumLoss for several). Leave "
                "out layers that these do not depend on: skip=[...]"
            )
        helpers = [helper for block in blocks for helper in block.helpers]
        modules = [self._model, *self._model.children(), *(helper.module for helper in helpers)]
        first = ""
        if any(helper in self._capture.called for helper in helpers):
            first = (
                "Their modules were called, and no gradient of backward() came to what they "
                "returned: perhaps another hook, or a change in place of a view, has put something "
                "else in its place. "
            )
        elif _compiled(modules):
            first = (
                "Most likely torch.compile had compiled the model, or another one of the same "
                "classes, and it ran, before the preconditioner was built: compiled code is kept "
                "by the class, and does not call hooks that came later. Call "
                "torch.compiler.reset() once the preconditioner is built, or build it before any "
                "such model runs. "
            )
        return (
            f"{first}{'Else' if first else 'Likely'} the forward pass ran before the "
            f"preconditioner was built or before its last step(); gradients were written by other "
            f"means than backward() (torch.autograd.grad, torch.func, a framework that owns the "
            f"parameters); the modules' weights are used without calling the modules; or the loss "
            f"is of the model's derivatives alone. Layers for which this must be so are left out "
            f"by skip=[{', '.join(repr(b.name) for b in blocks[:_SHOWN])}]"
        )

    def _without_gradients(self, blocks: Sequence[Block]) -> str:
        if any(consumes_gradients(p) for b in blocks for p in self._parameters[b]):
            why = (
                "Hooks on the parameters (register_post_accumulate_grad_hook) have taken them, as "
                "an optimizer does that steps within the backward pass: let it step after "
                "preconditioner.step() instead"
            )
        else:
            why = (
                "They were removed between backward() and preconditioner.step(), by zero_grad() or "
                "a stack that keeps gradients elsewhere (DeepSpeed, Megatron): call step() right "
                "after backward(), with the gradients in .grad"
            )
        return (
            f"statistics without gradients: a backward pass has reached {_names(blocks)}, and "
            f"there is nothing in .grad to precondition, so the step would do nothing. {why}"
        )


def _names(blocks: Sequence[Block]) -> str:
    names = ", ".join(repr(block.name) for block in blocks[:_SHOWN])
    more = len(blocks) - _SHOWN
    return f"block(s) {names}" + (f" and {more} more" if more > 0 else "")


def _beside(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what a gradient has beside a multiple of its parameter, up to rounding; or zero.

    Of parts of both it tells that much: what is a multiple on every rank may be none as a whole,
    where parts are single numbers.
    """
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=torch.bool)
    g = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
    p = parameter.flatten()
    wide = torch.promote_types(g.dtype, torch.float32)
    g, p = g.to(wide), p.to(wide)
    # Scaled to 1, so that no square leaves the range of numbers.
    size, length = g.abs().max(), p.abs().max()
    g, p = g / torch.where(size > 0, size, 1), p / torch.where(length > 0, length, 1)
    squares = p.dot(p)
    rest = g - p * (p.dot(g) / torch.where(squares > 0, squares, 1))
    # What was added up in a narrow dtype is that far from a multiple.
    bound = 8 * torch.finfo(gradient.dtype).eps
    return rest.abs().max() > bound


def _not_zero(tensors: dict[Block, list[Tensor]]) -> set[Block]:
    """Return the blocks of which a tensor is not zero; the host waits once."""
    parts = [(block, tensor.any()) for block, each in tensors.items() for tensor in each]
    if not parts:
        return set()
    device = parts[0][1].device
    flags = torch.stack([flag.to(device) for _, flag in parts]).tolist()
    return {block for (block, _), flag in zip(parts, flags, strict=True) if flag}


def _compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether torch.compile may have compiled some of these modules."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        return True
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"]["total"])
