"""Activations in real processes that nobody changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit import replay_plan
from resumekit.errors import ConfigurationError
from resumekit.launcher import (
    Activation,
    option_against_environment,
    prepared_environment,
    refuse_launched,
)

MODULE = """
import sys
def note(settings):
    import colorsys  # the module is complete
    print("activated", settings["text"], hasattr(colorsys, "hls_to_rgb"))
def fail(settings):
    raise ValueError("no")
"""


def output_of(
    tmp_path: Path, program: str, *options: str, call: str = "note", **variables: str
) -> str:
    """What a program prints that runs with one activation after the import of ``colorsys``."""
    (tmp_path / "activated.py").write_text(MODULE)
    activation = Activation("colorsys", f"activated:{call}", {"text": "here"})
    paths = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), str(tmp_path)]))
    environment = prepared_environment(
        {**os.environ, **variables, "PYTHONPATH": paths}, tmp_path / "launcher", [activation]
    )
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_an_activation_is_called_once_when_its_module_is_imported(tmp_path: Path) -> None:
    program = (
        "import importlib.util; importlib.util.find_spec('colorsys'); print('before');"
        "import colorsys; import colorsys"
    )
    assert output_of(tmp_path, program).split("\n")[:-1] == ["before", "activated here True"]


def test_a_process_that_does_not_import_the_module_is_left_alone(tmp_path: Path) -> None:
    assert output_of(tmp_path, "print('alone')") == "alone\n"


def test_a_child_of_a_launcher_is_activated_too(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import colorsys'])"
    assert output_of(tmp_path, program) == "activated here True\n"


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("print('hidden')")
    program = "import colorsys, sitecustomize; print(sitecustomize.__file__)"
    found = output_of(tmp_path, program, PYTHONPATH=str(hidden)).split("\n")
    assert found[:3] == ["hidden", "activated here True", str(hidden / "sitecustomize.py")]


def test_two_launchers_activate_both_once_whatever_is_between_them(tmp_path: Path) -> None:
    """The newer list has both; copies that a third ``sitecustomize`` runs do nothing."""
    (tmp_path / "activated.py").write_text(MODULE)
    between = tmp_path / "between"
    between.mkdir()
    (between / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print('between')\n"
        "older = os.path.join(os.environ['OLDER'], 'sitecustomize.py')\n"
        "exec(compile(open(older).read(), older, 'exec'))\n"
    )
    older, newer = tmp_path / "older", tmp_path / "newer"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OLDER": str(older)}
    for directory, text in ((older, "first"), (newer, "second")):
        activation = Activation("colorsys", "activated:note", {"text": text})
        environment = prepared_environment(environment, directory, [activation])
        paths = [str(directory), str(between), environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", "import colorsys"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines == ["between", "activated first True", "activated second True"], done.stderr
    assert done.stderr == ""


def test_a_process_that_a_launcher_has_started_starts_no_other_one(tmp_path: Path) -> None:
    refuse_launched({}, "resumekit prove")
    environment = prepared_environment({}, tmp_path, [])
    with pytest.raises(ConfigurationError, match="resumekit prove: started by resumekit run or"):
        refuse_launched(environment, "resumekit prove")


def test_in_a_replay_a_launcher_may_start_its_command(tmp_path: Path) -> None:
    environment = prepared_environment({replay_plan.VARIABLE: "{}"}, tmp_path, [])
    refuse_launched(environment, "resumekit run")


def test_a_failing_activation_is_one_line_and_the_program_runs_on(tmp_path: Path) -> None:
    found = output_of(tmp_path, "import colorsys; print('runs on')", call="fail")
    assert "resumekit: activated:fail is off (ValueError: no)" in found
    assert "runs on" in found
    assert "Traceback" not in found


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_options_against_the_environment_are_found_and_do_prevent_it(
    tmp_path: Path, option: str
) -> None:
    assert option_against_environment([sys.executable, option, "train.py"]) == option
    assert "activated" not in output_of(tmp_path, "import colorsys", option)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python", "train.py", "-E"], None),
        (["python", "-u", "-m", "pkg", "-I"], None),
        (["python3.11", "-uE", "train.py"], "-uE"),
        (["python", "-WIgnore", "-XE", "train.py"], None),
        (["env", "A=1", "python", "-sI", "train.py"], "-sI"),
        (["./train.sh", "-E"], None),
    ],
)
def test_only_options_of_the_interpreter_count(command: list[str], found: str | None) -> None:
    assert option_against_environment(command) == found
