"""Random training loops of `soframe.Optimizer`, beside updates that move weights in plain torch.

The loop beside has a preconditioner without the events that may leave no trace, as a `Twin` has.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import soframe
from soframe.settings import grouped
from tests.examples import examples
from tests.robustness.test_training_loops import RULES, SETUPS, TWINS, Loop, Rule, play

# Without EKFAC: rounding turns eigenvectors of equal eigenvalues, in which it measures.
METHODS = {name: TWINS[name] for name in TWINS if name != "ekfac"} | {
    "kfac": {"damping": 0.1, "kl_clip": 0.05},
    "soap-normuon": {},
}
RATES = {"lr": 0.1, "auxiliary_lr": 0.03, "weight_decay": 0.2, "auxiliary_weight_decay": 0.1}


class LoopOfOptimizer(Loop):
    """A loop with an optimizer that owns its step; it always moves the weights."""

    twins: ClassVar = {n: settings | {"auxiliary": "adamw"} for n, settings in METHODS.items()}

    def start(self) -> None:
        settings = grouped(METHODS[self.method])
        self.optimizer = soframe.Optimizer(self.model, self.method, **RATES, **settings)
        self.own = self.optimizer.preconditioner

    @property
    def states(self) -> soframe.Optimizer:
        return self.optimizer

    def step(self, moves: bool, zeroes: bool | None) -> None:
        self.take_step()
        self.zero(to_none=bool(zeroes))

    def take_step(self) -> None:
        self.compare("before the step")
        self.optimizer.step()
        skipped = self.plain.skipped
        self.plain.step()
        if self.plain.skipped == skipped:
            self.move_plainly()
        self.waiting = []
        for name, plain in self.plain.model.named_parameters():
            torch.testing.assert_close(self.model.get_parameter(name), plain, rtol=1e-7, atol=1e-12)
        counters = self.own.counters
        assert counters["skipped_updates"] == self.plain.skipped
        assert counters["skipped_statistics"] == self.plain.skipped_statistics

    def restart(self) -> None:
        # Moments that are frozen when an optimizer is built are not loaded; it warns of that.
        if all(parameter.requires_grad for parameter in self.plain.model.parameters()):
            super().restart()

    def set_rates(self, group: int, lr: float, decay: float) -> None:
        groups = self.optimizer.param_groups
        groups[group % len(groups)].update(lr=lr, weight_decay=decay)

    def split(self, group: int, part: int) -> None:
        groups = self.optimizer.param_groups
        former = groups[group % len(groups)]
        if part < len(former["params"]):
            groups.append({**former, "params": former["params"][:part]})
            former["params"] = former["params"][part:]

    @torch.no_grad()
    def move_plainly(self) -> None:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for own in group["params"]:
                plain = self.plain.model.get_parameter(names[own])
                if plain.grad is None or not plain.requires_grad:
                    continue
                decay = group["weight_decay"] if plain.dim() > 1 else 0.0
                plain -= group["lr"] * (plain.grad + decay * plain)


OF_GROUPS = [
    Rule(LoopOfOptimizer.set_rates, {"group": [0, 1, 2], "lr": [0.05, 0.2], "decay": [0.0, 0.3]}),
    Rule(LoopOfOptimizer.split, {"group": [0, 1, 2], "part": [1, 2]}),
]
LoopOfOptimizer.rules = [*RULES, *OF_GROUPS, *OF_GROUPS]


@pytest.mark.filterwarnings("ignore")  # of samples that are asked for, and gradients without
@pytest.mark.parametrize("number", range(examples(400)))
def test_a_random_training_loop_of_an_optimizer(number: int) -> None:
    play(LoopOfOptimizer(number), SETUPS | {"method": list(METHODS)})
