"""Readers of training data in the formats in which they are published.

Images are float32, ``[3, height, width]``, normalised; classes and tokens are int64. Transforms
draw from torch's default generator, which the training loop seeds for each item.
"""

from __future__ import annotations

import io
import itertools
import math
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from experiments.libraries import require

Example = tuple[Tensor, ...]
Image = Any
"""An image of pillow's."""
Transform = Callable[[Image], Tensor]

IMAGES = {".jpg", ".jpeg", ".png"}


def number(*parts: int) -> int:
    """Return a seed that is made of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def _require(path: Path, remedy: str) -> Path:
    """Return the path.

    Raises:
        FileNotFoundError: If it does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {remedy}")
    return path


# -- CIFAR-10 -------------------------------------------------------------------------------------


class Cifar10(Dataset[Example]):
    """CIFAR-10 from its binary files (https://www.cs.toronto.edu/~kriz/cifar.html).

    A record is one byte of the class and 3072 bytes of pixels: a plane of 32 x 32 for each of red,
    green and blue. Items are an image and its class.

    Args:
        folder: The folder of the files.
        train: Whether these are ``data_batch_1.bin`` to ``data_batch_5.bin``, padded by four
            pixels, cropped and flipped at random; else ``test_batch.bin``.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is cut off, or has a class above 9.
    """

    RECORD = 1 + 3 * 32 * 32
    REMEDY = (
        "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it, and pass its "
        "folder cifar-10-batches-bin as --data"
    )
    MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # as in kfac-pytorch

    def __init__(self, folder: Path, *, train: bool) -> None:
        names = [f"data_batch_{part}.bin" for part in range(1, 6)] if train else ["test_batch.bin"]
        records = torch.cat([self._read(folder / name) for name in names])
        self.classes = records[:, 0].long()
        self.images = records[:, 1:].view(-1, 3, 32, 32)
        self._train = train

    def _read(self, path: Path) -> Tensor:
        content = np.fromfile(_require(path, self.REMEDY), dtype=np.uint8)
        if len(content) == 0 or len(content) % self.RECORD:
            raise ValueError(
                f"{path} has {len(content)} bytes, no multiple of {self.RECORD}: {self.REMEDY}"
            )
        records = torch.from_numpy(content).view(-1, self.RECORD)
        if int(records[:, 0].max()) > 9:
            raise ValueError(f"{path} has a class above 9, so it is not CIFAR-10's: {self.REMEDY}")
        return records

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> Example:
        image = normalised(self.images[index].float() / 255, self.MEAN, self.DEVIATION)
        if self._train:
            start_row, start_column = torch.randint(9, (2,)).tolist()
            image = torch.nn.functional.pad(image, (4, 4, 4, 4))[
                :, start_row : start_row + 32, start_column : start_column + 32
            ]
            image = _perhaps_flipped(image)
        return image, self.classes[index]


