"""Copies in an object store, or in whatever else fsspec opens.

The files come first, each verified, and the manifest last: what has a valid manifest is complete. A
file is verified by the MD5 that the store reports, or else by reading it back.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingDependencyError,
    PlaceError,
)
from resumekit.places.directory import check_same, observed
from resumekit.places.place import Place
from resumekit.storage.directories import MANIFEST, MAX_JSON_BYTES, StepName
from resumekit.storage.files import BLOCK_BYTES, BlockDigester, FileEntry
from resumekit.storage.io.file_system import Observer
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.retention import Checkpoint, RetentionPolicy, select_deletions

_PART_BYTES = 8 * BLOCK_BYTES
_MAX_PARTS = 9_000  # S3 takes 10,000


class StoreCopies:
    """The copies under one URL.

    Args:
        place: with the URL.

    Raises:
        MissingDependencyError: the package for this kind of URL is missing.
        ConfigurationError: fsspec knows no such URL.
    """

    def __init__(self, place: Place) -> None:
        import fsspec  # late: importing resumekit stays cheap

        self._where = str(place)
        try:
            self._fs, root = fsspec.core.url_to_fs(
                place.url, skip_instance_cache=True, **place.storage_options
            )
        except ImportError as error:
            raise MissingDependencyError(self._where, found=str(error)) from error
        except ValueError as error:
            raise ConfigurationError(
                self._where, found=str(error), expected="a URL that fsspec can open"
            ) from error
        self._root = root.rstrip("/")
        self._manifests: dict[StepName, Manifest] = {}

    def names(self) -> list[StepName]:
        return [name for name in self._listed() if self._is_complete(name)]

    def manifest(self, name: StepName) -> Manifest:
        if name not in self._manifests:
            where = f"{self._where}/{name}/{MANIFEST}"
            path = self._path(name, MANIFEST)
            try:
                if self._fs.size(path) > MAX_JSON_BYTES:
                    raise CorruptCheckpointError(where, found="is too large")
                data = self._fs.cat_file(path)
            except FileNotFoundError:
                raise CheckpointNotFoundError(where, found="there is no such copy") from None
            manifest = Manifest.from_bytes(data, where=where)
            if manifest.name != name:
                raise CorruptCheckpointError(where, found=f"is the manifest of {manifest.name}")
            self._manifests[name] = manifest
        return self._manifests[name]

    def blocks(self, name: StepName, entry: FileEntry) -> Iterator[memoryview]:
        with self._fs.open(self._path(name, entry.path), "rb") as file:
            if hasattr(file, "prefetch"):  # of paramiko, as in `_write`
                file.prefetch(entry.size)
            while block := file.read(BLOCK_BYTES):
                yield memoryview(block)

    def put(self, source: StepReader, retention: RetentionPolicy, observer: Observer) -> None:
        manifest, name, previous = source.manifest, source.name, self._previous()
        if self._has_valid(name):
            check_same(self.manifest(name), manifest, self._where)
            return
        if previous is not None and previous.run_id != manifest.run_id:
            check_same(previous, manifest, self._where)
        there = self._files(name)
        for entry in manifest.files:
            if not self._has(source, entry, there.get(entry.path), observer):
                shared = previous if previous is not None and entry in previous.files else None
                self._write(source, entry, shared, observer)
        self._write_manifest(name, manifest)
        self._retain(retention, name)

    # ---------------------------------------------------------------- one file

    def _has(self, source: StepReader, entry: FileEntry, info: Any, observer: Observer) -> bool:
        """Whether a file of the copy is there already, verified."""
        if info is None or info["size"] != entry.size:
            return False
        sums = _Checksums(entry)
        for _ in sums.of(observed(source.blocks(entry), observer), str(source.path)):
            pass
        return self._is_verified(source.name, entry, sums, observer)

    def _write(
        self, source: StepReader, entry: FileEntry, shared: Manifest | None, observer: Observer
    ) -> None:
        """Copies a file: from the copy that has it too, or from the run directory.

        Raises:
            PlaceError: what is there is not what was written.
        """
        path, sums = self._path(source.name, entry.path), _Checksums(entry)
        if shared is not None:
            with suppress(NotImplementedError, OSError):
                self._fs.cp_file(self._path(shared.name, entry.path), path)
                if self._has(source, entry, self._fs.info(path), observer):
                    return
        blocks = sums.of(observed(source.blocks(entry), observer), str(source.path))
        file = self._created(path, sums.part_bytes)
        try:
            if hasattr(file, "set_pipelined"):  # of paramiko: else each 32 KB wait for an answer
                file.set_pipelined(True)
            for block in blocks:
                file.write(block)
        except BaseException:
            _discard(file)
            raise
        file.close()
        if not self._is_verified(source.name, entry, sums, observer):
            raise PlaceError(path, found="other bytes than were written", expected=entry.digest)

    def _created(self, path: str, part_bytes: int) -> Any:
        """A new file, with its directories where the store has such."""
        try:
            return self._fs.open(path, "wb", block_size=part_bytes)
        except FileNotFoundError:
            self._check_root()
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb", block_size=part_bytes)

    def _is_verified(
        self, name: StepName, entry: FileEntry, sums: _Checksums, observer: Observer
    ) -> bool:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(name, entry.path))
        if info["size"] != entry.size:
            return False
        if sums.match(info):
            return True
        digester = BlockDigester()
        for block in observed(self.blocks(name, entry), observer):
            digester.update(block)
        return digester.hexdigest() == entry.digest

    def _write_manifest(self, name: StepName, manifest: Manifest) -> None:
        """Makes the copy complete, if all its files are still there.

        Raises:
            PlaceError: another program has removed files, or the manifest cannot be read back.
        """
        there = self._files(name)
        missing = [each.path for each in manifest.files if each.path not in there]
        if missing:
            raise PlaceError(f"{self._where}/{name}", found=f"{missing[0]} is not there any more")
        self._fs.pipe_file(self._path(name, MANIFEST), manifest.to_bytes())
        self._fs.invalidate_cache()
        if self.manifest(name) != manifest:
            raise PlaceError(f"{self._where}/{name}", found="another manifest than was written")

    # ---------------------------------------------------------------- the copies

    def _listed(self) -> list[StepName]:
        """The names of all copies, complete or not, newest first."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            self._check_root()
            return []
        found = (StepName.parse(path.rstrip("/").rpartition("/")[2]) for path in paths)
        return sorted((name for name in found if name is not None), reverse=True)

    def _check_root(self) -> None:
        """Raises PlaceError where the bucket, or the root of a file system, does not exist."""
        top = self._root.partition("/")[0] or "/"
        if not self._fs.exists(top):
            raise PlaceError(self._where, found=f"there is no {top}", remedy="Create it first")

    def _is_complete(self, name: StepName) -> bool:
        return name in self._manifests or bool(self._fs.isfile(self._path(name, MANIFEST)))

    def _has_valid(self, name: StepName) -> bool:
        with suppress(CheckpointError):
            return self._is_complete(name) and self.manifest(name) is not None
        return False

    def _previous(self) -> Manifest | None:
        """The manifest of the newest copy."""
        return next((self.manifest(name) for name in self.names() if self._has_valid(name)), None)

    def _files(self, name: StepName) -> Mapping[str, Any]:
        """What the store says of each file of a copy, by its path in it."""
        self._fs.invalidate_cache()
        root = self._path(name)
        found = self._fs.find(root, detail=True)
        return {path.removeprefix(f"{root}/"): info for path, info in found.items()}

    def _retain(self, retention: RetentionPolicy, newest: StepName) -> None:
        """Removes old copies, and the rest of interrupted ones that are older."""
        if retention.keep_latest is None:
            return
        every = self._listed()
        valid = [name for name in every if self._has_valid(name)]
        checkpoints = [Checkpoint(name, self.manifest(name).metric) for name in valid]
        incomplete = {name for name in every if name < newest and not self._is_complete(name)}
        for name in sorted((select_deletions(checkpoints, retention) | incomplete) - {newest}):
            self._manifests.pop(name, None)
            if name not in incomplete:
                self._fs.rm_file(self._path(name, MANIFEST))
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: StepName, path: str = "") -> str:
        return f"{self._root}/{name}" + (f"/{path}" if path else "")


