"""The page on Kubernetes: its files by the schemas, its commands as process 1 of a container."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from how_to_pages import Page, Started, Workplace, difference, num_repeated, wait_until, without

from resumekit.testing.launchers import free_port

PAGE = Page("kubernetes")
WAIT = {"HOW_TO_WAIT_AT": "13"}  # the newest checkpoint is that of step 10
CONTAINER = "unshare --pid --fork --mount-proc --kill-child"
GRACE_SECONDS = 3.0  # until the kubelet sends SIGKILL; the page has more
DISRUPTED = frozenset({"DisruptionTarget"})


def documents(name: str) -> list[dict[str, Any]]:
    """What a YAML file of the page holds."""
    (block,) = [each for each in PAGE.blocks("yaml") if each.startswith(f"# {name}\n")]
    return list(yaml.safe_load_all(block))


def job(name: str) -> dict[str, Any]:
    """The Job of a file of the page."""
    (found,) = [each for each in documents(name) if each["kind"] == "Job"]
    return found


def container(name: str) -> dict[str, Any]:
    """The one container of a Job."""
    (found,) = job(name)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def command(name: str) -> str:
    """What the container of a Job runs, as process 1 of a PID namespace."""
    found = container(name)
    return f"{CONTAINER} {shlex.join([*found['command'], *found.get('args', [])])}"


def action(name: str, status: int, conditions: frozenset[str] = frozenset()) -> str:
    """What the Job does after a failed pod: the first rule that matches counts, else "Count"."""
    for rule in job(name)["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In"
        if status in codes["values"]:
            return str(rule["action"])
        if any(each["type"] in conditions for each in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize("name", ["job.yaml", "two-pods.yaml"])
def test_a_file_of_kubernetes_fits_the_schemas(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(name):
        validate.validate(document, validate.latest_version(), strict=True)
        wrong = {**document, "spec": {**document["spec"], "backOffLimit": 3}}
        with pytest.raises(validate.ValidationError):
            validate.validate(wrong, validate.latest_version(), strict=True)


def test_the_file_of_skypilot_fits_its_schemas(tmp_path: Path) -> None:
    if find_spec("sky") is None:
        pytest.skip("no SkyPilot: pip install skypilot")
    (content,) = documents("sky.yaml")
    file = tmp_path / "sky.yaml"
    program = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.run)"
    words = ["python", "-c", program, str(file)]
    for text, is_right in ((content, True), ({**content, "job_recovery": {}}, False)):
        file.write_text(yaml.safe_dump(text))
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ended.returncode == 0) == is_right, ended.stderr
        assert not is_right or ended.stdout.splitlines()[-1] == content["run"]


def test_the_files_agree_with_each_other() -> None:
    spec = job("job.yaml")["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert action("job.yaml", 128 + signal.SIGTERM) == "Ignore"
    assert action("job.yaml", 128 + signal.SIGKILL, DISRUPTED) == "Ignore"
    assert action("job.yaml", 128 + signal.SIGKILL) == action("job.yaml", 1) == "Count"
    assert action("two-pods.yaml", 1, DISRUPTED) == "Ignore"
    assert action("two-pods.yaml", 1) == "Count"
    (sky,) = documents("sky.yaml")
    assert 128 + signal.SIGTERM in sky["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert sky["run"].split() == container("job.yaml")["command"]
    service, ddp = documents("two-pods.yaml")
    (address,) = [each["value"] for each in environment() if each["name"] == "MASTER_ADDR"]
    names = {service["metadata"]["name"], ddp["spec"]["template"]["spec"]["subdomain"]}
    assert names == {"ddp"}
    assert address == f"{ddp['metadata']['name']}-0.ddp"
    assert service["spec"]["selector"] == {"job-name": ddp["metadata"]["name"]}


def environment() -> list[dict[str, str]]:
    """That the file of two pods sets in each container."""
    found = container("two-pods.yaml")["env"]
    assert isinstance(found, list)
    return found


# ---------------------------------------------------------------- pods


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    needs_namespaces()
    place = Workplace(tmp_path_factory.mktemp("kubernetes") / "whole", PAGE)
    place.run(command("job.yaml"))
    return place


def needs_namespaces() -> None:
    """Raises Skipped where a process may not make a PID namespace."""
    if subprocess.run([*CONTAINER.split(), "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid needs root")


def process_1(started: Started) -> psutil.Process:
    """Process 1 of a container, as the kubelet sees it."""
    (found,) = psutil.Process(started.process.pid).children()
    return found


def waiting(place: Workplace, command: str) -> Started:
    """A pod whose training waits after step 13."""
    started = place.start(command, **WAIT)
    wait_until(lambda: list(place.records.glob("waits-0")))
    return started


def test_sigterm_to_process_1_saves_and_the_next_pod_repeats_nothing(
    tmp_path: Path, whole: Workplace
) -> None:
    killed = Workplace(tmp_path / "killed", PAGE)
    started = waiting(killed, command("job.yaml"))
    process_1(started).terminate()
    killed.release()
    status = started.status()
    assert status == 128 + signal.SIGTERM
    assert action("job.yaml", status) == "Ignore"
    output = started.log.read_text() + killed.run(command("job.yaml"))
    assert not difference(whole, killed)
    assert num_repeated(whole, killed) == 0
    for line in PAGE.lines("text"):
        assert output.count(line.replace("/app", str(killed.directory))) == 1


@pytest.mark.full
def test_a_shell_without_exec_keeps_the_signal_from_the_training(
    tmp_path: Path, whole: Workplace
) -> None:
    killed = Workplace(tmp_path / "killed", PAGE)
    shell = f"{CONTAINER} sh -c 'python train.py; exit $?'"
    started = waiting(killed, shell)
    process_1(started).terminate()
    with pytest.raises(psutil.TimeoutExpired):
        process_1(started).wait(GRACE_SECONDS)
    process_1(started).kill()
    assert started.status() != 0
    killed.release()
    assert "SIGTERM" not in started.log.read_text()
    killed.run(command("job.yaml"))
    assert not difference(whole, killed)
    assert num_repeated(whole, killed) == 3


@pytest.mark.full
def test_a_shell_with_exec_passes_the_signal(tmp_path: Path, whole: Workplace) -> None:
    killed = Workplace(tmp_path / "killed", PAGE)
    (row,) = [row for row in PAGE.rows("line") if "exec python" in row[1]]
    words = yaml.safe_load(row[1].split("`")[-1].replace("/app", str(killed.directory)))
    started = waiting(killed, f"{CONTAINER} {shlex.join(words)}")
    process_1(started).terminate()
    killed.release()
    assert started.status() == 128 + signal.SIGTERM


@pytest.mark.full
@pytest.mark.parametrize("component", ["", "optimizer"])
def test_a_killed_pod_repeats_steps_and_without_the_optimizer_it_differs(
    tmp_path: Path, whole: Workplace, component: str
) -> None:
    """With a component left out it is the negative control."""
    killed = Workplace(tmp_path / "killed", PAGE)
    started = waiting(killed, command("job.yaml"))
    process_1(started).kill()  # with it all processes of its namespace
    assert started.status() != 0
    killed.release()
    killed.run(command("job.yaml"), **without(component) if component else {})
    found = difference(whole, killed)
    assert found == ("rank 0: launch 1 trained otherwise" if component else "")
    assert num_repeated(whole, killed) == 3


@pytest.mark.full
@pytest.mark.parametrize(("number", "repeated"), [(signal.SIGTERM, 0), (signal.SIGKILL, 3)])
def test_two_pods_end_together_and_are_started_again(
    tmp_path: Path, number: signal.Signals, repeated: int
) -> None:
    needs_namespaces()
    whole = Workplace(tmp_path / "whole", PAGE, cluster())
    whole.run(*pods())
    killed = Workplace(tmp_path / "killed", PAGE, cluster())
    started = [killed.start(each, **WAIT) for each in pods()]
    try:
        wait_until(lambda: len(list(killed.records.glob("waits-*"))) == len(started))
        os.kill(process_1(started[1]).pid, number)
        if number == signal.SIGKILL:
            started[1].status()  # all processes of its namespace have ended
        killed.release()
        first, second = [each.status() for each in started]
    finally:
        for each in started:
            each.kill_tree()
    assert first == 1, started[0].log.read_text()
    assert second != 0, started[1].log.read_text()
    killed.run(*pods())
    assert not difference(whole, killed, num_ranks=2)
    assert num_repeated(whole, killed) == repeated


def pods() -> list[str]:
    """The commands of both pods."""
    return [f"JOB_COMPLETION_INDEX={each} {command('two-pods.yaml')}" for each in range(2)]


def cluster() -> dict[str, str]:
    """What the Job sets in the environment of each container, for pods on this machine."""
    assert [each["name"] for each in environment()] == ["MASTER_ADDR", "MASTER_PORT"]
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
