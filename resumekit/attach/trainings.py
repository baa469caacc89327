"""Which run a training continues: the one of an earlier launch that is the same training.

Its order in the process is not enough: a script that leaves out what is done, as a cross-validation
that has the results of its first folds, begins with another one. In a directory with one run and
with one Trainer the two belong together, whatever was changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from resumekit.errors import CheckpointError, ConfigurationError, DirectoryError
from resumekit.log import logger, show_messages, warn
from resumekit.storage.directories import TRAININGS, replace_small, seal, unseal
from resumekit.storage.io.file_system import LocalFileSystem, directory_errors
from resumekit.storage.store import Store

_NUM_NAMED = 3


@dataclass(frozen=True)
class Training:
    """What a training is.

    Args:
        model: a digest of its modules and parameters, without their values.
        data: a digest of what it trains on, or of its length.
        settings: the arguments that make it another training, as text.
        others: digests of other arguments, and of plain variables of the functions that train: of
            several runs that fit, the one that agrees with the most of them is continued.
    """

    model: str
    data: str
    settings: Mapping[str, str]
    others: Mapping[str, str]

    def differences(self, then: Training) -> list[str]:
        """What makes it another training than one of an earlier launch, in words."""
        found = [name for name in ("model", "data") if getattr(self, name) != getattr(then, name)]
        values = ((n, then.settings.get(n), self.settings.get(n)) for n in self._names(then))
        return [*found, *(f"{n}: was {old}, now {new}" for n, old, new in values if old != new)]

    def _names(self, then: Training) -> list[str]:
        return sorted({*then.settings, *self.settings})

    def distance(self, then: Training) -> int:
        """The number of other values that differ."""
        names = {*then.others, *self.others}
        return sum(then.others.get(name) != self.others.get(name) for name in names)


@dataclass(frozen=True)
class KnownRun:
    """A run that an earlier launch, or this one, has begun.

    Args:
        number: its order in the launch that began it, from 1.
        training: what it trains.
        is_over: it has finished, or the script has gone on to another training.
        is_taken: it is that of another training of this launch.
    """

    number: int
    training: Training
    is_over: bool = False
    is_taken: bool = False


def run_of(
    training: Training, number: int, known: Sequence[KnownRun], *, root: Path
) -> KnownRun | None:
    """The run that a training continues; None where it begins a new one.

    Args:
        training: that begins.
        number: its order in this launch, from 1.
        known: the runs.
        root: the directory of the command.

    Raises:
        ConfigurationError: several runs fit, or none does while one was interrupted.
    """
    free = [each for each in known if not each.is_taken]
    fits = [each for each in free if not training.differences(each.training)]
    if fits:
        distances = [training.distance(each.training) for each in fits]
        nearest = [e for e, far in zip(fits, distances, strict=True) if far == min(distances)]
        by_order = [each for each in nearest if each.number == number]
        if len(by_order or nearest) > 1:
            raise _refused(number, nearest, training, "is each of several runs", root)
        return (by_order or nearest)[0]
    interrupted = [each for each in free if not each.is_over]
    if len(known) == number == 1 and interrupted:
        return known[0]
    if interrupted:
        raise _refused(number, interrupted, training, "is none of the interrupted runs", root)
    return None


def _refused(
    number: int, runs: Iterable[KnownRun], training: Training, what: str, root: Path
) -> ConfigurationError:
    lines, removed = [], []
    for each in runs:
        differences = _in_words(training.differences(each.training)) or "the same"
        lines.append(f"{directory_of(root, each.number)} ({differences})")
        if each.number > 1:  # the directory of the first one has the others in it
            removed.append(str(directory_of(root, each.number)))
    choice = f", or remove {' or '.join(removed)} if that run is not to be continued"
    return ConfigurationError(
        str(root),
        found=f"training {number} of this launch {what}: {'; '.join(lines)}",
        expected="the same model, data and arguments as one of them",
        remedy=f"Undo the change; or pass another --dir{choice if removed else ''}",
    )


def directory_of(root: Path, number: int) -> Path:
    """The directory of a run: that of the command for the first one, then ``trainer-2`` in it."""
    return root if number == 1 else root / f"trainer-{number}"


class KnownRuns:
    """The runs of a command's directory, in a file in it.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / TRAININGS
        self._num_begun = 0  # in this launch
        self._runs = {each.number: each for each in self._read()}

    def begin(self, training: Training) -> Path:
        """The directory of the run of a training that begins.

        Raises:
            ConfigurationError: see ``run_of``.
            DirectoryError: the file cannot be written, as on a full disk; the former one stays.
        """
        self._num_begun += 1
        # A run whose directory was removed has nothing to continue.
        self._runs = {
            number: replace(
                each, is_over=each.is_over or each.is_taken or self._has_finished(number)
            )
            for number, each in self._runs.items()
            if each.is_taken or directory_of(self._root, number).is_dir()
        }
        runs = list(self._runs.values())
        found = run_of(training, self._num_begun, runs, root=self._root)
        order = self._num_begun
        new = order if order not in self._runs else max(self._runs) + 1
        number = found.number if found else new
        self._report(training, found, number)
        self._runs[number] = KnownRun(number, training, is_taken=True)
        self._write()
        return directory_of(self._root, number)

    def _report(self, training: Training, found: KnownRun | None, number: int) -> None:
        by_order, directory = self._runs.get(self._num_begun), directory_of(self._root, number)
        if found is None and by_order is not None and not by_order.is_taken:
            show_messages()
            warn(
                "RK-834",
                "training %d of this launch is not the finished one in %s (%s): it begins in %s",
                self._num_begun,
                directory_of(self._root, by_order.number),
                _in_words(training.differences(by_order.training)),
                directory,
            )
        elif found is not None and number != self._num_begun:
            show_messages()
            logger.info("training %d of this launch continues %s", self._num_begun, directory)

    def _has_finished(self, number: int) -> bool:
        store = Store(directory_of(self._root, number))
        try:
            names = store.step_names()
            return bool(names) and store.open_step(names[0]).manifest.finished is not None
        except (CheckpointError, DirectoryError):
            return False

    def _read(self) -> list[KnownRun]:
        try:
            content = unseal(self._path.read_bytes(), where=str(self._path))
            return [_known(each) for each in content["runs"]]
        except FileNotFoundError:
            return []
        except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                str(self._path),
                found=f"damaged: {error}",
                expected="the trainings of the runs in this directory",
                remedy="Remove it: then trainings continue the runs in their order",
            ) from error

    def _write(self) -> None:
        runs = [{**asdict(each), "is_taken": False} for each in self._runs.values()]
        draft = self._path.with_suffix(".draft")
        with directory_errors(self._root, "be written"):
            self._root.mkdir(parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)  # of a launch that was killed
            data = seal({"runs": runs})
            replace_small(LocalFileSystem(), self._path, data, draft=draft, sync=False)


def _known(content: Mapping[str, Any]) -> KnownRun:
    training = Training(**content["training"])
    return KnownRun(int(content["number"]), training, is_over=content["is_over"] is True)


def _in_words(differences: Sequence[str]) -> str:
    more = f" and {len(differences) - _NUM_NAMED} more" if len(differences) > _NUM_NAMED else ""
    return ", ".join(differences[:_NUM_NAMED]) + more
