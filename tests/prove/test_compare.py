"""Two traces in, one verdict out: every kind of record, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resumekit.errors import TraceError
from resumekit.prove import compare
from resumekit.record.moments import TraceTail, read_trace

STATE = {"model": {"0.weight": "aa", "0.bias": "bb"}, "optimizer": {"0.weight.exp_avg": "cc"}}


def step(number: int, **fields: Any) -> dict[str, Any]:
    plain = {
        "epoch": 0,
        "batch": number - 1,
        "values": {"loss": float(1 / number).hex()},
        "lr": [(0.1).hex()],
        "samples": [number, number + 1],
        "rng": {"python": "p", "torch": f"t{number}"},
    }
    return {"kind": "step", "step": number, **plain, **fields}


def state(kind: str, number: int, **components: Any) -> dict[str, Any]:
    return {"kind": kind, "step": number, "components": {**STATE, **components}}


def write_launch(
    directory: Path, launch: int, records: list[dict[str, Any]], *, rank: int = 0, torn: str = ""
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{launch:020d}-{100 + launch}-rank-{rank:05d}.jsonl"
    lines = [{"kind": "start", "rank": rank, "pid": 1}, *records]
    path.write_text("".join(json.dumps({**line, "time_ns": 1}) + "\n" for line in lines) + torn)


def reference_records(last: int = 6) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for number in range(1, last + 1):
        records.append(step(number))
        if number % 2 == 0:
            records.append(state("checkpoint", number))
    return [*records, state("end", last)]


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    write_launch(tmp_path / "reference", 0, reference_records())
    return tmp_path / "reference"


def killed_then(tmp_path: Path, *relaunch: dict[str, Any], until: int = 5, torn: str = "") -> Path:
    """A candidate that was killed after step 5 and relaunched with these records."""
    first = [r for r in reference_records() if r["kind"] != "end" and r["step"] <= until]
    write_launch(tmp_path / "candidate", 0, first, torn=torn)
    write_launch(tmp_path / "candidate", 1, list(relaunch))
    return tmp_path / "candidate"


def good_relaunch() -> list[dict[str, Any]]:
    return [
        state("resumed", 4),
        step(5),
        step(6),
        state("checkpoint", 6),
        state("end", 6),
    ]


def test_a_run_that_resumed_and_repeated_a_step_is_exact(reference: Path, tmp_path: Path) -> None:
    verdict = compare(reference, killed_then(tmp_path, *good_relaunch()))
    assert verdict.exact, str(verdict)
    assert (verdict.num_steps, verdict.num_resumes) == (6, 1)
    assert (verdict.resumes[0].step, verdict.resumes[0].num_repeated_steps) == (4, 1)


def test_a_run_that_resumed_may_be_the_reference(reference: Path, tmp_path: Path) -> None:
    resumed = killed_then(tmp_path, *good_relaunch())
    assert compare(resumed, reference, expect_resume=False).exact
    wrong = reference_records()
    wrong[5] = state("checkpoint", 4, model={})
    write_launch(tmp_path / "wrong", 0, wrong)
    found = compare(resumed, tmp_path / "wrong", expect_resume=False).divergence
    assert found is not None
    assert (found.step, found.event, found.component) == (4, "checkpoint", "model")


def test_a_resume_within_one_process_is_a_resume(reference: Path, tmp_path: Path) -> None:
    records = [*reference_records()[:7], *good_relaunch()]
    write_launch(tmp_path / "candidate", 0, records)
    assert compare(reference, tmp_path / "candidate", expect_resume=False).exact


def test_a_torn_last_line_is_left_out(reference: Path, tmp_path: Path) -> None:
    torn = '{"kind":"step","step":6,"los'
    assert compare(reference, killed_then(tmp_path, *good_relaunch(), torn=torn)).exact


def test_a_damaged_line_in_the_middle_is_an_error(reference: Path, tmp_path: Path) -> None:
    candidate = killed_then(tmp_path, *good_relaunch(), torn='{"kind":"st\n{"kind": "x"}\n')
    with pytest.raises(TraceError, match="not a record"):
        compare(reference, candidate)


def test_a_directory_without_a_trace_is_an_error(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace"):
        compare(reference, tmp_path)


@pytest.mark.parametrize(
    ("changed", "component", "leaf"),
    [
        ({"values": {"loss": (9.0).hex()}}, "loss", ""),
        ({"values": {}}, "loss", ""),
        ({"values": {"loss": (1 / 6).hex(), "norm": 1}}, "norm", ""),
        ({"lr": [(0.2).hex()]}, "lr", "group0"),
        ({"lr": [(0.1).hex(), (0.1).hex()]}, "lr", "group1"),
        ({"samples": [8, 9]}, "data", "samples"),
        ({"epoch": 1}, "data", "epoch"),
        ({"batch": 0}, "data", "batch"),
        ({"rng": {"python": "p", "torch": "other"}}, "rng", "torch"),
        ({"rng": {"python": "p"}}, "rng", "torch"),
    ],
)
def test_every_field_of_a_step_is_compared(
    reference: Path, tmp_path: Path, changed: dict[str, Any], component: str, leaf: str
) -> None:
    relaunch = good_relaunch()
    relaunch[2] = step(6, **changed)
    verdict = compare(reference, killed_then(tmp_path, *relaunch))
    found = verdict.divergence
    assert found is not None
    assert (found.step, found.rank, found.component, found.leaf) == (6, 0, component, leaf)
    assert found.found != found.expected
    assert verdict.is_reproducible


@pytest.mark.parametrize(("index", "event"), [(0, "resumed"), (3, "checkpoint"), (4, "end")])
def test_every_kind_of_state_is_compared(
    reference: Path, tmp_path: Path, index: int, event: str
) -> None:
    relaunch = good_relaunch()
    record = relaunch[index]
    relaunch[index] = state(event, record["step"], optimizer={"0.weight.exp_avg": "dd"})
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.event, found.component, found.leaf) == (event, "optimizer", "0.weight.exp_avg")
    assert str(found) == (
        f"step {record['step']}, rank 0: optimizer: 0.weight.exp_avg differs "
        "(found dd, expected cc)"
    )


def test_a_step_that_is_saved_twice_may_be_resumed_from_either_save(
    reference: Path, tmp_path: Path
) -> None:
    due, ended = (state("checkpoint", 6, data={"batch": name}) for name in ("last", "none"))
    records = [*reference_records()[:-2], due, ended, state("end", 6)]
    write_launch(tmp_path / "twice", 0, records)
    write_launch(tmp_path / "resumed", 0, records[:-2])
    write_launch(tmp_path / "resumed", 1, [{**due, "kind": "resumed"}, *records[-2:]])
    verdict = compare(tmp_path / "twice", tmp_path / "resumed")
    assert verdict.exact, str(verdict)
    write_launch(tmp_path / "resumed", 1, [{**due, "kind": "resumed"}, {**ended, **due, "step": 4}])
    assert not compare(tmp_path / "twice", tmp_path / "resumed").exact


def test_a_component_that_is_missing_is_named(reference: Path, tmp_path: Path) -> None:
    relaunch = good_relaunch()
    del relaunch[0]["components"]["optimizer"]
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.component, found.found, found.expected) == ("optimizer", "absent", "present")


def test_a_leaf_that_is_missing_is_named(reference: Path, tmp_path: Path) -> None:
    relaunch = good_relaunch()
    relaunch[0] = state("resumed", 4, model={"0.weight": "aa"})
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.component, found.leaf, found.found) == ("model", "0.bias", "absent")


def test_the_earliest_step_is_named_and_the_rest_is_listed(reference: Path, tmp_path: Path) -> None:
    relaunch = good_relaunch()
    relaunch[0] = state("resumed", 4, optimizer={}, rng={"torch": "x"})
    relaunch[1] = step(5, samples=[7, 7])
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.step, found.component, found.others) == (4, "optimizer", ("rng",))


def test_a_run_that_counts_from_the_start_again_lost_its_progress(
    reference: Path, tmp_path: Path
) -> None:
    resumed = state("resumed", 4, progress={"step": "0"})
    candidate = killed_then(tmp_path, resumed, step(1, epoch=2))
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.step, found.event, found.component) == (4, "resumed", "progress")


def test_a_step_that_a_later_resume_repeated_is_judged_too(reference: Path, tmp_path: Path) -> None:
    candidate = killed_then(tmp_path, state("resumed", 4), step(5, lr=[(0.5).hex()]))
    write_launch(candidate, 2, good_relaunch())
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.launch, found.step, found.component) == (1, 5, "lr")


def test_a_run_that_lacks_a_step_is_not_exact(reference: Path, tmp_path: Path) -> None:
    relaunch = [record for record in good_relaunch() if record["step"] != 5]
    found = compare(reference, killed_then(tmp_path, *relaunch, until=4)).divergence
    assert found is not None
    assert (found.step, found.component, found.found) == (5, "run", "never trained")


def test_steps_after_a_resume_do_not_count_twice(reference: Path, tmp_path: Path) -> None:
    # Killed after step 5, resumed at 4, and never trained 5 and 6 again.
    found = compare(reference, killed_then(tmp_path, state("resumed", 4))).divergence
    assert found is not None
    assert (found.step, found.component) == (5, "run")


def test_a_run_that_trains_too_far_is_not_exact(reference: Path, tmp_path: Path) -> None:
    relaunch = [*good_relaunch()[:4], step(7), state("end", 7)]
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.step, found.component, found.expected) == (7, "run", "no such step")


def test_a_run_that_never_reaches_its_end_is_not_exact(reference: Path, tmp_path: Path) -> None:
    found = compare(reference, killed_then(tmp_path, *good_relaunch()[:4])).divergence
    assert found is not None
    assert (found.step, found.component, found.leaf) == (6, "run", "end")


def test_an_end_at_another_step_is_not_exact(reference: Path, tmp_path: Path) -> None:
    relaunch = [*good_relaunch()[:4], state("end", 5)]
    found = compare(reference, killed_then(tmp_path, *relaunch)).divergence
    assert found is not None
    assert (found.step, found.component, found.leaf) == (5, "run", "end")


def test_a_run_that_always_starts_again_never_resumed(reference: Path, tmp_path: Path) -> None:
    first = reference_records()[:1]
    write_launch(tmp_path / "candidate", 0, first)
    write_launch(tmp_path / "candidate", 1, reference_records())
    found = compare(reference, tmp_path / "candidate").divergence
    assert found is not None
    assert (found.component, found.expected) == ("run", "a resume")
    assert compare(reference, tmp_path / "candidate", expect_resume=False).exact


def test_a_fresh_start_over_a_checkpoint_is_not_exact(reference: Path, tmp_path: Path) -> None:
    candidate = killed_then(tmp_path, *reference_records()[:3])
    write_launch(candidate, 2, [state("resumed", 2), *reference_records()[3:]])
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.launch, found.component) == (1, "run")
    assert found.expected == "a resume from the checkpoint of step 4"


def test_a_checkpoint_the_reference_has_not_is_compared_with_the_run_itself(
    reference: Path, tmp_path: Path
) -> None:
    first = [*reference_records()[:4], state("checkpoint", 3, model={"0.weight": "own"})]
    write_launch(tmp_path / "candidate", 0, first)
    rest = [step(4), state("checkpoint", 4), *good_relaunch()[1:]]
    write_launch(tmp_path / "candidate", 1, [state("resumed", 3), *rest])
    found = compare(reference, tmp_path / "candidate").divergence
    assert found is not None
    assert (found.step, found.component, found.leaf) == (3, "model", "0.weight")


def test_the_buckets_of_ddp_are_named_after_what_changes_them(tmp_path: Path) -> None:
    def saved(kind: str, count: str, flag: str) -> dict[str, Any]:
        parts = {"callbacks/loops": {"count": count}, "model/gradient_buckets": {"flag": flag}}
        return state(kind, 1, **parts)

    records = [step(1), saved("checkpoint", "1", "a"), step(2)]
    write_launch(tmp_path / "reference", 0, records)
    write_launch(tmp_path / "candidate", 0, records[:2])
    write_launch(tmp_path / "candidate", 1, [saved("resumed", "0", "b"), step(2)])
    found = compare(tmp_path / "reference", tmp_path / "candidate").divergence
    assert found is not None
    assert found.component == "callbacks/loops"


def test_a_difference_before_the_first_kill_is_not_blamed_on_the_resume(
    reference: Path, tmp_path: Path
) -> None:
    first = [step(1), step(2), step(3, values={"loss": (5.0).hex()})]
    write_launch(tmp_path / "candidate", 0, first)
    write_launch(tmp_path / "candidate", 1, [state("resumed", 2, model={}), *good_relaunch()[1:]])
    verdict = compare(reference, tmp_path / "candidate")
    assert not verdict.exact
    assert not verdict.is_reproducible
    assert "NOT REPRODUCIBLE: step 3, rank 0: loss differs (found 5 = 0x1.4" in str(verdict)


def with_idle_state(records: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """The same records in a run that never seeds Python's generator and never draws from it."""
    for record in records:
        if record["kind"] == "step":
            record["rng"]["python"] = mark
        else:
            torch = f"t{record['step']}"
            record["components"] |= {"rng": {"python": mark, "torch": torch}}
            record["components"] |= {"extras": {"run_id": mark}}
    return records


