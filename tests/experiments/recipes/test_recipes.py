"""Each recipe takes a few steps on small files in the real formats, by both optimizers."""

import importlib
import math
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import soframe
from experiments.launch import Place
from experiments.libraries import MissingLibraryError
from experiments.recipes import NAMES, common, loop
from soframe.planning import workloads
from tests.compatibility.families import imported_timm
from tests.experiments.recipes import files

SHORT = {"steps": 3, "evaluate_every": 3, "tensorboard": False, "device": "cpu"}
IMAGES = {"side": 32, "classes": 2, "batch_size": 8}
CANVASES = {"canvases": 20, "test_canvases": 5, "batch_size": 10}
TEXT = {"vocabulary": 60, "length": 16, "width": 16, "layers": 2, "heads": 2, "batch_size": 4}
CASES = {
    "resnet32": (files.cifar, {"width": 4, "layers": 1, "batch_size": 10}),
    "resnet50": (files.image_folder, {**IMAGES, "width": 4, "layers": (1, 1, 1, 1)}),
    "vit": (files.image_folder, {**IMAGES, "patch": 8, "width": 16, "layers": 1, "heads": 2}),
    "gpt2": (files.tokens, TEXT),
    "bert_large": (files.tokens, {**TEXT, "mask": 59, "base": "adamw", "lr": 1e-3}),
    "pinn": (lambda folder: folder, {"points": 256, "width": 8, "batch_size": 256}),
    "unet": (lambda folder: folder, {**CANVASES, "width": 2}),
    # Of 4 channels oneDNN's gradient of a 1 x 1 convolution with stride 2, channels last, writes
    # beyond its memory on processors with AVX2 alone (torch 2.13.0).
    "detector": (lambda folder: folder, {**CANVASES, "width": 8}),
    "bert_bytes": (lambda folder: folder, {"length": 16, "width": 8, "heads": 2, "batch_size": 4}),
}
FIRST_ORDER = dict.fromkeys(("resnet32", "resnet50", "unet", "detector"), "sgd")


def recipe(name):
    return importlib.import_module(f"experiments.recipes.{name}")


def settings_of(name, folder, **changes):
    prepare, sizes = CASES[name]
    data = prepare(folder / "data")
    values = {**SHORT, **sizes, "data": data, "output": folder / "run", **changes}
    return recipe(name).Settings(**values)


def test_every_recipe_is_run():
    assert {*CASES, "lora"} == set(NAMES)  # see test_lora.py


