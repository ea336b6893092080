"""Random training loops on two ranks with parts of each batch, beside a loop with all of it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.robustness.test_training_loops import RULES, SETUPS, TWINS, Loop, Pass, play

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Where data decide which layers are used, ranks would use others; rounding turns eigenvectors of
# equal eigenvalues, in which EKFAC measures.
SHARED: dict[str, Any] = SETUPS | {
    "kind": [kind for kind in SETUPS["kind"] if kind != "branch"],
    "method": [method for method in SETUPS["method"] if method != "ekfac"],
    "average": ["local", "global"],
}
STRATEGIES = ["comm-opt", "mem-opt", "hybrid-opt", "sharded"]
GRADIENTS = ["averaged", "local"]
PROGRAMS, QUICK = 25, 10
"""The programs of a run, and of the one that `make test` has of each loop."""
SERVED = ["train", "train_on_nothing", "train_badly", "train_hugely", "zero", "zero_a_layer"]
SERVED += ["step", "reset", "look", "evaluate"]


class LoopOfRank(Loop):
    """A loop of one rank of several, which averages gradients itself or leaves it to soframe."""

    twins: ClassVar = {name: TWINS[name] | {"loss_average": "global"} for name in TWINS}

    def __init__(self, number: int, rank: int, ranks: int) -> None:
        super().__init__(number)
        self.rank, self.ranks = rank, ranks
        chosen = Random(number)
        self.gradients = chosen.choice(GRADIENTS)
        self.of_ranks = {"strategy": chosen.choice(STRATEGIES), "gradients": self.gradients}
        self.acts.append(str(self.of_ranks))

    @property
    def is_uneven(self) -> bool:
        """Whether ranks have different shares, perhaps none, of samples that weigh alike."""
        return self.settings["loss_average"] == "global"

    def part(self, batch: Tensor) -> Tensor:
        if not self.is_uneven:
            return super().part(batch)
        cut = 31 * self.seed % (len(batch) + 1)
        return batch[cut:] if self.rank else batch[:cut]

    def ahead(self, x: Tensor, target: Tensor, module: str = "") -> Pass:
        one = super().ahead(x, target, module)
        if self.is_uneven:
            one.loss = one.loss * (self.ranks * len(one.output) / max(1, len(x)))
        return one

    def average(self) -> None:
        if self.gradients == "averaged":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.ranks

    def clip(self, bound: float) -> None:
        if self.gradients == "averaged":
            self.average()
            super().clip(bound)

    def take_step(self) -> None:
        self.average()
        super().take_step()

    def compare(self, when: str) -> None:
        if self.gradients == "averaged" or when != "before the step":
            super().compare(when)

    def evaluate(self, what: str, size: int) -> None:
        if self.acts_alone(size):
            super().evaluate(what, size)

    def go_ahead_in_vain(self, what: str, size: int) -> None:
        if self.acts_alone(size):
            super().go_ahead_in_vain(what, size)

    def train_others(self, what: str, size: int) -> None:
        if self.acts_alone(size):
            super().train_others(what, size)

    def acts_alone(self, size: int) -> bool:
        """Whether this rank is the one that does something else meanwhile."""
        if self.rank == size % self.ranks:
            return True
        self.seed += 1  # ranks have parts of the same batches
        return False


class LoopOfWrapper(LoopOfRank):
    """A loop of a model in a wrapper that averages gradients, and allows no other passes."""

    rules: ClassVar = [rule for rule in RULES if rule.act.__name__ in SERVED]

    def __init__(self, number: int, rank: int, ranks: int) -> None:
        super().__init__(number, rank, ranks)
        self.of_ranks["gradients"] = self.gradients = "averaged"

    def train(self, size: int, scale: float, reentrant: bool | None) -> None:
        super().train(size, scale, reentrant=None)

    def average(self) -> None:
        """Nothing: the wrapper does."""

    def evaluate(self, what: str, size: int) -> None:
        if what in ("no_grad", "eval"):  # on all ranks: a wrapper gathers weights
            Loop.evaluate(self, what, size)


class LoopOfShards(LoopOfWrapper):
    def start(self) -> None:
        for child in self.model.children():
            fully_shard(child)
        fully_shard(self.model)
        super().start()


class LoopOfReplicas(LoopOfWrapper):
    def start(self) -> None:
        self.wrapper = DistributedDataParallel(self.model)
        super().start()

    def called(self, module: str) -> Callable[..., Tensor]:
        return self.wrapper


LOOPS = {loop.__name__: loop for loop in (LoopOfRank, LoopOfShards, LoopOfReplicas)}
RUNS: list[Any] = [range(QUICK)]
for begin in range(QUICK, examples(200), PROGRAMS):
    numbers = range(begin, begin + PROGRAMS)
    RUNS.append(pytest.param(numbers, marks=pytest.mark.thorough))


def go_through(rank: int, ranks: int, loop: str, numbers: range) -> None:
    kinds = SHARED["kind"]
    if loop == "LoopOfShards":
        kinds = [kind for kind in kinds if kind != "tied"]  # by modules that shard it apart
    for number in numbers:
        play(LOOPS[loop](number, rank, ranks), SHARED | {"kind": kinds})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("numbers", RUNS, ids=str)
def test_a_random_training_loop_on_two_ranks(loop: str, numbers: range) -> None:
    run_ranks(go_through, 2, loop, numbers)
