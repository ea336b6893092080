"""Methods of 2024 to 2026, one file each, written from the formulas of their papers.

Importing this package registers them as methods: ``soframe.Optimizer(model, "splus")``. They are
outside of soframe, by the public interface of `soframe.Method`, and have the defaults of their
papers, untuned. ``python -m soframe cite splus --import experiments.gallery`` prints the reference.
"""

import soframe
from experiments.gallery.adafisher import AdaFisher
from experiments.gallery.adamuon import AdaMuon
from experiments.gallery.caspr import CASPR
from experiments.gallery.conda import Conda
from experiments.gallery.cosmos import COSMOS
from experiments.gallery.dion import Dion
from experiments.gallery.ikfac import IKFAC
from experiments.gallery.jorge import Jorge
from experiments.gallery.lora_pro import LoRAPro
from experiments.gallery.mars_muon import MARSMuon
from experiments.gallery.mkor import MKOR
from experiments.gallery.mousse import Mousse
from experiments.gallery.muon_eq import MuonEq
from experiments.gallery.muon_squared import MuonSquared
from experiments.gallery.muon_vs import MuonVS
from experiments.gallery.polargrad import PolarGrad
from experiments.gallery.psgd_kron import PSGDKron
from experiments.gallery.racs import RACS
from experiments.gallery.sinkgd import SinkGD
from experiments.gallery.sophia_g import SophiaG
from experiments.gallery.splus import SPlus
from experiments.gallery.swan import SWAN

__all__ = [
    "CASPR",
    "COSMOS",
    "IKFAC",
    "METHODS",
    "MKOR",
    "RACS",
    "SWAN",
    "AdaFisher",
    "AdaMuon",
    "Conda",
    "Dion",
    "Jorge",
    "LoRAPro",
    "MARSMuon",
    "Mousse",
    "MuonEq",
    "MuonSquared",
    "MuonVS",
    "PSGDKron",
    "PolarGrad",
    "SPlus",
    "SinkGD",
    "SophiaG",
]

METHODS: dict[str, type[soframe.Method]] = {
    name: method
    for name, method in soframe.available("method").items()
    if method.__module__.startswith(f"{__name__}.")
}
"""The methods of this package by registered name."""