def test_bert_counts_its_masked_tokens(tmp_path, monkeypatch):
    counted, plain = [], soframe.Preconditioner.count

    def spy(self, terms, **options):
        counted.append(int(terms.sum()))
        plain(self, terms, **options)

    monkeypatch.setattr(soframe.Preconditioner, "count", spy)
    loop.run(recipe("bert_large"), settings_of("bert_large", tmp_path))
    assert counted == [4 * round(0.15 * 16)] * 3  # four windows in each of three steps


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_few_steps(tmp_path, name):
    settings = settings_of(name, tmp_path)
    found = {}
    for optimizer in ("soframe", FIRST_ORDER.get(name, "adamw")):
        output = tmp_path / optimizer
        outcome = loop.run(recipe(name), replace(settings, optimizer=optimizer, output=output))
        assert outcome.finished
        assert all(math.isfinite(value) for value in outcome.figures.values())
        found[optimizer] = outcome.figures["loss"]
    assert len(set(found.values())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit", {"data": "cifar", "side": 32, "patch": 8, "classes": 10}),
        ("vit", {"data": "shards", "samples": 15, "classes": 15}),
        ("resnet50", {"data": "shards", "samples": 15, "classes": 15}),
        ("gpt2", {"method": "kfac", "base": "sgd", "lr": 0.1, "accumulate": 2}),
        ("bert_large", {"amp": "bf16"}),
    ],
)
def test_other_data_and_methods(tmp_path, name, changes):
    settings = settings_of(name, tmp_path, **{k: v for k, v in changes.items() if k != "data"})
    if changes.get("data") == "cifar":
        settings = replace(settings, data=files.cifar(tmp_path / "cifar"))
    if changes.get("data") == "shards":
        files.shards(tmp_path / "tars" / "train")
        files.shards(tmp_path / "tars" / "val", counts=(2,))
        settings = replace(settings, data=tmp_path / "tars")
    assert math.isfinite(loop.run(recipe(name), settings).figures["loss"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?!soframe)")
@pytest.mark.parametrize("name", ["gpt2", "bert_large"])
def test_models_of_transformers(tmp_path, name):
    pytest.importorskip("transformers")
    settings = settings_of(name, tmp_path, model_code="transformers")
    own, theirs = (
        recipe(name).model(replace(settings, model_code=it)) for it in ("own", "transformers")
    )
    assert parameters(theirs) == pytest.approx(parameters(own), rel=0.02)  # BERT's has segments
    assert math.isfinite(loop.run(recipe(name), settings).figures["loss"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize("name", ["vit", "resnet50"])
def test_models_of_timm(tmp_path, name):
    imported_timm()
    settings = settings_of(name, tmp_path, model_code="timm")
    assert "timm" in type(recipe(name).model(settings)).__module__
    assert math.isfinite(loop.run(recipe(name), settings).figures["loss"])


def test_a_library_without_an_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingLibraryError, match=r"missing: timm\..* pip install timm$"):
        recipe("vit").model(recipe("vit").Settings(model_code="timm"))


@pytest.mark.slow
def test_kfac_in_front_of_lamb(tmp_path):
    library = pytest.importorskip("pytorch_optimizer")
    bert = recipe("bert_large")
    settings = settings_of("bert_large", tmp_path, base="lamb", lr=None, steps=4)
    optimizer, _ = bert.optimizer(bert.model(settings), settings)
    assert isinstance(optimizer, library.Lamb)
    assert math.isfinite(loop.run(bert, settings).figures["loss"])


def test_lamb_clips_the_global_norm():
    pytest.importorskip("pytorch_optimizer")
    moments = []
    for length in (0.5, 1000.0):
        model = torch.nn.Linear(3, 2)
        lamb = common.first_order(model, recipe("bert_large").Settings(), "lamb")
        count = sum(p.numel() for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, length / math.sqrt(count))
        lamb.step()
        moments.append(torch.cat([s["exp_avg"].flatten() for s in lamb.state.values()]).norm())
    torch.testing.assert_close(moments[0] / (1 - 0.9), torch.tensor(0.5))
    torch.testing.assert_close(moments[1] / (1 - 0.9), torch.tensor(1.0), rtol=1e-4, atol=0)


def test_the_second_phase_begins_with_the_weights_of_the_first(tmp_path):
    bert = recipe("bert_large")
    first = settings_of("bert_large", tmp_path, positions=16, output=tmp_path / "first", length=8)
    loop.run(bert, first)
    place = Place(0, 1, torch.device("cpu"))
    trained = loop.RecipeRun(bert, replace(first, resume=True), place).model.state_dict()
    second = replace(first, length=16, init=first.output, output=tmp_path / "second")
    begun = loop.RecipeRun(bert, second, place)
    assert begun.step == 0
    for name, weight in begun.model.state_dict().items():
        torch.testing.assert_close(weight, trained[name])
    assert loop.run(bert, second).finished
    resumed = loop.RecipeRun(bert, replace(second, init=tmp_path / "gone", resume=True), place)
    assert resumed.step == second.steps  # the run's own checkpoint, and not the first phase's


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"width": 8}, "is of another model"), ({"init": "nothing"}, "nothing has no checkpoint")],
)
def test_weights_of_another_model_are_refused(tmp_path, changes, message):
    bert = recipe("bert_large")
    first = settings_of("bert_large", tmp_path, positions=16, output=tmp_path / "first", steps=1)
    loop.run(bert, first)
    folder = tmp_path / changes.pop("init", "first")
    second = replace(first, init=folder, output=tmp_path / "second", **changes)
    with pytest.raises(ValueError, match=f"--init: .*{message}"):
        loop.run(bert, second)


