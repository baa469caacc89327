"""Trainers with state in attributes of their own: ``--case`` selects one.

``softmax``: a loss module that refers to the model and has a trained head; ``heads``: a dict of
trained modules; ``callback``: a schedule object in a callback; ``queue``: a tensor above 1 MiB of
which only the order changes. ``--optimizer sgd`` has no moments.
"""

from __future__ import annotations

from typing import Any

import torch
from judged_script import arguments, record
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from resumekit.adapters.transformers import ResumeCallback

WIDTH, NUM_LABELS, NUM_SAMPLES, BATCH_SIZE = 8, 3, 56, 8
SEEN: dict[str, Any] = {}  # of the step under way, for the record


class Encoder(nn.Module):
    """Gives an embedding of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.EmbeddingBag(20, WIDTH)
        self.scale = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.tokens(tokens)) * self.scale


class PairLoss(nn.Module):
    """Classifies a pair of texts by their embeddings, with a head of its own."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model
        self.classifier = nn.Linear(3 * WIDTH, NUM_LABELS)

    def forward(self, first: torch.Tensor, second: torch.Tensor, labels: Any) -> torch.Tensor:
        u, v = self.model(first), self.model(second)
        outputs = self.classifier(torch.cat([u, v, (u - v).abs()], dim=1))
        return nn.functional.cross_entropy(outputs, labels)


class Anneal:
    def __init__(self) -> None:
        self.value = 1.0
        self.num_steps = 0

    def step(self) -> float:
        self.num_steps += 1
        self.value = 0.9 * self.value + 0.02 * self.num_steps
        return self.value


class Annealing(TrainerCallback):
    """Scales the embeddings by an object of its own."""

    def __init__(self) -> None:
        self.anneal = Anneal()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].scale = self.anneal.step()


class PairTrainer(Trainer):
    def __init__(self, model: Encoder, *args: Any, case: str, kind: str, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.case = case
        self.kind = kind
        self.others: list[nn.Parameter] = []
        if case == "heads":
            self.heads = {"u": nn.Linear(WIDTH, NUM_LABELS), "v": nn.Linear(WIDTH, NUM_LABELS)}
            self.others = [p for head in self.heads.values() for p in head.parameters()]
        else:
            self.loss = PairLoss(model)
            self.others = [*self.loss.classifier.parameters()]
        if case == "queue":
            self.queue = torch.randn(9000, 32)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if self.kind == "sgd" else torch.optim.AdamW
        self.optimizer = kind([*self.model.parameters(), *self.others], lr=5e-2)
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:
        first, second, labels = inputs["first"], inputs["second"], inputs["labels"]
        if self.case == "heads":
            outputs = self.heads["u"](model(first)) + self.heads["v"](model(second))
            loss = nn.functional.cross_entropy(outputs, labels)
        else:
            loss = self.loss(first, second, labels)
        if self.case == "queue":
            loss = loss * (1 + 0.1 * self.queue[0].mean().abs())
            self.queue = self.queue.roll(-1, 0)
        return loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        SEEN.update(trainer=self, loss=loss.item(), labels=inputs["labels"].tolist())
        return loss


class Recording(TrainerCallback):
    """Writes the record of each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = SEEN["trainer"]
        attributes = {"scale": trainer.model.scale}
        if trainer.case == "queue":
            attributes["queue"] = trainer.queue
        record(
            state.global_step,
            loss=SEEN["loss"],
            optimizers=trainer.optimizer,
            inputs=SEEN["labels"],
            state={**attributes, "others": trainer.others},
        )


def make_pairs() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 20, (NUM_SAMPLES, 2, 5), generator=generator)
    labels = tokens.sum((1, 2)) % NUM_LABELS
    return [
        {"first": pair[0], "second": pair[1], "labels": label}
        for pair, label in zip(tokens, labels, strict=True)
    ]


def main() -> None:
    args = arguments("case", "optimizer")
    set_seed(0)
    callbacks = [Annealing()] if args.case == "callback" else []
    trainer = PairTrainer(
        Encoder(),
        TrainingArguments(
            output_dir=f"{args.directory}-output",
            num_train_epochs=2,
            per_device_train_batch_size=BATCH_SIZE,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=make_pairs(),
        callbacks=[*callbacks, Recording()],
        case=args.case,
        kind=args.optimizer,
    )
    trainer.add_callback(ResumeCallback(trainer, args.directory, save_every=3, strict=args.strict))
    trainer.train()


if __name__ == "__main__":
    main()
