"""Adam by torch's kernel beside its twin: the update of the method, then the move of weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.step import fused_adam
from tests import kit
from tests.curvature import randn
from tests.distributed.harness import run_ranks


class Parts(nn.Module):
    """A table, a convolution, a norm, and layers with and without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.plain = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.conv(self.table(tokens).mT).mT
        out: Tensor = self.head(self.plain(self.norm(rows)).tanh())
        return out


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(7, (5, 6), generator=generator)
    out: Tensor = model(tokens)
    return (out - randn(*out.shape, seed=step)).square().mean()


def train(monkeypatch: pytest.MonkeyPatch, fused: bool, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Parts().double()
    own = soframe.Optimizer(model, settings.pop("method", "adamw"), **settings)
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(fused_adam, "serves", lambda stack, backend: False)
        kit.train(model, loss_of, range(5), own)
        assert bool(own.preconditioner.curvature.averaged_gradients.left_to_optimizer) == fused
    return dict(model.state_dict())


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.01},
    "decay": {"lr": 0.01, "weight_decay": 0.3},
    "decay of vectors": {"lr": 0.01, "weight_decay": 0.3, "decay_vectors": True},
    "auxiliary": {"method": "muon", "lr": 0.02, "auxiliary_lr": 0.01, "weight_decay": 0.1},
    "betas": {"method": soframe.methods.AdamW(betas=(0.5, 0.7), eps=1e-3), "lr": 0.01},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernel_equals_its_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[name]
    plain = train(monkeypatch, fused=False, **settings)
    fused = train(monkeypatch, fused=True, **settings)
    for key, weight in plain.items():
        torch.testing.assert_close(fused[key], weight, rtol=1e-11, atol=1e-13)


def test_gradients_stay_what_they_are() -> None:
    """As in torch's optimizers: they are neither gathered nor overwritten."""
    model = Parts()
    own = soframe.Optimizer(model, "adamw", lr=0.01)
    loss_of(model.double(), 0).backward()
    own = soframe.Optimizer(model, "adamw", lr=0.01)
    before = [p.grad.clone() for p in model.parameters()]
    own.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_groups_have_rates_and_betas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Parts().double()
        first = [*model.table.parameters(), *model.conv.parameters()]
        rest = [p for p in model.parameters() if all(p is not q for q in first)]
        groups = [{"params": first, "lr": 0.03, "betas": (0.5, 0.9)}, {"params": rest}]
        own = soframe.Optimizer(model, "adamw", lr=0.01, param_groups=groups)
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(fused_adam, "serves", lambda stack, backend: False)
            kit.train(model, loss_of, range(2), own)
            own.param_groups[0]["lr"] = 0.005
            kit.train(model, loss_of, range(2, 4), own)
        weights.append(model.state_dict())
    for key, weight in weights[0].items():
        torch.testing.assert_close(weights[1][key], weight, rtol=1e-11, atol=1e-13)


