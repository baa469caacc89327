"""Findings as rows of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resumekit.prove.causes import Cause, Finding
from resumekit.record.moments import STEP

_DIGEST_LETTERS = 16  # the shortest digest in a trace


def finding_rows(findings: Iterable[Finding]) -> dict[str, list[dict[str, Any]]]:
    """The rows of causes and of consequences, as ``findings.html.j2`` takes them."""
    rows: dict[str, list[dict[str, Any]]] = {"causes": [], "consequences": []}
    for each in findings:
        kind = "consequences" if each.cause is Cause.CONSEQUENCE else "causes"
        rows[kind].append(_row(each))
    return rows


def causes_in_words(findings: Iterable[Finding]) -> str:
    """Each component with its likely cause, without consequences."""
    causes = [each for each in findings if each.cause is not Cause.CONSEQUENCE]
    return "; ".join(f"{each.component}: {each.cause.value}" for each in causes)


def _row(finding: Finding) -> dict[str, str]:
    where = f"step {finding.moment.step}"
    if finding.moment.kind != STEP:
        where = f"{finding.moment.kind}, {where}"
    leaf, values = next(iter(finding.leaves.items()))
    found, expected = ("absent" if each is None else _short(each) for each in values)
    more = len(finding.leaves) - 1
    return {
        "component": finding.component,
        "where": where,
        "leaf": leaf + (f" and {more} more" if more else ""),
        "found": found,
        "expected": expected,
        "cause": finding.cause.value,
        "evidence": finding.evidence,
    }


def _short(text: str) -> str:
    """A digest cut to what a reader compares, a float as a decimal, a list cut."""
    if text.lstrip("-").startswith("0x"):
        return f"{float.fromhex(text):.9g}"
    text = text.removeprefix("digest ")
    if len(text) >= _DIGEST_LETTERS and all(letter in "0123456789abcdef" for letter in text):
        return f"{text[:8]}…"
    return text if len(text) <= 40 else f"{text[:36]}…"
