"""The gallery's methods, which are registered only where a test asks for them."""

import importlib

from soframe.registry import KINDS

METHODS = KINDS["method"]._components
BEFORE = dict(METHODS)
GALLERY = importlib.import_module("experiments.gallery")
for name in METHODS.keys() - BEFORE.keys():
    del METHODS[name]
