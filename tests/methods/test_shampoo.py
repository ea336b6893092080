"""Shampoo against roots that scipy takes, in float64."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from soframe.methods import Shampoo
from soframe.solvers import Root
from soframe.specs import FactorSpec
from soframe.testing import compare
from tests.curvature import closing, randn
from tests.methods import stages

DECAY = 0.7


def power_of(matrix: Tensor, power: float, epsilon: float) -> Tensor:
    """The power by scipy, which goes by a Schur decomposition."""
    own = matrix.numpy()
    own = own + epsilon * np.linalg.norm(own, 2) * np.eye(len(own))
    return torch.from_numpy(scipy.linalg.fractional_matrix_power(own, power).real)


@pytest.mark.parametrize("power", [-0.25, -0.5, -1.0, -1 / 3, 0.5])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_powers(power: float, epsilon: float) -> None:
    rows = randn(3, 7, 4) * torch.tensor([1e-4, 1.0, 1e4]).double().view(3, 1, 1)
    factors = rows.mT @ rows
    found = Root(power, epsilon).solve(factors, torch.zeros(3))["root"]
    assert torch.equal(found, found.mT)
    for own, factor in zip(found, factors, strict=True):
        compare(own, power_of(factor, power, epsilon), f"power {power}")


def test_powers_of_singular_factors() -> None:
    row = randn(1, 1, 3)
    found = Root(-0.5, 0.0).solve(row.mT @ row, torch.zeros(1))["root"]
    length = row.norm()
    compare(found, row.mT @ row / length**3, "rank one", rtol=1e-6)
    assert not Root().solve(torch.zeros(1, 3, 3), torch.zeros(1))["root"].any()


def test_apply() -> None:
    left, right, gradient = randn(1, 2, 2), randn(1, 3, 3, seed=1), randn(1, 2, 3, seed=2)
    data = {"left": {"root": left}, "right": {"root": right}}
    compare(Root().apply(gradient, **data, damping=1.0), left @ gradient @ right, "both")  # type: ignore[arg-type]
    found = Root().apply_right(gradient, right={"root": right}, damping=1.0)
    compare(found, gradient @ right, "right")


@pytest.mark.parametrize("shape", [(3, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize(
    "method",
    [
        Shampoo(DECAY, graft=None),
        Shampoo(DECAY, graft="sgd", graft_steps=2),
        Shampoo(DECAY, power=-0.4, epsilon=0.01, graft=None),
        Shampoo(DECAY, "left", graft=None),
        Shampoo(DECAY, "right", graft=None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.covering(together=2)
def test_shampoo(shape: tuple[int, int], method: Shampoo, every: int) -> None:
    """Five steps, of which every second or each one refreshes the roots."""
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)).double()
    power = method.power or (-0.25 if method.sides == "both" else -0.5)
    past: list[Tensor] = []
    with closing(stages.preconditioner(model, method, solve_every=every)) as own:
        for step in range(5):
            gradient = randn(*shape, seed=step)
            past.append(gradient)
            model[0].weight.grad = gradient.clone()
            own.step()
            used = past[: step // every * every + 1]
            shares = [DECAY**age for age in reversed(range(len(used)))]
            rows = sum(w * g @ g.T for w, g in zip(shares, used, strict=True)) / sum(shares)
            columns = sum(w * g.T @ g for w, g in zip(shares, used, strict=True)) / sum(shares)
            expected = gradient
            if method.sides != "right":
                expected = power_of(rows, power, method.epsilon) @ expected
            if method.sides != "left":
                expected = expected @ power_of(columns, power, method.epsilon)
            if method.graft is not None:
                expected = expected * gradient.norm() / expected.norm()
                expected = gradient if step < method.graft_steps else expected
            compare(model[0].weight.grad, expected, f"step {step}", rtol=1e-8)


def test_what_it_is_not_for() -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 3))
    with closing(stages.preconditioner(model, Shampoo(max_size=4))) as own:
        assert [block.name for block in own.blocks] == ["1.weight", "1.bias"]
        (reason,) = [row.reason for row in own.report() if row.parameter == "0.weight"]
        assert "max_size=4" in reason
    with closing(stages.preconditioner(model, Shampoo(sides="left", max_size=4))) as own:
        assert len(own.blocks) == 3
    with pytest.raises(ValueError, match="solver='eigen'"):
        stages.preconditioner(stages.network(), "kfac", solver="root")
    diagonal = FactorSpec("D", "left", 1, 3, kind="diagonal", reads="gradient")
    assert Root().unsupported([diagonal]) is not None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"decay": 1.0}, "decay"),
        ({"sides": "top"}, "sides"),
        ({"power": 0.5}, "power"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"max_size": 0}, "max_size"),
        ({"graft_steps": -1}, "graft_steps must be at least 0"),
        ({"graft_steps": 2.5}, "graft_steps must be an integer"),
        ({"graft": "soap"}, "without factors"),
    ],
    ids=str,
)
def test_settings_are_checked(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Shampoo(**options)
    with pytest.raises(ValueError, match="power"):
        Root(0.0)


def test_ten_steps_are_those_of_the_graft_by_default() -> None:
    found = []
    for method in ("shampoo", "adamw"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
        directions = []
        with closing(stages.preconditioner(model, method)) as own:
            for step in range(11):
                model[0].weight.grad = randn(4, 4, seed=step)
                own.step()
                directions.append(model[0].weight.grad.clone())
        found.append(directions)
    same = [torch.allclose(*both) for both in zip(*found, strict=True)]
    assert same == [True] * 10 + [False]


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_shampoo_is_pytorch_optimizers() -> None:
    """Its factors are sums: averages of t gradients alike, whose roots are ``sqrt(t)`` as large."""
    from pytorch_optimizer import Shampoo as Peer

    model = nn.Sequential(nn.Linear(4, 4, bias=False)).double()
    other = nn.Parameter(model[0].weight.detach().clone())
    peer = Peer([other], lr=1.0, matrix_eps=1e-12)
    with closing(
        stages.preconditioner(model, Shampoo(1 - 1e-10, epsilon=1e-12, graft=None))
    ) as own:
        for step in range(5):
            gradient = randn(4, 4, seed=step)
            before = other.detach().clone()
            model[0].weight.grad, other.grad = gradient.clone(), gradient.clone()
            own.step()
            peer.step()
            found = model[0].weight.grad / (step + 1) ** 0.5
            compare(found, before - other.detach(), f"step {step}", rtol=1e-4)
