"""What do a save and a resume cost beside their bytes, with up to 4,096 ranks?

A transformer with AdamW's moments on simulated ranks, under FSDP2 on one dimension, under tensor
parallelism with FSDP2, and as HSDP with 16 shards. Rank 0's work for one save is done whole: it
encodes, collects the pickled proposals of all ranks, plans, pickles what each rank receives, writes
its index and its part, and commits a manifest with the files of all ranks. Then one rank that
resumes on a quarter of the ranks opens the checkpoint and does all but read the data files.

    python benchmarks/many_ranks.py [--ranks 16 4096] [--tensors 2000] [--rounds 3] [--record]

Each save is made in a fresh process, whose memory is measured. What other ranks hold follows from
their coordinates in the mesh by torch's own function; a few of them are compared with DTensors.
Tensors are small, so that what is left is what the number of ranks and tensors costs.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import (
    Findings,
    Line,
    MachineLoad,
    Plot,
    draw,
    parser_for,
    reset_peak,
    run_child,
    slope_of,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from resumekit.serialization import data_files, reading
from resumekit.serialization.leaves import ELEMENT_TYPES, Leaf
from resumekit.serialization.planning import (
    Assignment,
    LocalState,
    Proposal,
    SavePlan,
    assign,
    encode_local,
)
from resumekit.serialization.reading import StoredSource, read_sharded
from resumekit.serialization.sharding import is_sharded, local_part
from resumekit.serialization.writing import Payload
from resumekit.storage.commit import Staging
from resumekit.storage.files import FileEntry
from resumekit.storage.manifest import Manifest
from resumekit.storage.store import Store

RANKS = (16, 64, 256, 1024, 2048, 4096)
TENSORS = 2000
AIM_SECONDS, AIM_MEGABYTES, AIM_RESUME_SECONDS = 5.0, 200.0, 1.0

# Of a layer: rows and columns of each weight, and whether tensor parallelism splits its columns.
WEIGHTS = {
    "attention.query": (8192, 8, False),
    "attention.key": (8192, 8, False),
    "attention.value": (8192, 8, False),
    "attention.output": (8192, 8, True),
    "feed_forward.gate": (28677, 8, True),  # no number of ranks divides its rows
    "feed_forward.up": (28677, 8, True),
    "feed_forward.down": (8200, 8, True),
}
NORMS = ("attention_norm", "feed_forward_norm")  # replicated
TENSORS_PER_PARAMETER = 4  # itself, two moments, a count of steps

TP, SHARDS = 8, 16


@dataclass(frozen=True)
class Sharding:
    """How weights are sharded.

    Args:
        mesh: the mesh's shape for a number of ranks.
        rows: the placements of a weight that tensor parallelism splits by rows, or not at all.
        columns: of one that it splits by columns.
    """

    mesh: Callable[[int], tuple[int, ...]]
    rows: tuple[Any, ...]
    columns: tuple[Any, ...]


SHARDINGS = {
    "FSDP": Sharding(lambda n: (n,), (Shard(0),), (Shard(0),)),
    "TP x FSDP": Sharding(
        lambda n: (n // TP, TP), (_StridedShard(0, split_factor=TP), Shard(0)), (Shard(0), Shard(1))
    ),
    "HSDP": Sharding(
        lambda n: (n // SHARDS, SHARDS), (Replicate(), Shard(0)), (Replicate(), Shard(0))
    ),
}


class Model:
    """The parameters and moments of a model as one rank after the other holds them."""

    def __init__(self, sharding: Sharding, num_ranks: int, num_tensors: int) -> None:
        kinds = [*WEIGHTS, *NORMS]
        self._names = [
            (f"layers.{number // len(kinds)}.{kinds[number % len(kinds)]}.weight", kind)
            for number in range(num_tensors // TENSORS_PER_PARAMETER)
            for kind in [kinds[number % len(kinds)]]
        ]
        self._sharding, self._num_ranks = sharding, num_ranks
        self._mesh_shape = sharding.mesh(num_ranks)

    def _placements(self, kind: str) -> tuple[Any, ...]:
        return self._sharding.columns if WEIGHTS[kind][2] else self._sharding.rows

    def part(self, kind: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The local shape of a weight and its offsets."""
        placements, coordinate = self._placements(kind), []
        for length in reversed(self._mesh_shape):
            rank, along = divmod(rank, length)
            coordinate.insert(0, along)
        mesh_shape = self._mesh_shape
        if isinstance(placements[0], _StridedShard):  # torch lists all rows for these
            mesh_shape, coordinate = mesh_shape[::-1], coordinate[::-1]
            placements = (Shard(0), Shard(0))
        return _compute_local_shape_and_global_offset(
            WEIGHTS[kind][:2], mesh_shape, coordinate, placements
        )

    def states(self, rank: int) -> dict[str, Any]:
        """The states of a rank; its process group is that rank's."""
        mesh = DeviceMesh(
            "cpu", torch.arange(self._num_ranks).view(self._mesh_shape), _init_backend=False
        )

        local_shapes = {kind: self.part(kind, rank)[0] for kind in WEIGHTS}

        def weight(kind: str) -> Any:
            if kind in NORMS:
                return torch.empty(64)
            rows, columns, _ = WEIGHTS[kind]
            meta = TensorMeta(torch.Size((rows, columns)), (columns, 1), torch.float32)
            spec = DTensorSpec(mesh, self._placements(kind), tensor_meta=meta)
            return DTensor(torch.empty(local_shapes[kind]), spec, requires_grad=False)

        model: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for name, kind in self._names:
            model[name] = weight(kind)
            moments[name] = {
                "step": torch.tensor(1.0),
                "exp_avg": weight(kind),
                "exp_avg_sq": weight(kind),
            }
        groups = [{"lr": 1e-3, "params": [name for name, _ in self._names]}]
        return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}

    def proposals(self, like: Mapping[str, Proposal], rank: int) -> dict[str, Proposal]:
        """What another rank proposes whose state is like that of the rank with these proposals."""
        found = {}
        for key, proposal in like.items():
            parts = list(proposal.parts)
            for number, kind in enumerate(WEIGHTS):
                if number < len(self._names):
                    sizes, offsets = self.part(kind, rank)
                    parts[self._kind(key, kind)] = ((*offsets, *sizes),) if all(sizes) else ()
            found[key] = replace(proposal, parts=tuple(parts))
        return found

    def _kind(self, key: str, kind: str) -> int:
        """The number of a weight's kind among a rank's: they count shapes, not weights."""
        seen: list[object] = []
        for each in WEIGHTS:
            rows, columns, is_by_columns = WEIGHTS[each]
            placements = self._sharding.columns if is_by_columns else self._sharding.rows
            sort = (rows, columns, placements)
            if sort not in seen:
                seen.append(sort)
            if each == kind:
                return seen.index(sort) + (key == "optimizer")  # the first are the counts of steps
        raise KeyError(kind)


