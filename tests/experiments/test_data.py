import pytest
import torch

from soframe.experiments import data


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
