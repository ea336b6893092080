"""Prices: code on paper calls the operators of real code, each priced by its shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.kernels import gram
from soframe.layers.base import LayerHelper
from soframe.layers.sharing import SharedInputs
from soframe.methods import KFAC
from soframe.methods.base import Call, Given
from soframe.methods.returned import direction_of
from soframe.planning.costs import Costs
from soframe.planning.hardware import Curve, Hardware
from soframe.planning.measure import OF_LINEAR
from soframe.planning.planner import plan
from soframe.planning.pricing import Paper, Priced, Pricing
from soframe.planning.task import Task
from soframe.solvers import Eigen, Inverse, NewtonSchulz
from soframe.specs import VALUE
from tests.methods.table import layers
from tests.planning.kit import CPU, GPU, convolutional, dense


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=lambda one: one.name)
def test_a_product_has_its_price(hardware: Hardware) -> None:
    with Paper(hardware) as paper:
        left, right = paper.new((3, 100, 200)), paper.new((3, 200, 50))
        priced = paper.price(lambda: left @ right)
    assert priced.flops == 3 * 2 * 100 * 200 * 50
    assert priced.seconds == pytest.approx(hardware.product(priced.flops / 3, 3, "float32"))
    assert priced.operators == 1
    assert priced.peak == priced.results == 4 * 3 * 100 * 50


def test_products_in_place_and_convolutions_have_theirs() -> None:
    with Paper(CPU) as paper, torch.no_grad():
        total, x, images = paper.new((8, 8)), paper.new((8, 30)), paper.new((2, 3, 9, 9))
        weight = paper.new((4, 3, 3, 3))
        added = paper.price(lambda: total.addmm_(x, x.mT, beta=0.5))
        convolved = paper.price(lambda: nn.functional.conv2d(images, weight))
    assert (added.flops, added.peak) == (2 * 8 * 30 * 8, 0)
    assert convolved.flops == 2 * (2 * 4 * 7 * 7) * (3 * 3 * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_operator_has_the_curve_of_its_kind_and_dtype(dtype: torch.dtype) -> None:
    names = ("float32", "bfloat16", "float64")
    keys = [f"{kind}:{name}" for kind in ("product", "convolution", "eigh") for name in names]
    curves = {key: Curve(alpha=1.0 + number) for number, key in enumerate(keys)}
    with Paper(replace(CPU, operators=curves)) as paper, torch.no_grad():
        square, weight = paper.new((8, 8), dtype), paper.new((4, 3, 3, 3), dtype)
        images = paper.new((2, 3, 9, 9), dtype)
        seconds = {
            "product": paper.price(lambda: square @ square).seconds,
            "convolution": paper.price(lambda: nn.functional.conv2d(images, weight)).seconds,
            "eigh": paper.price(lambda: torch.linalg.eigh(square)).seconds,
        }
    name = str(dtype).removeprefix("torch.")
    assert seconds == {kind: curves[f"{kind}:{name}"].alpha for kind in seconds}


def test_other_operators_take_the_memory_s_time() -> None:
    with Paper(CPU) as paper:
        x = paper.new((1000, 1000))
        assert paper.price(lambda: x + 1).seconds == pytest.approx(8e6 / CPU.bandwidth)
        assert paper.price(lambda: x.mT[:2].view(2, -1)).seconds == 0
        assert paper.price(lambda: x[:2, :2] + 1).seconds == CPU.launch


FACTORISED: dict[str, Callable[[Tensor], object]] = {
    "cholesky": torch.linalg.cholesky_ex,
    "eigh": torch.linalg.eigh,
    "qr": torch.linalg.qr,
    "inverse": torch.cholesky_inverse,
    "triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=False),
}


@pytest.mark.parametrize("operator", FACTORISED)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_factorisation_has_the_price_of_its_side(operator: str, batch: int) -> None:
    with Paper(CPU) as paper:
        matrix = paper.new((batch, 300, 300))
        priced = paper.price(lambda: FACTORISED[operator](matrix))
    assert priced.seconds == pytest.approx(CPU.factorisation(operator, 300, batch, "float32"))
    assert priced.flops == 0


def test_numbers_that_code_reads_are_one() -> None:
    with Paper(CPU) as paper:
        x, numbers = paper.new((3, 4)), paper.new((5,), torch.long)
        read: list[object] = []

        def code() -> None:
            read.extend([x.sum().item(), numbers.sum().item(), (x > 0).any().item()])
            read.extend([bool((x > 0).any()), torch.equal(x, x + 1)])
            read.extend([tuple(x.nonzero().shape), x.nonzero().dtype])
            values, places, counts = numbers.unique(return_inverse=True, return_counts=True)
            read.extend([tuple(values.shape), tuple(places.shape), tuple(counts.shape)])

        paper.price(code)
    assert read == [1.0, 1, True, True, True, (12, 2), torch.long, (5,), (5,), (5,)]
    assert [type(one) for one in read[:3]] == [float, int, bool]


def test_nothing_costs_nothing() -> None:
    assert Priced() == Priced(0.0, 0, 0.0, 0, 0, 0.0)
    with Paper(CPU) as paper:
        x = paper.new((2, 3))
        free = paper.price(lambda: (x.view(6), x.t(), torch.empty_like(x).detach()))
    assert (free.seconds, free.operators) == (0.0, 0)


def test_storages_are_counted_once() -> None:
    """An operator that writes into its argument allocates nothing; two results of one, one."""
    with Paper(CPU) as paper:
        x = paper.new((10, 10))
        in_place = paper.price(lambda: x.add_(1))
        split = paper.price(lambda: (x + 1).chunk(2))
    assert (in_place.peak, in_place.results) == (0, 0)
    assert (split.peak, split.results) == (400, 400)


@pytest.mark.parametrize("in_place", [False, True])
def test_many_tensors_are_one_launch_on_a_gpu_and_a_loop_on_a_cpu(in_place: bool) -> None:
    for hardware, launches in ((CPU, 5), (GPU, 1)):
        with Paper(hardware) as paper:
            tensors = [paper.new((2, 2)) for _ in range(5)]
            multiply = torch._foreach_mul_ if in_place else torch._foreach_mul
            priced = paper.price(lambda t=tensors, f=multiply: f(t, 0.5))
        assert priced.seconds == pytest.approx(launches * hardware.launch)
        assert priced.operators == 1


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=lambda one: one.name)
def test_the_first_plan_of_a_process_has_the_prices_of_the_second(hardware: Hardware) -> None:
    """No constant that is made once per process is priced, or held."""
    model, inputs = convolutional(), torch.randn(4, 3, 8, 8)
    gram.ones.cache_clear()
    first, second = (Costs(Task.of(model, [inputs]), hardware).statistics for _ in range(2))
    assert first == second


def test_memory_is_counted_for_as_long_as_it_lives() -> None:
    def code() -> Tensor:
        big = torch.zeros(1000)
        small = big[:10] + 1
        del big
        return small + 1

    assert_equal(Paper(CPU).price(code), peak=4000 + 40, results=40)


def assert_equal(priced: object, **expected: object) -> None:
    assert {name: getattr(priced, name) for name in expected} == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("solver", [Inverse(), Eigen(), NewtonSchulz()], ids=repr)
def test_solvers_of_both_devices_cost_more_for_larger_matrices(
    device: str, solver: soframe.Solver
) -> None:
    seconds = []
    for size in (32, 128):
        with Paper(CPU if device == "cpu" else GPU) as paper:
            matrix, damping = paper.new((2, size, size)), paper.new((2,))
            seconds.append(paper.price(lambda: solver.solve(matrix, damping)).seconds)  # noqa: B023
    assert 0 < seconds[0] < seconds[1]


METHODS = sorted(soframe.available("method"))


def auxiliary(method: str) -> dict[str, str]:
    return {"auxiliary": "adamw"} if "muon" in method else {}


@pytest.mark.parametrize("method", METHODS)
def test_updates_on_paper_call_the_operators_of_real_ones(method: str) -> None:
    model = dense(6, 5, 5, 4)
    task = Task.of(model, method=method, **auxiliary(method))
    costs = Costs(task, CPU)
    for index, block in enumerate(task.blocks):
        on_paper = costs.direct([index])
        shapes = {f: {n: s.shape for n, s in own.items()} for f, own in block.tensors.items()}
        shapes |= {factor.name: {VALUE: factor.shape} for factor in block.unsolved}
        data = {f: {n: torch.rand(s) for n, s in own.items()} for f, own in shapes.items()}
        for name, tensors in data.items():
            if "order" in tensors:
                tensors["order"] = torch.arange(data[name]["order"].shape[-1]).expand_as(
                    data[name]["order"]
                )
        state = {name: torch.rand(spec.shape) for name, spec in block.states.items()}
        gradient = torch.rand(tuple(block.shape))
        given = Given(gradient, gradient, data, state, 10, block.solver, 1e-3)
        with torch.no_grad(), Pricing(CPU) as real:
            made = direction_of(block.method, given)
        del made
        assert real.priced.operators == on_paper.operators
        assert real.priced.flops == on_paper.flops
        assert real.priced.seconds == pytest.approx(on_paper.seconds)


def test_statistics_on_paper_call_the_operators_of_real_ones() -> None:
    model, images = convolutional(), torch.rand(4, 3, 8, 8)
    task = Task.of(model, (images,), method="kfac")
    planned = Costs(task, CPU).statistics
    calls: dict[str, tuple[Tensor, Tensor]] = {}
    names = {module: name for name, module in model.named_children()}

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls[names[module]] = args[0].detach(), output.detach()

    for module in names:
        module.register_forward_hook(record)
    model(images)
    shared = SharedInputs()
    for block in task.blocks:
        (helper,) = block.helpers
        inputs, output = calls[block.name]
        rows = helper.output_rows(torch.rand(output.shape))
        call = Call(helper, (inputs,), rows, block.dtype, shared)
        totals = {f.name: torch.zeros(f.shape) for f in block.factors}
        with torch.no_grad(), Pricing(CPU) as real:
            for name, moment in block.method.statistics(call).items():
                assert callable(moment)
                moment(totals[name], 1.0)
        assert real.priced.seconds == pytest.approx(planned[block.name].seconds)
        assert real.priced.operators == planned[block.name].operators


def test_operators_of_a_linear_are_those_by_which_hooks_are_measured() -> None:
    task = Task.of(dense(5, 5), (torch.rand(8, 5),), method="kfac")
    assert [one.operators for one in Costs(task, CPU).statistics.values()] == [OF_LINEAR]


def test_passes_on_paper_call_the_operators_of_real_ones() -> None:
    model, images = convolutional(), torch.rand(4, 3, 8, 8)
    priced = Costs(Task.of(model, (images,), method="kfac"), CPU).passes
    with Pricing(CPU) as real:
        model(images).sum().backward()
    assert real.priced.flops == priced.flops
    # The sum of the outputs is made in another way.
    assert real.priced.operators == pytest.approx(priced.operators, abs=4)


def test_the_model_of_a_task_stays_as_it_was() -> None:
    model, images = convolutional(), torch.rand(4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    task = Task.of(model, (images,), method="kfac")
    Costs(task, CPU).passes  # noqa: B018
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_activations_are_those_that_autograd_saves() -> None:
    model, images = dense(6, 5, 4), torch.rand(7, 6)
    task = Task.of(model, (images,), method="kfac")
    # The inputs of both layers; weights are held anyway.
    assert task.activations == 4 * 7 * (6 + 5)


class Attending(nn.Module):
    """Four heads of two for the queries, and fewer for keys and values; it has one sequence."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.first, self.last, self.heads = nn.Linear(8, 8), nn.Linear(8, 3), heads

    def forward(self, x: Tensor) -> Tensor:
        query = self.first(x).view(1, 5, 4, 2).transpose(1, 2)
        key = query[:, : self.heads] * 2
        attended = nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        return self.last(attended.transpose(1, 2).reshape(1, 5, 8))  # type: ignore[no-any-return]


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_on_paper_saves_no_scores_and_a_key_for_each_head(heads: int) -> None:
    task = Task.of(Attending(heads), (torch.rand(1, 5, 8),), method="kfac")
    # Inputs, queries, what was attended to, and keys: as values, too, where they are repeated.
    matrices = 3 + (1 if heads == 4 else 2)
    assert task.activations // 4 - matrices * 5 * 8 in range(4 * 5, 2 * 5 * 8)  # and logarithms


