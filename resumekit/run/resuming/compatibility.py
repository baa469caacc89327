"""Compatibility check of a checkpoint with the run, before any component is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from resumekit.capture.ddp_buckets import GRADIENT_BUCKETS
from resumekit.capture.fingerprint import SettingChange, Severity
from resumekit.capture.named_tensors import RANK_BUFFERS
from resumekit.capture.nested_state import is_same_class
from resumekit.capture.scheduler import SchedulerState
from resumekit.errors import DriftError, StateMismatchError
from resumekit.run.agreement import ComponentGroups
from resumekit.run.options import Options, names_component
from resumekit.state import Slot, StateComponent, states_of
from resumekit.storage.manifest import Manifest

# A run that turns AMP on continues with a fresh scaler rather than not at all; a message says so.
_MAY_START_FRESH = frozenset({Slot.GRAD_SCALER.value})


def check_fit(
    manifest: Manifest,
    components: Sequence[StateComponent],
    options: Options,
    *,
    world_size: int,
    regrouped: Collection[str],
    imported: bool,
    unneeded: Collection[str],
) -> tuple[str, ...]:
    """The components that start from their live state because the checkpoint has none.

    Args:
        manifest: the checkpoint's.
        components: of this run.
        options: of this run.
        world_size: the ranks of this run.
        regrouped: see ``regrouped_buffers``.
        imported: another program has written what it holds; it may lack any component.
        unneeded: the components on one side only in which there is nothing, or which only another
            framework needs.

    Raises:
        StateMismatchError: a component on one side only, and nothing allows it.
    """
    saved = {record.key for record in manifest.components}.difference(regrouped)
    live = {component.key for component in components}
    former = frameworks_of(manifest)

    def is_needed(key: str) -> bool:
        # Runs of several ranks alone have components of rank buffers; one rank's are in the module.
        is_of_ranks = key.rpartition("/")[2] == RANK_BUFFERS
        return key not in unneeded and not (is_of_ranks and 1 in (world_size, manifest.world_size))

    fresh: list[str] = []
    for component in components:
        key = component.key
        if key in saved or names_component(options.exclude, key):
            continue
        allowed = imported or names_component(options.allow_missing, key) or key in regrouped
        # What a framework needs for its own loop, starts fresh where another one was left.
        allowed = allowed or component.framework not in ("", *former)
        allowed = allowed or component.slot in _MAY_START_FRESH or not component.required
        if is_needed(key) and not allowed:
            raise StateMismatchError(
                key,
                found=f"{manifest.name} has no {key} (it has {', '.join(sorted(saved))})",
                expected="one, as this run uses it",
                remedy=f"Pass allow_missing={{{key!r}}} to start it from its live state",
            )
        fresh.append(key)
    for key in sorted(saved - live):
        is_bucket = key.rpartition("/")[2] == GRADIENT_BUCKETS
        if is_needed(key) and not (is_bucket or names_component(options.exclude, key)):
            raise StateMismatchError(
                key,
                found=f"{manifest.name} has {key}, and this run has none",
                expected="a live object to load it into",
                remedy=f"Give it to the Checkpointer, or pass exclude={{{key!r}}} to leave it out",
            )
    return tuple(fresh)


def regrouped_buffers(
    manifest: Manifest, components: Sequence[StateComponent], membership: ComponentGroups
) -> frozenset[str]:
    """The keys of each rank's own buffers of modules that other groups of ranks hold here.

    No rank can take them over: they start from the buffers that were saved with the module.
    """
    then = {record.key: record.groups for record in manifest.components}
    return frozenset(
        f"{each.key}/{RANK_BUFFERS}"
        for each in components
        if each.key in then and then[each.key] != membership.recorded(each)
    )


_DETAIL = "frameworks"


def owners(components: Sequence[StateComponent]) -> dict[str, Any]:
    """What a manifest's details record of it: the framework by component key, if any."""
    found = {each.key: each.framework for each in components if each.framework}
    return {_DETAIL: found} if found else {}


