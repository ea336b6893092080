"""Settings and checkpoints of kfac-pytorch 0.4, which need not be installed.

::

    arguments = {"factor_update_steps": 10, "inv_update_steps": 100, "skip_layers": ["head"]}
    preconditioner = soframe.Preconditioner(model, **kfac_pytorch.settings(**arguments))
    kfac_pytorch.load_state(preconditioner, torch.load("kfac.pt"))

Both assume ``Statistics(scaling="kaisa")``, under which factors and steps equal kfac-pytorch's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.checks.arguments import FACTOR_DTYPES
from soframe.checks.values import require_integer
from soframe.checks.warning import warn
from soframe.comm.packing import pack_triangle
from soframe.methods.kfac import KFAC
from soframe.preconditioner import Preconditioner
from soframe.registry import describe
from soframe.settings import Statistics
from soframe.solvers import Eigen, Inverse, Solver
from soframe.specs import FactorSpec
from soframe.state import checksums
from soframe.state.saving import agree
from soframe.strategies import CommOpt, HybridOpt, MemOpt, Strategy, compute_cost, memory_cost

_DEFAULTS: dict[str, Any] = {
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    "damping": 0.001,
    "factor_decay": 0.95,
    "kl_clip": 0.001,
    "lr": 0.1,
    "accumulation_steps": 1,
    "allreduce_bucket_cap_mb": 25.0,
    "assignment_strategy": "COMPUTE",
    "colocate_factors": True,
    "compute_method": "EIGEN",
    "compute_eigenvalue_outer_product": True,
    "grad_worker_fraction": 1.0,
    "symmetry_aware": False,
    "grad_scaler": None,
    "factor_dtype": None,
    "inv_dtype": torch.float32,
    "skip_layers": None,
    "update_factors_in_hook": True,
    "loglevel": 10,  # logging.DEBUG
}

# Arguments without a counterpart that change no result, with the reason.
_WITHOUT = {
    "accumulation_steps": "backward passes between two steps are counted, however many there are",
    "allreduce_bucket_cap_mb": "tensors that are sent together always share buffers",
    "symmetry_aware": "symmetric matrices always travel as triangles",
    "update_factors_in_hook": "the strategy decides when statistics are sent (deferred=)",
    "loglevel": "nothing is logged at construction: print preconditioner.report() and .placement",
}

_COSTS = {"COMPUTE": compute_cost, "MEMORY": memory_cost}
_SOLVERS: dict[str, Solver] = {"EIGEN": Eigen(), "INVERSE": Inverse(split="full")}
_FRACTIONS = {"COMM_OPT": 1.0, "HYBRID_OPT": 0.5, "MEM_OPT": 0.0}


def settings(**arguments: Any) -> dict[str, Any]:
    """Translate the keyword arguments of a ``KFACPreconditioner`` of kfac-pytorch 0.4.

    Omitted arguments have kfac-pytorch's defaults. An argument without a counterpart warns unless
    it has its default. For the rate of an optimizer put
    ``lr=lambda step: optimizer.param_groups[0]["lr"]`` in place of the result's.

    Args:
        **arguments: All arguments but the model; members of kfac-pytorch's enums, or their words
            and numbers.

    Returns:
        Keyword arguments of `soframe.Preconditioner`, with ``Statistics(scaling="kaisa")``.

    Raises:
        TypeError: If kfac-pytorch has no such argument, or ``skip_layers`` is a string.
        ValueError: If a value is invalid.
    """
    unknown = sorted(set(arguments) - set(_DEFAULTS))
    if unknown:
        raise TypeError(
            f"KFACPreconditioner of kfac-pytorch 0.4 has no argument {', '.join(unknown)}; it has "
            f"{', '.join(_DEFAULTS)}"
        )
    chosen = {**_DEFAULTS, **arguments}
    for name, why in _WITHOUT.items():
        if chosen[name] != _DEFAULTS[name]:
            warn(f"{name}={chosen[name]!r} has no counterpart and is left out: {why}")
    patterns = chosen["skip_layers"] or ()
    if isinstance(patterns, str):
        raise TypeError(f"skip_layers is a list of patterns: pass [{patterns!r}]")
    method = _word("compute_method", chosen["compute_method"], _SOLVERS)
    divided = method == "EIGEN" and chosen["compute_eigenvalue_outer_product"]
    if divided and callable(chosen["damping"]):
        warn(
            "compute_eigenvalue_outer_product=True used the damping of the last solve; here it is "
            "the damping of the step itself, as without that setting"
        )
    return {
        "method": "kfac",
        "solver": _SOLVERS[method],
        "strategy": _strategy(chosen),
        "damping": chosen["damping"],
        "decay": chosen["factor_decay"],
        "kl_clip": chosen["kl_clip"],
        "lr": chosen["lr"],
        "statistics_every": chosen["factor_update_steps"],
        "solve_every": chosen["inv_update_steps"],
        "skip": tuple(patterns),
        "grad_scaler": chosen["grad_scaler"],
        "statistics": Statistics(scaling="kaisa", dtype=_dtype(arguments)),
    }


def _word(name: str, value: object, known: Mapping[str, object]) -> str:
    """Return the word for an argument, given as itself or as a member of an enum."""
    word = value.name if isinstance(value, enum.Enum) else value
    if not isinstance(word, str) or word.upper() not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return word.upper()


def _strategy(chosen: Mapping[str, Any]) -> Strategy:
    """Return the grid for a fraction of gradient workers."""
    cost = _COSTS[_word("assignment_strategy", chosen["assignment_strategy"], _COSTS)]
    fraction, together = chosen["grad_worker_fraction"], bool(chosen["colocate_factors"])
    if isinstance(fraction, enum.Enum | str):
        fraction = _FRACTIONS[_word("grad_worker_fraction", fraction, _FRACTIONS)]
    if not 0 <= fraction <= 1:
        raise ValueError(
            f"grad_worker_fraction must be in [0, 1], or a DistributedStrategy, not {fraction!r}"
        )
    if fraction == 1:
        return CommOpt(colocate=together, cost=cost)
    if not together and fraction == 0:
        warn(
            "colocate_factors=False has no meaning where one rank preconditions a gradient "
            "(MEM_OPT): it owns all factors of the layer"
        )
    if fraction == 0:
        return MemOpt(cost=cost)
    return HybridOpt(colocate=together, cost=cost, gradient_workers=float(fraction))


def _dtype(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the one dtype of factors and second-order data."""
    names = ("factor_dtype", "inv_dtype")
    dtypes = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if not dtypes:
        return None
    dtype = FACTOR_DTYPES[0]
    for name, asked in dtypes.items():
        if not asked.is_floating_point:
            raise ValueError(f"{name} must be a dtype of floating-point numbers, not {asked!r}")
        dtype = torch.promote_types(dtype, asked)
    for name, asked in dtypes.items():
        if asked != dtype:
            warn(
                f"{name}={asked} becomes {dtype}: factors and second-order data have one dtype, in "
                f"which matrices are factorised"
            )
    return dtype


