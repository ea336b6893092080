"""The mutants: what is generated, which verdict it gets, and whether the table fits the project."""

from pathlib import Path

import pytest

from tests import mutants

TABLE, ACCEPTED = mutants.load()
TEXT = """\
def half(x: int = 4) -> float:
    scale = 2  # ÷
    if not x > 0:
        raise ValueError(f"{x + 1}")
    return x / scale
"""


def test_generated() -> None:
    found = mutants.generate("half.py", TEXT)
    assert [(m.line, m.change) for m in found] == [
        (1, "4 -> 5"),
        (2, "2 -> 3"),
        (3, "not x > 0 -> (x > 0)"),
        (3, "> -> <="),
        (3, "0 -> 1"),
        (5, "/ -> *"),
    ]
    assert found[-1].apply(TEXT) == TEXT.replace("x / scale", "x * scale")
    assert found[1].source == "scale = 2  # ÷"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a @ b", ["a @ b -> ((b) @ (a))"]),
        ("(a) % (b)", ["% -> //"]),
        ("a -= 1", ["-= -> +=", "1 -> 2"]),
        ("a and b is not c", ["and -> or", "is not -> is"]),
        ("call(True)", ["call(True) -> pass", "True -> False"]),
        ("def f(): return [a for a in b]", ["[a for a in b] -> []"]),
        ("x = -a.mT", ["-a.mT -> (a.mT)", "a.mT -> a"]),
        ("x = a.sum()", ["a.sum -> a.mean"]),
        ("x: int | None", []),
        ("x = zip(a, b, strict=True)", []),
        ("x = load(a, strict=True)", ["True -> False"]),
    ],
)
def test_operators(text: str, changes: list[str]) -> None:
    assert [m.change for m in mutants.generate("one.py", text)] == changes


def test_files_are_chosen_by_folder() -> None:
    files = ["soframe/a/one.py", "soframe/a/two.py", "soframe/b.py"]
    assert mutants.chosen(files, ["soframe"]) == files
    assert mutants.chosen(files, ["soframe/b.py", "soframe/a", "soframe/a/one.py"]) == [
        "soframe/b.py",
        *files[:2],
    ]
    with pytest.raises(SystemExit, match="no tests for soframe/c"):
        mutants.chosen(files, ["soframe/b.py", "soframe/c"])


@pytest.mark.slow
def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mutant that a test notices dies; equivalent ones survive, unless they are accepted."""
    (tmp_path / "half.py").write_text(TEXT.replace("x / scale", "x / scale + 0 * x"))
    (tmp_path / "test_half.py").write_text(
        "from half import half\n\n\ndef test_half():\n    assert half(6) == 3\n"
    )
    found = mutants.generate("half.py", (tmp_path / "half.py").read_text())
    changes = ("/ -> *", "+ -> -")
    some = [m for m in found if m.line == 5 and m.change in changes]
    some += [m for m in found if m.line == 5 and m.change == "* -> /"]
    tests = {"half.py": ["test_half.py"]}
    reason = {"file": "half.py", "source": some[0].source, "change": "+ -> -", "reason": "adds 0"}
    survivors = mutants.try_all(some, tests, [reason], root=tmp_path)
    assert [m.change for m in survivors] == ["* -> /"]
    printed = capsys.readouterr().out
    assert "killed" in printed
    assert "SURVIVED" in printed
    (tmp_path / "test_half.py").write_text("def test_half():\n    assert False\n")
    with pytest.raises(SystemExit, match=r"fail without a mutant: \['test_half\.py::test_half'\]"):
        mutants.try_all(some, tests, root=tmp_path)


def test_the_table_fits_the_project() -> None:
    for file, tests in TABLE.items():
        assert (mutants.ROOT / file).is_file(), file
        assert all((mutants.ROOT / test.partition("::")[0]).exists() for test in tests), file


def test_accepted_survivors_are_still_generated() -> None:
    candidates: dict[str, list[mutants.Mutant]] = {}
    for entry in ACCEPTED:
        file = entry["file"]
        if file not in candidates:
            text = (mutants.ROOT / file).read_text(encoding="utf-8")
            candidates[file] = list(mutants.candidates(file, text))
        assert any(mutants.matches(entry, mutant) for mutant in candidates[file]), entry
        assert entry["reason"]
