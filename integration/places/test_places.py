"""A run with a mirror on a real server that is killed, restarted or stopped, as the training is."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from place_servers import SECRET, Server

from resumekit.errors import CheckpointError
from resumekit.places import object_store
from resumekit.places.copies import open_client
from resumekit.places.object_store import StoreCopies
from resumekit.places.place import Place
from resumekit.storage.directories import StepName
from resumekit.storage.files import BlockDigester, FileEntry
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import StepReader, read_manifest

SCRIPT = Path(__file__).with_name("places_training.py")
STEPS = 80
KINDS = ("directory", "s3", "sftp")
RecordProperty = Callable[[str, object], None]
ONE_OR_FIFTY = [pytest.param(1, id="one"), pytest.param(50, marks=pytest.mark.full, id="fifty")]
# Of one step beside a mirror that is away. Anything that waits for the mirror takes longer: the
# pause before a further attempt is two seconds, and a stalled call takes a minute.
LONGEST_STEP_SECONDS = 1.9


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Server]]:
    servers: list[Server] = []

    def begin(kind: str) -> Server:
        if kind == "s3":
            pytest.importorskip("s3fs", reason="needs s3fs")
        if kind == "sftp":
            pytest.importorskip("paramiko", reason="needs paramiko")
        server = Server(kind, tmp_path / kind)
        servers.append(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        return server

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield begin
    for server in servers:
        server.signal(signal.SIGCONT)
        server.kill()


def start(
    directory: Path, place: str, flush: str = "60s", steps: int = STEPS
) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(directory), place, str(steps), flush]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """What it has written, once it has ended well."""
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def digest_of(text: str) -> str:
    return text.split("digest ")[1].split()[0]


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == f"step {step}\n":
            return
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nothing has disturbed."""
    root = tmp_path_factory.mktemp("reference")
    return digest_of(finish(start(root / "run", str(root / "place"))))


def half_copies(place: str) -> list[str]:
    """The copies that look complete, and are not."""
    client, found = open_client(Place(place)), []
    for name in client.names():
        try:
            for entry in client.manifest(name).files:
                digester = BlockDigester()
                for block in client.blocks(name, entry):
                    digester.update(block)
                if digester.hexdigest() != entry.digest:
                    found.append(f"{name}/{entry.path}")
        except (CheckpointError, OSError) as error:
            found.append(f"{name}: {error}")
    return found


def verify_files(directory: Path) -> None:
    """Checks that each copy with a valid manifest is whole, on the disk of a server that is away.

    Raises:
        CheckpointError: one is not.
    """
    for path in directory.glob("step-*/manifest.json"):
        name = StepName.from_text(path.parent.name)
        try:
            read_manifest(LocalFileSystem(), directory, name)
        except CheckpointError:
            continue  # half a manifest is none
        StepReader(LocalFileSystem(), directory, name).verify()


def kill_at_random(server: Server, directory: Path, seed: int) -> list[str]:
    """Kills a training while it uploads, and wipes its directory; the half copies in the place."""
    process = start(directory, server.place_of(seed))
    chosen = random.Random(seed)
    wait_for_step(process, chosen.randrange(8, 70))
    time.sleep(chosen.uniform(0, 0.3))
    process.kill()
    process.communicate()
    shutil.rmtree(directory)
    return half_copies(server.place_of(seed))


@pytest.mark.quick("one-s3")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_kills", ONE_OR_FIFTY)
def test_a_wiped_disk_during_an_upload_continues_from_the_newest_whole_copy(
    kind: str,
    num_kills: int,
    serve: Callable[[str], Server],
    tmp_path: Path,
    reference: str,
    record_property: RecordProperty,
) -> None:
    server = serve(kind)
    for seed in range(num_kills):
        place = server.place_of(seed)
        assert kill_at_random(server, tmp_path / "a", seed) == []
        newest = max((each.step for each in open_client(Place(place)).names()), default=0)
        text = finish(start(tmp_path / "a", place))
        assert digest_of(text) == reference
        assert f"resuming at step {newest} " in text or newest in (0, STEPS)
        shutil.rmtree(tmp_path / "a")
    record_property(f"disk wiped during an upload, {kind}", num_kills)


