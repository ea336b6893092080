"""Models of the package transformers: every parameter has a block or a reason, and steps are sound.

They are tiny, with weights from a seed. ``python -m tests.layers.test_transformers_models`` prints
which share of each model's elements every method has.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.blocks.report import Report
from soframe.layers import LanguageModelRMSNormHelper
from soframe.registry import KINDS
from soframe.testing import compare

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, about kernels that are not there

WORDS = 50
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
WIDE = {**LAYERS, "intermediate_size": 32}
LANGUAGE = {**WIDE, "vocab_size": WORDS, "max_position_embeddings": 16, "bos_token_id": 1}
LANGUAGE |= {"eos_token_id": 2, "pad_token_id": 0}


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(4, 3, size, size, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 1, 0])}


def sound() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 12, (2, 4), generator=generator)
    return {"input_values": torch.randn(2, 200, generator=generator), "labels": labels}


def gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    config = transformers.T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**WIDE, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = transformers.ResNetConfig(**sizes, layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def mixtral() -> nn.Module:
    sizes = {**LANGUAGE, "num_key_value_heads": 2, "num_local_experts": 3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def mamba() -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    config = transformers.MambaConfig(**sizes, time_step_rank=2)
    return transformers.MambaForCausalLM(config)


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (4, 2), "conv_stride": (2, 2)}
    config = transformers.Wav2Vec2Config(
        **WIDE,
        **convolutions,
        vocab_size=12,
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
    )
    return transformers.Wav2Vec2ForCTC(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "GPT-2": (gpt2, tokens),
    "BERT": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**LANGUAGE)), tokens),
    "Llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE)), tokens),
    "T5": (t5, tokens),
    "ViT": (vit, lambda: images(8)),
    "ResNet": (resnet, lambda: images(32)),
    "Mixtral": (mixtral, tokens),
    "Mamba": (mamba, tokens),
    "Wav2Vec2": (wav2vec2, sound),
}

# Of a model's elements the share that EKFAC has, and why others have none of its blocks. K-FAC has
# the tied tables, too.
TIED = "its weight is shared with a layer of another geometry"
COVERED: dict[str, tuple[float, set[str]]] = {
    "GPT-2": (0.85, {TIED}),
    "BERT": (
        0.75,
        {TIED, "its layer are not shared by the same modules"},
    ),
    "Llama": (1.0, set()),
    "T5": (0.90, {TIED}),
    "ViT": (0.95, {"ViTEmbeddings: no layer helper"}),
    "ResNet": (1.0, set()),
    "Mixtral": (0.25, {"MixtralTopKRouter: no layer", "MixtralExperts: no layer"}),
    "Mamba": (0.6, {TIED, "MambaMixer: no layer", "MambaMixer uses its weight without calling"}),
    "Wav2Vec2": (0.9, {"ParametrizedConv1d: its weight is not", "ParametrizationList: no layer"}),
}


def shares(model: nn.Module, report: Report) -> dict[str, float]:
    """Return the share of elements of each method; of the reason where there is none."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    found: Counter[str] = Counter()
    for row in report:
        found[row.method.partition(" / ")[0] if row.block is not None else "none"] += sizes[
            row.parameter
        ]
    return {method: count / sum(sizes.values()) for method, count in found.items()}


def built(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and what runs it and returns the loss."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, given = make(), batch()
    model.eval()  # no dropout
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()

    def loss() -> Tensor:
        value: Tensor = model(**given).loss
        return value

    return model, loss


def graded(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters whose gradients are not zero."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            yield name, parameter


@pytest.mark.parametrize("method", ["soap-muon", "muon"])
@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_moves_every_parameter(name: str, method: str) -> None:
    model, loss = built(name)
    optimizer = soframe.Optimizer(model, method=method, lr=0.01, layers="all")
    share = shares(model, optimizer.report())
    assert set(share) <= {method, "adamw"}
    assert share[method] > 0.7
    loss().backward()
    before = {key: parameter.detach().clone() for key, parameter in graded(model)}
    assert len(before) > 0.9 * len(dict(model.named_parameters()))
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), key
        assert (key in before) == (not torch.equal(parameter, before.get(key, parameter))), key
    optimizer.close()


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("name", MODELS)
def test_a_preconditioner_has_a_block_or_a_reason(name: str, method: str) -> None:
    model, loss = built(name)
    own = soframe.Preconditioner(model, method=method, layers="all", lr=1e-3)
    least, reasons = COVERED[name]
    reasons = reasons - {TIED} if method == "kfac" else reasons
    share = shares(model, own.report())
    assert share[method] >= least
    for row in own.report():
        assert row.block is not None or any(why in row.reason for why in reasons), row
    assert all(any(why in row.reason for row in own.report()) for why in reasons)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss().backward()
        kept = {key: p.grad.clone() for key, p in graded(model) if p.grad is not None}
        own.step()
        optimizer.step()
    rows = {row.parameter: row for row in own.report()}
    for key, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()), key
    changed = {key for key, p in graded(model) if not torch.equal(p.grad, kept[key])}
    assert changed == {key for key in kept if rows[key].block is not None}
    own.close()


def test_experts_are_laid_out_one_by_one() -> None:
    model, _ = built("Mixtral")
    optimizer = soframe.Optimizer(model, method="muon", lr=0.01)
    by_name = {block.name: block.shape for block in optimizer.preconditioner.blocks}
    assert by_name["model.layers.0.mlp.experts.gate_up_proj"] == (3, 64, 16)
    assert by_name["model.layers.0.mlp.experts.down_proj"] == (3, 16, 32)
    optimizer.close()


NORMS = [
    key
    for key, helper in KINDS["layer"]._optional.items()
    if helper is LanguageModelRMSNormHelper and isinstance(key, str)
]


@pytest.mark.parametrize("key", NORMS, ids=lambda key: key.rpartition(".")[2])
def test_norms_have_the_rows_that_they_scale(key: str) -> None:
    """Each by its name, as the package has it now, with a scale of one."""
    path, _, name = key.rpartition(".")
    module = getattr(importlib.import_module(path), name)(4, eps=0.1)
    helper = LanguageModelRMSNormHelper(module)
    assert helper.unsupported(module) is None
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    compare(helper.input_rows(x)[:, :, :, 0].permute(1, 2, 0), module(x), name, rtol=1e-6)


if __name__ == "__main__":
    for each in MODELS:
        network, _ = built(each)
        lines = []
        for chosen in ("kfac", "soap-muon"):
            if chosen == "kfac":
                preconditioner = soframe.Preconditioner(network, layers="all", kl_clip=None)
            else:
                preconditioner = soframe.Optimizer(network, lr=0.01).preconditioner
            said = shares(network, preconditioner.report())
            lines.append(", ".join(f"{key} {100 * value:.0f} %" for key, value in said.items()))
            preconditioner.close()
        print(f"{each:10s} {lines[0]:28s} | {lines[1]}")
