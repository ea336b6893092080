"""The workload of adapters: a frozen base, which they leave as it is at first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import adapters
from experiments.models import byte_gpt
from experiments.workloads import of_module


@pytest.mark.slow
def test_adapters_begin_at_the_base_and_are_trained_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "BASE", tmp_path / "base.pt")
    monkeypatch.setattr(adapters, "STEPS", 1)
    task = of_module(adapters).make(0, torch.float32)
    trained = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert sum(p.numel() for p in trained.values()) == 32_768
    base = byte_gpt()
    base.load_state_dict(adapters.base())  # which is read from its file
    tokens = torch.arange(64).view(1, 64)
    torch.testing.assert_close(task.model(tokens), base(tokens))
    assert (tmp_path / "base.pt").exists()
