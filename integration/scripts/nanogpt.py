"""``nanogpt_bare.py`` with its loop-carried variables in extras."""

from __future__ import annotations

from typing import Any

import torch
from judged_script import arguments, record
from nanogpt_parts import LAST_STEP, Decoder, estimate_loss, get_batch, learning_rate, make_data
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

args = arguments()
gradient_accumulation_steps = 2
eval_interval = 4

torch.manual_seed(0)
data = make_data()
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
extras: dict[str, Any] = {"best_val_loss": 1e9, "num_improved": 0}
extras["X"], extras["Y"] = get_batch(data["train"])
ckpt = Checkpointer(
    args.directory,
    model=model,
    optimizer=optimizer,
    extras=extras,
    save_every=3,
    strict=args.strict,
    loop_variables=args.loop_variables,
)

for iter_num in ckpt.batches(DataLoader(range(LAST_STEP), batch_size=None), steps=LAST_STEP):
    lr = learning_rate(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss(model, data["val"])
        if val_loss < extras["best_val_loss"]:
            extras["best_val_loss"] = val_loss
            extras["num_improved"] += 1
            if iter_num > 0:
                torch.save(model.state_dict(), f"{args.directory}-best.pt")
    used = []
    for _ in range(gradient_accumulation_steps):
        loss = model(extras["X"], extras["Y"]) / gradient_accumulation_steps
        used.append(extras["X"])
        extras["X"], extras["Y"] = get_batch(data["train"])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    record(iter_num + 1, loss=loss, optimizers=optimizer, inputs=used, state=extras)
    ckpt.step(loss=loss)