def write_idle_runs(tmp_path: Path, *, after_the_kill: str) -> None:
    write_launch(tmp_path / "reference", 0, with_idle_state(reference_records(), "one"))
    before = [r for r in reference_records() if r["kind"] != "end" and r["step"] <= 5]
    write_launch(tmp_path / "candidate", 0, with_idle_state(before, "another"))
    write_launch(tmp_path / "candidate", 1, with_idle_state(good_relaunch(), after_the_kill))


def test_a_generator_that_is_never_drawn_from_may_start_anywhere(tmp_path: Path) -> None:
    write_idle_runs(tmp_path, after_the_kill="another")
    verdict = compare(tmp_path / "reference", tmp_path / "candidate")
    assert verdict.exact, str(verdict)
    assert verdict.own_values == ("rng: python", "extras: run_id")
    constants = "(each run has its own constant extras: run_id)"
    assert str(verdict).endswith(f"{constants}; kills inside saves: not tried")


def test_what_each_run_has_of_its_own_must_still_be_restored(tmp_path: Path) -> None:
    write_idle_runs(tmp_path, after_the_kill="a third")
    found = compare(tmp_path / "reference", tmp_path / "candidate").divergence
    assert found is not None
    assert (found.step, found.event, found.component) == (4, "resumed", "extras")
    assert found.others == ("rng",)
    assert (found.found, found.expected) == ("a third", "another")


