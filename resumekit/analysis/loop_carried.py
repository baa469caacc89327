"""The loop-carried variables of a training loop: what a checkpoint would have to hold besides.

A variable is loop-carried when a resumed process does not have its value at the safe point
(``staleness``) and the value can still reach the training (``relevance``).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from resumekit.analysis import calls
from resumekit.analysis.relevance import Relevance
from resumekit.analysis.roles import Role, Roles
from resumekit.analysis.scopes import (
    LOCAL,
    Function,
    LoopNode,
    Relevant,
    Scope,
    children_of,
    negated,
    prefixes,
    touches_any,
)
from resumekit.analysis.source_file import Program
from resumekit.analysis.staleness import Staleness


@dataclass(frozen=True)
class Variable:
    """A loop-carried variable.

    Args:
        name: as the loop's function calls it.
        path: in the source file, see ``scopes``.
        is_rebound: the loop assigns it; otherwise the loop only changes the object.
    """

    name: str
    path: str
    is_rebound: bool


@dataclass(frozen=True)
class LoopCarried:
    """What the analysis of one loop found.

    Args:
        variables: their value can reach the training.
        only_logged: their value reaches only logging, printing or timing.
        relative_indices: names of counters of ``enumerate`` or ``zip`` that decide something and
            that start again at 0 in a resumed process.
        asked: objects from before the loop that it calls, and whose answers reach the training;
            they are state only if they change when they are asked, which no source shows.
    """

    variables: tuple[Variable, ...] = ()
    only_logged: tuple[Variable, ...] = ()
    relative_indices: tuple[str, ...] = ()
    asked: tuple[Variable, ...] = ()


def loop_carried(
    program: Program,
    function: Function,
    loop: LoopNode,
    *,
    callers: Sequence[tuple[Function, int]] | None = None,
    live: Callable[[str], Role | None] | None = None,
    with_logged: bool = True,
) -> LoopCarried:
    """The loop-carried variables of a loop.

    Args:
        program: the source file.
        function: the function that has the loop.
        loop: the innermost training loop.
        callers: the running functions of the file that lead to it, each with its line; by default
            the calls in the file are searched.
        live: gives the role of the object at a path, where objects exist.
        with_logged: also find what is only logged, which takes about as long again.
    """
    roles = Roles(program, live)
    root, chain = _chain(program, function, loop, callers)
    _note_loaders(roles, chain, program)
    staleness = Staleness(program, roles, chain, loop)
    staleness.run(root)
    changed = staleness.changed_by_loops

    def is_invariant(test: ast.expr, scope: Scope) -> bool:
        return not _reads_any(test, changed, scope)

    found, scope = [], Scope(function)
    for every_use in (False, True) if with_logged else (False,):
        relevance = Relevance(
            program,
            roles,
            chain,
            loop,
            every_use=every_use,
            only_inside=_assigned_only_inside(function, loop),
            is_invariant=is_invariant,
        )
        relevance.run(root)
        scope = relevance.scope or scope
        found.append(
            tuple(_without_contradictions(relevance.at_safe_point, loop, scope, is_invariant))
        )
    variables, logged = (
        _reported(staleness.at_safe_point, each, program, roles, scope, staleness.stored)
        for each in (found[0], found[-1])
    )
    names = {each.name for each in variables}
    indices = tuple(
        _shown(path, scope)
        for path in map(scope.path, _counters(loop, function))
        if path is not None and touches_any(path, found[0])
    )
    asked = {path for path, trains in _asked(loop, scope) if trains or path in found[0]}
    others = tuple(Variable(_shown(path, scope), path, False) for path in sorted(asked))
    return LoopCarried(
        variables,
        tuple(each for each in logged if each.name not in names),
        indices,
        tuple(each for each in others if each.name not in names),
    )


def _asked(loop: LoopNode, scope: Scope) -> Iterator[tuple[str, bool]]:
    """The objects that a loop calls, or of which it calls methods, and whether the call trains."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call):
            func = node.func
            path = scope.path(func.value if isinstance(func, ast.Attribute) else func)
            if path is not None:
                yield path, calls.trains(node)