def of_other_frameworks(manifest: Manifest, components: Sequence[StateComponent]) -> dict[str, str]:
    """The saved components that only a framework needs which this run does not use, and its name.

    Args:
        manifest: of the checkpoint; an older one has no frameworks, and nothing is found.
        components: of this run.
    """
    used = frameworks_in(components)
    live = {component.key for component in components}
    saved = {record.key for record in manifest.components}
    return {
        key: framework
        for key, framework in _recorded(manifest).items()
        if key in saved - live and framework not in used
    }


def frameworks_in(components: Sequence[StateComponent]) -> frozenset[str]:
    """The frameworks that keep some of the components for their own loop."""
    return frozenset(each.framework for each in components if each.framework)


def frameworks_of(manifest: Manifest) -> frozenset[str]:
    """The frameworks whose own loop wrote the checkpoint; none for plain PyTorch."""
    return frozenset(_recorded(manifest).values())


def _recorded(manifest: Manifest) -> dict[str, str]:
    recorded = manifest.details.get(_DETAIL)
    found = recorded if isinstance(recorded, Mapping) else {}
    return {key: str(framework) for key, framework in found.items()}


def is_empty(state: Any) -> bool:
    """Whether there is nothing in a state, however its containers are nested."""
    if isinstance(state, Mapping):
        return all(map(is_empty, state.values()))
    return isinstance(state, (list, tuple, str)) and not state


# Settings that a restored state brings with it, by their names in the fingerprint: the options of
# param groups, and what schedulers keep beside the constants of functions, which are code.
_RESTORED = re.compile(
    r"(?P<slot>optimizer)(/[^.]+)?\.param_groups\[\d+\]\.(?!num_parameters)"
    r"|(?P<other>lr_scheduler)(/[^.]+)?\.settings\.(?!.*\.constants\b)"
)
# Settings of a Trainer and of DeepSpeed that only make the optimizer.
_IN_OPTIMIZER = re.compile(
    r"callbacks/trainer_state\.(learning_rate|weight_decay)"
    r"|callbacks/deepspeed\.config\.optimizer\.params\..*"
)
# One learning rate under its names; the first one that differs is what the user has set.
# torch 2.13 lr_scheduler.py LRScheduler, OneCycleLR and CyclicLR compute the other ones from it.
_RATES = ("learning_rate", "max_lr", "initial_lr", "lr", "base_lrs", "min_lr")
# Argument of a Trainer that only begins the random state.
_SEED = "callbacks/trainer_state.seed"

# What describes the launch, and is no setting of the training.
_LAUNCH = ("command", "git", "world_size")
_VERSIONS = "versions."


