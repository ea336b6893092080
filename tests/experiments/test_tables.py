"""Tables: means and intervals by hand, seeds that are counted, and the formats."""

from __future__ import annotations

import csv
import io
import math
import re

import pytest

from experiments import display
from experiments.config import RunConfig
from experiments.records import Row, RunRecord
from experiments.tables import Group, Measured, latex_text, summary, tidy
from experiments.workloads import workload
from tests.experiments.helpers import record

CNN = workload("digits-cnn")


def run(seed: int, losses: tuple[float, ...], optimizer: str = "sgd", **fields) -> RunRecord:
    """A run whose evaluations are ten steps and 0.5 s apart."""
    config = RunConfig("digits-cnn", optimizer, lr=0.1, steps=40, seed=seed)
    rows = tuple(Row(10 * i, 0.5 * i, loss, 0.5 + 0.1 * seed) for i, loss in enumerate(losses))
    values = {"processes": 1, "targets": (0.5,), "sent_bytes_per_step": {}, "curvature_bytes": (0,)}
    return record(config=config, rows=rows, **(values | fields))


# At 0.5 or below after 10, 20 and 30 steps.
SGD = Group(
    (run(1, (2.0, 0.4, 0.1)), run(2, (2.0, 1.0, 0.2)), run(3, (2.0, 1.0, 0.9, 0.3))),
    "21 trials of 10 s",
)
# One never gets there, and one diverges.
KFAC = Group(
    (
        run(1, (2.0, 0.4, 0.1), "kfac", curvature_bytes=(2048,)),
        run(2, (2.0, 1.0, 0.9, 0.3), "kfac", curvature_bytes=(3072,)),
        run(3, (2.0, 1.0, math.inf), "kfac"),
    ),
    "untuned_x & 5%",
)


def cells(group: Group) -> dict[str, str]:
    table = summary(CNN, [group], "40 steps")
    return dict(zip(table.heads, map(str, table.rows[0]), strict=True))


def test_means_and_intervals_are_those_of_student() -> None:
    # The quantiles are a table's: 4.3027 of two degrees of freedom, 12.7062 of one.
    measured = Measured.of([10.0, 20.0, 30.0], 3)
    assert measured.mean == 20.0
    assert measured.half == pytest.approx(4.3027 * 10 / math.sqrt(3), rel=1e-4)
    assert str(measured) == "20 ± 25"
    assert Measured.of([10.0, 20.0], 3).half == pytest.approx(12.7062 * 5, rel=1e-4)
    assert str(Measured.of([10.0, 20.0], 3)) == "15 ± 64 (2/3)"
    assert str(Measured.of([], 3)) == "0/3"
    assert [str(Measured.of(one, 1)) for one in ([0.123456], [12345.6], [])] == [
        "0.1235",
        "12346",
        "-",
    ]
    assert str(Measured.of([20.0, 20.0], 2)) == "20 ± 0"
    assert str(Measured.of([1e-9, 2e-9], 2)) == "1.500e-09 ± 6.4e-09"


def test_seeds_that_missed_a_target_or_diverged_are_counted_and_not_averaged() -> None:
    assert cells(SGD) == {
        "optimizer": "SGD",
        "settings": "21 trials of 10 s",
        "steps to 0.5": "20 ± 25",
        "s to 0.5": "1.0 ± 1.2",
        "last loss": "0.20 ± 0.25",
        "accuracy, %": "70 ± 25",
        "ms/step": "50 ± 0",
        "memory": "0 B",
    }
    found = cells(KFAC)
    # 10 and 30 steps: 12.7062 times a standard error of 10.
    assert found["steps to 0.5"] == "20 ± 127 (2/3)"
    assert found["last loss"] == "0.2 ± 1.3 (2/3)"
    assert found["diverged"] == "1 of 3"
    assert found["memory"] == "3.07 kB"


def test_one_seed_has_no_interval() -> None:
    one = Group(SGD.records[:1], "untuned")
    assert cells(one)["steps to 0.5"] == "10"
    table = summary(CNN, [one], "40 steps")
    assert "seed 1" in table.notes[0]
    assert "Untuned: default settings and a default learning rate." in table.notes
    assert "ms/step: median over the steps." in table.notes
    averaged = "ms/step: median over the steps of a run, mean over seeds."
    assert averaged in summary(CNN, [SGD], "40 steps").notes


def test_markdown_has_a_line_for_each_group() -> None:
    lines = summary(CNN, [SGD, KFAC], "40 steps").markdown().splitlines()
    assert lines[0] == "**Digits CNN: training loss (cross entropy per image, nats)**"
    assert lines[2] == (
        "| optimizer | settings | diverged<br>seeds | steps to 0.5<br>mean | s to 0.5<br>mean "
        "| last loss<br>mean | accuracy, %<br>mean | ms/step<br>median | memory<br>maximum |"
    )
    assert lines[5].startswith("| K-FAC, comm-opt † | untuned_x & 5% |")
    assert lines[7].endswith("†: not tuned, beside others that were: tuned it may be faster.")
    assert lines[4] == (
        "| SGD | 21 trials of 10 s | 0 of 3 | 20 ± 25 | 1.0 ± 1.2 | 0.20 ± 0.25 | 70 ± 25 "
        "| 50 ± 0 | 0 B |"
    )
    assert len({line.count("|") for line in lines[2:6]}) == 1
    assert "over seeds 1, 2, 3, ± the 95 % interval of Student's t" in lines[7]
    assert "after 40 steps" in lines[7]
    assert "settings were tuned for the shortest time to 0.5." in lines[7]


