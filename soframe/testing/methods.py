"""The check of a method: any number of ranks must give the results of one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.multiprocessing.spawn import start_processes

from soframe import checkpoint
from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, Method
from soframe.methods.returned import check_direction, check_state
from soframe.optimizer import Optimizer
from soframe.registry import KINDS
from soframe.settings import grouped
from soframe.specs import SecondOrder, State
from soframe.strategies.base import Strategy
from soframe.strategies.sharded import Sharded
from soframe.testing.compare import compare

SAMPLES = 12
FEATURES = 4
STEPS = 4
"""Solves in the first and third; an error before the last step shows in the last."""
MIDDLE = 1
"""Steps before a run is saved: the next uses data of the first solve, the one after solves."""
ALL_CONTRIBUTE: tuple[Strategy | str, ...] = (
    "comm-opt",
    "mem-opt",
    "hybrid-opt",
    Sharded(group=None),
    Sharded(group=None, deferred=True),
)
"""Strategies under which all ranks contribute to all statistics, so that they are one process."""

Launch = Callable[..., Sequence[Any]]
"""Runs ``function(rank, ranks, *args)`` on all ranks of one group, and returns the results."""


class Net(nn.Module):
    """Tall, wide, square and grouped layers; two of them are alike, one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES + 2)
        self.second = nn.Linear(FEATURES + 2, FEATURES)
        self.twice = nn.Linear(FEATURES, FEATURES)
        self.grouped = nn.Conv2d(FEATURES, FEATURES, (1, 2), padding=(0, 1), groups=2)
        self.head = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[N, features]`` of inputs ``[N, features]``."""
        x = self.second(self.first(x).tanh()).tanh()
        x = self.twice(self.twice(x).tanh()).tanh()
        x = self.grouped(x[..., None, None]).flatten(1).tanh()  # at two positions
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Training:
    """A short training run."""

    method: Method | Mapping[str, Method]
    strategy: Strategy | str = "comm-opt"
    fisher: str = "empirical"  # observed ones use squared errors as the loss
    passes: int = 1  # micro-batches of each rank's batch
    copies: int = 1  # of each sample in the batch, with the same mean loss
    begin: int = 0  # the first step
    end: int = STEPS  # the step after the last
    state: dict[str, Any] | Path | None = None  # the initial one; a path for a sharded checkpoint
    folder: Path | None = None  # of a final sharded checkpoint
    options: dict[str, Any] = field(default_factory=dict)  # further settings of the optimizer

    @property
    def observes(self) -> bool:
        """Whether the optimizer observes outputs."""
        return self.fisher in ("type-2", "monte-carlo")


@dataclass(frozen=True)
class Trained:
    """The result of a run: its parameters, and if it ends early the states to go on from."""

    weights: dict[str, Tensor]
    state: dict[str, Any]


def train(rank: int, ranks: int, training: Training) -> Trained:
    """Train on one rank of a group, or alone."""
    torch.manual_seed(0)
    model = Net().double()
    settings, method = _settings(training), copy.deepcopy(training.method)
    optimizer = Optimizer(model, method, strategy=training.strategy, **grouped(settings))
    _resume(model, optimizer, training)
    for step in range(training.begin, training.end):
        optimizer.zero_grad()
        _backward(model, optimizer, rank, ranks, training, step)
        if ranks > 1:
            _average(model, ranks)
        optimizer.step()
    if training.folder is not None:
        sharded = {
            "model": model.state_dict(),
            "preconditioner": checkpoint.part(optimizer.preconditioner),
        }
        dcp_save(sharded, checkpoint_id=training.folder)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state: dict[str, Any] = {}
    if training.end < STEPS:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    optimizer.close()
    return Trained(weights, copy.deepcopy(state))


def _settings(training: Training) -> dict[str, Any]:
    """Return the settings of the optimizer."""
    settings: dict[str, Any] = {
        "lr": 0.05,
        "weight_decay": 0.01,
        "kl_clip": None,
        "statistics_every": 1,
        "solve_every": 2,
        "fisher": training.fisher,
    }
    if training.observes:
        settings["loss"] = "squared-error"
    method = training.method
    methods = method.values() if isinstance(method, Mapping) else (method,)
    if any(method.damped for method in methods):
        settings["damping"] = 0.1
    return settings | training.options


def _resume(model: nn.Module, optimizer: Optimizer, training: Training) -> None:
    """Continue from the state of an earlier training, if there is one."""
    if isinstance(training.state, Path):
        saved = {"model": model.state_dict()}
        dcp_load(saved, checkpoint_id=training.state)
        model.load_state_dict(saved["model"])
        checkpoint.load(optimizer.preconditioner, training.state)
    elif training.state is not None:
        model.load_state_dict(training.state["model"])
        optimizer.load_state_dict(training.state["optimizer"])


def _backward(
    model: nn.Module, optimizer: Optimizer, rank: int, ranks: int, run: Training, step: int
) -> None:
    """Add the gradients of a rank's part of a batch."""
    x, y = _batch(step)
    x, y = x.repeat(run.copies, 1), y.repeat(run.copies, 1)
    part = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
    size = len(x) // ranks // run.passes
    for inputs, targets in zip(x[part].split(size), y[part].split(size), strict=True):
        outputs = model(inputs)
        if run.observes:
            optimizer.observe(outputs)
        (0.5 * (outputs - targets).square().sum(1).mean() / run.passes).backward()


