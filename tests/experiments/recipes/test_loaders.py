"""Readers of the published formats, on small files."""

import re
import tarfile
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from experiments.libraries import require
from experiments.recipes import tokens
from experiments.recipes.loaders import (
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    CentreCrop,
    Cifar10,
    ImageFolder,
    MaskedTokens,
    RandomCrop,
    TarShards,
    Tokens,
    decoded,
)
from tests.experiments.recipes import files


def test_cifar_records(tmp_path):
    files.cifar(tmp_path)
    test = Cifar10(tmp_path, train=False)
    content = np.fromfile(tmp_path / "test_batch.bin", dtype=np.uint8)
    assert len(test) == 5
    assert len(Cifar10(tmp_path, train=True)) == 30
    image, label = test[3]
    record = content[3 * 3073 : 4 * 3073]
    assert label == record[0]
    # Green, row 2, column 7.
    assert image[1, 2, 7] == pytest.approx(
        (record[1 + 1024 + 2 * 32 + 7] / 255 - 0.4822) / 0.1994, rel=1e-5
    )


def test_cifar_is_cropped_and_flipped_in_training(tmp_path):
    files.cifar(tmp_path)
    plain = Cifar10(tmp_path, train=True)
    plain._train = False
    original = torch.nn.functional.pad(plain[4][0], (4, 4, 4, 4))
    train = Cifar10(tmp_path, train=True)
    found = {tuple(place) for place in (find(train[4][0], original) for _ in range(40))}
    assert len({top for top, _, _ in found}) > 4
    assert len({left for _, left, _ in found}) > 4
    assert {flipped for _, _, flipped in found} == {False, True}


def find(image, original):
    for flipped in (False, True):
        wanted = image.flip(-1) if flipped else image
        for top in range(9):
            for left in range(9):
                if torch.equal(original[:, top : top + 32, left : left + 32], wanted):
                    return top, left, flipped
    raise AssertionError("no crop")


def level(image):
    """The mean of an image of `files.picture`, in its bytes."""
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    return float(((image * deviation + mean) * 255).mean())


def test_image_folders(tmp_path):
    files.image_folder(tmp_path)
    found = ImageFolder(tmp_path / "train", CentreCrop(24))
    assert found.classes == list(files.CLASSES)
    assert len(found) == 16
    assert [int(found[index][1]) for index in (0, 7, 8, 15)] == [0, 0, 1, 1]
    image, _ = found[10]
    assert image.shape == (3, 24, 24)
    assert level(image) == pytest.approx(164, abs=2)
    assert image[0, 0, 0] < image[0, 0, -1]
    random = ImageFolder(tmp_path / "train", RandomCrop(24))
    drawn = [random[10][0] for _ in range(20)]
    assert {bool(one[0, 0, 0] < one[0, 0, -1]) for one in drawn} == {False, True}  # flipped
    assert len({round(level(one)) for one in drawn}) > 3
    assert all(140 < level(one) < 190 for one in drawn)


@pytest.mark.parametrize("size", [(300, 4), (4, 300), (1, 1)])
def test_a_crop_of_any_image_lies_within_it(size):
    for _ in range(20):
        assert RandomCrop(8)(files.picture(100, size)).isfinite().all()


def shown(crop, image):
    """The share of the area, and the aspect, that a crop of 50 pixels has of an image of 200."""
    deviation = torch.tensor(IMAGENET_DEVIATION)[:2, None]
    low, high = (255 * deviation * crop(image)[:2].flatten(1)).aminmax(dim=1, keepdim=True)
    # The outermost pixels are averages, half a pixel of the crop from its edge.
    sides = (high - low).flatten() * 50 / 49
    return float(sides.prod()) / 200**2, float(sides[0] / sides[1])


def test_crops_have_8_to_100_percent_of_the_area_and_aspects_of_3_to_4():
    torch.manual_seed(0)
    # Red is the column and green the row.
    places = np.stack(np.broadcast_arrays(np.arange(200)[None], np.arange(200)[:, None], 0), -1)
    image = require("PIL.Image").fromarray(places.astype(np.uint8))
    shares, aspects = zip(*(shown(RandomCrop(50), image) for _ in range(300)), strict=True)
    assert shown(CentreCrop(50), image) == pytest.approx((0.875**2, 1.0), abs=0.01)
    assert 0.06 < min(shares) < 0.13
    assert 0.85 < max(shares) < 1.05
    assert 0.7 < min(aspects) < 0.8
    assert 1.25 < max(aspects) < 1.43


def read(stream, workers=0, batch=2, count=None):
    """Classes of micro-batches."""
    loader = DataLoader(stream, batch_size=batch, num_workers=workers)
    found = []
    for _, labels in loader:
        found.append(labels.tolist())
        if len(found) == count:
            break
    return found


def stream(folder, **options):
    return TarShards(folder, CentreCrop(8), 15, **options)


def test_tar_shards_are_read_once_by_all_ranks_for_a_test(tmp_path):
    files.shards(tmp_path)
    seen = []
    for rank in range(2):
        shards = stream(tmp_path)
        shards.place(rank, 2)
        seen += [label for batch in read(shards) for label in batch]
    assert sorted(seen) == list(range(15))
    shards = stream(tmp_path)
    shards.place(0, 1)
    (image, label) = next(iter(shards))
    assert level(image) == pytest.approx(40 + 5 * int(label), abs=2)


