"""Scripts without a line of resumekit: how users launch and resume them, and what is lost then.

Those of ``CASES`` are in ``integration/user_scripts/official``, written after official examples of
their frameworks; those of ``EXAMPLE_CASES`` are the programs of ``examples``, each with a twin.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OFFICIAL = ROOT / "integration" / "user_scripts" / "official"
EXAMPLES = ROOT / "examples"

# A framework as the README names it, and the distribution that has its version.
PACKAGES = {
    "PyTorch": "torch",
    "Accelerate": "accelerate",
    "Trainer": "transformers",
    "Lightning": "lightning",
    "DeepSpeed": "deepspeed",
}


@dataclass(frozen=True)
class Loss:
    """What a resume has lost, in the words of ``prove``.

    Args:
        first: the component that differs first, the likely cause.
        step: where it does.
        also: every other component that differs in that step or later.
    """

    first: str
    step: int
    also: frozenset[str] = frozenset()

    def __str__(self) -> str:
        also = f"; also {', '.join(sorted(self.also))}" if self.also else ""
        return f"DIVERGED at step {self.step}: {self.first}{also}"


@dataclass(frozen=True)
class Case:
    """One script, killed once inside an epoch.

    Args:
        framework: a key of ``PACKAGES``.
        script: the name of its file.
        options: of its command line; ``{dir}`` is the directory of the run.
        relaunch: further options of the launch after the kill; ``{latest}`` is the newest
            checkpoint of the script.
        world: ranks that torchrun starts.
        num_ranks: all ranks, also where the script starts them itself.
        kill: the step after which it is killed.
        resumed: the step of the checkpoint that is resumed.
        num_steps: of the whole run.
        loss: what the resume loses; None where it is EXACT.
        folder: where the script is.
    """

    framework: str
    script: str
    options: tuple[str, ...]
    relaunch: tuple[str, ...] = ()
    world: int = 1
    num_ranks: int = 1
    kill: int = 13
    resumed: int = 10
    num_steps: int = 24
    loss: Loss | None = None
    folder: Path = OFFICIAL

    def __str__(self) -> str:
        variant = "-epoch" if "epoch" in self.options else ""
        return f"{self.script.removesuffix('.py')}{variant}-{self.num_ranks}"

    def command(self) -> list[str]:
        """The first launch."""
        return [sys.executable, str(self.folder / self.script), *self.options]

    def relaunch_command(self) -> list[str]:
        """The launch after the kill; empty where it is the first one again."""
        return [*self.command(), *self.relaunch] if self.relaunch else []


# The batch is wrong, and with it everything that follows from it.
_FOLLOWS = frozenset({"rng", "parameters", "optimizer", "loss"})


def _other_batch(*also: str, step: int = 11) -> Loss:
    return Loss("data", step, _FOLLOWS | {*also})


def _torch(script: str, *options: str, **fields: Any) -> Case:
    return Case("PyTorch", script, options, **fields)


def _accelerate(script: str, *options: str, **fields: Any) -> Case:
    return Case("Accelerate", script, options, **fields)


def _nlp(checkpointing_steps: str, *options: str, **fields: Any) -> Case:
    return _accelerate(
        "accelerate_complete_nlp.py",
        *("--output_dir", "{dir}", "--checkpointing_steps", checkpointing_steps, *options),
        relaunch=("--resume_from_checkpoint", "{latest}"),
        **fields,
    )


def _trainer(script: str, *options: str, batch_size: int = 8, **fields: Any) -> Case:
    """A script whose options are those of TrainingArguments."""
    settings = {
        "output_dir": "{dir}",
        "use_cpu": "true",
        "report_to": "none",
        "disable_tqdm": "true",
        "num_train_epochs": "3",
        "per_device_train_batch_size": str(batch_size),
        "learning_rate": "1e-3",
        "save_steps": "5",
        "logging_steps": "1",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    resume = ("--resume_from_checkpoint", "{latest}")
    return Case("Trainer", script, (*words, *options), resume, **fields)


def _lightning(script: str, *options: str, **fields: Any) -> Case:
    return Case("Lightning", script, ("--default_root_dir", "{dir}", *options), **fields)


_EVALUATION = ("--eval_strategy", "steps", "--eval_steps", "5")

CASES = (
    _torch(
        "torch_imagenet.py",
        *("--output", "{dir}"),
        relaunch=("--resume", "{dir}/checkpoint.pth.tar"),
        resumed=12,
        loss=_other_batch("buffers", step=13),
    ),
    _torch(
        "torch_word_language_model.py",
        *("--save", "{dir}/model.pt"),
        resumed=7,
        num_steps=28,
        # The hidden state is an input of the model, so a later batch differs, too.
        loss=Loss("rng", 8, frozenset({"parameters", "loss", "data"})),
    ),
    _torch(
        "torch_ddp_snapshot.py",
        *("--snapshot_path", "{dir}/snapshot.pt"),
        world=2,
        num_ranks=2,
        resumed=12,
        num_steps=20,
        # Nothing that is trained depends on it: there is no dropout, and the sampler has a seed.
        loss=Loss("rng", 13),
    ),
    _nlp("5", loss=_other_batch()),
    _nlp("epoch", resumed=8),
    _nlp("5", "--batch_size", "4", world=2, num_ranks=2, loss=_other_batch()),
    _accelerate("accelerate_accumulation.py", "--project_dir", "{dir}", resumed=12, num_steps=20),
    Case(
        "Trainer",
        "trainer_classification.py",
        ("--output_dir", "{dir}"),
        num_steps=20,
        loss=Loss("modules/AveragedModel", 11),
    ),
    _trainer("trainer_language_modeling.py", "--lr_scheduler_type", "cosine", num_steps=21),
    _trainer("trainer_masked_language_modeling.py", loss=_other_batch()),
    _trainer(
        "trainer_masked_language_modeling.py",
        batch_size=4,
        world=2,
        num_ranks=2,
        loss=_other_batch(),
    ),
    _trainer("trainer_summarization.py", "--predict_with_generate", *_EVALUATION),
    _trainer(
        "trainer_image_classification.py",
        *("--remove_unused_columns", "false"),
        # transformers 5.23 saves the layers of a ViT under names that its Trainer does not load.
        loss=Loss("parameters", 11, frozenset({"data", "rng", "optimizer", "loss"})),
    ),
    _trainer(
        "trainer_token_classification.py",
        *("--gradient_accumulation_steps", "2", "--load_best_model_at_end"),
        *("--metric_for_best_model", "accuracy", *_EVALUATION),
    ),
    Case(
        "Lightning",
        "lightning_digits.py",
        ("--output_dir", "{dir}"),
        num_steps=20,
        loss=_other_batch(),
    ),
    _lightning(
        "lightning_autoencoder.py", relaunch=("--ckpt_path", "{latest}"), loss=_other_batch()
    ),
    _lightning(
        "lightning_autoencoder.py",
        *("--devices", "2"),
        relaunch=("--ckpt_path", "{latest}"),
        num_ranks=2,
        loss=_other_batch(),
    ),
    _lightning(
        "lightning_gan.py",
        kill=27,
        resumed=20,
        num_steps=48,
        loss=_other_batch("buffers", "optimizer/1", step=21),
    ),
    _lightning("lightning_averaging.py", loss=_other_batch("buffers", "modules/AveragedModel")),
    _lightning(
        "lightning_averaging.py",
        *("--devices", "2"),
        world=2,
        num_ranks=2,
        loss=_other_batch("buffers", "modules/AveragedModel"),
    ),
    Case(
        "DeepSpeed",
        "deepspeed_cifar.py",
        ("--save_dir", "{dir}"),
        world=2,
        num_ranks=2,
        loss=Loss("rng", 11, _FOLLOWS - {"rng"}),
    ),
)


@dataclass(frozen=True)
class ExampleCase:
    """A program of ``examples``, and its twin in ``examples/stock`` with the framework's resume.

    Args:
        framework: as the table names it.
        name: of both files, without ``.py``.
        kill: the step after which the twin is killed.
        loss: what the resume of the twin loses.
        small: options of a launch of a few steps.
        small_kill: the step after which that one is killed.
        small_resumed: the step that it resumes from.
        world: ranks.
    """

    framework: str
    name: str
    kill: int
    loss: Loss
    small: tuple[str, ...]
    small_kill: int
    small_resumed: int
    world: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def stock(self) -> Case:
        """The twin."""
        return Case(
            self.framework,
            f"stock/{self.name}.py",
            ("--dir", "{dir}"),
            world=self.world,
            num_ranks=self.world,
            kill=self.kill,
            loss=self.loss,
            folder=EXAMPLES,
        )

    def command(self) -> list[str]:
        """How the example is launched."""
        return [sys.executable, str(EXAMPLES / f"{self.name}.py"), "--dir", "{dir}"]

    def changed_lines(self) -> str:
        """The lines that only the example has, and those that only its twin has."""
        stock, example = (_code(EXAMPLES / folder / f"{self.name}.py") for folder in ("stock", ""))
        counts = Counter(line[0] for line in difflib.ndiff(stock, example))
        return f"+{counts['+']} -{counts['-']}"


def _code(path: Path) -> list[str]:
    """The lines of a script behind its docstring, without the empty ones."""
    text = path.read_text(encoding="utf-8")
    end = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[end:] if line.strip()]


EXAMPLE_CASES = (
    ExampleCase(
        "Trainer, PEFT",
        "llm_lora",
        kill=45,
        loss=Loss("data", 41, frozenset({"rng", "parameters", "optimizer", "loss", "loss 2"})),
        small=("--epochs", "1"),
        small_kill=22,
        small_resumed=20,
    ),
    ExampleCase(
        "PyTorch",
        "image_classifier",
        kill=80,
        loss=_other_batch("buffers", "modules/AveragedModel", step=73),
        small=("--epochs", "1"),
        small_kill=22,
        small_resumed=20,
    ),
    ExampleCase(
        "Lightning",
        "gan",
        kill=80,
        loss=_other_batch("buffers", "optimizer/1", step=61),
        small=("--epochs", "1"),
        small_kill=25,
        small_resumed=20,
    ),
    ExampleCase(
        "PyTorch",
        "dqn",
        kill=450,
        loss=_other_batch("modules/Sequential", step=376),
        small=("--steps", "1000"),
        small_kill=110,
        small_resumed=100,
    ),
    ExampleCase(
        "PyTorch, FSDP2",
        "fsdp2_pretrain",
        kill=45,
        loss=Loss("rng", 41, frozenset({"parameters", "optimizer", "loss", "loss 2"})),
        small=("--windows", "480", "--epochs", "1"),
        small_kill=12,
        small_resumed=10,
        world=2,
    ),
)


def summary(framework: str) -> str:
    """What differs first after the resume in how many of a framework's cases, for the README."""
    losses = [case.loss for case in CASES if case.framework == framework]
    counts = Counter("" if loss is None else loss.first for loss in losses)
    parts = [f"`{first}` in {count}" for first, count in counts.most_common() if first]
    parts += [f"EXACT in {counts['']}"] if counts[""] else []
    return f"{'1 run' if len(losses) == 1 else f'{len(losses)} runs'}: {', '.join(parts)}"
