from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from failpoints import FailpointFileSystem, parse_failpoints
from hypothesis import given
from hypothesis import strategies as st

from resumekit.errors import CorruptCheckpointError, SaveError, UnreadableCheckpointError
from resumekit.storage.file_reader import FileReader
from resumekit.storage.files import (
    BLOCK_BYTES,
    FIRST_BYTES,
    BlockDigester,
    FileEntry,
    FileWriter,
    Piece,
)
from resumekit.storage.io import pipeline
from resumekit.storage.io.direct import address_of
from resumekit.storage.io.file_system import FileSystem, LocalFileSystem, ReadHandle
from resumekit.storage.io.pipeline import HostBuffer

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 12345]
LOCAL = LocalFileSystem()


def _content(size: int) -> bytes:
    return (b"0123456789abcdefg" * (size // 17 + 1))[:size]


def _expected_digest(content: bytes) -> str:
    blocks = range(0, len(content), BLOCK_BYTES)
    raw = b"".join(xxhash.xxh3_128_digest(content[at : at + BLOCK_BYTES]) for at in blocks)
    return xxhash.xxh3_128_hexdigest(raw)


def _write(path: Path, *parts: bytes) -> tuple[FileEntry, tuple[str, ...]]:
    writer = FileWriter(LOCAL, path, relative=path.name, writer=3)
    for part in parts:
        writer.write([memoryview(part)])
    return writer.finish(), writer.block_digests


def _open(path: Path, entry: FileEntry, file_system: FileSystem = LOCAL) -> FileReader:
    return FileReader(file_system, path, where="step-00000001/x", entry=entry)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_digest_is_the_digest_of_its_block_digests(size: int) -> None:
    digester = BlockDigester()
    digester.update(memoryview(_content(size)))
    assert digester.hexdigest() == _expected_digest(_content(size))


@given(cuts=st.lists(st.integers(0, 2 * BLOCK_BYTES + 99), max_size=6))
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    content = _content(2 * BLOCK_BYTES + 99)
    digester = BlockDigester()
    offsets = [0, *sorted(cuts), len(content)]
    for start, stop in pairwise(offsets):
        digester.update(memoryview(content)[start:stop])
    assert digester.hexdigest() == _expected_digest(content)
    assert len(digester.blocks) == 3


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_what_the_entry_says(tmp_path: Path, size: int) -> None:
    content = _content(size)
    entry, blocks = _write(tmp_path / "x", content[:1000], content[1000:])
    assert (tmp_path / "x").read_bytes() == content
    assert entry == FileEntry("x", size, _expected_digest(content), 3)
    assert len(blocks) == -(-size // BLOCK_BYTES)


def test_buffers_of_any_type_and_shape_are_written_as_their_bytes(tmp_path: Path) -> None:
    matrix = memoryview(bytes(range(24))).cast("B", shape=[2, 3, 4])
    numbers = memoryview(bytes(range(16))).cast("d")
    empty = memoryview((ctypes.c_double * 0)())
    writer = FileWriter(LOCAL, tmp_path / "x", relative="x", writer=0)
    writer.write([matrix, empty, numbers])  # type: ignore[list-item]  # items of another type
    writer.finish()
    assert (tmp_path / "x").read_bytes() == bytes(range(24)) + bytes(range(16))


@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_are_read(tmp_path: Path, size: int) -> None:
    entry, blocks = _write(tmp_path / "x", _content(size))
    buffer = bytearray(size)
    with _open(tmp_path / "x", entry) as reader:
        assert reader.read() == _content(size)
        reader.verify()
        read_into(reader, [memoryview(buffer)], 0, blocks)
    assert bytes(buffer) == _content(size)


_SIZE = 2 * BLOCK_BYTES + 999


@pytest.fixture(scope="module")
def three_blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FileEntry, Sequence[str]]:
    path = tmp_path_factory.mktemp("files") / "x"
    return path, *_write(path, _content(_SIZE))


@given(cuts=st.lists(st.integers(0, _SIZE), min_size=1, max_size=6), one_call=st.booleans())
def test_any_ranges_are_read_in_one_call_or_many(
    three_blocks: tuple[Path, FileEntry, Sequence[str]], cuts: list[int], one_call: bool
) -> None:
    path, entry, blocks = three_blocks
    content = _content(_SIZE)
    offsets = sorted(cuts)
    buffers = [bytearray(stop - start) for start, stop in pairwise(offsets)]
    views = [memoryview(buffer) for buffer in buffers]
    with _open(path, entry) as reader:
        if one_call:
            read_into(reader, views, offsets[0], blocks)
        else:
            for view, start in zip(views, offsets, strict=False):
                read_into(reader, [view], start, blocks)
    assert b"".join(buffers) == content[offsets[0] : offsets[-1]]


class _CountingReads(LocalFileSystem):
    num_bytes = 0

    def read_into(self, handle, offset, buffer):
        num_bytes = super().read_into(handle, offset, buffer)
        self.num_bytes += num_bytes
        return num_bytes


def test_a_file_read_from_front_to_back_in_small_pieces_is_read_once(
    three_blocks: tuple[Path, FileEntry, Sequence[str]],
) -> None:
    path, entry, blocks = three_blocks
    counting = _CountingReads()
    buffer = bytearray(100_000)
    with _open(path, entry, counting) as reader:
        for offset in range(0, _SIZE - len(buffer), len(buffer)):
            read_into(reader, [memoryview(buffer)], offset, blocks)
    assert counting.num_bytes <= _SIZE


@pytest.mark.parametrize("where", [0, 1234, BLOCK_BYTES, 2 * BLOCK_BYTES + 997])
def test_a_flipped_byte_is_found_before_any_byte_is_believed(tmp_path: Path, where: int) -> None:
    content = bytearray(_content(_SIZE))
    entry, blocks = _write(tmp_path / "x", bytes(content))
    content[where] ^= 1
    (tmp_path / "x").write_bytes(content)
    with _open(tmp_path / "x", entry) as reader:
        for attempt in (
            reader.read,
            reader.verify,
            lambda: read_into(reader, [memoryview(bytearray(_SIZE))], 0, blocks),
            # Another byte of the same block.
            lambda: read_into(reader, [memoryview(bytearray(1))], where ^ 1, blocks),
        ):
            with pytest.raises(CorruptCheckpointError, match=r"step-00000001/x: .*digest.* is "):
                attempt()


def test_block_digests_that_do_not_belong_to_the_file_are_refused(tmp_path: Path) -> None:
    entry, blocks = _write(tmp_path / "x", _content(_SIZE))
    for wrong in (
        blocks[:-1],
        (*blocks, blocks[0]),
        (blocks[1], blocks[0], blocks[2]),
        (blocks[0], blocks[2], blocks[1]),  # not of the block that is read
        ("zz" * 16, *blocks[1:]),
        (blocks[0].upper(), *blocks[1:]),
        (None, *blocks[1:]),
    ):
        with (
            _open(tmp_path / "x", entry) as reader,
            pytest.raises(CorruptCheckpointError, match="block"),
        ):
            read_into(reader, [memoryview(bytearray(1))], 0, wrong)  # type: ignore[arg-type]


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    entry, _ = _write(tmp_path / "x", b"12345")
    with pytest.raises(CorruptCheckpointError, match="has 5 bytes, expected 6"):
        _open(tmp_path / "x", replace(entry, size=6))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    entry, _ = _write(tmp_path / "x", b"12345")
    with _open(tmp_path / "x", entry) as reader:
        os.truncate(tmp_path / "x", 2)
        with pytest.raises(CorruptCheckpointError, match="ends after 2 bytes"):
            reader.read()


@pytest.mark.parametrize("offset", [0, 5, BLOCK_BYTES + 1])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_long_range_is_read_by_several_threads(
    tmp_path: Path, offset: int, damaged: bool
) -> None:
    content = _content(19 * BLOCK_BYTES)
    entry, blocks = _write(tmp_path / "x", content)
    if damaged:
        with (tmp_path / "x").open("r+b") as file:
            file.seek(9 * BLOCK_BYTES)
            file.write(b"another")
    sizes = [7, 0, 6 * BLOCK_BYTES, 1, 11 * BLOCK_BYTES]
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with _open(tmp_path / "x", entry) as reader:
        if damaged:
            with pytest.raises(CorruptCheckpointError, match="the digest of its block 9"):
                read_into(reader, buffers, offset, blocks)
        else:
            read_into(reader, buffers, offset, blocks)
            assert b"".join(buffers) == content[offset : offset + sum(sizes)]


def test_a_range_outside_the_file_is_refused(tmp_path: Path) -> None:
    entry, blocks = _write(tmp_path / "x", b"12345")
    with _open(tmp_path / "x", entry) as reader:
        for offset, size in ((3, 3), (-1, 2), (6, 0)):
            with pytest.raises(CorruptCheckpointError, match="within its 5 bytes"):
                read_into(reader, [memoryview(bytearray(size))], offset, blocks)


def test_a_file_that_is_too_large_to_hold_is_not_read(tmp_path: Path) -> None:
    entry, _ = _write(tmp_path / "x", b"12345")
    with (
        _open(tmp_path / "x", entry) as reader,
        pytest.raises(CorruptCheckpointError, match="at most 4"),
    ):
        reader.read(max_bytes=4)


@pytest.mark.parametrize("call", ["open", "read_into", "advise_sequential"])
def test_an_error_while_reading_proves_no_damage(tmp_path: Path, call: str) -> None:
    entry, _ = _write(tmp_path / "x", b"12345")
    failing = FailpointFileSystem(LOCAL, parse_failpoints(f"{call}:1=EIO"))
    with pytest.raises(UnreadableCheckpointError, match=r"step-00000001/x: .*EIO") as caught:
        _open(tmp_path / "x", entry, failing).read()
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_a_writer_is_dead_after_its_first_error(tmp_path: Path, call: str) -> None:
    failing = FailpointFileSystem(LOCAL, parse_failpoints(f"{call}:1=ENOSPC"))
    writer = FileWriter(failing, tmp_path / "x", relative="x", writer=0)

    def work() -> None:
        writer.write([memoryview(b"12345")])
        writer.finish()

    with pytest.raises(SaveError, match=r"x: could not be written: ENOSPC.*Free space") as caught:
        work()
    assert caught.value.errno == errno.ENOSPC
    for again in (writer.finish, lambda: writer.write([memoryview(b"6")])):
        with pytest.raises(SaveError, match="is finished or has failed"):
            again()
    writer.discard()
    assert failing.counts["fsync"] == (1 if call in ("fsync", "close") else 0)
    assert failing.counts["close"] == 1


def test_a_writer_left_by_an_exception_gives_its_file_back(tmp_path: Path) -> None:
    counting = FailpointFileSystem(LOCAL)
    with (
        suppress(KeyError),
        FileWriter(counting, tmp_path / "x", relative="x", writer=0) as writer,
    ):
        writer.write([memoryview(b"1")])
        raise KeyError
    assert (counting.counts["close"], counting.counts["fsync"]) == (1, 0)


def test_pages_are_sent_to_the_device_while_the_file_is_written(tmp_path: Path) -> None:
    counting = FailpointFileSystem(LOCAL)
    with FileWriter(counting, tmp_path / "x", relative="x", writer=0) as writer:
        writer.write([memoryview(bytes(5 * BLOCK_BYTES))])
        writer.finish()
    assert counting.counts["writeback"] == 2


CHUNKS = 2 * pipeline.CHUNK_BYTES + 3 * BLOCK_BYTES + 12345


@pytest.mark.parametrize("size", [*SIZES, CHUNKS])
def test_an_image_is_written_as_the_same_bytes_in_buffers_are(tmp_path: Path, size: int) -> None:
    content = _content(size)
    image = HostBuffer(size).view
    image[:] = content
    with FileWriter(LOCAL, tmp_path / "image", relative="x", writer=3) as writer:
        writer.write_image(image)
        entry = writer.finish()
    thirds = [content[: size // 3], content[size // 3 :]]
    assert (entry, writer.block_digests) == _write(tmp_path / "x", *thirds)
    assert entry.digest == _expected_digest(content)
    assert (tmp_path / "image").read_bytes() == (tmp_path / "x").read_bytes() == content


def test_many_small_buffers_fill_the_ring_in_their_order(tmp_path: Path) -> None:
    content = _content(CHUNKS)
    pieces = [content[at : at + 9_999] for at in range(0, CHUNKS, 9_999)]
    writer = FileWriter(LOCAL, tmp_path / "x", relative="x", writer=0)
    writer.write(memoryview(bytearray(piece)) for piece in pieces)  # each lives as long as needed
    assert writer.finish().digest == _expected_digest(content)
    assert (tmp_path / "x").read_bytes() == content


def _finish(writer: FileWriter, content: memoryview, *, with_image: bool) -> None:
    writer.write_image(content) if with_image else writer.write([content])
    writer.finish()


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_after_a_failed_write_of_the_thread_no_other_is_made(
    tmp_path: Path, number: int, with_image: bool
) -> None:
    failing = FailpointFileSystem(LOCAL, parse_failpoints(f"write:{number}=ENOSPC"))
    writer = FileWriter(failing, tmp_path / "x", relative="x", writer=0)
    content = memoryview(bytearray(5 * pipeline.CHUNK_BYTES))
    with pytest.raises(SaveError, match="ENOSPC") as caught:
        _finish(writer, content, with_image=with_image)
    assert caught.value.errno == errno.ENOSPC
    assert failing.counts["write"] == number
    assert (failing.counts["close"], failing.counts["fsync"]) == (1, 0)
    with pytest.raises(SaveError, match="is finished or has failed"):
        writer.finish()


def test_buffers_that_cannot_be_produced_leave_no_write_behind(tmp_path: Path) -> None:
    def produced() -> Iterator[memoryview]:
        yield memoryview(bytes(2 * pipeline.CHUNK_BYTES))
        raise KeyError

    counting = FailpointFileSystem(LOCAL)
    writer = FileWriter(counting, tmp_path / "x", relative="x", writer=0)
    with pytest.raises(KeyError):
        writer.write(produced())
    num_writes = counting.counts["write"]
    _write(tmp_path / "y", bytes(2 * pipeline.CHUNK_BYTES))  # the ring is free again
    assert counting.counts["write"] == num_writes <= 5
    assert counting.counts["close"] == 1


def test_without_a_thread_the_same_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(pipeline, "_thread", pipeline._Thread())
    monkeypatch.setattr(threading.Thread, "start", start)
    content = _content(CHUNKS)
    entry, _ = _write(tmp_path / "x", content)
    assert entry.digest == _expected_digest(content)
    assert (tmp_path / "x").read_bytes() == content


def test_a_child_forked_while_a_thread_writes_can_write(tmp_path: Path) -> None:
    content = _content(CHUNKS)
    _write(tmp_path / "parent", content)  # starts the thread, which the child has not
    with pipeline.ring.lent():
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            entry, _ = _write(tmp_path / "child", content)
            os._exit(0 if entry.digest == _expected_digest(content) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "child").read_bytes() == content


@pytest.mark.parametrize("num_blocks", [3, 19])
@pytest.mark.parametrize("damaged", [False, True])
def test_chosen_pieces_are_read_and_the_others_only_verified(
    tmp_path: Path, num_blocks: int, damaged: bool
) -> None:
    content = _content(num_blocks * BLOCK_BYTES + 5)
    entry, digests = _write(tmp_path / "x", content)
    if damaged:
        with (tmp_path / "x").open("r+b") as file:
            file.seek(BLOCK_BYTES + 70_000)
            file.write(b"another")
    image = HostBuffer(entry.size).view  # consecutive pieces in memory that direct I/O can use
    image[:] = bytes(entry.size)
    ends = [0, 100, BLOCK_BYTES + 7, BLOCK_BYTES + 400_000, 2 * BLOCK_BYTES, entry.size]
    pieces = [
        Piece(begin, end - begin, image[begin:end] if number % 3 else None)
        for number, (begin, end) in enumerate(pairwise(ends))
    ]
    with _open(tmp_path / "x", entry) as reader:
        if damaged:  # in a piece without memory
            with pytest.raises(CorruptCheckpointError, match="the digest of its block 1 "):
                reader.read_pieces([pieces[3]], digests)
            for several in (pieces, [Piece(0, entry.size, None)]):
                with pytest.raises(CorruptCheckpointError, match="the digest of its block 1 "):
                    reader.read_pieces(several, digests)
            return
        reader.read_pieces([Piece(0, entry.size, None)], digests)
        reader.read_pieces(pieces, digests)
    for offset, num_bytes, memory in pieces:
        expected = bytes(num_bytes) if memory is None else content[offset : offset + num_bytes]
        assert bytes(image[offset : offset + num_bytes]) == expected


@pytest.mark.parametrize("num_blocks", [3, 19])
def test_an_image_is_read_without_a_copy(tmp_path: Path, num_blocks: int) -> None:
    content = _content(num_blocks * BLOCK_BYTES + 5)
    entry, digests = _write(tmp_path / "x", content)
    counting = _Addresses()
    image = HostBuffer(entry.size).view
    half = BLOCK_BYTES // 2  # consecutive in memory and in the file: read as one
    pieces = [
        Piece(at, half, image[at : at + half]) for at in range(0, num_blocks * 2 * half, half)
    ]
    pieces.append(Piece(num_blocks * BLOCK_BYTES, 5, image[-5:]))
    with _open(tmp_path / "x", entry, counting) as reader:
        reader.read_pieces(pieces, digests)
    assert bytes(image) == content
    begin = address_of(image)
    assert counting.found == {begin + at for at in range(0, entry.size, BLOCK_BYTES)}


class _Addresses(LocalFileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        self.found.add(address_of(buffer))
        return super().read_into(handle, offset, buffer)


def read_into(
    reader: FileReader, buffers: Sequence[memoryview], offset: int, digests: Sequence[str]
) -> None:
    """Reads consecutive bytes."""
    pieces = []
    for buffer in buffers:
        pieces.append(Piece(offset, buffer.nbytes, buffer))
        offset += buffer.nbytes
    reader.read_pieces(pieces, digests)


class _SlowWrites(LocalFileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        time.sleep(0.02)
        super().write(handle, buffers)
        self.sizes.append(sum(buffer.nbytes for buffer in buffers))


def test_memory_of_the_ring_is_reused_only_once_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 8192)
    content = b"".join(bytes([number]) * 8192 for number in range(12))
    with FileWriter(_SlowWrites(), tmp_path / "x", relative="x", writer=0) as writer:
        writer.write([memoryview(content)])
        writer.finish()
    assert (tmp_path / "x").read_bytes() == content


def test_the_disk_begins_with_a_small_chunk_and_the_caller_is_ahead_of_it(tmp_path: Path) -> None:
    slow = _SlowWrites()
    content = memoryview(_content(CHUNKS))
    with FileWriter(slow, tmp_path / "x", relative="x", writer=0) as writer:
        writer.write([content])
        assert (
            len(slow.sizes) < len(writer.block_digests) == -(-CHUNKS // BLOCK_BYTES)
        )  # what to store of them is known
        entry = writer.finish()
    mib = 1 << 20
    assert slow.sizes == [mib, mib, 2 * mib, 4 * mib, 8 * mib, 8 * mib, 4 * mib + 12345]
    assert entry.digest == _expected_digest(content.tobytes())
    assert (tmp_path / "x").read_bytes() == content


def test_an_error_of_the_last_write_fails_the_file(tmp_path: Path) -> None:
    failing = FailpointFileSystem(_SlowWrites(), parse_failpoints("write:2=EIO"))
    with FileWriter(failing, tmp_path / "x", relative="x", writer=0) as writer:
        writer.write([memoryview(bytes(2 * FIRST_BYTES))])
        with pytest.raises(SaveError, match="EIO"):
            writer.finish()
    assert (failing.counts["close"], failing.counts["fsync"]) == (1, 0)


def test_two_files_are_written_alternately(tmp_path: Path) -> None:
    content = memoryview(_content(CHUNKS))
    writers = [FileWriter(LOCAL, tmp_path / name, relative=name, writer=0) for name in "xy"]
    for begin in (0, CHUNKS // 2):
        for writer in writers:
            writer.write([content[begin : begin + CHUNKS // 2]])
    for writer in writers:
        assert writer.finish().size == CHUNKS // 2 * 2
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes() == content[:-1]
