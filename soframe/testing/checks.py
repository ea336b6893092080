"""Checks for parts that users write: layer helpers, solvers, strategies.

Each raises an ``AssertionError`` with the violated property and, for numbers, the factor between
result and reference. soframe's own parts pass through the same functions.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from soframe.capture.hooks import Capture, LayerCall
from soframe.comm.recording import Event, Recording
from soframe.layers.base import BlockShape, Inputs, LayerHelper, Unit, moment
from soframe.layers.layout import parameter_of
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.settings import Distribution, Statistics
from soframe.solvers.base import LinAlgError, Solver, mean_trace
from soframe.specs import Data, FactorSpec
from soframe.strategies.base import Strategy
from soframe.strategies.placement import complete
from soframe.strategies.work import BlockWork
from soframe.testing.compare import compare, seeded
from soframe.testing.dense import double, flat


def check_layer_helper(
    module: nn.Module,
    *inputs: Tensor,
    helper: type[LayerHelper] | None = None,
    batch_dim: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Check a layer helper on one module, in float64.

    The identity that defines a correct helper: for every sample, the sum of ``g a^T`` over its rows
    is the gradient of that sample alone, packed as the helper packs it. So the trace of the block
    computed from the rows equals the exact block's. The check also covers packing and unpacking,
    which keep the sum of squares; parameters frozen one by one; inputs by keyword; fast moments
    against plain ones; two calls with rows of their own; and the statistics of a
    `soframe.Preconditioner` against moments of the rows.

    Args:
        module: A module with parameters; it is not changed.
        *inputs: The arguments of its call. Floating-point tensors are cast to float64.
        helper: The helper class; by default the registered one for the module's type.
        batch_dim: The output's dimension of samples; at least two samples.
        settings: Keyword arguments of the module's call.

    Raises:
        AssertionError: If the helper is wrong.
        ValueError: If the module's type has no registered helper.
    """
    chosen = helper or KINDS["layer"].lookup(type(module), optional=True)
    if chosen is None:
        raise ValueError(f"no layer helper is registered for {type(module).__name__}")
    name = f"{chosen.__name__} on {type(module).__name__}"
    assert issubclass(chosen, LayerHelper)
    reason = chosen.unsupported(module)
    assert reason is None, f"{name}: unsupported: {reason}"
    names = tuple(chosen.names(module))
    assert names, f"{name}: names() gives no parameter"
    case = _Case(chosen, module, tuple(map(double, inputs)), batch_dim, dict(settings or {}))
    case.check(names, f"{name} ({', '.join(names)})", every=True)
    if len(names) > 1:
        for key in names:
            case.check((key,), f"{name} ({key})", every=False)
    case.check(names, f"{name} (each alone)", every=False, joint=False)
    case.check_statistics(name)


