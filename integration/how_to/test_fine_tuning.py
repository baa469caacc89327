"""The page on fine-tuning: from the weights of another run, killed and continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from how_to_pages import Page, Workplace, difference, num_repeated, same, without

pytestmark = pytest.mark.full

PAGE = Page("fine-tuning")
WAIT = {"HOW_TO_WAIT_AT": "13"}
PREPARE = {"python finetune.py": "resumekit fork", "python new_head.py": "resumekit export"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("pretrained") / "run", PAGE)
    place.run("python pretrain.py")
    return place


def prepared(directory: Path, pretrained: Workplace, start: str) -> Workplace:
    """A directory with the pretrained run, after the command that the page has before another."""
    place = Workplace(directory, PAGE)
    shutil.copytree(pretrained.directory / "runs", place.directory / "runs")
    place.run(PAGE.command(PREPARE[start]))
    return place


def killed(directory: Path, pretrained: Workplace, start: str, **variables: str) -> Workplace:
    place = prepared(directory, pretrained, start)
    started = place.start(PAGE.command(start), **WAIT)
    place.wait_for_ranks(1, started)
    started.kill_tree()
    place.run(PAGE.command(start), **variables)
    return place


@pytest.mark.parametrize("start", PREPARE)
def test_a_fine_tuning_begins_with_the_weights_and_resumes_itself(
    tmp_path: Path, pretrained: Workplace, start: str
) -> None:
    whole = prepared(tmp_path / "whole", pretrained, start)
    whole.run(PAGE.command(start))
    (steps,) = whole.launches()
    (source,) = pretrained.launches()
    is_whole_model = "finetune" in start
    # With a new head only that is trained, and it does not have the weights of the former one.
    assert is_whole_model == (len(steps[0]["before"]) == len(source[-1]["weights"]))
    if is_whole_model:
        assert same(steps[0]["before"], source[-1]["weights"])
    resumed = killed(tmp_path / "killed", pretrained, start)
    assert not difference(whole, resumed)
    assert num_repeated(whole, resumed) == 3


def test_without_the_optimizer_it_continues_otherwise(
    tmp_path: Path, pretrained: Workplace
) -> None:
    start = "python finetune.py"
    whole = prepared(tmp_path / "whole", pretrained, start)
    whole.run(PAGE.command(start))
    resumed = killed(tmp_path / "killed", pretrained, start, **without("optimizer"))
    assert "trained otherwise" in difference(whole, resumed)
