from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from failpoints import FailpointFileSystem, parse_failpoints
from hypothesis import given
from hypothesis import strategies as st

from resumekit.errors import CorruptCheckpointError, SaveError
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName, seal
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import Manifest
from resumekit.storage.parts import Part, Parts
from resumekit.storage.store import Store

OpenStore = Callable[..., Store]
MakeManifest = Callable[..., Manifest]

STEP = StepName(5)
SAVE_NUMBER = 2


def _stage(store: Store) -> Staging:
    return store.stage(STEP, num_bytes=99, num_files=2, directories=["state"], with_parts=True)


def _parts(store: Store, staging: Staging, *, world_size: int = 2) -> Parts:
    return staging.parts(
        run_id=store.run_id,
        attempt=store.attempt,
        save_number=SAVE_NUMBER,
        world_size=world_size,
    )


def _part(store: Store, rank: int, *files: FileEntry, error: str | None = None) -> Part:
    return Part(store.run_id, store.attempt, STEP.step, SAVE_NUMBER, rank, files, error)


def _write(staging: Staging, rank: int) -> FileEntry:
    with staging.create(f"state/rank-{rank:05d}.json", writer=rank) as writer:
        writer.write([memoryview(b"%d" % rank)])
        return writer.finish()


def test_ranks_that_left_their_parts_are_committed_without_a_trace_of_them(
    store: Store, open_store: OpenStore, make_manifest: MakeManifest
) -> None:
    staging = _stage(store)
    other = open_store()
    other.join(store.run_id, store.attempt)
    attached = other.attach(staging.name)
    parts = _parts(store, staging)
    assert not parts.look()
    attached.leave_part(_part(other, 1, _write(attached, 1)))
    assert not parts.look()
    assert parts.missing == (0,)
    staging.leave_part(_part(store, 0, _write(staging, 0)))
    assert parts.look()
    assert (parts.missing, parts.failures) == ((), {})
    assert [part.rank for part in parts.found] == [0, 1]
    manifest = make_manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        name=STEP,
        files=parts.files(),
        world_size=2,
    )
    path = store.commit(staging, manifest)
    assert sorted(item.name for item in path.iterdir()) == ["manifest.json", "state"]
    store.open_step(STEP).verify()


def test_parts_that_are_missing_are_named_and_nothing_is_committed(store: Store) -> None:
    staging = _stage(store)
    parts = _parts(store, staging, world_size=3)
    staging.leave_part(_part(store, 1))
    assert not parts.look()
    assert parts.missing == (0, 2)
    with pytest.raises(SaveError, match=r"no part of ranks 0, 2, expected the parts of 3 ranks"):
        parts.files()


def test_of_many_missing_ranks_the_first_are_named(store: Store) -> None:
    parts = _parts(store, _stage(store), world_size=4096)
    with pytest.raises(SaveError, match=r"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4088 more"):
        parts.files()


def test_a_rank_that_failed_ends_the_wait_with_its_error(store: Store) -> None:
    staging = _stage(store)
    parts = _parts(store, staging)
    written = _write(staging, 1)
    staging.leave_part(_part(store, 1, written, error="ENOSPC (No space left on device)"))
    assert parts.look()
    assert parts.failures == {1: "ENOSPC (No space left on device)"}
    staging.leave_part(_part(store, 0))
    parts.look()
    with pytest.raises(SaveError, match=r"rank 1: its part of the checkpoint failed: ENOSPC"):
        parts.files()


@pytest.mark.parametrize("first", ["success", "error"])
def test_of_two_parts_of_a_rank_the_error_counts(store: Store, first: str) -> None:
    staging = _stage(store)
    parts = _parts(store, staging, world_size=1)
    both = [_part(store, 0), _part(store, 0, error="EIO")]
    for part in both if first == "success" else reversed(both):
        staging.leave_part(part)
        assert parts.look()
    assert parts.failures == {0: "EIO"}


@pytest.mark.parametrize(
    "stale",
    [
        pytest.param({"run_id": "0" * 32}, id="run"),
        pytest.param({"attempt": "0" * 32}, id="attempt"),
        pytest.param({"step": 4}, id="step"),
        pytest.param({"save_number": 1}, id="save number"),
        pytest.param({"rank": 2}, id="rank out of range"),
    ],
)
@pytest.mark.parametrize("error", [None, "EIO"])
def test_a_part_of_another_save_is_never_accepted(
    store: Store, stale: dict[str, object], error: str | None
) -> None:
    staging = _stage(store)
    parts = _parts(store, staging)
    staging.leave_part(replace(_part(store, 0, error=error), **stale))  # type: ignore[arg-type]
    assert not parts.look()
    assert (parts.missing, parts.failures) == ((0, 1), {})
    staging.leave_part(_part(store, 0))  # the right one is found beside it
    parts.look()
    assert parts.missing == (1,)


