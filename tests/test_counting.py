"""What the loss is a mean of, where layers see some of the samples and losses some of the terms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.capture.fisher import Fisher
from soframe.capture.sampling import chosen
from soframe.losses import CrossEntropy, SquaredError, SumLoss, Term
from soframe.testing import compare, layer_fisher
from tests import kit
from tests.curvature import (
    LossAverage,
    blocks,
    closing,
    factors,
    fill,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)
from tests.distributed.harness import run_ranks

AVERAGES: list[LossAverage] = ["local", "global", "sum"]


class Experts(nn.Module):
    """Each sample goes through one expert, or none, and all through the head; all linear.

    Args:
        outputs: Features of the outputs.
    """

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone()
        for number, expert in enumerate(self.experts):
            chosen = x[:, 0] == number
            hidden[chosen] = expert(x[chosen])
        return self.head(hidden)


def routed(routes: Sequence[int], seed: int = 0) -> Tensor:
    """A batch whose samples go to these experts (2: to none)."""
    x = randn(len(routes), 3, seed=seed)
    x[:, 0] = torch.tensor(routes, dtype=x.dtype)
    return x


def scaled(loss: Tensor, size: int, total: int, parts: int, average: str) -> Tensor:
    """A mean over ``size`` samples, as part of the loss of a step of ``total``."""
    return loss * {"local": 1 / parts, "global": size / total, "sum": size}[average]


def run(
    model: nn.Module,
    own: soframe.Preconditioner,
    data: Sequence[tuple[Tensor, Tensor]],
    average: str = "local",
    *,
    loss: Any = half_square,
    counted: bool = False,
    observed: bool = True,
) -> None:
    """A step over micro-batches."""
    total = sum(len(x) for x, _ in data)
    for x, y in data:
        if counted:
            own.count(len(x))
        output = model(x)
        if observed:
            own.observe(output)
        scaled(loss(output, y), len(x), total, len(data), average).backward()
    own.step()


def check_dense(
    model: nn.Module,
    own: soframe.Preconditioner,
    data: Sequence[tuple[Tensor, Tensor]],
    average: str = "local",
    kind: Any = "type-2",
    loss: Any = half_square,
    layers: Sequence[str] | None = None,
) -> None:
    """Hold blocks with statistics against the dense Fisher of the micro-batches."""
    if average != "local":
        data = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
    for name, block in blocks(own).items():
        if block.mass == 0 or (layers is not None and name not in layers):
            continue
        exact = [layer_fisher(model, name, x, loss, y, kind=kind)[0] for x, y in data]
        a = block.running["A"][0]
        g = block.running["G"][0] if "G" in block.running else torch.eye(len(a)).to(a)
        compare(torch.kron(g, a), torch.stack(exact).mean(0), f"{name}: kron(G, A)")


ROUTES = {
    "2 of 6": [0, 2, 2, 0, 2, 2],
    "both halves": [0, 1, 0, 1, 1, 0],
    "an expert without samples": [1] * 5 + [2],
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.covering(together=2)
def test_routing_under_type_2(name: str, average: str, parts: int) -> None:
    """The outputs tell N; nothing has to be said."""
    model, x, y = fill(Experts()), routed(ROUTES[name]), randn(6, 2, seed=1)
    sizes = [6] if parts == 1 else [2, 4]
    data = list(zip(x.split(sizes), y.split(sizes), strict=True))
    own = preconditioner(model, fisher="type-2", loss=SquaredError(), loss_average=average)
    with closing(own):
        run(model, own, data, average)
        check_dense(model, own, data, average)
        unused = "experts.0" if 0 not in ROUTES[name] else "experts.1"
        assert (blocks(own)[unused].mass == 0) == (len({*ROUTES[name]} - {2}) < 2)


def test_routing_under_monte_carlo() -> None:
    """Of one output the random sign has no variance: Monte-Carlo is exact."""
    model, data = fill(Experts(1)), [(routed(ROUTES["2 of 6"]), randn(6, 1, seed=1))]
    with closing(preconditioner(model, fisher="monte-carlo", loss=SquaredError())) as own:
        run(model, own, data)
        check_dense(model, own, data)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", ["observe", "observe, one loss", "count", "callable"])
def test_routing_forward_only(how: str, parts: int) -> None:
    model, x = fill(Experts()), routed(ROUTES["2 of 6"])
    sizes = [6] if parts == 1 else [1, 3, 2]
    now: list[int] = [0]
    options: dict[str, Any] = {"samples": lambda: now[0]} if how == "callable" else {}
    own = preconditioner(model, fisher="forward-only", loss_average="global", **options)
    with closing(own):
        outputs = []
        for part in x.split(sizes):  # all forward passes first, where that can be told
            now[0] = len(part)
            if how == "count":
                own.count(len(part))
            outputs.append(model(part))
            if how.startswith("observe"):
                own.observe(outputs[-1])
            if how == "callable":
                outputs.pop().sum().backward()
        if how == "observe, one loss":
            outputs = [torch.cat(outputs)]
        for output in outputs:
            output.sum().backward()
        own.step()
        rows = torch.cat([x[x[:, 0] == 0], torch.ones(2, 1).double()], 1)
        compare(blocks(own)["experts.0"].running["A"][0], rows.T @ rows / 6, "A")


class Crop(nn.Module):
    """Takes samples behind another dimension, and returns all rows and three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.inner(x[0])
        return rows, rows[:3]


def test_observed_samples_that_a_model_does_not_show_add_up() -> None:
    model, x = fill(Crop()), randn(11, 3)
    with closing(preconditioner(model, fisher="forward-only")) as own:
        losses = []
        for part in x.split(6):
            outputs, _ = model(part[None])
            own.observe(outputs)
            losses.append(outputs.square().sum())
        torch.stack(losses).sum().backward()
        own.step()
        rows = torch.cat([x, torch.ones(11, 1).double()], 1)
        compare(blocks(own)["inner"].running["A"][0], rows.T @ rows / 11, "A")