_CONSTANTS = {
    "damping": "damping",
    "factor_decay": "decay",
    "kl_clip": "kl_clip",
    "factor_update_steps": "statistics_every",
    "inv_update_steps": "solve_every",
}


def load_state(preconditioner: Preconditioner, state: Mapping[str, Any]) -> None:
    """Continue from the result of ``KFACPreconditioner.state_dict()``, on every rank.

    It restores the steps and the running factors. Checkpoints of kfac-pytorch lack second-order
    data: the next step solves all layers, so a run continues exactly only if that step is a solve
    step, as with kfac-pytorch. Settings are the constructor's (`settings`); different ones in the
    checkpoint warn, except the learning rate.

    Args:
        preconditioner: A preconditioner with ``Statistics(scaling="kaisa")`` and the method
            ``"kfac"``, of the same layers.
        state: The state, with its factors. A prefix ``module.`` of all names is removed.

    Raises:
        ValueError: If, on any rank, the state has another form or other layers, or factors that
            are not finite; then no rank changes.
    """
    layers: dict[str, dict[str, Tensor]] = {}

    def check() -> None:
        layers.update(_layers(preconditioner, state))

    agree(
        preconditioner.backend,
        check,
        lambda: checksums.text([state["steps"], checksums.seal(layers)]),
    )
    target = preconditioner.state_dict()
    for name, factors in layers.items():
        target["blocks"][name].update(
            mass=1.0 if factors else 0.0,
            masses={factor: [1.0] for factor in factors},
            factors=factors,
            second_order={},
            state={},
            updates=0,
        )
    target.update(step=state["steps"], owed_statistics=0)
    preconditioner.load_state_dict(checksums.seal(target))
    for theirs, name in _CONSTANTS.items():
        value = getattr(preconditioner, name)
        if theirs in state and state[theirs] != value:
            warn(
                f"the checkpoint has {theirs}={state[theirs]!r} and the preconditioner "
                f"{name}={value!r}, which stays: the constructor's settings hold"
            )


