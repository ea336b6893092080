"""Steps that would have no effect raise; modules that are not used are allowed, and reported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import RankFailure, run_ranks

LOST = "gradients without statistics"
GONE = "statistics without gradients"


class Network(nn.Module):
    """Two layers and a head that is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, head: bool = False) -> Tensor:
        hidden = self.first(x).tanh()
        return self.scale * (self.head(hidden) if head else self.last(hidden))


def build(model: nn.Module, **options: Any) -> soframe.Preconditioner:
    settings = {"kl_clip": None, "statistics_every": 1, "solve_every": 1, **options}
    return soframe.Preconditioner(model, **grouped(settings))


def batch(step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def backward(model: Callable[..., Tensor], step: int = 0, **options: Any) -> None:
    model(batch(step), **options).square().mean().backward()


def unused(preconditioner: soframe.Preconditioner) -> set[str]:
    return {row.block for row in preconditioner.report() if row.block and "not called" in row.note}


def raises_and_changes_nothing(
    own: soframe.Preconditioner,
    model: nn.Module,
    match: str,
    error: type[Exception] = RuntimeError,
) -> None:
    """Warnings are errors in tests; `UserWarning` where a part of the model is concerned."""
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(error, match=match):
        own.step()
    for name, parameter in model.named_parameters():
        if name in before:
            assert torch.equal(parameter.grad, before[name])


# -- what compilers leave out --------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("backend", "in_place", "another"),
    [
        pytest.param("eager", False, False, marks=pytest.mark.thorough),
        ("aot_eager", True, False),
        pytest.param("eager", False, True, marks=pytest.mark.thorough),
    ],
)
def test_compiled_before(backend: str, in_place: bool, another: bool) -> None:
    """It, or another model of its class, has run."""

    def make() -> tuple[Network, Any]:
        model = Network()
        if in_place:
            model.compile(backend=backend)
        return model, model if in_place else torch.compile(model, backend=backend)

    model, compiled = make()
    backward(compiled)
    if another:
        model, compiled = make()
    own = build(compiled)
    model.zero_grad()
    backward(compiled)
    reason = r"'first', 'last'.*or another one of the same classes.*torch\.compiler\.reset"
    raises_and_changes_nothing(own, model, f"{LOST}.*{reason}")
    torch.compiler.reset()
    model.zero_grad()
    own.reset_batch()
    backward(compiled)
    own.step()
    assert unused(own) == {"head"}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_part_that_was_compiled_before() -> None:
    """The others have statistics; that part is named."""
    model = Network()
    part: Any = torch.compile(nn.Sequential(model.first, nn.Tanh()), backend="eager")
    backward(lambda x: model.last(part(x)))
    own = build(model)
    model.zero_grad()
    backward(lambda x: model.last(part(x)))
    match = rf"{LOST}.*of block\(s\) 'first', and.*compiled"
    raises_and_changes_nothing(own, model, match, UserWarning)


# -- calls that pass hooks by ------------------------------------------------------------------


def by_hand(model: nn.Module, step: int = 0) -> None:
    """Gradients of autograd.grad, written into .grad."""
    own = [p for n, p in model.named_parameters() if not n.startswith("head")]
    for parameter, g in zip(
        own, torch.autograd.grad(model(batch(step)).square().mean(), own), strict=True
    ):
        parameter.grad = g


def functional(model: nn.Module, step: int = 0) -> None:
    parameters = {n: p * 1 for n, p in model.named_parameters()}
    torch.func.functional_call(model, parameters, (batch(step),)).square().mean().backward()


def uncalled(model: nn.Module, step: int = 0) -> None:
    """The last layer's weights, without the layer."""
    hidden = model.first(batch(step).to(model.last.weight)).tanh()
    F.linear(hidden, model.last.weight, model.last.bias).square().mean().backward()