def _discard(file: Any) -> None:
    """Gives a new file up: closing it, also by its finalizer, would commit what was written."""
    with suppress(Exception):  # the caller raises the first error
        file.discard()
    with suppress(AttributeError):  # paramiko's files are not committed
        file.closed = True


class _Checksums:
    """The digest of a file, and the checksums by which stores know it.

    Args:
        entry: the file.

    Attributes:
        part_bytes: of a multipart upload.
    """

    def __init__(self, entry: FileEntry) -> None:
        self._entry = entry
        num_parts = -(-entry.size // _PART_BYTES)
        self.part_bytes = _PART_BYTES * -(-max(num_parts, 1) // _MAX_PARTS)
        self._whole = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []

    def of(self, blocks: Iterator[memoryview], where: str) -> Iterator[memoryview]:
        """The same blocks, of 4 MiB but the last.

        Raises:
            CorruptCheckpointError: after the last block, the file is not what the manifest says.
        """
        digester, part, num_bytes = BlockDigester(), hashlib.md5(usedforsecurity=False), 0
        for block in blocks:
            digester.update(block)
            self._whole.update(block)
            part.update(block)
            num_bytes += block.nbytes
            if num_bytes % self.part_bytes == 0:
                self._parts.append(part.digest())
                part = hashlib.md5(usedforsecurity=False)
            yield block
        if num_bytes % self.part_bytes:
            self._parts.append(part.digest())
        if digester.hexdigest() != self._entry.digest:
            raise CorruptCheckpointError(
                f"{where}/{self._entry.path}",
                found=f"its digest is {digester.hexdigest()}",
                expected=self._entry.digest,
            )

    def match(self, info: Mapping[str, Any]) -> bool:
        """Whether the store reports one of the checksums of these bytes."""
        parts = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        whole = self._whole.digest()
        known = {whole.hex(), f"{parts}-{len(self._parts)}", base64.b64encode(whole).decode()}
        # S3: the ETag, of a multipart upload that of the MD5s of its parts. GCS: md5Hash.
        return not known.isdisjoint(str(info.get(key)).strip('"') for key in ("ETag", "md5Hash"))
