"""Hooks of others on the layers, and calls that are no training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from soframe.layers import LinearHelper
from soframe.testing import compare, layer_fisher
from tests.curvature import closing, factors, fill, half_square, preconditioner, randn
from tests.examples import examples


class Scale(nn.Module):
    """A product with a number, as a module of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def net(*between: nn.Module) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2)))


@given(
    hooks=st.lists(st.tuples(st.sampled_from([0.5, 2.0, 3.0]), st.booleans()), max_size=4),
    built=st.integers(0, 4),
    stepped=st.booleans(),
    root=st.booleans(),
)
@settings(max_examples=examples(25))
def test_the_order_of_hooks_does_not_matter(
    hooks: list[tuple[float, bool]], built: int, stepped: bool, root: bool
) -> None:
    """Hooks that replace an output, before and after soframe's: as if they were a module behind.

    One sample, for which K-FAC is the dense empirical Fisher.
    """
    model, product = net(), 1.0
    x, y = randn(1, 3), randn(1, 2, seed=1)
    for factor, _ in hooks:
        product *= factor
    own = None
    for number in range(len(hooks) + 1):
        if number == min(built, len(hooks)):
            own = preconditioner(model, decay=0.0)
            if stepped:
                half_square(model(x), y).backward()
                own.step()
        if number < len(hooks):
            factor, prepend = hooks[number]

            def hook(module: Any, args: Any, output: Tensor, factor: float = factor) -> Tensor:
                return output * factor

            model[0].register_forward_hook(hook, prepend=prepend)
    assert own is not None
    with closing(own):
        if not root:
            own.reset_batch()  # begins a window, as a step does
        half_square(model(x) if root else model[2](model[1](model[0](x))), y).backward()
        own.step()
        a, g = factors(own, "0")
        exact = layer_fisher(net(Scale(product)), "0", x, half_square, y, kind="empirical")[0]
        compare(torch.kron(g[0], a[0]), exact, "kron(G, A)")


class Attended(nn.Module):
    """Attention, whose products soframe finds in the graph, before a linear layer."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)
        self.is_doubled = double

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.attention(x, x, x)[0]
        return self.last(2 * outputs if self.is_doubled else outputs).mean(1)


class Read(nn.Module):
    """An LSTM before a linear layer."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)
        self.is_doubled = double

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.lstm(x)[0]
        return self.last(2 * outputs if self.is_doubled else outputs).mean(1)


