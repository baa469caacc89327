"""Everything the save protocol does is needed: without it, the explorer finds a broken promise.

A mutant is never a change of product code, see ``crashlab.mutants``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from crashlab.crashes import Renames
from crashlab.disk import FileNode
from crashlab.explorer import explore
from crashlab.faulty_launches import (
    relaunched_next_to_a_survivor,
    trained_on_after_a_failed_sync,
)
from crashlab.jobs import Job
from crashlab.mutants import (
    AcceptsAnotherAttempt,
    AcceptsAnotherSave,
    AcceptsAnotherStep,
    DeletesPinnedCheckpoints,
    EmptiesTheTrashBeforeTheSync,
    FixedTemporaryName,
    IgnoresFailures,
    IgnoresMissingRanks,
    LeavesPartsInPlace,
    LinksAcrossARepeatedStep,
    LinksToTheNewest,
    LinksUncompared,
    MovesInsteadOfLinking,
    OverwritesTheStep,
    PrunesTheNewest,
    ReadsUnchecked,
    RenamesBeforeFsync,
    RetainsBeforeCommit,
    RetainsTwoBeforeCommit,
    RetriesAFailedSync,
    SyncLabels,
    WithoutMarks,
    WritesInPlace,
    dropping,
)
from crashlab.recording import RUN, Recording
from crashlab.scenarios import SCENARIOS, Lab
from resumekit.errors import ResumekitError
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store

pytestmark = pytest.mark.full  # minutes

RecordProperty = Callable[[str, object], None]

# Syncs that no promise about checkpoints rests on.
REASON = "fsync quarantine/step-N.reason.json"
HARMLESS = {
    REASON: "it is for people; nothing reads it",
    "fsync_dir the run directory after rename to quarantine/step-N": (
        "the damaged directory may come back under its old name; it is found and put aside again"
    ),
}
HARMLESS_IN_PLACE = {
    **HARMLESS,
    "fsync step-N.incomplete": "its name counts; the text in it is for people",
    "fsync_dir the run directory after mkdir quarantine": (
        "a later sync covers it, and until then a damaged directory may be lost on its way"
    ),
}


IN_PLACE = Lab(is_in_place=True)


def _syncs(lab: Lab) -> dict[str, list[str]]:
    """Every sync that the protocol makes, with the scenarios that make it."""
    found: dict[str, list[str]] = {}
    for name, scenario in SCENARIOS.items():
        labels: set[str] = set()
        scenario(replace(lab, wrap=partial(SyncLabels, labels=labels)))
        for label in labels:
            found.setdefault(label, []).append(name)
    return found


SYNCS = _syncs(Lab())
SYNCS_IN_PLACE = _syncs(IN_PLACE)


def _first_violation(lab: Lab, scenarios: list[str], *, limit: int = 16) -> str | None:
    for name in scenarios:
        job = SCENARIOS[name](lab)
        for renames in Renames:
            violations = explore(job, limit=limit, renames=renames, enough=1).violations
            if violations:
                return violations[0]
    return None


def _count(record_property: RecordProperty, defect: str, violation: str) -> None:
    record_property(f"defect put into the protocol, {defect}", f"1: {violation.splitlines()[0]}")


@pytest.mark.parametrize("label", sorted(set(SYNCS) - set(HARMLESS)))
def test_leaving_out_a_sync_is_caught(label: str, record_property: RecordProperty) -> None:
    violation = _first_violation(Lab(wrap=dropping(label)), SYNCS[label])
    assert violation is not None
    _count(record_property, f"without {label}", violation)


@pytest.mark.parametrize("label", sorted(set(SYNCS_IN_PLACE) - set(HARMLESS_IN_PLACE)))
def test_leaving_out_a_sync_of_a_save_in_place_is_caught(
    label: str, record_property: RecordProperty
) -> None:
    lab = replace(IN_PLACE, wrap=dropping(label))
    violation = _first_violation(lab, SYNCS_IN_PLACE[label], limit=8)
    assert violation is not None
    _count(record_property, f"in place, without {label}", violation)


def test_a_save_in_place_without_its_mark_is_caught() -> None:
    assert _first_violation(replace(IN_PLACE, wrap=WithoutMarks), ["first_save"], limit=8)


def test_the_harmless_syncs_are_still_made() -> None:
    assert set(HARMLESS) <= set(SYNCS)
    assert set(HARMLESS_IN_PLACE) <= set(SYNCS_IN_PLACE)


@pytest.mark.parametrize("label", HARMLESS)
def test_a_sync_that_is_called_harmless_is(label: str) -> None:
    lab = Lab(wrap=dropping(label))
    assert _first_violation(lab, SYNCS[label], limit=6) is None


@pytest.mark.parametrize("label", HARMLESS_IN_PLACE)
def test_a_sync_of_a_save_in_place_that_is_called_harmless_is(label: str) -> None:
    lab = replace(IN_PLACE, wrap=dropping(label))
    assert _first_violation(lab, SYNCS_IN_PLACE[label], limit=2) is None


@pytest.mark.parametrize(
    "lab",
    [
        pytest.param(Lab(wrap=RenamesBeforeFsync), id="rename before fsync"),
        pytest.param(Lab(wrap=WritesInPlace), id="no staging"),
        pytest.param(Lab(store_class=OverwritesTheStep), id="in-place overwrite of a step"),
        pytest.param(Lab(store_class=RetainsBeforeCommit), id="retention before commit"),
    ],
)
def test_another_order_is_caught(
    lab: Lab, request: pytest.FixtureRequest, record_property: RecordProperty
) -> None:
    violation = _first_violation(lab, list(SCENARIOS))
    assert violation is not None
    _count(record_property, request.node.callspec.id, violation)


def test_committing_before_every_rank_has_finished_is_caught() -> None:
    job = SCENARIOS["next_save"](Lab(world_size=2, barriers=False))
    calls = job.recording.operations
    first_of_commit = next(i for i, call in enumerate(calls) if "manifest.json" in call.call)
    # Rank 0 compares the sizes before it commits: rank 1 has written all, and not synced all.
    written = {i for i, call in enumerate(calls) if call.rank == 1 and "fsync" not in call.call}

    def possible(done: frozenset[int]) -> bool:
        return first_of_commit not in done or written <= done

    assert explore(job, limit=16, possible=possible, enough=1).violations


@pytest.mark.parametrize(
    ("lab", "scenario"),
    [
        pytest.param(
            Lab(world_size=2, parts_class=IgnoresMissingRanks, barriers=False),
            "first_background_save",
            id="commit before all parts are there",
        ),
        pytest.param(
            Lab(world_size=2, parts_class=IgnoresFailures),
            "rank_that_reports_a_failure",
            id="part with an error counted as success",
        ),
        pytest.param(
            Lab(parts_class=AcceptsAnotherAttempt),
            "stale_parts_in_place",
            id="part of another attempt accepted",
        ),
        pytest.param(
            Lab(parts_class=AcceptsAnotherStep),
            "stale_parts_in_place",
            id="part of another step accepted",
        ),
        pytest.param(
            Lab(parts_class=AcceptsAnotherSave),
            "stale_parts_in_place",
            id="part of another save accepted",
        ),
        pytest.param(
            Lab(store_class=RetainsBeforeCommit),
            "background_saves_and_retention",
            id="retention before commit",
        ),
        pytest.param(
            Lab(wrap=EmptiesTheTrashBeforeTheSync),
            "background_saves_and_retention",
            id="trash emptied before the rename is durable",
        ),
        pytest.param(
            Lab(store_class=DeletesPinnedCheckpoints),
            "retention_of_a_pinned_checkpoint",
            id="pinned checkpoint deleted",
        ),
        pytest.param(
            Lab(store_class=PrunesTheNewest),
            "full_disk_at_the_start",
            id="newest checkpoint deleted on a full disk",
        ),
        pytest.param(
            Lab(wrap=EmptiesTheTrashBeforeTheSync),
            "full_disk_at_the_start",
            id="bytes removed on a full disk before the rename is durable",
        ),
        pytest.param(
            Lab(links_class=LinksToTheNewest),
            "sources_of_links_are_removed",
            id="link to the newest checkpoint",
        ),
        pytest.param(
            Lab(links_class=LinksAcrossARepeatedStep),
            "source_of_a_link_was_saved_twice",
            id="link while the newest checkpoint is replaced",
        ),
        pytest.param(
            Lab(files_class=LinksUncompared), "frozen_tensors_change", id="digest not compared"
        ),
        pytest.param(
            Lab(store_class=RetainsTwoBeforeCommit),
            "sources_of_links_are_removed",
            id="source of a link deleted before the link is durable",
        ),
        pytest.param(
            Lab(wrap=MovesInsteadOfLinking), "frozen_files_are_linked", id="move instead of a link"
        ),
    ],
)
def test_another_protocol_of_background_saves_and_links_is_caught(
    lab: Lab,
    scenario: str,
    request: pytest.FixtureRequest,
    record_property: RecordProperty,
) -> None:
    unchanged = Lab(world_size=lab.world_size)
    assert _first_violation(unchanged, [scenario], limit=2) is None
    violation = _first_violation(lab, [scenario])
    assert violation is not None
    _count(record_property, request.node.callspec.id, violation)


def _unlisted(job: Job) -> set[str]:
    """The files in its checkpoints that no manifest lists; a resume warns of them."""
    found = set[str]()
    for name in job.stores[0].step_names():
        manifest = job.stores[0].open_step(name).manifest
        listed = {f"/{entry.path}" for entry in manifest.files} | {"/manifest.json"}
        disk = job.recording.disk
        files = {
            path
            for path, number in disk.walk(disk.find(RUN / str(name)))
            if isinstance(disk.nodes[number], FileNode)
        }
        found |= files - listed
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_scenario_leaves_other_files_in_a_checkpoint(name: str) -> None:
    for is_in_place in (False, True):
        job = SCENARIOS[name](Lab(world_size=2, is_in_place=is_in_place))
        assert _unlisted(job) == set()


def test_parts_left_in_a_checkpoint_are_seen() -> None:
    assert _unlisted(SCENARIOS["first_background_save"](Lab(wrap=LeavesPartsInPlace)))


def test_trying_a_failed_fsync_again_is_caught() -> None:
    for number in range(100):
        job = trained_on_after_a_failed_sync(number, RetriesAFailedSync)
        assert job is not None, "no violation at any fsync"
        violations = explore(job, limit=8, enough=1).violations
        if any(violation.startswith("step-") for violation in violations):
            return


def _outcomes_next_to_a_survivor(lab: Lab) -> Iterator[str]:
    for at_call in range(1000):
        try:
            job = relaunched_next_to_a_survivor(lab, at_call=at_call)
        except ResumekitError as error:
            yield f"the save fails: {error}"
            continue
        if job is None:
            return
        again = Job(Recording.on(job.recording.disk))
        again.start()
        loaded = again.load_newest()
        if (loaded.name, loaded.content) != (StepName(2), job.attempted[StepName(2)]):
            yield f"{loaded.name} is loaded: {loaded.passed_over}"


def test_a_fixed_temporary_name_is_caught() -> None:
    assert list(_outcomes_next_to_a_survivor(Lab(wrap=FixedTemporaryName)))


def test_a_rank_that_outlives_its_job_does_no_harm_under_unique_names() -> None:
    assert list(_outcomes_next_to_a_survivor(Lab())) == []


def _wrong_content_after_damage(reader: type[Store]) -> Iterator[str]:
    job = SCENARIOS["next_save"](Lab(world_size=2))
    for path, number in job.recording.disk.walk(job.recording.disk.find(RUN / "step-00000002")):
        node = job.recording.disk.nodes[number]
        if not hasattr(node, "data") or path == "/manifest.json":
            continue
        for position in (0, len(node.data) // 2, len(node.data) - 1):
            disk = job.recording.disk.copy()
            disk.file(number).flip(position, 0x40)
            again = Job(Recording.on(disk), 2, store_class=reader)
            again.start()
            loaded = again.load_newest()
            if loaded.name is None or loaded.content != job.attempted[loaded.name]:
                yield f"{path} was damaged at {position}, and {loaded.name} is loaded"


def test_reading_without_checking_digests_is_caught() -> None:
    assert list(_wrong_content_after_damage(ReadsUnchecked))
    assert list(_wrong_content_after_damage(Store)) == []
