"""A LoRA fine-tune of a causal language model, with the Trainer of Hugging Face, on a file of text.

Settings: those of GPT-2 medium on E2E in LoRA's appendix (Hu et al., 2022, table 11), which adapts
queries and values; here the fused matrix of queries, keys and values has one adapter, and labels
are not smoothed. soframe's method and rate are those of `soframe.recommend`, which says itself that
fine-tuning is not measured: compare it with ``--optimizer adamw``.

It needs transformers, peft and accelerate: ``pip install -c constraints.txt -e
'.[recipes,integrations]'``. Checkpoints, and the continuation, are the Trainer's.

Run to its end on a small GPT-2 over bytes (docs/benchmarks/recipes.md), not on published weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import soframe
from experiments.launch import Place
from experiments.libraries import require
from experiments.recipes import common, loop
from experiments.recipes.common import Built, Common
from experiments.recipes.ranks import Interrupt, agreed, group
from experiments.records import jsonable, write_json


@dataclass(frozen=True)
class Settings(Common):
    """A LoRA fine-tune with the Hugging Face Trainer (run to its end on a small GPT-2)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 3e-4, "adamw": 2e-4}

    data: Path = Path("data/text.txt")
    """A file of text, UTF-8."""
    output: Path = Path("runs/lora")
    epochs: int = 5
    """Passes through the text (Hu et al., 2022)."""
    batch_size: int = 8
    """Windows of a step (Hu et al., 2022)."""
    method: str = "soap"
    """Method of soframe; `soap` is SOAP(max_ratio=2), as soframe.recommend has it."""
    base: Literal["sgd", "adamw", "lamb"] | None = None
    lr: float | None = None
    """Learning rate; None for 3e-4 with soframe (soframe.recommend) and 2e-4 with adamw (Hu et al.,
    2022)."""
    weight_decay: float = 0.01
    """Weight decay (Hu et al., 2022)."""
    warmup: float = 0.02
    """Fraction of the run in which the rate grows (Hu et al., 2022: 500 of about 26,000 steps)."""
    pretrained: str = "gpt2"
    """Model and tokenizer: a name of Hugging Face's hub, or a folder."""
    modules: tuple[str, ...] = ("c_attn",)
    """Layers with adapters; `q_proj v_proj` for a Llama."""
    rank: int = 4
    """Rank of the adapters (Hu et al., 2022)."""
    alpha: int = 32
    """Scale of the adapters (Hu et al., 2022)."""
    dropout: float = 0.1
    """Dropout of the adapters (Hu et al., 2022)."""
    length: int = 512
    """Tokens of a window."""
    held_out: float = 0.05
    """Fraction of the windows, the last ones, that are the test set."""


def model(settings: Settings) -> nn.Module:
    library, peft = require("transformers"), require("peft")
    body = library.AutoModelForCausalLM.from_pretrained(settings.pretrained)
    adapters = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.modules),
        task_type="CAUSAL_LM",
        # GPT-2's layers keep their weights transposed.
        fan_in_fan_out=body.config.model_type == "gpt2",
    )
    adapted: nn.Module = peft.get_peft_model(body, adapters)
    return adapted


