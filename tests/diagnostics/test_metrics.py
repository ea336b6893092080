"""Metrics against what is worked out beside them, by hand or from the definition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.diagnostics import scalars
from soframe.diagnostics.metrics import spectrum
from soframe.settings import grouped
from soframe.solvers import Eigen
from soframe.specs import FactorSpec
from tests.curvature import randn


class Training:
    """A small network, whose first layer some batches do not reach."""

    def __init__(self, method: Any = "kfac", lr: float = 0.1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        settings = {"statistics_every": 1, "solve_every": 1, **options}
        self.own = soframe.Preconditioner(
            self.model, method, optimizer=self.optimizer, **grouped(settings)
        )
        self.number = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        x = randn(8, 4, seed=self.number)
        self.model(x).square().sum(1).mean().backward()
        self.number += 1

    def step(self, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
        self.backward()
        between()
        self.own.step()
        found = self.own.metrics()
        self.optimizer.step()
        return found


def ages(found: dict[str, Any], kind: str) -> list[int | None]:
    return [one[kind] for block in found["blocks"].values() for one in block["factors"].values()]


# -- staleness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("statistics", "solves"), [(1, 1), (2, 4), (3, 6), (1, 5)])
def test_ages_count_the_steps_since_the_interval_was_due(statistics: int, solves: int) -> None:
    training = Training(statistics_every=statistics, solve_every=solves)
    assert set(ages(training.own.metrics(), "statistics_age")) == {None}
    for step in range(9):
        found = training.step()
        assert set(ages(found, "statistics_age")) == {step % statistics}
        assert set(ages(found, "solve_age")) == {step % solves}
        assert found["step"] == step + 1


def test_data_of_the_background_are_as_old_as_what_was_solved() -> None:
    training = Training(solve_every=4, background=2)
    # Solved in the step at first, then at 4 and 8, in use from 6 and 10 on.
    found = [training.step() for _ in range(12)]
    each = [set(ages(one, "solve_age")) for one in found]
    assert each == [{n} for n in (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3)]
    training.own.close()


def test_blocks_take_turns() -> None:
    training = Training(solve_every=4, stagger=True)
    found = [training.step()["blocks"] for _ in range(9)]
    each = [[one[name]["factors"]["A"]["solve_age"] for one in found] for name in ("0", "2")]
    assert each[0] != each[1]
    for own in each:
        assert max(own[4:]) == 3
        assert 0 in own[4:]


def test_methods_of_gradients_have_ages_too() -> None:
    training = Training("shampoo", solve_every=3, kl_clip=None)
    for step in range(5):
        found = training.step()
        assert set(ages(found, "statistics_age")) == {0}
        assert set(ages(found, "solve_age")) == {step % 3}


def test_a_scale_that_is_dropped_has_no_age() -> None:
    training = Training("ekfac", solve_every=3)
    found = [training.step()["blocks"]["0"]["factors"]["S"] for _ in range(5)]
    # It is gathered in the basis, from the step after the solve on, and dropped with the basis.
    assert [one["statistics_age"] for one in found] == [None, 0, 0, None, 0]


def test_ages_survive_a_state_and_a_change_of_the_model() -> None:
    training = Training(statistics_every=2, solve_every=4)
    for _ in range(6):
        found = training.step()
    other = Training(statistics_every=2, solve_every=4)
    other.own.load_state_dict(training.own.state_dict())
    loaded = other.own.metrics()
    for kind in ("statistics_age", "solve_age"):
        assert ages(loaded, kind) == ages(found, kind) == [1] * 4
    training.model[2].requires_grad_(False)
    found = training.step()
    assert found["blocks"].keys() == {"0", "2"}  # as a frozen layer keeps its block
    assert set(ages(found, "solve_age")) == {2}


# -- norms ---------------------------------------------------------------------------------------


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.detach().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("method", ["kfac", "soap", "muon"])
def test_norms_are_those_of_gradients_directions_and_weights(method: str) -> None:
    clip = {"norm_clip": 1e-3} if method == "kfac" else {}
    training = Training(method, auxiliary="adamw", **clip)
    training.own.measure(norms=True)
    for _ in range(3):
        training.backward()
        gradients = {p: p.grad.clone() for p in training.model.parameters() if p.grad is not None}
        training.own.step()
        found = training.own.metrics()
        for name, block in found["blocks"].items():
            own = [p for b in training.own.blocks if b.name == name for p in b.parameters.values()]
            assert block["gradient_norm"] == pytest.approx(norm([gradients[p] for p in own]))
            assert block["direction_norm"] == pytest.approx(norm([p.grad for p in own]))  # type: ignore[misc]
            assert block["weight_norm"] == pytest.approx(norm(own))
        every = list(training.model.parameters())
        assert found["norms"] == {
            "gradient_norm": pytest.approx(norm([gradients[p] for p in every])),
            "direction_norm": pytest.approx(norm([p.grad for p in every])),  # type: ignore[misc]
            "weight_norm": pytest.approx(norm(every)),
        }
        training.optimizer.step()


def test_norms_are_there_for_steps_that_were_to_take_them() -> None:
    training = Training()
    found = training.step()
    assert not found["measured"]
    assert found["blocks"]["0"]["weight_norm"] is None
    assert set(found["norms"].values()) == {None}
    training.own.measure(norms=True)
    assert training.step()["measured"]
    training.own.measure(norms=False)
    assert not training.step()["measured"]


def test_large_gradients_have_norms() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6))  # float32, whose squares end at 3e38
    own = soframe.Preconditioner(model, kl_clip=None)
    own.measure(norms=True)
    model(torch.randn(8, 4)).square().mean().backward()
    wide = norm([p.grad.double() for p in model.parameters()])  # type: ignore[union-attr]
    for parameter in model.parameters():
        parameter.grad *= 1e25  # type: ignore[operator]
    own.step()
    assert own.metrics()["blocks"]["0"]["gradient_norm"] == pytest.approx(1e25 * wide, rel=1e-5)


def test_how_far_weights_move_is_measured_where_soframe_moves_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = soframe.Optimizer(model, "muon", lr=0.1, weight_decay=0.3, auxiliary_lr=0.01)
    optimizer.preconditioner.measure(norms=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    found = optimizer.metrics()
    for name, parameter in model.named_parameters():
        moved = norm([parameter - before[name]])
        assert found["blocks"][name]["update_norm"] == pytest.approx(moved, rel=1e-5)
        assert found["blocks"][name]["weight_norm"] == pytest.approx(norm([before[name]]), rel=1e-5)
    rates = {method: group["lr"] for method, group in found["param_groups"].items()}
    assert sorted(rates.values()) == [0.01, 0.1]
    json.dumps(found, allow_nan=False)
    optimizer.preconditioner.measure(norms=False)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.metrics()["blocks"]["0.weight"]["update_norm"] is None


# -- what is in force ----------------------------------------------------------------------------


def test_clip_factors_are_those_by_which_directions_were_scaled() -> None:
    clips = {"kl_clip": 1e-5, "norm_clip": 2e-3}
    each = {
        "both": Training(**clips),
        "kl_clip": Training(kl_clip=1e-5),
        "norm_clip": Training(kl_clip=None, norm_clip=2e-3),
        "none": Training(kl_clip=None),
    }
    factors = {}
    for name, training in each.items():
        training.own.measure(norms=True)
        found = training.step()
        factors[name] = found["norms"]["direction_norm"]
        if name == "both":
            both = found
        assert (found["kl_clip"] is None) == (name in ("norm_clip", "none"))
    kl, length = (factors[name] / factors["none"] for name in ("kl_clip", "norm_clip"))
    assert both["kl_clip_factor"] == pytest.approx(kl)
    assert both["norm_clip_factor"] == pytest.approx(length)
    assert both["clip_factor"] == min(both["kl_clip_factor"], both["norm_clip_factor"]) < 1
    assert (both["kl_clip"], both["norm_clip"]) == (1e-5, 2e-3)
    none = each["none"].own.metrics()
    assert (none["kl_clip_factor"], none["clip_factor"]) == (None, 1.0)


def test_the_damping_of_the_last_step_and_of_a_block() -> None:
    training = Training(damping=lambda step: 0.5 / (step + 1))
    assert training.own.metrics()["damping"] is None
    training.step()
    found = training.step()
    assert found["damping"] == 0.25
    training.own.blocks[0].damp(7.0)
    found = training.step()
    assert [block["damping"] for block in found["blocks"].values()] == [7.0, pytest.approx(0.5 / 3)]


def test_relative_damping_is_told_as_what_is_added() -> None:
    training = Training(damping="relative", decay=0.0)
    found = training.step()
    for block in training.own.blocks:
        a, g = block.running["A"][0], block.running["G"][0]
        mean = float(a.trace() / len(a) * g.trace() / len(g))
        assert found["blocks"][block.name]["damping"] == pytest.approx(0.1 * mean)
        assert found["blocks"][block.name]["damping_multiple"] == 0.1


class Picky(Eigen):
    """Fails on factors of one size."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.shape[-1] == 5:
            raise torch.linalg.LinAlgError("not this one")
        return super().solve(matrix, damping)


