"""The calls that pages show for a reader's own model run, and train one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.docs.page import FENCE
from tests.docs.test_pages import ROOT

SHOWN = ("README.md", "docs/index.md", "docs/choose.md")


def shown(page: str) -> list[str]:
    """Return the code of the fences of a page that say `python notest`."""
    calls: list[str] = []
    code: list[str] | None = None
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if code is not None and fence:
            calls.append("\n".join(code))
            code = None
        elif code is not None:
            code.append(line)
        elif fence and fence["info"].split() == ["python", "notest"]:
            code = []
    return calls


class Net(nn.Module):
    """Small, with all that the calls name: a matrix in the middle, vectors, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.linspace(-1, 1, 64).view(16, 4)
    return nn.functional.mse_loss(model(inputs), inputs[:, :3].cos())


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in SHOWN for number in range(len(shown(page)))]
)
def test_the_call_trains(page: str, number: int) -> None:
    torch.manual_seed(0)
    model = Net()
    names: dict[str, Any] = {"soframe": soframe, "torch": torch, "model": model}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05)
    # A pass that begins when the call is made, behind the hooks of a preconditioner.
    names["loss"] = SimpleNamespace(backward=lambda: loss_of(model).backward())
    before = loss_of(model).item()
    exec(shown(page)[number], names)
    optimizer, preconditioner = names["optimizer"], names.get("preconditioner")
    losses = []
    for _ in range(20):
        losses.append(loss_of(model).item())
        optimizer.zero_grad()
        if isinstance(optimizer, soframe.TrustRegion | soframe.StochasticTrustRegion):
            optimizer.step(lambda: loss_of(model))
            continue
        loss_of(model).backward()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
    assert min(losses) < 0.99 * before  # the pages' rates are for larger models
    for owner in (optimizer, preconditioner):
        if hasattr(owner, "close"):
            owner.close()


def test_pages_show_calls() -> None:
    assert [len(shown(page)) > 1 for page in SHOWN] == [True] * len(SHOWN)
