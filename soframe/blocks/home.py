"""Where gradients live: the one seam between soframe and stacks that keep them elsewhere.

Whatever reads, writes or clears the gradient of a parameter asks a `GradientHome`, which the
constructor of `soframe.Preconditioner` gives to all of its parts. Plain PyTorch keeps gradients in
``.grad`` (`PlainGrad`, the default); Megatron, for example, in ``main_grad``.

A home answers for this rank alone: what it returns has the parameter's shape, and is averaged over
ranks or this rank's own, as ``gradients=`` of the preconditioner says. Where parameters are shared
out over ranks it is this rank's part of the averaged gradient, and `GradientHome.shards` says which
part that is. Reading is never a collective: gradients are read on some ranks and not on others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import dtensors, zero
from soframe.blocks.stacks import require_served
from soframe.specs import Shards


class GradientHome(ABC):
    """Where the gradients of parameters live. Two methods make a home; others have defaults."""

    @abstractmethod
    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter.

        Args:
            parameter: The parameter.

        Returns:
            The very tensor in which it lies, of the shape of `local`. What is written into that
            tensor is written into the gradient. None where there is no gradient.
        """

    @abstractmethod
    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Let a tensor be the gradient of a parameter, which `read` returns from now on.

        Args:
            parameter: The parameter.
            gradient: The tensor, of the shape of `local`; None for no gradient.
        """

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return what this rank has of a parameter itself.

        Args:
            parameter: The parameter.

        Returns:
            A tensor that has its memory, which is the parameter itself by default, or its local
            part where it is a DTensor.
        """
        return dtensors.local(parameter)

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards | None:
        """Return how a parameter, and its gradient, is shared out over ranks.

        The answer is the same on every rank.

        Args:
            parameter: The parameter.
            ranks: The global ranks of the group that the preconditioner works in.

        Returns:
            Which part each of them has; None, the default for what is no DTensor, where every rank
            has the whole.
        """
        return dtensors.shards(parameter, ranks)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a gradient.

        Args:
            parameter: The parameter.
        """
        return self.read(parameter) is not None

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of those parameters that have one, in their order.

        Args:
            parameters: The parameters.
        """
        return [g for p in parameters if (g := self.read(p)) is not None]

    def write(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Overwrite a gradient in place; a parameter without one gets none.

        Args:
            parameter: The parameter.
            values: A tensor of the shape of `local`, of any dtype.
        """
        gradient = self.read(parameter)
        if gradient is not None:
            gradient.copy_(values)

    def fill(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of a parameter, which is zero from now on if there was none.

        Args:
            parameter: The parameter.

        Returns:
            See `read`.
        """
        gradient = self.read(parameter)
        if gradient is None:
            gradient = torch.zeros_like(self.local(parameter), requires_grad=False)
            self.put(parameter, gradient)
        return gradient

    def zero(self, parameter: nn.Parameter) -> None:
        """Overwrite a gradient with zeros in place; a parameter without one gets none.

        Args:
            parameter: The parameter.
        """
        gradient = self.read(parameter)
        if gradient is not None:
            gradient.zero_()

    def clear(self, parameter: nn.Parameter) -> None:
        """Let a parameter have no gradient.

        Args:
            parameter: The parameter.
        """
        self.put(parameter, None)

    def is_partial(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient has to be brought into the parameter's parts by `settle`.

        Args:
            parameter: The parameter.

        Returns:
            By default False.
        """
        del parameter
        return False

    def settle(self, parameter: nn.Parameter) -> None:
        """Let a gradient be in the parameter's parts, and added up over ranks.

        The one method that may be a collective: every rank calls it, or none. By default there is
        nothing to do.

        Args:
            parameter: A parameter with a gradient of which `is_partial` is true.
        """
        del parameter

    def is_sparse(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has a gradient that is a sparse tensor.

        Args:
            parameter: The parameter.
        """
        gradient = self.read(parameter)
        return gradient is not None and gradient.is_sparse

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Check that this home has the gradients of parameters; called when a model is registered.

        The default refuses parameters of the stacks that are known to share them out over ranks. A
        home of such a stack overrides it.

        Args:
            parameters: Parameters with their names.

        Raises:
            ValueError: If the gradients of some live elsewhere.
        """
        require_served(parameters)

    def incomplete(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """Return why the gradients of a step are not complete, and the remedy; asked as it begins.

        Args:
            parameters: The parameters of the blocks.

        Returns:
            None, the default, where they are. A home in which gradients are averaged some time
            after a backward pass says so where they are not yet.
        """
        return None

    def shaped(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Let parameters have their shapes meanwhile, whatever this rank has of them.

        Args:
            parameters: The parameters.

        Returns:
            A context. The default changes nothing, since parameters have their shapes.
        """
        return nullcontext()

    def groups(self, optimizer: Any) -> list[Sequence[nn.Parameter]]:
        """Return the parameters of a model that each param group of an optimizer is of.

        Where parameters are shared out the optimizer may have others in their place.

        Args:
            optimizer: The optimizer, or what wraps it.

        Returns:
            By default what the groups have, in their order.
        """
        return [group["params"] for group in optimizer.param_groups]


class PlainGrad(GradientHome):
    """Gradients live in ``.grad``, where autograd leaves them; in this rank's part of a DTensor.

    Of a model that DeepSpeed's ZeRO shares out they live in this rank's partition
    (`soframe.blocks.zero`).
    """

    _zero: Mapping[nn.Parameter, zero.Partitions] = {}

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """See `GradientHome.read`."""
        if self._zero and parameter in self._zero:
            return self._zero[parameter].read(parameter)
        gradient = parameter.grad
        # The exact type: this is asked for every parameter, several times in a step.
        if gradient is None or type(gradient) is Tensor:
            return gradient
        return dtensors.local(gradient)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """See `GradientHome.put`. In ZeRO's partitions a copy of it, and zeros for none."""
        if self._zero and parameter in self._zero:
            self._zero[parameter].put(parameter, gradient)
            return
        parameter.grad = None if gradient is None else dtensors.like(gradient, parameter)

    def is_partial(self, parameter: nn.Parameter) -> bool:
        """See `GradientHome.is_partial`."""
        return dtensors.is_partial(parameter.grad, parameter)

    def settle(self, parameter: nn.Parameter) -> None:
        """See `GradientHome.settle`."""
        if parameter.grad is not None:
            parameter.grad = dtensors.settled(parameter.grad, parameter)

    def local(self, parameter: nn.Parameter) -> Tensor:
        """See `GradientHome.local`."""
        if self._zero and parameter in self._zero:
            return self._zero[parameter].local(parameter)
        return super().local(parameter)

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards | None:
        """See `GradientHome.shards`.

        Args:
            parameter: The parameter.
            ranks: The global ranks of the group.

        Returns:
            The parts, or None.

        Raises:
            ValueError: If it is shared out over other ranks; or DeepSpeed's ZeRO has the gradients
                of other parameters, and not this one's.
        """
        if not self._zero:
            return super().shards(parameter, ranks)
        if parameter not in self._zero:
            raise ValueError(
                "it is trained, and not in the optimizer that deepspeed.initialize was given, so "
                "nobody averages its gradient: give it to the optimizer, freeze it before "
                "deepspeed.initialize, or skip the module"
            )
        return self._zero[parameter].shards(parameter, ranks)

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """See `GradientHome.check`."""
        if not zero.is_there():
            require_served(parameters)
            return
        named = list(parameters)
        if found := zero.find(named, self._zero):
            self._zero = {**self._zero, **found}
        others = ((n, p) for n, p in named if p not in self._zero and not zero.has_engine(p))
        require_served(others)

    def incomplete(self, parameters: Iterable[nn.Parameter]) -> str | None:
        """See `GradientHome.incomplete`."""
        if not self._zero:
            return None
        found = dict.fromkeys(self._zero[p] for p in parameters if p in self._zero)
        return next((why for partitions in found if (why := partitions.incomplete())), None)

    def shaped(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """See `GradientHome.shaped`."""
        return zero.shaped(parameters)

    def groups(self, optimizer: Any) -> list[Sequence[nn.Parameter]]:
        """See `GradientHome.groups`."""
        for partitions in dict.fromkeys(self._zero.values()):
            if (groups := partitions.groups(optimizer)) is not None:
                return list(groups)
        return super().groups(optimizer)

    # What follows is the same as without these, with fewer calls in every step.

    def has(self, parameter: nn.Parameter) -> bool:
        """See `GradientHome.has`."""
        if self._zero:
            return super().has(parameter)
        return parameter.grad is not None

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """See `GradientHome.of`."""
        if self._zero:
            return super().of(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [g if type(g) is Tensor else dtensors.local(g) for g in gradients]


def empty(
    home: GradientHome,
    parameters: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter] = (),
    *,
    set_to_none: bool,
) -> None:
    """Zero the gradients that ``zero_grad`` of torch's optimizers has left.

    Args:
        home: Where the gradients live.
        parameters: Those of its param groups, which have gradients left where the home is not
            ``.grad``.
        others: Parameters in none of its groups.
        set_to_none: Whether they have no gradient afterwards, rather than zeros.
    """
    others = list(others)
    if left := [parameter for parameter in others if parameter.grad is not None]:
        nn.ParameterList(left).zero_grad(set_to_none)
    if type(home) is PlainGrad:
        return
    for parameter in (*parameters, *(p for p in others if home.has(p))):
        if set_to_none:
            home.clear(parameter)
        else:
            home.zero(parameter)
