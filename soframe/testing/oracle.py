"""The exact Gauss-Newton matrix of a batch, and the optimizer that inverts it, on small models.

K-FAC and its kin approximate the matrix with a block for each layer, which itself approximates the
matrix of all parameters. Set beside both, in steps and in loss, a method shows how much each of the
two approximations costs::

    oracle = soframe.testing.Oracle(model, lr=0.3, damping=1e-2, blocks="layers")
    oracle.step(lambda: criterion(model(inputs), targets))

The matrix of the N samples of a batch is ``G = (1/N) sum_n J_n^T H_n J_n``, with the Hessian H of
the loss in the outputs (Schraudolph, 2002). A product with it is one derivative of the outputs
along a vector and one backward pass, as in `soframe.trust_region`; its inverse is by conjugate
gradients (Martens, 2010). Nothing larger than vectors and the graph of the batch is kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from soframe.blocks.registration import unwrap
from soframe.products.vectors import Vector
from soframe.testing.dense import flat
from soframe.trust_region.forward import Closure, first_pass
from soframe.trust_region.layer_groups import layers_of
from soframe.trust_region.twice import Direction

Blocks = Literal["layers", "all"] | Sequence[Collection[str]]
"""The parameters of each block by name: a block a layer, one of all, or any division."""


class GaussNewton:
    """The Gauss-Newton matrix of the loss of a closure, at the present parameters.

    Vectors are dicts, as for `soframe.Curvature`: name -> ``[*shape]``, of each parameter that is
    trained.

    Args:
        model: The model.
        closure: Runs the model and returns the mean loss, without a backward pass. The loss depends
            on the parameters through the outputs of the model alone.
        blocks: ``"layers"`` has a block for the parameters of each module, ``"all"`` one block;
            otherwise the names of each block, such as the blocks of a curvature
            (``[names.values() for names in curvature.names.values()]``).

    Attributes:
        loss: The loss, a scalar.
        gradient: Its gradient.

    Raises:
        ValueError: If the blocks do not divide the trained parameters.
        RuntimeError: If the loss depends on parameters other than through the outputs, or a module
            has no second derivative.
    """

    loss: Tensor
    gradient: dict[str, Tensor]

    def __init__(self, model: nn.Module, closure: Closure, blocks: Blocks = "layers") -> None:
        model = unwrap(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._blocks = _divided(model, blocks, self._parameters)
        parameters = list(self._parameters.values())
        with torch.enable_grad():
            self._forward, value = first_pass(model, closure, parameters)
        self.loss = value.detach()
        self.gradient = self._pulled_back(self._forward.gradients, list(self._parameters))

    def __matmul__(self, vector: Vector) -> dict[str, Tensor]:
        """Multiply a vector.

        Args:
            vector: Name -> ``[*shape]``.

        Returns:
            Name -> ``[*shape]``.

        Raises:
            ValueError: If names or shapes do not fit.
        """
        return self._joined(self._products(self._parts(vector)))

    def solve(
        self, vector: Vector, damping: float, *, tolerance: float = 1e-6, iterations: int = 1000
    ) -> dict[str, Tensor]:
        """Return ``(G + damping I)^-1`` times a vector, by conjugate gradients in each block.

        Args:
            vector: Name -> ``[*shape]``.
            damping: Positive.
            tolerance: The norm of the residual of each block over the norm of its vector.
            iterations: At most so many products; then the present solution is returned.

        Returns:
            Name -> ``[*shape]``.

        Raises:
            ValueError: If names or shapes do not fit, or the damping is not positive.
        """
        if not damping > 0:
            raise ValueError(f"the damping of an exact solve must be positive, not {damping!r}")
        residuals = self._parts(vector)
        directions = dict(residuals)
        solutions, squares, bounds = dict[int, Tensor](), dict[int, Tensor](), dict[int, float]()
        for number, part in residuals.items():
            solutions[number] = torch.zeros_like(part)
            squares[number] = part @ part
            bounds[number] = tolerance**2 * float(squares[number])
        for _ in range(iterations):
            open_directions: dict[int, Tensor] = {}
            for number, bound in bounds.items():
                if float(squares[number]) > bound:
                    open_directions[number] = directions[number]
            if not open_directions:
                break
            images = self._products(open_directions)
            for number, direction in open_directions.items():
                image = images[number] + damping * direction
                length = squares[number] / (direction @ image)
                solutions[number] = solutions[number] + length * direction
                residuals[number] = residuals[number] - length * image
                previous, squares[number] = squares[number], residuals[number] @ residuals[number]
                directions[number] = residuals[number] + squares[number] / previous * direction
        return self._joined(solutions)

    def _products(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Multiply the flat vectors of some blocks by these blocks."""
        directions: list[Direction] = []
        for number, part in parts.items():
            tensors = self._split(number, part)
            directions.append(list(map(tensors.get, self._parameters)))
        parameters = list(self._parameters.values())
        tangents = self._forward.jacobian_products(parameters, directions)
        products = {}
        for number, tangent in zip(parts, tangents, strict=True):
            cotangents = self._forward.hessian_product(tangent)
            pulled_back = self._pulled_back(cotangents, self._blocks[number])
            products[number] = flat(pulled_back.values())
        return products

    def _pulled_back(self, cotangents: Sequence[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Multiply cotangents of the outputs by the transposed Jacobian of some parameters."""
        outputs, of_outputs = list[Tensor](), list[Tensor]()
        for output, cotangent in zip(self._forward.outputs, cotangents, strict=True):
            if output.requires_grad:
                outputs.append(output)
                of_outputs.append(cotangent)
        inputs = [self._parameters[name] for name in names]
        with self._forward.kernels.again():
            gradients = torch.autograd.grad(
                outputs, inputs, of_outputs, retain_graph=True, materialize_grads=True
            )
        return dict(zip(names, gradients, strict=True))

    def _parts(self, vector: Vector) -> dict[int, Tensor]:
        """Return the entries of a vector by block, ``[size]``; raise if it does not fit."""
        wrong = set(vector) ^ set(self._parameters)
        for name in vector.keys() & self._parameters.keys():
            if vector[name].shape != self._parameters[name].shape:
                wrong.add(name)
        if wrong:
            raise ValueError(
                f"names or shapes do not fit at {', '.join(sorted(wrong))}: pass a tensor of the "
                f"parameter's shape for each parameter that is trained"
            )
        parts = {}
        for number, names in enumerate(self._blocks):
            parts[number] = flat(vector[name].detach() for name in names)
        return parts

    def _split(self, number: int, part: Tensor) -> dict[str, Tensor]:
        """Return the tensors by name of the entries of a block."""
        names = self._blocks[number]
        sizes = [self._parameters[name].numel() for name in names]
        tensors: dict[str, Tensor] = {}
        for name, entries in zip(names, part.split(sizes), strict=True):
            tensors[name] = entries.view(self._parameters[name].shape)
        return tensors

    def _joined(self, parts: Mapping[int, Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for number, part in parts.items():
            tensors |= self._split(number, part)
        return {name: tensors[name] for name in self._parameters}


class Oracle(torch.optim.SGD):
    """SGD along the exact damped Gauss-Newton direction of each batch.

    It is SGD behind a preconditioner whose curvature is exact, of one batch and without averages
    over steps. A step takes tens of passes over its batch.

    Args:
        model: The model.
        lr: The learning rate.
        damping: Positive; added to the matrix.
        blocks: See `GaussNewton`.
        tolerance: See `GaussNewton.solve`.
        iterations: See `GaussNewton.solve`.
        **options: Of SGD: momentum, nesterov, weight_decay.

    Raises:
        ValueError: See `GaussNewton`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float,
        blocks: Blocks = "layers",
        tolerance: float = 1e-3,
        iterations: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(model.parameters(), lr, **options)
        self._model, self._blocks = unwrap(model), blocks
        self._damping, self._tolerance, self._iterations = damping, tolerance, iterations

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Update the parameters.

        Args:
            closure: See `GaussNewton`.

        Returns:
            The loss before the update.
        """
        matrix = GaussNewton(self._model, closure, self._blocks)
        update = matrix.solve(
            matrix.gradient, self._damping, tolerance=self._tolerance, iterations=self._iterations
        )
        for name, parameter in self._model.named_parameters():
            parameter.grad = update.get(name)
        super().step()
        return matrix.loss


def _divided(
    model: nn.Module, blocks: Blocks, parameters: Mapping[str, nn.Parameter]
) -> list[list[str]]:
    """Return the names of the parameters of each block; raise unless each is in exactly one."""
    if blocks == "all":
        blocks = [list(parameters)]
    elif blocks == "layers":
        names = {parameter: name for name, parameter in parameters.items()}
        blocks = []
        for layer in layers_of(model, names):  # a shared parameter belongs to its first layer
            blocks.append([names[parameter] for parameter in layer])
    division = [list(block) for block in blocks]
    counts = Counter(itertools.chain.from_iterable(division))
    wrong = counts.keys() - parameters.keys()
    wrong |= {name for name in parameters if counts[name] != 1}
    if wrong:
        raise ValueError(
            f"blocks must have each trained parameter once, and {', '.join(sorted(wrong))} is "
            f"missing, there twice, or not trained"
        )
    return division
