"""Tasks begin in their order, and end in it."""

from collections.abc import Iterator

import pytest
from soframe.comm.tasks import finish, run, start


def task(name: str, seen: list[str], yields: int = 1) -> Iterator[None]:
    seen.append(f"{name} begins")
    for _ in range(yields):
        yield
    seen.append(f"{name} ends")


@pytest.mark.parametrize("overlap", [True, False])
def test_the_order(overlap: bool) -> None:
    seen: list[str] = []
    run((task(name, seen) for name in "ab"), overlap=overlap)
    begins, ends = ["a begins", "b begins"], ["a ends", "b ends"]
    expected = [*begins, *ends] if overlap else ["a begins", "a ends", "b begins", "b ends"]
    assert seen == expected


def test_nothing_waits_until_all_have_begun() -> None:
    seen: list[str] = []
    end = start(task(name, seen) for name in "ab")
    assert seen == ["a begins", "b begins"]
    end()
    assert seen[2:] == ["a ends", "b ends"]


def test_a_task_that_has_ended_stays_so() -> None:
    seen: list[str] = []
    one = task("a", seen)
    next(one)
    finish(one)
    finish(one)
    assert seen == ["a begins", "a ends"]


def test_a_task_starts_nothing_once_others_wait() -> None:
    seen: list[str] = []
    with pytest.raises(AssertionError, match="a task yields once"):
        run([task("a", seen, yields=2)])


def test_a_task_that_has_nothing_under_way_need_not_yield() -> None:
    seen: list[str] = []
    run([task("a", seen, yields=0)])
    assert seen == ["a begins", "a ends"]
