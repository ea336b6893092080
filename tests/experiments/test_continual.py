"""The benchmark of tasks in turn and of merged models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import continual
from benchmarks.continual import SHORT, Accuracies, Experiment


@pytest.mark.slow
def test_the_short_run_has_every_contender_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(continual, "SEEDS", (0,))
    file = tmp_path / "runs.json"
    continual.main(short=True, kept=file, as_json=True)
    results = json.loads(capsys.readouterr().out)
    for name, experiment in continual.EXPERIMENTS.items():
        assert list(results[name]) == [*experiment.untuned, *continual.METHODS]
        for found in results[name].values():
            assert len(found["accuracies"][0]) == 2
    monkeypatch.setattr(continual, "EXPERIMENTS", {"merged": continual.EXPERIMENTS["merged"]})
    monkeypatch.setattr(continual, "accuracies", None)  # nothing runs again
    continual.main(short=True, kept=file)
    assert capsys.readouterr().out.count("\n a model for each task") == 1


def test_settings_are_chosen_on_validation_images_of_the_first_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, int]] = []

    def run(contender: str, setting: float, seed: int, size: continual.Size) -> Accuracies:
        if contender == "diagonal":
            seen.append((setting, seed))
        return Accuracies(choice=[0.2, -abs(setting - 2.0)], test=[setting])

    experiment = Experiment(run, ("plain",), "strength", lambda size: (1.0, 2.0, 3.0))
    monkeypatch.setattr(continual, "EXPERIMENTS", {"in turn": experiment})
    results = continual.scores("in turn", SHORT, tmp_path / "runs.json")
    assert results["diagonal"]["strength"] == 2.0
    assert results["diagonal"]["accuracies"] == [[2.0]] * 3
    assert seen == [(1.0, 0), (2.0, 0), (3.0, 0), (2.0, 1), (2.0, 2)]
    assert results["plain"]["accuracies"] == [[0.0]] * 3


def test_images_turn_to_the_left() -> None:
    pixels = torch.rand(3, 784, generator=torch.Generator().manual_seed(0))
    turned = torch.rot90(pixels.view(3, 28, 28), 1, (1, 2)).flatten(1)
    torch.testing.assert_close(continual.rotated(pixels, 90.0), turned, rtol=1e-4, atol=1e-4)


def test_no_image_both_trains_and_chooses_or_tests() -> None:
    task = continual.permutations(0, continual.Size())[1]
    images = torch.cat([task.train[0], task.choice[0], task.test[0]])
    assert images.shape == (5000, 784)
    assert len(images.unique(dim=0)) == 5000
