"""Whatever a trust region is given: it works, or it says by name what is wrong.

`SOFRAME_FUZZ` is the number of cases; by default there are few::

    SOFRAME_FUZZ=2000 python -m pytest tests/trust_region/test_fuzz.py
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.losses import CrossEntropy, SquaredError, SumLoss, Term
from soframe.settings import grouped
from soframe.trust_region import (
    AdaptiveDamping,
    ConstantDamping,
    LevenbergMarquardt,
    RelativeDamping,
)
from tests.examples import examples

CASES = int(os.environ.get("SOFRAME_FUZZ") or examples(120))

NUMBERS: list[Any] = [0, 1, -1, 2, 0.5, 1e-300, 1e300, 1e-8, 1e8, math.nan, math.inf, -math.inf]


def or_any_number(*good: Any) -> st.SearchStrategy[Any]:
    """One that is valid, mostly."""
    return st.one_of(*[st.sampled_from(good)] * 12, st.sampled_from(NUMBERS))


flags = st.booleans()
MODELS: dict[str, Callable[[], Any]] = {
    "deep": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "bare": lambda: nn.Sequential(nn.Linear(3, 3, bias=False)),
    "normalised": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
    "dropped": lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 3)),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).requires_grad_(False),
    "partly frozen": lambda: nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 3)),
    "double": lambda: nn.Sequential(nn.Linear(3, 3)).double(),
    "bfloat16": lambda: nn.Sequential(nn.Linear(3, 3)).bfloat16(),
    "empty": lambda: nn.Sequential(nn.ReLU()),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3)),
    "no model": lambda: 5,
}
GIVEN: dict[str, st.SearchStrategy[Any]] = {
    "damping": or_any_number(
        "levenberg-marquardt", "constant", "relative", 0.1, ConstantDamping(1.0), ConstantDamping,
        LevenbergMarquardt(interval=1), LevenbergMarquardt, RelativeDamping(), lambda step: 0.1,
        lambda step: "x", lambda step: 1 / 0,
    ),
    "weight_decay": or_any_number(0.0, 1e-3),
    "momentum": flags,
    "layer_groups": or_any_number(1, 2, 3, 9),
    "lr": or_any_number(1.0, 0.3),
    "fisher": or_any_number("monte-carlo", "type-2", "forward-only", "empirical"),
    "preconditioner_damping": or_any_number(None, AdaptiveDamping(interval=1), 0.5),
    "reject": flags,
    "full_batch": flags,
    "max_increase": or_any_number(None, 1.5, 1e9),
    "burn_in": or_any_number(0, 1, 2),
    "loss_average": or_any_number("local", "global", "sum"),
    "solver": or_any_number("inverse", "eigen", "newton-schulz"),
    "method": or_any_number("kfac", "foof", "tnt"),
    "statistics_every": or_any_number(1, 2, 3),
    "solve_every": or_any_number(1, 2, 6),
    "decay": or_any_number(0.5, 0.95),
    "moment": st.just(1),
    "kl_clip": or_any_number(1e-3),
    "background": or_any_number(0),
    "gradients": or_any_number("averaged", "local"),
}  # fmt: skip
LOSSES = or_any_number(
    "cross-entropy", "mse", "squared-error", "binary-cross-entropy", "gaussian", SquaredError(2.0),
    CrossEntropy("sum"), SumLoss([Term("cross-entropy", slice(0, 2)), Term("mse", slice(2, 3))]),
)  # fmt: skip


def batch(rows: int, seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=drawn).to(like)
    return x, torch.randint(3, (rows,), generator=drawn)


def right(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The criterion of a declared loss, where it has one here."""
    one_hot = lambda f, y: F.one_hot(y, 3).to(f)  # noqa: E731
    criteria: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mse": lambda f, y: F.mse_loss(f, one_hot(f, y)),
        "squared-error": lambda f, y: 0.5 * (f - one_hot(f, y)).square().sum(1).mean(),
        "binary-cross-entropy": lambda f, y: F.binary_cross_entropy_with_logits(f, one_hot(f, y)),
    }
    return criteria.get(loss, F.cross_entropy) if isinstance(loss, str) else F.cross_entropy


Odd = Callable[[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, int], Any]


def plainly(rows: int, scale: float = 1.0) -> Odd:
    def run(model: nn.Module, criterion: Any, like: Tensor, seed: int) -> Any:
        x, y = batch(rows, seed, like)
        return lambda: criterion(model(x * scale), y)

    return run


