"""NorMuon against its definition, written out anew in NumPy; chains that end as Muon does."""

import functools
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import (
    FOOF,
    KFAC,
    SOAP,
    Chain,
    KFACMuon,
    MatchRMS,
    Momentum,
    Muon,
    NewtonMuon,
    NormaliseRows,
    NorMuon,
    Orthogonalise,
    SOAPMuon,
    SOAPNorMuon,
)
from soframe.methods.base import Given
from soframe.methods.soap import independent_rms
from soframe.solvers import Eigen
from soframe.testing import compare
from tests.curvature import closing, randn
from tests.methods import stages


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(4, 3), (3, 5), (1, 4)], ids=str)
def test_rows(shape: tuple[int, int], beta: float) -> None:
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False)).double()
    squares = np.zeros(shape[0])
    with closing(stages.preconditioner(model, NormaliseRows(beta))) as own:
        for step in range(5):
            gradient = randn(*shape, seed=step)
            model[0].weight.grad = gradient.clone()
            own.step()
            x = gradient.numpy()
            squares = beta * squares + (1 - beta) * (x**2).mean(axis=1)
            y = x / (np.sqrt(squares)[:, None] + 1e-8)
            y *= np.sqrt((x**2).sum() / (y**2).sum())
            compare(model[0].weight.grad, torch.from_numpy(y), f"step {step}", rtol=1e-12)


MOMENTUM = Momentum(0.95, nesterov=True)


def first(gradient: Tensor, rows: Tensor) -> Given:
    """What the stage is given at its first update."""
    return Given(
        gradient=gradient,
        incoming=gradient,
        data={},
        state={"rows": rows},
        updates=0,
        solver=Eigen(),
        damping=0.1,
    )


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_norms_stay_and_rows_have_one_size_at_first(scale: float, seed: int) -> None:
    gradient = scale * randn(2, 3, 4, seed=seed)
    method = NormaliseRows(0.5)
    (spec,) = method.state(BlockShape(2, 3, 4)).values()
    made = method.direct(first(gradient, torch.zeros(spec.shape).double()))
    norms = [torch.linalg.matrix_norm(one) for one in (made.matrix, gradient)]
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
    sizes = made.matrix.square().mean(-1)
    torch.testing.assert_close(sizes, sizes[:, :1].expand(2, 3), rtol=1e-5 / min(scale, 1), atol=0)


def test_zero_rows_stay_zero() -> None:
    method = NormaliseRows()
    assert not method.direct(first(torch.zeros(1, 2, 3), torch.zeros(1, 2, 1))).matrix.any()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            NorMuon(0.9, nesterov=False, row_beta=0.8, scale="rms", steps=3),
            (Momentum(0.9, False), Orthogonalise(3), NormaliseRows(0.8), MatchRMS("rms")),
        ),
        (
            Muon(dtype="float32"),
            (MOMENTUM, Orthogonalise(dtype="float32"), MatchRMS()),
        ),
        (KFACMuon(), (KFAC(), MOMENTUM, Orthogonalise(), MatchRMS())),
        (NewtonMuon(), (FOOF(), MOMENTUM, Orthogonalise(), MatchRMS())),
        (
            SOAPNorMuon(0.95, max_ratio=4.0, steps=5),
            (
                MOMENTUM,
                SOAP(betas=(0.0, 0.95), skip_first=False, max_ratio=4.0),
                Orthogonalise(full_rms=independent_rms(0.95)),
                NormaliseRows(),
                MatchRMS(),
            ),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_chains(method: Chain, expected: tuple[Any, ...]) -> None:
    assert method.stages == expected
    assert type(method).__name__ in repr(method)
    assert SOAPMuon().stages == tuple(
        stage for stage in SOAPNorMuon().stages if not isinstance(stage, NormaliseRows)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"beta": 1.0}, "NormaliseRows: beta"), ({"eps": 0.0}, "NormaliseRows: eps")],
    ids=str,
)
def test_settings_out_of_range(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormaliseRows(**wrong)


def test_it_leaves_what_muon_leaves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = soframe.Optimizer(model, "normuon", lr=0.02)
    taken = {b.name for b in optimizer.preconditioner.blocks if not b.auxiliary}
    assert taken == {"0.weight"}
    optimizer.close()


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_normuon_is_pytorch_optimizers() -> None:
    from pytorch_optimizer import NorMuon as Peer

    peer = functools.partial(Peer, update_scale="preserve_norm")
    stages.check_peer(NorMuon(dtype="bfloat16"), peer)
