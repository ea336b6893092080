"""Constructions that a reader has to unfold become no more frequent; see calm.py."""

import pytest

from tests import calm


@pytest.mark.slow
def test_rates_stay_within_their_bounds() -> None:
    for top, files in calm.read().items():
        rates, bounds = calm.rates(files), calm.BOUNDS[top]
        assert rates.keys() == bounds.keys() == calm.TARGETS.keys()
        exceeded = {n: round(rate, 2) for n, rate in rates.items() if rate > bounds[n]}
        assert not exceeded, f"python -m tests.calm --files lists them: {top}: {exceeded}"


def test_constructions_are_counted_by_line() -> None:
    text = '''"""Sum [x for x in y]."""

def add(values, one):
    """Add."""
    # one
    rows = [x for row in values for x in row]  # nested
    if rows and one or not values:
        pass
    return sum(
        max(b if b else a for b in rows) for a in rows
    ) * 2


stages = [*["slow"] * count, "fast" * 2, "-" * (1 < 2), 3 * (count > 1)]
'''
    code = calm.Code("soframe/room/file.py", text)
    assert code.room == "soframe/room"
    assert code.lines == 8
    expected = {
        "comprehensions": [6, 9, 10],
        "nested": [6, 10],
        "conditional": [10],
        "booleans": [7, 7],
        "starred": [14],
        "pronouns": [3, 7],
        "repeated": [14, 14, 14],
    }
    for kind, lines in expected.items():
        assert sorted(line for name, line in code.places if name == kind) == lines, kind
    assert calm.rates([code])["nested"] == 1000 * 2 / 8


def test_branches_are_counted_in_statements_and_expressions() -> None:
    text = """
class Block:
    async def solve(self, rows):
        def inner():
            return [row for row in rows if row if row > 0]

        try:
            match rows:
                case 1 | 2:
                    return inner
                case _:
                    return lambda: 1 if rows else 2 or 3 or 4
        except ValueError:
            while True:
                pass
"""
    code = calm.Code("experiments/file.py", text)
    assert code.room == "experiments"
    assert code.functions == [("Block.solve", 3, 1 + 3 + 1 + 1 + 2 + 1 + 1)]
