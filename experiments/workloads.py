"""Workloads: a model, its data and loss, and the losses worth reaching.

A workload fixes everything that must be the same for every optimizer in a comparison. One of your
own is a Python file with three functions, see `of_module`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from experiments import canvases, clutter, data, models, problems, recipes
from experiments.config import method_of
from experiments.data import seeded
from experiments.tasks import Task, cross_entropy, half_square

PROBLEM = "problem:"
"""Prefix of the small problems' names."""
SIZED = "cluttered-digits:"
"""Prefix of the number of training images, where they are fewer than all."""
RECIPE = "recipe:"
"""Prefix of the names of recipes, see `experiments.recipes`."""
FILE = ".py"
"""End of the path of a file with a workload."""

FUNCTIONS = {"model": "model()", "data": "data()", "loss": "loss(model, *batch)"}
"""Functions of a workload's module."""
CONSTANTS = (
    "title",
    "batch_size",
    "targets",
    "evaluate_every",
    "loss_name",
    "classifies",
    "settings",
    "spaces",
)
"""Fields of `Workload` that the module of a workload may set."""


@dataclass(frozen=True)
class Workload:
    """A training problem.

    Attributes:
        title: Its name in tables and plots.
        make: From a seed and a floating type to a task.
        batch_size: Examples per step, over all processes; None for all of them.
        targets: Losses to reach, descending.
        evaluate_every: Steps between evaluations, and so the resolution of "steps to target".
        loss_name: The measured quantity, in words.
        classifies: Whether outputs are logits of classes, so that accuracy is defined.
        whole: Whether "trust-region" takes all examples in each step: its quadratic model is then
            the objective's.
        scale: Reported losses are the mean loss times this.
        held_out: Whether reported losses are those on the held-out examples.
        at_once: Examples of an evaluation that the model gets at once; None for a fixed number.
        settings: Settings chosen by hand, by optimizer; see `experiments.tuning.configure`.
        spaces: Settings to search, by optimizer; see `experiments.tuning.Space`.
        source: The file with the functions, or None.
    """

    title: str
    make: Callable[[int, torch.dtype], Task]
    batch_size: int | None
    targets: tuple[float, ...] = ()
    evaluate_every: int = 5
    loss_name: str = "training loss"
    classifies: bool = False
    whole: bool = False
    scale: float = 1.0
    held_out: bool = False
    at_once: int | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    spaces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Path | None = None

    @property
    def digest(self) -> str:
        """The SHA-256 of the file with the functions; empty without one."""
        return hashlib.sha256(self.source.read_bytes()).hexdigest() if self.source else ""


def _autoencoder(seed: int, dtype: torch.dtype) -> Task:
    pixels = data.digits()[0].to(dtype)
    model = models.autoencoder(models.AUTOENCODER_WIDTHS, seed, dtype)
    return Task(model, "squared-error", half_square, (pixels, pixels))


def _curves(seed: int, dtype: torch.dtype) -> Task:
    images = data.curves().to(dtype)
    model = models.autoencoder(models.CURVES_WIDTHS, seed, dtype)
    return Task(model, "squared-error", half_square, (images, images))


def _mnist_autoencoder(widths: Sequence[int], seed: int, dtype: torch.dtype) -> Task:
    images = canvases.split(held_out=False)[0].to(dtype)
    model = models.autoencoder(widths, seed, dtype)
    return Task(model, "squared-error", half_square, (images, images))


def _autoencoder_of_mnist(title: str, widths: Sequence[int]) -> Workload:
    return Workload(
        title=title,
        make=partial(_mnist_autoencoder, widths),
        batch_size=200,
        targets=(16.0, 12.0, 9.0),
        evaluate_every=10,
        loss_name="training loss (squared error per image)",
        whole=True,
        scale=2.0,
    )


