"""Influence by EKFAC: the time and memory of fitting and of scores, beside other libraries.

    python -m benchmarks.influence            # 1,000 training samples, 200 queries, three models
    python -m benchmarks.influence --short    # seconds: 64 samples, 16 queries

Models are trained on scikit-learn's digits, and every parameter of their linear layers and
convolutions is attributed. Contenders take turns in one process of one thread, in float32, with
batches of 100 and the same damping, a tenth of the mean eigenvalue; seconds are of the processor,
medians over ``--rounds``. Libraries are those installed here::

    pip install kronfluence==1.0.1 dattri-llm==0.1.0

*difference* is the norm of the difference to soframe's scores over their norm. *Memory* is the
largest growth of the resident set during fitting and scores, each library in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from experiments.data import digits
from experiments.display import aligned

TRAIN, QUERIES, BATCH, EPOCHS = 1000, 200, 100, 5
SHORT = (64, 16)
Data = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Two layers of attention over the rows of an image; its norms have no parameters."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, width)
        self.register_buffer("places", 0.1 * torch.randn(8, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "inputs": nn.Linear(width, 3 * width),
                    "outputs": nn.Linear(width, width),
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits ``[samples, 10]`` of pixels ``[samples, 64]``."""
        x = self.embed(pixels.view(-1, 8, 8)) + self.places
        for layer in self.layers:
            x = x + layer["outputs"](self._attend(layer["inputs"](_normalised(x))))
            x = x + layer["down"](F.gelu(layer["up"](_normalised(x))))
        logits: Tensor = self.head(_normalised(x).mean(1))
        return logits

    def _attend(self, projected: Tensor) -> Tensor:
        # [samples, heads, positions, width / heads]
        query, key, value = [
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in projected.chunk(3, 2)
        ]
        attended = F.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(2)


def _normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def perceptron() -> nn.Module:
    """Return two hidden layers of 256."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


def convolutional() -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutions": convolutional,
    "transformer": Attention,
}


def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of a batch, and its mean cross-entropy."""
    outputs = model(batch[0])
    return outputs, F.cross_entropy(outputs, batch[1])


def split_digits(samples: int, queries: int) -> tuple[Data, Data]:
    """Return training samples and queries: pixels ``[N, 64]`` and classes."""
    pixels, classes = digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    pixels, classes = pixels[order].float(), classes[order]
    end = samples + queries
    return (pixels[:samples], classes[:samples]), (pixels[samples:end], classes[samples:end])


def batches_of(data: Data, size: int = BATCH) -> list[Data]:
    """Return the batches of data."""
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def trained(name: str, data: Data) -> nn.Module:
    """Return a model after a few epochs of SGD."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data[1])).split(BATCH):
            optimizer.zero_grad()
            loss_of(model, (data[0][rows], data[1][rows]))[1].backward()
            optimizer.step()
    return model


@dataclass(frozen=True)
class Task:
    """A trained model, the data, and the damping that all contenders use."""

    model: nn.Module
    train: Data
    queries: Data
    damping: float


@dataclass(frozen=True)
class Result:
    """The seconds and the scores of a contender.

    Attributes:
        fit: Seconds of fitting.
        scoring: Seconds of scores.
        scores: ``[queries, training samples]``.
    """

    fit: float
    scoring: float
    scores: Tensor


def task_of(name: str, samples: int, queries: int) -> Task:
    """Return a trained model, with a tenth of the mean eigenvalue as damping."""
    train, asked = split_digits(samples, queries)
    model = trained(name, train)
    curvature = soframe.Curvature(model, "ekfac").fit(batches_of(train), loss_of)
    damping = 0.1 * curvature.trace() / len(curvature.eigenvalues())
    return Task(model, train, asked, damping)


def soframe_scores(task: Task) -> Result:
    """Score with soframe."""
    start = time.process_time()
    curvature = soframe.Curvature(task.model, "ekfac")
    curvature.fit(batches_of(task.train), loss_of)
    fitted = time.process_time()
    scores = soframe.influence.scores(
        curvature, [task.queries], batches_of(task.train), loss_of, damping=task.damping
    )
    return Result(fitted - start, time.process_time() - fitted, scores)


def kronfluence_scores(task: Task) -> Result:
    """Score with kronfluence, whose scores come by files."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task as BaseTask
    from torch.utils.data import TensorDataset

    class Classify(BaseTask):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return len(batch[1]) * F.cross_entropy(model(batch[0]), batch[1])

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    train, queries = TensorDataset(*task.train), TensorDataset(*task.queries)
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        prepared = prepare_model(task.model, Classify())
        analyzer = Analyzer(
            "digits",
            prepared,
            Classify(),
            cpu=True,
            disable_tqdm=True,
            log_level=logging.CRITICAL,
            output_dir=folder,
        )
        analyzer.fit_all_factors(
            "factors",
            train,
            per_device_batch_size=BATCH,
            factor_args=FactorArguments(
                strategy="ekfac",
                use_empirical_fisher=True,
                eigendecomposition_dtype=torch.float32,
            ),
        )
        fitted = time.process_time()
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            queries,
            train,
            per_device_query_batch_size=len(queries),
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=task.damping),
        )
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
        return Result(fitted - start, time.process_time() - fitted, scores)


