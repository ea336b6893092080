"""Files of factors, read back as a quantiser would."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.products.kinds import Batch, loss


def network() -> nn.Module:
    return fill(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Tanh(), nn.Linear(9, 4)))


def batches() -> list[Batch]:
    return [(randn(n, 2, 4, seed=n), randn(n, 4, seed=10 + n)) for n in (5, 3)]


def hessians(model: Any, data: list[Batch]) -> dict[str, Tensor]:
    """Return ``2/N sum a a^T`` of the inputs of both layers, by their definition, without bias."""
    samples = sum(len(x) for x, _ in data)
    images = torch.cat([x for x, _ in data])
    patches = images.unfold(2, 2, 1)  # [samples, channels, positions, kernel]
    rows = patches.transpose(1, 2).reshape(-1, 4)
    hidden = model[2](model[1](model[0](images))).detach()
    return {"0": 2 * rows.T @ rows / samples, "3": 2 * hidden.T @ hidden / samples}


def gptq(weight: Tensor, hessian: Tensor, step: float) -> Tensor:
    """Round ``[out, in]`` to multiples of a step, column by column (Frantar et al., 2023)."""
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian)).to(hessian)
    root = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    rest, rounded = weight.clone(), torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        rounded[:, column] = (rest[:, column] / step).round() * step
        error = (rest[:, column] - rounded[:, column]) / root[column, column]
        rest[:, column:] -= error.unsqueeze(1) * root[column, column:]
    return rounded


@pytest.mark.parametrize("name", ["factors.pt", "factors.safetensors"])
def test_a_quantiser_reads_the_hessians(name: str, tmp_path: Path) -> None:
    model, data = network(), batches()
    statistics = soframe.Statistics(fisher="forward-only")
    curvature = soframe.Curvature(model, statistics=statistics).fit(data, loss)
    loaded = soframe.factors.load(soframe.factors.save(curvature, tmp_path / name))
    assert set(loaded.tensors) == {"0.A", "3.A"}
    assert loaded.fisher == "forward-only"
    wanted = hessians(model, data)
    for layer, module in (("0", model[0]), ("3", model[3])):  # type: ignore[index]
        meaning = loaded.layers[layer]
        assert meaning["bias_column"]
        assert meaning["A"]["number"] == [8.0]
        assert meaning["parameters"] == {"weight": f"{layer}.weight", "bias": f"{layer}.bias"}
        (second_moment,) = loaded.tensors[f"{layer}.A"]
        assert [1, *second_moment.shape] == meaning["A"]["shape"]
        hessian = 2 * second_moment[:-1, :-1]
        torch.testing.assert_close(hessian, wanted[layer], rtol=1e-12, atol=1e-14)
        weight = module.weight.detach().flatten(1)
        rounded = gptq(weight, hessian, 0.2)
        nearest = (weight / 0.2).round() * 0.2
        losses = [((w - weight) @ hessian @ (w - weight).T).trace() for w in (rounded, nearest)]
        assert losses[0] < losses[1]


def test_both_sides_and_diagonals_are_in_the_file(tmp_path: Path) -> None:
    model, data = network(), batches()
    curvature = soframe.Curvature(model, soframe.methods.KFAC(max_size=6)).fit(data, loss)
    loaded = soframe.factors.load(soframe.factors.save(curvature, tmp_path / "factors"))
    (right,), (left,) = loaded.tensors["0.A"], loaded.tensors["0.G"]
    # A ⊗ G is the curvature of the first layer.
    trace = float(right.trace() * left.trace())
    assert trace == pytest.approx(curvature.trace("0"), rel=1e-12)
    assert loaded.layers["3"]["A"]["kind"] == "diagonal"
    assert loaded.tensors["3.A"].shape == (1, 10)
    trace = float(loaded.tensors["3.A"].sum() * loaded.tensors["3.G"][0].trace())
    assert trace == pytest.approx(curvature.trace("3"), rel=1e-12)
    assert loaded.layers["0"]["G"]["number"] == [8.0 * 3]


@pytest.mark.parametrize("name", ["factors.pt", "factors.safetensors"])
def test_a_save_that_fails_leaves_the_former_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = batches()
    path = soframe.factors.save(soframe.Curvature(network()).fit([first], loss), tmp_path / name)
    before, fitted = path.read_bytes(), soframe.Curvature(network()).fit([second], loss)

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        soframe.factors.save(fitted, path)
    assert path.read_bytes() == before


def test_errors_have_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    curvature = soframe.Curvature(model)
    with pytest.raises(RuntimeError, match="call fit"):
        soframe.factors.save(curvature, tmp_path / "factors.pt")
    curvature.fit(batches(), loss)
    diagonal = soframe.Curvature(model, "diagonal").fit(batches(), loss)
    with pytest.raises(ValueError, match=r"no factors A or G: .*Curvature.save"):
        soframe.factors.save(diagonal, tmp_path / "factors.pt")
    torch.save(model.state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"write it by soframe.factors.save"):
        soframe.factors.load(tmp_path / "other.pt")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    saved = soframe.factors.save(curvature, tmp_path / "cut")
    saved.write_bytes(saved.read_bytes()[:-100])
    torch.save({"metadata": [], "tensors": {}}, tmp_path / "brackets")
    for name in ("text", "empty", "cut", "brackets"):
        with pytest.raises(ValueError, match=r"write it by soframe.factors.save"):
            soframe.factors.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        soframe.factors.load(tmp_path / "none")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        soframe.factors.save(curvature, tmp_path / "factors.safetensors")


def save_on_the_first(rank: int, world_size: int, path: Path) -> None:
    curvature = soframe.Curvature(network()).fit(batches()[rank : rank + 1], loss)
    if rank == 0:
        soframe.factors.save(curvature, path)


@pytest.mark.distributed
def test_one_rank_may_save_alone(tmp_path: Path) -> None:
    run_ranks(save_on_the_first, 2, tmp_path / "factors.pt")
    loaded = soframe.factors.load(tmp_path / "factors.pt")
    curvature = soframe.Curvature(network()).fit(batches(), loss)
    whole = soframe.factors.load(soframe.factors.save(curvature, tmp_path / "whole.pt"))
    assert loaded.layers == whole.layers
    torch.testing.assert_close(dict(loaded.tensors), dict(whole.tensors), rtol=1e-12, atol=1e-14)
