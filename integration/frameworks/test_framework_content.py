"""Content that is wrong under right digests, in the checkpoints of frameworks.

The mutations and what they may come to are those of ``tests/faults/test_content.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mutated_trainings import FRAMEWORKS, judge_of
from one_rank import DEPRECATIONS

from crashlab.content import mutations
from crashlab.judging import NEWEST
from resumekit.run.resuming import finder
from resumekit.state import Checked

pytestmark = [
    *DEPRECATIONS,
    # lightning 2.6 utilities/_pytree.py calls what torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    # Of settings: loaders without workers, more lines of the log than batches, a folder with files.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]


@pytest.mark.quick("Trainer-70*", "Accelerate-70*", "Lightning-70*")  # DeepSpeed takes longest
@pytest.mark.parametrize(
    ("first", "apart"), [(70, 1499), pytest.param(3, 23, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_every_mutation_is_a_typed_error_before_anything_changes_or_loads(
    kind: str,
    first: int,
    apart: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with judge_of(kind, tmp_path) as (judge, run):
        chosen = [*mutations(run / NEWEST)][first::apart]
        counts, wrong = judge.judged(chosen)
    name = f"{kind}, every {apart}th from {first}"
    record_property(f"mutations of content, {name}", f"{len(chosen)}: {dict(counts)}")
    assert not wrong
    assert counts["passed over"] > len(chosen) // 5


@pytest.mark.quick("Lightning")
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_without_the_check_the_same_mutations_are_found_broken(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with judge_of(kind, tmp_path) as (judge, run):
        monkeypatch.setattr(finder, "check_contents", lambda *_: None)
        monkeypatch.setattr(Checked, "check_content", lambda *_: None)
        chosen = [
            each
            for each in mutations(run / NEWEST)
            if each.path[0] in ("progress", "data") and len(each.path) < 3
        ]
        _, wrong = judge.judged(chosen[::9])
    assert len(wrong) > 1