class _Named(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples as dicts."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data[1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self._data[0][index], "class": self._data[1][index]}


def dattri_scores(task: Task) -> Result:
    """Score with dattri-LLM, in one call, of whose seconds those of its fit are noted."""
    from dattri_llm import AttributionArguments, AttributionTask, EKFACAttributor

    def total(model: nn.Module, batch: Any) -> Tensor:
        return len(batch["class"]) * F.cross_entropy(model(batch["pixels"]), batch["class"])

    class Timed(EKFACAttributor):  # type: ignore[misc]
        fitting = 0.0

        def fit_raw(self, *args: Any, **settings: Any) -> Any:
            start = time.process_time()
            fitted = super().fit_raw(*args, **settings)
            self.fitting = time.process_time() - start
            return fitted

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        arguments = AttributionArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=len(task.queries[1]),
        )
        attributor = Timed(arguments, task=AttributionTask(loss_func=total, model=task.model))
        result = attributor.attribute(
            _Named(task.train), _Named(task.queries), damping=task.damping
        )
        seconds = time.process_time() - start
        _, scores = result.agnostic_matrix()
    scores = torch.as_tensor(scores).T
    return Result(attributor.fitting, seconds - attributor.fitting, scores)


@dataclass(frozen=True)
class Contender:
    """A library.

    Attributes:
        module: The name that it is imported by.
        run: Computes scores.
    """

    module: str
    run: Callable[[Task], Result]


CONTENDERS = {
    "soframe": Contender("soframe", soframe_scores),
    "kronfluence": Contender("kronfluence", kronfluence_scores),
    "dattri-LLM": Contender("dattri_llm", dattri_scores),
}


def installed() -> list[str]:
    """Return the contenders that are installed; the others are named on standard error."""
    names = []
    for name, contender in CONTENDERS.items():
        if importlib.util.find_spec(contender.module) is not None:
            names.append(name)
        else:
            print(f"{name} is not installed: skipped", file=sys.stderr)
    return names


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the output and the warnings of libraries."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def timed(task: Task, names: Sequence[str], rounds: int) -> dict[str, list[Result]]:
    """Let contenders take turns, each with a copy of the model."""
    results: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            turn = Task(copy.deepcopy(task.model), task.train, task.queries, task.damping)
            with quiet():
                results[name].append(CONTENDERS[name].run(turn))
    return results


def _resident(field: str) -> float:
    """Return a size in /proc/self/status, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def _grown(contender: str, model: str, samples: int, queries: int, sizes: Any) -> None:
    torch.set_num_threads(1)
    run = CONTENDERS[contender].run
    with quiet():
        run(task_of(model, *SHORT))  # imports
        task = task_of(model, samples, queries)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _resident("VmRSS")
        run(task)
    sizes.put(_resident("VmHWM") - before)


def memory(contender: str, model: str, samples: int, queries: int) -> float:
    """Return the MB by which the resident set of a process of its own grows at most."""
    context = get_context("spawn")
    sizes = context.Queue()
    process = context.Process(target=_grown, args=(contender, model, samples, queries, sizes))
    process.start()
    grown: float = sizes.get(timeout=600)
    process.join()
    return grown


def lines_of(results: dict[str, list[Result]], sizes: dict[str, float]) -> list[list[str]]:
    """Return the cells of the contenders."""
    ours = results["soframe"]
    lines = []
    for name, rounds in results.items():
        fit = statistics.median(result.fit for result in rounds)
        scoring = statistics.median(result.scoring for result in rounds)
        pairs = zip(ours, rounds, strict=True)
        of_fit, of_scoring, of_both = _ratios(list(pairs))
        difference = (rounds[0].scores - ours[0].scores).norm() / ours[0].scores.norm()
        both = torch.stack([rounds[0].scores.flatten(), ours[0].scores.flatten()])
        correlation = float(torch.corrcoef(both)[0, 1])
        size = f"{sizes[name]:.0f}" if name in sizes else "-"
        lines.append(
            [
                name,
                f"{fit:.3f}",
                f"{scoring:.3f}",
                f"{of_fit:.2f}",
                f"{of_scoring:.2f}",
                f"{of_both:.2f}",
                size,
                f"{float(difference):.1e}",
                f"{correlation:.6f}",
            ]
        )
    return lines


def _ratios(pairs: Sequence[tuple[Result, Result]]) -> tuple[float, float, float]:
    """Return medians over rounds of soframe's times over another's: fitting, scores, both."""
    fit = statistics.median(ours.fit / other.fit for ours, other in pairs)
    scoring = statistics.median(ours.scoring / other.scoring for ours, other in pairs)
    both = statistics.median(
        (ours.fit + ours.scoring) / (other.fit + other.scoring) for ours, other in pairs
    )
    return fit, scoring, both


HEAD = [
    "fit, s",
    "scores, s",
    "soframe's fit over it",
    "scores",
    "both",
    "memory, MB",
    "difference",
    "correlation",
]


def main() -> int:
    """Print a table of each model."""
    parser = argparse.ArgumentParser(description="Influence by EKFAC, timed.")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="few samples, one round, no memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 1 if options.short else options.rounds
    samples, queries = SHORT if options.short else (TRAIN, QUERIES)
    names = installed()
    for model in options.models.split(","):
        task = task_of(model, samples, queries)
        with quiet():
            for name in names:  # imports, and caches of the process
                CONTENDERS[name].run(task_of(model, *SHORT))
        results = timed(task, names, rounds)
        sizes = {}
        if not options.short and sys.platform == "linux":
            sizes = {name: memory(name, model, samples, queries) for name in names}
        print(
            aligned(f"{model}, {samples:,} x {queries}", [["", *HEAD], *lines_of(results, sizes)])
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
