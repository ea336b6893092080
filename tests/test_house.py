"""The size of a step and of the package stays within bounds; see house.py for what is measured."""

import ast

import pytest

from tests import house


@pytest.mark.slow
def test_measures_stay_within_their_bounds() -> None:
    numbers, details = house.measure()
    assert numbers.keys() >= house.BOUNDS.keys()
    exceeded = {n: (numbers[n], most) for n, most in house.BOUNDS.items() if numbers[n] > most}
    assert not exceeded, f"now, bound: {exceeded}; details: {details}"


def test_imports_and_circles() -> None:
    files = {
        "__init__": "",
        "a": "from soframe.b import c\nif TYPE_CHECKING:\n    import soframe.d\n",
        "b.__init__": "",
        "b.c": "from . import e\nfrom soframe import d\n",
        "b.e": "try:\n    import soframe.b.c\nfinally:\n    pass\n",
        "d": "def f():\n    from soframe.a import x\n",
    }
    graph = house.imports(files)
    assert graph == {
        "__init__": set(),
        "a": {"b.c", "d"},
        "b": set(),
        "b.c": {"b.e", "d"},
        "b.e": {"b.c"},
        "d": set(),
    }
    assert house.circles(graph) == [["b.c", "b.e"]]
    assert house.circles(house.imports(files, lazy=True)) == [["a", "b.c", "b.e", "d"]]


def test_trace_counts_what_is_entered_of_soframe_alone() -> None:
    inner = "def g(): return 1\ndef f(): return [(lambda: g())() for _ in range(2)]"
    scope: dict[str, object] = {}
    exec(compile(inner, str(house.ROOT / "one.py"), "exec"), scope)
    found = house.trace(scope["f"])  # type: ignore[arg-type]
    comprehension = found["inner"] - 1  # inlined since Python 3.12
    assert found == {
        "files": 1,
        "functions": 2,
        "inner": 1 + comprehension,
        "depth": 3 + comprehension,
        "calls": 5 + comprehension,
    }


def test_lines_are_sorted_by_kind() -> None:
    text = '"""One.\n\nTwo."""\n\nx = 1  # at the end\n# alone\n'
    found = house.lines({"room.file": text, "room.other": "y = 2\n"})
    assert found["room"] == {"code": 2, "docstring": 3, "comment": 1, "all": 7}


def test_attributes_are_declared_assigned_or_set() -> None:
    text = """
class Block:
    name: str
    size = 1

    def begin(self, other):
        self.size, self.count = 2, 0
        self.rows: int = self.columns
        other.part = 1
"""
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    assert house.attributes_of(node) == {"name", "size", "count", "rows"}


def test_experiments_name_no_module_of_benchmarks() -> None:
    for path in (house.ROOT.parent / "experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            match node:
                case ast.Import() | ast.ImportFrom():
                    names += [alias.name for alias in node.names]
                    names.append(getattr(node, "module", None) or "")
                case ast.Constant(str(text)):  # as importlib takes them
                    names.append(text)
                case _:
                    pass
            assert not any(name.split(".")[0] == "benchmarks" for name in names), path