def normalised(image: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Subtract a mean from each channel, and divide by a deviation."""
    return (image - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)


def _perhaps_flipped(image: Tensor) -> Tensor:
    """Return an image, flipped in half of all calls."""
    return image.flip(-1) if bool(torch.rand(()) < 0.5) else image


# -- images of any size ---------------------------------------------------------------------------

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def decoded(source: Path | bytes, name: str) -> Image:
    """Return an image in RGB.

    Args:
        source: A file, or the content of one.
        name: Its name in errors.

    Raises:
        ValueError: If it cannot be decoded.
        MissingLibraryError: If pillow is not installed.
    """
    pillow = require("PIL.Image")
    try:
        with pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:  # pillow raises both
        raise ValueError(f"{name} cannot be decoded ({error}): replace or remove it") from error


def _tensor(image: Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return normalised(pixels, IMAGENET_MEAN, IMAGENET_DEVIATION)


@dataclass(frozen=True)
class RandomCrop:
    """Cuts out a part of 8 to 100 %, of aspect 3/4 to 4/3, and flips it (Szegedy et al., 2015).

    Attributes:
        side: Side of the result.
    """

    side: int

    def __call__(self, image: Image) -> Tensor:
        width, height = image.size
        for _ in range(10):
            area = width * height * float(torch.empty(()).uniform_(0.08, 1))
            aspect = math.exp(float(torch.empty(()).uniform_(-1, 1)) * math.log(4 / 3))
            across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < across <= width and 0 < down <= height:
                start_column = int(torch.randint(width - across + 1, ()))
                start_row = int(torch.randint(height - down + 1, ()))
                break
        else:  # a long image: its middle
            across = min(width, round(height * 4 / 3))
            down = min(height, round(width * 4 / 3))
            start_column, start_row = (width - across) // 2, (height - down) // 2
        bilinear = require("PIL.Image").Resampling.BILINEAR
        box = (start_column, start_row, start_column + across, start_row + down)
        resized = _tensor(image.resize((self.side, self.side), bilinear, box=box))
        return _perhaps_flipped(resized)


@dataclass(frozen=True)
class CentreCrop:
    """Cuts out the middle of an image whose shorter side is resized to 8/7 of the crop.

    Attributes:
        side: Side of the result: 224 of 256, for instance.
    """

    side: int

    def __call__(self, image: Image) -> Tensor:
        width, height = image.size
        part = min(width, height) * 7 / 8
        start_column, start_row = (width - part) / 2, (height - part) / 2
        bilinear = require("PIL.Image").Resampling.BILINEAR
        box = (start_column, start_row, start_column + part, start_row + part)
        return _tensor(image.resize((self.side, self.side), bilinear, box=box))


class ImageFolder(Dataset[Example]):
    """Images in one folder for each class, which are numbered in alphabetical order.

    Args:
        folder: The folder of the classes' folders, as ImageNet's ``train`` has them.
        transform: From an image to a tensor.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If it has no images in folders.
    """

    def __init__(self, folder: Path, transform: Transform) -> None:
        remedy = (
            "it should have one folder of images for each class, as train/n01440764/*.JPEG and "
            "val/n01440764/*.JPEG of ImageNet (https://image-net.org/download)"
        )
        _require(folder, remedy)
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files: list[tuple[Path, int]] = []
        for index, name in enumerate(self.classes):
            paths = sorted((folder / name).iterdir())
            self.files += [(path, index) for path in paths if path.suffix.lower() in IMAGES]
        if not self.files:
            raise ValueError(f"{folder} has no images in folders: {remedy}")
        self._transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        path, label = self.files[index]
        return self._transform(decoded(path, str(path))), torch.tensor(label)


class Stream(IterableDataset[Example]):
    """Training data that are read in order, by every rank and worker its share.

    Attributes:
        samples: The number of samples of an epoch.
    """

    samples: int

    def place(
        self, rank: int, ranks: int, batch: int = 1, per_epoch: int | None = None, begin: int = 0
    ) -> None:
        """Choose the part to read, before an iteration.

        Args:
            rank: The rank.
            ranks: The number of ranks.
            batch: Samples of a micro-batch.
            per_epoch: Micro-batches of an epoch; None to read everything once.
            begin: Micro-batches that were read before.
        """
        raise NotImplementedError


class TarShards(Stream):
    """Images and classes in tar files, in WebDataset's convention: ``KEY.jpg`` beside ``KEY.cls``.

    The two members of a key follow each other; ``.cls`` is a number in ASCII. Each epoch has an
    order of shards of its own, which ranks and workers share out; samples are shuffled in a buffer.
    With as many ranks and workers, a continuation reads the samples of an uninterrupted run.

    Args:
        folder: The folder of the ``*.tar`` files.
        transform: From an image to a tensor.
        samples: Samples of an epoch.
        seed: Seed of the order.
        buffer: Samples of the buffer.

    Raises:
        FileNotFoundError: If the folder has no tar files.
    """

    def __init__(
        self, folder: Path, transform: Transform, samples: int, seed: int = 0, buffer: int = 1000
    ) -> None:
        _require(folder, "it should have tar shards of images, KEY.jpg beside KEY.cls")
        self.shards = sorted(folder.glob("*.tar"))
        if not self.shards:
            raise FileNotFoundError(f"{folder} has no *.tar")
        self.samples, self._transform = samples, transform
        self._seed, self._buffer = seed, buffer

    def place(
        self, rank: int, ranks: int, batch: int = 1, per_epoch: int | None = None, begin: int = 0
    ) -> None:
        self._rank, self._ranks, self._batch = rank, ranks, batch
        self._per_epoch, self._begin = per_epoch, begin

    def __iter__(self) -> Iterator[Example]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._ranks > len(self.shards):
            raise ValueError(f"{self._ranks} ranks cannot share {len(self.shards)} shard(s)")
        if self._per_epoch is None:
            share, shares = worker * self._ranks + self._rank, self._ranks * workers
            for name, content, label in self._records(self.shards[share::shares]):
                yield self._transform(decoded(content, name)), torch.tensor(label)
            return
        # DataLoader takes micro-batches from workers in turns, beginning with the first worker.
        position = (worker + self._begin) % workers
        share, shares = position * self._ranks + self._rank, self._ranks * workers
        if shares > len(self.shards):
            raise ValueError(
                f"{self._ranks} rank(s) with {workers} worker(s) cannot share {len(self.shards)} "
                f"shard(s): use fewer workers, or split the shards"
            )
        for epoch in itertools.count(self._begin // self._per_epoch):
            first = epoch * self._per_epoch
            batches = [n for n in range(first, first + self._per_epoch) if n % workers == position]
            done = sum(n < self._begin for n in batches)
            yield from self._epoch(
                epoch, share, shares, done * self._batch, len(batches) * self._batch
            )

    def _epoch(
        self, epoch: int, share: int, shares: int, begin: int, end: int
    ) -> Iterator[Example]:
        """Yield the samples of an epoch from one number to another, reading again at the end."""
        generator = torch.Generator().manual_seed(number(self._seed, epoch))
        order = torch.randperm(len(self.shards), generator=generator).tolist()
        shards = [self.shards[index] for index in order[share::shares]]
        generator.manual_seed(number(self._seed, epoch, share))
        passes = (self._shuffled(shards, generator) for _ in itertools.count())
        records = itertools.chain.from_iterable(passes)
        for index, (name, content, label) in enumerate(
            itertools.islice(records, begin, end), begin
        ):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(number(self._seed, epoch, share, index))
                image = self._transform(decoded(content, name))
            yield image, torch.tensor(label)

    def _shuffled(
        self, shards: Sequence[Path], generator: torch.Generator
    ) -> Iterator[tuple[str, bytes, int]]:
        """Yield the records of one pass, each in exchange for a later one."""
        held: list[tuple[str, bytes, int]] = []
        for record in self._records(shards):
            if len(held) < self._buffer:
                held.append(record)
                continue
            index = int(torch.randint(self._buffer, (), generator=generator))
            yield held[index]
            held[index] = record
        for index in torch.randperm(len(held), generator=generator).tolist():
            yield held[index]

    def _records(self, shards: Sequence[Path]) -> Iterator[tuple[str, bytes, int]]:
        """Yield the name, the content and the class of each image."""
        for shard in shards:
            for key, members in itertools.groupby(_members(shard), lambda member: member[0]):
                parts = {suffix: content for _, suffix, content in members}
                image = next((parts[s] for s in parts if f".{s}" in IMAGES), None)
                label = parts.get("cls", b"").strip()
                if image is None or not label.isdigit():
                    raise ValueError(
                        f"{shard}: {key} has no image with a class (members: {', '.join(parts)}); "
                        f"each key needs a .jpg and a .cls with a number"
                    )
                yield f"{shard}: {key}", image, int(label)


def _members(shard: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the key, the suffix and the content of each file of a tar file."""
    with shard.open("rb") as file:
        # Python's reader takes a file that was cut after a member for a whole one.
        file.seek(max(0, shard.stat().st_size - 1024))
        end = file.read()
        if len(end) < 1024 or any(end):
            raise ValueError(f"{shard} is cut off or no tar file: copy it again")
    with tarfile.open(shard) as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)) is not None:
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                yield f"{folder}/{stem}".lstrip("/"), suffix.lower(), content.read()