@dataclass
class _Case:
    """A helper, a module and the arguments of its call."""

    helper: type[LayerHelper]
    module: nn.Module
    inputs: Inputs
    batch_dim: int
    settings: dict[str, Any]

    def _copy(self, trained: Sequence[str]) -> nn.Module:
        copied = copy.deepcopy(self.module).double()
        for name, parameter in copied.named_parameters():
            parameter.requires_grad_(name in trained)
        return copied

    def _call(self, module: nn.Module, inputs: Inputs) -> Tensor:
        output = module(*inputs, **self.settings)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    def check(
        self, trained: tuple[str, ...], name: str, *, every: bool, joint: bool = True
    ) -> None:
        """Check rows, moments and packing with some of the parameters trained."""
        module = self._copy(trained)
        helpers = self.helper.of(module, trained, joint=joint)
        held: list[str] = []
        for helper in helpers:
            held += helper.parameters
        assert len(held) == len(set(held)), f"{name}: blocks share a parameter: {held}"
        assert set(held) <= set(trained), f"{name}: blocks have {held}, not all of them trained"
        if every:
            assert set(held) == set(trained), f"{name}: of() leaves out {set(trained) - set(held)}"
        for helper in helpers:
            for key, parameter in helper.parameters.items():
                same = parameter_of(module, key) is parameter
                assert same, f"{name}: {key} is not what the module has under that name"
            _check_packing(helper, name)
        if not helpers:
            return
        signature = list(inspect.signature(module.forward).parameters)
        by_keyword = helpers[0].inputs((), dict(zip(signature, self.inputs, strict=False)))
        lost = len(by_keyword) != len(helpers[0].inputs(self.inputs, {}))
        assert not lost, f"{name}: inputs given by keyword are lost"
        ((calls, exact),) = self._calls_of(module, helpers, [self.inputs])
        self._check_gradients(helpers, calls, exact, name)
        for helper in helpers:
            for inputs, gradient in calls[helper]:
                rows = helper.output_rows(gradient)
                _check_moments(helper, inputs, rows, name)
                _check_taking(helper, inputs, rows, name)
        if every:
            both = self._calls_of(module, helpers, [self.inputs, _other(self.inputs)])
            for which, (calls, exact) in zip(("first", "second"), both, strict=True):
                self._check_gradients(helpers, calls, exact, f"{name}, the {which} of two calls")

    def _check_gradients(
        self, helpers: Sequence[LayerHelper], calls: _Calls, exact: _Exact, name: str
    ) -> None:
        """Compare each sample's gradient from rows with the exact one."""
        for helper in helpers:
            assert calls[helper], f"{name}: no call was seen"
            by_rows = torch.zeros(len(exact[helper]), *helper.shape, dtype=torch.float64)
            for inputs, gradient in calls[helper]:
                by_rows += _samples(helper, inputs, gradient, exact[helper], name)
            for n, gradient in enumerate(exact[helper]):
                compare(by_rows[n], gradient, f"{name}: gradient of sample {n} made of its rows")

    def _calls_of(
        self, module: nn.Module, helpers: Sequence[LayerHelper], inputs: Sequence[Inputs]
    ) -> list[tuple[_Calls, _Exact]]:
        """Return the captured calls of several forward passes, and their samples' gradients."""
        calls: _Calls = {}

        def sink(call: LayerCall) -> None:
            calls[call.helper].append((call.inputs, call.gradient))

        capture = Capture()
        capture.listen(sink, dict.fromkeys(helpers, "module"), frozenset(helpers), alike=True)
        outputs = [self._call(module, arguments) for arguments in inputs]
        starts, calls_of = [], []
        for seed, output in enumerate(outputs):
            start = torch.randn(output.shape, dtype=output.dtype, generator=seeded(seed))
            calls = defaultdict(list)
            output.backward(start)
            starts.append(start)
            calls_of.append(calls)
        capture.close()
        results: list[tuple[_Calls, _Exact]] = []
        for arguments, start, seen in zip(inputs, starts, calls_of, strict=True):
            results.append((seen, self._exact(module, helpers, arguments, start)))
        return results

    def _exact(
        self, module: nn.Module, helpers: Sequence[LayerHelper], inputs: Inputs, start: Tensor
    ) -> _Exact:
        output = self._call(module, inputs)
        exact: _Exact = defaultdict(list)
        parameters: dict[str, Tensor] = {}
        for helper in helpers:
            parameters |= helper.parameters
        for n in range(output.shape[self.batch_dim]):
            alone = torch.zeros_like(start)
            alone.select(self.batch_dim, n).copy_(start.select(self.batch_dim, n))
            grads = torch.autograd.grad(
                output, list(parameters.values()), alone, retain_graph=True, materialize_grads=True
            )
            by_name = dict(zip(parameters, grads, strict=True))
            for helper in helpers:
                exact[helper].append(helper.pack({key: by_name[key] for key in helper.parameters}))
        return exact

    def check_statistics(self, name: str) -> None:
        """Compare the averages of a preconditioner with plain moments of the rows."""
        names = self.helper.names(self.module)
        holder = nn.Module()
        # Train all of the module's own parameters: a block may have a subset only.
        holder.module = self._copy([*names, *self.module._parameters])
        samples = self._call(holder.module, self.inputs).shape[self.batch_dim]
        preconditioner = Preconditioner(
            holder,
            layers={"^module$": self.helper},
            statistics=Statistics(samples=lambda: samples),
            kl_clip=None,
            statistics_every=1,
            solve_every=1,
        )
        blocks = {tuple(block.parameters): block for block in preconditioner.curvature.blocks}
        helpers = self.helper.of(holder.module, names)
        missing = {tuple(helper.parameters) for helper in helpers} - set(blocks)
        assert not missing, f"{name}: a Preconditioner has no block of {missing}"
        output = self._call(holder.module, self.inputs)
        start = torch.randn(output.shape, dtype=output.dtype, generator=seeded())
        output.backward(start / samples)
        before = _gradients(holder)
        preconditioner.step()
        preconditioner.close()
        after = _gradients(holder)
        changed = {key for key, grad in after.items() if not torch.equal(grad, before[key])}
        named = {f"module.{key}" for key in names}
        unchanged, taken = set(before) & named - changed, changed - named
        assert not unchanged, f"{name}: step() leaves {unchanged} as it was"
        assert not taken, f"{name}: step() changes {taken}, which names() leaves out"
        ((calls, _),) = self._calls_of(holder.module, helpers, [self.inputs])
        for helper in helpers:
            running = blocks[tuple(helper.parameters)].running
            a, g = _plain_factors(helper, calls[helper], samples)
            compare(running["A"], a, f"{name}: A of a Preconditioner")
            compare(running["G"], g, f"{name}: G of a Preconditioner")


