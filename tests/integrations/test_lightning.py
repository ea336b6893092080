"""Lightning itself: equal to the plain loop, on one process and on two, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import soframe
from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    BATCH,
    MICRO,
    OPTIONS,
    OWN,
    SAVED,
    STEPS,
    TIGHT,
    Data,
    as_launched,
    assert_equal,
    network,
    plain,
    sgd,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")


def module(own: bool, optimizers: int = 1, **options: Any) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            if own:
                return soframe.Optimizer(self, **OWN, **options)
            return [sgd(self.model) for _ in range(optimizers)]

    result = Module()
    result.automatic_optimization = optimizers == 1
    return result


def train(
    folder: str,
    *,
    resume: bool = False,
    own: bool = False,
    with_callback: bool | None = None,
    clip: float | None = None,
    rank: int = 0,
    ranks: int = 1,
    optimizers: int = 1,
    placed: str = "comm-opt",
    calls: int = 1,
) -> dict[str, Tensor]:
    """Train by Lightning; save into the folder on the way, or begin there."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint as Saving

    from soframe.integrations.lightning import SoframeCallback

    callbacks: list[Any] = []
    if not own if with_callback is None else with_callback:
        callbacks.append(SoframeCallback(**OPTIONS, strategy=placed))
    if not resume:
        callbacks.append(Saving(folder, every_n_train_steps=SAVED, save_top_k=-1))
    strategy: Any = "auto"
    if ranks > 1:
        from lightning.pytorch.strategies import DDPStrategy

        strategy = DDPStrategy(process_group_backend="gloo")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=STEPS if calls == 1 else SAVED,
        accumulate_grad_batches=MICRO if optimizers == 1 else 1,
        gradient_clip_val=clip,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    assert trainer.world_size == ranks
    own_module = module(own, optimizers, strategy=placed)
    data = Data(rank, ranks)
    if resume:  # Lightning would begin the epoch anew
        data.x = data.x[SAVED * MICRO * (BATCH // ranks) :]
    path = str(Path(folder) / f"epoch=0-step={SAVED}.ckpt") if resume else None
    loader = DataLoader(data, batch_size=BATCH // ranks)
    trainer.fit(own_module, loader, ckpt_path=path)
    for _ in range(calls - 1):
        trainer.fit_loop.epoch_loop.max_steps = STEPS
        data.x = data.x[SAVED * MICRO * BATCH :]
        trainer.fit(own_module, loader)
    for callback in callbacks:
        if isinstance(callback, SoframeCallback):
            assert callback.preconditioner is not None
            assert callback.preconditioner.state_dict()["step"] == STEPS
    assert trainer.global_step == STEPS
    return weights(own_module.model)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_equal_to_the_plain_loop(tmp_path: Path, clip: float | None) -> None:
    pytest.importorskip("lightning")
    assert_equal(train(str(tmp_path), clip=clip), plain(clip_directions=clip), TIGHT)


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("lightning")
    whole = train(str(tmp_path), own=own)
    assert_equal(whole, plain(own=own), TIGHT)
    assert_equal(train(str(tmp_path), resume=True, own=own), whole, 0)


def test_a_second_call_of_fit_keeps_the_factors(tmp_path: Path) -> None:
    """Lightning makes a new optimizer then; `train` asks for the steps of the preconditioner."""
    pytest.importorskip("lightning")
    train(str(tmp_path), calls=2)


def test_a_checkpoint_without_a_state(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    train(str(tmp_path), with_callback=False)
    with pytest.raises(ValueError, match="without the state of its precond"):
        train(str(tmp_path), resume=True)


def test_optimizers_that_it_is_not_for(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    with pytest.raises(TypeError, match="a preconditioner of its own"):
        train(str(tmp_path), own=True, with_callback=True)
    with pytest.raises(ValueError, match="one optimizer, and this has 2"):
        train(str(tmp_path), optimizers=2)


def on_ranks(rank: int, ranks: int, folder: str, own: bool, strategy: str) -> list[Any]:
    as_launched(rank, ranks)
    options: dict[str, Any] = {"rank": rank, "ranks": ranks, "own": own, "placed": strategy}
    return [train(folder, **options), train(folder, resume=True, **options)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("own", [False, True])
def test_two_ranks(tmp_path: Path, own: bool) -> None:
    """By DDP, with a state that is spread over the ranks."""
    pytest.importorskip("lightning")
    expected = plain(own=own)
    for whole, resumed in run_ranks(on_ranks, 2, str(tmp_path), own, "mem-opt"):
        assert_equal(whole, expected, 1e-8)
        assert_equal(resumed, whole, 0)
