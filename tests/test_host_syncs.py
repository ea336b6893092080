"""Between solves the host waits for the device at a known number of places."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from soframe.solvers import Eigen
from tests.curvature import closing, fill, preconditioner, randn

WAITING = {"__bool__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal", "item"}
WAITING |= {"nonzero", "numpy", "tolist"}


class Waits(TorchFunctionMode):
    """Counts the calls that wait for the device, where there is one."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.calls[name] += name in WAITING or (name == "to" and args[1:2] == ("cpu",))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "eigen"},
        {"solver": "inverse", "norm_clip": 1.0, "kl_clip": None},
        {"solver": Eigen(follows=True), "damping": "relative"},
        {"solver": "newton-schulz", "stagger": True},
        {"solver": "orthogonal-iteration", "damping": lambda step: 0.0},
    ],
    ids=lambda options: str(options["solver"]),
)
def test_steps_between_solves(options: dict[str, Any]) -> None:
    """Once for gradients and statistics, and for the results where no damping keeps them in range.

    What ranks agree on is waited for where there are several.
    """
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Conv1d(1, 2, 2), nn.Flatten()))
    options = {"kl_clip": 1e-3, "lr": 0.1, "statistics_every": 2, "solve_every": 6, **options}
    with closing(preconditioner(model, **options)) as own:
        for step in range(6):
            model.zero_grad()
            model(randn(5, 1, 3, seed=step)).square().mean().backward()
            with Waits() as waits:
                own.step()
            if step > (1 if "stagger" in options else 0):  # two blocks have had their turns then
                calls = {name: count for name, count in waits.calls.items() if count}
                damping = options.get("damping")
                # What such a damping gives is looked at, together.
                undamped = callable(damping) or damping == "relative"
                assert calls == {"tolist": 1, **({"__bool__": 1} if undamped else {})}, step


def test_what_waits_is_counted() -> None:
    with Waits() as waits:
        one = torch.ones(2)
        float(one[0]), bool(one[0]), one.tolist(), one.to("cpu"), one.to(one.device), one[0].item()
    counted = {name for name, count in waits.calls.items() if count}
    assert counted >= {"__float__", "__bool__", "tolist", "to", "item"}
