"""The remedies that the commands print, followed on their command lines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from resumekit import Checkpointer
from resumekit.adapters.torch import Checkpointer as TorchCheckpointer
from resumekit.attach.trainings import KnownRuns, Training
from resumekit.cli import main
from resumekit.launcher import VARIABLE
from resumekit.prove import prove
from resumekit.prove.attaching import steps_to_interrupt
from resumekit.replay import replay
from resumekit.state import StateComponent
from resumekit.storage.directories import TRAININGS

if TYPE_CHECKING:
    from followed_remedies import Remedy

TINY = Path(__file__).parents[1] / "prove" / "scripts" / "tiny_job.py"

SCRIPT = """
import torch
from resumekit.adapters.torch import Checkpointer
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.ones(6, 1))
with Checkpointer("runs/a", model=model, optimizer=optimizer, save_every=2) as checkpointer:
    for batch in checkpointer.batches(loader, epochs=1):
        model(batch).sum().backward()
        optimizer.step()
        checkpointer.step()
"""

Command = Callable[..., str]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line; gives what it prints where it fails, else nothing."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        printed = capfd.readouterr()
        return "" if not ended.value.code else f"{printed.out} {printed.err}"

    return run


def flags_in(remedy: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", remedy)


def tiny(*options: str, pause: str = "0.02") -> list[str]:
    given = [str(each) for each in (TINY, "{dir}", "--pause-seconds", pause, *options)]
    return ["--", sys.executable, *given]


def saved(directory: Path, *keys: str, scale: float = 1.0) -> None:
    """A run with models of these keys."""
    torch.manual_seed(0)
    models = {key: nn.Linear(2, 2) for key in keys}
    with torch.no_grad():
        for model in models.values():
            model.weight.fill_(scale)
    components = [StateComponent(key, model) for key, model in models.items()]
    with Checkpointer(directory, components=components) as checkpointer:
        checkpointer.resume()
        checkpointer.save()


# ---------------------------------------------------------------- export and fork


@pytest.mark.remedy("Remove it first")
def test_a_file_in_the_way_is_removed(tmp_path: Path, remedy: Remedy, command: Command) -> None:
    saved(tmp_path / "run", "model")
    words = ("export", tmp_path / "run", tmp_path / "file")
    (tmp_path / "file").touch()
    remedy.in_text(command(*words))
    (tmp_path / "file").unlink()
    assert not command(*words)


@pytest.mark.remedy("Export it as safetensors")
def test_what_is_no_pretrained_model_is_exported_as_safetensors(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    saved(tmp_path / "run", "model")
    words = ("export", tmp_path / "run", tmp_path / "out", "--to")
    assert "safetensors" in remedy.in_text(command(*words, "pretrained"))
    assert not command(*words, "safetensors")


@pytest.mark.remedy("Pass --component with one of them")
def test_one_of_several_models_is_named(tmp_path: Path, remedy: Remedy, command: Command) -> None:
    saved(tmp_path / "run", "model/a", "model/b")
    words = ("export", tmp_path / "run", tmp_path / "file")
    text = command(*words)
    names = re.findall(r"it has ([^)]*)\)", text)[0].split(", ")
    (flag,) = flags_in(remedy.in_text(text))
    assert names == ["model/a", "model/b"]
    assert not command(*words, flag, names[0])


@pytest.mark.remedy("Export it as bf16 or fp32")
def test_large_values_are_exported_in_another_type(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    saved(tmp_path / "run", "model", scale=1e30)
    text = remedy.in_text(command("export", tmp_path / "run", tmp_path / "a", "--dtype", "fp16"))
    for dtype in re.findall(r"\w+\d\d", text):
        assert not command("export", tmp_path / "run", tmp_path / dtype, "--dtype", dtype)


@pytest.mark.remedy("Export it with --stage {}")
@pytest.mark.parametrize("what", ["an unused parameter", "frozen parameters and buffers"])
def test_what_a_stage_of_zero_cannot_have_is_exported_for_another(
    tmp_path: Path, remedy: Remedy, command: Command, what: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    is_frozen = what.startswith("frozen")
    model[1].requires_grad_(not is_frozen)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    model[0](torch.ones(2, 2)).sum().backward()
    optimizer.step()
    run = tmp_path / "run"
    with TorchCheckpointer(run, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    words = ("export", run, tmp_path / "out", "--to", "deepspeed", "--stage")
    followed = re.findall(r"--stage (\d)", remedy.in_text(command(*words, 3)))
    assert followed == ["2" if is_frozen else "0"]
    assert not command(*words, *followed)


@pytest.mark.remedy("Choose another one, or remove it first")
def test_a_directory_in_the_way_of_a_fork(tmp_path: Path, remedy: Remedy, command: Command) -> None:
    saved(tmp_path / "run", "model")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").touch()
    remedy.in_text(command("fork", tmp_path / "run", tmp_path / "new"))
    assert not command("fork", tmp_path / "run", tmp_path / "other")
    shutil.rmtree(tmp_path / "new")
    assert not command("fork", tmp_path / "run", tmp_path / "new")


# ---------------------------------------------------------------- prove


@pytest.mark.remedy("Put it behind --, as in: resumekit prove -- python train.py")
def test_a_command_is_behind_the_dashes(remedy: Remedy) -> None:
    text = remedy.of(prove, [])
    words = shlex.split(text.partition("resumekit ")[2])
    assert words[: words.index("--")] == ["prove"]
    with pytest.raises(SystemExit):
        main([*words[:1], "--help", *words[1:]])


@pytest.mark.remedy("A run that nobody kills shows nothing about a resume")
def test_a_proof_has_kills(remedy: Remedy, command: Command) -> None:
    remedy.of(prove, ["anything"], kills=0)
    assert not command("prove", "--kills", 1, *tiny())


@pytest.mark.remedy("Train longer, or ask for fewer kills")
def test_a_short_training_is_killed_less_often(remedy: Remedy, command: Command) -> None:
    remedy.in_text(command("prove", "--kills", 3, *tiny("--steps", "3", "--save-every", "1")))
    assert not command("prove", "--kills", 1, *tiny("--steps", "3", "--save-every", "1"))
    assert not command("prove", "--kills", 3, *tiny("--steps", "12"))


# A training whose trace is written at each save alone.
BUFFERED = """
import os, runpy
lines, write = [], os.write
def buffer(file, line):
    lines.append(line)
    if b'"checkpoint"' in line or b'"end"' in line:
        write(file, b"".join(lines))
        lines.clear()
