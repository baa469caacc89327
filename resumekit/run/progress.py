"""The counters of the logical run, the best metric, and which of several loops leads."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from resumekit.data.source import Source
from resumekit.distributed import DataRanks, World
from resumekit.errors import CheckpointError, LoopError
from resumekit.state import Checked, Count, Rule
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest
from resumekit.storage.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far the logical run is. All counts are of the whole run, whatever was restarted.

    Args:
        step: optimizer-step boundaries passed.
        micro_step: batches used.
        epoch: the epoch of the next batch, from 0.
        batch: the index of the next batch in that epoch.
        samples: samples used, summed over the data-parallel ranks.
        tokens: tokens used, summed over the data-parallel ranks.
    """

    step: int = 0
    micro_step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain values for the manifest."""
        return asdict(self)


class _Counts(TypedDict):
    """``Progress`` as it is stored."""

    step: Count
    micro_step: Count
    epoch: Count
    batch: Count
    samples: Count
    tokens: Count


class _Loops(TypedDict):
    asked: list[str]
    over: list[str]


class _OptionalCounters(TypedDict, total=False):
    marks_steps: bool  # older checkpoints lack it


class _CountersState(_OptionalCounters):
    progress: _Counts
    horizon: dict[str, Count]
    finished: str | None
    loops: _Loops
    within_window: bool


class Counters(Checked):
    """How far the run is, how far it is to go, and whether it is finished.

    Samples and tokens are counted locally and summed over the ranks by ``fold``.

    Attributes:
        finished: why the run is over, or None.
        horizon: what the loop was asked for, e.g. ``{"epochs": 3}``.
        loop_order: the loops of the epoch under way.
        saw_whole_step: whether this process has used all batches of the step that was counted last.
        marks_steps: the loop calls ``step()``, in this launch or an earlier one.
    """

    schema = _CountersState

    def __init__(self) -> None:
        self._counts = Progress().as_dict()
        self._local_samples = 0
        self._local_tokens = 0
        self.finished: str | None = None
        self.horizon: dict[str, int] = {}
        self.loop_order = LoopOrder()
        self._is_within_window = False
        self._window_samples: list[Any] = []
        self._knows_window = True
        self.saw_whole_step = True
        self.marks_steps = False

    @property
    def progress(self) -> Progress:
        """The counts; samples and tokens as of the last ``fold``."""
        return Progress(**self._counts)

    @property
    def step(self) -> int:
        """The optimizer-step boundaries that were passed."""
        return self._counts["step"]

    def count_batch(self, num_samples: int, *, follows: bool = False) -> None:
        """One batch was handed to the loop, or to what draws from a loader beside it."""
        if not follows:
            self._counts["micro_step"] += 1
        self._local_samples += num_samples
        self._is_within_window = True

    def count_tokens(self, num_tokens: int) -> None:
        """So many tokens were used by this rank."""
        self._local_tokens += num_tokens

    def count_step(self) -> None:
        """One optimizer-step boundary was passed."""
        self._counts["step"] += 1
        self._is_within_window = False
        self.saw_whole_step, self._knows_window = self._knows_window, True

    def samples_so_far(self, num_ranks: int) -> int:
        """The samples of the run; since the last ``fold`` as many on every rank as on this one."""
        return self._counts["samples"] + self._local_samples * num_ranks

    def is_within_window(self) -> bool:
        """Whether batches were used since the last step."""
        return self._is_within_window

    def note_samples(self, indices: Any) -> None:
        """Remembers the samples of the accumulation window under way, for a trace."""
        if indices is not None:
            several = isinstance(indices, (list, tuple))
            self._window_samples.extend(indices if several else [indices])

    def take_samples(self) -> list[Any]:
        """The samples of the accumulation window that ends, as far as this process has seen it."""
        samples, self._window_samples = self._window_samples, []
        return samples

    def move_to(self, epoch: int, batch: int) -> None:
        """The position of the next batch."""
        self._counts["epoch"], self._counts["batch"] = epoch, batch

    def fold(self, world: World, data_ranks: DataRanks, message: T) -> list[T]:
        """Adds what was used since the last fold, once for ranks of the same data. Collective.

        Args:
            world: the ranks.
            data_ranks: which of them take the same data.
            message: of this rank, for all ranks.

        Returns:
            The messages of all ranks, in rank order.
        """
        used = world.gather((self._local_samples, self._local_tokens, message))
        counted = [used[rank] for rank in data_ranks.first_ranks]
        self._counts["samples"] += sum(samples for samples, _, _ in counted)
        self._counts["tokens"] += sum(tokens for _, tokens, _ in counted)
        self._local_samples = self._local_tokens = 0
        return [each for _, _, each in used]

    def state_dict(self) -> dict[str, Any]:
        """The counts, the horizon, and why the run is over if it is."""
        return {
            "progress": dict(self._counts),
            "horizon": dict(self.horizon),
            "finished": self.finished,
            "loops": self.loop_order.state_dict(),
            "within_window": self._is_within_window,
            "marks_steps": self.marks_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the counts of a checkpoint."""
        self._counts = dict(state["progress"])
        self._local_samples = self._local_tokens = 0
        self.horizon = dict(state["horizon"])
        self.finished = state["finished"]
        self.loop_order.load_state_dict(state["loops"])
        self._is_within_window = state["within_window"]
        self.marks_steps = state.get("marks_steps", False)  # older checkpoints lack it
        self._window_samples = []
        self._knows_window = not self._is_within_window