def check_method(
    method: Method | type[Method] | str,
    *,
    ranks: Sequence[int] = (2, 3, 4),
    strategies: Sequence[Strategy | str] = ALL_CONTRIBUTE,
    fishers: Sequence[str] = ("empirical", "type-2"),
    launch: Launch | None = None,
    rtol: float = 1e-9,
    **options: Any,
) -> None:
    """Check a method: every number of ranks, strategy and micro-batch gives one process's results.

    `soframe.Optimizer` trains a small network of tall, wide, square and grouped layers in float64,
    on one process with the whole batch, and then

    - with a check of the method's results: names, shapes and dtypes, and unchanged inputs;
    - with every sample twice in the batch, which keeps all means: a wrong ``degree`` of a factor in
      the gradient shows;
    - in micro-batches, and with a copy of the method for every layer in place of one instance, of
      whole matrices: state in the instance, results that mix groups, and a wrong ``elementwise``
      show;
    - saved in the middle and resumed by a fresh optimizer, to the bit;
    - on ranks, each with its part of the batch, under every strategy;
    - saved on the most ranks and resumed on at most half of them, under another strategy: from a
      state, and from a sharded checkpoint.

    Args:
        method: The method, or its name or class.
        ranks: Numbers of ranks that divide 12; the default covers all cases.
        strategies: The strategies; all ranks must contribute to all statistics.
        fishers: The Fishers, if the method reads calls; pass ``("empirical",)`` for a method that
            supports no other.
        launch: Runs a function on ranks, see `Launch`; None spawns processes, to which the method
            must be picklable.
        rtol: The largest relative error of the final weights.
        **options: Further settings of `soframe.Optimizer`.

    Raises:
        AssertionError: If a result differs; the message has the setting and the difference.
        TypeError: If `Method.direct` returns no `Direction`.
        ValueError: If a returned tensor has another name, shape or dtype than declared.
    """
    chosen: Method = KINDS["method"].build(method, Method)
    launch = spawn if launch is None else launch
    read = {factor.reads for factor in chosen.factors(BlockShape(1, 2, 2)) if factor.captured}
    if read <= {"inputs"} or chosen.empirical_only:
        fishers = ("empirical",)
    for fisher in fishers:
        name = f"{chosen!r}, fisher={fisher!r}"
        training = Training(chosen, fisher=fisher, options=options)
        reference = _compare_alone(training, name, rtol)
        # Statistics do not depend on the strategy: two strategies are enough for other Fishers.
        here = strategies if fisher == fishers[0] else strategies[1:3]
        compare_ranks = _RankComparison(training, reference, name, ranks, launch, rtol)
        compare_ranks.under(here)
        if len(ranks) > 1:
            compare_ranks.resumed_on_fewer(strategies)


def _compare_alone(training: Training, name: str, rtol: float) -> Trained:
    """Compare runs on one process with each other; return the plain one's result."""
    method = training.method
    assert isinstance(method, Method)
    train(0, 1, replace(training, method=_checked(method)))
    reference = train(0, 1, training)
    torch.manual_seed(0)
    for key, parameter in Net().double().named_parameters():
        moved = not torch.equal(reference.weights[key], parameter)
        assert moved, f"{name}: {key} has not moved in {STEPS} steps"
    patterns = {k: _variant(method, elementwise=False) for k, _ in Net().named_children()}
    runs = {
        "every sample twice": replace(training, copies=2),
        "3 micro-batches": replace(training, passes=3),
        "an instance for each layer, with groups of its own": replace(training, method=patterns),
    }
    for what, run in runs.items():
        _same(train(0, 1, run), reference, f"{name}, {what}", rtol)
    first = train(0, 1, replace(training, end=MIDDLE))
    resumed = train(0, 1, replace(training, begin=MIDDLE, state=first.state))
    _same(resumed, reference, f"{name}, resumed", 0.0)
    return reference