def _layers(preconditioner: Preconditioner, state: Any) -> dict[str, dict[str, Tensor]]:
    """Return each block's packed factors; blocks without factors have an empty dict."""
    scaling = preconditioner.curvature.parts.scaling
    if scaling != "kaisa":
        raise ValueError(
            f"factors of kfac-pytorch differ by constants from those of scaling={scaling!r}: "
            f"build the preconditioner with Statistics(scaling='kaisa') (kfac_pytorch.settings "
            f"says it)"
        )
    saved = _saved_layers(state)
    blocks = {block.name: block for block in preconditioner.blocks}
    if set(saved) != set(blocks):
        missing, unknown = sorted(set(blocks) - set(saved)), sorted(set(saved) - set(blocks))
        raise ValueError(
            f"the state belongs to other layers: it lacks {missing or 'nothing'} and has "
            f"{unknown or 'nothing'} besides"
        )
    return {name: _factors(block, saved[name]) for name, block in blocks.items()}


def _saved_layers(state: Any) -> Mapping[str, Any]:
    """Return the layers of a state by name, without the prefix of a wrapper."""
    if "steps" not in state:
        raise ValueError("this is not the state of a KFACPreconditioner: it has no 'steps'")
    require_integer("the steps of the state", state["steps"], 0)
    saved: Mapping[str, Any] | None = state.get("layers")
    if saved is None:
        raise ValueError("the state has no factors: save it with include_factors=True")
    if all(name.startswith("module.") for name in saved):
        return {name.removeprefix("module."): layer for name, layer in saved.items()}
    return saved


def _factors(block: Block, layer: Any) -> dict[str, Tensor]:
    """Return the packed factors of one block, with their features in soframe's order."""
    plain = describe(block.method) == describe(KFAC())
    if not plain or any(f.kind != "psd" or f.groups > 1 for f in block.factors):
        raise ValueError(
            f"block {block.name!r} is by {describe(block.method)} and has other factors than "
            f"kfac-pytorch's layers: use method='kfac' for it, and the default layers="
        )
    missing = [spec.name for spec in block.factors if layer.get(spec.name) is None]
    if len(missing) == len(block.factors):
        return {}
    if missing:
        raise ValueError(f"layer {block.name!r} of the state lacks the factor {missing[0]}")
    return {spec.name: _packed(block, spec, layer[spec.name]) for spec in block.factors}


def _packed(block: Block, spec: FactorSpec, matrix: Tensor) -> Tensor:
    shape = (spec.size, spec.size)
    if matrix.shape != shape:
        raise ValueError(
            f"{spec.name} of layer {block.name!r} is {tuple(matrix.shape)}, not of shape {shape}"
        )
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{spec.name} of layer {block.name!r} is not finite")
    matrix = matrix.detach().to(device=block.device, dtype=block.dtype)
    if spec.name == "A" and isinstance(block.layout.module, nn.Conv2d):
        order = _patch_order(block.layout.module, spec.size).to(block.device)
        matrix = matrix[order][:, order]
    return pack_triangle(matrix[None])


def _patch_order(conv: nn.Conv2d, size: int) -> Tensor:
    """Return the index in kfac-pytorch's patches of each feature of soframe's, ``[size]``."""
    # kfac-pytorch orders channel, row, column of the kernel; soframe puts the channel last.
    shape = (conv.in_channels, *conv.kernel_size)
    order = torch.arange(conv.weight.numel() // conv.out_channels, device="cpu").view(shape)
    bias = torch.arange(order.numel(), size, device="cpu")  # if the layer has one
    return torch.cat([order.permute(1, 2, 0).flatten(), bias])
