"""Whether gradients were zeroed after they were preconditioned.

Where gradients are accumulated over several backward passes, a step belongs after the last of them.
A step after each (a loop without Accelerate's ``sync_gradients``, for example) preconditions the
first gradient once more with every further one. It shows in the order of things: a backward pass
adds to the very tensor that the step wrote, which nobody has changed in between, and then comes a
step. Zeroing in place is a change, zeroing to None another tensor; so neither is taken for it.

A tensor counts the changes made to it, and a hook runs once autograd has added to one, of two
parameters: nothing is read of their values, so the host does not wait for the device (unless there
is something to be suspicious of).

Two cases look as if somebody had zeroed: several backward passes between such steps, of each of
which DistributedDataParallel writes the average, and its ``gradient_as_bucket_view=True``, where
all gradients of a bucket count their changes together. No error is raised in these.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from soframe.blocks.block import Block


class _Watched:
    """One parameter: the hook on it, and what its gradient was like.

    Attributes:
        used: Whether autograd has added to its gradient in this window.
    """

    of_soframe = True

    def __init__(self, block: Block) -> None:
        self.block, self.parameter = block, next(iter(block.parameters.values()))
        self._home = block.home
        self._written: tuple[weakref.ref[Tensor], int] | None = None
        self._added = self.used = False

    def __call__(self, parameter: nn.Parameter) -> None:
        """Note whether autograd has added to what a step wrote, and nothing else has changed it.

        Args:
            parameter: The parameter, whose gradient has just been accumulated.
        """
        self.used = True
        gradient, written = self._home.read(parameter), self._written
        self._added = (
            self._home.filled_by_autograd  # else what is added later looks like a change
            and written is not None
            and gradient is not None
            and written[0]() is gradient
            and gradient._version == written[1] + 1
        )
        if self._added and written is not None:
            self._written = (written[0], written[1] + 1)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of a parameter has no step that writes to it.
        return (_nothing, ())

    @property
    def untouched(self) -> bool:
        """Whether the gradient is what the last step wrote, and autograd has not added to it."""
        if self.used or self._written is None or not self._home.filled_by_autograd:
            return False
        gradient, (reference, version) = self._home.read(self.parameter), self._written
        return gradient is not None and reference() is gradient and gradient._version == version

    def wrote(self) -> None:
        """Note the gradient as it is."""
        gradient, self._added = self._home.read(self.parameter), False
        self._written = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def forget(self) -> None:
        """Note that no step has written the gradient."""
        self._written, self._added = None, False

    @property
    def added(self) -> bool:
        """Whether the gradient is one that a step wrote, plus later ones."""
        if not self._added or self._written is None:
            return False
        gradient = self._home.read(self.parameter)
        if gradient is None:
            return False
        reference, version = self._written
        if reference() is not gradient:
            return False
        # DistributedDataParallel writes the average; zeroing in place leaves nothing but zeros.
        return gradient._version == version or bool(gradient.any())


def _nothing() -> None:
    """Stand for a hook in a copy."""


class Accumulation:
    """Watches the gradients of the first and the last block.

    Args:
        blocks: The blocks.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        ends = (*blocks[:1], *blocks[-1:])  # of a stage of a pipeline, perhaps none
        self._watched = [_Watched(block) for block in dict.fromkeys(ends)]
        handles = [w.parameter.register_post_accumulate_grad_hook(w) for w in self._watched]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def check(self) -> None:
        """Check that a step is given gradients that were zeroed since the last one.

        Raises:
            RuntimeError: If a backward pass has added to preconditioned gradients.
        """
        for watched in self._watched:
            if watched.added:
                raise RuntimeError(
                    f"{watched.block.name}: a backward pass has added to the gradient that the "
                    f"last step() preconditioned, so this one would precondition that part again. "
                    f"Call step() once for each optimizer.step(), after the last backward pass "
                    f"(with Accelerate: if accelerator.sync_gradients), and zero the gradients "
                    f"before the next"
                )

        if self._watched and all(watched.untouched for watched in self._watched):
            raise RuntimeError(
                "step() was called again, and no backward pass has run since the last one, whose "
                "result is still in .grad and would be preconditioned again. Call it once for each "
                "optimizer.step() (a callback of a trainer may do so already), and zero the "
                "gradients before the next backward pass"
            )

    def begin(self) -> None:
        """Begin a window."""
        for watched in self._watched:
            watched.used = False

    @property
    def any(self) -> bool:
        """Whether autograd has added to a watched gradient in this window."""
        return any(watched.used for watched in self._watched)

    def wrote(self, blocks: Collection[Block]) -> None:
        """Note what a step has written.

        Args:
            blocks: The blocks whose gradients it has preconditioned.
        """
        for watched in self._watched:
            if watched.block in blocks:
                watched.wrote()
            else:
                watched.forget()

    def close(self) -> None:
        """Remove the hooks."""
        self._finalizer()


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
