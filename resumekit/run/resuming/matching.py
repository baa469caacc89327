"""Which object of a run each of several states is of that another program has saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resumekit.errors import StateMismatchError
from resumekit.run.resuming.finder import Found
from resumekit.state import Adopting, SharingPattern, Slot, StateComponent
from resumekit.storage.imported import import_of, imported_details

_SLOTS = (Slot.MODEL.value, Slot.OPTIMIZER.value, Slot.LR_SCHEDULER.value)


def match_imported(found: Found, components: Sequence[StateComponent]) -> None:
    """Gives the states of an import the keys of this run, where a slot has several objects.

    States with names are those of the objects with these names. Numbered ones are matched by their
    order, as the framework that saved them does.

    Raises:
        StateMismatchError: it is not plain whose state each is; names both lists.
    """
    aliases: dict[str, str] = {}
    for slot in _SLOTS if found.as_given else ():
        of_slot = (each for each in components if each.slot == slot)
        here = [each for each in of_slot if isinstance(each.stateful, Adopting)]
        given = [key for key in found.as_given if key.partition("/")[0] == slot]
        given = [key for key in given if key in found.states]
        keys = [each.key for each in here]
        if not given or not here or {*keys} == {*given}:
            continue
        has_order = len(given) == 1 or all(key.rpartition("/")[2].isdecimal() for key in given)
        if not has_order or len(given) != len(here):
            raise StateMismatchError(
                slot,
                found=f"{', '.join(given)} in the checkpoint that was imported",
                expected=f"those of this run: {', '.join(keys)}",
                remedy="Pass as many objects, under these names or, if they are numbers, in this "
                "order",
            )
        for each in here:
            if each.sharing_pattern is SharingPattern.SHARDED:
                raise StateMismatchError(
                    each.key,
                    found="sharded here, and one of several objects in the import",
                    expected="an object that is whole on each rank",
                )
        aliases.update(zip(given, keys, strict=True))
    _rename(found, aliases)


def _rename(found: Found, aliases: dict[str, str]) -> None:
    manifest, origin = found.manifest, import_of(found.manifest)
    if not aliases or origin is None:
        return
    records = [replace(each, key=aliases.get(each.key, each.key)) for each in manifest.components]
    origin = replace(origin, as_given=tuple(aliases.get(key, key) for key in origin.as_given))
    details = {**manifest.details, **imported_details(origin)}
    found.reader.manifest = replace(manifest, components=tuple(records), details=details)
    for stored, key in aliases.items():
        found.aliases[key] = stored
    states = {aliases.get(key, key): state for key, state in found.states.items()}
    found.states.clear()
    found.states.update(states)
