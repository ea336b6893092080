"""The board: notes that ranks leave each other in the store of torch.distributed.

A collective that a rank does not enter says nothing: the others wait until the process group's
time-out, half an hour by default, and then learn that it is over. Notes do not have to be waited
for. So a rank that is about to wait for the others, at construction and before it gathers a state,
says so first, and one that waits for long reads what the others have said: who is missing, who
waits elsewhere, who will never come. Steps write no notes, unless one raises on a rank by itself;
they read them once they wait for long.

Notes are kept where the ranks of a process group have met, in the store of the default group.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LOOK = 2.0
"""Seconds between two looks at what others say, while a rank waits; more where ranks are many."""

ALONE = 60.0
"""Seconds that a rank which builds a preconditioner for itself alone has until it must be here."""

_WAITS, _LEFT, _RAISED = "waits", "left", "raised"


def interval(ranks: int) -> float:
    """Return how long a rank that waits goes on between two looks, in seconds.

    Args:
        ranks: How many ranks there are.
    """
    return LOOK * max(1.0, ranks / 16)


@dataclass(frozen=True)
class Note:
    """What a rank said last in a process group.

    Attributes:
        rank: The rank, within the group.
        meeting: Which meeting of the group it is about, counted from 1; 0 if it said nothing yet.
        state: Whether it waits for the others there, has given up, or has raised on the way.
        text: What it is about to do, why it has given up, or its error.
    """

    rank: int
    meeting: int = 0
    state: str = ""
    text: str = ""

    @property
    def raised(self) -> bool:
        """Whether the rank has raised within a step, and takes part in nothing any more."""
        return self.state == _RAISED


@dataclass(frozen=True)
class Start:
    """What a rank said of a preconditioner that the others do not share.

    Attributes:
        rank: The rank, within the group.
        failed: Whether it could not even choose a backend.
        text: The backend that it has chosen for itself, or its error.
    """

    rank: int
    failed: bool
    text: str


class Board:
    """The notes of one process group.

    Args:
        group: The process group, of which this process is a member. It is not held.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        store = dist.distributed_c10d._get_default_store()
        # The type stubs of torch.distributed leave the name out.
        self._store = dist.PrefixStore("soframe", store)  # type: ignore[attr-defined]
        self._name, self._rank = str(group.group_name), dist.get_rank(group)
        self._members = dist.get_process_group_ranks(group)
        self._meetings = 0
        self._preconditioners = 0

    @staticmethod
    def of(group: dist.ProcessGroup) -> Board | None:
        """Return the board of a process group; None where there is no store that keeps notes.

        Args:
            group: The process group.
        """
        if group not in _BOARDS:
            store: object = dist.distributed_c10d._get_default_store()  # None with MPI
            # torch's engine for worlds on paper has a store that keeps nothing.
            if store is None or dist.get_backend(group) == "fake":
                return None
            _BOARDS[group] = Board(group)
        return _BOARDS[group]

    @staticmethod
    def of_world() -> Board | None:
        """Return the board of the default process group, if that has several ranks and a store."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        assert dist.group.WORLD is not None
        return Board.of(dist.group.WORLD)

    @property
    def interval(self) -> float:
        """How long a rank that waits goes on between two looks, in seconds."""
        return interval(len(self._members))

    # -- meetings -----------------------------------------------------------------------------

    def arrive(self, what: str) -> None:
        """Say that this rank waits for the others from now on.

        Args:
            what: What the ranks are about to do.
        """
        self._meetings += 1
        self._say(self._meetings, _WAITS, what)
        self._store.add(self._count, 1)

    def complete(self) -> bool:
        """Return whether every rank has arrived at the meeting at which this one waits."""
        return int(self._store.get(self._count)) >= self._meetings * len(self._members)

    def leave(self, why: str = "") -> None:
        """Say that this rank waits no longer, at a meeting that is not complete.

        Args:
            why: What to tell those that come late; nothing if they will see it for themselves.
        """
        self._store.add(self._count, -1)
        self._meetings -= 1
        if why:
            self.refuse(why)
        else:
            self._say(self._meetings, "", "")

    def refuse(self, why: str) -> None:
        """Say that this rank will not come to the next meeting.

        Args:
            why: The reason.
        """
        self._say(self._meetings + 1, _LEFT, why)

    def fail(self, why: str) -> None:
        """Say that this rank has raised within a step, and will not come to whatever follows.

        Args:
            why: The error.
        """
        self._say(self._meetings + 1, _RAISED, why)

    def missing(self) -> list[int]:
        """Return the ranks that have not arrived at the meeting at which this one waits."""
        here = [n.state == _WAITS and n.meeting >= self._meetings for n in self.notes()]
        return [rank for rank, is_here in enumerate(here) if not is_here]

    def elsewhere(self) -> list[Note]:
        """Return the notes of ranks that wait, have given up or have raised before this one."""
        return [note for note in self.notes() if note.meeting > self._meetings]

    def refusals(self) -> list[Note]:
        """Return the notes of ranks that will not come to the meeting at which this one waits."""
        gone = (_LEFT, _RAISED)
        return [n for n in self.notes() if n.state in gone and n.meeting >= self._meetings]

    def notes(self) -> list[Note]:
        """Return what every rank said last."""
        notes = []
        for rank in range(len(self._members)):
            said = self._read(f"{self._name}/{rank}")
            notes.append(Note(rank) if said is None else Note(rank, *said))
        return notes

    @property
    def _count(self) -> str:
        return f"{self._name}/arrived"

    def _say(self, meeting: int, state: str, text: str) -> None:
        self._store.set(f"{self._name}/{self._rank}", json.dumps([meeting, state, text]))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # -- preconditioners that are not shared --------------------------------------------------

    def begin(self) -> None:
        """Count a preconditioner that is about to be built; on the board of the world."""
        self._preconditioners += 1

    def say_start(self, text: str, *, failed: bool) -> None:
        """Say that this rank builds a preconditioner in which no other one takes part.

        Args:
            text: The backend that it has chosen for itself; or its error.
            failed: Whether it is an error.
        """
        note = json.dumps([self._preconditioners, failed, text])
        self._store.set(f"start/{self._members[self._rank]}", note)
        self._store.set(f"abandoned/{self._members[self._rank]}", json.dumps(None))

    def starts(self, ranks: list[int]) -> list[Start]:
        """Return what ranks have said of a preconditioner that others do not share.

        Args:
            ranks: The ranks, within the group, that this one waits for.

        Returns:
            The notes that are not older than the preconditioner that this rank builds.
        """
        starts = []
        world = Board.of_world()
        begun = 0 if world is None else world._preconditioners
        for rank in ranks:
            said = self._read(f"start/{self._members[rank]}")
            if said is not None and said[0] >= begun:
                starts.append(Start(rank, *said[1:]))
        return starts

    def abandon(self, ranks: list[int], why: str) -> None:
        """Tell ranks that build preconditioners for themselves that this one has waited for them.

        Args:
            ranks: The ranks, within the group.
            why: What to tell them.
        """
        for rank in ranks:
            self._store.set(f"abandoned/{self._members[rank]}", json.dumps(why))

    def abandoned(self) -> str | None:
        """Return what ranks say that have waited for this one in vain; on the board of the world.

        Returns:
            The message; None if none has.
        """
        said: str | None = self._read(f"abandoned/{self._members[self._rank]}")
        return said


# A group that is destroyed takes its board with it.
_BOARDS: weakref.WeakKeyDictionary[dist.ProcessGroup, Board] = weakref.WeakKeyDictionary()
