"""What a Trainer's arguments say: what is refused, when to save, how far the run goes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from resumekit.attach import asked_step, refuse_checkpoint, step_names
from resumekit.errors import ConfigurationError

if TYPE_CHECKING:
    from resumekit.run.loops import FrameworkLoop
    from resumekit.run.options import OptionKeywords

_REFUSED = {
    "ignore_data_skip": "a setting that changes which batches come next",
    "auto_find_batch_size": "a setting that changes which batches come next",
    # transformers 5.23 trainer_jit_checkpoint.py ends the training there, as if it were done.
    "enable_jit_checkpoint": "a second handler of SIGTERM, beside that of ResumeCallback",
}

# transformers 5.23 trainer_optimizer.py: by the beginning of ``optim``.
_REFUSED_OPTIMIZERS = {
    "galore": "an optimizer whose state has objects in it, or is not in its state_dict()",
    "apollo": "an optimizer whose state has objects in it, or is not in its state_dict()",
    "adalomo": "an optimizer whose state is not in its state_dict()",
    "grokadamw": "an optimizer that names its state by addresses in memory",
}


def check_arguments(args: Any) -> None:
    """Raises ConfigurationError unless a run with these arguments can be resumed exactly.

    Raises:
        ConfigurationError: names the setting that cannot be resumed exactly.
    """
    for setting, why in _REFUSED.items():
        if getattr(args, setting, False):
            raise ConfigurationError(
                f"TrainingArguments({setting}=True)",
                found=why,
                expected=f"{setting}=False",
            )
    name = _value(args.optim)
    for beginning, why in _REFUSED_OPTIMIZERS.items():
        if name.startswith(beginning):
            raise ConfigurationError(
                f"TrainingArguments(optim={name!r})", found=why, expected="another optimizer"
            )


def check_best_at_end(trainer: Any, *, reports: bool) -> None:
    """Raises ConfigurationError unless the Trainer can load the best model, if it is to.

    Args:
        trainer: the ``transformers.Trainer``.
        reports: whether a metric selects the best model.

    Raises:
        ConfigurationError: only a checkpoint in the run directory could have the best model.
    """
    args = trainer.args
    if not args.load_best_model_at_end or saves_by_itself(args):
        return
    where = "TrainingArguments(load_best_model_at_end=True)"
    found = "save_strategy='no', so the best model is the one of the run directory"
    if not reports:
        raise ConfigurationError(where, found=found, expected="a metric_for_best_model")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigurationError(
            where,
            found=f"{found}, which is sharded",
            expected="load_best_model_at_end=False",
            remedy="Pass load_best_model_at_end=False; `resumekit export` reads the directory "
            "above trainer.state.best_model_checkpoint",
        )


def with_defaults(options: OptionKeywords, args: Any, max_steps: int) -> OptionKeywords:
    """The options, with defaults from the arguments.

    Args:
        options: as the user gave them.
        args: the ``TrainingArguments``.
        max_steps: the steps of the whole run; ``save_steps`` below 1 are a fraction of them.
    """
    found: OptionKeywords = {}
    if _value(args.save_strategy) == "steps":
        steps = args.save_steps
        found["save_every"] = math.ceil(max_steps * steps) if steps < 1 else int(steps)
    elif _value(args.save_strategy) == "epoch":
        found["save_every"] = None  # and the callback saves at the end of each epoch
    if args.save_total_limit is not None and args.save_total_limit > 0:
        found["keep_latest"] = args.save_total_limit
    metric = args.metric_for_best_model
    if metric is not None and "best_metric" not in options:
        found["best_metric"] = metric if metric.startswith("eval_") else f"eval_{metric}"
        found["mode"] = "max" if args.greater_is_better else "min"
    found.update(options)
    return found


def saves_by_itself(args: Any) -> bool:
    """Whether the Trainer writes its own checkpoints."""
    return _value(args.save_strategy) != "no"


def saves_each_epoch(options: Mapping[str, Any], args: Any) -> bool:
    """Whether a save is due at the end of every epoch."""
    return "save_every" not in options and _value(args.save_strategy) == "epoch"


def evaluates_in_persistent_workers(args: Any) -> bool:
    """Whether the first evaluation of each launch draws a random number that later ones do not.

    transformers 5.23 trainer.py get_eval_dataloader keeps the loader with its workers.
    """
    return bool(args.dataloader_persistent_workers) and _value(args.eval_strategy) != "no"


def _value(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


# ---------------------------------------------------------------- how far the run goes


class Counts(NamedTuple):
    """What ``Trainer.set_initial_training_values`` gives. transformers 5.23 trainer.py."""

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: int
    total_train_batch_size: int
    steps_in_epoch: int
    max_steps: int


@dataclass(frozen=True)
class TrainingPlan:
    """How many steps and epochs are left of a run.

    The Trainer counts from its arguments, as if all epochs had as many batches as now. That is
    wrong for a run that was started with another batch size: it has made so many steps, and the
    rest of its epoch has as many batches as are left of it.

    Args:
        counts: the Trainer's own numbers.
        accumulation: the batches of an optimizer step.
        step: the optimizer steps that were made.
        epoch: the current epoch, or the next one.
        num_used: the batches of it that were used.
        num_left: the batches that are left of it; None where that is not known.
    """

    counts: Counts
    accumulation: int
    step: int
    epoch: int
    num_used: int
    num_left: int | None

    @property
    def batches_to_skip(self) -> int:
        """The batches that the Trainer skips: whole accumulation windows."""
        return -(-self.num_used // self.accumulation) * self.accumulation

    @property
    def epoch_under_way(self) -> dict[str, int]:
        """The length of the current epoch, as ``Trainer._run_epoch`` takes it."""
        if self.num_left is None or not self.num_used:
            return {}
        steps_in_epoch = self.batches_to_skip + self.num_left
        return {
            "steps_in_epoch": steps_in_epoch,
            "num_update_steps_per_epoch": -(-steps_in_epoch // self.accumulation),
        }

    def horizon(self, counts: Counts) -> dict[str, int]:
        """The horizon of the run: steps, and epochs where they have a length."""
        steps = {"steps": counts.max_steps}
        return steps if self.num_left is None else {**steps, "epochs": counts.num_train_epochs}

    def changed(self, *, by_steps: bool) -> Counts:
        """The Trainer's numbers for a run that was started with another batch size.

        Args:
            by_steps: whether the arguments give steps, from which the epochs follow.
        """
        counts, num_left = self.counts, self.num_left
        if num_left is None:
            return counts
        per_epoch = counts.num_update_steps_per_epoch
        is_within = self.num_used > 0
        epochs = self.epoch + is_within
        steps = self.step + (-(-num_left // self.accumulation) if is_within else 0)
        if by_steps:
            missing = max(counts.max_steps - steps, 0)
            return counts._replace(num_train_epochs=epochs - (-missing // per_epoch))
        return counts._replace(max_steps=steps + counts.max_steps - epochs * per_epoch)


# ---------------------------------------------------------------- checkpoints of the Trainer's own

# transformers 5.23 trainer_utils.py get_last_checkpoint: the folders that it takes for its own.
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def resume_option(resume_from_checkpoint: Any, directory: Path, args: Any) -> dict[str, Any]:
    """The option for what ``resume_from_checkpoint`` names: a step of the run; none for the run.

    True means the run directory, which may have no checkpoint yet. So do the word "true", which a
    script has from its command line, and the path of the run directory. Scripts that call
    ``get_last_checkpoint(output_dir)`` pass the newest of the Trainer's own checkpoints.

    Args:
        resume_from_checkpoint: what the user gave.
        directory: the run directory.
        args: the ``TrainingArguments``.

    Raises:
        ConfigurationError: it is the path of another checkpoint.
    """
    given = resume_from_checkpoint
    if given in (None, False, True) or str(given).lower() == "true":
        return {}
    asked = asked_step(given, directory)
    if asked is None:
        is_newest = saves_by_itself(args) and Path(given) == newest_checkpoint(args.output_dir)
        if not (is_newest and step_names(directory)):
            refuse_checkpoint(
                "resume_from_checkpoint",
                given,
                directory,
                framework="the Trainer",
                call="trainer.train()",
                weights="from_pretrained(that path)",
            )
    return asked or {}


def ignored_checkpoint(output_dir: str, step: int, directory: Path) -> str | None:
    """A warning where a checkpoint of the Trainer's own is newer than the one that is resumed.

    Args:
        output_dir: where the Trainer saves.
        step: the step that the run resumes from.
        directory: the run directory.
    """
    newest = newest_checkpoint(output_dir)
    if newest is None or _number(newest) <= step:
        return None
    return (
        f"{newest} is the Trainer's own and newer than step {step}: it is not read, train() "
        f"resumes from {directory} alone"
    )


def newest_checkpoint(output_dir: str) -> Path | None:
    """The newest of the Trainer's own checkpoints, or None."""
    folders = Path(output_dir).glob("checkpoint-*")
    return max((each for each in folders if _number(each)), key=_number, default=None)


