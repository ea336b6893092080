"""Param groups are the user's: given, edited, saved, and read at every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from tests import kit


def net() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.LayerNorm(4)
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 3), nn.Linear(3, 2)).double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 5, generator=generator, dtype=torch.float64)).square().mean()


def build(model: nn.Module, **options: Any) -> soframe.Optimizer:
    """Gradient descent in two methods, whose steps are easy to compute."""
    methods = {"^(0|2)$": "sgd"}
    return soframe.Optimizer(model, methods, auxiliary="sgd", **{"lr": 0.1, **options})


def options_of(model: nn.Module, optimizer: soframe.Optimizer) -> dict[str, tuple[float, float]]:
    """The options of each parameter, which is in one group."""
    names = {id(p): name for name, p in model.named_parameters()}
    every = [(names[id(p)], g) for g in optimizer.param_groups for p in g["params"]]
    assert len(dict(every)) == len(every)
    return {name: (group["lr"], group["weight_decay"]) for name, group in every}


EDITS = ("split", "merge", "reverse", "lr", "weight_decay")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from([*EDITS, "resume", "switch", "replace", "step"]), st.integers(0, 10**6)
    ),
    max_size=10,
)


def edit(groups: list[dict[str, Any]], how: str, seed: int) -> list[dict[str, Any]]:
    """Edit groups, and return the groups whose parameters have other options."""
    number = seed % len(groups)
    group = groups[number]
    if how == "split":
        half = len(group["params"]) // 2
        groups.append({**group, "params": group["params"][half:]})
        group["params"] = group["params"][:half]
    elif how == "merge" and len(groups) > 1:
        del groups[number]
        groups[seed % len(groups)]["params"] += group["params"]
        return [groups[seed % len(groups)]]
    elif how == "reverse":
        groups.reverse()
    elif how in group:
        group[how] = seed % 7 / 50
        return [group]
    return []


def stepped(model: nn.Module, options: dict[str, tuple[float, float]]) -> dict[str, Tensor]:
    """The weights after a step of gradient descent, of those with a gradient."""
    found = {}
    for name, p in model.named_parameters():
        lr, decay = options[name]
        found[name] = p.detach().clone()
        if p.grad is not None:
            found[name] -= lr * (p.grad + decay * (p.dim() > 1) * p.detach())
    return found


@given(operations=OPERATIONS)
def test_edits_of_groups_survive_and_are_what_a_step_takes(operations: Any) -> None:
    model = net()
    optimizer = build(model, weight_decay=0.3, auxiliary_lr=0.02)
    expected = options_of(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    for number, (operation, seed) in enumerate([*operations, ("step", 0)]):
        for group in edit(optimizer.param_groups, operation, seed):
            options = (group["lr"], group["weight_decay"])
            expected |= {names[id(p)]: options for p in group["params"]}
        if operation == "resume":
            state = copy.deepcopy(optimizer.state_dict())
            trained = [p.requires_grad for p in model.parameters()]
            model.requires_grad_(True)
            optimizer = build(model, lr=0.5)
            for parameter, was in zip(model.parameters(), trained, strict=True):
                parameter.requires_grad_(was)
            optimizer.load_state_dict(state)
        if operation == "switch":
            parameter = list(model.parameters())[1 + seed % 7]
            parameter.requires_grad_(not parameter.requires_grad)
        if operation == "replace":
            layer = model[seed % 4]
            layer.weight = nn.Parameter(layer.weight.detach().clone())
            names[id(layer.weight)] = f"{seed % 4}.weight"
        if operation in ("step", "switch", "replace"):  # blocks are made anew in the step
            model.zero_grad()
            loss_of(model, number).backward()
            wanted = stepped(model, expected)
            optimizer.step()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), wanted[name], rtol=1e-12, atol=1e-14)
        assert options_of(model, optimizer) == expected


@pytest.mark.parametrize("method", ["muon", "soap", "adamw", "kfac"])
def test_layerwise_rates(method: str) -> None:
    """Groups with a rate of 0 stay, whatever method their parameters are of."""
    model = net()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.0, "auxiliary_lr": 0.0},
        {"params": [p for layer in model[1:] for p in layer.parameters()]},
    ]
    before = copy.deepcopy(model.state_dict())
    optimizer = soframe.Optimizer(
        model, method, lr=0.1, statistics_every=1, solve_every=1, param_groups=groups
    )
    kit.train(model, loss_of, range(3), optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("0."), name


def test_options_of_given_groups_are_the_constructors() -> None:
    model = net()
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.3, "weight_decay": 0.2},
        {"params": list(model[1].parameters()), "decay_vectors": True},
        {"params": [*model[2].parameters(), *model[3].parameters()], "auxiliary_lr": 0.7},
    ]
    optimizer = build(model, auxiliary_lr=0.05, weight_decay=0.1, param_groups=groups)
    assert options_of(model, optimizer) == {
        "0.weight": (0.3, 0.2),
        "0.bias": (0.3, 0.2),
        "1.weight": (0.05, 0.1),
        "1.bias": (0.05, 0.1),
        "2.weight": (0.1, 0.1),
        "2.bias": (0.1, 0.1),
        "3.weight": (0.7, 0.1),
        "3.bias": (0.7, 0.1),
    }
    assert [g["decay_vectors"] for g in optimizer.param_groups] == [False, True, False, False]


def test_a_parameter_in_no_group_is_named() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"2\.bias, 3\.weight, 3\.bias in no param group"):
        build(model, param_groups=[{"params": list(model.parameters())[:5]}])
    optimizer = build(model)
    params = optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not model[2].bias]
    with pytest.raises(ValueError, match=r"2\.bias is in no param group"):
        kit.train(model, loss_of, range(1), optimizer)
    optimizer.add_param_group({"params": model[2].bias, "lr": 0.0})
    kit.train(model, loss_of, range(1), optimizer)
    optimizer.param_groups[1]["params"].append(model[2].bias)
    with pytest.raises(ValueError, match=r"2\.bias is in 2 param group"):
        kit.train(model, loss_of, range(1), optimizer)


@pytest.mark.parametrize("given", [False, True])
def test_what_is_added_to_a_model_may_be_added_to_the_groups(given: bool) -> None:
    model = net()
    options = {"param_groups": [{"params": list(model.parameters())}]} if given else {}
    optimizer = build(model, **options)
    kit.train(model, loss_of, range(1), optimizer)
    model.append(nn.Linear(2, 2).double())
    if given:
        with pytest.raises(ValueError, match=r"4\.weight, 4\.bias in no param group"):
            kit.train(model, loss_of, range(1), optimizer)
    with pytest.raises(ValueError, match="add the module to the model first"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.4, "auxiliary_lr": 0.5})
    kit.train(model, loss_of, range(1), optimizer)
    assert options_of(model, optimizer)["4.weight"] == (0.5, 0.0)
    state = optimizer.state_dict()
    again = build(model)
    again.load_state_dict(state)
    assert options_of(model, again) == options_of(model, optimizer)


@pytest.mark.parametrize("method", ["adamw", "muon", "soap"])
def test_an_added_group_has_the_betas_and_momentum_of_its_method(method: str) -> None:
    """Not the None that schedulers look for in the defaults."""
    body = [nn.Linear(2, 2) for _ in range(2)]
    model = nn.ModuleDict({"body": nn.ModuleList(body), "head": nn.Linear(2, 2)}).double()
    optimizer = soframe.Optimizer(model, method, lr=0.1)
    more = nn.Linear(2, 2).double()
    body[0].add_module("more", more)
    optimizer.add_param_group({"params": list(more.parameters())})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name in ("betas", "momentum"):
        assert of[id(more.weight)].get(name) == of[id(body[1].weight)].get(name)


@given(seed=st.integers(0, 10**6))
def test_every_entry_of_a_saved_group_is_under_a_checksum(seed: int) -> None:
    model = net()
    optimizer = build(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
    state = copy.deepcopy(optimizer.state_dict())
    group = state["param_groups"][seed % len(state["param_groups"])]
    name = sorted(group.keys() - {"params"})[seed % (len(group) - 1)]
    value = group[name]
    if isinstance(value, bool):
        group[name] = not value
    elif isinstance(value, int | float | Tensor):
        group[name] = value + 2.0**-30
    elif isinstance(value, list):
        group[name] = value[1:]
    else:
        group[name] = f"{value}x"
    before = copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match="damaged"):
        optimizer.load_state_dict(state)
    assert str(optimizer.param_groups) == str(before)


# -- settings of methods --------------------------------------------------------------------------


def warmed(step: int) -> float:
    return 0.85 + 0.01 * step


BUILT: dict[str, Any] = {
    "muon": soframe.methods.Muon,
    "sgd": lambda m: soframe.methods.SGD(m, nesterov=True),
    "soap-muon": soframe.methods.SOAPMuon,
    "adamw": lambda m: soframe.methods.AdamW(betas=(m, 0.99)),
    "soap": lambda m: soframe.methods.SOAP(betas=(m, 0.99)),
    "blocked": lambda m: soframe.methods.Blocked(soframe.methods.SOAP(betas=(m, 0.99)), 3),
}


@pytest.mark.parametrize("method", BUILT)
def test_a_momentum_that_changes_is_what_a_method_built_with_it_takes(method: str) -> None:
    """A step with another momentum is one of a method that was built so, from the same state."""
    model, other = net(), net()
    options: dict[str, Any] = {"lr": 0.1, "auxiliary": "sgd", "solve_every": 2}
    optimizer = soframe.Optimizer(model, BUILT[method](warmed(0)), **options)
    for step in range(4):
        for group in optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = warmed(step)
            elif "betas" in group:
                group["betas"] = (warmed(step), *group["betas"][1:])
        again = soframe.Optimizer(other, BUILT[method](warmed(step)), **options)
        again.preconditioner.curvature.steps = step
        for mine, theirs in zip(
            optimizer.preconditioner.blocks, again.preconditioner.blocks, strict=True
        ):
            theirs.record = copy.deepcopy(mine.record)
        for mine, theirs in zip(
            optimizer.preconditioner.curvature.placed.stacks,
            again.preconditioner.curvature.placed.stacks,
            strict=True,
        ):
            theirs.state = copy.deepcopy(mine.state)
            theirs.data = copy.deepcopy(mine.data)
            theirs.factors.update(copy.deepcopy(mine.factors))
        kit.train(model, loss_of, range(step, step + 1), optimizer)
        kit.train(other, loss_of, range(step, step + 1), again)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("schedule", ["one cycle", "cyclic"])
def test_schedulers_cycle_the_momentum_by_default(schedule: str) -> None:
    """Of Muon by its name, of AdamW as the first beta: as of torch's AdamW."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if schedule == "one cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
        return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, step_size_up=3)

    for method in ("adamw", "muon", "kfac"):
        ours, theirs = net(), net()
        optimizer = soframe.Optimizer(ours, {"^2$": method}, lr=0.01)
        reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0)
        schedulers = scheduler(optimizer), scheduler(reference)
        for step in range(6):
            for model, one in ((ours, optimizer), (theirs, reference)):
                model.zero_grad()
                loss_of(net(), step).backward()
                generator = torch.Generator().manual_seed(step)
                for p in model.parameters():
                    p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                if method == "kfac" and model is ours:
                    loss_of(model, step).backward()
                one.step()
            for one in schedulers:
                one.step()
            if method == "muon":
                momenta = [g["momentum"] for g in optimizer.param_groups]
                assert momenta == [reference.param_groups[0]["betas"][0]] * 2
        if method == "adamw":
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_groups_of_one_method_may_have_other_betas() -> None:
    """Layers of one shape, one batch as long as they agree; held to torch's AdamW."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()

    def of(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": list(model[0].parameters()), "betas": (0.5, 0.9), "eps": 1e-3},
            {"params": list(model[2].parameters()), "lr": 0.02},
        ]

    ours, theirs = layers(), layers()
    optimizer = soframe.Optimizer(ours, "adamw", lr=0.01, param_groups=of(ours))
    reference = torch.optim.AdamW(of(theirs), lr=0.01, weight_decay=0)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.eye(3).double() * (step + 1)).square().mean()

    for step in range(5):
        if step == 3:
            for one in (optimizer, reference):
                one.param_groups[1]["betas"] = (0.1, 0.5)
        kit.train(ours, loss, range(step, step + 1), optimizer)
        kit.train(theirs, loss, range(step, step + 1), reference)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_the_momentum_of_a_given_group_is_no_beta_of_the_auxiliary_method() -> None:
    """It is Muon's; vectors and the head take the steps of torch's AdamW, with its own betas."""
    ours, theirs = net(), net()
    given = [{"params": list(ours.parameters()), "momentum": 0.5}]
    optimizer = soframe.Optimizer(ours, "muon", lr=0.05, auxiliary_lr=0.01, param_groups=given)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0)
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, reference)):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, (-2.0) ** step)
            one.step()
    muon, adamw = optimizer.param_groups
    assert muon["momentum"] == 0.5
    assert "momentum" not in adamw
    expected = {
        id(mine): other for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    }
    for mine in adamw["params"]:
        torch.testing.assert_close(mine, expected[id(mine)], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "name", "value", "problem"),
    [
        ("adamw", "betas", (1.0, 0.9), "betas must be at least 0 and less than 1"),
        ("muon", "momentum", float("nan"), "beta must be at least 0"),
        ("soap-muon", "betas", (0.5, 0.9), "keeps no state for"),
    ],
)
def test_settings_of_methods_are_checked_at_the_step(
    method: str, name: str, value: Any, problem: str
) -> None:
    model = net()
    optimizer = soframe.Optimizer(model, method, lr=0.1)
    for group in optimizer.param_groups:
        if not group["method"].startswith("auxiliary"):
            group[name] = value
    with pytest.raises(ValueError, match=problem):
        kit.train(model, loss_of, range(1), optimizer)


@pytest.mark.parametrize("method", ["adamw", "soap", "kfac"])
def test_a_cleared_state_begins_anew(method: str) -> None:
    options: dict[str, Any] = {"lr": 0.05, "statistics_every": 1, "solve_every": 3}
    if method == "kfac":
        options["damping"] = 0.05  # the default falls with the steps, which go on
    model, other = net(), net()
    optimizer = soframe.Optimizer(model, method, **options)
    kit.train(model, loss_of, range(3), optimizer)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.state.clear()
    fresh = soframe.Optimizer(other, method, **options)
    kit.train(model, loss_of, range(3, 7), optimizer)
    kit.train(other, loss_of, range(3, 7), fresh)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
