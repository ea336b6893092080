"""BibTeX entries of components and of soframe: `references.bib`, with one field to a line.

A component of another package has entries of the same form as an attribute of its class, `bibtex`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from soframe.registry import KINDS

KFAC = ("martens2015kfac", "grosse2016kfc", "eschenhagen2023kfac")

PAPERS: dict[str, dict[str, tuple[str, ...]]] = {
    "method": {
        "adamw": ("kingma2015adam", "loshchilov2019decoupled"),
        "blocked": ("anil2020scalable", "shi2023distributed"),
        "diagonal": ("amari2019fisher",),
        "ekfac": ("george2018ekfac",),
        "eva": ("zhang2023eva",),
        "foof": ("benzing2022neurons",),
        "graft": ("agarwal2020disentangling",),
        "kfac": KFAC,
        "kfac-muon": (*KFAC, "jordan2024muon"),
        "kfac-reduce": ("martens2015kfac", "eschenhagen2023kfac"),
        "kl-shampoo": ("lin2025kl",),
        "kl-soap": ("lin2025kl",),
        "match-rms": ("jordan2024muon", "liu2025moonlight"),
        "momentum": ("polyak1964methods", "nesterov1983method"),
        "muon": ("jordan2024muon",),
        "newton-muon": ("benzing2022neurons", "jordan2024muon"),
        "normalise-rows": ("li2025normuon",),
        "normuon": ("li2025normuon",),
        "orthogonalise": ("jordan2024muon", "amsel2025polar"),
        "sgd": ("sutskever2013importance",),
        "shampoo": ("gupta2018shampoo", "shi2023distributed"),
        "soap": ("vyas2024soap",),
        "soap-muon": ("vyas2024soap", "jordan2024muon"),
        "soap-normuon": ("vyas2024soap", "li2025normuon"),
        "tnt": ("ren2021tnt",),
    },
    "solver": {
        "basis": ("vyas2024soap",),
        "eigen": ("grosse2016kfc", "george2018ekfac"),
        "inverse": ("martens2015kfac",),
        "newton-schulz": ("schulz1933iterative",),
        "orthogonal-iteration": ("golub2013matrix",),
        "root": (),
    },
    "strategy": {
        "auto": ("soframe",),
        "comm-opt": ("pauloski2021kaisa",),
        "hybrid-opt": ("pauloski2021kaisa",),
        "mem-opt": ("pauloski2021kaisa",),
        "owner-local": ("zhang2022scalable",),
        "sharded": ("soframe",),
    },
    "loss": dict.fromkeys(
        ("binary-cross-entropy", "cross-entropy", "gaussian", "mse", "squared-error", "sum"), ()
    ),
    "damping": {
        "constant": (),
        "levenberg-marquardt": ("martens2015kfac",),
        "relative": ("grosse2023influence",),
    },
    "optimizer": {"trust-region": ("martens2015kfac",)},
    "package": {"soframe": ("soframe",)},
}
"""Keys of `references.bib` by kind and name; empty where a component has no paper."""


@cache
def entries() -> dict[str, str]:
    """Return the BibTeX entries of `references.bib`, by key."""
    return read(Path(__file__).with_name("references.bib").read_text(encoding="utf-8"))


def read(text: str) -> dict[str, str]:
    """Return the BibTeX entries of a text, by key."""
    return {match[1]: match[0] for match in re.finditer(r"@\w+\{(\w+),\n(?:  .*\n)*\}", text)}


def _of_others() -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and entries of every component whose class has ``bibtex``."""
    for kind, registry in KINDS.items():
        for component in registry.available().values():
            if hasattr(component, "bibtex"):
                yield kind, registry.name_of(component), component.bibtex


def papers() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return keys of entries by kind and name: `PAPERS`, and of components of other packages."""
    known = {kind: dict(names) for kind, names in PAPERS.items()}
    for kind, name, text in _of_others():
        known.setdefault(kind, {})[name] = tuple(read(text))
    return known


def fields(entry: str) -> dict[str, str]:
    """Return the type and the fields of a BibTeX entry, by name."""
    (kind,) = re.findall(r"^@(\w+)", entry)
    return {"type": kind, **dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE))}


def cite(*names: str) -> dict[str, str]:
    """Return the BibTeX entries of components by registered names and, last, of soframe, by key."""
    known: dict[str, Sequence[str]] = {}
    for of_kind in papers().values():
        known |= of_kind
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(
            f"no references for {unknown}; there are: {', '.join(sorted(known))}; a class of yours "
            f"has them in an attribute bibtex"
        )
    texts = dict(entries())
    for _, _, text in _of_others():
        texts |= read(text)
    keys = dict.fromkeys(itertools.chain.from_iterable(known[name] for name in names))
    keys.pop("soframe", None)
    return {key: texts[key] for key in (*keys, "soframe")}