def _reported(
    stale: Iterable[str],
    relevant: Sequence[str],
    program: Program,
    roles: Roles,
    scope: Scope,
    stored: Collection[str],
) -> tuple[Variable, ...]:
    found: dict[str, str] = {}
    for path in stale:
        if touches_any(path, relevant):
            whole = _whole_object(path, program, scope)
            around = (each for each in prefixes(whole) if each != scope.receiver)
            if all(roles.of(each) is None for each in around):
                found[_shown(whole, scope)] = whole
                found.update((_shown(each, scope), each) for each in roles.given_to(whole))
    return tuple(
        Variable(name, path, path in stored)
        for name, path in sorted(found.items())
        if not any(name.startswith(f"{each}.") for each in found)
    )


def _without_contradictions(
    relevant: Relevant,
    loop: LoopNode,
    scope: Scope,
    is_invariant: Callable[[ast.expr, Scope], bool],
) -> tuple[str, ...]:
    """What is relevant, without variables that matter only where the loop never writes them.

    ``if evaluates: loss = ...`` and later ``if loss < best``: only without evaluation does the
    value from before the step matter, and then it is the one from before the loop.
    """
    written: dict[str, list[set[str]]] = {}

    def visit(node: ast.AST, guards: frozenset[str]) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            written.setdefault(scope.path_of(node.id), []).append(set(guards))
        if isinstance(node, ast.If) and is_invariant(node.test, scope):
            guard = ast.unparse(node.test)
            for each in node.body:
                visit(each, guards | {guard})
            for each in node.orelse:
                visit(each, guards | {negated(guard)})
            return
        for child in children_of(node):
            visit(child, guards)

    visit(loop, frozenset())
    return tuple(
        path
        for path, guards in relevant.items()
        if not guards
        or path not in written
        or not all(all(negated(g) in where for g in guards) for where in written[path])
    )


def _assigned_only_inside(function: Function, loop: LoopNode) -> frozenset[str]:
    """The locals that nothing but the loop assigns."""
    inside = {id(each) for each in ast.walk(loop)}
    stores = [
        each
        for each in function.nodes_of(ast.Name)
        if isinstance(each.ctx, ast.Store) and each.id in function.local_names
    ]
    outside = {each.id for each in stores if id(each) not in inside} | set(function.parameters)
    scope = Scope(function)
    return frozenset(scope.path_of(e.id) for e in stores if e.id not in outside)


def _reads_any(test: ast.expr, paths: Iterable[str], scope: Scope) -> bool:
    if any(isinstance(each, ast.Call) for each in ast.walk(test)):
        return True
    path = scope.path(test)
    if path is not None:
        return touches_any(path, paths)
    children = [each for each in children_of(test) if isinstance(each, ast.expr)]
    return any(_reads_any(each, paths, scope) for each in children)


def _whole_object(path: str, program: Program, scope: Scope) -> str:
    """The object of a class of this file that the path is inside of; ``self`` stays open."""
    for each in prefixes(path)[:-1]:
        is_open = each == scope.receiver or each.rpartition(LOCAL)[2] == "self"
        if not is_open and program.class_of(each) is not None:
            return each
    return path


def _shown(path: str, scope: Scope) -> str:
    """The path as the loop's function writes it."""
    for name, bound in scope.bindings:
        if path == bound or path.startswith(f"{bound}."):
            return name + path[len(bound) :]
    return path.rpartition(LOCAL)[2]


def _counters(loop: LoopNode, function: Function) -> list[ast.expr]:
    """The targets that count from the beginning of this process's loop."""
    if isinstance(loop, ast.While) or not isinstance(loop.target, (ast.Tuple, ast.List)):
        return []
    targets = loop.target.elts
    made_by = (each for each in _made_of(loop.iter, function) if isinstance(each, ast.Call))
    for node in made_by:
        if calls.dotted(node.func) == "enumerate":
            start = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "start")]
            return [] if any(".initial" in ast.unparse(each) for each in start) else targets[:1]
        if calls.dotted(node.func) == "zip" and len(node.args) == len(targets):
            pairs = zip(node.args, targets, strict=True)
            return [target for value, target in pairs if _counts(value)]
    return []


