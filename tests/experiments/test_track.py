"""The track: its runs, tuning, the ranking, and the figures of the page."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, spearmanr

import experiments.gallery
import soframe
from benchmarks import track
from experiments.config import RunConfig
from experiments.models import SmallGPT
from experiments.optimizers import build_optimizer, schedule_factor
from experiments.tuning import TUNING_SEED, TriedRates
from experiments.workloads import workload

pytestmark = pytest.mark.usefixtures("gallery")

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = re.compile(r"layers\.\d\.(q|k|v|out|widen|narrow)\.weight")
SOME_METHODS = [
    pytest.param(name, marks=[] if number % 3 == 0 else [pytest.mark.thorough])
    for number, name in enumerate(track.METHODS)
]


def test_a_small_gpt_reads_the_past_alone_and_starts_with_equal_logits() -> None:
    model = SmallGPT(0, layers=1)
    tokens = torch.arange(64).view(1, 64)
    assert torch.equal(model(tokens), torch.zeros(1, 256, 64))
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.layers[0].out.weight)
    changed = tokens.clone()
    changed[0, 32] = 200
    differs = (model(tokens) != model(changed)).any(dim=1)[0]
    assert differs.tolist() == [False] * 32 + [True] * 32
    # Of `kept`, the deviations that hyperball's entries have, at a width of 768.
    layer = SmallGPT(0, kept=True, width=768, layers=1).layers[0]
    for name, deviation in {"q": 0.0208, "out": 0.026, "widen": 0.031, "narrow": 0.031}.items():
        weight = layer.get_submodule(name).weight.detach()
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("name", SOME_METHODS)
def test_an_entry_trains_the_hidden_matrices_and_keeps_their_norms_if_it_says_so(name: str) -> None:
    config = track.configuration(name, 0.03, 3, track.Protocol(40, 0.25, 2))
    assert (config.steps, config.warmup, config.batch_size, config.seed) == (40, 0.25, 2, 3)
    rates = [config.lr * schedule_factor(config, step) for step in range(config.steps)]
    decay = 0.0 if track.METHODS[name].kept else 2.0
    assert sum(rates) * config.weight_decay == pytest.approx(decay, rel=0.05)
    task = workload(config.workload).make(config.seed, torch.float32)
    optimizer = build_optimizer(task.model, config, task.likelihood, full_batch=False)
    assert isinstance(optimizer, soframe.Optimizer)
    names = {parameter: key for key, parameter in task.model.named_parameters()}
    trained = set()
    for group in optimizer.param_groups:
        if not group["method"].startswith("auxiliary"):
            trained |= {names[parameter] for parameter in group["params"]}
    assert trained == set(filter(HIDDEN.fullmatch, names.values()))
    matrix = task.model.layers[0].q.weight
    before = matrix.detach().clone()
    for _ in range(3):  # in the first steps zeros are before it, and behind it
        optimizer.zero_grad()
        task.loss(task.model, task.train[0][:2], task.train[1][:2]).backward()
        optimizer.step()
    assert not torch.equal(matrix, before)
    is_kept = torch.isclose(matrix.norm(), before.norm(), rtol=1e-6)
    assert bool(is_kept) == track.METHODS[name].kept
    optimizer.close()


def losses_of(best: dict[str, float]) -> track.Losses:
    """Return losses that are least at a rate of each method."""

    def losses(configs: Sequence[RunConfig]) -> list[float]:
        return [
            2.0 + math.log(config.lr / best[config.optimizer]) ** 2 + config.seed * 1e-6
            for config in configs
        ]

    return losses


def test_rates_are_tried_until_the_best_is_within(tmp_path: Path) -> None:
    rates = TriedRates(tmp_path / "losses.json")
    best = {"soframe:muon": 0.068, "soframe:adamw": 0.0012, "soframe:normuon": 100.0}
    names = ["muon", "adamw", "normuon"]
    track.train(names, [0, 1], rates, losses_of(best))
    tried = rates.scores(track.USUAL.setting(TUNING_SEED))
    assert list(tried["muon"]) == ["0.045", "0.068", "0.1"]
    assert sorted(map(float, tried["adamw"])) == [0.00087, 0.0013, 0.002, 0.003, 0.0045]
    assert len(tried["normuon"]) == track.MOST
    found = track.report(names, [0, 1], rates)
    assert {name: row["lr"] for name, row in found["rows"].items()} == {
        "muon": 0.068,
        "adamw": 0.0013,
        "normuon": max(map(float, tried["normuon"])),
    }
    assert found["rows"]["muon"]["losses"] == [2.0, 2.000001]
    # What is kept is not trained again, and another protocol is another one.
    track.train(names, [], rates, losses_of({}))
    with pytest.raises(ValueError, match=r"'muon' was not trained for 450 steps.* batches of 64"):
        track.report(names, [0, 1], rates, track.Protocol(batch_size=64))


def test_held_out_methods_count_apart(tmp_path: Path) -> None:
    rates = TriedRates(tmp_path / "losses.json")
    finals = {"soap-muon": 1.0, "muon": 2.0, "adamw": 3.0, "adam-h": 3.5, "pmuon": 1.9}
    for seed in (TUNING_SEED, 0):
        rates.keep(track.USUAL.setting(seed), [(name, 0.1, loss) for name, loss in finals.items()])
    found = track.report(list(finals), [0], rates)
    assert found["agreement"]["methods"] == 3
    assert found["agreement"]["spearman"] == pytest.approx(1.0)
    assert found["agreement_of_all"]["spearman"] == pytest.approx(0.9)
    # Of ten pairs PMuon and Muon are not told apart there, and Adam-H is behind AdamW here.
    assert (found["pairs"], found["pairs_of_all"]) == ((5, 6), (8, 9))
    assert {name: row["place"] for name, row in found["rows"].items()} == {
        "soap-muon": 1,
        "pmuon": 2,
        "muon": 3,
        "adamw": 4,
        "adam-h": 5,
    }
    assert found["rows"]["adam-h"]["public_place"] == 4
    rates.keep(track.USUAL.setting(0), [("muon", 0.1, math.inf)])
    table = track.table(track.report(list(finals), [0], rates))
    assert list(table.columns[1].cells)[1] == "pmuon (held out)"
    assert list(table.columns[4].cells)[-1] == "diverged"


def test_a_method_without_a_public_entry_has_a_place_here_alone(tmp_path: Path) -> None:
    rates = TriedRates(tmp_path / "losses.json")
    finals = {"soap-muon": 1.0, "swan": 1.5, "muon": 2.0, "adamw": 3.0}
    for seed in (TUNING_SEED, 0):
        rates.keep(track.USUAL.setting(seed), [(name, 0.1, loss) for name, loss in finals.items()])
    found = track.report(list(finals), [0], rates)
    assert {name: row["place"] for name, row in found["rows"].items()} == {
        "soap-muon": 1,
        "swan": 2,
        "muon": 3,
        "adamw": 4,
    }
    assert found["rows"]["swan"]["public_place"] is None
    without = track.report([name for name in finals if name != "swan"], [0], rates)
    assert found["agreement"] == without["agreement"]
    assert found["pairs_of_all"] == without["pairs_of_all"]
    assert "0" not in track.table(found).columns[-1].cells


def test_the_gallery_is_raced() -> None:
    # LoRA-Pro needs adapters.
    assert set(experiments.gallery.METHODS) - {"lora-pro"} <= {
        entry.optimizer.removeprefix("soframe:") for entry in track.METHODS.values()
    }


def test_the_stored_losses_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track.main(figures=track.STORED, output=tmp_path / "track.json", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found["rows"]) == set(track.ENTRIES)
    page = " ".join((ROOT / "docs" / "benchmarks" / "methods.md").read_text("utf-8").split())
    assert track.sentence(found["agreement"]) in page
    assert track.sentence(found["agreement_of_all"]) in page
    assert track.sentence_of_pairs(found) in page


def test_the_gallery_s_page_has_the_stored_losses() -> None:
    rates = TriedRates(track.STORED)
    tuned = rates.scores(track.USUAL.setting(TUNING_SEED))
    page = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    for name, row in track.report(list(track.METHODS), [0, 1], rates)["rows"].items():
        shown = f"*{name}*" if name in track.ENTRIES else name
        end = " (end)" if row["lr"] == max(map(float, tuned[name])) else ""
        losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
        assert (
            f"| {row['place']} | {shown} | {row['lr']:g}{end} | {row['loss']:.3f} | {losses} |"
        ) in page


@given(scores=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=5))
@settings(max_examples=8, deadline=None)
def test_correlations_are_scipy_s_and_chance_counts_all_orders(
    scores: list[tuple[int, int]],
) -> None:
    here, there = map(list, zip(*scores, strict=True))
    if len(set(here)) == 1 or len(set(there)) == 1:
        return
    found = track.Agreement.of([float("inf") if x == 5 else x for x in here], there)
    rho, tau = spearmanr(here, there).statistic, kendalltau(here, there).statistic
    assert found.spearman == pytest.approx(rho)
    assert found.kendall == pytest.approx(tau)
    for low, high in (found.spearman_interval, found.kendall_interval):
        assert -1 - 1e-9 <= low <= high <= 1 + 1e-9
    others = [spearmanr(order, there).statistic for order in itertools.permutations(here)]
    assert found.chance == pytest.approx(sum(x >= rho - 1e-9 for x in others) / len(others))


def test_a_bootstrap_of_agreeing_orders_is_at_one() -> None:
    found = track.Agreement.of(range(6), range(6))
    assert found.spearman_interval == found.kendall_interval == (1.0, 1.0)
    assert found.chance == pytest.approx(1 / 720)
    opposite = track.Agreement.of(range(6), range(6, 0, -1))
    assert (opposite.spearman, opposite.kendall, opposite.chance) == (-1.0, -1.0, 1.0)
