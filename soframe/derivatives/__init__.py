"""Derivatives of a model's outputs along directions of its parameters.

The quadratic model of the trust region needs ``J v`` for three to six directions v a step. There
are two ways, from one forward pass:

* The *tape* (`soframe.derivatives.tape`) notes the functions of torch that the pass calls, and
  takes all tangents forward through them, if it has a rule for each.
* The *twin* (`soframe.derivatives.twice`) differentiates the gradient. It takes any function whose
  gradient can be differentiated, and is what runs wherever there is a function without a rule, a
  result that is written into, or autocast; and with ``reuse_activations=False``.

FIGURES

Everything is computed before parameters move: both need the pass as it was.
"""
