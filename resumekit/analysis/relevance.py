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
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from resumekit.analysis import calls
from resumekit.analysis.program import (
    LOCAL,
    Function,
    FunctionNode,
    LoopNode,
    Program,
    Scope,
    own_nodes,
)
from resumekit.analysis.roles import Role, Roles

_MAX_DEPTH = 10
_RETURN = "return"

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


@dataclass(frozen=True)
class _Context:
    """What surrounds a statement."""

    scope: Scope
    at_break: Relevant
    at_continue: Relevant
    at_return: Relevant
    jumps_matter: bool = False  # a break or continue skips something that matters
    returns_matter: bool = False
    wants_result: bool = False
    no_grad: bool = False
    indices: frozenset[str] = frozenset()  # of the for loops inside the training loop
    depth: int = 0


class Relevance:
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
        only_inside: Collection[str] = frozenset(),
        is_invariant: Callable[[ast.expr, Scope], bool] = lambda test, scope: False,
    ) -> None:
        self._program = program
        self._roles = roles
        self._chain = frozenset(map(id, chain))
        self._inner = inner
        self._every_use = every_use
        self._only_inside = only_inside
        self._is_invariant = is_invariant
        self._memo: dict[object, tuple[Relevant, bool]] = {}
        self._active: list[Function] = []
        self._component_aliases: set[str] = set()
        self.at_safe_point: Relevant = {}
        self.scope: Scope | None = None

    def run(self, root: Function) -> None:
        """Analyses a function as the program's beginning."""
        self._function(Scope(root), {}, wants_result=False, no_grad=False, depth=0)

    # ---------------------------------------------------------------- functions

    def _function(
        self, scope: Scope, out: Relevant, *, wants_result: bool, no_grad: bool, depth: int
    ) -> tuple[Relevant, bool]:
        function = scope.function
        prefix = f"{function.name}{LOCAL}"
        mine = {path for path in out if function.name and path.startswith(prefix)}
        own = set(mine) if function in self._active else set()
        key = (function.name, scope.bindings, _frozen(out), wants_result, no_grad)
        if key in self._memo:
            return self._memo[key]
        if function in self._active or depth > _MAX_DEPTH:
            return out, False
        self._active.append(function)
        matters = False
        while True:
            context = _Context(
                scope,
                at_break={},
                at_continue={},
                at_return=out,
                returns_matter=matters,
                wants_result=wants_result,
                no_grad=no_grad or _is_without_gradients(function),
                depth=depth,
            )
            inside, effect = self._body(function.body, out, context)
            if effect == matters or matters:
                break
            matters = effect
        self._active.pop()
        result = inside if not function.name else _without(inside, own)
        self._memo[key] = result, matters
        return result, matters

    def _call_inside(
        self, call: ast.Call, out: Relevant, context: _Context, *, want: bool
    ) -> tuple[Relevant, bool] | None:
        """The slice through a function of the same file; None for any other call."""
        found = self._program.called(call, context.scope)
        if found is None:
            return None
        function, receiver = found
        scope, copied = self._program.enter(call, context.scope, function, receiver)
        inside, effect = self._function(
            scope, out, wants_result=want, no_grad=context.no_grad, depth=context.depth + 1
        )
        prefix = f"{function.name}{LOCAL}"
        wanted = {path for path in inside if path.startswith(prefix) and path not in out}
        before = {path: guards for path, guards in inside.items() if path not in wanted}
        given = set(map(id, copied.values()))
        for parameter, value in copied.items():
            is_wanted = any(touches(path, parameter) for path in wanted)
            before, also = self._expression(value, before, context, want=is_wanted)
            effect = effect or also
        for value in [*call.args, *(each.value for each in call.keywords)]:
            if id(value) not in given and context.scope.path(value) is None:
                before, also = self._expression(value, before, context, want=want)
                effect = effect or also
        if isinstance(call.func, ast.Attribute) and receiver is None:
            before, also = self._expression(call.func.value, before, context, want=want)
            effect = effect or also
        return before, effect

    # ---------------------------------------------------------------- statements

    def _body(
        self, body: list[ast.stmt], out: Relevant, context: _Context
    ) -> tuple[Relevant, bool]:
        effect = False
        for statement in reversed(body):
            out, also = self._statement(statement, out, context)
            effect = effect or also
        return out, effect

    def _statement(self, node: ast.stmt, out: Relevant, context: _Context) -> tuple[Relevant, bool]:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return self._assignment(node, out, context)
        if isinstance(node, ast.Expr):
            return self._expression(node.value, out, context, want=False, is_statement=True)
        if isinstance(node, ast.If):
            return self._if(node, out, context)
        if isinstance(node, LoopNode):
            return self._loop(node, out, context)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node, out, context)
        if isinstance(node, (ast.Try, getattr(ast, "TryStar", ast.Try))):
            return self._try(node, out, context)
        if isinstance(node, ast.Return):
            before = context.at_return
            effect = context.returns_matter or context.wants_result
            if node.value is not None:
                want = context.wants_result
                before, also = self._expression(node.value, before, context, want=want)
                effect = effect or also
            return before, effect
        if isinstance(node, ast.Break):
            return context.at_break, context.jumps_matter
        if isinstance(node, ast.Continue):
            return context.at_continue, context.jumps_matter
        if isinstance(node, ast.Raise):
            return {}, True
        if isinstance(node, ast.Assert):
            return self._expression(node.test, out, context, want=self._every_use)
        if isinstance(node, ast.Delete):
            return out, False
        if isinstance(node, ast.Match):
            parts = [self._body(each.body, out, context) for each in node.cases]
            effect = any(each for _, each in parts)
            before = joined(out, *(each for each, _ in parts))
            before, also = self._expression(node.subject, before, context, want=effect)
            return before, effect or also
        return out, False

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, out: Relevant, context: _Context
    ) -> tuple[Relevant, bool]:
        if node.value is None:
            return out, False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.Assign) and len(targets) == 1:
            pairs = _pairs(targets[0], node.value)
            if len(pairs) > 1:
                return self._parallel(pairs, out, context)
        is_augmented = isinstance(node, ast.AugAssign)
        want, effect, before = False, False, dict(out)
        for target in targets:
            wanted, also = self._store(target, out, before, context, keeps=is_augmented)
            want, effect = want or wanted, effect or also
        after, also = self._expression(node.value, before, context, want=want)
        if is_augmented and want:
            after = self._read(node.target, after, context)
        return after, effect or also or want

    def _parallel(
        self, pairs: list[tuple[ast.expr, ast.expr]], out: Relevant, context: _Context
    ) -> tuple[Relevant, bool]:
        before, effect = dict(out), False
        wanted = []
        for target, value in pairs:
            want, also = self._store(target, out, before, context, keeps=False)
            wanted.append((value, want))
            effect = effect or also or want
        for value, want in wanted:
            before, also = self._expression(value, before, context, want=want)
            effect = effect or also
        return before, effect

    def _store(
        self, target: ast.expr, out: Relevant, before: Relevant, context: _Context, *, keeps: bool
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
        _drop_guards_on(path, before)
        if not keeps:
            for each in [each for each in before if _covers(path, each)]:
                del before[each]
        matters = self._is_component(target, context)
        if isinstance(target, ast.Name) and self._roles.is_training(path):
            matters = True
        return want or matters, matters

    def _store_item(
        self, target: ast.Subscript, out: Relevant, before: Relevant, context: _Context
    ) -> tuple[bool, bool]:
        if self._is_component(target, context):
            return True, True
        path = context.scope.path(_base(target))
        if path is None:
            return False, False
        want = any(touches(path, each) for each in out)
        if want and any(
            isinstance(each, ast.Name) and context.scope.path_of(each.id) in context.indices
            for each in ast.walk(target.slice)
        ):
            for each in [each for each in before if _covers(path, each)]:
                del before[each]
        elif want:
            before.update(self._read(target.slice, before, context))
        return want, False

    def _is_component(self, target: ast.expr, context: _Context) -> bool:
        """Whether a store changes a parameter, a param group, or an attribute of a model."""
        if isinstance(target, ast.Name):
            return False
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute) and each.attr in ("param_groups", "data", "grad"):
                path = context.scope.path(each.value)
                if path is None or not _is_self(path, context):
                    return True
        base = target
        while isinstance(base, (ast.Subscript, ast.Attribute)):
            base = base.value
            path = context.scope.path(base)
            if path is None:
                continue
            if path in self._component_aliases:
                return True
            if self._roles.is_training(path) and not isinstance(target, ast.Subscript):
                return not _is_self(path, context)
        return False

    def _if(self, node: ast.If, out: Relevant, context: _Context) -> tuple[Relevant, bool]:
        guard = ast.unparse(node.test)
        positive = {p: g for p, g in out.items() if not _excludes(g, negated(guard))}
        negative = {p: g for p, g in out.items() if not _excludes(g, guard)}
        then, effect = self._body(node.body, positive, context)
        other, also = self._body(node.orelse, negative, context)
        if not node.orelse and self._is_invariant(node.test, context.scope):
            # Nothing assigns it elsewhere: what is read without this branch is never read at all.
            killed = {p for p in self._only_inside if p in other and p not in then}
            other = _without(other, killed)
        before = _under(then, other, guard)
        effect = effect or also
        return self._test(node.test, before, context, effect=effect)

    def _test(
        self, test: ast.expr, before: Relevant, context: _Context, *, effect: bool
    ) -> tuple[Relevant, bool]:
        before, also = self._expression(test, before, context, want=effect)
        return before, effect or also

    def _loop(self, node: LoopNode, out: Relevant, context: _Context) -> tuple[Relevant, bool]:
        is_chain = id(node) in self._chain
        after, effect = out, False
        if node.orelse:
            after, effect = self._body(node.orelse, out, context)
        indices = context.indices
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if is_chain:
                indices = frozenset()
            else:
                indices |= {p for p in map(context.scope.path, _names(node.target)) if p}
                if _iterates_parameters(node.iter):
                    self._component_aliases |= indices - context.indices
                indices |= _derived(node.body, indices, context.scope)
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
        context: _Context,
        matters: bool,
        *,
        is_chain: bool,
    ) -> tuple[Relevant, bool]:
        """Before one iteration: the test of a ``while``, the targets of a ``for``."""
        if isinstance(node, ast.While):
            return self._test(node.test, body, context, effect=matters)
        before = dict(body)
        want, _ = self._store(node.target, body, before, context, keeps=False)
        if is_chain:
            return before, False
        return self._expression(node.iter, before, context, want=want or matters)

    def _with(
        self, node: ast.With | ast.AsyncWith, out: Relevant, context: _Context
    ) -> tuple[Relevant, bool]:
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

    def _try(self, node: ast.Try, out: Relevant, context: _Context) -> tuple[Relevant, bool]:
        after, effect = self._body(node.finalbody, out, context)
        handled = [self._body(each.body, after, context) for each in node.handlers]
        normal, also = self._body(node.orelse, after, context)
        end = joined(normal, *(each for each, _ in handled))
        before, inside = self._body(node.body, end, context)
        return before, effect or also or inside or any(each for _, each in handled)

    # ---------------------------------------------------------------- expressions

    def _read(self, node: ast.expr, before: Relevant, context: _Context) -> Relevant:
        return self._expression(node, before, context, want=True)[0]

    def _expression(
        self,
        node: ast.expr | None,
        out: Relevant,
        context: _Context,
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
        path = context.scope.path(node)
        if path is not None:
            is_known = path.split(".")[0] in self._program.imported or _is_self(path, context)
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
            shown = {p: g for p, g in inside.items() if _variable(p) not in hidden}
            return joined(out, shown), effect
        effect = False
        for child in reversed(list(ast.iter_child_nodes(node))):
            if isinstance(child, ast.expr):
                out, also = self._expression(child, out, context, want=want)
                effect = effect or also
        return out, effect

    def _comprehension(
        self, node: ast.expr, out: Relevant, context: _Context, *, want: bool
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
            inside = {p: g for p, g in inside.items() if p in out or _variable(p) not in hidden}
            inside, also = self._expression(generator.iter, inside, context, want=want or effect)
            effect = effect or also
        return inside, effect

    def _call(
        self, node: ast.Call, out: Relevant, context: _Context, *, want: bool, is_statement: bool
    ) -> tuple[Relevant, bool]:
        followed = self._call_inside(node, out, context, want=want)
        if followed is not None:
            return followed
        if self._is_logging(node, context) and not self._every_use:
            return self._arguments(node, out, context, want=want, receiver=False)
        effect = self._has_effect(node, context, is_statement=is_statement)
        wants_arguments = want or self._wants_arguments(node, context, is_statement=is_statement)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        path = None if receiver is None else context.scope.path(_base(receiver))
        wants_receiver = want or (effect and self._remembers(node, path, context))
        if path is not None and is_statement and calls.overwrites_receiver(node):
            owner = path.removesuffix(".data")
            if owner not in self._component_aliases and any(touches(owner, e) for e in out):
                effect = wants_arguments = True
                out = {p: g for p, g in out.items() if not _covers(owner, p)}
        elif path is not None and calls.resets_receiver(node) and is_statement:
            out = {p: g for p, g in out.items() if not _covers(path, p)}
        elif path is not None and self._changes(node, path, is_statement=is_statement):
            if any(touches(path, each) for each in out):
                effect = wants_arguments = wants_receiver = True
            if path in self._component_aliases or self._is_component(node.func, context):
                effect = wants_arguments = True
        if calls.dotted(node.func) == "next" and node.args:
            iterator = context.scope.path(node.args[0])
            if iterator is not None and any(touches(iterator, each) for each in out):
                wants_arguments = True
        before, also = self._arguments(
            node, out, context, want=wants_arguments, receiver=wants_receiver
        )
        if want and isinstance(node.func, ast.Name):
            function = context.scope.path_of(node.func.id)
            if function != node.func.id:
                before = {**before, function: None}
        return before, effect or also

    def _arguments(
        self, node: ast.Call, out: Relevant, context: _Context, *, want: bool, receiver: bool
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
        self, value: ast.expr, out: Relevant, context: _Context, *, want: bool
    ) -> tuple[Relevant, bool]:
        """An argument; a function of the same file is one that the callee calls."""
        if isinstance(value, (ast.Name, ast.Attribute)):
            called = ast.Call(func=value, args=[], keywords=[])
            followed = self._call_inside(called, out, context, want=want)
            if followed is not None:
                return followed
        return self._expression(value, out, context, want=want)

    def _is_decision(self, value: ast.expr, context: _Context) -> bool:
        """Whether an argument of a save says if it saves; others are what it saves and where to."""
        if isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return True
        path = context.scope.path(value)
        return path is not None and path in self._program.flags

    # ---------------------------------------------------------------- what a call does

    def _role(self, node: ast.expr, context: _Context) -> Role | None:
        path = context.scope.path(_base(node))
        return None if path is None else self._roles.of(path)

    def _is_logging(self, node: ast.Call, context: _Context) -> bool:
        if calls.is_logging(node):
            return True
        if isinstance(node.func, ast.Attribute):
            return self._role(node.func.value, context) is Role.LOGGING
        return False

    def _takes_training_object(self, node: ast.Call, context: _Context) -> bool:
        """Whether a model, an optimizer or the like is an argument, also as ``m.parameters()``."""
        for value in [*node.args, *(each.value for each in node.keywords)]:
            while isinstance(value, (ast.Call, ast.Starred)):
                func = value.value if isinstance(value, ast.Starred) else value.func
                is_method = isinstance(func, ast.Attribute)
                value = func.value if is_method and isinstance(value, ast.Call) else func  # type: ignore[attr-defined]
            path = context.scope.path(value)
            if path is not None and self._roles.is_training(path):
                return True
        return False

    def _is_training_method(self, node: ast.Call, context: _Context) -> bool:
        """Whether it is an unknown method of a model, an optimizer or the like."""
        if not isinstance(node.func, ast.Attribute):
            return False
        path = context.scope.path(node.func.value)
        if path is None or calls.method(node) in calls.OF_TRAINING_OBJECTS:
            return False
        return self._roles.is_training(path) and not _is_self(path, context)

    def _calls_model(self, node: ast.Call, context: _Context) -> bool:
        path = context.scope.path(node.func)
        if path is None or not self._roles.is_training(path):
            return False
        return not (isinstance(node.func, ast.Attribute) and _is_self(path, context))

    def _has_effect(self, node: ast.Call, context: _Context, *, is_statement: bool) -> bool:
        name = calls.method(node)
        return (
            (isinstance(node.func, ast.Attribute) and name in calls.TRAINING_METHODS)
            or (is_statement and name == "step" and isinstance(node.func, ast.Attribute))
            or name in ("train", "eval")
            or calls.is_saving(node)
            or calls.is_evaluation(node)
            or calls.trains(node)
            or calls.is_stopping(node)
            or calls.draws_random_numbers(node)
            or self._calls_model(node, context)
            or (is_statement and self._is_training_method(node, context))
            or (self._takes_training_object(node, context) and not calls.is_query(node))
        )

    def _wants_arguments(self, node: ast.Call, context: _Context, *, is_statement: bool) -> bool:
        name = calls.method(node)
        if isinstance(node.func, ast.Attribute) and name in calls.TRAINING_METHODS:
            if name == "backward":
                return True
            return name not in ("zero_grad",)
        if is_statement and name == "step" and isinstance(node.func, ast.Attribute):
            return True
        if calls.is_saving(node) or calls.trains(node):
            return True
        if self._calls_model(node, context):
            return not context.no_grad
        if calls.is_query(node):
            return False
        if is_statement and self._is_training_method(node, context):
            return True
        return is_statement and self._takes_training_object(node, context)

    def _remembers(self, node: ast.Call, path: str | None, context: _Context) -> bool:
        """Whether the receiver decides what the call does: a loss, a saver that keeps the best."""
        name = calls.method(node)
        if name in ("backward",):
            return True
        if path is None or self._roles.of(path) is not None:
            return False
        root = path.rpartition(LOCAL)[2].split(".")[0]
        return calls.is_saving(node) and root not in self._program.imported

    def _changes(self, node: ast.Call, path: str, *, is_statement: bool) -> bool:
        root = path.rpartition(LOCAL)[2].split(".")[0]
        if root in self._program.imported or self._roles.of(path) is not None:
            return False
        return calls.changes_receiver(node, is_statement=is_statement)


# ---------------------------------------------------------------- helpers


def _frozen(relevant: Relevant) -> frozenset[tuple[str, frozenset[str] | None]]:
    return frozenset(relevant.items())


def _without(relevant: Relevant, paths: set[str]) -> Relevant:
    return {path: guards for path, guards in relevant.items() if path not in paths}


def _covers(path: str, other: str) -> bool:
    """Whether a store to the first path overwrites the second."""
    return other == path or other.startswith(f"{path}.")


def _variable(path: str) -> str:
    return path.rpartition(LOCAL)[2].split(".")[0]


def _base(node: ast.expr) -> ast.expr:
    """What an element or a call's result is taken from: ``a.b`` of ``a.b[i].c()``, if possible."""
    while isinstance(node, (ast.Subscript, ast.Call)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute):
                return node
            node = node.func.value
        else:
            node = node.value
    return node


def _names(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for each in target.elts for name in _names(each)]
    return [target]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    many = (ast.Tuple, ast.List)
    if not (isinstance(target, many) and isinstance(value, many)):
        return [(target, value)]
    if len(target.elts) != len(value.elts):
        return [(target, value)]
    return list(zip(target.elts, value.elts, strict=True))


def _is_self(path: str, context: _Context) -> bool:
    function: Function | None = context.scope.function
    while function is not None:
        if function.owner and function.parameters:
            return path == Scope(function, context.scope.bindings).path_of(function.parameters[0])
        function = function.parent
    return False


def _derived(body: list[ast.stmt], indices: frozenset[str], scope: Scope) -> frozenset[str]:
    """The variables that a loop computes from its index."""
    found: set[str] = set()
    for node in own_nodes(body):
        if isinstance(node, ast.Assign):
            names = [each for each in ast.walk(node.value) if isinstance(each, ast.Name)]
            if any(scope.path_of(each.id) in indices | found for each in names):
                found.update(p for p in map(scope.path, node.targets) if p)
    return frozenset(found)


def _drop_guards_on(path: str, relevant: Relevant) -> None:
    """A variable gets a new value: a condition that reads it is another one before that."""
    word = re.compile(rf"\b{re.escape(path.rpartition(LOCAL)[2].split('.')[-1])}\b")
    for each, guards in relevant.items():
        if guards is not None and any(map(word.search, guards)):
            relevant[each] = None


def _is_without_gradients(function: Function) -> bool:
    if not isinstance(function.node, FunctionNode):
        return False
    return any(
        "no_grad" in text or "inference_mode" in text
        for text in map(ast.unparse, function.node.decorator_list)
    )


def _iterates_parameters(node: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Attribute)
        and each.attr in ("parameters", "named_parameters", "param_groups", "modules", "buffers")
        for each in ast.walk(node)
    )


def negated(guard: str) -> str:
    """The condition of the other branch."""
    return guard[4:] if guard.startswith("not ") else f"not {guard}"


def _excludes(guards: frozenset[str] | None, guard: str) -> bool:
    """Whether a path that is relevant under some conditions only is not under this one's branch."""
    return guards is not None and guards == frozenset({guard})


def _under(then: Relevant, other: Relevant, guard: str) -> Relevant:
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
