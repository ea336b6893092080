"""Where gradients live: in `.grad`, and in homes that were written outside of soframe."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as anew

import soframe
from soframe import GradientHome, PlainGrad
from soframe.settings import grouped
from tests.distributed.harness import run_ranks
from tests.methods.stages import damping_for

SAMPLES, STEPS = 12, 5
READ_GRAD = {
    "blocks/home.py": "it is where gradients live",
    "parallel/dtensors.py": "there those of DTensors live",
    "products/fitting.py": "it puts gradients aside and back, of a model that is not trained",
    "testing/methods.py": "it averages gradients over ranks, as DistributedDataParallel does",
    "testing/checks.py": "it compares gradients before and after",
    "testing/oracle.py": "it is an optimizer that puts its own gradients there",
}
"""The modules that may name `.grad`, and why."""


def names_grad(tree: ast.AST) -> bool:
    """Whether code reads or writes an attribute `grad`, other than the function of autograd."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            of = node.value
            if not (isinstance(of, ast.Attribute) and of.attr == "autograd"):
                return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            by_name = node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if by_name and "grad" in values:
                return True
    return False


@pytest.mark.slow
def test_no_other_module_knows_where_gradients_live() -> None:
    package = Path(soframe.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if file.parent.name != "trust_region"  # an extension, which refuses other homes
        and names_grad(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert found == set(READ_GRAD)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("p.grad", True),
        ("p.grad = None", True),
        ("getattr(p, 'grad')", True),
        ("torch.autograd.grad(loss, p)", False),
        ("p.main_grad", False),
    ],
)
def test_what_names_grad(code: str, expected: bool) -> None:
    assert names_grad(ast.parse(code)) == expected


