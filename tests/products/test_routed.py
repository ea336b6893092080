"""Gradients of samples whose rows are not in the order of the batch: experts, and their like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.laplace import Laplace
from soframe.products.routing import BASE, NONE, by_sample, digits_of, number_of_digits, numbered
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.products.kinds import KINDS, Batch, Mixture, loss

NAMES = ("experts", "experts as layers")


def deep() -> nn.Module:
    """Two mixtures between layers that see the batch."""
    layers = [nn.Linear(3, 3), Mixture(), nn.Linear(2, 3), nn.LayerNorm(3), Mixture()]
    return fill(nn.Sequential(*layers)).eval()


def batch_of(samples: int, positions: int = 4, seed: int = 0) -> Batch:
    return randn(samples, positions, 3, seed=seed), randn(samples, positions, 2, seed=seed + 1)


def expected(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the gradient of each sample's own loss, one by one, with the routes of the batch."""
    of_names: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for error in (model(batch[0]) - batch[1]).square().flatten(1).sum(1) / 2:
        model.zero_grad()
        error.backward(retain_graph=True)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            of_names[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    model.zero_grad()
    return {name: torch.stack(gradients) for name, gradients in of_names.items()}


def close(result: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert result.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = (result[name].double() - tensor.double()).abs().max()
        assert error <= tolerance * tensor.abs().max(), name


# -- samples of rows -------------------------------------------------------------------------------


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 3), st.integers(0, 6), st.integers(1, 4), st.integers(0, 1000))
def test_rows_are_arranged_as_by_a_loop(groups: int, number: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows, samples = torch.randn(groups, number, 2), torch.randint(NONE, size, (groups, number))
    arranged = by_sample(rows, samples, size)
    for group in range(groups):
        for sample in range(size):
            of_sample = rows[group][samples[group] == sample]
            torch.testing.assert_close(arranged[group, sample, : len(of_sample)], of_sample)
            assert not arranged[group, sample, len(of_sample) :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_digits_are_read_off_ratios(dtype: torch.dtype) -> None:
    samples = BASE**2 + 5
    assert [number_of_digits(n) for n in (1, 2, BASE, BASE + 1, samples)] == [0, 1, 1, 2, 3]
    outputs = (randn(samples, 3) * 1e-6).to(dtype).requires_grad_()
    heads = outputs * 1  # with a graph
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(samples, dtype=torch.long)
    reference = heads.detach()[order][None]
    for digit in range(number_of_digits(samples)):
        outputs.grad = None
        with numbered([heads], digit):
            (heads * heads.detach()).sum().backward(retain_graph=True)
        assert outputs.grad is not None
        of_rows = digits_of(reference, outputs.grad[order][None], dtype)
        assert of_rows is not None
        found += of_rows[0] * BASE**digit
    assert torch.equal(found, order)


def test_rows_of_several_samples_have_no_digit() -> None:
    rows = randn(1, 3, 4)
    of_two = rows.clone()
    of_two[0, 0] = 2.0**BASE * rows[0, 0]
    of_two[0, 1] = 0.9 * 2.0**40 * rows[0, 1]
    of_two[0, 2] = 2.0**50 * rows[0, 2]
    assert digits_of(rows, of_two, torch.float64) is None
    rows[0, 1] = of_two[0, 1] = 0
    number = digits_of(rows, of_two, torch.float64)
    assert number is not None
    assert number.tolist() == [[0, NONE, 50 - BASE]]
    for exponent in (0, 2 * BASE, BASE - 1):  # no hook, or two of them
        assert digits_of(rows, rows * 2.0**exponent, torch.float64) is None


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 7, BASE, BASE + 1])
def test_mixtures_have_the_gradients_of_autograd(samples: int) -> None:
    model = deep()
    curvature = soframe.Curvature(model)
    # The first batch meets the routed rows, and runs once more; the second keeps its graph at once.
    for batch in (batch_of(samples), batch_of(samples, positions=2, seed=5)):
        gradients = curvature.gradients(batch, loss)
        wanted = expected(model, batch)
        close(gradients.dense(), wanted)
        vector = {name: randn(2, *p.shape, seed=3) for name, p in model.named_parameters()}
        products = [vector[n].flatten(1) @ g.flatten(1).T for n, g in wanted.items()]
        torch.testing.assert_close(gradients.dot(vector), sum(products), rtol=1e-9, atol=1e-9)


