"""A script whose loop is at module level; its variables are globals.

The caller gives ``directory``, ``record`` and ``options``.
"""

# ruff: noqa: F821
# mypy: ignore-errors
from tiny_training import EPOCHS, loss_of, make, step

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = make()
ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
scale = 1.0
history = []
for batch in ckpt.batches(loader, epochs=EPOCHS):
    loss = (scale + sum(history[-2:])) * loss_of(model, batch)
    step(ckpt, optimizer, loss)
    scale = 0.7 * scale + 0.1 * loss.item()
    history.append(0.1 * loss.item())
    record(loss, model)
