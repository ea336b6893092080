"""The benchmark of paths: it times all that serve, and marks the one that is chosen."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import paths


@pytest.mark.slow
@pytest.mark.parametrize("cases", [1, 5])
def test_every_path_is_timed(cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    threads = str(torch.get_num_threads())
    asked = ["--threads", threads, "--rounds", "1", "--cases", str(cases)]
    assert paths.main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == cases
    for row in rows:
        *_, stride = row["case"]
        served = {"shifts", "rows", "unfold", *(["correlation", "fourier"] if stride == 1 else [])}
        assert set(row["measured"]) == set(row["predicted"]) == served
        assert row["chosen"] in served
        assert all(taken > 0 for taken in row["measured"].values())
    assert paths.main(asked) == 0
    assert capsys.readouterr().out.count("*") == cases
