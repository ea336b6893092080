"""The code of the guide on trainers runs, where their libraries are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import soframe
from tests.integrations.kit import Data, network, sgd

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trainers.md"


def code(section: str) -> list[str]:
    """The blocks of code of a section."""
    body = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [part.split("```")[0] for part in body.split("```python notest\n")[1:]]


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": network(), "data": Data(), "soframe": soframe}
    first, second = code("Hugging Face")
    exec(first, names)
    assert list(Path("runs").glob("checkpoint-*/soframe/checkpoint-*"))
    names["callback"].preconditioner.close()
    exec(second, names)
    names["trainer"].train()


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    model = network()
    x = Data().x
    names: dict[str, Any] = {
        "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2),
        "model": nn.Sequential(model.first, model.last),
        "data": DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4),
        "loss": nn.functional.mse_loss,
    }
    names["optimizer"] = sgd(names["model"])
    (block,) = code("Accelerate")
    exec(block, names)
    assert list(Path("runs/1").glob("soframe/checkpoint-*"))
    names["preconditioner"].close()


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    first, second = code("Lightning")
    names: dict[str, Any] = {"soframe": soframe, "data": DataLoader(Data(), batch_size=4)}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return sgd(self)

    names["module"] = Module()
    exec(first, names)
    assert names["callbacks"][0].preconditioner.state_dict()["step"] == 12
    exec(second, names)
    Module.configure_optimizers = names["configure_optimizers"]
    lightning.Trainer(max_epochs=1, logger=False).fit(Module(), names["data"])
