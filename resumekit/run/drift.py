"""What differs between the run that saved and the one that resumes, and whose value applies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resumekit.capture import Difference, SchedulerState, Severity
from resumekit.errors import DriftError
from resumekit.run.options import Options, names_component
from resumekit.state import Slot, StateComponent

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
# Argument of a Trainer that only begins the random state.
_SEED = "callbacks/trainer_state.seed"

# What describes the launch, and is no setting of the training.
_LAUNCH = ("command", "git", "world_size")
_VERSIONS = "versions."


@dataclass(frozen=True)
class DriftMessages:
    """What a resume logs of the differences.

    Args:
        warnings: settings of the script that have no effect, because the checkpoint's are used.
        notes: settings of the script that are used, and versions.
    """

    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def accept_drift(
    changed: Sequence[Difference], components: Sequence[StateComponent], options: Options
) -> None:
    """Refuses a changed horizon; where it is allowed, schedulers keep the live one.

    Raises:
        DriftError: what the learning rate was planned for has changed.
    """
    refused = [
        each
        for each in changed
        if each.severity is Severity.HORIZON
        and not names_component(options.exclude, each.name.split(".", 1)[0])
    ]
    if "horizon" in options.allow_changes:
        for component in components:
            if isinstance(component.stateful, SchedulerState):
                component.stateful.keep_horizon = True
    elif refused:
        raise DriftError(
            "horizon",
            found="; ".join(str(each) for each in refused),
            expected="the horizon that the learning rate was planned for",
            remedy="Restore it, or pass allow_changes={'horizon'}",
        )


def drift_messages(changed: Iterable[Difference], options: Options) -> DriftMessages:
    """One line for each pair of values, whichever settings have it; each says which one is used."""
    ignored: dict[tuple[str, str], list[str]] = {}
    seeds, versions, used = [], [], []
    for each in changed:
        if each.name.startswith(_VERSIONS):
            versions.append(f"{each.name.removeprefix(_VERSIONS)} was {each.then}, is {each.now}")
        elif re.split(r"[.\[]", each.name, maxsplit=1)[0] in _LAUNCH:
            continue
        elif each.name == _SEED:
            used_instead = "the checkpoint's random state is used"
            seeds.append(f"seed: was {each.then}, the script says {each.now}, {used_instead}")
        elif _is_restored(each.name, options):
            ignored.setdefault((_short(each.then), _short(each.now)), []).append(each.name)
        else:
            before, now = _short(each.then), _short(each.now)
            used.append(f"{each.name}: was {before} in the checkpoint, the script's {now} is used")
    notes = ([f"versions since the checkpoint: {', '.join(versions)}"] if versions else []) + used
    return DriftMessages((*_ignored(ignored), *seeds), tuple(notes))


def _ignored(found: dict[tuple[str, str], list[str]]) -> Iterable[str]:
    for (then, now), names in found.items():
        settings = ", ".join(dict.fromkeys(_setting(name) for name in names))
        match = next(filter(None, map(_RESTORED.match, names)), None)
        slot = Slot.OPTIMIZER.value if match is None else match["slot"] or match["other"]
        yield (
            f"{settings}: the script says {now}, the checkpoint's {then} is used; "
            f"exclude={{{slot!r}}} uses the script's, with a fresh {slot}"
        )


def _is_restored(name: str, options: Options) -> bool:
    """Whether the checkpoint's value of a setting is used."""
    if _IN_OPTIMIZER.fullmatch(name):
        return not names_component(options.exclude, Slot.OPTIMIZER.value)
    is_excluded = names_component(options.exclude, name.split(".", 1)[0])
    return _RESTORED.match(name) is not None and not is_excluded


def _setting(name: str) -> str:
    """The last part of a name, after that of the object where a slot has several."""
    key, _, rest = name.partition(".")
    slot, _, own = key.partition("/")
    leaf = re.sub(r"^param_groups\[\d+\]\.|^settings\.", "", rest)
    return f"{own} {leaf}" if own and slot != Slot.CALLBACKS.value else leaf


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
