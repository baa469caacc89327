"""Writes docs/images/kill.svg from a real run: started, killed with SIGKILL, started again.

    python docs/record_kill.py

Each line of the picture lights up when the run printed it. It has no script, only CSS animations,
and shows all lines where animations are off. The run is the script below, in a temporary directory.
"""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("images") / "kill.svg"
SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from resumekit.adapters.torch import Checkpointer

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1).sign()), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1),
                            torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer, save_every=40)
for x, y in ckpt.batches(loader, epochs=1):
    loss = torch.nn.functional.soft_margin_loss(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(loss=loss)
    time.sleep(0.04)
    if ckpt.progress.step % 16 == 0:
        print(f"step {ckpt.progress.step:4d}   loss {loss:.6f}", flush=True)
"""
KILLED_AT = "step  112"
LINE, LEFT, TOP, WIDTH = 23, 18, 62, 680
SECONDS_MOST = 0.5  # a longer pause, such as an import, is shortened to this


@dataclass(frozen=True)
class Line:
    """One line of the terminal, and when it appears."""

    seconds: float
    text: str
    kind: str


def record() -> list[Line]:
    """Runs the script, kills it, runs it again; the lines of both with the time of each."""
    lines: list[Line] = []
    now = 0.4

    def add(text: str, kind: str, pause: float) -> None:
        nonlocal now
        now += min(pause, SECONDS_MOST)
        lines.append(Line(now, text, kind))

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT, encoding="utf-8")
        for is_killed in (True, False):
            add("$ python train.py", "command", 0.5)
            process = subprocess.Popen(
                [sys.executable, "-u", "train.py"],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(PAGE.parents[2])},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            then = time.monotonic()
            assert process.stdout is not None
            for printed in process.stdout:
                text = printed.rstrip().replace(f"{folder}/", "")
                kind = "ours" if text.startswith("resumekit:") else "output"
                add(text, kind, time.monotonic() - then)
                then = time.monotonic()
                if is_killed and text.startswith(KILLED_AT):
                    process.send_signal(signal.SIGKILL)
                    break
            process.stdout.close()
            process.wait()
            if is_killed:
                add("Killed", "killed", 0.5)
    return lines


def picture(lines: list[Line]) -> str:
    """The SVG of a terminal: a line appears at its time."""
    height = TOP + LINE * len(lines) + 8
    rows = []
    for number, line in enumerate(lines):
        y = TOP + LINE * number
        text = html.escape(line.text)
        if line.kind == "output":  # losses that both launches have are marked
            step = re.match(r"step +\d+", line.text)
            again = [other for other in lines if step and other.text.startswith(step[0])]
            kind = "same" if len({other.text for other in again}) < len(again) else "output"
        else:
            kind = line.kind
        delay = f"animation-delay:{line.seconds:.2f}s"
        rows.append(f'<text x="{LEFT}" y="{y}" class="{kind}" style="{delay}">{text}</text>')
    dots = "".join(f'<circle cx="{24 + 18 * i}" cy="22" r="6"/>' for i in range(3))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">
<title>A training is killed with SIGKILL and started again with the same command</title>
<style>
text {{ font: 15px ui-monospace, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre;
  animation: appear .01s linear both }}
@keyframes appear {{ from {{ opacity: .25 }} to {{ opacity: 1 }} }}
.command {{ fill: #fff; font-weight: bold }} .ours {{ fill: #58c7d8 }}
.killed {{ fill: #ff7b72; font-weight: bold }} .same {{ fill: #7ee787 }}
circle {{ fill: #484f58 }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none }} }}
</style>
<rect width="{WIDTH}" height="{height}" rx="10" fill="#161b22"/>{dots}
{chr(10).join(rows)}
</svg>
"""


if __name__ == "__main__":
    PAGE.write_text(picture(record()), encoding="utf-8")
    print(f"wrote {PAGE}, {PAGE.stat().st_size:,} bytes")