class Parted(nn.Module):
    """Half of the samples go through the first layer, for any differentiation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        return self.head(torch.cat([self.first(x[:half]), x[half:]]))


@pytest.mark.parametrize("fisher", ["forward-only", "monte-carlo", "type-2"])
def test_a_trust_region_knows_its_samples(fisher: str) -> None:
    model, x, y = fill(Parted()), randn(6, 3), randn(6, 2, seed=1)
    optimizer = soframe.TrustRegion(
        model, SquaredError(), statistics=soframe.Statistics(fisher=fisher)
    )
    optimizer.step(lambda: half_square(model(x), y))
    rows = torch.cat([x[:3], torch.ones(3, 1).double()], 1)
    (block,) = (b for b in optimizer.preconditioner.blocks if b.name == "first")
    compare(block.running["A"][0], rows.T @ rows / 6, "A")
    optimizer.close()


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("parts", [[6], [2, 4], [4, 2]], ids=str)
def test_routing_under_the_empirical_fisher(average: str, parts: list[int]) -> None:
    """One of six samples reaches the expert: exact, whatever the loss."""
    model, x, y = fill(Experts()), routed([2, 2, 2, 0, 2, 2]), randn(6, 2, seed=1)
    data = list(zip(x.split(parts), y.split(parts), strict=True))
    with closing(preconditioner(model, loss_average=average)) as own:
        run(model, own, data, average, loss=log_cosh, counted=True, observed=False)
        check_dense(model, own, data, average, "empirical", log_cosh, ["experts.0"])


@pytest.mark.parametrize("average", AVERAGES)
def test_the_root_tells_the_samples(average: str) -> None:
    """Of routed samples, wherever the router stands; nothing has to be said."""
    model, x, y = fill(Experts()), routed([2, 2, 2, 0, 2, 2]), randn(6, 2, seed=1)
    data = list(zip(x.split([2, 4]), y.split([2, 4]), strict=True))
    with closing(preconditioner(model, loss_average=average)) as own:
        run(model, own, data, average, loss=log_cosh, observed=False)
        check_dense(model, own, data, average, "empirical", log_cosh, ["experts.0"])


@pytest.mark.parametrize("parts", [[6, 0], [0, 6], [0, 4, 0, 2]], ids=str)
def test_an_empty_forward_pass_beside_others_of_one_loss(parts: list[int]) -> None:
    """The one that the backward pass reaches first, which is the last, says nothing of N."""
    found = []
    x, y = randn(6, 3), randn(6, 2, seed=1)
    for sizes in (parts, [6]):
        model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        with closing(preconditioner(model)) as own:
            losses = [
                (model(inputs) - targets).cosh().log().sum()
                for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True)
            ]
            torch.stack(losses).sum().div(6).backward()
            own.step()
            found.append([*factors(own, "0"), *factors(own, "2")])
    for chunked, whole in zip(*found, strict=True):
        compare(chunked, whole, "factor")


class Windows(nn.Module):
    """A layer over windows is called with twice as many samples, which are half as long."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        windows = self.inner(x.reshape(2 * len(x), 2, 3)).reshape(x.shape)
        return self.head(windows.mean(1))


def test_windows_are_positions_of_the_samples() -> None:
    model, x = fill(Windows()), randn(3, 4, 3)
    with closing(preconditioner(model)) as own:
        model(x).sum().backward()
        own.step()
        rows = torch.cat([x.reshape(-1, 3), torch.ones(12, 1).double()], 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / 3, "A")


class Places(nn.Module):
    """Linear in its tables of tokens and of positions, which some layers see without the batch.

    Args:
        how: How the positions are passed.
    """

    def __init__(self, how: str = "[1, T]") -> None:
        super().__init__()
        self.how = how
        self.tokens, self.places = nn.Embedding(5, 3), nn.Embedding(4, 2)
        self.inner, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, ids: Tensor, *, other: Tensor | None = None) -> Tensor:
        where = torch.arange(ids.shape[1])
        if self.how == "[T, T]":
            places = self.places((where - where[:, None]).abs()).sum(0)
        elif self.how == "[N, T]":
            places = self.places(where.expand_as(ids))
        else:
            places = self.places(where[None] if self.how == "[1, T]" else where)
        inner = self.inner(places if places.dim() == 3 else places[None])
        return self.head(self.tokens(ids) + inner).mean(1)


