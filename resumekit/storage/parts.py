"""Part files: how the ranks of a background save report to rank 0 without collectives.

Each rank leaves one part in ``parts/`` of the staging directory once its own files are durable, or
once it has failed. Rank 0 lists that directory and commits when every rank has left a part without
an error. A part names the run, the attempt, the step and the number of the save: that of a rank
which outlived its job, or which is late, is never counted.

- A part is written under a temporary name and then renamed, and it is sealed. A network file
  system may show a part before its content: such a part is read again at the next look.
- Each part has a name of its own, so no part replaces another one.
- A part is not synced: after a power cut staging is never read.
- A rank that cannot write even the part that reports its error stays missing. Rank 0 names it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resumekit.errors import CorruptCheckpointError, SaveError
from resumekit.log import logger
from resumekit.storage.directories import MAX_JSON_BYTES, read_small, replace_small, seal, unseal
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import FileSystem, save_errors
from resumekit.storage.manifest import (
    HEX,
    MAX_RANKS,
    check_fields,
    constant,
    count,
    file_entries,
    objects,
    optional,
    text,
)

PARTS = "parts"

_FORMAT = "resumekit part"
_DRAFT = ".draft-"
_CHECKS = {
    "format": constant(_FORMAT),
    "run_id": HEX,
    "attempt": HEX,
    "step": count(),
    "save_number": count(),
    "rank": count(MAX_RANKS - 1),
    "error": optional(text),
    "files": objects,
}
_NUM_NAMED = 8


@dataclass(frozen=True)
class Part:
    """What one rank has written of one checkpoint.

    Args:
        run_id: of the run.
        attempt: of the process start.
        step: optimizer steps.
        save_number: counts the saves of the attempt, the same on all ranks.
        rank: that leaves it.
        files: that it wrote, each of them durable.
        error: why it failed; None when it did not.
    """

    run_id: str
    attempt: str
    step: int
    save_number: int
    rank: int
    files: tuple[FileEntry, ...] = ()
    error: str | None = None

    def to_bytes(self) -> bytes:
        """The part file."""
        content = {"format": _FORMAT, **vars(self), "files": [vars(entry) for entry in self.files]}
        return seal({name: content[name] for name in _CHECKS})

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "part") -> Part:
        """The part of a file, with every byte and field checked.

        Raises:
            CorruptCheckpointError: it is damaged, or not written to its end.
        """
        content = unseal(data, where=where)
        check_fields(content, _CHECKS, where=where)
        del content["format"]
        content["files"] = file_entries(content["files"], where=f"{where}: files")
        part = cls(**content)
        others = [entry.path for entry in part.files if entry.writer != part.rank]
        if others:
            raise CorruptCheckpointError(
                where, found=f"{others[0]!r:.80} of another rank", expected=f"rank {part.rank}"
            )
        return part


def leave_part(file_system: FileSystem, directory: Path, part: Part) -> None:
    """Puts a part where rank 0 looks for it.

    Args:
        file_system: the file system.
        directory: ``parts/`` of the staging directory, made by rank 0.
        part: of this rank.

    Raises:
        SaveError: it could not be written. The rank counts as missing.
    """
    name = f"rank-{part.rank:05d}-{uuid.uuid4().hex[:12]}.json"
    draft = directory / f"{_DRAFT}{name}"
    with save_errors(directory / name):
        replace_small(file_system, directory / name, part.to_bytes(), draft=draft, sync=False)


class Parts:
    """The parts of one save, as rank 0 finds them.

    Args:
        file_system: the file system.
        directory: ``parts/`` of the staging directory.
        expected: a part without files of any rank; the others must be of the same save.
        world_size: how many ranks leave one.
    """

    def __init__(
        self, file_system: FileSystem, directory: Path, *, expected: Part, world_size: int
    ) -> None:
        self._file_system = file_system
        self._directory = directory
        self._save = _save_of(expected)
        self._world_size = world_size
        self._parts: dict[int, Part] = {}
        self._done: set[str] = set()  # file names that need no second look
        self._unreadable: dict[str, str] = {}

    def look(self) -> bool:
        """Whether every rank has left its part, or one of them has reported an error.

        Lists the directory once and reads the parts that are new.

        Raises:
            SaveError: the directory could not be listed.
        """
        with save_errors(self._directory):
            names = [entry.name for entry in self._file_system.list(self._directory)]
        for name in names:
            if name not in self._done and not name.startswith(_DRAFT):
                self._read(name)
        return bool(self.failures) or not self.missing

    @property
    def found(self) -> tuple[Part, ...]:
        """The parts so far, by rank."""
        return tuple(self._parts[rank] for rank in sorted(self._parts))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks whose part is not there yet."""
        return tuple(rank for rank in range(self._world_size) if rank not in self._parts)

    @property
    def failures(self) -> dict[int, str]:
        """Why ranks have failed, by rank."""
        return {part.rank: part.error for part in self.found if part.error is not None}

    def files(self) -> tuple[FileEntry, ...]:
        """The files of all ranks, in the order of the ranks: the inventory of the checkpoint.

        Raises:
            SaveError: a rank has failed, or has left no part; names them.
        """
        for rank, error in self.failures.items():
            raise SaveError(f"rank {rank}", found=f"its part of the checkpoint failed: {error}")
        if self.missing:
            raise SaveError(
                str(self._directory),
                found=f"no part of {_described(self.missing)}{self._why_unreadable()}",
                expected=f"the parts of {self._world_size} ranks",
                remedy="See the log of these ranks",
            )
        return tuple(entry for part in self.found for entry in part.files)

    def _read(self, name: str) -> None:
        try:
            data = read_small(
                self._file_system, self._directory / name, where=name, max_bytes=MAX_JSON_BYTES
            )
            part = Part.from_bytes(data, where=name)
        except (CorruptCheckpointError, OSError) as error:
            self._unreadable[name] = str(error)  # it may be complete at the next look
            return
        self._unreadable.pop(name, None)
        self._done.add(name)
        if not self._is_of_this_save(part):
            logger.debug("%s is the part of another save; ignored", self._directory / name)
        elif part.error is not None or part.rank not in self._parts:
            self._parts[part.rank] = part

    def _is_of_this_save(self, part: Part) -> bool:
        return _save_of(part) == self._save and part.rank < self._world_size

    def _why_unreadable(self) -> str:
        return "".join(f"; {problem}" for problem in list(self._unreadable.values())[:1])


def _save_of(part: Part) -> tuple[str, str, int, int]:
    return part.run_id, part.attempt, part.step, part.save_number


def _described(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:_NUM_NAMED]))
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {words}{more}"
