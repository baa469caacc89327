"""Where checkpoints live: one run directory, one seam to the disk, one atomic commit."""

from __future__ import annotations

from resumekit.storage.digest import ALGORITHM, BLOCK_BYTES, BlockDigester, digest_bytes
from resumekit.storage.failpoints import (
    Failpoint,
    FailpointFileSystem,
    local_file_system,
    parse_failpoints,
)
from resumekit.storage.files import FileEntry, FileReader, FileWriter
from resumekit.storage.io import Entry, FileSystem, Free, LocalFileSystem, ReadHandle
from resumekit.storage.lock import DirectoryLock, NoLock, PosixLock
from resumekit.storage.manifest import FORMAT_VERSION, ComponentRecord, Manifest
from resumekit.storage.names import MANIFEST, StepName
from resumekit.storage.owner import Owner
from resumekit.storage.retention import Checkpoint, RetentionPolicy, select_deletions
from resumekit.storage.sealed import MAX_JSON_BYTES, parse_json
from resumekit.storage.staging import Staging
from resumekit.storage.step import StepReader
from resumekit.storage.store import Store

__all__ = [
    "ALGORITHM",
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "MANIFEST",
    "MAX_JSON_BYTES",
    "BlockDigester",
    "Checkpoint",
    "ComponentRecord",
    "DirectoryLock",
    "Entry",
    "Failpoint",
    "FailpointFileSystem",
    "FileEntry",
    "FileReader",
    "FileSystem",
    "FileWriter",
    "Free",
    "LocalFileSystem",
    "Manifest",
    "NoLock",
    "Owner",
    "PosixLock",
    "ReadHandle",
    "RetentionPolicy",
    "Staging",
    "StepName",
    "StepReader",
    "Store",
    "digest_bytes",
    "local_file_system",
    "parse_failpoints",
    "parse_json",
    "select_deletions",
]