def test_failed_solves_are_counted_where_they_failed() -> None:
    training = Training(solver=Picky())
    training.own.measure(norms=True)
    for _ in range(3):
        found = training.step()
    first, second = found["blocks"].values()
    assert [one["failed_solves"] for one in first["factors"].values()] == [3, 0]
    assert [one["failed_solves"] for one in second["factors"].values()] == [0, 0]
    assert found["counters"]["failed_solves"] == 3
    assert [one["solve_age"] for one in first["factors"].values()] == [None, None]
    assert not first["active"]
    assert found["norms"]["direction_norm"] == second["direction_norm"]


def test_a_skipped_update_has_no_norms() -> None:
    training = Training()
    training.own.measure(norms=True)
    training.step()

    def poison() -> None:
        next(training.model.parameters()).grad[0] = math.nan  # type: ignore[index]

    found = training.step(poison)
    assert not found["updated"]
    assert found["counters"]["skipped_updates"] == 1
    assert found["clip_factor"] is None
    assert set(found["norms"].values()) == {None}
    assert set(ages(found, "statistics_age")) == {1}
    json.dumps(found, allow_nan=False)


@pytest.mark.filterwarnings("ignore:soframe. statistics without gradients")
def test_a_block_that_nobody_uses_counts_for_nothing() -> None:
    training = Training()
    training.own.measure(norms=True)

    def forget() -> None:
        for parameter in training.model[0].parameters():
            parameter.grad = None

    training.own.step()  # without any gradient at all
    found = training.own.metrics()
    assert found["norms"]["gradient_norm"] == 0
    found = training.step(forget)
    assert not found["blocks"]["0"]["used"]
    assert found["norms"]["gradient_norm"] == found["blocks"]["2"]["gradient_norm"]


