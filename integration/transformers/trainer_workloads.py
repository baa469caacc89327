"""Trainers of other models, data and classes than ``transformers_workloads``, as people build them.

Every model is a tiny one of random weights, made from its configuration; nothing is downloaded. The
last line of each run writes down what ``train()`` returned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from annealed import Annealed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GenerationConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.trainer_callback import ExportableState
from transformers_workloads import BATCH_SIZE, BLOCK_SIZE, NUM_BLOCKS, Blocks
from trl_workloads import GENERATING, GENERATING_ARGUMENTS, TRL, Rising, trl_classes, unpaired

from resumekit.adapters.transformers import ResumeCallback

VOCABULARY = 128
SPECIAL = ("[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]")
RESULT = "result.json"
_SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "max_position_embeddings": BLOCK_SIZE,
}
LARGE = 320  # frozen blocks of this width take up more than 4 MiB


def tokenizer() -> PreTrainedTokenizerFast:
    """Knows the special tokens, and numbers for the rest."""
    words = [*SPECIAL, *(str(number) for number in range(len(SPECIAL), VOCABULARY))]
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[0])
    whole = Tokenizer(model)
    whole.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=whole,
        unk_token="[UNK]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
    )


class Sentences(Dataset[dict[str, Any]]):
    """Tokens of different lengths; what they are labeled with is up to the kind of model."""

    def __init__(self, label: Callable[[torch.Tensor], Any] | None = None) -> None:
        self.tokens = Blocks(augment=False).tokens
        self.label = label

    def __len__(self) -> int:
        return NUM_BLOCKS

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        if self.label is None:
            return {"input_ids": tokens}
        return {"input_ids": tokens, "labels": self.label(tokens)}


NUM_VIRTUAL = 5


def causal(width: int = 16, more: int = 0) -> nn.Module:
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": BLOCK_SIZE + more}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    )


def with_frozen_blocks() -> nn.Module:
    """Of more than 4 MiB; only the last norm and the embeddings are trained."""
    model = causal(LARGE)
    model.transformer.h.requires_grad_(False)
    return model


def with_lora(width: int = 16) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    return get_peft_model(causal(width), LoraConfig(r=2, lora_dropout=0.1, **targets))


def with_prompts(kind: str) -> nn.Module:
    """With trained embeddings of virtual tokens; with "p" an encoder makes them."""
    import peft

    kinds: dict[str, Any] = {
        "prompt": peft.PromptTuningConfig,
        "prefix": peft.PrefixTuningConfig,
        "p": partial(peft.PromptEncoderConfig, encoder_hidden_size=8),
    }
    config = kinds[kind](task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL)
    return peft.get_peft_model(causal(more=NUM_VIRTUAL), config)


def bert(kind: type[nn.Module]) -> nn.Module:
    return kind(BertConfig(vocab_size=VOCABULARY, **_SIZES))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=1, **sizes)
    )


def judge() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": BLOCK_SIZE, "num_labels": 1}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    return GPT2ForSequenceClassification(GPT2Config(vocab_size=VOCABULARY, **special, **sizes))


def preferences() -> Any:
    """Pairs of answers, as a data set of ``datasets``."""
    from datasets import Dataset as Table

    def words(tokens: list[int]) -> str:
        return " ".join(str(max(token, len(SPECIAL))) for token in tokens)

    rows = Blocks(augment=False).tokens.tolist()
    parts = {"prompt": slice(0, 6), "chosen": slice(6, 10), "rejected": slice(10, 13)}
    return Table.from_dict(
        {name: [words(row[part]) for row in rows] for name, part in parts.items()}
    )


def table() -> Any:
    """The blocks as a data set of ``datasets``."""
    from datasets import Dataset as Table

    tokens = Blocks(augment=False).tokens.tolist()
    return Table.from_dict({"input_ids": tokens, "labels": tokens})


def stream() -> Any:
    """A stream of ``datasets`` that is shuffled again in each pass."""
    return table().to_iterable_dataset().shuffle(seed=1, buffer_size=20)


class Averaging(TrainerCallback):
    """Averaged weights as people write them: tensors in a dict, and a count that sets the decay."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.num_updates = 0
        self.slowest = 0.9

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.shadow = {name: weight.detach().clone() for name, weight in named}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates += 1
        decay = min(self.slowest, (1 + self.num_updates) / (10 + self.num_updates))
        for name, weight in kwargs["model"].named_parameters():
            self.shadow[name].lerp_(weight.detach(), 1 - decay)