@pytest.mark.parametrize("kind", [Attended, Read])
def test_a_global_hook_may_change_what_a_module_returns(kind: type[nn.Module]) -> None:
    """As if the product with two were in the model, for modules that return tuples."""

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.MultiheadAttention | nn.LSTM):
            return (2 * output[0], *output[1:])
        return None

    found = []
    for is_in_the_model in (True, False):
        model, other = fill(kind(is_in_the_model)), fill(kind(True))
        with closing(preconditioner(model)) as own, closing(preconditioner(other)):
            handle = None if is_in_the_model else register_module_forward_hook(double)
            half_square(model(randn(5, 3, 4)), randn(5, 2, seed=1)).backward()
            if handle is not None:
                handle.remove()
            own.step()
            matrices = [f for block in own.blocks for f in factors(own, block.name)]
            found.append(matrices + [p.grad for p in model.parameters()])
    assert len(found[0]) == len(found[1])
    for one, another in zip(*found, strict=True):
        compare(one, another, "factor or gradient")


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tnt"])
def test_a_global_hook_that_scales_linear_layers_is_a_module_behind_them(method: str) -> None:
    """In every step, and in every second one."""

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return 2 * output if isinstance(module, nn.Linear) else None

    for every in (1, 2):
        hooked = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        scale = Scale(2.0)
        plain = fill(nn.Sequential(nn.Linear(3, 4), scale, nn.Tanh(), nn.Linear(4, 2), scale))
        with (
            closing(preconditioner(hooked, method=method, solve_every=2)) as own,
            closing(preconditioner(plain, method=method, solve_every=2)) as wanted,
        ):
            for step in range(3):
                x, y = randn(5, 3, seed=step), randn(5, 2, seed=9 + step)
                scale.factor = 2.0 if step % every == 0 else 1.0
                handle = register_module_forward_hook(double) if step % every == 0 else None
                hooked.zero_grad()
                half_square(hooked(x), y).backward()
                if handle is not None:
                    handle.remove()
                plain.zero_grad()
                half_square(plain(x), y).backward()
                own.step()
                wanted.step()
                for one, other in zip(hooked.parameters(), plain.parameters(), strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    compare(one.grad, other.grad, f"every {every}, step {step}")


def test_statistics_are_due_at_the_first_step_that_can_have_them() -> None:
    """Built between a backward pass and its step, beside a method that needs no statistics."""
    model, x = fill(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))), randn(4, 3)
    model(x).square().mean().backward()
    own = preconditioner(model, auxiliary="adamw", statistics_every=10, solve_every=10)
    with closing(own):
        with pytest.warns(UserWarning, match="gradients without statistics"):
            own.step()
        seen = []
        for _ in range(3):
            seen.append(own.takes_statistics)
            model.zero_grad()
            model(x).square().mean().backward()
            raw = [p.grad.clone() for p in model.parameters()]
            own.step()
            assert own.updated
            changed = [
                not torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True)
            ]
            assert all(changed)
        assert seen == [True, False, False]


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_trace_contains_nothing_of_ours(differentiated: bool) -> None:
    """`torch.jit.trace`, with which TensorBoard's add_graph draws a model, checks its graph."""
    found = []
    for traced in (True, False):
        model, x = net(), randn(4, 3)
        with closing(preconditioner(model)) as own:
            if traced:
                graph = torch.jit.trace(model, x)
                if differentiated:
                    graph(x).sum().backward()
                    model.zero_grad()
            half_square(model(x), randn(4, 2, seed=1)).backward()
            own.step()
            found.append([f.clone() for name in "02" for f in factors(own, name)])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


def test_scripted_layers_are_rows_of_the_report() -> None:
    model, x = net(), randn(4, 3)
    model[0] = torch.jit.script(model[0])
    with closing(preconditioner(model, auxiliary="adamw")) as own:
        half_square(model(x), randn(4, 2, seed=1)).backward()
        own.step()
        rows = {row.parameter: row for row in own.report()}
        assert "TorchScript runs it; a method that reads gradients" in rows["0.weight"].note
        assert rows["0.weight"].method.startswith("adamw")
        assert rows["2.weight"].method.startswith("kfac")


def test_an_error_in_a_helper_names_the_layer() -> None:
    class Broken(LinearHelper):
        def output_rows(self, grad_output: Tensor) -> Tensor:
            return grad_output @ torch.ones(7, 1)

    model = net()
    with closing(preconditioner(model, layers={"^2$": Broken})), pytest.raises(RuntimeError) as e:
        model(randn(4, 3)).sum().backward()
    assert e.value.__notes__ == ["soframe: in the statistics of '2'"]


def test_a_weight_that_a_function_uses_is_left_alone() -> None:
    """Its gradient stays, with a warning and a row of the report, while others have statistics."""

    class ByFunction(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](nn.functional.linear(x, self[0].weight))

    model = fill(ByFunction(nn.Linear(3, 4, bias=False), nn.Linear(4, 2)))
    with closing(preconditioner(model)) as own:
        model(randn(4, 3)).square().sum().backward()
        raw = model[0].weight.grad.clone()
        with pytest.warns(UserWarning, match="gradients without statistics.*'0'"):
            own.step()
        assert torch.equal(model[0].weight.grad, raw)
        notes = {row.parameter: row.note for row in own.report()}
        assert "its modules were not called in training" in notes["0.weight"]