def _is_latest(pair: list[Any]) -> bool:
    return len(pair) == 2 and type(pair[0]) is int and pair[0] >= 0


class OwnLoop:
    """An iterator of the run: what it draws from has its position saved, by its own name."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The loaders that it draws from."""
        return ()

    @property
    def needs_no_variable(self) -> bool:
        """Whether a resume does without the variables that refer to it."""
        return True


class LoopOrder:
    """The loops of the epoch under way, by the names of their loaders; a part of a run's state.

    Attributes:
        main: the loaders of the loop that has the horizon; empty inside ``epochs()``.
        asked: inside ``epochs()``, the loaders of this epoch in the order they were asked first.
    """

    def __init__(self) -> None:
        self.main: tuple[str, ...] = ()
        self.asked: list[str] = []
        self._over: set[str] = set()  # used up in this epoch
        self._fetched: set[str] = set()  # in this epoch, by this process

    @property
    def leader(self) -> str | None:
        """The first loader of the loop that leads, or None while none is under way."""
        if self.main:
            return self.main[0]
        for name in self.asked:
            if name not in self._over:
                return name
        return None

    @property
    def under_way(self) -> list[str]:
        """Inside ``epochs()``, the loaders that were asked in this epoch and are not used up."""
        return [name for name in self.asked if name not in self._over]

    def ask(self, names: Sequence[str], *, follows: bool) -> bool:
        """A loop is asked for a batch.

        Args:
            names: its loaders.
            follows: it never leads.

        Returns:
            False if it has none: its part of the epoch was used up before the checkpoint.

        Raises:
            LoopError: a resumed process could not reach this point again.
        """
        if names[0] in self._over and not self._fetched:
            return False
        if not self.main and not follows:
            self._take_place(names)
        leader = self.leader
        if leader not in names and leader not in self._fetched:
            raise LoopError(
                f"batches(name={names[0]!r})",
                found="used before any loop has a batch"
                if leader is None
                else f"used before the first batch of the leading loop, {leader!r}",
                expected="inside the loop, after its batch",
                remedy="Call next() on it inside the loop, after the loop has a batch",
            )
        return True

    def _take_place(self, names: Sequence[str]) -> None:
        is_second_pass = names[0] in self._over
        self._over.difference_update(names)
        self.asked.extend(name for name in names if name not in self.asked)
        if is_second_pass and not set(self.asked) - self._over - set(names):
            raise LoopError(
                f"batches(name={names[0]!r})",
                found="iterated a second time in one epoch",
                expected="once, unless another loop is under way around it",
                remedy="Give the second loop a name of its own",
            )

    def leads(self, names: Sequence[str]) -> bool:
        """Whether the loop over these loaders leads."""
        return self.leader in names

    def fetched(self, names: Iterable[str]) -> None:
        """A batch goes to the loop: from here on the loops stand where they stood."""
        self._fetched.update(names)

    def ended(self, names: Iterable[str]) -> None:
        """A loop inside ``epochs()`` has used up its loaders."""
        self._over.update(names)

    def is_alone(self, names: Collection[str]) -> bool:
        """Whether this epoch had no other loop yet."""
        return not self._over and len(self.asked) == len(names) and set(self.asked) == set(names)

    def next_epoch(self) -> None:
        """An epoch of ``epochs()`` ends."""
        self.asked = []
        self._over.clear()
        self._fetched.clear()

    def state_dict(self) -> dict[str, Any]:
        """The loops of the epoch under way."""
        return {"asked": list(self.asked), "over": sorted(self._over)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the loops of an interrupted epoch."""
        self.asked = list(state["asked"])
        self._over = set(state["over"])


class _NoMetric(TypedDict):
    """Nothing selects the best checkpoint."""


class _BestState(TypedDict):
    name: str
    mode: Literal["min", "max"]
    value: float | None
    step: Count | None
    latest: Annotated[list[int | float], Rule("a step and a value", _is_latest)] | None


class BestSelection(Checked):
    """Follows one reported metric and remembers its best value and step.

    Args:
        name: the keyword of ``report``, or None when no metric selects.
        mode: ``"min"`` or ``"max"``.
    """

    schema = _BestState | _NoMetric

    def __init__(self, name: str | None, mode: str) -> None:
        self.name, self._mode = name, mode
        self._best: tuple[int, float] | None = None  # step and value
        self._former: list[tuple[int, float]] = []  # of which the newest may not be durable yet
        self._latest: tuple[int, float] | None = None

    @property
    def was_reported(self) -> bool:
        """Whether the metric has had a value, in this process or before the checkpoint."""
        return self._latest is not None

    def report(self, values: Mapping[str, float], step: int) -> bool:
        """Takes the values reported for a step; whether the best one improved."""
        if self.name is None or self.name not in values:
            return False
        self._latest = (step, values[self.name])
        improved = self._is_better(values[self.name], self._best)
        if improved:
            if self._best is not None and self._best[0] != step:
                self._former = [*self._former[-1:], self._best]
            self._best = self._latest
        return improved

    def forget(self, step: int | None) -> None:
        """The save at a step has failed: a value that it was to keep is not the best one."""
        kept = [each for each in (*self._former, self._best) if each and each[0] != step]
        self._former, self._best = kept[:-1], kept[-1] if kept else None

    def _is_better(self, value: float, best: tuple[Any, float] | None) -> bool:
        """Whether this value is better; a NaN never is."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best[1] if self._mode == "min" else value > best[1]

    def metric_of(self, step: int) -> dict[str, str] | None:
        """The manifest's record of the metric at this step, or None if none was reported."""
        if self.name is None or self._latest is None or self._latest[0] != step:
            return None
        return {"name": self.name, "mode": self._mode, "value": self._latest[1].hex()}

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step and its metric."""
        if self.name is None:
            return {}
        step, value = self._best or (None, None)
        latest = list(self._latest) if self._latest else None
        found = {"name": self.name, "mode": self._mode, "value": value, "step": step}
        return {**found, "latest": latest}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Takes the best value over, unless this run selects by another metric.

        Returns:
            What was not restored: the best value of another metric.
        """
        if self.name is None or not state:
            return ()
        if (state["name"], state["mode"]) != (self.name, self._mode):
            return (
                f"best_metric: was {state['name']} ({state['mode']}) in the checkpoint, the "
                f"script's {self.name} ({self._mode}) is used; it has no best value yet",
            )
        self._best = None if state["value"] is None else (state["step"], state["value"])
        latest = state["latest"]
        self._latest = (int(latest[0]), float(latest[1])) if latest else None
        return ()

    def best_step(
        self, store: Store, in_flight: Manifest | None = None
    ) -> tuple[StepName, float] | None:
        """The checkpoint with the best value, and that value; or None.

        Args:
            store: has the committed ones.
            in_flight: of a checkpoint that counts too, although it may not be committed yet.
        """
        best: tuple[StepName, float] | None = None
        if self.name is None:
            return best
        found = {name: self._committed_value(store, name) for name in store.step_names()}
        if in_flight is not None:
            found[in_flight.name] = self._value_in(in_flight)
        for name in sorted(found):
            value = found[name]
            if value is not None and self._is_better(value, best):
                best = (name, value)
        return best

    def _committed_value(self, store: Store, name: StepName) -> float | None:
        try:
            return self._value_in(store.open_step(name).manifest)
        except CheckpointError:
            return None

    def _value_in(self, manifest: Manifest) -> float | None:
        saved = manifest.metric
        return float.fromhex(saved["value"]) if saved and saved["name"] == self.name else None
