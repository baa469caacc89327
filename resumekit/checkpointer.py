"""The Checkpointer that every adapter shares: saves a run, and resumes it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from resumekit.errors import ConfigurationError, LoopError, ResumekitError
from resumekit.log import logger
from resumekit.run import (
    Batches,
    Components,
    Epochs,
    FrameworkLoop,
    OptionKeywords,
    Options,
    ResumeReport,
    RunState,
    StepBoundary,
    check_components,
    checked_extras,
    checked_names,
    metric_values,
    run_directory,
    weakly,
    whole_number,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class BestCheckpoint(NamedTuple):
    """The best committed checkpoint: its directory, its step and the metric's value."""

    path: Path
    step: int
    value: float


class Checkpointer(StepBoundary):
    """Saves the whole state of a run and, when the same command is started again, continues it.

    Args:
        directory: the run directory; made if missing, one and the same for all ranks.
        components: the model, optimizers and all else whose state makes up the run, or a function
            that gives them, called by ``resume()``; the position in the data, the random state, the
            progress and the best metric are added here.
        extras: a live dict of your own values. Plain values are replaced under their key, objects
            with ``state_dict`` are loaded in place.
        generators: private random generators by name (torch, NumPy or ``random.Random``).
        groups: process groups by the names that components may call them by, see
            ``StateComponent``.
        data_parallel_group: the ranks that take different data, this one among them: a process
            group, a one-dimensional DeviceMesh, their global ranks, or a name in ``groups``. By
            default all ranks; ranks of one tensor-parallel group or pipeline take the same.
        **options: see ``resumekit.run.options.Options``, and the table in docs/quickstart.md.

    ``finished`` says why the run is over; ``already_finished`` whether it was when this launch
    began, so that the loops yield nothing.

    Raises:
        ConfigurationError: an option or another argument is wrong; shows what to write.
        DeclarationError: a component is declared in a way that cannot be right.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        components: Components,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        data_parallel_group: Any = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        check_components(components)
        run = RunState(
            run_directory(directory),
            components,
            Options.from_keywords(options),
            extras=checked_extras(extras),
            generators=checked_names("generators", generators),
            groups=checked_names("groups", groups),
            data_parallel_group=data_parallel_group,
        )
        super().__init__(run)
        self._pid = os.getpid()
        atexit.register(weakly(self._close_at_exit, None))

    # ---------------------------------------------------------------- what the user calls

    @property
    def directory(self) -> Path:
        """The run directory, as an absolute path."""
        return self._run.directory

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
        return self._resume()

    def epochs(self, num_epochs: int) -> Epochs:
        """The absolute numbers of the epochs still to be trained. Collective.

        Args:
            num_epochs: the epochs of the whole run, not of this launch.
        """
        self._enter("epochs", {"epochs": whole_number("epochs", num_epochs, 1)})
        return Epochs(self, num_epochs)

    def batches(
        self,
        loader: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        name: str | None = None,
        repeat: bool = False,
    ) -> Batches:
        """The batches still to be used, beginning with the next unseen one. Collective.

        Alone, with ``epochs=`` or ``steps=``, it is the whole loop. Inside ``epochs()``, or inside
        another loop, it goes once over the loader.

        Args:
            loader: the training loader, or a dict of loaders, which gives a dict of one batch of
                each; an epoch ends with the shortest, as ``zip`` does. Evaluation loaders are never
                wrapped.
            epochs: train until this many epochs of the whole run are complete.
            steps: train until the whole run has this many optimizer steps.
            name: of this loader, where a run has several; ``"train"`` by default. A dict has its
                names in its keys.
            repeat: for a loader beside the loop, drawn from with ``next``: it begins again whenever
                it is used up, and counts its own epochs.

        Raises:
            TypeError: more than one of ``epochs``, ``steps`` and ``repeat``; or a horizon inside
                another loop, or none outside of any.
            LoopError: a second loop with a horizon, over another loader.
            ConfigurationError: another loader of this name is in the middle of an epoch.
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        self._check_loader(loader, name)
        if (epochs is not None) + (steps is not None) + repeat > 1:
            raise TypeError("batches() takes one of epochs=, steps= and repeat=True")
        if epochs is None and steps is None:
            if self._loop is None and not repeat:
                raise TypeError(
                    "batches(loader) alone needs epochs= or steps=, or an epochs() loop; "
                    "a loader beside the loop needs repeat=True"
                )
            return Batches.of_epoch(self, loader, name, repeat=repeat)
        if self._loop == "epochs":
            raise TypeError("inside epochs() the loop is batches(loader), without a horizon")
        unit, count = ("epochs", epochs) if epochs is not None else ("steps", steps)
        self._enter("batches", {unit: whole_number(unit, count, 1)}, loader)
        feed = self._run.position.feed(loader, name)
        self._lead(feed)
        return Batches(self, feed, epochs=epochs, steps=steps)

    def drive(
        self, *, epochs: int | None = None, steps: int | None = None, one_at_a_time: bool = False
    ) -> FrameworkLoop:
        """Lets an adapter follow the loop that a framework runs. Collective.

        The checkpoint is found, so that ``progress`` and ``finished`` are those of the checkpoint;
        nothing else is restored before ``resume()``.

        Args:
            epochs: the epochs of the whole run, if that is how far the framework goes.
            steps: the optimizer steps of the whole run; with ``epochs``, whichever comes first.
                With neither, the loop's ``accept_horizon()`` is to be called before it is resumed.
            one_at_a_time: the framework uses each batch before it asks for the next one.

        Raises:
            ConfigurationError: saves inside an accumulation window are asked for, of a framework
                that may fetch the batches of a whole window before it uses the first one.
            DirectoryError: the run directory cannot be used, or another live job owns it.
            NoUsableCheckpointError: there are checkpoints, and none can be used.
            DriftError: the interrupted run had another horizon.
        """
        if self._run.options.saves_gradients and not one_at_a_time:
            raise ConfigurationError(
                "mid_accumulation",
                found="'gradients', in a loop that a framework runs",
                expected="'boundary'",
            )
        asked = {"epochs": epochs, "steps": steps}
        return FrameworkLoop(self, {unit: n for unit, n in asked.items() if n is not None})

    def step(self, *, tokens: int = 0, **values: Any) -> None:
        """Marks one optimizer-step boundary; a save that is due follows at the safe point.

        Call it also when the gradient scaler skipped the update. Where the framework counts
        accumulation windows itself, it may be called after every micro-batch: inside a window it
        only adds tokens.

        Args:
            tokens: the tokens that this rank used since the last call.
            **values: ``loss=loss`` is recorded in the journal, and compared when a resume repeats
                the step; other values are read only when tracing.

        Raises:
            LoopError: no batch has been fetched through ``batches()``, and no epoch has begun.
            DivergenceError: ``on_divergence="raise"``, and an earlier attempt recorded other values
                for this step.
        """
        self._step_without_batch()
        if not self._in_step:
            raise LoopError(
                "step()",
                found="called without a batch from batches()",
                expected="a loop over batches()",
                remedy="Write the loop as: for batch in checkpointer.batches(loader, epochs=...); "
                "several phases as one epochs(total)",
            )
        self._note_marked_step()
        self._run.counters.count_tokens(tokens)
        if self._at_step_boundary():
            self._count_step(values)

    def report(self, **values: float) -> None:
        """Takes metrics of the current step; an improved best metric makes a save due. Collective.

        Args:
            **values: e.g. ``eval_loss=0.5``; rank 0's values count.
        """
        agreed = self._run.world.broadcast(metric_values(values))
        self._reported.update(agreed)
        if self._run.selection.report(agreed, self.progress.step + self._has_uncounted_step):
            self._saves.request()

    def save(self) -> None:
        """Makes a save due at the next safe point; outside a loop, at once. Collective.

        With ``async_save`` its files may still be written when training continues: ``wait()``.
        """
        self._saves.request()
        if self._loop is None:
            self._resume()
            self._saves.make()

    def wait(self) -> None:
        """Returns when every save that was made is durable, on every rank. Collective.

        A save that is due is made at the next safe point, and not waited for.

        Raises:
            SaveError: the save in flight has failed, on whichever rank; the previous checkpoint is
                untouched.
        """
        self._saves.wait()

    def stop(self, reason: str) -> None:
        """Finishes the run at the next safe point; a relaunch finds it finished. Collective."""
        self._stop_reason = reason

    def best(self) -> BestCheckpoint | None:
        """The best committed checkpoint by ``best_metric``, or None if there is none yet.

        Waits for the save in flight where that is the best one.
        """
        best = self._run.best()
        if best is None:
            return None
        name, value = best
        return BestCheckpoint(self.directory / str(name), name.step, value)

    def close(self) -> None:
        """Makes a save that is due, and gives the run directory back. Collective, idempotent.

        All saves are durable then.

        Raises:
            SaveError: a save has failed, unless ``on_save_error="warn"``.
        """
        self._count_taken_step()
        try:
            self._save_what_is_due()
        finally:
            self._wait_and_release()

    def _save_what_is_due(self) -> None:
        saves = self._saves
        saves.is_ending = True
        is_due = self._stop_reason is not None or (saves.is_due and self._may_save())
        if self._loop is not None and is_due:
            is_over = self._loop == "epochs" and any(each.used_up for each in self._sources)
            if self._has_no_loop and self._in_step:  # an epoch without batches is over
                is_over = True
                self._next_epoch(self._epoch + 1)
            self._run.variables.leave(is_epoch_over=is_over)
            self._pass_safe_point(None)

    def _wait_and_release(self) -> None:
        """Waits for the save in flight, and gives back what this process holds."""
        try:
            self._saves.finish()
        finally:
            self._release()

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
            self._saves.forget()
            self._in_step = False
            self._stop_reason = None
            self._release()

    def _close_at_exit(self) -> None:
        """Closes at normal exit; after an uncaught exception nothing new is saved."""
        if os.getpid() != self._pid:  # of a forked child
            return
        if hasattr(sys, "last_value") or not self._run.world.is_alive():
            return
        try:
            self.close()
        except ResumekitError as error:  # nobody can catch it, and a traceback shows no user code
            logger.error("not saved at exit: %s Call close() right after the loop", error)
