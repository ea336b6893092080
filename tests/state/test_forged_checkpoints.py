"""Checkpoints that are damaged on purpose, or are something else: the one before is taken."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import soframe
from soframe import checkpoint
from soframe.state import checksums
from tests import kit

STATE = {"step": 1, "weights": torch.ones(3)}


def forge(saved: Path, **changes: Any) -> None:
    """Change the entries of a manifest, and seal it anew."""
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["checksums"]
    text = json.dumps(checksums.seal({**manifest, **changes}))
    (saved / "manifest.json").write_text(text)


def named(name: str) -> Callable[[Path], None]:
    def forged(saved: Path) -> None:
        files = json.loads((saved / "manifest.json").read_text())["files"]
        forge(saved, files={**files, name: [1, 2]})

    return forged


def a_pipe(saved: Path) -> None:
    (saved / "state.pt").unlink()
    os.mkfifo(saved / "state.pt")


def a_device(saved: Path) -> None:
    (saved / "state.pt").unlink()
    (saved / "state.pt").symlink_to("/dev/zero")


def a_folder(saved: Path) -> None:
    (saved / "state.pt").unlink()
    (saved / "state.pt").mkdir()


def a_folder_for_the_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").mkdir()


def a_pipe_for_the_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    os.mkfifo(saved / "manifest.json")


def a_manifest_of_a_terabyte(saved: Path) -> None:
    with (saved / "manifest.json").open("ab") as file:
        file.truncate(2**40)


def a_file(saved: Path) -> None:
    shutil.rmtree(saved)
    saved.write_text("mine")


def a_broken_link(saved: Path) -> None:
    shutil.rmtree(saved)
    saved.symlink_to(saved.parent / "gone")


def a_loop(saved: Path) -> None:
    shutil.rmtree(saved)
    saved.symlink_to(saved)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "brackets": lambda saved: (saved / "manifest.json").write_text("[" * 5000),
    "braces": lambda saved: (saved / "manifest.json").write_text('{"a":' * 400 + "1" + "}" * 400),
    "digits": lambda saved: (saved / "manifest.json").write_text('{"a": ' + "1" * 5000 + "}"),
    "a list": lambda saved: (saved / "manifest.json").write_text("[]"),
    "not text": lambda saved: (saved / "manifest.json").write_bytes(b"\xff\xfe\xff"),
    "no files": lambda saved: forge(saved, files=None),
    "a list of files": lambda saved: forge(saved, files=["state.pt"]),
    "no state": lambda saved: forge(saved, files={}),
    "no digest": lambda saved: forge(saved, files={"state.pt": None}),
    "half a digest": lambda saved: forge(saved, files={"state.pt": [1]}),
    "another size": lambda saved: forge(saved, files={"state.pt": [10**40, 0]}),
    "sharded": lambda saved: forge(saved, sharded=True),
    "no format": lambda saved: forge(saved, format=None),
    "/dev/zero": named("/dev/zero"),
    "../state.pt": named("../checkpoint-000001/state.pt"),
    "..": named(".."),
    "no name": named(""),
    "a zero byte": named("a\0b"),
    "half a character": named("\ud800"),
    "a long name": named("a" * 300),
    **{
        of.__name__: of
        for of in (
            a_pipe,
            a_device,
            a_folder,
            a_folder_for_the_manifest,
            a_pipe_for_the_manifest,
            a_manifest_of_a_terabyte,
            a_file,
            a_broken_link,
            a_loop,
        )
    },
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.timeout(60)
def test_the_checkpoint_before_a_damaged_one_is_taken(name: str, tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, STATE)
    bad = checkpoint.save(tmp_path, STATE)
    DAMAGE[name](bad)
    with pytest.warns(UserWarning, match="the checkpoint before it is taken"):
        assert checkpoint.latest(tmp_path) == good
    with pytest.raises(ValueError, match=r"damaged|no checkpoint|truncated|another version"):
        checkpoint.read(bad)
    for _ in range(3):  # which is removed in its turn, and in no way
        last = checkpoint.save(tmp_path, STATE)
        assert checkpoint.latest(tmp_path) == last
        assert checkpoint.read(last)["step"] == 1
    assert not good.exists()
    assert bad.is_file() is (name == "a_file"), "no file of another is removed"
    assert bad.is_file() or not bad.is_symlink()


def test_old_checkpoints_that_are_links_are_unlinked(tmp_path: Path) -> None:
    """As where they were moved to another disk; what they lead to stays."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    saved = checkpoint.save(folder, STATE)
    shutil.move(saved, elsewhere)
    saved.symlink_to(elsewhere)
    assert checkpoint.latest(folder) == saved
    (folder / ".checkpoint-000007.tmp").symlink_to(elsewhere)  # of a save that could not remove it
    for _ in range(3):
        checkpoint.save(folder, STATE)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-000003",
        "checkpoint-000004",
    ]
    assert checkpoint.read(elsewhere)["step"] == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["state.pt", ".metadata", "/dev/zero", "../x", "manifest.json", "."])
