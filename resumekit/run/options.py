"""The options and arguments that every adapter takes, checked in one place."""

from __future__ import annotations

import os
import re
from collections import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from resumekit.cadence import parse_cadence, seconds_of
from resumekit.capture.ddp_buckets import GRADIENT_BUCKETS
from resumekit.capture.slots import OPTIMIZER_PARAMETERS
from resumekit.distributed import AGREEMENT_TIMEOUT_SECONDS
from resumekit.errors import ConfigurationError, did_you_mean
from resumekit.places.place import GivenPlace, Place, checked_places
from resumekit.state import Slot, StateComponent
from resumekit.storage.directories import StepName
from resumekit.storage.retention import RetentionPolicy

Change = Literal["batch_size", "horizon", "world_size"]

# Those that launchers, schedulers and people send, and that a process can take.
SignalName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"]


class OptionKeywords(TypedDict, total=False):
    """The options as keywords; see ``Options``."""

    save_every: int | str | None
    mtbf: str
    keep_latest: int | None
    keep_best: int
    keep_every: int | None
    best_metric: str | None
    mode: Literal["min", "max"]
    randomness: Literal["tape", "keyed"]
    strict: bool
    exclude: Collection[str]
    allow_missing: Collection[str]
    per_rank: Collection[str]
    allow_changes: Collection[Change]
    rename: Mapping[str, str]
    resume_from: str | None
    import_from: str | Path | None
    trust_import: bool
    on_save_error: Literal["raise", "warn"]
    on_full: Literal["raise", "skip", "prune"]
    async_save: bool | Literal["auto"]
    on_save_in_flight: Literal["wait", "skip"]
    grace_seconds: float
    mid_accumulation: Literal["boundary", "gradients"]
    leave_on: Collection[SignalName]
    agreement_timeout_seconds: int
    validate: Literal["off", "digest", "full"]
    transient: Collection[str]
    user_state_limit: int
    loop_variables: Literal["restore", "report", "off"]
    on_divergence: Literal["warn", "raise"]
    record_command: bool
    lock: Literal["posix", "none"]
    places: Sequence[GivenPlace]
    mirror: GivenPlace | None
    mirror_flush: str
    trackers: Literal["continue", "off"]


