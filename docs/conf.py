"""Sphinx builds the documentation; warnings are errors, and so is every broken reference."""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[1]

project = "soframe"
author = "The soframe authors"
copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []

html_theme = "furo"
html_title = f"soframe {release}"
html_show_sphinx = False
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
html_static_path = ["_static"]
html_css_files = ["tables.css", "figures.css"]
html_math_renderer = "mathml"  # which browsers draw themselves, without a network

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autoclass_content = "class"
autosummary_generate = True
autosummary_ignore_module_all = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = True

nitpicky = True
# Builds work without a network, so names of other packages have nothing to link to.
_OTHERS = [
    "dist",
    "np",
    "numpy",
    "nn",
    "scipy",
    "torch",
    "Tensor",
    "DeviceMesh",
    "T",
    *sorted(sys.stdlib_module_names),
]
nitpick_ignore_regex = [
    (r"py:.*", rf"({'|'.join(_OTHERS)})(\..*)?"),
    (r"py:(class|data|obj)", r".*\.(C|T|P|R|_[A-Za-z]\w*)"),  # type variables, private types
    # Aliases, spelt out in the text beside them.
    (r"py:class", r"(Blocks|Choice|Closure|DampingChoice|Interval|SolveInterval|LossAverage)"),
    (r"py:class", r"(Rows|Samples|Scaling)"),
    # Bases of public classes, internal.
    (r"py:class", r"soframe\.state\.bound\.OfModel"),
    (r"py:class", r"soframe\.layers\.layout\.WeightAndBias"),
    (r"py:class", r"soframe\.methods\.(blocked\.Parts|composed\.Composed)"),
    (r"py:class", r"soframe\.(methods\.base\.WithoutFactors|losses\.\w+\.OverPositions)"),
    (r"py:class", r"soframe\.solvers\.scaled\.Scaling"),
    (
        r"py:class",
        r"soframe\.(blocks\.report\.ReportRow|planning\.task\.LayerShapes)",
    ),
    (r"py:class", r"soframe\.blocks\.block\.(Block|PlacedBlocks)"),  # internal, in fields
    (r"py:class", r"soframe\.strategies\.work\.Stacked"),  # internal, of a placement
    (r"py:class", r"soframe\.specs\.Move"),  # internal, of an exchange
    (r"py:class", r"soframe\.products\.(vectors\.Coordinates|samples\.\w+)"),
    (r"py:class", r"soframe\.checkpoint\.Owner"),  # a preconditioner
    (r"py:class", r"soframe\.trust_region\.(base\.ClosureOptimizer|adaptive\.GroupDampings)"),
    (r"py:class", r"(OnStep|ParamsT|Schedule|Writer)"),
    (r"py:class", r"(RMS|Coefficients|Carry|WeightDecayKind|Constraint)"),
]


def public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Link the place where an object is written to the public name it is documented under.

    A signature says `soframe.layers.base.LayerHelper`; the documentation has `soframe.LayerHelper`.
    Without this every type in every signature would be a broken reference.
    """
    if node.get("refdomain") != "py" or not (target := str(node["reftarget"])):
        return None
    name, *attributes = _public(target)
    if name is None:
        return None
    full = ".".join([name, *attributes])
    for kind in ("obj", node["reftype"]):
        found = env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, kind, full, node, content
        )
        if found is not None:
            return found
    return None


_PUBLIC = (
    "soframe",
    "soframe.diagnostics",
    "soframe.planning",
    "soframe.strategies",
    "soframe.testing",
)


def _public(target: str) -> list[Any]:
    """`soframe.a.b.Name.method` as ["soframe.Name", "method"], if that is the same object."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = getattr(importlib.import_module(".".join(parts[:end])), parts[end])
        except (ImportError, AttributeError, ValueError):
            continue
        for module in _PUBLIC:
            try:
                public = importlib.import_module(module)
            except ImportError:
                continue
            if getattr(public, parts[end], None) is value:
                return [f"{module}.{parts[end]}", *parts[end + 1 :]]
    return [None]


def inline_math(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(translator: Any, node: nodes.math_block) -> None:
    """Write a formula of its own lines as MathML."""
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("missing-reference", public_name)
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
