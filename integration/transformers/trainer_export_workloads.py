"""Training functions for exports: one saves a step in both ways, the other is a stock script."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers_workloads import BATCH_SIZE, BLOCK_SIZE, Blocks

SAVED_AT, LAST = 8, 12
NATIVE = f"output/checkpoint-{SAVED_AT}"


class Stopping(TrainerCallback, ExportableState):
    """Notes losses and states, and stops after a save, which looks up each exported state."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.notes: dict[str, Any] = {"losses": []}

    def state(self) -> dict[str, Any]:
        return {"args": {"at": self.at}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.notes["loaded"] = copy.deepcopy(states(objects))
        self.notes["state"] = [state.global_step, state.epoch, *state.log_history]
        self.notes["intervals"] = [state.logging_steps, state.save_steps, state.eval_steps]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **objects: Any) -> None:
        self.notes["losses"].append([logs.get("loss"), logs.get("grad_norm")])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == self.at:
            self.notes["trained"] = copy.deepcopy(states(objects))
            control.should_training_stop = control.should_save = True


def states(objects: Any) -> dict[str, Any]:
    names = ("model", "optimizer", "lr_scheduler")
    return {name: objects[name].state_dict() for name in names}


def make_trainer(directory: str, *, dtype: str, lora: bool, accumulate: int, at: int) -> Trainer:
    if lora:
        torch.manual_seed(7)  # the Trainer's checkpoints lack the base
    model: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=BLOCK_SIZE,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).to(getattr(torch, dtype))
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.seed()
        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=4,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED_AT,
        data_seed=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    return Trainer(model, arguments, train_dataset=Blocks(augment=False), callbacks=[Stopping(at)])


def stopping_of(trainer: Trainer) -> Stopping:
    return next(e for e in trainer.callback_handler.callbacks if isinstance(e, Stopping))


def save_both(directory: str, **options: Any) -> None:
    """Saves a step by the Trainer and as a checkpoint of resumekit."""
    from resumekit.adapters.transformers import ResumeCallback

    torch.manual_seed(0)
    trainer = make_trainer(directory, at=SAVED_AT + 1, **options)
    trainer.add_callback(
        ResumeCallback(trainer, Path(directory) / "run", save_every=SAVED_AT, keep_latest=None)
    )
    torch.manual_seed(trainer.accelerator.process_index + 1)
    trainer.train()


def continue_from(directory: str, *, source: str, **options: Any) -> None:
    """A script without resumekit, which begins from a checkpoint of the Trainer.

    Its weights and random numbers are others in each launch until they are restored.
    """
    torch.seed()
    trainer = make_trainer(directory, at=LAST, **options)
    torch.seed()
    trainer.train(resume_from_checkpoint=str(Path(directory) / source))
    name = f"{Path(source).name}-{trainer.args.process_index}.pt"
    torch.save(stopping_of(trainer).notes, Path(directory) / name)
