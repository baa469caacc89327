"""Hugging Face Trainer: one callback, and ``trainer.train()`` starts, resumes, or is done.

Example:
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ResumeCallback(trainer, "runs/a", save_every=500))
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate import require_supported
from resumekit.log import logger
from resumekit.requirements import require
from resumekit.run import DrivenLoop, Options, checked_extras, require_order, run_directory

require("transformers")

# ruff: noqa: E402  if it is there
from transformers.trainer_callback import TrainerCallback

from resumekit.adapters._transformers_arguments import (
    check_arguments,
    check_best_at_end,
    saves_each_epoch,
    with_defaults,
)
from resumekit.adapters._transformers_beside import BestModel, passed_over, require_own
from resumekit.adapters._transformers_plan import Counts, Plan
from resumekit.adapters._transformers_state import trainer_components
from resumekit.adapters._transformers_user_state import changed_settings, user_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.capture import UserState
    from resumekit.run import OptionKeywords
    from resumekit.state import StateComponent

__all__ = ["ResumeCallback"]


class ResumeCallback(TrainerCallback):
    """Saves the whole state of a Trainer's run; ``train()`` continues it in the same directory.

    Making it attaches it to the Trainer, see ``attach``. Where an option is not given, the
    ``TrainingArguments`` say it: ``save_strategy="steps"`` or ``"epoch"`` for ``save_every``,
    ``save_total_limit`` for ``keep_latest``, ``metric_for_best_model`` and ``greater_is_better``
    for ``best_metric`` and ``mode``.

    Args:
        trainer: the ``transformers.Trainer``, or one of a class derived from it.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: an option is wrong, or a setting of the Trainer cannot be followed.
    """

    def __init__(
        self,
        trainer: Any = None,
        directory: str | Path = "",
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        require_order(trainer, directory, call='ResumeCallback(trainer, "runs/a")')
        whole = Options.from_keywords(with_defaults(options, trainer.args, max_steps=1))
        self._metric = whole.best_metric
        self._saves_each_epoch = saves_each_epoch(options, trainer.args)
        self._trainer = trainer
        self._directory = run_directory(directory)
        averages = ema.values() if isinstance(ema, Mapping) else [ema]
        self._extras = checked_extras(extras)
        self._saved_elsewhere = [*averages, self._extras, *self._extras.values()]
        self._user_state: UserState
        self._settings: UserState
        self._options = whole
        self._make_checkpointer: Callable[[int], Checkpointer] = lambda max_steps: Checkpointer(
            self._directory,
            components=lambda: self._components(ema),
            extras=self._extras,
            generators=generators,
            **with_defaults(options, trainer.args, max_steps),
        )
        self._checkpointer: Checkpointer
        self._under_way = ExitStack()  # what an error in train() has to let go of
        self._finished_on: Any = None  # the data set of a train() that has come to its end
        self._best: BestModel
        self._loop: DrivenLoop
        self._plan: Plan
        self._num_epochs = 0
        self._in_training = False
        self.attach(trainer)

    def attach(self, trainer: Any) -> None:
        """Takes the four places that no event reaches: before training begins, around an epoch.

        Four methods of this one Trainer object are replaced. transformers 5.23 trainer.py:
        ``train`` looks for checkpoints of the Trainer's own; ``set_initial_training_values`` says
        how far the run goes; ``_init_training_state`` which epoch comes first; ``_run_epoch`` skips
        what was used of it, and returns when the evaluation at its end is done.
        """
        require_supported(trainer.accelerator)
        check_arguments(trainer.args)
        if "_run_epoch" in vars(trainer):
            raise ConfigurationError("trainer", found="a second ResumeCallback", expected="one")
        trainer.train = partial(self._train, trainer.train)
        trainer.set_initial_training_values = partial(
            self._count, trainer.set_initial_training_values
        )
        trainer._init_training_state = partial(self._begin, trainer._init_training_state)
        trainer._run_epoch = partial(self._run_epoch, trainer._run_epoch)

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Trains, from the run directory; the Trainer is to look for nothing of its own."""
        args = self._trainer.args
        require_own(resume_from_checkpoint, self._directory, args)
        check_best_at_end(self._trainer, reports=self._metric is not None)
        if trial is not None:
            raise ConfigurationError(
                "hyperparameter_search()",
                found="several runs in one run directory",
                remedy="Make a Trainer with a ResumeCallback and a directory for each trial",
            )
        data = self._trainer.train_dataset
        if self._finished_on is not None and self._finished_on is not data:
            raise ConfigurationError(
                "trainer.train()",
                found=f"another train_dataset than that of the run in {self._directory}, which "
                "is over",
                remedy="Make a Trainer with a ResumeCallback and a directory for each training",
            )
        changed = {"eval_on_start": args.eval_on_start, "save_total_limit": args.save_total_limit}
        try:
            with self._under_way:
                result = train(None, None, *rest, **named)
        finally:
            vars(args).update(changed)
        self._finished_on = data
        return result

    def _components(self, ema: Any) -> tuple[StateComponent, ...]:
        """All that makes up the run, when the Trainer has prepared it."""
        return trainer_components(
            self._trainer, self._user_state, self._settings, lambda: self._loop.progress, ema=ema
        )

    def _count(self, count: Callable[..., Any], args: Any, dataloader: Any) -> Counts:
        """How far the run goes, once it is known what of it lies behind."""
        counts = Counts(*count(args, dataloader))
        checkpointer = self._make_checkpointer(counts.max_steps)
        self._checkpointer = self._under_way.enter_context(checkpointer)
        if self._saves_each_epoch:
            checkpointer._run.account.cadence = "at the end of each epoch"
        self._best = BestModel(self._trainer, self._checkpointer)
        self._loop = loop = self._checkpointer.drive()
        under_way, place = loop.under_way(dataloader), loop.progress
        self._plan = plan = Plan(
            counts, args.gradient_accumulation_steps, place.step, place.epoch, *under_way
        )
        if loop.horizon not in ({}, plan.horizon(counts)):
            counts = plan.changed(by_steps=args.max_steps > 0)
        loop.accept_horizon(**plan.horizon(counts))
        self._num_epochs = counts.num_train_epochs
        return counts

    def _begin(
        self,
        begin: Callable[..., tuple[int, int]],
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """The epoch and the batch in it that the Trainer goes on with."""
        begin(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        # The others are to see what was restored, so it comes first.
        callbacks = self._trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._user_state = user_state(
            self._trainer,
            without=self,
            others=self._saved_elsewhere,
            transient=self._options.transient,
            limit_bytes=self._options.user_state_limit,
        )
        self._settings = changed_settings(self._trainer)
        self._in_training = False
        if self._loop.finished:
            return num_train_epochs, 0
        return self._plan.epoch, self._plan.batches_to_skip

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every object exists; a run that continues has been evaluated at its start."""
        report = self._loop.resume()
        args.eval_on_start = args.eval_on_start and not report.resumed
        self._best.take_over()
        newer = passed_over(args.output_dir, report.step, self._directory)
        if newer is not None and not self._loop.finished and state.is_world_process_zero:
            logger.warning("%s", newer)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first epoch of this launch; each later one begins when the former is over."""
        if not self._in_training:
            # Every callback has begun, and made what it keeps.
            self._user_state.restore_now()
            changed = self._settings.restore_now()
            if changed and state.is_world_process_zero:
                values = ", ".join(changed)
                logger.info("%s: changed in training; using the checkpoint's values", values)
            self._loop.next_epoch()
            self._in_training = True

    def _run_epoch(
        self, run: Callable[..., None], *, train_dataloader: Any, epoch: int, **rest: Any
    ) -> None:
        """One epoch, or the rest of one; all of its code has run when ``run`` returns."""
        continued = epoch == self._plan.epoch and self._plan.num_used > 0
        num_skipped = self._plan.batches_to_skip if continued else 0
        resumed = {
            "train_dataloader": self._loop.as_loader(train_dataloader, num_skipped=num_skipped),
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": num_skipped,
            # Any name makes the Trainer skip; it finds no random state of its own there.
            "resume_from_checkpoint": str(self._checkpointer.directory) if num_skipped else None,
            **(self._plan.epoch_under_way if continued else {}),
        }
        run(**{**rest, **resumed}, epoch=epoch)
        state = self._trainer.state
        if state.global_step >= state.max_steps:
            self._loop.finish(f"steps={state.max_steps}")
        elif self._trainer.control.should_training_stop or epoch + 1 >= self._num_epochs:
            self._loop.finish(f"the Trainer stopped at step {state.global_step}")
        else:
            self._loop.next_epoch()
        self._best.point()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step before is settled."""
        self._best.point()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer-step boundary."""
        self._checkpointer.step(loss=self._trainer._tr_loss)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A save that is due here is made after the evaluation."""
        if self._saves_each_epoch:
            self._checkpointer.save()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Metrics of the step that is not settled yet; beside numbers they may hold anything."""
        metric, metrics = self._metric, kwargs["metrics"]
        if self._in_training and metric is not None and metric in metrics:
            self._checkpointer.report(**{metric: metrics[metric]})
            self._best.note_metrics()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run directory is free for others."""
        self._in_training = False
        self._checkpointer.close()
