"""Checkpoints on disk: one run directory, one file system interface, one atomic commit."""

from __future__ import annotations

from resumekit.storage.commit import Checkpoint, RetentionPolicy, Staging, select_deletions
from resumekit.storage.directories import (
    MANIFEST,
    MAX_JSON_BYTES,
    TRAININGS,
    StepName,
    parse_json,
    seal,
    unseal,
)
from resumekit.storage.file_reader import FileReader
from resumekit.storage.files import (
    BLOCK_BYTES,
    FileEntry,
    FileWriter,
    Piece,
    combine,
    cut,
    digest_of_block,
)
from resumekit.storage.io.file_system import (
    Entry,
    FileSystem,
    Free,
    LocalFileSystem,
    ReadHandle,
    address_of,
)
from resumekit.storage.io.pipeline import HostBuffer, ThreadedCalls, num_threads, use_huge_pages
from resumekit.storage.manifest import (
    FORMAT_VERSION,
    LINEAGE,
    ComponentRecord,
    ForkOrigin,
    Manifest,
    StepReader,
    forked_details,
    holds_only_weights,
    lineage_of,
)
from resumekit.storage.ownership import DirectoryLock, Owner, PosixLock, is_unused
from resumekit.storage.parts import Part, Parts
from resumekit.storage.store import Store

__all__ = [
    "BLOCK_BYTES",
    "FORMAT_VERSION",
    "LINEAGE",
    "MANIFEST",
    "MAX_JSON_BYTES",
    "TRAININGS",
    "Checkpoint",
    "ComponentRecord",
    "DirectoryLock",
    "Entry",
    "FileEntry",
    "FileReader",
    "FileSystem",
    "FileWriter",
    "ForkOrigin",
    "Free",
    "HostBuffer",
    "LocalFileSystem",
    "Manifest",
    "Owner",
    "Part",
    "Parts",
    "Piece",
    "PosixLock",
    "ReadHandle",
    "RetentionPolicy",
    "Staging",
    "StepName",
    "StepReader",
    "Store",
    "ThreadedCalls",
    "address_of",
    "combine",
    "cut",
    "digest_of_block",
    "forked_details",
    "holds_only_weights",
    "is_unused",
    "lineage_of",
    "num_threads",
    "parse_json",
    "seal",
    "select_deletions",
    "unseal",
    "use_huge_pages",
]