@dataclass(frozen=True)
class Options:
    """How a run saves, keeps and resumes its checkpoints.

    Args:
        save_every: optimizer steps between saves, a duration such as ``"10min"``, or ``"auto"``:
            the interval that loses the least time, by the measured cost of a save and ``mtbf``.
            Saves then cost at most 1% of the training time, but one is made every 30 minutes at
            least. Whatever it is, a save is also made on ``save()``, on an improved metric and at
            the end; None makes no others.
        mtbf: the mean time between failures of the whole job, for ``save_every="auto"``.
        keep_latest: the number of newest checkpoints to keep; None keeps all.
        keep_best: the number of best checkpoints to keep, by ``best_metric``.
        keep_every: checkpoints at multiples of this many steps are kept for ever.
        best_metric: the keyword of ``report()`` that selects the best checkpoint.
        mode: ``"min"`` or ``"max"``: which values of it are better.
        randomness: ``"tape"`` records the run's random numbers as they are; ``"keyed"`` seeds each
            sample and collation from a key, so that they are the same for any number of workers.
            See docs/explanation/data.md.
        strict: refuse at start a run of which any part would not be restored exactly.
        exclude: components (keys or slots) that a resume leaves as they are, with what belongs to
            them; recorded.
        allow_missing: components that the checkpoint may lack; they keep their live state.
        per_rank: components (keys or slots) of which each rank has its own state, e.g. an optimizer
            that shards its moments by rank. See docs/explanation/contract.md.
        allow_changes: changes that a resume accepts: ``"horizon"``, ``"batch_size"``,
            ``"world_size"``. See docs/explanation/data.md.
        rename: prefixes of parameter names that the run has changed, saved to live, e.g.
            ``{"model.": ""}``. Needed only where a part of the names has changed; used while the
            checkpoint has the old names. See docs/explanation/contract.md.
        resume_from: the one checkpoint to start from, by name, e.g. ``"step-00000500"``.
        import_from: the path of a checkpoint that another program has written, e.g. a Trainer's
            ``checkpoint-500``: the run begins from it where its directory is empty. See
            docs/how-to/import.md.
        trust_import: make objects of any class that ``import_from`` holds, which runs code that it
            names. See docs/how-to/import.md.
        on_save_error: ``"raise"``, or ``"warn"`` to log it and train on; the old checkpoint stays
            either way.
        on_full: what becomes of a save for which the disk or the quota is too small: ``"raise"``
            does as ``on_save_error`` says; ``"skip"`` leaves it out with a warning, unless it is
            the last one of the run; ``"prune"`` deletes the oldest checkpoints until it fits, never
            the newest or the best. See docs/how-to/saving.md.
        async_save: True copies the state at the safe point and writes it beside the training;
            ``"auto"`` does so where host memory has room for the copy. A failure is raised at a
            later safe point. See ``Checkpointer.wait``.
        on_save_in_flight: what becomes of a save by ``save_every`` that is due while another one
            is being written: ``"wait"`` for that, or ``"skip"``. All other saves wait.
        grace_seconds: how long after a signal the process may live. A save in flight is always
            completed; the save of the step in progress is made after it if it still fits.
        mid_accumulation: when a save on the clock or by ``save()`` is made that comes due inside an
            accumulation window: at its end, ``"boundary"``, or at the next batch, ``"gradients"``:
            what the window has summed up in ``.grad`` is then saved as well.
        leave_on: the signals that ask the run to leave: it saves at the next step boundary and
            raises ``Preempted``. See docs/how-to/preemption.md.
        agreement_timeout_seconds: how long a rank waits for the others at a save or a resume before
            it gives up with ``RankLostError``. A rank that has died is noticed at once.
        validate: how replicated state is compared between the ranks: ``"digest"`` at every save,
            ``"full"`` after a resume as well, ``"off"`` never.
        transient: variables and attributes that a resume may recreate: they are neither saved nor
            reported. Names as in the report, e.g. ``"timer"`` or ``"trainer.cache"``.
        user_state_limit: bytes of user state (attributes of modules, callbacks, datasets, loss
            functions) that a checkpoint holds at most, counting only what training changed; a
            larger object is reported with its size.
        loop_variables: ``"restore"`` saves the variables that your running functions still read,
            and sets them at a resume; ``"report"`` names those that training changes; ``"off"``.
        on_divergence: what to do when a repeated step differs from what an earlier attempt
            recorded: ``"warn"``, or ``"raise"`` to end the run with ``DivergenceError``.
        record_command: whether the manifest holds the command line; values of options that look
            like secrets are replaced by ``***``.
        lock: ``"posix"`` keeps a second job out of the run directory by a record lock; ``"none"``
            is for file systems without such locks. See docs/reference/format.md.
        places: further locations for copies of the checkpoints, beside the run directory: each a
            path, a URL, ``"memory"`` or a ``resumekit.Place``. A resume uses the newest copy that
            verifies in any of them. See docs/how-to/places.md.
        mirror: one of them, e.g. ``"s3://bucket/run"``.
        mirror_flush: how long the end of a launch waits at most for its newest checkpoint to be
            copied to all places, e.g. ``"60s"``.
        trackers: ``"continue"`` lets TensorBoard and other trackers show one run after a resume,
            with each row once; ``"off"`` leaves them as they are. See docs/how-to/trackers.md.
    """

    save_every: int | str | None = "auto"
    mtbf: str = "24h"
    keep_latest: int | None = 2
    keep_best: int = 1
    keep_every: int | None = None
    best_metric: str | None = None
    mode: Literal["min", "max"] = "min"
    randomness: Literal["tape", "keyed"] = "tape"
    strict: bool = False
    exclude: Collection[str] = field(default_factory=frozenset)
    allow_missing: Collection[str] = field(default_factory=frozenset)
    per_rank: Collection[str] = field(default_factory=frozenset)
    allow_changes: Collection[Change] = field(default_factory=frozenset)
    rename: Mapping[str, str] = field(default_factory=dict)
    resume_from: str | None = None
    import_from: str | Path | None = None
    trust_import: bool = False
    on_save_error: Literal["raise", "warn"] = "raise"
    on_full: Literal["raise", "skip", "prune"] = "raise"
    async_save: bool | Literal["auto"] = False
    on_save_in_flight: Literal["wait", "skip"] = "wait"
    grace_seconds: float = 30.0
    mid_accumulation: Literal["boundary", "gradients"] = "boundary"
    leave_on: Collection[SignalName] = ("SIGTERM", "SIGUSR1", "SIGINT")
    agreement_timeout_seconds: int = AGREEMENT_TIMEOUT_SECONDS
    validate: Literal["off", "digest", "full"] = "digest"
    transient: Collection[str] = field(default_factory=frozenset)
    user_state_limit: int = 256 * 10**6
    loop_variables: Literal["restore", "report", "off"] = "restore"
    on_divergence: Literal["warn", "raise"] = "warn"
    record_command: bool = True
    lock: Literal["posix", "none"] = "posix"
    places: Sequence[GivenPlace] = ()
    mirror: GivenPlace | None = None
    mirror_flush: str = "60s"
    trackers: Literal["continue", "off"] = "continue"

    @property
    def saves_gradients(self) -> bool:
        """Whether a save may be made inside an accumulation window."""
        return self.mid_accumulation == "gradients"

    @property
    def retention(self) -> RetentionPolicy:
        """Which checkpoints are kept."""
        return RetentionPolicy(self.keep_latest, self.keep_best, self.keep_every)

    @property
    def all_places(self) -> tuple[Place, ...]:
        """Those of ``mirror`` and ``places``."""
        return checked_places(self.places, None)

    @property
    def memory(self) -> Place | None:
        """The one in memory."""
        return next((place for place in self.all_places if place.is_memory), None)

    @property
    def flush_seconds(self) -> float | None:
        """``mirror_flush`` in seconds; None if it is no duration."""
        return seconds_of(self.mirror_flush)

    def without_mirrors(self) -> Options:
        """The options of a run in a scratch directory."""
        return replace(self, places=[place for place in self.all_places if place.is_memory])

    def as_plain(self) -> dict[str, Any]:
        """The options by name, in plain values that two ranks can compare."""
        named = (frozenset, set, tuple, list)
        values = {**vars(self), "places": [repr(place) for place in self.places]}
        return {
            name: sorted(value) if isinstance(value, named) else value
            for name, value in values.items()
        }

    @classmethod
    def from_keywords(cls, keywords: OptionKeywords) -> Options:
        """The options of a call.

        Raises:
            ConfigurationError: an unknown name, or a value that has no meaning.
        """
        unknown = set(keywords) - {item.name for item in fields(cls)}
        if unknown:
            raise _unknown(min(unknown))
        return cls(**keywords)

    def __post_init__(self) -> None:
        parse_cadence(self.save_every, self.mtbf)
        _check_prefixes(self.rename)
        _check_step_name(self.resume_from)
        _check_seconds("grace_seconds", self.grace_seconds)
        _at_least("keep_latest", self.keep_latest, 1)
        _at_least("keep_best", self.keep_best, 0)
        _at_least("keep_every", self.keep_every, 1)
        _at_least("agreement_timeout_seconds", self.agreement_timeout_seconds, 1)
        _at_least("user_state_limit", self.user_state_limit, 0)
        _check_keys("exclude", self.exclude)
        _check_keys("allow_missing", self.allow_missing)
        _check_keys("per_rank", self.per_rank)
        places = checked_places(self.places, self.mirror)
        object.__setattr__(self, "places", places)  # as a Place each shows no credentials
        object.__setattr__(self, "mirror", None)
        if self.flush_seconds is None:
            expected = 'a duration such as "60s"'
            found = repr(self.mirror_flush)
            raise ConfigurationError("mirror_flush", found=found, expected=expected)
        for name, kind in get_type_hints(Options).items():
            _check_words(name, getattr(self, name), kind)


