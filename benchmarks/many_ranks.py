"""What does a save cost beside its bytes, with many ranks? Planning, indices, manifest and commit.

A transformer with AdamW's moments under ``fully_shard``, its norms replicated, on simulated ranks:
torch's stand-in for a process group gives each rank its own mesh, and what would travel between the
ranks is pickled and read back. Tensors are tiny, so that all that is left is what the number of
ranks and tensors costs. All ranks' files are really written, by a thread for each rank.

    python benchmarks/many_ranks.py [--ranks 8 64] [--tensors 1000] [--rounds 3] [--record]

What each rank does beside the others is timed on rank 1 alone, what rank 0 does for all is timed
whole. The total is their sum: the way through one save. That all ranks' files are written by one
machine is next to it.
"""

from __future__ import annotations

import gc
import pickle
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, parser_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from resumekit.serialization import (
    LocalState,
    Proposal,
    ShardedPayload,
    assign,
    encode_local,
    local_part,
    sharded_like,
)
from resumekit.storage import FileEntry, Manifest, Store

RANKS = (8, 16, 32, 64, 128)
TENSORS = (250, 500, 1000, 2000)
AIM_SECONDS = 2.0

Rank = dict[str, LocalState]

# Of a layer: rows and columns of each weight. No number of ranks divides all of the rows.
WEIGHTS = {
    "attention.query": (256, 8),
    "attention.key": (256, 8),
    "attention.value": (256, 8),
    "attention.output": (256, 8),
    "feed_forward.gate": (684, 4),
    "feed_forward.up": (684, 4),
    "feed_forward.down": (256, 8),
}
NORMS = ("attention_norm", "feed_forward_norm")
TENSORS_PER_PARAMETER = 4  # itself, two moments, a count of steps


class Model:
    """The parameters and moments of a model as one rank after the other holds them."""

    def __init__(self, num_tensors: int) -> None:
        kinds = [*WEIGHTS, *NORMS]
        self._names = [
            (f"layers.{number // len(kinds)}.{kinds[number % len(kinds)]}.weight", kind)
            for number in range(num_tensors // TENSORS_PER_PARAMETER)
            for kind in [kinds[number % len(kinds)]]
        ]
        # The ranks share their memory: only where it begins is looked at, and what is in it is 0.
        self._memory = {
            (name, part): torch.zeros(1024) for name, _ in self._names for part in range(4)
        }

    def states(self, num_ranks: int) -> dict[str, Any]:
        """The states of the rank that this process plays."""
        mesh = init_device_mesh("cpu", (num_ranks,))
        partners = {
            kind: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None)
            for kind, shape in WEIGHTS.items()
        }
        model: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for name, kind in self._names:
            made = []
            for part in range(3):
                memory = self._memory[name, part]
                if kind in NORMS:
                    made.append(memory[:64])
                    continue
                shape = local_part(partners[kind]).shape
                made.append(sharded_like(partners[kind], memory[: shape.numel()].view(shape)))
            model[name] = made[0]
            step = self._memory[name, 3][0]
            moments[name] = {"step": step, "exp_avg": made[1], "exp_avg_sq": made[2]}
        groups = [{"lr": 1e-3, "params": [name for name, _ in self._names]}]
        return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


