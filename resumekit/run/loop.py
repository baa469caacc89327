"""The loop of a run: what happens between two safe points, and the save that is due there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from signal import Signals
from threading import current_thread, main_thread
from typing import Any, NoReturn
from weakref import WeakSet

from resumekit.data.position import Feed
from resumekit.data.source import Source
from resumekit.errors import LoopError, Preempted
from resumekit.record.journal import Ending
from resumekit.record.trace import rng_digests
from resumekit.run.due_saves import NOTHING, DueSaves, Requests
from resumekit.run.fetch import begin, end_resume, restore_again, restore_random
from resumekit.run.progress import LoopOrder, OwnLoop, Progress
from resumekit.run.report import ResumeReport
from resumekit.run.resume import accept_horizon, enter, find, resume
from resumekit.run.run import RunState
from resumekit.run.steps_taken import StepsTaken

# The first steps of a launch: most user code shows in them what it changes.
_NUM_LOOKED = 2
# After so many batches without an optimizer step a loop may have forgotten to call step().
_MANY_BATCHES = 20


class Loop:
    """Where the loop of a run is, which loops are under way, and when their steps are counted.

    An adapter may have a subclass, whose framework says when a step is complete.

    Args:
        run: the run.

    Attributes:
        iterators: what the user or a framework goes over, while it is alive.
        saves: those that are due.
        outermost: the name of the outermost loop, once there is one.
        in_step: whether a batch was handed out since the last safe point.
        stepped: whether the leading loop handed out no batch since the last step.
        steps_taken: counts the steps of a loop that does not call ``step()``, where it need not.
        order: of the loops of the epoch under way.
    """

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.iterators: WeakSet[OwnLoop] = WeakSet()
        self.saves = DueSaves(run, self.iterators)
        self.outermost: str | None = None
        self._was_finished = False  # when that loop began
        self._main: Feed | None = None  # what it draws from, unless it is epochs()
        self._epoch = 0  # of epochs()
        self._num_used = 0  # the batches of this epoch that its loops used
        self.in_step = False
        self._has_no_loop = False  # an epoch of epochs() is under way, and no loop in it has begun
        self._is_announced = False  # what a checkpoint holds, in a loop without batches
        self.stepped = False
        self._num_steps_of_batch = 0  # calls of step() since a loop was given a batch
        self._is_numbered = False  # the loop goes over numbers, as of an environment's steps
        self.steps_taken: StepsTaken | None = None
        self._num_counted = 0  # steps of this launch that the loop did not mark
        self._num_batches_since_step = 0
        self._warned: set[str] = set()
        self._reported: set[str] = set()  # the names of the metrics that report() got
        self._stop_reason: str | None = None
        self._steps_at_epoch_start: int | None = 0
        self._num_epochs_without_step = 0  # in a row
        self._num_looked = 0
        self.order: LoopOrder = run.counters.loop_order

    @property
    def progress(self) -> Progress:
        """How far the logical run is."""
        return self.run.counters.progress

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None while it is not."""
        return self.run.counters.finished

    @property
    def was_finished(self) -> bool:
        """Whether the run was over when this launch began."""
        if self.outermost is None:
            return self.run.resumed is not None and self.finished is not None
        return self._was_finished

    @property
    def sources(self) -> Collection[Source]:
        """The loaders that were opened."""
        return self.run.position.sources.values()

    # ---------------------------------------------------------------- the verbs

    def find(self, up_to: Callable[[str], int | None]) -> bool:
        """Finds a checkpoint of at most a step; False also where the run has resumed. Collective.

        Args:
            up_to: gives the step for this run's id, see ``resume.find``.
        """
        return self.run.resumed is None and find(self.run, up_to=up_to)

    def resume(self) -> ResumeReport:
        """Restores all but the data position and the random state. Collective, idempotent."""
        return resume(self.run)

    def step(self, tokens: int, values: Mapping[str, Any]) -> None:
        """Marks one optimizer-step boundary, see ``Checkpointer.step``."""
        self._step_without_batch()
        if not self.in_step:
            raise LoopError(
                "step()",
                found="called without a batch from batches()",
                expected="a loop over batches()",
                remedy="Write the loop as: for batch in checkpointer.batches(loader, epochs=...); "
                "several phases as one epochs(total)",
            )
        self._note_marked_step()
        self.run.counters.count_tokens(tokens)
        if self.at_step_boundary():
            self._count_step(values)

    def report(self, values: Mapping[str, float]) -> None:
        """Takes metrics of the current step; an improved best one makes a save due. Collective."""
        agreed = self.run.world.broadcast(values)
        self._reported.update(agreed)
        selection, is_counted = self.run.selection, not self._has_uncounted_step
        if selection.report(agreed, self.progress.step + (not is_counted)):
            self.saves.request()
            self._warn_if_finished("report")
        if self.in_step and is_counted and not self.may_save() and selection.name in agreed:
            self._warn_once(
                "window",
                f"report({selection.name}=...) was called inside an accumulation window, where no "
                "checkpoint is saved, so none has this value; call it after an optimizer step",
            )

    def save(self) -> None:
        """Makes a save due at the next safe point; before the loop, at once. Collective."""
        self._warn_if_finished("save")
        self.saves.request()
        if self.outermost is None:
            resume(self.run)
            self.saves.make()

    def _warn_if_finished(self, verb: str) -> None:
        if self.outermost is not None and self.finished is not None:
            over = f"{verb}() was called after the run finished ({self.finished})"
            self._warn_once("finished", f"{over}: its last checkpoint stays as it is")

    def stop(self, reason: str) -> None:
        """Finishes the run at the next safe point. Collective."""
        self._stop_reason = reason

    def close(self) -> None:
        """Makes a save that is due, and gives back what this process holds. Collective."""
        self.count_taken_step()
        try:
            self._save_what_is_due()
        finally:
            try:
                self.saves.finish(is_last=True)
            finally:
                self.release()

    def _save_what_is_due(self) -> None:
        self.saves.is_ending = True
        is_due = self._stop_reason is not None or (self.saves.is_due and self.may_save())
        if self.outermost is not None and is_due:
            is_over = self.outermost == "epochs" and any(each.used_up for each in self.sources)
            if self._has_no_loop and self.in_step:  # an epoch without batches is over
                is_over = True
                self._next_epoch(self._epoch + 1)
            self.run.variables.leave(is_epoch_over=is_over)
            self.pass_safe_point(None)

    def abandon(self) -> None:
        """An error ends the loop: a step is half done, and nothing is saved, nor at exit."""
        self.saves.forget()
        self.in_step = False
        self._stop_reason = None
        self.run.journal.fail()
        self.release()

    # ---------------------------------------------------------------- what an adapter may override

    def begin_iteration(self) -> None:
        """The loop that leads has been given a batch."""

    def at_step_boundary(self) -> bool:
        """Whether an optimizer step is complete; asked by ``step()``."""
        return True

    def whole_loader(self, loader: Any, name: str | None) -> Any:
        """What to draw from, e.g. a ``SkippedLoader`` where a framework made one that skips.

        Refuses or reports a loader that the framework expects in another form.
        """
        return loader

    def count_taken_step(self) -> None:
        """Counts the step that optimizers have taken in this iteration, unless it is counted."""
        if self._has_uncounted_step:
            self._step_without_batch()
            self._num_counted += 1
            self._count_step({})
        if self.steps_taken is not None and (self.stepped or not self.in_step):
            self.steps_taken.forget()  # the iteration's further steps, or those of a resume

    def may_save(self) -> bool:
        """Whether this is no accumulation window, or one whose gradients can be saved."""
        return self.stepped or self.run.options.saves_gradients

    # ---------------------------------------------------------------- steps without step()

    @property
    def _has_uncounted_step(self) -> bool:
        """Whether optimizers have taken the step of this iteration, and ``step()`` counts none."""
        steps, run = self.steps_taken, self.run
        if steps is None or run.is_driven or run.counters.marks_steps:
            return False
        is_open = self._has_no_loop if not self.in_step else not self.stepped
        return is_open and steps.is_complete and self.at_step_boundary()

    def _step_without_batch(self) -> None:
        """A step is about to be counted; in an epoch without batches the epoch is the iteration."""
        if self._has_no_loop and not self.in_step:
            self.in_step, self._num_steps_of_batch = True, 0
            self.run.counters.count_batch(0)
            if not self._is_announced:
                self._is_announced = True
                self.run.variables.hand_out()
                self.run.reporter.announce()

    def begin_batches(self) -> None:
        """A loop over batches begins.

        Raises:
            LoopError: a step was marked before: a resume at this batch would repeat it.
        """
        if self._has_no_loop and self.in_step:
            raise LoopError(
                "step()",
                found="called before the first batch of an epoch",
                expected="a step on each batch, or epochs without batches()",
            )
        self._has_no_loop = False

    def _count_step(self, values: Mapping[str, Any]) -> None:
        counters = self.run.counters
        counters.count_step()
        self._count_step_of_batch()
        self.stepped = True
        self._num_batches_since_step = 0
        self.saves.count_step(counters.step)
        self._record_step(values)

    def _note_marked_step(self) -> None:
        """The loop calls ``step()``: from now on nothing else counts, in further launches too."""
        counters = self.run.counters
        if self.steps_taken is None or self.run.is_driven or counters.marks_steps:
            return
        counters.marks_steps = True
        if self._num_counted:
            counted = f"{self._num_counted} were counted without it"
            self.run.reporter.log(f"step() is called from here on and counts the steps; {counted}")

    # ---------------------------------------------------------------- the loops begin and end

    def enter(self, loop: str, horizon: dict[str, int], loader: Any = None) -> None:
        """The outermost loop begins."""
        if self.outermost is not None and self.finished is not None:
            raise LoopError(
                f"{loop}()",
                found=f"a second loop after the run finished ({self.finished})",
                remedy="Give the first loop the horizon of the whole run",
            )
        if self.outermost not in (None, loop):
            raise LoopError(
                f"{loop}()",
                found=f"a second loop after one over {self.outermost}()",
                expected="one",
            )
        enter(self.run, horizon, loader)
        accept_horizon(self.run, horizon)
        self.begin_loop(loop)

    def begin_loop(self, loop: str) -> None:
        """Everything is restored but the random state."""
        if self.outermost is None:
            self._take_signals()
            progress = self.progress
            self._steps_at_epoch_start = progress.step if progress.batch == 0 else None
            self._epoch, self._num_used = progress.epoch, progress.batch
            self._was_finished = self.finished is not None
            if self._was_finished:
                end_resume(self.run)
                self.run.finish_copies()
                self.run.trace_state("end")
        self.outermost = loop

    def _take_signals(self) -> None:
        left = self.saves.signals.install() if self.finished is None else []
        if left:
            is_main = current_thread() is main_thread()
            why = "handled by other code" if is_main else "the loop is outside of the main thread"
            self.run.reporter.log(f"{', '.join(left)}: {why}, so this run does not save on it")

    def lead(self, feed: Feed) -> None:
        """This is what the loop with the horizon draws from."""
        loaders = self.order.main
        if loaders not in ((), feed.names):
            raise LoopError(
                f"batches(name={feed.name!r})",
                found=f"a second loop with a horizon, after one over {', '.join(loaders)}",
                expected="one such loop in a run",
                remedy="Write several loops as: for epoch in checkpointer.epochs(...)",
            )
        self.run.position.require_known(feed.names)
        self._main, self.order.main = feed, feed.names

    def open_epoch(self, epoch: int) -> None:
        """An epoch of ``epochs()`` begins: its first line sees the run's random state."""
        self._epoch = epoch
        continues = self.progress.batch > 0
        self._has_no_loop = not continues and not self.run.is_driven
        if not continues:
            restore_again(self.run)
            for name, loader in self.run.variables.loaders().items():
                source = self.run.position.open_before_epoch(loader, name)
                self.run.owned.follow(source, streams=False)
            self.run.position.witness_epoch()
            restore_random(self.run)
        if not self.run.is_driven:  # the code before the first batch is the user's
            self.run.rng.begin_epoch(continues=continues)
        if self.steps_taken is not None:
            self.steps_taken.watch(self.run.components)

    def begin_epoch(self, feed: Feed, epoch: int) -> None:
        """A loader's epoch begins or continues."""
        if feed.continues and (feed is self._main or self.order.is_alone(feed.names)):
            self._num_used = feed.batch  # in batches of the size that they have now
            self.run.counters.move_to(*self._position())
        begin(self.run, feed, epoch)
        if self.steps_taken is not None:
            self.steps_taken.watch(self.run.components)

    def fetched(self, feed: Feed, *, follows: bool) -> None:
        """A batch goes to the loop."""
        run, order, names = self.run, self.order, feed.names
        order.fetched(names)
        leads = order.leads(names)
        self.in_step = True
        self._num_steps_of_batch = 0
        if not follows:
            self._is_numbered = all(isinstance(each.loader, range) for each in feed.sources)
            self._num_used = feed.batch if order.is_alone(names) else self._num_used + 1
        num_samples = feed.num_samples
        run.counters.count_batch(num_samples, follows=follows)
        run.journal.note_batch(feed, num_samples)
        if run.trace is not None:
            run.counters.note_samples(feed.indices)
        if leads:
            self.stepped = False
            self._note_batches_without_step()
            self.begin_iteration()

    def _note_batches_without_step(self) -> None:
        self._num_batches_since_step += 1
        steps, is_late = self.steps_taken, self._num_batches_since_step > _MANY_BATCHES
        if steps is None or not is_late or self.run.counters.step or "no step" in self._warned:
            return
        if steps.has_gradients:
            self._warned.add("no step")
            question = "is gradient accumulation longer? Otherwise call step()"
            self.run.reporter.log(f"no optimizer step in {_MANY_BATCHES} batches: {question}")

    def end_epoch(self, feed: Feed) -> None:
        """The loop with the horizon has used up an epoch."""
        self._require_steps()
        self.run.counters.move_to(feed.epoch, feed.batch)

    def close_epoch(self, epoch: int) -> None:
        """An epoch of ``epochs()`` is over, used up or left by ``break``."""
        self._require_steps()
        if not self.run.is_driven:  # a framework may evaluate in every second epoch
            self._warn_of_metric()
        self._next_epoch(epoch)

    def _next_epoch(self, epoch: int) -> None:
        self.run.position.end_epoch(self.order.asked)
        self.order.next_epoch()
        self._epoch, self._num_used, self._has_no_loop = epoch, 0, False
        self.run.counters.move_to(epoch, 0)

    def finish(self, reason: str, *, used_up: bool) -> None:
        """A framework has ended the run; an epoch that it used up is over."""
        is_over = used_up or not self.order.under_way
        if self.finished is None and self.order.asked and is_over:
            self._next_epoch(self._epoch + 1)
        self.pass_safe_point(reason, at_end=True)

    def _require_steps(self) -> None:
        """An epoch is over: one without a step may collect data or evaluate, two lack a step()."""
        self.count_taken_step()
        step = self.progress.step
        if self._steps_at_epoch_start != step:
            self._num_epochs_without_step = 0
        elif self._num_epochs_without_step:
            raise self._no_step()
        else:
            self._num_epochs_without_step = 1
            epoch = self.progress.epoch
            self.run.reporter.log(f"epoch {epoch} had no optimizer step; a second one is an error")
        self._steps_at_epoch_start = step

    def _no_step(self) -> LoopError:
        optimizers = "" if self.steps_taken is None else ", no step of an optimizer of the run"
        remedy = "An accumulation window must not be longer than an epoch"
        if not self.sources:
            remedy = (
                "Where not each needs a step, write: "
                "for i in checkpointer.batches(range(n), epochs=1)"
            )
        return LoopError(
            f"epoch {self.progress.epoch}",
            found=f"not one call of step(){optimizers}",
            expected="checkpointer.step() after every optimizer step",
            remedy=remedy,
        )

    def _warn_once(self, what: str, message: str) -> None:
        """One line to act on, the first time that this happens."""
        if what not in self._warned:
            self._warned.add(what)
            self.run.reporter.warn("RK-823", message)

    def _count_step_of_batch(self) -> None:
        self._num_steps_of_batch += 1
        if self._num_steps_of_batch == 2 and not (self._has_no_loop or self._is_numbered):
            epoch, batch = self._position()
            self._warn_once(
                "step",
                f"step() was called twice for batch {max(batch - 1, 0)} of epoch {epoch}: each "
                "call counts as an optimizer step; call it once for each batch",
            )

    def _warn_of_metric(self) -> None:
        """Warns where the metric that selects the best checkpoint has not been reported."""
        metric = self.run.options.best_metric
        if metric is not None and not self.run.selection.was_reported:
            given = ", ".join(sorted(self._reported))
            others = f" (report() got {given})" if given else ""
            self._warn_once(
                "best_metric",
                f"best_metric={metric!r} was never reported{others}, so no checkpoint is the best; "
                f"call report({metric}=...)",
            )

    # ---------------------------------------------------------------- the safe point

    def pass_safe_point(self, finished: str | None, *, at_end: bool = False) -> None:
        """All code of the last step has run, and nothing of the next one: save what is due.

        Args:
            finished: why the run is over here, or None.
            at_end: the end was found only after this safe point was passed once.
        """
        self.count_taken_step()
        counters = self.run.counters
        has_lost = self._num_epochs_without_step and not counters.step
        if finished and has_lost and not self._stop_reason:
            raise self._no_step()
        finished = self._stop_reason or finished
        if counters.finished is not None or not (self.in_step or at_end or finished):
            return
        counters.move_to(*self._position())
        if self.stepped and self.in_step:
            self.run.owned.observe_gradients()
        saves, may_save = self.saves, self.may_save()
        common = NOTHING
        if may_save and finished is None:
            common = saves.exchange(counters.step)
            if common.failed and not common.leave:
                saves.finish(is_last=False)
        if finished is not None:
            self._warn_of_metric()
            end_resume(self.run)
            counters.finished = finished
            self.run.journal.ending = Ending.FINISHED
            saves.is_ending = True
            saves.make()
            self.run.finish_copies()
            self.run.trace_state("end")
            saves.signals.restore()
        elif common.leave:
            self.in_step = False
            self._leave(common.leave, saves.make_before_leaving())
        else:
            self._save_at_boundary(common, may_save=may_save)
        self.in_step = False
        self._end_replay_after(counters.step)

    def _save_at_boundary(self, common: Requests, *, may_save: bool) -> None:
        saves = self.saves
        if common.save or (saves.is_due and may_save):
            saves.make()
        elif self._num_looked < _NUM_LOOKED and self.stepped:
            self._num_looked += 1
            self.run.variables.look()
            self.run.reporter.look()
        if may_save and self.stepped:
            saves.copy_to_memory(common)

    def _end_replay_after(self, step: int) -> None:
        """Ends the process if no further step is replayed."""
        replay, may_end = self.run.replay, self.finished is None and self.stepped
        if replay is not None and may_end and replay.ends_after(step, self.run.world):
            self.saves.finish(is_last=True)
            self.release()
            replay.end_process()

    def _leave(self, signal_number: int, step: int | None) -> NoReturn:
        """The run was asked to leave; the newest checkpoint is of this step."""
        then = f"saved at step {step}; the same command continues"
        if step is None:
            then = "nothing is saved; the same command starts fresh"
        self.run.reporter.log(f"{Signals(signal_number).name}: {then}")
        self.run.journal.ending = signal_number
        self.release()
        raise Preempted(signal_number, step or 0)

    def release(self) -> None:
        """Gives back what this process holds: the signals, hooks, the run directory."""
        if self.steps_taken is not None:
            self.steps_taken.detach()
        self.saves.signals.restore()
        self.run.close()

    def _position(self) -> tuple[int, int]:
        """Epoch and batch of the loop."""
        if self._main is not None:
            return self._main.epoch, self._main.batch
        return self._epoch, self._num_used

    def _record_step(self, values: Mapping[str, Any]) -> None:
        """Records the step that was just counted, in the journal and in a trace."""
        self.run.record_step(self._position()[0], values.get("loss"))
        if self.run.trace is not None:
            self._trace_step(values)

    def _trace_step(self, values: Mapping[str, Any]) -> None:
        trace = self.run.trace
        assert trace is not None
        epoch, batch = self._position()
        trace.step(
            self.progress.step,
            epoch=epoch,
            batch=batch,
            values=values,
            lr=self.run.owned.learning_rates(),
            samples=self.run.counters.take_samples(),
            is_rest=not self.run.counters.saw_whole_step,
            rng=rng_digests(),
        )