@pytest.mark.parametrize(
    ("after_the_kill", "has_extras", "component"),
    [("another", False, None), ("another", True, "extras"), ("a third", False, "rng")],
)
def test_a_run_that_is_killed_before_its_first_checkpoint_is_recorded(
    tmp_path: Path, after_the_kill: str, has_extras: bool, component: str | None
) -> None:
    """The steps confirm which generators were restored; nothing confirms other constants."""
    rest = [state("resumed", 2), *reference_records()[3:]]
    launches = {
        ("reference", 0): with_idle_state(reference_records(), "one"),
        ("candidate", 0): with_idle_state([step(1), step(2)], "another"),
        ("candidate", 1): with_idle_state(rest, after_the_kill),
    }
    for (name, launch), records in launches.items():
        for record in records:
            if not has_extras and record["kind"] != "step":
                del record["components"]["extras"]
        write_launch(tmp_path / name, launch, records)
    found = compare(tmp_path / "reference", tmp_path / "candidate").divergence
    if component is None:
        assert found is None
    else:
        assert found is not None
        assert (found.step, found.event, found.component) == (2, "resumed", component)


def test_constant_weights_are_not_the_run_s_own(reference: Path, tmp_path: Path) -> None:
    relaunch = good_relaunch()
    frozen = {"0.weight": "other", "0.bias": "bb"}
    first = [step(1), step(2), state("checkpoint", 2, model=frozen), step(3)]
    write_launch(tmp_path / "candidate", 0, first)
    resumed = [state("resumed", 2, model=frozen), step(3), step(4), *relaunch[1:]]
    write_launch(tmp_path / "candidate", 1, resumed)
    verdict = compare(reference, tmp_path / "candidate")
    assert not verdict.is_reproducible


