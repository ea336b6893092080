"""Trains kfac-pytorch and soframe side by side and prints by how much they differ.

    python -m benchmarks.parity_kfac_pytorch [--kfac-path DIR] [--store FILE]

Both start from the same weights and see the same batches, in float64, for a few steps of SGD; with
``scaling="kaisa"`` every factor and every preconditioned gradient must agree to rounding. The exit
status is 1 if they do not, 2 if kfac-pytorch cannot be imported. ``--store`` writes kfac-pytorch's
results for the tests (`tests/parity`), which run without it.

All numbers come from numpy's legacy generator, whose stream never changes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import soframe
from experiments.libraries import KFAC_PYTORCH_MISSING, import_kfac_pytorch
from soframe.solvers import Eigen, Inverse, Solver

STEPS = 5
LR = 0.1
ROUNDING = 1e-11
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: Its name.
        model: Which of `MODELS`.
        solver: "eigen" or "inverse".
        kl_clip: The bound of the clip; a large one never clips.
        micro_batches: Backward passes per step.
        statistics_every: Interval of statistics steps.
        solve_every: Interval of solves.
        damping: The damping.
        decay: The decay.
    """

    name: str
    model: str
    solver: str
    kl_clip: float = 1e-3
    micro_batches: int = 1
    statistics_every: int = 1
    solve_every: int = 1
    damping: float = 0.003
    decay: float = 0.9


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (6, 3)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)),
        (4, 3, 3),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, stride=(1, 2), padding=(0, 1)),
            nn.Tanh(),
            nn.Conv2d(3, 2, (1, 2), bias=False),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        (5, 2, 3, 3),
    ),
}
CASES = [
    *[Case(f"{m}, {s}", m, s) for m in MODELS for s in ("eigen", "inverse")],
    Case("linear, never clipped", "linear", "eigen", kl_clip=1e9),
    Case("conv, two micro-batches", "conv", "eigen", micro_batches=2),
    Case("sequence, intervals", "sequence", "inverse", statistics_every=2, solve_every=3),
]


def numbers(state: np.random.RandomState, *shape: int) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.from_numpy(np.asarray(state.standard_normal(shape)))


def build(case: Case) -> tuple[nn.Sequential, list[list[tuple[Tensor, Tensor]]]]:
    """Return a case's model and, for every step, its micro-batches."""
    state = np.random.RandomState(20)
    make, shape = MODELS[case.model]
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(state, *parameter.shape) / parameter[0].numel() ** 0.5)
        targets = model(torch.zeros(shape, dtype=torch.float64)).shape
    data = [
        [(numbers(state, *shape), numbers(state, *targets)) for _ in range(case.micro_batches)]
        for _ in range(STEPS)
    ]
    return model, data


def train(
    case: Case,
    attach: Callable[[nn.Module, Case], tuple[Callable[[], None], Callable[[], Numbers]]],
) -> list[Numbers]:
    """Train, and return the factors and preconditioned gradients of every step.

    Args:
        case: The case.
        attach: Attaches a preconditioner and returns its step and a reader of its factors.

    Returns:
        For every step, tensors by name.
    """
    model, data = build(case)
    step, factors = attach(model, case)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    history = []
    for micro_batches in data:
        optimizer.zero_grad()
        for inputs, targets in micro_batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / case.micro_batches).backward()
        step()
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        seen = {**factors(), **gradients}
        history.append({name: tensor.detach().clone() for name, tensor in seen.items()})
        optimizer.step()
    return history


