"""Recurrent cells: the blocks of two linear layers, written out; and layers with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from soframe.testing import check_layer_helper, compare
from tests import kit
from tests.curvature import blocks, closing, factors, fill, log_cosh, preconditioner, randn

CELLS: dict[str, Any] = {
    "LSTM": lambda **options: nn.LSTMCell(3, 4, **options),
    "GRU": lambda **options: nn.GRUCell(3, 4, **options),
    "RNN": lambda **options: nn.RNNCell(3, 4, **options),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_rows_are_those_of_autograd(cell: str, bias: bool) -> None:
    state: Any = randn(5, 4)
    settings = {"hx": (state, randn(5, 4, seed=1)) if cell == "LSTM" else state}
    check_layer_helper(fill(CELLS[cell](bias=bias)), randn(5, 3, seed=2), settings=settings)


class Unrolled(nn.Module):
    """A cell over a sequence, then a head."""

    def __init__(self, cell: nn.Module, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            if self.checkpointed:
                state = checkpoint(self.cell, step, state, use_reentrant=False)
            else:
                state = self.cell(step, hx=state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class WrittenOut(nn.Module):
    """A GRU cell of two linear layers."""

    def __init__(self, cell: nn.GRUCell) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(3, 12).double(), nn.Linear(4, 12).double()
        with torch.no_grad():
            for linear, part in ((self.ih, "ih"), (self.hh, "hh")):
                linear.weight.copy_(cell.get_parameter(f"weight_{part}"))
                linear.bias.copy_(cell.get_parameter(f"bias_{part}"))

    def forward(self, x: Tensor, hx: Tensor | None) -> Tensor:
        state = x.new_zeros(len(x), 4) if hx is None else hx
        (r, z, n), (hr, hz, hn) = self.ih(x).chunk(3, 1), self.hh(state).chunk(3, 1)
        r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
        return (1 - z) * (n + r * hn).tanh() + z * state


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_a_cell_is_its_two_linear_layers(method: str, checkpointed: bool) -> None:
    """Over steps, of which each is a call."""
    x, y, found = randn(5, 3, 3), randn(5, 2), []
    for written_out in (False, True):
        model = fill(Unrolled(nn.GRUCell(3, 4), checkpointed=checkpointed and not written_out))
        if written_out:
            model.cell = WrittenOut(model.cell)
        with closing(preconditioner(model, layers="all", method=method, solve_every=2)) as own:
            kit.train(model, lambda net, _: log_cosh(net(x), y), range(2), own)
            names = ["cell.ih", "cell.hh"] if written_out else ["cell.weight_ih", "cell.weight_hh"]
            assert set(blocks(own)) == {*names, "head"}
            each = [blocks(own)[name].running for name in names]
        gradients = {key.replace(".weight_", "."): p for key, p in model.named_parameters()}
        found.append((each, gradients))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        for name, factor in one.items():
            compare(factor, other[name], name)
    for part in ("ih", "hh"):
        one, other = found[0][1][f"cell.{part}"].grad, found[1][1][f"cell.{part}.weight"].grad
        compare(one, other, part)


def test_a_cell_of_one_step_has_the_factors_of_its_input() -> None:
    model, x = fill(Unrolled(nn.LSTMCell(3, 4))), randn(5, 1, 3)
    with closing(preconditioner(model, layers="all")) as own:
        log_cosh(model(x), randn(5, 2)).backward()
        own.step()
        a, _ = factors(own, "cell.weight_ih")
        state, _ = factors(own, "cell.weight_hh")
    rows = torch.cat([x[:, 0], torch.ones(5, 1, dtype=x.dtype)], 1)
    compare(a[0], rows.T @ rows / 5, "A of the input")
    assert state[0].count_nonzero() == 1  # the state begins with zeros, the bias sees ones


def test_without_gradients_nothing_is_looked_for() -> None:
    model = fill(Unrolled(nn.LSTMCell(3, 4)))
    with closing(preconditioner(model, layers="all")):
        with torch.no_grad():
            model(randn(5, 2, 3))
        assert model(randn(5, 2, 3)).requires_grad


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_whole_layers_have_a_reason_with_a_remedy(kind: Any) -> None:
    model = nn.ModuleDict({"recurrent": kind(3, 4), "head": nn.Linear(4, 2)})
    with closing(preconditioner(model, layers="all")) as own:
        reason = {row.parameter: row.reason for row in own.report()}["recurrent.weight_ih_l0"]
    assert f"nn.{kind.__name__}Cell" in reason
    remedy = {"^recurrent$": "soap", "": "kfac"}
    with closing(preconditioner(model, method=remedy)) as own:
        assert all(row.block is not None for row in own.report())
