"""A model on the meta device is planned: blocks, placement and bytes of any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import soframe
from soframe.comm.recording import Recording
from soframe.planning.workloads import WORKLOADS
from tests import kit

DIM, HEADS, KEYS, HIDDEN, VOCABULARY, LAYERS = 4096, 32, 8, 14_336, 128_256, 32
MATRICES = LAYERS * [
    *2 * [(DIM, DIM)],
    *2 * [(DIM // HEADS * KEYS, DIM)],
    *2 * [(HIDDEN, DIM)],
    (DIM, HIDDEN),
]
HEAD = (VOCABULARY, DIM)


@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_eight_billion_parameters_on_eight_ranks(strategy: str) -> None:
    """K-FAC of sides up to 8,192: triangles, eigenvectors, eigenvalues; two diagonals above."""
    model = WORKLOADS["llama-8b"].model()
    ranks = soframe.Distribution(backend=Recording(world_size=8))
    own = soframe.Preconditioner(
        model, solver="eigen", strategy=strategy, kl_clip=None, distribution=ranks
    )
    own.close()
    memory = [own.placement.memory(rank)["total"] for rank in range(8)]
    sides = [size for matrix in (*MATRICES, HEAD) for size in matrix]
    matrices = [size * (size + 1) // 2 + size**2 + size for size in sides if size <= 8192]
    every = 4 * (sum(matrices) + sum(2 * size for size in sides if size > 8192))
    if strategy == "comm-opt":
        assert memory == [every] * 8
    else:
        assert every / 8 < max(memory) < 1.1 * every / 8
    assert f"at most {max(memory) / 1e9:.3g} GB on a rank" in str(own.report())
    assert own.memory_usage()["total"] == 0


def test_the_plan_is_that_of_the_model_with_weights() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 4, 2), nn.LayerNorm(4), nn.Linear(7, 3))

    with torch.device("meta"):
        planned = kit.precondition(make(), layers="all", auxiliary="adamw")
    own = kit.precondition(make(), layers="all", auxiliary="adamw")
    assert planned.placement.memory(0) == own.placement.memory(0)
    assert planned.placement.digest == own.placement.digest
