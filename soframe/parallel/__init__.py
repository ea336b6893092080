"""Gradient storage under fully_shard, tensor parallelism and DeepSpeed; and pipelines.

An extension of the core: it imports the core, and `soframe.blocks.sharding` imports a file of it
when a model needs it.
"""
