"""What `observe` leaves alone, when it does nothing, and when it refuses."""

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.capture.fisher import Fisher
from soframe.losses import MeanSquaredError, SquaredError
from soframe.testing import compare
from tests.curvature import blocks, closing, factors, fill, half_square, preconditioner, randn
from tests.test_fisher import deep, deep_linear, labels, observe


def test_observing_leaves_the_gradients_alone() -> None:
    gradients = []
    for observed in (True, False):
        model = fill(deep())
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            output = model(randn(4, 3))
            if observed:
                own.observe(output)
                assert all(p.grad is None for p in model.parameters())
            F.cross_entropy(output, labels(4, classes=3)).backward()
            gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_the_loss_itself_adds_nothing_to_the_statistics() -> None:
    found = []
    for factor in (0.0, 1.0, 1e6):
        model = fill(deep())
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            output = model(randn(4, 3))
            own.observe(output)
            (factor * F.cross_entropy(output, labels(4, classes=3))).backward()
            own.step()
            found.append([*(t for name in blocks(own) for t in factors(own, name))])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_a_layer_that_the_loss_alone_reaches_has_no_statistics() -> None:
    """A second head, which a term of the loss trains that is not observed."""
    inner, head, aside = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
    model = fill(nn.ModuleDict({"inner": inner, "head": head, "aside": aside}))
    with closing(preconditioner(model, fisher="type-2", loss="mse")) as own:
        hidden = inner(randn(5, 3)).tanh()
        outputs = head(hidden)
        own.observe(outputs)
        (outputs.square().mean() + aside(hidden).square().mean()).backward()
        with pytest.warns(UserWarning, match="reached the parameters of block.* 'aside', and no"):
            own.step()
        assert blocks(own)["head"].running
        assert not blocks(own)["aside"].running


class CountedError(SquaredError):
    """A squared error that counts how often it is asked."""

    asked = 0

    def half_factor(self, outputs: Tensor) -> Any:
        type(self).asked += 1
        return super().half_factor(outputs)


def test_no_work_between_statistics_steps() -> None:
    model = fill(deep_linear())
    CountedError.asked = 0
    with closing(
        preconditioner(model, fisher="type-2", loss=CountedError, statistics_every=3)
    ) as own:
        asked, changed, before = [], [], None
        for step in range(7):
            model.zero_grad()
            observe(model, own, [(randn(2, 3, seed=step), randn(2, 2))], half_square)
            own.step()
            asked.append(CountedError.asked)
            now = factors(own, "0")[0].clone()
            changed.append(before is None or not torch.equal(now, before))
            before = now
    assert asked == [1, 1, 1, 2, 2, 2, 3]
    assert changed == [True, False, False, True, False, False, True]


# -- weights ---------------------------------------------------------------------------------


