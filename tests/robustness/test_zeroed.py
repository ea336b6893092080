"""What a step is given: gradients zeroed since the last one, of whole parameters with values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from soframe.testing import compare, dense_preconditioned
from tests.curvature import closing, fill, half_square, preconditioner, randn
from tests.distributed.harness import RankFailure, run_ranks
from tests.robustness.test_no_effect import Network, backward, build


def in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def together(model: nn.Module) -> None:
    if there := [p.grad for p in model.parameters() if p.grad is not None]:
        torch._foreach_zero_(there)


ZEROES = (in_place, to_none, together)


@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_zeroed(zero: Callable[[nn.Module], None], fused: bool) -> None:
    """Whichever way, with clipping, several passes, unused layers and penalties afterwards."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    own = build(model, statistics_every=2, solve_every=2)
    for step in range(8):
        zero(model)
        for number in range(1 + step % 3):
            backward(model, number, head=step > 4)
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        own.step()
        if step % 4 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if step % 4 == 3:  # added on purpose to what was preconditioned
            sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
    own.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_pass_between_the_step_and_the_zeroing() -> None:
    """A measurement leaves its gradients; they are zeroed before the batch, that does without."""
    model = Network()
    own = build(model)
    for zero in (in_place, to_none, in_place):
        backward(model)
        own.step()
        backward(model)
        zero(model)
        if zero is to_none:
            backward(model)
        own.step()
        zero(model)


def test_what_nobody_has_any_more_goes_with_its_hooks() -> None:
    """At once, and not with the next collection of garbage."""
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = build(model, optimizer=optimizer)
    backward(model)
    own.step()
    gc.collect()
    gc.disable()
    try:
        there = weakref.ref(own)
        del own
        assert there() is None
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.slow
def test_one_graph_under_the_compiler() -> None:
    """Hooks on parameters are none of the compiler's business."""
    torch._dynamo.reset()
    model = Network()
    own = build(model, statistics_every=2)
    backward(model)
    own.step()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    backward(compiled)
    own.step()
    torch._dynamo.reset()


# -- parameters without values, and parameters that are shared out -------------------------------


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Network()
    own = build(model)
    with pytest.raises(ValueError, match=r"scale is on the meta device.*to_empty"):
        own.step()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for _ in range(2):  # the first step finds new parameters
        model.zero_grad()
        backward(model)
        own.step()
    assert own.updated


def test_a_part_on_the_meta_device() -> None:
    model = Network()
    model.head = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match=r"head\.weight is on the meta device"):
        build(model)
    build(model, skip=["head"]).close()


@pytest.mark.parametrize("mark", ["_fsdp_flattened", "ds_id", "_hp_mapping"])
def test_marks_of_frameworks(mark: str) -> None:
    """What frameworks leave on parameters they shard, without the frameworks: before, and after."""
    model = Network()
    own = build(model)
    for parameter in model.parameters():
        setattr(parameter, mark, 1)
    backward(model)
    with pytest.raises(ValueError, match=r"first\.weight belongs to .*DistributedDataParallel"):
        own.step()
    own.close()
    with pytest.raises(ValueError, match=r"parameter scale belongs to .*DistributedDataParallel"):
        build(model)


def shard(model: nn.Module, kind: str) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        model, use_orig_params=kind == "original", device_id=torch.device("cpu")
    )


def sharded(rank: int, world_size: int, kind: str, before: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    own = build(model) if before else None
    wrapped = shard(model, kind)
    own = own or build(wrapped)
    wrapped(torch.randn(3, 4)).square().mean().backward()
    own.step()


@pytest.mark.distributed
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["original", "flat"])
@pytest.mark.covering(together=1)
def test_sharded_models(kind: str, before: bool) -> None:
    """Refused at construction; by the step, where the model was sharded after it.

    Models that fully_shard or a tensor-parallel plan has cut up are served (tests/compatibility).
    """
    for failure in run_ranks(sharded, 2, kind, before, check=False):
        assert isinstance(failure, RankFailure)
        assert failure.exception is not None
        assert "FullyShardedDataParallel, in whose flat buffers" in str(failure.exception)
        assert "shard the model by torch.distributed.fsdp.fully_shard" in str(failure.exception)


def test_an_optimizer_that_shares_parameters_out() -> None:
    """Nothing would read what the step writes; of a part another optimizer may."""
    model = Network()
    flat = torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1)
    with pytest.raises(ValueError, match=r"no parameter of any block.*does not read what a"):
        build(model, optimizer=flat)
    part = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"last\.weight .*another optimizer has it, leave "):
        build(model, optimizer=part)


# -- steps in the wrong place, which go unseen ---------------------------------------------------


EVERY_STEP = {"statistics_every": 1, "solve_every": 1}


def plain_net() -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer whose gradients and Fisher are read off its outputs, and its batch."""
    model = fill(nn.Linear(3, 2))
    return model, randn(6, 3), randn(6, 2, seed=1)


def dense(model: nn.Linear, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient ``[out, in + 1]`` over kron(G, A), damped."""
    rows = torch.cat([x, torch.ones(6, 1).double()], 1)
    errors = x @ model.weight.detach().T + model.bias.detach() - y
    fisher = torch.kron(errors.T @ errors / 6, rows.T @ rows / 6)
    return dense_preconditioned(fisher, gradient, 0.1)


def matrix_of_gradients(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    return torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)


@pytest.mark.parametrize("before", [0, 2])
def test_a_second_step_preconditions_its_own_results(before: int) -> None:
    """It warns within the first two windows, and is silent afterwards."""
    model, x, y = plain_net()
    with closing(preconditioner(model)) as own:
        for _ in range(before + 1):
            model.zero_grad()
            half_square(model(x), y).backward()
            raw = matrix_of_gradients(model)
            own.step()
        first = dense(model, x, y, raw)
        compare(matrix_of_gradients(model), first, "first")
        with seen_early(before):
            own.step()
        compare(matrix_of_gradients(model), dense(model, x, y, first), "second")


def seen_early(before: int) -> AbstractContextManager[Any]:
    if before >= 2:
        return nullcontext()  # warnings are errors here
    return pytest.warns(UserWarning, match="gradients were not zeroed after the last step")


@pytest.mark.parametrize("before", [0, 2])
def test_a_second_step_of_the_optimizer_moves_again(before: int) -> None:
    """By the same gradients, which stay raw in `.grad`, and the same statistics."""
    model, x, y = plain_net()
    settings = {"solver": "eigen", "damping": 0.1, "decay": 0.0, "kl_clip": None}
    own = soframe.Optimizer(model, "kfac", lr=0.05, **grouped({**settings, **EVERY_STEP}))
    for _ in range(before + 1):
        own.zero_grad()
        half_square(model(x), y).backward()
        move = 0.05 * dense(model, x, y, matrix_of_gradients(model))
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        own.step()
    with seen_early(before):
        own.step()
    moved = start - nn.utils.parameters_to_vector(model.parameters()).detach()
    compare(moved, 2 * torch.cat([move[:, :-1].flatten(), move[:, -1]]), "two moves")
    own.close()


def test_a_step_after_the_optimizers_is_lost() -> None:
    """The weights are those of the optimizer alone."""
    weights = []
    for is_preconditioned in (True, False):
        model, x, y = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        own = preconditioner(model, optimizer=optimizer) if is_preconditioned else None
        for _ in range(4):
            optimizer.zero_grad()
            half_square(model(x), y).backward()
            optimizer.step()
            if own is not None:
                own.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*weights)
