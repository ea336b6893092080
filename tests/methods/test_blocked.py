"""A matrix in parts: the method of each part as of a parameter by itself; and grafting."""

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import KLSOAP, SOAP, AdamW, Blocked, Chain, Graft, KLShampoo, Shampoo
from soframe.methods.base import Candidate, Method
from soframe.methods.blocked import spans
from soframe.strategies import Sharded
from soframe.testing import check_method, compare
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.methods import stages
from tests.methods.test_shampoo import power_of

METHODS: dict[str, Method] = {
    "shampoo": Shampoo(graft="sgd", graft_steps=0),
    "one side": Shampoo(sides="left", power=-0.4, graft=None),
    "soap": SOAP(betas=(0.9, 0.8), shampoo_beta=0.7),
    "kl-shampoo": KLShampoo(),
    "kl-soap": KLSOAP(carry="rotate"),
    "chain": Chain(("momentum", Shampoo(graft=None), "match-rms")),
    "no factors": AdamW(),
}


class Matrix(nn.Module):
    """One raw matrix."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.zeros(shape, dtype=torch.float64))


def pieces(size: int, limit: int) -> list[slice]:
    """The pieces of a side, by numpy's rule for parts that are nearly equal."""
    count = -(-size // limit)
    ends = [0]
    for number in range(count):
        ends.append(ends[-1] + size // count + (number < size % count))
    return [slice(a, b) for a, b in pairwise(ends)]


def apart(method: Method, shape: tuple[int, int], limit: int, steps: int, **settings: Any) -> Any:
    """The directions of each step, by a parameter for each part."""
    cuts = [(r, c) for r in pieces(shape[0], limit) for c in pieces(shape[1], limit)]
    model = nn.Module()
    for number, (rows, columns) in enumerate(cuts):
        zeros = torch.zeros(rows.stop - rows.start, columns.stop - columns.start).double()
        model.register_parameter(f"part{number}", nn.Parameter(zeros))
    found = []
    with closing(stages.preconditioner(model, method, **settings)) as own:
        for step in range(steps):
            gradient = randn(*shape, seed=step)
            for parameter, cut in zip(model.parameters(), cuts, strict=True):
                parameter.grad = gradient[cut].clone()
            own.step()
            whole = torch.zeros(shape).double()
            for parameter, cut in zip(model.parameters(), cuts, strict=True):
                whole[cut] = parameter.grad
            found.append(whole)
    return found


def whole(method: Method, shape: tuple[int, int], steps: int, **settings: Any) -> list[Tensor]:
    """The directions of each step of one matrix."""
    model, found = Matrix(shape), []
    with closing(stages.preconditioner(model, method, **settings)) as own:
        for step in range(steps):
            model.whole.grad = randn(*shape, seed=step)
            own.step()
            found.append(model.whole.grad.clone())
    return found


@pytest.mark.parametrize("shape", [(5, 7), (6, 4), (3, 8), (2, 2)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_parts_are_parameters(name: str, shape: tuple[int, int]) -> None:
    """Of five by seven, cut to three: parts of four shapes."""
    method, settings = METHODS[name], {"solve_every": 2}
    expected = apart(method, shape, 3, 6, **settings)
    for step, found in enumerate(whole(Blocked(method, 3), shape, 6, **settings)):
        compare(found, expected[step], f"step {step}", rtol=1e-8)


def test_it_is_something_else_than_the_whole() -> None:
    one, other = (
        whole(Blocked(Shampoo(graft_steps=1), 3), (5, 7), 2),
        whole(Shampoo(graft_steps=1), (5, 7), 2),
    )
    assert not torch.allclose(one[1], other[1], rtol=0.1)
    one, other = (
        whole(Blocked(Shampoo(graft_steps=1), 7), (5, 7), 2),
        whole(Shampoo(graft_steps=1), (5, 7), 2),
    )
    assert torch.equal(one[1], other[1])


@given(size=st.integers(1, 400), limit=st.integers(1, 60))
def test_sides_are_cut_into_the_fewest_nearly_equal_pieces(size: int, limit: int) -> None:
    found = spans(size, limit)
    lengths = [span.length for span in found for _ in range(span.pieces)]
    assert [s.stop - s.start for s in pieces(size, limit)] == lengths
    assert max(lengths) <= limit
    assert len(lengths) == -(-size // limit)
    starts = [sum(lengths[: sum(s.pieces for s in found[:n])]) for n in range(len(found))]
    assert [span.start for span in found] == starts


def test_groups_of_a_layer_are_cut_each() -> None:
    """And factors are as many and as small as they are said to be."""
    factors = Blocked(Shampoo(), 3).factors(BlockShape(2, 5, 7))
    assert [(f.name, f.groups, f.size) for f in factors] == [
        ("L", 2, 3), ("R", 2, 3), ("L@1", 4, 3), ("R@1", 4, 2),
        ("L@2", 2, 2), ("R@2", 2, 3), ("L@3", 4, 2), ("R@3", 4, 2),
    ]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_one_process(name: str) -> None:
    """Micro-batches, instances, resumption; and two ranks, sharded too."""
    method = Chain((Blocked(METHODS[name], 3), Graft()))
    strategies = ("comm-opt", "mem-opt", Sharded(group=None))
    check_method(method, ranks=(2,), strategies=strategies, launch=run_ranks)


def on_ranks(rank: int, ranks: int, strategy: str) -> list[Tensor]:
    method = Chain((Blocked(SOAP(), 3), Graft()))
    return whole(method, (5, 7), 4, strategy=strategy)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["sharded", "mem-opt"])
def test_parts_of_four_shapes_on_ranks(strategy: str) -> None:
    expected = on_ranks(0, 1, "comm-opt")
    for found in run_ranks(on_ranks, 2, strategy):
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            compare(one, other, f"step {step}", rtol=1e-9)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="block_size"):
        Blocked("soap", 0)
    with pytest.raises(ValueError, match="reads calls"):
        Blocked("kfac")
    with pytest.raises(ValueError, match="registered"):
        Blocked("nothing")
    weight = Candidate("w", nn.Linear(9, 9), ("weight",), BlockShape(1, 9, 9))
    assert "max_size=4" in str(Shampoo(max_size=4).unsuited(weight))
    assert Blocked(Shampoo(max_size=4), 4).unsuited(weight) is None
    assert "max_size=4" in str(Blocked(Shampoo(max_size=4), 5).unsuited(weight))
    assert Blocked(Shampoo(), 3).effort(weight.shape) == 9 * Shampoo().effort(BlockShape(1, 3, 3))


@pytest.mark.parametrize("sides", ["both", "left"])
def test_grafting_gives_adams_length(sides: Any) -> None:
    """Of the raw gradient, whatever comes before; torch's Adam says how long it is."""
    method = Chain((Shampoo(0.7, sides, graft=None), Graft(AdamW((0.8, 0.9)))))
    model = Matrix((3, 4))
    peer = nn.Parameter(torch.zeros(3, 4).double())
    adam = torch.optim.Adam([peer], lr=1.0, betas=(0.8, 0.9))
    rows, columns = torch.zeros(3, 3).double(), torch.zeros(4, 4).double()
    with closing(stages.preconditioner(model, method)) as own:
        for step in range(4):
            gradient = randn(3, 4, seed=step)
            before = peer.detach().clone()
            model.whole.grad, peer.grad = gradient.clone(), gradient.clone()
            own.step()
            adam.step()
            rows = 0.7 * rows + 0.3 * gradient @ gradient.T
            columns = 0.7 * columns + 0.3 * gradient.T @ gradient
            share = 1 - 0.7 ** (step + 1)
            power = -0.25 if sides == "both" else -0.5
            expected = power_of(rows / share, power, 1e-6) @ gradient
            if sides == "both":
                expected = expected @ power_of(columns / share, power, 1e-6)
            expected = expected * (peer.detach() - before).norm() / expected.norm()
            compare(model.whole.grad, expected, f"step {step}", rtol=1e-7)


def test_grafting_waits_for_nothing_and_keeps_zeros() -> None:
    assert Graft().starts_at_once
    assert not Graft("shampoo").starts_at_once
    assert Graft("sgd").length == soframe.methods.SGD()
    model = Matrix((2, 3))
    with closing(stages.preconditioner(model, Chain(("momentum", "graft")))) as own:
        model.whole.grad = torch.zeros(2, 3).double()
        own.step()
        assert not model.whole.grad.any()


@pytest.mark.distributed
def test_a_method_of_calls_gives_a_length() -> None:
    """Muon's direction at K-FAC's length, clipped as K-FAC is."""
    method = Chain(("orthogonalise", Graft("kfac")))
    assert method.captures
    assert not method.clipped
    stages.check_resume(method)


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_blocked_and_grafted_shampoo_is_pytorch_optimizers() -> None:
    """Where sides divide; its averages are not freed of their start, which grafting undoes."""
    from pytorch_optimizer import ScalableShampoo

    peer = nn.Parameter(torch.zeros(6, 6).double())
    reference = ScalableShampoo(
        [peer],
        lr=1.0,
        betas=(0.0, 0.9),
        start_preconditioning_step=1,
        preconditioning_compute_steps=1,
        block_size=3,
        shape_interpretation=False,
        nesterov=False,
        matrix_eps=1e-12,
        use_svd=True,
    )
    method = Chain((Blocked(Shampoo(0.9, epsilon=1e-12, graft=None), 3), Graft("sgd")))
    for step, found in enumerate(whole(method, (6, 6), 5)):
        before = peer.detach().clone()
        peer.grad = randn(6, 6, seed=step)
        reference.step()
        compare(found, before - peer.detach(), f"step {step}", rtol=1e-4)


def test_settings_change_the_method_of_the_parts() -> None:
    method = Blocked(AdamW(), 2)
    assert method.with_settings(method.settings()) is method
    assert method.with_settings({"eps": 1e-3}) == Blocked(AdamW(eps=1e-3), 2)


@pytest.mark.parametrize("size", [0, 2.5, "8", True])
def test_the_size_of_blocks_is_an_integer(size: Any) -> None:
    with pytest.raises(ValueError, match=r"block_size must be (at least 1|an integer)"):
        Blocked(SOAP(), size)