os.write = buffer
runpy.run_path({script!r})
os._exit(0)
"""


@pytest.mark.remedy("Train longer")
def test_a_training_that_ends_before_a_kill_trains_longer(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    script = tmp_path / "job.py"
    script.write_text(BUFFERED.format(script=str(TINY)))
    kill = ("--kills", 1, "--seed", 0)  # in the last steps of 12, and between two saves of 60
    words = ("prove", *kill, "--", sys.executable, script, "{dir}", "--save-every", "9", "--steps")
    remedy.in_text(command(*words, 12))
    assert not command(*words, 60)


@pytest.mark.remedy("Save more often")
def test_a_training_without_saves_saves_more_often(remedy: Remedy, command: Command) -> None:
    remedy.in_text(command("prove", "--kills", 1, *tiny("--save-every", "100")))
    assert not command("prove", "--kills", 1, *tiny("--save-every", "3"))


@pytest.mark.remedy("Kill it at checkpoint:{} or later, or save more often")
def test_a_kill_comes_after_the_first_save(remedy: Remedy, command: Command) -> None:
    text = remedy.in_text(command("prove", "--at", "step:2", *tiny(pause="0")))
    point = re.findall(r"checkpoint:\d+", text)[0]
    assert not command("prove", "--at", point, *tiny(pause="0"))
    assert not command("prove", "--at", "step:2", *tiny("--save-every", "1", pause="0"))


@pytest.mark.remedy("Give it more time (--timeout), or make the training shorter")
def test_a_slow_training_has_more_time(remedy: Remedy, command: Command) -> None:
    slow = tiny("--steps", "12", pause="0.1")
    text = command("prove", "--kills", 1, "--timeout", "0.5", *slow)
    (flag,) = flags_in(remedy.in_text(text))
    assert not command("prove", "--kills", 1, flag, 60, *slow)


@pytest.mark.remedy("Add --with-resumekit")
def test_a_cadence_is_that_of_an_attached_callback(remedy: Remedy, command: Command) -> None:
    words = ("--save-every", 2, *tiny())
    (flag,) = flags_in(remedy.in_text(command("prove", *words)))
    assert "without with_resumekit" not in command("prove", flag, *words)


@pytest.mark.remedy("Leave --relaunch out")
def test_an_attached_command_is_relaunched_as_it_is(remedy: Remedy, command: Command) -> None:
    words = ["prove", "--with-resumekit", "--relaunch", "python x.py", *tiny()]
    (flag,) = flags_in(remedy.in_text(command(*words)))
    at = words.index(flag)
    assert "relaunch" not in command(*words[:at], *words[at + 2 :])


@pytest.mark.full  # three imports of torch
@pytest.mark.remedy("Leave --with-resumekit out: what is in the script is proven")
def test_a_script_with_resumekit_is_proven_as_it_is(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    script = tmp_path / "train.py"
    slow = SCRIPT.replace('"runs/a"', "sys.argv[1]").replace("step()\n", "step(); sleep(0.2)\n")
    seeded = slow.replace("model =", "torch.manual_seed(0)\nmodel =", 1)
    script.write_text(f"import sys\nfrom time import sleep\n{seeded}")
    words = ["prove", "--with-resumekit", "--kills", 1, "--", sys.executable, script, "{dir}"]
    words.remove(flags_in(remedy.in_text(command(*words)))[0])
    assert not command(*words)


LOOP = """
import sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = torch.utils.data.DataLoader(torch.rand(6, 1), shuffle=True)
def train_on(batch):
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    time.sleep(0.05)
    return loss
