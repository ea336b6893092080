"""Fused projections of known modules: the sizes of their row blocks.

A guess would glue what belongs apart, so a module is known by its class, with the forward pass of
that class, and the sizes follow from its own attributes. Layouts that interleave the heads
(``query_key_value`` of GPT-NeoX, Falcon, BLOOM and Persimmon) have no such blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from torch import nn


def _splits(module: Any, out: int) -> list[int]:
    """GPT-2: queries, keys and values, or in cross-attention keys and values."""
    return list(repeat(module.split_size, out // module.split_size))


def _grouped(module: Any, out: int) -> list[int]:
    """Grouped-query attention: queries of all heads, keys and values of fewer."""
    keys = module.num_key_value_heads * module.head_dim
    return [out - 2 * keys, keys, keys]


_HF = "transformers.models."
_FUSED: dict[str, tuple[str, int | Callable[[Any, int], list[int]]]] = {
    "torch.nn.modules.activation.MultiheadAttention": ("in_proj_weight", 3),
    f"{_HF}gpt2.modeling_gpt2.GPT2Attention": ("c_attn", _splits),
    f"{_HF}openai.modeling_openai.Attention": ("c_attn", _splits),
    f"{_HF}phi3.modeling_phi3.Phi3Attention": ("qkv_proj", _grouped),
    f"{_HF}dbrx.modeling_dbrx.DbrxAttention": ("Wqkv", _grouped),
    f"{_HF}mpt.modeling_mpt.MptAttention": ("Wqkv", 3),
    f"{_HF}modernbert.modeling_modernbert.ModernBertAttention": ("Wqkv", 3),
    f"{_HF}qwen2_vl.modeling_qwen2_vl.VisionAttention": ("qkv", 3),
    f"{_HF}qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention": ("qkv", 3),
    f"{_HF}phi3.modeling_phi3.Phi3MLP": ("gate_up_proj", 2),
    f"{_HF}glm.modeling_glm.GlmMLP": ("gate_up_proj", 2),
    f"{_HF}glm4.modeling_glm4.Glm4MLP": ("gate_up_proj", 2),
    "timm.layers.attention.Attention": ("qkv", 3),
    "timm.models.swin_transformer.WindowAttention": ("qkv", 3),
    "timm.models.beit.Attention": ("qkv", 3),
    "timm.models.eva.EvaAttention": ("qkv", 3),
}
"""Qualified class -> the name of its fused module or parameter; how many equal parts, or sizes."""


def fused_sizes(module: nn.Module, name: str, out: int) -> list[int] | None:
    """Return the sizes of the row blocks of ``name`` in a module; None if it is not known."""
    for base in type(module).__mro__:
        child, parts = _FUSED.get(f"{base.__module__}.{base.__qualname__}", (None, 1))
        if child != name or type(module).forward is not base.forward:  # type: ignore[attr-defined]
            continue
        sizes = parts(module, out) if callable(parts) else list(repeat(out // parts, parts))
        if sum(sizes) == out and min(sizes) > 0:
            return sizes
        break
    return None