def test_settings_of_the_machine_reach_the_model(tmp_path, monkeypatch):
    precision = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    settings = settings_of("resnet50", tmp_path, channels_last=True, tf32=True)
    run = loop.RecipeRun(recipe("resnet50"), settings, Place(0, 1, torch.device("cpu")))
    assert precision == ["high"]
    (images, classes), *_ = map(run.moved, run.job.batches.shares(run.test, 4))
    kernel = next(run.model.parameters())
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (kernel, images))
    assert classes.dim() == 1
    run.advance()


def test_adamw_leaves_vectors_without_decay() -> None:
    settings = recipe("bert_large").Settings(weight_decay=0.3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decays = {}
    for group in common.first_order(model, settings, "adamw").param_groups:
        for parameter in group["params"]:
            decays[parameter] = group["weight_decay"]
    assert [decays[parameter] for parameter in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


def test_solver_and_decay_reach_soframe(tmp_path):
    settings = settings_of("resnet32", tmp_path, solver="eigen", decay=0.8)
    _, preconditioner = common.optimizer(recipe("resnet32").model(settings), settings)
    assert preconditioner.decay == 0.8
    assert {type(block.solver) for block in preconditioner.blocks} == {soframe.solvers.Eigen}


@pytest.mark.parametrize(("name", "rows"), [("unet", 0.25), ("detector", 1.0)])
def test_rows_reach_soframe(name, rows, tmp_path):
    settings = settings_of(name, tmp_path)
    _, preconditioner = common.optimizer(recipe(name).model(settings), settings)
    assert preconditioner.curvature.parts.sampler.rows == rows


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_default_sizes_are_the_published_ones():
    with torch.device("meta"):
        models = {name: recipe(name).model(recipe(name).Settings()) for name in ("resnet32", "vit")}
        # The published count of 464,154 is without convolutions in the two shortcuts.
        assert parameters(models["resnet32"]) == 464_154 + 16 * 32 + 64 + 32 * 64 + 128
        assert parameters(models["vit"]) / 1e6 == pytest.approx(22, abs=0.1)
        resnet = recipe("resnet50").model(recipe("resnet50").Settings())
        assert parameters(resnet) == parameters(workloads.resnet())
        bert, own = workloads.BERT(), recipe("bert_large").Settings()
        without = parameters(bert) - parameters(bert.follows) - parameters(bert.segments)
        assert parameters(recipe("bert_large").model(own)) == without
    assert recipe("gpt2").Settings().layers == 12


def test_kfac_is_in_front_of_the_base_and_leaves_the_head_alone(tmp_path):
    settings = settings_of("bert_large", tmp_path)
    bert = recipe("bert_large")
    optimizer, preconditioner = bert.optimizer(bert.model(settings), settings)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(preconditioner, soframe.Preconditioner)
    names = {block.block for block in preconditioner.placement.blocks}
    assert len(names) == 2 * 6
    assert all(name.startswith("layers.") for name in names)
    vit = recipe("vit")
    own = settings_of("vit", tmp_path / "vit")
    optimizer, preconditioner = vit.optimizer(vit.model(own), own)
    assert isinstance(optimizer, soframe.Optimizer)
    assert preconditioner is None


def test_classes_of_both_parts_have_to_be_the_same(tmp_path):
    settings = settings_of("resnet50", tmp_path)
    (settings.data / "val" / files.CLASSES[1]).rename(settings.data / "val" / "n02")
    with pytest.raises(ValueError, match=r"val has 2 classes: `train` and `val` need the same"):
        recipe("resnet50").data(settings)
