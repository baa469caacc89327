"""The engine that every adapter shares: a run that saves itself and finds its way back."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from resumekit.contract import Progress
from resumekit.data import Source
from resumekit.engine.cadence import parse_cadence
from resumekit.engine.driven import DrivenLoop
from resumekit.engine.loops import Batches, Epochs
from resumekit.engine.options import OptionKeywords, Options
from resumekit.engine.report import ResumeReport, tell
from resumekit.engine.run import Components, Run
from resumekit.errors import ConfigurationError, LoopError, SaveError
from resumekit.prove.trace import rng_digests

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class BestCheckpoint(NamedTuple):
    """The best committed checkpoint: its directory, its step and the metric's value."""

    path: Path
    step: int
    value: float


class Checkpointer:
    """Saves the whole state of a run and, when the same command is started again, continues it.

    Args:
        directory: the run directory; made if missing, one and the same for all ranks.
        components: the model, optimizers and all else whose state makes up the run, or a function
            that gives them, called by ``resume()``; the position in the data, the random state, the
            progress and the best metric are added here.
        extras: a live dict of your own values. Plain values are replaced under their key, objects
            with ``state_dict`` are loaded in place.
        generators: private random generators by name (torch, NumPy or ``random.Random``).
        **options: see ``resumekit.engine.options.Options``.

    Raises:
        ConfigurationError: an option is wrong.
        DeclarationError: a component is declared in a way that cannot be right.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        components: Components,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        self._options = Options.from_keywords(options)
        self._cadence = parse_cadence(self._options.save_every)
        self._run = Run(
            Path(directory),
            components,
            self._options,
            extras={} if extras is None else extras,
            generators={} if generators is None else generators,
        )
        self._loop: str | None = None  # the outermost loop, once there is one
        self._active: Source | None = None  # where the last batch came from
        self._samples: list[Any] = []  # of the step under way, when tracing
        self._tokens = 0  # of the accumulation window under way
        self._unsettled = False  # a batch was handed out since the last settled point
        self._stepped = False  # ... and its step is complete
        self._due = False
        self._stop_reason: str | None = None
        self._steps_at_epoch_start: int | None = 0
        self._announced = False
        _close_at_exit(self)

    # ---------------------------------------------------------------- what the user calls

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._run.directory

    @property
    def progress(self) -> Progress:
        """How far the logical run is; samples and tokens as of the last checkpoint."""
        return self._run.counters.progress

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None while it is not."""
        return self._run.counters.finished

    def resume(self) -> ResumeReport:
        """Restores everything but the data position and the random state. Collective, idempotent.

        Those two follow at the first fetch. Entering a loop calls this.

        Returns:
            What was found and done; a fresh start is ``resumed=False``.

        Raises:
            DirectoryError: the run directory cannot be used, or another live job owns it.
            CheckpointNotFoundError: ``resume_from`` names a checkpoint that is not there.
            NoUsableCheckpointError: there are checkpoints, and none can be used.
            StateMismatchError: the checkpoint does not fit the live objects; nothing was changed.
        """
        return self._run.resume()

    def epochs(self, num_epochs: int) -> Epochs:
        """The absolute numbers of the epochs still to be trained. Collective.

        Args:
            num_epochs: the epochs of the whole run, not of this launch.
        """
        self._enter("epochs", {"epochs": _positive("epochs", num_epochs)})
        return Epochs(self, num_epochs)

    def batches(
        self,
        loader: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        name: str = "train",
    ) -> Batches:
        """The batches still to be used, beginning with the next unseen one. Collective.

        Alone, with ``epochs=`` or ``steps=``, it is the whole loop; inside ``epochs()`` it is
        the rest of the epoch.

        Args:
            loader: the training loader; evaluation loaders are never wrapped.
            epochs: train until this many epochs of the whole run are complete.
            steps: train until the whole run has this many optimizer steps.
            name: tells this loader from others of the same run.

        Raises:
            TypeError: both ``epochs`` and ``steps``, or one of them inside ``epochs()``.
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        if epochs is not None and steps is not None:
            raise TypeError("batches() takes epochs= or steps=, not both")
        if epochs is None and steps is None:
            if self._loop != "epochs":
                raise TypeError(
                    "batches(loader) alone needs epochs= or steps=, or an epochs() loop"
                )
        else:
            if self._loop == "epochs":
                raise TypeError("inside epochs() the loop is batches(loader), without a horizon")
            unit, count = ("epochs", epochs) if epochs is not None else ("steps", steps)
            self._enter("batches", {unit: _positive(unit, count)})
        return Batches(self, self._run.position.open(loader, name), epochs=epochs, steps=steps)

    def drive(self, *, epochs: int | None = None, steps: int | None = None) -> DrivenLoop:
        """The loop of a framework that iterates by itself. Collective.

        The checkpoint is found, so that ``progress`` and ``finished`` tell where the run goes on;
        nothing else is restored before ``resume()``.

        Args:
            epochs: the epochs of the whole run, if that is how far the framework goes.
            steps: the optimizer steps of the whole run; with ``epochs``, whichever comes first.

        Raises:
            DirectoryError: the run directory cannot be used, or another live job owns it.
            NoUsableCheckpointError: there are checkpoints, and none can be used.
            DriftError: the interrupted run had another horizon.
        """
        self._run.find()
        asked = {"epochs": epochs, "steps": steps}
        self._run.accept_horizon({unit: n for unit, n in asked.items() if n is not None})
        return DrivenLoop(self)

    def step(self, *, tokens: int = 0, **values: Any) -> None:
        """Marks one optimizer-step boundary; a save that is due follows at the settled point.

        Call it also when the gradient scaler skipped the update. Where the framework counts
        accumulation windows itself, it may be called after every micro-batch: inside a window it
        only adds tokens.

        Args:
            tokens: the tokens that this rank used since the last call.
            **values: what to compare in a trace, e.g. ``loss=loss``; read only when tracing.

        Raises:
            LoopError: no batch has been fetched through ``batches()``.
        """
        if not self._unsettled:
            raise LoopError(
                "step()",
                found="called without a batch from batches()",
                expected="a loop over batches()",
                remedy="Write the loop as: for batch in checkpointer.batches(loader, epochs=...)",
            )
        self._tokens += tokens
        if not self._at_step_boundary():
            return
        counters = self._run.counters
        counters.count_step(self._tokens)
        self._tokens = 0
        self._stepped = True
        self._due = self._due or self._cadence.is_due(counters.progress.step)
        if self._run.trace is not None:
            self._trace_step(values)

    def report(self, **values: float) -> None:
        """Takes metrics of the current step; an improved best metric makes a save due. Collective.

        Args:
            **values: e.g. ``eval_loss=0.5``; rank 0's values count.
        """
        plain = {name: float(value) for name, value in values.items()}
        agreed = self._run.world.broadcast(plain)
        if self._run.selection.report(agreed, self.progress.step):
            self._due = True

    def save(self) -> None:
        """Makes a save due at the next settled point; outside a loop, at once. Collective."""
        self._due = True
        if self._loop is None:
            self._run.resume()
            self._save()

    def wait(self) -> None:
        """Returns when every save is durable; saves are synchronous, so that is at once."""

    def stop(self, reason: str) -> None:
        """Finishes the run at the next settled point; a relaunch finds it finished. Collective."""
        self._stop_reason = reason

    def best(self) -> BestCheckpoint | None:
        """The best committed checkpoint by ``best_metric``, or None if there is none yet."""
        return self._run.best(BestCheckpoint)

    def close(self) -> None:
        """Makes a save that is due, and gives the run directory back. Collective, idempotent."""
        self._count_taken_step()
        if self._due and self._stepped and self.finished is None:
            self._settle(None)
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # Nor at exit, should somebody catch the error: a step is half done.
            self._due = self._unsettled = False
            self._run.close()

    # ---------------------------------------------------------------- what an adapter may know

    def _at_step_boundary(self) -> bool:
        """Whether an optimizer step is complete; asked by ``step()``."""
        return True

    def _count_taken_step(self) -> None:
        """Calls ``step()`` if the framework has taken one that the loop did not mark."""

    # ---------------------------------------------------------------- what the loops call

    def _enter(self, loop: str, horizon: dict[str, int]) -> None:
        """The outermost loop begins."""
        if self._loop is not None and self.finished is not None:
            raise LoopError(
                f"{loop}()",
                found=f"a second loop after the run finished ({self.finished})",
                remedy="Give the first loop the horizon of the whole run",
            )
        self._run.resume()
        self._run.accept_horizon(horizon)
        self._begin_loop(loop)

    def _begin_loop(self, loop: str) -> None:
        """Everything is restored but the random state."""
        if self._loop is None:
            place = self.progress
            self._steps_at_epoch_start = place.step if place.batch == 0 else None
            if self.finished is not None:
                self._run.finish_again()
        self._loop = loop

    def _open_epoch(self, epoch: int) -> None:
        """An epoch of ``epochs()`` begins: its first line sees the run's random state."""
        if self.progress.batch == 0:
            self._run.restore_random()

    def _begin(self, source: Source, epoch: int) -> None:
        """A loader's epoch begins or continues: the position first, the random state last."""
        self._run.tell_changed_loaders()
        if source.changed and self._active is None:
            self._run.counters.move_to(*source.place())  # in batches of the size that they have now
        if not self._announced:
            self._announced = True
            self._run.announce()
        if self.progress.batch == 0:
            self._run.restore_random()
            source.restore_generators()
            source.begin(epoch)
        else:
            source.begin(epoch)
            source.restore_generators()
            self._run.restore_random()

    def _fetched(self, source: Source) -> None:
        """A batch goes to the loop."""
        self._active = source
        self._unsettled, self._stepped = True, False
        self._run.counters.count_batch(source.num_samples)
        if self._run.trace is not None and source.indices is not None:
            indices = source.indices
            self._samples.extend(indices if isinstance(indices, (list, tuple)) else [indices])

    def _epoch_ended(self, source: Source) -> None:
        """A loader's epoch is used up."""
        if self._loop == "batches":
            self._require_steps()
            self._run.counters.move_to(*source.place())

    def _close_epoch(self, epoch: int) -> None:
        """An epoch of ``epochs()`` is over, used up or left by ``break``."""
        self._require_steps()
        for source in self._run.position.sources.values():
            if source.used_up or source.place()[0] < epoch:
                source.end_epoch()
        self._active = None
        self._run.counters.move_to(epoch, 0)

    def _require_steps(self) -> None:
        self._count_taken_step()
        step = self.progress.step
        if self._steps_at_epoch_start == step:
            raise LoopError(
                f"epoch {self.progress.epoch}",
                found="not one call of step()",
                expected="checkpointer.step() after every optimizer step",
            )
        self._steps_at_epoch_start = step

    def _settle(self, finished: str | None, *, at_end: bool = False) -> None:
        """All code of the last step has run, and nothing of the next one: save what is due.

        Args:
            finished: why the run is over at this place, or None.
            at_end: the end was found only after the place had been settled once.
        """
        self._count_taken_step()
        counters = self._run.counters
        finished = self._stop_reason or finished
        if counters.finished is not None or not (self._unsettled or at_end or finished):
            return
        if self._active is not None:
            counters.move_to(*self._active.place())
        if finished is not None:
            counters.finished = finished
            self._save()
            self._run.trace_state("end")
        elif self._is_due():
            self._save()
        self._unsettled = False

    def _is_due(self) -> bool:
        if not self._stepped:
            return False  # in the middle of an accumulation window: at the next step boundary
        if self._cadence.needs_agreement:
            return self._run.world.broadcast(self._due)
        return self._due

    def _save(self) -> None:
        self._due = False
        try:
            self._run.save()
        except SaveError as error:
            if self._options.on_save_error == "raise":
                raise
            if self._run.world.is_first:
                tell(f"the save at step {self.progress.step} failed, training goes on: {error}")
        self._cadence.saved()

    def _trace_step(self, values: Mapping[str, Any]) -> None:
        place, trace = self.progress, self._run.trace
        assert trace is not None
        epoch, batch = self._active.place() if self._active else (place.epoch, place.batch)
        trace.step(
            place.step,
            epoch=epoch,
            batch=batch,
            values=values,
            lr=self._run.learning_rates(),
            samples=self._samples,
            rng=rng_digests(),
        )
        self._samples = []


def _positive(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(name, found=repr(value), expected="a whole number of at least 1")
    return value


def _close_at_exit(checkpointer: Checkpointer) -> None:
    """Closes at normal exit; after an uncaught exception nothing new is saved."""
    reference = weakref.ref(checkpointer)

    def close() -> None:
        alive = reference()
        if alive is not None and not hasattr(sys, "last_value") and alive._run.world_is_alive():
            alive.close()

    atexit.register(close)
