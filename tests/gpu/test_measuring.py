"""A GPU is measured: its operators, its batches, and what it multiplies fastest."""

from __future__ import annotations

from soframe.planning.measure import measure
from tests.gpu.kit import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU


def test_a_gpu_has_a_profile() -> None:
    made = measure(DEVICE, sides=(16, 64, 128), budget=2.0)
    assert all(0 < second < 60 for curve in made.operators.values() for _, second in curve.points)
    assert made.launch > 0
    assert made.bandwidth > 1e6
    if DEVICE.type == "cuda":
        assert made.memory is not None
        assert {"product:tf32", "product:bfloat16"} <= made.operators.keys()
        batches = {batch for _, batch, _ in made.batched["eigh:float32"]}
        assert batches == {1, 8, 64}
        assert made.factorisation("cholesky", 64, 64, "float32") > 0
