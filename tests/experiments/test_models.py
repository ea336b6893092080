import pytest
import torch
from torch import nn

from soframe.experiments import clutter, gpt, models, synthetic
from soframe.experiments.workloads import names, workload


@pytest.mark.parametrize("name", names())
def test_the_model_fits_the_data_and_the_loss(name):
    generated = name == "cluttered-digits"
    problem = workload(f"{name}:50" if generated else name)  # all of them would take half a minute
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
        if key.endswith("weight") and weight.ndim > 1:  # a norm's are ones
            assert not torch.equal(weight, different)


@pytest.mark.parametrize("name", ["curves", "digits-cnn", "cluttered-digits:10"])
def test_data_and_weights_do_not_depend_on_the_default_dtype(name):
    def made():
        for cached in (synthetic._images, clutter.cluttered_digits):
            cached.cache_clear()
        train = workload(name).data(1, torch.float32).train
        return [train.inputs, *workload(name).model(1, torch.float32).parameters()]

    expected = made()
    torch.set_default_dtype(torch.float64)
    try:
        found = made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


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


def test_logits_depend_on_bytes_up_to_their_own():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = gpt.ByteGPT(width=8, layers=2, heads=2, context=6).double()
    text = torch.tensor([[5, 9, 200, 3, 77, 1]])
    changed = text.clone()
    changed[0, 3] = 4
    before, after = model(text), model(changed)
    assert before.shape == (1, 256, 6)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert ((before[:, :, 3:] - after[:, :, 3:]).abs().amax(dim=1) > 1e-6).all()


def test_attention_is_torch_s():
    attention = gpt.Attention(8, heads=2).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.view(3, 5, 2, 4).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = attention.out(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


def test_curves_have_a_code_of_six():
    linear = [m for m in models.curves_autoencoder() if isinstance(m, nn.Linear)]
    widths = [m.in_features for m in linear] + [linear[-1].out_features]
    assert widths == [256, 128, 64, 32, 6, 32, 64, 128, 256]


def test_sequences_are_averaged_over_their_positions():
    problem = workload("byte-gpt")
    logits = torch.randn(2, 256, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    picked = -logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(problem.losses(logits, targets), picked.mean(1))
