"""Weights that are computed of parameters have a reason; adapters are linear layers as any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import soframe
from soframe.testing import compare, dense_fisher
from tests import kit
from tests.curvature import blocks, closing, factors, fill, log_cosh, preconditioner, randn


class Adapted(nn.Module):
    """A frozen layer plus a product of two thin ones (LoRA: Hu et al., 2022)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.lora_B(self.lora_A(x))


def test_adapters_have_blocks_and_their_base_has_none() -> None:
    model = fill(nn.Sequential(Adapted(nn.Linear(4, 3)), nn.Tanh(), Adapted(nn.Linear(3, 2))))
    x, y = randn(1, 4), randn(1, 2)
    with closing(preconditioner(model)) as own:
        names = {f"{layer}.lora_{part}" for layer in "02" for part in "AB"}
        assert set(blocks(own)) == names
        reasons = {row.parameter: row.reason for row in own.report()}
        assert reasons["0.base.weight"] == "frozen"
        log_cosh(model(x), y).backward()
        own.step()
        for name in names:
            ((a,), (g,)) = factors(own, name)
            parameters = [f"{name}.weight"]
            dense = dense_fisher(model, x, log_cosh, y, parameters=parameters, kind="empirical")
            compare(torch.kron(g, a), dense, name)


def adapted_by_peft() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    return peft.get_peft_model(layers, config, autocast_adapter_dtype=False).double()


def test_adapters_of_peft_are_those_of_the_dense_fisher_and_may_be_merged_in_between() -> None:
    model = adapted_by_peft()
    x, y = randn(1, 4), randn(1, 3)
    with closing(preconditioner(model)) as own:
        names = list(blocks(own))
        assert {name.split(".")[-2] for name in names} == {"lora_A", "lora_B"}
        model.merge_adapter()
        with torch.no_grad():
            model(x)
        model.unmerge_adapter()
        log_cosh(model(x), y).backward()
        own.step()
        for name in names:
            ((a,), (g,)) = factors(own, name)
            parameters = [f"{name}.weight"]
            dense = dense_fisher(model, x, log_cosh, y, parameters=parameters, kind="empirical")
            compare(torch.kron(g, a), dense, name)


def test_an_adapter_that_peft_adds_later_is_trained_alone() -> None:
    model = adapted_by_peft()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.1, statistics_every=1)
    model.add_adapter("later", model.peft_config["default"])
    model.double().set_adapter("later")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kit.train(model, lambda net, _: log_cosh(net(randn(5, 4)), randn(5, 3)), range(2), optimizer)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {name.rpartition(".lora_")[2] for name in moved} == {"A.later.weight", "B.later.weight"}
    rows = {row.parameter: row for row in optimizer.report()}
    assert {rows[name].method for name in moved} == {"kfac / inverse"}


class Symmetric(nn.Module):
    """A parametrisation without parameters of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def symmetric() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


MADE: dict[str, Any] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "weight norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        parametrizations.weight_norm(nn.Conv1d(1, 1, 3, padding=1), dim=2),
        nn.Flatten(),
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "one's own": symmetric,
}


@pytest.mark.parametrize("case", MADE)
def test_computed_weights_have_a_reason_and_are_left_as_they_are(case: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MADE[case](), nn.Tanh(), nn.Linear(3, 2))
    with closing(preconditioner(model, layers="all")) as own:
        assert set(blocks(own)) == {"2"}
        reasons = [row.reason for row in own.report() if row.block is None]
        assert all("computed" in reason for reason in reasons)
        assert any("'soap', takes it" in reason for reason in reasons)
        model(torch.randn(5, 3)).square().mean().backward()
        before = {name: p.grad.clone() for name, p in model[0].named_parameters()}
        own.step()
        assert all(torch.equal(p.grad, before[name]) for name, p in model[0].named_parameters())


@pytest.mark.parametrize("method", ["soap", "muon"])
@pytest.mark.parametrize("case", MADE)
def test_methods_of_gradients_take_what_weights_are_computed_of(case: str, method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MADE[case](), nn.Tanh(), nn.Linear(3, 2))
    optimizer = soframe.Optimizer(model, method=method, lr=0.01)
    assert all(row.block is not None for row in optimizer.report())
    for _ in range(2):  # of SOAP the first step makes the basis
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        graded = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved >= graded
    assert any(name.startswith("0.") for name in moved)
    optimizer.close()
