"""torchtitan's CheckpointManager in a run directory of resumekit; docs/how-to/dcp.md shows it."""

import os
import re
from dataclasses import dataclass

from torch.distributed import checkpoint as dcp
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager

from resumekit.dcp import StorageReader, StorageWriter


class RunDirectoryManager(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(self, state_dict, checkpoint_id, async_mode, *options, to_hf=False, **more):
        assert not to_hf
        assert async_mode != AsyncMode.ASYNC_WITH_PINNED_MEM
        keep = self.keep_latest_k or None
        writer = StorageWriter(self.folder, keep_latest=keep, process_group=self.pg)
        given = {"storage_writer": writer, "checkpoint_id": checkpoint_id}
        if async_mode == AsyncMode.DISABLED:
            return dcp.save(state_dict, **given)
        return dcp.async_save(state_dict, process_group=self.pg, **given)

    def dcp_load(self, state_dict, checkpoint_id, *options, **more):
        if os.path.dirname(checkpoint_id) != self.folder:  # initial_load_path
            super().dcp_load(state_dict, checkpoint_id, *options, **more)
        else:
            dcp.load(state_dict, storage_reader=StorageReader(checkpoint_id))
            self.states[MODEL].load_state_dict(state_dict)

    def _create_checkpoint_id(self, step, folder=""):
        return os.path.join(folder or self.folder, f"step-{step:08d}")

    def _find_load_step(self, folder=""):
        steps = re.findall(r"^step-(\d+)$", "\n".join(os.listdir(folder or self.folder)), re.M)
        return max(map(int, steps), default=-1)  # a step has its name once it is complete

    def _should_purge(self):
        return False  # keep_latest does it
