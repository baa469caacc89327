"""Hugging Face Trainer: with one callback ``trainer.train()`` starts, resumes, or is done.

Example:
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ResumeCallback(trainer, "runs/a", save_every=500))
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate import require_supported
from resumekit.log import logger, warn
from resumekit.requirements import check_tested, require
from resumekit.run.options import Options, checked_extras, require_order, run_directory

require("transformers")

# ruff: noqa: E402  if it is there
from transformers.trainer_callback import TrainerCallback

from resumekit.adapters.transformers import _private as private
from resumekit.adapters.transformers._private import attribute_faults, method_faults
from resumekit.adapters.transformers.arguments import (
    BestModel,
    Counts,
    TrainingPlan,
    check_arguments,
    check_best_at_end,
    ignored_checkpoint,
    resume_option,
    saves_each_epoch,
    with_defaults,
)
from resumekit.adapters.transformers.trainer_components import (
    known_components,
    trainer_components,
    trainer_settings,
)
from resumekit.adapters.transformers.user_state import changed_settings, user_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run.options import OptionKeywords

__all__ = ["ResumeCallback"]


class ResumeCallback(TrainerCallback):
    """Saves the whole state of a Trainer's run; ``train()`` resumes it in the same directory.

    The constructor attaches it to the Trainer, see ``attach``. Options that are not given come from
    the ``TrainingArguments``: ``save_strategy="steps"`` or ``"epoch"`` for ``save_every``,
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
        ConfigurationError: an option is wrong, or a setting of the Trainer is not supported.
        InexactError: ``strict=True``, and this version of transformers lacks what the adapter
            needs.
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
        self._options = whole
        self._make_checkpointer: Callable[[int], Checkpointer] = lambda max_steps: Checkpointer(
            self._directory,
            components=lambda: trainer_components(
                trainer, self._user_state, self._settings, lambda: self._loop.progress, ema=ema
            ),
            extras=self._extras,
            generators=generators,
            **with_defaults(self._with_asked(options), trainer.args, max_steps),
        )
        self._open = ExitStack()  # closes the Checkpointer after an error in train()
        self._finished_on: Any = None  # the data set of a train() that has finished
        self._num_epochs = 0
        self._asked: dict[str, Any] = {}  # the step that a train() is to resume
        self._in_training = False
        self._loss: Any = None  # of the batches of the step in progress
        self.attach(trainer)

    def _with_asked(self, options: OptionKeywords) -> OptionKeywords:
        """The options, with the step that a ``train()`` is to resume."""
        given = options.copy()
        if "resume_from" in self._asked:
            given["resume_from"] = self._asked["resume_from"]
        return given

    def attach(self, trainer: Any) -> None:
        """Replaces five methods of this Trainer object, for which there is no callback event.

        ``_private.py`` lists them with what each is for.
        """
        self._check_private_names(method_faults(trainer))
        require_supported(trainer.accelerator)
        check_arguments(trainer.args)
        if private.RUN_EPOCH.name in vars(trainer):
            raise ConfigurationError("trainer", found="a second ResumeCallback", expected="one")
        for method, replacement in (
            (private.TRAIN, self._train),
            (private.COUNT, self._count),
            (private.BEGIN, self._begin),
            (private.RUN_EPOCH, self._run_epoch),
            (private.TRAINING_STEP, self._training_step),
        ):
            method.write(trainer, partial(replacement, method.of(trainer)))

    @property
    def _has_finished(self) -> bool:
        """Whether a ``train()`` of this launch has come to its end."""
        return self._finished_on is not None

    def _begin_another(self, directory: Path) -> None:
        """Lets the next ``train()`` be a run of its own.

        Args:
            directory: of that run.
        """
        self._directory, self._finished_on = run_directory(directory), None

    def _check_private_names(self, found: Iterable[str]) -> None:
        warns = self._trainer.args.process_index == 0
        versions = ("transformers", "accelerate", "torch", "trl")
        check_tested(*versions, found=found, strict=self._options.strict, warns=warns)

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Trains from the run directory; the Trainer reads no checkpoint of its own."""
        args = self._trainer.args
        self._asked = resume_option(resume_from_checkpoint, self._directory, args)
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
            with self._open:
                result = train(None, None, *rest, **named)
        finally:
            vars(args).update(changed)
        self._finished_on = data
        return result

    def _count(self, count: Callable[..., Any], args: Any, dataloader: Any) -> Counts:
        """How far the run goes, from the progress of its checkpoint."""
        counts = Counts(*count(args, dataloader))
        checkpointer = self._make_checkpointer(counts.max_steps)
        self._checkpointer = self._open.enter_context(checkpointer)
        self._loop = loop = self._checkpointer.drive(checked=known_components(self._trainer))
        loop.set_log_holders(lambda: self._trainer.callback_handler.callbacks)
        self._best = BestModel(self._trainer, loop)
        if self._saves_each_epoch:
            loop.set_cadence_text("at the end of each epoch")
        epoch, progress = loop.under_way(dataloader), loop.progress
        self._plan = plan = TrainingPlan(
            counts, args.gradient_accumulation_steps, progress.step, progress.epoch, *epoch
        )
        if loop.horizon not in ({}, plan.horizon(counts)):
            counts = plan.changed(by_steps=args.max_steps > 0)
        loop.accept_horizon(trainer_settings(self._trainer), **plan.horizon(counts))
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
        """The epoch, and the batch in it, that the Trainer resumes at."""
        begin(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        # First, so that the others see the restored state.
        callbacks = self._trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._user_state = user_state(self._trainer, without=self, others=self._saved_elsewhere)
        self._settings = changed_settings(self._trainer)
        self._in_training, self._loss = False, None
        if self._loop.finished:
            return num_train_epochs, 0
        return self._plan.epoch, self._plan.batches_to_skip

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every object exists; a resumed run was evaluated at its start."""
        found = list(attribute_faults(self._trainer))
        if found:
            self._check_private_names(found)
        report = self._loop.resume()
        args.eval_on_start = args.eval_on_start and not report.resumed
        self._best.take_over()
        ignored = ignored_checkpoint(args.output_dir, report.step, self._directory)
        is_due = not (self._loop.finished or self._loop.is_replay)
        if ignored is not None and is_due and state.is_world_process_zero:
            warn("RK-835", "%s", ignored)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first epoch of this launch; later ones begin when the former is over."""
        if not self._in_training:
            # Every callback has initialised its attributes. Those after this one get this event in
            # each launch: what they do in an epoch that continues is undone at its first batch.
            self._user_state.restore_early()
            changed = self._settings.restore_early()
            if changed and state.is_world_process_zero:
                values = ", ".join(changed)
                logger.info("%s: changed in training; using the checkpoint's values", values)
            self._loop.next_epoch()
            self._in_training = True

    def _run_epoch(
        self, run: Callable[..., None], *, train_dataloader: Any, epoch: int, **rest: Any
    ) -> None:
        """One epoch, or the rest of one."""
        continued = epoch == self._plan.epoch and self._plan.num_used > 0
        num_skipped = self._plan.batches_to_skip if continued else 0
        resumed = {
            "train_dataloader": self._loop.as_loader(train_dataloader, num_skipped=num_skipped),
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": num_skipped,
            # Any name makes the Trainer skip; it finds no RNG state of its own there.
            "resume_from_checkpoint": str(self._checkpointer.directory) if num_skipped else None,
            **(self._plan.epoch_under_way if continued else {}),
        }
        run(**{**rest, **resumed}, epoch=epoch)  # all code of the epoch has run when it returns
        state = self._trainer.state
        if state.global_step >= state.max_steps:
            self._loop.finish(f"steps={state.max_steps}")
        elif self._trainer.control.should_training_stop or epoch + 1 >= self._num_epochs:
            self._loop.finish(f"the Trainer stopped at step {state.global_step}")
        else:
            self._loop.next_epoch()
        self._best.point()

    def _training_step(self, train_on: Callable[..., Any], *batch: Any, **named: Any) -> Any:
        """The loss of one batch, which the step adds up."""
        loss = train_on(*batch, **named)
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The safe point of the step before has passed."""
        self._best.point()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer-step boundary."""
        loss, self._loss = self._loss, None
        self._checkpointer.step(loss=loss)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A save that is due here is made after the evaluation."""
        if self._saves_each_epoch:
            self._checkpointer.save()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Metrics of the current step, which may have other values than numbers."""
        metric, metrics = self._metric, kwargs["metrics"]
        if self._in_training and metric is not None and metric in metrics:
            self._checkpointer.report(**{metric: metrics[metric]})
            self._best.note_metrics()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Releases the run directory, while the trackers are open."""
        self._in_training = False
        self._checkpointer.close()
