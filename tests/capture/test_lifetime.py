"""Hooks: several preconditioners, copies, pickles, the end of them, and wrappers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from tests.capture.kit import (
    STEPS,
    Case,
    Result,
    TwoLayers,
    descend,
    expected,
    precondition,
    snapshot,
    softplus,
    vectors,
)
from tests.distributed.harness import run_ranks

CASE = Case(TwoLayers)


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def assert_same(got: Result, want: Result, blocks: tuple[str, ...] = ("first", "last")) -> None:
    for kind in want:
        for name, tensor in want[kind].items():
            if name.split(".")[0] in blocks:
                compare(got[kind][name], tensor, f"{kind} of {name}")


# -- several -----------------------------------------------------------------------------------


def test_two_models_and_two_preconditioners() -> None:
    """Interleaved, each trains as if it were alone."""
    models = [CASE.build(), CASE.build()]
    preconditioners = [precondition(model) for model in models]
    wanted = expected(CASE)
    late: list[Any] = [None, None]
    for step in range(STEPS + 1):
        for index, model in enumerate(models):
            at = step - index  # the second model is one step behind
            if not 0 <= at < STEPS:
                continue
            model.zero_grad()
            late[index] = softplus(model(vectors(at)))
        for index, (model, preconditioner) in enumerate(zip(models, preconditioners, strict=True)):
            at = step - index
            if not 0 <= at < STEPS:
                continue
            late[index].backward()
            preconditioner.step()
            assert_same(snapshot(model, preconditioner), wanted[at])
            descend(model)


def test_two_models_in_one_loss() -> None:
    """One backward through both, as in a generator and its discriminator."""
    models = [CASE.build(), CASE.build()]
    preconditioners = [precondition(model) for model in models]
    (softplus(models[0](vectors(0))) + softplus(models[1](vectors(0)))).backward()
    for model, preconditioner in zip(models, preconditioners, strict=True):
        preconditioner.step()
        assert_same(snapshot(model, preconditioner), expected(CASE)[0])


def test_two_preconditioners_share_a_model_by_parts() -> None:
    """Each has layers of its own, with settings of its own; both of them gather all they need."""
    model = CASE.build()
    first, last = precondition(model, skip=["last"]), precondition(model, skip=["first"])
    wanted = expected(CASE)
    for step in range(STEPS):
        model.zero_grad()
        softplus(model(vectors(step))).backward()
        first.step()
        last.step()
        assert_same(snapshot(model, first), {**wanted[step], "A": {}, "G": {}})
        for kind in "AG":
            assert set(snapshot(model, first)[kind]) == {"first"}
            assert set(snapshot(model, last)[kind]) == {"last"}
        descend(model)


def test_a_newer_preconditioner_replaces_an_older_one() -> None:
    """The older one's step raises, and the newer one computes what it computes alone."""
    model = CASE.build()
    older = precondition(model)
    softplus(model(vectors(1))).backward()
    with pytest.warns(UserWarning, match="a new preconditioner of the same Linear") as told:
        newer = precondition(model)
    assert len(told) == 1
    model.zero_grad()
    softplus(model(vectors(0))).backward()
    with pytest.raises(RuntimeError, match="was replaced by a newer one on the same model"):
        older.step()
    older.close()
    newer.step()
    assert_same(snapshot(model, newer), expected(CASE)[0])
    newer.close()
    assert hooks(model) == 0


def test_an_older_one_that_nothing_reaches_is_replaced_without_a_warning() -> None:
    """It had some of the layers, and only the garbage collector can tell that it is gone."""
    model = CASE.build()
    gc.collect()
    gc.disable()
    try:
        circle: list[Any] = [precondition(model, skip=["last"])]
        circle.append(circle)
        del circle
        newer = precondition(model)  # a warning is an error
    finally:
        gc.enable()
    newer.close()
    assert hooks(model) == 0


@pytest.mark.parametrize("where", ["backward", "step", "move"])
def test_a_cell_that_was_interrupted_runs_again(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer optimizer takes over, wherever Ctrl-C was, and steps as one of a fresh copy."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def cell(model: nn.Module) -> soframe.Optimizer:
        optimizer = soframe.Optimizer(model, "kfac", lr=0.1, statistics_every=1, solve_every=1)
        for step in range(STEPS):
            model.zero_grad()
            softplus(model(vectors(step))).backward()
            optimizer.step()
        return optimizer

    model = CASE.build()
    with monkeypatch.context() as patch:
        handle = None
        if where == "backward":
            handle = model.first.weight.register_hook(interrupt)
        elif where == "step":
            patch.setattr(soframe.methods.KFAC, "precondition", interrupt)
        else:
            patch.setattr(soframe.step.moving, "descend", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last error
            cell(model)
    if handle is not None:
        handle.remove()
    fresh = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="replaces an older one"):
        newer = cell(model)
    cell(fresh)
    assert kept is not None
    for mine, other in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)
    newer.close()
    assert hooks(model) == 0


