"""The prose of the package and of the documentation stays within bounds; see prose.py."""

import pytest

from tests import prose


@pytest.mark.slow
def test_rates_stay_within_their_bounds() -> None:
    for kind, files in prose.read().items():
        rates, bounds = prose.rates(files), prose.BOUNDS[kind]
        assert rates.keys() == bounds.keys() == prose.TARGETS.keys()
        exceeded = {n: round(rate, 2) for n, rate in rates.items() if rate > bounds[n]}
        assert not exceeded, f"python -m tests.prose --show lists them: {kind}: {exceeded}"


@pytest.mark.slow
def test_comments_are_not_fewer() -> None:
    assert prose.comment_rate() >= prose.COMMENTS_BOUND


def test_found_in_docstrings_and_comments() -> None:
    text = '''"""Return what is there.

There is `what is code` for nobody."""
x = "what is no prose"  # Those
# of whom? What is it? See what to do.
'''
    found = prose.of_python("one.py", text)
    lines = {name: [line for line, _ in found.found(name)] for name in prose.PATTERNS}
    expected = {"noun clause": [1], "there is": [3], "nobody": [3], "that of": [4], "say, tell": []}
    assert lines == expected
    assert found.words == 18
    assert prose.comments(text) == (2, 1)


def test_fences_are_no_prose_and_lines_are_counted_on() -> None:
    page = "One ``tells``.\n\n```python\n# what is this\n```\n\nA rank says\nwhat it has.\n"
    found = prose.of_markdown("one.md", page)
    assert [line for line, _ in found.found("noun clause")] == [8]
    assert [line for line, _ in found.found("say, tell")] == [7]
    assert found.words == 7
