"""Copies of checkpoints in further places: what is copied, what is chosen, what is never shown."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Place
from resumekit.adapters.torch import Checkpointer
from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    ForeignCheckpointError,
    MissingDependencyError,
    PlaceError,
)
from resumekit.places import client, mirror, object_store
from resumekit.places.copies import open_client
from resumekit.record.trace import RUN_ROOT_VARIABLE
from resumekit.run.options import Options
from resumekit.storage.directories import StepName
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

URL = "faulty://bucket/run"
SECRET = "hunter22-secret"


class FaultyStore(MemoryFileSystem):
    """A store in memory that can refuse, stall and count."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[Exception | None] = None
    stalled: ClassVar[threading.Event | None] = None
    written: ClassVar[list[str]] = []
    copied: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        bare = path.rpartition("@")[2].removeprefix("faulty://").strip("/")
        return f"/{bare}" if bare else ""

    def _check(self) -> None:
        if self.stalled is not None:
            self.stalled.wait(30)
        if self.error is not None:
            raise self.error

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._check()
        return super().ls(path, detail=detail, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._check()
        if "w" in mode:
            self.written.append(path.partition("/run/")[2])
        return super()._open(path, mode, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.copied.append(path2.partition("/run/")[2])
        super().cp_file(path1, path2, **options)


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultyStore]]:
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("written", []), ("copied", [])):
        monkeypatch.setattr(FaultyStore, name, value)
    monkeypatch.setattr(mirror, "_FIRST_PAUSE_SECONDS", 0.02)
    yield FaultyStore
    if FaultyStore.stalled is not None:
        FaultyStore.stalled.set()
    FaultyStore.error = FaultyStore.stalled = None


