"""Layers with one input: their common moment is computed once, and is each one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import soframe
from soframe.kernels.gram import mirror
from soframe.layers import Conv2dHelper, LinearHelper
from soframe.layers.base import LayerHelper, moment
from soframe.layers.sharing import SharedInputs
from soframe.methods.base import Call
from soframe.testing import compare
from tests.curvature import blocks, closing, fill, preconditioner, randn


class Attention(nn.Module):
    """Three layers with one input; the last has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 2), nn.Linear(3, 4)
        self.v, self.twin = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.q(2 * x).mT).softmax(-1) + self.k(x).mean()
        return self.out(weights @ (self.v(x) + self.twin(x)))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[LayerHelper]:
    """The helpers whose inputs' moment was really computed."""
    found: list[LayerHelper] = []
    for kind in (LinearHelper, Conv2dHelper):
        plain = kind.input_moment

        def spy(self: LayerHelper, *args: Any, plain: Any = plain) -> Tensor:
            found.append(self)
            return plain(self, *args)

        monkeypatch.setattr(kind, "input_moment", spy)
    return found


@pytest.mark.parametrize("passes", [1, 2])
def test_factors_are_those_of_layers_of_their_own(
    passes: int, monkeypatch: pytest.MonkeyPatch, computed: list[LayerHelper]
) -> None:
    results, counts = [], []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(LinearHelper, "input_key", lambda self: None)
        model = fill(Attention())
        computed.clear()
        with closing(preconditioner(model)) as own:
            for seed in range(passes):
                model(randn(2, 5, 3, seed=seed)).square().mean().backward()
            own.step()
            results.append({n: dict(b.running) for n, b in blocks(own).items()})
        counts.append(len(computed))
    for name, own_factors in results[0].items():
        for factor, tensor in own_factors.items():
            compare(tensor, results[1][name][factor], f"{name}: {factor}", rtol=1e-12)
    assert counts[1] == 6 * passes
    # Of one pass: out, v with its twin, q of 2 x, k or q of x. Sums of several are not taken over.
    assert counts[0] <= (5 if passes == 1 else 11)


def helper(**options: Any) -> LinearHelper:
    return LinearHelper(fill(nn.Linear(3, 2, **options)))


def add(shared: SharedInputs, own: LayerHelper, x: Tensor, total: Any = None, scale: float = 1.0):
    rows = own.output_rows(randn(len(x), 2))
    fresh = total is None or not total.any()
    return shared.add(own, (x,), rows, total, scale, fresh=fresh)


def test_a_sum_is_taken_over_with_another_scale(computed: list[LayerHelper]) -> None:
    shared, x = SharedInputs(), randn(4, 3)
    first = add(shared, helper(), x, scale=0.5)
    before = first.clone()
    second = add(shared, helper(), x.detach(), scale=2.0)
    onto = torch.ones(1, 4, 4, dtype=torch.float64)
    third = add(shared, helper(), x, onto, 3.0)
    assert third is onto
    assert len(computed) == 1
    rows = torch.cat([x, torch.ones(4, 1)], 1)
    compare(mirror(second)[0], 2 * rows.T @ rows, "taken over", rtol=1e-12)
    compare(mirror(third)[0], 1 + 3 * rows.T @ rows, "added", rtol=1e-12)
    assert torch.equal(first, before)


def test_slices_of_one_stack_share_a_sum(computed: list[LayerHelper]) -> None:
    shared, x = SharedInputs(), randn(4, 3)
    stack = torch.zeros(3, 4, 4, dtype=torch.float64)
    for number, scale in enumerate((0.5, 2.0, 3.0)):
        add(shared, helper(), x, stack[number : number + 1], scale)
    assert len(computed) == 1
    # A second call of the first layer: its sum is that of one call no longer.
    add(shared, helper(), x, stack[:1], 1.0)
    add(shared, helper(), x, stack[1:2], 1.0)
    assert len(computed) == 2
    rows = torch.cat([x, torch.ones(4, 1)], 1)
    expected = torch.tensor([1.5, 3.0, 3.0]).view(3, 1, 1) * (rows.T @ rows)
    compare(mirror(stack), expected, "slices", rtol=1e-12)


def test_what_is_not_the_same_is_computed(computed: list[LayerHelper]) -> None:
    x = randn(4, 3)

    def input_changes(shared: SharedInputs, first: Tensor) -> tuple[LayerHelper, Tensor]:
        x.mul_(2)
        return helper(), x

    def sum_changes(shared: SharedInputs, first: Tensor) -> tuple[LayerHelper, Tensor]:
        first.mul_(2)
        return helper(), x

    for make in (
        input_changes,
        sum_changes,
        lambda *_: (helper(bias=False), x),
        lambda *_: (helper(), x.clone()),
        lambda *_: (helper(), x[:2]),
        lambda *_: (helper(), x.view(-1)[:9].view(3, 3).T),
    ):
        shared = SharedInputs()
        first = add(shared, helper(), x)
        computed.clear()
        own, other = make(shared, first)
        total = add(shared, own, other)
        assert len(computed) == 1, make
        rows = own.output_rows(randn(len(other), 2))
        compare(mirror(total), moment(own.block_rows((other,), rows)), "its own", rtol=1e-12)


