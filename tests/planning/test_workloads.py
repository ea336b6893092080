"""Published models on the meta device: counts of parameters, forwards, and blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from soframe.planning.workloads import (
    BERT,
    GPT,
    WORKLOADS,
    Gated,
    Layer,
    Llama,
    Residual,
    resnet,
    rotated,
)

# Of the authors' checkpoints or torchvision's; tied heads count once, BERT has both heads.
PUBLISHED = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
}
OF_EACH_KIND = ("resnet50", "bert-large", "gpt2", "llama-8b")
"""The others are longer and wider."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    model = WORKLOADS[name].model()
    assert all(one.is_meta for one in model.parameters())
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]


LENGTHS = {
    "bert-large": 512,
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 1024),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_have_the_published_length(name: str) -> None:
    for tensor in WORKLOADS[name].inputs(2):
        assert tensor.shape == (2, LENGTHS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else pytest.mark.thorough)
        for name in WORKLOADS
    ],
)
def test_models_take_their_inputs(name: str) -> None:
    workload = WORKLOADS[name]
    with torch.no_grad():
        out = workload.model()(*workload.inputs(workload.batch))
    first = out if isinstance(out, torch.Tensor) else out[0]
    assert first.is_meta
    assert len(first) == workload.batch


def test_heads_of_gpt_and_bert_are_the_embeddings() -> None:
    for name in ("gpt2", "bert-large"):
        model = WORKLOADS[name].model()
        assert model.head.weight is model.tokens.weight


HEADS = {  # the features of a head, and how many heads of queries a head of keys serves
    "bert-large": (64, 1),
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), (64, 1)),
    "llama-7b": (128, 1),
    "llama-8b": (128, 4),
    "llama-70b": (128, 8),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_attention_have_the_published_sizes(name: str) -> None:
    layer = WORKLOADS[name].model().layers[0]
    assert (layer.size, getattr(layer, "queries", 1)) == HEADS[name]


@pytest.mark.parametrize("name", ["llama-7b", "llama-8b", "llama-70b"])
def test_llamas_read_as_much_text_as_they_were_trained_on(name: str) -> None:
    (tokens,) = WORKLOADS[name].inputs(3)
    assert tokens.shape == (3, 4096 if name == "llama-7b" else 8192)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_rank_has_a_usual_batch(name: str) -> None:
    batch = WORKLOADS[name].batch
    assert batch == {"resnet": 32, "llama-": 1}.get(name[:6], 8)
    assert all(len(tensor) == batch for tensor in WORKLOADS[name].inputs(batch))


# -- numbers of small ones -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_of_gpt_or_bert_is_torchs(causal: bool) -> None:
    layer = Layer(12, 3, causal=causal)
    activation = (lambda x: F.gelu(x, approximate="tanh")) if causal else F.gelu
    expected = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation=activation, batch_first=True, norm_first=causal
    )
    attention = expected.self_attn
    parts = (layer.query, layer.key, layer.value)
    pairs = [
        (attention.in_proj_weight, torch.cat([part.weight for part in parts])),
        (attention.in_proj_bias, torch.cat([part.bias for part in parts])),
    ]
    modules = [
        (attention.out_proj, layer.out),
        (expected.linear1, layer.widen),
        (expected.linear2, layer.narrow),
        (expected.norm1, layer.norm_attention),
        (expected.norm2, layer.norm_mlp),
    ]
    for theirs, ours in modules:
        pairs += zip(theirs.parameters(), ours.parameters(), strict=True)
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.copy_(ours)
    x = torch.rand(2, 5, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    torch.testing.assert_close(layer(x), expected(x, src_mask=mask))


def test_positions_rotate_pairs_of_features() -> None:
    x = torch.rand(2, 3, 7, 8, dtype=torch.float64)
    rates = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)  # 10,000^(-k/4)
    turns = torch.polar(torch.ones(7, 4).double(), torch.arange(7)[:, None] * rates)
    turned = torch.complex(x[..., :4], x[..., 4:]) * turns
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotated(x), expected)


