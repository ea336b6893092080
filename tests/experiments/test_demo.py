"""What `make demo` prints: every optimizer's way to every target, from its record."""

import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from soframe.experiments import demo, tables
from soframe.experiments.commands import app
from soframe.experiments.compare import Comparison
from soframe.experiments.workloads import workload
from tests.experiments.helpers import record

STRATEGIES = ["K-FAC, comm-opt", "K-FAC, mem-opt", "K-FAC, hybrid-opt"]
ROWS = {
    "digits-autoencoder": ["SGD", "AdamW", *STRATEGIES, "K-FAC, trust region"],
    "digits-cnn": ["SGD", "AdamW", *STRATEGIES],
    "byte-gpt": ["AdamW", "muon", "soap-muon"],
}
FIRST = {"digits-autoencoder": 2, "digits-cnn": 2, "byte-gpt": 1}
"""How many runs of each come first, which are of first order."""


def trained(configs, *, processes, watch):
    """What the runs might have brought: each some tenths of a second slower than the one before.

    Those of first order stop short of the lowest target.
    """
    name = configs[0].workload
    targets = configs[0].targets or workload(name).targets
    placed = {"comm-opt": (2, 2), "mem-opt": (1, 1), "hybrid-opt": (1, 1)}
    return Comparison(
        name,
        tuple(
            record(
                losses=(9.0, *(targets[:-1] if number < FIRST[name] else targets)),
                targets=targets,
                seconds=1.0 + 0.3 * number,
                config=config,
                processes=processes,
                gradient_workers=placed[config.strategy] if config.optimizer == "kfac" else (),
            )
            for number, config in enumerate(configs)
        ),
    )


@pytest.fixture
def printed(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "compare", trained)
    result = CliRunner().invoke(app, ["demo", "--output", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.output
    return result.stdout


def parts(text):
    """The lines that follow each workload's title."""
    titles = [f"{workload(name).title}, 2 process(es)" for name in ROWS]
    for title, following in zip(titles, [*titles[1:], None], strict=True):
        start = text.index(title)
        yield text[start : None if following is None else text.index(following)].splitlines()


@pytest.mark.slow
def test_every_optimizer_has_a_row_with_its_steps_and_seconds_to_each_target(printed):
    for (name, labels), lines in zip(ROWS.items(), parts(printed), strict=True):
        targets = demo.TARGETS.get(name) or workload(name).targets
        head = next(line for line in lines if all(f"to {target:g}" in line for target in targets))
        places = [head.index(f"to {target:g}") for target in targets]
        assert places == sorted(places)
        rows = [re.split(r" {2,}", line.strip()) for line in lines]
        rows = [row for row in rows if row[0] in labels]
        assert [row[0] for row in rows] == labels
        for number, row in enumerate(rows):
            seconds = 1.0 + 0.3 * number
            reached = [f"{10 * hit} / {hit * seconds:.1f}" for hit in range(1, len(targets) + 1)]
            if number < FIRST[name]:
                reached[-1] = "not reached"
            assert row[1 : 1 + len(targets)] == reached


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_cut_on_a_narrow_terminal(name):
    shown = trained(demo.configurations(name, 90.0, 0), processes=2, watch=None)
    screen = Console(width=80)
    with screen.capture() as capture:
        screen.print(tables.comparison(workload(name), shown.records))
    text = capture.get()
    assert "…" not in text
    for number, label in enumerate(ROWS[name]):
        assert set(label.split()) <= set(text.split())
        assert f"10 / {1.0 + 0.3 * number:.1f}" in text


@pytest.mark.slow
def test_what_the_figures_say_follows_the_table(printed, tmp_path):
    texts = [re.sub(r"\s+", " ", " ".join(lines)) for lines in parts(printed)]
    autoencoder, cnn, transformer = texts
    assert "To a training loss of 0.05, K-FAC, trust region took 30 steps and 7.5 s" in autoencoder
    assert "no first-order run reached it within the budget" in autoencoder
    assert "trust region" not in cnn
    assert "To a training loss of 0.01, K-FAC, comm-opt took 20 steps and 3.2 s" in cnn
    assert "On 2 processes mem-opt and hybrid-opt are the same placement" in cnn
    assert "To a held-out loss of 2.6, soap-muon took 20 steps and 3.2 s" in transformer
    for name, text in zip(ROWS, texts, strict=True):
        assert f"Plot: {tmp_path / 'plots' / name}.png" in text
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
