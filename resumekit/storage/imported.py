"""What a manifest says of the checkpoint of another program that its run began from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from resumekit.storage.manifest import Manifest

_IMPORTED = "imported"


@dataclass(frozen=True)
class ImportOrigin:
    """The checkpoint of another program that a run began from.

    Args:
        source: what it is, and its name.
        lacks: what it does not hold, in words.
        as_given: the components whose states are those of the run's objects, as that program
            saved them; empty in all checkpoints but the first.
    """

    source: str
    lacks: tuple[str, ...] = ()
    as_given: tuple[str, ...] = ()


def import_of(manifest: Manifest) -> ImportOrigin | None:
    """The import that a run began from; mostly None. A manifest's details may hold anything."""
    row = manifest.details.get(_IMPORTED)
    if not isinstance(row, Mapping) or set(row) != set(ImportOrigin.__dataclass_fields__):
        return None
    source, lists = row["source"], [row["lacks"], row["as_given"]]
    if not isinstance(source, str) or not all(isinstance(each, list | tuple) for each in lists):
        return None
    lacks, as_given = (tuple(map(str, each)) for each in lists)
    return ImportOrigin(source, lacks, as_given)


def imported_details(origin: ImportOrigin) -> dict[str, Any]:
    """The details of a manifest that record an import."""
    return {_IMPORTED: asdict(origin)}