def test_with_the_manifest_first_a_kill_leaves_a_half_copy(
    serve: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANIFEST_FIRST", "1")
    server = serve("s3")
    for seed in range(10):
        if kill_at_random(server, tmp_path / "a", seed):
            return
    pytest.fail("no half copy in ten kills: the trials show nothing")


def disturb_at_random(server: Server, directory: Path, seed: int) -> tuple[str, float]:
    """A training whose server is killed or stopped during an upload, and is there again later.

    Returns:
        What it has written, and the seconds of its longest step.
    """
    place, chosen = server.place_of(seed), random.Random(seed)
    first = chosen.randrange(8, 70)
    process = start(directory, place)
    wait_for_step(process, first)
    time.sleep(chosen.uniform(0, 0.1))
    server.kill() if seed % 2 else server.signal(signal.SIGSTOP)
    verify_files(server.root / "bucket" / f"run-{seed}")
    wait_for_step(process, chosen.randrange(first + 10, STEPS + 1))  # training goes through it
    server.start() if seed % 2 else server.signal(signal.SIGCONT)
    text = finish(process)
    assert "not mirrored when this launch ends" not in text
    assert half_copies(place) == []
    assert max(open_client(Place(place)).names()).step == STEPS
    return text, float(text.split("longest ")[1].split()[0])


@pytest.mark.quick("one-s3")
@pytest.mark.parametrize("kind", ["s3", "sftp"])
@pytest.mark.parametrize("num_trials", ONE_OR_FIFTY)
def test_a_server_that_is_killed_or_stopped_during_an_upload_delays_no_step(
    kind: str,
    num_trials: int,
    serve: Callable[[str], Server],
    tmp_path: Path,
    reference: str,
    record_property: RecordProperty,
) -> None:
    server, longest = serve(kind), []
    for seed in range(num_trials):
        text, seconds = disturb_at_random(server, tmp_path / f"{seed}", seed)
        assert digest_of(text) == reference
        longest.append(seconds)
    assert max(longest) < LONGEST_STEP_SECONDS
    record_property(f"mirror killed or stalled, {kind}", num_trials)
    record_property(f"longest step beside it in ms, {kind}", round(1e3 * max(longest)))


def test_a_training_that_waits_for_its_mirror_is_seen_to_wait(
    serve: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAIT_FOR_MIRROR", "1")
    server = serve("s3")
    process = start(tmp_path / "a", server.place, steps=20)
    wait_for_step(process, 9)
    server.signal(signal.SIGSTOP)
    time.sleep(LONGEST_STEP_SECONDS + 1)
    server.signal(signal.SIGCONT)
    text = finish(process)
    assert float(text.split("longest ")[1].split()[0]) > LONGEST_STEP_SECONDS


@pytest.mark.full
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_a_server_that_is_killed_and_restarted_has_all_copies_in_the_end(
    kind: str, serve: Callable[[str], Server], tmp_path: Path, reference: str
) -> None:
    server = serve(kind)
    process = start(tmp_path / "a", server.place)
    wait_for_step(process, 20)
    server.kill()
    wait_for_step(process, 60)  # training goes through it
    server.start()
    text = finish(process)
    assert digest_of(text) == reference
    assert "not mirrored when this launch ends" not in text
    assert text.count("WARNING") <= 1
    assert half_copies(server.place) == []
    assert max(open_client(Place(server.place)).names()).step == STEPS


@pytest.mark.quick("s3")
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_a_server_that_stalls_for_ever_delays_only_the_exit_and_only_by_the_flush(
    kind: str, serve: Callable[[str], Server], tmp_path: Path, reference: str
) -> None:
    server = serve(kind)
    process = start(tmp_path / "a", server.place, flush="2s")
    wait_for_step(process, 20)
    server.signal(signal.SIGSTOP)
    text = finish(process)  # it would not end, if anything waited for the server
    assert digest_of(text) == reference
    assert "not mirrored when this launch ends: step-00000080" in text
    assert SECRET not in text
    server.signal(signal.SIGCONT)
    text = finish(start(tmp_path / "a", server.place))
    assert "nothing to do" in text
    assert max(open_client(Place(server.place)).names()).step == STEPS
    assert half_copies(server.place) == []


@pytest.mark.quick("s3")
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_the_commands_copy_both_ways_and_no_file_shows_the_password(
    kind: str, serve: Callable[[str], Server], tmp_path: Path
) -> None:
    server = serve(kind)
    finish(start(tmp_path / "a", str(tmp_path / "b"), steps=10))

    def resumekit(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "resumekit.cli", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    for word in ("copied", "was there"):
        done = resumekit("mirror", tmp_path / "a", server.place)
        assert (done.returncode, done.stdout.count(word)) == (0, 2), done
    done = resumekit("fetch", server.place, tmp_path / "c", "--step", "5")
    assert done.returncode == 0, done
    assert [each.name for each in tmp_path.glob("c/step-*")] == ["step-00000005"]
    done = resumekit("list", tmp_path / "c", "--place", server.place)
    assert done.stdout.count("bucket/run-0") == 2, done
    assert "only in a place" in done.stdout
    server.kill()
    done = resumekit("fetch", server.place, tmp_path / "d")
    assert done.returncode == 2
    assert done.stderr.count("\n") <= 2
    assert SECRET not in done.stdout + done.stderr
    finish(start(tmp_path / "e", str(tmp_path / "f"), steps=10))
    for path in (each for each in tmp_path.rglob("*") if each.is_file()):
        assert SECRET.encode() not in path.read_bytes()


@pytest.mark.quick("20")
@pytest.mark.parametrize("num_blocks", [1, 20])
def test_an_upload_that_is_given_up_replaces_no_file(
    num_blocks: int,
    serve: Callable[[str], Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve("s3")
    finish(start(tmp_path / "a", server.place, steps=5))
    copies = StoreCopies(Place(server.place))
    source = StepReader(LocalFileSystem(), tmp_path / "a", StepName(5))
    entry = next(each for each in source.manifest.files if each.path.endswith(".safetensors"))

    def blocks(self: StepReader, entry: FileEntry) -> Iterator[memoryview]:
        for _ in range(num_blocks):
            yield memoryview(bytes(4 << 20))
        raise OSError("given up")

    monkeypatch.setattr(StepReader, "blocks", blocks)
    with pytest.raises(OSError, match="given up"):
        copies._write(source, entry, None, lambda _: None)
    gc.collect()
    assert half_copies(server.place) == []


def test_a_file_of_several_parts_is_verified_by_its_checksum(
    serve: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("s3")
    data = random.Random(0).randbytes(object_store._PART_BYTES * 2 + 5)
    digester = BlockDigester()
    digester.update(memoryview(data))
    entry = FileEntry("x", len(data), digester.hexdigest(), 0)
    copies = StoreCopies(Place(server.place))
    sums = object_store._Checksums(entry)
    blocks = (memoryview(data)[at : at + (4 << 20)] for at in range(0, len(data), 4 << 20))
    path = f"{copies._root}/x"
    with copies._created(path, sums.part_bytes) as file:
        for block in sums.of(blocks, "here"):
            file.write(block)
    assert sums.match(copies._fs.info(path))
    assert xxhash.xxh3_64(copies._fs.cat_file(path)).digest() == xxhash.xxh3_64(data).digest()
    assert os.environ["AWS_ENDPOINT_URL"]
