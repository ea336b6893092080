"""Settings and checkpoints of kfac-pytorch, by its figures (`tests/parity`)."""

from __future__ import annotations

import enum
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from benchmarks.parity_kfac_pytorch import CASES, LR, STEPS, Case, attach_soframe, build, train
from soframe.integrations import kfac_pytorch
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse
from soframe.strategies import CommOpt, HybridOpt, MemOpt, memory_cost
from soframe.testing import compare
from tests.distributed.harness import RankFailure, run_ranks

STORED = json.loads(
    (Path(__file__).parents[1] / "parity" / "kfac_pytorch.json").read_text(encoding="utf-8")
)


class AssignmentStrategy(enum.Enum):
    """Has the names of kfac-pytorch's."""

    COMPUTE = 1
    MEMORY = 2


class ComputeMethod(enum.Enum):
    EIGEN = 1
    INVERSE = 2


class DistributedStrategy(enum.Enum):
    COMM_OPT = 1
    MEM_OPT = 2
    HYBRID_OPT = 3
    OTHER = 4


def scale() -> float:
    return 2.0


def every(step: int) -> int:
    return 1 + step


# -- settings --------------------------------------------------------------------------------------

DEFAULTS = {
    "method": "kfac",
    "solver": Eigen(),
    "strategy": CommOpt(),
    "damping": 0.001,
    "decay": 0.95,
    "kl_clip": 0.001,
    "lr": 0.1,
    "statistics_every": 1,
    "solve_every": 1,
    "skip": (),
    "statistics": soframe.Statistics(scaling="kaisa"),
    "grad_scaler": None,
}


def in_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {"statistics": soframe.Statistics(scaling="kaisa", dtype=dtype)}