def test_a_plan_leaves_no_tensors_without_numbers_behind() -> None:
    model, images = convolutional(), torch.rand(4, 3, 8, 8)
    Costs(Task.of(model, (images,), method="kfac"), CPU).statistics  # noqa: B018
    own = soframe.Preconditioner(model, lr=0.1, kl_clip=None)
    model(images).square().sum().backward()
    own.step()
    assert all(type(p.grad) is Tensor for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())  # type: ignore[union-attr]


LAYERS = layers()


@pytest.mark.covering(together=1)
@pytest.mark.parametrize("hardware", [CPU, GPU], ids=lambda one: one.name)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_under_every_method_has_a_plan(
    layer: str, method: str, hardware: Hardware
) -> None:
    _, make, inputs = LAYERS[layer]
    try:
        task = Task.of(make(), (inputs(),), method=method)
    except ValueError as error:
        assert "there is nothing to precondition" in str(error)  # noqa: PT017
        return
    planned = plan(task, ranks=2, hardware=hardware)
    assert all(row.timing.mean > 0 for row in planned.rows)
    # Only helpers that observe in a way of their own may have statistics without a price.
    own = all(type(h).observe is LayerHelper.observe for b in task.blocks for h in b.helpers)
    assert not (own and planned.notes)


@pytest.mark.slow
@pytest.mark.parametrize("solver", sorted(soframe.available("solver")))
def test_every_solver_has_a_plan_in_double_precision(solver: str) -> None:
    method = {"root": "shampoo", "basis": "soap"}.get(solver, "kfac")
    task = Task.of(dense(6, 5, 5, 4).double(), method=method, solver=solver)
    assert all(row.timing.phases["solve"] > 0 for row in plan(task, ranks=2, hardware=CPU).rows)


