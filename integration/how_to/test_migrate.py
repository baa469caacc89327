"""The page on migrating: each diff is applied, each command run, and the way back, too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
from deepspeed_extension import compile_once
from how_to_pages import Page, Workplace, difference, without

from resumekit.testing.launchers import free_port

PAGE = Page("migrate")
SCRIPTS = Path(__file__).with_name("migrated_scripts")


@dataclass(frozen=True)
class Migration:
    """A section of the page, and the stock script that it is followed with.

    Args:
        title: of the section.
        script: in ``migrated_scripts``.
        needs: the package.
        killed_at: the step of the stock script, in the middle of an epoch.
        killed_after: so many steps of the new script, the newest checkpoint being older.
        back: what the stock script says then, by what it said.
        command: that starts the stock script again.
    """

    title: str
    script: str
    needs: str
    killed_at: int
    killed_after: int
    back: dict[str, str]
    command: str = "python train.py"
    ranks: dict[str, str] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The section."""
        page = Page("migrate").text
        return page.partition(f"## From {self.title}\n")[2].partition("\n## ")[0]

    @property
    def diff(self) -> str:
        """What the page says to change."""
        (found,) = re.findall(r"```diff\n(.*?)```", self.text, flags=re.DOTALL)
        return str(found)

    @property
    def stock(self) -> str:
        """The program before."""
        return (SCRIPTS / self.script).read_text(encoding="utf-8")

    @property
    def migrated(self) -> str:
        """The program with the diff of the page."""
        return applied(self.diff, self.stock)

    @property
    def returned(self) -> str:
        """The program before, which loads the export."""
        program = self.stock
        for old, new in self.back.items():
            assert program.count(old) == 1, old
            program = program.replace(old, new)
        return program

    def commands(self, verb: str) -> list[str]:
        """``resumekit import`` or ``resumekit export`` as they stand on the page."""
        (block,) = re.findall(r"```bash\n(.*?)```", self.text, flags=re.DOTALL)
        found = [line for line in block.splitlines() if line.startswith(f"resumekit {verb}")]
        assert found
        return found


MIGRATIONS = [
    Migration(
        "the Trainer",
        "from_trainer.py",
        "transformers",
        killed_at=620,  # of 400 steps an epoch
        killed_after=550,
        back={"resume_from_checkpoint=last": 'resume_from_checkpoint="out"'},
    ),
    Migration(
        "Accelerate",
        "from_accelerate.py",
        "accelerate",
        killed_at=620,  # of 150 steps an epoch
        killed_after=550,
        back={'load_state(f"checkpoints/step_{step}")': 'load_state("out")'},
        command="python train.py 1000",
    ),
    Migration(
        "Lightning",
        "from_lightning.py",
        "lightning",
        killed_at=550,  # of 200 steps an epoch
        killed_after=550,
        back={'ckpt_path="last"': 'ckpt_path="out.ckpt"'},
    ),
    Migration(
        "DeepSpeed",
        "from_deepspeed.py",
        "deepspeed",
        killed_at=550,  # of 100 steps an epoch
        killed_after=150,
        back={
            'load_checkpoint("checkpoints")': 'load_checkpoint("out")',
            'client_state["epoch"] if client_state else 0': "6",
        },
        ranks={"--ranks 4 --stage 3": "--ranks 1 --stage 1"},
    ),
    Migration(
        "`torch.save`",
        "from_torch_save.py",
        "torch",
        killed_at=450,  # of 100 steps an epoch
        killed_after=250,
        back={
            'saved["model"]': 'torch.load("out.pt")',
            'saved["optimizer"]': 'torch.load("out/optimizer.bin")',
            'saved["epoch"] + 1': "6",
        },
    ),
]
CASES = [pytest.param(each, id=each.title.strip("`")) for each in MIGRATIONS]


def applied(diff: str, program: str) -> str:
    """The program with a diff of the page, whose lines have to stand in it in this order."""
    lines, position = program.splitlines(), 0
    for each in diff.splitlines():
        mark, text = each[0], each[1:]
        if mark == "+":
            lines.insert(position, text)
            position += 1
        elif text.strip() != "...":
            assert text in lines[position:], f"the diff does not apply: {each}"
            position = lines.index(text, position)
            if mark == "-":
                del lines[position]
            else:
                position += 1
    return "\n".join(lines)


def new_place(directory: Path, program: str) -> Workplace:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    place = Workplace(directory, PAGE, {**ranks, **address})
    (place.directory / "train.py").write_text(program, encoding="utf-8")
    return place


def kill_at(place: Workplace, step: int, **variables: str) -> None:
    started = place.start("python train.py", HOW_TO_WAIT_AT=str(step), **variables)
    place.wait_for_ranks(1, started)
    started.kill_tree()
    for each in place.records.glob("waits-*"):
        each.unlink()


def migrate(place: Workplace, each: Migration, **variables: str) -> None:
    """Kills the stock script, continues with resumekit, kills that, and goes back."""
    kill_at(place, each.killed_at)
    for command in each.commands("import"):
        place.run(command)
    (place.directory / "train.py").write_text(each.migrated, encoding="utf-8")
    kill_at(place, each.killed_after, **variables)
    for command in each.commands("export"):
        for old, new in each.ranks.items():
            assert command.count(old) == 1
            command = command.replace(old, new)
        place.run(command)
    (place.directory / "train.py").write_text(each.returned, encoding="utf-8")
    place.run(each.command)


def uninterrupted(directory: Path, each: Migration) -> Workplace:
    """The run that the stock script would have been."""
    pytest.importorskip(each.needs)
    if each.needs == "deepspeed":
        compile_once()
    whole = new_place(directory, each.stock)
    whole.run("python train.py")
    return whole


@pytest.mark.parametrize("each", CASES)
@pytest.mark.quick("torch.save")
def test_a_migration_and_the_way_back_train_as_the_stock_script(
    each: Migration, tmp_path: Path
) -> None:
    whole = uninterrupted(tmp_path / "whole", each)
    place = new_place(tmp_path / "migrated", each.stock)
    migrate(place, each)
    assert not difference(whole, place)
    # The launch with resumekit continued after the import, and the last one after its save.
    _, with_resumekit, last = place.launches()
    assert len(with_resumekit) == each.killed_after
    assert len(last) < len(whole.launches()[0]) - each.killed_at


@pytest.mark.full
def test_without_the_optimizer_of_the_import_the_run_continues_otherwise(tmp_path: Path) -> None:
    """The negative control of the migrations."""
    each = MIGRATIONS[-1]
    whole = uninterrupted(tmp_path / "whole", each)
    place = new_place(tmp_path / "migrated", each.stock)
    migrate(place, each, **without("optimizer"))
    assert difference(whole, place) == "rank 0: launch 1 trained otherwise"


@pytest.mark.parametrize("each", CASES)
def test_a_diff_applies_to_its_own_script_alone(each: Migration) -> None:
    compile(each.migrated, "train.py", "exec")
    for other in (other for other in MIGRATIONS if other != each):
        with pytest.raises(AssertionError, match="the diff does not apply"):
            applied(each.diff, other.stock)
