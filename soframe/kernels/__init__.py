"""Second moments of a layer's inputs and output gradients: pure functions of tensors and geometry.

Every function adds into a sum that exists, in its lower triangle. `soframe.kernels.dispatch` says
which of the ways is used for which shape.
"""
