"""The remedies for a ``ckpt_path`` that is not of the run, followed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from followed_remedies import Remedy

pytest.importorskip("lightning")

from lightning.pytorch import Trainer
from lightning_workloads import NUM_SAMPLES, QUIET, Classifier, make_loader

from resumekit.adapters.lightning import ResumeCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]
END = 24


class Net(Classifier):
    """One that Lightning can make again from its checkpoint."""

    def __init__(self) -> None:
        super().__init__()


def fit(
    directory: Path | None,
    path: Any = None,
    *,
    epochs: int = 2,
    net: Any = None,
    import_from: str | None = None,
) -> Trainer:
    """A fit with a callback, or a stock one without a directory."""
    options: Any = {"save_every": 2, "import_from": import_from}
    callbacks: list[Any] = [] if directory is None else [ResumeCallback(directory, **options)]
    settings = {"enable_checkpointing": False, "max_epochs": epochs, **QUIET}
    trainer = Trainer(callbacks=callbacks, **settings)
    loader = make_loader(False, "shuffle", "0", NUM_SAMPLES)
    trainer.fit(net or Net(), loader, ckpt_path=path)
    return trainer


def stock(directory: Path) -> Path:
    """A checkpoint of a run of Lightning alone, after an epoch."""
    fit(None, epochs=1).save_checkpoint(directory / "own.ckpt")
    return directory / "own.ckpt"


@pytest.mark.remedy("Call {} alone: it resumes from the run directory, or starts the run there")
def test_a_run_is_resumed_without_a_path(tmp_path: Path, remedy: Remedy) -> None:
    fit(tmp_path / "run")
    text = remedy.of(fit, tmp_path / "run", stock(tmp_path))
    assert re.findall(r"Call trainer\.(\w+)\(\) alone", text) == ["fit"]
    assert fit(tmp_path / "run").global_step == END


@pytest.mark.remedy("Pass that directory to ResumeCallback: {}")
def test_the_step_of_another_run_is_resumed_in_its_directory(
    tmp_path: Path, remedy: Remedy
) -> None:
    fit(tmp_path / "other")
    step = tmp_path / "other" / "step-00000022"
    text = remedy.of(fit, tmp_path / "run", step)
    directory = ast.literal_eval(text.partition(": ")[2])
    assert fit(Path(directory), step).global_step == END


@pytest.mark.remedy(
    "Pass import_from={} to ResumeCallback to continue that run, or begin a new one from its "
    "weights alone: {}"
)
def test_a_run_of_lightning_is_continued_or_its_weights_begin_one(
    tmp_path: Path, remedy: Remedy
) -> None:
    path = stock(tmp_path)
    text = remedy.of(fit, tmp_path / "run", path)
    given = re.findall(r"import_from='(.+?)'", text)[0]
    assert fit(tmp_path / "imported", import_from=given).global_step == END
    load = getattr(Net, re.findall(r"(\w+)\(that path\)", text)[0])
    assert fit(tmp_path / "run", net=load(path)).global_step == END
