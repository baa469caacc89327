"""What can happen to a committed checkpoint: each kind of damage, ready to be done to a copy."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_FLIPS = 30
SMALL_BYTES = 256


@dataclass(frozen=True)
class Damage:
    """One way to damage a run directory.

    Args:
        name: for people.
        path: what an error has to name, relative to the run directory.
        do: does it, given the run directory.
    """

    name: str
    path: str
    do: Callable[[Path], None]

    def __str__(self) -> str:
        return self.name


def files_of(run: Path, step: str) -> list[str]:
    """The files of a step directory, relative to the run directory."""
    return sorted(str(path.relative_to(run)) for path in (run / step).rglob("*") if path.is_file())


def flip_positions(size: int) -> list[int]:
    """Every byte of a small file, or 30 positions of a larger one with both ends among them."""
    if size <= SMALL_BYTES:
        return list(range(size))
    return [round(i * (size - 1) / (NUM_FLIPS - 1)) for i in range(NUM_FLIPS)]


def flip(path: Path, position: int) -> None:
    """Flips one bit; doing it twice undoes it."""
    bit = 1 << random.Random(position).randrange(8)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


def whole_file_damages(run: Path, step: str) -> Iterator[Damage]:
    """Each file of a step cut short, emptied, overwritten, made longer, or gone."""
    for path in files_of(run, step):
        size = (run / path).stat().st_size
        for length in sorted({0, 1, size // 2, size - 1}):
            yield Damage(f"{path} cut to {length} bytes", path, _cut(path, length))
        yield Damage(f"{path} is zeros", path, _rewrite(path, lambda data: bytes(len(data))))
        yield Damage(f"{path} is longer", path, _rewrite(path, lambda data: data + b"\0"))
        yield Damage(f"{path} is twice as long", path, _rewrite(path, lambda data: data * 2))
        yield Damage(f"{path} is missing", path, _remove(path))


def swapped_files(run: Path, step: str, others: dict[str, Path]) -> Iterator[Damage]:
    """Each file replaced by its counterpart in other step directories.

    Args:
        run: the run directory.
        step: the step to damage.
        others: step directories by a name for people.
    """
    for path in files_of(run, step):
        for name, other in others.items():
            source = other / Path(path).relative_to(step)
            if source.is_file() and source.read_bytes() != (run / path).read_bytes():
                # A whole manifest of another step or run is found by what does not fit it.
                named = step if path.endswith("manifest.json") else path
                yield Damage(f"{path} is that of {name}", named, _put(path, source.read_bytes()))


def swapped_ranks(run: Path, step: str) -> Iterator[Damage]:
    """The files of two ranks exchanged, and one copied over both."""
    for path in files_of(run, step):
        if "rank-00000" not in path:
            continue
        other = path.replace("rank-00000", "rank-00001")
        if not (run / other).is_file():
            continue
        yield Damage(f"{path} and {other} were exchanged", path, _exchange(path, other))
        content = (run / path).read_bytes()
        yield Damage(f"{other} is a copy of rank 0's", other, _put(other, content))


def special_files(run: Path, step: str) -> Iterator[Damage]:
    """Each file and directory replaced by something of its name that is no file or directory."""
    for path in files_of(run, step):
        yield from _other_kinds(path)
    for directory in sorted({str(Path(path).parent) for path in files_of(run, step)} - {step}):
        yield Damage(f"{directory} is a link", directory, _link(directory))
        yield Damage(f"{directory} is a file", directory, _file_instead(directory))


def bookkeeping_damages(run: Path, path: str) -> Iterator[Damage]:
    """The other files of the run directory, replaced or removed."""
    if (run / path).is_dir():
        yield Damage(f"{path} is a link", path, _link(path))
        yield Damage(f"{path} is a file", path, _file_instead(path))
        return
    yield Damage(f"{path} is missing", path, _remove(path))
    yield Damage(f"{path} is empty", path, _put(path, b""))
    yield Damage(f"{path} is garbage", path, _put(path, b"\x80\x04garbage"))
    yield from _other_kinds(path)


def _other_kinds(path: str) -> Iterator[Damage]:
    yield Damage(f"{path} is a link to its own content", path, _link(path))
    yield Damage(f"{path} is a dangling link", path, _dangling(path))
    yield Damage(f"{path} is a pipe", path, _pipe(path))
    yield Damage(f"{path} is a directory", path, _directory(path))
    yield Damage(f"{path} is a socket", path, _socket(path))
    yield Damage(f"{path} is a hard link to another file", path, _hard_link(path))


def extra_files(run: Path, step: str) -> Iterator[Damage]:
    """A file that the manifest does not list, in every directory."""
    folders = sorted({str(Path(path).parent) for path in files_of(run, step)})
    for folder in folders:
        extra = f"{folder}/.nfs0001"
        yield Damage(f"{extra} is an extra file", extra, _put(extra, b"x"))
        yield Damage(f"{extra} is an extra directory", extra, _directory(extra))
        yield Damage(f"{extra} is an extra link", extra, _dangling(extra))
        yield Damage(f"{extra} is an extra pipe", extra, _pipe(extra))
    copy = f"{folders[0]}/copy.safetensors"
    yield Damage(f"{copy} is an extra tensor file", copy, _put(copy, b"\x08" + bytes(7) + b"{}"))


def moved_steps(run: Path, newest: str, older: str, foreign: Path) -> Iterator[Damage]:
    """Whole step directories, and manifests, under the wrong name."""

    def exchange(directory: Path) -> None:
        (directory / newest).rename(directory / "aside")
        (directory / older).rename(directory / newest)
        (directory / "aside").rename(directory / older)

    def replace_by(source: Callable[[Path], Path]) -> Callable[[Path], None]:
        def do(directory: Path) -> None:
            content = source(directory)
            shutil.rmtree(directory / newest)
            shutil.copytree(content, directory / newest)

        return do

    def link_to_older(directory: Path) -> None:
        shutil.rmtree(directory / newest)
        (directory / newest).symlink_to(older)

    def plain_file(directory: Path) -> None:
        shutil.rmtree(directory / newest)
        (directory / newest).write_bytes(b"")

    def empty(directory: Path) -> None:
        shutil.rmtree(directory / newest)
        (directory / newest).mkdir()

    manifest = f"{newest}/manifest.json"
    yield Damage("the two steps are renamed to each other", newest, exchange)
    yield Damage("the older step under the newer name", newest, replace_by(lambda d: d / older))
    yield Damage("another run's step", newest, replace_by(lambda _: foreign / newest))
    yield Damage("the step directory is a link to the older one", newest, link_to_older)
    yield Damage("the step directory is a file", newest, plain_file)
    yield Damage("the step directory is empty", manifest, empty)


def _cut(path: str, length: int) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / path, length)


def _rewrite(path: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        (run / path).write_bytes(change((run / path).read_bytes()))

    return do


def _put(path: str, content: bytes) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        (run / path).write_bytes(content)

    return do


def _remove(path: str) -> Callable[[Path], None]:
    return lambda run: (run / path).unlink()


def _exchange(path: str, other: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        content, counterpart = (run / path).read_bytes(), (run / other).read_bytes()
        (run / path).write_bytes(counterpart)
        (run / other).write_bytes(content)

    return do


def _link(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        elsewhere = run.parent / "elsewhere"
        (run / path).rename(elsewhere)
        (run / path).symlink_to(elsewhere)

    return do


def _dangling(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        _clear(run / path)
        (run / path).symlink_to("/nonexistent/resumekit")

    return do


def _pipe(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        _clear(run / path)
        os.mkfifo(run / path)

    return do


def _socket(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        _clear(run / path)
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir((run / path).parent)  # a socket's path has to be short
            try:
                server.bind((run / path).name)
            finally:
                os.chdir(here)

    return do


def _directory(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        _clear(run / path)
        (run / path).mkdir()

    return do


def _file_instead(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        shutil.rmtree(run / path)
        (run / path).write_bytes(b"")

    return do


def _hard_link(path: str) -> Callable[[Path], None]:
    def do(run: Path) -> None:
        size = (run / path).stat().st_size
        other = run.parent / "other"
        other.write_bytes(b"\x55" * size)
        (run / path).unlink()
        (run / path).hardlink_to(other)

    return do


def _clear(path: Path) -> None:
    if path.is_file():
        path.unlink()
