"""Other people's training loops, one file each; each imports its library, so none is imported here.

==========================================  ======================================================
`soframe.integrations.transformers`         a callback of the Hugging Face ``Trainer``
`soframe.integrations.accelerate`           a step that asks Accelerate whether there is one
`soframe.integrations.lightning`            a callback of Lightning's ``Trainer``
`soframe.integrations.deepspeed`            a step before that of a DeepSpeed engine
`soframe.integrations.kfac_pytorch`         settings and checkpoints of kfac-pytorch
==========================================  ======================================================
"""
