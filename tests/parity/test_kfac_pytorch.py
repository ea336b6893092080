"""With ``scaling="kaisa"`` soframe computes what kfac-pytorch computes.

The figures of kfac-pytorch, after a few steps of training in float64, were written by
``python -m benchmarks.parity_kfac_pytorch --store tests/parity/kfac_pytorch.json``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parity_kfac_pytorch import CASES, Case, attach_soframe, main, train
from soframe.testing import compare

STORED = json.loads(Path(__file__).with_name("kfac_pytorch.json").read_text(encoding="utf-8"))


def test_the_stored_cases_are_those_of_the_command() -> None:
    assert list(STORED) == [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_figures_of_kfac_pytorch(case: Case) -> None:
    final = train(case, attach_soframe)[-1]
    assert set(final) == set(STORED[case.name])
    for name, figures in STORED[case.name].items():
        expected = torch.tensor(figures, dtype=torch.float64)
        compare(final[name].flatten(), expected, f"{case.name}: {name}", rtol=1e-10)


@pytest.mark.slow
def test_the_clip_and_the_solver_matter_in_these_cases() -> None:
    """Otherwise the figures would not tell whether they are right."""
    for case in CASES[:6]:
        other = "inverse" if case.solver == "eigen" else "eigen"
        for changed in (replace(case, kl_clip=1e9), replace(case, solver=other)):
            own, moved = train(case, attach_soframe)[-1], train(changed, attach_soframe)[-1]
            differences = [
                float((own[name] - moved[name]).norm() / own[name].norm())
                for name in own
                if name.endswith(".grad")
            ]
            assert max(differences) > 1e-3, (case.name, changed)


def test_without_kfac_pytorch_the_command_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "kfac", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--kfac-path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "git clone" in error
    assert "--kfac-path" in error