def test_an_epoch_of_tar_shards_has_each_sample_once_in_an_order_of_its_own(tmp_path):
    files.shards(tmp_path)
    for buffer in (4, 1000):
        shards = stream(tmp_path, buffer=buffer)
        shards.place(0, 1, batch=3, per_epoch=5)
        batches = read(shards, batch=3, count=15)
        epochs = [list(chain(*batches[5 * epoch : 5 * epoch + 5])) for epoch in range(3)]
        assert all(sorted(epoch) == list(range(15)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != sorted(epochs[0])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_tar_shards_go_on_where_they_were(tmp_path, workers):
    files.shards(tmp_path, counts=(5, 4, 6, 3))
    whole = stream(tmp_path, buffer=3)
    whole.place(1, 2, batch=2, per_epoch=4)
    wanted = read(whole, workers, count=11)
    for begin in (1, 4, 7):
        rest = stream(tmp_path, buffer=3)
        rest.place(1, 2, batch=2, per_epoch=4, begin=begin)
        assert read(rest, workers, count=11 - begin) == wanted[begin:]


def test_token_windows(tmp_path):
    files.tokens(tmp_path)
    found = Tokens(tmp_path / "train.bin", length=10, vocabulary=50)
    assert len(found) == 19  # 200 tokens; each window needs one more
    tokens, following = found[6]
    assert tokens.tolist() == [value % 50 for value in range(60, 70)]
    assert following.tolist() == [value % 50 for value in range(61, 71)]
    assert tokens.dtype == torch.int64
    with pytest.raises(IndexError):
        found[19]


def test_masked_tokens(tmp_path):
    files.tokens(tmp_path, train=40_001, vocabulary=50)
    plain = Tokens(tmp_path / "train.bin", length=2000, vocabulary=60)
    masked = MaskedTokens(plain, 60, mask=59)
    torch.manual_seed(0)
    items = [masked[index] for index in range(20)]
    tokens, labels = (torch.cat(each) for each in zip(*items, strict=True))
    drawn = labels != -100
    assert int(drawn.sum()) == 20 * 300
    original = torch.cat([plain[index][0] for index in range(20)])
    assert torch.equal(labels[drawn], original[drawn])
    assert torch.equal(tokens[~drawn], original[~drawn])
    hidden = (tokens[drawn] == 59).double().mean()
    kept = (tokens[drawn] == original[drawn]).double().mean()
    # Of 6000; one random token in sixty is the mask, or the one that was there.
    assert hidden == pytest.approx(0.8 + 0.1 / 60, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 60, abs=0.015)


def test_text_becomes_tokens(tmp_path):
    texts = tmp_path / "a.txt", tmp_path / "b.txt"
    texts[0].write_text("Größe" * 20, encoding="utf-8")
    texts[1].write_text("x" * 60, encoding="utf-8")
    counts = tokens.write(tokens.Settings(text=texts, output=tmp_path / "out", held_out=0.1))
    assert counts == {"train.bin": 126 + 54, "val.bin": 14 + 6}
    found = Tokens(tmp_path / "out" / "train.bin", length=7, vocabulary=256)
    assert bytes(found[0][0].tolist()).decode() == "Größe"


def spoil_cifar(folder):
    path = files.cifar(folder) / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])


def wrong_classes(folder):
    path = files.cifar(folder) / "data_batch_3.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])


def spoil_image(folder):
    path = files.image_folder(folder) / "train" / files.CLASSES[1] / f"{files.CLASSES[1]}_2.JPEG"
    path.write_bytes(path.read_bytes()[:200])


def cut_tar(folder):
    path = files.shards(folder) / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:3000])


def no_class(folder):
    files.shards(folder)
    with tarfile.open(folder / "shard-000009.tar", "w") as archive:
        files._add(archive, "a.jpg", b"")
        files._add(archive, "b.cls", b"1")


def odd_tokens(folder):
    path = files.tokens(folder) / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])


def nothing(folder):
    pass


def placed(folder, ranks):
    shards = stream(folder)
    shards.place(0, ranks, 1, 5)
    return read(shards, count=99)


def all_items(dataset):
    return [dataset[index] for index in range(len(dataset))]


def cifar(folder):
    return Cifar10(folder, train=True)


def images(folder):
    return all_items(ImageFolder(folder / "train", CentreCrop(8)))


def text(folder, length=4):
    return all_items(Tokens(folder / "train.bin", length, 9))


def shared(ranks):
    return lambda folder: placed(folder, ranks)


@pytest.mark.parametrize(
    ("prepare", "load", "error", "message"),
    [
        (nothing, cifar, OSError, "data_batch_1.bin does not exist: download https"),
        (spoil_cifar, cifar, ValueError, "batch_3.bin has 18437 bytes, no multiple of 3073"),
        (wrong_classes, cifar, ValueError, "batch_3.bin has a class above 9"),
        (nothing, images, OSError, "train does not exist: it should have one folder"),
        (lambda folder: (folder / "train").mkdir(), images, ValueError, "has no images in folders"),
        (spoil_image, images, ValueError, "n01443537_2.JPEG cannot be decoded ("),
        (nothing, stream, OSError, "has no *.tar"),
        (cut_tar, shared(1), ValueError, "shard-000001.tar is cut off or no tar file"),
        (no_class, shared(1), ValueError, "shard-000009.tar: a has no image with a class"),
        (files.shards, shared(4), ValueError, "4 ranks cannot share 3 shard(s)"),
        (nothing, text, OSError, "train.bin does not exist: make it of text by"),
        (odd_tokens, text, ValueError, "has 399 bytes, no whole number of uint16"),
        (files.tokens, partial(text, length=200), ValueError, "has 200 tokens, fewer than 201"),
        (files.tokens, text, ValueError, "beyond a vocabulary of 9: pass the --voc"),
    ],
)
def test_errors_name_the_file_and_the_remedy(tmp_path, prepare, load, error, message):
    prepare(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        load(tmp_path)


def test_an_image_within_an_archive_is_named():
    with pytest.raises(ValueError, match="shard: 7 cannot be decoded"):
        decoded(b"no image", "shard: 7")
