"""Names of attributes that look like secrets: their values are in no checkpoint."""

from __future__ import annotations

import functools
import re
from typing import Any

from resumekit.capture.user_state.value_types import word_set

_ALWAYS_SECRET = word_set("apikey credential credentials passphrase passwd password pwd secret")
_SECRET_KEYS = word_set(
    """
    access account api auth aws client encryption hf hub license private secret service session
    signing ssh storage wandb
    """
)
_TOKENS_OF_TEXT = word_set(
    """
    bos cls current decoder end eos first forced image last mask new next pad per prev previous
    sep special start stop think unk
    """
)


def is_secret(name: str, value: Any) -> bool:
    """Whether an attribute looks like a secret: by the last words of its name, and text in it.

    ``hf_token``, ``api_key`` and ``password`` do; ``tokens``, ``token_count``, ``pad_token``,
    ``sort_key`` and ``key_padding`` do not, and a number never does.
    """
    return _names_secret(name) and _holds_text(value)


@functools.cache
def _names_secret(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [*filter(None, snake.split("_"))]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TOKENS_OF_TEXT
    if last == "key":
        return not before or before in _SECRET_KEYS
    return last in _ALWAYS_SECRET


def _holds_text(value: Any) -> bool:
    """Whether it is text, or a container with some."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(each, (str, bytes)) and each for each in items)
    return isinstance(value, (str, bytes)) and bool(value)
