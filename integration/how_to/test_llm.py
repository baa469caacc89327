"""The page on LLMs: each command of its table is killed twice, and compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from how_to_pages import Page, Workplace, difference, without

pytest.importorskip("trl")
pytest.importorskip("peft")

from resumekit.testing.launchers import free_port

PAGE = Page("llm")
KILLED_AT = (13, 8)  # after a checkpoint of step 10, and of step 15
ROWS = [tuple(row) for row in PAGE.rows("command")]
SFT, DPO = "python sft.py --config tiny.yaml --use_peft", "python dpo.py --config tiny.yaml --sync"
GENERATING = "python grpo.py --config tiny.yaml --num_generations 4 --max_completion_length 8"


class Runs:
    """Uninterrupted runs of the commands, each made once, and killed ones.

    Args:
        directory: new.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._whole: dict[str, Workplace] = {}

    def new(self) -> Workplace:
        variables = {"PORT": str(free_port()), "HF_HUB_OFFLINE": "1"}
        number = len(list(self._directory.iterdir()))
        return Workplace(self._directory / str(number), PAGE, variables)

    def whole(self, command: str) -> Workplace:
        if command not in self._whole:
            place = self.new()
            place.output = place.run(command)
            self._whole[command] = place
        return self._whole[command]

    def killed(self, command: str, **variables: str) -> Workplace:
        place = self.new()
        for step in KILLED_AT:
            place.kill_at(step, command, num_ranks=num_ranks(command))
        place.output = place.run(command, **variables)
        return place


def num_ranks(command: str) -> int:
    return 2 if command.startswith("accelerate launch") else 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("llm"))


@pytest.mark.full
@pytest.mark.parametrize(("command", "result"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_table(runs: Runs, command: str, result: str) -> None:
    if "qlora" in command:
        pytest.importorskip("bitsandbytes")
    assert PAGE.lines("bash").count(command) == 1
    whole, killed = runs.whole(command), runs.killed(command)
    assert result == "exact"
    assert "all saved state is exact" in whole.output
    assert "resumekit: WARNING" not in whole.output + killed.output
    assert not difference(whole, killed, num_ranks=num_ranks(command))
    assert len(killed.launches()) == 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "component"),
    [
        (f"{SFT} --packing", "optimizer"),
        (DPO, "callbacks/attributes"),
        (f"{GENERATING} --use_peft", "rng"),
        (f"{GENERATING} --steps", "callbacks/generated"),
    ],
)
def test_without_a_component_a_training_continues_otherwise(
    runs: Runs, start: str, component: str
) -> None:
    """The negative control of the rows."""
    command = PAGE.command(start)
    killed = runs.killed(command, **without(component))
    assert "trained otherwise" in difference(runs.whole(command), killed)


@pytest.mark.full
def test_the_adapter_of_a_run_is_opened_and_exported(runs: Runs) -> None:
    place = runs.whole(PAGE.command(f"{SFT} --packing"))
    output = place.run(PAGE.command("python use.py"))
    assert "LoraConfig" in output
    place.run(PAGE.command("resumekit export"))
    assert (place.directory / "exported" / "adapter_config.json").is_file()


def test_each_command_of_the_page_is_in_its_table() -> None:
    commands = [line for line in PAGE.lines("bash") if "tiny.yaml" in line]
    assert commands == [row[0] for row in ROWS]
