"""Backward slice through expressions, calls and stores; see ``relevance`` for statements."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod

from resumekit.analysis import calls
from resumekit.analysis.call_effects import CallEffects, Context, is_self
from resumekit.analysis.paths import Relevant, covers, drop_guards_on, joined, touches, variable_of
from resumekit.analysis.program import Program
from resumekit.analysis.roles import Roles
from resumekit.analysis.scopes import children_of
from resumekit.analysis.syntax import base_of


class ExpressionSlice(CallEffects, ABC):
    """What is relevant before an expression, a call or a store.

    Args:
        program: the source file.
        roles: what its variables are for.
        every_use: count any use, also one that only logs.
    """

    def __init__(self, program: Program, roles: Roles, *, every_use: bool) -> None:
        super().__init__(program, roles)
        self._every_use = every_use

    @abstractmethod
    def _call_inside(
        self,
        call: ast.Call,
        out: Relevant,
        context: Context,
        *,
        want: bool,
        elements: frozenset[int] | None = None,
    ) -> tuple[Relevant, bool] | None:
        """The slice through a function of the same file; None for any other call."""

    # ---------------------------------------------------------------- stores

    def _store(
        self, target: ast.expr, out: Relevant, before: Relevant, context: Context, *, keeps: bool
    ) -> tuple[bool, bool]:
        """A store: whether the stored value is wanted, and whether the store itself matters.

        Args:
            target: what is stored into.
            out: what is relevant after the store.
            before: the same without what the store overwrites; it is changed here.
            context: of the statement.
            keeps: the store reads the old value.
        """
        if isinstance(target, (ast.Tuple, ast.List)):
            found = [self._store(t, out, before, context, keeps=keeps) for t in target.elts]
            return any(w for w, _ in found), any(e for _, e in found)
        if isinstance(target, ast.Starred):
            return self._store(target.value, out, before, context, keeps=keeps)
        scope = context.scope
        if isinstance(target, ast.Subscript):
            return self._store_item(target, out, before, context)
        path = scope.path(target)
        if path is None:
            return self._is_component(target, context), self._is_component(target, context)
        want = any(touches(path, each) for each in out)
        drop_guards_on(path, before)
        if not keeps:
            for each in [each for each in before if covers(path, each)]:
                del before[each]
        matters = self._is_component(target, context)
        if isinstance(target, ast.Name) and self._roles.is_training(path):
            matters = True
        return want or matters, matters

    def _store_item(
        self, target: ast.Subscript, out: Relevant, before: Relevant, context: Context
    ) -> tuple[bool, bool]:
        if self._is_component(target, context):
            return True, True
        path = context.scope.path(base_of(target))
        if path is None:
            return False, False
        want = any(touches(path, each) for each in out)
        if want and any(
            isinstance(each, ast.Name) and context.scope.path_of(each.id) in context.indices
            for each in ast.walk(target.slice)
        ):
            for each in [each for each in before if covers(path, each)]:
                del before[each]
        elif want:
            before.update(self._read(target.slice, before, context))
        return want, False

    # ---------------------------------------------------------------- expressions

    def _read(self, node: ast.expr, before: Relevant, context: Context) -> Relevant:
        return self._expression(node, before, context, want=True)[0]

    def _expression(
        self,
        node: ast.expr | None,
        out: Relevant,
        context: Context,
        *,
        want: bool,
        is_statement: bool = False,
    ) -> tuple[Relevant, bool]:
        """Before an expression is evaluated.

        Args:
            node: the expression.
            out: what is relevant after it.
            context: of the statement.
            want: its value is relevant.
            is_statement: its value is thrown away.
        """
        if node is None or isinstance(node, ast.Constant):
            return out, False
        want = want or self._every_use
        if isinstance(node, ast.Call):
            return self._call(node, out, context, want=want, is_statement=is_statement)
        read = self._program.property_read(node, context.scope)
        if read is not None:
            return self._call(read, out, context, want=want, is_statement=False)
        path = context.scope.path(node)
        if path is not None:
            is_known = variable_of(path) in self._program.imported or is_self(path, context)
            if want and not is_known:
                out = {**out, path: None}
            return out, False
        if isinstance(node, ast.NamedExpr):
            before = dict(out)
            stored, effect = self._store(node.target, out, before, context, keeps=False)
            before, also = self._expression(node.value, before, context, want=want or stored)
            return before, effect or also or stored
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, out, context, want=want)
        if isinstance(node, ast.Lambda):
            hidden = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            inside, effect = self._expression(node.body, {}, context, want=want)
            shown = {p: g for p, g in inside.items() if variable_of(p) not in hidden}
            return joined(out, shown), effect
        effect = False
        for child in reversed(children_of(node)):
            if isinstance(child, ast.expr):
                out, also = self._expression(child, out, context, want=want)
                effect = effect or also
        return out, effect

    def _comprehension(
        self, node: ast.expr, out: Relevant, context: Context, *, want: bool
    ) -> tuple[Relevant, bool]:
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]  # type: ignore[attr-defined]
        inside: Relevant = out
        effect = False
        generators = node.generators  # type: ignore[attr-defined]
        for each in parts:
            inside, also = self._expression(each, inside, context, want=want)
            effect = effect or also
        for generator in reversed(generators):
            for test in generator.ifs:
                inside, also = self._expression(test, inside, context, want=want or effect)
                effect = effect or also
            hidden = {each.id for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
            inside = {p: g for p, g in inside.items() if p in out or variable_of(p) not in hidden}
            inside, also = self._expression(generator.iter, inside, context, want=want or effect)
            effect = effect or also
        return inside, effect

    def _call(
        self, node: ast.Call, out: Relevant, context: Context, *, want: bool, is_statement: bool
    ) -> tuple[Relevant, bool]:
        followed = self._call_inside(node, out, context, want=want)
        if followed is not None:
            return followed
        logs = self._is_logging(node, context) or (is_statement and calls.writes_log(node))
        if logs and not self._every_use:
            return self._arguments(node, out, context, want=want, receiver=False)
        effect = self._has_effect(node, context, is_statement=is_statement)
        wants_arguments = want or self._wants_arguments(node, context, is_statement=is_statement)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        path = None if receiver is None else context.scope.path(base_of(receiver))
        wants_receiver = want or (effect and self._remembers(node, path, context))
        if path is not None and is_statement and calls.overwrites_receiver(node):
            owner = path.removesuffix(".data")
            if owner not in self._component_aliases and any(touches(owner, e) for e in out):
                effect = wants_arguments = True
                out = {p: g for p, g in out.items() if not covers(owner, p)}
        elif path is not None and calls.resets_receiver(node) and is_statement:
            out = {p: g for p, g in out.items() if not covers(path, p)}
        elif path is not None and self._changes(node, path, is_statement=is_statement):
            if any(touches(path, each) for each in out):
                effect = wants_arguments = wants_receiver = True
            if path in self._component_aliases or self._is_component(node.func, context):
                effect = wants_arguments = True
        function = context.scope.path(node.func)
        remembers = function is not None and self._roles.remembers(function)
        if function is not None and remembers and any(touches(function, e) for e in out):
            effect = wants_arguments = True
        changed = (context.scope.path(base_of(each)) for each in calls.changed_arguments(node))
        if any(touches(path, each) for path in changed if path is not None for each in out):
            effect = wants_arguments = True
        if calls.dotted(node.func) == "next" and node.args:
            iterator = context.scope.path(node.args[0])
            if iterator is not None and any(touches(iterator, each) for each in out):
                wants_arguments = True
        before, also = self._arguments(
            node, out, context, want=wants_arguments, receiver=wants_receiver
        )
        if want or effect:
            unknown = self._roles.changed_by_unknown(node, context.scope)
            before = joined(before, dict.fromkeys(unknown))
        if want and function is not None:
            is_name = isinstance(node.func, ast.Name) and self._program.is_variable(function)
            if is_name or remembers:
                before = {**before, function: None}
        return before, effect or also

    def _arguments(
        self, node: ast.Call, out: Relevant, context: Context, *, want: bool, receiver: bool
    ) -> tuple[Relevant, bool]:
        effect = False
        saves = calls.is_saving(node) and not self._every_use
        for value in reversed([*node.args, *(each.value for each in node.keywords)]):
            decides = want and (not saves or self._is_decision(value, context))
            out, also = self._argument(value, out, context, want=decides)
            effect = effect or also
        if isinstance(node.func, ast.Attribute):
            out, also = self._expression(node.func.value, out, context, want=receiver)
            effect = effect or also
        elif not isinstance(node.func, ast.Name):
            out, also = self._expression(node.func, out, context, want=want)
            effect = effect or also
        return out, effect

    def _argument(
        self, value: ast.expr, out: Relevant, context: Context, *, want: bool
    ) -> tuple[Relevant, bool]:
        """An argument; a function of the same file is one that the callee calls."""
        if isinstance(value, (ast.Name, ast.Attribute)):
            called = ast.Call(func=value, args=[], keywords=[])
            followed = self._call_inside(called, out, context, want=want)
            if followed is not None:
                return followed
        return self._expression(value, out, context, want=want)
