"""The losses and figures of the U-Net, the detector and the BERT over bytes, by hand."""

import math

import pytest
import torch
from torch import nn

import soframe
from experiments.canvases import CLASSES, SIDE, canvases
from experiments.recipes import bert_bytes, common, detector, unet


class Says(nn.Module):
    """A model that returns what it was made with."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, inputs):
        return self.outputs


def test_kfac_covers_the_transposed_convolutions_of_the_unet():
    settings = unet.Settings(width=2)
    _, preconditioner = common.optimizer(unet.model(settings), settings)
    covered = {block.block for block in preconditioner.placement.blocks}
    assert {"up_to_middle", "up_to_high", "head", "high.0"} <= covered


def test_dice_and_its_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 1, 4, 4, generator=generator, dtype=torch.float64)
    masks = (torch.rand(3, 4, 4, generator=generator) < 0.4).double()
    chances = 1 / (1 + (-logits[:, 0]).exp())
    entropy = -(masks * chances.log() + (1 - masks) * (1 - chances).log()).mean()
    soft = 2 * (chances * masks).sum() / (chances + masks).sum()
    value = unet.loss(Says(logits), torch.zeros(3, 1, 4, 4), masks)
    torch.testing.assert_close(value, entropy + 1 - soft)
    found = (chances > 0.5).double()
    means = unet.metrics(Says(logits), torch.zeros(3, 1, 4, 4), masks)
    dice = unet.summary({name: float(mean) for name, mean in means.items()})["dice"]
    expected = 2 * (found * masks).sum() / (found.sum() + masks.sum())
    assert dice == pytest.approx(float(expected))


@pytest.fixture
def shown():
    return canvases(30, held_out=False)


def outputs(shown, spoiled=()):
    """Return what a detector would return that knows everything; some canvases are spoiled."""
    across = SIDE // detector.CELL
    out = torch.zeros(len(shown.images), 5 + CLASSES, across, across, dtype=torch.float64)
    out[:, 0] = -20
    for canvas in range(len(shown.images)):
        for digit, label in enumerate(shown.classes[canvas].tolist()):
            if label < 0:
                continue
            left, top, right, bottom = shown.boxes[canvas, digit].tolist()
            x, y = (left + right) / 16, (top + bottom) / 16  # the centre, in cells of 8 pixels
            column, row = math.floor(x), math.floor(y)
            out[canvas, 0, row, column] = 20
            sides = (math.log((right - left) / 10), math.log((bottom - top) / 10))
            wanted = torch.tensor([x - column - 0.5, y - row - 0.5, *sides])
            out[canvas, 1:5, row, column] = wanted
            out[canvas, 5 + (label + (canvas in spoiled)) % CLASSES, row, column] = 20
    return out


def f1(out, shown):
    means = detector.metrics(Says(out), shown.images, *detector.cells(shown))
    return detector.summary({name: float(mean) for name, mean in means.items()})["f1"]


def test_a_detector_that_knows_everything(shown):
    out = outputs(shown)
    assert f1(out, shown) == pytest.approx(1)
    assert float(detector.loss(Says(out), shown.images, *detector.cells(shown))) < 1e-4


def test_wrong_classes_and_boxes_do_not_count(shown):
    digits = (shown.classes >= 0).sum(1)
    right = 1 - float(digits[:10].sum() / digits.sum())
    assert f1(outputs(shown, spoiled=range(10)), shown) == pytest.approx(right)
    moved = outputs(shown)
    moved[:, 1] += 1  # a cell to the right: less than half of a box remains
    assert f1(moved, shown) == 0
    extra = outputs(shown)
    extra[:, 0] = 20  # an object in each of 16 cells
    found = 2 * float(digits.sum()) / (float(digits.sum()) + 16 * len(digits))
    assert f1(extra, shown) == pytest.approx(found)


def test_the_overlap_of_boxes():
    # 10 x 10 pixels, and the same moved by five: 50 / 150.
    boxes = torch.tensor([[0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    others = torch.tensor([[5 / 8, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(detector.overlaps(boxes, others), torch.tensor([1 / 3]).double())
    larger = torch.tensor([[0.0, 0.0, math.log(2), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(detector.overlaps(boxes, larger), torch.tensor([0.5]).double())


def test_the_loss_of_a_detector_is_the_sum_of_three(shown):
    generator = torch.Generator().manual_seed(1)
    across = SIDE // detector.CELL
    out = torch.randn(30, 5 + CLASSES, across, across, generator=generator, dtype=torch.float64)
    classes, boxes = detector.cells(shown)
    total = 0.0
    for canvas in range(30):
        for cell in range(across * across):
            values = out[canvas, :, cell // across, cell % across].tolist()
            label = int(classes[canvas, cell])
            total += math.log1p(math.exp(values[0])) - values[0] * (label >= 0)
            if label < 0:
                continue
            for value, target in zip(values[1:5], boxes[canvas, cell].tolist(), strict=True):
                distance = abs(value - target)
                total += distance**2 / 2 if distance < 1 else distance - 0.5
            total += math.log(sum(map(math.exp, values[5:]))) - values[5 + label]
    value = float(detector.loss(Says(out), shown.images, classes, boxes.double()))
    assert value == pytest.approx(total / 30)


def test_bert_over_bytes_has_masks_and_weights_of_its_width():
    settings = bert_bytes.Settings()
    train, test = bert_bytes.data(settings)
    tokens, labels = train[3]
    assert tokens.shape == labels.shape == (settings.length,)
    drawn = labels != -100
    assert int(drawn.sum()) == round(0.15 * settings.length)
    assert torch.equal(bert_bytes.terms(tokens, labels), drawn)
    assert len(test) == 128 * 128 // settings.length
    torch.manual_seed(0)
    bert = bert_bytes.model(settings)
    assert bert.head.weight is bert.tokens.weight
    for weight in (bert.tokens.weight, bert.transform[0].weight):
        assert float(weight.detach().std()) == pytest.approx(settings.width**-0.5, rel=0.05)
    _, preconditioner = common.optimizer(bert, settings)
    assert isinstance(preconditioner, soframe.Preconditioner)
