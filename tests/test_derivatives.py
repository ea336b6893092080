"""The benchmark of derivatives: both ways compute the same, and the tape follows every net."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import derivatives
from soframe.experiments.train import numerics


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-cnn", "norms"])
def test_both_ways_are_timed_at_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(derivatives.SAMPLES, "digits-cnn", 16)
    with numerics(1):
        rows = derivatives.measure((name,), rounds=1)
    assert [row["directions"] for row in rows] == [3, 6]
    for row in rows:
        assert float(str(row["difference"])) < 1e-5
        assert float(str(row["ratio"])) == pytest.approx(
            float(str(row["twin"])) / float(str(row["tape"]))
        )


@pytest.mark.slow
def test_the_tape_follows_every_net(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in derivatives.SAMPLES:
        monkeypatch.setitem(derivatives.SAMPLES, name, 2)
    for name in derivatives.NETS:
        model, closure, isotropic = derivatives.problem(name)
        each = [
            derivatives.curvature(model, closure, 2, isotropic=isotropic, reuse=reuse)
            for reuse in (True, False)
        ]
        torch.testing.assert_close(each[0], each[1], rtol=1e-4, atol=1e-6)
        assert float(each[0].diagonal().min()) > 0


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(derivatives.SAMPLES, "digits-cnn", 16)
    app = derivatives.typer.Typer()
    app.command()(derivatives.main)
    shown = CliRunner().invoke(app, ["--net", "digits-cnn", "--rounds", "1"])
    assert shown.exit_code == 0, shown.output
    assert "digits-cnn" in shown.output
    shown = CliRunner().invoke(app, ["--net", "nothing"])
    assert "--net must be one of" in str(shown.exception)
