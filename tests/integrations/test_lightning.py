"""Lightning itself: equal to the plain loop, on one process and on two, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.harness import run_ranks
from tests.integrations.kit import (
    BATCH,
    CASES,
    MICRO,
    SAVED,
    STEPS,
    TIGHT,
    Case,
    Data,
    as_launched,
    assert_equal,
    assert_plain,
    base,
    finish,
    network,
    scaler,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:(?!soframe)")


def module(case: Case, optimizers: int = 1, **options: Any) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(case)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            own = {**options}
            if case.fp16:
                own["grad_scaler"] = self.trainer.precision_plugin.scaler
            self.optimizers_made = [base(self.model, case, **own) for _ in range(optimizers)]
            return self.optimizers_made

    result = Module()
    result.automatic_optimization = optimizers == 1
    return result


def train(
    folder: str,
    case: Case = Case(),  # noqa: B008
    *,
    resume: bool = False,
    with_callback: bool | None = None,
    rank: int = 0,
    ranks: int = 1,
    optimizers: int = 1,
    placed: str = "comm-opt",
    calls: int = 1,
) -> dict[str, Tensor]:
    """Train by Lightning; save into the folder on the way, or begin there."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint as Saving
    from lightning.pytorch.plugins.precision import MixedPrecision

    from soframe.integrations.lightning import SoframeCallback

    callbacks: list[Any] = []
    if not case.own if with_callback is None else with_callback:
        callbacks.append(SoframeCallback(method=case.method, **case.settings, strategy=placed))
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
        gradient_clip_val=case.clip,
        precision="bf16-mixed" if case.bf16 else None,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler())] if case.fp16 else None,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    assert trainer.world_size == ranks
    own_module = module(case, optimizers, strategy=placed)
    data = Data(rank, ranks, case)
    if resume:  # Lightning would begin the epoch anew
        data.skip(SAVED)
    path = str(Path(folder) / f"epoch=0-step={SAVED}.ckpt") if resume else None
    loader = DataLoader(data, batch_size=BATCH // ranks)
    trainer.fit(own_module, loader, ckpt_path=path)
    for _ in range(calls - 1):
        trainer.fit_loop.epoch_loop.max_steps = STEPS
        data.skip(SAVED)
        trainer.fit(own_module, loader)
    assert trainer.global_step == STEPS
    every = [one.preconditioner for one in callbacks if isinstance(one, SoframeCallback)]
    every += [one.preconditioner for one in own_module.optimizers_made if case.own]
    for preconditioner in every:
        finish(own_module.model, preconditioner, case, begun=SAVED if resume else 0)
    return weights(own_module.model)


@pytest.mark.parametrize("name", ["clip", *CASES])
def test_equal_to_the_plain_loop(tmp_path: Path, name: str) -> None:
    pytest.importorskip("lightning")
    case = {"clip": Case(clip=0.01), **CASES}[name]
    assert_plain(train(str(tmp_path), case), case, TIGHT, clips="directions")


@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_is_the_same(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("lightning")
    case = Case(own=own)
    whole = train(str(tmp_path), case)
    assert_plain(whole, case, TIGHT)
    assert_equal(train(str(tmp_path), case, resume=True), whole, 0)


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
        train(str(tmp_path), Case(own=True), with_callback=True)
    with pytest.raises(ValueError, match="one optimizer, and this has 2"):
        train(str(tmp_path), optimizers=2)


def on_ranks(rank: int, ranks: int, folder: str) -> list[Any]:
    as_launched(rank, ranks)
    options: dict[str, Any] = {"rank": rank, "ranks": ranks, "placed": "mem-opt"}
    both = []
    for own in (False, True):
        case, where = Case(own=own), f"{folder}/{own}"
        both.append([train(where, case, resume=resume, **options) for resume in (False, True)])
    cases = [train(f"{folder}/{name}", case, **options) for name, case in CASES.items()]
    return [both, cases]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    """By DDP, with a state that is spread over the ranks, and a bad sample on one of them."""
    pytest.importorskip("lightning")
    for both, cases in run_ranks(on_ranks, 2, str(tmp_path), timeout=240):
        for own, (whole, resumed) in enumerate(both):
            assert_plain(whole, Case(own=bool(own)), 1e-8)
            assert_equal(resumed, whole, 0)
        for found, case in zip(cases, CASES.values(), strict=True):
            assert_plain(found, case, 1e-8, clips="directions")
