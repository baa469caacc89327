"""The runner: real processes, real SIGKILLs, and commands that misbehave."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from resumekit.cli import main
from resumekit.errors import (
    CommandFailedError,
    CommandTimeoutError,
    ConfigurationError,
    KillPointNotReachedError,
    ProveError,
)
from resumekit.launcher.processes import is_running
from resumekit.prove import Outcome, ProveResult, prove
from resumekit.prove.kills import kill_instants
from resumekit.prove.report import print_result
from resumekit.prove.workspaces import prepared

SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = (sys.executable, str(SCRIPTS / "plain_training.py"), "{dir}")


def tiny(*options: str, **arguments: Any) -> ProveResult:
    """Judges the job of the standard library."""
    command = [sys.executable, str(SCRIPTS / "tiny_job.py"), "{dir}", *options]
    kills = {} if "at" in arguments else {"kills": 3}
    if "at" in arguments and "--pause-seconds" not in options:
        command += ["--pause-seconds", "0"]  # it kills itself at a chosen point
    return prove(command, **{**kills, "timeout_seconds": 30, **arguments})


def text_of(result: ProveResult) -> str:
    console = Console(file=StringIO(), width=120, highlight=False)
    print_result(result, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------ plain PyTorch, no Checkpointer


@pytest.mark.full  # three imports of torch; the job of the standard library is exact, too
def test_a_script_with_a_right_resume_of_its_own_is_exact() -> None:
    result = prove(PLAIN, kills=1, seed=1)
    (trial,) = result.trials
    assert (trial.outcome, result.ok) == (Outcome.EXACT, True), text_of(result)
    assert trial.num_kills == 1
    assert [launch.exit_status for launch in trial.launches] == [-9, 0]
    assert trial.verdict is not None
    assert trial.verdict.num_resumes == 1
    assert trial.digests == result.reference_digests
    assert trial.digests.keys() == {"model", "optimizer"}


@pytest.mark.full  # four imports of torch; a component of the tiny job is left out, too
def test_a_script_that_forgets_its_optimizer_is_reported() -> None:
    result = prove([*PLAIN, "--wrong", "optimizer"], kills=1, seed=3)
    (trial,) = result.trials
    assert (trial.outcome, result.ok) == (Outcome.DIVERGED, False), text_of(result)
    assert trial.verdict is not None
    divergence = trial.verdict.divergence
    assert divergence is not None
    assert (divergence.component, divergence.leaf) == ("optimizer", "state[0].momentum_buffer")
    assert divergence.step == trial.verdict.resumes[0].step + 1
    assert "optimizer: state[0].momentum_buffer differs" in text_of(result)


@pytest.mark.full  # three imports of torch
def test_a_recorder_that_stops_is_named_and_the_trace_alone_decides() -> None:
    """An optimizer whose learning rate is no number steps once; the recorder cannot read it."""
    result = prove([*PLAIN, "--odd-optimizer"], kills=1, seed=1)
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT, text_of(result)
    assert trial.recorded is None
    assert "The recorder stopped, and what it saw is not compared: ValueError" in text_of(result)


# ----------------------------------------------------------------------------- kills and answers


def test_every_kill_hits_and_the_answer_is_written_as_json(tmp_path: Path) -> None:
    result = tiny(json_path=tmp_path / "answer.json", keep=tmp_path / "runs")
    assert result.ok, text_of(result)
    assert result.trials[0].num_kills == 3
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["ok"] is True
    assert answer["trials"][0]["outcome"] == "exact"
    assert answer["trials"][0]["verdict"]["num_steps"] == 12
    assert (tmp_path / "runs" / "killed" / "trace" / "launch-00003").is_dir()
    text = text_of(result)
    assert "EXACT: 12 steps" in text
    assert "every bit equal; kills inside saves: not tried" in text
    assert text.count("SIGKILL after step") == 3


def test_the_user_s_environment_is_left_as_it_is_but_for_ours(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os, sys\n"
        "json.dump(dict(os.environ), open(sys.argv[1], 'a')); open(sys.argv[1], 'a').write('\\n')\n"
        f"sys.argv[1:] = [sys.argv[2]]\nexec(open({str(SCRIPTS / 'tiny_job.py')!r}).read())\n"
    )
    seen = tmp_path / "seen"
    prove([sys.executable, str(script), str(seen), "{dir}"], kills=1)
    ours = {"RESUMEKIT_TRACE", "RESUMEKIT_RUN_ROOT", "PYTHONUNBUFFERED"}
    ours |= {"PYTHONPATH", "PYTHONRESUMEKIT"}
    for line in seen.read_text().splitlines():
        inherited = {k: v for k, v in json.loads(line).items() if k not in ours | {"LC_CTYPE"}}
        assert inherited == {k: v for k, v in os.environ.items() if k not in ours | {"LC_CTYPE"}}


def test_the_same_seed_gives_the_same_instants() -> None:
    steps = list(range(1, 41))
    one, same, other = (
        kill_instants(steps, 5, first_saved=5, rng=Random(seed)) for seed in (1, 1, 2)
    )
    assert one == same != other
    assert all(0 <= kill.fraction < 1 for kill in one)
    assert [(kill.step - 1) // 8 for kill in one] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_the_last_kill_falls_behind_the_first_save(seed: int) -> None:
    (kill,) = kill_instants(range(1, 13), 1, first_saved=10, rng=Random(seed))
    assert 10 <= kill.step <= 11


def test_a_proof_without_a_kill_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kills: 0, expected 1 or more"):
        tiny(kills=0)


def test_a_script_that_does_not_repeat_itself_is_distinguished_from_a_bad_resume(
    tmp_path: Path,
) -> None:
    script = tmp_path / "job.py"
    source = (SCRIPTS / "tiny_job.py").read_text()
    script.write_text(source.replace('"model": 1', '"model": os.getpid()'))
    result = prove([sys.executable, str(script), "{dir}"], kills=1)
    assert (result.trials[0].outcome, result.ok) == (Outcome.NOT_REPRODUCIBLE, False)
    assert "before the first kill" in text_of(result)
    assert "Likely cause" not in text_of(result)


def test_a_relaunch_that_fails_is_not_exact() -> None:
    result = tiny("--fail-on-relaunch")
    (trial,) = result.trials
    assert (trial.outcome, result.ok) == (Outcome.FAILED, False)
    assert "state-0.json: cannot be understood" in text_of(result)


def test_a_relaunch_that_fails_before_it_traces_anything_is_not_called_irreproducible() -> None:
    words = f"test ! -e {{dir}}/state-0.json && {sys.executable} {SCRIPTS / 'tiny_job.py'} {{dir}}"
    result = prove(["sh", "-c", words], at=("step:5",), timeout_seconds=30)
    (trial,) = result.trials
    assert (trial.outcome, result.ok) == (Outcome.FAILED, False), text_of(result)
    assert trial.verdict is not None
    assert trial.verdict.divergence is not None
    assert (trial.verdict.divergence.launch, trial.verdict.is_reproducible) == (1, True)


# -------------------------------------------------------------------------------- chosen points


def test_each_launch_is_killed_at_the_next_chosen_point(tmp_path: Path) -> None:
    result = tiny(at=("step:5", "checkpoint:9", "step:11"), json_path=tmp_path / "answer.json")
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT, text_of(result)
    assert [launch.killed_after_step for launch in trial.launches] == [5, 9, 11, None]
    assert [launch.exit_status for launch in trial.launches] == [-9, -9, -9, 0]
    assert trial.verdict is not None
    assert [resume.step for resume in trial.verdict.resumes] == [3, 9, 9]
    assert "SIGKILL at checkpoint:9" in text_of(result)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["at"] == ["step:5", "checkpoint:9", "step:11"]
    assert (answer["seed"], answer["num_kills_asked"]) == (None, 3)


def test_one_point_may_be_chosen_twice() -> None:
    trial = tiny(at=("step:5", "step:5")).trials[0]
    assert (trial.outcome, trial.num_kills) == (Outcome.EXACT, 2)


def test_a_process_that_does_not_kill_itself_is_killed_soon_after_the_point() -> None:
    """The trace is watched too, as a launcher may outlive the process that came to the point."""
    result = tiny("--lives-on", "--pause-seconds", "0.05", at=("step:4",))
    (launch, _) = result.trials[0].launches
    assert (result.trials[0].outcome, launch.was_killed) == (Outcome.EXACT, True)
    assert launch.killed_after_step is not None
    assert 4 <= launch.killed_after_step < 12


def test_a_launcher_goes_with_the_process_that_came_to_the_point() -> None:
    words = f"{sys.executable} {SCRIPTS / 'tiny_job.py'} {{dir}} || sleep 60"
    result = prove(["sh", "-c", words], at=("step:5",), timeout_seconds=30)
    assert result.trials[0].outcome is Outcome.EXACT, text_of(result)


@pytest.mark.full  # another test starts torchrun, too
def test_all_ranks_go_when_one_comes_to_a_chosen_point(tmp_path: Path) -> None:
    result = tiny("--pause-seconds", "0.05", at=("checkpoint:6",), world=2, keep=tmp_path / "runs")
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT, text_of(result)
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == 2
    assert trial.verdict.resumes[0].step in (3, 6)  # of the slower rank: they do not wait for it
    assert marked_processes(str(tmp_path)) == []


def test_a_component_is_left_out_at_chosen_points_too() -> None:
    result = tiny(at=("step:8",), inject="optimizer")
    assert (result.trials[0].outcome, result.ok) == (Outcome.CAUGHT, True), text_of(result)
    assert result.trials[0].launches[0].at == "step:8"


def test_a_point_that_no_run_comes_to_is_an_error_of_its_own() -> None:
    with pytest.raises(KillPointNotReachedError, match=r"never reaches step:13, .* to step:12"):
        tiny(at=("step:5", "step:13"))


def test_a_point_that_lies_before_the_resume_is_an_error_and_not_exact() -> None:
    with pytest.raises(KillPointNotReachedError, match="the killed run never reached step:5"):
        tiny(at=("step:8", "step:5"))


def test_a_run_that_diverged_stays_so_when_a_later_point_is_never_reached() -> None:
    result = tiny("--deaf-to", "model", at=("step:8", "step:5"), inject="optimizer")
    assert (result.trials[0].outcome, result.trials[0].num_kills) == (Outcome.CAUGHT, 1)


def test_a_script_without_checkpointer_has_no_checkpoint_to_be_killed_at(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    source = (SCRIPTS / "tiny_job.py").read_text()
    script.write_text(
        source.replace('write("checkpoint", step=step, components=digests())', "pass")
    )
    with pytest.raises(KillPointNotReachedError, match="saves through a Checkpointer"):
        prove([sys.executable, str(script), "{dir}"], at=("checkpoint:4",))


@pytest.mark.parametrize("point", ["step:2", "step:3"])
def test_a_point_before_everything_that_is_saved_is_refused(point: str) -> None:
    with pytest.raises(ProveError, match=r"has no checkpoint yet .* checkpoint:3 or later"):
        tiny(at=(point,))


def test_of_several_points_the_first_may_lie_before_everything_that_is_saved() -> None:
    trial = tiny(at=("step:2", "checkpoint:3")).trials[0]
    assert (trial.outcome, trial.num_kills) == (Outcome.EXACT, 2)


@pytest.mark.parametrize("random", [{"kills": 2}, {"seed": 0}])
def test_points_exclude_random_instants(random: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"given together with {next(iter(random))}"):
        prove(["anything"], at=("step:5",), **random)


@pytest.mark.parametrize("point", ["", "step", "step:", "step:x", "step:-1", "epoch:1", "step:1 "])
def test_what_is_no_point_is_refused(point: str) -> None:
    with pytest.raises(ConfigurationError, match="expected 'step:<n>' or 'checkpoint:<n>'"):
        prove(["anything"], at=(point,))


def test_points_are_chosen_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = [sys.executable, str(SCRIPTS / "tiny_job.py"), "{dir}"]
    with pytest.raises(SystemExit, match="0"):
        main(["prove", "--at", "step:5", "--at", "checkpoint:9", "--", *job])
    output = capsys.readouterr()
    assert "killed at checkpoint:9" in output.err
    assert "EXACT: 12 steps, 2 resumes" in output.out
    with pytest.raises(SystemExit, match="2"):
        main(["prove", "--at", "step:5", "--kills", "1", "--", *job])
    assert "given together with kills" in capsys.readouterr().err


# -------------------------------------------------------------------------------- likely causes


def test_a_difference_is_reported_with_its_likely_cause(tmp_path: Path) -> None:
    result = tiny("--forgets", "model", at=("step:8",), json_path=tmp_path / "answer.json")
    (trial,) = result.trials
    assert trial.outcome is Outcome.DIVERGED, text_of(result)
    cause = "model: weights restarted. No tensor is one that the reference run ever recorded."
    assert trial.causes == (cause,)
    *_, verdict, line = text_of(result).splitlines()
    assert verdict.startswith("DIVERGED: step 6, rank 0: model: value differs")
    assert line == f"Likely cause: {cause}"
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["trials"][0]["causes"] == [cause]


def test_a_difference_that_nothing_recorded_explains_is_a_variable_outside_the_checkpoint() -> None:
    result = tiny("--counts", at=("step:8",))
    line = text_of(result).splitlines()[-1]
    assert line.startswith("Likely cause: loss: a variable that is not in the checkpoint. ")


@pytest.mark.parametrize("options", [(), ("--fail-on-relaunch",)])
def test_without_a_difference_there_is_no_cause(options: tuple[str, ...]) -> None:
    """A launch that failed has its own message."""
    result = tiny(*options, at=("step:8",))
    assert result.trials[0].causes == ()
    assert "Likely cause" not in text_of(result)


def test_a_component_that_is_left_out_is_listed_with_its_likely_cause() -> None:
    text = " ".join(text_of(tiny(at=("step:8",), inject="all")).split())
    assert text.count("weights restarted") == 1


# ----------------------------------------------------------------------------- negative controls


@pytest.mark.parametrize("component", ["model", "optimizer"])
def test_a_component_that_is_left_out_is_caught_and_named(component: str) -> None:
    result = tiny(inject=component)
    (trial,) = result.trials
    assert (trial.outcome, result.ok) == (Outcome.CAUGHT, True), text_of(result)
    assert trial.verdict is not None
    assert trial.verdict.divergence is not None
    assert trial.verdict.divergence.event == "resumed"
    assert trial.num_kills == 1


def test_every_component_is_left_out_in_turn() -> None:
    result = tiny(inject="all")
    assert {trial.injected: trial.outcome for trial in result.trials} == {
        "model": Outcome.CAUGHT,
        "optimizer": Outcome.CAUGHT,
        "extras": Outcome.NO_EFFECT,
    }
    assert result.ok
    assert "no effect" in text_of(result)


def test_an_injection_that_nobody_notices_is_a_failure() -> None:
    result = tiny("--deaf-to", "optimizer", inject="optimizer")
    assert (result.trials[0].outcome, result.ok) == (Outcome.MISSED, False)
    assert tiny(inject="extras").trials[0].outcome is Outcome.MISSED


def test_a_component_that_changes_is_missed_and_not_without_effect() -> None:
    result = tiny("--deaf-to", "optimizer", inject="all")
    assert [trial.outcome for trial in result.trials] == [
        Outcome.CAUGHT,
        Outcome.MISSED,
        Outcome.NO_EFFECT,
    ]
    assert not result.ok


def test_settings_of_the_caller_s_environment_do_not_reach_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RESUMEKIT_INJECT", "model")
    assert tiny(kills=1).ok


def test_an_injection_under_a_wrong_name_is_a_failure() -> None:
    result = tiny("--breaks", "model", inject="optimizer", kills=1)
    assert (result.trials[0].outcome, result.ok) == (Outcome.MISNAMED, False)


def test_a_component_that_the_checkpoints_have_not_cannot_be_left_out() -> None:
    with pytest.raises(ConfigurationError, match="expected one of model, optimizer, extras"):
        tiny(inject="grad_scaler")


# ----------------------------------------------------------------------- commands that misbehave


def test_a_command_that_fails_by_itself_is_an_error_with_its_last_words() -> None:
    with pytest.raises(CommandFailedError, match="there is no such thing as step four"):
        tiny("--fail-at", "4")


def test_a_command_that_never_traces_is_reported_with_the_remedy() -> None:
    with pytest.raises(ProveError, match=r"resumekit\.trace\("):
        prove([sys.executable, "-c", "pass"])


def test_a_command_that_trains_too_few_steps_is_reported() -> None:
    with pytest.raises(ProveError, match=r"trained 3 steps, expected more than 3"):
        tiny("--steps", "3")


def test_a_command_that_saves_nothing_before_its_end_is_reported() -> None:
    with pytest.raises(ProveError, match="saved nothing before its last step, 12"):
        tiny("--save-every", "100")


def test_a_command_that_hangs_is_killed_and_reported() -> None:
    with pytest.raises(CommandTimeoutError, match="did not end within 1 seconds"):
        tiny("--hang-at", "5", timeout_seconds=1)


def test_a_command_that_ends_before_a_kill_is_reported(tmp_path: Path) -> None:
    """Everything is traced at once in the last moment, and only then could a kill be timed."""
    script = tmp_path / "job.py"
    source = (SCRIPTS / "tiny_job.py").read_text()
    source = source.replace("    os.write(file, line", "    lines.append(line")
    source = f"lines = []\n{source}\nos.write(file, b''.join(lines))\nos._exit(0)\n"
    script.write_text(source.replace("from __future__ import annotations\n", ""))
    with pytest.raises(ProveError, match="ended before the first kill could hit"):
        prove([sys.executable, str(script), "{dir}", "--pause-seconds", "0.1"], kills=1, seed=2)


def test_a_program_that_is_not_there_is_reported() -> None:
    with pytest.raises(ConfigurationError, match="cannot be started"):
        prove(["no-such-program-anywhere", "train.py"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"kills": -1}, "kills"), ({"world": 0}, "world"), ({"inject": "model", "kills": 0}, "kills")],
)
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        tiny(**arguments)


def test_a_directory_that_is_not_empty_is_not_kept_into(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigurationError, match="not empty"):
        tiny(keep=tmp_path)


@pytest.mark.parametrize("child", ["marked", "unmarked"])
def test_children_that_leave_the_group_die_with_it(tmp_path: Path, child: str) -> None:
    result = tiny("--leave-child", child, kills=2, keep=tmp_path / "runs")
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT
    children = (tmp_path / "runs" / "killed" / "files" / "children").read_text().split()
    assert len(children) == 3
    running = [pid for pid in children if is_running(int(pid))]
    for pid in running:
        os.kill(int(pid), 9)
    if child == "marked":
        assert (running, trial.num_left_behind) == ([], 1)
        assert "outlived the command and were killed: 1" in text_of(result)
    else:
        # The last launch ended by itself, and nothing shows any more whose child this is.
        assert (running, trial.num_left_behind) == (children[2:], 0)


def test_ranks_in_sessions_of_their_own_die_with_their_launcher(tmp_path: Path) -> None:
    result = tiny("--pause-seconds", "0.05", kills=1, world=2, keep=tmp_path / "runs")
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT, text_of(result)
    assert trial.verdict is not None
    assert (trial.verdict.num_ranks, trial.verdict.num_resumes) == (2, 1)
    assert marked_processes(str(tmp_path)) == []


def marked_processes(word: str) -> list[int]:
    """The processes that were started with this word somewhere in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if word.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


# ------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "x.py", "-a"], ["python", "+", "x.py", "-a"]),
        (["/usr/bin/python3.11", "-u", "x.py"], ["/usr/bin/python3.11", "-u", "+", "x.py"]),
        (
            ["python", "-X", "dev", "-m", "pkg.train", "-m"],
            ["python", "-X", "dev", "+", "-m", "pkg.train", "-m"],
        ),
    ],
)
def test_several_ranks_go_through_torchrun(command: list[str], expected: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    split = expected.index("+")
    whole = [*expected[:split], *launcher, *expected[split + 1 :]]
    assert prepared(command, world=2, directory=Path("d")) == whole


@pytest.mark.parametrize(
    "command", [["./train.sh"], ["python", "-c", "pass"], ["torchrun", "x.py"]]
)
def test_what_torchrun_cannot_start_is_refused(command: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="several ranks"):
        prepared(command, world=2, directory=Path("d"))


def test_the_directory_is_filled_in_everywhere() -> None:
    words = prepared(["python", "x.py", "{dir}/a", "--out={dir}"], world=1, directory=Path("/r"))
    assert words == ["python", "x.py", "/r/a", "--out=/r"]


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing to run"):
        prove([])
