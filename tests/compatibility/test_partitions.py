"""Partitions of gradients, by stand-ins for DeepSpeed's optimizers that are written down here.

They have the attributes that soframe reads, filled in from where each element is.
`tests.compatibility.test_deepspeed_zero` is the same with DeepSpeed itself.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe import PlainGrad
from soframe.comm import shards
from soframe.parallel import deepspeed
from soframe.settings import grouped
from soframe.strategies import work
from tests.compatibility.fully_sharded import weights
from tests.compatibility.partitioned import (
    STEPS,
    Case,
    alone,
    assert_same,
    base,
    losses,
    net,
    settings_of,
)
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


@dataclass
class Mark:
    """What is noted of a parameter."""

    gradient_dict: dict[int, list[Tensor] | None]


class DeepSpeedZeroOptimizer:
    """Lays parameters out in a flat buffer for each group, of which each rank moves a part.

    Args:
        optimizer: The optimizer.
        turns: Whether the parameters lie in another order than in the optimizer.
        aligned: Of what the positions of parameters are multiples.
    """

    cpu_offload = zenflow = has_moe_layers = False
    loss_scale = model_parallel_world_size = sequence_parallel_size = 1
    gradient_average, torch_autocast_gradscaler = True, None
    gradient_accumulation_dtype, is_gradient_accumulation_boundary = torch.float32, True

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, turns: bool = False, aligned: int = 1
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.optimizer, self._flat = optimizer, []
        self.bit16_groups: list[list[nn.Parameter]] = []
        self.params_in_partition: list[list[nn.Parameter]] = []
        self.partition_size: list[int] = []
        self.real_dp_process_group = [dist.group.WORLD] * len(optimizer.param_groups)
        self.averaged_gradients: dict[int, list[Tensor] | None] = {}
        self.grad_start_offset: dict[int, dict[int, dict[int, int]]] = {}
        self.grad_partition_insertion_offset: dict[int, dict[int, dict[int, int]]] = {}
        self._where: dict[nn.Parameter, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            own = list(group["params"])
            lying, end = own[::2] + own[1::2] if turns else own, 0
            for p in lying:
                self._where[p] = begin = -(-end // aligned) * aligned
                end = begin + p.numel()
            size = -(-end // (2 * ranks)) * 2
            flat = torch.zeros(size * ranks, dtype=own[0].dtype)
            starts: dict[int, dict[int, int]] = {part: {} for part in range(ranks)}
            places: dict[int, dict[int, int]] = {part: {} for part in range(ranks)}
            for p in lying:
                begin = self._where[p]
                flat[begin : begin + p.numel()] = p.detach().flatten()
                p.data = flat[begin : begin + p.numel()].view(p.shape)
                for part in range(ranks):
                    held = [e for e in range(begin, begin + p.numel()) if e // size == part]
                    if held:
                        starts[part][id(p)] = held[0] - begin
                        places[part][id(p)] = held[0] - part * size
            group["params"] = [flat[rank * size :][:size].clone()]
            self._flat.append(flat)
            self.bit16_groups.append(own)
            self.partition_size.append(size)
            self.params_in_partition.append([p for p in lying if id(p) in starts[rank]])
            self.grad_start_offset[number] = starts
            self.grad_partition_insertion_offset[number] = places
            for p in own:
                mark = Mark(self.averaged_gradients) if id(p) in starts[rank] else None
                setattr(p, deepspeed.MARK, mark)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def get_param_id(self, parameter: nn.Parameter) -> int:
        return id(parameter)

    def reduce(self) -> None:
        """Average the gradients, and keep a partition of them."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for number, group in enumerate(self.bit16_groups):
            size = self.partition_size[number]
            for p in group:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(ranks)
                dist.all_reduce(p.grad)
            pieces: list[Tensor] = []
            end = 0
            for p in self.params_in_partition[number]:
                start = self.grad_start_offset[number][rank][id(p)]
                place = self.grad_partition_insertion_offset[number][rank][id(p)]
                if place > end:
                    pieces.append(torch.zeros(place - end))
                assert p.grad is not None
                piece = p.grad.flatten()[start:][: size - place]
                pieces.append(p.grad if len(piece) == p.numel() else piece)
                end = place + len(piece)
            self.averaged_gradients[number] = [*pieces, torch.zeros(size - end)]
            for p in group:
                p.grad = None

    def step(self) -> None:
        """Move this rank's parts, and bring every rank those of the others."""
        rank = dist.get_rank()
        for number, group in enumerate(self.param_groups):
            pieces = self.averaged_gradients[number]
            assert pieces is not None
            group["params"][0].grad = torch.cat([piece.flatten() for piece in pieces])
            self.averaged_gradients[number] = None
        self.optimizer.step()
        for number, group in enumerate(self.param_groups):
            for other, part in enumerate(self._flat[number].split(self.partition_size[number])):
                if other == rank:
                    part.copy_(group["params"][0])
                dist.broadcast(part, other)


