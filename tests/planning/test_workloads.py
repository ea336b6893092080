"""Published models on the meta device: counts of parameters, forwards, and blocks."""

from __future__ import annotations

import pytest
import torch

from soframe.planning.workloads import WORKLOADS

# Of the authors' checkpoints or torchvision's; tied heads count once, BERT has both heads.
PUBLISHED = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
}
OF_EACH_KIND = ("resnet50", "bert-large", "gpt2", "llama-8b")
"""The others are longer and wider."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    model = WORKLOADS[name].model()
    assert all(one.is_meta for one in model.parameters())
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]


LENGTHS = {
    "bert-large": 512,
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 1024),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_sequences_have_the_published_length(name: str) -> None:
    for tensor in WORKLOADS[name].inputs(2):
        assert tensor.shape == (2, LENGTHS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OF_EACH_KIND else pytest.mark.thorough)
        for name in WORKLOADS
    ],
)
def test_models_take_their_inputs(name: str) -> None:
    workload = WORKLOADS[name]
    with torch.no_grad():
        out = workload.model()(*workload.inputs(workload.batch))
    first = out if isinstance(out, torch.Tensor) else out[0]
    assert first.is_meta
    assert len(first) == workload.batch


def test_heads_of_gpt_and_bert_are_the_embeddings() -> None:
    for name in ("gpt2", "bert-large"):
        model = WORKLOADS[name].model()
        assert model.head.weight is model.tokens.weight
