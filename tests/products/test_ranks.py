"""A curvature on two ranks, with unequal shares of the data: that of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.curvature import closing, fill, preconditioner, randn
from tests.distributed.harness import RankError, run_ranks
from tests.products.kinds import KINDS, Batch, loss
from tests.products.table import COLUMNS, errors
from tests.products.test_fitting import CLASSES, batches, close, cross_entropy, network, values_of

SHARES = ((0, 2), (1,), (), ())
"""The batches of each rank: one has more, and of four ranks two have none."""
RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
DAMPING = 0.2


def vector_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: randn(2, *p.shape, seed=i) for i, (name, p) in enumerate(named)}


def results(curvature: soframe.Curvature, model: nn.Module, data: list[Batch], of_loss: Any) -> Any:
    """Return what the ranks have in common, and this rank's scores."""
    vector, inverse = vector_of(model), curvature.inverse(DAMPING)
    common = (
        values_of(curvature),
        curvature @ vector,
        inverse.sqrt() @ vector,
        [curvature.trace(), curvature.trace(curvature.blocks[-1].name), curvature.logdet(DAMPING)],
    )
    query = [data[0]]
    shares = [soframe.influence.scores(curvature, query, data, of_loss, damping=DAMPING)]
    return common, shares


def on_rank(rank: int, ranks: int, strategy: str, method: str, folder: str) -> Any:
    model, data = network(), batches(5, 4, 6)
    curvature = soframe.Curvature(model, method, strategy=strategy)
    mine = [data[number] for number in SHARES[rank]]
    curvature.fit(mine, cross_entropy, folder=folder, every=1)
    found = results(curvature, model, data, cross_entropy)
    if strategy != "comm-opt":
        vector = vector_of(model)
        vector["0.bias"] = vector["0.bias"] + rank
        with pytest.raises(ValueError, match="comm-opt"):
            curvature @ vector
    return found


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
@RANKS
def test_ranks_are_one_process(ranks: int, strategy: str, method: str, tmp_path: Path) -> None:
    model, data = network(), batches(5, 4, 6)
    alone = soframe.Curvature(model, method).fit(data, cross_entropy)
    wanted = results(alone, model, data, cross_entropy)
    for found in run_ranks(on_rank, ranks, strategy, method, str(tmp_path)):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    close(soframe.Curvature(model, method).load(tmp_path), alone)