_Seen = tuple[Inputs, Tensor]
_Calls = dict[LayerHelper, list[_Seen]]
_Exact = dict[LayerHelper, list[Tensor]]


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters' gradients by name."""
    named = module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _other(inputs: Inputs) -> Inputs:
    """Return inputs of another call: the same numbers in another order."""
    # Keep ascending integers, which may be offsets, and masks as they are.
    other = []
    for tensor in inputs:
        turned = tensor.flatten().flip(0).view_as(tensor)
        if tensor.is_floating_point():
            other.append(turned / 2)
        else:
            is_ascending = tensor.dim() < 2 and bool((tensor.diff() >= 0).all())
            stays = is_ascending or tensor.dtype == torch.bool
            other.append(tensor if stays else turned)
    return tuple(other)


def _samples(
    helper: LayerHelper, inputs: Inputs, gradient: Tensor, exact: Sequence[Tensor], name: str
) -> Tensor:
    """Return the gradient of each sample, from the rows of a call: ``[N, groups, out, in]``."""
    rows = helper.output_rows(gradient)
    what = f"{name}: output_rows must be [groups, batch, shared, features]"
    assert rows.dim() == 4, f"{what}, not {list(rows.shape)}"
    assert rows.shape[1] == len(exact), f"{name}: rows must keep the batch, dimension 1"
    a = helper.block_rows(inputs, rows)
    shape = BlockShape(rows.shape[0], rows.shape[3], a.shape[3])
    assert shape == helper.shape, f"{name}: rows make {shape}, the gradient is {helper.shape}"
    return torch.einsum("gnto,gnti->ngoi", rows, a)


def _check_moments(helper: LayerHelper, inputs: Inputs, rows: Tensor, name: str) -> None:
    """Compare fast moments with plain ones."""
    a = helper.block_rows(inputs, rows)
    diagonal = _spec(helper, "right").kind == "diagonal"
    means = helper.mean_rows(inputs, rows)
    for side, fast, plain in (
        ("input_moment", partial(helper.input_moment, inputs, rows), _moment(a, diagonal)),
        ("mean_moment", partial(helper.mean_moment, inputs, rows), _moment(means, diagonal)),
        ("output_moment", partial(helper.output_moment, rows), moment(rows)),
    ):
        compare(_lower(fast()), _lower(plain), f"{name}: fast {side}")
        before = torch.ones_like(plain)
        total = fast(before.clone(), 0.5)
        compare(_lower(total), _lower(before + plain / 2), f"{name}: fast {side}, added")
    compare(helper.input_sum(inputs, rows), a.sum((1, 2)), f"{name}: fast input_sum")
    left_moment, right_moment = helper.sample_moments(inputs, rows)
    sample_gradients = torch.einsum("gnto,gnti->gnoi", rows, a)
    compare(
        left_moment,
        (sample_gradients @ sample_gradients.mT).sum(1),
        f"{name}: fast sample_moments, left",
    )
    plain = (sample_gradients.mT @ sample_gradients).sum(1)
    if diagonal:
        plain = plain.diagonal(dim1=1, dim2=2)
    compare(right_moment, plain, f"{name}: fast sample_moments, right")


