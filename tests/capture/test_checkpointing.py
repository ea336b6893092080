"""Activation checkpointing and offloading: the same factors, and the memory that they save."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.capture.kit import (
    WORLDS,
    Case,
    average_gradients,
    check,
    no_sync,
    precondition,
    softplus,
    vectors,
)

Run = Callable[..., Tensor]


def plain(function: Run, *args: Tensor) -> Tensor:
    return function(*args)


reentrant: Run = partial(checkpoint, use_reentrant=True)
recomputed: Run = partial(checkpoint, use_reentrant=False)


class Network(nn.Module):
    """Three layers; the middle one is called twice. ``outer`` and ``inner`` run two nested parts.

    The loss reaches a layer after the checkpointed part, within it, and none before the last.
    """

    def __init__(self, outer: Run = plain, inner: Run = plain) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self._run: dict[str, Run] = {"outer": outer, "inner": inner}
        self.storages: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._run["outer"](self._outer, self._input(x)))

    def _input(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()

    def _outer(self, x: Tensor) -> Tensor:
        return self._run["inner"](self._inner, self._kept(self.middle(x).tanh())).tanh()

    def _inner(self, x: Tensor) -> Tensor:
        hidden = self._kept(self._kept(x.sin()).cos())
        return self._kept(self.middle(hidden)) * hidden

    def _kept(self, x: Tensor) -> Tensor:
        self.storages.append(StorageWeakRef(x.untyped_storage()))
        return x


class Once(Network):
    """Every layer is called once: what a static graph is not needed for."""

    def _outer(self, x: Tensor) -> Tensor:
        return self._run["inner"](self._inner, x.sin()).tanh()


class AllWithin(Network):
    """All layers lie within one checkpoint: no layer of the outer pass comes first."""

    def forward(self, x: Tensor) -> Tensor:
        return self._run["outer"](self._whole, x.clone().requires_grad_())

    def _whole(self, x: Tensor) -> Tensor:
        return self.last(self._run["inner"](self._inner, self.first(x)))


class Separate(Network):
    """Every layer lies in a checkpoint, and there are several: still one pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self._run["outer"](self.first, x.clone().requires_grad_())
        return self._run["outer"](self._end, self._run["outer"](self._inner, x))

    def _end(self, x: Tensor) -> Tensor:
        return self.last(self._run["inner"](self.middle, x))


class Segments(nn.Module):
    """``checkpoint_sequential`` in two segments, with in-place activations."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = use_reentrant
        layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU(True), nn.Linear(3, 2)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layers(x)
        x = x.clone().requires_grad_()
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=self.reentrant)


def offloading(model: nn.Module, x: Tensor, step: int) -> None:
    with save_on_cpu():
        loss = softplus(model(x))
    loss.backward()


def halves(model: nn.Module, x: Tensor, step: int) -> None:
    """Both forwards, then both backwards."""
    with no_sync(model):
        losses = [softplus(model(part)) / 2 for part in x.chunk(2)]
        for loss in losses:
            loss.backward()
    average_gradients(model)


LAYERS = {"plain": plain, "reentrant": reentrant, "recomputed": recomputed}
CASES = {
    **{
        f"{outer}, {inner} within": Case(
            partial(Network, LAYERS[outer], LAYERS[inner]), Network, ddp={"static_graph": True}
        )
        for outer in LAYERS
        for inner in LAYERS
    },
    **{
        f"all within {outer}, {inner} within": Case(
            partial(AllWithin, LAYERS[outer], LAYERS[inner]), AllWithin
        )
        for outer, inner in [
            ("reentrant", "plain"),
            ("recomputed", "plain"),
            ("reentrant", "reentrant"),
            ("recomputed", "recomputed"),
        ]
    },
    "separate and reentrant": Case(
        partial(Separate, reentrant), Separate, ddp={"static_graph": True}
    ),
    "separate and recomputed": Case(partial(Separate, recomputed), Separate),
    "reentrant segments": Case(partial(Segments, True), Segments),
    "recomputed segments": Case(partial(Segments, False), Segments),
    "reentrant, forwards before backwards": Case(partial(Once, reentrant), Once, train=halves),
    "recomputed, forwards before backwards": Case(partial(Once, recomputed), Once, train=halves),
    "offloaded": Case(Network, train=offloading),
    "offloaded and recomputed": Case(partial(Network, recomputed), Network, train=offloading),
}


# The first, undifferentiated pass through an outer reentrant checkpoint.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_checkpoint(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


def alive(model: Network) -> list[bool]:
    """Return which of the intermediate results of the last forward still have their memory."""
    gc.collect()
    return [not storage.expired() for storage in model.storages]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    ("kinds", "kept"),
    [((plain, plain), True), ((recomputed, plain), False), ((reentrant, plain), False)],
)
def test_checkpoints_save_memory(hooked: bool, kinds: tuple[Run, Run], kept: bool) -> None:
    """Between forward and backward only what lies outside a checkpoint is kept."""
    model = Once(*kinds)
    preconditioner = precondition(model) if hooked else None
    loss = softplus(model(vectors(0).float()))
    assert any(alive(model)) == kept
    loss.backward()
    if preconditioner is not None:
        preconditioner.step()
        assert preconditioner.blocks[1].running
    assert not any(alive(model))


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_kept_loss_keeps_no_activation(kind: str, hooked: bool) -> None:
    """A script that sums up ``loss`` without ``detach()`` keeps graphs, but no saved tensor."""
    model = Once(LAYERS[kind])
    preconditioner: Any = precondition(model) if hooked else None
    x = vectors(0).float()
    storage = StorageWeakRef(x.untyped_storage())
    loss = softplus(model(x))
    del x
    loss.backward()
    assert not any(alive(model))
    assert storage.expired()
    del preconditioner
