"""The benchmark of recipes at the size of a laptop: its data, the rate that counts, kept curves."""

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import recipes
from benchmarks.recipes import RECIPES, SEEDS, TUNING_SEED, Run, Small
from experiments.recipes.loaders import Cifar10


def test_images_of_mnist_are_what_the_reader_of_cifar_reads(monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(0)

    def digits(count):
        pixels = torch.randint(256, (count, 784), generator=generator) / 255
        return pixels, torch.randint(10, (count,), generator=generator)

    sets = {False: digits(10), True: digits(3)}
    monkeypatch.setattr(recipes.canvases, "split", lambda held_out: sets[held_out])
    folder = recipes.cifar(tmp_path)["data"]
    for held_out, (pixels, classes) in sets.items():
        read = Cifar10(folder, train=not held_out)
        assert torch.equal(read.classes, classes)
        assert read.images.shape == (len(pixels), 3, 32, 32)
        for plane in read.images.unbind(1):
            inner = plane[:, 2:30, 2:30].reshape(-1, 784)
            assert torch.equal(inner / 255, pixels)
            assert plane.sum() == inner.sum()


@pytest.mark.parametrize("quality", ["loss", "accuracy"])
@pytest.mark.parametrize(
    ("at", "tried", "rate"),
    [
        (0.2, (0.1, 0.2, 0.4), "0.2"),
        (1.5, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), "1.6"),
        (0.05, (0.1, 0.2, 0.4, 0.05, 0.025), "0.05"),
        (100.0, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4), "6.4 (end)"),
    ],
)
def test_the_best_rate_trains_on_the_seeds_of_the_report(
    monkeypatch, tmp_path, quality, at, tried, rate
):
    """Rates are tried beyond the first ones while the best is at an end."""
    small = Small("A recipe", 10, quality, {"sgd": (0.1, 0.2, 0.4), "soframe": (0.3,)})
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    taken = []

    def curve(run, folder):
        taken.append((run.optimizer, run.rate, run.seed))
        loss = math.nan if run.rate == 3.2 and at < 3.2 else abs(math.log(run.rate / at))
        return [(5, 1.0, 9.0), (10, 2.0, loss if quality == "loss" else -loss)]

    monkeypatch.setattr(Run, "curve", curve)
    found = recipes.row("small", tmp_path)["optimizers"]
    best = float(rate.split()[0])
    assert taken == [
        *(("sgd", number, TUNING_SEED) for number in tried),
        *(("sgd", best, seed) for seed in (0, 1, 2)),
        *(("soframe", 0.3, seed) for seed in (0, 1, 2)),
    ]
    assert tuple(found["sgd"]["tried"]) == tried
    assert found["soframe"]["tried"] == {}
    first, second = recipes.lines(
        {"small": {"title": "A", "quality": quality, "optimizers": found}}
    )
    assert first[1:5] == ["sgd", rate, "10", "2.0"]
    assert second[2] == "0.3"


@pytest.mark.slow
def test_a_run_is_trained_once(monkeypatch, tmp_path):
    monkeypatch.setitem(recipes.RECIPES, "pinn", replace(RECIPES["pinn"], steps=8))
    run = Run("pinn", "soframe", 0.01, 0)
    curve = run.curve(tmp_path)
    assert [step for step, _, _ in curve] == list(range(1, 9))
    assert 0 < curve[0][1] < curve[-1][1]
    assert curve[-1][2] < curve[0][2]
    monkeypatch.setattr(Run, "_train", None)
    assert run.curve(tmp_path) == curve


def test_kept_curves_are_those_of_the_recipes(tmp_path):
    """Of the lengths and seeds that the command has, and drawn as they are."""
    kept = json.loads(recipes.CURVES.read_text(encoding="utf-8"))
    assert list(kept) == list(RECIPES)
    for name, small in RECIPES.items():
        assert set(kept[name]["optimizers"]) == set(small.rates)
        for optimizer, found in kept[name]["optimizers"].items():
            assert found["rate"] in [*map(float, found["tried"]), *small.rates[optimizer]]
            assert list(map(int, found["curves"])) == list(SEEDS)
            assert {curve[-1][0] for curve in found["curves"].values()} == {small.steps}
    assert recipes.plot(kept, tmp_path / "recipes.png").stat().st_size > 10_000
