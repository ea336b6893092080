"""Data and models: the same from their seed, whatever the caller's randomness and default dtype."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from experiments import clutter, data, models
from experiments.tasks import cross_entropy, half_square
from experiments.workloads import names, workload
from soframe.planning import workloads

MAKERS = [*(name for name in names() if name != "cluttered-digits"), "cluttered-digits:50"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.thorough) if n == "cluttered-vit" else n for n in MAKERS],
)
def test_a_task_is_the_same_from_its_seed(name):
    def made(seed):
        task = workload(name).make(seed, torch.float32)
        examples = (*task.train, *(task.test or ()))
        return [*(p.detach() for p in task.model.parameters()), *examples]

    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    first = made(0)
    assert torch.equal(torch.rand(1), wanted)
    torch.set_default_dtype(torch.float64)
    try:
        again = made(0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(first, again, strict=True))
    assert not torch.equal(made(1)[0], first[0])
    task = workload(name).make(0, torch.float32)
    loss = task.loss(task.model, *data.take(task.train, slice(4)))
    loss.backward()
    assert all(p.grad is not None for p in task.model.parameters())


def test_classification_splits_all_digits_and_keeps_images_with_their_classes():
    train, test = data.classified_digits(3, torch.float32)
    assert (train[0].shape, test[0].shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    labelled = {}
    for images, classes in (train, test):
        for image, label in zip(images, classes, strict=True):
            labelled.setdefault(tuple(image.flatten().tolist()), set()).add(int(label))
    assert set(labelled) == {tuple(row.tolist()) for row in data.digits()[0].float()}
    # 178 to 183 of each class: a shuffled label would show as an image with two classes or as a
    # wrong count.
    counts = torch.bincount(torch.cat([train[1], test[1]]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # The nearest training image has the same class for nearly every test image.
    nearest = train[1][torch.cdist(test[0].flatten(1), train[0].flatten(1)).argmin(dim=1)]
    assert (nearest == test[1]).float().mean() > 0.95


def test_curves_are_drawn_around_their_points():
    curves = data.curves(count=3, seed=4)
    control = torch.rand(3, 3, 2, generator=torch.Generator().manual_seed(4)) * 11 + 2
    for image, points in zip(curves.view(3, 16, 16), control, strict=True):
        # De Casteljau's construction, against the polynomial.
        curve = []
        for t in torch.linspace(0, 1, 40):
            level = list(points)
            while len(level) > 1:
                level = [a + t * (b - a) for a, b in pairwise(level)]
            curve.append(level[0])
        for x, y in ((0, 0), (8, 8), (5, 11)):
            squared = min(float(((p - torch.tensor([x, y])) ** 2).sum()) for p in curve)
            expected = torch.exp(torch.tensor(-squared / 2))
            torch.testing.assert_close(image[y, x], expected, atol=1e-4, rtol=1e-4)


def test_the_corpus_is_cut_into_windows_and_the_byte_that_follows(tmp_path, monkeypatch):
    texts = {f"{chr(97 + i)}.py": bytes([i]) * 300 for i in range(21)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "x.txt").write_bytes(b"?" * 999)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    (inputs, following), test = data.standard_library()
    # The first and the 21st module are held out: 600 bytes, four windows and what is left over.
    assert test[0].shape == (4, 128)
    assert set(test[0].unique().tolist()) == {0, 20}
    joined = b"".join(texts[f"{chr(97 + i)}.py"] for i in range(1, 20))
    assert len(inputs) == (len(joined) - 1) // 128
    for i in (0, 7, len(inputs) - 1):
        assert bytes(inputs[i].tolist()) == joined[128 * i : 128 * i + 128]
        assert bytes(following[i].tolist()) == joined[128 * i + 1 : 128 * i + 129]


@pytest.mark.slow
def test_cluttered_images_are_the_same_however_many_are_made_and_balanced(monkeypatch):
    monkeypatch.setattr(clutter, "_CHUNK", 50)
    make = clutter.cluttered_digits.__wrapped__  # not what the cache has
    (first, classes), (held_out, _) = make(30, 10)
    (more, _), _ = make(90, 10)
    (other, _), _ = make(30, 10, seed=1)
    assert (first.shape, first.dtype) == ((30, 3, 32, 32), torch.uint8)
    assert torch.equal(first, more[:30])
    assert not torch.equal(more[:40], more[50:])  # chunks differ
    assert not torch.equal(first[:10], held_out)
    assert not torch.equal(first, other)
    assert torch.bincount(classes).tolist() == [3] * 10
    assert [len(images) for images, _ in clutter.pools()] == [1438, 359]


@pytest.mark.slow
def test_each_set_draws_from_its_own_pool_its_clutter_too(monkeypatch):
    trained, tested = clutter.pools()
    blank = (torch.zeros_like(tested[0]), tested[1])
    monkeypatch.setattr(clutter, "NOISE", 0.0)
    monkeypatch.setattr(clutter, "pools", lambda: (trained, blank))
    (train, _), (test, _) = clutter.cluttered_digits.__wrapped__(10, 10)
    # Without ink there is the dark background alone; with it there are bright pixels.
    assert int(test.max()) <= 255 * clutter.DARK + 1
    assert int(train.flatten(1).max(dim=1).values.min()) > 255 * clutter.DARK


def test_images_show_the_digit_of_their_class(monkeypatch):
    """Pools in which a digit's ink says its class: the brightest pixel tells it again."""
    classes = torch.arange(10).repeat(3)
    ink = (classes.float() + 1) / 10
    pool = (ink.view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone(), classes)
    for name, value in {"NOISE": 0.0, "FRAGMENTS": 0, "DARK": 0.0, "BRIGHT": 1.0}.items():
        monkeypatch.setattr(clutter, name, value)
    monkeypatch.setattr(clutter, "pools", lambda: (pool, pool))
    (images, labels), _ = clutter.cluttered_digits.__wrapped__(40, 10)
    brightest = images.flatten(1).max(dim=1).values.float() / 255
    assert torch.equal((brightest * 10).round().long() - 1, labels)