class Branches(nn.Module):
    """A layer on every position, and one that long sequences alone reach."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.every(x))
        return self.head(torch.tanh(self.some(y)) if x.shape[1] > 1 else y)


@pytest.mark.parametrize("method", ["kfac", "tnt", "diagonal"])
@pytest.mark.parametrize("whole_step", [False, True])
def test_micro_batches_weighted_by_size_are_one_batch(whole_step: bool, method: str) -> None:
    """Rows are weighted as samples are, however many positions a sample has."""
    batches = [randn(1, 3, 3, seed=1), randn(3, 1, 3, seed=2)]
    found = []
    for average in ("local", "global"):
        model = fill(Branches())
        given: dict[str, Any] = {"fisher": "type-2", "loss": "squared-error"}
        given["loss_average"] = average
        with ExitStack() as stack:
            if whole_step:
                statistics = soframe.Statistics(**given)
                own: Any = soframe.Optimizer(model, method=method, lr=0.0, statistics=statistics)
                inner = stack.enter_context(closing(own.preconditioner))
            else:
                of_model = preconditioner(model, method=method, **given)
                own = inner = stack.enter_context(closing(of_model))
            for x in batches:
                outputs = model(x).movedim(-1, 1)
                weight = len(x) / 2 if average == "local" else 1.0
                own.observe(outputs, weight=weight)
                (weight * outputs.square().sum() / len(x)).backward()
            own.step()
            found.append([t for b in inner.blocks for t in b.running.values()])
    for local, whole in zip(*found, strict=True):
        compare(local, whole, "weighted by size")


@pytest.mark.parametrize("fisher", ["type-2", "monte-carlo"])
@pytest.mark.parametrize("to_none", [False, True])
def test_an_empty_batch_behind_one_that_was_left_out(fisher: str, to_none: bool) -> None:
    """The statistics of gradients that were zeroed go, even if nothing comes in their place."""
    model = fill(deep_linear())
    with closing(preconditioner(model, fisher=fisher, loss="squared-error")) as own:
        for samples in (4, 0):
            model.zero_grad(set_to_none=to_none)
            output = model(randn(samples, 3))
            own.observe(output)
            output.square().sum().backward()
        own.step()
        assert not any(block.active for block in own.blocks)


# -- errors ----------------------------------------------------------------------------------


def test_the_empirical_fisher_needs_no_observation_and_ignores_one() -> None:
    """So that a loop need not know which Fisher it has."""
    found = []
    for observes in (False, True):
        model = fill(deep())
        with closing(preconditioner(model)) as own:
            outputs = model(randn(2, 3))
            if observes:
                own.observe(outputs, weight=3.0)
            outputs.square().mean().backward()
            own.step()
            found.append([p.grad.clone() for p in model.parameters()])
    for plain, observed in zip(*found, strict=True):
        assert torch.equal(plain, observed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fisher": "type-2"}, "fisher='type-2' needs a loss"),
        ({"fisher": "monte-carlo"}, "fisher='monte-carlo' needs a loss"),
        ({"fisher": "exact", "loss": "mse"}, "fisher must be one of 'empirical', 'forward-only'"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preconditioner(fill(deep()), **settings)


def test_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, not 0"):
        Fisher("monte-carlo", MeanSquaredError(), samples=0)


def test_an_observation_needs_a_forward_pass_of_a_layer() -> None:
    model = fill(deep())
    with closing(preconditioner(model, fisher="type-2", loss="mse")) as own:
        with torch.no_grad():
            output = model(randn(2, 3))
        with pytest.raises(RuntimeError, match="no registered layer ran with gradients"):
            own.observe(output.requires_grad_())
        output = model(randn(2, 3))
        own.observe(output)
        with pytest.raises(RuntimeError, match="since the last probe"):
            own.observe(output)


def test_a_layer_that_has_just_thawed_is_observed_from_the_next_step_on() -> None:
    """Alone: no layer that has hooks ran with gradients."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    with closing(preconditioner(model, fisher="type-2", loss="mse")) as own:
        for step in range(3):
            model[0].requires_grad_(step > 0)
            model[2].requires_grad_(step == 0)
            model.zero_grad()
            output = model(randn(5, 3))
            own.observe(output)
            output.square().mean().backward()
            raw = [parameter.grad for parameter in model.parameters()]
            raw = [gradient.clone() for gradient in raw if gradient is not None]
            own.step()
            written = [parameter.grad for parameter in model.parameters()]
            written = [gradient for gradient in written if gradient is not None]
            assert len(raw) == len(written) == 2
            is_raw = all(map(torch.equal, raw, written))
            assert is_raw == (step == 1)


def test_a_copied_model_is_not_observed() -> None:
    model = fill(deep())
    with closing(preconditioner(model, fisher="type-2", loss="mse")) as own:
        output = copy.deepcopy(model)(randn(2, 3))
        with pytest.raises(RuntimeError, match="no registered layer"):
            own.observe(output)


@pytest.mark.parametrize("fisher", ["type-2", "monte-carlo"])
def test_scores_of_words_in_the_last_dimension_are_refused(fisher: str) -> None:
    """A cross-entropy would take positions for classes."""
    statistics = soframe.Statistics(fisher=fisher, loss="cross-entropy")
    model = fill(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)))
    tokens = torch.arange(8).view(2, 4) % 5
    own = soframe.Preconditioner(model, statistics=statistics, statistics_every=1)
    with closing(own):
        for is_transposed in (True, False):
            model.zero_grad()
            scores = model(tokens)
            own.observe(scores.transpose(1, 2) if is_transposed else scores)
            nn.functional.cross_entropy(scores.transpose(1, 2), tokens).backward()
            if is_transposed:
                own.step()
            else:
                with pytest.raises(ValueError, match=r"\[2, 4, 5\].*outputs.transpose\(1, 2\)"):
                    own.step()

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(batch)
        return scores, nn.functional.cross_entropy(scores.transpose(1, 2), batch)

    with pytest.raises(ValueError, match=r"pass outputs.transpose\(1, 2\)"):
        soframe.Curvature(model, statistics=statistics).fit([tokens], loss)
