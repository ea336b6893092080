"""The public track's setting at its real size: GPT-2 of 124 million parameters on a GPU.

    torchrun --nproc-per-node 8 benchmarks/track_gpu.py --method soap-muon --lr 0.02 \\
        --tokens 'tokens/train_*.bin' --held-out tokens/val.bin --target 3.28

Model, data and batch are fixed; the method is free, with one forward and backward pass a step. What
is reported is the step at which the loss on held-out tokens is at the target. Tokens are read from
files that you name (`harness.tokens` has their format); nothing is downloaded. `--preset tiny` is
for a processor and a look at the machinery.

The public track's model is a later design than GPT-2 (rotary positions, normalised queries and
keys, squared ReLU), so that its 3.28 is another number of steps here. Compare methods under this
script, and their order with the public one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from harness.gpt2 import GPT2, Sizes
from harness.tokens import Stream
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe


@dataclass(frozen=True)
class Preset:
    """What is fixed.

    Attributes:
        sizes: Of the model.
        batch: Windows of a step, over all ranks and micro-batches.
        micro_batch: Windows of a backward pass on a rank.
        held_out: Windows that the loss is measured on.
    """

    sizes: Sizes
    batch: int
    micro_batch: int
    held_out: int


PRESETS = {
    "gpt2-124m": Preset(Sizes(), batch=512, micro_batch=32, held_out=10240),
    "tiny": Preset(
        Sizes(vocabulary=256, context=16, width=16, layers=2, heads=2),
        batch=8,
        micro_batch=4,
        held_out=4,
    ),
}


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
        rank: From 0.
        world_size: The number of processes.
        device: Its own.
    """

    rank: int
    world_size: int
    device: torch.device


