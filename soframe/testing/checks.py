"""Checks for parts that users write: layer helpers, solvers, strategies.

Each raises an ``AssertionError`` that says what is wrong and, for numbers, by what factor. The
parts that come with soframe pass through the same functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from soframe.comm.recording import Event, Recording
from soframe.layers.base import BlockShape, LayerHelper, moment
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.solvers.base import LinAlgError, Solver, mean_trace
from soframe.specs import FactorSpec
from soframe.strategies.base import Strategy
from soframe.strategies.placement import BlockWork
from soframe.testing.compare import compare, kron


def check_layer_helper(
    module: nn.Module, *inputs: Tensor, helper: type[LayerHelper] | None = None
) -> None:
    """Check a layer helper on one module, in float64.

    The identity that defines a right helper: for every sample, the sum of ``g a^T`` over the rows
    of that sample is the gradient of that sample alone, packed as the helper packs it. So the trace
    of the block that the rows make is that of the exact block. Besides: packing and unpacking, a
    frozen weight or bias, inputs by keyword, a batch of one, and fast moments equal to plain ones.

    Args:
        module: A module with parameters; it is not changed.
        *inputs: What it is called with, ``[N, ...]`` each, N > 1.
        helper: The helper class; by default the one that is registered for the module's type.

    Raises:
        AssertionError: If the helper is wrong.
        ValueError: If no helper is registered for the module.
    """
    chosen = helper if helper is not None else KINDS["layer"].lookup(type(module))
    if chosen is None:
        raise ValueError(f"no layer helper is registered for {type(module).__name__}")
    name = f"{chosen.__name__} on {type(module).__name__}"
    assert issubclass(chosen, LayerHelper)
    reason = chosen.unsupported(module)
    assert reason is None, f"{name}: unsupported: {reason}"
    doubles = tuple(x.detach().double() for x in inputs)
    has_bias = isinstance(module._parameters.get("bias"), nn.Parameter)
    for weight, bias in [(True, True), (True, False), (False, True)]:
        if weight or has_bias:
            own = copy.deepcopy(module).double()
            for parameter in own.parameters():
                parameter.requires_grad_(True)
            made = chosen(own, weight=weight, bias=bias and has_bias)
            part = f"{name} (weight={weight}, bias={bias and has_bias})"
            _check_samples(made, doubles, part)
            _check_packing(made, part)


def _check_samples(helper: LayerHelper, inputs: tuple[Tensor, ...], name: str) -> None:
    signature = list(helper._signature.parameters)
    by_keyword = helper.inputs((), dict(zip(signature, inputs, strict=False)))
    assert len(by_keyword) == len(inputs), f"{name}: inputs given by keyword are lost"
    output = helper.module(*inputs)
    gradient = torch.randn(output.shape, dtype=output.dtype, generator=_generator())
    rows = helper.output_rows(gradient)
    assert rows.dim() == 4, f"{name}: output_rows must be [groups, batch, shared, features]"
    assert rows.shape[1] == inputs[0].shape[0], f"{name}: rows must keep the batch, dimension 1"
    a = helper.block_rows(inputs, rows)
    shape = BlockShape(rows.shape[0], rows.shape[3], a.shape[3])
    assert shape == helper.shape, f"{name}: rows make {shape}, the gradient is {helper.shape}"
    by_rows = torch.einsum("gnto,gnti->ngoi", rows, a)
    for n in range(inputs[0].shape[0]):
        one = tuple(x[n : n + 1] for x in inputs)
        own = list(helper.parameters.items())
        grads = torch.autograd.grad(
            helper.module(*one), [p for _, p in own], gradient[n : n + 1], allow_unused=True
        )
        parts = {k: g for (k, _), g in zip(own, grads, strict=True)}
        exact = helper.to_matrix(parts.get("weight"), parts.get("bias"))
        compare(by_rows[n], exact, f"{name}: gradient of sample {n} made of its rows")
    for side, fast, plain in (
        ("input", partial(helper.input_moment, inputs, rows), moment(a)),
        ("output", partial(helper.output_moment, rows), moment(rows)),
    ):
        compare(fast().tril(), plain.tril(), f"{name}: fast {side}_moment")
        before = torch.ones_like(plain)
        total = fast(before.clone(), 0.5)
        compare(total.tril(), (before + plain / 2).tril(), f"{name}: fast {side}_moment, added")


def _check_packing(helper: LayerHelper, name: str) -> None:
    parts = {k: torch.randn_like(p) for k, p in helper.parameters.items()}
    matrix = helper.to_matrix(parts.get("weight"), parts.get("bias"))
    assert tuple(matrix.shape) == tuple(helper.shape), f"{name}: to_matrix gives {matrix.shape}"
    back = dict(zip(("weight", "bias"), helper.from_matrix(matrix), strict=True))
    for key in ("weight", "bias"):
        given, got = parts.get(key), back[key]
        assert (given is None) == (got is None), f"{name}: from_matrix invents or loses the {key}"
        if given is not None and got is not None:
            compare(got, given, f"{name}: {key} after to_matrix and from_matrix")


def check_solver(
    solver: Solver,
    *,
    sizes: Iterable[tuple[int, int]] = ((1, 1), (1, 4), (3, 2), (8, 13)),
    conditions: Sequence[float] = (1.0, 1e4, 1e8),
    dampings: Sequence[float] = (1.0, 1e-3, 1e-6),
    rtol: float = 1e-6,
) -> None:
    """Check a solver against dense solves under the same damping, in float64.

    A solver with ``damps_factors`` is held to ``(left + share I)^-1 V (right + share I)^-1``, any
    other to ``(left ⊗ right + damping I)^-1 vec(V)``, and all to ``V (right + damping I)^-1`` where
    there is no left factor. Besides: the announced tensors, that inputs
    are not changed, float32, zero factors, and that a matrix that is not finite is refused.

    Args:
        solver: The solver.
        sizes: ``(out, in)`` of the blocks.
        conditions: Condition numbers of the factors; their spectra fall geometrically from 1.
        dampings: The dampings.
        rtol: The largest relative error. It covers the digits that a condition number costs.

    Raises:
        AssertionError: If the solver is wrong.
    """
    for out, into in sizes:
        for condition in conditions:
            for damping in dampings:
                left, right = (_psd(2, n, condition) for n in (out, into))
                name = f"{solver!r}, {out}x{into}, condition {condition:g}, damping {damping:g}"
                _check_solution(solver, left, right, damping, name, rtol)
    zero = torch.zeros(2, 3, 3, dtype=torch.float64)
    _check_solution(solver, zero, _psd(2, 4, 10.0), 0.1, f"{solver!r}, zero factor", rtol)
    bad = torch.full((1, 3, 3), float("nan"))
    try:
        data = solver.solve(bad, torch.ones(1))
    except LinAlgError:
        return
    finite = all(bool(t.isfinite().all()) for t in data.values())
    assert not finite, f"{solver!r}: a factor of NaNs gives finite second-order data"


def _check_solution(
    solver: Solver, left: Tensor, right: Tensor, damping: float, name: str, rtol: float
) -> None:
    # The inputs' factor comes first, as in K-FAC's (A, G).
    shares = dict(
        zip(
            ("right", "left"),
            solver.shares([mean_trace(right), mean_trace(left)], damping),
            strict=True,
        )
    )
    data = {}
    for side, matrix in (("left", left), ("right", right)):
        before = matrix.clone()
        data[side] = solver.solve(matrix, shares[side])
        assert torch.equal(matrix, before), f"{name}: solve changes the factor"
        spec = solver.tensors(FactorSpec(side, side, *matrix.shape[:2]))  # type: ignore[arg-type]
        assert list(spec) == list(data[side]), f"{name}: tensors() announces {list(spec)}"
        for key, tensor in data[side].items():
            shape = tuple(tensor.shape)
            assert shape == spec[key].shape, f"{name}: {key} is {shape}, not {spec[key].shape}"
            if spec[key].symmetric:
                assert torch.equal(tensor, tensor.mT), f"{name}: {key} is not symmetric to the bit"
    shape = (left.shape[0], left.shape[1], right.shape[1])
    gradient = torch.randn(shape, dtype=torch.float64, generator=_generator())
    given = gradient.clone()
    result = solver.apply(gradient, left=data["left"], right=data["right"], damping=damping)
    assert torch.equal(gradient, given), f"{name}: apply changes the gradient"
    expected = torch.stack(
        [
            _dense_solution(solver, left[g], right[g], gradient[g], damping, shares, g)
            for g in range(shape[0])
        ]
    )
    compare(result, expected, name, rtol=rtol)
    # The inputs' factor alone takes the whole damping, and the other one is the identity.
    alone = solver.solve(right, solver.shares([mean_trace(right)], damping)[0])
    result = solver.apply_right(gradient, right=alone, damping=damping)
    assert torch.equal(gradient, given), f"{name}: apply_right changes the gradient"
    damped = right + damping * torch.eye(right.shape[1], dtype=right.dtype)
    expected = torch.linalg.solve(damped, gradient, left=False)
    compare(result, expected, f"{name}, without a left factor", rtol=rtol)
    single = {s: {k: t.float() for k, t in tensors.items()} for s, tensors in data.items()}
    low = solver.apply(
        gradient.float(), left=single["left"], right=single["right"], damping=damping
    )
    assert low.dtype == torch.float32, f"{name}: apply turns float32 into {low.dtype}"


def _dense_solution(
    solver: Solver,
    left: Tensor,
    right: Tensor,
    gradient: Tensor,
    damping: float,
    shares: dict[str, Tensor],
    group: int,
) -> Tensor:
    if solver.damps_factors:
        left = left + shares["left"][group] * torch.eye(len(left), dtype=left.dtype)
        right = right + shares["right"][group] * torch.eye(len(right), dtype=right.dtype)
        # Solved one by one: the condition of the product is the product of the conditions.
        half: Tensor = torch.linalg.solve(left, gradient)
        result: Tensor = torch.linalg.solve(right, half.mT).mT
        return result
    curvature = kron(left, right)
    curvature = curvature + damping * torch.eye(len(curvature), dtype=curvature.dtype)
    solution: Tensor = torch.linalg.solve(curvature, gradient.flatten())
    return solution.view_as(gradient)


def _psd(groups: int, n: int, condition: float) -> Tensor:
    random = torch.randn(groups, n, n, dtype=torch.float64, generator=_generator())
    basis: Tensor = torch.linalg.qr(random).Q
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    matrix = basis * values @ basis.mT
    return (matrix + matrix.mT) / 2


def check_strategy(strategy: Strategy, *, world_sizes: Sequence[int] = (1, 2, 3, 4, 6, 8)) -> None:
    """Check a strategy: its placements can be executed, and ranks never wait for each other.

    For every world size a placement of several models is validated, found again by a second call,
    and executed by every rank of a world on paper; then the ranks of every group must have entered
    the same collectives in the same order, and each must have sent and must hold what the placement
    plans. The largest world exchanges gradients in both ways, by owner and fused.

    Args:
        strategy: The strategy.
        world_sizes: Numbers of ranks.

    Raises:
        AssertionError: If the strategy is wrong.
    """
    for ranks in world_sizes:
        name = f"{strategy!r} on {ranks} rank(s)"
        for work in _works():
            placement = strategy.place(work, ranks)
            again = copy.deepcopy(strategy).place(list(work), ranks)
            assert placement.digest == again.digest, f"{name}: place() is not a pure function"
            assert placement.world_size == ranks, f"{name}: for {placement.world_size} ranks"
            assert placement.work == tuple(work), f"{name}: the placement is of other work"
            try:
                placement.validate()
            except ValueError as error:
                raise AssertionError(f"{name}: {error}") from error
        _check_traces(strategy, ranks, name, fused=False)
        if ranks == max(world_sizes):
            _check_traces(strategy, ranks, f"{name}, fused", fused=True)


def _works() -> list[list[BlockWork]]:
    def block(name: str, groups: int, out: int, into: int) -> BlockWork:
        factors = (FactorSpec("A", "right", groups, into), FactorSpec("G", "left", groups, out))
        return BlockWork(name, BlockShape(groups, out, into), factors)

    uneven = [block(f"layer{i}", 1 + i % 3, 2**i, 3 + 7 * i) for i in range(7)]
    return [[], [block("only", 1, 10, 5)], uneven, [block(f"l{i}", 1, 8, 8) for i in range(12)]]


def _check_traces(strategy: Strategy, ranks: int, name: str, *, fused: bool) -> None:
    backends = [Recording(rank=rank, world_size=ranks, fused=fused) for rank in range(ranks)]
    for backend in backends:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2))
        preconditioner = Preconditioner(
            model,
            strategy=strategy,
            backend=backend,
            kl_clip=None,
            solve_every=1,
            statistics_every=1,
        )
        # On paper nothing travels, so the ranks' weights are those of one.
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            preconditioner.step()
        preconditioner.close()
        _check_plan(preconditioner, backend.rank, name)
    traces: dict[tuple[int, ...], dict[int, list[Event]]] = {}
    for backend in backends:
        for event in backend.events:
            traces.setdefault(event.group, {}).setdefault(backend.rank, []).append(event)
    for group, by_rank in traces.items():
        expected: Any = by_rank.get(group[0])
        for rank in group:
            assert by_rank.get(rank) == expected, (
                f"{name}: ranks {group[0]} and {rank} enter other collectives in group {group}"
            )


def _check_plan(preconditioner: Preconditioner, rank: int, name: str) -> None:
    placement = preconditioner.placement
    fused = preconditioner.backend.fused
    step = placement.traffic(rank, statistics=True, solve=True, fused=fused)
    expected = {phase: {key: 2 * n for key, n in count.items()} for phase, count in step.items()}
    traffic = preconditioner.traffic()
    start = traffic.pop("start", {"bytes": 0, "calls": 0})
    traffic["total"] = {key: n - start[key] for key, n in traffic["total"].items()}
    assert traffic == expected, f"{name}: rank {rank} sends {traffic}, its plan is {expected}"
    held, planned = preconditioner.memory_usage(), placement.memory(rank)
    assert held == planned, f"{name}: rank {rank} holds {held}, its plan is {planned}"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
