"""Ranks that do different things, or less: errors on every rank, or the same as zero gradients."""

from __future__ import annotations

import pytest
import torch

from soframe.capture.loss_scale import LossScale
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run

pytestmark = pytest.mark.distributed


def differ(run: Run, what: str) -> None:
    conv = run.model.conv
    if what == "frozen":
        conv.requires_grad_(False)
    elif what == "replaced":
        conv.weight = torch.nn.Parameter(conv.weight.detach().clone())
    elif what == "a module more":
        run.model.more = torch.nn.Linear(2, 2)
    elif what == "sparse":
        run.model.unused.weight.grad = torch.zeros(3, 3).double().to_sparse()
    else:
        scaler = torch.amp.GradScaler("cpu")  # which has not unscaled anything
        run.preconditioner.curvature.parts.loss_scale = LossScale(scaler)


CHANGES = {
    "frozen": "frozen, thawed or replaced on 1 of 3 ranks",
    "replaced": "frozen, thawed or replaced on 1 of 3 ranks",
    "a module more": "frozen, thawed or replaced on 1 of 3 ranks",
    "sparse": "needs dense gradients",
    "scaled": "the gradients are still scaled",
}


def differ_in_a_step(rank: int, ranks: int, what: str, gradients: str) -> list[str]:
    """The ranks reach soframe first: nobody else averages gradients."""
    options = {"gradients": gradients, "statistics_every": 2}
    run = Run(Case(options), rank, ranks)
    run.step(0)
    try:
        run.step(1, lambda run: differ(run, what) if rank == 1 else None)
    except (RuntimeError, TypeError) as error:
        return [str(error)]
    return ["no error"]


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_one_rank_alone_does_to_its_model_is_an_error_on_all(what):
    for kind in ("local",) if what == "sparse" else ("local", "averaged"):
        for (error,) in run_ranks(differ_in_a_step, 3, what, kind):
            assert CHANGES[what] in error, (kind, error)
