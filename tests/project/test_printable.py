"""Text of other origin is escaped wherever it is printed."""

from __future__ import annotations

import logging

import pytest

from resumekit.errors import ConfigurationError
from resumekit.log import logger
from resumekit.printable import printable


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain text, ümläut 漢字 \\", "plain text, ümläut 漢字 \\"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\tc\x7f\x9b", "a\\nb\\r\\tc\\x7f\\x9b"),
        ("\u202e\u2066\u200b\u2028\ufeff", "\\u202e\\u2066\\u200b\\u2028\\ufeff"),
        ("\udcff\ud800\U000e0001", "\\udcff\\ud800\\U000e0001"),
    ],
)
def test_what_is_not_printable_is_escaped_and_escaping_twice_changes_nothing(
    text: str, escaped: str
) -> None:
    assert printable(text) == escaped
    assert printable(escaped) == escaped
    assert escaped.encode("utf-8")


def test_errors_are_one_printable_line() -> None:
    error = ConfigurationError(
        "a\nb", found="\x1b[31m", expected="\u202e", remedy="Rename 'x\ny' first"
    )
    assert str(error) == "a\\nb: \\x1b[31m, expected \\u202e. Rename 'x\\ny' first. [RK-101]"
    assert error.args == (str(error),)


def test_log_lines_are_printable_for_every_handler(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "resumekit"):
        logger.warning("%s: %s", "a\nb", "\x1b[31m")
        logger.info("plain %s", 1)
    assert caplog.messages == ["a\\nb: \\x1b[31m", "plain 1"]
    assert caplog.records[1].args == (1,)
