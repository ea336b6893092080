"""Random training loops, beside a plain K-FAC, and beside loops in which less happens.

A program has passes, whole or in parts, of batches that are empty or not finite; gradients that are
zeroed or clipped; steps; layers that are frozen and thawed; restarts; and what may leave no trace.
After each step gradients and weights are those of `tests.loops.Plain`, for K-FAC; for other methods
those of a `Twin`, which restarts never, and to which nothing happens that may leave no trace.

A program is drawn from its number alone. The acts of one that fails stand under its error.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from tests.curvature import randn
from tests.examples import examples
from tests.loops import Forward, Plain

WIDTH, OUT, TOKENS, LR = 3, 2, 4, 0.1
KINDS = ["plain", "deep", "reused", "tied", "norm", "branch", "images", "tokens"]
CALLS = {"layers": "all", "damping": 0.1, "decay": 0.8, "kl_clip": 0.05}
EVERY: dict[str, Any] = {"statistics_every": 2, "solve_every": 4}
TWINS: dict[str, dict[str, Any]] = {
    "ekfac": CALLS | EVERY,
    "kfac-reduce": CALLS | EVERY,
    "tnt": CALLS | EVERY,
    "foof": CALLS | EVERY,
    "eva": CALLS | {"statistics_every": 2},
    "diagonal": CALLS | {"statistics_every": 2},
    "newton-muon": {"damping": 0.1},
    "shampoo": {"solve_every": 2},
    "soap": {"solve_every": 2},
    "kl-soap": {},
    "muon": {},
    "adamw": {},
}
"""The settings of methods that are held to a twin."""


class Net(nn.Module):
    """A few layers, and perhaps one that is idle and frozen; all but the last in a checkpoint."""

    def __init__(self, kind: str, biases: tuple[bool, bool], *, idle: bool) -> None:
        super().__init__()
        self.kind, self.reentrant = kind, None
        first, last = biases
        if idle:
            self.idle = nn.Linear(OUT, OUT).requires_grad_(False)
        if kind == "images":
            self.first: nn.Module = nn.Conv2d(1, 2, 2, bias=first)
        elif kind == "tokens":
            self.first = nn.Embedding(TOKENS, WIDTH)
        else:
            self.first = nn.Linear(WIDTH, WIDTH, bias=first and kind != "tied")
        if kind in ("deep", "branch", "tied"):
            self.second: nn.Module = nn.Linear(WIDTH, WIDTH, bias=last and kind != "tied")
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "norm":
            self.second = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(8 if kind == "images" else WIDTH, OUT, bias=last)
        self.double()
        # The idle layer has no part in the numbers of the others.
        named = {n: p for n, p in self.named_parameters() if not n.startswith("idle")}
        for number, parameter in enumerate(named.values()):
            parameter.data = 0.7 * randn(*parameter.shape, seed=900 + number)

    def body(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "images":
            return h.tanh().flatten(1)
        if self.kind == "tokens":
            return h.mean(1).tanh()
        h = h.tanh()
        if self.kind == "reused":
            return self.first(h).tanh()
        if self.kind in ("deep", "tied", "norm"):
            return self.second(h).tanh()
        if self.kind == "branch" and x.sum() > 0:
            return h + self.second(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples; zero without any."""
    difference = (output - target).flatten(1)
    losses = difference.square().sum(1) / 2 + (0.3 * difference.sum(1)).cosh()
    return losses.sum() / max(1, len(output))


class Twin:
    """The same model under a preconditioner of its own; `Plain` has the same interface."""

    def __init__(self, model: nn.Module, method: str, chosen: dict[str, Any]) -> None:
        self.model, self.forwards = model, 0
        alone = {"backend": soframe.comm.SingleProcess()}
        self.own = soframe.Preconditioner(model, method, **grouped(chosen | alone))
        self.step, self.begin = self.own.step, self.own.reset_batch
        self.restart = self.begin
        self.state_dict, self.load_state_dict = self.own.state_dict, self.own.load_state_dict

    def forward(self, x: Tensor, module: str = "") -> Forward:
        self.forwards += 1
        return Forward(self.model.get_submodule(module)(x), [], frozenset(), self.forwards)

    def backward(
        self, loss: Tensor, forwards: Any, samples: int, only: Sequence[str] | None = None
    ) -> None:
        inputs = None if only is None else [self.model.get_parameter(name) for name in only]
        loss.backward(inputs=inputs, retain_graph=True)

    def observe(self, forward: Forward, samples: int) -> None:
        """Nothing: the Fisher is the empirical one."""

    changed = property(lambda self: self.own.changed)
    steps = property(lambda self: self.own.steps)
    skipped = property(lambda self: self.own.counters["skipped_updates"])
    skipped_statistics = property(lambda self: self.own.counters["skipped_statistics"])


