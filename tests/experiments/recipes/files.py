"""Small files in the formats of the published data sets."""

import io
import tarfile

import numpy as np
from PIL import Image

CLASSES = ("n01440764", "n01443537")


def cifar(folder, counts=(6, 6, 6, 6, 6, 5)):
    """Write CIFAR-10's six binary files: records of a class and 3072 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    names = [f"data_batch_{part}.bin" for part in range(1, 6)] + ["test_batch.bin"]
    for name, count in zip(names, counts, strict=True):
        records = generator.integers(256, size=(count, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)
    return folder


def picture(value, size=(40, 32)):
    """An image, darker to the right, whose mean is about a value."""
    across = np.linspace(-20, 20, size[0], dtype=np.float64)
    pixels = np.broadcast_to(value + across[None, :, None], (size[1], size[0], 3))
    return Image.fromarray(pixels.astype(np.uint8))


def image_folder(folder, count=8):
    """Write JPEGs in ImageNet's folders of classes, `train` and `val`."""
    for part, number in (("train", count), ("val", 2)):
        for label, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for index in range(number):
                mode = "L" if index == 0 else "RGB"  # ImageNet has some without colour
                image = picture(60 + 100 * label + 2 * index).convert(mode)
                image.save(folder / part / name / f"{name}_{index}.JPEG", quality=95)
    return folder


def shards(folder, counts=(5, 4, 6), first=0):
    """Write tar shards of KEY.jpg beside KEY.cls; classes count the samples."""
    folder.mkdir(parents=True, exist_ok=True)
    number = first
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"shard-{shard:06d}.tar", "w") as archive:
            for _ in range(count):
                content = io.BytesIO()
                picture(40 + 5 * number).save(content, "JPEG", quality=95)
                _add(archive, f"./{number:08d}.jpg", content.getvalue())
                _add(archive, f"./{number:08d}.cls", f"{number}\n".encode())
                number += 1
    return folder


def _add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def tokens(folder, train=200, val=70, vocabulary=50):
    """Write train.bin and val.bin, uint16."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.bin", train), ("val.bin", val)):
        (np.arange(count) % vocabulary).astype("<u2").tofile(folder / name)
    return folder
