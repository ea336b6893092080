import dataclasses, soframe, torch
from soframe.methods.base import *
from soframe.specs import TensorSpec, FactorSpec, VALUE
from soframe.testing import check_method
from tests.distributed.harness import run_ranks
import pytest

@soframe.register("method","adamw")
@dataclasses.dataclass(frozen=True)
class Toy(Method):
    joint=False; clipped=False; starts_at_once=True
    def factors(self, shape): return ()
    def state(self, shape):
        return {"m": TensorSpec(tuple(shape))}
    def direct(self, given):
        m=given.state["m"]*0.9+given.incoming
        return Direction(m.clone(), {"m":m})

@dataclasses.dataclass(frozen=True)
class Rows(Method):
    decay: float = 0.95
    joint = clipped = False
    def factors(self, shape):
        return (FactorSpec("rows", "left", shape[0], shape[1], kind="diagonal", reads="gradient", decay=self.decay),)
    def observe(self, gradient, data):
        return {"rows": gradient.square().mean(2)}
    def solver(self, factor, default):
        return None
    def direct(self, given):
        return Direction(given.incoming / (given.data["rows"][VALUE].sqrt().unsqueeze(2) + 1e-8))

@dataclasses.dataclass(frozen=True)
class Half(Method):
    """(G G^T)^-1 of the averaged gradient, and momentum; refreshes after."""
    joint = clipped = False
    starts_at_once=True
    refreshes_after = True
    def factors(self, shape):
        return (FactorSpec("L", "left", shape[0], shape[1], reads="gradient"),)
    def state(self, shape):
        return {"m": TensorSpec(tuple(shape))}
    def observe(self, gradient, data):
        return {"L": gradient @ gradient.mT}
    def unsuited(self, c):
        return "vector" if min(c.shape[1:])==1 else None
    def direct(self, given):
        m=given.state["m"]*0.9+given.incoming
        out = m.clone()
        if "L" in given.data:
            d = given.data["L"]
            out = d["vectors"] @ ((d["vectors"].mT @ m)/(d["values"].unsqueeze(-1)+0.1))
        return Direction(out, {"m":m})

@pytest.mark.parametrize("m", ["kfac","foof","kfac-reduce",Toy(),Rows(),Half()], ids=repr)
def test_toy(m):
    check_method(m, launch=run_ranks, auxiliary=Toy())