def test_ranks_are_compared_one_by_one(reference: Path, tmp_path: Path) -> None:
    write_launch(reference, 0, [step(n, samples=[10 + n]) for n in range(1, 7)], rank=1)
    candidate = killed_then(tmp_path, *good_relaunch())
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.step, found.rank, found.component) == (1, 1, "run")
    write_launch(candidate, 0, [step(n, samples=[10 + n]) for n in range(1, 6)], rank=1)
    write_launch(candidate, 1, [step(6, samples=[99])], rank=1)
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.step, found.rank, found.component, found.leaf) == (6, 1, "data", "samples")


def test_a_rank_the_reference_has_not_is_not_exact(reference: Path, tmp_path: Path) -> None:
    candidate = killed_then(tmp_path, *good_relaunch())
    write_launch(candidate, 0, [step(1)], rank=3)
    found = compare(reference, candidate).divergence
    assert found is not None
    assert (found.rank, found.component) == (3, "run")


@pytest.mark.parametrize(("loss", "component"), [(0.5, "optimizer"), (0.75, "model")])
def test_equal_losses_blame_the_update_and_other_losses_the_weights(
    tmp_path: Path, loss: float, component: str
) -> None:
    """In a script with step records alone, model and optimizer differ in the same record."""

    def record(number: int, mark: str, value: float) -> dict[str, Any]:
        components = {"model": {"w": mark}, "optimizer": {"state.0.exp_avg": mark}}
        return step(number, values={"loss": value.hex()}, components=components)

    write_launch(tmp_path / "reference", 0, [record(n, f"s{n}", 0.5) for n in (1, 2, 3)])
    write_launch(tmp_path / "candidate", 0, [record(n, f"s{n}", 0.5) for n in (1, 2)])
    write_launch(tmp_path / "candidate", 1, [record(3, "other", loss)])
    found = compare(tmp_path / "reference", tmp_path / "candidate").divergence
    assert found is not None
    assert (found.step, found.component) == (3, component)


