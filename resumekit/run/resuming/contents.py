"""Checks what the states of a checkpoint hold; that their bytes are intact is known by then.

Where states record the same fact, as the progress and the manifest do, they must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resumekit.errors import InvalidStateError
from resumekit.state import Checked, Slot, StateComponent
from resumekit.storage.manifest import Manifest


def check_contents(
    manifest: Manifest,
    states: Iterable[tuple[str, Any]],
    components: Iterable[StateComponent],
) -> None:
    """Checks all states that this rank has read of a checkpoint; changes nothing.

    Args:
        manifest: of the checkpoint.
        states: with the key of their component.
        components: of this run, as far as they are known.

    Raises:
        InvalidStateError: names the component and the field.
    """
    checked = {each.key: each.stateful for each in components if isinstance(each.stateful, Checked)}
    read = dict[str, Any]()
    for key, state in states:
        if key in checked:
            checked[key].check_content(key, state)
            read[key] = state
    progress = read.get(Slot.PROGRESS.value)
    if progress is not None:
        _check_progress(manifest, progress)
        is_alone = manifest.world_size == 1  # the progress is that of rank 0
        _check_positions(progress, read.get(Slot.DATA.value), is_alone=is_alone)
        for key, state in read.items():
            for path, (value, name) in checked[key].progress_in(state).items():
                _require_equal(f"{key}: {path}", value, progress["progress"][name], "the progress")
    best = read.get(Slot.BEST_METRIC.value)
    if best and manifest.metric is not None:
        latest = {"name": best["name"], "mode": best["mode"], "value": _hex(best["latest"])}
        _require_equal(Slot.BEST_METRIC.value, latest, manifest.metric, "the manifest")


def _check_progress(manifest: Manifest, progress: Mapping[str, Any]) -> None:
    key = Slot.PROGRESS.value
    counts = progress["progress"]
    _require_equal(f"{key}: progress", counts, manifest.progress, "the manifest")
    _require_equal(f"{key}: progress.step", counts["step"], manifest.step, "the manifest")
    _require_equal(f"{key}: finished", progress["finished"], manifest.finished, "the manifest")


def _check_positions(
    progress: Mapping[str, Any], positions: Mapping[str, Any] | None, *, is_alone: bool
) -> None:
    """The loops of the progress have positions; that of the only loader is its position."""
    if positions is None:  # left out, or of a rank that saved none
        return
    data, counts = Slot.DATA.value, progress["progress"]
    for name in progress["loops"]["asked"]:
        if name not in positions:
            raise InvalidStateError(
                f"{data}: {name}", found="missing", expected="a position, as the progress has it"
            )
    if counts["batch"] and not positions:
        raise InvalidStateError(
            data, found="no position", expected=f"one after batch {counts['batch']} of the epoch"
        )
    for name, each in positions.items() if is_alone and len(positions) == 1 else ():
        if each["batch"] and not each["endless"]:
            for field in ("epoch", "batch"):
                where = f"{data}: {name}.{field}"
                _require_equal(where, each[field], counts[field], "the progress")


def _require_equal(where: str, found: Any, other: Any, whose: str) -> None:
    if found != other:
        raise InvalidStateError(where, found=f"{found!r:.80}", expected=f"{other!r:.80} of {whose}")


def _hex(latest: Any) -> str | None:
    return None if latest is None else float(latest[1]).hex()