MANIFESTS = st.fixed_dictionaries(
    {},
    optional={
        "format": VALUES | st.just("soframe.checkpoint"),
        "version": VALUES | st.just(1),
        "sharded": VALUES,
        "files": VALUES | st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=3),
    },
)


@given(changes=MANIFESTS, sealed=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_manifest_is_whole_or_refused(
    changes: dict[str, Any], sealed: bool, tmp_path: Path
) -> None:
    saved = checkpoint.save(tmp_path, STATE, keep=1)
    if sealed:
        forge(saved, **changes)
    else:
        manifest = json.loads((saved / "manifest.json").read_text())
        (saved / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    with contextlib.suppress(ValueError):
        assert torch.equal(checkpoint.read(saved)["weights"], STATE["weights"])


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_files_have_the_rights_of_the_umask(mask: int, sharded: bool, tmp_path: Path) -> None:
    """So that a group may read the checkpoints of its members."""
    before = os.umask(mask)
    try:
        checkpoint.save(tmp_path / "of" / "a run", {"a": torch.ones(2)}, sharded=sharded)
    finally:
        os.umask(before)
    found = list((tmp_path / "of").rglob("*"))
    assert len(found) >= 4
    for path in found:
        rights = stat.S_IMODE(path.stat().st_mode)
        assert rights == (0o777 if path.is_dir() else 0o666) & ~mask, path


def cyclic() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["again"] = state
    return state


def deep() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(5000):
        state = {"a": state}
    return state


ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.ones(4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "cyclic": cyclic,
    "deep": deep,
    "a set": lambda: {1, 2},
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("where", ["factor", "blocks", "counters"])
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant).*:UserWarning")
def test_a_state_with_something_odd_is_refused(name: str, where: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    own = kit.precondition(model, lr=0.1)
    kit.train(model, lambda m, _: m(torch.ones(2, 4)).square().mean(), [0], own)
    state: dict[str, Any] = own.state_dict()
    odd = ODD[name]()
    if where == "factor":
        state["blocks"]["0"]["factors"]["A"] = odd
    else:
        state[where] = odd
    with pytest.raises(ValueError, match=r"damaged|of another model"):
        own.load_state_dict(state)
    with pytest.raises(TypeError, match=r"a state is|tensors of a state"):
        checkpoint.seal({"odd": odd})
    assert soframe.checkpoint.seal({"fine": torch.ones(1)})


def trust_region_of(model: nn.Module) -> soframe.TrustRegion:
    return soframe.TrustRegion(model, "mse", full_batch=True)


def optimizer_of(model: nn.Module) -> soframe.Optimizer:
    return soframe.Optimizer(model, "kfac", lr=0.1)


PLACES: dict[str, tuple[Callable[[nn.Module], Any], list[tuple[Any, ...]]]] = {
    "the optimizer": (
        optimizer_of,
        [("state",), ("state", 0, "soframe"), ("param_groups",), ("param_groups", 0, "lr")],
    ),
    "a trust region": (
        trust_region_of,
        [
            ("state", 0, "update"),
            ("param_groups", 0),
            ("trust_region",),
            ("trust_region", "losses"),
            ("curvature", "version"),
            ("curvature", "blocks"),
        ],
    ),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("what", PLACES)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant).*:UserWarning")
def test_a_state_of_an_optimizer_with_something_odd_changes_nothing(what: str, name: str) -> None:
    """In place of the state, or of an entry that is read."""
    build, places = PLACES[what]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    own = build(model)
    for step in range(2):
        own.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        if what == "the optimizer":
            F.mse_loss(model(x), torch.ones(5, 3)).backward()
            own.step()
        else:
            own.step(lambda x=x: F.mse_loss(model(x), torch.ones(5, 3)))
    before = own.state_dict()
    with pytest.raises(ValueError, match=r"not the state of|damaged"):
        own.load_state_dict(ODD[name]())
    for place in places:
        state = copy.deepcopy(before)
        *outer, last = place
        entry: Any = state
        for key in outer:
            entry = entry[key]
        entry[last] = ODD[name]()
        with pytest.raises(ValueError, match=r"not the state of|damaged"):
            own.load_state_dict(state)
    after, expected = (checkpoint.seal(plain(state)) for state in (own.state_dict(), before))
    assert after["checksums"] == expected["checksums"]
    own.load_state_dict(before)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state with the tensors within bytes instead of bytes, which cannot be sealed."""
    content = state["state"][0].get("soframe")
    if content is None:
        return state
    return {**state, "state": torch.load(io.BytesIO(content), weights_only=True)}