def test_records_of_one_step_are_distinguished_by_their_order(tmp_path: Path) -> None:
    micro_steps = [step(1, samples=[1]), step(1, samples=[2]), step(2)]
    write_launch(tmp_path / "reference", 0, micro_steps)
    write_launch(tmp_path / "candidate", 0, [step(1, samples=[9]), *micro_steps[1:]])
    found = compare(tmp_path / "reference", tmp_path / "candidate", expect_resume=False).divergence
    assert found is not None
    assert (found.step, found.component, found.expected) == (1, "data", "[1]")


def test_a_step_counts_with_all_its_records(tmp_path: Path) -> None:
    records = [step(1), step(2), step(2, samples=[9]), step(3)]
    write_launch(tmp_path / "reference", 0, records)
    write_launch(tmp_path / "candidate", 0, records[:3])
    write_launch(tmp_path / "candidate", 1, [step(2), step(3)])
    found = compare(tmp_path / "reference", tmp_path / "candidate").divergence
    assert found is not None
    assert (found.step, found.component, found.found) == (2, "run", "never trained")


def test_long_lists_name_the_first_place_where_they_part(tmp_path: Path) -> None:
    samples = list(range(1000, 1100))
    write_launch(tmp_path / "reference", 0, [step(1, samples=samples)])
    write_launch(tmp_path / "candidate", 0, [step(1, samples=[*samples[:70], 5, *samples[71:]])])
    found = compare(tmp_path / "reference", tmp_path / "candidate", expect_resume=False).divergence
    assert found is not None
    assert (found.found, found.expected) == ("5 at position 70", "1070")


def test_launch_folders_keep_the_launch_of_a_rank_that_died_early(tmp_path: Path) -> None:
    write_launch(tmp_path / "launch-00000", 0, [step(1)])
    write_launch(tmp_path / "launch-00001", 0, [step(2)])
    write_launch(tmp_path / "launch-00001", 0, [step(2)], rank=1)
    trace = read_trace(tmp_path)
    assert [attempt.launch for attempt in trace[0]] == [0, 1]
    assert [attempt.launch for attempt in trace[1]] == [1]


def test_the_tail_follows_a_trace_that_is_being_written(tmp_path: Path) -> None:
    tail = TraceTail(tmp_path)
    assert tail.poll() is None
    write_launch(tmp_path, 0, [step(1), step(2)], torn='{"kind":"step","ste')
    assert tail.poll() == 2
    path = next(tmp_path.glob("*.jsonl"))
    with path.open("a") as file:
        file.write('p":3,"time_ns":1}\n')
    assert tail.poll() == 3


# ---------------------------------------------------------------------------------- a tolerance


@pytest.mark.parametrize(("factor", "is_within"), [(1 + 1e-7, True), (1 + 1e-3, False)])
def test_a_tolerance_accepts_small_differences_of_values_and_is_stated(
    reference: Path, tmp_path: Path, factor: float, is_within: bool
) -> None:
    relaunch = good_relaunch()
    relaunch[2] = step(6, values={"loss": float(factor / 6).hex()})
    relaunch[4] = state("end", 6, model={"0.weight": "other"})
    candidate = killed_then(tmp_path, *relaunch)
    assert not compare(reference, candidate).exact
    verdict = compare(reference, candidate, tolerance=1e-6)
    assert verdict.exact == is_within
    assert ("EQUAL WITHIN 1e-06: 6 steps" in str(verdict)) == is_within
    assert ("DIVERGED (tolerance of values 1e-06): step 6" in str(verdict)) != is_within
    assert ("kills inside saves: not tried" in str(verdict)) == is_within


def test_a_tolerance_does_not_accept_another_batch(reference: Path, tmp_path: Path) -> None:
    relaunch = good_relaunch()
    relaunch[1] = step(5, samples=[5, 7])
    verdict = compare(reference, killed_then(tmp_path, *relaunch), tolerance=0.5)
    assert verdict.divergence is not None
    assert verdict.divergence.component == "data"
