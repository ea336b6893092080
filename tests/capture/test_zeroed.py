"""Statistics belong to the gradients that ``.grad`` holds: zeroed ones take theirs along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from tests.curvature import blocks, closing, fill, half_square, preconditioner, randn
from tests.distributed.harness import run_ranks

STEPS = 4
Zero = Callable[[nn.Module], None]


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


ZEROES = (to_none, in_place)


def network(into: int = 4, out: int = 3) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(into, 5), nn.Tanh(), nn.Linear(5, out))
    return fill(model)


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    return randn(size, 4, seed=seed), randn(size, 3, seed=100 + seed)


def trained(
    method: str, zero: Zero, *, dropped: str = "", micro: int = 1, **settings: Any
) -> Tensor:
    """Train; `dropped` names what happens before every other step; return the weights."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with closing(preconditioner(model, method=method, optimizer=optimizer, **settings)) as own:
        for step in range(STEPS):
            zero(model)
            if dropped and step % 2 == 0:
                drop(model, own, dropped, step)
                zero(model)
            for number in range(micro):
                x, y = batch(10 * step + number)
                (half_square(model(x), y) / micro).backward()
            own.step()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def drop(model: nn.Module, own: soframe.Preconditioner, what: str, step: int) -> None:
    """Run backward passes whose gradients are zeroed."""
    x, y = batch(50 + step, size=9)
    if what == "spike":
        (100 * half_square(model(x), y)).backward()
    elif what == "attack":
        x.requires_grad_()
        half_square(model(x), y).backward()
        assert x.grad is not None
        half_square(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
    elif what == "error":
        loss = half_square(model(x.requires_grad_()), y)
        x.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loss.backward()
    else:
        assert what == "same graph"
        loss = half_square(model(x), y)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError


@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dropped", ["spike", "attack", "error", "same graph"])
def test_training_as_if_the_dropped_pass_had_not_been(dropped: str, micro: int, zero: Zero) -> None:
    plain = trained("kfac", zero, micro=micro)
    compare(trained("kfac", zero, dropped=dropped, micro=micro), plain, dropped, rtol=1e-12)


def by_a_tensor(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


def by_its_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = torch.zeros_like(parameter)


def by_a_product(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0


@pytest.mark.parametrize("replace", [by_a_tensor, by_its_data, by_a_product])
def test_a_gradient_that_is_replaced_by_zeros(replace: Callable[[nn.Parameter], None]) -> None:
    """The new tensor has the version of the former one: both are new."""
    model, (x, y), (other, target) = network(), batch(7, size=9), batch(8)
    with closing(preconditioner(model)) as own:
        half_square(model(x), y).backward()
        for parameter in model.parameters():
            replace(parameter)
        half_square(model(other), target).backward()
        own.step()
        rows = torch.cat([other, torch.ones(6, 1).double()], 1)
        compare(blocks(own)["0"].running["A"][0], rows.T @ rows / 6, "A")


@pytest.mark.parametrize("method", ["ekfac", "foof", "tnt", "diagonal", "kfac-reduce", "eva"])
def test_every_method_drops_them(method: str) -> None:
    every = {"solve_every": 2}
    plain = trained(method, to_none, **every)
    compare(trained(method, to_none, dropped="spike", **every), plain, method, rtol=1e-12)


@pytest.mark.parametrize("average", ["local", "global", "sum"])
def test_the_number_of_passes_is_that_of_the_gradient(average: str) -> None:
    plain = trained("kfac", to_none, micro=2, loss_average=average)
    dropped = trained("kfac", to_none, micro=2, loss_average=average, dropped="attack")
    compare(dropped, plain, average, rtol=1e-12)


@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.parametrize("by_model", [True, False])
def test_under_the_optimizer(by_model: bool, zero: Zero) -> None:
    """Zeroed by the model, the optimizer or by hand."""
    ends = []
    for dropped in (True, False):
        model = network()
        own = soframe.Optimizer(model, "kfac", lr=0.1, statistics_every=1, solve_every=1)
        for step in range(STEPS):
            if dropped:
                half_square(model(batch(50 + step)[0]), batch(60 + step)[1]).backward()
            if by_model:
                zero(model)
            else:
                own.zero_grad(set_to_none=zero is to_none)
            half_square(model(batch(step)[0]), batch(step)[1]).backward()
            own.step()
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        own.close()
    compare(*ends, "weights", rtol=1e-12)


@pytest.mark.parametrize("between", ["clip", "nothing", "step of another"])
def test_micro_batches_that_are_kept(between: str) -> None:
    """A change of gradients between the passes is no zeroing, nor is a gradient of zeros."""
    model = network()
    nn.init.zeros_(model[2].weight)  # the first layer has a gradient of zeros
    (x, y), (other, target) = batch(0), batch(1)
    with closing(preconditioner(model)) as own:
        (half_square(model(x), y) / 2).backward()
        if between == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif between == "step of another":
            torch.optim.SGD(model.parameters(), 0.0).step()
        (half_square(model(other), target) / 2).backward()
        own.step()
        inputs = torch.cat([x, other])
        rows = torch.cat([inputs, torch.ones(12, 1).double()], 1)
        compare(blocks(own)["0"].running["A"][0], rows.T @ rows / 12, "A")


class Heads(nn.Module):
    """A trunk with two heads, for two losses with a pass each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.one(hidden), self.two(hidden)


def test_a_layer_that_the_first_pass_did_not_reach() -> None:
    """Its gradient is None when the second pass begins, and nothing was zeroed."""
    model, (x, y) = fill(Heads()), batch(0)
    with closing(preconditioner(model)) as own:
        half_square(model(x)[0], y).backward()
        half_square(model(x)[1], y).backward()
        own.step()
        assert blocks(own)["one"].mass > 0
        assert blocks(own)["two"].mass > 0


def test_a_part_that_was_zeroed() -> None:
    """The statistics of that part go; the other part keeps the pass."""
    model, (x, y), (other, target) = fill(Heads()), batch(0), batch(1)
    alone = fill(Heads())
    with closing(preconditioner(model)) as own, closing(preconditioner(alone)) as wanted:
        half_square(model(x)[0], y).backward()
        model.one.zero_grad()
        half_square(model.one(other @ randn(4, 5)), target).backward()
        half_square(alone.one(other @ randn(4, 5)), target).backward()
        own.step()
        wanted.step()
        for name in "AG":
            compare(blocks(own)["one"].running[name], blocks(wanted)["one"].running[name], name)
        assert blocks(own)["trunk"].mass > 0


@pytest.mark.parametrize("size", [1, 6])
def test_a_pass_of_a_part_that_was_zeroed_does_not_count(size: int) -> None:
    """The gradients of the other part are those of two micro-batches, not of three."""
    factors: list[Tensor] = []
    for dropped in (True, False):
        model = fill(Heads())
        with closing(preconditioner(model)) as own:
            if dropped:
                x, y = batch(0, size)
                half_square(model.one(model.trunk(x).detach()), y).backward()
            for number in (1, 2):
                x, y = batch(number)
                (half_square(model(x)[1], y) / 2).backward()
                model.one.zero_grad()
            own.step()
            factors.append(blocks(own)["two"].running["G"][0])
    compare(*factors, "G", rtol=1e-12)


def test_statistics_of_a_gradient_that_the_step_does_not_find() -> None:
    model = fill(Heads())
    with closing(preconditioner(model)) as own:
        for step in range(3):
            x, y = batch(step)
            one, two = model(x)
            (half_square(one, y) + half_square(two, y)).backward()
            if step == 2:
                before = blocks(own)["two"].running["A"].clone()
                model.two.zero_grad()
            own.step()
            model.zero_grad()
        assert torch.equal(blocks(own)["two"].running["A"], before)


# -- generative adversarial networks -----------------------------------------------------------


def adversaries(rank: int, ranks: int, order: str, *, detached: bool) -> list[Tensor]:
    """Train a generator and a discriminator on ranks' parts of the data; return their weights.

    With ``detached`` the generator's loss reaches the discriminator through copies of its weights:
    no statistics of it could be dropped, since none are taken.
    """
    made, judge = network(4, 4), network(4, 1)
    parts = {"generator": made, "discriminator": judge}
    optimizers = {n: torch.optim.SGD(p.parameters(), 0.05, momentum=0.9) for n, p in parts.items()}
    own = {n: preconditioner(p, optimizer=optimizers[n]) for n, p in parts.items()}

    def of_generator(noise: Tensor) -> Tensor:
        if not detached:
            scores = judge(made(noise))
        else:
            weights = {n: p.detach() for n, p in judge.named_parameters()}
            scores = torch.func.functional_call(judge, weights, made(noise))
        return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))

    def of_discriminator(noise: Tensor, real: Tensor) -> Tensor:
        both = judge(torch.cat([real, made(noise).detach()]))
        targets = torch.cat([torch.ones(len(real), 1), torch.zeros(len(noise), 1)])
        return F.binary_cross_entropy_with_logits(both, targets.double())

    for step in range(STEPS):
        noise = randn(6, 4, seed=step)[rank::ranks]
        real = randn(6, 4, seed=50 + step)[rank::ranks]
        for name in order.split():
            optimizers[name].zero_grad()
            loss = of_generator(noise) if name == "generator" else of_discriminator(noise, real)
            loss.backward()
            average(parts[name], ranks)
            own[name].step()
            optimizers[name].step()
    for one in own.values():
        one.close()
    return [nn.utils.parameters_to_vector(p.parameters()).detach() for p in parts.values()]


def average(model: nn.Module, ranks: int) -> None:
    """Average the gradients over the ranks."""
    for parameter in model.parameters() if ranks > 1 else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


ORDERS = ["generator discriminator", "discriminator generator"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_discriminator_keeps_nothing_of_the_generators_pass(order: str) -> None:
    found, plain = (adversaries(0, 1, order, detached=detached) for detached in (False, True))
    for weights, expected in zip(found, plain, strict=True):
        compare(weights, expected, order, rtol=1e-12)


# -- the other Fishers -------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["type-2", "forward-only"])
def test_observed_statistics_are_dropped_with_the_gradients(fisher: str) -> None:
    """A pass between the observation and the zeroing marks them as those of the gradients."""
    found = []
    settings: dict[str, Any] = {"loss": "squared-error"} if fisher == "type-2" else {}
    for dropped in (True, False):
        model = network()
        with closing(preconditioner(model, fisher=fisher, **settings)) as own:
            for seed in (7, 8, 9) if dropped else (8, 9):
                x, y = batch(seed)
                output = model(x)
                own.observe(output)
                half_square(output, y).backward()
                if seed == 7:
                    model.zero_grad()
            own.step()
            found.append([factor.clone() for factor in blocks(own)["0"].running.values()])
    for with_pass, without in zip(*found, strict=True):
        compare(with_pass, without, fisher)


def test_gradients_zeroed_between_observation_and_backward() -> None:
    """The statistics precede their gradients, and stay."""
    model, (x, y) = network(), batch(0)
    with closing(preconditioner(model, fisher="type-2", loss="squared-error")) as own:
        half_square(model(x), y).backward()
        output = model(x)
        own.observe(output)
        model.zero_grad()
        half_square(output, y).backward()
        own.step()
        assert all(block.mass > 0 for block in own.blocks)


# -- ranks -------------------------------------------------------------------------------------


def on_ranks(rank: int, ranks: int, dropped: str, zero: str) -> Tensor:
    """Train in two micro-batches under DistributedDataParallel; return the weights.

    ``dropped`` is what happens before: a spike that is skipped, or a pass for adversarial examples,
    on which the model trains then. One process makes these with gradients of the inputs alone.
    """
    model = network()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with closing(preconditioner(model, optimizer=optimizer)) as own:
        for step in range(STEPS):
            x, y = batch(50 + step)
            x, y = x[rank::ranks].requires_grad_(), y[rank::ranks]
            if ranks > 1:
                (100 * half_square(wrapped(x), y)).backward()
            elif dropped == "attack":
                x.grad = torch.autograd.grad(half_square(model(x), y), x)[0]
            optimizer.zero_grad(set_to_none=zero == "to none")
            for number in range(2):
                x_half, y_half = batch(10 * step + number)
                x_half, y_half = x_half[rank::ranks], y_half[rank::ranks]
                if dropped == "attack":
                    assert x.grad is not None
                    x_half = x_half + 0.1 * x.grad.sign()
                (half_square(wrapped(x_half), y_half) / 2).backward()
            own.step()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def adversaries_on_ranks(rank: int, ranks: int) -> list[list[Tensor]]:
    return [adversaries(rank, ranks, order, detached=False) for order in ORDERS]


@pytest.mark.distributed
def test_adversaries_on_two_ranks_are_those_of_one_process() -> None:
    plain = [adversaries(0, 1, order, detached=True) for order in ORDERS]
    for found in run_ranks(adversaries_on_ranks, 2):
        for order, parts, expected in zip(ORDERS, found, plain, strict=True):
            for weights, alone in zip(parts, expected, strict=True):
                compare(weights, alone, order, rtol=1e-9)


@pytest.mark.distributed
@pytest.mark.parametrize("dropped", ["spike", "attack"])
@pytest.mark.parametrize("zero", ["to none", "in place"])
def test_two_ranks_drop_the_pass_that_one_process_did_not_have(zero: str, dropped: str) -> None:
    plain = on_ranks(0, 1, dropped, zero)
    for weights in run_ranks(on_ranks, 2, dropped, zero):
        compare(weights, plain, "weights", rtol=1e-9)
