"""The Checkpointer that every adapter shares: saves a run, and resumes it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from resumekit.errors import ConfigurationError, ResumekitError
from resumekit.log import logger
from resumekit.run.components import weakly
from resumekit.run.loop import Loop
from resumekit.run.loops import Batches, Epochs, FrameworkLoop
from resumekit.run.options import (
    OptionKeywords,
    Options,
    check_components,
    checked_extras,
    checked_names,
    metric_values,
    run_directory,
    whole_number,
)
from resumekit.run.progress import Progress
from resumekit.run.report import ResumeReport
from resumekit.run.run import Components, RunState
from resumekit.state import StateComponent

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
        groups: process groups by the names that components may call them by, see
            ``StateComponent``.
        data_parallel_group: the ranks that take different data, this one among them: a process
            group, a one-dimensional DeviceMesh, their global ranks, or a name in ``groups``. By
            default all ranks; ranks of one tensor-parallel group or pipeline take the same.
        make_loop: gives the ``Loop`` of this run; an adapter passes its subclass where the
            framework knows when a step is complete.
        **options: see ``resumekit.run.options.Options``, and docs/reference/options.md.

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
        make_loop: Callable[[RunState], Loop] = Loop,
        **options: Unpack[OptionKeywords],
    ) -> None:
        check_components(components)
        self._run = run = RunState(
            run_directory(directory),
            components,
            Options.from_keywords(options),
            extras=checked_extras(extras),
            generators=checked_names("generators", generators),
            groups=checked_names("groups", groups),
            data_parallel_group=data_parallel_group,
        )
        self._loop = make_loop(run)
        self._pid = os.getpid()
        atexit.register(weakly(self._close_at_exit, None))

    # ---------------------------------------------------------------- what the user calls

    @property
    def directory(self) -> Path:
        """The run directory, as an absolute path."""
        return self._run.directory

    @property
    def progress(self) -> Progress:
        """How far the logical run is; samples and tokens as of the last checkpoint.

        Epoch and batch are those of ``epochs()``, where the batches of all its loops count, or of
        the loop that has the horizon. Loaders beside it (``repeat=True``) move neither. In a loop
        that does not call ``step()``, a step is counted when the next batch is requested.
        """
        return self._loop.progress

    @property
    def finished(self) -> str | None:
        """Why the run is over, e.g. ``"epochs=3"``, or None while it is not."""
        return self._loop.finished

    @property
    def already_finished(self) -> bool:
        """Whether the run was over when this launch began: its loops yield nothing.

        Known when a loop has been entered, or ``resume()`` was called. Code after the loop that
        needs values of the loop belongs under ``if not checkpointer.already_finished:``.
        """
        return self._loop.was_finished

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
        return self._loop.resume()

    def epochs(self, num_epochs: int) -> Epochs:
        """The absolute numbers of the epochs still to be trained. Collective.

        Args:
            num_epochs: the epochs of the whole run, not of this launch.
        """
        self._loop.enter("epochs", {"epochs": whole_number("epochs", num_epochs, 1)})
        return Epochs(self, self._loop, num_epochs)

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
        loader = self._loop.whole_loader(loader, name)
        if (epochs is not None) + (steps is not None) + repeat > 1:
            raise TypeError("batches() takes one of epochs=, steps= and repeat=True")
        if epochs is None and steps is None:
            if self._loop.outermost is None and not repeat:
                raise TypeError(
                    "batches(loader) alone needs epochs= or steps=, or an epochs() loop; "
                    "a loader beside the loop needs repeat=True"
                )
            return Batches.of_epoch(self, self._loop, loader, name, repeat=repeat)
        if self._loop.outermost == "epochs":
            raise TypeError("inside epochs() the loop is batches(loader), without a horizon")
        unit, count = ("epochs", epochs) if epochs is not None else ("steps", steps)
        self._loop.enter("batches", {unit: whole_number(unit, count, 1)}, loader)
        feed = self._run.position.feed(loader, name)
        self._loop.lead(feed)
        return Batches(self, self._loop, feed, epochs=epochs, steps=steps)

    def drive(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        one_at_a_time: bool = False,
        checked: Sequence[StateComponent] = (),
    ) -> FrameworkLoop:
        """Lets an adapter follow the loop that a framework runs. Collective.

        The checkpoint is found, so that ``progress`` and ``finished`` are those of the checkpoint;
        nothing else is restored before ``resume()``.

        Args:
            epochs: the epochs of the whole run, if that is how far the framework goes.
            steps: the optimizer steps of the whole run; with ``epochs``, whichever comes first.
                With neither, the loop's ``accept_horizon()`` is to be called before it is resumed.
            one_at_a_time: the framework uses each batch before it asks for the next one.
            checked: the components that are known before their objects exist: the checkpoint that
                is found has states of these types.

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
        self._run.checked = checked
        asked = {"epochs": epochs, "steps": steps}
        return FrameworkLoop(
            self, self._loop, {unit: n for unit, n in asked.items() if n is not None}
        )

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
        self._loop.step(tokens, values)

    def report(self, **values: float) -> None:
        """Takes metrics of the current step; an improved best metric makes a save due. Collective.

        Args:
            **values: e.g. ``eval_loss=0.5``; rank 0's values count.
        """
        self._loop.report(metric_values(values))

    def save(self) -> None:
        """Makes a save due at the next safe point; before the loop, at once. Collective.

        After the run has finished, whose last checkpoint stays as it is, it only warns.

        With ``async_save`` its files may still be written when training continues: ``wait()``.
        """
        self._loop.save()

    def wait(self) -> None:
        """Waits until every save that was made is durable, on every rank. Collective.

        A save that is due is made at the next safe point, and not waited for.

        Raises:
            SaveError: the save in flight has failed, on whichever rank; the previous checkpoint is
                untouched.
        """
        self._loop.saves.wait()

    def stop(self, reason: str) -> None:
        """Finishes the run at the next safe point; a relaunch finds it finished. Collective."""
        self._loop.stop(reason)

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
        self._loop.close()

    @property
    def _sources(self) -> Collection[Any]:
        """The loaders that were opened."""
        return self._loop.sources

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
            self._loop.abandon()

    def _close_at_exit(self) -> None:
        """Closes at normal exit; after an uncaught exception nothing new is saved."""
        if os.getpid() != self._pid:  # of a forked child
            return
        if hasattr(sys, "last_value"):
            self._run.journal.fail()
            self._run.journal.write_end()
            return
        if not self._run.world.is_alive():
            return
        try:
            self.close()
        except ResumekitError as error:  # nobody can catch it, and a traceback shows no user code
            logger.error("not saved at exit: call close() right after the loop. %s", error)
