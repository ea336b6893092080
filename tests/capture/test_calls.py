"""One forward and one backward: every way in which a layer may be called."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from soframe.testing import compare, layer_fisher
from tests.capture.kit import (
    LAYERS,
    SAMPLES,
    WORLDS,
    Case,
    Recorder,
    TwoLayers,
    check,
    images,
    no_sync,
    precondition,
    sequences,
    snapshot,
    softplus,
    vectors,
)


class Recurrent(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.first(x).tanh()
        return self.last(x) + self.last(-x)


class Nested(TwoLayers):
    """A module within a module that is called twice, once with fewer positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(self.first, nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).mean(1) + self.inner(x[:, 0]))


class FewerLater(TwoLayers):
    """The call that backward meets first has all samples, an earlier one only some."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        hidden = torch.cat([self.first(x[chosen]), x[~chosen]])
        return self.last(self.first(hidden).tanh())


class Detached(TwoLayers):
    """One call never reaches the loss, another only in part."""

    def forward(self, x: Tensor) -> Tensor:
        self.first(x * 5)
        return self.last(self.first(x).tanh() + self.first(x + 1).detach())


class ByKeyword(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=self.first(input=x).tanh())


class InPlace(TwoLayers):
    """Activations that overwrite what the layers returned."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu_(self.first(x))
        hidden = self.last(hidden)
        hidden.mul_(2.0)
        hidden[:, 0] = 0.0
        hidden[:, 1:].tanh_()
        return hidden


class OutOfPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = 2 * self.last(F.relu(self.first(x)))
        return torch.stack([torch.zeros_like(hidden[:, 0]), hidden[:, 1].tanh()], 1)


class ThroughView(TwoLayers):
    """A view of the output is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.view(-1).relu_()
        return self.last(hidden)


class OutOfView(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


class Strided(TwoLayers):
    """Inputs and output gradients that are not contiguous, or have stride 0."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat_interleave(2, dim=-1)[..., ::2]
        turned = self.first(wide.mT.contiguous().mT)
        return self.last(turned).mT + self.last(turned[:, :1].expand(turned.shape)).mT


class Turned(nn.Module):
    """Convolution and linear layers, the latter on a permuted view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, (2, 1), stride=(1, 2), padding=(1, 0))
        self.second = nn.Conv2d(3, 2, 1, bias=False)
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).permute(0, 2, 3, 1))


class ChannelsLast(Turned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


class InPlaceConvolution(Turned):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.tanh(self.first(x))).permute(0, 2, 3, 1))


class WithUnused(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class NoGradient(torch.autograd.Function):
    """The sum of two tensors, one of which gets None for its gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class WithoutGradient(TwoLayers):
    """A call whose output's gradient is None."""

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.last(self.first(x).tanh()), self.last(x))


class Cut(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) + self.last(x).detach()


class Halved(TwoLayers):
    """Some of the samples go through the first layer, as in a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return self.last(torch.cat([self.first(x[chosen]), x[~chosen]]).tanh())


class Empty(TwoLayers):
    """A call with an empty batch adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.first(x), self.first(x[:0])]).tanh())


class Regularised(nn.Module):
    """Dropout and batch norm, which in eval mode treat samples one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout()
        self.last = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x))).flatten(1))


class Encoder(nn.Sequential):
    """Has a fast path for inference that calls none of its layers."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))


def evaluate(model: nn.Module) -> None:
    model.eval()


def evaluate_norm(model: nn.Module) -> None:
    model.train()
    model.norm.eval()
    model.drop.p = 0.0


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def scale_by_hooks(model: nn.Module) -> None:
    """Hooks of others, here before the preconditioner's: they change what goes in and out."""
    model.first.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    model.first.register_forward_hook(lambda module, args, output: output * 2 + args[0])


GLOBAL_HOOKS: list[RemovableHandle] = []  # of the pass under way


