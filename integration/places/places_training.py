"""A small training with a mirror, as a user writes it; its last line is a digest of the weights.

Arguments: run directory, place, steps, ``mirror_flush``. The controls of the tests are in the
environment: with ``MANIFEST_FIRST`` a copy becomes complete before its files are there, and with
``WAIT_FOR_MIRROR`` a save returns once its copy is complete.
"""

import os
import sys
import time

import torch
import xxhash

from resumekit.adapters.torch import Checkpointer
from resumekit.places.mirror import Upload
from resumekit.places.object_store import StoreCopies

if os.environ.get("MANIFEST_FIRST"):
    write = StoreCopies.put

    def put_manifest_first(self, source, retention, observer):
        self._fs.makedirs(self._path(source.name), exist_ok=True)
        self._fs.pipe_file(self._path(source.name, "manifest.json"), source.manifest.to_bytes())
        for entry in source.manifest.files:
            self._write(source, entry, None, observer)

    StoreCopies.put = put_manifest_first  # type: ignore[method-assign]

if os.environ.get("WAIT_FOR_MIRROR"):
    offer = Upload.offer

    def offer_and_wait(self, name, *, is_last):
        offer(self, name, is_last=is_last)
        with self._change:
            self._change.wait_for(self._is_idle)

    Upload.offer = offer_and_wait  # type: ignore[method-assign]

directory, place, steps, flush = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.1))
optimizer = torch.optim.Adam(model.parameters())
dataset = torch.utils.data.TensorDataset(torch.randn(1024, 256))
loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
ckpt = Checkpointer(
    directory,
    model=model,
    optimizer=optimizer,
    save_every=5,
    mirror=place,
    mirror_flush=flush,
)
# Of a launch that begins at step 0: a resume restores what the loop changes.
begun, durations = time.monotonic(), []
for (x,) in ckpt.batches(loader, steps=int(steps)):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(loss=loss)
    time.sleep(0.01)
    print("step", ckpt.progress.step, flush=True)
    durations.append(time.monotonic() - begun)
    begun = time.monotonic()
print(f"longest {max(durations[1:], default=0):.3f}")
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
print("digest", xxhash.xxh3_64_hexdigest(weights), flush=True)
