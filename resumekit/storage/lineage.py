"""Which checkpoints of other runs a run began from; in the details of its manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from resumekit.storage.manifest import Manifest

LINEAGE = "lineage"
_ONLY_WEIGHTS = "only_weights"
_OF_THE_ATTEMPT = ("journal", "resume_from")  # details that say nothing of another run


@dataclass(frozen=True)
class ForkOrigin:
    """The checkpoint that a run was forked from.

    Args:
        run_id: of the run it belongs to.
        checkpoint: the name of its step directory.
        manifest_digest: the xxh3-128 of its manifest.
        forked: when; ISO 8601 in UTC.
        only_weights: whether only the model's weights were taken.
    """

    run_id: str
    checkpoint: str
    manifest_digest: str
    forked: str
    only_weights: bool

    def __str__(self) -> str:
        weights = "the weights of " if self.only_weights else ""
        return f"{weights}{self.checkpoint} of run {self.run_id[:8]}"


def lineage_of(manifest: Manifest) -> tuple[ForkOrigin, ...]:
    """The checkpoints that the run was forked from, the latest fork last; mostly none."""
    rows = manifest.details.get(LINEAGE)
    rows = rows if isinstance(rows, list | tuple) else ()
    return tuple(ForkOrigin(**row) for row in rows if _is_origin(row))


def _is_origin(row: Any) -> bool:
    """Whether a row has all fields, each of its type; a manifest's details may hold anything."""
    if not isinstance(row, Mapping) or set(row) != set(ForkOrigin.__dataclass_fields__):
        return False
    return all(isinstance(row[name], bool if name == "only_weights" else str) for name in row)


def holds_only_weights(manifest: Manifest) -> bool:
    """Whether a run starts afresh from this checkpoint, with its weights."""
    return manifest.details.get(_ONLY_WEIGHTS) is True


def forked_details(manifest: Manifest, origin: ForkOrigin) -> dict[str, Any]:
    """The details of a manifest for a run that begins from the checkpoint of this one."""
    lineage = [asdict(each) for each in (*lineage_of(manifest), origin)]
    if origin.only_weights:
        return {_ONLY_WEIGHTS: True, LINEAGE: lineage}
    kept = {key: v for key, v in manifest.details.items() if key not in _OF_THE_ATTEMPT}
    return {**kept, LINEAGE: lineage}
