"""Layer helpers: how a module's inputs, output gradients and parameters become matrices."""

from soframe.layers.base import BlockShape, LayerHelper
from soframe.layers.conv import Conv2dHelper
from soframe.layers.linear import LinearHelper

__all__ = ["BlockShape", "Conv2dHelper", "LayerHelper", "LinearHelper"]
