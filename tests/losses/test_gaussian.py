"""The Gaussian likelihood with a variance: its Fisher is the mean Hessian over its targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.losses import Gaussian, Loss, SumLoss, Term
from soframe.testing import compare
from tests.curvature import randn

SHAPES = [(3, 2), (2, 2, 3), (2, 2, 2, 2)]


def likelihood(outputs: Tensor, targets: Tensor, positions: str = "mean") -> Tensor:
    """One sample's loss, by torch: ``[1, 2, ...]``."""
    mean, log = outputs.unbind(1)
    return F.gaussian_nll_loss(mean, targets, log.exp(), reduction=positions, eps=0.0)


def dense(outputs: Tensor, positions: str) -> Tensor:
    """The mean Hessian over targets ``[N, K, K]``, by quadrature, exact for polynomials."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    rows = []
    for one in outputs.split(1):
        mean, log = one.unbind(1)
        total = torch.zeros(one.numel(), one.numel(), dtype=torch.float64)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            y = mean + float(node) * (log / 2).exp()
            hessian = torch.func.hessian(lambda f, y=y: likelihood(f, y, positions))(one)
            total += float(weight) * hessian.reshape(total.shape)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("positions", ["mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_mean_hessian(shape: tuple[int, ...], positions: str) -> None:
    loss, outputs, vectors = Gaussian(positions), randn(*shape), randn(*shape, seed=2)
    expected = dense(outputs, positions)
    flat = vectors.reshape(shape[0], -1, 1)
    compare(loss.hessian_product(outputs, vectors), (expected @ flat).reshape(shape), "products")
    s = torch.stack(list(loss.half_factor(outputs))).reshape(-1, shape[0], expected.shape[1])
    compare(torch.einsum("kni,knj->nij", s, s), expected, "half-factor")
    v = loss.sample(outputs.repeat_interleave(40000, 0), torch.Generator().manual_seed(0))
    v = v.reshape(shape[0], 40000, -1)
    moment = torch.einsum("nsi,nsj->nij", v, v) / 40000
    assert float((moment - expected).norm() / expected.norm()) < 0.03
    assert loss.means is (positions == "mean")


@example(outputs=[(0.0, 0.0)], away=1e6, factor=1.0, positions="mean")
@given(
    outputs=st.lists(st.tuples(st.floats(-3, 3), st.floats(-8, 8)), min_size=1, max_size=5),
    away=st.floats(-1e6, 1e6),
    factor=st.floats(1e-3, 1e3),
    positions=st.sampled_from(["mean", "sum"]),
)
def test_gradients_tell_what_a_term_counts(
    outputs: list[tuple[float, float]], away: float, factor: float, positions: str
) -> None:
    """However far targets are: from some distance on one form of the root would be all rounding."""
    f = torch.tensor(outputs, dtype=torch.float64).T.unsqueeze(0).requires_grad_()
    mean, log = f.detach().unbind(1)
    y = mean + away * (log / 2).exp()
    (gradient,) = torch.autograd.grad(factor * likelihood(f, y, positions), f)
    found = Gaussian(positions).counts(f.detach(), gradient)
    assert found.shape == (1, 1, len(outputs))
    torch.testing.assert_close(found, torch.full_like(found, factor), rtol=1e-9, atol=0.0)


def test_in_single_precision_and_where_a_term_is_left_out() -> None:
    f = torch.tensor([[0.3, -2.0], [0.1, 1.0], [0.2, 0.5]], requires_grad=True)
    y = torch.tensor([40.0, 0.1, 3.0])
    mask = torch.tensor([1.0, 2.0, 0.0])
    each = F.gaussian_nll_loss(f[:, 0], y, f[:, 1].exp(), reduction="none", eps=0.0)
    (gradient,) = torch.autograd.grad((mask * each).sum(), f)
    found = Gaussian().counts(f.detach(), gradient)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[:, 0], mask.double(), rtol=1e-5, atol=0.0)


def test_what_has_no_mean_and_log_variance_is_refused() -> None:
    for shape in ((3,), (3, 3), (3, 1, 2)):
        with pytest.raises(ValueError, match=r"\[N, 2, ...\], a mean and a log-variance, not"):
            Gaussian().hessian_product(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(ValueError, match="Gaussian: positions must be 'mean' or 'sum'"):
        Gaussian("both")  # type: ignore[arg-type]


def test_a_sum_says_that_a_term_is_expected_and_others_are_not() -> None:
    assert Gaussian().expected
    assert SumLoss([Term("mse", slice(2, None)), Term("gaussian", slice(0, 2))]).expected
    assert not SumLoss([Term("mse")]).expected

    class Own(Gaussian):
        counts = Loss.counts

    with pytest.raises(
        NotImplementedError, match=r"Own.expected is true, so it needs a method counts"
    ):
        Own().counts(torch.zeros(1, 2), torch.zeros(1, 2))


def test_factors_of_the_type_2_fisher() -> None:
    """One sample is what K-FAC is exact for: its block is that of the dense Fisher."""
    model, x = nn.Linear(3, 2).double(), randn(1, 3)
    own = soframe.Preconditioner(
        model,
        statistics=soframe.Statistics(fisher="type-2", loss="gaussian"),
        kl_clip=None,
        statistics_every=1,
        decay=0.0,
    )
    outputs = model(x)
    own.observe(outputs)
    likelihood(outputs, randn(1)).backward()
    own.step()
    (block,) = own.blocks
    a, g = (block.running.matrix(factor)[0] for factor in block.factors)
    inputs = torch.cat([x, torch.ones(1, 1).double()], 1)
    compare(a, inputs.T @ inputs, "A")
    compare(g, dense(outputs.detach(), "mean")[0], "G")