"""


@pytest.mark.full  # four imports of torch
@pytest.mark.remedy(
    "Add the two lines of docs/start/pytorch.md to the loop, and leave --with-resumekit out"
)
def test_a_loop_gets_the_lines_of_the_quickstart(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{LOOP}for batch in 3 * [*loader]:\n    train_on(batch)\n")
    words = ["prove", "--with-resumekit", "--kills", 1, "--", sys.executable, script, "{dir}"]
    text = remedy.in_text(command(*words))
    page = Path(__file__).parents[2] / re.findall(r"docs/\S+", text)[0]
    lines = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    lines = lines.replace('"runs/a"', "sys.argv[1]").replace("save_every=500", "save_every=4")
    script.write_text(f"{LOOP}{lines}")
    words.remove(flags_in(text)[0])
    assert not command(*words)


@pytest.mark.remedy("Leave --world out if the command starts its ranks itself")
def test_a_command_that_is_no_script_starts_its_ranks(remedy: Remedy, command: Command) -> None:
    shell = ["sh", "-c", shlex.join(tiny()[1:]) + " 2>&1"]
    words = ["prove", "--kills", 1, "--world", 2, "--", *shell]
    at = words.index(flags_in(remedy.in_text(command(*words)))[0])
    assert not command(*words[:at], *words[at + 2 :])


@pytest.mark.remedy("Call resumekit.trace(step, loss=loss, ...) in each step")
def test_steps_that_nobody_sees_are_traced(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    words = ("prove", "--kills", 1, "--", sys.executable, script, "{dir}")
    call = re.findall(r"resumekit\.trace\([^)]*\)", remedy.in_text(command(*words)))[0]
    lines = ("loss = 0.5", call.replace(", ...", ""), "time.sleep(0.1)")
    script.write_text("\n    ".join(("import time, resumekit\nfor step in range(9):", *lines)))
    assert "steps to compare" not in command(*words)


@pytest.mark.remedy("Put {dir} into the command where the script writes to")
def test_a_large_directory_is_not_copied(
    tmp_path: Path, remedy: Remedy, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resumekit.prove.workspaces._LARGEST_MEGABYTES", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_bytes(bytes(1000))
    words = ["prove", "--kills", 1, *tiny()]
    at = words.index("{dir}")
    text = command(*words[:at], "run", *words[at + 1 :])
    assert remedy.in_text(text)
    assert not command(*words[:at], re.findall(r"\{\w+\}", text)[0], *words[at + 1 :])


@pytest.mark.remedy("Save more often, train longer, or ask for fewer kills")
def test_kills_fall_behind_the_first_save_of_an_attached_callback(remedy: Remedy) -> None:
    steps = range(1, 13)
    remedy.of(steps_to_interrupt, steps, 5, 8, "job")
    for more, every, num_kills in ((0, 4, 8), (1, 5, 8), (0, 5, 7)):
        assert steps_to_interrupt(range(1, 13 + more), every, num_kills, "job")


# ---------------------------------------------------------------- run


@pytest.mark.remedy("Remove it: then trainings continue the runs in their order")
def test_a_damaged_list_of_trainings_is_removed(tmp_path: Path, remedy: Remedy) -> None:
    training = Training("model", "data", {}, {})
    first = KnownRuns(tmp_path).begin(training)
    (tmp_path / TRAININGS).write_text("{}")
    remedy.of(KnownRuns, tmp_path)
    (tmp_path / TRAININGS).unlink()
    assert KnownRuns(tmp_path).begin(training) == first


@pytest.mark.remedy(
    "Leave one out; resumekit prove --with-resumekit attaches as resumekit run does"
)
def test_a_command_is_not_in_two_launchers(
    remedy: Remedy, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("run", "--dir", tmp_path, "--", sys.executable, "-c", "pass")
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "list")
        remedy.in_text(command(*words))
    assert not command(*words)


@pytest.mark.remedy("Remove {}, or add a ResumeCallback to the script")
def test_an_option_of_python_is_removed(tmp_path: Path, remedy: Remedy, command: Command) -> None:
    words = ["run", "--dir", tmp_path, "--", sys.executable, "-I", "-c", "pass"]
    option = re.findall(r"Remove (\S+),", remedy.in_text(command(*words)))[0]
    words.remove(option)
    assert not command(*words)


@pytest.mark.remedy("Leave {} out")
def test_an_option_of_python_is_left_out_of_a_proof(
    tmp_path: Path, remedy: Remedy, command: Command
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    words = ["prove", "--", sys.executable, "-I", script, "{dir}"]
    option = re.findall(r"Leave (\S+) out", remedy.in_text(command(*words)))[0]
    words.remove(option)
    assert "ignores PYTHONPATH" not in command(*words)


@pytest.mark.remedy("Pass --max-restarts 0; let torchrun --max-restarts or the scheduler restart")
def test_several_nodes_are_restarted_by_the_scheduler(
    remedy: Remedy, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    words = ["run", "--dir", tmp_path, "--", sys.executable, "-c", "pass"]
    given = remedy.in_text(command(*words)).removeprefix("Pass ").partition(";")[0].split()
    assert not command(*words[:3], *given, *words[3:])


# ---------------------------------------------------------------- replay


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> list[object]:
    """The words of a replay, in a directory with a finished run."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert not os.spawnl(os.P_WAIT, sys.executable, sys.executable, "train.py")
    return ["replay", "runs/a", "--from", 4, "--", sys.executable, "train.py"]


