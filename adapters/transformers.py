"""Hugging Face Trainer: one callback, and ``trainer.train()`` starts, resumes, or is done.

Example:
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ResumeCallback(trainer, "runs/a", save_every=500))
    trainer.train()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.capture import AttributeState, by_class_and_ordinal
from resumekit.contract import Fidelity, SharingPattern, Slot, StateComponent
from resumekit.engine.driven import DrivenLoop
from resumekit.engine.options import Options
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate import accelerator_components, require_supported
from resumekit.requirements import require

require("transformers")

from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402  if it is there

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.engine.options import OptionKeywords

__all__ = ["ResumeCallback"]

# transformers 5.23 trainer_callback.py TrainerState: what training changes. The rest is settings.
_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)

# transformers 5.23 trainer.py _run_epoch: what is summed up between two lines of the log.
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")

# transformers 5.23 trainer_utils.py speed_metrics: these are read from a clock.
_CLOCK_SUFFIXES = ("_runtime", "_per_second")


class ResumeCallback(TrainerCallback):
    """Saves the whole state of a Trainer's run; ``train()`` continues it in the same directory.

    Making it attaches it to the Trainer, see ``attach``.

    Args:
        trainer: the ``transformers.Trainer``.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.engine.options.Options``.

    Raises:
        ConfigurationError: an option is wrong, or a setting of the Trainer cannot be followed.
    """

    def __init__(
        self,
        trainer: Any,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        self._reports = Options.from_keywords(options).best_metric is not None
        self._trainer = trainer
        self._make_checkpointer: Callable[[], Checkpointer] = lambda: Checkpointer(
            directory,
            components=lambda: _components(trainer, ema=ema),
            extras=extras,
            generators=generators,
            **options,
        )
        self._checkpointer: Checkpointer
        self._loop: DrivenLoop
        self._num_epochs = 0
        self._in_training = False
        self.attach(trainer)

    def attach(self, trainer: Any) -> None:
        """Takes the two places that no event reaches: where training begins, and around an epoch.

        Two methods of this one Trainer object are replaced. transformers 5.23 trainer.py:
        ``_init_training_state`` says which epoch comes first, before any event; ``_run_epoch``
        skips what was used of it, and returns when the evaluation at its end is done.
        """
        require_supported(trainer.accelerator)
        for setting in ("ignore_data_skip", "auto_find_batch_size"):
            if getattr(trainer.args, setting):
                raise ConfigurationError(
                    f"TrainingArguments({setting}=True)",
                    found="a setting that changes which batches come next",
                    expected=f"{setting}=False",
                )
        if "_run_epoch" in vars(trainer):
            raise ConfigurationError("trainer", found="a second ResumeCallback", expected="one")
        trainer._init_training_state = partial(self._begin, trainer._init_training_state)
        trainer._run_epoch = partial(self._run_epoch, trainer._run_epoch)

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
        if resume_from_checkpoint is not None:
            raise ConfigurationError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}",
                found="a checkpoint of the Trainer's own",
                remedy="Call trainer.train() alone: it resumes from the run directory",
            )
        begin(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        # The others are to see what was restored, so it comes first.
        callbacks = self._trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        self._checkpointer = self._make_checkpointer()
        self._loop = self._checkpointer.drive(steps=max_steps)
        self._num_epochs, self._in_training = num_train_epochs, False
        place = self._loop.progress
        return (num_train_epochs, 0) if self._loop.finished else (place.epoch, place.batch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every object exists."""
        self._loop.resume()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first epoch of this launch; each later one begins when the former is over."""
        if not self._in_training:
            self._loop.next_epoch()
            self._in_training = True

    def _run_epoch(
        self, run: Callable[..., None], *, train_dataloader: Any, epoch: int, **rest: Any
    ) -> None:
        """One epoch, or the rest of one; all of its code has run when ``run`` returns."""
        num_used = self._loop.progress.batch
        resumed = {
            "train_dataloader": self._loop.as_loader(train_dataloader, num_skipped=num_used),
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": num_used,
            # Any name makes the Trainer skip; it finds no random state of its own there.
            "resume_from_checkpoint": str(self._checkpointer.directory) if num_used else None,
        }
        run(**{**rest, **resumed}, epoch=epoch)
        state = self._trainer.state
        if state.global_step >= state.max_steps:
            self._loop.finish(f"steps={state.max_steps}")
        elif self._trainer.control.should_training_stop or epoch + 1 >= self._num_epochs:
            self._loop.finish(f"the Trainer stopped at step {state.global_step}")
        else:
            self._loop.next_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer-step boundary."""
        self._checkpointer.step(loss=self._trainer._tr_loss)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Metrics of the step that is not settled yet."""
        if self._reports and self._in_training:
            self._checkpointer.report(**kwargs["metrics"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The run directory is free for others."""
        self._in_training = False
        self._checkpointer.close()


class _TrainerState(AttributeState):
    def comparable_state(self) -> dict[str, Any]:
        """Two equal runs log different times."""
        state = self.state_dict()
        state["log_history"] = [
            {key: value for key, value in line.items() if not key.endswith(_CLOCK_SUFFIXES)}
            for line in state["log_history"]
        ]
        return state


def _components(trainer: Any, *, ema: Any) -> tuple[StateComponent, ...]:
    """All that the Trainer holds, and the attributes that other callbacks export."""
    components = accelerator_components(
        trainer.accelerator,
        model=trainer.model,
        # accelerate 1.15 optimizer.py wraps: the state is that of the object inside.
        optimizer=trainer.optimizer.optimizer,
        lr_scheduler=trainer.lr_scheduler,
        ema=ema,
    )
    callbacks = trainer.callback_handler.callbacks
    exporting = by_class_and_ordinal(c for c in callbacks if isinstance(c, ExportableState))
    slot, own = Slot.CALLBACKS.value, SharingPattern.PER_RANK  # each rank sums up its own losses
    fidelity, reason = _fidelity(trainer.args)
    trainer_state = _TrainerState(trainer.state, _STATE, key=f"{slot}/trainer_state")
    sums = AttributeState(trainer, _SUMS, key=f"{slot}/trainer")
    exported = [
        AttributeState(callback, callback.state()["attributes"], key=f"{slot}/{name}")
        for name, callback in exporting.items()
    ]
    return (
        *components,
        StateComponent(trainer_state.key, trainer_state, own),
        StateComponent(sums.key, sums, own, fidelity=fidelity, reason=reason),
        *(StateComponent(each.key, each, own, required=False) for each in exported),
    )


def _fidelity(args: Any) -> tuple[Fidelity, str]:
    if args.dataloader_persistent_workers and str(args.eval_strategy.value) != "no":
        # transformers 5.23 trainer.py get_eval_dataloader keeps the loader with its workers.
        return Fidelity.LOST, (
            "the first evaluation of each launch draws a random number for its persistent workers; "
            "use dataloader_persistent_workers=False"
        )
    return Fidelity.EXACT, ""