def _check_taking(helper: LayerHelper, inputs: Inputs, rows: Tensor, name: str) -> None:
    """Compare rows sampled from a call with the same rows of the whole call."""
    a = helper.block_rows(inputs, rows)
    units: dict[Unit | None, tuple[Unit, ...]] = {"sample": ("sample",), "row": ("sample", "row")}
    for unit in units.get(helper.unit, ()):
        every_g, every_a = rows, a  # [groups, units, positions, features]
        if unit == "row":
            every_g, every_a = rows.flatten(1, 2).unsqueeze(2), a.flatten(1, 2).unsqueeze(2)
        index = torch.tensor([0, every_g.shape[1] - 1])
        taken = helper.take_rows(rows, index, unit)
        part = helper.block_rows(helper.take_inputs(inputs, index, unit), taken)
        compare(taken, every_g[:, index], f"{name}: take_rows, by {unit}")
        compare(part, every_a[:, index], f"{name}: take_inputs, by {unit}")


def _plain_factors(
    helper: LayerHelper, calls: Sequence[_Seen], samples: int
) -> tuple[Tensor, Tensor]:
    """Return A and G of K-FAC from rows, with a loss that is a mean over samples."""
    diagonal = _spec(helper, "right").kind == "diagonal"
    a, g, reached, every = [], [], [], 0
    for inputs, gradient in calls:
        rows = helper.output_rows(gradient)
        mask = helper.mask(inputs, rows)
        if mask is None:
            mask = torch.ones(rows.shape[:3], dtype=torch.bool)
        a.append(_moment(helper.block_rows(inputs, rows), diagonal))
        g.append(moment(rows * mask.unsqueeze(3)))
        reached.append(mask.sum((1, 2)))
        every += mask[0].numel()
    count = torch.stack(reached).sum(0)
    if _spec(helper, "left").mean_over != "group rows":
        count = torch.full_like(count, every)
    count = count.clamp(min=1).view(-1, 1, 1)
    return torch.stack(a).sum(0) / samples, torch.stack(g).sum(0) / count


def _spec(helper: LayerHelper, side: Literal["left", "right"]) -> FactorSpec:
    """Return the spec of one of K-FAC's factors for a helper."""
    _, out, into = helper.shape
    size = into if side == "right" else out
    return helper.factor(FactorSpec(side, side, helper.shape[0], size))


def _moment(rows: Tensor, diagonal: bool) -> Tensor:
    return rows.square().sum((1, 2)) if diagonal else moment(rows)


def _lower(factor: Tensor) -> Tensor:
    return factor.tril() if factor.dim() == 3 else factor


def _check_packing(helper: LayerHelper, name: str) -> None:
    tensors = {k: torch.randn_like(p) for k, p in helper.parameters.items()}
    matrix = helper.pack(tensors)
    packed, stated = list(matrix.shape), list(helper.shape)
    assert packed == stated, f"{name}: pack gives {packed}, and `shape` is {stated}"
    back = helper.unpack(matrix)
    for key, tensor in tensors.items():
        assert key in back, f"{name}: unpack loses the {key}"
        compare(back[key], tensor, f"{name}: {key} after pack and unpack")
    invented = set(back) - set(tensors)
    assert not invented, f"{name}: unpack invents {invented}"
    # Norms, and bounds on steps, apply to the matrix.
    squares = flat(tensors.values()).square().sum()
    compare(matrix.square().sum(), squares, f"{name}: the sum of squares after pack")