# What else one adapter or another takes by name.
_ARGUMENTS = (
    "components",
    "data_parallel_group",
    "ema",
    "extras",
    "generators",
    "grad_scaler",
    "groups",
    "lr_scheduler",
    "model",
    "optimizer",
    "stage_group",
)


def _unknown(name: str) -> ConfigurationError:
    known = [*(item.name for item in fields(Options)), *_ARGUMENTS]
    if name in _ARGUMENTS:
        return ConfigurationError(name, found="not an argument under this adapter")
    listed = "docs/reference/options.md and help(resumekit.run.Options) list the options"
    return ConfigurationError(
        name, found="not an option", remedy=did_you_mean(name, known) or listed
    )


def _check_prefixes(given: Any) -> None:
    """Raises ConfigurationError unless this maps prefixes to prefixes."""
    pairs = given.items() if isinstance(given, Mapping) else [(given, None)]
    for each in (part for pair in pairs for part in pair):
        if not isinstance(each, str) or (each and not each.endswith(".")):
            raise ConfigurationError(
                "rename",
                found=repr(each if isinstance(given, Mapping) else given),
                expected='prefixes that end with a dot or are empty, e.g. {"model.": ""}',
            )


def _check_step_name(given: Any) -> None:
    """Raises ConfigurationError unless this names a checkpoint, or is None."""
    if given is None or (isinstance(given, str) and StepName.parse(given) is not None):
        return
    text = str(given)
    path, _, last = text.rpartition("/")
    remedy = None
    if path and StepName.parse(last) is not None:
        remedy = f'Pass the name alone, resume_from="{last}", and its run directory'
    elif text.isdecimal() and not isinstance(given, bool):
        remedy = f'Pass resume_from="{StepName(int(text))}"'
    raise ConfigurationError(
        "resume_from",
        found=repr(given),
        expected='the name of a checkpoint, e.g. "step-00000500"',
        remedy=remedy,
    )


