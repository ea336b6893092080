"""`clip_lr="initial"`: a clipped step follows the schedule of the learning rate."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.testing import compare
from tests.curvature import closing
from tests.trust_region.test_kl_clip import clip, net, step
from tests.trust_region.test_norm_clip import norm_clip

RATES = [0.4, 0.2, 0.7]


def by_hand(group: dict[str, Any], rate: float) -> None:
    group["lr"] = rate


def in_place(group: dict[str, Any], rate: float) -> None:
    group["lr"].fill_(rate)


BOUNDS: list[dict[str, Any]] = [{"kl_clip": 1e-5}, {"kl_clip": None, "norm_clip": 1e-3}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=["kl", "norm"])
@pytest.mark.parametrize(
    ("number", "assign"),
    [(float, by_hand), (lambda lr: torch.tensor(lr, dtype=torch.float64), in_place)],
    ids=["number", "tensor"],
)
def test_the_factor_is_that_of_the_first_rate(
    bounds: dict[str, Any], number: Any, assign: Callable[[dict[str, Any], float], None]
) -> None:
    plain, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=number(0.4))
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, optimizer=optimizer, clip_lr="initial", statistics_every=1, **bounds
    )
    lengths = []
    with closing(unclipped), closing(own):
        for index, rate in enumerate(RATES):
            assign(optimizer.param_groups[0], rate)
            raw, p = step(plain, unclipped, index)
            _, clipped = step(model, own, index)
            if bounds["kl_clip"]:
                # The same as the live rate with a bound that follows its square.
                factor = clip(raw, p, [0.4] * 4, 1e-5)
                assert factor == pytest.approx(clip(raw, p, [rate] * 4, 1e-5 * (rate / 0.4) ** 2))
            else:
                factor = norm_clip(p, [0.4] * 4, 1e-3)
                assert factor == pytest.approx(norm_clip(p, [rate] * 4, 1e-3 * rate / 0.4))
            assert factor < 1
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {index}")
            lengths.append(sum(float((rate * q).square().sum()) for q in clipped) ** 0.5)
    if bounds["kl_clip"] is None:
        assert lengths == pytest.approx([1e-3 * rate / 0.4 for rate in RATES])


def test_schedulers_say_what_they_began_with() -> None:
    """Whenever they were made: their warm-up has lowered the rate before the first look."""
    model, plain = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.1 + n)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    own = soframe.Preconditioner(model, kl_clip=1e-6, optimizer=optimizer, clip_lr="initial")
    with closing(own), closing(soframe.Preconditioner(plain, kl_clip=None)) as unclipped:
        raw, p = step(plain, unclipped)
        _, clipped = step(model, own)
    factor = clip(raw, p, [0.4] * 4, 1e-6)
    for one, other in zip(clipped, p, strict=True):
        compare(one, factor * other, "clipped")


def test_a_schedule_without_an_optimizer() -> None:
    model, plain = net(), net()
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, kl_clip=1e-6, lr=lambda n: RATES[n], clip_lr="initial", statistics_every=1
    )
    with closing(own), closing(unclipped):
        for number in range(2):
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = clip(raw, p, [0.4] * 4, 1e-6)
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


@pytest.mark.parametrize("as_tensor", [True, False])
def test_resumed_with_an_optimizer_that_has_the_rate_of_then(as_tensor: bool) -> None:
    def begin(model: Any, lr: float) -> tuple[Any, soframe.Preconditioner]:
        rate: Any = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        own = soframe.Preconditioner(
            model, kl_clip=1e-6, optimizer=optimizer, clip_lr="initial", statistics_every=1
        )
        return optimizer, own

    found: list[list[Tensor]] = []
    for resumed in (False, True):
        model = net()
        optimizer, own = begin(model, 0.4)
        step(model, own, 0)
        optimizer.param_groups[0]["lr"] = 0.1
        if resumed:
            file = io.BytesIO()
            torch.save(own.state_dict(), file)
            file.seek(0)
            own.close()
            optimizer, own = begin(model, 0.1)
            own.load_state_dict(torch.load(file, weights_only=True))
        found.append(step(model, own, 1)[1])
        own.close()
    assert all(map(torch.equal, *found))


def test_groups_that_come_later_begin_later() -> None:
    model, plain = net(), net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.4)
    own = soframe.Preconditioner(
        model, kl_clip=1e-6, optimizer=optimizer, clip_lr="initial", skip=["^3$"]
    )
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 5.0})
    with closing(own), closing(soframe.Preconditioner(plain, kl_clip=None, skip=["^3$"])) as other:
        raw, p = step(plain, other)
        _, clipped = step(model, own)
    factor = clip(raw[:2], p[:2], [0.4] * 2, 1e-6)
    for one, two in zip(clipped[:2], p[:2], strict=True):
        compare(one, factor * two, "clipped")
    assert own.state_dict()["initial_lrs"] == [0.4, 5.0]


def test_live_is_the_default_and_other_words_are_refused() -> None:
    with closing(soframe.Preconditioner(net(), lr=0.1)) as own:
        assert own.state_dict()["initial_lrs"] == []
    with pytest.raises(ValueError, match="clip_lr must be one of 'live', 'initial', not 'first'"):
        soframe.Preconditioner(net(), lr=0.1, clip_lr="first")  # type: ignore[arg-type]
