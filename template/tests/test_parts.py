"""soframe's checks of each part; names come from the entry points of the installed package."""

import torch
from torch import nn

import soframe
from soframe.citations import cite
from soframe.testing import check_layer_helper, check_method, check_strategy


def test_names_are_available() -> None:
    assert "sign-momentum" in soframe.available("method")
    assert "first-rank" in soframe.available("strategy")
    helpers = {helper.__name__ for helper in soframe.available("layer").values()}
    assert "ScaleHelper" in helpers
    assert "bernstein2018signsgd" in cite("sign-momentum")


def test_layer_helper() -> None:
    from soframe_plugin import Scale

    check_layer_helper(Scale(3), torch.randn(6, 3))


def test_method() -> None:
    check_method("sign-momentum", ranks=())  # ranks=(2, 4) starts processes


def test_strategy() -> None:
    from soframe_plugin import FirstRank

    check_strategy(FirstRank(), world_sizes=[1, 2, 4])


def test_all_together() -> None:
    from soframe_plugin import Scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), Scale(3))
    optimizer = soframe.Optimizer(model, "sign-momentum", strategy="first-rank", lr=0.01)
    x = torch.randn(8, 4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
