"""Blocks of single parameters, by the gradients of samples: beside dense ones, and as layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.laplace import Laplace
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.products.kinds import Batch, Kind, loss
from tests.products.test_everywhere import WAYS

DAMPING = 0.3
FISHERS: dict[str, soframe.Statistics] = {
    "empirical": soframe.Statistics(),
    "type-2": soframe.Statistics(fisher="type-2", loss="squared-error"),
}


class Scaled(nn.Module):
    """Parameters of its own beside a layer: a vector, a table of positions, a scalar, one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.zeros(3))
        self.table = nn.Parameter(torch.zeros(1, 4, 3))
        self.power = nn.Parameter(torch.zeros(()))
        self.twice = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer((x * self.scale + self.table).tanh())
        outputs: Tensor = (x @ self.twice).tanh() @ self.twice * self.power.exp()
        return outputs


class Unknown(nn.Module):
    """A module without a helper, with a matrix and a vector; all of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.shift = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.shift


class Pooled(Unknown):
    """Sequences ``[T, N, 3]``, whose batch is the first dimension of outputs ``[N, 2]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(0)


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


class Checkpointed(Scaled):
    """The same, computed again in each backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return outputs


MODELS: dict[str, Any] = {
    "beside layers": Scaled,
    "alone": Unknown,
    "parametrised": normed,
    "checkpointed": Checkpointed,
}


def kind_of(name: str) -> Kind:
    return Kind(fill(MODELS[name]()).eval(), lambda n: randn(n, 4, 3, seed=n))


def plain(name: str) -> Kind:
    """Return a kind with the same weights and outputs that is never computed again."""
    return kind_of("beside layers" if name == "checkpointed" else name)


def single(curvature: soframe.Curvature) -> list[str]:
    """Return the names of the parameters that are blocks by themselves."""
    return [block.name for block in curvature.blocks if block.auxiliary]


def fisher_of(kind: Kind, name: str, fisher: str, data: list[Batch]) -> Tensor:
    """Return the Fisher of a parameter, ``[entries, entries]``, sample by sample."""
    weight = kind.model.get_parameter(name).detach()
    rows: list[Tensor] = []
    for batch in data:
        if fisher == "empirical":
            gradients = kind.gradients(batch)[name]
            rows += gradients.reshape(len(gradients), 1, -1)
            continue
        for x in batch[0].split(1):  # the Hessian of the loss is the identity

            def call(value: Tensor, x: Tensor = x) -> Tensor:
                return functional_call(kind.model, {name: value}, (x,)).flatten()

            jacobian = torch.autograd.functional.jacobian(call, weight)
            rows.append(jacobian.reshape(-1, weight.numel()))
    return torch.stack([row.T @ row for row in rows]).mean(0)


@pytest.mark.parametrize("fisher", list(FISHERS))
@pytest.mark.parametrize("name", list(MODELS))
def test_blocks_of_parameters_are_dense_ones(name: str, fisher: str) -> None:
    kind = kind_of(name)
    data = kind.data()
    diagonal = soframe.Curvature(kind.model, auxiliary="diagonal", statistics=FISHERS[fisher])
    whole = soframe.Curvature(kind.model, auxiliary="kfac", statistics=FISHERS[fisher])
    names = single(diagonal.fit(data, loss, every=2))
    assert names == single(whole.fit(data, loss))
    assert names
    assert diagonal.left_out == {}
    vector = {n: randn(2, *p.shape, seed=i) for i, (n, p) in enumerate(named(kind))}
    for parameter in names:
        dense = fisher_of(plain(name), parameter, fisher, data)
        flat = vector[parameter].reshape(2, -1)
        for curvature, matrix in ((diagonal, dense.diagonal().diag()), (whole, dense)):
            damped = matrix + DAMPING * torch.eye(len(matrix), dtype=matrix.dtype)
            inverse = curvature.inverse(DAMPING)
            root, solved = inverse.sqrt(), (inverse @ vector)[parameter]
            pairs = [
                ((curvature @ vector)[parameter].reshape(2, -1), flat @ matrix),
                (solved.reshape(2, -1), torch.linalg.solve(damped, flat.T).T),
                ((root @ (root @ vector))[parameter], solved),
                (curvature.eigenvalues(parameter), torch.linalg.eigvalsh(matrix)),
            ]
            for found, wanted in pairs:
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
            assert curvature.trace(parameter) == pytest.approx(float(matrix.trace()))
            logdet = float(torch.linalg.slogdet(damped)[1])
            assert curvature.logdet(DAMPING, parameter) == pytest.approx(logdet)


def named(kind: Kind) -> list[tuple[str, nn.Parameter]]:
    return list(kind.model.named_parameters())


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_of_samples_have_all_parameters(name: str) -> None:
    kind = kind_of(name)
    curvature = soframe.Curvature(kind.model, auxiliary="diagonal").fit(kind.data(), loss)
    for batch in kind.data()[1:]:  # in the first the order of rows is looked at
        found, wanted = curvature.gradients(batch, loss).dense(), plain(name).gradients(batch)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    query, train = kind.data()[0], kind.data()[1:]
    scores = soframe.influence.scores(curvature, [query], train, loss, damping=DAMPING)
    inverse = curvature.inverse(DAMPING) @ plain(name).gradients(query)
    products: list[Tensor] = []
    for batch in train:
        gradients = plain(name).gradients(batch)
        product = [torch.einsum("q...,t...->qt", inverse[n], gradients[n]) for n in gradients]
        products.append(torch.stack(product).sum(0))
    torch.testing.assert_close(scores, torch.cat(products, 1), rtol=1e-9, atol=1e-11)


class Raw(nn.Module):
    """A linear layer that has no helper."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("positions", [(), (4,)])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("fisher", "of_loss"),
    [("empirical", None), ("type-2", "cross-entropy"), ("monte-carlo", "cross-entropy")],
)
def test_a_parameter_has_the_diagonal_of_a_layer(
    fisher: str, of_loss: str | None, counts: bool, positions: tuple[int, ...]
) -> None:
    """Labels are drawn alike: this test is of the Monte-Carlo Fisher, too."""
    layers = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    raw = nn.Sequential(Raw(layers[0]), nn.Tanh(), layers[2])  # type: ignore[arg-type]
    statistics = soframe.Statistics(fisher=fisher, loss=of_loss)
    values: list[Tensor] = []
    for model in (layers, raw):
        torch.manual_seed(0)
        curvature = soframe.Curvature(
            model, "diagonal", statistics=statistics, auxiliary="diagonal"
        )

        def of_terms(
            model: nn.Module, batch: Batch, curvature: soframe.Curvature = curvature
        ) -> tuple[Tensor, Tensor]:
            labels = batch[1].clone()
            if counts:
                labels.view(-1)[::3] = -100
                curvature.count(labels != -100)
            outputs = model(batch[0])
            if positions:
                outputs = outputs.transpose(1, 2)
            return outputs, nn.functional.cross_entropy(outputs, labels)

        curvature.fit(labelled(*positions), of_terms, every=1)
        values.append(curvature.eigenvalues())
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-14)


