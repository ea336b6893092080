"""The LoRA recipe with transformers, peft and accelerate, on a small GPT-2 in a folder."""

import json
import math
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.libraries import MissingLibraryError
from experiments.recipes import loop, lora

TEXT = "Natural gradients follow the geometry of the model's distribution. " * 200


def test_missing_libraries_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingLibraryError, match=r"missing: accelerate.*\.\[integrations\]"):
        lora.run(lora.Settings(output=tmp_path))


@pytest.mark.parametrize(("step", "expected"), [(4, 2.0), (6, 1.0)])
def test_the_last_loss_is_measured_unless_it_was(step, expected):
    log = [{"step": 2, "eval_loss": 3.0}, {"step": 4, "eval_loss": 2.0}, {"step": 4, "loss": 5.0}]
    state = SimpleNamespace(log_history=log, global_step=step)
    trainer = SimpleNamespace(state=state, evaluate=lambda: {"eval_loss": 1.0})
    assert lora._last_loss(trainer) == expected


def test_a_loss_that_is_not_finite_is_an_error():
    state = SimpleNamespace(log_history=[], global_step=4)
    trainer = SimpleNamespace(state=state, evaluate=lambda: {"eval_loss": math.nan})
    with pytest.raises(loop.DivergedError, match="the loss is nan"):
        lora._last_loss(trainer)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings for a GPT-2 of random weights and a tokenizer of this text, in a folder."""
    for name in ("transformers", "peft", "accelerate", "tokenizers"):
        pytest.importorskip(name)
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("gpt2")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made._tokenizer)
    fast.save_pretrained(folder / "model")
    config = transformers.GPT2Config(
        vocab_size=len(fast), n_positions=32, n_embd=16, n_layer=2, n_head=2
    )
    torch.default_generator.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return lora.Settings(
        data=folder / "text.txt",
        output=folder / "run",
        pretrained=str(folder / "model"),
        length=16,
        steps=6,
        save_every=3,
        evaluate_every=3,
        batch_size=4,
        dropout=0.2,
        lr=0.05,
        tensorboard=False,
        device="cpu",
    )


pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")


def adapters(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["soframe", "adamw"])
def test_a_resumed_fine_tune_ends_with_the_bits_of_one_that_was_not_interrupted(
    settings, tmp_path, optimizer
):
    whole = replace(settings, output=tmp_path / "whole", optimizer=optimizer)
    outcome = lora.run(whole)
    assert (outcome.step, outcome.finished) == (6, True)
    rows = [json.loads(row) for row in (whole.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[-1]["loss"] == outcome.figures["loss"] < rows[0]["loss"]
    # As if it had been killed after its first checkpoint.
    parts = replace(whole, output=tmp_path / "parts", resume=True)
    parts.output.mkdir()
    (whole.output / "checkpoint-3").rename(parts.output / "checkpoint-3")
    lora.run(parts)
    first, second = (adapters(one.output / "checkpoint-6") for one in (whole, parts))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert (whole.output / "checkpoint-6" / "soframe").exists() == (optimizer == "soframe")


@pytest.mark.slow
def test_an_interrupt_saves_and_stops(settings, tmp_path):
    endless = replace(settings, output=tmp_path, steps=10**5)

    def interrupt():
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    outcome = lora.run(endless)
    thread.join()
    assert not outcome.finished
    assert (tmp_path / f"checkpoint-{outcome.step}").is_dir()
    with pytest.raises(ValueError, match="has checkpoints of another run: pass --resume"):
        lora.run(endless)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base": "sgd"}, ValueError, "leave out --base"),
        ({"processes": 2}, ValueError, "use torchrun"),
        ({"length": 10**6}, ValueError, "fewer than two windows"),
        ({"batch_size": 10**6}, ValueError, "exceeds the"),
    ],
)
def test_refusals(settings, tmp_path, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        lora.run(replace(settings, output=tmp_path, **changes))


def test_the_contract_is_that_of_other_recipes(settings):
    model = lora.model(settings)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2
    assert all("c_attn.lora" in name for name in trained)
    train, test = lora.data(settings)
    assert len(train) > 10 * len(test)
    assert lora.loss(model, *train[:4]).item() == pytest.approx(5.7, abs=0.3)