@pytest.mark.parametrize("method", ["kfac", "shampoo", "soap-muon"])
def test_the_precision_of_this_process_changes_no_price_of_a_gpu(method: str) -> None:
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            task = Task.of(dense(6, 5, 5, 4), method=method, **auxiliary(method))
            (row, *_) = plan(task, ranks=1, hardware=GPU).rows
            found.append((row.memory, row.timing))
    finally:
        torch.set_float32_matmul_precision(before)
    assert found[0] == found[1]


@pytest.mark.slow
def test_statistics_without_a_price_are_named() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model, x = nn.ModuleDict({"attend": attention}), torch.rand(3, 5, 8)
    model.forward = lambda x: attention(x, x, x)[0]  # type: ignore[assignment]
    made = plan(Task.of(model, (x,), layers="all"), ranks=2, hardware=CPU)
    assert "no price for the statistics of 2 block(s), such as attend.in_proj" in made.notes[0]
    assert f"note: {made.notes[0]}" in str(made)
    unknown = plan(Task.of(dense(6, 5)), ranks=2, hardware=CPU).notes
    assert unknown == (
        "no price for passes and statistics of calls: pass the shapes of the inputs (--input)",
    )
    assert not plan(Task.of(dense(6, 5), (torch.rand(3, 6),)), ranks=2, hardware=CPU).notes


class Reading(KFAC):
    """Looks at numbers."""

    def direct(self, given: Given) -> Tensor:
        return torch.from_numpy(given.gradient.numpy() + 1)


def test_a_part_that_reads_numbers_is_named() -> None:
    task = Task.of(dense(6, 5), method=Reading())
    said = r"direct of Reading on '0' cannot be planned.*run on the meta device"
    with pytest.raises(ValueError, match=said):
        plan(task, ranks=2, hardware=GPU)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) if x.sum().item() > 0 else x


def test_a_model_that_reads_numbers_is_planned_without_inputs() -> None:
    said = r"the forward pass cannot be planned.*other inputs, or none"
    with pytest.raises(ValueError, match=said):
        Task.of(Branching(), (torch.ones(2, 3),))
    assert plan(Task.of(Branching()), ranks=2, hardware=CPU).notes