# -- times and bytes -----------------------------------------------------------------------------


def test_times_add_up_and_begin_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.step()
    found = training.own.metrics()
    assert found["timed_steps"] is None
    assert all(one["seconds"] is None for one in found["phases"].values())
    training.own.measure(times=True)
    for number in range(2):
        found = training.step()
        assert found["timed_steps"] == number + 1
    assert {"accumulate", "agree", "solve", "direct", "write"} <= found["phases"].keys()
    timed = [one for one in found["phases"].values() if one["seconds"] is not None]
    assert all(one["seconds"] > 0 for one in timed)
    assert sum(one["share"] for one in timed) == pytest.approx(1)
    before = found["phases"]["solve"]["seconds"]
    training.own.measure(times=True)
    assert training.own.metrics()["timed_steps"] == 0
    found = training.step()
    assert found["timed_steps"] == 1
    assert 0 < found["phases"]["solve"]["seconds"] < before + 60
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)  # a clock that is too coarse
    training.own.measure(times=True)
    found = training.step()
    assert found["phases"]["solve"]["seconds"] == 0
    assert {phase["share"] for phase in found["phases"].values()} == {None}


# -- spectra -------------------------------------------------------------------------------------

PSD = FactorSpec("A", "right", 2, 4)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 1000))
def test_a_spectrum_is_that_of_the_matrix(n: int, groups: int, seed: int) -> None:
    root = randn(groups, n, n, seed=seed)
    matrix = root @ root.mT
    factor = FactorSpec("A", "right", groups, n)
    found = spectrum(matrix, factor, full=True)
    assert found is not None
    values = np.array([np.linalg.svd(one, compute_uv=False) ** 2 for one in root.numpy()])
    np.testing.assert_allclose(found["eigenvalues"], values, rtol=1e-6, atol=1e-10)
    assert found["largest"] == pytest.approx(values.max())
    assert found["smallest"] == pytest.approx(values.min(), rel=1e-6, abs=1e-10)
    assert found["trace"] == pytest.approx(np.mean([np.trace(one) for one in matrix.numpy()]))
    shares = values / values.sum(1, keepdims=True)
    entropy = [-sum(p * math.log(p) for p in one if p > 0) for one in shares]
    ranks = np.mean([math.exp(one) for one in entropy])
    assert found["effective_rank"] == pytest.approx(ranks, rel=1e-6)
    if found["condition"] is not None:
        assert found["condition"] == pytest.approx((values[:, 0] / values[:, -1]).max(), rel=1e-5)