def data(settings: Settings) -> tuple[TensorDataset, TensorDataset]:
    path, length = settings.data, settings.length
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass a file of text as --data")
    tokenizer = require("transformers").AutoTokenizer.from_pretrained(settings.pretrained)
    tokens = torch.tensor(tokenizer(path.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    end = len(windows) - max(1, round(settings.held_out * len(windows)))
    if end < 1:
        raise ValueError(f"{path} has {len(tokens)} tokens, fewer than two windows of {length}")
    return TensorDataset(windows[:end]), TensorDataset(windows[end:])


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the tokens that follow, in nats."""
    value: Tensor = model(input_ids=tokens, labels=tokens).loss
    return value


def optimizer(model: nn.Module, settings: Settings, **more: Any) -> Built:
    if settings.optimizer == "soframe" and settings.base is not None:
        raise ValueError("lora has no optimizer behind a preconditioner: leave out --base")
    if settings.optimizer == "soframe" and settings.method == "soap":
        more["method"] = soframe.methods.SOAP(max_ratio=2)
    return common.optimizer(model, settings, **more)


def _collated(items: list[tuple[Tensor]]) -> dict[str, Tensor]:
    tokens = torch.stack([item[0] for item in items])
    labels = tokens.clone()
    labels[:, 0] = -100  # not predicted, but the Trainer would count it as a term
    return {"input_ids": tokens, "labels": labels}


def run(settings: Settings) -> loop.Outcome:
    """Fine-tune by the Trainer, alone or as a rank of torchrun; see `loop.run`."""
    require("accelerate")
    if settings.processes > 1:
        raise ValueError("lora with --processes is not supported: use torchrun")
    continued = any(settings.output.glob("checkpoint-*"))
    if continued and not settings.resume:
        raise ValueError(f"{settings.output} has checkpoints of another run: pass --resume")
    with group(settings) as place, Interrupt(all_of_them=place.size > 1) as interrupt:
        trainer = _trainer(settings, place, interrupt)
        trainer.train(resume_from_checkpoint=continued)
        state = trainer.state
        finished = state.global_step >= state.max_steps
        figures = {}
        if finished:
            figures["loss"] = _last_loss(trainer)
        elif place.rank == 0:
            print(f"interrupted after step {state.global_step}; --resume goes on", flush=True)
        return loop.Outcome(state.global_step, finished, figures)


def _last_loss(trainer: Any) -> float:
    """Return the loss on the test set after the last step; raise DivergedError if not finite."""
    state = trainer.state
    evaluations = [row for row in state.log_history if "eval_loss" in row]
    if not evaluations or evaluations[-1]["step"] < state.global_step:
        evaluations.append(trainer.evaluate())
    loss: float = evaluations[-1]["eval_loss"]
    if not math.isfinite(loss):
        raise loop.DivergedError(f"the loss is {loss}")
    return loss


def _watch(settings: Settings, place: Place, interrupt: Interrupt) -> Any:
    """Return a callback that stops at an interrupt, and writes the evaluations."""

    class Watch(require("transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            if agreed(interrupt.asked, place) and state.global_step < state.max_steps:
                control.should_training_stop = control.should_save = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
            if place.rank == 0:
                row = {"step": state.global_step, "loss": arguments["metrics"]["eval_loss"]}
                with (settings.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(jsonable(row)) + "\n")

    return Watch()


def _trainer(settings: Settings, place: Place, interrupt: Interrupt) -> Any:
    library = require("transformers")
    callbacks = require("soframe.integrations.transformers")
    library.set_seed(settings.seed)
    net = model(settings).to(place.device)
    train, test = data(settings)
    micro, rest = divmod(settings.batch_size, place.size * settings.accumulate)
    per_epoch = len(train) // settings.batch_size
    if rest or per_epoch == 0:
        raise ValueError(
            f"a batch of {settings.batch_size} cannot be split over {place.size} rank(s) with "
            f"{settings.accumulate} micro-batch(es), or exceeds the {len(train)} windows"
        )
    steps = settings.steps or settings.epochs * per_epoch
    if place.rank == 0:
        about = loop.description(__name__, settings, place, net)
        write_json(settings.output / "run.json", about)
    by_soframe = settings.optimizer == "soframe"
    clip = settings.clip or 0.0
    if by_soframe:
        clip = 0.0
    chosen_optimizer, _ = optimizer(net, settings)
    arguments = library.TrainingArguments(
        output_dir=str(settings.output),
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=settings.accumulate,
        max_steps=steps,
        learning_rate=settings.rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=round(settings.warmup * steps),
        max_grad_norm=clip,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every or per_epoch,
        save_steps=settings.save_every or per_epoch,
        save_total_limit=2,
        logging_steps=10,
        report_to=["tensorboard"] if settings.tensorboard else [],
        disable_tqdm=not sys.stdout.isatty(),
        use_cpu=place.device.type == "cpu",
        bf16=settings.amp == "bf16",
        fp16=settings.amp == "fp16",
        seed=settings.seed,
        dataloader_num_workers=settings.workers,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    watching = [_watch(settings, place, interrupt)]
    if by_soframe:
        # Without settings it saves the state of the soframe.Optimizer, on all ranks.
        watching.insert(0, callbacks.SoframeCallback())
    return library.Trainer(
        model=net,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=_collated,
        optimizers=(chosen_optimizer, None),
        callbacks=watching,
    )
