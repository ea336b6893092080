"""Batches that are given up, modules that are exchanged, numbers that are not real."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import soframe
from soframe.testing import compare
from tests import kit


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model(x).square().mean().backward()


@contextmanager
def nothing_is_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def factors(preconditioner: soframe.Preconditioner) -> list[Tensor]:
    blocks = preconditioner.state_dict()["blocks"].values()
    return [tensor for block in blocks for tensor in block["factors"].values()]


def test_a_batch_that_is_given_up_leaves_nothing() -> None:
    results = []
    for given_up in (False, True):
        model = network()
        preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
        if given_up:
            backward(model, seed=1)
            model.zero_grad()
            preconditioner.reset_batch()
        backward(model, seed=2)
        preconditioner.step()
        results.append([*factors(preconditioner), *(p.grad for p in model.parameters())])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


def test_a_generator_s_loss_leaves_nothing_in_its_discriminator() -> None:
    """Its gradients there are zeroed before the discriminator's own batch, or are never made."""
    found = []
    for frozen in (False, True):
        model, generator = network(), nn.Linear(3, 3).double()
        own = soframe.Optimizer(model, "kfac", lr=0.1, kl_clip=None, statistics_every=1)
        for step in range(2):
            own.zero_grad()
            backward(model, seed=step)
            own.step()
            model.requires_grad_(not frozen)
            backward(nn.Sequential(generator, model), seed=step)
            model.requires_grad_(True)
        found.append([*factors(own.preconditioner), *model.parameters()])
        own.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_an_exchanged_module_is_registered_anew() -> None:
    model = network()
    preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=10)
    backward(model, seed=1)
    preconditioner.step()
    model[2] = nn.Linear(4, 5).double()
    for seed in (2, 3):
        model.zero_grad()
        backward(model, seed)
        raw = model[2].weight.grad.clone()
        preconditioner.step()
    assert preconditioner.placement.work[1].shape == (1, 5, 5)
    assert not torch.equal(raw, model[2].weight.grad)
    found = factors(preconditioner)
    preconditioner.close()
    twin = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    model.zero_grad()
    backward(model, seed=3)
    twin.step()
    compare(found[3], factors(twin)[3], "G of the new module")


def test_complex_parameters_are_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    report = soframe.Preconditioner(model, kl_clip=None, statistics_every=1).report()
    reasons = {row.parameter: row.reason for row in report}
    assert reasons["0.weight"] == ""
    assert "complex" in reasons["1.weight"]
    with pytest.raises(ValueError, match="complex"):
        soframe.Preconditioner(model[1], kl_clip=None, statistics_every=1)


@pytest.mark.parametrize(
    ("compute", "restore"),
    [
        (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
        (
            lambda m: parametrize.register_parametrization(m, "weight", nn.Tanh(), unsafe=True),
            lambda m: parametrize.remove_parametrizations(m, "weight"),
        ),
    ],
    ids=["prune", "parametrize"],
)
def test_a_weight_that_is_computed_for_a_while(
    compute: Callable[[nn.Module], Any], restore: Callable[[nn.Module], Any]
) -> None:
    """The parameter is the same all the time, and alone in its layer: only its name changes."""
    torch.manual_seed(0)
    layers = (nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model = nn.Sequential(*layers).double()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.01, statistics_every=1)
    methods = []
    for seed, change in enumerate((lambda _: None, compute, restore)):
        change(model[1])
        optimizer.zero_grad()
        backward(model, seed)
        lost = r"lost their block: 1 \(kfac / inverse before\): .*computed"
        expected = pytest.warns(UserWarning, match=lost) if change is compute else nothing_is_said()
        with expected as said:
            optimizer.step()
        assert [warning.filename for warning in said or ()] == [__file__] * (change is compute)
        rows = [row for row in optimizer.report() if row.parameter.startswith("1.")]
        assert {row.parameter for row in rows} == {f"1.{n}" for n, _ in model[1].named_parameters()}
        methods += [row.method for row in rows]
    assert methods == ["kfac / inverse", "adamw", "kfac / inverse"]


def freeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def take_away(model: nn.Sequential) -> None:
    model[0] = nn.Identity()
    model[2] = nn.Linear(3, 2).double()


def wrap(model: nn.Sequential) -> None:
    model[0] = nn.Sequential(model[0], nn.Tanh())


def freeze_and_prune(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)
    model[0].requires_grad_(False)


@pytest.mark.parametrize("change", [freeze, take_away, wrap, freeze_and_prune])
def test_a_layer_that_is_frozen_gone_or_under_another_name_is_no_loss(
    change: Callable[[nn.Module], None],
) -> None:
    model = network()
    preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    change(model)
    backward(model, seed=1)
    with nothing_is_said():
        preconditioner.step()


def test_a_layer_of_another_kind_is_named_where_it_has_no_block() -> None:
    """By the rows of a report that have no block; the whole layer is named once."""
    model = network()
    preconditioner = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    model[0] = nn.Bilinear(3, 3, 4).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    model[2](model[1](model[0](x, x))).square().mean().backward()
    lost = r"lost their block: 0 \(kfac / inverse before\): Bilinear: no layer helper"
    with pytest.warns(UserWarning, match=lost) as said:
        preconditioner.step()
    assert [one.filename for one in said] == [__file__]


@pytest.mark.parametrize("method", ["kfac", "adamw"])
def test_a_model_that_is_cast_takes_along_what_it_has(method: str) -> None:
    """A run whose model is cast to float64 in the middle is one in float64 up to rounding."""
    weights = []
    for cast in (0, 3):
        model = network().float()
        optimizer = soframe.Optimizer(model, method, lr=0.1, statistics_every=1, solve_every=2)
        for step in range(6):
            if step == cast:
                model.double()
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.to(model[0].weight.dtype)).square().mean().backward()
            optimizer.step()
        kept = [t for b in optimizer.preconditioner.blocks for t in b.state.values()]
        kept += [t for b in optimizer.preconditioner.blocks for t in b.running.values()]
        assert {tensor.dtype for tensor in kept} == {torch.float64}
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [soframe.Optimizer, soframe.Preconditioner, soframe.TrustRegion])
def test_a_model_that_holds_one_can_be_copied(kind: Callable[..., Any]) -> None:
    """As for an average of the weights; the copy of the optimizer belongs to no model."""
    model = network()
    settings = {soframe.Optimizer: {"lr": 0.1}, soframe.TrustRegion: {"loss": "squared-error"}}
    model.owner = kind(model, **settings.get(kind, {"kl_clip": None}))
    copied = copy.deepcopy(model)
    assert not hasattr(copied.owner, "_capture")
    assert not hasattr(copied.owner, "preconditioner")
    assert torch.equal(copied[0].weight, model[0].weight)
    for use in (repr, lambda own: own.step(), lambda own: own.state_dict()):
        with pytest.raises(AttributeError, match=rf"{kind.__name__} belongs to its model.*copied"):
            use(copied.owner)
    with pytest.raises(TypeError, match=r"copied: save its state_dict\(\), build another one"):
        copy.deepcopy(model.owner)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = model.owner.nothing