class Transposed(soframe.layers.ExpertsHelper):
    """The helper of `Kernels`."""

    parameter, transposed = "kernel", True


class Kernels(nn.Module):
    """Three experts in one parameter ``[experts, in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(randn(3, 3, 2, seed=4))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.kernel


class Choosing(nn.Module):
    """A layer that sees tokens with as many indices as the batch has samples, after a flat one."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.expert = nn.Linear(3, 2), nn.Linear(3, 2)
        self.chosen = torch.tensor([0, 2, 4])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        outputs = self.flat(tokens).index_add(0, self.chosen, self.expert(tokens[self.chosen]))
        return outputs.unflatten(0, x.shape[:2])


def test_an_expert_with_as_many_rows_as_samples_is_seen_in_every_batch() -> None:
    model: Any = fill(Choosing())
    curvature = soframe.Curvature(model)
    for chosen in ([0, 2, 4], [4, 0, 1]):  # the first tokens in the order of samples; others
        model.chosen = torch.tensor(chosen)
        batch = batch_of(3, positions=2, seed=chosen[0])
        close(curvature.gradients(batch, loss).dense(), expected(model, batch))


class Sorted(nn.Module):
    """Tokens of a batch by their size to experts, each of which has room for a third of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Kernels()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        order = tokens[:, 0].argsort()
        outputs = self.experts(tokens[order].unflatten(0, (3, -1)))
        return outputs.flatten(0, 1)[order.argsort()].view(*x.shape[:2], 2)


def test_outputs_in_a_dict_show_the_samples() -> None:
    model, batch = deep(), batch_of(6)

    def in_dict(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
        outputs, value = loss(model, batch)
        return {"loss": value, "logits": outputs, "mask": batch[0] > 0}, value

    close(soframe.Curvature(model).gradients(batch, in_dict).dense(), expected(model, batch))


def test_experts_that_choose_among_the_tokens_of_a_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Sorted()).double().eval()
    batch = batch_of(4, positions=6)
    curvature = soframe.Curvature(model, layers={"0": "all", "experts": Transposed})
    close(curvature.gradients(batch, loss).dense(), expected(model, batch))


class Filtering(nn.Module):
    """A layer that sees the samples whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = (x[:, 0] > 0).nonzero(as_tuple=True)
        return x.new_zeros(len(x), 2).index_add(0, rows, self.layer(x[rows]))


def test_a_batch_may_be_the_first_in_which_a_layer_lacks_samples() -> None:
    model = fill(Filtering())
    curvature = soframe.Curvature(model)
    for inputs in (randn(5, 3).abs(), randn(5, 3)):
        batch = inputs, randn(5, 2, seed=1)
        close(curvature.gradients(batch, loss).dense(), expected(model, batch))


def test_experts_in_one_parameter_with_as_many_rows_as_samples_are_seen_in_every_batch() -> None:
    model = Sorted()
    curvature = soframe.Curvature(model, layers={"experts": Transposed})
    in_order, others = batch_of(3, positions=3), batch_of(3, positions=3, seed=5)
    in_order[0][:, :, 0] = torch.arange(9).view(3, 3).T  # each expert has one token of each sample
    for batch in (in_order, others):
        close(curvature.gradients(batch, loss).dense(), expected(model, batch))


class Turned(nn.Module):
    """Layers that see positions first, ``[T, N, features]``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return output


class Ordered(nn.Module):
    """A layer that sees the samples of a batch by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        output: Tensor = self.inner(self.first(x)[order].tanh())[order.argsort()]
        return output


