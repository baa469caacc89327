"""Repeats steps of a past run, bit for bit, and compares them with what the run recorded."""

from __future__ import annotations

from resumekit.replay.result import CheckpointResult, RankResult, ReplayResult
from resumekit.replay.runner import replay
from resumekit.replay.running import isolated

__all__ = ["CheckpointResult", "RankResult", "ReplayResult", "isolated", "replay"]
