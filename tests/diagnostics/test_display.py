"""Metrics from a file: what the command prints and draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import soframe
from soframe.cli import app
from soframe.diagnostics import display as measured
from soframe.diagnostics.metrics import scalars
from tests import kit


@pytest.fixture(name="found", scope="module")
def metrics_of_a_run() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    own = soframe.Preconditioner(
        model, damping=0.05, kl_clip=None, statistics_every=2, solve_every=4
    )
    own.measure(norms=True, times=True)
    kit.train(model, lambda net, _: net(torch.randn(8, 4)).square().mean(), range(4), own)
    return own.metrics(spectra="full")


def show(tmp_path: Path, text: str, *arguments: str) -> Any:
    file = tmp_path / "metrics.json"
    file.write_text(text)
    return CliRunner().invoke(app, ["metrics", str(file), *arguments])


def test_tables_show_every_factor_and_phase(found: dict[str, Any], tmp_path: Path) -> None:
    shown = show(tmp_path, json.dumps(found))
    assert shown.exit_code == 0, shown.output
    rows = {tuple(line.split()[:2]): line.split() for line in shown.stdout.splitlines()}
    assert " phase       ms per step  share  bytes  collectives " in shown.stdout
    # A line a row, one space from the edge.
    assert re.search(r"\n 0 .*\n +A \(5\) .*\n +G \(5\) .*\n 2 .*\n +A \(6\) ", shown.stdout)
    a = rows["A", "(5)"]
    assert a[2:4] == ["1", "3"]  # steps since statistics and since the solve
    spectrum = found["blocks"]["0"]["factors"]["A"]["spectrum"]
    assert a[4] == f"{spectrum['condition']:.3g}"
    weight = found["blocks"]["2"]["weight_norm"]
    assert rows["2", "0.05"][-1] == f"{weight:.3g}"
    times = found["phases"]["solve"]
    assert rows["solve", f"{1e3 * times['seconds'] / 4:.3g}"][2] == f"{times['share']:.1%}"


def test_numbers_for_machines(found: dict[str, Any], tmp_path: Path) -> None:
    shown = show(tmp_path, json.dumps(found), "--json")
    assert json.loads(shown.stdout) == scalars(found)


@pytest.mark.slow
def test_a_figure_has_what_the_metrics_have(found: dict[str, Any], tmp_path: Path) -> None:
    spectra, conditions, ages = measured.figure(found).axes
    names = ["0.A", "0.G", "2.A", "2.G"]
    assert [line.get_label() for line in spectra.lines] == names
    factors = [one for block in found["blocks"].values() for one in block["factors"].values()]
    values = factors[0]["spectrum"]["eigenvalues"][0]
    assert list(spectra.lines[0].get_ydata()) == [v / values[0] for v in values if v > 0]
    assert list(spectra.lines[0].get_xdata()) == [1, 2, 3, 4, 5]
    assert (spectra.get_yscale(), conditions.get_xscale()) == ("log", "log")
    assert [axes.get_title() for axes in (spectra, conditions, ages)] == [
        "spectra",
        "condition",
        "steps ago",
    ]
    for axes, labels in ((spectra, names), (ages, ["statistics", "solve"])):
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == labels
    widths = [bar.get_width() for bar in conditions.patches]
    assert widths == [one["spectrum"]["condition"] or 0 for one in factors]
    assert [bar.get_width() for bar in ages.patches] == [1] * 4 + [3] * 4
    # A pair of bars a factor, one below the other, with the name at their middle.
    places = [bar.get_y() + bar.get_height() / 2 for bar in ages.patches]
    assert places == pytest.approx([0, 1, 2, 3, 0.4, 1.4, 2.4, 3.4])
    assert ages.get_yticks() == pytest.approx([0.2, 1.2, 2.2, 3.2])
    assert ages.yaxis_inverted()
    for axes in (spectra, ages):
        axes.set_xlim(0, 2)
        assert all(place % 1 == 0 for place in axes.get_xticks())  # numbers and steps are whole
    assert [text.get_text() for text in ages.get_yticklabels()] == names
    image = tmp_path / "figures" / "metrics.png"
    shown = show(tmp_path, json.dumps(found), "--figure", str(image))
    assert shown.exit_code == 0, shown.output
    assert image.read_bytes().startswith(b"\x89PNG")
    # Without spectra there are ages still.
    bare = json.loads(json.dumps(found))
    for block in bare["blocks"].values():
        for one in block["factors"].values():
            one["spectrum"] = None
    assert len(measured.figure(bare).axes[2].patches) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "has no metrics: write json.dumps(preconditioner.metrics())"),
        ('{"format": "soframe.metrics", "version": 9}', "of version 9, and this soframe reads 1"),
    ],
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    shown = show(tmp_path, text)
    assert shown.exit_code == 1
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_spectra_are_the_eigenvalues_by_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)  # two samples: of rank two

    def loss(net: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = net(batch)
        return outputs, outputs.square().sum(1).mean()

    curvature = soframe.Curvature(model).fit([inputs], loss)
    (axes,) = measured.spectra(curvature).axes
    assert len(axes.lines) == 2
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.xaxis.get_gridlines()[0].get_visible()
    assert not axes.spines["top"].get_visible()
    for line, name, most in zip(axes.lines, ("0", "2"), (16, 10), strict=True):
        values = curvature.eigenvalues(name).flip(0)
        assert len(line.get_ydata()) <= 4 < most == len(values)  # type: ignore[arg-type]
        assert line.get_ydata() == pytest.approx(values[: len(line.get_ydata())].tolist())  # type: ignore[arg-type]
        assert list(line.get_xdata()) == list(range(1, 1 + len(line.get_ydata())))  # type: ignore[arg-type]
        share = curvature.trace(name) / curvature.trace()
        rank = f"rank {len(line.get_ydata())} of {most}"  # type: ignore[arg-type]
        assert line.get_label() == f"{name}: {share:.0%} of the trace, {rank}"


def test_a_figure_of_many_spectra_names_the_largest() -> None:
    layers = [nn.Linear(1, 1, bias=False) for _ in range(20)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 1 + number / 20)

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().mean()

    curvature = soframe.Curvature(nn.Sequential(*layers)).fit([torch.ones(2, 1)], loss)
    axes = measured.spectra(curvature).axes[0]
    assert len(axes.lines) == 20
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert len(set(looks[:14])) == 14  # of seven colors, solid and dashed
    assert looks[14:] == looks[:6]
    legend = axes.get_legend()
    assert legend is not None
    traces = {str(number): curvature.trace(str(number)) for number in range(20)}
    largest = sorted(traces, key=lambda name: -traces[name])[:12]
    assert {text.get_text().split(":")[0] for text in legend.get_texts()} == set(largest)
