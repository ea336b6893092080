"""The optimizer that owns the step: its groups, its steps, its states, and what it refuses."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import checkpoint
from soframe.methods import SOAP, AdamW
from soframe.settings import grouped
from soframe.step import fused_adam
from tests import kit
from tests.distributed.harness import run_ranks

SETTINGS: dict[str, Any] = {"lr": 0.02, "auxiliary_lr": 3e-3, "weight_decay": 0.1}


class Text(nn.Module):
    """An embedding tied to the head, a norm, and layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(self.embedding(tokens))).tanh()
        return self.head(hidden)


def text() -> Text:
    torch.manual_seed(0)
    return Text().double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 7, (6, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def backward(model: nn.Module, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss


def test_every_parameter_is_of_one_of_two_methods() -> None:
    model = text()
    optimizer = soframe.Optimizer(model, "soap-muon", **SETTINGS)
    rows = {row.parameter: row for row in optimizer.report()}
    assert set(rows) == {name for name, _ in model.named_parameters()}
    auxiliary = {name for name, row in rows.items() if row.method == "adamw"}
    assert auxiliary == set(rows) - {"hidden.weight"}
    assert "embedding" in rows["embedding.weight"].note
    assert "vector" in rows["norm.weight"].note
    main, other = optimizer.param_groups
    assert (main["lr"], other["lr"]) == (0.02, 3e-3) or (main["lr"], other["lr"]) == (3e-3, 0.02)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len({id(p) for p in grouped})


def test_methods_by_patterns_have_groups_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    methods = {"^0$": "muon", "^2$": SOAP()}
    optimizer = soframe.Optimizer(model, methods, lr=0.1, auxiliary=AdamW(eps=1e-6))
    methods_of = [group["method"] for group in optimizer.param_groups]
    assert sorted(methods_of) == ["auxiliary: adamw", "muon", "soap"]
    reasons = {row.parameter: row.note for row in optimizer.report()}
    assert "no pattern of method= matches" in reasons["3.weight"]


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_alone_adamw_is_torchs(decay_vectors: bool) -> None:
    ours, theirs = text(), text()
    settings = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = soframe.Optimizer(ours, "adamw", decay_vectors=decay_vectors, **settings)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1]},
        {
            "params": [p for p in theirs.parameters() if p.dim() == 1],
            "weight_decay": 0.1 * decay_vectors,
        },
    ]
    reference = torch.optim.AdamW(groups, **settings)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 8) for o in (optimizer, reference)]
    for model, one, scheduler in zip(
        (ours, theirs), (optimizer, reference), schedulers, strict=True
    ):
        kit.train(model, loss_of, range(6), one, scheduler)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_a_closure_is_called_and_its_loss_returned() -> None:
    model = text()
    optimizer = soframe.Optimizer(model, **SETTINGS)
    before = copy.deepcopy(model.state_dict())

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert float(loss.detach()) > 0
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("method", ["soap-muon", "ekfac", "shampoo"])
def test_a_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    settings = {**SETTINGS, "statistics_every": 1, "solve_every": 2}
    model = text()
    optimizer = soframe.Optimizer(model, method, **grouped(settings))
    kit.train(model, loss_of, range(4), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    kit.train(model, loss_of, range(4, 7), optimizer)
    again = text()
    again.load_state_dict(saved[0])
    other = soframe.Optimizer(again, method, **grouped({**settings, "lr": 5.0}))
    other.load_state_dict(saved[1])
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
    kit.train(again, loss_of, range(4, 7), other)
    for mine, own in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, own)


