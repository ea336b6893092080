"""The track at its real size: its files of tokens, and a step at tiny size."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import track_gpu
from harness import tokens
from harness.gpt2 import GPT2, Sizes

from soframe.experiments.launch import Worker, launch

TINY = track_gpu.PRESETS["tiny"]
ALONE = track_gpu.Place(rank=0, world_size=1, device=torch.device("cpu"))
MUON = {"method": "muon", "lr": 0.02, "auxiliary_lr": 0.002}


def write(path: Path, values: np.ndarray, header: bool = False) -> Path:
    """Write tokens as the public speed runs do, or bare."""
    front = np.zeros(tokens.HEADER, dtype="<i4")
    front[:3] = tokens.MAGIC, tokens.VERSION, len(values)
    path.write_bytes((front.tobytes() if header else b"") + values.astype("<u2").tobytes())
    return path


@pytest.mark.parametrize("header", [False, True])
def test_windows_are_read_in_order_from_all_files(tmp_path: Path, header: bool) -> None:
    first = write(tmp_path / "a.bin", np.arange(11), header)
    second = write(tmp_path / "b.bin", np.arange(100, 109), header)
    stream = tokens.Stream.of([first, second], context=4, vocabulary=200)
    assert len(stream) == 4
    values, following = stream.batch(1, 4)
    assert values.tolist() == [
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [0, 1, 2, 3],
    ]
    assert torch.equal(following, values + 1)
    assert values.dtype == torch.int64


def test_what_is_no_file_of_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name one of your own"):
        tokens.open_tokens(tmp_path / "none.bin")
    with pytest.raises(FileNotFoundError, match="name one of your own"):
        track_gpu.files(str(tmp_path / "*.bin"))
    good = write(tmp_path / "good.bin", np.arange(300), header=True)
    (tmp_path / "short.bin").write_bytes(good.read_bytes()[:-2])
    with pytest.raises(ValueError, match="has 299 tokens, and 300 by its header"):
        tokens.open_tokens(tmp_path / "short.bin")
    (tmp_path / "odd.bin").write_bytes(good.read_bytes()[:-1])
    with pytest.raises(ValueError, match="its size is odd"):
        tokens.open_tokens(tmp_path / "odd.bin")
    content = bytearray(good.read_bytes())
    content[4] = 2
    (tmp_path / "later.bin").write_bytes(content)
    with pytest.raises(ValueError, match="of version 2, and not 1"):
        tokens.open_tokens(tmp_path / "later.bin")
    with pytest.raises(ValueError, match="no window of 300 tokens"):
        tokens.Stream.of([good], context=300, vocabulary=300)
    with pytest.raises(ValueError, match="token 299 is not in a vocabulary of 200"):
        tokens.Stream.of([good], context=299, vocabulary=200).batch(0, 1)


@pytest.mark.slow
def test_the_real_model_has_124_million_parameters() -> None:
    model = GPT2(Sizes(layers=0))
    layer = 12 * 768**2 + 13 * 768
    outer = sum(p.numel() for p in model.parameters())
    assert outer == (50304 + 1024 + 2) * 768
    assert round((outer + 12 * layer) / 1e6) == 124


def test_attention_looks_back_only() -> None:
    model = GPT2(TINY.sizes)
    text = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 8:] = 0
    outputs: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, given, out: outputs.append(out))
    for value in (text, changed):
        model(value, value)
    assert torch.allclose(outputs[0][0, :8], outputs[1][0, :8], atol=1e-6)
    assert not torch.allclose(outputs[0][0, 8:], outputs[1][0, 8:], atol=1e-3)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    generator = np.random.default_rng(0)
    train = write(tmp_path / "train.bin", generator.integers(0, 256, 1000), header=True)
    held_out = write(tmp_path / "held_out.bin", generator.integers(0, 256, 100))
    return {"tokens": str(train), "held_out": str(held_out)}


def test_micro_batches_make_the_same_step(files: dict[str, str]) -> None:
    found = []
    for micro_batch in (8, 4, 2):
        preset = dataclasses.replace(TINY, micro_batch=micro_batch)
        stream = tokens.Stream.of([Path(files["tokens"])], 16, 256)
        training = track_gpu.Training(preset, ALONE, stream, MUON)
        assert training.micro_batches == 8 // micro_batch
        losses = [training.step(steps=4, cooldown=0.5) for _ in range(4)]
        held_out = training.held_out_loss(tokens.Stream.of([Path(files["held_out"])], 16, 256))
        found.append([*losses, held_out])
        # Half of the steps at the full rate; then down along a line.
        lrs = sorted(group["lr"] for group in training.optimizer.param_groups)
        assert lrs == pytest.approx([0.002 * 0.5, 0.02 * 0.5])
        training.optimizer.close()
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    bad = dataclasses.replace(TINY, micro_batch=3)
    with pytest.raises(ValueError, match=r"8 windows cannot be shared out over 1 rank.* of 3"):
        track_gpu.Training(bad, ALONE, stream, MUON)


def held_out_losses(worker: Worker, files: dict[str, str], micro_batch: int) -> list[float]:
    """Take two steps, and measure after each."""
    preset = dataclasses.replace(TINY, micro_batch=micro_batch)
    place = track_gpu.Place(worker.rank, worker.world_size, torch.device("cpu"))
    stream, held_out = (tokens.Stream.of([Path(name)], 16, 256) for name in files.values())
    training = track_gpu.Training(preset, place, stream, {**MUON, "strategy": "sharded"})
    found = []
    for _ in range(2):
        training.step(steps=2, cooldown=0.5)
        found.append(training.held_out_loss(held_out))
    training.optimizer.close()
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_take_the_steps_of_one(files: dict[str, str]) -> None:
    alone = held_out_losses(Worker(0, 1, lambda message: None), files, 4)
    both = launch(held_out_losses, 2)(files, 2)  # two micro-batches on each rank
    assert both[0] == both[1]
    assert both[0] == pytest.approx(alone, rel=1e-5)


def test_a_step_of_the_command(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    track_gpu.main(
        **files,
        method="soap-muon",
        lr=0.02,
        auxiliary_lr=0.002,
        weight_decay=0.0,
        strategy="sharded",
        statistics_every=1,
        solve_every=5,
        steps=1,
        cooldown=0.6,
        evaluate_every=1,
        target=0.1,
        preset="tiny",
        seed=0,
    )
    first, step, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["preset"], first["method"]) == ("tiny", "soap-muon")
    assert step["step"] == 1
    assert 0 < step["held_out_loss"] < 7
    assert last == {"reached": None, "target": 0.1}
