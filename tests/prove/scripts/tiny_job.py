"""A job of the standard library alone, so that a launch takes a moment.

It "trains" an integer, keeps its state in a JSON file, writes its own trace lines, dies at a chosen
point, and goes wrong on request. Its components are ``model``, ``optimizer`` and ``extras``, the
last of which is the same from the first step to the last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--pause-seconds", type=float, default=0.02)
parser.add_argument("--save-every", type=int, default=3)
parser.add_argument("--fail-at", type=int, default=0)
parser.add_argument("--fail-on-relaunch", action="store_true")
parser.add_argument("--hang-at", type=int, default=0)
parser.add_argument("--lives-on", action="store_true", help="chosen points do not kill it")
parser.add_argument("--leave-child", choices=["marked", "unmarked"])
parser.add_argument("--deaf-to", default="", help="a component whose injection is ignored")
parser.add_argument("--breaks", default="", help="a component that every injection breaks")
parser.add_argument("--forgets", default="", help="a component that no resume restores")
parser.add_argument("--counts", action="store_true", help="losses depend on an unsaved counter")
args = parser.parse_args()

trace = Path(os.environ["RESUMEKIT_TRACE"])
trace.mkdir(parents=True, exist_ok=True)
file = os.open(trace / f"{time.time_ns():020d}-{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY)


def write(kind: str, **fields: Any) -> None:
    line = json.dumps({"kind": kind, "time_ns": time.time_ns(), **fields})
    os.write(file, line.encode() + b"\n")
    point = f"{kind}:{fields.get('step')}"
    if os.environ.get("RESUMEKIT_TRACE_KILL") == point and not args.lives_on:
        os.kill(os.getpid(), signal.SIGKILL)


def digests() -> dict[str, dict[str, str]]:
    return {key: {"value": f"{value}"} for key, value in state.items()}


rank = int(os.environ.get("RANK", "0"))
write("start", rank=rank)
args.directory.mkdir(parents=True, exist_ok=True)
if args.leave_child:
    # Away from the process group; unmarked: without the environment of the launch as well.
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    environment: dict[str, str] | None = None if args.leave_child == "marked" else {}
    child = subprocess.Popen(command, start_new_session=True, env=environment)
    with (args.directory / "children").open("a") as children:
        children.write(f"{child.pid}\n")

fresh = {"model": 1, "optimizer": 2, "extras": "constant"}
state: dict[str, Any] = dict(fresh)
saved = args.directory / f"state-{rank}.json"
first = 1
if saved.exists():
    if args.fail_on_relaunch:
        raise SystemExit(f"{saved.name}: cannot be understood")
    step, state = json.loads(saved.read_text())
    left_out = os.environ.get("RESUMEKIT_INJECT", "")
    if left_out:
        for key in {left_out, args.breaks} & fresh.keys() - {args.deaf_to}:
            state[key] = fresh[key]
    state.update({key: fresh[key] for key in fresh if key == args.forgets})
    write("resumed", step=step, components=digests())
    first = step + 1

for step in range(first, args.steps + 1):
    if step == args.fail_at:
        raise SystemExit("there is no such thing as step four")
    if step == args.hang_at:
        time.sleep(60)
    state["optimizer"] = (state["optimizer"] * 31 + state["model"]) % 1_000_003
    state["model"] = (state["model"] * 17 + state["optimizer"]) % 1_000_003
    time.sleep(args.pause_seconds)
    loss = state["model"] + (step - first if args.counts else 0)
    write("step", step=step, values={"loss": float(loss).hex()})
    if step % args.save_every == 0 or step == args.steps:
        saved.with_suffix(".tmp").write_text(json.dumps([step, state]))
        saved.with_suffix(".tmp").rename(saved)
        write("checkpoint", step=step, components=digests())
write("end", step=args.steps, components=digests())
