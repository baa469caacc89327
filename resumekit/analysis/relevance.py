"""Backward slice: which variables have a value that can still reach the training.

At each point of a program a path is *relevant* when its value can reach a loss, a model call, a
component, a random draw, or a condition that decides training, evaluation, saving or stopping.
Calls of functions of the same file are followed.

Simplifications: a ``for`` loop runs at least once, exceptions occur at the end of ``try``, aliases
other than parameters are not followed, and ``buffer[i] = x`` with the index of an inner loop
rewrites ``buffer``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

from resumekit.analysis.effects import Context
from resumekit.analysis.expressions import ExpressionSlice, Flow
from resumekit.analysis.program import Program
from resumekit.analysis.roles import Role, Roles
from resumekit.analysis.scopes import (
    LOCAL,
    Function,
    LoopNode,
    Relevant,
    Scope,
    compared_subject,
    counts,
    derived_names,
    excludes,
    frozen,
    is_exhaustive,
    is_without_gradients,
    iterates_parameters,
    joined,
    negated,
    own_nodes,
    pairs_of,
    returned_values,
    root_of,
    stored_names,
    target_names,
    under,
    without,
)

_MAX_DEPTH = 10


class Relevance(ExpressionSlice):
    """The backward slice of one program.

    Args:
        program: the source file.
        roles: what its variables are for.
        chain: the loops that a resume continues; their iterables and targets are restored.
        inner: the innermost of them; what is relevant at the start of its body is recorded.
        every_use: count any use, also one that only logs.
        only_inside: locals of the loop's function that only the loop assigns.
        is_invariant: whether no loop changes what a condition reads.

    Attributes:
        at_safe_point: what was relevant at the start of the inner loop's body.
        scope: of the function that has the inner loop.
    """

    def __init__(
        self,
        program: Program,
        roles: Roles,
        chain: Iterable[ast.AST],
        inner: ast.AST,
        *,
        every_use: bool = False,
        only_inside: Set[str] = frozenset(),
        is_invariant: Callable[[ast.expr, Scope], bool] = lambda test, scope: False,
    ) -> None:
        super().__init__(program, roles, every_use=every_use)
        self._chain = frozenset(map(id, chain))
        self._inner = inner
        self._leading = {
            function
            for function in program.functions.values()
            if any(id(each) in self._chain for each in own_nodes(function.body))
        }
        self._only_inside = only_inside
        self._is_invariant = is_invariant
        self._memo: dict[object, Flow] = {}
        self._active: list[Function] = []
        self._assigned_by_all: dict[int, set[str]] = {}
        self.at_safe_point: Relevant = {}
        self.scope: Scope | None = None
        self._by_statement: dict[type, Callable[[Any, Relevant, Context], Flow]] = {
            **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.AugAssign), self._assignment),
            **dict.fromkeys((ast.For, ast.AsyncFor, ast.While), self._loop),
            **dict.fromkeys((ast.With, ast.AsyncWith), self._with),
            ast.If: self._if,
            ast.Try: self._try,
            ast.Return: self._return,
            ast.Match: self._match,
        }

    def run(self, root: Function) -> None:
        """Analyses a function as the program's beginning."""
        self._function({}, Context(Scope(root)))

    # ---------------------------------------------------------------- functions

    def _function(self, out: Relevant, context: Context) -> Flow:
        unused = self._unused(context.scope, out)
        before, effect = self._used(without(out, unused), context)
        return {**dict.fromkeys(unused), **before}, effect

    def _unused(self, scope: Scope, out: Relevant) -> set[str]:
        """What a function has nothing to do with, so that one result is good for many calls."""
        if scope.function in self._leading:
            return set()
        mentioned = self._program.mentioned(scope)
        return {p for p, g in out.items() if g is None and root_of(p) not in mentioned}

    def _used(self, out: Relevant, context: Context) -> Flow:
        scope, function = context.scope, context.scope.function
        is_active = function in self._active
        prefix = f"{function.name}{LOCAL}"
        local = {path for path in out if path.startswith(prefix)} if is_active else set[str]()
        asked = (context.wants_result, context.elements, context.no_grad)
        key = (function.name, scope.bindings, frozen(out), *asked)
        if key in self._memo:
            return self._memo[key]
        if is_active or context.depth > _MAX_DEPTH:
            return out, False
        self._active.append(function)
        no_grad = context.no_grad or is_without_gradients(function)
        matters = False
        while True:
            inner = replace(context, at_return=out, returns_matter=matters, no_grad=no_grad)
            inside, effect = self._body(function.body, out, inner)
            if effect == matters or matters:
                break
            matters = effect
        self._active.pop()
        result = inside if not function.name else without(inside, local)
        self._memo[key] = result, matters
        return result, matters

    # ---------------------------------------------------------------- statements

    def _body(self, body: list[ast.stmt], out: Relevant, context: Context) -> Flow:
        effect = False
        for statement in reversed(body):
            out, also = self._statement(statement, out, context)
            effect = effect or also
        return out, effect

    def _statement(self, node: ast.stmt, out: Relevant, context: Context) -> Flow:
        handle = self._by_statement.get(type(node))
        if handle is not None:
            return handle(node, out, context)
        if isinstance(node, ast.Expr):
            return self._expression(node.value, out, context, want=False, is_statement=True)
        if isinstance(node, ast.Break):
            return context.at_break, context.jumps_matter
        if isinstance(node, ast.Continue):
            return context.at_continue, context.jumps_matter
        if isinstance(node, ast.Raise):
            return {}, True
        if isinstance(node, ast.Assert):
            return self._expression(node.test, out, context, want=self._every_use)
        return out, False

    def _return(self, node: ast.Return, out: Relevant, context: Context) -> Flow:
        parts = context.elements if isinstance(node.value, ast.Tuple) else None
        values = returned_values(node, by_element=parts is not None)
        wanted = [
            (value, context.wants_result and (parts is None or index in parts))
            for index, value in enumerate(values)
        ]
        before, effect = self._in_turn(wanted, context.at_return, context)
        return before, effect or context.returns_matter or context.wants_result

    def _match(self, node: ast.Match, out: Relevant, context: Context) -> Flow:
        cases = [self._body(each.body, out, context) for each in node.cases]
        effect = any(each for _, each in cases)
        before = joined({} if is_exhaustive(node) else out, *(each for each, _ in cases))
        before, also = self._expression(node.subject, before, context, want=effect)
        return before, effect or also

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, out: Relevant, context: Context
    ) -> Flow:
        if node.value is None:
            return out, False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.Assign) and len(targets) == 1:
            pairs = pairs_of(targets[0], node.value)
            if len(pairs) > 1:
                return self._parallel(pairs, out, context)
        want, effect, before = False, False, dict(out)
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple):
            followed = self._unpacked(targets[0], node.value, out, context)
            if followed is not None:
                return followed
        for target in targets:
            wanted, also = self._store(
                target, out, before, context, keeps=isinstance(node, ast.AugAssign)
            )
            want, effect = want or wanted, effect or also
        after, also = self._expression(node.value, before, context, want=want)
        if isinstance(node, ast.AugAssign) and want:
            after = self._read(node.target, after, context)
        return after, effect or also or want

    def _unpacked(
        self, target: ast.Tuple, value: ast.expr, out: Relevant, context: Context
    ) -> Flow | None:
        """``a, b = f()`` for a function of the file: which elements of its result are wanted."""
        if not isinstance(value, ast.Call) or self._program.called(value, context.scope) is None:
            return None
        before, effect = dict(out), False
        wanted: set[int] = set()
        for index, each in enumerate(target.elts):
            if isinstance(each, ast.Starred):
                return None
            want, also = self._store(each, out, before, context, keeps=False)
            wanted |= {index} if want else set()
            effect = effect or also or want
        elements = None if self._every_use else frozenset(wanted)
        want = bool(wanted) or self._every_use
        after = self._call_inside(value, before, context, want=want, elements=elements)
        assert after is not None
        return after[0], effect or after[1]

    def _parallel(
        self, pairs: list[tuple[ast.expr, ast.expr]], out: Relevant, context: Context
    ) -> Flow:
        before, effect = dict(out), False
        wanted = []
        for target, value in pairs:
            want, also = self._store(target, out, before, context, keeps=False)
            wanted.append((value, want))
            effect = effect or also or want
        before, also = self._in_turn(wanted, before, context)
        return before, effect or also

    def _if(self, node: ast.If, out: Relevant, context: Context) -> Flow:
        if id(node) not in self._assigned_by_all:
            self._note_alternatives(node, context.scope)
        guard = ast.unparse(node.test)
        positive = {p: g for p, g in out.items() if not excludes(g, negated(guard))}
        negative = {p: g for p, g in out.items() if not excludes(g, guard)}
        then, effect = self._body(node.body, positive, context)
        other, also = self._body(node.orelse, negative, context)
        if not node.orelse:
            other = without(other, self._assigned_by_all.get(id(node), set()))
        if not node.orelse and self._is_invariant(node.test, context.scope):
            # Nothing assigns it elsewhere: what is read without this branch is never read at all.
            stored = stored_names(node.body, context.scope) & self._only_inside
            killed = {p for p in stored if p in other and p not in then}
            other = without(other, killed)
        before = under(then, other, guard)
        effect = effect or also
        return self._test(node.test, before, context, effect=effect)

    def _note_alternatives(self, node: ast.If, scope: Scope) -> None:
        """``if kind == "a": ... elif kind == "b": ...`` without ``else``: one of them runs.

        What all of them assign is then assigned.
        """
        branches = [node]
        while len(branches[-1].orelse) == 1 and isinstance(branches[-1].orelse[0], ast.If):
            branches.append(branches[-1].orelse[0])
        subjects = {compared_subject(each.test) for each in branches}
        if len(branches) == 1 or branches[-1].orelse or len(subjects) != 1 or None in subjects:
            return
        assigned = [stored_names(each.body, scope) for each in branches]
        for each in branches:
            self._assigned_by_all[id(each)] = set.intersection(*assigned)

    def _test(self, test: ast.expr, before: Relevant, context: Context, *, effect: bool) -> Flow:
        before, also = self._expression(test, before, context, want=effect)
        return before, effect or also

    def _loop(self, node: LoopNode, out: Relevant, context: Context) -> Flow:
        is_chain = id(node) in self._chain
        after, effect = out, False
        if node.orelse:
            after, effect = self._body(node.orelse, out, context)
        indices = context.indices
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if is_chain:
                indices = frozenset()
            else:
                indices |= {p for p in map(context.scope.path, target_names(node.target)) if p}
                if iterates_parameters(node.iter):
                    self._component_aliases |= indices - context.indices
                indices |= derived_names(node.body, indices, context.scope)
        head, matters = after, False
        before: Relevant = {}
        while True:
            inner = replace(
                context,
                at_break=out,
                at_continue=head,
                jumps_matter=matters,
                indices=indices,
            )
            before, also = self._body(node.body, head, inner)
            if node is self._inner:
                self.at_safe_point = joined(self.at_safe_point, before)
                self.scope = context.scope
            before, also_head = self._head(node, before, inner, matters or also, is_chain=is_chain)
            new = joined(head, before)
            now = matters or also or also_head
            if new == head and now == matters:
                break
            head, matters = new, now
        result = head if isinstance(node, ast.While) else before
        return result, effect or matters

    def _head(
        self,
        node: LoopNode,
        body: Relevant,
        context: Context,
        matters: bool,
        *,
        is_chain: bool,
    ) -> Flow:
        """Before one iteration: the test of a ``while``, the targets of a ``for``."""
        if isinstance(node, ast.While):
            return self._test(node.test, body, context, effect=matters)
        before = dict(body)
        want, _ = self._store(node.target, body, before, context, keeps=False)
        if is_chain and counts(node.iter):
            return before, False
        before, effect = self._expression(node.iter, before, context, want=want or matters)
        return before, effect and not is_chain

    def _with(self, node: ast.With | ast.AsyncWith, out: Relevant, context: Context) -> Flow:
        text = " ".join(ast.unparse(item.context_expr) for item in node.items)
        inner = context
        if "no_grad" in text or "inference_mode" in text:
            inner = replace(context, no_grad=True)
        before, effect = self._body(node.body, out, inner)
        for item in reversed(node.items):
            want = effect
            if item.optional_vars is not None:
                after, before = before, dict(before)
                stored, _ = self._store(item.optional_vars, after, before, context, keeps=False)
                want = want or stored
            role = self._role(item.context_expr, context)
            want = want and role is not Role.LOGGING
            before, also = self._expression(item.context_expr, before, context, want=want)
            effect = effect or also
        return before, effect

    def _try(self, node: ast.Try, out: Relevant, context: Context) -> Flow:
        after, effect = self._body(node.finalbody, out, context)
        handled = [self._body(each.body, after, context) for each in node.handlers]
        normal, also = self._body(node.orelse, after, context)
        end = joined(normal, *(each for each, _ in handled))
        before, inside = self._body(node.body, end, context)
        before = joined(before, *(each for each, _ in handled))  # an exception at the beginning
        return before, effect or also or inside or any(each for _, each in handled)