class Stage3:
    """Cuts each parameter by itself, which has elements in a forward and its backward pass alone.

    Args:
        optimizer: The optimizer.
        model: The model.
    """

    offload_optimizer = offload_param = False
    loss_scale = sequence_parallel_size = 1
    model_parallel_group = all2all_process_group = torch_autocast_gradscaler = None
    is_gradient_accumulation_boundary = True

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.optimizer = optimizer
        self.averaged_gradients: dict[int, list[Tensor] | None] = {}
        # Each parameter is a list of its own, but for the first two.
        owners = [(p, n) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        alike = len(owners) > 1 and owners[0][1] == owners[1][1]
        cut = 2 if alike else 1
        pieces = [owners[:cut], *([one] for one in owners[cut:])]
        self.fp16_groups = [[p for p, _ in piece] for piece in pieces]
        self.sub_group_to_group_id = {n: piece[0][1] for n, piece in enumerate(pieces)}
        self.sub_group_process_groups = [dist.group.WORLD] * len(pieces)
        self._copies: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for number, (p, group) in enumerate(owners):
            size = -(-p.numel() // self._ranks)
            whole = torch.zeros(size * self._ranks, dtype=p.dtype)
            whole[: p.numel()] = p.detach().flatten()
            marks = {"ds_id": number, "ds_shape": p.shape, "ds_numel": p.numel()}
            marks |= {"ds_tensor": whole[self._rank * size :][:size].clone(), "_z3_optimizer": self}
            marks["ds_tensor"].ds_numel = size
            for name, value in marks.items():
                setattr(p, name, value)
            self._copies[group].append(marks["ds_tensor"])
            p.data = torch.empty(0, dtype=p.dtype)
        for group, copies in zip(optimizer.param_groups, self._copies, strict=True):
            group["params"] = copies
        model.register_forward_pre_hook(lambda *_: self._fetch())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _every(self) -> list[nn.Parameter]:
        return [p for group in self.fp16_groups for p in group]

    def _fetch(self) -> None:
        for p in self._every():
            if p.numel() == 0:
                parts = [torch.empty_like(p.ds_tensor) for _ in range(self._ranks)]
                dist.all_gather(parts, p.ds_tensor.detach())
                p.data = torch.cat(parts)[: p.ds_numel].view(p.ds_shape)

    def reduce(self) -> None:
        """Average the gradients, keep this rank's parts, and let the parameters go."""
        for number, group in enumerate(self.fp16_groups):
            entries = []
            for p in group:
                size = p.ds_tensor.ds_numel
                whole = torch.zeros(size * self._ranks, dtype=p.dtype)
                if p.grad is not None:
                    whole[: p.ds_numel] = p.grad.flatten() / self._ranks
                dist.all_reduce(whole)
                entries.append(whole[self._rank * size :][:size].clone())
                p.grad, p.data = None, torch.empty(0, dtype=p.dtype)
            self.averaged_gradients[number] = entries

    def step(self) -> None:
        """Move this rank's parts."""
        for number, group in enumerate(self.fp16_groups):
            entries = self.averaged_gradients[number]
            assert entries is not None
            for p, entry in zip(group, entries, strict=True):
                p.ds_tensor.grad = entry
            self.averaged_gradients[number] = None
        self.optimizer.step()


def install() -> None:
    """Let soframe find them, in this process."""
    sys.modules["deepspeed"] = ModuleType("deepspeed")


def train(rank: int, ranks: int, case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    model = net()
    optimizer = base(model, case)
    settings = settings_of(case)
    if case.when == "before":
        own = soframe.Preconditioner(model, case.method, optimizer=optimizer, **grouped(settings))
    engine: Any
    if case.stage == 3:
        engine = Stage3(optimizer, model)
    else:
        engine = DeepSpeedZeroOptimizer(optimizer, **case.zero)
    if case.when == "after":
        given = engine
        if case.stage == 1:  # as an engine has it, which is a model
            given, model.optimizer = optimizer, engine
        own = soframe.Preconditioner(model, case.method, optimizer=given, **grouped(settings))
    for step in range(STEPS):
        for loss in losses(step, case, model, rank, ranks):
            (loss / case.passes).backward()
        engine.reduce()
        own.step()
        engine.step()
    own.close()
    if case.stage == 3:
        model(torch.tensor([0]))
    return weights(model), own.counters


def train_all(rank: int, ranks: int, cases: list[Case]) -> list[Any]:
    install()
    return [train(rank, ranks, case) for case in cases]


MEM = {"strategy": "mem-opt"}
CLIPS = {**MEM, "kl_clip": 2e-4, "norm_clip": 0.03}
CASES = {
    "after": Case(options=CLIPS),
    "rates": Case(options=CLIPS, groups=True),
    "rates, comm": Case(options={**CLIPS, "strategy": "comm-opt"}, groups=True),
    "its own optimizer, sharded": Case(1, options={**CLIPS, "strategy": "sharded"}),
    "passes": Case(options=MEM, passes=2),
    "spoilt": Case(options=MEM, spoilt=2),
    "in turns": Case(options=MEM, zero={"turns": True}),
    "aligned": Case(options=MEM, zero={"aligned": 7}),
    "3 after": Case(3, options=CLIPS),
    "3 before, rates": Case(3, "before", options=CLIPS, groups=True),
    "3 rates, comm": Case(3, options={**CLIPS, "strategy": "comm-opt"}, groups=True),
    "3 passes, spoilt": Case(3, options=MEM, passes=2, spoilt=2),
}


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.thorough]),
        2,
        pytest.param(3, marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_ranks_are_one_process(ranks: int) -> None:
    results = run_ranks(train_all, ranks, list(CASES.values()), timeout=120)
    for index, (name, case) in enumerate(CASES.items()):
        assert_same([own[index] for own in results], case, name)


def with_and_without(rank: int, ranks: int, cases: list[Case]) -> list[Any]:
    install()
    in_own_memory()
    work.SMALL = 0  # a batched product may be rounded otherwise than one alone
    return [(train(rank, ranks, case)[0], alone(case, rank, ranks)) for case in cases]


def in_own_memory() -> None:
    """Copy parts that are used as they are: where a tensor begins decides how it is rounded."""
    begin = shards._begin

    def copy(split: shards.Split, own: int) -> None:
        assert split.part is not None
        split.part = split.part.clone()
        begin(split, own)

    shards._begin = copy


def test_methods_do_what_they_do_with_whole_gradients() -> None:
    """To the bit: of two ranks a sum has one order."""
    names = ("kfac", "ekfac", "soap", "soap-muon", "shampoo", "adamw")
    cases = [Case(method=name, options={**MEM, "auxiliary": "adamw"}) for name in names]
    for own in run_ranks(with_and_without, 2, cases, timeout=120):
        for name, (found, expected) in zip(names, own, strict=True):
            for key, weight in found.items():
                assert torch.equal(weight, expected[key]), (name, key)


# -- what is refused -------------------------------------------------------------------------------

UNSERVED: dict[str, tuple[str, Any, str]] = {
    "offload": ("cpu_offload", True, "leave offload_optimizer out"),
    "zenflow": ("zenflow", True, "leave offload_optimizer out"),
    "scale": ("loss_scale", 2.0, "leave the loss scale at 1"),
    "scaler": ("torch_autocast_gradscaler", object(), "leave the loss scale at 1"),
    "experts": ("has_moe_layers", True, "experts over ranks"),
    "tensors": ("model_parallel_world_size", 2, "tensor parallelism"),
    "sequences": ("sequence_parallel_size", 2, "sequence parallelism"),
    "sums": ("gradient_average", False, "leave gradient_average on"),
}

UNSERVED_3: dict[str, tuple[str, Any, str]] = {
    "3 offload": ("offload_optimizer", True, "leave offload_optimizer out"),
    "3 parameters": ("offload_param", True, "leave offload_param out"),
    "3 scale": ("loss_scale", 2.0, "leave the loss scale at 1"),
    "3 tensors": ("model_parallel_group", object(), "tensor parallelism"),
    "3 bits": ("all2all_process_group", object(), "leave zero_quantized_gradients out"),
}


def said(function: Any) -> str:
    """What is raised."""
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, ranks: int) -> dict[str, str]:
    install()
    found = {}

    def made(model: nn.Module | None = None) -> tuple[nn.Module, DeepSpeedZeroOptimizer]:
        model = net() if model is None else model
        model.optimizer = DeepSpeedZeroOptimizer(base(model, Case()))  # as an engine has it
        return model, model.optimizer

    for name, (attribute, value, _) in UNSERVED.items():
        model, engine = made()
        setattr(engine, attribute, value)
        found[name] = said(lambda model=model: soframe.Preconditioner(model, kl_clip=None))
    for name, (attribute, value, _) in UNSERVED_3.items():
        model = net()
        engine = Stage3(base(model, Case()), model)
        setattr(engine, attribute, value)
        found[name] = said(lambda model=model: soframe.Preconditioner(model, kl_clip=None))
    model = net()
    engine = Stage3(base(model, Case()), model)
    own = soframe.Preconditioner(model, lr=0.1, statistics_every=1)
    found["3 too early"] = said(own.step)
    own.measure(norms=True)
    model(torch.tensor([0])).sum().backward()
    engine.reduce()
    assert said(own.step) == "nothing"
    found["3 norms"] = (
        f"{own.engine.measuring.last.norms.weight}, {own.metrics()['norms']['weight_norm']}"
    )
    engine = Stage3(base(net(), Case()), model)
    for p in model.parameters():
        p._z3_optimizer = engine
    found["3 again"] = said(own.step)
    own.close()
    for p in model.parameters():
        del p._z3_optimizer
    found["3 no engine"] = said(lambda: soframe.Preconditioner(model, lr=0.1))
    for dtype in (torch.float64, torch.float16):
        model, engine = made(net().to(dtype))
        found[str(dtype)] = said(lambda model=model: soframe.Preconditioner(model, kl_clip=None))
    model = net()
    model.head.weight.use_muon = True
    _, engine = made(model)
    found["muon"] = said(lambda: soframe.Preconditioner(model, kl_clip=None))

    class Other(PlainGrad):
        check = soframe.GradientHome.check

    model, engine = made()
    found["home"] = said(
        lambda: soframe.Preconditioner(
            model, kl_clip=None, distribution=soframe.Distribution(home=Other())
        )
    )
    found["own step"] = said(lambda: soframe.Optimizer(model, "kfac", lr=0.1))
    found["trust region"] = said(lambda: soframe.TrustRegion(model, "squared-error"))
    found["local"] = said(
        lambda: soframe.Preconditioner(
            model, kl_clip=None, distribution=soframe.Distribution(gradients="local")
        )
    )

    model = net()
    engine = DeepSpeedZeroOptimizer(torch.optim.SGD(model.layers.parameters(), lr=0.1))
    model.optimizer = engine
    found["left out"] = said(lambda: soframe.Preconditioner(model, kl_clip=None))
    del model.optimizer
    found["no engine"] = said(lambda: soframe.Preconditioner(model, kl_clip=None))
    model = net()
    own = soframe.Preconditioner(model, lr=0.1)
    engine = DeepSpeedZeroOptimizer(base(model, Case()))
    found["no engine, before"] = said(own.step)
    own.close()

    model, engine = made()
    own = soframe.Preconditioner(model, lr=0.1)
    found["too early"] = said(own.step)
    model(torch.tensor([0])).sum().backward()
    engine.reduce()
    engine.is_gradient_accumulation_boundary = False
    found["too early, added up"] = said(own.step)
    _, _again = made(model)
    found["again"] = said(own.step)
    own.close()

    model = net()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.1)
    _, engine = made(model)
    found["own step, before"] = said(optimizer.step)
    optimizer.close()
    return found


