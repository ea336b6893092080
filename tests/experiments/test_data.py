from itertools import pairwise

import pytest
import torch

from soframe.experiments import corpus, data, synthetic


def test_reconstruction_is_every_digit_with_itself_as_target():
    digits = data.digits_reconstruction(torch.float64)
    assert digits.test is None
    assert digits.train.inputs.shape == (1797, 64)
    assert digits.train.inputs.dtype == torch.float64
    assert torch.equal(digits.train.inputs, digits.train.targets)
    assert digits.train.inputs.min() == 0.0
    assert digits.train.inputs.max() == 1.0


def test_classification_splits_all_digits_and_keeps_images_with_their_classes():
    split = data.digits_classification(seed=3)
    assert split.train.inputs.shape == (1438, 1, 8, 8)
    assert split.test.inputs.shape == (359, 1, 8, 8)
    whole = data.digits_reconstruction()
    labelled = {}
    for examples in (split.train, split.test):
        for image, label in zip(examples.inputs, examples.targets, strict=True):
            labelled.setdefault(tuple(image.flatten().tolist()), set()).add(int(label))
    assert set(labelled) == {tuple(row.tolist()) for row in whole.train.inputs}
    # 178 to 183 of each class: a shuffled label would show as an image with two classes or as a
    # wrong count.
    counts = torch.bincount(torch.cat([split.train.targets, split.test.targets]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_split_depends_on_the_seed_only():
    first, again, other = (data.digits_classification(seed) for seed in (1, 1, 2))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.test.targets, again.test.targets)
    assert not torch.equal(first.train.inputs, other.train.inputs)


def test_images_are_labelled_right():
    """The nearest training image has the same class for nearly every test image."""
    split = data.digits_classification()
    distances = torch.cdist(split.test.inputs.flatten(1), split.train.inputs.flatten(1))
    nearest = split.train.targets[distances.argmin(dim=1)]
    assert (nearest == split.test.targets).float().mean() > 0.95


def test_examples_must_pair_up():
    with pytest.raises(ValueError, match="3 inputs but 2 targets"):
        data.Examples(torch.zeros(3, 1), torch.zeros(2))


def test_curves_are_drawn_around_their_points():
    curves = synthetic.curves(torch.float64, count=3, seed=4)
    assert curves.test is None
    assert curves.train.inputs.shape == (3, 256)
    assert torch.equal(curves.train.inputs, curves.train.targets)
    control = torch.rand(3, 3, 2, generator=torch.Generator().manual_seed(4)) * 11 + 2
    for image, points in zip(curves.train.inputs.view(3, 16, 16), control, strict=True):
        # De Casteljau's construction, against the polynomial.
        curve = []
        for t in torch.linspace(0, 1, 40):
            level = list(points)
            while len(level) > 1:
                level = [a + t * (b - a) for a, b in pairwise(level)]
            curve.append(level[0])
        for x, y in ((0, 0), (8, 8), (5, 11)):
            squared = min(float(((p - torch.tensor([x, y])) ** 2).sum()) for p in curve)
            expected = torch.exp(torch.tensor(-squared / 2, dtype=torch.float64))
            torch.testing.assert_close(image[y, x], expected, atol=1e-4, rtol=1e-4)


def test_curves_do_not_depend_on_the_run():
    assert torch.equal(synthetic.curves().train.inputs, synthetic.curves().train.inputs)
    assert not torch.equal(
        synthetic.curves(count=3, seed=0).train.inputs,
        synthetic.curves(count=3, seed=1).train.inputs,
    )


def test_the_corpus_is_cut_into_windows_and_the_byte_that_follows(tmp_path, monkeypatch):
    texts = {f"{chr(97 + i)}.py": bytes([i]) * 300 for i in range(21)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "x.txt").write_bytes(b"?" * 999)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    split = corpus.standard_library()
    # The first and the 21st module are held out: 600 bytes, four windows and what is left over.
    assert split.test.inputs.shape == (4, 128)
    assert set(split.test.inputs.unique().tolist()) == {0, 20}
    joined = b"".join(texts[f"{chr(97 + i)}.py"] for i in range(1, 20))
    assert len(split.train) == (len(joined) - 1) // 128
    for i in (0, 7, len(split.train) - 1):
        assert bytes(split.train.inputs[i].tolist()) == joined[128 * i : 128 * i + 128]
        assert bytes(split.train.targets[i].tolist()) == joined[128 * i + 1 : 128 * i + 129]


def test_the_standard_library_is_there():
    split = corpus.standard_library()
    assert len(split.train) > 10_000
    assert len(split.test) == corpus.HELD_OUT_WINDOWS
    assert b"import" in bytes(split.train.inputs[:100].flatten().tolist())