@pytest.mark.parametrize("sharded", [False, True])
def test_bases_are_a_methods_own_whatever_the_users_solver_is(
    sharded: bool, tmp_path: Path
) -> None:
    """What SOAP keeps is in its bases, which no solver of the user's has made."""
    # A layer of K-FAC, which the solver is for, does not move.
    settings = {"auxiliary": "soap", "lr": 0.0, "auxiliary_lr": 0.02, "solve_every": 3}
    model = text()
    optimizer = soframe.Optimizer(model, {"^hidden$": "kfac"}, solver="eigen", **grouped(settings))
    kit.train(model, loss_of, range(4), optimizer)
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    part = checkpoint.part(optimizer.preconditioner)
    checkpoint.save(tmp_path, {"preconditioner": part}, sharded=True)
    kit.train(model, loss_of, range(4, 8), optimizer)
    again = text()
    again.load_state_dict(weights)
    different: dict[str, Any] = {"solver": "inverse", "damping": "relative"}
    other = soframe.Optimizer(again, {"^hidden$": "kfac"}, **grouped({**different, **settings}))
    if sharded:
        checkpoint.load(other.preconditioner, checkpoint.latest(tmp_path))
    else:
        other.load_state_dict(saved)
    kit.train(again, loss_of, range(4, 8), other)
    for mine, own in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, own)


