"""Integrations with trainers, one file each; each imports its library, so none is imported here.

==========================================  ======================================================
`soframe.integrations.transformers`         a callback of the Hugging Face ``Trainer``
`soframe.integrations.accelerate`           steps at Accelerate's boundaries of accumulation
`soframe.integrations.lightning`            a callback of Lightning's ``Trainer``
`soframe.integrations.deepspeed`            a step before the step of a DeepSpeed engine
`soframe.integrations.kfac_pytorch`         settings and checkpoints of kfac-pytorch
==========================================  ======================================================
"""
