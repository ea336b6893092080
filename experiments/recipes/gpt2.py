"""GPT-2 of 124 million parameters on tokenised text, with soframe's default optimizer.

Settings: nanoGPT's ``config/train_gpt2.py`` (Karpathy, 2022), which trains on OpenWebText with
AdamW: 0.5 million tokens of a step, 600,000 steps. soframe's rate is the one found on a byte-level
GPT of 0.8 million parameters (docs/benchmarks/defaults.md); for 124 million it is not tuned. The
half cosine goes to zero, nanoGPT's to a tenth.

::

    python -m experiments.recipes tokens --text *.txt --output data/text --tokenizer gpt2
    torchrun --nproc-per-node 8 -m experiments.recipes gpt2 --data data/text --accumulate 5

Run to its end small, over bytes (docs/benchmarks/recipes.md), not at its full size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.libraries import require
from experiments.models import GPT, Sizes
from experiments.recipes import common
from experiments.recipes.common import Built, Common
from experiments.recipes.loaders import Tokens


@dataclass(frozen=True)
class Settings(Common):
    """GPT-2 of 124 million parameters on text (run to its end smaller, over bytes)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 0.04, "adamw": 6e-4}

    data: Path = Path("data/text")
    """Folder of train.bin and val.bin (see the command `tokens`)."""
    output: Path = Path("runs/gpt2")
    steps: int | None = 600_000
    """Optimizer steps (nanoGPT: 600,000)."""
    batch_size: int = 480
    """Windows of a step (nanoGPT: 480 of 1024 tokens)."""
    method: str = "soap-normuon"
    """Method of soframe (docs/benchmarks/defaults.md)."""
    base: Literal["sgd", "adamw", "lamb"] | None = None
    strategy: str = "mem-opt"
    lr: float | None = None
    """Learning rate; None for 0.04 with soframe (docs/benchmarks/defaults.md) and 6e-4 with adamw
    (nanoGPT)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW (nanoGPT)."""
    weight_decay: float = 0.1
    """Weight decay of matrices with adamw (nanoGPT); none with soframe, whose rate was tuned
    without."""
    clip: float | None = 1.0
    """Bound on the norm of gradients, for first-order optimizers (nanoGPT)."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "cosine"
    warmup: float = 2000 / 600_000
    """Fraction of the run in which the rate grows (nanoGPT: 2000 steps)."""
    save_every: int | None = 1000
    """Steps between checkpoints."""
    evaluate_every: int | None = 1000
    """Steps between evaluations (nanoGPT: 1000)."""
    vocabulary: int = 50257
    """Tokens there are; 256 for bytes."""
    length: int = 1024
    """Tokens of a window."""
    width: int = 768
    """Width of the stream."""
    layers: int = 12
    """Layers."""
    heads: int = 12
    """Heads of the attention."""
    model_code: Literal["own", "transformers"] = "own"
    """The model: soframe's, or `GPT2LMHeadModel` of transformers, without dropout."""


def model(settings: Settings) -> nn.Module:
    if settings.model_code == "transformers":
        library = require("transformers")
        gpt2: nn.Module = library.GPT2LMHeadModel(
            library.GPT2Config(
                vocab_size=settings.vocabulary,
                n_positions=settings.length,
                n_embd=settings.width,
                n_layer=settings.layers,
                n_head=settings.heads,
                use_cache=False,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                **dict.fromkeys(("bos_token_id", "eos_token_id")),  # beyond a small vocabulary
            )
        )
        return gpt2
    sizes = Sizes(
        settings.vocabulary, settings.length, settings.width, settings.layers, settings.heads
    )
    return GPT(sizes, fused=True, seed=settings.seed)


def data(settings: Settings) -> tuple[Tokens, Tokens]:
    names = ("train.bin", "val.bin")
    train, test = (
        Tokens(settings.data / name, settings.length, settings.vocabulary) for name in names
    )
    return train, test


def loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the following tokens, in nats."""
    out = model(tokens)
    # transformers returns logits with the vocabulary last, in a container.
    logits = out.logits if hasattr(out, "logits") else out.transpose(1, 2)
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def terms(tokens: Tensor, following: Tensor) -> int:
    return following.numel()


def optimizer(model: nn.Module, settings: Settings, **more: Any) -> Built:
    if settings.optimizer == "soframe" and settings.base is None:
        more["weight_decay"] = 0.0
    return common.optimizer(model, settings, **more)
