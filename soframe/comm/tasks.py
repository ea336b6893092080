"""Overlap as straight-line code: a task is a generator that yields while the network works.

A task makes what it sends, starts a collective, yields once, waits, and goes on with what has
arrived; `soframe.comm.fusion` has examples.

`start` begins all tasks in their order and only then lets anything wait, so what one task sends
travels while the next makes its own. Tasks start their collectives in the order in which they are
passed, which is the placement's, the same on every rank (a rank leaves out those in which it has no
part); what comes after the ``yield`` starts none. So there is no deadlock, whoever waits for what
and when: of the collectives that have not ended, take the first one in that order. None of its
members waits for an earlier one, so each has started it or is still computing, and it ends.

With ``overlap=False`` each task is finished before the next one starts: the same collectives in the
same order and the same arithmetic, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

Task = Iterator[None]


def start(tasks: Iterable[Task], *, overlap: bool = True) -> Callable[[], None]:
    """Begin tasks: each runs until it has something under way.

    Args:
        tasks: The tasks, in the same order on every rank.
        overlap: Whether the next one begins before what the last one started has ended.

    Returns:
        Call it to let all of them end; it starts nothing.
    """
    begun: list[Task] = []
    for task in tasks:
        next(task, None)
        if overlap:
            begun.append(task)
        else:
            finish(task)

    def end() -> None:
        for task in begun:
            finish(task)

    return end


def run(tasks: Iterable[Task], *, overlap: bool = True) -> None:
    """Run tasks to their end.

    Args:
        tasks: The tasks, in the same order on every rank.
        overlap: See `start`.
    """
    start(tasks, overlap=overlap)()


def finish(task: Task) -> None:
    """Run a task that has begun to its end; one that has ended stays so.

    Args:
        task: The task.

    Raises:
        AssertionError: If it yields again.
    """
    for _ in task:
        raise AssertionError("a task yields once: what it starts later would have no order")
