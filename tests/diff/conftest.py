"""Hand-made checkpoints, each of a run of its own: of one rank, or sharded over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from resumekit.serialization.planning import Assignment, Proposal, assign, encode_local
from resumekit.serialization.sharding import FlatPart
from resumekit.serialization.writing import Payload
from resumekit.storage.commit import Staging
from resumekit.storage.files import FileEntry
from resumekit.storage.manifest import ComponentRecord, Manifest, StepReader
from resumekit.storage.store import Store


class Checkpoints:
    """Writes checkpoints of nested states."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stores: list[Store] = []

    def whole(self, states: Mapping[str, Any], **settings: Any) -> StepReader:
        """The checkpoint of one rank with these states by component key."""
        records = [ComponentRecord(key, "global", "exact", "", "state", (0,)) for key in states]
        return self.commit(Payload.of_states("state", 0, states).write, records, 1, settings)

    def per_rank(self, key: str, states: Sequence[Any]) -> StepReader:
        """The checkpoint of a component of which each rank has its own state."""
        writers = tuple(range(len(states)))
        record = ComponentRecord(key, "per_rank", "exact", "", "state", writers)
        payloads = [
            Payload.of_states("state", rank, {key: state}) for rank, state in enumerate(states)
        ]
        return self.commit(_all(payloads), [record], len(states))

    def sharded(self, whole: Mapping[str, torch.Tensor], num_ranks: int) -> StepReader:
        """The checkpoint of a model that is sharded by ranges of its elements."""
        local = [
            encode_local("model", {name: _part(w, rank, num_ranks) for name, w in whole.items()})
            for rank in range(num_ranks)
        ]
        plan = assign(local[0], [Proposal.of(each, rank) for rank, each in enumerate(local)])
        payloads = [
            Payload.of_shards(
                *("state", rank, each),
                Assignment.of(each, plan.choice, positions, None if rank else plan.tensors),
            )
            for rank, (each, positions) in enumerate(zip(local, plan.positions, strict=True))
        ]
        writers = tuple(range(num_ranks))
        record = ComponentRecord("model", "sharded", "exact", "", "state", writers)
        return self.commit(_all(payloads), [record], num_ranks)

    def commit(
        self,
        write: Callable[[Staging], list[FileEntry]],
        records: Sequence[ComponentRecord],
        num_ranks: int,
        settings: Mapping[str, Any] | None = None,
    ) -> StepReader:
        """The checkpoint with these files."""
        store = Store(self._directory / f"run-{len(self._stores)}")
        store.acquire()
        self._stores.append(store)
        name = store.next_name(1)
        staging = store.stage(name, num_bytes=0, num_files=2, directories=["state"])
        with staging.writing():
            files = write(staging)
        manifest = Manifest(
            *(store.run_id, store.attempt, 1, "2026-01-31T12:00:00+00:00", num_ranks),
            progress={},
            components=tuple(records),
            files=tuple(files),
            fingerprint=settings or {},
        )
        store.commit(staging, manifest)
        return store.open_step(name)

    def close(self) -> None:
        """Releases the directories."""
        for store in self._stores:
            store.release()


def _all(payloads: Sequence[Any]) -> Callable[[Staging], list[FileEntry]]:
    return lambda staging: [entry for each in payloads for entry in each.write(staging)]


def _part(whole: torch.Tensor, rank: int, num_ranks: int) -> FlatPart:
    begin, end = (whole.numel() * each // num_ranks for each in (rank, rank + 1))
    return FlatPart(whole.shape, begin, whole.reshape(-1)[begin:end])


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    made = Checkpoints(tmp_path)
    yield made
    made.close()
