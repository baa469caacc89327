"""A GAN with a DeepSpeed engine for each network, as in DeepSpeedExamples' training/gan.

The script writes its losses and, at the end, a digest of its weights into files of its own: the
tests compare these, and ask the library nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed_workloads import start_ranks
from digits import Digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.deepspeed import Checkpointer

NUM_SAMPLES = 96
BATCH_SIZE = 8
NOISE = 8


def make_engine(model: nn.Module, *, stage: int, accumulate: int = 1, clip: float = 1.0) -> Any:
    """An engine with Adam and a schedule of its own."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:  # the biggest parameters are partitioned, the others are whole on every rank
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 200
    return deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        lr_scheduler=lambda optimizer: StepLR(optimizer, 5, gamma=0.9),
        config=config,
    )[0]


def train(
    directory: str,
    *,
    stage: int = 1,
    given: str = "DG",
    n_critic: int = 1,
    accumulate: tuple[int, int] = (1, 1),
    freeze: bool = True,
    through_engine: bool = False,
    mark: bool = False,
    strict: bool = True,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Trains both.

    Args:
        directory: the run directory.
        stage: of ZeRO, in both engines.
        given: the engines that the Checkpointer is given; fewer for a negative control.
        n_critic: the generator is trained in every n-th batch.
        accumulate: micro-batches in an optimizer step of the discriminator and the generator.
        freeze: keep the generator's backward pass out of the discriminator's gradients.
        through_engine: call the engines, and two backward passes for each step, instead of the
            modules and one.
        mark: call ``step()`` after every batch.
        strict: of the Checkpointer.
        epochs: of the run.
        save_every: of the Checkpointer.
    """
    start_ranks()
    torch.manual_seed(0)
    net_d = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    net_g = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
    engine_d = make_engine(net_d, stage=stage, accumulate=accumulate[0])
    engine_g = make_engine(net_g, stage=stage, accumulate=accumulate[1], clip=0.5)
    data = Digits(NUM_SAMPLES, augment=False)
    if get_world_size() > 1:
        loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    else:
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    torch.manual_seed(get_rank() + 1)  # ranks draw different noise

    engines = {name: each for name, each in (("D", engine_d), ("G", engine_g)) if name in given}
    extras = {"batches": 0}
    checkpointer = Checkpointer(
        engines, directory, extras=extras, save_every=save_every, strict=strict
    )
    written = Path(directory).parent
    launch = len(list(written.glob(f"losses-*-rank-{get_rank()}.txt")))
    real, fake = torch.ones(BATCH_SIZE, 1), torch.zeros(BATCH_SIZE, 1)
    call_d, call_g = (engine_d, engine_g) if through_engine else (net_d, net_g)
    with checkpointer, (written / f"losses-{launch}-rank-{get_rank()}.txt").open("w") as losses:
        for images, _ in checkpointer.batches(loader, epochs=epochs):
            extras["batches"] += 1
            net_d.zero_grad()
            noise = torch.randn(BATCH_SIZE, NOISE)
            images_g = call_g(noise)
            loss_d = binary_cross_entropy_with_logits(call_d(images), real)
            if through_engine:
                engine_d.backward(loss_d)
            loss_fake = binary_cross_entropy_with_logits(call_d(images_g.detach()), fake)
            loss_d = loss_fake if through_engine else loss_d + loss_fake
            engine_d.backward(loss_d)
            engine_d.step()
            print(images.sum().item(), loss_d.item(), end=" ", file=losses)
            if extras["batches"] % n_critic == 0:
                net_d.requires_grad_(not freeze)
                loss_g = binary_cross_entropy_with_logits(call_d(images_g), real)
                engine_g.backward(loss_g)
                engine_g.step()
                net_d.requires_grad_(True)
                print(loss_g.item(), end="", file=losses)
            print(file=losses, flush=True)
            if mark:
                checkpointer.step()
    digests = {name: digest(each) for name, each in (("D", net_d), ("G", net_g))}
    (written / f"weights-rank-{get_rank()}.txt").write_text(str(digests))
    destroy_process_group()


def digest(model: nn.Module) -> str:
    """Of the weights and this rank's buffers. Collective at ZeRO 3."""
    found = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, tensor in sorted(model.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
