"""Second moments of a layer's inputs and output gradients: pure functions of tensors and geometry.

All add to the lower triangle of a sum; `soframe.kernels.dispatch` chooses the path of a shape.
"""
