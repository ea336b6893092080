"""What holds for every test."""

import gc
import os

# Before torch is imported: several workers and their processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import Phase, settings

pytest_plugins = ["tests.background"]  # its fixtures

# A shared machine is slow at times; that is no failure. The same examples in every run: a change
# is judged by what it changes. `make test-all` and `make fuzz` look for new ones.
settings.register_profile(
    "soframe", deadline=None, print_blob=True, max_examples=25, derandomize=True
)
# For `make mutants`: more examples, and no search for the smallest.
settings.register_profile(
    "verdict",
    settings.get_profile("soframe"),
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
)
# For `make test-all` and `make fuzz`: more examples, others in each run.
settings.register_profile(
    "thorough", settings.get_profile("soframe"), max_examples=100, derandomize=False
)
# For `make test-fast`: a few examples of each property.
settings.register_profile("fast", settings.get_profile("soframe"), max_examples=5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "soframe"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of every collection of garbage: half a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # one in twenty seconds went into it


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give each test the same random numbers, whichever worker runs it and in whichever order."""
    # Not torch.manual_seed: without an accelerator it keeps the stack of every call of it.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
