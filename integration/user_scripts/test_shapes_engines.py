"""Forms of keeping state under Accelerate and DeepSpeed, on two ranks that are killed twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from cold_launches import ColdLaunches
from judge import Judge, Verdict, assert_verdict

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from shapes_of_engines import FORMS

KILLS = (10, 13)
SCRIPT = Path(__file__).with_name("shapes_of_engines.py")
ENGINES = ("accelerate", "deepspeed")
EACH = pytest.mark.parametrize(
    "shape", [f"{engine}_{form}" for engine in ENGINES for form in FORMS]
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("engines"), ColdLaunches(SCRIPT, num_ranks=2))


@pytest.mark.quick("deepspeed_in_a_class")
@EACH
def test_a_loop_of_an_engine_is_exact(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(f"shapes_of_engines:{shape}", kills=KILLS), Verdict.EXACT)


@pytest.mark.full
@EACH
def test_without_loop_variables_it_differs(judge: Judge, shape: str) -> None:
    judgement = judge.verdict(f"shapes_of_engines:{shape}", kills=KILLS[:1], loop_variables="off")
    assert judgement.difference