def wide(how: str, method: str, before: bool) -> nn.Module:
    """Train a model whose first layer gets more inputs."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    own = soframe.Preconditioner(model, method, auxiliary="adamw", lr=0.1, statistics_every=1)

    def square(model: nn.Module, _: int) -> Tensor:
        return model(torch.ones(6, model[0].weight.shape[1])).square().mean()

    kit.train(model, square, range(2 * before), own)
    with torch.no_grad():
        if how == "parameter":
            model[0].weight = nn.Parameter(torch.randn(4, 7))
        else:
            model[0].weight.data = torch.randn(4, 7)
            model[0].weight.grad = None
    kit.train(model, square, range(4), own)
    return model


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("method", ["kfac", "soap", "muon"])
def test_a_parameter_of_another_shape_begins_anew(method: str, before: bool) -> None:
    assert wide("parameter", method, before)[0].weight.grad.shape == (4, 7)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("method", ["kfac", "soap", "muon", "adamw"])
def test_data_of_another_shape_are_refused(method: str, before: bool) -> None:
    with pytest.raises(ValueError, match=r"weight.*put a new nn\.Parameter"):
        wide("data", method, before)


def test_torchscript_and_whole_graphs_are_refused_with_the_remedy() -> None:
    model = network()
    own = soframe.Preconditioner(model, lr=0.1, statistics_every=1)
    with pytest.raises(AttributeError, match=r"torch\.jit\.script cannot compile .* close\(\)"):
        torch.jit.script(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"compile with fullgraph=False"):
        compiled(torch.ones(2, 3).double())
    own.close()


def replica_of(model: nn.Module) -> nn.Module:
    """A copy as `torch.nn.DataParallel` makes it for another device."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copied in copies.items():
        for name, child in module._modules.items():
            copied._modules[name] = copies[child]
        for name, parameter in module._parameters.items():
            setattr(copied, name, None if parameter is None else parameter * 1.0)
    return copies[model]


@pytest.mark.parametrize("method", ["kfac", "muon"])
def test_replicas_in_threads_are_refused(method: str) -> None:
    """Their calls are parts of a batch, which would count as calls of the whole one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    own = soframe.Preconditioner(model, method, lr=0.1, statistics_every=1, solve_every=1)
    x = torch.randn(6, 3)
    model(x).square().mean().backward()
    own.step()
    replica = replica_of(model)
    if method == "kfac":
        with pytest.raises(RuntimeError, match=r"DataParallel.*of a Linear.*a process for each"):
            replica(x)
        return
    model.zero_grad()
    replica(x).square().mean().backward()
    own.step()
    assert own.updated


def grow(model: nn.Sequential) -> None:
    """Move the second layer to the name "3", and the first one, within its container, to "1.0"."""
    first, tanh, second = model
    for name, module in enumerate((nn.Identity(), nn.Sequential(first), tanh, second)):
        model.add_module(str(name), module)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "soap", "adamw"])
def test_a_layer_that_is_moved_within_the_model_keeps_its_state(method: str) -> None:
    """Also one whose former name is now another layer's; the steps are those of a model at rest."""
    weights = []
    for moved in (False, True):
        model = network()
        optimizer = soframe.Optimizer(model, method, lr=0.05, statistics_every=2, solve_every=4)
        for step in range(8):
            if moved and step == 4:
                grow(model)
            optimizer.zero_grad()
            backward(model, seed=step)
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    for plain, other in zip(*weights, strict=True):
        assert torch.equal(plain, other)