def labelled(*positions: int) -> list[Batch]:
    data: list[Batch] = []
    for n in (5, 2, 4):
        inputs = randn(n, *positions, 3, seed=n)
        data.append((inputs, torch.arange(inputs[..., 0].numel()).view(inputs.shape[:-1]) % 3))
    return data


def test_a_penalty_is_of_no_sample() -> None:
    kind = kind_of("alone")
    data = kind.data()

    def penalised(model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
        outputs, value = loss(model, batch)
        return {"of": outputs, "hidden": outputs * 1}, value + model.kernel.square().sum()

    plain, other = (
        soframe.Curvature(kind.model, auxiliary="diagonal").fit(data, of_loss)
        for of_loss in (loss, penalised)
    )
    torch.testing.assert_close(other.eigenvalues(), plain.eigenvalues(), rtol=1e-9, atol=1e-12)
    with pytest.warns(UserWarning, match="in kernel the gradient of the loss is not the mean"):
        gradients = other.gradients(data[0], penalised)
    torch.testing.assert_close(gradients.dense(), kind.gradients(data[0]), rtol=1e-9, atol=1e-12)


def test_a_parameter_of_some_batches_has_zeros_in_the_others() -> None:
    model: Any = fill(Scaled())
    data = Kind(model, lambda n: randn(n, 4, 3, seed=n)).data()

    def some(net: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        if len(batch[0]) == 3:
            outputs = net.layer(batch[0])
            return outputs, (outputs - batch[1]).square().flatten(1).sum(1).mean() / 2
        return loss(net, batch)

    curvature = soframe.Curvature(model, auxiliary="diagonal")
    gradients = Kind(model, lambda n: randn(n, 4, 3, seed=n)).gradients
    squares = torch.cat([gradients(batch)["scale"] for batch in data[:2]]).square().sum(0)
    for every in (1, 10):
        curvature.fit(data, some, every=every)
        found = curvature.eigenvalues("scale")
        assert len(data[2][0]) == 3
        torch.testing.assert_close(found, (squares / 13).sort().values, rtol=1e-10, atol=1e-13)


def test_weights_gradients_and_hooks_stay() -> None:
    kind = kind_of("beside layers")
    loss(kind.model, kind.data()[0])[1].backward()
    before = {name: (p, p.grad, p.grad.clone()) for name, p in named(kind)}  # type: ignore[union-attr]
    curvature = soframe.Curvature(kind.model, auxiliary="diagonal").fit(kind.data(), loss)
    curvature.gradients(kind.data()[0], loss)
    for parameter, gradient, copied in before.values():
        assert parameter.grad is gradient
        assert torch.equal(copied, gradient)  # type: ignore[arg-type]
    curvature.close()
    assert not kind.model.layer._forward_hooks  # type: ignore[union-attr]


def test_posteriors_and_files_have_the_parameters(tmp_path: Path) -> None:
    kind = kind_of("beside layers")
    curvature = soframe.Curvature(kind.model, auxiliary="diagonal").fit(kind.data(), loss)
    samples = Laplace(curvature).sample(2, torch.Generator().manual_seed(0))
    assert samples.keys() == dict(named(kind)).keys()
    curvature.save(tmp_path)
    loaded = soframe.Curvature(kind.model, auxiliary="diagonal").load(tmp_path)
    torch.testing.assert_close(loaded.eigenvalues(), curvature.eigenvalues(), rtol=0, atol=0)
    rows = {row.parameter: row for row in curvature.report()}
    assert (rows["scale"].method, rows["scale"].block) == ("diagonal", "scale")
    assert "no layer helper" in rows["scale"].note


# -- ranks -----------------------------------------------------------------------------------------


def results(curvature: soframe.Curvature, kind: Kind) -> Any:
    vector = {n: randn(2, *p.shape, seed=i) for i, (n, p) in enumerate(named(kind))}
    inverse = curvature.inverse(DAMPING)
    scores = soframe.influence.scores(
        curvature, kind.data()[:1], kind.data()[1:], loss, damping=DAMPING
    )
    values = [curvature.eigenvalues(block.name) for block in curvature.blocks]
    numbers = [curvature.trace(), curvature.logdet(DAMPING), curvature.trace("scale")]
    return curvature @ vector, inverse @ vector, values, numbers, scores


def on_rank(rank: int, ranks: int, strategy: str, folder: str, *, load: bool) -> Any:
    kind = kind_of("beside layers")
    curvature = soframe.Curvature(kind.model, strategy=strategy, auxiliary="diagonal")
    if load:
        return results(curvature.load(folder), kind)
    data = kind.data()
    shares = ([data[0], data[2]], [data[1]], [], [])
    curvature.fit(shares[rank], loss, folder=folder, every=1)
    return results(curvature, kind)


def on_rank_anew(rank: int, ranks: int, strategy: str, folder: str) -> Any:
    return on_rank(rank, ranks, strategy, folder, load=False)


def on_rank_again(rank: int, ranks: int, strategy: str, folder: str) -> Any:
    return on_rank(rank, ranks, strategy, folder, load=True)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.covering(together=1)
def test_ranks_are_one_process_and_others_load(ranks: int, strategy: str, tmp_path: Path) -> None:
    kind = kind_of("beside layers")
    alone = soframe.Curvature(kind.model, auxiliary="diagonal").fit(kind.data(), loss)
    wanted = results(alone, kind)
    for run, number in ((on_rank_anew, ranks), (on_rank_again, 6 // ranks - 1)):
        for found in run_ranks(run, number, strategy, str(tmp_path)):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


class Shifted(nn.Module):
    """A vector and a table of positions, the latter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = (x * self.scale + self.table).tanh() + self.table
        return outputs


def between() -> Kind:
    """Return a vector and a table between two layers that a plan cuts."""
    model = fill(nn.Sequential(nn.Linear(3, 4), Shifted(), nn.Linear(4, 3))).eval()
    return Kind(model, lambda n: randn(n, 2, 3, seed=n))


def nested(model: nn.Module, ranks: int) -> int:
    for child in model:  # type: ignore[attr-defined]
        fully_shard(child)
    fully_shard(model)
    return ranks


NESTED: dict[str, Callable[[nn.Module, int], int]] = {"nested": nested}
CHOICES = ("^2$", "kfac", "comm-opt"), ("^0$", "diagonal", "mem-opt"), ("^1$", "kfac", "sharded")
"""The layer that has a helper's block, the method of all other parameters, and the strategy."""


def sharded_errors(rank: int, ranks: int, way: str, fisher: str) -> list[float]:
    """Return the errors of everything that parameters have on sharded models."""
    whole, data, found = between(), between().data() + between().data()[:1], list[float]()
    gradients = [whole.gradients(batch) for batch in data]
    dense = {name: fisher_of(whole, name, fisher, data) for name, _ in named(whole)}
    for pattern, auxiliary, strategy in CHOICES:
        kind = between()
        shares = (WAYS | NESTED)[way](kind.model, ranks)
        part = slice(rank * shares // ranks, None, shares)
        share = data[part]
        curvature = soframe.Curvature(
            kind.model,
            {pattern: "kfac"},
            auxiliary=auxiliary,
            strategy=strategy,
            statistics=FISHERS[fisher],
        )
        curvature.fit(share, loss, every=1)
        assert single(curvature)
        vector = {n: randn(2, *p.shape, seed=i) for i, (n, p) in enumerate(named(whole))}
        inverse = curvature.inverse(DAMPING)
        scores = soframe.influence.scores(curvature, data[1:2], share, loss, damping=DAMPING)
        solved = inverse @ gradients[1]
        wanted: Any = 0.0
        for name in vector:
            columns = torch.cat([batch[name] for batch in gradients[part]]).flatten(1)
            wanted = wanted + solved[name].flatten(1) @ columns.T
        pairs = [(scores, wanted)]
        found_gradients = curvature.gradients(share[-1], loss).dense()
        pairs += [(found_gradients[name], gradients[part][-1][name]) for name in vector]
        for name in single(curvature):
            matrix = dense[name]
            if auxiliary == "diagonal":
                matrix = matrix.diagonal().diag()
            flat = vector[name].reshape(2, -1)
            damped = matrix + DAMPING * torch.eye(len(matrix), dtype=matrix.dtype)
            pairs += [
                ((curvature @ vector)[name].reshape(2, -1), flat @ matrix),
                ((inverse @ vector)[name].reshape(2, -1), torch.linalg.solve(damped, flat.T).T),
                (curvature.eigenvalues(name), torch.linalg.eigvalsh(matrix)),
            ]
        found += [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]
    return found


QUICK = {("nested", 2, "type-2"), ("plan", 2, "empirical")}
SHARDED = []
for way in (*NESTED, *WAYS):
    for ranks in (1, 2, 4):
        if ranks != 4 and ("copies" in way or "of a plan" in way):
            continue  # they are of four
        for fisher in FISHERS:
            is_quick = (way, ranks, fisher) in QUICK
            marks = [pytest.mark.slow] if is_quick else [pytest.mark.thorough]
            SHARDED.append(pytest.param(way, ranks, fisher, marks=marks))


@pytest.mark.distributed
@pytest.mark.parametrize(("way", "ranks", "fisher"), SHARDED)
def test_sharded_parameters_have_dense_blocks(way: str, ranks: int, fisher: str) -> None:
    """Ranks have batches of other sizes, and so other numbers of passes."""
    for found in run_ranks(sharded_errors, ranks, way, fisher):
        assert max(found) < 1e-11


# -- choices and errors ----------------------------------------------------------------------------


def test_what_stays_out_is_named() -> None:
    model = fill(Scaled())
    model.power.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"scale: .*; table: .*auxiliary='diagonal' they have"):
        plain = soframe.Curvature(model)
    assert single(plain) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = soframe.Curvature(model, auxiliary="diagonal")
        skipped = soframe.Curvature(nn.Sequential(model), auxiliary="diagonal", skip=["^0$"])
    assert single(asked) == ["scale", "table", "twice"]
    assert asked.left_out == {"power": "frozen"}
    assert single(skipped) == []
    assert skipped.left_out.keys() == {f"0.{name}" for name in ("scale", "table", "power", "twice")}


def test_layers_without_a_method_are_parameters() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    curvature = soframe.Curvature(model, {"^0$": "kfac"}, auxiliary="diagonal")
    assert single(curvature) == ["2.weight", "2.bias"]


def test_errors_have_a_remedy() -> None:
    kind = kind_of("alone")
    x, y = kind.data()[0]

    def flat(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0]).flatten(0, 1)
        return outputs, (outputs - batch[1].flatten(0, 1)).square().sum(1).mean()

    def nothing(model: nn.Module, batch: Batch) -> tuple[None, Tensor]:
        return None, loss(model, batch)[1]

    curvature = soframe.Curvature(kind.model, auxiliary="diagonal")
    remedy = r"samples of kernel, shift: .* Return the outputs that the loss is of"
    for call in (curvature.gradients, lambda batch, of_loss: curvature.fit([batch], of_loss)):
        for of_loss in (flat, nothing):
            with pytest.raises(ValueError, match=remedy):
                call((x, y), of_loss)
    pooled, first = soframe.Curvature(fill(Pooled()), auxiliary="diagonal"), x.transpose(0, 1)
    with pytest.raises(ValueError, match=r"outputs have 5 rows, and the batch 5 .* dimension 1"):
        pooled.gradients((first, y.mean(1)), loss)
    mixing = nn.Sequential(kind.model, nn.BatchNorm1d(4)).double()
    with pytest.raises(ValueError, match=r"1 normalises with .* call model.eval\(\) before"):
        soframe.Curvature(mixing, auxiliary="diagonal").fit([(x, y)], loss)
    statistics = soframe.Statistics(fisher="forward-only")
    with pytest.raises(ValueError, match="forward-only' has none: pass another Fisher"):
        soframe.Curvature(kind.model, statistics=statistics, auxiliary="diagonal")
    with pytest.raises(ValueError, match="defines no products"):
        soframe.Curvature(kind.model, auxiliary="adamw")
    with pytest.raises(ValueError, match="auxiliary='diagonal' reads calls of layers"):
        soframe.Preconditioner(kind.model, auxiliary="diagonal")
    model = fill(Scaled())
    with pytest.raises(ValueError, match=r"the data never reach .*scale"):
        soframe.Curvature(model, auxiliary="diagonal").fit(
            [(x, y)],
            lambda net, batch: loss(net.layer, batch),  # type: ignore[arg-type]
        )
