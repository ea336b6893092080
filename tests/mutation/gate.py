"""The mutation gate: break the code in known ways, each of which must make a test fail.

`mutants.toml` names the mutants. Each is applied, alone, to a copy of the project, and the tests it
names run there. A mutant is dead when a test fails, or when the tests never end; it is an error if
the unbroken code fails the same tests, or if they cannot even be collected.

Run it with `make mutants`, or, for some of them, `python -m tests.mutation.gate NAME...`
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 900.0
PASSED, FAILED = 0, 1  # pytest's exit codes; any other says that no verdict was reached
LIBRARIES = ("torch", "torch.distributed", "torch._dynamo", "scipy.linalg", "sklearn.datasets")
NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "_build", "build", "runs")


@dataclass(frozen=True)
class Mutant:
    """One way to break the code: `find`, once in `file`, becomes `replace`; `tests` must notice."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    needs: str | None = None
    """The library without which the tests skip, so that they could not fail."""

    @property
    def can_be_tried(self) -> bool:
        """Whether its tests would run here."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def apply(self, root: Path) -> str:
        """Write the broken file below `root` and return the text that it replaced."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"mutant {self.name!r}: its text is {count} times in {self.file}")
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")
        return text


def load() -> list[Mutant]:
    """The mutants of `mutants.toml`, in its order."""
    text = Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text).get("mutant", [])
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class Runner:
    """Runs tests of projects, see `runner.py`; a context, at whose end its process ends."""

    def __init__(self, libraries: Sequence[str]) -> None:
        script = str(Path(__file__).with_name("runner.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, root: Path, tests: Sequence[str]) -> int | None:
        """The exit code of pytest on `tests` in the project at `root`; None if it did not end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"root": str(root), "tests": tests, "timeout": TIMEOUT}
        self._process.stdin.write(f"{json.dumps(job)}\n")
        self._process.stdin.flush()
        code: int | None = json.loads(self._process.stdout.readline())
        return code


def verdict(runner: Runner, root: Path, mutant: Mutant) -> str:
    """What became of a mutant in the project at `root`: "killed", "SURVIVED" or an error."""
    original = mutant.apply(root)
    try:
        code = runner.run(root, mutant.tests)
    finally:
        (root / mutant.file).write_text(original, encoding="utf-8")
    if code is None:
        return "killed (the tests never ended)"
    names = {PASSED: "SURVIVED", FAILED: "killed"}
    return names.get(code, f"ERROR (pytest exit code {code}: no test ran)")


def gate(
    mutants: Sequence[Mutant], root: Path = ROOT, libraries: Sequence[str] = LIBRARIES
) -> bool:
    """Try every mutant on a copy of the project at `root`, print the verdicts; are all dead?"""
    for mutant in mutants:
        if not mutant.can_be_tried:
            print(f"{mutant.name:<48} not tried: its tests need {mutant.needs}")
    mutants = [mutant for mutant in mutants if mutant.can_be_tried]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, Runner(libraries) as runner:
        copy = Path(scratch).resolve() / "project"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for tests in sorted({mutant.tests for mutant in mutants}):
            if runner.run(copy, tests) != PASSED:
                print(f"ERROR: without any mutant these do not pass: {' '.join(tests)}")
                return False
        dead = 0
        for mutant in mutants:
            start = time.monotonic()
            answer = verdict(runner, copy, mutant)
            dead += answer.startswith("killed")
            print(f"{mutant.name:<48} {answer} [{time.monotonic() - start:.0f} s]", flush=True)
    print(f"{dead} of {len(mutants)} mutants killed")
    return dead == len(mutants)


def main(names: Sequence[str]) -> int:
    """Run the gate on the named mutants, or on all; return the exit code of the process."""
    mutants = load()
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        print(f"no such mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    return 0 if gate([m for m in mutants if not names or m.name in names]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
