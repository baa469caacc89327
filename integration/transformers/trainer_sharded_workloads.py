"""A Trainer whose model or optimizer is sharded over the ranks, by FSDP2 or by DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from trainer_workloads import Sentences, causal, tokenizer, with_lora, with_prompts
from transformers import Trainer, TrainingArguments, set_seed
from transformers_workloads import BATCH_SIZE

from resumekit.adapters.transformers import ResumeCallback


class OnCpu(Trainer):
    """Shards with FSDP on CPUs; accelerate 1.15 state.py takes it for accelerators only."""

    version = 2

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Accelerator = self.accelerator
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.device = torch.device("cpu")  # the first one takes no cpu:0 for the cpu
        is_first = self.version == 1
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=self.version,
            reshard_after_forward="FULL_SHARD" if is_first else True,
            use_orig_params=True if is_first else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
        self.is_fsdp_enabled = True


class OnCpuFirst(OnCpu):
    """With FSDP1."""

    version = 1


def train(
    directory: str,
    *,
    save_every: int,
    sharding: str,
    accumulate: int = 1,
    evaluate: str = "no",
    epochs: int = 2,
    adapter: str = "",
) -> None:
    """Trains with dropout and AdamW on two ranks; ``adapter`` is one of PEFT."""
    set_seed(0)
    stage = int(sharding[-1]) if sharding.startswith("ZeRO-") else None
    deepspeed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        eval_strategy=evaluate,
        save_strategy="no",
        deepspeed=None if stage is None else deepspeed,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    kinds = {"FSDP1": OnCpuFirst, "FSDP2": OnCpu}
    trainer = kinds.get(sharding, Trainer)(
        with_lora() if adapter == "lora" else with_prompts(adapter) if adapter else causal(),
        arguments,
        processing_class=tokenizer() if adapter else None,
        train_dataset=Sentences(lambda tokens: tokens),
        eval_dataset=Sentences(lambda tokens: tokens),
    )
    trainer.add_callback(
        ResumeCallback(trainer, Path(directory) / "run", save_every=save_every, strict=True)
    )
    torch.manual_seed(trainer.accelerator.process_index + 1)  # ranks draw different dropout masks
    trainer.train()
    weights = trainer.model.state_dict().items()  # FSDP1 gathers here
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in weights}
    save_file(whole, Path(directory) / f"expected-{trainer.accelerator.process_index}.safetensors")
    if sharding == "FSDP1":
        assert isinstance(trainer.model, FullyShardedDataParallel)
    elif stage is None:
        assert all(isinstance(each, DTensor) for each in trainer.model.parameters())
    else:
        assert trainer.deepspeed.zero_optimization_stage() == stage
