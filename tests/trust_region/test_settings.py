"""What a trust region is given: each setting is checked at construction, by its name."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import PlainGrad
from soframe.losses import SquaredError
from soframe.settings import grouped
from soframe.trust_region import RelativeDamping
from tests.trust_region.kit import classes_of, deep, trust_region, vector


def no_number(step: int) -> str:
    """A schedule that returns no number."""
    return "3"


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"layer_groups": wrong}, ValueError, "layer_groups must be a positive integer, not")
        for wrong in (0, -1)
    ),
    *(
        ({"lr": wrong}, ValueError, "lr must be positive, not")
        for wrong in (0, -1.0, math.inf, math.nan)
    ),
    *(
        ({"weight_decay": wrong}, ValueError, "weight_decay must not be negative, not")
        for wrong in (-1.0, math.inf, math.nan)
    ),
    *(
        ({"max_increase": wrong}, ValueError, "max_increase must be above 1, or None, not")
        for wrong in (1.0, 0.5, math.nan)
    ),
    *(
        ({"preconditioner_damping": wrong}, ValueError, "preconditioner_damping must be positive")
        for wrong in (0.0, -1.0, math.nan, math.inf)
    ),
    ({"damping": "high"}, ValueError, "damping must be a number, a callable"),
    ({"damping": -1.0}, ValueError, "damping must be a number"),
    ({"damping": True}, ValueError, "damping must be a number"),
    ({"damping": no_number}, ValueError, "damping must be a number"),
    ({"damping": RelativeDamping()}, ValueError, "needs one damping for the whole model"),
    ({"fisher": "exact"}, ValueError, "TrustRegion needs fisher='monte-carlo', 'type-2' or"),
    ({"gradients": "local"}, ValueError, "TrustRegion needs gradients='averaged'"),
    ({"background": 1}, ValueError, "TrustRegion needs background=0"),
    ({"auxiliary": "adamw"}, ValueError, "TrustRegion takes no auxiliary="),
    ({"home": PlainGrad()}, ValueError, "TrustRegion takes no home="),
    *(
        ({"method": method}, ValueError, "TrustRegion needs methods whose updates depend on the")
        for method in ("soap", "muon", "shampoo", {"0": "kfac", "*": "adamw"})
    ),
    ({"loss": 5}, TypeError, "a loss is a name"),
    ({"loss": None}, TypeError, "a loss is a name"),
    ({"loss": nn.MSELoss()}, TypeError, "a loss is a name"),
    ({"loss": "hinge"}, ValueError, "no loss 'hinge'"),
    ({"params": []}, ValueError, "empty parameter list"),
    ({"moment": True}, TypeError, "Preconditioner has no setting 'moment'"),
    ({"kl_clip": 1e-3}, ValueError, "TrustRegion takes no kl_clip=: the quadratic model chooses"),
    ({"norm_clip": 1.0}, ValueError, "TrustRegion takes no norm_clip="),
    ({"optimizer": object()}, ValueError, "TrustRegion takes no optimizer=: it is an optimizer"),
    (
        {"grad_scaler": object()},
        ValueError,
        "TrustRegion takes no grad_scaler=: it runs the backward",
    ),
    ({"loss_average": "sum"}, ValueError, "TrustRegion needs loss_average='local' or 'global'"),
]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    REFUSED,
    ids=lambda one: re.sub(" at 0x[0-9a-f]+", "", str(one)),
)
def test_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    model, settings = deep(), dict(settings)
    loss = settings.pop("loss", "mse")
    with pytest.raises(kind, match=message):
        soframe.TrustRegion(model, loss, **grouped(settings))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("lr", [1, 0.5, torch.tensor(0.5), 2.0])
def test_numbers_of_any_kind(lr: Any) -> None:
    own = trust_region(deep(), "cross-entropy", lr=lr, weight_decay=0, max_increase=2)
    own.close()


# -- closures ------------------------------------------------------------------------------------


@pytest.fixture
def case() -> Iterator[tuple[nn.Module, soframe.TrustRegion, Tensor]]:
    net = deep()
    own = trust_region(net, SquaredError())
    yield net, own, classes_of(0)[0]
    own.close()


def under_no_grad(net: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return net(x).square().mean()


def leaf(net: nn.Module, x: Tensor) -> Any:
    net(x)
    return torch.ones((), requires_grad=True)


CLOSURES: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (lambda net, x: net(x).sum().item(), TypeError, "must return its loss, a scalar"),
    "nothing": (lambda net, x: net(x) and None, RuntimeError, "Boolean value of Tensor"),
    "several numbers": (lambda net, x: net(x), TypeError, "must return its loss, a scalar"),
    "no model": (lambda net, x: x.sum(), RuntimeError, "must run the model, with gradients"),
    "linear": (lambda net, x: (2 * net(x)).sum(), ValueError, "has 0 times the curvature"),
    "no_grad": (under_no_grad, RuntimeError, "must run the model, with gradients"),
    "detached": (lambda net, x: net(x).detach().sum(), RuntimeError, "does not require grad"),
    "another leaf": (leaf, ValueError, "has 0 times the curvature of loss=SquaredError"),
    "integers": (lambda net, x: net(x).argmax(1).sum(), RuntimeError, "does not require grad"),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closures(case: Any, name: str) -> None:
    closure, kind, message = CLOSURES[name]
    net, own, x = case
    before = vector(net)
    with pytest.raises(kind, match=message):
        own.step(lambda: closure(net, x))
    assert torch.equal(vector(net), before)
    own.step(lambda: 0.5 * net(x).square().sum(1).mean())
    assert not torch.equal(vector(net), before)


def test_a_step_has_a_closure(case: Any) -> None:
    _, own, _ = case
    with pytest.raises(ValueError, match="not an empty list"):
        own.step([])


def test_a_model_that_returns_a_scalar() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    net = Scalar()
    own = trust_region(net, SquaredError())
    with pytest.raises(RuntimeError, match="the model returns a scalar"):
        own.step(lambda: net(torch.ones(4, 3)))
