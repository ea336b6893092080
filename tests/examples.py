"""How many examples of a property a run of the tests tries."""

import os

FEWEST = 5


def examples(number: int) -> int:
    """The examples of one property: the same in every run but those of ``make test-all``.

    Args:
        number: The most worth trying at a time: the profile ``verdict`` tries this many.

    Returns:
        An eighth of them; half under ``make test-all``, and a few under ``make test-fast``.
    """
    profile = os.environ.get("HYPOTHESIS_PROFILE", "soframe")
    if profile == "verdict":
        return number
    if profile == "fast":
        return min(number, 3)
    return max(min(number, FEWEST), number // (2 if profile == "thorough" else 8))