@contextlib.contextmanager
def joined() -> Iterator[Place]:
    """Join the process group that torchrun asks for, if it does."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Place(rank, world_size, device)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


class Training:
    """A model in training by one method.

    Args:
        preset: What is fixed.
        place: Where this process stands.
        stream: The training tokens.
        optimizer: Arguments of `soframe.Optimizer`.
        seed: Of the weights.

    Raises:
        ValueError: If the batch cannot be shared out over ranks and micro-batches.
    """

    def __init__(
        self, preset: Preset, place: Place, stream: Stream, optimizer: dict[str, Any], seed: int = 0
    ) -> None:
        self.preset, self.place, self.stream = preset, place, stream
        share = place.world_size * preset.micro_batch
        if preset.batch % share:
            raise ValueError(
                f"a batch of {preset.batch} windows cannot be shared out over {place.world_size} "
                f"rank(s) in micro-batches of {preset.micro_batch}"
            )
        self.micro_batches = preset.batch // share
        self.model = GPT2(preset.sizes, seed).to(place.device)
        self.forward: nn.Module = self.model
        if place.world_size > 1:
            self.forward = DistributedDataParallel(self.model)
        self.optimizer = soframe.Optimizer(self.forward, samples="positions", **optimizer)
        self.lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.taken = 0

    def step(self, steps: int, cooldown: float) -> float:
        """Take a step of a run of so many, and return this rank's training loss.

        Args:
            steps: Of the whole run.
            cooldown: The last part of them, in which learning rates fall along a line to zero.
        """
        left = (steps - self.taken) / max(1.0, cooldown * steps)
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
            group["lr"] = lr * min(1.0, left)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.place.device)
        own = self.preset.micro_batch
        for index in range(self.micro_batches):
            place = (self.taken * self.micro_batches + index) * self.place.world_size
            windows = self.stream.batch((place + self.place.rank) * own, own)
            last = index == self.micro_batches - 1
            with contextlib.nullcontext() if last else self._unshared():
                loss = self._loss(*windows) / self.micro_batches
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.taken += 1
        return float(total)

    def _unshared(self) -> contextlib.AbstractContextManager[None]:
        """Return what keeps gradients on their ranks until the last micro-batch."""
        if isinstance(self.forward, DistributedDataParallel):
            context: contextlib.AbstractContextManager[None] = self.forward.no_sync()
            return context
        return contextlib.nullcontext()

    def _loss(self, tokens: Tensor, following: Tensor) -> Tensor:
        device = self.place.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss: Tensor = self.forward(tokens.to(device), following.to(device))
        return loss

    @torch.no_grad()
    def held_out_loss(self, stream: Stream) -> float:
        """Return the mean loss on held-out windows, over all ranks.

        Args:
            stream: The held-out tokens.

        Raises:
            ValueError: If there are fewer windows than the preset has.
        """
        count, own = self.preset.held_out, self.preset.micro_batch
        if len(stream) < count:
            raise ValueError(f"{count} held-out windows are measured, and there are {len(stream)}")
        sums = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        self.model.eval()
        for first in range(self.place.rank * own, count, self.place.world_size * own):
            size = min(own, count - first)
            tokens, following = (part.to(self.place.device) for part in stream.batch(first, size))
            with torch.autocast(
                self.place.device.type, torch.bfloat16, enabled=self.place.device.type == "cuda"
            ):
                loss = self.model(tokens, following)
            sums += torch.tensor([size * float(loss), size], device=sums.device)
        self.model.train()
        if self.place.world_size > 1:
            dist.all_reduce(sums)
        return float(sums[0] / sums[1])


def files(pattern: str) -> list[Path]:
    """Return the files of a pattern, in the order of their names.

    Raises:
        FileNotFoundError: If there are none.
    """
    found = sorted(glob.glob(pattern))  # noqa: PTH207  # a pattern may be absolute
    if not found:
        raise FileNotFoundError(f"no file of tokens at {pattern}: name one of your own")
    return [Path(name) for name in found]


def main(
    tokens: Annotated[str, typer.Option(help="Files to train on; a pattern.")],
    held_out: Annotated[str, typer.Option(help="Files to measure on; a pattern.")],
    method: Annotated[str, typer.Option(help="Of soframe.Optimizer.")] = "soap-muon",
    lr: Annotated[float, typer.Option(help="Of the method.")] = 0.02,
    auxiliary_lr: Annotated[float, typer.Option(help="Of AdamW, for the others.")] = 0.002,
    weight_decay: Annotated[float, typer.Option(help="Decoupled.")] = 0.0,
    strategy: Annotated[str, typer.Option(help="Who does what.")] = "sharded",
    statistics_every: Annotated[int, typer.Option(min=1)] = 1,
    solve_every: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1)] = 3250,
    cooldown: Annotated[float, typer.Option(help="The last part of the steps.")] = 0.6,
    evaluate_every: Annotated[int, typer.Option(min=1)] = 125,
    target: Annotated[float, typer.Option(help="A held-out loss; the run ends there.")] = 3.28,
    preset: Annotated[str, typer.Option(help=f"One of: {', '.join(PRESETS)}.")] = "gpt2-124m",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Train until a loss on held-out tokens is reached, and say after how many steps."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"no preset {preset!r}; there are: {', '.join(PRESETS)}")
    fixed = PRESETS[preset]
    sizes = fixed.sizes
    streams = [Stream.of(files(p), sizes.context, sizes.vocabulary) for p in (tokens, held_out)]
    settings = {
        "method": method,
        "lr": lr,
        "auxiliary_lr": auxiliary_lr,
        "weight_decay": weight_decay,
        "strategy": strategy,
        "statistics_every": statistics_every,
        "solve_every": solve_every,
    }
    with joined() as place:
        training = Training(fixed, place, streams[0], settings, seed)

        def say(**what: Any) -> None:
            if place.rank == 0:
                print(json.dumps(what), flush=True)

        parameters = sum(p.numel() for p in training.model.parameters())
        say(preset=preset, parameters=parameters, sizes=asdict(sizes), seed=seed, **settings)
        loss = training.held_out_loss(streams[1])
        while training.taken < steps and loss > target:
            trained = training.step(steps, cooldown)
            if training.taken % evaluate_every == 0 or training.taken == steps:
                loss = training.held_out_loss(streams[1])
                say(step=training.taken, training_loss=trained, held_out_loss=loss)
        say(reached=training.taken if loss <= target else None, target=target)
        training.optimizer.close()


if __name__ == "__main__":
    try:
        typer.run(main)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
