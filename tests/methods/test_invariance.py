"""What a step must not depend on: how inputs and activations are parameterised, units of the loss.

Without damping a K-FAC step is that of the function, whatever invertible affine maps stand between
the layers; with damping that holds of orthogonal maps.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.testing import compare
from tests.curvature import (
    Kind,
    closing,
    gather,
    gradient_matrix,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)
from tests.examples import examples

WIDTHS = (2, 3, 2)
SAMPLES = 7


def affine(n: int, seed: int, *, orthogonal: bool) -> Tensor:
    """A map ``[n + 1, n + 1]`` of vectors with a one at the end."""
    matrix = torch.eye(n + 1, dtype=torch.float64)
    if orthogonal:
        matrix[:n, :n] = torch.linalg.qr(randn(n, n, seed=seed))[0]
    else:
        matrix[:n, :n] += 0.3 * randn(n, n, seed=seed)
        matrix[:n, n] = randn(n, seed=seed + 1)
    return matrix


class Net(nn.Module):
    """Two layers with tanh; fixed affine maps before each layer and between it and the tanh.

    Args:
        maps: Of the inputs of layer 0, the outputs of layer 0, the inputs of layer 1.
    """

    def __init__(self, maps: list[Tensor]) -> None:
        super().__init__()
        self.into0, self.out0, self.into1 = maps
        self.layers = nn.ModuleList(nn.Linear(a, b).double() for a, b in pairwise(WIDTHS))
        for number in range(2):
            plain = 0.7 * randn(WIDTHS[number + 1], WIDTHS[number] + 1, seed=number)
            self._put(number, plain)

    def _put(self, number: int, plain: Tensor) -> None:
        """Set a layer so that with its maps it is ``plain`` ``[out, in + 1]``."""
        into = (self.into0, self.into1)[number]
        matrix = plain @ torch.linalg.inv(into)
        if number == 0:
            n = len(matrix)
            matrix = self.out0[:n, :n] @ matrix
            matrix[:, -1] += self.out0[:n, n]
        with torch.no_grad():
            self.layers[number].weight.copy_(matrix[:, :-1])
            self.layers[number].bias.copy_(matrix[:, -1])

    def forward(self, x: Tensor) -> Tensor:
        z = self.layers[0](_apply(self.into0, x))
        h = torch.tanh(_apply(torch.linalg.inv(self.out0), z))
        return self.layers[1](_apply(self.into1, h))


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    n = x.shape[-1]
    return x @ matrix[:n, :n].T + matrix[:n, n]


def stepped(maps: list[Tensor], kind: Kind, solver: str, damping: float) -> tuple[Tensor, Tensor]:
    """The outputs of the net before and after one step."""
    model = Net(maps)
    inputs, targets = randn(SAMPLES, WIDTHS[0], seed=20), randn(SAMPLES, WIDTHS[-1], seed=21)
    before = model(inputs).detach()
    with closing(preconditioner(model, solver=solver, damping=damping)) as own:
        gather(model, [(inputs, targets)], log_cosh, kind)
        model.zero_grad()
        own.curvature.capture.enabled = False
        log_cosh(model(inputs), targets).backward()
        own.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.5)
        return before, model(inputs)


def check(maps: list[Tensor], kind: Kind, solver: str, damping: float, rtol: float) -> None:
    plain = [torch.eye(len(m), dtype=torch.float64) for m in maps]
    before, after = stepped(plain, kind, solver, damping)
    same, mapped = stepped(maps, kind, solver, damping)
    compare(same, before, "the function before the step")
    assert (after - before).norm() > 1e-2 * before.norm()
    compare(mapped - same, after - before, "the change of the function", rtol=rtol)


@pytest.mark.slow
@given(seed=st.integers(0, 50), kind=st.sampled_from(["type-2", "empirical"]))
@settings(max_examples=examples(15))
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_without_damping_affine_maps_leave_the_function(solver: str, seed: int, kind: Kind) -> None:
    maps = [affine(n, 3 * seed + i, orthogonal=False) for i, n in enumerate((2, 3, 3))]
    check(maps, kind, solver, 0.0, 1e-5)


@pytest.mark.slow
@given(seed=st.integers(0, 50), kind=st.sampled_from(["type-2", "empirical"]))
@settings(max_examples=examples(15))
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_with_damping_orthogonal_maps_leave_the_function(
    solver: str, seed: int, kind: Kind
) -> None:
    maps = [affine(n, 3 * seed + i, orthogonal=True) for i, n in enumerate((2, 3, 3))]
    check(maps, kind, solver, 0.1, 1e-9)


def test_with_damping_other_maps_do_not() -> None:
    maps = [affine(n, i, orthogonal=False) for i, n in enumerate((2, 3, 3))]
    with pytest.raises(AssertionError, match="the change of the function"):
        check(maps, "type-2", "eigen", 0.1, 1e-3)


def scaled_step(kind: Kind, scale: float, damping: float, solver: str) -> list[Tensor]:
    """The preconditioned gradients of ``scale`` times the loss."""
    model = Net([torch.eye(n + 1, dtype=torch.float64) for n in (2, 3, 3)])
    inputs, targets = randn(SAMPLES, WIDTHS[0], seed=20), randn(SAMPLES, WIDTHS[-1], seed=21)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * half_square(output, target)

    with closing(preconditioner(model, damping=damping, solver=solver)) as own:
        gather(model, [(inputs, targets)], loss, kind)
        model.zero_grad()
        own.curvature.capture.enabled = False
        loss(model(inputs), targets).backward()
        own.step()
        return [gradient_matrix(block) for block in own.blocks]


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("scale", [1e-3, 7.0])
def test_units_of_the_loss(scale: float, solver: str) -> None:
    """F of ``c loss`` is ``c F`` if it is a curvature; the empirical one is ``c^2 F``."""
    damping = 0.05
    for kind, power in (("type-2", 1), ("empirical", 2)):
        own = scaled_step(kind, 1.0, damping, solver)
        other = scaled_step(kind, scale, scale**power * damping, solver)
        for one, two in zip(own, other, strict=True):
            compare(scale ** (power - 1) * two, one, kind)
    # The negative control: with the damping of a true curvature, the empirical step is another.
    for one, two in zip(own, scaled_step("empirical", scale, scale * damping, solver), strict=True):
        factor = one.norm() / two.norm()
        assert (factor * two - one).norm() > 1e-3 * one.norm()
