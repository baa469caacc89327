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
from resumekit.analysis.roles import Role, Roles
from resumekit.analysis.scopes import (
    Function,
    LoopNode,
    Relevant,
    Scope,
    compared_subject,
    counts,
    derived_names,
    disables_gradients,
    excludes,
    is_exhaustive,
    iterates_parameters,
    joined,
    negated,
    pairs_of,
    root_of,
    stored_names,
    target_names,
    under,
    without,
)
from resumekit.analysis.source_file import Program

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
        every_use: bool,
        only_inside: Set[str],
        is_invariant: Callable[[ast.expr, Scope], bool],
    ) -> None:
        super().__init__(program, roles, every_use=every_use)
        self._chain = frozenset(map(id, chain))
        self._inner = inner
        self._leading = {
            function
            for function in program.functions.values()
            if any(id(each) in self._chain for each in function.own_nodes)
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
        return Flow({**dict.fromkeys(unused), **before}, effect)

    def _unused(self, scope: Scope, out: Relevant) -> set[str]:
        """What a function has nothing to do with, so that one result is good for many calls."""
        if scope.function in self._leading:
            return set()
        mentioned = self._program.mentioned(scope)
        return {p for p, g in out.items() if g is None and root_of(p) not in mentioned}

    def _used(self, out: Relevant, context: Context) -> Flow:
        scope, function = context.scope, context.scope.function
        is_active = function in self._active
        local = {path for path in out if is_active and function.has_local(path)}
        asked = (context.wants_result, context.elements, context.no_grad)
        key = (function.name, scope.bindings, frozenset(out.items()), *asked)
        if key in self._memo:
            return self._memo[key]
        if is_active or len(self._active) > _MAX_DEPTH:
            return Flow(out)
        self._active.append(function)
        no_grad = context.no_grad or any(map(disables_gradients, function.decorators))
        matters = False
        while True:
            inner = replace(context, at_return=out, returns_matter=matters, no_grad=no_grad)
            inside, effect = self._body(function.body, out, inner)
            if effect == matters or matters:
                break
            matters = effect
        self._active.pop()
        result = inside if not function.name else without(inside, local)
        self._memo[key] = Flow(result, matters)
        return self._memo[key]

    # ---------------------------------------------------------------- statements

    def _body(self, body: list[ast.stmt], out: Relevant, context: Context) -> Flow:
        effect = False
        for statement in reversed(body):
            out, also = self._statement(statement, out, context)
            effect = effect or also
        return Flow(out, effect)

    def _statement(self, node: ast.stmt, out: Relevant, context: Context) -> Flow:
        handle = self._by_statement.get(type(node))
        if handle is not None:
            return handle(node, out, context)
        if isinstance(node, ast.Expr):
            return self._expression(node.value, Flow(out), context, want=False, is_statement=True)
        if isinstance(node, ast.Break):
            return Flow(context.at_break, context.jumps_matter)
        if isinstance(node, ast.Continue):
            return Flow(context.at_continue, context.jumps_matter)
        if isinstance(node, ast.Raise):
            return Flow({}, True)
        if isinstance(node, ast.Assert):
            return self._expression(node.test, Flow(out), context, want=self._every_use)
        return Flow(out)

    def _return(self, node: ast.Return, out: Relevant, context: Context) -> Flow:
        after = Flow(context.at_return, context.returns_matter or context.wants_result)
        parts = context.elements
        if parts is None or not isinstance(node.value, ast.Tuple):
            return self._expression(node.value, after, context, want=context.wants_result)
        wanted = [
            (value, context.wants_result and index in parts)
            for index, value in enumerate(node.value.elts)
        ]
        return self._in_turn(wanted, after, context)

    def _match(self, node: ast.Match, out: Relevant, context: Context) -> Flow:
        cases = [self._body(each.body, out, context) for each in node.cases]
        before = joined({} if is_exhaustive(node) else out, *(each.relevant for each in cases))
        effect = any(each.effect for each in cases)
        return self._condition(node.subject, Flow(before, effect), context)

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, out: Relevant, context: Context
    ) -> Flow:
        if node.value is None:
            return Flow(out)
        before = dict(out)

        def store(target: ast.expr) -> bool:
            keeps = isinstance(node, ast.AugAssign)
            return self._store(target, out, before, context, keeps=keeps)

        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1:
            followed = self._unpacked(targets[0], node.value, out, context)
            if followed is not None:
                return followed
            pairs = pairs_of(targets[0], node.value)
            wanted = [(value, store(target)) for target, value in pairs]
        else:
            every = [store(target) for target in targets]
            wanted = [(node.value, any(every))]
        effect = any(want for _, want in wanted)
        after = self._in_turn(wanted, Flow(before, effect), context)
        if isinstance(node, ast.AugAssign) and effect:
            return Flow(self._read(node.target, after.relevant, context), after.effect)
        return after

    def _unpacked(
        self, target: ast.expr, value: ast.expr, out: Relevant, context: Context
    ) -> Flow | None:
        """``a, b = f()`` for a function of the file: which elements of its result are wanted."""
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Call):
            return None
        if any(isinstance(each, ast.Starred) for each in target.elts):
            return None
        before = dict(out)
        wanted = frozenset(
            index
            for index, each in enumerate(target.elts)
            if self._store(each, out, before, context, keeps=False)
        )
        after = Flow(before, bool(wanted))
        if self._every_use:
            return self._call_inside(value, after, context, want=True)
        return self._call_inside(value, after, context, want=after.effect, elements=wanted)

    def _if(self, node: ast.If, out: Relevant, context: Context) -> Flow:
        if id(node) not in self._assigned_by_all:
            self._note_alternatives(node, context.scope)
        guard = ast.unparse(node.test)
        positive = {p: g for p, g in out.items() if not excludes(g, negated(guard))}
        negative = {p: g for p, g in out.items() if not excludes(g, guard)}
        then = self._body(node.body, positive, context)
        other = self._body(node.orelse, negative, context)
        skipped = other.relevant
        if not node.orelse:
            skipped = without(skipped, self._assigned_by_all.get(id(node), set()))
            if self._is_invariant(node.test, context.scope):
                # Nothing assigns it elsewhere: what is read without this branch is never read.
                stored = stored_names(node.body, context.scope) & self._only_inside
                skipped = without(skipped, stored - then.relevant.keys())
        before = Flow(under(then.relevant, skipped, guard), then.effect or other.effect)
        return self._condition(node.test, before, context)

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

    def _condition(self, test: ast.expr, after: Flow, context: Context) -> Flow:
        """Before a condition: its value is relevant where it decides something."""
        return self._expression(test, after, context, want=after.effect)

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
        while True:
            inner = replace(
                context,
                at_break=out,
                at_continue=head,
                jumps_matter=matters,
                indices=indices,
            )
            body = self._body(node.body, head, inner)
            if node is self._inner:
                self.at_safe_point = joined(self.at_safe_point, body.relevant)
                self.scope = context.scope
            body = Flow(body.relevant, matters or body.effect)
            before = self._head(node, body, inner, is_chain=is_chain)
            new = joined(head, before.relevant)
            if new == head and before.effect == matters:
                break
            head, matters = new, before.effect
        result = head if isinstance(node, ast.While) else before.relevant
        return Flow(result, effect or matters)

    def _head(self, node: LoopNode, after: Flow, context: Context, *, is_chain: bool) -> Flow:
        """Before one iteration: the test of a ``while``, the targets of a ``for``."""
        if isinstance(node, ast.While):
            return self._condition(node.test, after, context)
        stored = dict(after.relevant)
        want = self._store(node.target, after.relevant, stored, context, keeps=False)
        before = Flow(stored, after.effect)
        if is_chain and counts(node.iter):
            return before
        before = self._expression(node.iter, before, context, want=want or after.effect)
        return Flow(before.relevant, after.effect) if is_chain else before

    def _with(self, node: ast.With | ast.AsyncWith, out: Relevant, context: Context) -> Flow:
        text = " ".join(ast.unparse(item.context_expr) for item in node.items)
        inner = replace(context, no_grad=context.no_grad or disables_gradients(text))
        after = self._body(node.body, out, inner)
        for item in reversed(node.items):
            want = after.effect
            if item.optional_vars is not None:
                before = dict(after.relevant)
                want |= self._store(
                    item.optional_vars, after.relevant, before, context, keeps=False
                )
                after = Flow(before, after.effect)
            want = want and self._role(item.context_expr, context) is not Role.LOGGING
            after = self._expression(item.context_expr, after, context, want=want)
        return after

    def _try(self, node: ast.Try, out: Relevant, context: Context) -> Flow:
        last = self._body(node.finalbody, out, context)
        handled = [self._body(each.body, last.relevant, context) for each in node.handlers]
        caught = [each.relevant for each in handled]
        normal = self._body(node.orelse, last.relevant, context)
        first = self._body(node.body, joined(normal.relevant, *caught), context)
        before = joined(first.relevant, *caught)  # an exception at the beginning
        return Flow(before, any(each.effect for each in (last, normal, first, *handled)))
