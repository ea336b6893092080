"""Whether gradients were zeroed after they were preconditioned, given up before, or used already.

Where gradients are accumulated over several backward passes, a step belongs after the last of them.
A step after each (a loop without Accelerate's ``sync_gradients``, for example) preconditions the
first gradient once more with every further one. It shows in the order of things: a backward pass
adds to the very tensor that the step wrote, which nobody has changed in between, and then comes a
step. Or no backward pass comes in between at all, and the step finds the tensors of the last one as
they were. Zeroing in place is a change, zeroing to None another tensor; so neither is taken for it.

A tensor counts the changes made to it, and a hook runs once autograd has added to one, of two
parameters: nothing is read of their values, so the host does not wait for the device (unless there
is something to be suspicious of).

A batch may be given up: its gradients are zeroed, and no step comes, as while preconditioning has
not begun yet. What its backward passes have gathered must not count as micro-batches of the next
one. It shows when the next backward pass begins: what autograd has left is there no longer, or it
is zero.

An optimizer that steps between the backward pass and the preconditioner has used the raw gradient,
and what the preconditioner writes is used by nobody. A hook on the optimizer counts its steps.
Where it takes none, and parameters change, another optimizer is in use than the one whose learning
rates the preconditioner reads.

Two cases look as if somebody had zeroed: several backward passes between such steps, of each of
which DistributedDataParallel writes the average, and its ``gradient_as_bucket_view=True``, where
all gradients of a bucket count their changes together. No error is raised in these.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from soframe.blocks import sharding
from soframe.blocks.block import Block

ELSEWHERE = 3
"""Steps, one after the other, that another optimizer takes, until that is told."""


class OptimizerSteps:
    """Counts the steps of the optimizer that the gradients are for.

    Args:
        optimizer: The optimizer, or a trainer's wrapper of it; None, or one that has no hooks on
            its steps, which then nobody sees.

    Attributes:
        count: How many it has taken.
    """

    def __init__(self, optimizer: object) -> None:
        self.count = 0
        self._before: tuple[int, int] | None = None
        self._elsewhere = 0
        self._finalizer: weakref.finalize[..., OptimizerSteps] | None = None
        if (inner := _innermost(optimizer)) is None:
            return
        counter = weakref.WeakMethod(self._stepped)

        def stepped(*_: Any) -> None:
            if (count := counter()) is not None:
                count()

        handle = inner.register_step_post_hook(stepped)
        self._finalizer = weakref.finalize(self, handle.remove)

    def _stepped(self) -> None:
        self.count += 1

    def follow(self, parameter: nn.Parameter) -> None:
        """Warn where this optimizer rests while another one steps; call it at every step.

        Not of one that has never stepped: some give their steps other names, as SAM does, and some
        only hold learning rates.

        Args:
            parameter: Any one that the optimizer trains.
        """
        if self.count == 0:
            return
        now = (parameter._version, self.count)
        before, self._before = self._before or now, now
        elsewhere = before[0] != now[0] and before[1] == now[1]
        self._elsewhere = self._elsewhere + 1 if elsewhere else 0
        if self._elsewhere == ELSEWHERE:
            warnings.warn(
                f"the optimizer that the preconditioner was given has taken none of the last "
                f"{ELSEWHERE} steps, and something else has changed the parameters: learning "
                f"rates, and with them the KL clip, are read from the optimizer that was given. "
                f"Build a preconditioner for the one that steps now (state_dict() has the "
                f"curvature), or pass lr= where none is to be read",
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove the hook."""
        if self._finalizer is not None:
            self._finalizer()


def _innermost(optimizer: object) -> torch.optim.Optimizer | None:
    """Return who takes the steps of an optimizer, if its steps can be hooked.

    A trainer's wrapper is no optimizer, or one by its class alone, and hands steps to another one.
    """
    looked_at = []
    while optimizer is not None and optimizer not in looked_at:
        looked_at.append(optimizer)
        if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(
            optimizer
        ):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


