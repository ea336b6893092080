import io
import math

import pytest
from rich.console import Console

from soframe.experiments import plots
from soframe.experiments.compare import STRATEGIES, bars, console, ignore
from soframe.experiments.demo import sentences
from soframe.experiments.records import Row
from soframe.experiments.train import Progress
from soframe.experiments.workloads import workload
from tests.experiments.helpers import record

AUTOENCODER = workload("digits-autoencoder")


def test_curves_are_the_recorded_rows():
    runs = [record("sgd"), record("kfac", losses=(3.0, 0.5), seconds=2.0)]
    left, right = plots.loss_curves(AUTOENCODER, runs).axes
    assert (left.get_yscale(), right.get_yscale()) == ("log", "log")
    for axes, attribute in ((left, "step"), (right, "seconds")):
        curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for run in runs:
            expected = [[getattr(row, attribute), row.loss] for row in run.rows]
            assert curves[run.config.label] == expected
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert names == ["SGD", "K-FAC, comm-opt"]


def test_the_axis_is_labelled_without_exponents():
    left, _ = plots.loss_curves(AUTOENCODER, [record()]).axes
    labels = [left.yaxis.get_minor_formatter()(value) for value in (0.2, 0.3, 0.5, 6.0, 20.0)]
    assert labels == ["0.2", "", "0.5", "", "20"]
    assert left.yaxis.get_major_formatter()(0.1) == "0.1"


def test_curves_of_all_strategies_can_be_told_apart():
    strategies = [kfac(name, (1, 1)) for name in STRATEGIES]
    runs = [record(name) for name in ("sgd", "adamw", "trust-region")] + strategies
    left, _ = plots.loss_curves(AUTOENCODER, runs).axes
    curves = [line for line in left.lines if not line.get_label().startswith("_")]
    assert len({line.get_color() for line in curves}) == 6
    assert len({str(line._dash_pattern) for line in curves[3:]}) == 3


def test_seeds_of_one_optimizer_look_alike_and_are_named_once():
    runs = [record("soap"), record("muon"), record("soap")]
    _, right = plots.loss_curves(AUTOENCODER, runs, targets=(0.7,)).axes
    first, other, again = right.lines[:3]
    assert first.get_color() == again.get_color() != other.get_color()
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert names == ["SOAP", "Muon"]
    assert [list(line.get_ydata()) for line in right.lines[3:]] == [[0.7, 0.7]]


def test_a_run_that_diverges_leaves_the_others_their_room():
    plain = plots.loss_curves(AUTOENCODER, [record(losses=(3.0, 2.0, 0.4))]).axes[0].get_ylim()
    runs = [record(losses=(2.0, 1e30, 0.5)), record("adamw", losses=(3.0, 2.0, 0.4))]
    left, right = plots.loss_curves(AUTOENCODER, runs).axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_ylim() == pytest.approx((min(0.4, *AUTOENCODER.targets) / 1.2, 9.0))
    assert 3.0 < plain[1] < 9.0


def test_a_run_that_diverged_can_be_drawn(tmp_path):
    runs = [record(losses=(3.0, math.inf, math.nan)), record(losses=(2.0, 0.0))]
    path = plots.save(plots.loss_curves(AUTOENCODER, runs), tmp_path / "a" / "b.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bars_show_the_loss_on_a_terminal():
    screen = io.StringIO()
    with bars(Console(file=screen, force_terminal=True, width=100), ["SGD", "AdamW"]) as watch:
        watch("AdamW", Progress(Row(step=30, seconds=1.5, loss=0.25), fraction=0.5))
        watch("SGD", Progress(Row(step=10, seconds=0.5, loss=math.nan), fraction=1.0))
    shown = screen.getvalue()
    assert "loss 0.2500  step 30  1.5 s" in shown
    assert "loss diverged  step 10" in shown


def test_there_are_no_bars_off_a_terminal():
    screen = io.StringIO()
    with bars(Console(file=screen), ["SGD"]) as watch:
        assert watch is ignore
        watch("SGD", Progress(Row(step=30, seconds=1.5, loss=0.25), fraction=0.5))
    assert screen.getvalue() == ""


@pytest.mark.parametrize("to_stderr", [False, True])
def test_a_console_off_a_terminal_is_wide_enough_for_tables(capsys, to_stderr):
    screen = console(to_stderr=to_stderr)
    assert screen.width >= 100
    screen.print("text")
    out, err = capsys.readouterr()
    assert (out, err) == (("", "text\n") if to_stderr else ("text\n", ""))


def kfac(strategy, workers, processes=2):
    run = record("kfac", gradient_workers=workers, processes=processes)
    config = run.config.but(strategy=strategy)
    return type(run)(**{**vars(run), "config": config})


def test_strategies_that_coincide_are_named():
    runs = [
        record(),
        kfac("comm-opt", (2, 2)),
        kfac("mem-opt", (1, 1)),
        kfac("hybrid-opt", (1, 1)),
    ]
    (note,) = sentences("digits-autoencoder", runs)[1:]
    assert note == (
        "On 2 processes mem-opt and hybrid-opt are the same placement: "
        "each block has 1 gradient worker(s)."
    )
    apart = [kfac("mem-opt", (1, 1), 4), kfac("hybrid-opt", (2, 2), 4)]
    assert sentences("digits-autoencoder", apart)[1:] == ()
    alone = [kfac("mem-opt", (1, 1), 1), kfac("hybrid-opt", (1, 1), 1)]
    assert sentences("digits-autoencoder", alone)[1:] == ()
