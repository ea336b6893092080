"""Uses of autograd beyond one ``loss.backward()``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from soframe.testing import compare, dense_preconditioned
from tests.capture.kit import (
    DAMPING,
    WORLDS,
    Case,
    Recorder,
    TwoLayers,
    actual,
    average_gradients,
    check,
    no_sync,
    precondition,
    snapshot,
    softplus,
    vectors,
)
from tests.distributed.harness import run_ranks


def penalised(model: nn.Module, x: Tensor, step: int) -> None:
    """Loss plus gradient penalty: mean over samples of the squared gradient of their output."""
    x = x.clone().requires_grad_()
    with no_sync(model):
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (softplus(output) + gradient.pow(2).sum(1).mean()).backward()
    average_gradients(model)


def probed(model: nn.Module, x: Tensor, step: int) -> None:
    """A Hessian-vector product before the backward, through the same graph."""
    with no_sync(model):
        loss = softplus(model(x))
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        slope = sum((g**2).sum() for g in gradients)
        torch.autograd.grad(slope, parameters, retain_graph=True)
        loss.backward()
    average_gradients(model)


def with_graph(model: nn.Module, x: Tensor, step: int) -> None:
    with no_sync(model):
        loss = softplus(model(x))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss.backward(inputs=list(model.parameters()))
    assert all(g.requires_grad for g in gradients)
    average_gradients(model)


class TwoHeads(nn.Module):
    """Two losses of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        trunk = self.trunk(x).tanh()
        return tuple(head(trunk) for head in self.heads)


CASES = {
    "probed by autograd.grad": Case(TwoLayers, train=probed),
    "gradients of the same graph": Case(TwoLayers, train=with_graph),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_autograd(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


@pytest.mark.parametrize("world_size", WORLDS)
def test_gradient_penalty(world_size: int) -> None:
    """G holds the whole gradient of each output, the penalty's part included."""
    case = Case(TwoLayers, train=penalised)
    ranks = run_ranks(actual, 2, case) if world_size == 2 else [actual(0, 1, case)]
    twin = case.twin()
    recorder = Recorder(twin)
    penalised(twin, case.data(0), 0)
    recorder.step(len(case.data(0)))
    for steps in ranks:
        for layer, factors in recorder.factors().items():
            for kind, factor in factors.items():
                compare(steps[0][kind][layer], factor, f"{kind} of {layer}")
        for name, parameter in twin.named_parameters():
            compare(steps[0]["gradients"][name], parameter.grad, name)


@pytest.mark.parametrize("left_out", ["weight", "bias"])
def test_parameter_without_gradient(left_out: str) -> None:
    """Where one parameter has no gradient, it counts as zero and stays None."""
    case = Case(TwoLayers)
    whole, model = case.build(), case.build()
    reference, preconditioner = precondition(whole), precondition(model)
    softplus(whole(vectors(0))).backward()
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters()}
    reference.step()
    inputs = [p for name, p in model.named_parameters() if not name.endswith(left_out)]
    softplus(model(vectors(0))).backward(inputs=inputs)
    preconditioner.step()
    got, want = snapshot(model, preconditioner), snapshot(whole, reference)
    for layer in ("first", "last"):
        for kind in "AG":
            compare(got[kind][layer], want[kind][layer], f"{kind} of {layer}")
        weight, bias = gradients[f"{layer}.weight"], gradients[f"{layer}.bias"]
        parts = [weight * (left_out != "weight"), bias[:, None] * (left_out != "bias")]
        fisher = torch.kron(want["G"][layer], want["A"][layer])
        result = dense_preconditioned(fisher, torch.cat(parts, 1), DAMPING)
        other = model.get_submodule(layer)
        assert getattr(other, left_out).grad is None
        if left_out == "bias":
            compare(other.weight.grad, result[:, :-1], layer)
        else:
            compare(other.bias.grad, result[:, -1], layer)


def test_gradients_all_none() -> None:
    """A step without any backward changes nothing, and the next one is the first."""
    model = Case(TwoLayers).build()
    preconditioner = precondition(model)
    preconditioner.step()
    assert all(p.grad is None for p in model.parameters())
    assert not any(block.running for block in preconditioner.blocks)
    softplus(model(vectors(0))).backward()
    preconditioner.step()
    got = snapshot(model, preconditioner)
    want = actual(0, 1, Case(TwoLayers))[0]
    for kind in want:
        for name, tensor in want[kind].items():
            assert torch.equal(got[kind][name], tensor)


def test_gradient_set_to_none_after_backward() -> None:
    """One layer's gradients are dropped by hand: the other layer is preconditioned as ever."""
    model = Case(TwoLayers).build()
    preconditioner = precondition(model)
    softplus(model(vectors(0))).backward()
    model.first.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match="statistics without gradients.*'first'"):
        preconditioner.step()
    want = actual(0, 1, Case(TwoLayers))[0]["gradients"]
    assert model.first.weight.grad is None
    assert model.first.bias.grad is None
    assert torch.equal(model.last.weight.grad, want["last.weight"])
    assert torch.equal(model.last.bias.grad, want["last.bias"])