def names_component(names: Collection[str], key: str) -> bool:
    """Whether a component is named, by its key, by its slot or by what it belongs to."""
    return any(f"{key}/".startswith(f"{name}/") for name in names)


def is_per_rank(names: Collection[str], key: str) -> bool:
    """Whether the option ``per_rank`` names a component.

    What is derived from a model or an optimizer is named by its key only: where the ranks have
    different moments, they still have equal parameters.
    """
    is_derived = key.rpartition("/")[2] in (OPTIMIZER_PARAMETERS, GRADIENT_BUCKETS)
    return key in names if is_derived else names_component(names, key)


def _check_words(name: str, value: Any, kind: Any) -> None:
    """Raises ConfigurationError unless this is one of the words, where the type lists them.

    Of a collection each item has to be one; a text is none.
    """
    if get_origin(kind) is abc.Collection:
        _check_names(name, value)
        for each in value:
            _check_words(name, each, *get_args(kind))
    elif words := _words_of(kind):
        _one_of(name, value, words)


def _words_of(kind: Any) -> tuple[object, ...]:
    """All values of a type that lists them, as Literal does; empty for any other."""
    if kind is bool:
        return False, True
    if get_origin(kind) is Literal:
        return get_args(kind)
    is_union = get_origin(kind) in (Union, UnionType)  # with Literal it is the former
    found = [_words_of(each) for each in get_args(kind)] if is_union else []
    return tuple(chain.from_iterable(found)) if all(found) else ()


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            name, found=repr(value), expected=" or ".join(repr(word) for word in allowed)
        )


def _at_least(name: str, value: int | None, minimum: int) -> None:
    if value is not None:
        whole_number(name, value, minimum)


def _check_seconds(name: str, value: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):
        raise ConfigurationError(name, found=repr(value), expected="a number of seconds")