@pytest.mark.parametrize("train", [by_hand, functional, uncalled])
def test_calls_that_pass_hooks_by(train: Callable[[nn.Module, int], None]) -> None:
    model = Network()
    own = build(model)
    train(model, 0)
    names = "'last'" if train is uncalled else "'first', 'last'"
    error = UserWarning if train is uncalled else RuntimeError
    raises_and_changes_nothing(own, model, rf"{LOST}.*of block\(s\) {names}, and.*skip=", error)


@pytest.mark.filterwarnings("default:soframe. gradients without statistics")
def test_two_windows_are_checked() -> None:
    model = Network()
    own = build(model)
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            F.linear(batch(), model.head.weight).square().mean().backward()
            own.step()
        assert len([one for one in told if LOST in str(one.message)]) == (step < 2)


def test_skipped_as_the_error_says() -> None:
    model = Network()
    own = build(model, skip=["last"])
    uncalled(model)
    own.step()
    assert unused(own) == {"head"}


def test_a_layer_that_is_not_called_keeps_its_gradient() -> None:
    """As a parameter without a block does: beside updates that are clipped, and it is reported."""
    model = Network().double()
    uncalled(model)
    raw = model.last.weight.grad.clone()
    others = model.first.weight.grad.clone()
    model.zero_grad()
    own = build(model, kl_clip=1e-12)
    uncalled(model)
    with pytest.warns(UserWarning, match=rf"{LOST}.*unclipped") as warned:
        own.step()
    assert warned[0].filename == __file__
    torch.testing.assert_close(model.last.weight.grad, raw)
    assert model.first.weight.grad.norm() < 1e-3 * others.norm()
    assert unused(own) == {"last", "head"}


def test_the_auxiliary_method_moves_a_layer_that_is_not_called() -> None:
    model = Network().double()
    settings = {"lr": 0.01, "auxiliary_lr": 0.02, "auxiliary_weight_decay": 0.1}
    optimizer = soframe.Optimizer(model, "kfac", skip=["last"], **settings)  # type: ignore[arg-type]
    weight = model.last.weight.detach().clone().requires_grad_()
    adamw = torch.optim.AdamW([weight], lr=0.02, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        uncalled(model, step)
        weight.grad = model.last.weight.grad.clone()
        adamw.step()
        optimizer.step()
        torch.testing.assert_close(model.last.weight.detach(), weight.detach())


class Borrowing(nn.Module):
    """Uses the weight of a part without calling it, before a head that is called."""

    def __init__(self, part: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 2)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.use(self.part, x).tanh()
        return self.head(hidden)  # type: ignore[no-any-return]


def use_linear(part: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, part.weight, part.bias)


def use_convolution(part: nn.Module, x: Tensor) -> Tensor:
    return F.conv1d(x, part.weight, part.bias).mean(2)


def use_table(part: nn.Module, x: Tensor) -> Tensor:
    return F.embedding(x, part.weight).mean(1)


BORROWED = {
    "linear": (lambda: nn.Linear(3, 4), use_linear, lambda: batch().double()),
    "convolution": (
        lambda: nn.Conv1d(2, 4, 2),
        use_convolution,
        lambda: batch().double().expand(2, 5, 3).transpose(0, 1),
    ),
    "table": (lambda: nn.Embedding(7, 4), use_table, lambda: torch.arange(10).reshape(5, 2) % 7),
}


@pytest.mark.parametrize("name", BORROWED)
def test_a_weight_that_is_used_without_its_module_takes_a_plain_gradient_step(name: str) -> None:
    """Under K-FAC without `skip=`, at K-FAC's rate; the first step warns."""
    make, use, inputs = BORROWED[name]
    torch.manual_seed(0)
    model, x = Borrowing(make(), use).double(), inputs()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.05, layers="all")
    for step in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        with pytest.warns(UserWarning, match=f"{LOST}.*'part'") if step == 0 else nullcontext():
            optimizer.step()
        for key, parameter in model.named_parameters():
            plain = before[key] - 0.05 * gradients[key]
            if key.startswith("part"):
                compare(parameter.detach(), plain, key, rtol=1e-12)
            else:
                assert not torch.allclose(parameter, plain)


