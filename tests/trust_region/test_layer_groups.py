"""Steps whose parts have coefficients of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import compare
from soframe.trust_region import Quadratic
from soframe.trust_region.layer_groups import LayerGroups, group_of_each
from soframe.trust_region.quadratic import combine, inner_products
from soframe.trust_region.twice import Direction
from tests.curvature import randn
from tests.examples import examples
from tests.trust_region.kit import classes_of, closures, deep, fisher, flat, trust_region
from tests.trust_region.test_quadratic import CURVATURES, Tied, curvature, directions_of


def chain(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(count)])


def numbers_of(model: nn.Module, parts: int) -> list[int]:
    parameters = list(model.parameters())
    found = group_of_each(model, parameters, parts)
    return [found[p] for p in parameters]


@pytest.mark.parametrize(
    ("layers", "parts", "expected"),
    [
        (8, 1, [0, 0, 0, 0, 0, 0, 0, 0]),
        (8, 2, [0, 0, 0, 0, 0, 0, 0, 1]),
        (8, 3, [0, 0, 0, 0, 1, 1, 1, 2]),
        (5, 4, [0, 0, 1, 2, 3]),
        (3, 9, [0, 4, 8]),
        (1, 3, [2]),
    ],
)
def test_the_last_layer_is_one_and_the_others_are_cut_evenly(
    layers: int, parts: int, expected: list[int]
) -> None:
    assert numbers_of(chain(layers), parts) == [n for n in expected for _ in range(2)]


def test_shared_and_own_parameters() -> None:
    """What layers share is the first's; a module's own come before those of its children."""

    class Own(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    model = Own()
    found = group_of_each(model, list(model.parameters()), 9)
    of = [model.scale, model.first.weight, model.first.bias, model.second.bias]
    assert [found[p] for p in of] == [0, 4, 4, 8]
    assert len(found) == 4


def test_frozen_layers_are_not_counted() -> None:
    model = chain(4)
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = group_of_each(model, trained, 3)
    assert [found[p] for p in trained] == [0, 0, 1, 1, 2, 2]


def split(parameters: list[nn.Parameter], direction: Direction, numbers: list[int]) -> Any:
    groups = LayerGroups(nn.Module(), 1, parameters)
    groups.numbers = dict(zip(parameters, numbers, strict=True))
    return groups.split(parameters, direction)


def test_parts_add_up_and_none_is_empty() -> None:
    like = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1, 3, 4)]
    tensors: list[Tensor | None] = [randn(2), None, randn(3, seed=1), None]
    parts = split(like, tensors, [0, 1, 2, 2])
    assert [[t is not None for t in part] for part in parts] == [
        [True, False, False, False],
        [False, False, True, False],
    ]
    total = combine(like, parts, torch.ones(2))
    for tensor, found in zip(tensors, total, strict=True):
        compare(found, torch.zeros_like(found) if tensor is None else tensor, "sum")
    assert split(like[:2], [None, None], [0, 1]) == []


def dense(direction: Direction, like: list[Tensor]) -> Tensor:
    rows = zip(direction, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if d is None else d).flatten() for d, p in rows])


@pytest.mark.parametrize("name", CURVATURES)
def test_curvature_of_parts_is_that_of_the_dense_fisher(name: str) -> None:
    make, batches, criterion = CURVATURES[name]
    model = make()
    parameters = [p.detach() for p in model.parameters()]
    one, two = directions_of(model, 2)
    own = list(model.parameters())
    three, both = (split(own, d, numbers_of(model, n)) for d, n in ((one, 3), (two, 2)))
    directions = [*three, *both, two]
    d = torch.stack([dense(direction, parameters) for direction in directions])
    expected = d @ fisher(model, batches, criterion) @ d.T
    compare(curvature(model, closures(model, batches, criterion), directions), expected, name)
    compare(inner_products(directions), d @ d.T, "inner products")
    coefficients = torch.linspace(-1, 1, len(directions), dtype=torch.float64)
    compare(flat(combine(parameters, directions, coefficients)), coefficients @ d, "combination")


def test_inner_products_of_parameters_of_either_dtype() -> None:
    like = [torch.zeros(*shape) for shape in ((3, 4), (5,), (2, 2), (30,), (4,))]
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(p.shape, generator=generator) for p in like] for _ in range(3)]
    rows = [[t.double() if n % 2 else t for n, t in enumerate(row)] for row in rows]
    directions = [*rows[:2], [None, None, *rows[2][2:]], [None] * len(like)]
    d = torch.stack([dense(direction, like).double() for direction in directions])
    compare(inner_products(directions), d @ d.T, "inner products", rtol=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=examples(40), deadline=None)
def test_parts_never_promise_less(seed: int, parts: int) -> None:
    """Than the direction that they are parts of."""
    root = randn(8, 6, seed=seed)
    full, slope = root.T @ root + 0.1 * torch.eye(6).double(), randn(6, seed=seed + 1)
    direction = randn(6, seed=seed + 2)
    rows = [direction * (torch.arange(6) % parts == part) for part in range(parts)]

    def promised(d: Tensor) -> float:
        model = Quadratic(d @ full @ d.T, d @ slope)
        return model.change(model.minimise())

    assert promised(torch.stack(rows)) <= promised(direction[None]) + 1e-12


def test_a_choice_is_made_for_each_part() -> None:
    # The second of the first pair and the first of the other; the last belongs to every step.
    slope = torch.tensor([1.0, 2.0, 3.0, 1.5, 1.0], dtype=torch.float64)
    model = Quadratic(torch.eye(5, dtype=torch.float64), slope)
    taken, chosen = model.best_of(2)
    assert taken == [True, False]
    compare(chosen.slope, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), "slope")
    assert Quadratic(model.curvature, slope[[2, 3, 0, 1, 4]]).best_of(2)[0] == [False, True]
    assert Quadratic(model.curvature, slope[[0, 3, 2, 1, 4]]).best_of(2)[0] == [True, True]
    equal = Quadratic(model.curvature, torch.ones(5, dtype=torch.float64))
    assert equal.best_of(2)[0] == [False, False]  # what is stays
    for barred in ([False, True], [True, False], [True, True]):
        both = Quadratic(model.curvature, slope[[0, 3, 2, 1, 4]])  # the seconds bring more
        assert both.best_of(2, barred)[0] == [not bad for bad in barred]


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=examples(40), deadline=None)
def test_no_single_exchange_would_bring_more(seed: int, count: int) -> None:
    """Nor would all of the first, nor all of the others."""
    root, slope = randn(8, 2 * count + 1, seed=seed), randn(2 * count + 1, seed=seed + 1)
    model = Quadratic(root.T @ root, slope)
    taken, chosen = model.best_of(count)

    def promised(seconds: Sequence[bool]) -> float:
        rows = [number + count * second for number, second in enumerate(seconds)] + [2 * count]
        own = Quadratic(model.curvature[rows][:, rows], slope[rows])
        return own.change(own.minimise())

    best = chosen.change(chosen.minimise())
    assert best == promised(taken)
    # Pairs are looked at in turn, so of the last one it holds as it stands.
    last = [*taken[:-1], not taken[-1]]
    for other in ([False] * count, [True] * count, last):
        assert best <= promised(other)


def test_more_parts_promise_more_of_the_same_step() -> None:
    promised = []
    for parts in (1, 2, 3):
        model = deep()
        own = trust_region(model, "cross-entropy", 0.05, layer_groups=parts)
        x, y = classes_of(0)
        own.step(lambda model=model, x=x, y=y: F.cross_entropy(model(x), y))
        promised.append(own.last["predicted"])
    assert promised[1] < promised[0]
    assert promised[2] == promised[1]  # of two layers there are no three parts


@pytest.mark.parametrize("parts", [0, -1])
def test_parts_are_counted(parts: int) -> None:
    with pytest.raises(ValueError, match=f"layer_groups must be a positive integer, not {parts}"):
        trust_region(deep(), "cross-entropy", layer_groups=parts)