def orthogonal_signs(columns: int) -> Tensor:
    """The first columns of a Hadamard matrix but for its ones: signs without correlations."""
    matrix = torch.ones(1, 1).double()
    while len(matrix) <= columns:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix[:, 1 : columns + 1]


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("how", ["[1, T]", "[T]", "[T, T]", "[N, T]"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.covering(together=1)
def test_layers_without_a_batch_are_shared_by_all_samples(
    how: str, average: str, parts: int
) -> None:
    """Over targets with all signs, that is in expectation, the factors of one batch per sample.

    The model is linear, and its loss has the identity as Hessian: there K-FAC is exact for one
    position, and the mean over signs enumerates the expectation.
    """
    model, ids = fill(Places(how)), torch.tensor([[0, 1, 2], [4, 4, 1], [1, 0, 0], [3, 2, 2]])
    wanted = fill(Places("[N, T]"))
    signs = orthogonal_signs(8)
    found: dict[str, list[list[Tensor]]] = {}
    for name, net, count in (("shared", model, parts), ("expanded", wanted, 1)):
        settings = {"statistics_every": 1, "loss_average": average, "decay": 0.0}
        sums: list[list[Tensor]] = []
        with closing(preconditioner(net, layers="all", **settings)) as own:
            for row in signs:
                for part, start in zip(ids.chunk(count), row.view(4, 2).chunk(count), strict=True):
                    loss = (net(part, other=part[:, 0]) * start).sum() / len(part)
                    scaled(loss, len(part), 4, count, average).backward()
                own.step()
                each = [blocks(own)[n].running for n in ("places", "inner", "tokens", "head")]
                sums.append([f.clone() for running in each for f in running.values()])
        found[name] = sums
    means = [
        [torch.stack(each).mean(0) for each in zip(*found[name], strict=True)] for name in found
    ]
    names = [f"{n}.{f}" for n in ("places", "inner", "tokens", "head") for f in "AG"]
    for name, one, other in zip(names, *means, strict=True):
        # Distances reach rows that places do not, and more of them.
        if how != "[T, T]" or name.startswith(("tokens", "head.G")):
            compare(one, other, name)
    if how == "[T, T]":
        counts = torch.tensor([3.0, 4.0, 2.0, 0.0]).double()
        compare(means[0][0], counts[None], "places.A")


SIX = torch.tensor([[0, 1, 2], [4, 4, 1], [1, 0, 0], [3, 2, 2], [2, 3, 1], [0, 0, 4]])


def in_parts(net: nn.Module, sizes: Sequence[int], counted: bool, own: Any) -> list[Tensor]:
    """Mean factors over targets with all signs, of losses that go through several passes each."""
    sums: list[list[Tensor]] = []
    for row in orthogonal_signs(12):
        if counted:
            own.count(6)
        losses = []
        for part, start in zip(SIX.split(sizes), row.view(6, 2).split(sizes), strict=True):
            losses.append((net(part) * start).sum() / 6)
        torch.stack(losses).sum().backward()
        own.step()
        running = [blocks(own)[name].running for name in ("places", "inner", "tokens", "head")]
        sums.append([factor.clone() for each in running for factor in each.values()])
    return [torch.stack(factor).mean(0) for factor in zip(*sums, strict=True)]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("sizes", [[2, 4], [1, 5], [5, 1], [1, 4, 1]], ids=str)
@pytest.mark.parametrize("how", ["[1, T]", "[T]"])
@pytest.mark.covering(together=2)
def test_forward_passes_of_one_loss_have_sizes_of_their_own(
    how: str, sizes: Sequence[int], counted: bool
) -> None:
    """A table has the rows of samples, or rows that the samples of its forward pass share."""
    settings: dict[str, Any] = {"layers": "all", "statistics_every": 1, "decay": 0.0}
    net, wanted = fill(Places(how)), fill(Places("[N, T]"))
    with closing(preconditioner(net, **settings)) as own:
        found = in_parts(net, sizes, counted, own)
    with closing(preconditioner(wanted, **settings)) as own:
        whole = in_parts(wanted, [6], False, own)
    names = [
        f"{name}.{factor}" for name in ("places", "inner", "tokens", "head") for factor in "AG"
    ]
    for name, one, other in zip(names, found, whole, strict=True):
        compare(one, other, name)


@pytest.mark.parametrize("counted", [True, False])
def test_an_image_without_a_batch_is_one_sample(counted: bool) -> None:
    """Its channels, which the root shows in place of samples, share no rows of a convolution."""
    model, image = (
        fill(nn.Sequential(nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 2))),
        randn(3, 5, 4),
    )
    found = []
    for x in (image, image.unsqueeze(0)):
        with closing(preconditioner(model, decay=0.0)) as own:
            if counted:
                own.count(1)
            model(x).square().sum().backward()
            own.step()
            found.append([*factors(own, "0"), *factors(own, "2")])
    for alone, of_batch in zip(*found, strict=True):
        compare(alone, of_batch, "factor")


class Context(nn.Module):
    """Called with samples and with more rows of a context, so that its inputs do not show N."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.head(self.inner(x) + context.mean(0))


@pytest.mark.parametrize("rows", [2, 7])
def test_inputs_that_differ_leave_n_to_the_layer_nearest_to_the_loss(rows: int) -> None:
    model, x = fill(Context()), randn(4, 3)
    with closing(preconditioner(model)) as own:
        model(x, randn(rows, 3)).mean(0).sum().backward()
        own.step()
        compare(factors(own, "inner")[0][0], x.T @ x / 4, "A")


class Steps(nn.Module):
    """A table that is called with ids of each sample, or of each step.

    Args:
        steps_first: Whether the steps are the first dimension.
    """

    def __init__(self, *, steps_first: bool) -> None:
        super().__init__()
        self.steps_first = steps_first
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids.T).transpose(0, 1) if self.steps_first else self.table(ids)
        return self.head(rows.tanh().mean(1))


def test_a_table_whose_second_dimension_is_the_batch_is_not_shared() -> None:
    found = []
    for steps_first in (False, True):
        model = fill(Steps(steps_first=steps_first))
        with closing(preconditioner(model, layers="all")) as own:
            model(torch.tensor([[0, 1, 2], [4, 4, 1], [1, 0, 0], [3, 2, 2]])).mean(
                0
            ).sum().backward()
            own.step()
            found.append([f.clone() for f in blocks(own)["table"].running.values()])
    for name, one, other in zip("AG", *found, strict=True):
        compare(other, one, name)


class Offset(nn.Module):
    """Adds to each position the image of a table ``[1, T]``, whose layer is nearest to the loss."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.inner, self.offset = nn.Linear(3, 2), nn.Linear(4, 2)
        self.table = randn(1, positions, 4, seed=7)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return inner + self.offset(self.table)


def test_a_table_nearest_to_the_loss_with_as_many_positions_as_samples() -> None:
    """[1, T] with T = N: the batch stays that of the model's arguments."""
    model, x, y = fill(Offset(4)), randn(4, 4, 3), randn(4, 4, 2, seed=1)
    with closing(preconditioner(model)) as own:
        output = model(x)
        (0.5 * (output - y).square().sum((1, 2)).mean()).backward()
        own.step()
        found = factors(own, "inner")
    rows = torch.cat([x, torch.ones(4, 4, 1).double()], 2).flatten(0, 1)
    errors = (output - y).detach().flatten(0, 1)  # the gradients of the samples' own losses
    compare(found[0][0], rows.T @ rows / 4, "A")
    compare(found[1][0], errors.T @ errors / 16, "G")


class Flat(nn.Module):
    """Its layers have the tokens of all samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_flat_tokens_of_which_some_are_padding() -> None:
    model, x, y = fill(Flat()), randn(3, 4, 3), randn(3, 4, 2, seed=1)
    with closing(preconditioner(model)) as own:
        own.count(KEEP, rows=KEEP)
        output = model(x)
        half_square(output[KEEP], y[KEEP]).backward()
        own.step()
        found = factors(own, "inner")
    rows = torch.cat([x[KEEP], torch.ones(int(KEEP.sum()), 1).double()], 1)
    errors = (output - y).detach()[KEEP]
    compare(found[0][0], rows.T @ rows / len(rows), "A")
    compare(found[1][0], errors.T @ errors / len(rows), "G")


class Pairs(nn.Module):
    """Two sequences of each sample go through the table as one batch ``[2 N, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one, other = self.table(torch.cat([first, second])).sum(1).chunk(2)
        return one - 2 * other


def test_a_table_whose_calls_have_two_sequences_of_each_sample() -> None:
    model, y = fill(Pairs()), randn(2, 3)
    first, second = torch.tensor([[0, 1, 1], [4, 2, 0]]), torch.tensor([[3, 3, 1], [0, 4, 2]])
    with closing(preconditioner(model, layers="all")) as own:
        output = model(first, second)
        half_square(output, y).backward()
        own.step()
        found = factors(own, "table")
    used = torch.cat([first, second]).flatten().bincount(minlength=5).double()
    errors = (output - y).detach()
    # Each of the 2 x 3 rows of a sample has its error, or minus twice it.
    gradients = torch.cat([errors, -2 * errors]).repeat_interleave(3, 0)
    compare(found[0].flatten(), used / 2, "A")
    compare(found[1][0], gradients.T @ gradients / 12, "G")


@pytest.mark.slow
def test_shared_layers_under_type_2_are_exact_in_expectation() -> None:
    """The signs of columns differ from step to step: without them G would be twice as large."""
    found = []
    for how in ("[1, T]", "[N, T]"):
        model, ids = fill(Places(how)), torch.tensor([[0, 1, 1], [4, 1, 2]])
        own = preconditioner(model, layers="all", fisher="type-2", loss=SquaredError(), decay=0.0)
        factors_of, sums = ["places", "inner"], []
        with closing(own):
            for _ in range(40):
                own.observe(model(ids))
                model(ids).sum().backward()
                own.step()
                sums.append([f.clone() for n in factors_of for f in factors(own, n)])
        found.append([torch.stack(each).mean(0) for each in zip(*sums, strict=True)])
    for one, other, exact in zip(*found, (True, False, True, False), strict=True):
        compare(one, other, "factor", rtol=1e-10 if exact else 0.2)


def test_a_call_with_fewer_samples_than_another_of_the_layer_is_no_error() -> None:
    model = fill(Reused())
    with closing(preconditioner(model)) as own:
        model(randn(4, 3)).sum().backward()
        own.step()


class Reused(nn.Module):
    """A layer that is called with all samples, and, before or after that, with two of them."""

    def __init__(self, few_first: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.few_first = nn.Linear(3, 3), nn.Linear(3, 2), few_first

    def forward(self, x: Tensor) -> Tensor:
        if self.few_first:
            x = torch.cat([self.layer(x[:2]), x[2:]])
            return self.head(self.layer(x))
        x = self.layer(x)
        return self.head(torch.cat([self.layer(x[:2]), x[2:]]))


@pytest.mark.parametrize("few_first", [True, False])
@pytest.mark.parametrize("how", ["type-2", "count", "nothing"])
def test_calls_of_one_layer_are_positions_of_the_samples_of_the_loss(
    how: str, few_first: bool
) -> None:
    model, x, y = fill(Reused(few_first)), randn(4, 3), randn(4, 2, seed=1)
    settings = {"fisher": "type-2", "loss": SquaredError()} if how == "type-2" else {}
    with closing(preconditioner(model, **settings)) as own:
        run(model, own, [(x, y)], counted=how == "count", observed=how == "type-2")
        with torch.no_grad():
            inner = model.layer(x[:2] if few_first else x)
        second = torch.cat([inner, x[2:]]) if few_first else inner[:2]
        rows = torch.cat([x[:2] if few_first else x, second])
        rows = torch.cat([rows, torch.ones(6, 1).double()], 1)
        compare(factors(own, "layer")[0][0], rows.T @ rows / 4, "A")


# -- terms that are ignored, rows that are padding -----------------------------------------------

KEEP = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]]).bool()


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("layout", ["positions", "flat", "terms alone"])
@pytest.mark.covering(together=2)
def test_ignored_terms_under_type_2_are_exact(layout: str, parts: int, average: str) -> None:
    """A deep linear net whose kept positions enter the loss, against the dense Fisher of these."""
    model, x, y = fill(chain()), randn(3, 4, 3), randn(3, 4, 2, seed=1)
    own = preconditioner(model, fisher="type-2", loss=SquaredError(), loss_average=average)
    data = [(x[keep], y[keep]) for keep in _masks(parts)]
    total = int(KEEP.sum())
    with closing(own):
        for keep, a, b in zip(KEEP.chunk(parts), x.chunk(parts), y.chunk(parts), strict=True):
            own.count(keep, rows=keep)
            output = model(a)
            seen = {
                "positions": output.transpose(1, 2),
                "flat": output.flatten(0, 1),
                "terms alone": output[keep],
            }
            own.observe(seen[layout])
            loss = half_square(output[keep], b[keep])
            scaled(loss, int(keep.sum()), total, parts, average).backward()
        own.step()
        check_dense(model, own, data, average)


