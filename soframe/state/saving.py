"""State: what a preconditioner must remember, independent of world size and strategy.

Running factors are stored as packed triangles. Second-order data is stored too, since between
solves it cannot be recomputed from the factors, which have moved on. Everything is tensors,
numbers, strings, dicts and lists, so ``torch.load(weights_only=True)`` reads it, and sealed with
checksums. Loading checks everything before it changes anything.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.registration import plain_name
from soframe.comm.agreement import agree_on_state
from soframe.comm.base import Backend
from soframe.comm.fused import Parcel, deliver
from soframe.comm.stages import ALONE, Stages
from soframe.registry import describe
from soframe.specs import TensorSpec
from soframe.state import checksums
from soframe.state.transfer import to_everyone
from soframe.step.averages import settled, store
from soframe.step.rates import LearningRates
from soframe.strategies.placement import BlockPlacement

FORMAT = "soframe.Preconditioner"
# 2: the features of a convolution are in the order kernel row, kernel column, channel; before, the
# channel came first. 3: with checksums; otherwise as 2. 4: with a mass for each factor, and with
# what methods keep; otherwise as 3.
VERSION = 4
READABLE = (2, 3, VERSION)


def save(
    placed: PlacedBlocks,
    *,
    counters: Mapping[str, int],
    step: int,
    owed_statistics: int,
    scaling: str,
) -> dict[str, Any]:
    """Return the state.

    Args:
        placed: The blocks, with their places. Where a rank lacks second-order data, every rank must
            call.
        counters: What went wrong so far.
        step: Completed steps.
        owed_statistics: Steps to come that take statistics whatever the interval says.
        scaling: The scaling convention.

    Returns:
        The state, the same on every rank.
    """
    blocks = placed.blocks
    if any(map(_is_spread, placed.placement.blocks)):
        placed.backend.meet("Preconditioner.state_dict()")
    state = header(blocks, counters, step=step, owed_statistics=owed_statistics, scaling=scaling)
    factors = _gather_factors(placed)
    data = _gather_second_order(placed)
    states = _gather_states(placed)
    for block in blocks:
        saved = state["blocks"][block.name]
        saved.update(factors=factors[block], second_order=data[block])
        saved["state"] = states.get(block, {})
    return state


def header(
    blocks: Sequence[Block],
    counters: Mapping[str, int],
    step: int,
    owed_statistics: int,
    scaling: str,
) -> dict[str, Any]:
    """Return the state without its tensors: numbers and strings, the same on every rank.

    Args:
        blocks: The blocks.
        counters: What went wrong so far.
        step: Completed steps.
        owed_statistics: Steps to come that take statistics whatever the interval says.
        scaling: The scaling convention.

    Returns:
        What `check_header` checks.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "owed_statistics": owed_statistics,
        "scaling": scaling,
        "counters": dict(counters),
        "blocks": {
            block.name: {
                "shape": list(block.shape),
                "method": describe(block.method),
                "solver": describe(block.solver),
                "solvers": _solvers(block),
                "mass": block.mass,
                "masses": {name: list(masses) for name, masses in block.record.masses.items()},
                "updates": block.record.updates,
            }
            for block in blocks
        },
    }


def _is_spread(place: BlockPlacement) -> bool:
    """Return whether some rank lacks what another has."""
    everyone = place.everyone
    factors = range(len(place.owners))
    return (
        len(place.gradient_workers) < len(everyone)
        or place.deferred
        or any(place.holding(factor) != everyone for factor in factors)
    )


