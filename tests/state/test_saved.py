"""What a state dict says of itself, whom it waits for, and what a loaded one leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.comm import Recording
from soframe.state import checksums
from soframe.state.saving import dampings, history, load_history
from tests import kit
from tests.curvature import closing, fill, randn

EVERY: dict[str, Any] = {"statistics_every": 1, "solve_every": 2, "kl_clip": None}


class Meeting(Recording):
    """A rank on paper that notes whom it waits for."""

    def __init__(self, world_size: int = 1) -> None:
        super().__init__(world_size=world_size)
        self.met: list[str] = []

    def meet(self, what: str) -> None:
        self.met.append(what)


def network() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def loss(model: nn.Module, step: int) -> Tensor:
    return model(randn(6, 3, seed=step)).square().sum(1).mean()


def trained(steps: int = 2, **settings: Any) -> soframe.Preconditioner:
    model = network()
    own = soframe.Preconditioner(model, **{**EVERY, **settings})
    kit.train(model, loss, range(steps), own)
    return own


@pytest.mark.parametrize(
    ("strategy", "ranks", "meets"), [("comm-opt", 1, 0), ("comm-opt", 2, 0), ("mem-opt", 2, 1)]
)
def test_ranks_meet_before_they_send_what_is_spread_over_them(
    strategy: str, ranks: int, meets: int
) -> None:
    backend = Meeting(ranks)
    distribution = soframe.Distribution(backend=backend)
    with closing(trained(1, strategy=strategy, distribution=distribution)) as own:
        backend.met.clear()
        own.state_dict()
        assert backend.met == ["Preconditioner.state_dict()"] * meets


def test_ranks_meet_before_they_load() -> None:
    backend = Meeting()
    with closing(trained(distribution=soframe.Distribution(backend=backend))) as own:
        state = own.state_dict()
        backend.met.clear()
        own.load_state_dict(state)
        assert backend.met == ["loading the state of a preconditioner"]


def test_a_state_says_what_it_is() -> None:
    with closing(trained()) as own:
        state = own.state_dict()
    assert (state["format"], state["version"]) == ("soframe.Preconditioner", 4)
    assert state["step"] == 2
    block = state["blocks"]["0"]
    assert (block["shape"], block["updates"]) == ([1, 4, 4], 2)
    assert block["method"] == "KFAC()"
    assert set(block["factors"]) == {"A", "G"}


def test_later_steps_change_no_tensor_of_a_state() -> None:
    model = network()
    with closing(soframe.Preconditioner(model, "ekfac", **EVERY)) as own:
        kit.train(model, loss, range(3), own)
        state = own.state_dict()
        kept = copy.deepcopy(state)
        kit.train(model, loss, range(3, 6), own)
    for (name, now), (_, then) in zip(
        checksums.tensors_of(state), checksums.tensors_of(kept), strict=True
    ):
        assert torch.equal(now, then), name
    # And a state that is loaded is the caller's still.
    other = network()
    with closing(soframe.Preconditioner(other, "ekfac", **EVERY)) as own:
        own.load_state_dict(state)
        kit.train(other, loss, range(3, 6), own)
    for (name, now), (_, then) in zip(
        checksums.tensors_of(state), checksums.tensors_of(kept), strict=True
    ):
        assert torch.equal(now, then), name


def test_a_loaded_block_owes_nothing() -> None:
    with closing(trained()) as own:
        own.blocks[0].record.missed = 7
        own.blocks[0].record.pending = 0.5
        state = history(own.blocks)
        assert state["missed"] == {"0": {"turn": 7}}
        load_history(state, own.blocks)
        assert [block.record.missed for block in own.blocks] == [7, 0]
        load_history({}, own.blocks)
        assert [block.record.missed for block in own.blocks] == [0, 0]
        assert not own.blocks[0].record.statistics_at
        own.load_state_dict(own.state_dict())
        assert own.blocks[0].record.pending == 0.0


def test_dampings_are_those_of_blocks_that_have_one() -> None:
    with closing(trained()) as own:
        own.blocks[0].damp(0.25)
        own.blocks[1].damp(None)
        assert dampings(own.blocks, {"frozen": 0.5, "2": 0.75, "none": None}) == {
            "0": 0.25,
            "frozen": 0.5,
        }


def test_many_damaged_tensors_are_not_all_named() -> None:
    with closing(trained()) as own:
        good = own.state_dict()
        for damaged, more in ((1, 0), (3, 0), (4, 1), (5, 2)):
            state = copy.deepcopy(good)
            tensors = dict(list(checksums.tensors_of(state))[:damaged])
            for tensor in tensors.values():
                tensor.add_(1)
            names = ", ".join(list(tensors)[:3]) + (f" and {more} more" if more else "")
            with pytest.raises(ValueError, match=f"damaged: {names} has another checksum"):
                own.load_state_dict(state)


def test_the_bytes_of_a_rank_are_those_of_its_tensors() -> None:
    with closing(trained(1, method="soap")) as own:
        usage = own.memory_usage()
        factors = sum(t.nbytes for block in own.blocks for t in block.running.values())
        states = sum(t.nbytes for block in own.blocks for t in block.state.values())
        data = sum(
            tensor.nbytes
            for block in own.blocks
            for tensors in block.second_order.values()
            for tensor in tensors.values()
        )
    assert (usage["factors"], usage["state"], usage["second_order"]) == (factors, states, data)
    assert usage["total"] == factors + states + data + usage["statistics"] + usage["accumulators"]
    with closing(trained(1)) as own:
        assert "state" not in own.memory_usage()
