"""How many examples of a property a run of the tests tries."""

import os

FEWEST = 6


def examples(number: int) -> int:
    """The examples of one property: the same in every run but those of ``make test-all``.

    Args:
        number: The most worth trying at a time: the profile ``verdict`` tries this many.

    Returns:
        Half of them; a few under ``make test-fast``.
    """
    profile = os.environ.get("HYPOTHESIS_PROFILE", "soframe")
    if profile == "verdict":
        return number
    return min(number, 3) if profile == "fast" else max(min(number, FEWEST), number // 2)