def _gather_factors(
    placed: PlacedBlocks,
) -> dict[Block, dict[str, Tensor]]:
    """Bring the running factors of every block to every rank, packed and settled."""
    backend = placed.backend
    factors: dict[Block, dict[str, Tensor]] = {}
    for block, place in placed:
        factors[block] = {}
        masses = block.record.masses
        if not masses:
            continue
        held = settled(placed, block.stack, (block.member,), "state")
        for index, factor in enumerate(block.factors):
            if factor.name not in masses:
                continue
            tensor = held.get(factor.name)
            if place.holding(index) != place.everyone:
                spec = TensorSpec(factor.packed_shape)
                tensors = None if tensor is None else [tensor]
                source = place.owners[index]
                (tensor,) = to_everyone(
                    backend, block, source=source, specs=(spec,), tensors=tensors, phase="state"
                )
            assert tensor is not None
            # What is packed already is the running factor itself, which will change.
            packed = place.packed or factor.kind != "psd"
            factors[block][factor.name] = tensor.clone() if packed else tensor
    return factors


def _gather_second_order(
    placed: PlacedBlocks,
) -> dict[Block, dict[str, dict[str, Tensor]]]:
    """Bring the second-order data of every block to every rank."""
    backend = placed.backend
    everyone = tuple(range(backend.world_size))
    parcels: list[tuple[Block, Parcel]] = []
    for block, place in placed:
        if not block.solved or len(place.gradient_workers) == backend.world_size:
            continue
        source = place.gradient_workers[0]
        names = flat_specs(block)
        tensors = (
            [block.second_order[f][n] for f, n, _ in names] if backend.rank == source else None
        )
        specs = tuple(spec for _, _, spec in names)
        parcel = Parcel(
            source, everyone, specs=specs, dtype=block.dtype, device=block.device, tensors=tensors
        )
        parcels.append((block, parcel))
    if parcels:
        deliver(backend, [parcel for _, parcel in parcels], "state")
    # A block that is not solved altogether is solved anew at the next step.
    data = {block: {f: dict(t) for f, t in block.second_order.items()} for block in placed.blocks}
    for block, parcel in parcels:
        data[block] = {}
        for (factor, name, _), tensor in zip(flat_specs(block), parcel.tensors or (), strict=True):
            data[block].setdefault(factor, {})[name] = tensor
    return data


def flat_specs(block: Block) -> list[tuple[str, str, TensorSpec]]:
    """Return (factor, tensor, spec) of the second-order data, in the order of travel."""
    return [
        (factor, name, spec)
        for factor, specs in block.tensors.items()
        for name, spec in specs.items()
    ]


def _gather_states(
    placed: PlacedBlocks,
) -> dict[Block, dict[str, Tensor]]:
    """Bring what methods keep to every rank."""
    backend = placed.backend
    states: dict[Block, dict[str, Tensor]] = {}
    for block, place in placed:
        if not block.record.updates or not block.states:
            continue
        if len(place.gradient_workers) == backend.world_size:
            states[block] = {name: tensor.clone() for name, tensor in block.state.items()}
            continue
        source = place.gradient_workers[0]
        held = [block.state[name] for name in block.states] if backend.rank == source else None
        specs = tuple(block.states.values())
        tensors = to_everyone(
            backend, block, source=source, specs=specs, tensors=held, phase="state"
        )
        states[block] = dict(zip(block.states, tensors, strict=True))
    return states


def check(state: Any, blocks: Sequence[Block], scaling: str, lrs: LearningRates) -> None:
    """Check that a state belongs to these blocks, is whole, and is what was saved.

    Args:
        state: What `save` returned, perhaps in another run.
        blocks: The blocks.
        scaling: The scaling convention in force.
        lrs: Where the learning rates of the blocks come from.

    Raises:
        ValueError: If it does not; the message says what differs.
    """
    check_header(state, blocks, scaling, lrs)
    for block in blocks:
        _check_tensors(block.name, state["blocks"][block.name], block)
    verify(state)


def verify(state: Mapping[str, Any]) -> None:
    """Check that a state is what was saved, as far as it has checksums.

    Args:
        state: What `check_header` has checked.

    Raises:
        ValueError: If it is not.
    """
    if state["version"] > 2:
        checksums.verify(state)
    else:
        warn_unverified(f"the state has version {state['version']}")


