"""Recipes: whole training runs of published models, each one short file.

    python -m experiments.recipes pinn                      # one process
    python -m experiments.recipes resnet32 --processes 2    # local processes, over Gloo
    torchrun --nproc-per-node 8 -m experiments.recipes resnet50 --data imagenet

A recipe is a module with one class and three functions:

- ``Settings``, a frozen dataclass on top of `experiments.recipes.common.Common`;
- ``model(settings)``, the model, on the CPU, initialised by torch's default generator;
- ``data(settings)``, the training set and the test set: datasets whose items are tuples of tensors,
  or an `experiments.recipes.loaders.Stream` for training data that is read in order. Items may draw
  from torch's default generator: it is seeded for each item.
- ``loss(model, *batch)``, the mean loss of a batch, a scalar.

It may also have:

- ``optimizer(model, settings, **more)``, an optimizer, and a preconditioner or None, instead of
  `experiments.recipes.common.optimizer`; ``more`` are settings of soframe's, such as the scaler;
- ``metrics(model, *batch)``, further means over a batch by name, and ``summary(means)``, figures
  that are computed from the means over the test set;
- ``run(settings)``, its own training loop, instead of `experiments.recipes.loop`;
- ``terms(*batch)``, the number or the mask of the loss's terms, for `soframe.Preconditioner.count`.

`experiments.recipes.loop.run` trains any such module.
"""

NAMES = (
    *("resnet32", "resnet50", "bert_large", "gpt2", "vit", "lora"),
    *("pinn", "unet", "detector", "bert_bytes"),
)
"""The recipes."""
