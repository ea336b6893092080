"""Runs of closures: the first of a step, with what derivatives need of it, and one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from soframe.blocks.home import PlainGrad
from soframe.derivatives.forward import Closure, Forward, Outputs
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.losses.base import Loss
from soframe.trust_region.declared import require_apart, require_graph, require_only_through


def first_pass(
    model: nn.Module,
    outputs: Outputs,
    closure: Closure,
    parameters: Sequence[nn.Parameter],
    *,
    reuse: bool,
    loss: Loss | None = None,
) -> tuple[Forward, Tensor]:
    """Run a closure, and differentiate its loss in the model's outputs; no backward pass yet.

    Args:
        model: The model.
        outputs: Collects its outputs.
        closure: The closure; gradients are enabled.
        parameters: Those that are trained.
        reuse: Whether derivatives may follow a tape of the pass.
        loss: The declared loss; its Hessian is taken in place of the closure's if it is expected.

    Returns:
        The pass, and the loss.

    Raises:
        RuntimeError: If the closure has changed gradients; see also `Outputs.of`.
    """
    replay = Replay(model)
    tape = Tape(replay.devices, reuse=reuse)
    with _no_gradient_changes(parameters):
        seen, value = outputs.of(closure, tape)
    require_graph(seen, value)
    require_apart(seen, outputs.calls)
    gradients = torch.autograd.grad(value, seen, create_graph=True, materialize_grads=True)
    require_only_through(seen, value, parameters)
    forward = Forward(
        closure,
        replay,
        outputs=seen,
        gradients=gradients,
        tape=tape,
        calls=outputs.calls,
        expected=loss if loss is not None and loss.expected else None,
    )
    return forward, value


@contextmanager
def _no_gradient_changes(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Look for gradients that change within, where autograd puts them, whatever their home.

    Yields:
        Nothing.

    Raises:
        RuntimeError: If one has changed: a closure has called ``backward`` or ``zero_grad``.
    """
    home = PlainGrad()
    # The tensors themselves are kept, so that no other one can have their place in memory.
    before = [(g, 0 if g is None else g._version) for g in map(home.read, parameters)]
    yield
    for parameter, (gradient, version) in zip(parameters, before, strict=True):
        same = home.read(parameter) is gradient
        if not same or (gradient is not None and gradient._version != version):
            raise RuntimeError(
                "the closure has changed gradients, and the step makes them itself: call neither "
                "backward() nor zero_grad() in the closure, and return the loss"
            )


@contextmanager
def placed(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Within it parameters have other values, in other memory: what passes computed with stays.

    Args:
        parameters: The parameters.
        values: What each is.

    Yields:
        Nothing.
    """
    before = [parameter.data for parameter in parameters]
    try:
        for p, value in zip(parameters, values, strict=True):
            p.data = value
        yield
    finally:
        for p, value in zip(parameters, before, strict=True):
            p.data = value


@contextmanager
def moved(parameters: Sequence[nn.Parameter], update: Sequence[Tensor]) -> Iterator[None]:
    """Within it parameters have moved: see `placed`.

    Args:
        parameters: The parameters.
        update: What is added to each.

    Yields:
        Nothing.
    """
    values = [p.data + more for p, more in zip(parameters, update, strict=True)]
    with placed(parameters, values):
        yield


def closures_of(closure: Closure | Sequence[Closure]) -> list[Closure]:
    """Return what a step runs, as a list.

    Args:
        closure: A closure, or several.

    Returns:
        At least one.

    Raises:
        TypeError: If there is none, or one cannot be called.
    """
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(map(callable, closures)):
        raise TypeError(
            f"TrustRegion.step takes a closure that returns the loss, or a list of closures with "
            f"one for every micro-batch, not {closure!r}"
        )
    return closures