def of_kinds(rank: int, ranks: int, names: list[str]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the errors beside dense matrices by kind and strategy; one rank has no data."""
    found = {}
    for name in names:
        for strategy in ("comm-opt", "mem-opt", "hybrid-opt", "sharded"):
            kind = KINDS[name]()
            data = kind.data()
            curvature = soframe.Curvature(kind.model, strategy=strategy, layers=kind.layers)
            curvature.fit([data[number] for number in SHARES[rank]], loss)
            found[name, strategy] = errors(curvature, kind, data)
    return found


SOME = ["Conv2d, grouped", "MultiheadAttention", "experts", "LayerNorm"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, SOME),
        pytest.param(4, SOME, marks=pytest.mark.thorough),
        pytest.param(2, list(KINDS), marks=pytest.mark.thorough),
        pytest.param(4, list(KINDS), marks=pytest.mark.thorough),
    ],
)
def test_kinds_of_layers_on_several_ranks_are_dense_products(ranks: int, names: list[str]) -> None:
    for found in run_ranks(of_kinds, ranks, names, timeout=600):
        for case, of_kind in found.items():
            assert set(of_kind) == set(COLUMNS)
            assert max(of_kind.values()) < 1e-12, (case, of_kind)


def fails(rank: int, ranks: int) -> None:
    data = batches(5, 4, 6)
    if rank == 1:
        data[1][0][:] = float("nan")
    soframe.Curvature(network()).fit([data[number] for number in SHARES[rank]], cross_entropy)


@RANKS
def test_all_ranks_raise_the_error_of_one(ranks: int) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(fails, ranks)
    summaries = [failure.summary for failure in raised.value.failures]
    assert len(summaries) == ranks
    assert all("the loss of batch 0 " in summary for summary in summaries)


def fails_at_once(rank: int, ranks: int, folder: str) -> list[str]:
    """Return the errors of fits in which one rank alone has a fault."""
    data, messages = batches(5, 4, 6), list[str]()
    mine = [data[number] for number in SHARES[rank]]

    def broken() -> Any:
        raise OSError("disk full")
        yield

    loaders: list[Any] = [iter(mine) if rank == 1 else mine, broken() if rank == 1 else mine]
    for loader in loaders:
        with pytest.raises((ValueError, RuntimeError, OSError)) as raised:
            soframe.Curvature(network(), "ekfac").fit(loader, cross_entropy)
        messages.append(str(raised.value))
    options: list[dict[str, Any]] = [{"every": 1 + rank}, {"folder": folder if rank == 0 else None}]
    for option in options:
        with pytest.raises(ValueError, match="must be the same on every rank") as unlike:
            soframe.Curvature(network(), "ekfac").fit(mine, cross_entropy, **option)
        messages.append(str(unlike.value))
    curvature = soframe.Curvature(network(), strategy="sharded").fit(mine, cross_entropy)
    none = {n: p.new_empty(0, *p.shape) for n, p in curvature.parameters.items()}
    torch.testing.assert_close(curvature @ none, none)
    return messages


@RANKS
def test_no_rank_waits_for_one_that_cannot_fit(ranks: int, tmp_path: Path) -> None:
    for messages in run_ranks(fails_at_once, ranks, str(tmp_path)):
        words = "pass a DataLoader or a list", "disk full", "every", "saves"
        assert all(word in text for word, text in zip(words, messages, strict=True))


def scores_a_share(rank: int, ranks: int) -> list[Tensor]:
    """Return scores of the samples of this rank, of which the last has none."""
    data = batches(5, 4, 6)
    curvature = soframe.Curvature(network()).fit(data, cross_entropy)
    shares = [data, *([] for _ in range(ranks - 1))]
    for other in range(1, ranks - 1):
        shares[other].append(shares[0].pop())
    train = shares[rank]
    scores = soframe.influence.scores(curvature, data[:1], train, cross_entropy, damping=DAMPING)
    lengths = soframe.influence.self_influence(curvature, train, cross_entropy, damping=DAMPING)
    return [scores, lengths]


@RANKS
def test_a_rank_without_training_samples_has_no_scores(ranks: int) -> None:
    shares, alone = run_ranks(scores_a_share, ranks), scores_alone()
    sizes = {2: [(5, 15), (5, 0)], 4: [(5, 5), (5, 6), (5, 4), (5, 0)]}
    assert [share[0].shape for share in shares] == sizes[ranks]
    for number, whole in enumerate(alone):
        parts = [shares[rank][number] for rank in (0, *range(ranks - 1, 0, -1))]  # in their order
        torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-9, atol=1e-12)
        assert all(part.dtype == whole.dtype for part in parts)


def scores_alone() -> list[Tensor]:
    data = batches(5, 4, 6)
    curvature = soframe.Curvature(network()).fit(data, cross_entropy)
    with pytest.raises(ValueError, match="train has no batches"):
        soframe.influence.self_influence(curvature, [], cross_entropy, damping=DAMPING)
    return [
        soframe.influence.scores(curvature, data[:1], data, cross_entropy, damping=DAMPING),
        soframe.influence.self_influence(curvature, data, cross_entropy, damping=DAMPING),
    ]


def goes_on(rank: int, ranks: int, folder: str) -> Any:
    model, data = network(), batches(5, 4, 6)
    mine = [data[number] for number in SHARES[rank]]
    seen: list[Batch] = []

    def dies(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        seen.append(batch)
        if len(seen) == 2:  # the second batch of rank 0, the first of rank 1 in its second pass
            raise RuntimeError("out of time")
        return cross_entropy(model, batch)

    with pytest.raises(RuntimeError, match="out of time"):
        soframe.Curvature(model, "ekfac", strategy="mem-opt").fit(
            mine, dies, folder=folder, every=1
        )
    again = soframe.Curvature(model, "ekfac", strategy="mem-opt").load(folder)
    return values_of(again.fit(mine, cross_entropy))


@RANKS
def test_an_interrupted_fit_goes_on_where_each_rank_was(ranks: int, tmp_path: Path) -> None:
    alone = soframe.Curvature(network(), "ekfac").fit(batches(5, 4, 6), cross_entropy)
    for found in run_ranks(goes_on, ranks, str(tmp_path)):
        torch.testing.assert_close(found, values_of(alone), rtol=1e-10, atol=1e-12)
    with pytest.raises(
        ValueError, match=rf"unfinished fit on {ranks} rank.*resume it with the same"
    ):
        soframe.Curvature(network(), "ekfac").load(tmp_path)


def multiplies_others(rank: int, ranks: int) -> list[str]:
    """Return the errors of products of which one rank has another vector."""
    curvature = soframe.Curvature(network(), strategy="mem-opt")
    curvature.fit([batches(5, 4, 3, 2)[rank]], cross_entropy)
    vector = {name: torch.ones_like(p) for name, p in curvature.parameters.items()}
    name = next(iter(vector))
    texts: list[str] = []
    for other in (0.5, 2.0, None):
        changed = {key: tensor.clone() for key, tensor in vector.items()}
        if rank == 1 and other is None:
            del changed[name]
        elif rank == 1:
            changed[name].view(-1)[0] = other
        with pytest.raises(ValueError, match="pass the same vectors on all ranks") as raised:
            curvature @ changed
        texts.append(str(raised.value))
    with pytest.raises(ValueError, match="the vector lacks"):
        curvature @ {}  # as on the other rank
    assert torch.isfinite((curvature @ vector)[name]).all()  # and go on
    return texts


@RANKS
def test_all_ranks_raise_if_one_multiplies_another_vector(ranks: int) -> None:
    smaller, larger, lacking = run_ranks(multiplies_others, ranks)[0]
    assert "0.5" in smaller
    assert "2.0" in larger
    assert "rank(s) [1]" in lacking


def is_singular(rank: int, ranks: int, strategy: str) -> list[str]:
    """Return the errors of inverses without damping, of a model with one singular block."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    data = batches(50, 40, 60)
    statistics = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    curvature = soframe.Curvature(model, strategy=strategy, statistics=statistics)
    curvature.fit([data[number] for number in SHARES[rank]], cross_entropy)
    texts: list[str] = []
    calls = (
        lambda: curvature.inverse(0.0),
        lambda: soframe.influence.scores(curvature, data, data, cross_entropy, damping=0.0),
        lambda: soframe.influence.self_influence(curvature, data, cross_entropy, damping=0.0),
    )
    for call in calls:
        with pytest.raises(ValueError, match="has no inverse") as raised:
            call()
        texts.append(str(raised.value))
    assert curvature.inverse(0.1).trace() > 0  # and go on
    return texts


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
def test_every_rank_raises_of_a_singular_block(strategy: str, ranks: int) -> None:
    """The logits' curvature has no part along all ones."""
    for texts in run_ranks(is_singular, ranks, strategy):
        for text in texts:
            assert "rounding in 2 (rank 10 of 15). Pass" in text


def trained(rank: int, ranks: int, strategy: str, folder: str) -> Any:
    """Save the curvature of a step of training, and return its spectra."""
    model, data = network(), batches(5, 5, 5)[rank]
    with closing(preconditioner(model, solver="eigen", layers="all", strategy=strategy)) as own:
        cross_entropy(model, data)[1].backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= ranks  # type: ignore[operator]
        own.step()
        own.curvature.save(folder)
        return values_of(own.curvature)


@pytest.mark.parametrize("strategy", ["mem-opt", "sharded"])
def test_one_process_loads_what_ranks_have_in_training(strategy: str, tmp_path: Path) -> None:
    results = run_ranks(trained, 2, strategy, str(tmp_path))
    loaded = soframe.Curvature(network()).load(tmp_path)
    fitted = soframe.Curvature(network()).fit(batches(5, 5), cross_entropy)
    close(loaded, fitted)
    for values in results:
        torch.testing.assert_close(values, values_of(loaded), rtol=1e-12, atol=1e-14)


def on_four(rank: int, ranks: int, strategy: str, folder: str, *, load: bool) -> Any:
    model, data = network(), batches(5, 4, 6, 3, 2)
    curvature = soframe.Curvature(model, "ekfac", strategy=strategy)
    if load:
        curvature.load(folder)
    else:
        shares = [[data[0]], [], [data[1], data[4]], [data[2], data[3]]]  # one has no data
        curvature.fit(shares[rank], cross_entropy, folder=folder)
    return results(curvature, model, data, cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded", "hybrid-opt"])
def test_four_ranks_are_one_process_and_two_load_it(strategy: str, tmp_path: Path) -> None:
    model, data = network(), batches(5, 4, 6, 3, 2)
    alone = soframe.Curvature(model, "ekfac").fit(data, cross_entropy)
    wanted = results(alone, model, data, cross_entropy)
    for ranks, load in ((4, False), (2, True)):
        run = functools.partial(on_four, load=load)
        for found in run_ranks(run, ranks, strategy, str(tmp_path)):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