def check_solver(
    solver: Solver,
    *,
    sizes: Iterable[tuple[int, int]] = ((1, 1), (1, 4), (3, 2), (8, 13)),
    conditions: Sequence[float] = (1.0, 1e4, 1e8),
    dampings: Sequence[float] = (1.0, 1e-3, 1e-6),
    rtol: float = 1e-6,
    tolerance: float | None = None,
) -> None:
    """Check a solver against dense solves under the same damping, in float64.

    The reference is ``(left + share I)^-1 V (right + share I)^-1`` for a solver with
    ``damps_factors``, ``(left ⊗ right + damping I)^-1 vec(V)`` for others, and ``V (right + damping
    I)^-1`` for all if the left factor is missing. ``solve_again`` has the same reference, from the
    data of other factors and of another damping; it may need several solves of the same factors,
    and may keep its data if factors have changed little. Two shares must add at least the damping
    to their block. If ``follows`` is set, tensors from ``follow`` of the same factor must be as
    good. The check also covers the announced tensors, unchanged inputs, float32, zero factors, and
    an error for a matrix that is not finite.

    Args:
        solver: The solver.
        sizes: ``(out, in)`` of the blocks.
        conditions: Condition numbers of the factors; their spectra fall geometrically from 1.
        dampings: The dampings.
        rtol: The largest relative error. It covers the digits that a condition number costs.
        tolerance: For a solver that is approximate by design, in place of ``rtol``: the largest
            relative error ``||X - X*|| / ||X*||`` of a solution X, or its largest relative residual
            ``||C X - V|| / ||V||`` with the damped curvature C, whichever is smaller. X must also
            be a direction of descent. State it for the conditions and dampings that it holds for.

    Raises:
        AssertionError: If the solver is wrong.
        ValueError: If the tolerance is not between 0 and 1; zeros would pass with 1.
    """
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(f"check_solver: tolerance must be between 0 and 1, not {tolerance!r}")
    bound = _Bound(rtol, tolerance)
    for (out, into), condition, damping in itertools.product(sizes, conditions, dampings):
        factors = {"left": _psd(2, out, condition), "right": _psd(2, into, condition)}
        name = f"{solver!r}, {out}x{into}, condition {condition:g}, damping {damping:g}"
        _check_solution(solver, factors, damping, name, bound)
        for scale, may_keep in ((0.8, True), (0.1, False)):
            before = {side: scale * factor for side, factor in factors.items()}
            again = f"{name}, solved again after {scale:g} of the factors"
            _check_again(solver, before, factors, damping, again, bound, may_keep=may_keep)
    for damping in dampings:
        before = {"left": 0.1 * _psd(2, 5, 10.0), "right": 0.1 * _psd(2, 7, 10.0)}
        factors = {"left": _psd(2, 5, 10.0, seed=1), "right": _psd(2, 7, 10.0, seed=1)}
        name = f"{solver!r}, damping {damping:g}, solved again in another basis"
        _check_again(solver, before, factors, damping, name, bound, may_keep=False)
        if solver.diagonals:
            _compare_diagonals(solver, damping, _Bound(1e-6, tolerance))
    if solver.damps_factors:
        _check_shares(solver)
    zero = torch.zeros(2, 3, 3, dtype=torch.float64)
    factors = {"left": zero, "right": _psd(2, 4, 10.0)}
    _check_solution(solver, factors, 0.1, f"{solver!r}, zero factor", bound)
    _solve_nan(solver)


def _solve_nan(solver: Solver) -> None:
    """Raise unless a factor of NaNs is an error, or gives data that are not finite."""
    bad = torch.full((1, 3, 3), float("nan"))
    try:
        data = solver.solve(bad, torch.ones(1))
    except LinAlgError:
        return
    finite = all(bool(t.isfinite().all()) for t in data.values())
    assert not finite, f"{solver!r}: a factor of NaNs gives finite second-order data"


def _compare_diagonals(solver: Solver, damping: float, bound: _Bound) -> None:
    """Compare solutions with dense ones where one factor is diagonal, or both."""
    for diagonal in (("left",), ("right",), ("left", "right")):
        factors = {"left": _psd(2, 3, 100.0), "right": _psd(2, 5, 100.0)}
        for side in diagonal:
            factors[side] = factors[side].diagonal(dim1=1, dim2=2).clone()
            factors[side][:, 0] = 0  # an index that never occurs
        name = f"{solver!r}, diagonal {' and '.join(diagonal)}, damping {damping:g}"
        _check_solution(solver, factors, damping, name, bound)


class _Problem(NamedTuple):
    """A gradient, the dense solution, and the product with the damped curvature."""

    gradient: Tensor
    solution: Tensor
    product: Callable[[Tensor], Tensor]


class _Bound(NamedTuple):
    """The largest relative error of an exact solver, or the tolerance of an approximate one."""

    rtol: float
    tolerance: float | None

    def met(self, result: Tensor, problem: _Problem) -> bool:
        """Return whether a result is as close to the solution as it has to be."""
        error = (result - problem.solution).norm() / problem.solution.norm()
        if self.tolerance is None:
            return bool(error <= self.rtol)
        residual = (problem.product(result) - problem.gradient).norm() / problem.gradient.norm()
        # Iterations bound the residual, rounded data the error. Written so that a NaN fails.
        return bool(error <= self.tolerance) or bool(residual <= self.tolerance)

    def compare(self, result: Tensor, problem: _Problem, name: str) -> None:
        """Raise if a result is too far from the solution, or leads uphill."""
        if self.tolerance is None or result.shape != problem.solution.shape:
            compare(result, problem.solution, name, rtol=self.rtol)
            return
        if not self.met(result, problem):
            compare(result, problem.solution, name, rtol=self.tolerance)
        slopes = (result * problem.gradient).sum((1, 2))
        assert bool((slopes > 0).all()), f"{name}: the result is not a descent direction"


