"""`clip_lr="initial"`: a clipped step follows the schedule of the learning rate."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as torch_lr

import soframe
from soframe.settings import grouped
from soframe.testing import compare
from tests.curvature import closing
from tests.examples import examples
from tests.test_kl_clip import clip, net, step
from tests.test_norm_clip import norm_clip

RATES = [0.4, 0.2, 0.3]
LOWERED = [0.3, 0.2, 0.25]
"""Below the 0.4 that an optimizer is built with, from the first step on."""


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
@pytest.mark.parametrize("by_default", [{}, {"clip_lr": "initial"}], ids=["default", "initial"])
def test_the_factor_is_that_of_the_first_rate(
    bounds: dict[str, Any],
    number: Any,
    assign: Callable[[dict[str, Any], float], None],
    by_default: dict[str, Any],
) -> None:
    plain, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=number(0.4))
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, optimizer=optimizer, statistics_every=1, **grouped({**by_default, **bounds})
    )
    lengths = []
    with closing(unclipped), closing(own):
        for index, rate in enumerate(LOWERED):
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
        assert lengths == pytest.approx([1e-3 * rate / 0.4 for rate in LOWERED])


def test_schedulers_say_what_they_began_with() -> None:
    """Whenever they were made: their warm-up has lowered the rate before the first look."""
    model, plain = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.1 + n)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    own = soframe.Preconditioner(
        model, kl_clip=1e-6, optimizer=optimizer, clips=soframe.Clips(clip_lr="initial")
    )
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
        model,
        kl_clip=1e-6,
        lr=lambda n: RATES[n],
        clips=soframe.Clips(clip_lr="initial"),
        statistics_every=1,
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
            model,
            kl_clip=1e-6,
            optimizer=optimizer,
            clips=soframe.Clips(clip_lr="initial"),
            statistics_every=1,
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
        model,
        kl_clip=1e-6,
        optimizer=optimizer,
        clips=soframe.Clips(clip_lr="initial"),
        skip=["^3$"],
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


# -- schedules that begin below their peak -----------------------------------------------------


def warm(optimizer: Any, steps: int) -> Any:
    return torch_lr.LinearLR(optimizer, start_factor=0.1, total_iters=steps)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch_lr.OneCycleLR(o, max_lr=0.8, total_steps=12),
    "one cycle of three": lambda o: torch_lr.OneCycleLR(
        o, max_lr=0.8, total_steps=12, three_phase=True
    ),
    "linear": lambda o: warm(o, 4),
    "sequential": lambda o: torch_lr.SequentialLR(
        o, [warm(o, 3), torch_lr.CosineAnnealingLR(o, 8)], [3]
    ),
    "chained": lambda o: torch_lr.ChainedScheduler([warm(o, 3), torch_lr.ExponentialLR(o, 0.9)]),
    "lambda": lambda o: torch_lr.LambdaLR(o, lambda n: min(1.0, 0.2 * n)),
    "lambda above one": lambda o: torch_lr.LambdaLR(o, lambda n: 1.0 + 3 * n * (n < 5)),
    "restarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: torch_lr.CyclicLR(o, 0.01, 0.8, step_size_up=3, cycle_momentum=False),
    "multiplicative": lambda o: torch_lr.MultiplicativeLR(o, lambda n: 1.5 if n < 6 else 0.5),
    "step": lambda o: torch_lr.StepLR(o, 3),
    "none": lambda o: None,
}
PEAKS = {"one cycle": 0.8, "one cycle of three": 0.8} | dict.fromkeys(
    ("linear", "sequential", "chained", "lambda", "restarts", "step"), 0.4
)
"""What is known before the first step."""

KAPPA = 1e-5


def clipped_steps(
    name: str,
    *,
    as_tensor: bool = False,
    after: bool = False,
    resumed_at: int | None = None,
    jumps: dict[int, float] | None = None,
) -> list[tuple[float, float, float]]:
    """Train; returns the live rate, the factor and the squared length without it of each step."""

    def begin(model: Any, lr: float) -> tuple[Any, Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=number(lr))
        scheduler = None if after else SCHEDULERS[name](optimizer)
        options: Any = {"optimizer": optimizer, "clip_lr": "initial", "statistics_every": 1}
        own = soframe.Preconditioner(model, kl_clip=KAPPA, **grouped(options))
        return optimizer, SCHEDULERS[name](optimizer) if after else scheduler, own

    def number(lr: float) -> Any:
        return torch.tensor(lr, dtype=torch.float64) if as_tensor else lr

    plain, model = net(), net()
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    optimizer, scheduler, own = begin(model, 0.4)
    found = []
    for index in range(12):
        if index == resumed_at:
            file = io.BytesIO()
            schedule = None if scheduler is None else scheduler.state_dict()
            torch.save([own.state_dict(), optimizer.state_dict(), schedule], file)
            file.seek(0)
            own.close()
            optimizer, scheduler, own = begin(model, 0.4)
            saved = torch.load(file, weights_only=False)  # torch's schedulers have classes within
            own.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            if scheduler is not None:
                scheduler.load_state_dict(saved[2])
        if index in (jumps or {}):
            optimizer.param_groups[0]["lr"] = number((jumps or {})[index])
        raw, p = step(plain, unclipped, index)
        _, clipped = step(model, own, index)
        rate = float(optimizer.param_groups[0]["lr"])
        square = sum(float((a * b).sum()) for a, b in zip(raw, p, strict=True))
        factor = sum(float((a * b).sum()) for a, b in zip(raw, clipped, strict=True)) / square
        found.append((rate, factor, square))
        optimizer._opt_called = True  # weights stay, so that every step is known
        if scheduler is not None and index < 11:
            scheduler.step()
    unclipped.close()
    own.close()
    return found


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(SCHEDULERS)),
    as_tensor=st.booleans(),
    after=st.booleans(),
    resumed_at=st.none() | st.integers(0, 11),
    jumps=st.dictionaries(st.integers(0, 11), st.floats(0.0, 10.0), max_size=2),
)
@settings(max_examples=examples(25))
def test_no_step_is_longer_than_the_bound(name: str, **how: Any) -> None:
    """Whatever the scheduler and its peak, wherever it was made, and whoever changes rates."""
    largest = 0.0
    for rate, factor, square in clipped_steps(name, **how):
        largest = max(largest, rate)
        assert rate**2 * factor**2 * square <= KAPPA * (1 + 1e-6)
        # Never less strict than the largest rate so far asks for; nor stricter than any peak.
        assert factor <= min(1.0, (KAPPA / square) ** 0.5 / max(largest, 1e-9)) * (1 + 1e-6)
        known = max(largest, PEAKS.get(name, 0.0), 0.4, *how["jumps"].values(), 4.0 * 1.6)
        assert factor >= min(1.0, (KAPPA / square) ** 0.5 / known) * (1 - 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.covering(together=1)
def test_the_bound_holds_at_the_peak_of_a_schedule(name: str, after: bool) -> None:
    """So that a warm-up makes shorter steps, though the schedule does not begin at its peak."""
    for rate, factor, square in clipped_steps(name, after=after):
        length = (rate * factor) ** 2 * square
        assert length == pytest.approx(KAPPA * (rate / PEAKS[name]) ** 2, rel=1e-6)


def test_a_rate_that_stood_in_before_the_scheduler_was_made_is_no_peak() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    own = soframe.Preconditioner(
        model, kl_clip=KAPPA, optimizer=optimizer, clips=soframe.Clips(clip_lr="initial")
    )
    torch_lr.OneCycleLR(optimizer, max_lr=0.8, total_steps=12)
    with closing(own):
        step(model, own)
        assert own.state_dict()["initial_lrs"] == [0.8]


@pytest.mark.slow
@pytest.mark.parametrize("resumed_at", [3, 5, 8])
@pytest.mark.parametrize("name", ["cyclic", "one cycle", "lambda above one", "multiplicative"])
@pytest.mark.covering(together=1)
def test_the_largest_rate_so_far_is_resumed(name: str, resumed_at: int) -> None:
    whole, again = clipped_steps(name), clipped_steps(name, resumed_at=resumed_at)
    assert sum(again, ()) == pytest.approx(sum(whole, ()))


def test_a_schedule_that_warms_up_without_an_optimizer() -> None:
    """The same after a resume, which asks the schedule itself for what it was."""
    rates = [0.1, 0.8, 0.2, 0.05]

    def begin(model: Any) -> soframe.Preconditioner:
        options: Any = {"lr": lambda n: rates[n], "clip_lr": "initial", "statistics_every": 1}
        return soframe.Preconditioner(model, kl_clip=KAPPA, **grouped(options))

    plain, model = net(), net()
    own = begin(model)
    with closing(soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)) as unclipped:
        for number, peak in enumerate([0.1, 0.8, 0.8, 0.8]):
            if number == 2:
                saved = own.state_dict()
                own.close()
                own = begin(model)
                own.load_state_dict(saved)
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            for one, other in zip(clipped, p, strict=True):
                compare(one, clip(raw, p, [peak] * 4, KAPPA) * other, f"step {number}")
    own.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_that_were_merged_since_have_what_their_scheduler_recorded(groups: int) -> None:
    """As many groups as were saved have the saved references."""

    def optimizer_of(model: nn.Sequential, count: int) -> torch.optim.Optimizer:
        parts = [list(model[i].parameters()) for i in (0, 3)]
        parts = parts if count == 2 else [parts[0] + parts[1]]
        return torch.optim.SGD([{"params": part, "lr": 0.4} for part in parts])

    model, plain = net(), net()
    with closing(
        soframe.Preconditioner(model, kl_clip=KAPPA, optimizer=optimizer_of(model, 2))
    ) as own:
        step(model, own)
        saved = own.state_dict()
    optimizer = optimizer_of(model, groups)
    for group in optimizer.param_groups:
        group.update(lr=0.1, initial_lr=0.3)
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    again = soframe.Preconditioner(model, kl_clip=KAPPA, optimizer=optimizer)
    with closing(again), closing(unclipped):
        again.load_state_dict(saved)
        for one in range(2):  # the loaded statistics and data are of the first step
            raw, p = step(plain, unclipped, 0)
            if one == 0:
                _, clipped = step(model, again, 0)
    reference = 0.4 if groups == 2 else 0.3
    for one_tensor, other in zip(clipped, p, strict=True):
        compare(one_tensor, clip(raw, p, [reference] * 4, KAPPA) * other, "clipped")


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("how", ["reverse", "split", "merge"])
def test_references_follow_groups_that_are_edited(how: str, resumed: bool) -> None:
    """An edit that leaves every parameter its rate changes no factor, also in a resumed run."""

    def begin(model: nn.Module) -> soframe.Optimizer:
        parts = [model[0].weight], [model[0].bias], list(model[3].parameters())
        groups = [
            {"params": part, "lr": lr} for part, lr in zip(parts, (0.5, 0.5, 0.01), strict=True)
        ]
        every = {"statistics_every": 1, "solve_every": 1, "kl_clip": 1e-3}
        return soframe.Optimizer(model, "kfac", lr=0.1, param_groups=groups, **every)

    def edit(groups: list[dict[str, Any]]) -> None:
        first, second, third = groups
        if how == "reverse":
            groups.reverse()
        elif how == "merge":
            first["params"] += second["params"]
            groups.remove(second)
        else:
            groups.append({**third, "params": third["params"][1:]})
            del third["params"][1:]

    found = []
    for edits in (False, True):
        model = net()
        own, factors = begin(model), []
        for number in range(5):
            for group in own.param_groups if number else ():
                group["lr"] *= 0.7
            if edits and number == 2:
                edit(own.param_groups)
            if edits and resumed and number in (2, 3):
                saved = own.state_dict()
                own.close()
                own = begin(model)
                own.load_state_dict(saved)
            step(model, own, number)
            factors.append(own.metrics()["kl_clip_factor"])
        own.close()
        found.append(factors)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="clip_lr must be one of 'live', 'initial', not 'first'"):
        soframe.Preconditioner(net(), lr=0.1, clips=soframe.Clips(clip_lr="first"))  # type: ignore[arg-type]