def _two_losses(rank: int, world_size: int) -> str:
    model = Case(TwoHeads).build()
    preconditioner = precondition(model)
    before = model.trunk.weight.detach().clone()
    first, second = map(softplus, model(vectors(rank)))
    first.backward(retain_graph=True)
    # One rank alone is enough for all of them to hear of it.
    if rank == 0:
        second.backward()
    gradient = model.trunk.weight.grad.clone()
    with pytest.raises(RuntimeError, match="add the losses up, and call backward") as raised:
        preconditioner.step()
    assert torch.equal(model.trunk.weight.grad, gradient)
    assert torch.equal(model.trunk.weight, before)
    preconditioner.close()
    return str(raised.value)


@pytest.mark.parametrize("world_size", WORLDS)
def test_losses_that_go_backward_through_one_call_are_refused(world_size: int) -> None:
    """Each would count as samples of its own, with a factor of the outputs that is too large."""
    said = run_ranks(_two_losses, 2) if world_size == 2 else [_two_losses(0, 1)]
    assert all("same call of 'trunk'" in text for text in said)


def test_losses_of_several_calls_may_go_backward_one_by_one() -> None:
    """The remedy where a sum will not do; and what was given up is no earlier loss."""
    model = Case(TwoHeads).build()
    preconditioner = precondition(model)
    first, second = map(softplus, model(vectors(0)))
    first.backward(retain_graph=True)
    model.zero_grad()  # its gradient was only looked at
    preconditioner.reset_batch()
    second.backward()
    preconditioner.step()
    model.zero_grad()
    for number in range(2):
        (softplus(model(vectors(number))[number]) / 2).backward()
    preconditioner.step()


class Apart(nn.Module):
    """Two parts, each with a loss of its own, and one that is called in either."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.shared = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.shared(hidden), self.shared(self.second(hidden.detach()).tanh())


@pytest.mark.parametrize("average", ["local", "global"])
def test_losses_of_one_forward_pass_are_of_the_same_samples(average: str) -> None:
    """Whether they go backward together or, where no call is common to them, one by one."""
    found = []
    for together in (True, False):
        model = Case(Apart).build()
        preconditioner = precondition(model, loss_average=average)
        for number in range(2):
            losses = [softplus(output) / 2 for output in model(vectors(number))]
            if together:
                losses = [losses[0] + losses[1]]
            for loss in losses:
                loss.backward()
        preconditioner.step()
        found.append(snapshot(model, preconditioner))
    for kind, tensors in found[0].items():
        for name, tensor in tensors.items():
            compare(found[1][kind][name], tensor, f"{kind} of {name}")


def test_a_loss_of_the_window_before_is_no_earlier_one() -> None:
    """Its gradients were preconditioned, and its graph is differentiated once more."""
    model = Case(TwoHeads).build()
    preconditioner = precondition(model)
    first, second = map(softplus, model(vectors(0)))
    first.backward(retain_graph=True)
    preconditioner.step()
    model.zero_grad()
    (softplus(model(vectors(1))[1]) / 2).backward()  # the first pass of this window, as that was
    (second / 2).backward()
    preconditioner.step()


def test_inputs_alone_bear_several_losses() -> None:
    """A method that reads inputs alone has them twice, which changes no mean."""
    found = []
    for together in (True, False):
        model = Case(TwoHeads).build()
        preconditioner = precondition(model, method="foof")
        first, second = map(softplus, model(vectors(0)))
        if together:
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()
        preconditioner.step()
        found.append(model.trunk.weight.grad)
    compare(found[0], found[1], "the gradient of the trunk")


def test_directional_derivatives_in_forward_mode_add_nothing() -> None:
    """Inputs with tangents give the model's own derivative, and the statistics of the loss."""
    case = Case(TwoLayers)
    whole, model = case.build(), case.build()
    reference, preconditioner = precondition(whole), precondition(model)
    x, direction = vectors(0), vectors(1)
    softplus(whole(x)).backward()
    wanted = torch.autograd.functional.jvp(whole, x, direction)[1]
    reference.step()
    with torch.autograd.forward_ad.dual_level():
        outputs = model(torch.autograd.forward_ad.make_dual(x, direction))
        value, derivative = torch.autograd.forward_ad.unpack_dual(outputs)
        softplus(value).backward()
    preconditioner.step()
    assert derivative is not None
    compare(derivative, wanted, "derivative")
    got, want = snapshot(model, preconditioner), snapshot(whole, reference)
    for layer in ("first", "last"):
        for kind in "AG":
            compare(got[kind][layer], want[kind][layer], f"{kind} of {layer}")