@contextmanager
def playing(rank: int, num_ranks: int) -> Iterator[None]:
    """This process as one rank of a job."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Clock(dict[str, float]):
    """Seconds by what was done.

    Attributes:
        cpu_seconds: what this process computed in all, whatever else the machine does.
    """

    cpu_seconds = 0.0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time of a block."""
        begin, computed = time.perf_counter(), time.process_time()
        yield
        self[what] = self.get(what, 0.0) + time.perf_counter() - begin
        self.cpu_seconds += time.process_time() - computed


def measured(sharding: str, num_ranks: int, num_tensors: int) -> dict[str, float]:
    """Seconds, bytes and memory of one save, and of the plan of one rank that resumes."""
    clock = Clock()
    model = Model(SHARDINGS[sharding], num_ranks, num_tensors)
    sent = _sent(model, num_ranks)
    with playing(0, num_ranks), tempfile.TemporaryDirectory() as directory:
        states = model.states(0)
        gc.collect()
        before = reset_peak()
        with clock.timed("encode"):
            local = {key: encode_local(key, state) for key, state in states.items()}
            assert all(each.layout for each in local.values())  # compared with the last save
        with clock.timed("plan"):
            for each in local.values():
                Proposal.of(each, 0)
            proposals = [pickle.loads(each) for each in sent]  # noqa: S301 - made above
            plans = {
                key: assign(each, [proposal[key] for proposal in proposals])
                for key, each in local.items()
            }
            given = [
                pickle.dumps({key: plan.positions[rank] for key, plan in plans.items()})
                for rank in range(num_ranks)
            ]
            choices = pickle.dumps({key: plan.choice for key, plan in plans.items()})
        payloads = _payloads(local, plans, clock)
        store = Store(Path(directory, "run"))
        store.acquire()
        staging = store.stage(
            store.next_name(1), num_bytes=0, num_files=0, directories=["model", "optimizer"]
        )
        with clock.timed("write"), staging.writing():
            entries = [entry for each in payloads for entry in each.write(staging)]
        readers = _resuming(SHARDINGS[sharding], num_ranks, num_tensors)
        needed = _needed(plans, readers)
        entries += _of_the_others(staging, local, plans, num_ranks, needed)
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
        os.sync()  # each rank has synced its own files
        with clock.timed("commit"):
            path = store.commit(staging, manifest)
        peak = reset_peak(peak=True) - before
        sizes = {
            "proposals": sum(map(len, sent)),
            "assignments": sum(map(len, given)) + len(choices),
            "manifest": (path / "manifest.json").stat().st_size,
            "index": sum(each.stat().st_size for each in path.glob("*/index.json")),
        }
        name = staging.step
        del local, plans, proposals, given, payloads, entries, manifest, states
        gc.collect()
        resumed = _resume(store, name, readers)
        store.release()
    save = sum(clock.values())
    return {
        **{f"{what} s": seconds for what, seconds in clock.items()},
        **{f"{what} bytes": size for what, size in sizes.items()},
        "save s": save,
        "save CPU s": clock.cpu_seconds,
        "memory MB": (peak + sizes["proposals"]) / 1e6,
        **resumed,
        "indices opened": sum(map(len, needed.values())),
    }


