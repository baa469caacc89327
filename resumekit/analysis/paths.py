"""Paths of variables, and sets of relevant ones."""

from __future__ import annotations

import re

from resumekit.analysis.scopes import LOCAL

# A relevant path, and the conditions under which alone it is; None: under any.
Relevant = dict[str, frozenset[str] | None]


def joined(*many: Relevant) -> Relevant:
    """What is relevant in any of several successors."""
    result: Relevant = {}
    for each in many:
        for path, guards in each.items():
            known = result.get(path, frozenset())
            result[path] = None if guards is None or known is None else guards | known
    return result


def touches(path: str, other: str) -> bool:
    """Whether one path is the other, or an attribute of it."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def frozen(relevant: Relevant) -> frozenset[tuple[str, frozenset[str] | None]]:
    """The same as a key of a dict."""
    return frozenset(relevant.items())


def without(relevant: Relevant, paths: set[str]) -> Relevant:
    """Without some paths."""
    return {path: guards for path, guards in relevant.items() if path not in paths}


def covers(path: str, other: str) -> bool:
    """Whether a store to the first path overwrites the second."""
    return other == path or other.startswith(f"{path}.")


def variable_of(path: str) -> str:
    """The variable that a path begins with."""
    return path.rpartition(LOCAL)[2].split(".")[0]


def root_of(path: str) -> str:
    """The path of the variable that a path begins with."""
    function, at, variable = path.rpartition(LOCAL)
    return f"{function}{at}{variable.partition('.')[0]}"


def drop_guards_on(path: str, relevant: Relevant) -> None:
    """A variable gets a new value: a condition that reads it is another one before that."""
    word = re.compile(rf"\b{re.escape(path.rpartition(LOCAL)[2].split('.')[-1])}\b")
    for each, guards in relevant.items():
        if guards is not None and any(map(word.search, guards)):
            relevant[each] = None


def negated(guard: str) -> str:
    """The condition of the other branch."""
    return guard[4:] if guard.startswith("not ") else f"not {guard}"


def excludes(guards: frozenset[str] | None, guard: str) -> bool:
    """Whether a path that is relevant under some conditions only is not under this one's branch."""
    return guards is not None and guards == frozenset({guard})


def under(then: Relevant, other: Relevant, guard: str) -> Relevant:
    """Both branches joined: what only the first makes relevant is so under its condition."""
    result: Relevant = {}
    for path in {**then, **other}:
        if path in then and path in other:
            one, two = then[path], other[path]
            result[path] = None if one is None or two is None else one | two
        elif path in then:
            result[path] = then[path] if then[path] is not None else frozenset({guard})
        else:
            mine = other[path]
            result[path] = mine if mine is not None else frozenset({negated(guard)})
    return result
