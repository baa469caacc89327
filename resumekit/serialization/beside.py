"""Small files that a checkpoint carries for other tools; a resume does not read them."""

from __future__ import annotations

from collections.abc import Mapping

from resumekit.storage import FileEntry, Staging


class FilesBeside:
    """Files of a given content, written beside a component's own.

    Args:
        directory: where they go, relative to the step directory.
        rank: the rank that writes.
        files: the content of each by its name.
    """

    def __init__(self, directory: str, rank: int, files: Mapping[str, bytes]) -> None:
        self._rank = rank
        self._files = {f"{directory}/{name}": content for name, content in files.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes that it will write."""
        return sum(map(len, self._files.values()))

    @property
    def num_files(self) -> int:
        """Files that it will write."""
        return len(self._files)

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of the files in the inventory, once their bytes survive a power cut.

        Raises:
            ConfigurationError: a name that no file in a checkpoint can have.
            SaveError: a file could not be written.
        """
        entries = []
        for path, content in self._files.items():
            with staging.create(path, writer=self._rank) as file:
                file.write([memoryview(content)])
                entries.append(file.finish())
        return entries
