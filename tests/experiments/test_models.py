import pytest
import torch
from torch import nn

from soframe.experiments import models
from soframe.experiments.workloads import names, workload


@pytest.mark.parametrize("name", names())
def test_the_model_fits_the_data_and_the_loss(name):
    problem = workload(name)
    train = problem.data(0, torch.float32).train[:5]
    losses = problem.losses(problem.model(0, torch.float32)(train.inputs), train.targets)
    assert losses.shape == (5,)
    assert losses.isfinite().all()
    assert list(problem.targets) == sorted(problem.targets, reverse=True)


@pytest.mark.parametrize("name", names())
def test_weights_depend_on_the_seed_and_leave_the_global_generator_alone(name):
    before = torch.get_rng_state()
    first, again, other = (workload(name).model(seed, torch.float64) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for (key, weight), (_, same), (_, different) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert weight.dtype == torch.float64
        assert torch.equal(weight, same)
        if key.endswith("weight") and "norm" not in key:  # a norm's are ones
            assert not torch.equal(weight, different)


def test_the_autoencoder_is_mirrored_with_a_linear_code():
    layers = list(models.digits_autoencoder())
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    widths = [layer.in_features for layer in linear] + [linear[-1].out_features]
    assert widths == [64, 256, 128, 64, 16, 64, 128, 256, 64]
    assert [type(layer).__name__ for layer in layers].count("Tanh") == 6
    code = layers.index(linear[3])
    assert isinstance(layers[code + 1], nn.Linear)


def test_the_cnn_has_a_strided_convolution():
    convolutions = [m for m in models.digits_cnn().modules() if isinstance(m, nn.Conv2d)]
    assert [m.stride for m in convolutions] == [(1, 1), (2, 2), (1, 1)]


def test_the_losses_are_those_of_the_textbook():
    reconstruction, classification = workload("digits-autoencoder"), workload("digits-cnn")
    outputs, targets = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[1.0, 0.0], [3.0, 4.0]]),
    )
    assert reconstruction.losses(outputs, targets).tolist() == [2.0, 12.5]
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    expected = [torch.tensor(2.0).log(), torch.tensor(2.0).exp().add(1).log()]
    torch.testing.assert_close(
        classification.losses(logits, torch.tensor([0, 1])), torch.stack(expected)
    )


def test_an_unknown_workload_lists_those_there_are():
    with pytest.raises(ValueError, match="no workload 'mnist'; there are: digits-autoencoder, "):
        workload("mnist")
