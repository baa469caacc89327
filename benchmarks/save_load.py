"""How long does a save and a load of a real training state take, next to torch.save and torch.load?

GPT-2 124M in float32 with AdamW's state, 1.49 GB. Every round measures all contenders one after the
other on the same disk, so the ratios hold on a machine whose load changes. What is compared:

* save: our whole commit (stage, write, digest, fsync of files and directories, manifest, rename)
  against ``torch.save`` and one ``fsync``, which is neither atomic nor digested;
* load: ours with every byte verified against ``torch.load``, both from a cold page cache and into a
  fresh process;
* memory: by how much a save raises the highest resident size of a fresh process.

    python benchmarks/save_load.py [--rounds 8] [--directory DIR] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, drop_page_cache, median_ratio, parser_for, run_child, timed
from rich.console import Console

from resumekit.serialization import Payload, read_payload, state_digest
from resumekit.storage import Manifest, StepName, Store

DIRECTORY = "state"


def gpt2_shapes(
    num_layers: int = 12, width: int = 768, num_tokens: int = 50257, num_positions: int = 1024
) -> dict[str, tuple[int, ...]]:
    """The parameters of GPT-2 124M by name; the head is tied to ``wte``."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (num_tokens, width),
        "transformer.wpe.weight": (num_positions, width),
    }
    for layer in range(num_layers):
        block = {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }  # fmt: skip
        shapes |= {f"transformer.h.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def training_state() -> dict[str, Any]:
    """Model and AdamW state, filled with random numbers."""
    generator = torch.Generator().manual_seed(0)

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=generator)

    model = {name: filled(shape) for name, shape in gpt2_shapes().items()}
    moments = {
        name: {
            "step": torch.tensor(100.0),
            "exp_avg": filled(tuple(weight.shape)),
            "exp_avg_sq": filled(tuple(weight.shape)),
        }
        for name, weight in model.items()
    }
    model["lm_head.weight"] = model["transformer.wte.weight"]
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 3e-4}]}}


# The contenders


def save_resumekit(states: Mapping[str, Any], directory: Path) -> None:
    """A committed step directory."""
    store = Store(directory)
    store.acquire()
    payload = Payload(DIRECTORY, 0, states)
    staging = store.stage(
        StepName(1),
        num_bytes=payload.num_bytes,
        num_files=payload.num_files,
        directories=[DIRECTORY],
    )
    manifest = Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=1,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=1,
        progress={},
        components=(),
        files=tuple(payload.write(staging)),
    )
    store.commit(staging, manifest)
    store.release()


def save_torch(states: Mapping[str, Any], directory: Path) -> None:
    """One durable file."""
    directory.mkdir()
    with (directory / "checkpoint.pt").open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def load_resumekit(directory: Path) -> dict[str, Any]:
    """The states, every byte verified."""
    return read_payload(Store(directory).open_step(StepName(1)), DIRECTORY, 0)


def load_torch(directory: Path) -> dict[str, Any]:
    """The states, nothing verified."""
    states: dict[str, Any] = torch.load(directory / "checkpoint.pt", weights_only=True)
    return states


SAVERS: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "resumekit": save_resumekit,
    "torch": save_torch,
}
LOADERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "resumekit": load_resumekit,
    "torch": load_torch,
}


# Measuring


@dataclass
class Seconds:
    """What each contender took, one number for each round."""

    save: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SAVERS})
    load: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in LOADERS})


def measure(directory: Path, num_rounds: int, console: Console) -> Seconds:
    """All contenders, interleaved; who comes first changes from round to round.

    Each one finds the same: an idle disk, the other's files deleted, and a fresh process to load
    into, as a resumed run is one.
    """
    states = training_state()
    expected = state_digest(states)
    seconds = Seconds()
    for number in range(num_rounds + 1):  # the first round warms up and checks what was loaded
        took: dict[str, tuple[float, float]] = {}
        for name in list(SAVERS)[:: 1 if number % 2 else -1]:
            path = directory / name
            os.sync()
            save_seconds, _ = timed(partial(SAVERS[name], states, path))
            drop_page_cache(path)
            loaded = run_child(__file__, "--load-child", name, "--directory", str(path))
            if loaded["digest"] != expected:
                raise AssertionError(f"{name} did not give back what was saved")
            shutil.rmtree(path)
            took[name] = (save_seconds, loaded["seconds"])
        if number:
            for name, (save_seconds, load_seconds) in took.items():
                seconds.save[name].append(save_seconds)
                seconds.load[name].append(load_seconds)
            times = (f"{name} {save:.2f} {load:.2f}" for name, (save, load) in took.items())
            console.print(f"round {number}, save and load: " + ", ".join(times), style="dim")
    return seconds


def load_child(name: str, directory: Path) -> dict[str, Any]:
    """Seconds of a load in this process, and the digest of what came."""
    seconds, states = timed(partial(LOADERS[name], directory))
    return {"seconds": seconds, "digest": state_digest(states)}


def peak_bytes() -> int:
    """The highest resident size of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def memory_child(directory: Path) -> dict[str, int]:
    """By how many bytes a save raises the peak of this process."""
    states = training_state()
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak so far is the size now
    before = peak_bytes()
    save_resumekit(states, directory / "memory")
    after = peak_bytes()
    shutil.rmtree(directory / "memory")
    return {"extra": after - before}


# Report


def rows_of(seconds: Seconds, extra_bytes: int) -> list[tuple[str, str, str, str, str]]:
    """What was asked, ours, torch's, ratio or size, and the aim."""

    def cell(times: list[float]) -> str:
        return f"{statistics.median(times):.2f} s (best {min(times):.2f})"

    rows = []
    for what, times, aim in (
        ("save, durable and digested", seconds.save, 0.9),
        ("load, cold and every byte verified", seconds.load, 1.0),
    ):
        ratio = f"{median_ratio(times['resumekit'], times['torch']):.2f}x"
        rows.append((what, cell(times["resumekit"]), cell(times["torch"]), ratio, f"≤ {aim}x"))
    memory = f"{extra_bytes / 1e6:.1f} MB"
    return [*rows, ("extra peak memory of a save", memory, "", "", "≤ 64 MB")]


HEADINGS = ("", "resumekit", "torch + fsync", "ratio", "aim")


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=8)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    parser.add_argument("--load-child", choices=list(LOADERS), help=argparse.SUPPRESS)
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_child:
        print(json.dumps(memory_child(arguments.directory)))
        return
    if arguments.load_child:
        print(json.dumps(load_child(arguments.load_child, arguments.directory)))
        return
    console = Console()
    with tempfile.TemporaryDirectory(prefix="save-load-", dir=arguments.directory or ".") as name:
        extra_bytes = run_child(__file__, "--memory-child", "--directory", name)["extra"]
        seconds = measure(Path(name), arguments.rounds, console)
    Findings(
        "",
        heading="Save and load",
        before=[
            "`python benchmarks/save_load.py --record`: GPT-2 124M float32 with AdamW, 1.49",
            f"GB. Medians of {arguments.rounds} interleaved rounds; a ratio is the median of",
            "the rounds' ratios.",
        ],
        title=f"GPT-2 124M with AdamW, 1.49 GB, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows_of(seconds, extra_bytes),
        packages=("torch", "numpy"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
