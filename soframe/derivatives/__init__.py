"""Derivatives of a model's outputs along directions of its parameters.

The quadratic model of the trust region needs ``J v`` for three to six directions v a step. There
are two ways, from one forward pass:

* The *tape* (`soframe.derivatives.tape`) notes the functions of torch that the pass calls, and
  takes all tangents forward through them, if it has a rule for each.
* The *twin* (`soframe.derivatives.twice`) differentiates the gradient. It takes any function whose
  gradient can be differentiated, and is what runs wherever there is a function without a rule, a
  result that is written into, or autocast; and with ``reuse_activations=False``.

The tape pays for its lines. For forward, backward and curvature along 3 and 6 directions the twin
takes so many times as long (`benchmarks/derivatives.py`, one thread):

==============================  ====  ====
net                                3     6
==============================  ====  ====
CURVES                          1.50  1.48
digits autoencoder              1.35  1.31
digits CNN                      2.22  2.44
byte GPT                        1.35  1.18
net with batch and layer norm   2.21  2.69
==============================  ====  ====

Everything is computed before parameters move: both need the pass as it was.
"""