def _made_of(iterable: ast.expr, function: Function) -> Iterator[ast.AST]:
    """The parts of an iterable; of a variable those of all that the function assigns to it."""
    yield from ast.walk(iterable)
    if isinstance(iterable, ast.Name):
        for node in function.nodes_of(ast.Assign):
            if any(isinstance(e, ast.Name) and e.id == iterable.id for e in node.targets):
                yield from ast.walk(node.value)


def _counts(value: ast.expr) -> bool:
    name = calls.dotted(value.func) if isinstance(value, ast.Call) else ""
    return name.rpartition(".")[2] in ("count", "cycle", "range")


# ---------------------------------------------------------------- loops around the loop


def _note_loaders(roles: Roles, chain: Iterable[ast.AST], program: Program) -> None:
    """What the loops iterate over is data: its position is in the checkpoint."""
    iterables = [each.iter for each in chain if isinstance(each, (ast.For, ast.AsyncFor))]
    lists = {path for each in program.functions.values() for path in _changed_lists(each)}
    for function in program.functions.values():
        scope = Scope(function)
        nodes = {id(each) for each in function.own_nodes}
        for iterable in iterables:
            if id(iterable) not in nodes:
                continue
            for each in _iterated(iterable):
                path = scope.path(each)
                if path is not None and path not in lists:
                    roles.note_training(path)


def _changed_lists(function: Function) -> Iterator[str | None]:
    """The lists that a function makes longer, shorter or puts into another order."""
    scope = Scope(function)
    for node in function.nodes_of(ast.Call):
        changed = calls.changed_list(node)
        if changed is not None:
            yield scope.path(changed)


def _iterated(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return [node]
    if calls.dotted(node.func) == "range":
        return []
    return [each for value in node.args for each in _iterated(value)]


def _chain(
    program: Program,
    function: Function,
    loop: LoopNode,
    callers: Sequence[tuple[Function, int]] | None,
) -> tuple[Function, Sequence[ast.AST]]:
    """The function that the analysis begins with, and the loops and calls that a resume continues.

    The callers are the running ones, or where that is not known, those that the file has.
    """
    root, chain = function, [loop, *_loops_around(function, loop)]
    running = None if callers is None else iter(callers)
    seen = {function}
    while not _makes_optimizer(root):
        if running is None:
            found = _searched_calls(program, root, seen)
        else:
            found = [
                (caller, call)
                for caller, line in islice(running, 1)
                for call in _calls_of(program, caller, root)
                if call.lineno <= line <= (call.end_lineno or line)
            ]
        if not found:
            break
        root, call = found[0]
        seen.add(root)
        chain += [call, *_loops_around(root, call)]
    return root, chain


def _searched_calls(
    program: Program, function: Function, seen: Collection[Function]
) -> list[tuple[Function, ast.Call]]:
    """The calls of a function in others; one in a loop first, as its caller trains in epochs."""
    others = [each for each in program.functions.values() if each not in seen]
    found = [(each, call) for each in others for call in _calls_of(program, each, function)]
    return sorted(found, key=lambda pair: not _loops_around(*pair))


def _makes_optimizer(function: Function) -> bool:
    """Whether a run begins in the function: loops around it make several runs."""
    if function.owner or not function.name:
        return False
    return any(
        isinstance(node, ast.Call) and "optim" in calls.dotted(node.func).lower()
        for each in function.nodes_of(ast.Assign)
        for node in ast.walk(each.value)
    )


def _calls_of(program: Program, caller: Function, function: Function) -> list[ast.Call]:
    scope = Scope(caller)
    called = [(each, program.called(each, scope)) for each in caller.nodes_of(ast.Call)]
    return [call for call, callee in called if callee and callee.function is function]


def _loops_around(function: Function, target: ast.AST) -> list[ast.AST]:
    """The loops of a function around a node, the innermost first."""
    loops = [each for each in function.own_nodes if isinstance(each, LoopNode)]
    around = [each for each in loops if each is not target and target in ast.walk(each)]
    return [*reversed(around)]
