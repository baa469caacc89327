"""Takes a file of another run's checkpoint into staging: as a link, or else as a verified copy."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from resumekit.errors import CorruptCheckpointError
from resumekit.storage.digest import BLOCK_BYTES
from resumekit.storage.files import FileEntry, FileWriter
from resumekit.storage.io.file_system import FileSystem, read_errors, read_fully, save_errors

# Another file system, one without links or that refuses this one, and too many links.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def link_file(file_system: FileSystem, source: Path, target: Path) -> bool:
    """Whether the target is now another name of the source; False where it has to be copied.

    Raises:
        SaveError: the link failed for a reason that a copy would meet as well.
    """
    with save_errors(target):
        try:
            file_system.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
    return True


def copy_file(file_system: FileSystem, source: Path, entry: FileEntry, writer: FileWriter) -> None:
    """Copies a file block by block and compares the digest of what was written.

    Args:
        file_system: of both.
        source: the file.
        entry: its line in the manifest of its checkpoint.
        writer: of the copy.

    Raises:
        CorruptCheckpointError: it is not what its manifest says.
        UnreadableCheckpointError: it could not be read.
        SaveError: it could not be written.
    """
    with read_errors(str(source)):
        handle = file_system.open(source)
    try:
        block = memoryview(bytearray(min(BLOCK_BYTES, entry.size)))
        for begin in range(0, entry.size, BLOCK_BYTES):
            wanted = block[: entry.size - begin]
            with read_errors(str(source)):
                num_bytes = read_fully(file_system, handle, begin, wanted)
            writer.write([wanted[:num_bytes]])
    finally:
        with suppress(OSError):  # nothing was written
            file_system.close(handle)
    written = writer.finish()
    if (written.size, written.digest) != (entry.size, entry.digest):
        raise CorruptCheckpointError(
            str(source), found=f"its digest is {written.digest}", expected=entry.digest
        )