def _masks(parts: int) -> list[Tensor]:
    masks = []
    for number, part in enumerate(KEEP.chunk(parts)):
        mask = torch.zeros_like(KEEP)
        mask[number * len(part) : (number + 1) * len(part)] = part
        masks.append(mask)
    return masks


FISHERS: dict[str, dict[str, Any]] = {
    "empirical": {},
    "type-2": {"fisher": "type-2", "loss": CrossEntropy()},
    "type-2, sums": {"fisher": "type-2", "loss": CrossEntropy(positions="sum")},
    "forward-only": {"fisher": "forward-only"},
}


@pytest.mark.parametrize("samples", ["batch", "positions"])
@pytest.mark.parametrize("method", ["kfac", {"^0$": "kfac", ".*": "foof"}], ids=["kfac", "foof"])
@pytest.mark.parametrize("name", FISHERS)
@pytest.mark.covering(together=2)
def test_terms_that_count_are_a_batch_of_their_own(name: str, method: Any, samples: str) -> None:
    """Positions do not mix here: the padded batch is that of the positions that count."""
    x, labels = randn(3, 4, 3), torch.arange(12).reshape(3, 4) % 2
    x[~KEEP] = 1e6
    found = []
    for padded in (True, False):
        model = fill(deep())
        own = preconditioner(model, method=method, samples=samples, **FISHERS[name])
        with closing(own):
            if padded:
                own.count(KEEP, rows=KEEP.long())
            output = model(x if padded else x[KEEP])
            if padded:
                output = output.transpose(1, 2)
            if name != "empirical":
                own.observe(output)
            target = labels.masked_fill(~KEEP, -100) if padded else labels[KEEP]
            F.cross_entropy(output, target).backward()
            own.step()
            found.append({(n, k): f for n, b in blocks(own).items() for k, f in b.running.items()})
            found[-1] |= {(n, ""): p.grad for n, p in model.named_parameters()}
    assert found[0].keys() == found[1].keys()
    for key, one in found[0].items():
        compare(one, found[1][key], str(key))


@pytest.mark.slow
def test_ignored_terms_under_monte_carlo() -> None:
    """The mean over draws tends to type-2's."""
    model, x, labels = fill(deep()), randn(3, 4, 3), torch.arange(12).reshape(3, 4) % 2
    found = []
    for fisher in (
        Fisher("type-2", CrossEntropy()),
        Fisher("monte-carlo", CrossEntropy(), 2000, torch.Generator().manual_seed(0)),
    ):
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            own.curvature.parts.fisher = fisher
            own.count(KEEP, rows=KEEP)
            output = model(x).transpose(1, 2)
            own.observe(output)
            F.cross_entropy(output, labels.masked_fill(~KEEP, -100)).backward()
            own.step()
            found.append([factors(own, name) for name in "02"])
    for (a, g), (drawn_a, drawn_g) in zip(*found, strict=True):
        compare(drawn_a, a, "A")
        compare(drawn_g, g, "G", rtol=0.05, atol=0.01)


