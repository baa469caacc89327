"""What a Trainer's arguments say about saving, and which of them cannot be followed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from resumekit.errors import ConfigurationError

if TYPE_CHECKING:
    from resumekit.run import OptionKeywords

_REFUSED = {
    "ignore_data_skip": "a setting that changes which batches come next",
    "auto_find_batch_size": "a setting that changes which batches come next",
    # transformers 5.23 trainer_jit_checkpoint.py ends the training there, as if it were done.
    "enable_jit_checkpoint": "a second answer to SIGTERM, beside that of ResumeCallback",
}

# transformers 5.23 trainer_optimizer.py: by the beginning of ``optim``.
_REFUSED_OPTIMIZERS = {
    "galore": "an optimizer whose state has objects in it, or is not in its state_dict()",
    "apollo": "an optimizer whose state has objects in it, or is not in its state_dict()",
    "adalomo": "an optimizer whose state is not in its state_dict()",
    "grokadamw": "an optimizer that names its state by addresses in memory",
}


def check_arguments(args: Any) -> None:
    """Returns when a run with these ``TrainingArguments`` can be continued exactly.

    Raises:
        ConfigurationError: names the one that cannot be followed.
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
    """Returns when the best model can be loaded at the end, or nobody asks for it.

    Args:
        trainer: the ``transformers.Trainer``.
        reports: whether a metric says which one is the best.

    Raises:
        ConfigurationError: it is asked for, and only our checkpoints could have it.
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
            found=f"{found}, which is in parts",
            expected="load_best_model_at_end=False",
            remedy="Open trainer.state.best_model_checkpoint by `resumekit export`",
        )


def with_defaults(options: OptionKeywords, args: Any, max_steps: int) -> OptionKeywords:
    """The options, and what the arguments say where an option was not given.

    Args:
        options: as the user gave them.
        args: the ``TrainingArguments``.
        max_steps: the steps of the whole run; ``save_steps`` below 1 are a share of them.
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
    """Whether the Trainer writes checkpoints of its own."""
    return _value(args.save_strategy) != "no"


def saves_each_epoch(options: Mapping[str, Any], args: Any) -> bool:
    """Whether a save is due at the end of every epoch."""
    return "save_every" not in options and _value(args.save_strategy) == "epoch"


def evaluates_in_persistent_workers(args: Any) -> bool:
    """Whether the first evaluation of each launch draws what a later one does not.

    transformers 5.23 trainer.py get_eval_dataloader keeps the loader with its workers.
    """
    return bool(args.dataloader_persistent_workers) and _value(args.eval_strategy) != "no"


def _value(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
