"""What holds for every test."""

import gc
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator

# Before torch is imported: several workers and their processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import Phase, settings

gc.disable()  # until all tests are collected: what they import is no garbage

pytest_plugins = ["tests.background"]  # its fixtures

# A shell lets what it runs in the background ignore interrupts, which tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine is slow at times; that is no failure. The same examples in every run: a change
# is judged by what it changes. `make test-all` and `make fuzz` look for new ones.
settings.register_profile(
    "soframe", deadline=None, print_blob=True, max_examples=15, derandomize=True
)
# For `make mutants`: more examples, and no search for the smallest.
settings.register_profile(
    "verdict",
    settings.get_profile("soframe"),
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
)
# For `make test-all` and `make fuzz`: more examples, others in each run.
settings.register_profile(
    "thorough", settings.get_profile("soframe"), max_examples=100, derandomize=False
)
# For `make test-fast`: a few examples of each property.
settings.register_profile("fast", settings.get_profile("soframe"), max_examples=3)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "soframe"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of every collection of garbage: half a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)  # one in twenty seconds went into it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", action="store_true", help="run two cases of each test at most")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark what a covering set of cases leaves out, and let `--few` leave out more."""
    for cases in by_test(items):
        if mark := cases[0].get_closest_marker("covering"):
            for item in left_out(cases, **mark.kwargs):
                item.add_marker(pytest.mark.thorough)
    yield  # items are deselected by their markers
    if config.getoption("--few"):
        kept = {id(item) for cases in by_test(items) for item in (cases[0], cases[-1])}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]


def by_test(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(tests.values())


def left_out(cases: list[pytest.Item], together: int) -> list[pytest.Item]:
    """The cases of a test without which every so many values still occur together.

    Args:
        cases: The cases of one test.
        together: How many: at 1 every value of every argument occurs, at 2 every pair of values.
    """
    left = {}
    for case in cases:
        values = [(name, id(value)) for name, value in case.callspec.params.items()]  # type: ignore[attr-defined]
        left[case] = set(itertools.combinations(values, together))
    own, used = dict(left), Counter[object]()
    while any(left.values()):
        # Of cases that bring equally many, the one whose values have occurred least.
        best = max(left, key=lambda case: (len(left[case]), -sum(used[one] for one in own[case])))
        found = left.pop(best)
        used.update(own[best])
        left = {case: values - found for case, values in left.items()}
    return list(left)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give each test the same random numbers, whichever worker runs it and in whichever order."""
    # Not torch.manual_seed: without an accelerator it keeps the stack of every call of it.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