def _check_solution(
    solver: Solver, factors: Data, damping: float, name: str, bound: _Bound
) -> None:
    """Compare the solver with a dense solve; factors are matrices, or diagonals of them."""
    shares = _shares(solver, factors, damping)
    data: dict[str, dict[str, Tensor]] = {}
    for side, factor in factors.items():
        before = factor.clone()
        data[side] = solver.solve(factor, shares[side])
        assert torch.equal(factor, before), f"{name}: solve changes the factor"
        _check_announced(solver, side, factor, data[side], name)
        if factor.dim() == 3:
            data[side] = _followed(solver, side, factor, data[side], name)
    problem = _problem(solver, factors, damping)
    gradient = problem.gradient
    gradient_before = gradient.clone()
    result = solver.apply(gradient, **data, damping=damping)
    assert torch.equal(gradient, gradient_before), f"{name}: apply changes the gradient"
    bound.compare(result, problem, name)
    # A single factor, of inputs, takes the whole damping; the other one is the identity.
    right = factors["right"]
    alone = solver.solve(right, solver.shares([mean_trace(right)], damping)[0])
    result = solver.apply_right(gradient, right=alone, damping=damping)
    assert torch.equal(gradient, gradient_before), f"{name}: apply_right changes the gradient"
    damped = _damped(right, damping)
    expected = torch.linalg.solve(damped, gradient, left=False)
    problem = _Problem(gradient, expected, lambda x: x @ damped)
    bound.compare(result, problem, f"{name}, without a left factor")
    low_data: dict[str, Data] = {}
    for side, tensors in data.items():
        low_data[side] = {key: tensor.float() for key, tensor in tensors.items()}
    low = solver.apply(gradient.float(), **low_data, damping=damping)
    assert low.dtype == torch.float32, f"{name}: apply turns float32 into {low.dtype}"


def _shares(solver: Solver, factors: Data, damping: float) -> dict[str, Tensor]:
    """Return each side's share of the damping."""
    # The inputs' factor comes first, as in K-FAC's (A, G).
    traces = [mean_trace(factors["right"]), mean_trace(factors["left"])]
    right, left = solver.shares(traces, damping)
    return {"left": left, "right": right}


def _damped(factor: Tensor, damping: float | Tensor) -> Tensor:
    """Return dense matrices of a factor, with a damping, or with one for each group."""
    matrix = factor if factor.dim() == 3 else factor.diag_embed()
    return matrix + torch.as_tensor(damping).view(-1, 1, 1) * torch.eye(len(matrix[0])).to(matrix)


def _check_shares(solver: Solver) -> None:
    """Check that two shares add at least the damping to the block."""
    # The factors are multiples of the identity, one of them by at least one, so adding the whole
    # damping to each factor is enough.
    for damping in (1e2, 1.0, 1e-3, 1e-6):
        for scales in ((1.0, 1.0), (100.0, 1.0), (1.0, 100.0), (0.01, 100.0), (100.0, 0.01)):
            a, g = torch.tensor(scales, dtype=torch.float64).view(2, 1).repeat(1, 2)
            first, second = solver.shares([a, g], damping)
            added = float((a * second + g * first + first * second).min())
            assert added >= damping * (1 - 1e-6), (
                f"{solver!r}: shares() of the factors {scales[0]:g} I and {scales[1]:g} I add "
                f"{added:.3e} to their block, and the damping is {damping:g}"
            )


def _check_announced(solver: Solver, side: str, matrix: Tensor, data: Data, name: str) -> None:
    """Compare the tensors of a factor with the announced ones."""
    kind: Literal["psd", "diagonal"] = "psd" if matrix.dim() == 3 else "diagonal"
    spec = solver.tensors(FactorSpec(side, side, *matrix.shape[:2], kind=kind))  # type: ignore[arg-type]
    names, returned = list(spec), list(data)
    assert names == returned, f"{name}: tensors() announces {names}, solve() returns {returned}"
    for key, tensor in data.items():
        shape = tuple(tensor.shape)
        assert shape == spec[key].shape, f"{name}: {key} is {shape}, not {spec[key].shape}"
        if spec[key].symmetric:
            assert torch.equal(tensor, tensor.mT), f"{name}: {key} is not symmetric to the bit"