EXPECTED = {
    **{
        name: f"ValueError: the parameter .*{what}"
        for name, (_, _, what) in {**UNSERVED, **UNSERVED_3}.items()
    },
    "3 too early": "RuntimeError: .*is_gradient_accumulation_boundary",
    "3 norms": "{}, None",
    "3 again": "RuntimeError: deepspeed.initialize was called again",
    "3 no engine": "ValueError: the parameter .* after deepspeed.initialize",
    "torch.float64": "ValueError: the parameter .*train in float32",
    "torch.float16": "ValueError: the parameter .*train in float32",
    "muon": "ValueError: the parameter .*Muon",
    "home": "ValueError: the parameter .*no other home= is given",
    "no engine": r"ValueError: the parameter .*optimizer=engine\.optimizer",
    "no engine, before": r"ValueError: the parameter .*optimizer=engine\.optimizer",
    "own step": "ValueError: a soframe.Optimizer moves .*DeepSpeedPreconditioner",
    "own step, before": "ValueError: a soframe.Optimizer moves .*DeepSpeedPreconditioner",
    "trust region": "ValueError: TrustRegion needs whole .* DeepSpeed's ZeRO",
    "local": "ValueError: .*pass .*gradients='averaged'",
    "left out": "ValueError: .*give it to the optimizer",
    "too early": "RuntimeError: .*is_gradient_accumulation_boundary",
    "too early, added up": "RuntimeError: .*is_gradient_accumulation_boundary",
    "again": "RuntimeError: deepspeed.initialize was called again",
}