def _number(folder: Path) -> int:
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else 0


class BestModel:
    """Sets ``best_model_checkpoint`` to the best checkpoint of the run.

    A Trainer that writes its own checkpoints sets it itself. The Trainer reads the folder at the
    end of training only, so a checkpoint that is still being written is named like any other.

    Args:
        trainer: the ``transformers.Trainer``.
        loop: of the run.
    """

    def __init__(self, trainer: Any, loop: FrameworkLoop) -> None:
        self._trainer = trainer
        self._loop = loop
        self._is_ours = not saves_by_itself(trainer.args)
        self._may_differ = True
        self._in_flight: int | None = None  # the step that is named, while it is being written

    def take_over(self) -> None:
        """The state was restored; the folder that it names may be gone or moved."""
        state = self._trainer.state
        if self._is_ours:
            # transformers 5.23 trainer.py _finalize_training deletes all others where it is 1.
            self._trainer.args.save_total_limit = None
            self.point()
        elif state.best_model_checkpoint and not Path(state.best_model_checkpoint).is_dir():
            state.best_model_checkpoint = None  # as _init_training_state does

    def note_metrics(self) -> None:
        """A step was evaluated; its checkpoint follows at the safe point."""
        self._may_differ = True

    def point(self) -> None:
        """Sets the folder of the best model, at the safe point after an evaluation."""
        in_flight = self._loop.step_in_flight
        has_ended = self._in_flight is not None and self._in_flight != in_flight  # or has failed
        if not self._is_ours or not (self._may_differ or has_ended):
            return
        self._may_differ, self._in_flight, folder = False, None, None
        best = self._loop.best_so_far()
        if best is not None:
            directory, step = best
            folder = str(directory / "model")
            self._in_flight = step if step == in_flight else None
        self._trainer.state.best_model_checkpoint = folder
