"""The command line of a run without its secrets: it is stored in every manifest.

A value is hidden when its option is named like a secret, when it is a URL with user information,
or when it looks like a token of a well-known service. The value of an option is what follows
``=``, or the next word unless that is an option itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"

# As whole words of a name: --hf_token, --api-key, --wandb.apiKey, AWS_SECRET_ACCESS_KEY. Plurals
# are not among them: --max_tokens and --num_keys are settings.
_WORDS = frozenset(
    {"token", "key", "apikey", "password", "passwd", "passphrase", "pwd", "secret", "credential"}
    | {"credentials", "secrets", "auth", "accesskey", "secretkey", "authtoken"}
)
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")

_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s]*@")
_QUERY = re.compile(r"(?P<name>[?&;][^=?&;#\s]+)=(?P<value>[^&;#\s]*)")
_TOKENS = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA)[A-Za-z0-9_\-]{12,}"
)
_HEADER = re.compile(r"\b(?P<kind>bearer|basic)\s+\S+", re.IGNORECASE)
_JSON = re.compile(r"(?P<name>[\w.-]+)(?P<between>[\"']?\s*:\s*[\"'])[^\"']*")
_ASSIGNED = re.compile(r"(?P<name>[^=\s:/?]+)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)


def without_secrets(words: Iterable[str]) -> list[str]:
    """A command line whose secrets are ``***``.

    Args:
        words: as in ``sys.argv``.
    """
    found, hides_next = [], False
    for word in words:
        is_option = _OPTION.fullmatch(word) is not None
        if hides_next and not is_option:
            found.append(HIDDEN)
            hides_next = False
            continue
        assigned = _ASSIGNED.fullmatch(word)
        if assigned is not None and is_secret_name(assigned["name"]):
            found.append(f"{assigned['name']}={HIDDEN}")
        else:
            found.append(_without_tokens(word))
        hides_next = is_option and assigned is None and is_secret_name(word)
    return found


def is_secret_name(name: str) -> bool:
    """Whether an option, a variable or an attribute of this name holds a secret.

    Args:
        name: e.g. ``--hf_token``, ``wandb.apiKey`` or ``OPENAI_API_KEY``.
    """
    return any(part.lower() in _WORDS for part in _PARTS.findall(name))


def _without_tokens(word: str) -> str:
    word = _USER_INFO.sub(rf"\g<scheme>{HIDDEN}@", word)
    word = _QUERY.sub(
        lambda m: f"{m['name']}={HIDDEN if is_secret_name(m['name']) else m['value']}", word
    )
    word = _JSON.sub(
        lambda m: f"{m['name']}{m['between']}{HIDDEN}" if is_secret_name(m["name"]) else m[0], word
    )
    word = _HEADER.sub(rf"\g<kind> {HIDDEN}", word)
    return _TOKENS.sub(HIDDEN, word)
