"""The benchmarks of influence: their short runs, and the datamodeling score."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import influence, influence_lds


def test_the_short_comparison_has_a_line_of_each_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = influence.Contender("no_such_library", influence.soframe_scores)
    known = {"soframe": influence.CONTENDERS["soframe"], "absent": absent}
    monkeypatch.setattr(influence, "CONTENDERS", known)
    monkeypatch.setattr(sys, "argv", ["influence", "--short", "--models", "transformer"])
    assert influence.main() == 0
    printed = capsys.readouterr()
    assert printed.err == "absent is not installed: skipped\n"
    assert printed.out.splitlines()[1] == "transformer, 64 x 16"
    assert printed.out.splitlines()[3].startswith("soframe")


def test_predictions_in_the_order_of_losses_have_the_score_one() -> None:
    subsets = torch.arange(4).unsqueeze(1)
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
    # A sample that helps lowers the loss of the half that has it.
    losses = torch.tensor([[0.1, 0.9], [0.8, 0.5], [0.2, 0.4], [0.7, 0.1]])
    found = influence_lds.correlations(scores, subsets, losses)
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0]).double())


def test_models_that_train_at_once_are_those_that_train_alone() -> None:
    problem = replace(influence_lds.PROBLEMS["bytes"], steps=3, batch=4)
    data, _ = problem.split(10, 2)
    models = [problem.make(), problem.make()]
    subsets = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    both = influence_lds.trained(models, data, subsets, problem)
    alone = influence_lds.trained(models[1:], data, subsets[1:], problem)
    for name, parameter in alone.items():
        torch.testing.assert_close(both[name][1:], parameter, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["perceptron", pytest.param("bytes", marks=pytest.mark.thorough)])
def test_the_short_datamodeling_score_is_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = influence.Contender("no_such_library", influence.soframe_scores)
    monkeypatch.setattr(influence, "CONTENDERS", {"absent": absent})
    problem = replace(influence_lds.PROBLEMS[name], steps=3)
    text = influence_lds.table(name, problem, 60, 10, (3, 4))
    assert [line.split("  ")[0] for line in text.splitlines()[3:]] == [
        "kfac",
        "ekfac",
        "gradient products",
    ]
