"""BERT over bytes, masked language modelling on Python's standard library, with K-FAC before AdamW.

Model, masks and loss are those of `experiments.recipes.bert_large`, small, with weights as large as
the width asks for; tokens are bytes, and the mask is one more. Text is the running interpreter's:
losses compare within one version of Python.

Run to its end on a CPU (docs/benchmarks/applications.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from torch import nn
from torch.utils.data import TensorDataset

from experiments.data import standard_library
from experiments.models import BYTES
from experiments.recipes import bert_large
from experiments.recipes.bert_large import loss, terms
from experiments.recipes.loaders import MaskedTokens

__all__ = ["Settings", "data", "loss", "model", "terms"]


@dataclass(frozen=True)
class Settings(bert_large.Settings):
    """BERT over the bytes of Python's standard library (rates of `benchmarks.applications`)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 1e-2, "adamw": 3e-3}

    data: Path = Path("data")
    """Not used: the text is the standard library's."""
    output: Path = Path("runs/bert-bytes")
    steps: int | None = 200
    """Optimizer steps."""
    batch_size: int = 32
    """Windows of a step."""
    base: Literal["sgd", "adamw", "lamb"] | None = "adamw"
    """Optimizer behind a soframe.Preconditioner."""
    strategy: str = "comm-opt"
    """Distribution strategy on several ranks."""
    lr: float | None = None
    """Learning rate; None for the rate of the optimizer."""
    clip: float | None = None
    """Bound on the norm of gradients of AdamW, or of LAMB's behind soframe; None for no clip."""
    schedule: Literal["constant", "linear", "cosine", "root", "milestones"] = "linear"
    """Decay of the rate."""
    warmup: float = 0.1
    """Fraction of the run in which the rate grows."""
    kl_clip: float | None = None
    """Bound of the KL clip; None for soframe's default."""
    decay: float | None = 0.95
    """Decay of the running factors."""
    statistics_every: int | None = 10
    """Steps between statistics."""
    solve_every: int | None = 50
    """Steps between solves."""
    save_every: int | None = 1000
    """Steps between checkpoints."""
    evaluate_every: int | None = 50
    """Steps between evaluations."""
    vocabulary: int = BYTES + 1
    """Bytes, and the mask."""
    mask: int = BYTES
    """The token of the mask."""
    length: int = 32
    """Bytes of a window; it divides 128."""
    positions: int = 32
    """Positions of the model."""
    width: int = 64
    """Width of the stream."""
    layers: int = 2
    """Layers."""
    heads: int = 4
    """Heads of the attention."""


def model(settings: Settings) -> nn.Module:
    bert = bert_large.BERT(settings)
    for module in bert.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=settings.width**-0.5)
    return bert


def data(settings: Settings) -> tuple[MaskedTokens, MaskedTokens]:
    (trained, _), (held_out, _) = standard_library()
    sets = []
    for text in (trained, held_out):
        windows = TensorDataset(text.reshape(-1, settings.length))
        sets.append(MaskedTokens(windows, settings.vocabulary, settings.mask))
    train, test = sets
    return train, test
