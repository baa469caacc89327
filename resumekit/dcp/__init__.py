"""Checkpoints of resumekit for programs that use ``torch.distributed.checkpoint``.

::

    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(...)}
    dcp.save(state, storage_writer=StorageWriter("runs/a"), checkpoint_id=f"step-{step}")
    dcp.load(state, storage_reader=StorageReader("runs/a"))

The reader loads any step that any adapter wrote into any layout, with the planner of the caller.
"""

from resumekit.dcp.reader import StorageReader
from resumekit.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