def shares(*sizes: int, equal: bool = False) -> Odd:
    def run(model: nn.Module, criterion: Any, like: Tensor, seed: int) -> Any:
        x, y = batch(sum(sizes), seed, like)
        each = zip(x.split(sizes), y.split(sizes), strict=True)
        share = [1 / len(sizes) if equal else size / sum(sizes) for size in sizes]
        return [
            lambda x=x, y=y, s=s: s * criterion(model(x), y)
            for (x, y), s in zip(each, share, strict=True)
        ]

    return run


def through(change: Callable[[Any], Any]) -> Odd:
    def run(model: nn.Module, criterion: Any, like: Tensor, seed: int) -> Any:
        x, y = batch(6, seed, like)
        return lambda: change(criterion(model(x), y))

    return run


def without_gradient(model: nn.Module, criterion: Any, like: Tensor, seed: int) -> Any:
    x, y = batch(6, seed, like)
    return torch.no_grad()(lambda: criterion(model(x), y))


def ignoring(model: nn.Module, criterion: Any, like: Tensor, seed: int) -> Any:
    x, y = batch(6, seed, like)
    weight = torch.tensor([1.0, 3.0, 0.0]).to(like)
    return lambda: F.cross_entropy(model(x), torch.where(x[:, 0] > 0, y, -100), weight)


ODD: dict[str, Odd] = {
    "plain": plainly(6),
    "one row": plainly(1),
    "no rows": plainly(0),
    "huge": plainly(6, 1e30),
    "tiny": plainly(6, 1e-30),
    "nan": plainly(6, math.nan),
    "inf": plainly(6, math.inf),
    "shares": shares(1, 5, 2),
    "equal shares of unequal batches": shares(1, 5, 2, equal=True),
    "an empty share": shares(0, 6),
    "wrong scale": through(lambda loss: 3 * loss),
    "negative": through(lambda loss: -loss),
    "zero": through(lambda loss: 0 * loss),
    "nan loss": through(lambda loss: loss * math.nan),
    "huge loss": through(lambda loss: loss * 1e30),
    "no tensor": through(float),
    "no graph": through(torch.detach),
    "integers": through(lambda loss: loss.detach().long()),
    "complex": through(lambda loss: loss * 1j),
    "several": through(lambda loss: loss.expand(2)),
    "squared": through(torch.square),
    "weights": ignoring,
    "no gradient": without_gradient,
    "no model": lambda model, *_: lambda: torch.ones((), requires_grad=True),
}

NAMES = re.compile(
    "|".join([*GIVEN, "TrustRegion", "Preconditioner", "loss", "closure", "model", "param", "skip"])
    + "|does not require grad|grad can be implicitly created"
    + "|soframe|LazyLinear|LevenbergMarquardt|AdaptiveDamping|damping|nothing to precondition"
    + "|more than 1 value per channel|takes no arguments"
)
"""What a message has to have one of; the last two are of what the user gave."""


def finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(
    model=st.sampled_from([*["deep"] * 6, *MODELS]),
    loss=LOSSES,
    given_names=st.lists(st.sampled_from(sorted(GIVEN)), max_size=5, unique=True),
    steps=st.lists(st.sampled_from([*["plain"] * 8, *ODD]), min_size=1, max_size=5),
    data=st.data(),
)
@settings(
    max_examples=CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_it_works_or_says_by_name_what_is_wrong(
    model: str, loss: Any, given_names: list[str], steps: list[str], data: Any
) -> None:
    torch.manual_seed(0)
    net = MODELS[model]()
    chosen = {name: data.draw(GIVEN[name], label=name) for name in given_names}
    problem = ""
    try:
        own = soframe.TrustRegion(net, loss, **grouped(chosen))
    except (ValueError, TypeError) as error:
        problem = str(error)
    except ZeroDivisionError:  # a callable's own error is passed on
        problem = "damping" if callable(chosen.get("damping")) else "divided by zero"
    if problem:
        assert NAMES.search(problem), problem
        return
    like = next(net.parameters())
    for number, step in enumerate(steps):
        before = [p.detach().clone() for p in net.parameters()]
        problem = ""
        try:
            result = own.step(ODD[step](net, right(loss), like, number))
        except (ValueError, TypeError, RuntimeError) as error:
            problem = str(error)
        if problem:
            assert NAMES.search(problem), problem
            assert all(map(torch.equal, before, net.parameters())), step
        else:
            assert result.dim() == 0
        assert finite(net), step
    own.close()