class Dictionary(GradientHome):
    """Gradients in a dict, to which somebody moves them after the backward pass."""

    def __init__(self) -> None:
        self.gradients: dict[nn.Parameter, Tensor] = {}

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        return self.gradients.get(parameter)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        self.gradients.pop(parameter, None)
        if gradient is not None:
            self.gradients[parameter] = gradient

    def collect(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                self.gradients[parameter] = parameter.grad
                parameter.grad = None


class MainGrad(GradientHome):
    """Gradients in `main_grad`, to which hooks add them, as Megatron's do."""

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        return getattr(parameter, "main_grad", None)

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        parameter.main_grad = gradient  # type: ignore[attr-defined]

    def add(self, parameter: nn.Parameter) -> None:
        """Be called once autograd has accumulated into a parameter."""
        assert parameter.grad is not None
        self.fill(parameter).add_(parameter.grad)
        parameter.grad = None

    def hook(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.add)


class Net(nn.Module):
    """Square layers, a norm, an embedding, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.embedding(tokens)).tanh())
        return self.head(self.second(hidden).tanh())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 5, (SAMPLES,), generator=generator)
    return tokens, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


class SGD(torch.optim.Optimizer):
    """Descends along the gradients of a home."""

    def __init__(self, model: nn.Module, home: GradientHome) -> None:
        super().__init__(model.parameters(), {"lr": 0.05})
        self._home = home

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = self._home.read(parameter)
            if gradient is not None:
                self._home.local(parameter).sub_(gradient, alpha=0.05)


HOMES: dict[str, Callable[[], GradientHome]] = {
    "grad": PlainGrad,
    "dictionary": Dictionary,
    "main_grad": MainGrad,
    "main_grad, hooked last": MainGrad,
}


def train(
    rank: int, ranks: int, home_name: str, owner: str, gradients: str, set_to_none: bool = True
) -> dict[str, Tensor]:
    """The weights after some steps, the third of which is skipped for what is not finite."""
    model, home = net(), HOMES[home_name]()
    if home_name == "main_grad":
        home.hook(model)  # type: ignore[attr-defined]
    settings: dict[str, Any] = {
        "home": home,
        "gradients": gradients,
        "strategy": "mem-opt",
        "statistics_every": 1,
        "solve_every": 2,
    }
    if owner == "kfac":
        optimizer: Any = SGD(model, home)
        preconditioner = soframe.Preconditioner(
            model, "kfac", optimizer=optimizer, **grouped(settings)
        )
    else:
        optimizer = soframe.Optimizer(model, owner, lr=0.02, weight_decay=0.1, **grouped(settings))
        preconditioner = optimizer.preconditioner
    if home_name == "main_grad, hooked last":
        home.hook(model)  # type: ignore[attr-defined]
    for step in range(STEPS):
        tokens, targets = batch(step)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        loss = (model(tokens[mine]) - targets[mine]).square().sum(1).mean()
        (loss * float("nan") if step == 2 else loss).backward()
        if isinstance(home, Dictionary):
            home.collect(model)
        if ranks > 1 and gradients == "averaged":
            for gradient in home.of(model.parameters()):
                dist.all_reduce(gradient)
                gradient.div_(ranks)
        if owner == "kfac":
            preconditioner.step()
        optimizer.step()
        if owner == "kfac":
            for parameter in model.parameters():
                home.clear(parameter) if set_to_none else home.zero(parameter)
        else:
            optimizer.zero_grad(set_to_none)
    assert preconditioner.counters["skipped_updates"] == 1
    if home_name != "grad" and set_to_none:
        assert not home.of(model.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_moved_alike(
    found: dict[str, Tensor], expected: dict[str, Tensor], case: str = ""
) -> None:
    start = dict(net().named_parameters())
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), (case, name)
        if "unused" not in name:
            assert not torch.equal(weight, start[name].to(weight.dtype)), name


@pytest.mark.parametrize("owner", ["kfac", "soap-muon"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("home", [name for name in HOMES if name != "grad"])
@pytest.mark.covering(together=2)
def test_any_home_trains_as_grad_does(home: str, owner: str, set_to_none: bool) -> None:
    if home == "dictionary" and not set_to_none:
        pytest.skip("what is collected replaces what is there")
    expected = train(0, 1, "grad", owner, "averaged", set_to_none)
    assert_moved_alike(train(0, 1, home, owner, "averaged", set_to_none), expected)


@pytest.mark.distributed
@pytest.mark.parametrize("owner", ["kfac", "soap-muon"])
@pytest.mark.parametrize("gradients", ["averaged", "local"])
@pytest.mark.covering(together=1)
def test_any_home_trains_as_grad_does_on_two_ranks(owner: str, gradients: str) -> None:
    expected = run_ranks(train, 2, "grad", owner, gradients)
    for home in ("dictionary", "main_grad"):
        for found, wanted in zip(
            run_ranks(train, 2, home, owner, gradients), expected, strict=True
        ):
            assert_moved_alike(found, wanted)


@dataclass(frozen=True)
class Flat:
    """A run with gradients in flat buffers.

    Attributes:
        method: The method.
        owner: Whether `soframe.Optimizer` owns the step, rather than `SGD`.
        options: Settings of soframe.
        passes: Micro-batches in each step.
        checkpoints: Whether activations are computed anew in the backward pass.
        bf16: Whether parameters are bfloat16, and buffers float32.
        spoilt: The step at which the loss of one rank is NaN.
        begin: The first step.
        end: The step after the last.
        saved: The weights and the state to begin from.
    """

    method: Any = "soap-muon"
    owner: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1
    checkpoints: bool = False
    bf16: bool = False
    spoilt: int | None = None
    begin: int = 0
    end: int = STEPS
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None


class Buffers(MainGrad):
    """The averaged gradient of each parameter, or a range of it, as stacks with flat buffers do.

    Args:
        rank: This rank.
        parts: Whether each rank has a range.
        dtype: The dtype of the buffers.
    """

    def __init__(self, rank: int, *, parts: bool, dtype: torch.dtype) -> None:
        self.rank, self.parts, self.dtype = rank, parts, dtype

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> soframe.Shards | None:
        if not self.parts:
            return None
        size, count = parameter.numel(), len(ranks)
        cuts = [size * index // count for index in range(count + 1)]
        dtype = str(self.dtype).removeprefix("torch.")
        pairs = tuple(pairwise(cuts))
        return soframe.Shards(shape=(size,), dim=0, ranges=pairs, copies=(0,) * count, dtype=dtype)

    def mine(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """Return what this rank has of a tensor like a parameter."""
        shards = self.shards(parameter, range(dist.get_world_size()))
        if shards is None:
            return tensor
        start, stop = shards.ranges[self.rank]
        return tensor.view(-1)[start:stop]

    def local(self, parameter: nn.Parameter) -> Tensor:
        return self.mine(parameter, parameter.detach())

    def reduce(self, model: nn.Module) -> None:
        """Average the gradients over ranks, and keep what is this rank's."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to(self.dtype) / dist.get_world_size()
                dist.all_reduce(gradient)
                self.put(parameter, self.mine(parameter, gradient))
                parameter.grad = None

    def gather(self, model: nn.Module) -> None:
        """Bring every rank the ranges that others have moved."""
        for parameter in model.parameters():
            shards = self.shards(parameter, range(dist.get_world_size()))
            for other, (start, stop) in enumerate(shards.ranges if shards else ()):
                part = parameter.detach().view(-1)[start:stop].clone()
                dist.broadcast(part, other)
                parameter.detach().view(-1)[start:stop] = part


Ended = tuple[dict[str, Tensor], dict[str, Any]]
"""Weights, and soframe's state."""


def train_flat(rank: int, ranks: int, case: Flat, parts: bool) -> Ended:
    model = net()
    if case.saved is not None:
        model.load_state_dict(case.saved[0])
    if case.bf16:
        model.bfloat16()
    home = Buffers(rank, parts=parts, dtype=torch.float32 if case.bf16 else torch.float64)
    settings: dict[str, Any] = {
        "home": home,
        "strategy": "mem-opt",
        "statistics_every": 1,
        "solve_every": 2,
        **damping_for(case.method, "adamw"),
        **case.options,
    }
    if case.owner:
        optimizer: Any = soframe.Optimizer(
            model, case.method, lr=0.02, weight_decay=0.1, **grouped(settings)
        )
        preconditioner = optimizer.preconditioner
    else:
        preconditioner = soframe.Preconditioner(model, case.method, lr=0.05, **grouped(settings))
        optimizer = SGD(model, home)
    own = optimizer if case.owner else preconditioner
    if case.saved is not None:
        own.load_state_dict(case.saved[1])
    for step in range(case.begin, case.end):
        tokens, targets = batch(step)
        mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        for x, y in zip(
            tokens[mine].chunk(case.passes), targets[mine].chunk(case.passes), strict=True
        ):
            outputs = model(x) if not case.checkpoints else anew(model, x, use_reentrant=False)
            loss = (outputs.double() - y).square().sum(1).mean() / case.passes
            (loss * math.nan if step == case.spoilt and rank == 0 else loss).backward()
        home.reduce(model)
        if not case.owner:
            preconditioner.step()
        optimizer.step()
        home.gather(model)
        for parameter in model.parameters():
            home.clear(parameter)
    assert preconditioner.counters["skipped_updates"] == (case.spoilt is not None)
    ended = {name: p.detach().clone() for name, p in model.named_parameters()}, own.state_dict()
    preconditioner.close()
    return ended


FLAT = {
    "soap-muon": Flat(passes=2),
    "adamw": Flat("adamw", spoilt=2),
    "kfac": Flat("kfac", owner=False, options={"kl_clip": None}, passes=2, checkpoints=True),
    "kfac, comm-opt": Flat("kfac", options={"strategy": "comm-opt", "kl_clip": None}, spoilt=2),
    "ekfac, sharded": Flat("ekfac", options={"strategy": "sharded", "kl_clip": None}),
    "bf16": Flat("kfac", options={"kl_clip": None}, bf16=True),
    "bf16, adamw": Flat("adamw", bf16=True),
    "kl_clip": Flat("kfac", owner=False, options={"kl_clip": 1e-4}),
    "norm_clip": Flat("kfac", options={"kl_clip": None, "norm_clip": 0.05}),
}


def both_ways(rank: int, ranks: int, names: Sequence[str]) -> list[list[Ended]]:
    cases = [FLAT[name] for name in names]
    return [[train_flat(rank, ranks, case, parts) for parts in (True, False)] for case in cases]


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "names"), [(2, list(FLAT)[2:]), (3, list(FLAT)[:2])])
def test_a_home_may_have_a_part_of_each_gradient(ranks: int, names: list[str]) -> None:
    """To the bit, where norms are not clipped: parts are moved, and nothing else is computed."""
    for results in run_ranks(both_ways, ranks, names):
        for name, ((found, _), (whole, _)) in zip(names, results, strict=True):
            if not name.endswith("clip"):
                assert_moved_alike(found, whole, name)
                continue
            for key, weight in found.items():
                torch.testing.assert_close(weight, whole[key], rtol=0, atol=1e-12, msg=name)


