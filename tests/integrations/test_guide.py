"""The code on trainers in the guide and in the quick start runs, where their libraries are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import soframe
from tests.distributed.harness import run_ranks
from tests.integrations.kit import Case, Data, as_launched, network, sgd

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")

DOCS = Path(__file__).parents[2] / "docs"


def code(section: str, page: str = "guides/trainers.md") -> list[str]:
    """The blocks of code of a section."""
    body = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
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


def test_accelerate_of_the_quick_start() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    preconditioner = soframe.Preconditioner(model, optimizer=optimizer)
    names: dict[str, Any] = {
        "accelerator": accelerator,
        "model": model,
        "optimizer": optimizer,
        "preconditioner": preconditioner,
    }
    (block,) = code("Gradient accumulation", "quickstart.md")
    # The loss is that of a forward pass within the block, which the page leaves out.
    block = block.replace("backward(loss)", "backward(model(**batch)['loss'])")
    for batch in Data().batches():
        exec(block, {**names, "batch": batch})
    assert preconditioner.steps == 6
    preconditioner.close()


def of_deepspeed(rank: int, ranks: int, folder: str) -> int:
    as_launched(rank, ranks)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.chdir(folder)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled for a minute
    deepspeed.init_distributed("gloo")
    model = network(Case(dtype=torch.float32))
    x = Data(case=Case(dtype=torch.float32)).x
    names: dict[str, Any] = {
        "deepspeed": deepspeed,
        "model": nn.Sequential(model.first, model.last),
        "optimizer": None,
        "config": {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True},
        "data": DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4),
        "loss": nn.functional.mse_loss,
    }
    names["optimizer"] = sgd(names["model"])
    (block,) = code("DeepSpeed")
    exec(block, names)
    steps: int = names["preconditioner"].preconditioner.steps
    names["preconditioner"].preconditioner.close()
    return steps


@pytest.mark.distributed
@pytest.mark.slow
def test_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert run_ranks(of_deepspeed, 1, str(tmp_path), timeout=120) == [12]
    assert list(tmp_path.glob("runs/*"))


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
