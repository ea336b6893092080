"""The pictures of the guides on uses of a curvature: each is drawn by its command."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from benchmarks import pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "laplace",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("spectra", "influence")),
    ],
)
def test_a_picture_is_the_one_of_its_guide(name: str, tmp_path: Path) -> None:
    drawn = tmp_path / f"{name}.png"
    assert pictures.main([name, str(drawn)]) == 0
    guide = Path(__file__).parents[2] / "docs" / "guides" / f"{name}.png"
    shown = image.imread(guide)
    difference = np.abs(image.imread(drawn) - shown)  # [height, width, RGBA]
    assert difference.mean() < 0.1 * shown.std()