def test_a_trust_region_replaces_and_is_replaced() -> None:
    model = CASE.build()
    with pytest.warns(UserWarning, match="replaces an older one"):
        kept = precondition(model), soframe.TrustRegion(model, "mse")
    with pytest.warns(UserWarning, match="replaces an older one"):
        precondition(model)
    with pytest.raises(RuntimeError):
        kept[1].step(lambda: model(vectors(0)).square().sum(1).mean() / 2)


def test_a_preconditioner_that_could_not_be_built_has_nothing() -> None:
    model = CASE.build()
    with pytest.raises(ValueError, match="is not in the given optimizer"):
        precondition(model, optimizer=torch.optim.SGD(model.first.parameters(), lr=0.1))
    precondition(model).close()


@pytest.mark.parametrize("method", ["kfac", "soap", "adamw"])
def test_errors_name_a_parameter_as_the_model_does(method: str) -> None:
    model = CASE.build()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^last\.weight is not in the given optimizer"):
        precondition(model, method=method, optimizer=optimizer)
    model.last.to("meta")
    with pytest.raises(ValueError, match=r"parameter last\.weight is on the meta device"):
        precondition(model, method=method)


def test_a_module_that_left_belongs_to_nobody() -> None:
    """Where a model has changed, what it had before may be preconditioned by another."""
    model = CASE.build()
    one, left = precondition(model), model.last
    model.last = nn.Linear(3, 2).double()
    softplus(model(vectors(0))).backward()
    one.step()
    precondition(left).close()
    model.zero_grad()
    softplus(model(vectors(1))).backward()
    one.step()  # it is not replaced
    with pytest.warns(UserWarning, match="replaces an older one"):
        precondition(model.last)


# -- the end -----------------------------------------------------------------------------------


def close(preconditioner: Any) -> None:
    preconditioner.close()


def twice(preconditioner: Any) -> None:
    preconditioner.close()
    preconditioner.close()


@pytest.mark.parametrize("end", [close, twice])
def test_close_removes_every_hook(end: Callable[[Any], None]) -> None:
    model = CASE.build()
    model.first.register_forward_hook(lambda module, args, output: None)
    preconditioner = precondition(model)
    assert hooks(model) == 5  # of two layers, the root before and after its call, and the user's
    late = softplus(model(vectors(0)))
    end(preconditioner)
    assert hooks(model) == 1
    late.backward()  # its hooks are there still, and do nothing
    assert not preconditioner.curvature.statistics.window.sums
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="closed"):
        preconditioner.step()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_rebuilding_does_not_add_hooks() -> None:
    """A frozen parameter makes the preconditioner register the model anew."""
    model = CASE.build()
    preconditioner = precondition(model)
    for trainable in (False, True, False):
        model.zero_grad()
        softplus(model(vectors(0))).backward()
        model.first.bias.requires_grad_(trainable)
        preconditioner.step()
        assert hooks(model) == 4
    preconditioner.close()
    assert hooks(model) == 0


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_dropped_preconditioner_takes_its_hooks_along() -> None:
    """The garbage collector would remove them while something else walks through the model."""
    model = CASE.build()
    preconditioner = precondition(model)
    softplus(model(vectors(0))).backward()
    preconditioner.step()
    late = softplus(model(vectors(0)))
    seen = weakref.ref(preconditioner), weakref.ref(preconditioner.blocks[0])
    del preconditioner
    assert seen[0]() is None
    assert hooks(model) == 0
    late.backward()
    del late
    gc.collect()
    assert seen[1]() is None


@pytest.mark.usefixtures("uncollected")
def test_dropped_curvature_takes_its_hooks_along() -> None:
    model = CASE.build()
    curvature = soframe.Curvature(model)
    curvature.fit([vectors(0)], _mean_square)
    del curvature
    assert hooks(model) == 0