def _followed(
    solver: Solver, side: str, matrix: Tensor, data: dict[str, Tensor], name: str
) -> dict[str, Tensor]:
    """Return the data after `Solver.follow` of the very factor that was solved."""
    # The result of `follow` is defined for an unchanged factor only: the data must remain as good
    # as they were.
    factor, data_before = matrix.clone(), copy.deepcopy(data)
    followed = solver.follow(matrix, data)
    assert torch.equal(matrix, factor), f"{name}: follow changes the factor"
    assert _equal(data, data_before), f"{name}: follow changes the data that it is given"
    if followed is None:
        return data
    assert solver.follows, (
        f"{name}: follow() makes tensors and `follows` is false, so it is never called"
    )
    unknown = set(followed) - set(data)
    assert not unknown, f"{name}: follow() makes {unknown}, which solve() does not"
    changed = {**data, **followed}
    _check_announced(solver, side, matrix, changed, f"{name}, followed")
    return changed


def _problem(solver: Solver, factors: Data, damping: float) -> _Problem:
    """Return a gradient and its dense solution."""
    groups, out = factors["left"].shape[:2]
    into = factors["right"].shape[1]
    gradient = torch.randn(groups, out, into, dtype=torch.float64, generator=seeded())
    if solver.damps_factors:
        shares = _shares(solver, factors, damping)
        left = _damped(factors["left"], shares["left"])
        right = _damped(factors["right"], shares["right"])
        # Solve one factor at a time: the product's condition is the product of conditions.
        half = torch.linalg.solve(left, gradient)
        solution = torch.linalg.solve(right, half.mT).mT
        return _Problem(gradient, solution, lambda x: left @ x @ right)
    left, right = _damped(factors["left"], 0.0), _damped(factors["right"], 0.0)
    dense = torch.stack(list(map(torch.kron, left, right)))
    solution = torch.linalg.solve(_damped(dense, damping), gradient.flatten(1)).view_as(gradient)
    return _Problem(gradient, solution, lambda x: left @ x @ right + damping * x)


_SETTLES = 50  # solves of one matrix within which a warm-started iteration has converged


def _check_again(
    solver: Solver,
    before: Data,
    now: Data,
    damping: float,
    name: str,
    bound: _Bound,
    *,
    may_keep: bool,
) -> None:
    """Compare `Solver.solve_again`, from the data of other factors, with a dense solve."""
    # An iteration may need several solves of the same factors. A solver may keep its data, to the
    # bit, if factors have changed little; here they change by several times their norm, so it may
    # not. The last solve had another damping.
    shares = _shares(solver, before, 2 * damping)
    data = {side: solver.solve(matrix, shares[side]) for side, matrix in before.items()}
    shares = _shares(solver, now, damping)
    problem = _problem(solver, now, damping)
    for count in range(1, _SETTLES + 1):
        last, data, kept = data, {}, False
        for side, matrix in now.items():
            factor = matrix.clone()
            data_before = copy.deepcopy(last[side])
            data[side] = solver.solve_again(matrix, shares[side], last[side])
            assert torch.equal(matrix, factor), f"{name}: solve_again changes the factor"
            assert _equal(last[side], data_before), f"{name}: solve_again changes the last data"
            _check_announced(solver, side, matrix, data[side], name)
            kept |= _equal(data[side], data_before)
        if may_keep and kept and count == 1:
            return
        result = solver.apply(problem.gradient, **data, damping=damping)
        if count == _SETTLES or bound.met(result, problem):
            break
    bound.compare(result, problem, name)


def _equal(tensors: Data, expected: Data) -> bool:
    return all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())


def _psd(groups: int, n: int, condition: float, seed: int = 0) -> Tensor:
    random = torch.randn(groups, n, n, dtype=torch.float64, generator=seeded(seed))
    basis: Tensor = torch.linalg.qr(random).Q
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    matrix = basis * values @ basis.mT
    return (matrix + matrix.mT) / 2


METHODS = ("kfac", "foof", "ekfac", "soap", "adamw")
"""Blocks with two factors, one, three, factors of gradients and a state, none and a state."""


