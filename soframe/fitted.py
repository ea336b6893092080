"""Files of fitted curvatures: factors and second-order data by layer, with their meaning."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from soframe import checkpoint, resume
from soframe.comm.agreement import gather_texts
from soframe.comm.base import Backend
from soframe.curvature import Curvature
from soframe.products.fitting import Progress
from soframe.registry import describe
from soframe.state import saving

KEY, MEANING = "curvature", "meaning"
"""The keys of a saved curvature."""


@dataclass(frozen=True)
class Fitted:
    """A fitted curvature, as a checkpoint saves and loads it."""

    curvature: Curvature
    backend: Backend
    stage: str = ""

    def land(self, call: str) -> None:
        """Install background solves: it has none."""

    def header(self) -> dict[str, Any]:
        """Return the state without its tensors."""
        return resume.header(self.curvature, self.curvature.counts)

    def check_header(self, saved: Any) -> None:
        """Raise ValueError unless a state can be loaded."""
        resume.check_header(self.curvature, saved)

    def agree_on_state(self, check: Callable[[], object], common: Callable[[], str]) -> None:
        """Raise on all ranks if one cannot load its state."""
        saving.agree(self.backend, check, common, self.curvature.parts.stages)

    def load_checked(
        self, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> None:
        """Take a state that ``check`` returns, or raises."""
        resume.load(self.curvature, check)


def save(curvature: Curvature, folder: str | os.PathLike[str]) -> Path:
    """Save a curvature with its meaning; return the checkpoint. Every rank must call."""
    tensors = checkpoint.part(Fitted(curvature, curvature.parts.backend))
    text = json.dumps(_meaning(curvature))
    return checkpoint.save(folder, {KEY: tensors, MEANING: {"text": text}}, sharded=True, keep=1)


def load(curvature: Curvature, folder: str | os.PathLike[str]) -> None:
    """Load the last curvature that was saved into a folder; every rank must call.

    Raises:
        ValueError: If the folder has none, or it is damaged, or of another model or method.
    """
    path = checkpoint.latest(folder)
    if path is None:
        raise ValueError(f"{folder} has no curvature that this object could load")
    meaning = json.loads(_read_text(path))
    progress, places = meaning["progress"], _places(curvature)
    batches = progress.pop("batches")
    if any(batches) and meaning["places"] != places:
        raise ValueError(
            f"the curvature in {folder} is of a fit that goes on, on {len(batches)} rank(s) "
            f"under {meaning['places']}, and here are {places}: resume it with the same"
        )
    checkpoint.load(Fitted(curvature, curvature.parts.backend), path, key=KEY)
    unfinished = bool(progress["gathering"])
    counted = batches[curvature.parts.backend.rank] if unfinished else 0
    curvature.fitting.go_on(Progress(counted, **progress), meaning["weights"])
    curvature.adopt()


def _places(curvature: Curvature) -> str:
    """Return the strategy and ranks, with which alone an unfinished fit goes on."""
    return f"{curvature.strategy!r} on {curvature.parts.backend.world_size} rank(s)"


def _meaning(curvature: Curvature) -> dict[str, Any]:
    """Return the meaning of the tensors, as in JSON; every rank must call."""
    fitting, backend = curvature.fitting, curvature.parts.backend
    every = [int(text) for text in gather_texts(backend, str(fitting.progress.batches))]
    blocks: dict[str, dict[str, Any]] = {}
    for block in curvature.blocks:
        weights = fitting.weights.get(block.name, {})
        factors = {
            factor.name: {
                "side": factor.side,
                "kind": factor.kind,
                "degree": factor.degree,
                "mean over": factor.mean_over,
                "weight": weights.get(factor.name),
            }
            for factor in block.factors
        }
        blocks[block.name] = {
            "parameters": curvature.names[block],
            "shape": list(block.shape),
            "method": describe(block.method),
            "factors": factors,
        }
    return {
        "fisher": curvature.parts.fisher.kind,
        "blocks": blocks,
        "weights": fitting.weights,
        "progress": {**asdict(fitting.progress), "batches": every},
        "places": _places(curvature),
    }


def _read_text(path: Path) -> str:
    """Return the meaning of a saved curvature."""
    read = {MEANING: {"text": ""}}
    alone = not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to load in a single process")
        dcp_load(
            read,
            storage_reader=checkpoint.PlainReader(path),
            planner=checkpoint.PlainPlanner(),
            no_dist=alone,
        )
    return read[MEANING]["text"]
