"""The mutation gate tells the dead from the living, and its mutants still fit the code."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation import gate

TESTS = ("test_double.py",)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one function and one test."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "double.py").write_text("def double(x):\n    return 2 * x  # twice\n")
    (root / "test_double.py").write_text(
        "from double import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    return root


def mutant(find: str, replace: str) -> gate.Mutant:
    return gate.Mutant(f"{find} -> {replace}", "double.py", find, replace, TESTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("find", "replace", "answer"),
    [
        pytest.param("2 *", "3 *", "killed", marks=pytest.mark.thorough),
        ("2 * x", "x + x", "SURVIVED"),
        ("def double", "def triple", "ERROR"),
    ],
)
def test_verdict(
    project: Path, find: str, replace: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (project / "double.py").read_text()
    assert gate.gate([mutant(find, replace)], project, ()) == (answer == "killed")
    assert answer in capsys.readouterr().out
    assert (project / "double.py").read_text() == before


def test_a_mutant_whose_tests_would_skip_is_not_tried(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(mutant("2 *", "3 *"), needs="a_library_that_nobody_has")
    assert gate.gate([one], project, ())
    assert "not tried: its tests need a_library_that_nobody_has" in capsys.readouterr().out


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "test_double.py").write_text("def test_double():\n    assert False\n")
    assert not gate.gate([mutant("2 *", "3 *")], project, ())
    assert "without any mutant" in capsys.readouterr().out


@pytest.mark.slow
def test_tests_that_never_end_are_killed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after them runs."""
    with gate.Runner(()) as runner:
        monkeypatch.setattr(gate, "TIMEOUT", 1.0)
        endless = gate.verdict(runner, project, mutant("return 2 * x", "while True: pass"))
        assert endless == "killed (the tests never ended)"
        monkeypatch.setattr(gate, "TIMEOUT", 120.0)
        assert runner.run(project, TESTS) == gate.PASSED


def test_a_text_that_is_not_there_once_is_an_error(project: Path) -> None:
    with pytest.raises(ValueError, match="2 times"):
        mutant("x", "y").apply(project)


def test_every_mutant_fits_the_code() -> None:
    mutants = gate.load()
    assert len({m.name for m in mutants}) == len(mutants)
    for m in mutants:
        text = (gate.ROOT / m.file).read_text(encoding="utf-8")
        assert text.count(m.find) == 1, f"{m.name}: {m.find!r} must be exactly once in {m.file}"
        assert m.find != m.replace, m.name
        paths = [test.partition("::")[0] for test in m.tests if test.startswith("tests/")]
        assert paths, f"{m.name} names no tests"
        assert all((gate.ROOT / path).exists() for path in paths), m.name
