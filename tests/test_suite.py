"""The benchmark of small problems: targets, whose trial counts, and what is kept of a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from harness import suite
from harness.suite_problems import PROBLEMS
from typer.testing import CliRunner

import soframe
from benchmarks import suite as command

app = typer.Typer()
app.command()(command.main)


def curve(*losses: float) -> suite.Curve:
    """One step and one second from each loss to the next."""
    points = [(float(at), at, loss) for at, loss in enumerate(losses)]
    return suite.Curve(points, len(losses) - 1, float(len(losses) - 1))


def test_a_curve_says_when_a_loss_was_reached_and_keeps_its_records() -> None:
    own = curve(8.0, 4.0, 5.0, math.nan, 3.999, 1.0, 2.0)
    assert own.lowest == 1.0
    assert own.lowest_within(4.0) == 3.999
    assert own.reached(4.0) == (1.0, 1)
    assert own.reached(0.5) is None
    again = suite.Curve.of(own.as_dict())
    assert [loss for *_, loss in again.points] == [8.0, 4.0, 1.0]
    assert again.reached(2.0) == own.reached(2.0)
    last = suite.Curve.of(curve(8.0, 4.0, 3.999).as_dict())
    assert last.lowest == 3.999


def test_the_soonest_trial_at_adamw_s_loss_counts() -> None:
    def trial(lr: float, *losses: float) -> list[Any]:
        own = curve(*losses)
        return [{"lr": lr}, own.lowest, own.as_dict()["points"]]

    trials = {
        "adamw": [trial(1.0, 9.0, 3.0, 2.0), trial(2.0, 9.0, 1.0, 4.0)],
        "soap": [trial(1.0, 9.0, 5.0, 0.1), trial(2.0, 9.0, 0.9, 0.8), trial(3.0, 9.0, 2.0)],
        "muon": [trial(1.0, 9.0, 2.0), trial(2.0, 9.0, 1.5)],
    }
    assert suite.best_of("adamw", trials) == {"lr": 2.0}
    assert suite.best_of("soap", trials) == {"lr": 2.0}
    assert suite.best_of("muon", trials) == {"lr": 2.0}


def test_a_target_is_what_single_precision_tells_from_zero() -> None:
    assert suite.resolved(0.0) == 2**-23
    assert suite.resolved(1e-6) == 1e-6
    assert suite.resolved(-0.5) == -0.5  # of a density, whose logarithm it is
    assert suite.best_of(
        "soap",
        {
            "adamw": [[{"lr": 1}, 0.0, [[3.0, 1, 0.0]]]],
            "soap": [[{"lr": 1}, 0.0, [[3.0, 1, 0.0]]], [{"lr": 2}, 1e-9, [[2.0, 1, 1e-9]]]],
        },
    ) == {"lr": 2}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_the_same_from_its_seed_and_goes_through_every_batch(name: str) -> None:
    losses = []
    for seed in (0, 0, 1):
        task = PROBLEMS[name].make(seed)
        torch.manual_seed(seed)
        first = next(task.closures)()
        first.backward()
        assert all(p.grad is not None for p in task.model.parameters())
        losses.append((first.item(), float(task.evaluate())))
    assert losses[0] == losses[1] != losses[2]


def test_there_are_enough_and_some_are_unseen() -> None:
    assert len(PROBLEMS) >= 12
    assert sum(problem.unseen for problem in PROBLEMS.values()) >= 3
    for name in PROBLEMS:
        assert suite.Results(name, 2.0, Path("nowhere")).trials.keys() == set(suite.PEERS)


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-2, [3e-3, 1e-2, 3e-2]),
        (0.1, [3e-3, 1e-2, 3e-2, 9e-2, 3e-1]),
        (1e3, [3e-3, 1e-2, 3e-2, 9e-2, 3e-1, 9e-1]),  # no further than that
        (1e-3, [3e-4, 9e-4, 3e-3, 1e-2, 3e-2]),
    ],
)
def test_a_grid_goes_on_while_its_end_is_the_best(
    monkeypatch: pytest.MonkeyPatch, best: float, tried: list[float]
) -> None:
    monkeypatch.setattr(suite, "RATES", {"adamw": (3e-3, 1e-2, 3e-2)})
    monkeypatch.setattr(suite, "PEERS", ("adamw",))

    def race(problem: str, seed: int, runs: dict[str, Any]) -> dict[str, suite.Curve]:
        ((_, setting),) = runs.values()
        return {"adamw": curve(99.0, 1.0 + abs(math.log(setting["lr"] / best)))}

    monkeypatch.setattr(suite, "race", race)
    trials: dict[str, list[Any]] = {}
    suite.tune("vae", 2.0, trials, lambda: None)
    assert sorted({setting["lr"] for setting, *_ in trials["adamw"]}) == tried


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RATES", dict.fromkeys(suite.PEERS, (1e-2,)))
    monkeypatch.setattr(suite, "FURTHER", 0)
    raced: list[Any] = []
    race = suite.race

    def watched(problem: str, seed: int, runs: Any, turn: float = 0.25) -> Any:
        raced.extend(runs)
        return race(problem, seed, runs, turn)

    monkeypatch.setattr(suite, "race", watched)

    def once(seeds: list[int]) -> list[suite.Row]:
        results = suite.Results("gaussian-natural", 0.02, tmp_path / "runs", tmp_path / "tuned")
        names = [suite.TRUST_REGION, "adamw", "soap"]
        results.complete(seeds, names, 2.0)
        return suite.rows(results, seeds, names)

    own, adamw, _ = once([0])
    assert adamw.ratios == (1.0,)
    assert own.targets == (min(adamw.lowest),)
    assert own.error is None
    assert raced.count("adamw") == 3 + 1
    assert raced.count("muon") == 3
    raced.clear()
    once([0])
    assert raced == []
    once([0, 1])
    assert raced == [suite.TRUST_REGION, "adamw", "soap"]


def test_peers_without_a_rate_have_their_defaults(tmp_path: Path) -> None:
    """And those with a schedule the time of the tuned peers, since it has to have an end."""
    results = suite.Results("vae", 2.0, tmp_path)
    given = {name: results._entry(name, 2.0) for name in (*suite.UNTUNED, suite.STOCHASTIC)}
    assert given == {
        "prodigy": (4.0, {}),
        "prodigy-cosine": (2.0, {"schedule": "cosine"}),
        "dadapt-adam": (4.0, {}),
        "schedule-free": (4.0, {}),
        "adamw-default": (4.0, {}),
        suite.STOCHASTIC: (4.0, {}),
    }
    pytest.importorskip("pytorch_optimizer")
    kinds = [
        type(suite.optimizer_of(name, PROBLEMS["vae"].make(0), {})).__name__
        for name in suite.UNTUNED
    ]
    assert kinds == ["Prodigy", "Prodigy", "DAdaptAdam", "ScheduleFreeAdamW", "AdamW"]


def test_a_schedule_free_peer_is_evaluated_at_its_average() -> None:
    pytest.importorskip("pytorch_optimizer")
    task = PROBLEMS["norms"].make(0)
    other = suite.optimizer_of("schedule-free", task, {})
    for _ in range(3):
        other.zero_grad()
        next(task.closures)().backward()
        other.step()
    there = [p.detach().clone() for p in task.model.parameters()]
    with suite.averaged(other):
        pairs = list(zip(task.model.parameters(), there, strict=True))
        away = max(float((p - q).detach().abs().max()) for p, q in pairs)
    assert away > 1e-4
    for parameter, before in zip(task.model.parameters(), there, strict=True):
        torch.testing.assert_close(parameter, before)


def test_the_stochastic_one_is_evaluated_at_its_average() -> None:
    assert suite.entrants("pinn", suite.OWN) == [suite.TRUST_REGION]
    assert suite.entrants("vae", suite.OWN) == [*suite.OWN]
    task = PROBLEMS["norms"].make(0)
    own = suite.optimizer_of(suite.STOCHASTIC, task, {})
    assert isinstance(own, soframe.StochasticTrustRegion)
    for _ in range(3):
        own.step(next(task.closures))
    iterates = float(task.evaluate())
    with own.averaged():
        expected = float(task.evaluate())
    assert suite.evaluated(task, own) == expected != iterates
    assert float(task.evaluate()) == iterates


def test_what_there_is_not() -> None:
    for arguments in (["nothing"], ["--optimizers", "adamw,sgd"], ["--optimizers", "soap"]):
        assert CliRunner().invoke(app, arguments).exit_code != 0
