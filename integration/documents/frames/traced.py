import os
from pathlib import Path

from parts import objects, step_of

os.environ["RESUMEKIT_TRACE"] = os.path.abspath("trace")  # as prove sets it
import resumekit

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
hardest_loss = 0.0
for step, batch in enumerate(loader, start=1):
    loss = train_on(batch)
    hardest_loss = max(hardest_loss, float(loss))
    ...  # fragment 1
found = [each.read_bytes() for each in Path("trace").rglob("*") if each.is_file()]
assert sum(each.count(b"hardest_loss") for each in found) == len(loader)