def _sent(model: Model, num_ranks: int) -> list[bytes]:
    """What all ranks send to the first, pickled."""
    like: list[dict[str, Proposal]] = []
    for rank in (0, 1):
        with playing(rank, num_ranks):
            local = {key: encode_local(key, state) for key, state in model.states(rank).items()}
            like.append({key: Proposal.of(each, rank) for key, each in local.items()})
    for rank in {num_ranks // 2 + 1, num_ranks - 1}:
        with playing(rank, num_ranks):
            local = {key: encode_local(key, state) for key, state in model.states(rank).items()}
            found = {key: Proposal.of(each, rank) for key, each in local.items()}
        assert found == model.proposals(like[1], rank), "torch and this script disagree"
    every = [like[0], *(model.proposals(like[1], rank) for rank in range(1, num_ranks))]
    digests = {key: [each[key].kinds_digest for each in every] for key in like[0]}
    return [
        pickle.dumps({key: each[key].sent_by(rank, digests[key]) for key in each})
        for rank, each in enumerate(every)
    ]


def _payloads(
    local: Mapping[str, LocalState], plans: Mapping[str, SavePlan], clock: Clock
) -> list[Payload]:
    with clock.timed("index"):
        return [
            Payload.of_shards(
                key, 0, each, Assignment.of(each, plan.choice, plan.positions[0], plan.tensors)
            )
            for key, each in local.items()
            for plan in [plans[key]]
        ]


def _resuming(sharding: Sharding, num_ranks: int, num_tensors: int) -> dict[str, Any]:
    """The live states of one rank of a quarter as many; None of its tensors has values."""
    fewer = max(num_ranks // 4, TP if sharding is SHARDINGS["TP x FSDP"] else SHARDS)
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "fake", rank=fewer // 2, world_size=fewer, store=FakeStore()
    )
    return Model(sharding, fewer, num_tensors).states(fewer // 2)


def _flat(key: str, state: Any) -> dict[str, Any]:
    """The tensors of a state by the names that they are stored under."""
    if key == "model":
        return dict(state)
    return {
        f"state.{name}.{part}": tensor
        for name, moments in state["state"].items()
        for part, tensor in moments.items()
    }


def _needed(plans: Mapping[str, SavePlan], live: Mapping[str, Any]) -> dict[str, set[int]]:
    """The writers whose files the rank that resumes opens."""
    found: dict[str, set[int]] = {}
    for key, plan in plans.items():
        found[key] = {
            chunk.writer
            for name, tensor in _flat(key, live[key]).items()
            for box in [reading.box_of(tensor, name)]
            if box is not None
            for chunk in plan.tensors[name].chunks.near(box)
        }
    return found


def _of_the_others(
    staging: Staging,
    local: Mapping[str, LocalState],
    plans: Mapping[str, SavePlan],
    num_ranks: int,
    needed: Mapping[str, set[int]],
) -> list[FileEntry]:
    """The files of the other ranks: whole where they are needed, of one byte elsewhere."""
    entries: list[FileEntry] = []
    with staging.create("model/any", writer=0) as file:
        file.write([memoryview(b"-")])
        small = file.finish()
    (staging.path / "model/any").unlink()
    for key, plan in plans.items():
        boxes: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in needed[key]}
        for name, logical in plan.tensors.items():
            for chunk in logical.chunks if needed[key] - {0} else ():
                if chunk.writer in boxes:
                    boxes[chunk.writer][name] = chunk.box.sizes
        for rank in range(1, num_ranks):
            if rank in boxes:
                with staging.writing():
                    entries += _whole_files(key, rank, boxes[rank]).write(staging)
                continue
            for suffix in ("json", "safetensors"):
                path = f"{key}/rank-{rank:05d}.{suffix}"
                (staging.path / path).write_bytes(b"-")
                entries.append(replace(small, path=path, writer=rank))
    return entries


def _whole_files(key: str, rank: int, boxes: Mapping[str, tuple[int, ...]]) -> Payload:
    element = ELEMENT_TYPES["float32"]
    leaves = {name: Leaf(torch.zeros(sizes), element, sizes) for name, sizes in boxes.items()}
    return Payload(key, rank, leaves)


def _resume(store: Store, name: Any, live: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a resume's plan: all but the data files' bytes."""
    clock = Clock()
    before = reset_peak()
    with clock.timed("open"):
        step = store.open_step(name)
    with mock.patch.object(data_files.DataFile, "read"), clock.timed("resume plan"):
        for key, state in live.items():
            wanted = _flat(key, state)

            def pair(saved: Any, key: str = key, wanted: Any = wanted) -> Any:
                named = _flat(key, saved)
                return [
                    (named[name], tensor) for name, tensor in wanted.items() if is_sharded(tensor)
                ]

            found, _ = read_sharded(StoredSource(step, key, key, ("index.json",)), pair)
            for each, tensor in _flat(key, found).items():
                assert local_part(tensor).shape == local_part(wanted[each]).shape
    seconds = {"open s": clock["open"], "resume s": clock["open"] + clock["resume plan"]}
    seconds["resume CPU s"] = clock.cpu_seconds
    return {**seconds, "resume MB": (reset_peak(peak=True) - before) / 1e6}


PLOTTED = ("save s", "save CPU s", "memory MB", "resume s", "resume CPU s")
FIELDS = {
    "encode ms": ("encode s", 1e3),
    "plan ms": ("plan s", 1e3),
    "index ms": ("index s", 1e3),
    "write ms": ("write s", 1e3),
    "commit ms": ("commit s", 1e3),
    "save s": ("save s", 1),
    "save CPU s": ("save CPU s", 1),
    "memory MB": ("memory MB", 1),
    "resume s": ("resume s", 1),
    "resume CPU s": ("resume CPU s", 1),
    "resume MB": ("resume MB", 1),
    "writers read": ("indices opened", 1),
    "proposals KB": ("proposals bytes", 1e-3),
    "assignments KB": ("assignments bytes", 1e-3),
    "index KB": ("index bytes", 1e-3),
    "manifest KB": ("manifest bytes", 1e-3),
}


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--only", choices=SHARDINGS, help="one sharding alone")
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        sharding, num_ranks, num_tensors = arguments.child
        print(json.dumps(measured(sharding, int(num_ranks), int(num_tensors))))
        return
    machine_load = MachineLoad()
    rows, lines = [], {what: [] for what in PLOTTED}
    after = []
    for sharding in [arguments.only] if arguments.only else SHARDINGS:
        found: dict[int, dict[str, float]] = {}
        for num_ranks in arguments.ranks:
            rounds = [
                run_child(__file__, "--child", sharding, str(num_ranks), str(arguments.tensors))
                for _ in range(arguments.rounds)
            ]
            found[num_ranks] = {
                name: statistics.median(each[name] for each in rounds) for name in rounds[0]
            }
            values = (found[num_ranks][name] * factor for name, factor in FIELDS.values())
            rows.append((sharding, str(num_ranks), *map(_number, values)))
        for what, several in lines.items():
            points = [(num_ranks, each[what]) for num_ranks, each in found.items()]
            several.append(Line(sharding, points))
            if len(points) > 1:
                slope = slope_of(points)
                after.append(f"{sharding}, {what}: slope {slope:.2f} of log against log.")
    if arguments.record:
        plots = [Plot("ranks", what, several) for what, several in lines.items()]
        print(f"written to {draw('many-ranks', plots)}")
    _publish(arguments, rows, after, machine_load)


def _publish(
    arguments: Any, rows: Sequence[Sequence[str]], after: Sequence[str], machine_load: MachineLoad
) -> None:
    Findings(
        "many-ranks",
        heading="What a save and a resume cost beside their bytes, with many ranks",
        before=[
            f"`python benchmarks/many_ranks.py --record`: {arguments.tensors} tensors on simulated",
            f"ranks, the median of {arguments.rounds} saves, each in a fresh process. A save is",
            "what rank 0 does: encode, plan (with the pickled proposals of all ranks and what each",
            "receives), its indices, its files, the commit with the files of all ranks. A resume",
            "is one rank of a quarter as many: it opens the checkpoint and does all but read the",
            "data files. Memory is the peak above what the process had before. The aims with",
            f"4,096 ranks: {AIM_SECONDS:.0f} s, {AIM_MEGABYTES:.0f} MB and, for the resume,",
            f"{AIM_RESUME_SECONDS:.0f} s. A slope of 1 is linear, of 0 flat.",
        ],
        title=f"a save beside its bytes, {arguments.rounds} rounds",
        headings=("sharding", "ranks", *FIELDS),
        rows=rows,
        packages=("torch", "numpy"),
        after=after,
        load=machine_load,
    ).publish(arguments.record)
    for line in after:
        print(line)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    main()
