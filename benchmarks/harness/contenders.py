"""Those who take part in a benchmark of whole steps: a network with an optimizer in training."""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import soframe
from harness.networks import Network
from harness.step_times import STEP_KINDS

Interval = int | Callable[[int], int]
Intervals = tuple[Interval, Interval]
TURNS = (("precondition", 2), ("statistics", 2), ("solve", 1))
CYCLE = tuple(kind for kind, count in TURNS for _ in range(count))
LR, DAMPING, DECAY, KL_CLIP = 0.01, 0.003, 0.95, 0.001
LIBRARIES = ("sgd", "soframe", "kfac-pytorch")
WORDS = frozenset(
    {
        *("eigen", "inverse", "own", "channels_last", "compiled", "a quarter of the rows"),
        *("staggered", "staggered solves", "background", "background ready"),
    }
)
"""What a contender's name says after the library's, separated by commas."""
LANDS = 10  # steps after which a solve in the background is put to use


@dataclass
class Contender:
    """A network in training, with an optimizer and perhaps a preconditioner.

    Attributes:
        name: What it is called.
        model: Its copy of the network.
        step: Takes a step.
        clock: Returns seconds, once the device has nothing more to do.
        preconditioner: A library's preconditioner, if there is one.
        taken: Completed steps.
        times: The seconds of the steps of each kind in each round.
    """

    name: str
    model: nn.Module
    step: Callable[[], None]
    clock: Callable[[], float]
    preconditioner: Any = None
    taken: int = 0
    times: dict[str, list[list[float]]] = field(default_factory=lambda: {k: [] for k in STEP_KINDS})

    @property
    def beside(self) -> bool:
        """Whether it computes beside its steps."""
        return "background" in self.name

    def turn(self, kind: str, count: int) -> None:
        """Time the next steps.

        Args:
            kind: What they are.
            count: How many.
        """
        found = []
        for _ in range(count):
            assert kind_of(self.taken) == kind
            start = self.clock()
            self.step()
            found.append(self.clock() - start)
            self.taken += 1
        self.times[kind].append(found)

    def warm_up(self) -> None:
        """Take the first step and a cycle, and forget their times."""
        for kind, count in (("solve", 1), *TURNS):
            self.turn(kind, count)
        self.times = {kind: [] for kind in STEP_KINDS}


def kind_of(step: int) -> str:
    """Return the kind of a step, which libraries may ask before and after it is taken.

    Args:
        step: Completed steps.
    """
    return "solve" if step == 0 else CYCLE[(step - 1) % len(CYCLE)]


def interval(*kinds: str) -> Callable[[int], int]:
    """Return a schedule under which something is due at steps of some kinds.

    Args:
        *kinds: Which.
    """
    return lambda step: 1 if kind_of(step) in kinds else step + 1


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock of seconds that waits for the device.

    Args:
        device: The device.
    """

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised if device.type == "cuda" else time.perf_counter


def words_of(name: str) -> tuple[str, list[str]]:
    """Return the library that a contender's name begins with, and the words after it.

    Args:
        name: The name.

    Raises:
        ValueError: If it says something else than what there is.
    """
    library, *words = name.split(", ")
    unknown = [word for word in words if word not in WORDS]
    if library not in LIBRARIES or unknown:
        raise ValueError(
            f"{name!r}: there is no {(unknown if library in LIBRARIES else [library])[0]!r}; a "
            f"contender is one of {', '.join(LIBRARIES)}, and after commas any of "
            f"{', '.join(sorted(WORDS))}"
        )
    return library, words


def contender(
    name: str,
    network: Network,
    model: nn.Module,
    device: torch.device,
    own: dict[str, Any],
    every: Intervals | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Contender:
    """Set a contender up.

    Args:
        name: ``"sgd"``, or another of `LIBRARIES`, and some of `WORDS`.
        network: The network.
        model: Its weights, which are copied.
        device: The device.
        own: What ``"soframe, own"`` is.
        every: Intervals of statistics and solves; None for those of `kind_of`.
        wrap: What the model is wrapped in.

    Returns:
        One that has taken no step yet.

    Raises:
        ValueError: As `words_of` does.
    """
    library, said = words_of(name)
    model = copy.deepcopy(model).to(device)
    settings = dict(own) if "own" in said else {}
    last = settings.pop("channels_last", False) or "channels_last" in said
    compiled = settings.pop("compile", False) or "compiled" in said
    torch.manual_seed(1)
    inputs, targets = (tensor.to(device) for tensor in network.batch())
    if last and network.images:
        # torch's stubs leave out a call with a memory format alone.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    whole = wrap(model)
    fast = torch.compile(whole) if compiled else whole
    result = Contender(name, model, lambda: None, clock_of(device))
    every = every or (interval("statistics", "solve"), interval("solve"))
    result.preconditioner = _preconditioner(library, said, whole, sgd, settings, every)

    def step() -> None:
        sgd.zero_grad()
        eager = getattr(result.preconditioner, "takes_statistics", False)
        network.loss((whole if eager else fast)(inputs), targets).backward()
        if result.preconditioner is not None:
            result.preconditioner.step()
        sgd.step()

    result.step = step
    return result


def _preconditioner(
    library: str,
    said: list[str],
    model: nn.Module,
    sgd: torch.optim.Optimizer,
    settings: dict[str, Any],
    every: Intervals,
) -> Any:
    if library == "sgd":
        return None
    statistics_every, solve_every = every
    common: dict[str, Any] = {"damping": DAMPING, "kl_clip": KL_CLIP}
    if "staggered" in said or "staggered solves" in said:
        common["stagger"] = True if "staggered" in said else "solves"
    if "background" in said or "background ready" in said:
        common["background"] = LANDS if "background" in said else "ready"
    if "a quarter of the rows" in said:
        common["rows"] = 0.25
    solver = "eigen" if "eigen" in said else "inverse"
    if library == "soframe":
        return soframe.Preconditioner(
            model,
            optimizer=sgd,
            decay=DECAY,
            statistics_every=statistics_every,
            solve_every=solve_every,
            **{"solver": solver, **common, **settings},
        )
    peer = importlib.import_module("kfac.preconditioner")
    return peer.KFACPreconditioner(
        model,
        lr=LR,
        factor_decay=DECAY,
        factor_update_steps=statistics_every,
        inv_update_steps=solve_every,
        compute_method=solver,
        **common,
    )


def race(contenders: list[Contender], seconds: float, least: int = 3) -> int:
    """Let contenders take turns until time is up, and return the number of rounds.

    Args:
        contenders: SGD first.
        seconds: For all of them together.
        least: Rounds, whatever the seconds.

    Returns:
        The number of rounds; the times are the contenders'.
    """
    for one in contenders:
        one.warm_up()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < least or time.perf_counter() < end:
        for kind, count in TURNS:
            for one in contenders:
                one.turn(kind, count)
        rounds += 1
    return rounds
