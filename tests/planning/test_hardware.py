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


def test_batches_lie_between_the_measured_ones() -> None:
    one, eight = (MADE.factorisation("eigh", 64, batch, "float32") for batch in (1, 8))
    assert (one, eight) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert one < MADE.factorisation("eigh", 64, 3, "float32") < eight
    assert MADE.factorisation("eigh", 64, 80, "float32") == pytest.approx(2e-2)
    assert MADE.factorisation("cholesky", 64, 5, "float32") == pytest.approx(5 * LAW(64))


def test_a_device_that_pools_runs_a_batch_as_one() -> None:
    assert MADE.product(1e6, 10, "float32") == pytest.approx(10 * (1e-6 + 1e-4))
    pooling = replace(MADE, pools=True)
    assert pooling.product(1e6, 10, "float32") == pytest.approx(1e-6 + 1e-3)


def test_collectives_are_measured_or_follow_from_links() -> None:
    assert MADE.collective("all_reduce", 1e6, range(4)) == pytest.approx(1e-3)
    assert MADE.collective("broadcast", 1e6, [3]) == 0
    within = MADE.collective("broadcast", 1e6, [0, 1])
    assert within == pytest.approx(1e-6 + 1e-5)
    assert MADE.collective("broadcast", 1e6, [0, 4]) == pytest.approx(1e-5 + 1e-4)
    # A larger group than the measured one: its time, by the ratio of the formula.
    assert MADE.collective("all_reduce", 1e6, range(64)) > MADE.collective(
        "all_reduce", 1e6, range(4)
    )


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
