"""The steps of weights along their updates, if soframe owns the step.

With the learning rate ``lr``, the weight decay ``decay``, a weight ``w`` and its update ``u``:

- *Decoupled* decay (Loshchilov and Hutter, 2019): ``w <- w - lr u - lr decay w``.
- *Cautious* decay (Chen et al., 2025, "Cautious Weight Decay"): the same, in those entries alone in
  which ``u w >= 0``. There the step leads towards zero, or does not move; elsewhere it leads away
  from zero, and decay would only undo a part of it.
- *Hyperball* (Wen et al., 2026, "Fantastic Pretraining Optimizers and Where to Find Them II:
  Hyperball Optimization"): the Frobenius norm ``R`` that a matrix had at first is kept,

      w <- R normalise(w - lr R normalise(u)),    normalise(x) = x / |x|,

  so ``lr`` is an angle: the tangent of the one between the old weight and the new, where ``u`` is
  orthogonal to ``w``. The length of ``u`` does not matter, and decay has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.step.verdict import keep_if

WeightDecayKind = Literal["decoupled", "cautious"]
Constraint = Literal["hyperball"]
NONE: Mapping[int, Tensor] = MappingProxyType({})
WEIGHT_DECAY_KINDS, CONSTRAINTS = get_args(WeightDecayKind), get_args(Constraint)


@dataclass(frozen=True)
class Move:
    """The settings by which the parameters of a group move."""

    lr: float
    weight_decay: float
    kind: WeightDecayKind
    constraint: Constraint | None  # on matrices
    decay_vectors: bool  # whether vectors decay, too

    @property
    def is_plain(self) -> bool:
        """Whether a step is along the update alone, and decay along the weight."""
        decoupled = self.weight_decay == 0 or self.kind == "decoupled"
        return self.constraint is None and decoupled

    @classmethod
    def of(cls, group: Mapping[str, Any], prefix: str = "") -> Move:
        """Return the settings of a param group, checked; errors name them with a prefix."""
        move = cls(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            kind=group["weight_decay_kind"],
            constraint=group["constraint"],
            decay_vectors=bool(group["decay_vectors"]),
        )
        # An optimizer checks the settings that it is given before there are groups.
        name = f"param group {group['method']!r}: " if "method" in group else ""
        _check(move, name, prefix)
        return move


def _check(move: Move, name: str, prefix: str) -> None:
    """Raise ValueError if a setting is out of range, does not exist, or contradicts another."""
    for setting, value in {"lr": move.lr, "weight_decay": move.weight_decay}.items():
        if not 0 <= value <= torch.finfo(torch.float32).max:
            raise ValueError(
                f"{name}{prefix}{setting} must be finite in float32 and not negative, not {value!r}"
            )
    if move.kind not in WEIGHT_DECAY_KINDS:
        kinds = ", ".join(map(repr, WEIGHT_DECAY_KINDS))
        raise ValueError(
            f"{name}{prefix}weight_decay_kind must be one of {kinds}, not {move.kind!r}"
        )
    if move.constraint is None:
        return
    if move.constraint not in CONSTRAINTS:
        raise ValueError(
            f"{name}{prefix}constraint must be None or 'hyperball', not {move.constraint!r}"
        )
    if move.weight_decay != 0:
        raise ValueError(
            f"{name}{prefix}constraint='hyperball' keeps the norm of weights, so "
            f"{prefix}weight_decay={move.weight_decay:g} could not change it: pass "
            f"{prefix}weight_decay=0"
            + ("" if prefix else " (and auxiliary_weight_decay= for the auxiliary method)")
        )


def selects(groups: Iterable[Mapping[str, Any]], moves: Iterable[Move]) -> bool:
    """Return whether `descend` can let the parameters of all groups stay; see there."""
    for group, move in zip(groups, moves, strict=True):
        if not move.is_plain:
            return False
        # The factor of the decay is multiplied in the dtype of the weights.
        if any(torch.finfo(p.dtype).bits < 32 for p in group["params"]):
            return False
    return True


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be constrained: biases and gains, as vectors, cannot."""
    return sum(size > 1 for size in parameter.shape) > 1 and not parameter.is_complex()


