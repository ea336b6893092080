"""Families of models of transformers and timm, tiny and random, and the table of their first steps.

``python -m tests.compatibility.families`` writes docs/compatibility-families.md.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

import soframe

METHODS = ("kfac", "soap-muon")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility-families.md"
WORDS, SIZE = 50, 32

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
WORDED = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
CAUSAL = {**WORDED, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT |= {"bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 4}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
PIXELS = {**SMALL, "image_size": SIZE, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "embedding_size": 8}
SOUND = {**SMALL, "conv_dim": (8, 8), "conv_kernel": (4, 2), "conv_stride": (2, 2)}
SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "vocab_size": 12}
SOUND |= {"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "ctc_loss_reduction": "mean"}

# By the name of transformers' AutoModelFor...: the types of models and the settings of each.
TRANSFORMERS: dict[str, dict[str, dict[str, Any]]] = {
    "CausalLM": {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), CAUSAL),
        **dict.fromkeys(("phi", "phi3", "olmo", "olmo2", "stablelm", "starcoder2"), CAUSAL),
        **dict.fromkeys(("granite", "cohere", "gpt_neox"), CAUSAL),
        **{name: {**CAUSAL, **EXPERTS} for name in ("mixtral", "qwen2_moe", "qwen3_moe")},
        **dict.fromkeys(("gpt2", "gptj", "gpt_bigcode"), GPT),
        "opt": {**CAUSAL, "ffn_dim": 32, "word_embed_proj_dim": 16},
        "bloom": {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        "mamba": {"vocab_size": WORDS, **SMALL, "state_size": 4, "time_step_rank": 2},
    },
    "MaskedLM": {
        **dict.fromkeys(("bert", "roberta", "electra"), WORDED),
        "albert": {**WORDED, "embedding_size": 8},
        "distilbert": {
            "vocab_size": WORDS,
            "dim": 16,
            "hidden_dim": 32,
            "n_layers": 2,
            "n_heads": 2,
        },
    },
    "Seq2SeqLM": {
        "t5": {
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "bart": {
            "vocab_size": WORDS,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "pad_token_id": 0,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "decoder_start_token_id": 0,
            "max_position_embeddings": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    },
    "ImageClassification": {
        **dict.fromkeys(("vit", "dinov2", "beit"), PIXELS),
        **dict.fromkeys(("resnet", "convnext"), STAGES),
        "swin": {
            "image_size": SIZE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    },
    "CTC": {"wav2vec2": SOUND, "hubert": SOUND},
}
# By name, or by class in timm.models.
VIT = {"img_size": SIZE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
TIMM: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("vit_tiny_patch16_224", "deit_tiny_patch16_224"), VIT),
    "eva02_tiny_patch14_224": {**VIT, "embed_dim": 24},
    "cait_xxs24_224": {**VIT, "init_values": 0.1},
    "swin_tiny_patch4_window7_224": {"img_size": SIZE, "embed_dim": 12, "depths": (2, 2, 1, 1)},
    "coat_lite_tiny": {"img_size": SIZE, "embed_dims": (8, 8, 16, 16), "serial_depths": (1,) * 4},
    "mlp_mixer.MlpMixer": {"img_size": SIZE, "patch_size": 8, "embed_dim": 16, "num_blocks": 2},
    "convmixer.ConvMixer": {"dim": 16, "depth": 2, "patch_size": 4},
    "metaformer.MetaFormer": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    # timm's own tiny models of its families
    **{f"test_{name}": {} for name in ("resnet", "efficientnet", "efficientnet_gn", "byobnet")},
    **{f"test_{name}": {} for name in ("efficientnet_ln", "efficientnet_evos", "convnext")},
    **{f"test_{name}": {} for name in ("vit", "vit4", "nfnet", "mambaout")},
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def of_transformers(auto: str, kind: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and its loss on a batch."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(kind, **TRANSFORMERS[auto][kind])
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{auto}").from_config(config)
    if auto == "ImageClassification":
        pixels = torch.randn(2, 3, SIZE, SIZE, generator=seeded())
        batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    elif auto == "CTC":
        labels = torch.randint(1, 12, (2, 4), generator=seeded())
        batch = {"input_values": torch.randn(2, 200, generator=seeded()), "labels": labels}
    else:
        ids = torch.randint(3, WORDS, (2, 6), generator=seeded())
        batch = {"input_ids": ids, "labels": ids}
    return model, lambda: model(**batch).loss


def imported_timm() -> Any:
    """Import timm, which reads images with torchvision: it, or empty modules in its place."""
    if find_spec("torchvision") is not None:
        import_torchvision()
        return importlib.import_module("timm")
    parts = ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.folder", ".ops")
    parts += (".ops.misc", ".models", ".models.feature_extraction", ".utils")
    names = [f"torchvision{part}" for part in parts]
    sys.modules.update((name, MagicMock()) for name in names)
    try:
        return importlib.import_module("timm")
    finally:
        for name in names:
            del sys.modules[name]


def import_torchvision() -> None:
    """Import torchvision, also its build for GPUs beside a torch for processors."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # its operators are in a library for CUDA; its import names two of them
        for name in ("nms", "qnms"):
            boxes = "Tensor dets, Tensor scores, float iou_threshold"
            torch.library.define(f"torchvision::{name}", f"({boxes}) -> Tensor")
        importlib.import_module("torchvision")


