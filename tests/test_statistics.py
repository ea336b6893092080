"""Running factors: what they average, and what a window gathers."""

import copy
import math
from contextlib import ExitStack
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.testing import compare, layer_fisher
from tests import kit
from tests.curvature import closing, factors, fill, half_square, log_cosh, preconditioner, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples

DECAYS = st.one_of(st.just(0.0), st.floats(0, 0.9999), st.sampled_from([0.5, 0.95, 1 - 1e-9]))


def batch(seed: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    return randn(samples, 3, seed=2 * seed), randn(samples, 2, seed=2 * seed + 1)


def one_pass(model: nn.Module, seed: int, samples: int = 4) -> None:
    inputs, targets = batch(seed, samples)
    log_cosh(model(inputs), targets).backward()


def alone(seed: int, scaling: str = "fisher") -> dict[str, Tensor]:
    """The factors of one batch."""
    model = fill(nn.Linear(3, 2))
    with closing(preconditioner(model, scaling=scaling, decay=0.0)) as own:
        one_pass(model, seed)
        own.step()
        return dict(zip("AG", factors(own, "Linear"), strict=True))


@given(decays=st.lists(DECAYS, min_size=1, max_size=5), constant=st.booleans())
@settings(max_examples=examples(25))
@pytest.mark.parametrize("scaling", ["fisher", "kaisa"])
def test_the_running_factors_are_the_weighted_average(
    scaling: str, decays: list[float], constant: bool
) -> None:
    if constant:
        decays = [decays[0]] * len(decays)
    schedule = decays[0] if constant else lambda step: decays[step] if step < len(decays) else 0.5
    batches = [alone(seed, scaling) for seed in range(len(decays))]
    weights = [(1 - d) * prod(decays[t + 1 :]) for t, d in enumerate(decays)]
    start = prod(decays) if scaling == "kaisa" else 0.0
    model = fill(nn.Linear(3, 2))
    with closing(preconditioner(model, decay=schedule, scaling=scaling)) as own:
        for seed in range(len(decays)):
            model.zero_grad()
            one_pass(model, seed)
            own.step()
        for name, running in zip("AG", factors(own, "Linear"), strict=True):
            total = start * torch.eye(running.shape[-1], dtype=torch.float64)
            for weight, factor in zip(weights, batches, strict=True):
                total = total + weight * factor[name]
            # Without the start's identity, the weights are what they add up to: no start-up bias.
            expected = total / (start + sum(weights))
            # A decay near one leaves little of its own precision to 1 - decay.
            rtol = max(1e-10, 1e-15 / (1 - max(decays)))
            compare(running, expected, f"{scaling} {name} after {decays}", rtol=rtol)


def test_running_factors_are_whole_once_somebody_looks() -> None:
    """Statistics add to lower triangles; the others are written when somebody looks."""
    model = fill(nn.Linear(300, 2))  # large enough for a sum of several blocks of columns
    with closing(preconditioner(model, statistics_every=1, solve_every=3)) as own:
        (block,) = own.blocks
        looked = []
        for seed in range(5):
            x, y = randn(4, 300, seed=seed), randn(4, 2, seed=9)
            kit.train(model, lambda net, _: log_cosh(net(x), y), [seed], own)  # noqa: B023
            looked.append(not block.stack.lower)
            whole = block.stack.factors["A"]
            assert looked[-1] == torch.equal(whole, whole.mT)
        assert not any(looked)
        before = {name: factor.clone() for name, factor in block.stack.factors.items()}
        assert not torch.equal(before["A"], before["A"].mT)
        for name, factor in block.running.items():
            assert torch.equal(factor, factor.mT), name
            assert torch.equal(factor.tril(), before[name].tril()), name
        assert not block.stack.lower


def test_one_batch_over_and_over_is_its_own_average() -> None:
    expected = alone(0)
    model = fill(nn.Linear(3, 2))
    with closing(preconditioner(model, decay=0.95)) as own:
        for _ in range(4):
            model.zero_grad()
            one_pass(model, 0)
            own.step()
            for name, running in zip("AG", factors(own, "Linear"), strict=True):
                compare(running, expected[name], name)


class Experts(nn.Module):
    """Two layers, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(fill(nn.Linear(3, 2), seed) for seed in range(2))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.experts[which](x)


def test_a_step_without_a_layer_leaves_its_average() -> None:
    model = Experts()
    with closing(preconditioner(model, decay=0.5)) as own:
        seen = []
        for seed, which in enumerate((0, 1, 0)):
            model.zero_grad()
            inputs, targets = batch(seed)
            log_cosh(model(inputs, which), targets).backward()
            own.step()
            seen.append([{k: f.clone() for k, f in b.running.items()} for b in own.blocks])
        assert seen[0][1] == {}
        assert torch.equal(seen[0][0]["A"], seen[1][0]["A"])
        first, third = alone(0)["A"], alone(2)["A"]
        compare(seen[2][0]["A"], (0.25 * first + 0.5 * third) / 0.75, "A")
        compare(seen[2][1]["A"], alone(1)["A"], "A of the other")


@pytest.mark.filterwarnings("ignore:soframe. some backward passes of this step reached")
@pytest.mark.parametrize("average", ["local", "global"])
@pytest.mark.parametrize("used", [1, 2])
def test_samples_that_do_not_reach_a_layer_count(average: str, used: int) -> None:
    """The Fisher is a mean over all samples, whichever layers they use."""
    model, passes = Experts(), 3
    data = [batch(seed, 1) for seed in range(passes)]
    own = preconditioner(model, loss_average=average)
    with closing(own):
        for number, (inputs, targets) in enumerate(data):
            output = model(inputs, int(number >= used))
            (log_cosh(output, targets) / passes).backward()
        own.step()
        for which, users in enumerate((range(used), range(used, passes))):
            if len(users) > 1:
                continue  # of several samples K-FAC is no longer exact
            name = f"experts.{which}"
            inputs, targets = data[users[0]]
            part = nn.Sequential(model.experts[which])
            (exact,) = layer_fisher(part, "0", inputs, log_cosh, targets, kind="empirical")
            a, g = factors(own, name)
            compare(torch.kron(g[0], a[0]), exact / passes, name)


def test_several_calls_in_one_pass_are_positions() -> None:
    """A layer called twice in one forward pass equals one call on two positions."""
    layer = fill(nn.Linear(3, 2))
    x, start = randn(4, 2, 3), randn(4, 2, 2, seed=1)
    results = []
    for together in (True, False):
        with closing(preconditioner(layer)) as own:
            outputs = layer(x) if together else torch.stack([layer(x[:, t]) for t in (0, 1)], 1)
            outputs.backward(start)
            own.step()
            results.append(factors(own, "Linear"))
    for name, one, other in zip("AG", *results, strict=True):
        compare(other, one, name)


def test_a_pass_through_forward_passes_of_two_windows() -> None:
    """The samples of both count, as in one window."""
    results = []
    for between in (True, False):
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
        with closing(preconditioner(model, decay=0.0)) as own:
            parts = [model(randn(3, 3, seed=1))]
            if between:
                model(randn(4, 3)).sum().backward()
                own.step()
                model.zero_grad()
            parts.append(model(randn(2, 3, seed=2)))
            (torch.cat(parts).square().sum() / 5).backward()
            with pytest.warns(UserWarning, match="mean over 5 terms"):
                own.step()
            results.append(factors(own, "0"))
    for name, one, other in zip("AG", *results, strict=True):
        compare(other, one, name)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (1, 1)], ids=str)
def test_a_pass_through_forward_passes_of_one_sample(sizes: tuple[int, ...]) -> None:
    """A is the mean over the samples of all, whichever came last."""
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    parts = randn(sum(sizes), 3).split(sizes)
    with closing(preconditioner(model)) as own:
        (torch.cat([model(part.clone()) for part in parts]).square().sum() / sum(sizes)).backward()
        with pytest.warns(UserWarning, match=f"mean over {sum(sizes)} terms"):
            own.step()
        rows = torch.cat([torch.cat(parts), torch.ones(sum(sizes), 1).double()], 1)
        compare(factors(own, "0")[0][0], rows.T @ rows / sum(sizes), "A")


def test_a_pass_without_samples_counts_for_the_layers_that_were_not_zeroed() -> None:
    """It is one of three passes that divide the loss, for all but the zeroed layer."""
    results = []
    for zeroes in (True, False):
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
        with closing(preconditioner(model)) as own:
            model(randn(0, 3)).sum().backward()
            one_pass(model, 1)
            if zeroes:
                model[0].zero_grad()
            one_pass(model, 2)
            own.step()
            results.append(factors(own, "2"))
    for name, one, other in zip("AG", *results, strict=True):
        compare(other, one, name)


def test_micro_batches_are_the_batch() -> None:
    results = []
    inputs, targets = batch(0, 6)
    for pieces in (1, 2, 3):
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
        with closing(preconditioner(model)) as own:
            for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                (half_square(model(x), y) / pieces).backward()
            own.step()
            running = [f for name in ("0", "2") for f in factors(own, name)]
            results.append([*running, *(p.grad for p in model.parameters())])
    for pieces, result in zip((2, 3), results[1:], strict=True):
        for one, other in zip(results[0], result, strict=True):
            compare(other, one, f"{pieces} micro-batches")


@pytest.mark.parametrize("as_callable", [True, False])
def test_the_scale_of_the_gradient_is_undone(as_callable: bool) -> None:
    """GradScaler multiplies the loss; the factors are those of the loss itself."""
    scale = 2.0**7
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = fill(nn.Linear(3, 2))
    own = soframe.Preconditioner(
        model,
        kl_clip=None,
        grad_scaler=(lambda: scale) if as_callable else scaler,
        statistics_every=1,
    )
    with closing(own):
        inputs, targets = batch(0)
        scaler.scale(log_cosh(model(inputs), targets)).backward()
        if as_callable:
            for parameter in model.parameters():
                parameter.grad /= scale
        else:
            scaler.unscale_(torch.optim.SGD(model.parameters()))
        own.step()
        expected = alone(0)
        for name, running in zip("AG", factors(own, "Linear"), strict=True):
            compare(running, expected[name], name)


@pytest.mark.parametrize("average", ["local", "global", "sum"])
def test_a_scale_of_the_loss_is_none_of_the_type_2_fishers(average: str) -> None:
    """Its vectors are sent backward as they are; only the loss is multiplied."""
    results = []
    for scale in (1.0, 2.0**7):
        model, (inputs, targets) = fill(nn.Linear(3, 2)), batch(0)
        options = {"fisher": "type-2", "loss": "squared-error", "loss_average": average}
        with closing(preconditioner(model, grad_scaler=lambda s=scale: s, **options)) as own:
            output = model(inputs)
            own.observe(output)
            (scale * half_square(output, targets)).backward()
            for parameter in model.parameters():
                parameter.grad /= scale
            own.step()
            results.append(factors(own, "Linear"))
    for name, one, other in zip("AG", *results, strict=True):
        compare(other, one, name)


def test_a_layer_that_was_not_called_keeps_its_factor_of_inputs() -> None:
    """The samples of its window count, and no row of it does: it has nothing to average."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, inputs: Tensor, *, both: bool) -> Tensor:
            found: Tensor = self.one(inputs)
            return found + self.other(inputs) if both else found

    model = fill(Branches())
    with closing(preconditioner(model, method="foof")) as own:
        kept: list[Tensor] = []
        for seed, both in enumerate((True, False)):
            model.zero_grad()
            inputs, targets = batch(seed)
            log_cosh(model(inputs, both=both), targets).backward()
            own.step()
            kept += [own.blocks[number].running["A"].clone() for number in (0, 1)]
    assert not torch.equal(kept[0], kept[2])
    assert torch.equal(kept[1], kept[3])


class InTurns(nn.Module):
    """Two heads, of which each batch uses one: the second between the turns for statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)


def in_turns(
    rank: int,
    ranks: int,
    strategy: str = "comm-opt",
    resumed: int | None = None,
    wrapped: int | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Train both heads alternately; return the weights, and A of the heads."""

    def made() -> tuple[nn.Module, soframe.Preconditioner]:
        model = fill(InTurns())
        every = {"statistics_every": 2, "solve_every": 4}
        return model, preconditioner(model, strategy=strategy, decay=0.0, **every)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = batch(step)
        return log_cosh(model(inputs[rank::ranks], step % 2), targets[rank::ranks])

    model, own = made()
    for step in range(12):
        if step == resumed:
            saved = model.state_dict(), own.state_dict()
            own.close()
            model, own = made()
            model.load_state_dict(saved[0])
            own.load_state_dict(saved[1])
        if step == wrapped:
            model.heads[0] = nn.Sequential(model.heads[0])  # type: ignore[index]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        kit.train(model, loss, [step], kit.Averaging(model), own, sgd)
    with closing(own):
        known = strategy == "comm-opt" and wrapped is None
        found = [] if not known else [factors(own, f"heads.{n}")[0][0] for n in (0, 1)]
        return [p.detach() for p in model.parameters()], found


def test_a_layer_that_is_used_between_turns_alone_takes_statistics_at_its_next_use() -> None:
    """The first head at steps 0, 2, ... and 10; the second at 3, 7 and 11."""
    weights, found = in_turns(0, 1)
    for number, (step, a) in enumerate(zip((10, 11), found, strict=True)):
        rows = torch.cat([batch(step)[0], torch.ones(4, 1).double()], 1)
        compare(a, rows.T @ rows / 4, f"A of head {number}")
    for step in range(1, 8):
        for one, other in zip(in_turns(0, 1, resumed=step)[0], weights, strict=True):
            assert torch.equal(one, other), f"resumed at step {step}"
    for step in (2, 3):  # when the second head has missed its turn
        for one, other in zip(in_turns(0, 1, wrapped=step)[0], weights, strict=True):
            assert torch.equal(one, other), f"the model was changed at step {step}"


def test_a_layer_whose_statistics_are_dropped_between_turns_takes_them_at_its_next_use() -> None:
    model = fill(InTurns())
    with closing(preconditioner(model, statistics_every=2, solve_every=4, decay=0.0)) as own:
        for step in range(6):
            inputs, targets = batch(step)
            model.zero_grad()
            loss = log_cosh(model(inputs, step % 2), targets)
            (loss * math.nan if step == 3 else loss).backward()
            own.step()
        rows = torch.cat([batch(5)[0], torch.ones(4, 1).double()], 1)
        compare(factors(own, "heads.1")[0][0], rows.T @ rows / 4, "A of the second head")


@pytest.mark.parametrize("method", ["soap", "shampoo"])
def test_so_do_methods_of_gradients_at_the_next_use(method: str) -> None:
    """Heads with the same weights and batches have the same factors, at and between turns."""
    model = fill(InTurns())
    model.heads[1].load_state_dict(model.heads[0].state_dict())
    optimizer = soframe.Optimizer(model, method, lr=0.0, statistics_every=2, solve_every=4)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = batch(step // 2)
        return log_cosh(model(inputs, step % 2), targets)

    kit.train(model, loss, range(12), optimizer)
    saved = optimizer.preconditioner.state_dict()["blocks"]
    optimizer.close()
    for key in ("weight", "bias"):
        first, second = (saved[f"heads.{n}.{key}"]["factors"] for n in (0, 1))
        assert first.keys() == second.keys() == {"L", "R"} or key == "bias"
        for name, factor in first.items():
            compare(second[name], factor, f"{key}: {name}")


def test_a_call_between_turns_is_not_counted_at_a_turn() -> None:
    """In the second step EKFAC's layer alone takes statistics: of the other no input is kept."""

    def running(is_late: bool) -> Tensor:
        model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        settings = {"method": {"^0": "kfac", "": "ekfac"}, "statistics_every": 3, "solve_every": 6}
        outputs: list[Tensor] = []
        with closing(preconditioner(model, **settings)) as own:
            for step in range(4):
                if is_late and step == 3:
                    outputs[1].sum().backward()
                outputs.append(model(randn(5, 3, seed=step)))
                outputs[-1].square().sum(1).mean().backward(retain_graph=True)
                own.step()
            return factors(own, "0")[0]

    compare(running(True), running(False), "A", rtol=0)


@pytest.mark.parametrize("change", ["resumed", "rebuilt"])
def test_a_missed_turn_of_gradients_outlives(change: str) -> None:
    """The second head misses the turns; whenever the run is interrupted, it ends the same."""

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = batch(step)
        return log_cosh(model(inputs, step % 2), targets)

    def train(interrupted: int | None) -> Tensor:
        model = fill(InTurns())
        settings = {"lr": 0.1, "statistics_every": 2, "solve_every": 4}
        own = soframe.Optimizer(model, "soap", **settings)
        for step in range(8):
            if step == interrupted and change == "rebuilt":
                model.heads[0] = nn.Sequential(model.heads[0])  # type: ignore[index]
            elif step == interrupted:
                saved = copy.deepcopy((model.state_dict(), own.state_dict()))
                own.close()
                model = fill(InTurns())
                own = soframe.Optimizer(model, "soap", **settings)
                model.load_state_dict(saved[0])
                own.load_state_dict(saved[1])
            weights = kit.train(model, loss, [step], own)
        own.close()
        return weights

    expected = train(None)
    for step in range(1, 7):
        assert torch.equal(train(step), expected), f"interrupted before step {step}"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_state_does_not_change_with_later_steps(is_loaded: bool) -> None:
    """Of diagonal factors, too, which are saved as they are held; nor once it is loaded."""
    model = fill(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)))
    with ExitStack() as opened:
        own = opened.enter_context(closing(preconditioner(model, layers="all")))

        def step(seed: int) -> None:
            model.zero_grad()
            indices = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])[seed]
            log_cosh(model(indices), batch(seed)[1]).backward()
            own.step()

        step(0)
        state = own.state_dict()
        saved = copy.deepcopy(state["blocks"])
        if is_loaded:
            own.close()
            own = opened.enter_context(closing(preconditioner(model, layers="all")))
            own.load_state_dict(state)
        step(1)
        after = own.state_dict()["blocks"]
        for name, block in saved.items():
            for factor, tensor in block["factors"].items():
                assert torch.equal(state["blocks"][name]["factors"][factor], tensor)
                assert not torch.equal(after[name]["factors"][factor], tensor)


class Borrowed(nn.Module):
    """Uses its layer's weight with or without the layer, whose hooks see the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, *, called: bool) -> Tensor:
        hidden = self.first(x)
        return self.head(hidden) if called else F.linear(hidden, self.head.weight, self.head.bias)


def test_a_weight_that_is_used_without_its_module_at_a_turn_waits_for_no_statistics() -> None:
    model = fill(Borrowed())
    with closing(preconditioner(model, statistics_every=3, solve_every=3)) as own:
        taking = []
        for step in range(10):
            taking.append(own.takes_statistics)
            inputs, targets = batch(step)
            model.zero_grad()
            log_cosh(model(inputs, called=step != 6), targets).backward()
            own.step()
    assert [step for step, takes in enumerate(taking) if takes] == [0, 3, 6, 9]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_ranks_agree_on_layers_that_are_used_between_turns(strategy: str) -> None:
    weights, _ = in_turns(0, 1)
    for own, _ in run_ranks(in_turns, 2, strategy):
        for one, other in zip(own, weights, strict=True):
            compare(one, other, "weights")
