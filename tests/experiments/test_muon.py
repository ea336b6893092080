import pytest
import torch
from torch import nn

from experiments import models
from experiments.config import RunConfig
from experiments.muon import Muon, orthogonalise, split
from experiments.optimizers import build_optimizer


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


def test_a_kernel_moves_as_its_matrix_of_output_channels():
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(6, 3, 2, 2, generator=generator)
    kernel, matrix = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1).clone())
    for parameter in (kernel, matrix):
        parameter.grad = start.cos().view_as(parameter)
        Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.3).step()
    assert torch.equal(kernel.flatten(1), matrix)
    assert not torch.equal(kernel, start)


def test_what_is_no_hidden_matrix_goes_to_adamw():
    model = models.GPT(models.Sizes(16, context=4, width=8, layers=1, heads=2))
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = ([names[id(p)] for p in part] for part in split(model))
    assert matrices == [
        "layers.0.qkv.weight",
        "layers.0.out.weight",
        "layers.0.widen.weight",
        "layers.0.narrow.weight",
    ]
    assert {"tokens.weight", "positions.weight", "head.weight", "head.bias"} <= set(others)
    assert len(matrices) + len(others) == len(names)
    matrices, others = split(models.autoencoder((8, 4, 2), 0, torch.float32))
    assert (len(matrices), len(others)) == (4, 4)


def test_the_published_one_takes_the_same_steps_but_for_its_bfloat16():
    pytest.importorskip("pytorch_optimizer")
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "steps": 1}
    config = RunConfig("digits-autoencoder", "muon", options={"adamw_lr": 0.01}, **settings)
    published = config.but(options={"adamw_lr": 0.01, "published": True})
    found, kinds = [], set()
    for each in (config, published):
        model = models.autoencoder((8, 4, 2), 0, torch.float32)
        optimizer = build_optimizer(model, each, "mse", full_batch=False)
        kinds.add(type(optimizer).__module__.split(".")[0])
        generator = torch.Generator().manual_seed(1)
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    ours, theirs = found
    assert kinds == {"experiments", "pytorch_optimizer"}
    assert (ours - theirs).norm() < 0.02 * ours.norm()
