"""Canvases of digits: what their masks, classes and boxes say of them."""

import torch

from experiments.canvases import CLASSES, SIDE, canvases, split


def test_boxes_enclose_the_pixels_of_digits():
    shown = canvases(40, held_out=False)
    assert shown.images.shape == (40, 1, SIDE, SIDE)
    assert shown.classes.shape == (40, 4)
    middle = SIDE // 2
    for mask, classes, boxes in zip(shown.masks, shown.classes, shown.boxes, strict=True):
        marked = torch.zeros_like(mask, dtype=torch.bool)
        for quadrant, (label, box) in enumerate(zip(classes.tolist(), boxes.tolist(), strict=True)):
            if label < 0:
                assert box == [0, 0, 0, 0]
                continue
            left, top, right, bottom = map(int, box)
            centre = (left + right) / 2, (top + bottom) / 2
            assert (centre[0] >= middle, centre[1] >= middle) == (quadrant % 2, quadrant // 2)
            inside = mask[top:bottom, left:right] == label + 1
            assert inside.any(0)[[0, -1]].all()  # the box is no larger than the digit
            assert inside.any(1)[[0, -1]].all()
            marked[top:bottom, left:right] = True
        assert not mask[~marked].any()  # halves of digits are background


def test_every_class_and_every_kind_of_quadrant_occurs():
    shown = canvases(200, held_out=False)
    assert set(shown.classes.flatten().tolist()) == set(range(-1, CLASSES))
    empty = (shown.masks == 0).flatten(1)
    bright = shown.images.flatten(1) > 0.9
    # Ink that belongs to no digit is that of a half.
    assert (bright & empty).any()


def test_held_out_canvases_show_other_digits():
    (trained, _), (tested, _) = split(held_out=False), split(held_out=True)
    assert (len(trained), len(tested)) == (4000, 1000)
    seen = {pixels.numpy().tobytes() for pixels in trained}
    assert all(pixels.numpy().tobytes() not in seen for pixels in tested)
    assert not torch.equal(canvases(5, held_out=False).images, canvases(5, held_out=True).images)


def test_the_first_canvases_are_the_same_for_any_number():
    few, many = canvases(7, held_out=True), canvases(510, held_out=True)
    assert torch.equal(few.images, many.images[:7])
    assert torch.equal(few.boxes, many.boxes[:7])
