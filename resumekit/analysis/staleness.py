"""Forward pass: which variables a resumed process does not have at the safe point.

A resumed process runs everything before the loops again, and of the loop around the inner one the
statements before it. What the inner body and the rest of an iteration have written is *stale*
there: the process has another value, unless a statement that runs again writes it from values that
it has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Set

from resumekit.analysis import calls
from resumekit.analysis.roles import Roles
from resumekit.analysis.scopes import (
    LOCAL,
    Function,
    LoopNode,
    Scope,
    base_of,
    children_of,
    covers,
    is_exhaustive,
    nodes_of,
    own_nodes,
    pairs_of,
    target_names,
    touches_any,
    variable_of,
)
from resumekit.analysis.source_file import Callee, Program

Paths = frozenset[str]
_MAX_DEPTH = 10


class Staleness:
    """The forward pass over one program.

    Args:
        program: the source file.
        roles: what its variables are for.
        chain: the loops that a resume continues, and the calls between them.
        inner: the innermost loop.

    Attributes:
        at_safe_point: what is stale at the start of the inner loop's body.
        changed_by_loops: what the loops write, their targets included.
        stored: what an assignment somewhere gives a new value.
    """

    def __init__(
        self, program: Program, roles: Roles, chain: Iterable[ast.AST], inner: ast.AST
    ) -> None:
        self._program = program
        self._roles = roles
        self._chain = frozenset(map(id, chain))
        self._inner = inner
        self._active: list[Function] = []
        self._written: dict[object, Paths] = {}
        self.at_safe_point: Paths = frozenset()
        self.changed_by_loops: Paths = frozenset()
        self.stored: set[str] = set()

    def run(self, root: Function) -> None:
        """Analyses a function as the program's beginning."""
        self._active.append(root)
        self._body(root.body, frozenset(), Scope(root))
        self._active.pop()

    # ---------------------------------------------------------------- what is written

    def written(self, body: list[ast.stmt], scope: Scope) -> Paths:
        """The paths that statements may write, in functions of the same file too."""
        found: set[str | None] = set()
        statements = {id(each.value) for each in nodes_of(body, ast.Expr)}
        for node in own_nodes(body):
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                found.add(scope.path(node))
                self.stored.add(scope.path(node) or "")
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found |= self._with_alias(scope.path(base_of(node)))
            elif isinstance(node, ast.Call):
                found |= self._written_by_call(node, scope, is_statement=id(node) in statements)
        paths = (each for each in found if each is not None)
        return frozenset(each for each in paths if self._roles.of_whole(each) is None)

    def _with_alias(self, path: str | None) -> set[str | None]:
        """The path of a changed object, and the path that a local took the object from."""
        return set() if path is None else {path, self._program.origin_of(path)}

    def _written_inside(self, node: ast.Call, scope: Scope, callee: Callee) -> Paths:
        """What a function of the file writes that a call runs."""
        function = callee.function
        inner, _ = self._program.enter(node, scope, callee)
        key = (function.name, inner.bindings)
        if key not in self._written:
            self._written[key] = frozenset()  # a recursive call adds nothing
            self._written[key] = self.written(function.body, inner)
        return _outside(function, self._written[key])

    def _written_by_call(
        self, node: ast.Call, scope: Scope, *, is_statement: bool
    ) -> Set[str | None]:
        called = self._program.called(node, scope)
        if called is not None:
            return self._written_inside(node, scope, called)
        found = self._written_by_arguments(node, scope)
        forward = self._program.forward_of(node, scope)
        if forward is not None:
            found |= self._written_inside(node, scope, forward)
        found.update(self._roles.changed_by_unknown(node, scope))
        function = scope.path(node.func)
        if self._roles.remembers(function):
            found.add(function)
        if isinstance(node.func, ast.Attribute):
            found |= self._written_by_method(node, node.func.value, scope, is_statement)
        elif is_statement and function is not None and self._is_called_object(function, scope):
            found.add(function)
        return found

    def _is_called_object(self, path: str, scope: Scope) -> bool:
        """Whether a path is an object that is called for what it does, and no unknown callback."""
        is_parameter = path.rpartition(LOCAL)[2] in scope.function.parameters and LOCAL in path
        return self._program.is_variable(path) and not is_parameter

    def _written_by_arguments(self, node: ast.Call, scope: Scope) -> set[str | None]:
        """What an unknown function writes: arguments, and what functions among them write."""
        found: set[str | None] = set()
        for value in calls.arguments_of(node):
            if isinstance(value, (ast.Name, ast.Attribute)):
                call = calls.call_of(value)
                if self._program.called(call, scope) is not None:
                    found |= self._written_by_call(call, scope, is_statement=True)
        for each in calls.changed_arguments(node):
            found |= self._with_alias(scope.path(base_of(each)))
        if calls.dotted(node.func) == "next" and node.args:
            found.add(scope.path(node.args[0]))
        return found

    def _written_by_method(
        self, node: ast.Call, receiver: ast.expr, scope: Scope, is_statement: bool
    ) -> set[str | None]:
        """What an unknown method writes: its object, and tensors that an optimizer updates."""
        found: set[str | None] = set()
        if is_statement and not calls.writes_log(node):
            found.add(scope.path(node.func))
        path = scope.path(base_of(receiver))
        changes = calls.changes_receiver(node, is_statement=is_statement) or (
            self._roles.remembers(scope.path(receiver)) and not calls.only_looks(node)
        )
        is_imported = path is not None and variable_of(path) in self._program.imported
        if changes and not is_imported and path != scope.receiver:
            found |= self._with_alias(path)
        if calls.method(node) == "step" and is_statement:
            found.update(self._program.optimized_in(scope))
        return found

    # ---------------------------------------------------------------- statements

    def _body(self, body: list[ast.stmt], stale: Paths, scope: Scope) -> Paths:
        for node in body:
            stale = self._statement(node, stale, scope)
        return stale

    def _statement(self, node: ast.stmt, stale: Paths, scope: Scope) -> Paths:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return self._assignment(node, stale, scope)
        if isinstance(node, ast.Expr):
            return self._expression(node.value, stale, scope, is_statement=True)
        if isinstance(node, ast.Return):
            return stale if node.value is None else self._expression(node.value, stale, scope)
        if isinstance(node, ast.If):
            return self._if(node, stale, scope)
        if isinstance(node, LoopNode):
            return self._loop(node, stale, scope)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._with(node, stale, scope)
        if isinstance(node, ast.Try):
            return self._try(node, stale, scope)
        if isinstance(node, ast.Match):
            cases = [self._body(each.body, stale, scope) for each in node.cases]
            return frozenset().union(*cases, () if is_exhaustive(node) else stale)
        return stale

    def _if(self, node: ast.If, stale: Paths, scope: Scope) -> Paths:
        stale = self._expression(node.test, stale, scope)
        then, other = self._body(node.body, stale, scope), self._body(node.orelse, stale, scope)
        if self._reads(node.test, stale, scope):  # a resumed process may run the other branch
            then |= stale | self.written([*node.body, *node.orelse], scope)
        return (then | other) - _switched(node, scope)

    def _with(self, node: ast.With | ast.AsyncWith, stale: Paths, scope: Scope) -> Paths:
        for item in node.items:
            stale = self._expression(item.context_expr, stale, scope)
            if item.optional_vars is not None:
                stale = self._store(item.optional_vars, stale, scope, is_stale=False)
        return self._body(node.body, stale, scope)

    def _try(self, node: ast.Try, stale: Paths, scope: Scope) -> Paths:
        stale = self._body(node.body, stale, scope)
        after = self._body(node.orelse, stale, scope)
        for handler in node.handlers:
            after |= self._body(handler.body, stale, scope)
        return self._body(node.finalbody, after, scope)

    def _loop(self, node: LoopNode, stale: Paths, scope: Scope) -> Paths:
        is_chain = id(node) in self._chain
        tested = node.test if isinstance(node, ast.While) else node.iter
        head = stale = self._expression(tested, stale, scope)
        if is_chain:
            head = stale | self.written(node.body, scope)
            targets = [] if isinstance(node, ast.While) else list(ast.walk(node.target))
            self.changed_by_loops |= head.union(p for p in map(scope.path, targets) if p)
        while True:
            start = head
            if not isinstance(node, ast.While):
                from_stale = not is_chain and self._reads(node.iter, head, scope)
                start = self._store(node.target, head, scope, is_stale=from_stale)
            if node is self._inner:
                self.at_safe_point |= start
            after = self._body(node.body, start, scope)
            if after | head == head:
                break
            head |= after
        return self._body(node.orelse, after, scope)

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, stale: Paths, scope: Scope
    ) -> Paths:
        if node.value is None:
            return stale
        stale = self._expression(node.value, stale, scope)
        if isinstance(node, ast.AugAssign):
            both = self._reads(node.value, stale, scope) or self._reads(node.target, stale, scope)
            return self._store(node.target, stale, scope, is_stale=both, keeps=True)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            pairs = pairs_of(target, node.value)
            found = [(each, self._reads(value, stale, scope)) for each, value in pairs]
            for each, is_stale in found:
                stale = self._store(each, stale, scope, is_stale=is_stale)
        return stale

    def _store(
        self, target: ast.expr, stale: Paths, scope: Scope, *, is_stale: bool, keeps: bool = False
    ) -> Paths:
        for each in target_names(target):
            path = scope.path(base_of(each))
            if path is not None and is_stale:
                stale |= {path}
            elif path is not None and not isinstance(each, ast.Subscript) and not keeps:
                stale = _without(path, stale)
        return stale

    # ---------------------------------------------------------------- expressions

    def _reads(self, node: ast.expr, stale: Paths, scope: Scope) -> bool:
        """Whether the value depends on a stale variable."""
        if not stale:
            return False
        node = self._program.property_read(node, scope) or node
        path = scope.path(node)
        if path is not None:
            return touches_any(path, stale)
        if isinstance(node, ast.Call):
            called = self._program.called(node, scope)
            if called is not None and self._function_reads(node, called, stale, scope):
                return True
        return any(
            self._reads(child, stale, scope)
            for child in children_of(node)
            if isinstance(child, (ast.expr, ast.keyword, ast.comprehension))
            for child in ([child.value] if isinstance(child, ast.keyword) else _parts(child))
        )

    def _function_reads(self, node: ast.Call, callee: Callee, stale: Paths, scope: Scope) -> bool:
        function = callee.function
        if function in self._active or len(self._active) > _MAX_DEPTH:
            return False
        inner, _ = self._program.enter(node, scope, callee)
        outside = _outside(function, stale)
        self._active.append(function)
        found = any(self._reads(each, outside, inner) for each in function.returned)
        self._active.pop()
        return found

    def _expression(
        self, node: ast.expr, stale: Paths, scope: Scope, *, is_statement: bool = False
    ) -> Paths:
        """After an expression is evaluated: what its calls write."""
        for child in children_of(node):
            if isinstance(child, ast.keyword):
                stale = self._expression(child.value, stale, scope)
            elif isinstance(child, ast.expr) and not isinstance(child, ast.Lambda):
                stale = self._expression(child, stale, scope)
        if not isinstance(node, ast.Call):
            return stale
        called = self._program.called(node, scope)
        if called is not None:
            return self._enter(node, called, stale, scope)
        if isinstance(node.func, ast.Attribute):
            path = scope.path(base_of(node.func.value))
            if path is not None and is_statement and calls.resets_receiver(node):
                return _without(path, stale)
        return stale

    def _enter(self, node: ast.Call, callee: Callee, stale: Paths, scope: Scope) -> Paths:
        function = callee.function
        if function in self._active or len(self._active) > _MAX_DEPTH:
            return stale
        inner, copied = self._program.enter(node, scope, callee)
        given = {name for name, value in copied.items() if self._reads(value, stale, scope)}
        self._active.append(function)
        after = self._body(function.body, _outside(function, stale) | given, inner)
        self._active.pop()
        return _outside(function, after)


def _without(path: str, paths: Paths) -> Paths:
    """The paths that a store to a path does not overwrite."""
    return frozenset(each for each in paths if not covers(path, each))


def _outside(function: Function, paths: Paths) -> Paths:
    """The paths that do not begin with a local of a function."""
    return frozenset(each for each in paths if not function.has_local(each))


def _switched(node: ast.If, scope: Scope) -> Paths:
    """What gets a constant from some epoch on, ``if epoch >= 5: x = 0``: a resume does that too."""
    compares = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
    operators = [operator for each in compares for operator in each.ops]
    if not operators or not all(isinstance(each, (ast.Gt, ast.GtE)) for each in operators):
        return frozenset()
    stores = [
        target
        for each in nodes_of(node.body, ast.Assign)
        if isinstance(each.value, ast.Constant)
        for target in each.targets
    ]
    return frozenset(path for path in map(scope.path, stores) if path is not None)


def _parts(node: ast.expr | ast.comprehension) -> list[ast.expr]:
    return [node.iter, *node.ifs] if isinstance(node, ast.comprehension) else [node]