@dataclass
class Pass:
    """A forward pass of both models, with its losses."""

    output: Tensor
    loss: Tensor
    plain: Forward
    plain_loss: Tensor

    @property
    def size(self) -> int:
        """Samples of all ranks."""
        return len(self.plain.output)


SIZES, SCALES = [1, 2, 3, 5], [1.0, 0.5, 3.0, 1e-3]
LAYERS, BOOLEANS = [0, 1, 2], [False, True]
SETUPS: dict[str, Sequence[Any]] = {
    "kind": KINDS,
    "biases": [(False, False), (False, True), (True, False), (True, True)],
    "idle": BOOLEANS,
    "positions": [0, 0, 2, 3],
    "method": ["kfac", "type-2"] * 6 + list(TWINS),
    "average": ["local", "global", "sum"],
    "every": [1, 1, 2, 3],
    "solver": ["eigen", "inverse"],
    "clips": [(None, None), (0.05, None), (0.1, 0.2), (None, 0.1)],
}

# Of gradients without statistics or the reverse, and of layers that were thawed or frozen since.
REFUSALS = ["gradients", "same call", "no registered layer ran", "there is nothing to precondition"]
# Of a state in which the block of what is frozen now had other parameters.
REFUSALS += [" in the state and "]

Act = TypeVar("Act", bound=Callable[..., None])


@dataclass
class Rule:
    """An act of a program, the values of its arguments, and when it can be."""

    act: Callable[..., None]
    choices: dict[str, Sequence[Any]]
    when: Callable[[Loop], bool] = lambda loop: True


RULES: list[Rule] = []


def rule(
    often: int = 1, when: Callable[[Loop], bool] = lambda loop: True, **choices: Sequence[Any]
) -> Callable[[Act], Act]:
    """Enter an act among those that programs are drawn from, perhaps more than once."""

    def enter(act: Act) -> Act:
        RULES.extend([Rule(act, choices, when)] * often)
        return act

    return enter


