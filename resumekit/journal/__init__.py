"""The journal: one record for each optimizer step, and the comparison of repeated steps."""

from __future__ import annotations

from resumekit.journal.attempts import (
    AttemptVerdict,
    EarlierUse,
    Used,
    compared,
    earlier_use,
    lineage,
    sum_over_ranks,
    verdicts,
)
from resumekit.journal.comparison import Comparison, Difference, Verdict, worst
from resumekit.journal.files import (
    DIRECTORY,
    Attempt,
    JournalFile,
    find_attempts,
    limit_earlier,
    name_of,
    number_of_attempt,
)
from resumekit.journal.records import (
    COMMAND,
    LOSS,
    SAVE,
    STEP,
    Has,
    Header,
    Record,
    code_digests,
    environment,
    settings_digest,
)
from resumekit.journal.step_values import (
    LateLosses,
    RandomStates,
    SampleIds,
    learning_rates_digest,
    plain_loss,
    plain_rates,
)

__all__ = [
    "COMMAND",
    "DIRECTORY",
    "LOSS",
    "SAVE",
    "STEP",
    "Attempt",
    "AttemptVerdict",
    "Comparison",
    "Difference",
    "EarlierUse",
    "Has",
    "Header",
    "JournalFile",
    "LateLosses",
    "RandomStates",
    "Record",
    "SampleIds",
    "Used",
    "Verdict",
    "code_digests",
    "compared",
    "earlier_use",
    "environment",
    "find_attempts",
    "learning_rates_digest",
    "limit_earlier",
    "lineage",
    "name_of",
    "number_of_attempt",
    "plain_loss",
    "plain_rates",
    "settings_digest",
    "sum_over_ranks",
    "verdicts",
    "worst",
]