@contextmanager
def playing(rank: int, num_ranks: int) -> Iterator[None]:
    """This process as one rank of a job."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@dataclass
class Save:
    """What one save took, in seconds, and made, in bytes.

    Args:
        seconds: by what was done.
        num_bytes: by what was made.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time of a block."""
        begin = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begin

    @property
    def total(self) -> float:
        """The way through it, where each rank writes its own files."""
        return sum(self.seconds.values()) - self.seconds["write all"]

    @property
    def kept(self) -> float:
        """Without planning: what a save takes whose plan is that of the save before."""
        return self.total - self.seconds["propose"] - self.seconds["plan"]


def measure(num_ranks: int, num_tensors: int, directory: Path) -> Save:
    """One save of a job of so many ranks."""
    save = Save()
    gc.collect()
    gc.disable()  # a real rank has no other ranks' tensors to go through
    try:
        return _measured(save, num_ranks, num_tensors, directory)
    finally:
        gc.enable()


def _measured(save: Save, num_ranks: int, num_tensors: int, directory: Path) -> Save:
    ranks, proposals = _proposed(num_ranks, Model(num_tensors), save)
    assignments = _planned(ranks[0], proposals, save)
    payloads = []
    for rank, local in enumerate(ranks):
        given = assignments[rank]
        with (save if rank == 0 else Save()).timed("index"):  # rank 0: of all parts, and its own
            payloads.append([ShardedPayload(key, rank, local[key], given[key]) for key in local])
    _written(payloads, num_ranks, directory, save)
    return save


def _proposed(
    num_ranks: int, model: Model, save: Save
) -> tuple[list[Rank], list[dict[str, Proposal]]]:
    ranks: list[Rank] = []
    sent: list[bytes] = []
    for rank in range(num_ranks):
        watch = save if rank == 1 else Save()
        with playing(rank, num_ranks):
            states = model.states(num_ranks)
            with watch.timed("encode"):
                local = {key: encode_local(key, state) for key, state in states.items()}
                assert all(each.layout for each in local.values())  # compared with the last save
            with watch.timed("propose"):
                proposed = {key: Proposal.of(each, rank) for key, each in local.items()}
                sent.append(pickle.dumps(proposed))
        ranks.append(local)
    save.num_bytes["proposals"] = sum(map(len, sent))
    with save.timed("plan"):
        received = [pickle.loads(each) for each in sent]  # noqa: S301 - made above
    return ranks, received


def _planned(
    first: Rank, proposals: Sequence[dict[str, Proposal]], save: Save
) -> list[dict[str, Any]]:
    with save.timed("plan"):
        plans = {key: assign(first[key], [each[key] for each in proposals]) for key in first}
        made = [{key: plans[key][rank] for key in plans} for rank in range(len(proposals))]
        save.num_bytes["assignments"] = sum(len(pickle.dumps(each)) for each in made)
    return made


def _written(
    payloads: Sequence[Sequence[ShardedPayload]], num_ranks: int, directory: Path, save: Save
) -> None:
    store = Store(directory)
    store.acquire()
    name = store.next_name(1)
    mine = store.stage(name, num_bytes=0, num_files=0, directories=["model", "optimizer"])

    def write(payload: Sequence[ShardedPayload]) -> list[FileEntry]:
        staging = store.attach(mine.name)
        return [entry for each in payload for entry in each.write(staging)]

    with save.timed("write"):
        entries = write(payloads[0])
    with ThreadPoolExecutor(num_ranks) as pool, save.timed("write all"):
        entries += [entry for written in pool.map(write, payloads[1:]) for entry in written]
    manifest = Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=1,
        created="2024-01-01T00:00:00+00:00",
        world_size=num_ranks,
        progress={},
        components=(),
        files=tuple(entries),
    )
    with save.timed("commit"):
        path = store.commit(mine, manifest)
    store.release()
    save.num_bytes["manifest"] = (path / "manifest.json").stat().st_size
    save.num_bytes["index"] = sum(each.stat().st_size for each in path.glob("*/index.json"))


HEADINGS = (
    "ranks",
    "tensors",
    "a rank encodes ms",
    "proposes ms",
    "rank 0 plans ms",
    "its indices ms",
    "its files ms",
    "commit ms",
    "total s",
    "plan kept s",
    "all files here s",
    "proposals KiB",
    "index KiB",
    "manifest KiB",
)


def row_of(num_ranks: int, num_tensors: int, saves: Sequence[Save]) -> tuple[str, ...]:
    """Medians over the rounds."""

    def milliseconds(what: str) -> str:
        return f"{statistics.median(save.seconds[what] for save in saves) * 1e3:.0f}"

    sizes = saves[0].num_bytes
    return (
        str(num_ranks),
        str(num_tensors),
        *map(milliseconds, ("encode", "propose", "plan", "index", "write", "commit")),
        f"{statistics.median(save.total for save in saves):.2f}",
        f"{statistics.median(save.kept for save in saves):.2f}",
        f"{statistics.median(save.seconds['write all'] for save in saves):.2f}",
        *(f"{sizes[what] / 1024:.0f}" for what in ("proposals", "index", "manifest")),
    )


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS)
    arguments = parser.parse_args()
    rows = []
    for num_ranks in arguments.ranks:
        for num_tensors in arguments.tensors:
            saves = []
            for _ in range(arguments.rounds):
                with tempfile.TemporaryDirectory() as directory:
                    saves.append(measure(num_ranks, num_tensors, Path(directory, "run")))
            rows.append(row_of(num_ranks, num_tensors, saves))
    Findings(
        "many-ranks",
        heading="What a save costs beside its bytes, with many ranks",
        before=[
            "`python benchmarks/many_ranks.py --record`: simulated ranks, tiny tensors,",
            f"medians of {arguments.rounds} saves. What each rank does beside the others",
            "(encode, propose) is timed on one rank; what rank 0 plans, its indices and files,",
            "and the commit are timed whole. The total is their sum; without the planning it",
            "is what a save costs whose tensors keep their sharding. Next to it: the files of",
            "all other ranks, written by this one machine, a thread for each rank. The aim is",
            f"to stay below {AIM_SECONDS:.0f} s in all with 64 ranks and 1,000 tensors.",
        ],
        title=f"a save beside its bytes, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows,
        packages=("torch",),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