class Norms(TrainerCallback):
    """Two of them look at other parameters; what each has summed up, and draws, is its own."""

    def __init__(self, ends_with: str) -> None:
        self.ends_with = ends_with
        self.sum = torch.zeros(())
        self.draws = torch.Generator().manual_seed(len(ends_with))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, weight in kwargs["model"].named_parameters():
            if name.endswith(self.ends_with):
                share = torch.rand((), generator=self.draws)
                self.sum += share * weight.detach().square().sum()


class Freezing(TrainerCallback):
    """Begins with the head alone, continues with all, and then freezes the embeddings."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, weight in kwargs["model"].named_parameters():
            weight.requires_grad = "ln_f" in name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, weight in kwargs["model"].named_parameters():
            if state.global_step == 5:
                weight.requires_grad = True
            elif state.global_step == 14:
                weight.requires_grad = "wte" not in name


class Tightening(TrainerCallback):
    """Clips gradients harder from one step on, and logs more seldom."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            args.max_grad_norm = 0.1
            state.logging_steps = 2


class Halving(TrainerCallback):
    """Halves a change of the weights from one step on; its attribute begins in its class."""

    factor = 1.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.factor = 0.5
        with torch.no_grad():
            next(kwargs["model"].parameters()).add_(1e-3 * self.factor)


class Marking(TrainerCallback):
    """Keeps its numbers where other callbacks find them."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for each in (args, state):
            each.mark = getattr(each, "mark", 0) + 1
        with torch.no_grad():
            next(kwargs["model"].parameters()).add_(args.mark * 1e-3 + state.mark * 1e-4)


class Preparing(TrainerCallback, ExportableState):
    """Sets up the training at its start, and changes it by a factor in each epoch.

    Every launch calls these events; what they do belongs to the run's first moments only.
    """

    def __init__(self) -> None:
        self.scale, self.num_epochs = 1.0, 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"scale": self.scale}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scale = 2.0
        with torch.no_grad():
            next(kwargs["model"].parameters()).mul_(1.5)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_epochs += 1
        args.max_grad_norm *= 0.5
        for group in kwargs["optimizer"].param_groups:
            group["weight_decay"] += 0.1 * self.num_epochs

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.scale *= 0.9
        with torch.no_grad():
            next(kwargs["model"].parameters()).add_(1e-3 * self.scale)


class Weighing(Trainer):
    """A user-defined class: a mean teacher, learned weights of two losses, recent losses.

    The teacher is averaged through ``.data``, and its fixed copy never changes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean_teacher = deepcopy(self.model).requires_grad_(False)
        self.first_teacher = deepcopy(self.mean_teacher)
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        self.recent = torch.zeros(4)
        self.num_seen = 0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        optimizer.add_param_group({"params": list(self.weights), "lr": 0.1})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.weights.zero_grad()
        (weights,) = self.weights
        found = model(**inputs)
        with torch.no_grad():
            wanted = self.mean_teacher(**inputs).logits - self.first_teacher(**inputs).logits
            self.recent = torch.cat([self.recent[1:], found.loss.detach()[None]])
            for mine, its in zip(self.mean_teacher.parameters(), model.parameters(), strict=True):
                mine.data.lerp_(its.data, 0.1)
        self.num_seen += 1
        losses = torch.stack([found.loss, (found.logits - wanted).square().mean()])
        seen = self.recent.mean() / self.num_seen
        return (losses * torch.exp(-weights) + weights).sum() * (1 + seen)


class Stance(TrainerCallback):
    """Calls a compiled model as it was written, up to a step or from that step on."""

    def __init__(self, *, switch_at: int, eager_first: bool) -> None:
        self.switch_at = switch_at
        self.eager_first = eager_first

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_eager = (state.global_step < self.switch_at) == self.eager_first
        torch.compiler.set_stance("force_eager" if is_eager else "default")