@pytest.mark.remedy("Pass --allow-writes, in a copy of this directory if its files matter")
def test_a_replay_without_an_overlay_may_write(
    trained: list[object], remedy: Remedy, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resumekit.replay.running.Isolation.obstacle", lambda self: "no overlay")
    (flag,) = flags_in(remedy.in_text(command(*trained)))
    assert not command(*trained[:4], flag, *trained[4:])


@pytest.mark.remedy(
    "Give the directory of its Checkpointer, and the arguments that the run was started with"
)
def test_a_replay_has_the_directory_and_the_arguments_of_the_run(
    trained: list[object], remedy: Remedy, command: Command
) -> None:
    shutil.copytree("runs/a", "runs/b")
    remedy.in_text(command(trained[0], "runs/b", *trained[2:]))
    remedy.in_text(command(*trained[:-1], "-c", "pass"))
    assert not command(*trained)


@pytest.mark.remedy("Put it behind --, as in: resumekit {} -- python train.py")
def test_a_replayed_command_is_behind_the_dashes(
    trained: list[object], remedy: Remedy, command: Command
) -> None:
    text = remedy.of(replay, [], Path("runs/a"), from_step=4)
    words: list[Any] = shlex.split(text.partition("resumekit ")[2])
    ours = {"500": 4, "python": sys.executable}
    assert not command(*(ours.get(word, word) for word in words))