def _mean_square(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = model(batch)
    return outputs, outputs.square().mean()


def test_model_is_not_kept_alive() -> None:
    model = CASE.build()
    preconditioner = precondition(model)
    softplus(model(vectors(0))).backward()
    preconditioner.step()
    weight = weakref.ref(model.first)
    del model, preconditioner
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("settings", [{}, {"background": 1}, {"solver": "eigen"}])
def test_steps_leave_nothing_to_the_garbage_collector(settings: dict[str, Any]) -> None:
    """What a step has used is freed with it, not when Python next looks for cycles."""
    model = CASE.build()
    preconditioner = precondition(model, **settings)

    def step(number: int) -> None:
        model.zero_grad()
        softplus(model(vectors(number))).backward()
        preconditioner.step()

    assert cycles(step) == 0


def test_steps_of_the_trust_region_leave_nothing_to_the_garbage_collector() -> None:
    model = CASE.build()
    own = soframe.TrustRegion(model, "squared-error", statistics_every=1, solve_every=1)

    def step(number: int) -> None:
        own.step(lambda: model(vectors(number)).square().sum(1).mean() / 2)

    assert cycles(step) == 0


def cycles(step: Callable[[int], None]) -> int:
    """How many objects of three steps only the garbage collector frees; two more come before."""
    gc.disable()
    try:
        for number in range(2):
            step(number)
        gc.collect()
        for number in range(3):
            step(number)
        return gc.collect()
    finally:
        gc.enable()


# -- copies ------------------------------------------------------------------------------------


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def calls_of(preconditioner: Any) -> list[int]:
    """Return the number of calls in the window under way, by block."""
    tallies = preconditioner.curvature.statistics.window.tallies
    return [tallies[block].counts.calls for block in preconditioner.blocks]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
def test_copy_is_inert(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """The copy trains without the preconditioner, and can have one of its own."""
    model = CASE.build()
    preconditioner = precondition(model)
    softplus(model(vectors(0))).backward()
    before = calls_of(preconditioner)
    other = duplicate(model)
    other.zero_grad()
    softplus(other(vectors(1))).backward()
    assert calls_of(preconditioner) == before
    plain = CASE.build()
    softplus(plain(vectors(1))).backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(other.get_parameter(name).grad, parameter.grad)
    own = precondition(other)
    other.zero_grad()
    softplus(other(vectors(0))).backward()
    own.step()
    preconditioner.step()
    assert_same(snapshot(other, own), expected(CASE)[0])
    assert_same(snapshot(model, preconditioner), expected(CASE)[0])


def test_a_pickled_model_does_not_need_soframe() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    own = soframe.Preconditioner(model, kl_clip=None)
    assert b"soframe" not in pickle.dumps(model)
    own.close()
    soframe.Optimizer(model, "kfac-muon", lr=0.1)
    assert b"soframe" not in pickle.dumps(model)


@pytest.mark.parametrize(
    "kind", [soframe.Preconditioner, soframe.Optimizer, soframe.StochasticTrustRegion]
)
def test_what_belongs_to_a_model_is_not_pickled(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    own = kind(model, **{"lr": 0.1} if kind is not soframe.StochasticTrustRegion else {})
    with pytest.raises(TypeError, match=rf"{kind.__name__} .* save its state_dict\(\)"):
        torch.save(own, io.BytesIO())


def test_a_curvature_is_copied_by_its_file() -> None:
    curvature = soframe.Curvature(nn.Sequential(nn.Linear(3, 2)))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Curvature .* save\(\) it into a folder"):
            copied(curvature)


def test_state_dict_of_the_model_does_not_change() -> None:
    model, plain = CASE.build(), CASE.build()
    preconditioner = precondition(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    preconditioner.close()


# -- wrappers ----------------------------------------------------------------------------------

compiled = partial(torch.compile, backend="eager")
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "DDP, bucket views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def wrap(rank: int, world_size: int, name: str, late: bool) -> tuple[list[str], list[Result]]:
    """Build the preconditioner over a wrapped model, or wrap the model afterwards."""
    model = CASE.build()
    early = precondition(model) if late else None
    wrapped = WRAPPERS[name](model)
    preconditioner = early or precondition(wrapped)
    # The names of a compiled model matter here, not what the compiler makes of it.
    runnable = DistributedDataParallel(model) if "compiled" in name else wrapped
    results = []
    for step in range(STEPS):
        runnable.zero_grad(set_to_none=False)
        softplus(runnable(vectors(step).chunk(world_size)[rank])).backward()
        memory = [p.grad.data_ptr() for p in model.parameters()]
        preconditioner.step()
        assert [p.grad.data_ptr() for p in model.parameters()] == memory
        results.append(snapshot(model, preconditioner))
        descend(model)
    return [row.parameter for row in preconditioner.report()], results


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.covering(together=1)
def test_wrapped_before_or_after(name: str, late: bool) -> None:
    """The names are the model's own, the numbers the same, and gradients are written in place."""
    wanted = expected(CASE)
    for names, results in run_ranks(wrap, 2, name, late):
        assert names == [n for n, _ in CASE.build().named_parameters()]
        for got, want in zip(results, wanted, strict=True):
            assert_same(got, want)


@pytest.mark.slow
def test_compiled_wrapper_is_looked_through() -> None:
    model = CASE.build()
    preconditioner = precondition(compiled(model), skip=["^last$"])
    names = {row.parameter: row.block for row in preconditioner.report()}
    assert names == {
        "first.weight": "first",
        "first.bias": "first",
        "last.weight": None,
        "last.bias": None,
    }