def named(value: object) -> str:
    """A name that is the same in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"factor_update_steps": 5}, {"statistics_every": 5}),
        ({"factor_update_steps": every}, {"statistics_every": every}),
        ({"inv_update_steps": 7}, {"solve_every": 7}),
        ({"damping": 0.02}, {"damping": 0.02}),
        ({"factor_decay": 0.5}, {"decay": 0.5}),
        ({"kl_clip": None}, {"kl_clip": None}),
        ({"lr": 0.3}, {"lr": 0.3}),
        ({"assignment_strategy": "memory"}, {"strategy": CommOpt(cost=memory_cost)}),
        (
            {"assignment_strategy": AssignmentStrategy.MEMORY},
            {"strategy": CommOpt(cost=memory_cost)},
        ),
        ({"colocate_factors": False}, {"strategy": CommOpt(colocate=False)}),
        ({"compute_method": "inverse"}, {"solver": Inverse(split="full")}),
        ({"compute_method": ComputeMethod.INVERSE}, {"solver": Inverse(split="full")}),
        ({"compute_eigenvalue_outer_product": False}, {}),
        ({"grad_worker_fraction": DistributedStrategy.COMM_OPT}, {}),
        ({"grad_worker_fraction": 1}, {}),
        ({"grad_worker_fraction": DistributedStrategy.MEM_OPT}, {"strategy": MemOpt()}),
        ({"grad_worker_fraction": 0}, {"strategy": MemOpt()}),
        ({"grad_worker_fraction": "mem_opt"}, {"strategy": MemOpt()}),
        ({"grad_worker_fraction": DistributedStrategy.HYBRID_OPT}, {"strategy": HybridOpt()}),
        ({"grad_worker_fraction": 0.25}, {"strategy": HybridOpt(gradient_workers=0.25)}),
        ({"grad_scaler": scale}, {"grad_scaler": scale}),
        ({"factor_dtype": torch.float64}, in_dtype(torch.float64)),
        ({"inv_dtype": torch.float32}, in_dtype(torch.float32)),
        ({"skip_layers": ["Conv2d"]}, {"skip": ("Conv2d",)}),
    ],
    ids=named,
)
def test_each_argument(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """What has a counterpart is translated, without a warning."""
    found = kfac_pytorch.settings(**given)
    assert found == {**DEFAULTS, **expected}
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2))
    soframe.Preconditioner(model, **found).close()


@pytest.mark.parametrize(
    ("given", "why", "expected"),
    [
        ({"accumulation_steps": 4}, "accumulation_steps=4.*are counted", {}),
        ({"allreduce_bucket_cap_mb": 1.0}, "allreduce_bucket_cap_mb=1.0.*share buffers", {}),
        ({"symmetry_aware": True}, "symmetry_aware=True.*triangles", {}),
        ({"update_factors_in_hook": False}, "update_factors_in_hook=False.*strategy", {}),
        ({"loglevel": 20}, "loglevel=20.*report", {}),
        ({"damping": scale}, "compute_eigenvalue_outer_product=True.*damping", {"damping": scale}),
        (
            {"factor_dtype": torch.float16},
            "factor_dtype=torch.float16 becomes torch.float32",
            in_dtype(torch.float32),
        ),
        (
            {"grad_worker_fraction": 0, "colocate_factors": False},
            "colocate_factors=False has no meaning",
            {"strategy": MemOpt()},
        ),
    ],
    ids=named,
)
def test_what_has_no_counterpart_is_warned_of(
    given: dict[str, Any], why: str, expected: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match=f"soframe: {why}") as caught:
        assert kfac_pytorch.settings(**given) == {**DEFAULTS, **expected}
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"model": None}, TypeError, "no argument model; it has factor_update_steps"),
        ({"compute_method": "newton"}, ValueError, "compute_method must be one of EIGEN, INVERSE"),
        ({"assignment_strategy": 3}, ValueError, "assignment_strategy must be one of"),
        ({"grad_worker_fraction": 1.5}, ValueError, r"grad_worker_fraction must be in \[0, 1\]"),
        ({"grad_worker_fraction": DistributedStrategy.OTHER}, ValueError, "grad_worker_fraction"),
        ({"grad_worker_fraction": "all"}, ValueError, "grad_worker_fraction must be one of COMM"),
        ({"inv_dtype": torch.int64}, ValueError, "inv_dtype must be a dtype of floating-point"),
        ({"skip_layers": "head"}, TypeError, r"a list of patterns: pass \['head'\]"),
    ],
)
def test_what_has_no_meaning_is_an_error(
    given: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        kfac_pytorch.settings(**given)


# -- checkpoints -----------------------------------------------------------------------------------


def arguments(case: Case) -> dict[str, Any]:
    """What the case is for kfac-pytorch."""
    return {
        "factor_update_steps": case.statistics_every,
        "inv_update_steps": case.solve_every,
        "damping": case.damping,
        "factor_decay": case.decay,
        "kl_clip": case.kl_clip,
        "lr": LR,
        "compute_method": case.solver,
    }


def checkpoint(case: Case, prefix: str = "") -> dict[str, Any]:
    """The state that kfac-pytorch had after the steps whose figures are stored."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, figures in STORED[case.name].items():
        layer, _, what = name.rpartition(".")
        if what in ("A", "G"):
            matrix = torch.tensor(figures, dtype=torch.float64)
            size = round(len(figures) ** 0.5)
            layers.setdefault(f"{prefix}{layer}", {})[what] = matrix.view(size, size)
    constants = {k: v for k, v in arguments(case).items() if k != "compute_method"}
    return {"steps": STEPS, **constants, "layers": layers}


def resumed(case: Case, prefix: str = "") -> tuple[nn.Module, soframe.Preconditioner]:
    model, _ = build(case)
    own = soframe.Preconditioner(model, **kfac_pytorch.settings(**arguments(case)))
    kfac_pytorch.load_state(own, checkpoint(case, prefix))
    return model, own