def of_timm(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and its loss on a batch."""
    torch.manual_seed(0)
    timm = imported_timm()
    module, _, kind = name.rpartition(".")
    if module:
        make = getattr(importlib.import_module(f"timm.models.{module}"), kind)
        model = make(num_classes=3, **TIMM[name])
    else:
        model = timm.create_model(name, num_classes=3, **TIMM[name])
    # The first update of a norm's weight can be smaller than the rounding of 1 in float32.
    model.double()
    pixels = torch.randn(2, 3, SIZE, SIZE, generator=seeded(), dtype=torch.float64)
    return model, lambda: nn.functional.cross_entropy(model(pixels), torch.tensor([0, 1]))


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    **{
        f"transformers {kind}": lambda auto=auto, kind=kind: of_transformers(auto, kind)  # type: ignore[misc]
        for auto, kinds in TRANSFORMERS.items()
        for kind in kinds
    },
    **{f"timm {name}": lambda name=name: of_timm(name) for name in TIMM},  # type: ignore[misc]
}


def first_step(family: str, method: str) -> tuple[dict[str, float], set[str]]:
    """Take a step of `soframe.Optimizer`, and check it.

    Returns:
        The share of elements by method, and the reasons of the auxiliary's.
    """
    model, loss = FAMILIES[family]()
    layers = {"layers": "all"} if method == "kfac" else {}
    optimizer = soframe.Optimizer(model, method, lr=1e-3, **layers)
    try:
        loss().backward()
        moved = {n: p.detach().clone() for n, p in model.named_parameters() if _graded(p)}
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert bool(parameter.isfinite().all()), f"{name} is not finite"
            assert name not in moved or not torch.equal(parameter, moved[name]), f"{name} stays"
        report = list(optimizer.report())
    finally:
        optimizer.close()
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    counts: Counter[str] = Counter()
    reasons = set()
    for row in report:
        if row.parameter in sizes:
            assert row.block is not None, f"{row.parameter}: {row.reason}"
            counts[row.method.partition(" / ")[0]] += sizes[row.parameter]
            if row.block == row.parameter and method == "kfac":
                reasons.add(row.note.partition(":")[0])
    return {name: count / sum(sizes.values()) for name, count in counts.items()}, reasons


def _graded(parameter: nn.Parameter) -> bool:
    # Smaller gradients, as behind a layer scale of 1e-6, are lost in the rounding of the weights.
    return parameter.grad is not None and bool((parameter.grad.abs() > 1e-6).any())


HEAD = """# Models of transformers and timm

`soframe.Optimizer` took one step on a tiny, random model of each family. Every parameter is in a
block of the method or of the auxiliary one (AdamW), and moves. Columns have the method's share of
the elements, `kfac` with `layers="all"`. The third has the classes of modules whose parameters
the auxiliary method trains there, for the reasons in the report.

`python -m tests.compatibility.families` wrote this page ({versions}), which is tested by
`tests/compatibility/test_families.py::test_every_parameter_has_a_block_and_moves`. timm imports
torchvision, in the version that belongs to torch: `pip install timm torchvision`. Where that is not
installed, these tests put empty modules in its place, since timm only reads images with it.
"""
TABLE = """
## {library}

| family | `kfac`, % | auxiliary | `soap-muon`, % |
|---|---|---|---|
"""
SHORT = {"its weight is shared": "tied tables", "this bias and": "biases of tied layers"}


def main() -> None:
    """Write the page, or print the rows of the families that the arguments name."""
    tables: dict[str, list[str]] = {"transformers": [], "timm": []}
    for family in sys.argv[1:] or FAMILIES:
        (kfac, reasons), (muon, _) = (first_step(family, method) for method in METHODS)
        named = {next((n for start, n in SHORT.items() if r.startswith(start)), r) for r in reasons}
        others = ", ".join(sorted(f"`{n}`" if n[0].isupper() else n for n in named))
        share = f"{100 * kfac['kfac']:.0f} | {others} | {100 * muon['soap-muon']:.0f}"
        library, _, name = family.partition(" ")
        tables[library].append(f"| {name} | {share} |\n".replace("|  |", "| |"))
        print(tables[library][-1], end="", flush=True)
    if not sys.argv[1:]:
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *tables))
        text = HEAD.format(versions=versions)
        for library, rows in tables.items():
            text += TABLE.format(library=library) + "".join(rows)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