def test_an_output_in_whose_place_something_else_is() -> None:
    model = Network()

    def other(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.linear(args[0], module.weight, module.bias)

    model.last.register_forward_hook(other)
    own = build(model)
    backward(model)
    match = rf"{LOST}.*of block\(s\) 'last', and.*Their modules"
    raises_and_changes_nothing(own, model, match, UserWarning)


def test_a_forward_pass_of_before() -> None:
    model = Network()
    loss = model(batch()).square().mean()
    own = build(model)
    loss.backward()
    raises_and_changes_nothing(own, model, f"{LOST}.*the forward pass ran before")


# -- observe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["type-2", "monte-carlo"])
@pytest.mark.parametrize("after", [0, 1])
def test_observe_is_forgotten(fisher: str, after: int) -> None:
    model = Network()
    own = build(model, fisher=fisher, loss="mse")
    for step in range(after + 1):
        model.zero_grad()
        output = model(batch(step))
        if step < after:
            own.observe(output)
        output.square().mean().backward()
        if step < after:
            own.step()
    match = rf"{LOST}.*'first', 'last'.*needs .*observe\(outputs\)"
    raises_and_changes_nothing(own, model, match, UserWarning if after else RuntimeError)


def test_observe_misses_an_output() -> None:
    model = Network()
    own = build(model, fisher="type-2", loss="mse")
    outputs = [model(batch(), head=head) for head in (False, True)]
    own.observe(outputs[0])
    sum(output.square().mean() for output in outputs).backward()
    match = rf"{LOST}.*of block\(s\) 'head', and.*SumLoss"
    raises_and_changes_nothing(own, model, match, UserWarning)


# -- gradients that are gone -------------------------------------------------------------------


def to_none(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("which", ["", "last"])
def test_an_optimizer_in_hooks(which: str, ahead: bool) -> None:
    """Of all parameters, or of some; before the preconditioner is built, or after."""
    model = Network()
    own = None if ahead else build(model)
    for parameter in model.get_submodule(which).parameters():
        parameter.register_post_accumulate_grad_hook(to_none)
    own = own or build(model)
    backward(model)
    names = "'last', and" if which else "'first', 'last'"
    error = UserWarning if which else RuntimeError
    raises_and_changes_nothing(own, model, f"{GONE}.*{names}.*steps within", error)


def test_hooks_that_take_nothing() -> None:
    model = Network()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    own = build(model)
    kit.train(model, lambda net, n: net(batch(n)).square().mean() * (n != 1), range(3), own)
    assert len(seen) == 15


def test_gradients_that_are_zeroed_before_the_step() -> None:
    model = Network()
    own = build(model)
    backward(model)
    model.zero_grad()
    raises_and_changes_nothing(own, model, f"{GONE}.*between backward")


def test_only_other_parameters_have_gradients() -> None:
    model = Network()
    own = build(model)
    model.scale.square().backward()
    raises_and_changes_nothing(own, model, "no block has a gradient or statistics")
    model.zero_grad()
    backward(model)
    own.step()
    model.zero_grad()
    model.scale.square().backward()
    own.step()  # some steps may do without the blocks
    assert float(model.scale.grad) == 2


# -- what stays allowed --------------------------------------------------------------------------


def touched(model: nn.Module, step: int, head: bool) -> None:
    """A sum times zero gives every parameter a gradient."""
    total = sum(p.sum() for p in model.parameters())
    (model(batch(step), head).square().mean() + 0 * total).backward()


def plain(model: nn.Module, step: int, head: bool) -> None:
    backward(model, step, head=head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("train", [plain, touched])
def test_modules_that_are_used_at_times(
    train: Callable[[nn.Module, int, bool], None], to_none: bool, dtype: torch.dtype
) -> None:
    """Neither a head that is used later, nor layers that are no longer, whatever is in .grad."""
    model = Network().to(dtype)
    cast = model.forward
    model.forward = lambda x, head=False: cast(x.to(dtype), head)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = build(model)
    for step, head in enumerate([False, False, True, True, False]):
        optimizer.zero_grad(set_to_none=to_none)
        train(model, step, head)
        assert unused(own) == ({"head"} if 0 < step < 3 else set())
        own.step()
        optimizer.step()
    assert not unused(own)


def test_a_loss_of_derivatives_alone() -> None:
    """The layers were called, and their outputs have no part in it: they keep their factors."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    own = build(model)
    for step in range(4):
        model.zero_grad()
        x = batch(step).requires_grad_()
        output = model(x)
        if step == 2:
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            slope.square().mean().backward()
        else:
            output.square().mean().backward()
        masses = [block.mass for block in own.blocks]
        own.step()
        if step == 2:
            assert own.blocks[1].mass == masses[1]


def test_a_backward_pass_that_is_left_out() -> None:
    model = Network()
    own = build(model)
    own.step()
    model(batch())
    own.step()
    backward(model)
    own.step()
    assert unused(own) == {"head"}


def test_gradients_and_statistics_that_are_not_finite() -> None:
    model = Network()
    own = build(model)
    for bad in (True, False):
        model.zero_grad()
        (by_hand if bad else backward)(model)
        if bad:
            model.first.weight.grad.fill_(torch.nan)
        own.step()
    assert own.counters["skipped_updates"] == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_accumulation(reentrant: bool) -> None:
    model = Network()
    own = build(model, samples="batch")
    for step in range(3):
        model.zero_grad()
        for part in range(2):
            x = batch(step + part).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        own.step()
        own.propose()
    assert unused(own) == {"head"}


def test_thawed_and_resumed() -> None:
    model = Network()
    model.last.requires_grad_(False)
    own = build(model)
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        model.last.requires_grad_(step > 0)  # thawed before it had a gradient
        own.step()
    saved = own.state_dict()
    own.close()
    own = build(model)
    own.load_state_dict(saved)
    for step in range(2):
        model.zero_grad()
        backward(model, step)
        own.step()


def test_a_trust_region_with_an_unused_head() -> None:
    model = Network()
    own = soframe.TrustRegion(
        model, "mse", weight_decay=0.1, burn_in=1, statistics_every=1, solve_every=1
    )
    for step in range(3):
        with pytest.warns(match=f"{LOST}.*'head'") if step < 2 else nullcontext() as warned:
            own.step(lambda step=step: F.mse_loss(model(batch(step)), batch(step)[:, :2]))
        assert {warning.filename for warning in warned or ()} <= {__file__}
    assert unused(own.preconditioner) == {"head"}


# -- on several ranks ----------------------------------------------------------------------------


def on_ranks(rank: int, world_size: int, how: str, strategy: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Network()
    local = options.get("gradients") == "local"
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if local:
        wrapped.register_comm_hook(None, soframe.comm.leave_gradients)
    own = build(wrapped, strategy=strategy, **options)
    for step in range(3):
        model.zero_grad(set_to_none=step == 0)
        head = how == "head on one rank" and rank == 1 and step > 0
        backward(wrapped, step + rank, head=head)
        if how == "zeroed" and step == 1:
            model.zero_grad()
        own.step()
    dist.barrier()
    return unused(own)


@pytest.mark.distributed
@pytest.mark.parametrize("gradients", ["averaged", "local"])
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded", "owner-local"])
@pytest.mark.covering(together=1)
def test_used_on_one_rank_only(strategy: str, gradients: str) -> None:
    options = {"gradients": gradients}
    assert run_ranks(on_ranks, 2, "head on one rank", strategy, options) == [set(), set()]
    assert run_ranks(on_ranks, 2, "head never", strategy, options) == [{"head"}, {"head"}]


@pytest.mark.distributed
def test_every_rank_raises() -> None:
    for failure in run_ranks(on_ranks, 2, "zeroed", "mem-opt", {}, check=False):
        assert isinstance(failure, RankFailure)
        assert GONE in failure.summary