def test_the_losses_are_those_of_the_textbook():
    outputs, targets = torch.randn(5, 3), torch.randn(5, 3)
    expected = sum(0.5 * float(((o - t) ** 2).sum()) for o, t in zip(outputs, targets, strict=True))
    identity = torch.nn.Identity()
    assert float(half_square(identity, outputs, targets)) == pytest.approx(expected / 5)
    classes = torch.tensor([0, 2, 1, 1, 0])
    logs = outputs.log_softmax(1)[torch.arange(5), classes]
    assert float(cross_entropy(identity, outputs, classes)) == pytest.approx(-float(logs.mean()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_gpt_reads_no_byte_ahead_and_both_kinds_are_one_model(fused):
    sizes = models.Sizes(16, context=6, width=8, layers=2, heads=2)
    model = models.GPT(sizes, fused=fused).double()
    text = torch.randint(16, (2, 6))
    other = text.clone()
    other[:, 4] = (other[:, 4] + 1) % 16
    logits, changed = model(text), model(other)
    assert logits.shape == (2, 16, 6)
    assert torch.equal(logits[:, :, :4], changed[:, :, :4])
    assert not torch.equal(logits[:, :, 4:], changed[:, :, 4:])
    loss = models.next_token_loss(model, text, other)
    torch.testing.assert_close(loss, F.cross_entropy(logits, other))


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_layer_adds_begins_smaller_by_the_root_of_their_number(fused):
    sizes = models.Sizes(16, context=6, width=64, layers=8, heads=2)
    model = models.GPT(sizes, fused=fused)
    stds = {name: float(p.detach().std()) for name, p in model.named_parameters()}
    last = [name for name in stds if name.endswith((".out.weight", ".narrow.weight"))]
    assert len(last) == 16
    for name in last:
        assert stds[name] == pytest.approx(0.005, rel=0.1)
    for name in ("tokens.weight", "layers.0.widen.weight"):
        assert stds[name] == pytest.approx(0.02, rel=0.1)


def test_attention_is_torch_s():
    sizes = models.Sizes(16, context=5, width=8, layers=1, heads=2)
    plain, fused = models.Layer(sizes).double(), workloads.Layer(8, 2).double()
    state = plain.state_dict()
    for part in ("weight", "bias"):
        parts = state.pop(f"qkv.{part}").chunk(3)
        state |= {f"{n}.{part}": t for n, t in zip(("query", "key", "value"), parts, strict=True)}
    fused.load_state_dict(state)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    # All but the form of GELU is the same.
    torch.testing.assert_close(plain(x), fused(x), atol=2e-3, rtol=0)


def test_networks_are_those_of_the_papers():
    counts = [
        sum(p.numel() for p in make().parameters()) for make in (models.resnet20, models.resnet18)
    ]
    assert [round(count / 1e6, 2) for count in counts] == [0.27, 11.17]
    model = models.autoencoder(models.CURVES_WIDTHS, 0, torch.float32)
    kinds = [type(layer).__name__ for layer in model]
    assert [m.out_features for m in model if isinstance(m, torch.nn.Linear)] == [
        *(128, 64, 32, 6),
        *(32, 64, 128, 256),
    ]
    assert kinds.count("Tanh") == 6  # code and reconstruction are linear


@pytest.mark.slow
def test_a_workload_may_be_smaller():
    task = workload("cluttered-digits:50").make(0, torch.float32)
    assert (len(task.train[0]), len(task.test[0])) == (50, 10)
    for name in ("cluttered-digits:", "cluttered-digits:0", "cluttered-digits:x", "curves:10"):
        with pytest.raises(ValueError, match=f"no workload '{name}'"):
            workload(name)