def descend(
    parameters: Sequence[nn.Parameter],
    home: GradientHome,
    move: Move,
    updates: Mapping[int, Tensor] = NONE,
    bad: Tensor | None = None,
) -> None:
    """Move the parameters with a gradient along their updates, without a constraint.

    ``updates`` has this rank's part of each update, by the identity of its parameter; others move
    along their gradients. All stay where ``bad``, a scalar on the device, is one: see `selects`.
    """
    moving: list[tuple[Tensor, Tensor]] = []  # weights here, and their updates
    decaying: list[tuple[Tensor, Tensor]] = []
    gradients = home.each(parameters)
    for parameter, weight, gradient in zip(
        parameters, home.locals(parameters), gradients, strict=True
    ):
        if gradient is None:
            continue
        update = updates.get(id(parameter))
        if update is None:  # of a block that is not solved yet
            update = gradient if bad is None else gradient.clone()  # which `_add` may zero
        moving.append((weight, update))
        if move.decay_vectors or parameter.dim() > 1:
            decaying.append((weight, update))
    if move.weight_decay > 0:
        for weights, of_weights in _alike(decaying):
            _decay(weights, of_weights, move, bad)
    for weights, of_weights in _alike(moving):
        _add(weights, of_weights, move.lr, bad)


def _alike(moved: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield parameters with their updates by device and dtype, for which kernels are fused."""
    if not moved:
        return
    pairs: Any = list(map(list, zip(*moved, strict=True)))
    alike: Any = Optimizer._group_tensors_by_device_and_dtype(pairs)
    for (_, dtype), ((weights, updates), _) in alike.items():
        if dtype.is_complex:
            yield (
                [torch.view_as_real(weight) for weight in weights],
                list(map(torch.view_as_real, updates)),
            )
        else:
            yield weights, updates


def _add(weights: list[Tensor], updates: list[Tensor], lr: float, bad: Tensor | None) -> None:
    """Move weights along their updates unless ``bad`` is one, in one pass where memory is dense."""
    if bad is None:
        torch._foreach_add_(weights, updates, alpha=-lr)
        return
    tensors = weights + updates
    is_dense = all(t.layout == torch.strided and t.is_contiguous() for t in tensors)
    if is_dense and all(update.dtype == weights[0].dtype for update in updates):
        kernel: Any = torch._fused_sgd_
        kernel(
            weights,
            updates,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=bad,
        )
        return
    keep_if(bad == 0, updates)
    torch._foreach_add_(weights, updates, alpha=-lr)


def _decay(weights: list[Tensor], directions: list[Tensor], move: Move, bad: Tensor | None) -> None:
    """Let weights decay, before they move."""
    rate = move.lr * move.weight_decay
    if move.kind == "decoupled":
        if bad is None:
            torch._foreach_mul_(weights, 1 - rate)
        else:
            remainder = (bad.to(weights[0].dtype) * rate).add_(1 - rate)  # one in a bad step
            torch._foreach_mul_(weights, remainder)
        return
    assert bad is None
    # The product of signs: the product of two small numbers may underflow to zero.
    masks = torch._foreach_sign(weights)
    dense = [direction.to_dense() for direction in directions]
    torch._foreach_mul_(masks, torch._foreach_sign(dense))
    torch._foreach_add_(masks, 1)  # 0 where the signs differ, else 1 or 2
    torch._foreach_clamp_max_(masks, 1)
    torch._foreach_addcmul_(weights, weights, masks, -rate)


class Ball:
    """The matrices of a block whose norm a constraint keeps, for each group by itself.

    Several matrices that the method treats as one have one norm. Vectors in the same block, such as
    a bias, are not constrained.
    """

    def __init__(self, block: Block, names: Mapping[int, str]) -> None:
        self._block = block
        self.matrices = {k: p for k, p in block.parameters.items() if is_matrix(p)}
        # The same in every run: ``names`` has the qualified names by identity.
        self.key = ", ".join([names[id(parameter)] for parameter in self.matrices.values()])

    @property
    def trained(self) -> bool:
        """Whether it has a matrix that is not frozen."""
        return any(parameter.requires_grad for parameter in self.matrices.values())

    @cached_property
    def _dtype(self) -> torch.dtype:
        dtypes = [parameter.dtype for parameter in self.matrices.values()]
        return reduce(torch.promote_types, dtypes, torch.float32)

    @property
    def groups(self) -> int:
        """The number of norms."""
        return self._block.shape.groups

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the present Frobenius norms of the weights, ``[groups]``, at least float32.

        Raises:
            ValueError: If one is zero or not finite, so that no step along the sphere is defined.
                If the matrix is sharded over ranks.
        """
        self._require_whole()
        norms = self._lengths(self._wide(self.matrices))
        if not bool(((norms > 0) & norms.isfinite()).all()):
            problem = "not finite"
            if bool((norms == 0).any()):
                problem = "zero"
            if self.groups > 1:
                problem += " in some group"
            raise ValueError(
                f"constraint='hyperball' keeps the norm of {self.key}, which is {problem}: "
                f"initialise it otherwise, or give it to the auxiliary method by a pattern of "
                f"method="
            )
        return norms

    def loaded(self, radii: Tensor) -> Tensor:
        """Return saved norms on the block's device and in at least float32."""
        return radii.to(device=self._block.device, dtype=self._dtype)

    def move(
        self,
        home: GradientHome,
        radii: Tensor,
        lr: float,
        updates_by_id: Mapping[int, Tensor] = NONE,
    ) -> None:
        """Move the weights along their updates, on spheres with the norms ``radii``, ``[groups]``.

        Without an update a weight moves along its gradient. A missing gradient counts as zero; a
        group whose updates are all zero or missing stays.
        """
        self._require_whole()
        updates: dict[str, Tensor] = {}
        for name, parameter in self.matrices.items():
            gradient = home.read(parameter)
            if gradient is not None:
                updates[name] = updates_by_id.get(id(parameter), gradient)
        if not updates:
            return
        for name, parameter in self.matrices.items():
            if name not in updates:
                updates[name] = torch.zeros_like(parameter)
        weights, directions = self._wide(self.matrices), self._wide(updates)
        # A group with a zero update must not divide by its length.
        lengths = self._lengths(directions)
        steps = self._at_entries(torch.where(lengths > 0, lr * radii / lengths, 0))
        moved = {name: weights[name] - directions[name] * steps[name] for name in weights}
        lengths = self._lengths(moved)
        # A step that ends in the centre cannot be normalised: the weights stay.
        scales = self._at_entries(torch.where(lengths > 0, radii / lengths, 0))
        stays = self._at_entries((lengths == 0).to(lengths.dtype))
        for name, parameter in self.matrices.items():
            parameter.copy_(moved[name] * scales[name] + weights[name] * stays[name])

    def _require_whole(self) -> None:
        if self._block.shards:
            raise ValueError(
                f"constraint='hyperball' keeps the norm of {self.key}, of which each rank has a "
                f"part under fully_shard or a tensor-parallel plan: norms of parts are not added "
                f"up yet. Pass constraint=None, or use DistributedDataParallel"
            )

    def _wide(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.to_dense().detach().to(self._dtype) for name, t in tensors.items()}

    def _lengths(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of each group, ``[groups]``, of tensors in the matrices' shapes."""
        if self.groups > 1:
            norms: Tensor = torch.linalg.vector_norm(self._packed(tensors), dim=(1, 2))
            return norms
        lengths = [torch.linalg.vector_norm(tensor) for tensor in tensors.values()]
        # With one group no packing is needed: layouts keep the norm of all entries.
        total: Tensor = torch.linalg.vector_norm(torch.stack(lengths))
        return total.reshape(1)

    def _at_entries(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Return one number per group, ``[groups]``, at all entries of the matrices."""
        if self.groups == 1:
            return dict.fromkeys(self.matrices, numbers[0])
        _, out, into = self._block.shape
        return self._block.layout.unpack(numbers.view(-1, 1, 1).repeat(1, out, into))

    def _packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return ``[groups, out, in]``, with zeros for the vectors of the block."""
        free = {
            name: torch.zeros_like(parameter, dtype=self._dtype)
            for name, parameter in self._block.parameters.items()
            if name not in tensors
        }
        return self._block.layout.pack({**tensors, **free})


def require_radii(radii: Mapping[str, Tensor], balls: Sequence[Ball]) -> None:
    """Raise ValueError unless saved norms are of these matrices."""
    groups = {ball.key: ball.groups for ball in balls}
    for key, norms in radii.items():
        if groups.get(key) != len(norms):
            raise ValueError(
                f"the state keeps {len(norms)} norm(s) of {key}, which this model does not have"
            )
