"""The planned table of the page that chooses is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import recommended

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choose.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        # The others are planned alike, and take longer.
        pytest.param(name, marks=[] if "ViT" in name or "LoRA" in name else pytest.mark.thorough)
        for name in recommended.MODELS
    ],
)
def test_the_page_has_the_planned_figures(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommended, "MODELS", {model: recommended.MODELS[model]})
    ((name, moments, *planned),) = recommended.rows()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {name} |"))
    line = line.replace("the same", " ".join(planned[:2]))
    shown = [float(number) for number in re.findall(r"\d+\.\d+", line)]
    one, eight = planned[:3], planned[3:]
    exact = [float(x) for x in (moments, *one[:2], *eight[:2], one[2], eight[2])]
    assert shown == pytest.approx(exact, abs=0.0051)