@pytest.mark.parametrize("positions", ["mean", "sum"])
def test_a_mean_over_positions_is_one_however_it_is_said(positions: Any) -> None:
    """With `samples="positions"` outputs with positions are what terms in a row are."""
    found = []
    for flat in (True, False):
        model = fill(deep())
        loss = CrossEntropy(positions=positions)
        with closing(preconditioner(model, fisher="type-2", loss=loss, samples="positions")) as own:
            output = model(randn(3, 4, 3).flatten(0, 1) if flat else randn(3, 4, 3))
            output = output if flat else output.transpose(1, 2)
            own.observe(output)
            output.square().mean().backward()
            own.step()
            pairs = [factors(own, name) for name in "02"]
            found.append([torch.kron(g[0], a[0]) for a, g in pairs])
    for one, other in zip(*found, strict=True):
        compare(one, other, "kron(G, A)")


class Attention(nn.Module):
    """Causal attention whose keys may be padding, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, data: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        later = torch.ones(x.shape[1], x.shape[1]).bool().triu(1)
        scores = scores.masked_fill(later | ~data[:, None], -1e9)
        return self.head(x + self.out((scores.softmax(-1) @ v).tanh()))


LENGTHS = [4, 2, 3]


@pytest.mark.parametrize("name", FISHERS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_batch_is_the_unpadded_one(name: str, side: str) -> None:
    """Sequences that mix their positions; the first position of each has no term."""
    tokens = [randn(n, 4, seed=n) for n in LENGTHS]
    labels = [torch.tensor([-100, *range(1, n)]) % 3 for n in LENGTHS]
    labels = [own.index_fill(0, torch.tensor([0]), -100) for own in labels]
    x, target = 1e3 * randn(3, 5, 4, seed=9), torch.full((3, 5), -100)
    data = torch.zeros(3, 5).bool()
    for row, (own, its) in enumerate(zip(tokens, labels, strict=True)):
        where = slice(len(own)) if side == "right" else slice(5 - len(own), None)
        x[row, where], target[row, where], data[row, where] = own, its, True
    total = int((target != -100).sum())
    found = []
    for padded in (True, False):
        model = fill(Attention())
        own = preconditioner(model, loss_average="global", **FISHERS[name])
        with closing(own):
            batches = [(x, target, data)] if padded else []
            for t, its in zip(tokens, labels, strict=True):
                if not padded:
                    batches.append((t[None], its[None], torch.ones(1, len(t)).bool()))
            for inputs, wanted, mask in batches:
                own.count(wanted != -100, rows=mask)
                output = model(inputs, mask).transpose(1, 2)
                if name != "empirical":
                    own.observe(output)
                (F.cross_entropy(output, wanted, reduction="sum") / total).backward()
            own.step()
            found.append({(n, k): f for n, b in blocks(own).items() for k, f in b.running.items()})
            found[-1] |= {(n, ""): p.grad for n, p in model.named_parameters()}
    assert found[0].keys() == found[1].keys()
    for key, one in found[0].items():
        compare(one, found[1][key], str(key), rtol=1e-8)


@pytest.mark.parametrize("kept", [[2], [1, 3]], ids=str)
@pytest.mark.parametrize("said", ["mask", "number"])
def test_what_is_ignored_may_be_attended_to(kept: list[int], said: str) -> None:
    """The vectors of terms that count go back to all rows, and no others do."""
    x, every = randn(1, 4, 4), torch.ones(1, 4).bool()
    keep = torch.zeros(1, 4).bool().index_fill(1, torch.tensor(kept), True)
    found = []
    for counted in (True, False):
        model = fill(Attention())
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            if counted:
                own.count(keep if said == "mask" else len(kept))
            output = model(x, every).transpose(1, 2)
            own.observe(output if counted and said == "mask" else output[:, :, kept])
            output.sum().backward()
            own.step()
            found.append(
                [torch.kron(g[0], a[0]) for a, g in (factors(own, name) for name in blocks(own))]
            )
    for one, other in zip(*found, strict=True):
        compare(one, other, "kron(G, A)")


@pytest.mark.parametrize("average", ["local", "global"])
def test_micro_batches_with_different_numbers_of_tokens(average: str) -> None:
    """The empirical Fisher: one token of one micro-batch counts, of another three."""
    model, x, y = fill(chain()), randn(2, 4, 3), randn(2, 4, 2, seed=1)
    keep = torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]]).bool()
    with closing(preconditioner(model, loss_average=average)) as own:
        for mask, a, b in zip(keep.split(1), x.split(1), y.split(1), strict=True):
            own.count(mask, rows=mask)
            loss = log_cosh(model(a)[mask], b[mask])
            scaled(loss, int(mask.sum()), 4, 2, average).backward()
        own.step()
        # By loops: a token's weight is the gradient's, 1/2 and 1/6, or 1/4 each.
        weights = [1 / 2, *[1 / 6] * 3] if average == "local" else [1 / 4] * 4
        a, b = x[keep], y[keep]
        for layer, name in enumerate("01"):
            a_sum, g_sum = 0.0, 0.0
            for weight, one, wanted in zip(weights, a, b, strict=True):
                inputs = one if layer == 0 else model[0](one)
                output = model[layer](inputs).detach().requires_grad_()
                last = model[1](output) if layer == 0 else output
                log_cosh(last[None], wanted[None]).backward()
                row = torch.cat([inputs.detach(), torch.ones(1).double()])
                a_sum = a_sum + weight * torch.outer(row, row)
                g_sum = g_sum + weight * torch.outer(output.grad, output.grad)
            compare(factors(own, name)[0][0], a_sum, f"A of {name}")
            compare(factors(own, name)[1][0], g_sum, f"G of {name}")


def test_a_micro_batch_without_terms() -> None:
    """Of all ignored tokens a loss over all micro-batches' tokens is zero, and nothing is lost."""
    results = []
    for empty in (True, False):
        model, x = fill(chain()), randn(2, 4, 3)
        with closing(preconditioner(model, loss_average="global")) as own:
            for number, part in enumerate(x.split(1)):
                if number == 1 and not empty:
                    continue
                mask = torch.full((1, 4), number == 0)
                own.count(mask, rows=mask)
                (model(part).square().sum(-1)[mask].sum() / 4).backward()
            own.step()
            results.append([f for name in "01" for f in factors(own, name)])
    for one, other in zip(*results, strict=True):
        compare(one, other, "factor")


