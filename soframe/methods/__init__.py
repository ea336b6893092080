"""Methods: how the gradient of a block is preconditioned, and from which statistics.

Constructors raise a ValueError for a setting that is out of range.
"""

from soframe.methods.adam import SGD, AdamW, Diagonal
from soframe.methods.base import Call, Candidate, Direction, Given, Method, WithoutFactors
from soframe.methods.blocked import Blocked
from soframe.methods.chain import Chain
from soframe.methods.ekfac import EKFAC
from soframe.methods.eva import Eva
from soframe.methods.foof import FOOF
from soframe.methods.graft import Graft
from soframe.methods.kfac import KFAC, KFACReduce
from soframe.methods.kl import KLSOAP, KLShampoo
from soframe.methods.momentum import Momentum
from soframe.methods.normuon import NormaliseRows, NorMuon
from soframe.methods.orthogonal import KFACMuon, MatchRMS, Muon, NewtonMuon, Orthogonalise
from soframe.methods.shampoo import Shampoo
from soframe.methods.soap import SOAP, SOAPMuon, SOAPNorMuon
from soframe.methods.spectrum import Spectrum
from soframe.methods.tnt import TNT

__all__ = [
    "EKFAC",
    "FOOF",
    "KFAC",
    "KLSOAP",
    "SGD",
    "SOAP",
    "TNT",
    "AdamW",
    "Blocked",
    "Call",
    "Candidate",
    "Chain",
    "Diagonal",
    "Direction",
    "Eva",
    "Given",
    "Graft",
    "KFACMuon",
    "KFACReduce",
    "KLShampoo",
    "MatchRMS",
    "Method",
    "Momentum",
    "Muon",
    "NewtonMuon",
    "NorMuon",
    "NormaliseRows",
    "Orthogonalise",
    "SOAPMuon",
    "SOAPNorMuon",
    "Shampoo",
    "Spectrum",
    "WithoutFactors",
]
