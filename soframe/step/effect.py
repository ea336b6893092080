"""Whether hooks and gradients agree: blocks with a gradient and no statistics, or the reverse.

Hooks can be left out silently: by code that was compiled before they were there, by calls that
bypass their module, by frameworks that own the parameters. Gradients can be gone before the step,
taken by an optimizer that steps within the backward pass. So in the first two windows in which a
block takes statistics each rank sends, with its report, whether it has statistics and a gradient of
the block. Where all blocks of all ranks lack one of the two, the step would do nothing: all ranks
raise. Where some do, they warn, since there may be reasons: a penalty on the weights of a module
that is not called, or a loss of derivatives.

A block with neither is unused. A gradient of zeros counts as none: ``zero_grad`` leaves it in a
module that was not called.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.checks.warning import warn
from soframe.curvature import Curvature
from soframe.estimate.window import Window
from soframe.layers.base import LayerHelper

WINDOWS = 2
"""Windows with statistics in which each block is checked."""

_SHOWN = 8


class Effect:
    """The gradients and statistics of this rank's blocks in their first windows with statistics."""

    def __init__(self, curvature: Curvature, *, partial: Window | None = None) -> None:
        self._model, self._home = curvature.parts.model, curvature.parts.home
        self._blocks, self._capture = curvature.blocks, curvature.capture
        self._others = curvature.registration.others  # parameters without a block
        # The window in which the model changed: its hooks may have missed calls.
        self._partial = partial
        self._windows: Counter[Block] = Counter()  # by block those with statistics that have ended
        self._due: list[Block] = []  # those that take statistics in the window under way
        self._judged: list[Block] = []  # those that are checked in it

    def end(self, window: Window) -> None:
        """Count a window."""
        self._windows.update(window.due)

    def begin(self, window: Window) -> None:
        """Choose the blocks that are checked; raise if a framework has sharded them since."""
        self._due, self._judged = [], []
        if window is self._partial:
            return
        named: list[tuple[str, nn.Parameter]] = []
        for block in self._blocks:
            if block not in window.due:
                continue
            self._due.append(block)
            if self._windows[block] < WINDOWS:
                self._judged.append(block)
                named += [(f"{block.name}.{name}", p) for name, p in block.parameters.items()]
        if named:
            self._home.check(named)

    def flags(self, window: Window) -> list[float]:
        """Return this rank's flags, equally many on every rank.

        The first two are whether any block has a gradient, and whether only other parameters have.
        Two follow for every block that is due: whether it has statistics, and whether it has a
        gradient.
        """
        if not self._judged:
            return self.no_flags(window)
        seen = {block for block in self._judged if window.tallies[block].counts.calls}
        reached = self._reached(window, seen)
        parameters = itertools.chain.from_iterable(b.parameters.values() for b in self._blocks)
        has_any = bool(reached) or any(map(self._home.has, parameters))
        # Evidence that the backward pass ran, but reached no block.
        has_other = not has_any and any(map(self._home.has, self._others))
        numbers = [float(has_any), float(has_other)]
        for block in self._due:
            numbers += [float(block in seen), float(block in reached)]
        return numbers

    def _reached(self, window: Window, seen: Collection[Block]) -> set[Block]:
        """Return the blocks with a gradient; some were ``seen`` to be called."""
        reached = {block for block in seen if self._home.of(block.parameters.values())}
        # Without statistics a gradient of zeros counts as none; testing for it makes the host wait.
        unseen = [b for b in self._judged if b not in seen and not self._derived(window, b)]
        if unseen:
            reached |= self._with_gradient(unseen)
        return reached

    def no_flags(self, window: Window) -> list[float]:
        """Return zeros in place of the numbers of `flags`."""
        if window is self._partial or not window.due:
            return []
        return [0.0] * (2 + 2 * len(window.due))

    def require(self, sums: Sequence[float]) -> None:
        """Check the sums of `flags` over ranks.

        Raises:
            RuntimeError: On every rank, if the step would have no effect; see the module.
        """
        if not self._judged:
            return
        flags = [number > 0 for number in sums]
        seen, reached = flags[2::2], flags[3::2]  # by block
        missed: list[Block] = []  # a gradient without statistics
        taken: list[Block] = []  # statistics without a gradient
        for block, is_seen, is_reached in zip(self._due, seen, reached, strict=True):
            if is_seen == is_reached:
                continue
            if is_reached:
                missed.append(block)
            else:
                taken.append(block)
        self._raise_if_idle(missed, taken, flags)
        if missed:
            warn(self._without_statistics(missed))
        # With a probe, statistics do not imply that the loss depends on a block.
        if taken and not self._capture.probing:
            warn(self._without_gradients(taken))

    def _raise_if_idle(
        self, missed: Sequence[Block], taken: Sequence[Block], flags: Sequence[bool]
    ) -> None:
        """Raise if the step would have no effect."""
        has_any, has_other = flags[:2]
        has_statistics = any(flags[2::2]) or any(block.mass > 0 for block in self._blocks)
        if missed and not has_statistics:
            raise RuntimeError(f"{self._without_statistics(missed)} No gradient was changed.")
        if has_any:
            return
        if taken:
            raise RuntimeError(self._without_gradients(taken))
        if has_other and not has_statistics:
            raise RuntimeError(
                f"no block has a gradient or statistics, while other parameters have gradients: "
                f"the backward pass has not reached {_names(self._judged)}, and the "
                f"preconditioner would have no effect. {self._remedies(self._judged)}"
            )

    def _derived(self, window: Window, block: Block) -> bool:
        """Return whether the loss may depend on a block's derivatives alone."""
        # The layer was called, and no gradient came to its output.
        called = any(helper in window.calls.called for helper in block.helpers)
        return called and not self._capture.probing and block.mass > 0

    def _with_gradient(self, blocks: Sequence[Block]) -> set[Block]:
        """Return the blocks with a nonzero gradient; the host waits at most once."""
        owners: list[Block] = []
        flags: list[Tensor] = []
        for block in blocks:
            for gradient in self._home.of(block.parameters.values()):
                owners.append(block)
                flags.append(gradient.to_dense().any())
        if not flags:
            return set()
        nonzero: list[bool] = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        return {block for block, flag in zip(owners, nonzero, strict=True) if flag}

    # -- errors -------------------------------------------------------------------------------

    def _without_statistics(self, blocks: Sequence[Block]) -> str:
        return (
            f"gradients without statistics: the backward passes since the last step have reached "
            f"the parameters of {_names(blocks)}, and no hook saw how, on any rank, so that these "
            f"gradients stay raw and unclipped, or meet old curvature. {self._remedies(blocks)}."
        )

    def _remedies(self, blocks: Sequence[Block]) -> str:
        if self._capture.probing:
            return (
                "This Fisher needs preconditioner.observe(outputs) between the model's forward "
                "pass and loss.backward(), at every step with preconditioner.takes_statistics, and "
                "with every output that the loss is of (soframe.losses.SumLoss for several). Leave "
                "out layers that these do not depend on: skip=[...]"
            )
        helpers: list[LayerHelper] = []
        for block in blocks:
            helpers += block.helpers
        modules = [self._model, *self._model.children(), *(helper.module for helper in helpers)]
        first = "Likely"
        if any(helper in self._capture.calls.called for helper in helpers):
            first = (
                "Their modules were called, and no gradient of backward() came to what they "
                "returned: perhaps another hook, or a change in place of a view, has put something "
                "else in its place. Or else"
            )
        elif _compiled(modules):
            first = (
                "Most likely torch.compile had compiled the model, or another one of the same "
                "classes, and it ran, before the preconditioner was built: compiled code is kept "
                "by the class, and does not call hooks that came later. Call "
                "torch.compiler.reset() once the preconditioner is built, or build it before any "
                "such model runs. Or else"
            )
        return (
            f"{first} the forward pass ran before the preconditioner was built or before its last "
            f"step(); gradients were written by other means than backward() (torch.autograd.grad, "
            f"torch.func, a stack that owns the parameters); the modules' weights are used without "
            f"calling the modules, as by a penalty; gradients were not zeroed after the last step; "
            f"or the loss is of the model's derivatives alone. Where this must be so, leave layers "
            f"out, or to the auxiliary method, by "
            f"skip=[{', '.join(repr(b.name) for b in blocks[:_SHOWN])}]"
        )

    def _without_gradients(self, blocks: Sequence[Block]) -> str:
        parameters = itertools.chain.from_iterable(block.parameters.values() for block in blocks)
        if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            why = (
                "Hooks on the parameters (register_post_accumulate_grad_hook) have taken them, as "
                "an optimizer does that steps within the backward pass: let it step after "
                "preconditioner.step() instead"
            )
        else:
            why = (
                "They were removed between backward() and preconditioner.step(), by zero_grad() or "
                "a stack that keeps gradients elsewhere (DeepSpeed, Megatron), or fully_shard has "
                "not reduced them (set_requires_gradient_sync(False) in the last pass): call "
                "step() right after backward(), with the gradients in .grad"
            )
        return (
            f"statistics without gradients: a backward pass has reached {_names(blocks)}, and "
            f"there is nothing in .grad to precondition. {why}"
        )


def _names(blocks: Sequence[Block]) -> str:
    names = ", ".join(repr(block.name) for block in blocks[:_SHOWN])
    if len(blocks) > _SHOWN:
        names += f" and {len(blocks) - _SHOWN} more"
    return f"block(s) {names}"


def _compiled(modules: Iterable[nn.Module]) -> bool:
    """Return whether torch.compile may have compiled some of these modules."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        return True
    # Not imported here: if the module is not loaded, torch.compile has not run.
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"]["total"])
