"""Sharded checkpoints whose files are damaged, or are something else: the one before is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import soframe
from soframe import checkpoint
from tests import kit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.timeout(60),
]


def trained(seed: int) -> soframe.Preconditioner:
    """Return a preconditioner after a step on the data of a seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3))
    preconditioner = kit.precondition(model, lr=0.1)
    kit.train(model, lambda m, _: m(torch.randn(2, 4)).square().mean(), [0], preconditioner)
    return preconditioner


def save(folder: Path, preconditioner: soframe.Preconditioner) -> Path:
    return checkpoint.save(
        folder, {"preconditioner": checkpoint.part(preconditioner)}, sharded=True
    )


def a_pipe(file: Path) -> None:
    os.mkfifo(file)


def a_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def a_folder(file: Path) -> None:
    file.mkdir()


def a_pipe_elsewhere(file: Path) -> None:
    """Reading it, as anything outside, would not end."""
    pipe = file.parents[1] / "pipe"
    os.mkfifo(pipe)
    file.symlink_to(pipe)


def an_empty_file(file: Path) -> None:
    file.touch()


def missing(file: Path) -> None:
    """Leave no file."""


FORGERS: tuple[Callable[[Path], None], ...] = (
    a_pipe,
    a_device,
    a_folder,
    a_pipe_elsewhere,
    an_empty_file,
    missing,
)


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp"])
@pytest.mark.parametrize("forge", FORGERS)
def test_the_checkpoint_before_a_forged_one_is_taken(
    forge: Callable[[Path], None], pattern: str, tmp_path: Path
) -> None:
    first, second = trained(0), trained(1)
    good, bad = save(tmp_path, first), save(tmp_path, second)
    (file,) = bad.glob(pattern)
    file.unlink()
    forge(file)
    require_the_one_before(tmp_path, good, second, first)


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp"])
@pytest.mark.parametrize("forge", FORGERS)
def test_a_forged_checkpoint_is_not_loaded(
    forge: Callable[[Path], None], pattern: str, tmp_path: Path
) -> None:
    """Also where `latest` has not looked at it."""
    preconditioner = trained(0)
    bad = save(tmp_path, preconditioner)
    (file,) = bad.glob(pattern)
    file.unlink()
    forge(file)
    with pytest.raises(ValueError, match="no complete checkpoint of a preconditioner can be read"):
        checkpoint.load(preconditioner, bad)


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp"])
def test_the_checkpoint_before_a_cut_one_is_taken(pattern: str, tmp_path: Path) -> None:
    first, second = trained(0), trained(1)
    good, bad = save(tmp_path, first), save(tmp_path, second)
    (file,) = bad.glob(pattern)
    os.truncate(file, file.stat().st_size - 1)
    require_the_one_before(tmp_path, good, second, first)


def require_the_one_before(
    folder: Path,
    good: Path,
    preconditioner: soframe.Preconditioner,
    expected: soframe.Preconditioner,
) -> None:
    """Require that `latest` names the good checkpoint, and that it is loaded."""
    with pytest.warns(UserWarning, match="the checkpoint before it is taken"):
        assert checkpoint.latest(folder) == good
    checkpoint.load(preconditioner, good)
    for found, block in zip(preconditioner.blocks, expected.blocks, strict=True):
        for factor in block.factors:
            assert torch.equal(found.running.matrix(factor), block.running.matrix(factor))
    for _ in range(2):  # the forged one is removed in its turn
        last = save(folder, expected)
        assert checkpoint.latest(folder) == last