def make(kind: str) -> tuple[nn.Module, Any, Any, type[Trainer], type[TrainingArguments]]:
    """Model, data, collator, and the classes of the Trainer and its arguments."""
    usual = (Trainer, TrainingArguments)
    if kind == "masked":
        collator = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)
        return (bert(BertForMaskedLM), Sentences(), collator, *usual)
    if kind == "classified":
        labeled = Sentences(lambda tokens: int(tokens.sum()) % 2)
        return (bert(BertForSequenceClassification), labeled, None, *usual)
    if kind == "seq2seq":
        reversed_ = Sentences(lambda tokens: tokens.flip(0))
        return t5(), reversed_, None, Seq2SeqTrainer, Seq2SeqTrainingArguments
    if kind == "stream":
        return (causal(), stream(), None, *usual)
    if kind in TRL:
        data = table() if kind == "sft" else preferences()
        data = unpaired(data) if kind == "unpaired" else data
        # Of a few prompts; each is answered and used several times.
        data = data.select(range(24)) if kind in GENERATING else data
        model: Any = judge() if kind == "reward" else causal()
        return (model, data, None, *trl_classes(TRL[kind]))
    if kind == "weighed":
        return (causal(), Sentences(lambda tokens: tokens), None, Weighing, TrainingArguments)
    models = {
        "lora": with_lora,
        "large lora": lambda: with_lora(LARGE),
        "frozen blocks": with_frozen_blocks,
    }
    model = models.get(kind, causal)()
    if kind == "annealed":
        model.transformer.drop = Annealed(model.config.n_embd)
    return (model, Sentences(lambda tokens: tokens), None, *usual)


def train(
    directory: str,
    *,
    save_every: int,
    kind: str = "causal",
    accumulate: int = 1,
    batch_size: int = BATCH_SIZE,
    epochs: int = 2,
    max_steps: int = -1,
    callbacks: str = "",
    stop_after: int = 0,
    compiled: bool = False,
    switch_at: int = 0,
    seedable: bool = True,
    sampled: bool = False,
    scaled: bool = False,
    scheduler: str = "cosine",
    logging_steps: int = 1,
    allow: Any = None,
    async_save: bool = False,
    keep_latest: int | None = 2,
    **settings: Any,
) -> None:
    """Trains with dropout and AdamW; every step is logged, with its gradient norm."""
    set_seed(0)
    model, data, collator, trainer_class, arguments_class = make(kind)
    if sampled:  # an evaluation that draws random numbers
        settings["generation_config"] = GenerationConfig(
            do_sample=True, max_new_tokens=4, decoder_start_token_id=1
        )
    if kind in GENERATING:
        settings = {**GENERATING_ARGUMENTS, **settings}
    arguments = arguments_class(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        lr_scheduler_type=scheduler,
        warmup_steps=3,
        logging_steps=logging_steps,
        torch_compile=compiled or switch_at > 0,
        torch_compile_backend="eager" if compiled or switch_at else None,
        accelerator_config={"use_seedable_sampler": seedable},
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        **{"save_strategy": "no", **settings},
    )
    known: dict[str, list[Any]] = {
        "averaging": [Averaging()],
        "freezing": [Freezing()],
        "tightening": [Tightening()],
        "halving": [Halving()],
        "marking": [Marking()],
        "preparing": [Preparing()],
        "two of a class": [Norms("weight"), Norms("bias")],
    }
    others: list[Any] = known.get(callbacks, [])
    if switch_at:
        others.append(Stance(switch_at=switch_at, eager_first=not compiled))
    if stop_after:
        others.append(EarlyStoppingCallback(early_stopping_patience=stop_after))
    given: dict[str, Any] = {"processing_class": tokenizer()} if kind in TRL else {}
    if collator is not None:
        given["data_collator"] = collator
    if kind in GENERATING:
        given["reward_funcs"] = [Rising()]
    if kind in ("preferences", "unpaired"):
        given["ref_model"] = make(kind)[0]
    evaluated = data if kind == "seq2seq" else Sentences(lambda tokens: tokens)
    if scaled:
        optimizer = Adafactor(model.parameters(), warmup_init=True)
        given["optimizers"] = (optimizer, AdafactorSchedule(optimizer))
    trainer = trainer_class(
        model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated if "eval_strategy" in settings else None,
        callbacks=others,
        **given,
    )
    trainer.add_callback(
        ResumeCallback(
            trainer,
            Path(directory) / "run",
            save_every=save_every,
            strict=True,
            allow_changes=allow or (),
            async_save=async_save,
            keep_latest=keep_latest,
        )
    )
    result = trainer.train()
    returned = {"steps": result.global_step, "train_loss": result.training_loss.hex()}
    (Path(directory) / RESULT).write_text(json.dumps(returned), encoding="utf-8")
