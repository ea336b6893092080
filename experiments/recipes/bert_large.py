r"""BERT-Large, masked language modelling on text, with K-FAC in front of LAMB as in KAISA.

Settings: the second phase of gpauloski/BERT-PyTorch at commit eb22480c, with which KAISA trained
(Pauloski et al., SC 2021): its ``config/bert_pretraining_phase2_config.json`` and the defaults of
``run_pretraining.py``. Three things differ: there is no prediction of the next sentence; the masks
are new in each epoch; the split of the damping and the dtype of the inverses are soframe's
defaults. LAMB is pytorch_optimizer's (``pip install pytorch_optimizer``); ``--base adamw`` needs
another rate, such as 1e-4 at batches of 256 (Devlin et al., 2019).

::

    python -m experiments.recipes tokens --text *.txt --output data/text \
        --tokenizer bert-base-uncased
    torchrun --nproc-per-node 8 -m experiments.recipes bert_large --data data/text --accumulate 256

The first phase has ``--length 128 --batch-size 65536 --steps 7038 --warmup 0.2843 --lr 6e-3
--output runs/bert-phase-1``; the second begins with its weights by ``--init runs/bert-phase-1``.
Run for a few steps on generated files; neither phase was run to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from experiments.libraries import require
from experiments.recipes import common
from experiments.recipes.common import Built, Common
from experiments.recipes.loaders import MaskedTokens, Tokens
from soframe.planning.workloads import Layer


@dataclass(frozen=True)
class Settings(Common):
    """BERT-Large on text, the second phase of KAISA's (not run to its end)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 4e-3, "adamw": 1e-4}

    data: Path = Path("data/text")
    """Folder of train.bin and val.bin (see the command `tokens`)."""
    output: Path = Path("runs/bert-large")
    steps: int | None = 1563
    """Optimizer steps (BERT-PyTorch: 1563)."""
    batch_size: int = 32768
    """Windows of a step (BERT-PyTorch: 32768)."""
    base: Literal["sgd", "adamw", "lamb"] | None = "lamb"
    """Optimizer behind a soframe.Preconditioner (BERT-PyTorch: LAMB)."""
    strategy: str = "hybrid-opt"
    """Distribution strategy on several ranks, on half of them (BERT-PyTorch: HYBRID_OPT, 0.5)."""
    lr: float | None = None
    """Learning rate; None for 4e-3 with soframe and LAMB (BERT-PyTorch), and 1e-4 with adamw, at
    batches of 256 (Devlin et al., 2019)."""
    weight_decay: float = 0.01
    """Weight decay of matrices (Devlin et al., 2019)."""
    clip: float | None = 1.0
    """Bound on the norm of gradients, within LAMB (apex's FusedLAMB: 1)."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "root"
    """Decay of the rate (BERT-PyTorch: a polynomial of degree 0.5)."""
    warmup: float = 0.128
    """Fraction of the run in which the rate grows (BERT-PyTorch)."""
    damping: float | None = 3e-3
    """Damping (BERT-PyTorch)."""
    kl_clip: float | None = 1e-3
    """Bound of the KL clip (BERT-PyTorch)."""
    statistics_every: int | None = 1
    """Steps between statistics (BERT-PyTorch: 1)."""
    solve_every: int | None = 10
    """Steps between solves (BERT-PyTorch: 10)."""
    save_every: int | None = 200
    """Steps between checkpoints (BERT-PyTorch: 200)."""
    evaluate_every: int | None = 100
    """Steps between evaluations."""
    vocabulary: int = 30522
    """Tokens there are (bert-base-uncased)."""
    mask: int = 103
    """The token of the mask (bert-base-uncased)."""
    length: int = 512
    """Tokens of a window (second phase: 512)."""
    positions: int = 512
    """Positions that the model has in both phases (bert-large-uncased: 512)."""
    width: int = 1024
    """Width of the stream."""
    layers: int = 24
    """Layers."""
    heads: int = 16
    """Heads of the attention."""
    model_code: Literal["own", "transformers"] = "own"
    """The model: soframe's layers without dropout, or `BertForMaskedLM` of transformers."""


class BERT(nn.Module):
    """An encoder with the head of masked words: `(batch, length)` to logits, vocabulary last.

    Args:
        settings: Its sizes.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.tokens = nn.Embedding(settings.vocabulary, width)
        self.positions = nn.Embedding(settings.positions, width)
        self.norm = nn.LayerNorm(width)
        layers = (Layer(width, settings.heads, causal=False) for _ in range(settings.layers))
        self.layers = nn.Sequential(*layers)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, settings.vocabulary)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.norm(self.tokens(tokens) + self.positions(places)))
        logits: Tensor = self.head(self.transform(hidden))
        return logits


def model(settings: Settings) -> nn.Module:
    if settings.model_code == "transformers":
        library = require("transformers")
        bert: nn.Module = library.BertForMaskedLM(
            library.BertConfig(
                vocab_size=settings.vocabulary,
                max_position_embeddings=settings.positions,
                hidden_size=settings.width,
                intermediate_size=4 * settings.width,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
            )
        )
        return bert
    return BERT(settings)


def data(settings: Settings) -> tuple[MaskedTokens, MaskedTokens]:
    names = ("train.bin", "val.bin")
    train, test = (
        MaskedTokens(
            Tokens(settings.data / name, settings.length, settings.vocabulary),
            settings.vocabulary,
            settings.mask,
        )
        for name in names
    )
    return train, test


def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the masked tokens, in nats."""
    out = model(tokens)
    logits = out.logits if hasattr(out, "logits") else out
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def terms(tokens: Tensor, labels: Tensor) -> Tensor:
    return labels != -100


def optimizer(model: nn.Module, settings: Settings, **more: Any) -> Built:
    if settings.optimizer != "soframe":
        return common.optimizer(model, settings)
    # The head has a side of the vocabulary's size (BERT-PyTorch skips it and its transform).
    is_own_model = settings.model_code == "own"
    more["skip"] = ("^head$", "^transform") if is_own_model else ("^cls",)
    if settings.strategy == "hybrid-opt":
        more["strategy"] = soframe.strategies.HybridOpt(gradient_workers=0.5)
    return common.optimizer(model, settings, **more)
