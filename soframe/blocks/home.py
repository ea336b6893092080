"""Where gradients live: the one seam between soframe and frameworks that keep them elsewhere.

All reads, writes and clears of a parameter's gradient go through a `GradientHome`, which the
constructor of `soframe.Preconditioner` passes to all of its parts. Plain PyTorch keeps gradients in
``.grad`` (`PlainGrad`, the default); Megatron, for example, in ``main_grad``.

A home serves this rank alone: its tensors have the shape of this rank's part of the parameter, by
default the whole parameter. ``Distribution(gradients=...)`` declares whether they are averaged over
ranks or this rank's own. Reading is never a collective: some ranks read gradients that others do
not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.specs import Shards

_GRAD, _PLAIN = attrgetter("grad"), {nn.Parameter}


class GradientHome(ABC):
    """Where the gradients of parameters live. Two methods make a home; others have defaults."""

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter.

        Returns:
            The tensor that stores it, not a copy, of the shape of `local`; None without a gradient.
        """

    @abstractmethod
    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Set the gradient of a parameter, which `read` returns from now on.

        Args:
            parameter: The parameter.
            gradient: The tensor, of the shape of `local`; None for no gradient.
        """

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the parameter itself.

        Returns:
            A tensor in the memory of the parameter; by default the parameter itself, or the local
            tensor of a DTensor.
        """
        return sharding.local(parameter)

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards | None:
        """Return how a parameter, and its gradient, is sharded over ranks, the same on every rank.

        Args:
            parameter: The parameter.
            ranks: The global ranks of the group that the preconditioner works in.

        Returns:
            The part of each rank; None, the default unless it is a DTensor, where every rank has
            the whole.
        """
        home = self._elsewhere(parameter)
        return None if home is None else home.shards(parameter, ranks)

    def _elsewhere(self, parameter: nn.Parameter) -> GradientHome | None:
        """Return the home of a parameter of another kind than this one is for."""
        return _home_of(parameter)

    def each(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the gradient of each parameter, as `read` does."""
        return [self.read(parameter) for parameter in parameters]

    def locals(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's part of each parameter, as `local` does."""
        return [self.local(parameter) for parameter in parameters]

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a gradient."""
        return self.read(parameter) is not None

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of those parameters that have one, in their order."""
        return [gradient for gradient in self.each(list(parameters)) if gradient is not None]

    def version(self, parameter: nn.Parameter, gradient: Tensor) -> int:
        """Return a number of a parameter's gradient, as read, that each change in place raises."""
        home = self._elsewhere(parameter)
        return gradient._version if home is None else home.version(parameter, gradient)

    def fill(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of a parameter; if it has none, store zeros first."""
        gradient = self.read(parameter)
        if gradient is None:
            gradient = torch.zeros_like(self.local(parameter), requires_grad=False)
            self.put(parameter, gradient)
        return gradient

    def zero(self, parameter: nn.Parameter) -> None:
        """Overwrite a gradient with zeros in place; do nothing without one."""
        gradient = self.read(parameter)
        if gradient is not None:
            gradient.zero_()

    def clear(self, parameter: nn.Parameter) -> None:
        """Remove the gradient of a parameter."""
        self.put(parameter, None)

    def is_partial(self, parameter: nn.Parameter) -> bool:
        """Return whether `settle` has to reduce a gradient to the parameter's parts; here False."""
        return False

    def settle(self, parameter: nn.Parameter) -> None:
        """Reduce a gradient over ranks to the parameter's parts.

        The one method that may be a collective: all ranks call it, or none, for a parameter that
        has a gradient and for which `is_partial` is true. The default does nothing.
        """
        return

    def is_sparse(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a gradient that is a sparse tensor."""
        gradient = self.read(parameter)
        return gradient is not None and gradient.is_sparse

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check that this home has the gradients of parameters; called when a model is registered.

        The default rejects parameters of frameworks that keep gradients elsewhere. A home for such
        a framework overrides it.

        Args:
            parameters: Parameters with their names.

        Raises:
            ValueError: If the gradients of some live elsewhere.
        """
        sharding.require_served(parameters)

    def incomplete(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """Return why gradients are incomplete at the start of a step, and the remedy.

        Returns:
            None, the default, where they are complete.
        """
        return None

    def shaped(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context in which parameters have full shapes; by default they always do."""
        return nullcontext()

    def groups(self, optimizer: Any) -> list[Sequence[nn.Parameter]]:
        """Return the model's parameters in each param group of an optimizer.

        Args:
            optimizer: The optimizer, or a wrapper of it. If parameters are sharded, its groups may
                have other tensors in their place.

        Returns:
            By default the parameters of its groups, in their order.
        """
        return [group["params"] for group in optimizer.param_groups]


class PlainGrad(GradientHome):
    """Gradients live in ``.grad``; of a DTensor, in its local tensor.

    Under DeepSpeed's ZeRO they live in this rank's partition of the averaged gradients.

    Args:
        *sources: The model and optimizers from which ZeRO's optimizer is reached.
    """

    _sources: Sequence[object] = ()
    _zero: Mapping[nn.Parameter, GradientHome] = {}

    def __init__(self, *sources: object) -> None:
        self._sources = [source for source in sources if source is not None]

    def _elsewhere(self, parameter: nn.Parameter) -> GradientHome | None:
        if not self._zero and type(parameter) is nn.Parameter:
            return None
        return self._zero.get(parameter) or _home_of(parameter)

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        if not self._zero and type(parameter) is nn.Parameter:  # as `_elsewhere`, for each call
            return parameter.grad
        home = self._elsewhere(parameter)
        return parameter.grad if home is None else home.read(parameter)

    def each(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        # The plain case without bytecode for each, since this runs several times in a step.
        if type(self) is PlainGrad and not self._zero and set(map(type, parameters)) <= _PLAIN:
            return list(map(_GRAD, parameters))
        return super().each(parameters)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Set the gradient of a parameter; ZeRO's partitions store a copy, and zeros for None."""
        home = self._elsewhere(parameter)
        if home is None:
            parameter.grad = gradient
        else:
            home.put(parameter, gradient)

    def local(self, parameter: nn.Parameter) -> Tensor:
        home = self._elsewhere(parameter)
        return parameter if home is None else home.local(parameter)

    def locals(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        if self._zero or type(self) is not PlainGrad:
            return super().locals(parameters)
        return [p if type(p) is nn.Parameter else self.local(p) for p in parameters]

    def is_partial(self, parameter: nn.Parameter) -> bool:
        home = self._elsewhere(parameter)
        return home is not None and home.is_partial(parameter)

    def settle(self, parameter: nn.Parameter) -> None:
        home = self._elsewhere(parameter)
        if home is not None:
            home.settle(parameter)

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = list(parameters)
        deepspeed = sharding.met("deepspeed")
        if deepspeed is not None:  # gradients that ZeRO keeps
            self._zero = {**self._zero, **deepspeed.homes(named, self._zero, self._sources)}
        if self._zero:
            named = [(name, parameter) for name, parameter in named if parameter not in self._zero]
        sharding.require_served(named)

    def incomplete(self, parameters: Iterable[nn.Parameter]) -> str | None:
        if not self._zero:
            return None
        for home in dict.fromkeys(filter(None, map(self._zero.get, parameters))):
            if (why := home.incomplete(())) is not None:
                return why
        return None

    def shaped(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        return sharding.shaped(parameters)

    def groups(self, optimizer: Any) -> list[Sequence[nn.Parameter]]:
        for home in dict.fromkeys(self._zero.values()):
            if groups := home.groups(optimizer):
                return groups
        return super().groups(optimizer)


def _home_of(parameter: nn.Parameter) -> GradientHome | None:
    """Return the home of a DTensor's gradient; None for other parameters."""
    if not sharding.is_distributed(parameter):
        return None
    home: GradientHome = sharding.met("torch.distributed.tensor").HOME
    return home


def empty(home: GradientHome, parameters: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
    """Zero gradients as torch's ``Optimizer.zero_grad`` does, in less time, wherever they live."""
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if set_to_none:
        for parameter in with_gradient:
            parameter.grad = None
    elif with_gradient:
        nn.ParameterList(with_gradient).zero_grad(set_to_none)
    if type(home) is PlainGrad:
        return
    clear = home.clear if set_to_none else home.zero
    for parameter in parameters:
        if home.has(parameter):
            clear(parameter)


def any_nonzero(gradients: Sequence[Tensor]) -> bool:
    """Return whether any gradient has a nonzero entry; the host waits for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        by_device.setdefault(values.device, []).append(values.any())
    return any(bool(torch.stack(flags).any()) for flags in by_device.values())
