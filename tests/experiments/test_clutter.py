"""Cluttered digits: the same every time, balanced, and held-out digits in held-out images alone."""

from __future__ import annotations

import pytest
import torch

from soframe.experiments import clutter
from soframe.experiments.workloads import workload


@pytest.mark.slow
def test_images_are_the_same_every_time_and_however_many_are_made() -> None:
    make = clutter.cluttered_digits.__wrapped__  # not what the cache has
    first, again, more = make(30, 10), make(30, 10), make(1040, 10)
    assert first.train.inputs.shape == (30, 3, 32, 32)
    assert first.train.inputs.dtype == torch.uint8
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.train.inputs, more.train.inputs[:30])
    assert not torch.equal(more.train.inputs[:40], more.train.inputs[1000:])  # chunks differ
    assert not torch.equal(first.train.inputs[:10], first.test.inputs)
    other = make(30, 10, seed=1)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert not torch.equal(other.train.inputs[:10], first.test.inputs)


@pytest.mark.slow
def test_held_out_images_have_random_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pool for both sets, images differ all the same."""
    trained, _ = clutter.pools()
    monkeypatch.setattr(clutter, "pools", lambda: (trained, trained))
    data = clutter.cluttered_digits.__wrapped__(10, 10)
    assert torch.equal(data.train.targets, data.test.targets)
    same = (data.train.inputs == data.test.inputs).float().mean()
    assert same < 0.1


def test_the_caller_s_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    clutter.cluttered_digits.__wrapped__(10, 10)
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 1995])
def test_there_are_as_many_of_each_class(count: int) -> None:
    data = clutter.cluttered_digits(count, 200)
    counts = torch.bincount(data.train.targets, minlength=10)
    assert int(counts.sum()) == count
    assert int(counts.max() - counts.min()) <= 1
    assert torch.bincount(data.test.targets).tolist() == [20] * 10


def test_no_digit_is_in_both_pools() -> None:
    trained, tested = clutter.pools()
    assert (len(trained.images), len(tested.images)) == (1438, 359)
    # The digits of scikit-learn are all different, so that equal pixels mean an equal digit.
    seen = {tuple(image.flatten().tolist()) for image in trained.images}
    assert len(seen) == 1438
    assert not any(tuple(image.flatten().tolist()) in seen for image in tested.images)


def test_each_set_draws_from_its_own_pool_its_clutter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, tested = clutter.pools()
    blank = clutter.Pool(torch.zeros_like(tested.images), tested.classes)
    monkeypatch.setattr(clutter, "NOISE", 0.0)
    monkeypatch.setattr(clutter, "pools", lambda: (trained, blank))
    data = clutter.cluttered_digits.__wrapped__(10, 10)
    # Without ink there is the dark background alone; with it there are bright pixels.
    assert int(data.test.inputs.max()) <= 255 * clutter.DARK + 1
    assert int(data.train.inputs.flatten(1).max(dim=1).values.min()) > 255 * clutter.DARK


def test_images_show_the_digit_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools in which a digit's ink says its class: the brightest pixel tells it again."""
    classes = torch.arange(10).repeat(3)
    ink = (classes.float() + 1) / 10
    pool = clutter.Pool(ink.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone(), classes)
    monkeypatch.setattr(clutter, "NOISE", 0.0)
    monkeypatch.setattr(clutter, "FRAGMENTS", 0)
    monkeypatch.setattr(clutter, "DARK", 0.0)
    monkeypatch.setattr(clutter, "BRIGHT", 1.0)
    monkeypatch.setattr(clutter, "pools", lambda: (pool, pool))
    data = clutter.cluttered_digits.__wrapped__(40, 10)
    brightest = data.train.inputs.flatten(1).max(dim=1).values.float() / 255
    assert torch.equal((brightest * 10).round().long() - 1, data.train.targets)


def test_a_workload_may_be_smaller() -> None:
    whole, small = workload("cluttered-digits"), workload("cluttered-digits:50")
    assert (whole.name, small.name) == ("cluttered-digits", "cluttered-digits:50")
    assert workload("cluttered-digits:50000").name == whole.name
    data = small.data(0, torch.float32)
    assert (len(data.train), len(data.test)) == (50, 10)
    for name in ("cluttered-digits:", "cluttered-digits:0", "cluttered-digits:x", "curves:10"):
        with pytest.raises(ValueError, match=f"no workload '{name}'"):
            workload(name)
