"""The benchmark of products: what is counted is what is timed, and the arithmetic of its table."""

import json
from typing import Any

import pytest
import torch
from harness.contenders import Contender, contender
from harness.networks import NETWORKS, Network
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import products


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unsqueeze(1).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0, 0])


ROWS = Network(
    "rows",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)),
    lambda: (torch.randn(5, 3), torch.randint(2, (5,))),
    F.cross_entropy,
)
IMAGES = Network(
    "images",
    lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(16, 3)),
    lambda: (torch.randn(5, 3, 4, 4), torch.randint(3, (5,))),
    F.cross_entropy,
    images=True,
)
TOKENS = Network(
    "tokens", Attention, lambda: (torch.randn(5, 6, 4), torch.randint(3, (5,))), F.cross_entropy
)


def taking_part(network: Network, name: str) -> Contender:
    torch.manual_seed(0)
    one = contender(name, network, network.model(), torch.device("cpu"), {})
    one.warm_up()
    return one


def test_multiply_adds_are_those_of_the_products() -> None:
    """Two linear layers, one without bias, 5 rows; by hand."""
    plain = products.multiply_adds(taking_part(ROWS, "sgd"))
    assert set(plain.values()) == {5 * (2 * 3 * 4 + 3 * 4 * 2)}  # the inputs need no gradient
    own = products.multiply_adds(taking_part(ROWS, "soframe, inverse"))
    added = {kind: own[kind] - plain[kind] for kind in own}
    inverses = 4 * (4 * 4 + 4 * 4) + 2 * (2 * 4 + 4 * 4)  # G^-1 V A^-1
    assert added["precondition"] == pytest.approx(inverses, rel=0.5)  # and the KL clip's
    factors = 5 * (4**2 + 4**2 + 4**2 + 2**2)
    assert added["statistics"] - added["precondition"] == factors
    assert added["solve"] == added["statistics"]


@pytest.mark.slow
@pytest.mark.parametrize("network", [ROWS, IMAGES, TOKENS], ids=lambda n: str(n.title))
@pytest.mark.parametrize("name", ["sgd", "soframe, inverse", "soframe, eigen"])
def test_what_is_counted_is_timed(network: Network, name: str) -> None:
    one = taking_part(network, name)
    counter = FlopCounterMode(display=False, custom_mapping=products._uncounted())
    with counter, torch.autograd.profiler.profile() as profiled:
        for kind, count in products.TURNS:
            one.turn(kind, count)
    seen = {e.key: e.count for e in profiled.key_averages() if e.key in products.PRODUCTS}
    counted = {
        str(op).replace(".", "::"): n for op, n in counter.get_flop_counts()["Global"].items()
    }
    if "aten::convolution" in counted:
        counted["aten::mkldnn_convolution"] = counted.pop("aten::convolution")
    assert set(counted) <= set(seen)
    assert all(counted.values())


def test_attention_counts_its_products() -> None:
    q = torch.randn(2, 3, 5, 4, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=products._uncounted()) as forward:
        out = F.scaled_dot_product_attention(q, q, q)
    with FlopCounterMode(display=False, custom_mapping=products._uncounted()) as backward:
        out.sum().backward()
    once = 2 * (2 * 3) * 5 * 5 * 4  # of two products, each with an addition
    assert forward.get_total_flops() == 2 * once
    assert backward.get_total_flops() == 5 * once


def test_the_least_step_adds_products_at_the_rate_of_sgd() -> None:
    def row(name: str, scale: float, added: float) -> dict[str, Any]:
        kinds = {"precondition": 0.0, "statistics": added, "solve": 3 * added}
        return {
            "name": name,
            "seconds": dict.fromkeys(kinds, 2.0 * scale),
            "products": dict.fromkeys(kinds, 1.0 * scale),
            "work": {kind: 4e9 + 1e9 * more for kind, more in kinds.items()},
        }

    plain, own = products.summary([row("sgd", 1, 0), row("own", 3, 1)], 1, 4)
    assert plain["at SGD's rate"] == plain[": SGD"] == 1.0
    assert (plain["ms"], plain["ms in products"], plain["other ms"]) == (2000, 1000, 1000)
    assert (plain["G multiply-adds"], plain["G per second"]) == (4.0, 4.0)
    assert own[": SGD"] == 3.0
    work = (3 * 1 + 3) / 4  # three steps with statistics and one that solves, less those of SGD
    assert own["G multiply-adds"] == pytest.approx(4 + work)
    assert own["at SGD's rate"] == pytest.approx((2 + work / 4) / 2)
    assert own["other ms"] == pytest.approx(3000)


@pytest.mark.slow
def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(NETWORKS, "gpt", TOKENS)
    threads = torch.get_num_threads()
    try:
        assert products.main(["gpt", "--rounds", "1", "--json", "--threads", "1"]) == 0
        (sgd, own) = json.loads(capsys.readouterr().out)["gpt"]
        assert products.main(["gpt", "--rounds", "1", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "soframe, inverse" in text
    assert "at SGD's rate" in text
    assert own["G multiply-adds"] > sgd["G multiply-adds"]
    assert own["at SGD's rate"] > 1
    assert own["ms in products"] > 0
    assert own["ms"] > 0