def test_a_part_that_is_seen_half_is_read_again(store: Store) -> None:
    staging = _stage(store)
    parts = _parts(store, staging, world_size=1)
    staging.leave_part(_part(store, 0))
    (path,) = (staging.path / "parts").iterdir()
    content = path.read_bytes()
    for size in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        assert not parts.look()
    with pytest.raises(SaveError, match=r"no part of rank 0; rank-00000-\w+.json: .* seals them"):
        parts.files()
    path.write_bytes(content)
    assert parts.look()


def test_a_part_that_is_being_written_is_not_looked_at(store: Store) -> None:
    staging = _stage(store)
    parts = _parts(store, staging, world_size=1)
    staging.leave_part(_part(store, 0))
    (path,) = (staging.path / "parts").iterdir()
    path.rename(path.with_name(f".draft-{path.name}"))
    assert not parts.look()


def test_a_look_lists_once_and_reads_each_part_once(open_store: OpenStore) -> None:
    counting = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=counting)
    store.acquire()
    staging = _stage(store)
    parts = _parts(store, staging, world_size=50)
    for rank in range(1, 50):
        staging.leave_part(_part(store, rank))
    before = counting.counts.copy()
    for _ in range(10):
        assert not parts.look()
    made = counting.counts - before
    assert (made["list"], made["open"]) == (10, 49)


@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_a_rank_that_cannot_leave_its_part_reports_it_and_stays_missing(
    open_store: OpenStore, call: str
) -> None:
    failing = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=failing)
    store.acquire()
    staging = _stage(store)
    parts = _parts(store, staging, world_size=1)
    failing._plan = parse_failpoints(f"{call}:{failing.counts[call] + 1}=ENOSPC")
    with pytest.raises(SaveError, match="ENOSPC"):
        staging.leave_part(_part(store, 0))
    assert not parts.look()
    staging.leave_part(_part(store, 0, error="ENOSPC"))
    assert parts.look()


def test_a_part_after_the_commit_began_finds_no_directory(
    store: Store, make_manifest: MakeManifest, run_directory: Path
) -> None:
    staging = _stage(store)
    manifest = make_manifest(run_id=store.run_id, attempt=store.attempt, name=STEP, files=[])
    path = store.commit(staging, manifest)
    with pytest.raises(SaveError, match="ENOENT"):
        staging.leave_part(_part(store, 0))
    assert [item.name for item in path.iterdir()] == ["manifest.json"]


def test_a_poll_that_fails_is_an_error_of_the_save(open_store: OpenStore) -> None:
    failing = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=failing)
    store.acquire()
    staging = _stage(store)
    failing._plan = parse_failpoints(f"list:{failing.counts['list'] + 1}=EIO")
    with pytest.raises(SaveError, match=r"parts.*EIO"):
        _parts(store, staging).look()


ENTRIES = st.builds(
    FileEntry,
    st.sampled_from(["state/a", "model/\u00fc b"]),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["0" * 32, "f" * 32]),
    st.just(7),
)


@given(st.lists(ENTRIES, max_size=3), st.none() | st.text(max_size=50), st.integers(0, 2**40))
def test_a_part_is_read_back_as_it_was(
    files: list[FileEntry], error: str | None, step: int
) -> None:
    part = Part("a" * 32, "b" * 32, step, 1, 7, tuple(files), error)
    assert Part.from_bytes(part.to_bytes()) == part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "resumekit checkpoint"}, "expected 'resumekit part'"),
        ({"rank": -1}, "rank: -1, expected"),
        ({"save_number": True}, "save_number"),
        ({"error": 5}, "error"),
        ({"extra": 1}, "unknown: \\['extra'\\]"),
        ({"files": [{"path": "../x", "size": 1, "digest": "0" * 32, "writer": 7}]}, "path"),
        ({"files": [{"path": "a", "size": 1, "digest": "0" * 32, "writer": 6}]}, "another rank"),
    ],
)
def test_a_part_with_a_wrong_field_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {
        "format": "resumekit part",
        "run_id": "a" * 32,
        "attempt": "b" * 32,
        "step": 1,
        "save_number": 1,
        "rank": 7,
        "error": None,
        "files": [],
    }
    Part.from_bytes(seal(fields))
    with pytest.raises(CorruptCheckpointError, match=message):
        Part.from_bytes(seal({**fields, **changes}))