def test_only_what_was_not_tuned_beside_what_was_has_the_mark() -> None:
    hand = Group(SGD.records, "set by hand, not tuned")
    for groups, marked in (
        ([SGD, KFAC, hand], [False, True, True]),
        ([SGD, SGD], [False, False]),
        ([KFAC, hand], [False, False]),
    ):
        table = summary(CNN, groups, "40 steps")
        assert [str(row[0]).endswith(" †") for row in table.rows] == marked
        assert any("†" in note for note in table.notes) == any(marked)
        assert [row[0] for row in table.as_dict()["rows"]] == [row[0] for row in table.rows]


def test_latex_has_the_rules_of_booktabs_and_as_many_cells_in_each_row() -> None:
    text = summary(CNN, [SGD, KFAC], "40 steps").latex("digits_cnn")
    commands = re.findall(r"^\\(begin|end|\w+rule|label)(\{.*\})?", text, re.MULTILINE)
    assert [name for name, _ in commands] == [
        *("begin", "label", "begin", "toprule", "midrule", "bottomrule", "end", "end"),
    ]
    assert r"\label{tab:digits-cnn}" in text
    (alignment,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
    rows = re.findall(r"^(.*) \\\\$", text, re.MULTILINE)
    assert len(rows) == 4
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(alignment) - 1}
    assert (
        r"K-FAC, comm-opt $\dagger$ & untuned\_x \& 5\% & 1 of 3 & 20 $\pm$ 127 (2/3) &" in rows[3]
    )
    # No character with a meaning of its own is left, but in the first line, a comment.
    body = text.partition("\n")[2]
    assert not re.findall(r"(?<!\\)[%#_~^]", body)
    assert body.count("$") % 2 == 0
    assert body.count("{") == body.count("}")


def test_special_characters_of_latex_are_escaped() -> None:
    assert latex_text("soframe:soap_x") == r"soframe:soap\_x"
    assert latex_text("5% & #1 $2 {a}") == r"5\% \& \#1 \$2 \{a\}"
    assert latex_text("a\\b~c^d") == r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d"
    assert latex_text("-0.5 ± 1e-05, comm-opt") == r"$-$0.5 $\pm$ 1e-05, comm-opt"


def test_csv_has_a_line_for_each_evaluation() -> None:
    rows = list(csv.DictReader(io.StringIO(tidy([SGD, KFAC]))))
    assert len(rows) == sum(len(one.rows) for one in (*SGD.records, *KFAC.records))
    assert rows[1] == {
        "workload": "digits-cnn",
        "optimizer": "sgd",
        "label": "SGD",
        "settings": "21 trials of 10 s",
        "strategy": "comm-opt",
        "ranks": "1",
        "seed": "1",
        "step": "10",
        "seconds": "0.5",
        "loss": "0.4",
        "accuracy": "0.6",
        "ms_per_step": "50.0",
        "sent_bytes_per_step": "0",
        "curvature_bytes": "0",
    }
    assert float(rows[-1]["loss"]) == math.inf


@pytest.mark.slow
def test_bands_reach_from_the_lowest_to_the_highest_seed_and_count_the_lost() -> None:
    groups = {"SGD (tuned)": SGD.records, "K-FAC (untuned)": KFAC.records}
    figure = display.loss_bands(CNN, groups, "a title")
    left, right = figure.axes
    mean, _, thin = left.lines[:3]
    # The three runs have evaluations up to 20 steps in common.
    assert mean.get_xdata().tolist() == [0, 10, 20]
    assert mean.get_ydata().tolist() == pytest.approx([2.0, 0.8, (0.1 + 0.2 + 0.9) / 3])
    (path,) = left.collections[0].get_paths()
    at_20 = sorted({float(y) for x, y in path.vertices if x == 20})
    assert at_20 == [0.1, 0.9]
    assert list(thin.get_ydata()) == [2.0, 1.0, math.inf]
    # Seconds reach the end of the slowest run, a faster one that has ended keeps its loss.
    last = max(record.rows[-1].seconds for record in SGD.records)
    assert right.lines[0].get_xdata().tolist()[-1] == last > 1.0
    ends = [record.rows[-1].loss for record in SGD.records]
    assert right.lines[0].get_ydata()[-1] == pytest.approx(sum(ends) / len(ends))
    # The dots go on with the last loss until the slowest contender, who is of the other group.
    slowest = max(record.last.seconds for record in (*SGD.records, *KFAC.records))
    assert right.get_xlim() == (0.0, slowest)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "SGD (tuned)",
        "K-FAC (untuned), 1 of 3 diverged",
    ]


@pytest.mark.parametrize(
    ("losses", "scale"), [((1.0, -2.0), "linear"), ((3.0, 1.0), "linear"), ((5.0, 1.0), "log")]
)
def test_losses_below_zero_or_close_together_have_a_linear_scale(
    losses: tuple[float, ...], scale: str
) -> None:
    figure = display.loss_bands(CNN, {"a": [run(1, losses)]}, "a title")
    assert [axes.get_yscale() for axes in figure.axes] == [scale, scale]
