"""An optimizer that shards its moments by rank, on 2 ranks, under ``--framework``.

torchrun --nproc-per-node=2 sharded_moments.py --directory runs/moments --framework torch

Without ``--per-rank optimizer`` no save is possible. With ``--bare`` the script has no callback:
``resumekit run`` attaches one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from judged_script import arguments, record
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 40, 4, 3  # 5 steps an epoch on 2 ranks
WIDTH = 6


class ShardedAdam(torch.optim.Optimizer):
    """Adam of which each rank keeps the moments of its rows of a matrix, and of its vectors."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rank, num_ranks = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        parameters = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        for number, (parameter, lr) in enumerate(parameters):
            if parameter.dim() == 2:
                parts = [part.clone() for part in parameter.chunk(num_ranks)]
                self._update(parameter, parts[rank], parameter.grad.chunk(num_ranks)[rank], lr)
                if num_ranks > 1:
                    dist.all_gather(parts, parts[rank].clone())
                parameter.copy_(torch.cat(parts))
                continue
            if number % num_ranks == rank:
                self._update(parameter, parameter, parameter.grad, lr)
            if num_ranks > 1:
                dist.broadcast(parameter, src=number % num_ranks)
        return loss

    def _update(self, parameter: Any, part: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(part), square=torch.zeros_like(part))
        state["step"] += 1
        state["mean"].lerp_(grad, 0.1)
        state["square"].lerp_(grad * grad, 0.05)
        correction = 1 - 0.9 ** state["step"]
        part.sub_(lr / correction * state["mean"] / (state["square"].sqrt() + 1e-3))


class Samples(Dataset):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": inputs.sum() + inputs[0] * inputs[1]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(WIDTH, 8), nn.Dropout(0.1)
        self.second = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.second(self.dropout(torch.tanh(self.first(inputs)))).sum(1)
        return {"loss": nn.functional.mse_loss(outputs, labels)}


def with_torch(directory: str, **options: Any) -> None:
    from resumekit.adapters.torch import Checkpointer

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model: nn.Module = Net()
    sampler = None
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(Samples())
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)
    loader = DataLoader(Samples(), BATCH_SIZE, shuffle=sampler is None, sampler=sampler)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(ckpt.progress.step + 1, loss=loss, optimizers=optimizer, inputs=batch["inputs"])
        ckpt.step(loss=loss)
    ckpt.close()


def with_accelerate(directory: str, **options: Any) -> None:
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    made, net = DataLoader(Samples(), BATCH_SIZE, shuffle=True), Net()
    adam = ShardedAdam(net.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(net, adam, made)
    ckpt = Checkpointer(accelerator, directory, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        record(ckpt.progress.step + 1, loss=loss, optimizers=adam, inputs=batch["inputs"])
        ckpt.step(loss=loss)
    ckpt.close()


def with_transformers(directory: str, **options: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    seen: dict[str, Any] = {}

    class Seeing(Trainer):
        def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            loss = super().training_step(model, inputs, *others, **named)
            seen.update(loss=loss.item(), inputs=inputs["inputs"].tolist())
            return loss

    class Recording(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **named: Any) -> None:
            record(
                state.global_step, loss=seen["loss"], optimizers=optimizer, inputs=seen["inputs"]
            )

    model = Net()
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)
    settings = TrainingArguments(
        output_dir=f"{directory}-output",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Seeing(
        model,
        settings,
        train_dataset=Samples(),
        optimizers=(optimizer, None),
        callbacks=[Recording()],
    )
    if options:
        trainer.add_callback(ResumeCallback(trainer, directory, **options))
    trainer.train()


def with_lightning(directory: str, **options: Any) -> None:
    import lightning

    from resumekit.adapters.lightning import ResumeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            record(
                self.global_step,
                loss=outputs["loss"],
                optimizers=optimizer.optimizer,
                inputs=batch["inputs"],
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return ShardedAdam(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "RANK" in os.environ else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumeCallback(directory, **options)] if options else [],
    )
    trainer.fit(Module(), DataLoader(Samples(), BATCH_SIZE, shuffle=True))


FRAMEWORKS = {
    "torch": with_torch,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
    "lightning": with_lightning,
}


def train(directory: str, *, framework: str = "torch", **options: Any) -> None:
    """Trains and saves every 3 steps.

    Args:
        directory: the run directory.
        framework: a key of ``FRAMEWORKS``.
        **options: of the adapter.
    """
    run(directory, framework=framework, save_every=3, **options)


def run(directory: str, *, framework: str, **options: Any) -> None:
    """Trains; under a framework with a callback of its own only where there are options."""
    torch.manual_seed(0)
    FRAMEWORKS[framework](directory, **options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    args = arguments("framework", "per-rank")
    names = {args.per_rank} - {""}
    if args.bare:
        run(args.directory, framework=args.framework)
    else:
        train(args.directory, framework=args.framework, strict=args.strict, per_rank=names)