@dataclass(frozen=True)
class _RankComparison:
    """Compares runs on several ranks with the run on one process."""

    training: Training
    reference: Trained
    name: str
    ranks: Sequence[int]
    launch: Launch
    rtol: float

    def under(self, strategies: Sequence[Strategy | str]) -> None:
        """Compare each rank's results under all strategies, and of micro-batches."""
        for number in self.ranks:
            runs = [replace(self.training, strategy=strategy) for strategy in strategies]
            runs.append(replace(self.training, passes=2 if number < 4 else 3))
            for rank, of_rank in enumerate(self.launch(_train_each, number, runs)):
                for run, trained in zip(runs, of_rank, strict=True):
                    where = f"{number} ranks, rank {rank}, {run.strategy!r}, {run.passes} passes"
                    _same(trained, self.reference, f"{self.name}, {where}", self.rtol)

    def resumed_on_fewer(self, strategies: Sequence[Strategy | str]) -> None:
        """Compare runs that are resumed on fewer ranks, from a state and from a checkpoint."""
        most = max(self.ranks)
        fewest = min(*self.ranks, most // 2)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "sharded"
            half = replace(self.training, strategy=strategies[-1], end=MIDDLE, folder=folder)
            before = self.launch(_train_each, most, [half])
            second_half = replace(self.training, strategy=strategies[0], begin=MIDDLE)
            of_state = replace(second_half, state=before[0][0].state)
            runs = [of_state, replace(second_half, state=folder)]
            after = self.launch(_train_each, fewest, runs)
        for trained, form in zip(after[0], ("a state", "a sharded checkpoint"), strict=True):
            where = f"{self.name}, resumed from {form} on {fewest} of {most} ranks"
            _same(trained, self.reference, where, self.rtol)


def _train_each(rank: int, ranks: int, trainings: Sequence[Training]) -> list[Trained]:
    return [train(rank, ranks, training) for training in trainings]


def spawn(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run a function on new processes that form one Gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, args=(ranks, folder, function, args), nprocs=ranks)
        results: list[Any] = []
        for rank in range(ranks):
            results.append(torch.load(Path(folder) / f"{rank}.pt", weights_only=False))
        return results


def _run(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(function(rank, ranks, *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _variant(method: Method, **members: Any) -> Method:
    """Return a copy of another class, which equals no other, with some methods overridden."""
    kind, copied = type(method), copy.deepcopy(method)
    derived = type(kind.__name__, (kind,), {"__slots__": (), **members})
    object.__setattr__(copied, "__class__", derived)
    for name in members:
        vars(copied).pop(name, None)  # of the instance
    return copied


def _checked(method: Method) -> Method:
    """Return a copy whose `direct` and `rebase` raise if they break their contract."""
    kind = type(method)

    def direct(self: Method, step: Given) -> Direction:
        tensors = {"the gradient": step.gradient, "the incoming gradient": step.incoming}
        for name, tensor in step.state.items():
            tensors[f"the state {name!r}"] = tensor
        for factor, data in step.data.items():
            for name, tensor in data.items():
                tensors[f"the data of {factor!r}, {name!r},"] = tensor
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        update = kind.direct(self, step)
        check_direction(method, step, update)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), (
                f"{method!r}: direct(), or a solver within it, has changed {name} in place, while "
                f"the update may still be given up: return a new tensor (x = x * y, not x.mul_(y))"
            )
        return update

    def rebase(self: Method, state: State, old: SecondOrder, new: SecondOrder) -> State:
        rebased = kind.rebase(self, state, old, new)
        check_state(method, "rebase()", rebased, state)
        return rebased

    return _variant(method, direct=direct, rebase=rebase, elementwise=method.elementwise)


def _average(model: nn.Module, ranks: int) -> None:
    """Average the gradients of all parameters, in place."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)


def _same(trained: Trained, expected: Trained, name: str, rtol: float) -> None:
    for key, weight in trained.weights.items():
        if rtol == 0.0:
            assert torch.equal(weight, expected.weights[key]), f"{name}: {key} differs in its bits"
        else:
            compare(weight, expected.weights[key], f"{name}: {key}", rtol=rtol)
