"""Profiles of hardware: curves, collectives by tier, and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soframe.planning.hardware import Collective, Curve, Hardware, Link, names

LAW = Curve(tuple((float(n), 1e-9 * n**3) for n in (16, 64, 256)))
MADE = Hardware(
    name="made",
    device="cpu",
    source="this test",
    launch=1e-6,
    bandwidth=1e10,
    operators={"product:float32": Curve(alpha=1e-6, beta=1e-10), "cholesky:float32": LAW},
    batched={"eigh:float32": ((64, 1, 1e-3), (256, 1, 1e-2), (64, 8, 2e-3), (256, 8, 4e-2))},
    collectives=(Collective("all_reduce", 4, Curve(((1e3, 1e-4), (1e6, 1e-3)))),),
    node=4,
    within=Link(1e-6, 1e11),
    across=Link(1e-5, 1e10),
)


@given(st.floats(16, 4096))
def test_a_power_law_is_met_between_and_above_its_points(size: float) -> None:
    assert LAW(size) == pytest.approx(1e-9 * size**3, rel=1e-6)


def test_below_the_first_point_a_curve_is_constant() -> None:
    assert LAW(1) == LAW(16)


def test_above_a_single_point_a_curve_is_linear() -> None:
    assert Curve(((16.0, 1e-3),))(64) == pytest.approx(4e-3)


def test_a_curve_without_points_is_a_line() -> None:
    assert Curve(alpha=2.0)(5) == 2.0
    assert Curve(beta=3.0)(5) == 15.0
    assert Curve(alpha=2.0, beta=3.0)(0.5) == 3.5
    assert Curve(alpha=2.0, beta=3.0)(0) == 2.0
    assert Curve()(5) == 0.0


def test_a_point_has_its_seconds() -> None:
    points = ((2.0, 1.0), (4.0, 8.0), (6.0, 5.0))
    for size, seconds in points:
        assert Curve(points)(size) == pytest.approx(seconds)
        assert Curve(points)(size, 3) == pytest.approx(seconds)


def test_batches_lie_between_the_measured_ones() -> None:
    one, eight = (MADE.factorisation("eigh", 64, batch, "float32") for batch in (1, 8))
    assert (one, eight) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert one < MADE.factorisation("eigh", 64, 3, "float32") < eight
    assert MADE.factorisation("eigh", 64, 80, "float32") == pytest.approx(2e-2)
    assert MADE.factorisation("cholesky", 64, 5, "float32") == pytest.approx(5 * LAW(64))


def test_a_batch_of_products_takes_as_long_as_one_of_its_work() -> None:
    assert MADE.product(1e6, 10, "float32") == pytest.approx(1e-6 + 1e-3)


def test_collectives_are_measured_or_follow_from_links() -> None:
    assert MADE.collective("all_reduce", 1e6, range(4)) == pytest.approx(1e-3)
    assert MADE.collective("broadcast", 1e6, [3]) == 0
    within = MADE.collective("broadcast", 1e6, [0, 1])
    assert within == pytest.approx(1e-6 + 1e-5)
    assert MADE.collective("broadcast", 1e6, [0, 4]) == pytest.approx(1e-5 + 1e-4)


@pytest.mark.parametrize(
    ("operation", "ranks", "latencies", "volume"),
    [
        ("all_reduce", 3, 4, 4 / 3),  # twice two rounds, and twice two thirds of the bytes
        ("reduce", 4, 2, 1.0),
        ("broadcast", 3, 2, 1.0),
        ("reduce_scatter", 4, 2, 3 / 4),
        ("all_gather_shares", 2, 1, 1 / 2),
        ("all_to_all", 3, 2, 2 / 3),
    ],
)
def test_links_have_rings_and_trees(
    operation: str, ranks: int, latencies: int, volume: float
) -> None:
    linked = replace(MADE, collectives=())
    inside = latencies * 1e-6 + volume * 1e6 / 1e11
    assert linked.collective(operation, 1e6, range(ranks)) == pytest.approx(inside)
    # Ranks 2 and 3 of the first node, and the first ranks of the second.
    outside = latencies * 1e-5 + volume * 1e6 / 1e10
    assert linked.collective(operation, 1e6, range(2, 2 + ranks)) == pytest.approx(
        outside if ranks > 2 else inside
    )


def test_other_groups_take_the_nearest_measured_one_by_the_ratio_of_the_links() -> None:
    curves = (Collective("reduce", 2, Curve(beta=1e-9)), Collective("reduce", 16, Curve(beta=8e-9)))
    both = replace(MADE, collectives=curves)
    # Four rounds to three, and the same bytes: 8 is nearer to 16 than to 2.
    links = (3 * 1e-5 + 1e-4) / (4 * 1e-5 + 1e-4)
    assert both.collective("reduce", 1e6, range(8)) == pytest.approx(8e-3 * links)
    # Above the largest measured size the time of a collective grows with its bytes at most.
    steep = (Collective("reduce", 2, Curve(((1e3, 1e-6), (1e4, 1e-4)))),)
    assert replace(MADE, collectives=steep).collective("reduce", 1e5, range(2)) == pytest.approx(
        1e-3
    )


def test_above_the_last_point_an_overhead_stays_and_the_rest_grows_by_its_power() -> None:
    assert LAW(512) == pytest.approx(1e-9 * 512**3)
    assert LAW(512, 3) == pytest.approx(1e-9 * 512**3)
    assert LAW(512, 2) == pytest.approx(4 * LAW(256))
    assert LAW(200, 2) == pytest.approx(1e-9 * 200**3)
    overhead = Curve(((10.0, 1.0 + 1e-3), (20.0, 1.0 + 8e-3)))
    assert overhead(100, 3) == pytest.approx(1.0 + 1.0)
    falling = Curve(((10.0, 2.0), (20.0, 1.0)))
    assert falling(100, 3) == 1.0
    steep = replace(MADE, operators={"product:float32": Curve(((1e3, 1e-6), (1e4, 1e-4)))})
    assert steep.product(1e5, 2, "float32") == pytest.approx(2e-3)


def test_other_dtypes_and_convolutions_take_the_nearest_curve_that_exists() -> None:
    half = {"product:bfloat16": Curve(beta=1e-12), "cholesky:float64": Curve(((16.0, 1.0),))}
    more = replace(MADE, operators={**MADE.operators, **half})
    assert more.product(1e6, 1, "bfloat16") == pytest.approx(1e-6)
    assert more.product(1e6, 1, "bfloat16", "convolution") == pytest.approx(1e-6)
    assert more.product(1e6, 1, "float16") == more.product(1e6, 1, "float32")
    assert more.factorisation("cholesky", 16, 2, "float64") == pytest.approx(2.0)
    assert more.factorisation("cholesky", 16, 1, "float32") == LAW(16)
    double = {"eigh:float64": ((64, 1, 1.0), (256, 1, 2.0))}
    batched = replace(MADE, batched={**MADE.batched, **double})
    assert batched.factorisation("eigh", 64, 1, "float64") == pytest.approx(1.0)
    assert batched.factorisation("eigh", 64, 1, "float16") == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="no curve of 'qr'"):
        MADE.factorisation("qr", 16, 1, "float32")


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    MADE.save(tmp_path / "made.json")
    assert Hardware.load(tmp_path / "made.json") == MADE


@pytest.mark.parametrize("text", ["{}", "[1", '{"name": "x", "operators": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="is not a hardware profile"):
        Hardware.load(tmp_path / "other.json")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no hardware profile 'no-such'"):
        Hardware.load("no-such")


@pytest.mark.parametrize("name", names())
def test_shipped_profiles_name_their_source(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.name == name
    assert len(hardware.source) > 20