def check_header(state: Any, blocks: Sequence[Block], scaling: str, lrs: LearningRates) -> None:
    """Check that a state belongs to these blocks, without a look at its tensors or checksums.

    Args:
        state: What `save` returned, perhaps in another run; its blocks may lack their tensors.
        blocks: The blocks.
        scaling: The scaling convention in force.
        lrs: Where the learning rates of the blocks come from.

    Raises:
        ValueError: If it does not; the message says what differs.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError("this is not the state of a soframe.Preconditioner")
    version = state.get("version")
    if isinstance(version, bool) or version not in READABLE:
        raise ValueError(
            f"the state has version {version!r}; this soframe reads versions "
            f"{READABLE[0]} to {READABLE[-1]}: load it with the soframe that wrote it"
        )
    keys: tuple[str, ...] = ("step", "owed_statistics", "scaling", "counters", "blocks")
    if version > 2:
        keys = (*keys, "initial_lrs", checksums.KEY)
    elif checksums.KEY in state:
        raise ValueError(f"the state is damaged: version {version} had no {checksums.KEY}")
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(f"the state is truncated: it lacks {', '.join(missing)}")
    for key in ("step", "owed_statistics"):
        _check_count(key, state[key])
    for key, count in _mapping("counters", state["counters"]).items():
        if not isinstance(key, str):
            raise ValueError(f"the state is damaged: there is a counter {key!r}")
        _check_count(f"counter {key!r}", count)
    lrs.check_state(state.get("initial_lrs", []))
    _check_history(state.get("history", {}))
    if state["scaling"] != scaling:
        raise ValueError(
            f"the state was made with scaling={state['scaling']!r}, not {scaling!r}: the factors "
            f"differ by constants"
        )
    saved, expected = _mapping("blocks", state["blocks"]), {block.name: block for block in blocks}
    if set(saved) != set(expected):
        raise ValueError(_other_layers(set(saved), set(expected)))
    for name, block in expected.items():
        _check_block(name, _mapping(f"block {name!r}", saved[name]), block)


def _other_layers(saved: set[str], expected: set[str]) -> str:
    """Return what to say of a state whose blocks have other names."""
    problem = (
        f"the state is of another model or another choice of layers: it lacks "
        f"{sorted(expected - saved) or 'nothing'} and has {sorted(saved - expected) or 'nothing'} "
        f"besides"
    )
    if {plain_name(str(name)) for name in saved} != expected:
        return problem
    return (
        f"{problem}. These are the same layers, within wrappers whose names states do not have any "
        f"more: take '_orig_mod' and '_checkpoint_wrapped_module' out of the names in "
        f"state['blocks'] and state['history'], and load soframe.checkpoint.seal(state)"
    )


def warn_unverified(what: str) -> None:
    """Say that nothing tells whether a state is what was saved.

    Args:
        what: Why.
    """
    warnings.warn(
        f"soframe: {what}, which has no checksums: bits that were flipped since would load. Save "
        f"it anew.",
        stacklevel=3,
    )


def _check_count(what: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"the state is damaged: {what} is {value!r}")


def _mapping(what: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the state is damaged: {what} is {type(value).__name__}, not a dict")
    return value


def _check_block(name: str, saved: Mapping[Any, Any], block: Block) -> None:
    _require(name, saved, "shape", "method", "solver", "mass")
    if saved["shape"] != list(block.shape):
        raise ValueError(
            f"block {name!r} has shape {saved['shape']} in the state and {list(block.shape)} in "
            f"the model"
        )
    if saved["method"] != describe(block.method):
        raise ValueError(
            f"block {name!r} was made by {saved['method']}, and is now by {describe(block.method)}"
        )
    mass = saved["mass"]
    if not isinstance(mass, float) or not 0 <= mass < math.inf:
        raise ValueError(f"the state is damaged: mass of block {name!r} is {mass!r}")
    _check_masses(name, saved, block)
    _check_count(f"number of updates of block {name!r}", saved.get("updates", 0))
    _check_count(f"number of rows of block {name!r}", saved.get("rows", 0))
    kinds = {"solver": str, "solvers": dict, "input_of": str, "solved": bool}
    for key, kind in kinds.items():
        if not isinstance(saved.get(key, kind()), kind):
            raise ValueError(f"the state is damaged: {key} of block {name!r} is {saved[key]!r}")
    if saved.get("updates", 0) and block.method.rebases and not same_solvers(saved, block):
        raise ValueError(
            f"block {name!r} was solved by {saved['solver']}, and is now by "
            f"{describe(block.solver)}: what {describe(block.method)} keeps lies in the bases of "
            f"the last solve, which another solver cannot use. Pass the solver= that it was solved "
            f"by"
        )


def _require(name: str, saved: Mapping[Any, Any], *keys: str) -> None:
    missing = [key for key in keys if key not in saved]
    if missing:
        raise ValueError(f"the state is truncated: block {name!r} lacks {', '.join(missing)}")


def _check_tensors(name: str, saved: Mapping[Any, Any], block: Block) -> None:
    _require(name, saved, "factors", "second_order")
    factors = _mapping(f"factors of block {name!r}", saved["factors"])
    wanted = {f.name: f.packed_shape for f in block.factors}
    if set(factors) != set(masses_of(saved, block)):
        raise ValueError(f"the state is truncated: block {name!r} has factors {sorted(factors)}")
    for factor, tensor in factors.items():
        _check_tensor(f"factor {factor} of block {name!r}", tensor, wanted[factor])
    _check_kept(name, saved, block)
    second_order = _mapping(f"second-order data of block {name!r}", saved["second_order"])
    if not same_solvers(saved, block):
        return
    if second_order and set(second_order) != set(block.tensors):
        raise ValueError(f"the state is truncated: second-order data of block {name!r}")
    for factor, tensors in second_order.items():
        specs = block.tensors[factor]
        if set(_mapping(f"second-order data of block {name!r}", tensors)) != set(specs):
            raise ValueError(f"the state is truncated: second-order data of block {name!r}")
        for tensor_name, spec in specs.items():
            what = f"{tensor_name} of factor {factor} of block {name!r}"
            _check_tensor(what, tensors[tensor_name], spec.shape)


def _check_kept(name: str, saved: Mapping[Any, Any], block: Block) -> None:
    kept = _mapping(f"state of block {name!r}", saved.get("state", {}))
    if set(kept) != (set(block.states) if saved.get("updates", 0) else set()):
        raise ValueError(f"the state is truncated: block {name!r} keeps {sorted(kept)}")
    for tensor_name, tensor in kept.items():
        what = f"{tensor_name} of block {name!r}"
        _check_tensor(what, tensor, block.states[tensor_name].shape)


def same_solvers(saved: Mapping[Any, Any], block: Block) -> bool:
    """Return whether the second-order data of a block in a state are those of its solvers now.

    A method that chooses all solvers itself has the same ones, whatever the user's solver is: what
    it keeps in a basis would be lost with the basis. One may also derive its own from the user's.
    States of before have the user's alone.

    Args:
        saved: The block's part of the state, of the same method.
        block: The block.
    """
    if "solvers" in saved:
        return bool(saved["solvers"] == _solvers(block))
    asked = any(solver is block.solver for _, _, solver in block.solved_here)
    return not asked or bool(saved["solver"] == describe(block.solver))


def _solvers(block: Block) -> dict[str, str]:
    """Return who solves each factor of a block: the user's solver, or the method's own."""
    return {factor.name: describe(solver) for _, factor, solver in block.solved_here}


def masses_of(saved: Mapping[Any, Any], block: Block) -> dict[str, tuple[float, ...]]:
    """Return the masses of a block's factors in a state; up to version 3 they had one in common.

    Args:
        saved: The block's part of the state.
        block: The block.
    """
    if "masses" in saved:
        return {name: tuple(masses) for name, masses in saved["masses"].items()}
    mass = (float(saved["mass"]),)
    return {factor.name: mass for factor in block.factors} if saved["mass"] > 0 else {}


def _check_masses(name: str, saved: Mapping[Any, Any], block: Block) -> None:
    sizes = {f.name: f.groups if f.mean_over == "group rows" else 1 for f in block.factors}
    for factor, masses in _mapping(f"masses of block {name!r}", saved.get("masses", {})).items():
        good = isinstance(masses, list | tuple) and len(masses) == sizes.get(factor)
        if not good or not all(isinstance(m, float) and 0 <= m < math.inf for m in masses):
            raise ValueError(f"the state is damaged: mass of {factor} of block {name!r}: {masses}")


def _check_tensor(what: str, tensor: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"the state is damaged: {what} is {got}, not a tensor of shape {shape}")
    if not tensor.is_floating_point() or tensor.is_meta or tensor.layout != torch.strided:
        raise ValueError(
            f"the state is damaged: {what} is no dense tensor of floating-point numbers, but "
            f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"the state is damaged: {what} is not finite")


def load(
    state: Any,
    placed: PlacedBlocks,
    check: Callable[[], object],
    stages: Stages = ALONE,
) -> None:
    """Load a state on every rank, or on none.

    Args:
        state: The state.
        placed: The blocks, with their places.
        check: Raises if this rank cannot load the state.
        stages: Who loads the states of the other stages of a model.

    Raises:
        ValueError: If some rank cannot, or the ranks have different states.
    """

    def common() -> str:
        numbers = {key: state[key] for key in ("step", "owed_statistics", "counters")}
        numbers["history"] = state.get("history")
        numbers["initial_lrs"] = [float(rate) for rate in state.get("initial_lrs", ())]
        numbers["damping"] = state.get("damping")
        known = {
            name: [
                b["mass"],
                b.get("masses"),
                b.get("updates"),
                sorted(b["second_order"]),
                b.get("rows"),
                b.get("input_of"),
            ]
            for name, b in state["blocks"].items()
        }
        return json.dumps([numbers, known], sort_keys=True)

    def step() -> str:
        return json.dumps([state["step"], state["owed_statistics"]])

    agree(placed.backend, check, common, stages, step)
    load_blocks(state, placed)


def agree(
    backend: Backend,
    check: Callable[[], object],
    common: Callable[[], str],
    stages: Stages = ALONE,
    of_stages: Callable[[], str] = str,
) -> None:
    """Check something on every rank; what one rank cannot load is loaded by none.

    Args:
        backend: The backend.
        check: Raises if this rank cannot load its state.
        common: Returns, after that, what must be the same on every rank.
        stages: Who has the other stages of a model, which load nothing either then.
        of_stages: Returns what must be the same on all of them.

    Raises:
        ValueError: If some rank cannot, or the ranks have different states.
    """
    if stages.backend is not None:
        agree(stages.backend, lambda: agree(backend, check, common), of_stages)
        return
    backend.meet("loading the state of a preconditioner")
    try:
        check()
        text = common()
    except Exception:  # whatever it is: the other ranks wait, and must be told
        agree_on_state(backend, None)
        raise
    agree_on_state(backend, text)


def load_blocks(state: Mapping[str, Any], placed: PlacedBlocks) -> None:
    """Load a checked state into blocks; each rank keeps what its placement says.

    Args:
        state: The state.
        placed: The blocks, with their places.
    """
    for stack in placed.stacks:
        stack.clear()
        saved_of = [state["blocks"][block.name] for block in stack.blocks]
        for block, saved in zip(stack.blocks, saved_of, strict=True):
            load_factors(block, saved, placed.rank)
        solved = [
            i
            for i, (block, saved) in enumerate(zip(stack.blocks, saved_of, strict=True))
            # Without data of this solver the block is solved at the next step.
            if saved["second_order"] and same_solvers(saved, block)
        ]
        for index, factor in enumerate(stack.like.factors if solved else ()):
            names = stack.like.tensors.get(factor.name, {})
            if names and placed.rank in stack.place.needing(index):
                every = [saved_of[i]["second_order"][factor.name] for i in solved]
                loaded = {n: _cat([_own(d[n], stack.like) for d in every]) for n in names}
                stack.set_data(factor.name, solved, loaded)
        for i, (block, saved) in enumerate(zip(stack.blocks, saved_of, strict=True)):
            block.record.solved = i in solved
            block.record.updates = saved.get("updates", 0)
        kept = [i for i, saved in enumerate(saved_of) if saved.get("state")]
        if kept and placed.rank in stack.place.gradient_workers:
            states = [saved_of[i]["state"] for i in kept]
            loaded = {
                name: _cat([_own(state[name], stack.like) for state in states])
                for name in stack.like.states
            }
            stack.set_state(kept, loaded)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def load_factors(block: Block, saved: Mapping[str, Any], rank: int) -> None:
    """Load the running factors of one block.

    Args:
        block: The block.
        saved: Its part of the state.
        rank: This rank.
    """
    masses, stack = masses_of(saved, block), block.stack
    block.record.masses, block.record.pending = dict(masses), 0.0
    for index, factor in enumerate(block.factors):
        if factor.name in masses and stack.place.holds(rank, index):
            own = _own(saved["factors"][factor.name], block)
            stored = store(own, factor, packed=stack.place.packed)
            stack.set_factor(factor.name, (block.member,), stored)


def history(blocks: Sequence[Block]) -> dict[str, dict[str, dict[str, int]]]:
    """Return when factors took statistics and were solved: kind -> block -> factor -> step."""
    return {
        "statistics": {b.name: b.record.statistics_at for b in blocks if b.record.statistics_at},
        "solves": {b.name: b.record.solved_at for b in blocks if b.record.solved_at},
    }


def load_history(saved: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    """Continue from a `history`; ages that it does not have are not known."""
    for block in blocks:
        block.record.statistics_at = dict(saved.get("statistics", {}).get(block.name, {}))
        block.record.solved_at = dict(saved.get("solves", {}).get(block.name, {}))


def _check_history(saved: object) -> None:
    steps: list[object] = []
    good = isinstance(saved, Mapping) and set(saved) <= {"statistics", "solves"}
    for blocks in saved.values() if isinstance(saved, Mapping) else ():
        good = good and isinstance(blocks, Mapping)
        for factors in blocks.values() if isinstance(blocks, Mapping) else ():
            good = good and isinstance(factors, Mapping)
            steps += factors.values() if isinstance(factors, Mapping) else ()
    if not good or not all(type(step) is int and step >= 0 for step in steps):
        raise ValueError("the state is damaged: its history is none of steps")


def _own(tensor: Tensor, block: Block) -> Tensor:
    return tensor.detach().to(device=block.device, dtype=block.dtype, copy=True)


def memory_usage(placed: PlacedBlocks, under_way: Sequence[Tensor] | None = None) -> dict[str, int]:
    """Return bytes on this rank.

    Args:
        placed: The blocks.
        under_way: The memory of solves in the background; None where there are none.

    Returns:
        ``"factors"``, ``"accumulators"``, ``"second_order"``, ``"statistics"``, perhaps
        ``"state"`` and ``"under_way"``, and their ``"total"``.
    """
    stacks = placed.stacks
    held = {
        "factors": [t for s in stacks for t in s.factors.values()],
        "accumulators": [t for s in stacks for t in s.accumulators.values()],
        "second_order": [t for s in stacks for d in s.data.values() for t in d.values()],
        "statistics": [t for s in stacks for t in s.sums.values()],
    }
    if any(block.states for block in placed.blocks):
        held["state"] = [t for s in stacks for t in s.state.values()]
    held |= {} if under_way is None else {"under_way": list(under_way)}
    usage = {name: sum(_bytes(t) for t in tensors) for name, tensors in held.items()}
    return {**usage, "total": sum(usage.values())}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
