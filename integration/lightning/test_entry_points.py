"""The entry points by which Lightning asks for callbacks: nothing without ``resumekit run``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from resumekit.adapters.lightning_callbacks import callbacks
from resumekit.attach import AttachSettings, attached_environment, current_attachment
from resumekit.launcher import VARIABLE
from resumekit.storage.store import Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")

SCRIPT = """
import torch
from lightning import pytorch as pl
{imports}

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = pl.Trainer(
    callbacks=[{callbacks}], max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False)
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 1)))
print("callbacks:", [type(each).__name__ for each in trainer.callbacks])
"""


def entry_points() -> dict[str, dict[str, str]]:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = content["project"]["entry-points"]
    return found


def installed(directory: Path) -> Path:
    """A folder in which the metadata of an installed resumekit is, with its entry points."""
    folder = directory / "installed" / "resumekit-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: resumekit\nVersion: 0.1.0\n")
    lines = [
        f"[{group}]\nresumekit = {each['resumekit']}" for group, each in entry_points().items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return folder.parent


def launch(environment: dict[str, str], *, imports: str = "", given: str = "") -> str:
    """What a script writes."""
    script = SCRIPT.format(imports=imports, callbacks=given)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def on_path(environment: Any, *folders: Path) -> dict[str, str]:
    paths = [*map(str, folders), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_each_package_of_lightning_finds_the_one_function() -> None:
    function = f"{callbacks.__module__}:{callbacks.__name__}"
    assert entry_points() == {group: {"resumekit": function} for group in GROUPS}


def test_without_the_variable_it_needs_the_standard_library_alone() -> None:
    script = (
        "import sys\n"
        "from resumekit.adapters.lightning_callbacks import callbacks\n"
        "assert callbacks() == []\n"
        "ours = {each for each in sys.modules if each.partition('.')[0] == 'resumekit'}\n"
        "print(sorted(ours), 'torch' in sys.modules)"
    )
    environment = {name: each for name, each in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == (
        "['resumekit', 'resumekit.adapters', 'resumekit.adapters.lightning_callbacks', "
        "'resumekit.version'] False"
    )


@pytest.mark.parametrize("content", [None, "", "{", "[]", "[3]"])
def test_whatever_the_variable_names_it_raises_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
) -> None:
    path = tmp_path / "activations.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    current_attachment.cache_clear()
    assert callbacks() == []
    current_attachment.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (content not in (None, "[]"))
    assert all(line.startswith("resumekit: nothing is attached (") for line in lines)


@pytest.mark.parametrize("where", ["installed", "launched", "both"])
def test_one_callback_is_attached_wherever_its_entry_point_is(tmp_path: Path, where: str) -> None:
    private = tmp_path / "launcher"
    settings = AttachSettings(str(tmp_path / "run"), 1)
    environment = attached_environment(on_path(os.environ, installed(tmp_path)), private, settings)
    if where == "installed":
        shutil.rmtree(private / "resumekit_attach-0.dist-info")
    elif where == "launched":
        shutil.rmtree(tmp_path / "installed")
    output = launch(environment)
    assert output.count("starting in") == 1
    assert output.count("_AttachedCallback") == 1
    assert "none is attached" not in output
    assert Store(tmp_path / "run").step_names()[0].step == 4
    assert "nothing to do" in launch(environment)


def test_nothing_is_attached_without_the_variable(tmp_path: Path) -> None:
    stock = {name: each for name, each in os.environ.items() if name != VARIABLE}
    assert "Callback" not in launch(on_path(stock, installed(tmp_path)))


def test_a_script_with_a_callback_of_its_own_gets_no_second_one(tmp_path: Path) -> None:
    private = tmp_path / "launcher"
    settings = AttachSettings(str(tmp_path / "run"), 1)
    environment = attached_environment(on_path(os.environ, installed(tmp_path)), private, settings)
    output = launch(
        environment,
        imports="from resumekit.adapters.lightning import ResumeCallback",
        given=f"ResumeCallback({json.dumps(str(tmp_path / 'own'))}, save_every=1)",
    )
    assert "callbacks: ['ResumeCallback']" in output
    assert output.count("none is attached") == 1
    assert not (tmp_path / "run").exists()
    assert Store(tmp_path / "own").step_names()[0].step == 4