def test_what_is_refused() -> None:
    for found in run_ranks(refusals, 2):
        assert set(found) == set(EXPECTED)
        for name, what in EXPECTED.items():
            assert re.match(what, found[name], re.DOTALL), (name, found[name])


# -- one at a time ---------------------------------------------------------------------------------


def verbs(rank: int, ranks: int) -> tuple[Any, ...]:
    """A rank that has nothing of a model of three numbers, and what a home does there."""
    install()
    model = nn.Linear(2, 1)
    engine = DeepSpeedZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    home = PlainGrad(engine)
    home.check(model.named_parameters())
    group = range(ranks)
    held = {name: home.shards(p, group) for name, p in model.named_parameters()}
    nothing = [home.has(p) for p in model.parameters()]
    home.put(model.weight, None)
    early = said(lambda: home.put(model.weight, torch.ones(2)))
    model(torch.ones(1, 2)).sum().backward()
    engine.reduce()
    parts = [home.read(p).tolist() for p in model.parameters()]
    home.put(model.weight, torch.full_like(home.read(model.weight), 3.0))
    home.zero(model.bias)
    changed = [part.tolist() for part in home.of(model.parameters())]
    home.clear(model.weight)
    cleared = home.read(model.weight).tolist()
    local = [home.local(p).shape for p in model.parameters()]
    return held, nothing, early, parts, changed, cleared, local


def test_the_verbs_of_partitions() -> None:
    results = run_ranks(verbs, 3)
    assert all("no averaged gradients" in early for _, _, early, *_ in results)
    held = results[0][0]
    assert held["weight"].ranges == ((0, 2), (0, 0), (0, 0))
    assert held["bias"].ranges == ((0, 0), (0, 1), (0, 0))
    for rank, (same, nothing, _, parts, changed, cleared, local) in enumerate(results):
        assert same == held
        assert nothing == [False, False]
        assert parts == [[[1.0, 1.0], []], [[], [1.0]], [[], []]][rank]
        assert changed == [[[3.0, 3.0], []], [[], [0.0]], [[], []]][rank]
        assert cleared == [[0.0, 0.0], [], []][rank]
        assert [tuple(shape) for shape in local] == [(len(part),) for part in parts]