def test_padding_alone_under_a_loss_of_sequences() -> None:
    """A mean over samples of pooled sequences: N is the batch, A has the data."""
    model, x = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), randn(3, 4, 3)
    found = []
    with closing(preconditioner(model)) as own:
        own.count(rows=KEEP)
        hidden = model(x) * KEEP.unsqueeze(-1)
        hidden.sum(1).square().sum().div(3).backward()
        own.step()
        found = factors(own, "0")
    rows = torch.cat([x[KEEP], torch.ones(int(KEEP.sum()), 1).double()], 1)
    compare(found[0][0], rows.T @ rows / 3, "A")
    # Of G the rows that are left: those of padding are zero here, and no positions.
    with closing(preconditioner(model)) as own:
        hidden = model(x) * KEEP.unsqueeze(-1)
        hidden.sum(1).square().sum().div(3).backward()
        own.step()
        compare(found[1][0], factors(own, "0")[1][0] * 12 / 7, "G")


@pytest.mark.parametrize("method", ["kfac", "kfac-reduce"])
def test_samples_that_are_padding(method: str) -> None:
    """A mask of samples serves layers of any kind."""
    keep = torch.tensor([1, 0, 1, 1]).bool()
    found = []
    for padded in (True, False):
        model = fill(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(2), nn.Linear(4, 2)))
        with closing(preconditioner(model, method=method)) as own:
            x = randn(4, 2, 3, 3)
            if padded:
                own.count(keep, rows=keep)
            output = model(x if padded else x[keep])
            output = output[keep] if padded else output
            output.square().sum().div(3).backward()
            own.step()
            found.append([f for name in "02" for f in factors(own, name)])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


@pytest.mark.parametrize(("rows", "wanted"), [(0.5, 4), (3, 3), (99, 7)])
def test_some_of_the_rows_are_some_of_the_data(rows: float, wanted: int) -> None:
    x = randn(3, 4, 3)
    model = fill(nn.Linear(3, 2))
    options: dict[str, Any] = {"loss_average": "sum"}
    with closing(preconditioner(model, rows=rows, **options)) as own:
        own.count(rows=KEEP, terms=int(KEEP.sum()))
        model(x).square().sum(-1)[KEEP].sum().backward()
        own.step()
        found = factors(own, "Linear")
    index = chosen(0, 0, 0, 7, wanted)
    with closing(preconditioner(model, **options)) as own:
        model(x[KEEP][index]).square().sum().backward()
        own.step()
        for one, other in zip(found, factors(own, "Linear"), strict=True):
            compare(one, other, "factor")


# -- what is said, and what is not ---------------------------------------------------------------


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("method", ["diagonal", "tnt", "ekfac"])
def test_the_positions_of_a_sample_stay_together(method: str) -> None:
    """Padding has no gradient: the gradients of samples are the same with and without a mask."""
    keep = torch.ones_like(KEEP) if method == "ekfac" else KEEP  # its bases are of all data
    found = []
    for mask in (keep, None):
        model, x = fill(deep()), randn(3, 4, 3)
        with closing(preconditioner(model, method=method, solve_every=2)) as own:
            for _ in range(2):
                own.count(len(x), rows=mask)
                model.zero_grad()
                (model(x)[keep].square().sum() / len(x)).backward()
                own.step()
            found.append([f for block in own.blocks for f in block.running.values()])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


def test_what_is_said_is_used_up_by_a_backward_pass() -> None:
    model, x = fill(chain()), randn(4, 3)
    with closing(preconditioner(model)) as own:
        own.count(4)
        with torch.no_grad():
            model(x[:2])
        backward(model, x)
        with torch.no_grad():
            model(x[:2])
        backward(model, x)
        with pytest.raises(RuntimeError, match=r"in a forward pass without count\(\)"):
            own.step()
        own.reset_batch()
        backward(model, x)
        with pytest.raises(RuntimeError, match="call it before the forward pass of every micro"):
            own.step()


def test_forward_passes_may_all_come_first() -> None:
    found = []
    for first in (True, False):
        model, x = fill(chain()), randn(2, 4, 3)
        with closing(preconditioner(model)) as own:
            losses = []
            for part, keep in zip(x.split(1), KEEP.split(1), strict=False):
                own.count(keep, rows=keep)
                losses.append(model(part).square().sum(-1)[keep].mean() / 2)
                if not first:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            own.step()
            found.append([f for name in "01" for f in factors(own, name)])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


@pytest.mark.parametrize("counted", [(0, 1), (1,)], ids=str)
def test_a_pass_of_several_batches_is_an_error(counted: Sequence[int]) -> None:
    model, x = fill(chain()), randn(4, 3)
    with closing(preconditioner(model)) as own:
        total = 0.0
        for number, part in enumerate(x.split(2)):
            if number in counted:
                own.count(2)
            total = total + model(part).square().mean() / 2
        total.backward()
        with pytest.raises(ValueError, match="forward passes of several count"):
            own.step()


def test_a_forward_pass_that_was_reached_before_is_asked_of() -> None:
    model, x = fill(chain()), randn(9, 3)
    with closing(preconditioner(model, fisher="forward-only")) as own:
        loss = model(x[:4]).square().sum()
        loss.backward(retain_graph=True)
        (loss + model(x[4:]).square().sum()).backward()
        with pytest.warns(UserWarning, match=r"2 forward passes \(of 5 and 4 samples\)"):
            own.step()


def test_nothing_is_asked_between_statistics() -> None:
    model, x = fill(chain()), randn(4, 3)
    with closing(preconditioner(model, statistics_every=2)) as own:
        for step in range(4):
            model.zero_grad()
            if own.takes_statistics:
                own.count(4)
            else:
                own.count("nonsense")  # type: ignore[arg-type]
            backward(model, x)
            own.step()
            assert own.curvature.steps == step + 1


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).flatten(2).mT)


@pytest.mark.parametrize(
    ("make", "settings", "said", "message"),
    [
        (Images, {}, {"rows": torch.ones(2, 3, 3).bool()}, "single rows out of 'conv': Conv2dHel"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2)),
            {"method": "kfac-reduce"},
            {"rows": torch.ones(2, 2, 3).bool()},
            "single rows out of '0': LinearHelper under KFACReduce",
        ),
        (Images, {}, {"rows": torch.ones(2, 5).bool()}, r"no layer was called with so many"),
    ],
    ids=["convolution", "reduce", "fits nothing"],
)
def test_rows_that_cannot_be_left_out(
    make: Any, settings: dict[str, Any], said: dict[str, Any], message: str
) -> None:
    model = fill(make())
    with closing(preconditioner(model, **settings)) as own:
        own.count(**said)
        backward(model, randn(2, 2, 3, 3))
        with pytest.raises(ValueError, match=message):
            own.step()