@pytest.mark.parametrize("name", ["conv, eigen", "conv, inverse", "sequence, eigen"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(name: str, prefix: str) -> None:
    """After the checkpoint comes the same batch once more, with the initial weights."""
    case = next(case for case in CASES if case.name == name)
    runs = []
    for resume in (False, True):
        if resume:
            model, own = resumed(case, prefix)
        else:
            holder: list[Any] = []

            def attach(network: nn.Module, case: Case, holder: list[Any] = holder) -> Any:
                holder.append(network)
                step, factors = attach_soframe(network, case)
                holder.append(step)
                return step, factors

            train(case, attach)
            model, step = holder
            own = step.__self__
            start, _ = build(case)
            model.load_state_dict(start.state_dict())
        _, data = build(case)
        model.zero_grad()
        ((inputs, targets),) = data[0]
        nn.functional.mse_loss(model(inputs), targets).backward()
        own.step()
        runs.append([p.grad for p in model.parameters()])
        assert own.state_dict()["step"] == STEPS + 1
    for other, expected in zip(runs[1], runs[0], strict=True):
        compare(other, expected, name, rtol=1e-9)


CASE = CASES[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.pop("steps"), "no 'steps'"),
        (lambda s: s.pop("layers"), "include_factors=True"),
        (lambda s: s["layers"].pop("0"), r"other layers: it lacks \['0'\]"),
        (lambda s: s.update(steps=2.5), r"steps of the state must be an integer, not 2\.5"),
        (lambda s: s.update(steps=-1), "steps of the state must be at least 0"),
        (lambda s: s["layers"]["0"].update(G=None), "'0' of the state lacks the factor G"),
        (lambda s: s["layers"]["0"]["A"].fill_(torch.nan), "A of layer '0' is not finite"),
        (lambda s: s["layers"]["0"].update(A=torch.eye(3)), r"is \(3, 3\), not of shape \(4, 4\)"),
    ],
)
def test_other_states_are_refused_and_change_nothing(change: Any, why: str) -> None:
    _, own = resumed(CASE)
    before = soframe.checkpoint.seal(own.state_dict())["checksums"]
    state = checkpoint(CASE)
    change(state)
    with pytest.raises(ValueError, match=why):
        kfac_pytorch.load_state(own, state)
    assert soframe.checkpoint.seal(own.state_dict())["checksums"] == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scaling": "fisher"}, "scaling='kaisa'"),
        ({"method": "kfac-reduce", "scaling": "kaisa"}, "method='kfac'"),
    ],
)
def test_other_preconditioners_are_refused(options: dict[str, Any], why: str) -> None:
    model, _ = build(CASE)
    own = soframe.Preconditioner(model, lr=LR, **grouped(options))
    with pytest.raises(ValueError, match=why):
        kfac_pytorch.load_state(own, checkpoint(CASE))


def test_layers_without_factors_get_them_later() -> None:
    _, own = resumed(CASE)
    state = checkpoint(CASE)
    state["layers"]["0"] = {"A": None, "G": None}
    kfac_pytorch.load_state(own, state)
    assert [block.mass for block in own.blocks] == [0.0, 1.0]


def test_other_settings_are_warned_of() -> None:
    model, _ = build(CASE)
    own = soframe.Preconditioner(
        model, **kfac_pytorch.settings(**{**arguments(CASE), "damping": 0.5})
    )
    with pytest.warns(
        UserWarning, match="the checkpoint has damping=0.003 and .* damping=0.5"
    ) as caught:
        kfac_pytorch.load_state(own, checkpoint(CASE))
    assert len(caught) == 1


def on_ranks(rank: int, world_size: int, spoilt: bool) -> list[Tensor]:
    model, data = build(CASE)
    given = {**arguments(CASE), "grad_worker_fraction": 0}
    own = soframe.Preconditioner(model, **kfac_pytorch.settings(**given))
    state = checkpoint(CASE)
    if spoilt and rank == 1:
        del state["layers"]["0"]
    kfac_pytorch.load_state(own, state)
    ((inputs, targets),) = data[0]
    nn.functional.mse_loss(model(inputs), targets).backward()
    own.step()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


@pytest.mark.distributed
def test_two_ranks_load_as_one_does_or_none() -> None:
    alone = on_ranks(0, 1, False)
    for gradients in run_ranks(on_ranks, 2, False):
        for other, expected in zip(gradients, alone, strict=True):
            compare(other, expected, "two ranks", rtol=1e-9)
    for failure in run_ranks(on_ranks, 2, True, check=False):
        assert isinstance(failure, RankFailure)
        assert isinstance(failure.exception, ValueError)