def late(frozen: bool) -> tuple[nn.Sequential, soframe.Optimizer]:
    """A model of two groups of one size each; the first comes last if it is thawed later."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))
    model = nn.Sequential(*layers).double()
    model[0].requires_grad_(not frozen)
    methods = {"2": "ekfac", "": "kfac"}
    settings = {"kl_clip": 1e-9, "statistics_every": 1, "solve_every": 2}
    return model, soframe.Optimizer(model, methods, lr=0.02, **grouped(settings))


def scheduled(optimizer: soframe.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 0.5**step]
    )


def of_unit_rows(model: nn.Module, _: int) -> Tensor:
    return model(torch.eye(5).double()).square().sum(-1).mean()


@pytest.mark.filterwarnings("ignore:soframe. moments and statistics of 0 are not loaded")
@pytest.mark.parametrize("freezes", ["not", "before it is built", "afterwards"])
def test_a_run_is_resumed_whose_groups_came_in_another_order(freezes: str) -> None:
    """What is frozen before an optimizer is built begins anew at its thaw, in its group."""
    frozen_again = freezes != "not"
    model, optimizer = late(frozen=True)
    kit.train(model, of_unit_rows, range(1), optimizer)
    model[0].requires_grad_(True)
    kit.train(model, of_unit_rows, range(1), optimizer)
    schedule = scheduled(optimizer)
    model[0].requires_grad_(not frozen_again)
    for _ in range(2):
        kit.train(model, of_unit_rows, range(1), optimizer)
        schedule.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    again, other = late(frozen=freezes == "before it is built")
    again[0].requires_grad_(not frozen_again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed = scheduled(other)
    resumed.load_state_dict(saved[2])
    for group, rate in zip(other.param_groups, resumed.get_last_lr(), strict=True):
        group["lr"] = rate  # which a scheduler that is made sets to the first one
    for step in range(4):
        for one in (model, again):
            one[0].requires_grad_(not frozen_again or step > 1)
        kit.train(model, of_unit_rows, range(1), optimizer)
        kit.train(again, of_unit_rows, range(1), other)
        schedule.step()
        resumed.step()
        for name in ("method", "lr", "initial_lr"):
            expected = [group[name] for group in optimizer.param_groups]
            assert [group[name] for group in other.param_groups] == expected
        begins_anew = freezes == "before it is built" and step > 1
        for mine, own in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, own) != begins_anew


def test_a_group_that_a_state_lacks_has_no_place_in_its_order() -> None:
    model, optimizer = late(frozen=False)
    model[0].requires_grad_(False)
    kit.train(model, of_unit_rows, range(1), optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    again, other = late(frozen=True)
    kit.train(again, of_unit_rows, range(1), other)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    (group,) = optimizer.param_groups
    assert group["params"] == [model[2].weight]
    model[0].requires_grad_(True)
    kit.train(model, of_unit_rows, range(1), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.02]


@pytest.mark.parametrize("how", ["torch", "by hand", "no schedule"])
def test_a_group_that_begins_beside_a_schedule_is_warned_of_once(how: str) -> None:
    model, optimizer = late(frozen=True)
    schedule = None
    if how == "torch":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if how == "by hand":
        optimizer.param_groups[0]["lr"] = 0.01
    kit.train(model, of_unit_rows, range(1), optimizer)
    if schedule is not None:
        schedule.step()
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            kit.train(model, of_unit_rows, range(1), optimizer)
    assert not torch.equal(model[0].weight, before)
    assert len(seen) == (how != "no schedule")
    for one in seen:
        assert "kfac at lr=" in str(one.message)
        assert "at lr=0.02." in str(one.message)
        assert one.filename == kit.__file__  # where the step is called


def test_a_group_that_was_there_follows_a_schedule_while_it_is_frozen() -> None:
    model, optimizer = late(frozen=False)
    schedule = scheduled(optimizer)
    model[0].requires_grad_(False)
    for step in range(4):
        model[0].requires_grad_(step >= 2)
        kit.train(model, of_unit_rows, range(1), optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        schedule.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.02 * 0.9**4, 0.02 * 0.5**4])


def test_states_of_others_are_refused_and_change_nothing() -> None:
    model = text()
    optimizer = soframe.Optimizer(model, "muon", **SETTINGS)
    with pytest.raises(ValueError, match="not the state of a soframe"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    other = text()
    foreign = soframe.Optimizer(other, "soap", **SETTINGS).state_dict()
    with pytest.raises(ValueError, match="was made by SOAP"):
        optimizer.load_state_dict(foreign)
    kit.train(model, loss_of, range(2), optimizer)


@pytest.mark.parametrize(
    "method", ["kfac", "soap", "muon", "soap-normuon", "shampoo", "adamw", "sgd"]
)
@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_gradients_stay(method: str, *, bad: bool) -> None:
    """As in torch.optim: a second backward pass adds to them, and clips see gradients."""
    model = text()
    optimizer = soframe.Optimizer(model, method, lr=0.02)
    kit.train(model, loss_of, range(2), optimizer)
    backward(model, 2)
    if bad:
        model.norm.weight.grad[0] = float("nan")
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]) == bad, name


def test_a_bad_batch_moves_nothing() -> None:
    model = text()
    optimizer = soframe.Optimizer(model, "soap-muon", **SETTINGS)
    kit.train(model, loss_of, range(3), optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.preconditioner.state_dict()["blocks"]))
    optimizer.zero_grad()
    backward(model, 3)
    model.norm.weight.grad[0] = float("nan")
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name])  # nor does weight decay
    for name, block in optimizer.preconditioner.state_dict()["blocks"].items():
        for key, tensor in block["state"].items():
            assert torch.equal(tensor, before[1][name]["state"][key])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lr": -1.0}, "lr must be finite in float32 and not negative"),
        ({"auxiliary_lr": 1e300}, "auxiliary_lr must be finite in float32"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite"),
        ({"auxiliary": None}, "auxiliary= names the method"),
        ({"auxiliary": "kfac"}, "auxiliary='kfac' reads calls"),
        ({"optimizer": None}, "optimizer= is this optimizer's own"),
        ({"betas": (0.9, 0.95)}, "no setting 'betas'.*given to the method: method="),
        (
            {"fisher": "type-2", "loss": "cross-entropy", "method": "muon"},
            "no block's method reads",
        ),
        ({"solve_evry": 3}, "Optimizer has no setting 'solve_evry'; did you mean 'solve_every'"),
        ({"weight_dacay": 0.1}, "did you mean 'weight_decay'.* The settings are auxiliary, "),
        ({"method": "no-such"}, "no method 'no-such'"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        soframe.Optimizer(text(), **grouped({"lr": 0.1, **settings}))


def test_a_model_with_nothing_to_train_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"no trainable parameter: .* thaw a part"):
        soframe.Optimizer(text().requires_grad_(False), "adamw", lr=0.1)


@pytest.mark.parametrize("method", ["soap-muon", "adamw", "ekfac"])
def test_parameters_may_be_frozen_and_thawed(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].weight.requires_grad_(False)
    optimizer = soframe.Optimizer(model, method, lr=0.01, statistics_every=1, solve_every=2)
    optimizer.param_groups[0]["lr"] = 0.02  # as a scheduler does

    def step() -> dict[str, bool]:
        before = copy.deepcopy(model.state_dict())
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        kit.train(model, lambda net, _: net(x).square().mean(), range(1), optimizer)
        return {k: not torch.equal(before[k], v) for k, v in model.state_dict().items()}

    for _ in range(3):
        moved = step()
    assert [name for name, has in moved.items() if not has] == ["2.weight"]
    main = optimizer.param_groups[0]["method"]
    updates = {block.name: block.record.updates for block in optimizer.preconditioner.blocks}
    model[2].weight.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    step()
    moved = step()
    assert [name for name, has in moved.items() if not has] == ["0.weight"]
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    first = optimizer.param_groups[0]
    assert (first["method"], first["lr"]) == (main, 0.02)
    untouched = [b for b in optimizer.preconditioner.blocks if b.name.startswith("3")]
    assert untouched
    for block in untouched:  # its state has gone on
        assert block.record.updates == updates[block.name] + 2


def alternate(model: nn.Module, step: int) -> Tensor:
    """Train the first layer in even steps and the last in odd ones; return the loss."""
    model[0].requires_grad_(step % 2 == 0)
    model[2].requires_grad_(step % 2 == 1)
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, 5, generator=generator, dtype=torch.float64)).square().mean()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_parts_that_are_frozen_in_turn_have_the_moments_of_torchs_adamw() -> None:
    model, twin = small(), small()
    optimizer = soframe.Optimizer(model, "adamw", lr=0.01, weight_decay=0.1, decay_vectors=True)
    torchs = torch.optim.AdamW(twin.parameters(), 0.01, weight_decay=0.1)
    got = kit.train(model, alternate, range(20), optimizer)
    torch.testing.assert_close(got, kit.train(twin, alternate, range(20), torchs))
    rows = {row.parameter: row.note for row in optimizer.report()}
    assert {name for name, note in rows.items() if "frozen" in note} == {"0.weight", "0.bias"}


def in_turn(rank: int, ranks: int) -> list[Tensor]:
    found = []
    for strategy in ("comm-opt", "sharded"):
        model = small()
        optimizer = soframe.Optimizer(model, "adamw", lr=0.01, strategy=strategy)
        found.append(kit.train(model, alternate, range(9), kit.Averaging(model), optimizer))
        optimizer.close()
    return found


@pytest.mark.distributed
def test_ranks_keep_the_moments_of_parts_that_are_frozen_in_turn() -> None:
    twin = small()
    torchs = torch.optim.AdamW(twin.parameters(), 0.01, weight_decay=0.0)
    expected = kit.train(twin, alternate, range(9), torchs)
    for found in run_ranks(in_turn, 2):
        for weights in found:
            torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("method", ["momentum", "shampoo", "soap", "muon"])
def test_parts_that_are_frozen_in_turn_are_of_one_optimizer_for_each(method: str) -> None:
    settings = {"lr": 0.01, "auxiliary_lr": 0.01, "solve_every": 1}
    model, twin = small(), small()
    optimizer = soframe.Optimizer(model, method, **settings)
    parts = []
    for step in (0, 1):
        alternate(twin, step)
        parts.append(soframe.Optimizer(twin, method, **settings))
    for step in range(8):
        kit.train(model, alternate, [step], optimizer)
        kit.train(twin, alternate, [step], parts[step % 2])
    for mine, own in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, own)


@pytest.mark.parametrize("frozen_at_last", [0, 1])
def test_a_run_with_parts_that_are_frozen_in_turn_is_resumed(frozen_at_last: int) -> None:
    """The state has the moments of frozen parts; a frozen part needs no param group."""
    model, again = small(), small()
    optimizer, other = (soframe.Optimizer(m, "adamw", lr=0.01) for m in (model, again))
    kit.train(model, alternate, range(5 + frozen_at_last), optimizer)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps = range(5 + frozen_at_last, 9)
    expected = kit.train(model, alternate, steps, optimizer)
    assert torch.equal(kit.train(again, alternate, steps, other), expected)
    for group in other.param_groups:
        frozen = [p for p in group["params"] if not p.requires_grad]
        group["params"] = [p for p in group["params"] if p.requires_grad]
    assert frozen
    before = frozen[0].detach().clone()
    again.zero_grad()
    alternate(again, steps[-1]).backward()
    other.step()
    assert torch.equal(frozen[0], before)


@pytest.mark.parametrize("frozen", [["2.bias", "2.weight"], ["2.bias"]])
def test_moments_of_parameters_that_are_frozen_at_construction_are_not_loaded(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is said: the thawed part would begin anew."""
    # Frozen parts keep a stack from torch's kernel, which rounds otherwise.
    monkeypatch.setattr(fused_adam, "serves", lambda stack, backend: False)
    model, again = small(), small()
    optimizer = soframe.Optimizer(model, "adamw", lr=0.01)
    expected = kit.train(model, alternate, range(5), optimizer)
    again.load_state_dict(model.state_dict())
    for name in frozen:
        again.get_parameter(name).requires_grad_(False)
    other = soframe.Optimizer(again, "adamw", lr=0.01)
    message = f"of {re.escape(', '.join(frozen))} are not.*freeze them afterwards"
    with pytest.warns(UserWarning, match=message):
        other.load_state_dict(optimizer.state_dict())
    expected = kit.train(model, alternate, [6], optimizer)
    assert torch.equal(kit.train(again, alternate, [6], other), expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("frozen", ["at once", "after backward()"])
def test_gradients_of_frozen_parameters_are_zeroed(frozen: str, set_to_none: bool) -> None:
    """Else the next gradient after the thaw would be added to what stayed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].bias.requires_grad_(frozen != "at once")
    optimizer = soframe.Optimizer(model, "muon", lr=0.1)
    if frozen == "at once":
        model[0].bias.grad = torch.ones(4)
    model(torch.ones(2, 4)).square().sum().backward()
    model[0].requires_grad_(False)
    optimizer.step()
    assert model[0].bias.grad is not None
    kept = {id(p.grad) for p in model.parameters()}
    optimizer.zero_grad(set_to_none)
    for parameter in model.parameters():
        if set_to_none:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))
            assert id(parameter.grad) in kept
    model[0].requires_grad_(True)
    model(torch.ones(2, 4)).square().sum().backward()
    expected = copy.deepcopy([p.grad for p in model.parameters()])
    model.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_groups_follow_blocks_that_a_step_made_before_it_raised() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    calls: list[int] = []

    def damping(step: int) -> float:
        """Raise when ranks agree once more, on the blocks that are new."""
        calls.append(step)
        if calls == [0, 1, 1]:
            raise OSError("the file of settings cannot be read")
        return 0.1

    methods = {"^2$": "kfac", "": "muon"}
    optimizer = soframe.Optimizer(model, methods, lr=0.1, auxiliary_lr=1e-3, damping=damping)

    def step() -> None:
        kit.train(model, lambda net, _: net(torch.ones(2, 4)).square().mean(), range(1), optimizer)

    step()
    model[0].weight.requires_grad_(True)
    with pytest.raises(OSError, match="cannot be read"):
        step()
    step()
    of_method = {group["method"]: group["params"] for group in optimizer.param_groups}
    (muon,) = (params for method, params in of_method.items() if method == "muon")
    assert {id(p) for p in muon} == {id(model[0].weight), id(model[1].weight)}


@pytest.mark.parametrize("what", ["parameter", "module"])
def test_what_is_added_to_a_model_is_trained_too(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = soframe.Optimizer(model, "muon", lr=0.1, auxiliary_lr=1e-3)
    added = nn.Parameter(torch.ones(4))
    if what == "parameter":
        model[1].register_parameter("added", added)
    else:
        model[1].add_module("inner", nn.ParameterList([added]))
    (model(torch.ones(2, 4)).square().mean() + added.square().sum()).backward()
    optimizer.step()
    assert not torch.equal(added.detach(), torch.ones(4))
    assert any("added" in row.parameter or "inner" in row.parameter for row in optimizer.report())


def test_two_settings_of_one_method_have_names_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    methods = {"^0$": SOAP(), "^1$": SOAP(betas=(0.9, 0.99)), "": "muon"}
    optimizer = soframe.Optimizer(model, methods, lr=0.1)
    named = {group["method"] for group in optimizer.param_groups}
    assert named == {"soap", "soap 2", "auxiliary: adamw"}  # the head is no matrix of Muon
    state = optimizer.state_dict()
    again = soframe.Optimizer(model, methods, lr=0.1)
    again.load_state_dict(state)
    assert {group["method"] for group in again.param_groups} == named
