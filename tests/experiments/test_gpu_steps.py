"""The benchmark of steps on a GPU, at its tiny sizes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import soframe
from benchmarks import gpu_steps

TINY = ["--preset", "tiny", "--device", "cpu", "--seconds", "0", "--rounds", "1"]


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """The command sets the precision of the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def written(path: Path, *asked: str) -> dict:
    """Run the command, and return what it writes and its exit status."""
    status = gpu_steps.main([*TINY, *asked, "--json", str(path / "steps.json")])
    return {"status": status, **json.loads((path / "steps.json").read_text())}


@pytest.mark.slow
@pytest.mark.thorough
def test_all_contenders_take_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = written(tmp_path)
    out, err = capsys.readouterr()
    assert found["status"] == 0
    assert (found["device"], found["torch"]) == ("CPU", torch.__version__)
    assert "cudnn.allow_tf32" in out
    known = {name for names in gpu_steps.KNOWN.values() for name in names}
    own = {name for name in known if name.startswith("soframe")}
    present: set[str] = set()
    for key, reference in (("gpt2", "adamw"), ("resnet50", "sgd"), ("resnet50-half", "sgd")):
        workload = found["workloads"][key]
        assert (workload["reference"], workload["rounds"]) == (reference, 1)
        assert workload["errors"] == {}
        names = [row["name"] for row in workload["rows"]]
        assert names[0] == reference
        present.update(names)
        for row in workload["rows"]:
            assert f"\n{row['name']} " in out
            ratio = "ratio" if key == "gpt2" else "1/10"
            assert (row[ratio] == [1.0] * 3) == (row["name"] == reference)
    assert own | {"adamw", "sgd", "torch-muon"} <= present
    assert present | set(found["left_out"]) == known
    for name in found["left_out"]:
        assert f"{name} is left out: there is no package " in err


def test_a_turn_is_one_interval() -> None:
    workload = gpu_steps.gpt2(gpu_steps.PRESETS["tiny"], 1, torch.device("cpu"))
    one = workload.contenders["soframe-soap"]()
    assert isinstance(one, gpu_steps.Training)
    optimizer = one.optimizers[0]
    assert isinstance(optimizer, soframe.Optimizer)
    for turn, act in enumerate((one.warm_up, one.turn)):
        act()
        assert len(one.ms) == len(one.host_ms) == turn
        metrics = optimizer.metrics()
        assert metrics["step"] == 20 + 10 * turn
        factors = metrics["blocks"]["layers.0.query.weight"]["factors"]
        assert factors["L"]["solve_age"] == 9  # the next turn begins with a solve
    assert all(p.grad is None for p in one.model.parameters())
    one.close()


def fail(model: object, every: object) -> list[torch.optim.Optimizer]:
    """Run out of memory, as it were."""
    raise torch.OutOfMemoryError("there is no more")


class Late(torch.optim.SGD):
    """Fails in its first turn that counts."""

    taken = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take a step."""
        self.taken += 1
        if self.taken > 11:
            raise ValueError("it is late")


@pytest.mark.slow
def test_who_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_steps.GPT2_CONTENDERS, "torch-muon", fail)
    late = "soframe-soap"
    monkeypatch.setitem(
        gpu_steps.GPT2_CONTENDERS, late, lambda model, every: [Late(model.parameters(), lr=0.0)]
    )
    found = written(tmp_path, "gpt2", "--only", f"torch-muon;{late};soframe-muon")
    assert found["status"] == 1
    workload = found["workloads"]["gpt2"]
    assert [row["name"] for row in workload["rows"]] == ["adamw", "soframe-muon"]
    assert workload["errors"] == {
        "torch-muon": "torch.OutOfMemoryError: there is no more",
        late: "ValueError: it is late",
    }
    out, err = capsys.readouterr()
    assert "torch-muon failed: torch.OutOfMemoryError: there is no more" in out
    assert 'raise ValueError("it is late")' in err