def scale_globally(model: nn.Module, step: int, always_call: bool = False) -> None:
    """A hook of every module in torch, in the second of three steps: torch calls it first."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return output * 2 + output.square() if isinstance(module, LAYERS) else None

    if step == 1:
        GLOBAL_HOOKS.append(register_module_forward_hook(hook, always_call=always_call))


def scale_globally_in_pairs(model: nn.Module, step: int) -> None:
    """Two of them in each of the later steps, of which one is kept by torch for errors too."""
    for always_call in (True, False):
        scale_globally(model, min(step, 1), always_call=always_call)


def unscale(model: nn.Module, step: int) -> None:
    while GLOBAL_HOOKS:
        GLOBAL_HOOKS.pop().remove()


def in_micro_batches(model: nn.Module, x: Tensor, step: int) -> None:
    """Two backward passes, of which the second alone averages gradients."""
    first, second = x.chunk(2)
    with no_sync(model):
        (softplus(model(first)) / 2).backward()
    (softplus(model(second)) / 2).backward()


class Switched(TwoLayers):
    """Calls the first layer only if a sample is meant for it."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        if not chosen.any():
            return self.last(x.tanh())
        return self.last(torch.cat([self.first(x[chosen]), x[~chosen]]).tanh())


def switched(step: int) -> Tensor:
    """Two samples that use the first layer, and two that do not."""
    x = vectors(step)
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    return x


def own_samples() -> int:
    """The samples of this process's part of a batch."""
    return SAMPLES // (dist.get_world_size() if dist.is_initialized() else 1)


UNUSED = {"ddp": {"find_unused_parameters": True}}
CASES = {
    "one call each": Case(TwoLayers),
    "a sequence": Case(TwoLayers, data=sequences),
    "several calls": Case(Recurrent),
    "several calls, static graph": Case(Recurrent, ddp={"static_graph": True}),
    "calls of a submodule, sharing another name": Case(Nested, data=sequences),
    "calls with fewer samples": Case(FewerLater),
    "calls that do not reach the loss": Case(Detached),
    "by keyword": Case(ByKeyword),
    "in-place activations": Case(InPlace, OutOfPlace),
    "in-place through a view": Case(ThroughView, OutOfView),
    "non-contiguous": Case(Strided, data=sequences),
    "convolutions": Case(Turned, data=images),
    "channels_last inputs": Case(ChannelsLast, Turned, data=images),
    "channels_last model": Case(ChannelsLast, Turned, data=images, prepare=to_channels_last),
    "in-place after a convolution": Case(InPlaceConvolution, Turned, data=images),
    "an unused module": Case(WithUnused, **UNUSED),
    "a gradient that is None": Case(WithoutGradient, Cut),
    "some of the samples": Case(Halved, options={"samples": own_samples}),
    "some processes": Case(Switched, data=switched, options={"samples": own_samples}, **UNUSED),
    "an empty batch": Case(Empty),
    "eval mode": Case(Regularised, data=images, prepare=evaluate),
    "eval mode in part": Case(Regularised, data=images, prepare=evaluate_norm),
    "transformer in eval mode": Case(
        Encoder, data=sequences, prepare=evaluate, raw=("0.layers.0.self_attn.out_proj",)
    ),
    "hooks of others": Case(TwoLayers, prepare=scale_by_hooks),
    "global hooks": Case(TwoLayers, begin=scale_globally, change=unscale),
    "global hooks, convolutions": Case(Turned, data=images, begin=scale_globally, change=unscale),
    "global hooks, several calls": Case(
        Recurrent, begin=scale_globally_in_pairs, change=unscale, prepare=scale_by_hooks
    ),
    "global hooks, micro-batches": Case(
        Nested,
        data=sequences,
        train=in_micro_batches,
        begin=scale_globally_in_pairs,
        change=unscale,
    ),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_call(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


@pytest.mark.distributed
def test_used_on_one_process_only() -> None:
    """No declaration is needed: each process knows its own samples."""
    check(Case(Switched, data=switched, **UNUSED), 2)


def test_reference_and_factors_are_the_fisher_of_one_datum() -> None:
    """Where K-FAC is exact both equal autograd's own Fisher, with no free constant."""
    case = CASES["one call each"]
    model, twin, x = case.build(), case.twin(), case.data(0)[:1]
    recorder, preconditioner = Recorder(twin), precondition(model)
    for each in (model, twin):
        softplus(each(x)).backward()
    recorder.step(1)
    preconditioner.step()
    factors = snapshot(model, preconditioner)
    for layer, reference in recorder.factors().items():
        (exact,) = layer_fisher(case.build(), layer, x, softplus)
        compare(torch.kron(reference["G"], reference["A"]), exact, f"reference of {layer}")
        compare(torch.kron(factors["G"][layer], factors["A"][layer]), exact, f"factors of {layer}")