class OrderedOnce(Ordered):
    """A layer that sees the samples by their size, and once more as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.inner(x)


@pytest.mark.parametrize("build", [Turned, Ordered, OrderedOnce])
@pytest.mark.parametrize("samples", [4, BASE + 1])
def test_as_many_rows_as_samples_may_have_another_order(
    build: Callable[[], nn.Module], samples: int
) -> None:
    model = fill(build())
    curvature = soframe.Curvature(model)
    # The order of a single sample shows nothing, and later batches are of the order found.
    for number in (1, samples, samples):
        batch = batch_of(number, positions=samples, seed=number)
        close(curvature.gradients(batch, loss).dense(), expected(model, batch))


def test_rows_in_the_order_of_the_batch_are_looked_at_once() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    curvature, passes = soframe.Curvature(model), list[int]()

    def counted(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
        outputs, value = loss(model, batch)
        value.register_hook(lambda _: passes.append(len(batch[0])))
        return outputs, value

    for samples in (1, 2, 6, 7):  # a single sample shows no order
        curvature.gradients(batch_of(samples), counted)
    assert passes == [1, 2, 2, 6, 7]


@pytest.mark.parametrize("returns_hidden", [False, True])
def test_a_term_of_hidden_states_leaves_the_order_as_it_is(returns_hidden: bool) -> None:
    model: Any = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))

    def penalised(layers: Any, batch: Batch) -> tuple[Any, Tensor]:
        hidden = layers[:2](batch[0])
        outputs = layers[2](hidden)
        squares = (outputs - batch[1]).square().flatten(1).sum(1)
        value = (squares / 2 + hidden.square().flatten(1).sum(1)).mean()
        return {"hidden": hidden, "logits": outputs} if returns_hidden else outputs, value

    batch = batch_of(20)
    each = [penalised(model, (x, y))[1] for x, y in zip(*(t.split(1) for t in batch), strict=True)]
    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(value, list(parameters.values())) for value in each]
    wanted = {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}
    close(soframe.Curvature(model).gradients(batch, penalised).dense(), wanted)


class Checkpointed(nn.Module):
    """A module that is computed again in the backward pass."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_their_rows_again(reentrant: bool) -> None:
    first, *rest = deep().children()
    model = nn.Sequential(first, Checkpointed(nn.Sequential(*rest), reentrant=reentrant))
    batch = batch_of(6)
    close(soframe.Curvature(model).gradients(batch, loss).dense(), expected(model, batch))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rows_of_few_bits_are_told_apart(dtype: torch.dtype, tolerance: float) -> None:
    model = copy.deepcopy(deep()).to(dtype)
    inputs, targets = batch_of(40)
    batch = inputs.to(dtype), targets.to(dtype)
    result = soframe.Curvature(model).gradients(batch, loss).dense()
    close(result, expected(model, batch), tolerance)


def test_rows_are_in_order_where_their_numbers_overflow() -> None:
    """In half precision, in which zeros of an activation stay finite."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))).half()
    inputs, targets = batch_of(6)
    batch = inputs.half(), targets.half()
    result = soframe.Curvature(model).gradients(batch, loss).dense()
    close(result, expected(model, batch), 0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_micro_batches_within_a_loss_are_of_their_samples(size: int) -> None:
    """Each is a forward pass, of as many samples or of fewer in the last one."""
    model, batch = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), batch_of(4)

    def in_parts(layers: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = torch.cat([layers(part) for part in inputs.split(size)])
        return outputs, (outputs - targets).square().flatten(1).sum(1).mean() / 2

    curvature = soframe.Curvature(model)
    for _ in range(2):  # the first batch looks at the order of rows
        close(curvature.gradients(batch, in_parts).dense(), expected(model, batch))
    close(curvature.gradients(batch, loss).dense(), expected(model, batch))
    with pytest.raises(ValueError, match="does not return the outputs that the loss is of"):
        curvature.gradients(batch, lambda layers, batch: (None, in_parts(layers, batch)[1]))


def test_two_views_of_each_sample_add_up() -> None:
    model: Any = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    views = randn(4, 3), randn(4, 3, seed=1)

    def apart(layers: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        outputs = layers(batch[0]), layers(batch[1])
        return outputs, (outputs[0] - outputs[1]).square().sum(1).mean()

    found = soframe.Curvature(model).gradients(views, apart).dense()
    for number in range(4):
        _, value = apart(model, [view[number : number + 1] for view in views])
        wanted = torch.autograd.grad(value, list(model.parameters()))
        close(
            {name: rows[number] for name, rows in found.items()},
            dict(zip(found, wanted, strict=True)),
        )


def test_predictions_of_experts_have_the_jacobians_of_autograd() -> None:
    for name in NAMES:
        kind = KINDS[name]()
        curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(kind.data(), loss)
        inputs, _ = kind.data()[0]
        predictive = Laplace(curvature, 0.7).predictive(inputs)
        inverse = curvature.inverse(0.7 / 13).sqrt()
        outputs = kind.model(inputs).flatten(1)
        for sample, of_sample in enumerate(outputs):
            rows: dict[str, list[Tensor]] = {n: [] for n, _ in kind.model.named_parameters()}
            for output in of_sample:
                parameters = list(kind.model.parameters())
                own = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
                for key, p, g in zip(rows, parameters, own, strict=True):
                    rows[key].append(torch.zeros_like(p) if g is None else g)
            root = inverse @ {key: torch.stack(of_key) for key, of_key in rows.items()}
            flat = torch.cat([tensor.flatten(1) for tensor in root.values()], 1) / 13**0.5
            torch.testing.assert_close(predictive.covariance[sample], flat @ flat.T)


# -- refusals --------------------------------------------------------------------------------------


def no_outputs(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    return None, loss(model, batch)[1]


def other_outputs(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
    outputs, value = loss(model, batch)
    return outputs * 1, value


def of_the_batch(model: Any, batch: Batch) -> tuple[Any, Tensor]:
    hidden = model[:3](batch[0])
    outputs = model[3:](hidden)
    return outputs, (outputs - batch[1]).square().mean() + hidden.mean(0).square().sum()


def hooked_twice(model: Any, batch: Batch) -> tuple[Any, Tensor]:
    hidden = model[:4](batch[0])
    outputs = model[4:](hidden)
    return (hidden, outputs), (outputs - batch[1]).square().mean()


@pytest.mark.parametrize(
    ("of_loss", "message"),
    [
        (
            no_outputs,
            r"\S+: the rows of a Linear are not in .* a tensor \[samples, \.\.\.\] or several",
        ),
        (other_outputs, r"4\.\S+: a call of Linear .* return the outputs that the loss is of"),
        (of_the_batch, r"1\.\S+: a call of Linear .* leave terms of the whole batch out"),
        (hooked_twice, r"\S+: a call of Linear has rows whose gradients are not of the outputs"),
    ],
)
def test_rows_that_no_sample_explains_are_refused(
    of_loss: Callable[..., Any], message: str
) -> None:
    curvature = soframe.Curvature(deep())
    with pytest.raises(ValueError, match=message):
        curvature.gradients(batch_of(5), of_loss)
    close(curvature.gradients(batch_of(5), loss).dense(), expected(deep(), batch_of(5)))


class Mixed(nn.Module):
    """A layer whose outputs are normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        output: Tensor = self.last((hidden - hidden.mean(0)) / hidden.std(0))
        return output