def train(
    directory: Path, *, steps: int = 6, stop_at: int | None = None, frozen: int = 0, **options: Any
) -> Any:
    """The weights at the end of a run that saves every two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    if frozen:
        model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(frozen), False))
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
    options = {"save_every": 2, "mirror_flush": "20s", **options}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for (x,) in ckpt.batches(loader, steps=steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            ckpt.step()
            if ckpt.progress.step == stop_at:
                break
    return model.state_dict()["0.weight"].clone()


def names_in(url: str | Path) -> list[int]:
    return [name.step for name in open_client(Place(url)).names()]


def steps_of(directory: Path) -> list[int]:
    return [name.step for name in Store(directory).step_names()]


# ---------------------------------------------------------------- copied, and found again


@pytest.mark.parametrize("kind", ["store", "directory"])
def test_a_wiped_run_continues_bit_for_bit_from_its_newest_copy(kind: str, tmp_path: Path) -> None:
    place = URL if kind == "store" else tmp_path / "place"
    reference = train(tmp_path / "reference")
    train(tmp_path / "a", stop_at=4, mirror=place)
    run_id = Store(tmp_path / "a").recorded_run_id()
    assert names_in(place)[0] == 4
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(train(tmp_path / "a", mirror=place), reference)
    assert Store(tmp_path / "a").recorded_run_id() == run_id
    assert names_in(place)[0] == 6


def test_a_copy_has_the_bytes_of_the_original(tmp_path: Path) -> None:
    train(tmp_path / "a", stop_at=4, mirror=tmp_path / "place")  # the end waits for the copy
    train(tmp_path / "a", mirror=tmp_path / "place")
    for step in ("step-00000004", "step-00000006"):
        original = tmp_path / "a" / step
        for path in (each for each in original.rglob("*") if each.is_file()):
            copy = tmp_path / "place" / step / path.relative_to(original)
            assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("damage", ["all", "newest"])
def test_a_damaged_checkpoint_is_replaced_by_its_copy(damage: str, tmp_path: Path) -> None:
    reference = train(tmp_path / "reference")
    train(tmp_path / "a", stop_at=4, mirror=URL)
    for step in (2, 4) if damage == "all" else (4,):
        path = tmp_path / "a" / str(StepName(step)) / "model" / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert torch.equal(train(tmp_path / "a", mirror=URL), reference)
    assert len(list((tmp_path / "a" / "quarantine").glob("*.json"))) == 1  # only 4 was tried


def test_a_checkpoint_that_only_a_place_has_can_be_named(tmp_path: Path) -> None:
    train(tmp_path / "a", mirror=URL, keep_latest=None)
    shutil.rmtree(tmp_path / "a")
    train(tmp_path / "a", mirror=URL, keep_latest=None, resume_from="step-00000002")
    assert 2 in steps_of(tmp_path / "a")


def test_a_copy_that_is_damaged_is_passed_over(
    tmp_path: Path, faulty: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", stop_at=4, mirror=URL)
    shutil.rmtree(tmp_path / "a")
    (path,) = (each for each in faulty.store if "4/model/rank-00000.safetensors" in each)
    data = faulty().cat_file(path)
    faulty().pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    reference = train(tmp_path / "reference")
    with caplog.at_level(logging.INFO, "resumekit"):
        assert torch.equal(train(tmp_path / "a", mirror=URL), reference)
    assert "step-00000002 was fetched from" in caplog.text
    assert "passed over step-00000004" in caplog.text
    assert not list((tmp_path / "a" / ".staging").iterdir())


def test_without_its_manifest_a_copy_is_no_candidate(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    train(tmp_path / "a", stop_at=2, mirror=URL)
    (path,) = (each for each in faulty.store if each.endswith("manifest.json"))
    faulty().rm_file(path)
    assert names_in(URL) == []
    shutil.rmtree(tmp_path / "a")
    train(tmp_path / "a", stop_at=2)  # a fresh start: nothing was ever mirrored


def test_the_manifest_is_the_last_file(tmp_path: Path, faulty: type[FaultyStore]) -> None:
    train(tmp_path / "a", stop_at=2, mirror=URL)
    manifests = [path.endswith("manifest.json") for path in faulty.written]
    assert manifests == [False] * (len(manifests) - 1) + [True]


# ---------------------------------------------------------------- places that do not answer


def test_a_place_that_is_away_is_one_warning_and_training_goes_to_its_end(
    tmp_path: Path, faulty: type[FaultyStore], caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", stop_at=2)
    faulty.error = PermissionError(f"The provided token {SECRET} has expired")
    place = Place(URL, storage_options={"token": SECRET})
    with caplog.at_level(logging.WARNING, "resumekit"):
        train(tmp_path / "a", mirror=place, mirror_flush="0.3s")
    texts = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(texts) == 3
    assert "the checkpoints there are left out" in texts[0]
    assert "not mirrored yet, training continues" in texts[1]
    assert "step-00000006" in texts[2]
    assert "resumekit mirror" in texts[2]
    assert SECRET not in "".join(texts)
    faulty.error = None
    train(tmp_path / "a", mirror=place)  # it has finished: the next launch copies it
    assert names_in(URL) == [6]


def test_a_place_that_is_away_stops_a_run_that_could_have_checkpoints_there(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    train(tmp_path / "a", stop_at=4, mirror=URL)
    shutil.rmtree(tmp_path / "a")
    faulty.error = OSError("connection refused")
    with pytest.raises(PlaceError, match="connection refused"):
        train(tmp_path / "a", mirror=URL)
    faulty.error = None
    assert not (tmp_path / "a").exists()  # else its new id would differ from that of the copies
    reference = train(tmp_path / "left out")
    assert torch.equal(train(tmp_path / "a", mirror=URL), reference)


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "no directory").write_text("")
    with pytest.raises(PlaceError, match="Not a directory"):
        train(tmp_path / "a", mirror=tmp_path / "no directory")
    assert not (tmp_path / "a").exists()


def test_a_stalled_place_delays_neither_the_start_nor_training_nor_the_end(
    tmp_path: Path, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALL_SECONDS", 1.0)
    train(tmp_path / "a", stop_at=2)
    faulty.stalled = threading.Event()
    train(tmp_path / "a", places=[tmp_path / "b", URL], mirror_flush="4s")
    assert steps_of(tmp_path / "a") == [6, 4, 2]  # 2 stays, as its upload may continue
    assert steps_of(tmp_path / "b") == [6, 4]  # the other place has its copies


def test_calls_that_never_return_do_not_pile_up(
    faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALL_SECONDS", 0.05)
    faulty.stalled = threading.Event()
    stalled = open_client(Place(URL))
    for _ in range(6):
        with pytest.raises(PlaceError):
            stalled.names()
    threads = stalled._abandoned
    assert len(threads) == 3
    faulty.stalled.set()
    for thread in threads:
        thread.join()
    assert stalled.names() == []


def test_the_copies_of_another_run_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "a", mirror=URL)
    train(tmp_path / "b")
    with pytest.raises(ForeignCheckpointError, match="the copies of run"):
        train(tmp_path / "b", mirror=URL)
    train(tmp_path / "b", mirror=f"{URL}-b")
    train(tmp_path / "c", mirror=URL)
    assert names_in(f"{URL}-b") == [6]
    run_ids = [Store(tmp_path / each).recorded_run_id() for each in ("a", "c")]
    assert run_ids[0] == run_ids[1]


# ---------------------------------------------------------------- what is sent, and what stays


def mirrored(directory: Path, step: int, place: Place, keep: int | None = None) -> None:
    reader = Store(directory).open_step(StepName(step))
    open_client(place).put(reader, RetentionPolicy(keep), lambda _: None)


def test_an_interrupted_upload_sends_only_what_is_missing(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    train(tmp_path / "a", stop_at=2)
    mirrored(tmp_path / "a", 2, Place(URL))
    everything = list(faulty.written)
    for path in [each for each in faulty.store if "manifest" in each or "optimizer" in each]:
        faulty().rm_file(path)
    changed = next(each for each in faulty.store if each.endswith("state/rank-00000.json"))
    faulty().pipe_file(changed, bytes(len(faulty().cat_file(changed))))  # of the right size
    faulty.written.clear()
    mirrored(tmp_path / "a", 2, Place(URL))
    missing = [each for each in everything if "model" not in each]
    assert sorted(faulty.written) == [
        each for each in sorted(missing) if not each.endswith("state/rank-00000.safetensors")
    ]
    faulty.written.clear()
    mirrored(tmp_path / "a", 2, Place(URL))
    assert faulty.written == []


@pytest.mark.parametrize("kind", ["store", "directory"])
def test_files_that_the_copy_before_has_too_are_not_sent_again(
    kind: str, tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    train(tmp_path / "a", keep_latest=None, frozen=2 << 20)  # 8 MiB, in a file of its own
    place = Place(URL if kind == "store" else tmp_path / "place")
    for step in (2, 4):
        mirrored(tmp_path / "a", step, place)
    manifests = [Store(tmp_path / "a").open_step(StepName(step)).manifest for step in (2, 4)]
    common = [each.path for each in manifests[0].files if each in manifests[1].files]
    assert common
    if kind == "store":
        assert faulty.copied == [f"step-00000004/{path}" for path in common]
    else:
        for path in common:
            assert (tmp_path / "place" / "step-00000004" / path).stat().st_nlink == 2


def test_a_damaged_file_is_not_mirrored(tmp_path: Path) -> None:
    train(tmp_path / "a", stop_at=2)
    path = tmp_path / "a" / "step-00000002" / "model" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for place in (Place(URL), Place(tmp_path / "place")):
        with pytest.raises(CorruptCheckpointError, match="digest"):
            mirrored(tmp_path / "a", 2, place)
        assert open_client(place).names() == []


def test_what_the_store_has_changed_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "a", stop_at=2)
    read = object_store.StoreCopies.blocks
    monkeypatch.setattr(
        object_store.StoreCopies,
        "blocks",
        lambda *arguments: (memoryview(bytes(each)[:-1] + b"?") for each in read(*arguments)),
    )
    with pytest.raises(PlaceError, match="other bytes than were written"):
        mirrored(tmp_path / "a", 2, Place(URL))
    assert names_in(URL) == []


def test_retention_of_a_place_keeps_the_newest_and_removes_manifests_first(
    tmp_path: Path, faulty: type[FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(
        FaultyStore,
        "rm_file",
        lambda self, path: removed.append(path) or self.store.pop(path),  # type: ignore[func-returns-value]
    )
    train(tmp_path / "a", steps=10, keep_latest=None)
    for step in (2, 4, 6, 8):
        mirrored(tmp_path / "a", step, Place(URL), keep=2)
    assert names_in(URL) == [8, 6]
    of_one = [path for path in removed if "step-00000002" in path]
    assert of_one[0].endswith("step-00000002/manifest.json")
    assert len(of_one) > 1
    mirrored(tmp_path / "a", 2, Place(URL), keep=1)  # an older one, by hand
    assert names_in(URL) == [8, 2]


def test_another_checkpoint_of_the_same_name_stays_in_the_place(tmp_path: Path) -> None:
    train(tmp_path / "a", stop_at=2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for directory in ("a", "b"):
        train(tmp_path / directory, stop_at=4)
    mirrored(tmp_path / "a", 4, Place(URL))
    kept = open_client(Place(URL)).manifest(StepName(4))
    with pytest.raises(ForeignCheckpointError, match="another checkpoint"):
        mirrored(tmp_path / "b", 4, Place(URL))
    assert open_client(Place(URL)).manifest(StepName(4)) == kept
    mirrored(tmp_path / "b", 4, Place(f"{URL}-b"))
    assert names_in(f"{URL}-b") == [4]


def test_retention_of_the_run_leaves_what_is_being_uploaded(
    tmp_path: Path, faulty: type[FaultyStore]
) -> None:
    train(tmp_path / "a", stop_at=2)
    store = Store(tmp_path / "a")
    store.acquire()
    faulty.stalled = threading.Event()
    copies = mirror.Mirror(store, [(open_client(Place(URL)), None)], RetentionPolicy(1))
    while not copies._uploads[0]._current:
        time.sleep(0.001)
    assert store._pins == {StepName(2): 1}
    faulty.stalled.set()
    copies.finish(20)
    assert not store._pins
    store.release()
    assert names_in(URL) == [2]


@pytest.mark.parametrize(
    ("save_every", "expected"), [(None, [10, 8, 6, 4, 2]), (4, [10, 6, 2]), ("1h", [10, 2])]
)
def test_a_place_has_a_cadence_and_gets_the_last_checkpoint(
    save_every: Any, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = mirror.Mirror.offer

    def offer_and_wait(self: mirror.Mirror, name: StepName) -> None:
        offer(self, name)
        while any(not each._is_idle() for each in self._uploads):
            time.sleep(0.001)

    monkeypatch.setattr(mirror.Mirror, "offer", offer_and_wait)
    place = Place(URL, save_every=save_every, keep_latest=100)
    train(tmp_path / "a", steps=10, places=[place])
    assert names_in(URL) == expected


def test_a_tool_that_repeats_a_run_in_a_scratch_directory_leaves_its_places_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_ROOT_VARIABLE, str(tmp_path / "scratch"))
    train(tmp_path / "a", mirror=URL)
    assert names_in(URL) == []


def test_a_limit_of_the_bandwidth_holds_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(mirror.time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(mirror.time, "sleep", slept.append)
    limit = mirror._Limit(Place("/x", max_bandwidth="20MB/s").bytes_per_second)
    for _ in range(10):
        limit.wait(4_000_000)
    assert sum(slept) == pytest.approx(2.0)
    mirror._Limit(Place("/x").bytes_per_second).wait(10**12)
    assert sum(slept) == pytest.approx(2.0)


def test_the_limit_is_asked_for_every_byte_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(mirror._Limit, "wait", lambda self, num_bytes: seen.append(num_bytes))
    train(tmp_path / "a", steps=2, mirror=tmp_path / "place")
    assert sum(seen) >= sum(path.stat().st_size for path in tmp_path.glob("place/step-*/*/*"))


# ---------------------------------------------------------------- what the user writes, and sees


@pytest.mark.parametrize(
    "options",
    [
        {"places": "s3://bucket/run"},
        {"places": [""]},
        {"places": [3]},
        {"places": ["/x", "/x/"]},
        {"places": ["/x"], "mirror": "file:///x"},
        {"mirror_flush": "soon"},
        {"mirror_flush": 60},
    ],
)
def test_options_without_a_meaning_are_refused(options: Any) -> None:
    with pytest.raises(ConfigurationError):
        Options(**options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"save_every": "auto"},
        {"save_every": 0},
        {"keep_latest": 0},
        {"max_bandwidth": 20},
        {"max_bandwidth": "0.1MB/s"},
        {"max_bandwidth": "20Mbit/s"},
    ],
)
def test_places_without_a_meaning_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigurationError):
        Place("/x", **arguments)


def test_the_run_directory_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the run directory"):
        train(tmp_path / "a", mirror=tmp_path / "a")


@pytest.mark.parametrize("url", ["nonsense://x/y", "nonsense::/x"])
def test_a_url_that_nothing_opens_is_an_error_at_the_start(url: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, MissingDependencyError, PlaceError)):
        train(tmp_path / "a", mirror=url)


def test_credentials_are_not_shown() -> None:
    url = f"s3://user:{SECRET}@bucket/run?signature={SECRET}"
    place = Place(url, storage_options={"client_kwargs": {"aws_secret_access_key": SECRET}})
    options = Options(mirror=url, places=[place.directory or "/x", Place("/y")])
    shown = f"{place} {place!r} {options!r} {options.as_plain()}"
    shown += place.without_secrets(f"GET https://h/x?X-Amz-Signature={SECRET} of {SECRET}")
    assert SECRET not in shown
    assert "s3://bucket/run" in shown


def test_credentials_are_not_recorded(tmp_path: Path) -> None:
    url = f"faulty://user:{SECRET}@bucket/run"
    train(tmp_path / "a", mirror=Place(url, storage_options={"key": SECRET}))
    for path in (each for each in tmp_path.rglob("*") if each.is_file()):
        assert SECRET.encode() not in path.read_bytes()
