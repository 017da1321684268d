"""Checkpoints on disk as a source of canonical weights.

    checkpoint = open_checkpoint("/models/qwen3-30b-a3b-gptq")
    checkpoint.layers, checkpoint.info(3).w13.name, checkpoint.load(3, experts=[0, 1])

errors.py     the one error                  files.py, tensors.py   what is read from disk, and how it is checked
families.py   the table of families          names.py               tensor names -> layers, experts, projections
formats.py    the table of formats           readers/               one module for each kind of storage
units.py      one projection of one expert   recipe.py              what a layer will be, by headers
assembly.py   reading it into matrices       fit.py                 bringing parts to one scheme
"""

from expertd_kernels.checkpoint.checkpoint import Checkpoint, open_checkpoint
from expertd_kernels.checkpoint.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]