# Settings that the length of a run follows from, of a Trainer and of a loop.
_CAUSES = frozenset(
    {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"}
    | {"batch_size", "epochs", "steps"}
)


def horizon_causes(changed: Iterable[SettingChange]) -> list[str]:
    """What the user has changed so that the horizon is another one, if that is known."""
    named = ((each.name.rpartition(".")[2], each) for each in changed if each.then is not None)
    return [f"{name}: was {each.then}, now {each.now}" for name, each in named if name in _CAUSES]


def accept_drift(
    changed: Sequence[SettingChange],
    components: Sequence[StateComponent],
    options: Options,
    *,
    causes: Sequence[str],
) -> None:
    """Refuses a changed horizon; where it is allowed, schedulers keep the live one.

    Args:
        changed: what differs between the run that saved and this one.
        components: of this run.
        options: of this run.
        causes: what of the loop was changed.

    Raises:
        DriftError: what the learning rate was planned for has changed.
    """
    replaced = set(_replaced_schedulers(changed))
    refused = [
        each
        for each in changed
        if each.severity is Severity.HORIZON
        and (key := each.name.split(".", 1)[0]) not in replaced
        and not names_component(options.exclude, key)
    ]
    if "horizon" in options.allow_changes:
        for scheduler in states_of(components, SchedulerState):
            scheduler.keep_horizon = True
    elif refused:
        raise DriftError(
            "horizon",
            found="; ".join([*horizon_causes(changed), *causes] or map(str, refused)),
            expected="the horizon that the learning rate was planned for",
            remedy="Restore it, or pass allow_changes={'horizon'}",
        )


def _replaced_schedulers(changed: Iterable[SettingChange]) -> Iterable[str]:
    """The keys of schedulers of another class; no option helps, and the check of states refuses."""
    for each in changed:
        key, _, name = each.name.partition(".")
        if name.startswith("classes") and not is_same_class(str(each.then), str(each.now)):
            yield key


def drift_messages(
    changed: Iterable[SettingChange], options: Options
) -> tuple[list[str], list[str]]:
    """One line for each pair of values, whichever settings have it; each says which one is used.

    Returns:
        Warnings: settings of the script that have no effect, because the checkpoint's are used.
        Notes: settings of the script that are used, and versions.
    """
    ignored, seeds, versions, used = list[SettingChange](), [], [], []
    for each in changed:
        if each.name.startswith(_VERSIONS):
            versions.append(f"{each.name.removeprefix(_VERSIONS)} was {each.then}, is {each.now}")
        elif re.split(r"[.\[]", each.name, maxsplit=1)[0] in _LAUNCH:
            continue
        elif each.name == _SEED:
            used_instead = "the checkpoint's random state is used"
            seeds.append(f"seed: was {each.then}, the script says {each.now}, {used_instead}")
        elif _is_restored(each.name, options):
            ignored.append(each)
        else:
            before, now = _short(each.then), _short(each.now)
            used.append(f"{each.name}: was {before} in the checkpoint, the script's {now} is used")
    notes = ([f"versions since the checkpoint: {', '.join(versions)}"] if versions else []) + used
    return [*_ignored(ignored), *seeds], notes


def _ignored(found: Iterable[SettingChange]) -> Iterable[str]:
    by_values: dict[tuple[str, str], list[str]] = {}
    for each in _with_one_rate(found):
        by_values.setdefault((_short(each.then), _short(each.now)), []).append(each.name)
    for (then, now), names in by_values.items():
        settings = ", ".join(dict.fromkeys(_setting(name) for name in names))
        match = next(filter(None, map(_RESTORED.match, names)), None)
        slot = Slot.OPTIMIZER.value if match is None else match["slot"] or match["other"]
        yield (
            f"{settings}: the script says {now}, the checkpoint's {then} is used; "
            f"exclude={{{slot!r}}} uses the script's, with a fresh {slot}"
        )


def _with_one_rate(found: Iterable[SettingChange]) -> list[SettingChange]:
    """The differences; those of the learning rate of an optimizer are one, and come first."""
    rates: dict[str, dict[str, list[SettingChange]]] = {}
    others = []
    for each in found:
        key, _, name = each.name.partition(".")
        leaf = name.rpartition(".")[2].partition("[")[0]
        if leaf in _RATES:
            slot, _, owner = key.partition("/")
            owner = "" if slot == Slot.CALLBACKS.value else owner
            rates.setdefault(owner, {}).setdefault(leaf, []).append(each)
        else:
            others.append(each)
    merged = []
    for owner, by_leaf in rates.items():
        leaf = min(by_leaf, key=_RATES.index)
        if leaf == "min_lr":  # nothing but the end of the schedule was changed
            others += by_leaf[leaf]
            continue
        values = dict.fromkeys((str(each.then), str(each.now)) for each in by_leaf[leaf])
        then, now = (", ".join(side) for side in zip(*values, strict=True))
        name = f"{Slot.OPTIMIZER.value}/{owner}.learning rate"
        merged.append(SettingChange(name, then, now, Severity.REPORTED))
    return merged + others


def _is_restored(name: str, options: Options) -> bool:
    """Whether the checkpoint's value of a setting is used."""
    if _IN_OPTIMIZER.fullmatch(name):
        return not names_component(options.exclude, Slot.OPTIMIZER.value)
    is_excluded = names_component(options.exclude, name.split(".", 1)[0])
    return _RESTORED.match(name) is not None and not is_excluded


def _setting(name: str) -> str:
    """The last part of a name, after that of the object where a slot has several."""
    key, _, rest = name.partition(".")
    slot, _, name = key.partition("/")
    leaf = re.sub(r"^param_groups\[\d+\]\.|^settings\.", "", rest)
    return f"{name} {leaf}" if name and slot != Slot.CALLBACKS.value else leaf


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


HORIZON = "horizon"


def horizon_in_words(horizon: Mapping[str, int]) -> str:
    """E.g. ``steps=100``."""
    return ", ".join(f"{unit}={count}" for unit, count in horizon.items()) or "no limit"