def test_parameters_may_change_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Parts().double()
        first = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in first)]
        groups = [{"params": rest, "lr": 0.03}, {"params": first}]
        own = soframe.Optimizer(model, "adamw", lr=0.01, param_groups=groups)
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(fused_adam, "serves", lambda stack, backend: False)
            kit.train(model, loss_of, range(2), own)
            moved = own.param_groups[0]["params"].pop()
            own.param_groups[1]["params"].append(moved)
            kit.train(model, loss_of, range(2, 4), own)
        ends.append(model.state_dict())
    for key, weight in ends[0].items():
        torch.testing.assert_close(ends[1][key], weight, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("change", ["cautious", "frozen", "missing", "norms", "memory"])
def test_steps_that_the_kernel_cannot_take_are_the_twins(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns with the kernel: states are shared by both."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Parts().double()
        own = soframe.Optimizer(model, "adamw", lr=0.01, weight_decay=0.1)
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(fused_adam, "serves", lambda stack, backend: False)
            kit.train(model, loss_of, range(2), own)
            if change == "cautious":
                own.param_groups[0]["weight_decay_kind"] = "cautious"
            if change == "norms":
                own.preconditioner.measure(norms=True)
            model.zero_grad()
            loss_of(model, 2).backward()
            if change == "frozen":
                model.head.bias.requires_grad_(False)
            if change == "missing":
                model.head.bias.grad = None
            if change == "memory":  # as by .to(memory_format=...), with the gradient as it was
                model.plain.weight.data = model.plain.weight.detach().mT.contiguous().mT
            own.step()
            assert not own.preconditioner.curvature.averaged_gradients.left_to_optimizer
            model.head.bias.requires_grad_(True)
            model.plain.weight.data = model.plain.weight.detach().contiguous()
            own.param_groups[0]["weight_decay_kind"] = "decoupled"
            own.preconditioner.measure(norms=False)
            kit.train(model, loss_of, range(3, 5), own)
        ends.append(copy.deepcopy(model.state_dict()))
    for key, weight in ends[0].items():
        torch.testing.assert_close(ends[1][key], weight, rtol=1e-11, atol=1e-13)


def test_a_bad_batch_changes_nothing() -> None:
    model = Parts().double()
    own = soframe.Optimizer(model, "adamw", lr=0.01)
    kit.train(model, loss_of, range(2), own)
    before = copy.deepcopy(model.state_dict())
    states = {b.name: {k: t.clone() for k, t in b.state.items()} for b in own.preconditioner.blocks}
    model.zero_grad()
    (loss_of(model, 2) * torch.nan).backward()
    own.step()
    assert own.preconditioner.counters["skipped_updates"] == 1
    for block in own.preconditioner.blocks:
        assert block.record.updates == 2
        assert all(torch.equal(block.state[k], t) for k, t in states[block.name].items())
    assert all(torch.equal(model.state_dict()[k], w) for k, w in before.items())


def test_a_flag_of_the_device_selects() -> None:
    """What a GPU finds bad leaves weights and moments; the host counts the update a step later."""
    model = Parts().double()
    own = soframe.Optimizer(model, "adamw", lr=0.01)
    kit.train(model, loss_of, range(2), own)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 2).backward()
    (stack,) = own.preconditioner.curvature.averaged_gradients.left_to_optimizer
    adam = fused_adam.Adam(stack)
    adam.move(own._group_of, own._moves, torch.tensor(1.0))
    assert all(torch.equal(model.state_dict()[k], w) for k, w in before.items())
    adam.move(own._group_of, own._moves, torch.tensor(0.0))
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


def test_a_state_that_was_loaded_is_not_written_by_later_steps() -> None:
    model = nn.Linear(3, 2)  # a stack of one block keeps the tensors that it is given
    own = soframe.Optimizer(model, "adamw", lr=0.01)

    def loss(net: nn.Module, step: int) -> Tensor:
        out: Tensor = net(torch.full((4, 3), 1.0 + step)).square().mean()
        return out

    kit.train(model, loss, range(2), own)
    state = own.preconditioner.state_dict()
    kept = copy.deepcopy(state["blocks"])
    own.preconditioner.load_state_dict(state)
    kit.train(model, loss, range(2), own)
    for name, block in kept.items():
        for key, tensor in block["state"].items():
            assert torch.equal(state["blocks"][name]["state"][key], tensor)


def on_ranks(rank: int, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Parts().double()
    local = soframe.Distribution(gradients="local")
    own = soframe.Optimizer(model, "adamw", lr=0.01, distribution=local)
    for step in range(4):
        own.zero_grad()
        loss_of(model, ranks * step + rank).backward()
        own.step()
        # Each rank has gradients of its own samples.
        assert not own.preconditioner.curvature.averaged_gradients.left_to_optimizer
    return dict(model.state_dict())


@pytest.mark.distributed
def test_local_gradients_are_averaged_before_they_move_weights() -> None:
    torch.manual_seed(0)
    model = Parts().double()
    own = soframe.Optimizer(model, "adamw", lr=0.01)

    def of_both(net: nn.Module, step: int) -> Tensor:
        return (loss_of(net, 2 * step) + loss_of(net, 2 * step + 1)) / 2

    kit.train(model, of_both, range(4), own)
    for found in run_ranks(on_ranks, 2):
        for key, weight in model.state_dict().items():
            torch.testing.assert_close(found[key], weight, rtol=1e-10, atol=1e-12)


ENDS = {"kernel": 3, "resumed": 6}
"""The step after which the state is saved, and the last."""


def averaged(rank: int, ranks: int, steps: range, folder: Path) -> dict[str, Tensor]:
    """Train with micro-batches, eight in all, and gradients that are averaged over ranks."""
    torch.manual_seed(0)
    model = Parts().double()
    own = soframe.Optimizer(model, "adamw", lr=0.01, weight_decay=0.1)
    if steps.start:
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        own.load_state_dict(state["own"])
    for step in steps:
        own.zero_grad()
        for number in range(rank, 8, ranks):
            (loss_of(model, 8 * step + number) * ranks / 8).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        own.step()
        assert own.preconditioner.curvature.averaged_gradients.left_to_optimizer
    state = {"model": model.state_dict(), "own": own.state_dict()}
    if rank == 0 and not steps.start:
        torch.save(state, folder / "state.pt")
    own.close()
    return dict(model.state_dict())


@pytest.mark.distributed
@pytest.mark.slow
def test_four_ranks_are_one_process_and_two_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Parts().double()
    twin = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    expected: list[dict[str, Tensor]] = []
    for step in range(ENDS["resumed"]):
        twin.zero_grad()
        for number in range(8):
            (loss_of(model, 8 * step + number) / 8).backward()
        twin.step()
        expected.append(copy.deepcopy(model.state_dict()))
    first, last = range(ENDS["kernel"]), range(ENDS["kernel"], ENDS["resumed"])
    for ranks, steps in ((4, first), (2, last)):
        for found in run_ranks(averaged, ranks, steps, tmp_path):
            for key, weight in expected[steps.stop - 1].items():
                torch.testing.assert_close(found[key], weight, rtol=1e-9, atol=1e-11)
