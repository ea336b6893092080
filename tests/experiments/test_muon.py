import pytest
import torch
from torch import nn

from benchmarks.time_to_target import with_muon
from soframe.experiments import gpt, models
from soframe.experiments.config import RunConfig
from soframe.experiments.muon import Muon, MuonWithAdamW, orthogonalise, split
from soframe.experiments.optimizers import build_optimizer


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_vectors_stay_and_values_go_to_one(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    # Each singular value follows the quintic by itself.
    x = values / values.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    torch.testing.assert_close(orthogonalise(matrix), u * x @ vt, rtol=1e-10, atol=1e-10)
    assert 0.6 < x.min() < x.max() < 1.3


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_steps_are_those_of_torch_but_for_its_bfloat16(shape):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        Muon([ours], lr=0.1, momentum=0.9, weight_decay=0.3),
        torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.3),
    ]
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert moved > 0.3


def test_what_is_no_hidden_matrix_goes_to_adamw():
    model = gpt.ByteGPT(width=8, layers=1, heads=2, context=4)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = ([names[id(p)] for p in part] for part in split(model))
    assert matrices == [
        "layers.0.attention.qkv.weight",
        "layers.0.attention.out.weight",
        "layers.0.widen.weight",
        "layers.0.narrow.weight",
    ]
    assert {"bytes.weight", "positions.weight", "head.weight", "head.bias"} <= set(others)
    assert len(matrices) + len(others) == len(names)
    matrices, others = split(models.digits_autoencoder())
    assert (len(matrices), len(others)) == (8, 8)


def test_only_muon_is_exchanged_for_the_published_one():
    configs = [RunConfig("curves", name, lr=1.0, steps=1) for name in ("adamw", "muon")]
    assert with_muon(configs, published=False) == configs
    adamw, muon = with_muon(configs, published=True)
    assert (adamw, muon.options) == (configs[0], {"published": True})


def test_learning_rates_reach_both_parts():
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = MuonWithAdamW(model, lr=0.02, momentum=0.9, adamw_lr=0.004)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.004]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_published_one_takes_the_same_steps_but_for_its_bfloat16():
    pytest.importorskip("pytorch_optimizer")
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "steps": 1}
    config = RunConfig("digits-autoencoder", "muon", options={"adamw_lr": 0.01}, **settings)
    published = config.but(options={"adamw_lr": 0.01, "published": True})
    found, kinds = [], set()
    for each in (config, published):
        model = models.digits_autoencoder(0)
        optimizer = build_optimizer(model, each)
        kinds.add(type(optimizer).__module__.split(".")[0])
        generator = torch.Generator().manual_seed(1)
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    ours, theirs = found
    assert kinds == {"soframe", "pytorch_optimizer"}
    assert (ours - theirs).norm() < 0.02 * ours.norm()
