"""Blocks of one shape are applied together: as one by one, from data that lie side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.gradients import applying
from soframe.solvers import Eigen, Inverse, Lazy, Relative
from soframe.testing import compare
from tests.curvature import blocks, closing, fill, log_cosh, preconditioner, randn


def network() -> nn.Module:
    """Two layers of one shape in groups, three of another, and two of their own."""
    return fill(
        nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, groups=2, bias=False),
            nn.Conv2d(6, 6, 3, padding=1, groups=2),
            nn.Conv2d(6, 6, 3, padding=1, groups=2),
            nn.Flatten(),
            *(layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.Tanh())),
            nn.Linear(24, 3),
        )
    )


def run(steps: int, seen: list[tuple[int, ...]] | None = None, **options: Any) -> list[Tensor]:
    """Train, and return all gradients as they were preconditioned."""
    model, found = network(), []
    model.train()
    with closing(preconditioner(model, kl_clip=None, **options)) as own:
        for step in range(steps):
            model.zero_grad()
            log_cosh(model(randn(5, 2, 2, 2, seed=step)), randn(5, 3, seed=step)).backward()
            own.step()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
        if seen is not None:
            seen += [tuple(block.shape) for block in own._blocks]
    return found


OPTIONS: list[dict[str, Any]] = [
    {"solver": "eigen"},
    {"solver": "inverse", "stagger": True, "statistics_every": 2, "solve_every": 4},
    {"solver": Eigen(follows=True), "statistics_every": 1, "solve_every": 3},
    {"solver": Relative(Inverse()), "method": {"^6$": "foof", "": "kfac"}},
    {"solver": Lazy(Inverse(), tolerance=0.1), "statistics_every": 1, "solve_every": 2},
    {"solver": {"^4$": "eigen", "": "inverse"}, "background": 2, "solve_every": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocks_together_are_blocks_one_by_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = run(9, **options)
    monkeypatch.setattr(applying, "SMALL", 0)
    for got, expected in zip(together, run(9, **options), strict=True):
        compare(got, expected, str(options), rtol=1e-9, atol=1e-12)


class Counting(Inverse):
    """Remembers the shapes that it was applied to."""

    applied: list[tuple[int, ...]] = []  # noqa: RUF012  # of all instances

    def apply(self, gradient: Tensor, **data: Any) -> Tensor:
        self.applied.append(tuple(gradient.shape))
        return super().apply(gradient, **data)


def test_a_shape_is_one_product() -> None:
    Counting.applied = []
    shapes: list[tuple[int, ...]] = []
    run(1, shapes, solver=Counting())
    assert len(shapes) == 7
    assert sorted(Counting.applied) == sorted([(2, 3, 9), (4, 3, 28), (3, 24, 25), (1, 3, 25)])


def test_large_blocks_of_a_cpu_are_applied_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "SMALL", 24 * 25 - 1)
    Counting.applied = []
    run(1, solver=Counting())
    assert Counting.applied.count((1, 24, 25)) == 3
    assert (4, 3, 28) in Counting.applied


def test_data_lie_side_by_side_and_are_held_once() -> None:
    model = network()
    with closing(preconditioner(model, solver="inverse", statistics_every=1)) as own:
        log_cosh(model(randn(5, 2, 2, 2)), randn(5, 3)).backward()
        own.step()
        three = [block for block in own._blocks if tuple(block.shape) == (1, 24, 25)]
        assert len(three) == 3
        data = [block.second_order["A"]["inverse"] for block in three]
        memory = {tensor.untyped_storage().data_ptr() for tensor in data}
        assert len(memory) == 1
        assert data[0].untyped_storage().nbytes() == sum(tensor.nbytes for tensor in data)
        again = applying.side_by_side(three, "A", "inverse")
        assert again.data_ptr() == data[0].data_ptr(), "nothing is copied while data stay"
        assert torch.equal(again, torch.cat(data))
        for some in ([three[0], three[2]], three[::-1], three):
            expected = torch.cat([block.second_order["A"]["inverse"] for block in some])
            assert torch.equal(applying.side_by_side(some, "A", "inverse"), expected)
        data = [block.second_order["A"]["inverse"] for block in three]
        apart = {"inverse": data[1] + 1}
        before = three[1].second_order["A"]
        three[1].second_order.put({"A": apart})
        assert torch.equal(
            applying.side_by_side(three, "A", "inverse"), torch.cat([data[0], data[1] + 1, data[2]])
        )
        assert torch.equal(before["inverse"], data[1]), "what others kept stays what it was"


def test_a_state_is_as_large_as_its_tensors(tmp_path: Any) -> None:
    """Data that lie beside others are saved once, and loaded."""
    model = network()
    with closing(preconditioner(model, solver="inverse", statistics_every=1)) as own:
        log_cosh(model(randn(5, 2, 2, 2)), randn(5, 3)).backward()
        own.step()
        torch.save(own.state_dict(), tmp_path / "state.pt")
        usage = own.memory_usage()
        held = usage["factors"] + usage["second_order"]
        assert (tmp_path / "state.pt").stat().st_size < 1.2 * held + 30_000
        assert blocks(own)
        with closing(preconditioner(network(), solver="inverse")) as other:
            other.load_state_dict(torch.load(tmp_path / "state.pt"))
            for one, loaded in zip(own._blocks, other._blocks, strict=True):
                for name, tensors in one.second_order.items():
                    assert torch.equal(loaded.second_order[name]["inverse"], tensors["inverse"])


def test_only_equals_go_together() -> None:
    """Other solvers, other gradient workers: other batches."""
    model = network()
    with closing(
        preconditioner(model, solver={"^4$": Inverse(split="full"), "": "inverse"})
    ) as own:
        log_cosh(model(randn(5, 2, 2, 2)), randn(5, 3)).backward()
        own.step()
        named = blocks(own)
        batch = applying.Batch((0,), 0.1, lambda block: None)
        batch.gradients[named["6"]] = torch.zeros(())
        assert batch.takes(named["8"], (0,))
        assert not batch.takes(named["8"], (0, 1)), "gradient workers"
        assert not batch.takes(named["4"], (0,)), "solver"
        assert not batch.takes(named["10"], (0,)), "shape"
