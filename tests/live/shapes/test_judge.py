"""The judge itself: each verdict is reached, and only by what deserves it."""

from __future__ import annotations

from judge import Judge, Verdict


def judged(judge: Judge, name: str) -> tuple[Verdict, str]:
    judgement = judge.verdict(f"shapes_of_the_judge:{name}", names=("gauge",))
    return judgement.verdict, judgement.difference


def test_state_that_is_lost_without_a_report_is_silent(judge: Judge) -> None:
    expected = (Verdict.SILENT, "step 10 of launch 2 differs")
    assert judged(judge, "state_that_no_library_sees") == expected


def test_a_warning_at_the_first_save_with_a_refusal_under_strict_is_a_report(judge: Judge) -> None:
    assert judged(judge, "state_reported_in_time")[0] is Verdict.REPORTED


def test_a_report_after_the_first_save_is_too_late(judge: Judge) -> None:
    assert judged(judge, "state_reported_too_late")[0] is Verdict.SILENT


def test_a_report_of_something_else_does_not_count(judge: Judge) -> None:
    assert judged(judge, "another_state_reported")[0] is Verdict.SILENT


def test_an_error_of_the_library_at_the_resume_is_a_refusal(judge: Judge) -> None:
    assert judged(judge, "resume_refused")[0] is Verdict.REFUSED


def test_a_script_that_fails_after_its_resume_is_not_exact(judge: Judge) -> None:
    expected = (Verdict.SILENT, "launch 2 failed")
    assert judged(judge, "resume_that_fails") == expected


def test_one_bit_of_one_weight_in_a_step_that_is_repeated_later_is_seen(judge: Judge) -> None:
    expected = (Verdict.SILENT, "step 10 of launch 2 differs")
    assert judged(judge, "one_wrong_bit_in_a_repeated_step") == expected


def test_a_training_that_ends_early_is_not_exact(judge: Judge) -> None:
    expected = (Verdict.SILENT, "it ended after step 19 of 21")
    assert judged(judge, "training_that_ends_early") == expected


def test_a_save_that_changes_the_training_is_seen_in_the_first_launch(judge: Judge) -> None:
    expected = (Verdict.SILENT, "step 4 of launch 1 differs")
    assert judged(judge, "save_that_changes_the_training") == expected


def test_a_loop_without_state_is_exact(judge: Judge) -> None:
    judgement = judge.verdict("shapes_without_state:running_loss")
    assert (judgement.verdict, judgement.noise) == (Verdict.EXACT, [])
