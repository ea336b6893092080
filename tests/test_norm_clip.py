"""The norm clip against its closed form: alone, with the KL clip, and at a learning rate."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.clips import NormClip
from soframe.testing import compare
from tests.curvature import closing, half_square, randn
from tests.examples import examples
from tests.test_kl_clip import clip, factor_of, net, step


def length_of(p: Sequence[Tensor]) -> float:
    """The length by its definition, over parameters, whose first dimension are the outputs."""
    total = 0.0
    for update in p:
        rows = [float(row.square().sum()) for row in update]
        total += sum(rows) / len(rows)
    return total**0.5


def norm_clip(p: Sequence[Tensor], bound: float, lr: float = 1.0) -> float:
    """The factor by its definition."""
    return min(1.0, bound / (lr * length_of(p)))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    bound=st.floats(1e-6, 1e3),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    lr=st.sampled_from([0.1, 1.0, 3.0]),
)
@settings(max_examples=examples(20))
def test_closed_form(sizes: list[int], bound: float, scale: float, lr: float) -> None:
    p = [scale * torch.randn(1, n, 2, dtype=torch.float64) for n in sizes]
    factor = factor_of(NormClip(), p, p, lr, bound)
    rows = [q[0] for q in p]  # [n, 2], of one group
    compare(factor, torch.tensor(norm_clip(rows, bound, lr), dtype=torch.float64), "factor")
    assert lr * float(factor) * length_of(rows) <= bound * (1 + 1e-12)
    for one, term in zip(NormClip().terms(p, p), p, strict=True):
        compare(one, NormClip().term(term, term), "term")


@pytest.mark.parametrize("norm", [1e-4, 1e30])
@pytest.mark.parametrize("kl", [None, 1e-8, 1e30])
def test_the_stricter_clip_holds(norm: float, kl: float | None) -> None:
    plain, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)  # which no clip reads
    clips = soframe.Clips(norm_clip=norm)
    own = soframe.Preconditioner(model, kl_clip=kl, clips=clips, optimizer=optimizer)
    with closing(own), closing(soframe.Preconditioner(plain, kl_clip=None)) as unclipped:
        raw, p = step(plain, unclipped)
        _, clipped = step(model, own)
    factor = min(norm_clip(p, norm), 1.0 if kl is None else clip(raw, p, kl))
    for one, other in zip(clipped, p, strict=True):
        compare(one, factor * other, "clipped")
    if norm < 1 and kl != 1e-8:
        assert length_of(clipped) == pytest.approx(norm)


def test_a_schedule_of_the_bound() -> None:
    plain, model = net(), net()
    own = soframe.Preconditioner(
        model,
        kl_clip=None,
        clips=soframe.Clips(norm_clip=lambda n: 1e-3 / (1 + n)),
        lr=0.5,
        statistics_every=1,
    )
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    with closing(own), closing(unclipped):
        for number in range(2):
            _, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = norm_clip(p, 1e-3 / (1 + number), 0.5)
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without values: reading one would raise."""
    p = [torch.empty(1, 2, 3, device="meta"), torch.empty(2, 1, 1, device="meta")]
    factor = factor_of(NormClip(), p, p, 0.1, 1e-3)
    assert factor.is_meta
    assert factor.shape == ()


def test_zeros_stay_zero() -> None:
    zeros = [torch.zeros(1, 2, 2)]
    assert factor_of(NormClip(), zeros, zeros, 0.1, 1e-3) == 1.0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), "1", True])
def test_bounds_out_of_range(bad: Any) -> None:
    with pytest.raises(ValueError, match="norm_clip must be"):
        soframe.Preconditioner(net(), clips=soframe.Clips(norm_clip=bad))


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (0.2, 0.2)),
        ({"kl_clip": None}, (None, None)),
        ({"kl_clip": 0.4}, (0.4, None)),
        ({"clips": soframe.Clips()}, (0.2, None)),
        ({"clips": soframe.Clips(norm_clip=1.0)}, (0.2, 1.0)),
        ({"kl_clip": 0.4, "clips": soframe.Clips(norm_clip=1.0)}, (0.4, 1.0)),
    ],
)
def test_what_is_set_is_what_clips(
    options: dict[str, Any], bounds: tuple[float | None, float | None]
) -> None:
    """Left alone, both clips are on; who sets a clip gets that one."""
    with closing(soframe.Preconditioner(net(), **options)) as own:
        assert (own.kl_clip, own.norm_clip) == bounds


def test_the_default_bounds_the_first_updates() -> None:
    """Of a model whose gradients are large, and whose updates would be longer."""
    model, plain = net(), net()
    own = soframe.Preconditioner(model, damping=1e-6)
    with closing(own), closing(soframe.Preconditioner(plain, damping=1e-6, kl_clip=None)) as free:
        _, p = step(plain, free)
        _, clipped = step(model, own)
    assert length_of(p) > 1
    assert length_of(clipped) <= 0.2 * (1 + 1e-5)


STEPS = 12  # beyond the second statistics of K-FAC, and the second bases of SOAP


def moves(make: Callable[[nn.Module, float], Any], lr: float, warm_up: int = 1) -> list[Tensor]:
    """Return what each step adds to all weights, of steps that all begin at the same weights."""
    model = net()
    optimizer, own = make(model, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warm_up))
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    found = []
    for number in range(STEPS):
        nn.utils.vector_to_parameters(start.clone(), model.parameters())
        optimizer.zero_grad()
        half_square(model(randn(5, 2, 3, 3, seed=number)), randn(5, 2, seed=number)).backward()
        if own is not None:
            own.step()
        optimizer.step()
        scheduler.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    (optimizer if own is None else own).close()
    return found


def behind_sgd(model: nn.Module, lr: float) -> Any:
    """Return the README's first snippet."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optimizer, soframe.Preconditioner(model, optimizer=optimizer)


def owning(model: nn.Module, lr: float) -> Any:
    """Return the README's second snippet."""
    return soframe.Optimizer(model, lr=lr), None


@pytest.mark.parametrize("make", [behind_sgd, owning])
def test_by_default_a_step_is_in_proportion_to_its_rate(make: Callable[..., Any]) -> None:
    """Half the rate is half the step, and a warm-up warms up, with momentum and default clips."""
    full, half, warmed = moves(make, 0.1), moves(make, 0.05), moves(make, 0.1, warm_up=8)
    for number in range(STEPS):
        assert full[number].abs().max() > 1e-3
        compare(half[number], full[number] / 2, f"step {number} at half the rate")
        share = min(1.0, (number + 1) / 8)
        compare(warmed[number], full[number] * share, f"step {number} of a warm-up")