# -- text -----------------------------------------------------------------------------------------


class Tokens(Dataset[Example]):
    """Windows of a file of tokens, little-endian uint16 without a header, mapped into memory.

    Items are ``length`` tokens and the tokens that follow each.

    Args:
        path: The file.
        length: Tokens of a window.
        vocabulary: The number of tokens there are.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is cut off, or shorter than a window.
    """

    REMEDY = (
        "make it of text by `python -m experiments.recipes tokens --text FILE --output FOLDER`, "
        "and pass FOLDER as --data"
    )

    def __init__(self, path: Path, length: int, vocabulary: int) -> None:
        size = _require(path, self.REMEDY).stat().st_size
        if size % 2:
            raise ValueError(f"{path} has {size} bytes, no whole number of uint16: {self.REMEDY}")
        self._count = (size // 2 - 1) // length
        if self._count < 1:
            raise ValueError(f"{path} has {size // 2} tokens, fewer than {length + 1}")
        self._path, self._length, self._vocabulary = path, length, vocabulary

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._count:
            raise IndexError(index)
        # Opened for each window: workers share no handle, and pages are not kept.
        tokens = np.memmap(self._path, dtype="<u2", mode="r")
        begin = index * self._length
        window = torch.from_numpy(tokens[begin : begin + self._length + 1].astype(np.int64))
        if int(window.max()) >= self._vocabulary:
            raise ValueError(
                f"{self._path} has token {int(window.max())}, beyond a vocabulary of "
                f"{self._vocabulary}: pass the --vocabulary of its tokenizer"
            )
        return window[:-1], window[1:]


class MaskedTokens(Dataset[Example]):
    """Windows with masks, for BERT (Devlin et al., 2019).

    Items are the tokens, and labels that are -100 where nothing is predicted. 15 % of the positions
    are drawn. Of these 80 % become the mask, 10 % a random token, and 10 % stay.

    Args:
        inner: The windows, the first tensor of an item.
        vocabulary: The number of tokens there are.
        mask: The token of the mask.
    """

    def __init__(self, inner: Tokens | TensorDataset, vocabulary: int, mask: int) -> None:
        self._inner, self._vocabulary, self._mask = inner, vocabulary, mask

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Example:
        tokens = self._inner[index][0]
        count = max(1, round(0.15 * len(tokens)))
        drawn = torch.randperm(len(tokens))[:count]
        labels = torch.full_like(tokens, -100)
        labels[drawn] = tokens[drawn]
        kind = torch.rand(count)
        random_tokens = torch.randint(self._vocabulary, (count,))
        replaced = torch.where(
            kind < 0.8, self._mask, torch.where(kind < 0.9, random_tokens, tokens[drawn])
        )
        return tokens.index_put((drawn,), replaced), labels
