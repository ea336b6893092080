"""Files of fitted curvatures: factors and second-order data by layer, with their meaning."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from soframe import checkpoint
from soframe.blocks.block import Block, PlacedBlocks
from soframe.comm.agreement import gather_json
from soframe.products.fitting import Fit, Progress, Weights
from soframe.registry import describe
from soframe.state import durable

KEY, MEANING = "curvature", "meaning"
"""The keys of a saved curvature."""


class Fitted(checkpoint.Owner, Protocol):
    """A fitted curvature."""

    @property
    def placed(self) -> PlacedBlocks:
        """Its blocks, with their places and the backend."""

    @property
    def fitting(self) -> Fit:
        """Its fit."""

    @property
    def names(self) -> Mapping[Block, Mapping[str, str]]:
        """For each block, the names in the model by the names in the block."""

    def so_far(self) -> tuple[Progress, Weights]:
        """Return how far a fit has come, and its numbers of samples; none in training."""

    def describe_fit(self) -> tuple[str, str]:
        """Return the kind of Fisher, and the strategy with its ranks."""

    def adopt(self) -> None:
        """Take the second-order data that are there, unless a fit is under way."""


def save(curvature: Fitted, folder: str | os.PathLike[str]) -> Path:
    """Save a curvature with its meaning; return the checkpoint. Every rank must call."""
    tensors = checkpoint.part(curvature)
    text = json.dumps(_meaning(curvature))
    contents = {KEY: tensors, MEANING: {"text": text}}
    ranks = durable.Ranks.of_backend(curvature.placed.backend)
    return durable.save_on(ranks, folder, contents, sharded=True, keep=1)


def load(curvature: Fitted, folder: str | os.PathLike[str]) -> None:
    """Load the last curvature that was saved into a folder; every rank must call.

    Raises:
        ValueError: If the folder has none, or it is damaged, or of another model or method.
    """
    ranks = durable.Ranks.of_backend(curvature.placed.backend)
    path = durable.latest_on(ranks, folder)
    if path is None:
        raise ValueError(f"{folder} has no curvature that this object could load")
    meaning = json.loads(_read_text(path, ranks))
    progress, (_, places) = meaning["progress"], curvature.describe_fit()
    batches = progress.pop("batches")
    if any(batches) and meaning["places"] != places:
        raise ValueError(
            f"the curvature in {folder} is from an unfinished fit on {len(batches)} rank(s) "
            f"under {meaning['places']}, and here are {places}: resume it with the same"
        )
    checkpoint.load(curvature, path, key=KEY)
    unfinished = bool(progress["gathering"])
    counted = batches[curvature.placed.rank] if unfinished else 0
    curvature.fitting.go_on(Progress(counted, **progress), meaning["weights"])
    curvature.adopt()


def _meaning(curvature: Fitted) -> dict[str, Any]:
    """Return the meaning of the tensors, as in JSON; every rank must call."""
    progress, weights_of = curvature.so_far()
    fisher, places = curvature.describe_fit()
    every = gather_json(curvature.placed.backend, progress.batches)
    blocks: dict[str, dict[str, Any]] = {}
    for block in curvature.placed.blocks:
        weights = weights_of.get(block.name, {})
        factors: dict[str, dict[str, Any]] = {}
        for factor in block.factors:
            factors[factor.name] = {
                "side": factor.side,
                "kind": str(factor.kind),
                "degree": factor.degree,
                "mean over": factor.mean_over,
                "weight": weights.get(factor.name),
            }
        blocks[block.name] = {
            "parameters": curvature.names[block],
            "shape": list(block.shape),
            "method": describe(block.method),
            "factors": factors,
        }
    return {
        "fisher": fisher,
        "blocks": blocks,
        "weights": weights_of,
        "progress": {**asdict(progress), "batches": every},
        "places": places,
    }


def _read_text(path: Path, ranks: durable.Ranks) -> str:
    """Return the meaning of a saved curvature."""
    read = {MEANING: {"text": ""}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to load in a single process")
        dcp_load(
            read,
            storage_reader=checkpoint.PlainReader(path),
            planner=checkpoint.PlainPlanner(),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )
    return read[MEANING]["text"]