def whole_number(name: str, value: int | None, minimum: int) -> int:
    """The value, a whole number.

    Raises:
        ConfigurationError: it is none, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        expected = f"a whole number of at least {minimum}"
        raise ConfigurationError(name, found=repr(value), expected=expected)
    return value


def _check_names(name: str, value: Collection[str]) -> None:
    if isinstance(value, str):
        raise ConfigurationError(name, found=repr(value), expected=f"a set, e.g. {{{value!r}}}")


def _check_keys(name: str, keys: Collection[str]) -> None:
    _check_names(name, keys)  # else each letter would be a key
    slots = [slot.value for slot in Slot]
    for key in keys:
        if key.split("/", 1)[0] not in slots:
            raise ConfigurationError(
                name, found=repr(key), expected=f"a slot ({', '.join(slots)}) or 'slot/name'"
            )


# A URL, also after pathlib has joined its two slashes.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def run_directory(given: Any) -> Path:
    """The absolute path of a run directory, with ``~`` expanded. Nothing is made.

    Raises:
        ConfigurationError: it is no path, an empty one, or a URL.
    """
    expected, remedy = 'a path such as "runs/a"', None
    if not isinstance(given, (str, os.PathLike)):
        found = "None" if given is None else f"a {type(given).__name__}"
        raise ConfigurationError("directory", found=found, expected=expected)
    text = os.fspath(given)
    is_url = isinstance(text, str) and _URL.match(text)
    if is_url:
        expected = "a local or mounted path"
        remedy = "Pass a local directory, and the URL as mirror="
    if not isinstance(text, str) or not text.strip() or is_url:
        raise ConfigurationError("directory", found=repr(text), expected=expected, remedy=remedy)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ConfigurationError("directory", found=repr(text), expected=expected) from error


def require_order(first: Any, second: Any, *, call: str) -> None:
    """Returns unless a path was given first, where the framework's object belongs.

    Args:
        first: the first argument, the framework's object.
        second: the run directory.
        call: how to write it, e.g. ``Checkpointer(accelerator, "runs/a")``.

    Raises:
        ConfigurationError: it was; shows the call.
    """
    if isinstance(first, (str, os.PathLike)) or first is None:
        name = call.partition("(")[0]
        others = "" if second in (None, "") else f", {type(second).__name__}"
        found = f"called as {name}({first!s}{others})" if first else "no first argument"
        raise ConfigurationError(name, found=found, expected=call)


def checked_extras(extras: Any) -> dict[str, Any]:
    """The live dict of the user's own values; a new one where none was given.

    Raises:
        ConfigurationError: it is no dict.
    """
    if extras is None:
        return {}
    if not isinstance(extras, dict):
        raise ConfigurationError(
            "extras",
            found=_shortened(extras),
            expected="a dict that your code keeps up to date",
            remedy='Pass e.g. extras={"phase": 1}',
        )
    return extras


def checked_names(name: str, given: Any) -> Mapping[str, Any]:
    """A mapping of names to objects; an empty one where none was given.

    Raises:
        ConfigurationError: it is no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            name,
            found=f"a {type(given).__name__}",
            expected=f'a dict of names, e.g. {name}={{"first": ...}}',
        )
    return given


def check_components(components: Any) -> None:
    """Raises ConfigurationError unless the components are a function, or nothing but components.

    Raises:
        ConfigurationError: they are not; names the first that is none.
    """
    if callable(components):
        return
    if not isinstance(components, Sequence):
        raise ConfigurationError(
            "components", found=f"a {type(components).__name__}", expected="a list of them"
        )
    for each in components:
        if not isinstance(each, StateComponent):
            raise ConfigurationError(
                "components",
                found=f"a {type(each).__name__}",
                expected='StateComponents, e.g. StateComponent("model", ModelState(model))',
            )


def metric_values(values: Mapping[str, Any]) -> dict[str, float]:
    """What ``report()`` was given, as plain numbers.

    Raises:
        ConfigurationError: a value is no number; names it.
    """
    plain = {}
    for name, value in values.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements
            raise ConfigurationError(
                f"report({name}=...)",
                found=_shortened(value),
                expected="a number, or a tensor with one element",
            ) from error
    return plain


def _shortened(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a {type(value).__name__}"