@pytest.mark.distributed
def test_a_run_with_parts_goes_on() -> None:
    """With parts on other ranks, without parts, and from there."""
    whole = run_ranks(train_flat, 2, Flat(passes=2), False)[0][0]
    begun = {parts: run_ranks(train_flat, 2, Flat(end=2), parts)[0] for parts in (True, False)}
    for ranks, before, after in ((3, True, True), (2, True, False), (2, False, True)):
        found, _ = run_ranks(train_flat, ranks, Flat(begin=2, saved=begun[before]), after)[0]
        for key, weight in found.items():
            torch.testing.assert_close(weight, whole[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_frozen_parameters_are_zeroed_in_a_home(set_to_none: bool) -> None:
    model, home = net(), MainGrad()
    home.hook(model)
    optimizer = soframe.Optimizer(
        model, "muon", lr=0.1, distribution=soframe.Distribution(home=home)
    )
    model(torch.zeros(2, 3, dtype=torch.long)).square().sum().backward()
    model.first.requires_grad_(False)
    optimizer.step()
    assert home.has(model.first.weight)
    optimizer.zero_grad(set_to_none)
    assert home.has(model.first.weight) != set_to_none
    assert not any(gradient.any() for gradient in home.of(model.parameters()))


def test_a_step_says_where_it_looked_for_gradients() -> None:
    """A home that nobody fills is as if gradients had been removed."""
    model = net()
    optimizer = soframe.Optimizer(
        model, "kfac", lr=0.1, distribution=soframe.Distribution(home=Dictionary()), kl_clip=None
    )
    tokens, targets = batch(0)
    (model(tokens) - targets).square().mean().backward()
    with pytest.raises(RuntimeError, match="statistics without gradients"):
        optimizer.step()


@pytest.mark.parametrize("home", [PlainGrad, "grad", 3])
def test_what_is_no_home_is_refused(home: Any) -> None:
    with pytest.raises(TypeError, match=r"home must be a soframe\.GradientHome"):
        soframe.Preconditioner(net(), distribution=soframe.Distribution(home=home), kl_clip=None)


def test_a_home_says_what_it_does_not_have() -> None:
    """It is asked for every parameter before anything is built."""

    class Refusing(PlainGrad):
        def check(self, parameters: Any) -> None:
            names = [name for name, _ in parameters]
            raise ValueError(f"no place for {names[0]}")

    with pytest.raises(ValueError, match=r"no place for embedding\.weight"):
        soframe.Preconditioner(
            net(), distribution=soframe.Distribution(home=Refusing()), kl_clip=None
        )


@pytest.mark.parametrize("make", [PlainGrad, Dictionary, MainGrad])
def test_the_verbs_of_a_home(make: Callable[[], GradientHome]) -> None:
    home, parameters = make(), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    one, other = parameters
    assert not home.has(one)
    assert home.of(parameters) == []
    home.zero(one)
    assert home.read(one) is None
    filled = home.fill(one)
    assert home.read(one) is filled
    assert home.fill(one) is filled
    filled.copy_(torch.tensor([2.0, 3.0]))
    assert [gradient is filled for gradient in home.of(parameters)] == [True]
    home.zero(one)
    assert filled.tolist() == [0.0, 0.0]
    assert not home.is_sparse(one)
    assert not home.is_sparse(other)
    home.put(other, torch.eye(2)[0].to_sparse())
    assert home.is_sparse(other)
    home.clear(one)
    assert not home.has(one)
    assert home.has(other)


def test_a_home_that_extends_the_plain_one_is_asked_for_each_parameter() -> None:
    class Doubled(PlainGrad):
        def read(self, parameter: nn.Parameter) -> Tensor | None:
            gradient = super().read(parameter)
            return None if gradient is None else 2 * gradient

        def local(self, parameter: nn.Parameter) -> Tensor:
            return parameter.detach()

    one = nn.Parameter(torch.ones(2))
    one.grad = torch.full((2,), 3.0)
    (read,), (local,) = Doubled().each([one]), Doubled().locals([one])
    assert read is not None
    assert read.tolist() == [6.0, 6.0]
    assert local is not one


def test_other_data_of_another_shape_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    own = soframe.Optimizer(model, "adamw", lr=0.01)
    model(torch.ones(4, 3)).sum().backward()
    model[1].bias.data = torch.zeros(5)
    with pytest.raises(ValueError, match=r"bias of 1.bias has the shape \(5,\), and had \(2,\)"):
        own.step()
