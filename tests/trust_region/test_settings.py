"""What a trust region is given: each setting is checked at construction, by its name."""

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe import PlainGrad
from soframe.losses import SquaredError
from soframe.settings import grouped
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt, RelativeDamping
from tests.trust_region.kit import classes_of, deep, trust_region, vector

FLAGS = ("momentum", "full_batch", "reject")
NO_NUMBERS: list[Any] = ["no", None, True, math.nan, [1.0], 1j, 10**400]


def no_number(step: int) -> str:
    """A schedule that returns no number."""
    return "3"


SGD = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({flag: "no"}, TypeError, f"{flag} must be True or False, not 'no'") for flag in FLAGS),
    *(({flag: 1}, TypeError, f"{flag} must be True or False, not 1") for flag in FLAGS),
    *(({flag: None}, TypeError, f"{flag} must be True or False, not None") for flag in FLAGS),
    ({"burn_in": True}, ValueError, "burn_in must be an integer, not True"),
    ({"burn_in": 2.0}, ValueError, "burn_in must be an integer, not 2.0"),
    ({"burn_in": -1}, ValueError, "burn_in must be at least 0, not -1"),
    ({"burn_in": "3"}, ValueError, "burn_in must be an integer, not '3'"),
    *(
        ({"layer_groups": wrong}, ValueError, "layer_groups must be a positive integer, not")
        for wrong in (0, -1, 1.5, True, "3", None, math.nan)
    ),
    *(({"lr": wrong}, ValueError, "lr must be positive, not") for wrong in NO_NUMBERS),
    *(({"lr": wrong}, ValueError, "lr must be positive, not") for wrong in (0, -1.0, math.inf)),
    *(
        ({"weight_decay": wrong}, ValueError, "weight_decay must not be negative, not")
        for wrong in (*NO_NUMBERS, -1.0, math.inf)
    ),
    ({"weight_decay": 1e300}, ValueError, "weight_decay must not be above 1e\\+30, not 1e\\+300"),
    *(
        ({"max_increase": wrong}, ValueError, "max_increase must be above 1, or None, not")
        for wrong in ("2", True, 1.0, 0.5, math.nan, [2.0])
    ),
    *(
        ({"preconditioner_damping": wrong}, ValueError, "preconditioner_damping must be positive")
        for wrong in ("1", True, 0.0, -1.0, math.nan, math.inf, AdaptiveDamping)
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
    ({"moment": True}, TypeError, "TrustRegion has no setting 'moment', nor has Preconditioner"),
    ({"kl_clip": 1e-3}, ValueError, "TrustRegion takes no kl_clip=: the quadratic model chooses"),
    ({"norm_clip": 1.0}, ValueError, "TrustRegion takes no norm_clip="),
    ({"clip_lr": "initial"}, ValueError, "TrustRegion takes no clip_lr="),
    ({"optimizer": SGD}, ValueError, "TrustRegion takes no optimizer=: it is an optimizer"),
    ({"grad_scaler": float}, ValueError, "TrustRegion takes no grad_scaler=: it runs the backward"),
    ({"loss_average": "sum"}, ValueError, "TrustRegion needs loss_average='local' or 'global'"),
]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    REFUSED,
    ids=lambda one: re.sub(" at 0x[0-9a-f]+", "", str(one)),
)
def test_settings(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = deep()
    others = {name: value for name, value in settings.items() if name != "loss"}
    with pytest.raises(kind, match=message):
        soframe.TrustRegion(model, settings.get("loss", "mse"), **grouped(others))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [LevenbergMarquardt, AdaptiveDamping])
@pytest.mark.parametrize("wrong", ["3", None, True, [1.0]])
def test_settings_of_dampings(kind: Any, wrong: Any) -> None:
    for name in kind.__dataclass_fields__:
        if wrong is None and name == "initial":
            continue  # it is to be measured
        with pytest.raises(ValueError, match=f"{kind.__name__}: {name} must be"):
            kind(**{name: wrong})


@pytest.mark.parametrize("lr", [1, 0.5, torch.tensor(0.5), 2.0])
def test_numbers_of_any_kind(lr: Any) -> None:
    own = trust_region(deep(), "cross-entropy", lr=lr, weight_decay=0, max_increase=2)
    own.close()


@pytest.mark.parametrize(
    ("name", "value"), [("lr", math.nan), ("lr", -1.0), ("lr", "x"), ("weight_decay", math.inf)]
)
def test_what_a_group_has_become(name: str, value: Any) -> None:
    net, (x, y) = deep(), classes_of(0)
    own = trust_region(net, "cross-entropy")
    own.step(lambda: F.cross_entropy(net(x), y))
    before = vector(net)
    own.param_groups[0][name] = value
    with pytest.raises(ValueError, match=f"TrustRegion: the {name} of a .*group has become"):
        own.step(lambda: F.cross_entropy(net(x), y))
    assert torch.equal(vector(net), before)


# -- closures ------------------------------------------------------------------------------------


@pytest.fixture
def case() -> Iterator[tuple[nn.Module, soframe.TrustRegion, Tensor]]:
    net = deep()
    own = trust_region(net, SquaredError())
    yield net, own, classes_of(0)[0]
    own.close()


@pytest.mark.parametrize("closure", [None, 5, [], (), [None], "loss", torch.zeros(())])
def test_what_is_no_closure(case: Any, closure: Any) -> None:
    with pytest.raises(TypeError, match=r"TrustRegion\.step takes a closure that returns the loss"):
        case[1].step(closure)


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
    "no model": (lambda net, x: x.sum(), RuntimeError, "must run the model, and did not"),
    "linear": (lambda net, x: (2 * net(x)).sum(), ValueError, "has 0 times the curvature"),
    "no_grad": (under_no_grad, RuntimeError, "the model's output 0 has no gradient"),
    "detached": (lambda net, x: net(x).detach().sum(), RuntimeError, "loss has no gradient"),
    "another leaf": (leaf, ValueError, "has 0 times the curvature of loss=SquaredError"),
    "integers": (lambda net, x: net(x).argmax(1).sum(), RuntimeError, "loss has no gradient"),
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