class _Watched:
    """One parameter: the hook on it, and what its gradient was like.

    Attributes:
        used: Whether autograd has added to its gradient in this window.
    """

    of_soframe = True

    def __init__(self, block: Block, steps: OptimizerSteps) -> None:
        self.block, self.parameter = block, next(iter(block.parameters.values()))
        self._home, self._steps = block.home, steps
        self._written: tuple[weakref.ref[Tensor], int] | None = None
        self._left: tuple[weakref.ref[Tensor], int] | None = None
        self._at = 0
        self._added = self.used = False

    def __call__(self, parameter: nn.Parameter) -> None:
        """Note whether autograd has added to what a step wrote, and nothing else has changed it.

        Args:
            parameter: The parameter, whose gradient has just been accumulated.
        """
        self.used, self._at = True, self._steps.count
        gradient, written = self.gradient, self._written
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)
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
    def gradient(self) -> Tensor | None:
        """The gradient as it is."""
        return self._home.read(self.parameter)

    def begin(self) -> None:
        """Begin a window: nothing has been left in it so far."""
        self.used, self._left = False, None

    def wrote(self) -> None:
        """Note the gradient as it is."""
        gradient, self._added = self.gradient, False
        self._written = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def forget(self) -> None:
        """Note that no step has written the gradient."""
        self._written, self._added = None, False

    @property
    def added(self) -> bool:
        """Whether the gradient is one that a step wrote, plus later ones."""
        if not self._added or self._written is None:
            return False
        gradient = self.gradient
        if gradient is None:
            return False
        reference, version = self._written
        if reference() is not gradient:
            return False
        # DistributedDataParallel writes the average; zeroing in place leaves nothing but zeros.
        return gradient._version == version or bool(gradient.any())

    @property
    def gone(self) -> bool:
        """Whether what the backward passes of this window have left was zeroed."""
        if self._left is None or not self._home.filled_by_autograd:
            return False
        if consumes_gradients(self.parameter):
            return False  # they keep it elsewhere
        if (gradient := self.gradient) is None:
            return True
        if sharding.is_distributed(gradient):
            return False  # to look at all of it, ranks would have to meet within the backward pass
        reference, version = self._left
        as_it_was = reference() is gradient and gradient._version == version
        return not as_it_was and not bool(gradient.any())

    @property
    def late(self) -> bool:
        """Whether the optimizer has stepped since the last backward pass of this window."""
        return self.used and self._steps.count > self._at and self.gradient is not None

    @property
    def stands(self) -> bool:
        """Whether the gradient is the one that a step wrote, and nobody has touched it since."""
        if self.used or self._written is None or not self._home.filled_by_autograd:
            return False
        reference, version = self._written
        gradient = self.gradient
        return gradient is not None and reference() is gradient and gradient._version == version


def consumes_gradients(parameter: nn.Parameter) -> bool:
    """Return whether others' post-accumulate hooks run, which may take the gradient away."""
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(getattr(h, "of_soframe", False) for h in hooks.values())


def _nothing() -> None:
    """Stand for a hook in a copy."""


class Accumulation:
    """Watches the gradients of the first and the last block.

    Args:
        blocks: The blocks.
        steps: Those of the optimizer.
    """

    def __init__(self, blocks: Sequence[Block], steps: OptimizerSteps) -> None:
        ends = (*blocks[:1], *blocks[-1:])  # of a stage of a pipeline, perhaps none
        self._watched = [_Watched(block, steps) for block in dict.fromkeys(ends)]
        handles = [w.parameter.register_post_accumulate_grad_hook(w) for w in self._watched]
        self._finalizer = weakref.finalize(self, _remove, handles)

    def check(self) -> None:
        """Check that a step is given gradients that were zeroed since the last one.

        Raises:
            RuntimeError: If a backward pass has added to preconditioned gradients, or none has come
                since they were preconditioned; or if the optimizer has stepped since the last one.
        """
        for watched in self._watched:
            if watched.late:
                raise RuntimeError(
                    f"{watched.block.name}: optimizer.step() came between the backward pass and "
                    f"preconditioner.step(), so the weights have moved along the raw gradient, and "
                    f"nobody would use the preconditioned one. Call preconditioner.step() first"
                )
        with_gradient = [watched for watched in self._watched if watched.gradient is not None]
        if with_gradient and all(watched.stands for watched in with_gradient):
            raise RuntimeError(
                f"{with_gradient[0].block.name}: no backward pass has come since the last step() "
                f"preconditioned the gradient, and this one would precondition it again. Call "
                f"step() once for each optimizer.step(), after the last backward pass"
            )
        for watched in self._watched:
            if watched.added:
                raise RuntimeError(
                    f"{watched.block.name}: a backward pass has added to the gradient that the "
                    f"last step() preconditioned, so this one would precondition that part again. "
                    f"Call step() once for each optimizer.step(), after the last backward pass "
                    f"(with Accelerate: if accelerator.sync_gradients), and zero the gradients "
                    f"before the next"
                )

    def begin(self) -> None:
        """Begin a window."""
        for watched in self._watched:
            watched.begin()

    def given_up(self) -> bool:
        """Return whether the gradients of the backward passes so far were zeroed, in this window.

        The host waits for the device where a gradient has changed since autograd left it.
        """
        used = [watched for watched in self._watched if watched.used]
        return bool(used) and all(watched.gone for watched in used)

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