def test_the_input_is_not_kept(computed: list[LayerHelper]) -> None:
    """Nor is another that lies where it lay taken for it."""
    buffer = np.empty((4, 3))
    shared = SharedInputs()
    helpers = [helper() for _ in range(20)]
    expired = []
    for number, own in enumerate(helpers):
        buffer[:] = number
        x = torch.from_numpy(buffer)
        add(shared, own, x)
        memory = StorageWeakRef(x.untyped_storage())
        del x
        expired.append(memory.expired())
        del memory
    assert all(expired)
    assert len(computed) == 20


def test_convolutions_of_one_image(computed: list[LayerHelper]) -> None:
    shared, x = SharedInputs(), randn(2, 2, 5, 5)
    for options, new in [({}, 1), ({}, 0), ({"padding": 1}, 1), ({"stride": 2}, 1)]:
        conv = fill(nn.Conv2d(2, 2, 3, **options))
        own = Conv2dHelper(conv)
        rows = own.output_rows(conv(x))
        computed.clear()
        total = shared.add(own, (x,), rows, None, 1.0, fresh=True)
        assert len(computed) == new, options
        expected = moment(own.block_rows((x,), rows))
        compare(mirror(total.clone()), expected, str(options), rtol=1e-12)


@pytest.mark.usefixtures("computed")  # few rows of a plain moment are copied instead
def test_nothing_is_held_between_steps() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with closing(preconditioner(model)) as own:
        model(randn(2, 5, 3)).square().mean().backward()
        assert own.curvature.statistics.window.shared._known is not None
        own.step()
        assert own.curvature.statistics.window.shared._known is None


@pytest.mark.parametrize(
    ("module", "kind", "shape"),
    [
        (nn.Linear(3, 5), LinearHelper, (4, 6, 3)),
        (nn.Linear(3, 5, bias=False), LinearHelper, (4, 3)),
        (nn.Conv2d(2, 3, (2, 3)), Conv2dHelper, (4, 2, 5, 6)),
    ],
    ids=str,
)
def test_inputs_of_another_precision_than_the_gradients(
    module: nn.Module, kind: Any, shape: tuple[int, ...]
) -> None:
    """Their moment needs the shape of the output gradients, and no copy of their values."""
    helper, x = kind(module), torch.randn(shape)
    rows = helper.output_rows(torch.full_like(module(x), torch.nan, dtype=torch.bfloat16))
    plain = Call(helper=helper, inputs=(x,), rows=rows, dtype=torch.float32)
    found = replace(plain, widens=True).input_moment()
    assert found.dtype == torch.float32
    compare(mirror(found), mirror(plain.input_moment()), "inputs", rtol=1e-6)


class Scaled(LinearHelper):
    """Its inputs are multiplied by a number of the module, which `input_key` does not know."""

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs) * self.module.scale


class Keyed(Scaled):
    """The same, with a key that knows the number."""

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs)

    def input_key(self) -> Any:
        return LinearHelper.input_key(self), self.module.scale


@pytest.mark.parametrize("helper", [Scaled, Keyed])
def test_a_subclass_with_other_rows_shares_no_moment_by_the_key_of_its_base(helper: Any) -> None:
    x, rows = randn(5, 3), randn(1, 5, 1, 2)
    shared, found = SharedInputs(), []
    for scale in (1.0, 3.0):
        module = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        module.scale = scale  # type: ignore[assignment]
        found.append(shared.add(helper(module), (x,), rows, None, 1.0, fresh=True).clone())
    compare(mirror(found[1]), 9 * mirror(found[0]), "the second layer's", rtol=1e-12)
    assert (helper(module).input_key() is None) == (helper is Scaled)


def test_soframe_s_own_helpers_share_moments_where_they_say_so() -> None:
    keyed = {name for name, helper in vars(soframe.layers).items() if has_key(helper)}
    convolutions = {f"Conv{kind}{n}dHelper" for kind in ("", "Transpose") for n in (1, 2, 3)}
    embeddings = {"EmbeddingHelper", "EmbeddingBagHelper"}  # whose own key is None
    assert keyed == {"LinearHelper", "TransposedLinearHelper", *convolutions, *embeddings}


def has_key(helper: object) -> bool:
    of_layers = isinstance(helper, type) and issubclass(helper, LayerHelper)
    return of_layers and helper.input_key is not LayerHelper.input_key  # type: ignore[union-attr]
