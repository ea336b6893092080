"""A training script that ends while statistics still travel, without closing anything."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tests.distributed.training import Case, Run, mean_over

STEPS = 3
TRAVELLING = "statistics are under way"


def main(store: str, strategy: str, how: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    stored = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=stored, rank=rank, world_size=ranks)
    case = Case({"strategy": strategy, "statistics_every": 1, "solve_every": 10})
    run = Run(case, rank, ranks, average=mean_over())
    for step in range(STEPS):
        run.step(step)
    if any(block.under_way for block in run.preconditioner._blocks):
        print(TRAVELLING, flush=True)
    if how == "raises" or (how == "one raises" and rank == 1):
        raise ValueError("the script's own")
    if how == "one raises":
        run.step(STEPS)  # with one that has gone
    if how == "destroys the group":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