def check_strategy(
    strategy: Strategy,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4, 6, 8),
    methods: Sequence[Method | str] = METHODS,
) -> None:
    """Check a strategy: its placements can be executed, without deadlocks.

    For every world size and method the placement of several models is validated, compared with a
    second call's, and executed by every rank of a simulated world. Then the ranks of every group
    must have entered the same collectives in the same order, and each must have sent and must hold
    the bytes that the placement plans. The last world exchanges gradients in both ways, by owner
    and fused.

    Args:
        strategy: The strategy.
        world_sizes: Numbers of ranks.
        methods: Methods whose blocks it places: the first on all numbers of ranks, the others on
            the last two. Check a strategy for blocks of two factors only with ``("kfac",)``.

    Raises:
        AssertionError: If the strategy is wrong.
    """
    on_all = itertools.product(methods[:1], world_sizes)
    on_last = itertools.product(methods[1:], world_sizes[-2:])
    for method, ranks in itertools.chain(on_all, on_last):
        name = f"{strategy!r} of {method!r} on {ranks} rank(s)"
        for work in _works(method):
            placement = strategy.place(work, ranks)
            assert placement.world_size == ranks, f"{name}: for {placement.world_size} ranks"
            assert placement.work == tuple(work), f"{name}: the placement is of other work"
            try:
                complete(placement).validate()
            except ValueError as error:
                raise AssertionError(f"{name}: {error}") from error
            again = copy.deepcopy(strategy).place(list(work), ranks)
            assert placement.digest == again.digest, f"{name}: place() is not a pure function"
        _check_traces(strategy, method, ranks, name, fused=False)
        if ranks == world_sizes[-1]:
            _check_traces(strategy, method, ranks, f"{name}, fused", fused=True)


@functools.cache
def _works(method: Method | str) -> list[list[BlockWork]]:
    """Return the work of several models: without a layer, with one, many different, many alike."""
    uneven = [(3 + 7 * i, 2**i) for i in range(1, 7)]
    models = [[(5, 10), (10, 2)], [*uneven, (4, 2)], list(itertools.repeat((8, 8), 12))]
    works: list[list[BlockWork]] = [[]]
    for sizes in models:
        backend = Recording()
        preconditioner = Preconditioner(
            nn.Sequential(*itertools.starmap(nn.Linear, sizes)),
            method,
            kl_clip=None,
            distribution=Distribution(backend=backend),
        )
        works.append(list(preconditioner.placement.work))
        preconditioner.close()
    return works


def _check_traces(
    strategy: Strategy, method: Method | str, ranks: int, name: str, *, fused: bool
) -> None:
    backends = [Recording(rank=rank, world_size=ranks, fused=fused) for rank in range(ranks)]
    for backend in backends:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2))
        with torch.no_grad():  # factors that a strategy rounds stay positive by their damping
            for parameter in model.parameters():
                parameter.mul_(0.01)
        preconditioner = Preconditioner(
            model,
            method,
            strategy=strategy,
            distribution=Distribution(backend=backend),
            kl_clip=None,
            solve_every=2,
            statistics_every=1,
        )
        # A simulated world sends nothing, so the ranks' weights equal one rank's.
        for _ in range(_STEPS):
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


_STEPS = 4  # solves in the first and third, statistics in all


def _check_plan(preconditioner: Preconditioner, rank: int, name: str) -> None:
    placement, fused = preconditioner.placement, preconditioner.backend.fused
    expected: dict[str, dict[str, int]] = {}
    for step in range(_STEPS):
        phases = placement.traffic(
            rank, statistics=True, solve=step % 2 == 0, fused=fused, first=step == 0
        )
        for phase, count in phases.items():
            total = expected.setdefault(phase, {"bytes": 0, "calls": 0})
            total["bytes"] += count["bytes"]
            total["calls"] += count["calls"]
    traffic = preconditioner.traffic()
    start = traffic.pop("start", {"bytes": 0, "calls": 0})
    traffic["total"]["bytes"] -= start["bytes"]
    traffic["total"]["calls"] -= start["calls"]
    assert traffic == expected, f"{name}: rank {rank} sends {traffic}, its plan is {expected}"
    held, planned = preconditioner.memory_usage(), placement.memory(rank)
    assert held == planned, f"{name}: rank {rank} holds {held}, its plan is {planned}"