def test_spectra_at_the_edges() -> None:
    eye = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    found = spectrum(3 * eye, PSD)
    assert found == {
        "largest": pytest.approx(3),
        "smallest": pytest.approx(3),
        "condition": pytest.approx(1),
        "effective_rank": pytest.approx(4),
        "trace": pytest.approx(12),
    }
    line = torch.ones(2, 4, 4, dtype=torch.float64)
    found = spectrum(line, PSD)
    assert found is not None
    assert found["condition"] is None  # it has no inverse
    assert found["effective_rank"] == pytest.approx(1)
    found = spectrum(0 * eye, PSD)
    assert found is not None
    assert (found["condition"], found["effective_rank"]) == (None, 0)
    diagonal = torch.tensor([[1.0, 4.0, 2.0, 2.0]]).double()
    found = spectrum(diagonal, FactorSpec("A", "right", 1, 4, kind="diagonal"), full=True)
    assert found is not None
    assert found["eigenvalues"] == [[4, 2, 2, 1]]
    assert found["condition"] == 4
    # Of float32 less is known than of float64.
    small = torch.diag_embed(torch.tensor([[1.0, 1e-9]]))
    factor = FactorSpec("A", "right", 1, 2)
    assert spectrum(small, factor)["condition"] is None  # type: ignore[index]
    assert spectrum(small.double(), factor)["condition"] == pytest.approx(1e9)  # type: ignore[index]
    vector = FactorSpec("v", "right", 1, 4, kind="vector")
    assert spectrum(torch.ones(1, 4), vector) is None


def test_spectra_are_made_when_asked() -> None:
    training = Training(decay=0.5)
    training.step()
    training.step()
    assert ages(training.own.metrics(), "spectrum") == [None] * 4
    found = training.own.metrics(spectra="full")
    for block in training.own.blocks:
        for name, one in found["blocks"][block.name]["factors"].items():
            values = torch.linalg.eigvalsh(block.running[name]).flip(1)
            wanted = pytest.approx(values[0].tolist(), rel=1e-9, abs=1e-14)
            assert one["spectrum"]["eigenvalues"] == [wanted]
    json.dumps(found, allow_nan=False)
    with pytest.raises(ValueError, match="spectra must be True, False or 'full'"):
        training.own.metrics(spectra="all")  # type: ignore[arg-type]


# -- for loggers ---------------------------------------------------------------------------------


def test_scalars_are_named_numbers() -> None:
    training = Training()
    training.own.measure(norms=True, times=True)
    training.step()
    metrics = training.own.metrics(spectra=True)
    found = scalars(metrics)
    assert all(type(number) is float for number in found.values())
    assert found["damping/2"] == metrics["damping"] == 0.05
    assert found["solve_age/0.A"] == 0
    assert found["direction_norm/0"] == metrics["blocks"]["0"]["direction_norm"]
    assert found["overall/kl_clip_factor"] == metrics["kl_clip_factor"]
    assert found["overall/weight_norm"] == metrics["norms"]["weight_norm"]
    of_g = metrics["blocks"]["0"]["factors"]["G"]["spectrum"]
    assert found["effective_rank/0.G"] == of_g["effective_rank"]
    assert found["seconds/solve"] == metrics["phases"]["solve"]["seconds"]
    assert found["overall/norm_clip"] == 0.2
    assert "overall/energy_clip" not in found  # it is off


@pytest.mark.slow
def test_a_trust_region_tells_the_dampings_that_it_has_chosen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = soframe.TrustRegion(model, "squared-error", full_batch=True)
    own, x = optimizer.preconditioner, randn(8, 4)
    told, had = [], []

    def closure() -> Tensor:
        return model(x).square().sum() / 16

    plain = optimizer._proposer.begin

    def begin(start: float) -> None:
        plain(start)
        had.append([block.record.damping for block in own.blocks])

    optimizer._proposer.begin = begin  # type: ignore[method-assign]
    for _ in range(30):
        optimizer.step(closure)
        told.append([block["damping"] for block in own.metrics()["blocks"].values()])
    assert len({damping for each in told for damping in each}) > 2  # there were trials
    # Nothing but a choice changes them, so that they are those with which the next step begins.
    assert told[:-1] == had[1:]