class Loop:
    """A loop with a preconditioner, and beside it a plain or an eventless one.

    Of several ranks each has its part of every batch; the plain loop beside it has the whole.
    """

    rank, ranks = 0, 1
    of_ranks: Mapping[str, Any] = {}  # settings of several
    twins: Mapping[str, dict[str, Any]] = TWINS
    rules: Sequence[Rule] = RULES

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.seed, self.saved = 0, None
        self.waiting: list[Pass] = []
        self.kept: list[Tensor] = []
        self.acts: list[str] = []

    def choose(self, act: Callable[..., None], choices: Mapping[str, Sequence[Any]]) -> None:
        """Choose the arguments of an act, and act."""
        chosen = {name: self.random.choice(values) for name, values in choices.items()}
        values = ", ".join(f"{name}={value}" for name, value in chosen.items())
        self.acts.append(f"{act.__name__}({values})")
        getattr(self, act.__name__)(**chosen)

    def go_on(self) -> None:
        chosen = self.random.choice([rule for rule in self.rules if rule.when(self)])
        self.choose(chosen.act, chosen.choices)

    # -- the beginning ----------------------------------------------------------------------------

    def build(
        self,
        kind: str,
        biases: tuple[bool, bool],
        idle: bool,
        positions: int,
        method: str,
        average: Any,
        every: int,
        solver: str,
        clips: tuple[float | None, float | None],
    ) -> None:
        if kind == "tokens" and method in self.twins and "kl_clip" not in self.twins[method]:
            kind = "plain"  # a head and a table would be left to others
        self.kind, self.positions, self.observes = kind, positions, method == "type-2"
        kl_clip, norm_clip = clips
        plain: dict[str, Any] = {
            "damping": lambda step: (0.3, 0.05, 0.1)[step % 3],
            "decay": lambda step: (0.5, 0.9)[step % 2],
            "statistics_every": lambda step: every,
            "solve_every": lambda step: 2 * every if step > 2 else every,
            "solver": solver,
            "kl_clip": kl_clip,
            "norm_clip": norm_clip,
            "loss_average": average,
            "fisher": "type-2" if self.observes else "empirical",
        }
        self.method, self.settings = method, self.twins.get(method, plain | {"layers": "all"})
        if self.observes:
            self.settings |= {"loss": "squared-error"}
        if method not in self.twins:
            self.method = "kfac"
        self.model = Net(kind, biases, idle=idle)
        self.start()
        other = Net(kind, biases, idle=False)
        self.plain: Any = Plain(other, plain)
        if method in self.twins:
            self.plain = Twin(other, method, self.settings)
        self.layers = [n for n in ("first", "second", "head") if hasattr(self.model, n)]

    def start(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR)
        self.own = soframe.Preconditioner(
            self.model,
            self.method,
            optimizer=self.optimizer,
            **grouped({**self.settings, **self.of_ranks}),
        )

    @property
    def states(self) -> Any:
        """What has a state to save."""
        return self.own

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all ranks."""
        self.seed += 1
        size *= self.ranks
        between = (self.positions,) if self.positions else ()
        if self.kind in ("images", "tokens"):
            between = ()
        target = randn(size, *between, OUT, seed=5000 + self.seed)
        if self.kind == "tokens":
            generator = torch.Generator().manual_seed(self.seed)
            return torch.randint(TOKENS, (size, 3), generator=generator), target
        if self.kind == "images":
            return randn(size, 1, 3, 3, seed=self.seed), target
        return randn(size, *between, WIDTH, seed=self.seed), target

    def ahead(self, x: Tensor, target: Tensor, module: str = "") -> Pass:
        """A forward pass of both."""
        output = self.called(module)(self.part(x))
        plain = self.plain.forward(x, module)
        loss, plain_loss = loss_of(output, self.part(target)), loss_of(plain.output, target)
        return Pass(output, loss, plain, plain_loss)

    def called(self, module: str) -> Callable[..., Tensor]:
        """What is called in place of the model, or of a module by itself."""
        return self.model.get_submodule(module)

    def part(self, batch: Tensor) -> Tensor:
        """This rank's samples."""
        size = len(batch) // self.ranks
        return batch[self.rank * size : (self.rank + 1) * size]

    def back(self, one: Pass, scale: float = 1.0) -> None:
        (scale * one.loss).backward()
        self.plain.backward(scale * one.plain_loss, [one.plain], one.size)

    # -- passes -----------------------------------------------------------------------------------

    @rule(4, size=SIZES, scale=SCALES, reentrant=[None, None, False, True])
    def train(self, size: int, scale: float, reentrant: bool | None) -> None:
        x, target = self.batch(size)
        if reentrant and (self.observes or self.kind == "tokens"):
            reentrant = False
        elif reentrant:
            x.requires_grad_()
        self.model.reentrant = reentrant
        one = self.ahead(x, target)
        if self.observes:
            self.own.observe(one.output)
            self.plain.observe(one.plain, one.size)
        self.back(one, scale)
        self.model.reentrant = None

    @rule(4, when=lambda loop: not loop.observes, size=[0, *SIZES])
    def go_ahead(self, size: int) -> None:
        self.waiting.append(self.ahead(*self.batch(size)))

    @rule(when=lambda loop: loop.waiting, which=LAYERS, scale=SCALES)
    def go_back(self, which: int, scale: float) -> None:
        self.back(self.waiting.pop(which % len(self.waiting)), scale)

    @rule(4, when=lambda loop: len(loop.waiting) > 1, turned=BOOLEANS)
    def go_back_through_two(self, turned: bool) -> None:
        """The mean over the samples of both."""
        parts = [self.waiting.pop(), self.waiting.pop()]
        if turned:
            parts.reverse()
        total = sum(one.size for one in parts)
        torch.stack([one.loss * one.size for one in parts]).sum().div(total).backward()
        loss = torch.stack([one.plain_loss * one.size for one in parts]).sum() / total
        self.plain.backward(loss, [one.plain for one in parts], total)

    @rule(when=lambda loop: loop.waiting, chosen=range(1, 7), both=BOOLEANS)
    def go_back_in_parts(self, chosen: int, both: bool) -> None:
        """To some layers, and perhaps to the others next."""
        one, parts = self.waiting.pop(), dict[bool, list[str]]()
        trained = [n for n, p in self.plain.model.named_parameters() if p.requires_grad]
        for name in trained:
            number = self.layers.index(name.partition(".")[0])
            parts.setdefault(bool(chosen >> number & 1), []).append(name)
        for names in list(parts.values())[: 2 if both else 1]:
            inputs = [self.model.get_parameter(name) for name in names]
            one.loss.backward(inputs=inputs, retain_graph=True)
            self.plain.backward(one.plain_loss, [one.plain], one.size, names)

    @rule(2, when=lambda loop: not loop.observes, size=SIZES)
    def train_twice(self, size: int) -> None:
        """One loss of two passes of the same samples."""
        x, target = self.batch(size)
        one, two = self.ahead(x, target), self.ahead(x, -target)
        (one.loss + two.loss).backward()
        self.plain.backward(one.plain_loss + two.plain_loss, [one.plain, two.plain], one.size)

    @rule(when=lambda loop: not loop.observes and loop.trains_head, size=SIZES)
    def train_the_head_alone(self, size: int) -> None:
        self.back(self.ahead(*self.batch(1)))  # it would have the samples of a pass that is open
        self.seed += 1
        x = randn(size * self.ranks, self.model.head.in_features, seed=self.seed)
        self.back(self.ahead(x, randn(len(x), OUT, seed=5000 + self.seed), "head"))

    @property
    def trains_head(self) -> bool:
        return any(p.requires_grad for p in self.model.head.parameters())

    @rule(when=lambda loop: not loop.observes, scale=[float("nan"), float("inf")], size=SIZES)
    def train_badly(self, scale: float, size: int) -> None:
        self.back(self.ahead(*self.batch(size)), scale)

    @rule(when=lambda loop: not loop.observes, size=SIZES)
    def train_hugely(self, size: int) -> None:
        """The statistics are infinite, the gradient is not."""
        self.back(self.ahead(*self.batch(size)), 1e160)
        self.take_step()
        self.zero(to_none=True)

    @rule(2)
    def train_on_nothing(self) -> None:
        self.train(0, 1.0, reentrant=None)

    # -- gradients --------------------------------------------------------------------------------

    @rule(2, to_none=BOOLEANS)
    def zero(self, to_none: bool) -> None:
        for model in (self.model, self.plain.model):
            model.zero_grad(set_to_none=to_none)

    @rule(2, layer=LAYERS, to_none=BOOLEANS)
    def zero_a_layer(self, layer: int, to_none: bool) -> None:
        name = self.layers[layer % len(self.layers)]
        for model in (self.model, self.plain.model):
            model.get_submodule(name).zero_grad(set_to_none=to_none)

    @rule(bound=[0.1, 100.0])
    def clip(self, bound: float) -> None:
        for model in (self.model, self.plain.model):
            nn.utils.clip_grad_norm_(model.parameters(), bound)

    # -- steps ------------------------------------------------------------------------------------

    @rule(6, moves=[False, False, True], zeroes=[True, True, False, None])
    def step(self, moves: bool, zeroes: bool | None) -> None:
        self.take_step()
        if moves:
            self.optimizer.step()
            torch.optim.SGD(self.plain.model.parameters(), LR).step()
            self.waiting = []
        if zeroes is not None:
            self.zero(to_none=zeroes)

    def take_step(self) -> None:
        self.compare("before the step")
        self.own.step()
        self.plain.step()
        self.compare("after the step")
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        assert all(whole(gradient).isfinite().all() for gradient in gradients)
        counters = self.own.counters
        assert counters["skipped_updates"] == self.plain.skipped
        assert counters["skipped_statistics"] == self.plain.skipped_statistics
        assert self.own.steps == self.plain.steps

    def compare(self, when: str) -> None:
        for name, plain in self.plain.model.named_parameters():
            own = self.model.get_parameter(name)
            check(whole(own.detach()), plain.detach(), f"{name} {when}")
            assert (own.grad is None) == (plain.grad is None), f"the gradient of {name} {when}"
            if own.grad is not None:
                check(whole(own.grad), plain.grad, f"the gradient of {name} {when}")

    # -- changes ----------------------------------------------------------------------------------

    @rule(layer=LAYERS, part=["", "", "bias", "weight"], thaws=BOOLEANS)
    def freeze(self, layer: int, part: str, thaws: bool) -> None:
        name = self.layers[layer % len(self.layers)]
        for model in (self.model, self.plain.model):
            for own, parameter in model.get_submodule(name).named_parameters():
                if part in ("", own):
                    parameter.requires_grad_(thaws)
            if not any(p.requires_grad for p in model.parameters()):
                model.head.weight.requires_grad_(True)
        self.waiting = []

    @rule()
    def move(self) -> None:
        """Change the weights by other means than the optimizer."""
        weights = {n: value + 0.01 for n, value in self.plain.model.state_dict().items()}
        for model in (self.model, self.plain.model):
            model.load_state_dict(weights, strict=False)
        self.waiting = []

    @rule()
    def reset(self) -> None:
        self.own.reset_batch()
        self.plain.begin()

    @rule(when=lambda loop: not loop.plain.changed)
    def save(self) -> None:
        weights = copy.deepcopy(self.plain.model.state_dict())
        self.saved = weights, self.frozen, self.states.state_dict(), self.plain.state_dict()

    @property
    def frozen(self) -> list[bool]:
        return [p.requires_grad for p in self.model.parameters()]

    @rule(when=lambda loop: loop.saved is not None and not loop.plain.changed)
    def go_back_to_what_was_saved(self) -> None:
        weights, frozen, own, plain = self.saved
        if frozen != self.frozen:
            return
        for model in (self.model, self.plain.model):
            model.load_state_dict(weights, strict=False)
        self.states.load_state_dict(own)
        self.plain.load_state_dict(plain)
        self.waiting = []

    @rule(when=lambda loop: not loop.plain.changed)
    def restart(self) -> None:
        """Go on with another model, optimizer and preconditioner; a window begins anew.

        What is frozen then is forgotten, which a twin does not.
        """
        trained = [p.requires_grad for p in self.plain.model.parameters()]
        if isinstance(self.plain, Twin) and not all(trained):
            return
        file = io.BytesIO()
        torch.save(self.states.state_dict(), file)
        file.seek(0)
        former, self.model = self.model, copy.deepcopy(self.model)
        for parameter, before in zip(self.model.parameters(), former.parameters(), strict=True):
            parameter.grad = before.grad
        self.start()
        self.states.load_state_dict(torch.load(file, weights_only=True))
        self.plain.restart()
        self.waiting = []

    # -- what leaves no trace ---------------------------------------------------------------------

    @rule(what=["no_grad", "inference", "eval", "thread"], size=SIZES)
    def evaluate(self, what: str, size: int) -> None:
        x, _ = self.batch(size)
        act = torch.inference_mode() if what == "inference" else torch.no_grad()
        call: Callable[..., Tensor] = act(self.model)
        if what == "thread":
            thread = threading.Thread(target=call, args=(x,))
            thread.start()
            thread.join()
            return
        self.model.train(what != "eval")
        call(x)
        self.model.train()

    @rule(
        when=lambda loop: not loop.observes,
        what=["drop", "keep", "input", "weights", "fail"],
        size=SIZES,
    )
    def go_ahead_in_vain(self, what: str, size: int) -> None:
        x, target = self.batch(size)
        if what == "input" and x.is_floating_point():
            x.requires_grad_()
        loss = loss_of(self.model(x), target)
        if what == "keep":
            self.kept.append(loss)
        elif x.requires_grad:
            torch.autograd.grad(loss, x)
        elif what == "weights":
            trained = [p for p in self.model.parameters() if p.requires_grad]
            torch.autograd.grad(loss, trained, allow_unused=True)
        elif what == "fail":
            loss.register_hook(fail)
            try:
                loss.backward()
            except ArithmeticError:
                return

    @rule(what=["copy", "func", "functional"], size=SIZES)
    def train_others(self, what: str, size: int) -> None:
        """Weights that are no parameters of this model."""
        x, target = self.batch(size)
        if what == "copy":
            loss_of(copy.deepcopy(self.model)(x), target).backward()
            return
        named = {n: (2 * p.detach()).requires_grad_() for n, p in self.model.named_parameters()}

        def loss(weights: dict[str, Tensor]) -> Tensor:
            return loss_of(torch.func.functional_call(self.model, weights, (x,)), target)

        if what == "func":
            torch.func.grad(loss)(named)
        else:
            loss(named).backward()

    @rule()
    def look(self) -> None:
        self.own.metrics()
        self.own.report()
        self.own.memory_usage()
        self.own.state_dict()
        self.model.head.register_forward_hook(lambda *_: None)


def fail(gradient: Tensor) -> None:
    raise ArithmeticError


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(got: Tensor, want: Tensor, what: str) -> None:
    """Within rounding, but for numbers that are not finite on both sides."""
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite()), what
    scale = float(want[finite].abs().max()) if finite.any() else 0.0
    difference = (got - want)[finite].abs()
    assert bool((difference <= 1e-7 * scale + 1e-14).all()), f"{what}: {got} instead of {want}"


def play(loop: Loop, setups: Mapping[str, Sequence[Any]]) -> None:
    """Let a loop set itself up and act, until it has acted enough or is refused something."""
    try:
        loop.choose(Loop.build, setups)
        for _ in range(20):
            loop.go_on()
    except Exception as error:
        if isinstance(error, AssertionError) or not any(text in str(error) for text in REFUSALS):
            error.add_note("\n".join(loop.acts))
            raise


@pytest.mark.filterwarnings("ignore")  # of samples that are asked for, and gradients without
@pytest.mark.parametrize("number", range(examples(800)))
def test_a_random_training_loop(number: int) -> None:
    play(Loop(number), SETUPS)