@pytest.mark.parametrize(
    ("loss", "terms", "message"),
    [
        ("mse", 5, r"count.. was given 5, which does not say which terms of the outputs \(3, 2, 4"),
        ("mse", torch.ones(3, 5).bool(), r"given a mask \(3, 5\), which does not say which"),
        (SumLoss([Term("mse"), Term(SquaredError())]), KEEP, "all take means over positions, or"),
    ],
)
def test_terms_that_the_outputs_do_not_have(loss: Any, terms: Any, message: str) -> None:
    model = fill(chain())
    with closing(preconditioner(model, fisher="type-2", loss=loss)) as own:
        own.count(terms)
        output = model(randn(3, 4, 3)).transpose(1, 2)
        own.observe(output)
        output.square().mean().backward()
        with pytest.raises(ValueError, match=message):
            own.step()


def test_terms_that_one_of_two_outputs_does_not_have() -> None:
    """Three samples with four positions each in one output, and with none in the other."""
    model = fill(chain())
    loss = SumLoss([Term(SquaredError()), Term(SquaredError(), output=1)])
    with closing(preconditioner(model, fisher="type-2", loss=loss)) as own:
        own.count(12)
        output = model(randn(3, 4, 3)).transpose(1, 2)
        outputs = [output, output.mean(2)]
        own.observe(outputs)
        (outputs[0].square().mean() + outputs[1].square().mean()).backward()
        with pytest.raises(ValueError, match=r"given 12, .* outputs \(3, 2, 4\), \(3, 2\)"):
            own.step()


def test_each_forward_pass_is_observed_before_the_next_is_counted() -> None:
    model = fill(chain())
    with closing(preconditioner(model, fisher="type-2", loss="mse")) as own:
        for size in (1, 2):
            own.count(size)
            model(randn(size, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="still waits for observe"):
            own.step()


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({}, ValueError, "says terms=, rows= or both"),
        ({"terms": -1}, ValueError, "must not be negative"),
        ({"terms": True}, TypeError, "a number of terms or a bool mask"),
        ({"terms": 2.0}, TypeError, "a number of terms or a bool mask"),
        ({"terms": torch.zeros(2, 3).long()}, TypeError, "such as labels != -100"),
        ({"rows": torch.zeros(2, 3)}, TypeError, "rows is a mask"),
        ({"rows": [True]}, TypeError, "rows is a mask, .* not list"),
        ({"rows": torch.tensor([[5, 0]])}, ValueError, "True or 1 for data"),
        ({"rows": torch.tensor(True)}, ValueError, "not a single number"),
    ],
)
def test_what_cannot_be_said(said: dict[str, Any], error: type[Exception], message: str) -> None:
    with closing(preconditioner(fill(chain()))) as own, pytest.raises(error, match=message):
        own.count(**said)


def test_what_contradicts_a_setting() -> None:
    with (
        closing(preconditioner(fill(chain()), scaling="kaisa")) as own,
        pytest.raises(ValueError, match="needs scaling='fisher'"),
    ):
        own.count(3)
    with closing(preconditioner(fill(chain()), samples=lambda: 3)) as own:
        with pytest.raises(ValueError, match="both say what the loss is a mean over"):
            own.count(3)
        own.count(rows=torch.ones(2, 3).bool())


def test_a_callable_is_asked_once_for_a_pass() -> None:
    numbers = iter([2, 4])
    model, x = fill(chain()), randn(6, 3)
    own = preconditioner(model, samples=lambda: next(numbers), loss_average="sum")
    with closing(own):
        for part in x.split([2, 4]):
            model(part).sum().backward()
        own.step()
        rows = torch.cat([x, torch.ones(6, 1).double()], 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / 6, "A")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_said_holds_for_what_a_checkpoint_runs_again(reentrant: bool) -> None:
    found = []
    for again in (True, False):
        model, x = fill(deep()), randn(2, 4, 3).requires_grad_()
        with closing(preconditioner(model)) as own:
            for part, keep in zip(x.split(1), KEEP.split(1), strict=False):
                own.count(keep, rows=keep)
                hidden = checkpoint(model[:2], part, use_reentrant=reentrant) if again else None
                output = model[2](model[:2](part) if hidden is None else hidden)
                (output.square().sum(-1)[keep].mean() / 2).backward()
            own.step()
            found.append([f for name in "02" for f in factors(own, name)])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


def test_a_number_may_be_a_tensor() -> None:
    model, x = fill(chain()), randn(4, 3)
    with closing(preconditioner(model)) as own:
        own.count(torch.tensor(8))
        backward(model, x)
        own.step()
        rows = torch.cat([x, torch.ones(4, 1).double()], 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / 8, "A")


# -- ranks -----------------------------------------------------------------------------------------

SHARES: dict[int, list[list[int]]] = {  # by ranks: the routes of each rank's samples
    1: [[0, 2, 1, 2, 2, 2]],
    2: [[0, 2, 1, 2], [2, 2]],
    3: [[0, 2], [1, 2, 2], [2]],
}


def on_share(rank: int, ranks: int, name: str, strategy: str) -> list[Tensor]:
    """A step on a share of six samples, of which some ranks' reach no expert."""
    model = fill(Experts())
    sizes = [len(own) for own in SHARES[ranks]]
    x, y = routed(SHARES[1][0]), randn(6, 2, seed=1)
    order = torch.tensor([x[:, 0].tolist().index(0), 1, 2, 3, 4, 5])
    x, y = x[order].split(sizes)[rank], y[order].split(sizes)[rank]
    settings: dict[str, Any] = {"loss_average": "global", "strategy": strategy, "decay": 0.5}
    if name == "type-2":
        settings |= {"fisher": "type-2", "loss": SquaredError()}
    own = preconditioner(model, **settings)

    def loss(model: nn.Module, _: int) -> Tensor:
        for parameter in model.parameters():  # of experts that no sample of this rank reaches, too
            parameter.grad = torch.zeros_like(parameter)
        if name == "empirical":
            own.count(len(x))
        output = model(x)
        if name == "type-2":
            own.observe(output)
        return log_cosh(output, y) * len(x) / 6 * ranks

    with closing(own):
        kit.train(model, loss, range(2), kit.Averaging(model), own)
        return kit.gradients(model)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["type-2", "empirical"])
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
@pytest.mark.covering(together=2)
def test_ranks_with_uneven_routing_are_one_process(name: str, ranks: int, strategy: str) -> None:
    alone = on_share(0, 1, name, "comm-opt")
    for own in run_ranks(on_share, ranks, name, strategy):
        for one, other in zip(own, alone, strict=True):
            compare(one, other, "preconditioned gradients")


def count_for_oneself(rank: int, ranks: int) -> list[Tensor]:
    """Each rank's callable returns the number of its own tokens."""
    model, x = fill(chain()), randn(3, 4, 3)
    keep = KEEP
    if ranks > 1:
        keep, x = ((KEEP[:1], x[:1]), (KEEP[1:], x[1:]))[rank]
    own = preconditioner(model, samples=lambda: int(keep.sum()), loss_average="global")
    with closing(own):
        (model(x).square().sum(-1)[keep].sum() / 7 * ranks).backward()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        own.step()
        return [f.clone() for name in "01" for f in factors(own, name)]