def _cnn(seed: int, dtype: torch.dtype) -> Task:
    examples = data.classified_digits(seed, dtype)
    return Task(models.digits_cnn(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _byte_gpt(seed: int, dtype: torch.dtype) -> Task:
    model, examples = models.byte_gpt(seed, dtype), data.standard_library()
    return Task(model, "cross-entropy", cross_entropy, *examples)


def _small_gpt(seed: int, dtype: torch.dtype, *, kept: bool) -> Task:
    model = models.small_gpt(seed, dtype, kept=kept)
    trained, held_out = data.standard_library(data.CONTEXT // 2)
    return Task(model, "cross-entropy", cross_entropy, trained, held_out)


def _small(title: str, *, kept: bool) -> Workload:
    return Workload(
        title=title,
        make=partial(_small_gpt, kept=kept),
        batch_size=32,
        evaluate_every=20,
        loss_name="loss on held-out modules (cross entropy per byte, nats)",
        held_out=True,
    )


def _byte_llama(seed: int, dtype: torch.dtype) -> Task:
    model, examples = models.byte_llama(seed, dtype), data.scipy_sources()
    return Task(model, "cross-entropy", cross_entropy, *examples)


def _vit(seed: int, dtype: torch.dtype) -> Task:
    examples = clutter.cluttered_digits(10_000)
    return Task(models.vit(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _cluttered(count: int, seed: int, dtype: torch.dtype) -> Task:
    held_out = min(clutter.HELD_OUT_IMAGES, max(1, count // 5))
    examples = clutter.cluttered_digits(count, held_out)
    return Task(models.resnet20_of_bytes(seed, dtype), "cross-entropy", cross_entropy, *examples)


def _cluttered_digits(count: int) -> Workload:
    return Workload(
        title=f"ResNet-20 on {count} cluttered digits",
        make=partial(_cluttered, count),
        batch_size=128,
        targets=(0.5,),
        evaluate_every=100,
        loss_name="loss on held-out digits (cross entropy per image, nats)",
        classifies=True,
        held_out=True,
    )


def _problem(name: str) -> Workload:
    make, title, batch_size = problems.PROBLEMS[name]

    def task(seed: int, dtype: torch.dtype) -> Task:
        with models.own_randomness():
            task_of_seed: Task = make(seed)
        assert dtype == torch.float32, "the small problems have no other precision"
        return task_of_seed

    return Workload(title, task, batch_size, whole=batch_size is None)


def of_module(module: ModuleType, *arguments: object) -> Workload:
    """Return the workload of a module with three functions.

    ``model()`` returns the model, with initial weights that torch draws: each run seeds it first.
    ``data()`` returns the training and the held-out examples, each a tuple of tensors of one length
    or a map-style dataset whose items are tuples of tensors. It is called with seed 0, so that all
    runs and ranks have the same examples. ``loss(model, *batch)`` returns the mean loss of a batch;
    it must call ``model``, not its submodules. The reported loss is that on the held-out examples.

    Optional constants of the module are the fields of `Workload` in `CONSTANTS`: ``title`` (by
    default the module's name), ``batch_size`` (64), ``targets`` (none), ``evaluate_every`` (20
    steps), ``loss_name`` ("held-out loss"), ``classifies`` (False; with True batches are inputs and
    classes), ``settings`` and ``spaces`` (none).

    Args:
        module: The module.
        arguments: Arguments of ``model`` and ``data``, for a module whose functions have any.

    Raises:
        ValueError: If a function is missing, or if it returns something else; or if ``settings`` or
            ``spaces`` name no optimizer.
    """
    path = Path(str(module.__file__))
    for name, call in FUNCTIONS.items():
        if not callable(getattr(module, name, None)):
            raise ValueError(f"{path} has no function {call}")
    constants = {name: getattr(module, name) for name in CONSTANTS if hasattr(module, name)}
    defaults: dict[str, Any] = {
        "title": module.__name__.rpartition(".")[2],
        "batch_size": 64,
        "evaluate_every": 20,
        "loss_name": "held-out loss",
    }
    chosen = {**defaults, **constants}
    for optimizer in {**chosen.get("settings", {}), **chosen.get("spaces", {})}:
        method_of(optimizer)  # which raises if it is none
    chosen["targets"] = tuple(sorted(chosen.get("targets", ()), reverse=True))
    make = partial(_task_of, path, module, arguments)
    return Workload(make=make, held_out=True, at_once=chosen["batch_size"], source=path, **chosen)


def _task_of(
    path: Path, module: ModuleType, arguments: Sequence[object], seed: int, dtype: torch.dtype
) -> Task:
    if dtype != torch.float32:
        raise ValueError(f"{path} decides the types of its tensors: leave out dtype")
    with seeded(seed):
        model = module.model(*arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}: model() must return an nn.Module, not {type(model).__name__}")
    with seeded(0):
        sets = module.data(*arguments)
    if not (isinstance(sets, tuple | list) and len(sets) == 2 and all(map(_has_examples, sets))):
        raise ValueError(
            f"{path}: data() must return (train, test), each a tuple of tensors of one length or "
            "a map-style dataset"
        )
    return Task(model, None, module.loss, *sets)


def _has_examples(examples: object) -> bool:
    if isinstance(examples, tuple):
        tensors = all(isinstance(tensor, Tensor) and tensor.ndim > 0 for tensor in examples)
        return tensors and len({len(tensor) for tensor in examples}) == 1
    items = hasattr(examples, "__getitem__") and hasattr(examples, "__len__")
    return items and not isinstance(examples, Tensor)  # (inputs, targets) is one set, not two


def _recipe(name: str) -> Workload:
    """Return a recipe with its default settings, with the losses that it trains alone."""
    if name not in recipes.NAMES:
        raise ValueError(f"no recipe {name!r}; there are: {', '.join(recipes.NAMES)}")
    module = importlib.import_module(f"{recipes.__name__}.{name}")
    settings = module.Settings()
    return replace(of_module(module, settings), batch_size=settings.batch_size)


def _of_file(name: str) -> Workload:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no workload {name!r}: there is no such file")
    return of_module(_imported(path.resolve(), path.read_bytes()))


@lru_cache
def _imported(path: Path, content: bytes) -> ModuleType:
    """Run a file once in each process: methods that it registers have one name each."""
    # Modules beside it can be imported, as beside a script.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"workload.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


_WORKLOADS = {
    "digits-autoencoder": Workload(
        title="Digits autoencoder",
        make=_autoencoder,
        batch_size=500,
        targets=(0.3, 0.15),
        loss_name="training loss (half the squared error per image)",
        whole=True,
    ),
    "curves": Workload(
        title="CURVES autoencoder",
        make=_curves,
        batch_size=500,
        targets=(0.5, 0.4, 0.3),
        loss_name="training loss (squared error per image)",
        whole=True,
        scale=2.0,
    ),
    "mnist-autoencoder": _autoencoder_of_mnist(
        "Autoencoder of MNIST's images", models.MNIST_WIDTHS
    ),
    "published-autoencoder": _autoencoder_of_mnist(
        "Autoencoder of MNIST's images, published widths", models.PUBLISHED_WIDTHS
    ),
    "byte-gpt": Workload(
        title="Byte-level GPT on Python's standard library",
        make=_byte_gpt,
        batch_size=8,
        targets=(2.5,),
        evaluate_every=20,
        loss_name="loss on held-out modules (cross entropy per byte, nats)",
        held_out=True,
    ),
    "small-gpt": _small("Small GPT on Python's standard library", kept=False),
    "small-gpt-kept": _small("Small GPT, for methods that keep the norms of weights", kept=True),
    "byte-llama": Workload(
        title="Byte-level Llama on SciPy's sources",
        make=_byte_llama,
        batch_size=16,
        evaluate_every=20,
        loss_name="loss on held-out modules (cross entropy per byte, nats)",
        held_out=True,
    ),
    "cluttered-vit": Workload(
        title="ViT on 10,000 cluttered digits",
        make=_vit,
        batch_size=64,
        evaluate_every=20,
        loss_name="loss on held-out digits (cross entropy per image, nats)",
        classifies=True,
        held_out=True,
    ),
    "digits-cnn": Workload(
        title="Digits CNN",
        make=_cnn,
        batch_size=128,
        targets=(0.1, 0.01),
        loss_name="training loss (cross entropy per image, nats)",
        classifies=True,
    ),
    "cluttered-digits": _cluttered_digits(clutter.TRAINING_IMAGES),
}


def names() -> tuple[str, ...]:
    """Return the names of the workloads, without the small problems'."""
    return tuple(_WORKLOADS)


def workload(name: str) -> Workload:
    """Return a workload.

    Args:
        name: One of `names()`; "cluttered-digits:10000"; "problem:" or "recipe:" and its name; or
            the path of a Python file, see `of_module`.

    Raises:
        ValueError: If the name is unknown; the message lists the names.
    """
    if name.endswith(FILE):
        return _of_file(name)
    prefix, colon, rest = name.partition(":")
    if prefix + colon == SIZED and rest.isdecimal() and int(rest) > 0:
        return _cluttered_digits(int(rest))
    if prefix + colon == PROBLEM:
        return _problem(rest)
    if prefix + colon == RECIPE:
        return _recipe(rest)
    if name not in _WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(_WORKLOADS)}; or FILE.py")
    return _WORKLOADS[name]
