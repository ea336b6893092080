"""Layer helpers: how a module's inputs, output gradients and parameters become matrices.

Linear layers and two-dimensional convolutions are used by default, the others with ``layers="all"``
or by class.
"""

from soframe.layers.attention import AttentionHelper
from soframe.layers.base import BlockShape, InnerCall, LayerHelper
from soframe.layers.conv import (
    Conv1dHelper,
    Conv2dHelper,
    Conv3dHelper,
    ConvTranspose1dHelper,
    ConvTranspose2dHelper,
    ConvTranspose3dHelper,
)
from soframe.layers.embedding import EmbeddingBagHelper, EmbeddingHelper
from soframe.layers.experts import ExpertsHelper
from soframe.layers.layout import Layout
from soframe.layers.linear import LinearHelper, TransposedLinearHelper
from soframe.layers.norms import (
    BatchNormHelper,
    GroupNormHelper,
    InstanceNormHelper,
    LanguageModelRMSNormHelper,
    LayerNormHelper,
    NormHelper,
    RMSNormHelper,
)
from soframe.layers.recurrent import RecurrentCellHelper

__all__ = [
    "AttentionHelper",
    "BatchNormHelper",
    "BlockShape",
    "Conv1dHelper",
    "Conv2dHelper",
    "Conv3dHelper",
    "ConvTranspose1dHelper",
    "ConvTranspose2dHelper",
    "ConvTranspose3dHelper",
    "EmbeddingBagHelper",
    "EmbeddingHelper",
    "ExpertsHelper",
    "GroupNormHelper",
    "InnerCall",
    "InstanceNormHelper",
    "LanguageModelRMSNormHelper",
    "LayerHelper",
    "LayerNormHelper",
    "Layout",
    "LinearHelper",
    "NormHelper",
    "RMSNormHelper",
    "RecurrentCellHelper",
    "TransposedLinearHelper",
]
