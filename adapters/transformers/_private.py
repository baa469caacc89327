"""The names of transformers and TRL that are not documented, or that the adapter replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from resumekit.frameworks.accelerate import MODELS
from resumekit.requirements import PrivateName, faults

_TRAINER = "transformers 5.23 trainer.py Trainer"

# Replaced on one Trainer object, because no event of a callback is at these points.
# Looks for checkpoints of the Trainer's own.
TRAIN = PrivateName("train", _TRAINER, ("resume_from_checkpoint", "trial"), is_written=True)
# How far the run goes; _inner_training_loop calls it before _init_training_state.
COUNT = PrivateName(
    "set_initial_training_values", _TRAINER, ("args", "dataloader"), is_written=True
)
# Which epoch comes first, and the batch in it.
BEGIN = PrivateName(
    "_init_training_state",
    _TRAINER,
    (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    is_written=True,
)
# Skips the batches that were used, and returns when the evaluation at the epoch's end is done.
RUN_EPOCH = PrivateName("_run_epoch", _TRAINER, (), is_written=True)
# Gives the loss of one batch, before the Trainer adds it to those since the last line of its log.
TRAINING_STEP = PrivateName("training_step", _TRAINER, (), is_written=True)
_OF_RUN_EPOCH = {
    "epoch",
    "train_dataloader",
    "steps_in_epoch",
    "num_update_steps_per_epoch",
    "resume_from_checkpoint",
    "epochs_trained",
    "steps_trained_in_current_epoch",
}

# _run_epoch, _maybe_log_save_evaluate: what is summed up between two lines of the log.
SUMS = (
    LOSS_SUM := PrivateName("_tr_loss", _TRAINER, is_written=True),
    PrivateName("_total_loss_scalar", _TRAINER, is_written=True),
    LAST_LOGGED := PrivateName("_globalstep_last_logged", _TRAINER, is_written=True),
    PrivateName("current_flos", _TRAINER, is_written=True),
)

# torch 2.13 distributed/fsdp/fully_sharded_data_parallel.py FullyShardedDataParallel (FSDP1).
FSDP1_MODULE = PrivateName(
    "_fsdp_wrapped_module", "torch 2.13 distributed/fsdp FullyShardedDataParallel", is_optional=True
)


def _of_trl(name: str, source: str) -> PrivateName:
    return PrivateName(name, f"trl 1.16 {source}", is_written=True, is_optional=True)


# Each Trainer of TRL: what is summed up between two lines of the log.
TRL_SUMS = (
    _of_trl("_metrics", "trainer/base_trainer.py"),
    _of_trl("_total_train_tokens", "trainer/sft_trainer.py"),
)
# The same in ORPO and CPO, in dicts that make their entries.
TRL_STORED = _of_trl("_stored_metrics", "experimental/orpo, experimental/cpo")
# What was generated for several steps, and how many batches of it were used.
TRL_STEP = _of_trl("_step", "grpo_trainer.py, rloo_trainer.py GRPOTrainer._prepare_inputs")
TRL_GENERATED = _of_trl("_buffered_inputs", "grpo_trainer.py GRPOTrainer._prepare_inputs")
# What controls the entropy bonus.
TRL_ENTROPY = (
    _of_trl("entropy_coef", "grpo_trainer.py GRPOTrainer._compute_loss"),
    _of_trl("_last_world_entropy", "grpo_trainer.py GRPOTrainer._compute_loss"),
)
# The latest completions, for a table.
TRL_LOGS = _of_trl("_logs", "grpo_trainer.py GRPOTrainer.log")
TRL_HAS_IMAGES = PrivateName("_is_vlm", "trl 1.16 grpo_trainer.py GRPOTrainer", is_optional=True)

_GENERATING = ("_metrics", "_step", "_buffered_inputs")
# Whose state is known from step to step, and what each must have. Another one is reported as lost.
TRL_TRAINERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("SFT", "DPO", "KTO", "Reward"), ("_metrics",)),
    **dict.fromkeys(("GRPO", "RLOO", "Distillation"), _GENERATING),
    **dict.fromkeys(("ORPO", "CPO"), ("_stored_metrics",)),
    "_Base": (),
}

# transformers 5.23 trainer_callback.py TrainerState: what training changes. The rest is settings.
STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)

# transformers 5.23 trainer_callback.py TrainerState.compute_steps: computed from the arguments.
INTERVALS = ("logging_steps", "eval_steps", "save_steps")

# transformers 5.23 trainer.py, trl 1.16 grpo_trainer.py, rloo_trainer.py: user code that is called.
CALLED = (
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)


def trl_classes(trainer: Any) -> list[type]:
    """The classes of TRL that a Trainer derives from."""
    return [each for each in type(trainer).__mro__ if each.__module__.partition(".")[0] == "trl"]


def method_faults(trainer: Any) -> Iterator[str]:
    """What of the replaced methods is not as in the tested version; asked before training.

    Args:
        trainer: the ``transformers.Trainer``.
    """
    yield from faults(trainer, (TRAIN, COUNT, BEGIN, RUN_EPOCH, TRAINING_STEP))
    yield from faults(trainer.accelerator, (MODELS,))
    if not RUN_EPOCH.fault(trainer):
        missing = _OF_RUN_EPOCH.difference(signature(RUN_EPOCH.of(trainer)).parameters)
        if missing:
            yield f"_run_epoch does not take {', '.join(sorted(missing))} ({RUN_EPOCH.source})"


def attribute_faults(trainer: Any) -> Iterator[str]:
    """What of the attributes is not as in the tested version; asked when training begins.

    Args:
        trainer: the ``transformers.Trainer``.
    """
    state = "transformers 5.23 trainer_callback.py TrainerState"
    kinds = [each.__name__.removesuffix("Trainer") for each in trl_classes(trainer)]
    required = {name for kind in kinds for name in TRL_TRAINERS.get(kind, ())}
    yield from faults(trainer, SUMS)
    yield from faults(trainer, (PrivateName(name, "trl 1.16") for name in sorted(required)))
    yield from faults(trainer.state, (PrivateName(name, state) for name in (*STATE, *INTERVALS)))
