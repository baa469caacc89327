"""What a checkpoint has of the variables of a loop."""

from __future__ import annotations

from typing import Annotated, TypedDict

from resumekit.capture.user_state.table import Followable, SavedSlot, UserStateFields
from resumekit.live.counts_and_operands import EnumerateCounts
from resumekit.state import Count


class _OptionalScript(TypedDict, total=False):
    loaders: dict[str, str]
    counts: EnumerateCounts
    epoch_counts: EnumerateCounts
    ranges: dict[str, int]


class _Script(_OptionalScript):
    """What the code was at the fetch, and what it begins with."""

    sites: list[_Site]
    digests: dict[str, str]


class _Site(TypedDict):
    """``Site``."""

    file: str
    function: str
    digest: str
    lasti: Count
    line: Count


class _VariablesFields(UserStateFields):
    at_epoch: list[SavedSlot]
    script: _Script


VariablesContent = Annotated[_VariablesFields, Followable()]
