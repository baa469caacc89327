"""Reads the remedy of an error, for the tests that follow it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from resumekit.errors import ResumekitError


class Remedy:
    """The remedy that a test follows, as it stands in the sources: ``{}`` for what is inserted."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pattern = ".+?".join(map(re.escape, text.split("{}")))

    def in_text(self, message: str) -> str:
        """The remedy as it stands in a message."""
        found = re.search(rf"{self._pattern}(?=$|\.?$|[.,;)])", message)
        assert found, f"{message!r} has no {self.text!r}"
        return found[0]

    def of(self, call: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
        """The remedy of the error that a call raises."""
        with pytest.raises(ResumekitError) as error:
            call(*arguments, **keywords)
        assert error.value.remedy, error.value
        assert re.fullmatch(self._pattern, error.value.remedy), error.value
        return error.value.remedy
