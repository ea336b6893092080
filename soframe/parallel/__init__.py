"""Where gradients live under fully_shard, tensor parallelism and DeepSpeed; and pipelines.

An extension of the core: it imports the core, and `soframe.blocks.sharding` imports a file of it
once a model has what it serves.
"""
