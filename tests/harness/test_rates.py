from pathlib import Path

import pytest
from harness.rates import TriedRates


def test_the_best_of_all_that_had_to_be_tried(tmp_path: Path) -> None:
    losses = TriedRates(tmp_path / "new" / "losses.json")
    losses.keep("3 steps", [("sgd", 0.1, 2.0), ("sgd", 0.2, 1.0), ("sgd", 0.4, float("nan"))])
    losses.keep("4 steps", [("sgd", 0.1, 0.5)])
    assert losses.best({"sgd": (0.1, 0.2, 0.4)}, "3 steps") == {"sgd": 0.2}
    assert losses.scores("3 steps") == {"sgd": {"0.1": 2.0, "0.2": 1.0, "0.4": None}}
    accuracies = TriedRates(losses.path, highest=True)
    assert accuracies.best({"sgd": (0.1, 0.2, 0.4)}, "3 steps") == {"sgd": 0.1}
    with pytest.raises(
        ValueError, match=r"'sgd' was not tuned for 4 steps at 0\.2, 0\.4: add --tune"
    ):
        losses.best({"sgd": (0.1, 0.2, 0.4)}, "4 steps")
    with pytest.raises(ValueError, match=r"'muon' was not tuned for 5 steps at 0\.1"):
        losses.best({"muon": (0.1,)}, "5 steps")
