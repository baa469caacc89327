"""Backward slice through expressions, calls and stores; see ``relevance`` for statements."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from resumekit.analysis import calls
from resumekit.analysis.effects import CallEffects, Context
from resumekit.analysis.roles import Roles
from resumekit.analysis.scopes import (
    Relevant,
    base_of,
    children_of,
    covers,
    drop_guards_on,
    joined,
    target_names,
    touches_any,
    variable_of,
    without,
)
from resumekit.analysis.source_file import Program


class Flow(NamedTuple):
    """What is relevant before a piece of code, and whether the code has an effect on the training.

    What takes a flow extends that piece by the code before it.
    """

    relevant: Relevant
    effect: bool = False


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
    def _function(self, out: Relevant, context: Context) -> Flow:
        """Before a function runs, in the context of its own statements."""

    # ---------------------------------------------------------------- stores

    def _store(
        self, target: ast.expr, out: Relevant, before: Relevant, context: Context, *, keeps: bool
    ) -> bool:
        """Whether the value that a store writes is wanted.

        Args:
            target: what is stored into.
            out: what is relevant after the store.
            before: the same without what the store overwrites; it is changed here.
            context: of the statement.
            keeps: the store reads the old value.
        """
        if isinstance(target, (ast.Tuple, ast.List)):
            targets = target_names(target)
            wanted = [self._store(each, out, before, context, keeps=keeps) for each in targets]
            return any(wanted)
        matters = self._is_component(target, context)
        if isinstance(target, ast.Subscript):
            return matters or self._store_item(target, out, before, context)
        path = context.scope.path(target)
        if path is None:
            return matters
        drop_guards_on(path, before)
        if not keeps:
            _drop_covered(path, before)
        is_component = isinstance(target, ast.Name) and self._roles.is_training(path)
        return matters or is_component or touches_any(path, out)

    def _store_item(
        self, target: ast.Subscript, out: Relevant, before: Relevant, context: Context
    ) -> bool:
        path = context.scope.path(base_of(target))
        if path is None or not touches_any(path, out):
            return False
        names = (each.id for each in ast.walk(target.slice) if isinstance(each, ast.Name))
        if any(context.scope.path_of(each) in context.indices for each in names):
            _drop_covered(path, before)
        else:
            before.update(self._read(target.slice, before, context))
        return True

    # ---------------------------------------------------------------- expressions

    def _read(self, node: ast.expr, before: Relevant, context: Context) -> Relevant:
        return self._expression(node, Flow(before), context, want=True).relevant

    def _expression(
        self,
        node: ast.expr | None,
        after: Flow,
        context: Context,
        *,
        want: bool,
        is_statement: bool = False,
    ) -> Flow:
        """Before an expression is evaluated.

        Args:
            node: the expression.
            after: the flow after it.
            context: of the statement.
            want: its value is relevant.
            is_statement: its value is thrown away.
        """
        if node is None or isinstance(node, ast.Constant):
            return after
        want = want or self._every_use
        call = node if isinstance(node, ast.Call) else None
        call = call or self._program.property_read(node, context.scope)
        if call is not None:
            return self._call(call, after, context, want=want, is_statement=is_statement)
        path = context.scope.path(node)
        if path is not None:
            is_known = variable_of(path) in self._program.imported or context.scope.is_self(path)
            return (
                Flow({**after.relevant, path: None}, after.effect)
                if want and not is_known
                else after
            )
        if isinstance(node, ast.NamedExpr):
            before = dict(after.relevant)
            stored = self._store(node.target, after.relevant, before, context, keeps=False)
            after = Flow(before, after.effect or stored)
            return self._expression(node.value, after, context, want=want or stored)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self._comprehension(node, after, context, want=want)
        if isinstance(node, ast.Lambda):
            hidden = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            inside = self._expression(node.body, Flow({}), context, want=want)
            shown = {p: g for p, g in inside.relevant.items() if variable_of(p) not in hidden}
            return Flow(joined(after.relevant, shown), after.effect or inside.effect)
        children = [each for each in reversed(children_of(node)) if isinstance(each, ast.expr)]
        return self._in_turn([(each, want) for each in children], after, context)

    def _in_turn(
        self, wanted: Iterable[tuple[ast.expr, bool]], after: Flow, context: Context
    ) -> Flow:
        """Before several expressions, the last one first; each with whether it is wanted."""
        for node, want in wanted:
            after = self._expression(node, after, context, want=want)
        return after

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        after: Flow,
        context: Context,
        *,
        want: bool,
    ) -> Flow:
        out = after.relevant
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        flow = self._in_turn([(each, want) for each in parts], Flow(out), context)
        for generator in reversed(node.generators):
            for test in generator.ifs:
                flow = self._expression(test, flow, context, want=want or flow.effect)
            hidden = {each.id for each in ast.walk(generator.target) if isinstance(each, ast.Name)}
            shown = {
                p: g for p, g in flow.relevant.items() if p in out or variable_of(p) not in hidden
            }
            flow = Flow(shown, flow.effect)
            flow = self._expression(generator.iter, flow, context, want=want or flow.effect)
        return Flow(flow.relevant, flow.effect or after.effect)

    # ---------------------------------------------------------------- calls

    def _call_inside(
        self,
        call: ast.Call,
        after: Flow,
        context: Context,
        *,
        want: bool,
        elements: frozenset[int] | None = None,
    ) -> Flow | None:
        """The slice through a function of the same file; None for any other call."""
        found = self._program.called(call, context.scope)
        if found is None:
            return None
        scope, copied = self._program.enter(call, context.scope, found)
        inner = Context(scope, wants_result=want, elements=elements, no_grad=context.no_grad)
        inside, effect = self._function(after.relevant, inner)
        wanted = {p for p in inside if scope.function.has_local(p) and p not in after.relevant}
        given = set(map(id, copied.values()))
        others = [
            each
            for each in calls.arguments_of(call)
            if id(each) not in given and context.scope.path(each) is None
        ]
        if isinstance(call.func, ast.Attribute) and found.receiver is None:
            others.append(call.func.value)
        evaluated = [(value, touches_any(name, wanted)) for name, value in copied.items()]
        evaluated += [(each, want) for each in others]
        flow = Flow(without(inside, wanted), after.effect or effect)
        return self._in_turn(evaluated, flow, context)

    def _call(
        self, node: ast.Call, after: Flow, context: Context, *, want: bool, is_statement: bool
    ) -> Flow:
        followed = self._call_inside(node, after, context, want=want)
        if followed is not None:
            return followed
        logs = self._is_logging(node, context) or (is_statement and calls.writes_log(node))
        if logs and not self._every_use:
            return self._arguments(node, after, context, want=want, receiver=False)
        out = after.relevant
        effect, counts = self._effect(node, context, is_statement=is_statement)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        path = None if receiver is None else context.scope.path(base_of(receiver))
        reads = effect and self._remembers(node, path, context)
        matters = False
        if path is not None:
            out, matters, also = self._changed_receiver(
                node, path, out, context, is_statement=is_statement
            )
            reads = reads or also
        matters = matters or self._changes_relevant(node, out, context)
        flow = Flow(out, after.effect or effect or matters)
        flow = self._arguments(
            node, flow, context, want=want or counts or matters, receiver=want or reads
        )
        before = flow.relevant
        if want or effect or matters:
            unknown = self._roles.changed_by_unknown(node, context.scope)
            before = joined(before, dict.fromkeys(unknown))
        return Flow(self._with_called(node, before, context, want=want), flow.effect)

    def _changed_receiver(
        self, node: ast.Call, path: str, out: Relevant, context: Context, *, is_statement: bool
    ) -> tuple[Relevant, bool, bool]:
        """What a method does to its object.

        Returns:
            What is relevant without what it overwrites, whether the change matters, and whether
            the object's former content does.
        """
        if is_statement and calls.overwrites_receiver(node):
            owner = path.removesuffix(".data")
            if owner in self._component_aliases or not touches_any(owner, out):
                return out, False, False
            return {p: g for p, g in out.items() if not covers(owner, p)}, True, False
        if is_statement and calls.resets_receiver(node):
            return {p: g for p, g in out.items() if not covers(path, p)}, False, False
        if not self._changes(node, path, is_statement=is_statement):
            return out, False, False
        reads = touches_any(path, out)
        is_component = path in self._component_aliases or self._is_component(node.func, context)
        return out, reads or is_component, reads

    def _changes_relevant(self, node: ast.Call, out: Relevant, context: Context) -> bool:
        """Whether a call changes the called object or an argument, and that is relevant."""
        function = context.scope.path(node.func)
        if self._roles.remembers(function) and touches_any(function, out):
            return True
        changed = (context.scope.path(base_of(each)) for each in calls.changed_arguments(node))
        return any(touches_any(path, out) for path in changed)

    def _with_called(
        self, node: ast.Call, before: Relevant, context: Context, *, want: bool
    ) -> Relevant:
        """Adds the called object where it is a variable whose answer is wanted."""
        function = context.scope.path(node.func)
        if not want or function is None:
            return before
        is_name = isinstance(node.func, ast.Name) and self._program.is_variable(function)
        is_asked = is_name or self._roles.remembers(function)
        return {**before, function: None} if is_asked else before

    def _arguments(
        self, node: ast.Call, after: Flow, context: Context, *, want: bool, receiver: bool
    ) -> Flow:
        saves = calls.is_saving(node) and not self._every_use
        for value in reversed(calls.arguments_of(node)):
            decides = want and (not saves or self._is_decision(value, context))
            after = self._argument(value, after, context, want=decides)
        if isinstance(node.func, ast.Attribute):
            return self._expression(node.func.value, after, context, want=receiver)
        if isinstance(node.func, ast.Name):
            return after
        return self._expression(node.func, after, context, want=want)

    def _argument(self, value: ast.expr, after: Flow, context: Context, *, want: bool) -> Flow:
        """An argument; a function of the same file is one that the callee calls."""
        followed = None
        if isinstance(value, (ast.Name, ast.Attribute)):
            followed = self._call_inside(calls.call_of(value), after, context, want=want)
        return followed or self._expression(value, after, context, want=want)


def _drop_covered(path: str, relevant: Relevant) -> None:
    for each in [each for each in relevant if covers(path, each)]:
        del relevant[each]