def test_a_model_that_mixes_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="first: a call of Linear has rows whose gradients are no"):
        soframe.Curvature(fill(Mixed())).gradients(batch_of(5), loss)


def decayed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs, value = loss(model, batch)
    return outputs, value + 0.1 * model.get_parameter("0.weight").square().sum()


def steep(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    inputs = batch[0].requires_grad_()
    outputs, value = loss(model, (inputs, batch[1]))
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs, value + slope.square().sum()


@pytest.mark.parametrize(("of_loss", "names"), [(decayed, "0"), (steep, "0, 2")])
def test_parts_of_a_gradient_that_no_call_has_are_named(of_loss: Any, names: str) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    curvature = soframe.Curvature(model)
    with pytest.warns(UserWarning, match=f"in {names} the gradient of the loss is not the mean"):
        curvature.gradients(batch_of(5), of_loss)


class Positions(nn.Module):
    """A table of positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x + self.table(torch.arange(4)))
        return output


def test_a_table_that_samples_share_is_refused_by_name() -> None:
    model = fill(Positions())
    with pytest.raises(ValueError, match=r"table: a call of Embedding .*expand tensors without"):
        soframe.Curvature(model).gradients(batch_of(3), loss)
    skipping = soframe.Curvature(model, skip=["table"])
    wanted = expected(model, batch_of(3))
    del wanted["table.weight"]
    close(skipping.gradients(batch_of(3), loss).dense(), wanted)


# -- ranks -----------------------------------------------------------------------------------------


def on_rank(rank: int, ranks: int, *, sharded: bool) -> Any:
    """Return the gradients of batches of other sizes on each rank; of one sample at first."""
    model = deep()
    if sharded:
        fully_shard(model)
    curvature = soframe.Curvature(model)
    sizes = ((1, 3, 1), (2, BASE + 1, 2))[rank]
    return [curvature.gradients(batch_of(size, seed=size), loss).dense() for size in sizes], sizes


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_run_as_many_passes(sharded: bool) -> None:
    model = deep()
    for results, sizes in run_ranks(partial(on_rank, sharded=sharded), 2):
        for result, size in zip(results, sizes, strict=True):
            close(result, expected(model, batch_of(size, seed=size)))