def attach_soframe(
    model: nn.Module, case: Case
) -> tuple[Callable[[], None], Callable[[], Numbers]]:
    """Attach soframe, with the constants of kfac-pytorch."""
    solver: Solver = Eigen() if case.solver == "eigen" else Inverse(split="full")
    own = soframe.Preconditioner(
        model,
        solver=solver,
        damping=case.damping,
        decay=case.decay,
        kl_clip=case.kl_clip,
        lr=LR,
        statistics_every=case.statistics_every,
        solve_every=case.solve_every,
        statistics=soframe.Statistics(scaling="kaisa"),
    )

    def factors() -> Numbers:
        found = {f"{b.name}.{f}": tensor[0] for b in own.blocks for f, tensor in b.running.items()}
        for block in own.blocks:
            if isinstance(block.layout.module, nn.Conv2d):
                order = patch_order(block.layout.module, len(found[f"{block.name}.A"]))
                found[f"{block.name}.A"] = found[f"{block.name}.A"][order][:, order]
        return found

    return own.step, factors


def patch_order(conv: nn.Conv2d, size: int) -> Tensor:
    """Where soframe has each feature of kfac-pytorch's patches, which begin with the channel."""
    kernel, channels = conv.kernel_size, conv.in_channels
    order = torch.arange(channels * kernel[0] * kernel[1]).view(*kernel, channels)
    order = order.permute(2, 0, 1).flatten()
    return torch.cat([order, torch.arange(len(order), size)])  # and the bias


def attach_kfac_pytorch(
    model: nn.Module, case: Case
) -> tuple[Callable[[], None], Callable[[], Numbers]]:
    """Attach kfac-pytorch."""
    from kfac.preconditioner import KFACPreconditioner

    own = KFACPreconditioner(
        model,
        factor_update_steps=case.statistics_every,
        inv_update_steps=case.solve_every,
        damping=case.damping,
        factor_decay=case.decay,
        kl_clip=case.kl_clip,
        lr=LR,
        accumulation_steps=case.micro_batches,
        compute_method=case.solver,
        factor_dtype=torch.float64,
        inv_dtype=torch.float64,
    )

    def factors() -> Numbers:
        layers = own.state_dict()["layers"]
        return {f"{name}.{f}": state[f] for name, state in layers.items() for f in "AG"}

    return own.step, factors


def difference(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference over the second tensor's."""
    return float((one - other).norm() / other.norm())


class DoubleTorch:
    """torch with float64 in place of float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def import_double_kfac(path: Path | None) -> None:
    """Import kfac-pytorch with decompositions in float64: its own are always in float32.

    Args:
        path: A folder to look in first.
    """
    import_kfac_pytorch(path)
    for solver in ("eigen", "inverse"):
        importlib.import_module(f"kfac.layers.{solver}").torch = DoubleTorch()


def main(arguments: list[str] | None = None) -> int:
    """Compare all cases; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--store", type=Path, help="write kfac-pytorch's figures to this file")
    options = parser.parse_args(arguments)
    try:
        import_double_kfac(options.kfac_path)
    except ImportError as error:
        script = "benchmarks.parity_kfac_pytorch"
        print(KFAC_PYTORCH_MISSING.format(error=error, script=script), file=sys.stderr)
        return 2
    worst = 0.0
    stored = {}
    print(f"largest relative difference over {STEPS} steps")
    print(f"{'case':<28}{'factors':>12}{'gradients':>12}")
    for case in CASES:
        own, theirs = train(case, attach_soframe), train(case, attach_kfac_pytorch)
        found = {"factors": 0.0, "gradients": 0.0}
        for one, other in zip(own, theirs, strict=True):
            for name, tensor in other.items():
                kind = "gradients" if name.endswith(".grad") else "factors"
                found[kind] = max(found[kind], difference(one[name], tensor))
        print(f"{case.name:<28}{found['factors']:>12.1e}{found['gradients']:>12.1e}")
        worst = max(worst, *found.values())
        stored[case.name] = {name: t.flatten().tolist() for name, t in theirs[-1].items()}
    if options.store is not None:
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in stored.items())
        options.store.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    # Written so that a NaN fails.
    equal = worst <= ROUNDING
    print(f"{'equal to rounding' if equal else 'DIFFERENT'} (limit {ROUNDING:.0e})")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