def test_a_layer_of_llama_is_its_formulas() -> None:
    layer = Gated(12, 6, 2, 20)  # six queries of two features; two keys, each for three of them
    x = torch.rand(2, 5, 12)
    normed = F.rms_norm(x, (12,), layer.norm_attention.weight)
    query = rotated(layer.query(normed).view(2, 5, 6, 2).transpose(1, 2))
    key = rotated(layer.key(normed).view(2, 5, 2, 2).transpose(1, 2))
    value = layer.value(normed).view(2, 5, 2, 2).transpose(1, 2)
    heads = []
    for head in range(6):
        scores = query[:, head] @ key[:, head // 3].mT / 2**0.5  # [2, 5, 5]
        future = torch.ones(5, 5).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        heads.append(weights @ value[:, head // 3])
    attended = x + layer.out(torch.cat(heads, dim=-1))
    normed = F.rms_norm(attended, (12,), layer.norm_mlp.weight)
    expected = attended + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
    torch.testing.assert_close(layer(x), expected)


def test_gpts_logits_are_of_tokens_at_their_places() -> None:
    model = GPT(4, 1, 2)
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    hidden = model.tokens.weight[tokens] + model.positions.weight[:3]
    expected = model.norm(model.layers(hidden)) @ model.tokens.weight.mT
    torch.testing.assert_close(model(tokens), expected)


def test_berts_heads_read_words_and_the_first_one() -> None:
    with torch.device("meta"):
        model = BERT()
    model.layers = nn.Sequential()
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    tokens, segments = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 1, 1]])
    places = torch.arange(3)
    sums = F.embedding(tokens, model.tokens.weight) + F.embedding(places, model.positions.weight)
    hidden = model.norm(sums + F.embedding(segments, model.segments.weight))
    words, follows = model(tokens, segments)
    torch.testing.assert_close(words, model.head(model.transform(hidden)))
    torch.testing.assert_close(follows, model.follows(hidden[:, 0]))


def test_a_llama_has_norms_and_a_head() -> None:
    model = Llama(11, 2, 8, 4, 2, 12)
    tokens = torch.tensor([[3, 1, 4]])
    hidden = model.layers[1](model.layers[0](model.tokens.weight[tokens]))
    torch.testing.assert_close(model(tokens), model.norm(hidden) @ model.head.weight.mT)


def test_a_residual_block_adds_its_shortcut_before_the_last_activation() -> None:
    sizes = [(3, 1, 1), (3, 3, 1), (4, 1, 1)]
    block, x = Residual(4, sizes), torch.randn(2, 4, 6, 6)
    first, second, third = block.convolutions
    assert isinstance(block.shortcut, nn.Identity)
    expected = F.relu(third(second(first(x).relu()).relu()) + x)
    torch.testing.assert_close(block(x), expected)
    # Another width, or a stride, needs a convolution in the shortcut.
    for channels, stride in ((5, 1), (4, 2)):
        block = Residual(channels, [(3, 1, 1), (3, 3, stride), (4, 1, 1)])
        weight, _ = block.shortcut
        assert (weight.kernel_size, weight.stride) == ((1, 1), (stride, stride))
        assert block(torch.rand(2, channels, 6, 6)).shape == (2, 4, 6 // stride, 6 // stride)


def test_a_resnet_halves_its_images_five_times() -> None:
    with torch.device("meta"):
        model = resnet()
        x = torch.empty(1, 3, 224, 224)
    sides: list[int] = []
    for module in model:
        x = module(x)
        if isinstance(module, Residual | nn.Sequential | nn.MaxPool2d):
            sides.append(x.shape[-1])
    assert sides == [112, 56, *[56] * 3, *[28] * 4, *[14] * 6, *[7] * 3]
    pool = model[2]
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