@pytest.mark.distributed
def test_numbers_that_callables_return_need_not_agree() -> None:
    """Every rank counts its own: added up they are those of one process."""
    alone = count_for_oneself(0, 1)
    for own in run_ranks(count_for_oneself, 2):
        for one, other in zip(own, alone, strict=True):
            compare(one, other, "factor")


@pytest.mark.parametrize("batch", [(1,), ()])
def test_one_sample_in_several_calls_is_asked_once(batch: tuple[int, ...]) -> None:
    """A policy called at each time step, or at each sample: these are taken for samples."""
    model, steps = fill(nn.Sequential(nn.Linear(3, 2))), randn(5, *batch, 3)

    def loss(net: nn.Module, step: int) -> Tensor:
        return torch.stack([net(x).square().sum() for x in steps]).mean()

    with closing(preconditioner(model)) as own:
        asked = r"5 forward passes.*mean over 5 terms.*count\(n\)"
        with pytest.warns(UserWarning, match=asked) as warned:
            kit.train(model, loss, range(1), own)
        assert warned[0].filename == kit.__file__  # where the step is called
        kit.train(model, loss, range(1), own)  # warnings are errors here
        rows = torch.cat([steps.view(5, 3), torch.ones(5, 1).double()], 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / 5, "A of five samples")
    with closing(preconditioner(model)) as own:
        own.count(5)
        loss(model, 0).backward()
        own.step()
        compare(factors(own, "0")[0][0], rows.T @ rows / 5, "A of the mean")


class Heads(nn.Module):
    """Each sample goes through the head of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs = x.new_zeros(*x.shape[:-1], 2)
        for number, head in enumerate(self.heads):
            chosen = x.flatten(1)[:, 0] == number
            outputs[chosen] = head(x[chosen])
        return outputs


@pytest.mark.parametrize("positions", [(), (2,)], ids=str)
def test_a_last_head_with_one_sample_is_said_once(positions: tuple[int, ...]) -> None:
    """It looks like the end of a model that was called without a batch."""
    model, x = fill(Heads()), routed([0, 1, 0, 0])
    x = x.view(4, *itertools.repeat(1, len(positions)), 3).expand(4, *positions, 3)
    rows = torch.cat([x[1], torch.ones(*positions, 1).double()], -1).view(-1, 4)

    def loss(net: nn.Module, step: int) -> Tensor:
        return half_square(net(x), x[..., :2])

    with closing(preconditioner(model)) as own:
        with pytest.warns(UserWarning, match=r"one sample.* of 4 samples.*another layer had 3"):
            kit.train(model, loss, range(1), own)
        kit.train(model, loss, range(1), own)  # warnings are errors here
    with closing(preconditioner(model)) as own:
        own.count(4)
        kit.train(model, loss, range(1), own)
        compare(factors(own, "heads.1")[0][0], rows.T @ rows / 4, "A of a mean over four")


def test_a_single_sample_with_positions_is_no_table_of_all_samples() -> None:
    """If its head has had a part of a batch before."""
    model, several = fill(Heads()), randn(5, 4, 3)
    several[:, 0, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    single = several.clone()
    single[2, 0, 0] = 1.0
    with closing(preconditioner(model, decay=0.0)) as own:
        for x in (several, single):
            model(x).square().sum().div(len(x)).backward()
            own.step()
            model.zero_grad()
        rows = torch.cat([single[1], torch.ones(4, 1).double()], 1)
        compare(factors(own, "heads.0")[0][0], rows.T @ rows / 5, "A of a mean over five")


class OneByOne(nn.Module):
    """Samples of other sizes, as images are, go through the layer one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.cat([self.inner(x[None]) for x in batch])


class Modulated(nn.Module):
    """A table that all samples share goes through a layer of its own, after theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch) * self.shared(torch.ones(1, 4, dtype=batch.dtype))


class Plain(OneByOne):
    """All samples at once."""

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch)


@pytest.mark.parametrize(("kind", "sizes"), [(Plain, (5, 3)), (OneByOne, (8,)), (Modulated, (8,))])
def test_numbers_of_samples_that_layers_do_not_agree_on(
    kind: type[nn.Module], sizes: tuple[int, ...]
) -> None:
    """A loss over 8 samples, with and without `count`: slices of a batch are other samples."""
    model, x = fill(kind().double()), randn(8, 3)
    rows = torch.cat([x, torch.ones(8, 1).double()], 1)

    def loss(net: nn.Module, step: int) -> Tensor:
        outputs = [net(part) for part in x.split(sizes)]
        return torch.cat(outputs).square().sum() / len(x)

    if len(sizes) > 1:
        for samples in (None, "batch", lambda: 8):
            with closing(preconditioner(model, samples=samples)) as own:
                kit.train(model, loss, range(1), own)
                compare(factors(own, "inner")[0][0], rows.T @ rows / 8, "A")
    with closing(preconditioner(model)) as own:
        own.count(8)
        loss(model, 0).backward()
        own.step()
        compare(factors(own, "inner")[0][0], rows.T @ rows / 8, "A of the mean")


class TimeFirst(nn.Module):
    """Positions first inside; a dictionary in, a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any], unused: Any = None) -> dict[str, Tensor]:
        x = batch["x"][0].transpose(0, 1)
        return {"y": self.head(self.inner(x)).mean(0)}


@pytest.mark.parametrize("call", ["root", "submodules"])
def test_the_batch_is_the_roots_wherever_it_is_inside(call: str) -> None:
    """And if submodules are called themselves, that of the layer nearest to the loss."""
    model, x = fill(TimeFirst()), randn(3, 5, 3)
    with closing(preconditioner(model)) as own:
        if call == "root":
            model({"x": (x, None)}, unused="text")["y"].sum().backward()
        else:
            model.head(model.inner(x.transpose(0, 1)).mean(0)).sum().backward()
        own.step()
        rows = torch.cat([x.reshape(-1, 3), torch.ones(15, 1).double()], 1)
        compare(factors(own, "inner")[0][0], rows.T @ rows / 3, "A")


def test_tokens_are_the_roots_where_every_token_has_a_term() -> None:
    model, ids = fill(Places()), torch.tensor([[0, 1, 2], [4, 4, 1]])
    with closing(preconditioner(model, layers="all", samples="positions")) as own:
        model(ids).sum().backward()
        own.step()
        counts = torch.tensor([2.0, 2, 2, 0]).double()
        compare(blocks(own)["places"].running["A"][0], counts / 6, "A")
