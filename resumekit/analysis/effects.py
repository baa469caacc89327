"""What a call or a store does to the training, given the statements around it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from resumekit.analysis import calls
from resumekit.analysis.roles import Role, Roles
from resumekit.analysis.scopes import Relevant, Scope, base_of, variable_of
from resumekit.analysis.source_file import Program


@dataclass(frozen=True)
class Context:
    """What surrounds a statement."""

    scope: Scope
    at_break: Relevant = field(default_factory=dict)
    at_continue: Relevant = field(default_factory=dict)
    at_return: Relevant = field(default_factory=dict)
    jumps_matter: bool = False  # a break or continue skips something that matters
    returns_matter: bool = False
    wants_result: bool = False
    elements: frozenset[int] | None = None  # of a returned tuple, the ones that are wanted
    no_grad: bool = False
    indices: frozenset[str] = frozenset()  # of the for loops inside the training loop


class CallEffects:
    """Judges calls and stores by the roles of the objects that take part.

    Args:
        program: the source file.
        roles: what its variables are for.
    """

    def __init__(self, program: Program, roles: Roles) -> None:
        self._program = program
        self._roles = roles
        self._component_aliases: set[str] = set()  # the parameters that a loop goes over

    def _is_component(self, target: ast.expr, context: Context) -> bool:
        """Whether a store changes a parameter, a param group, or an attribute of a model."""
        if isinstance(target, ast.Name):
            return False
        attributes = (each for each in ast.walk(target) if isinstance(each, ast.Attribute))
        changed = [e.value for e in attributes if e.attr in ("param_groups", "data", "grad")]
        if not all(context.scope.is_self(context.scope.path(each)) for each in changed):
            return True
        base = target
        while isinstance(base, (ast.Subscript, ast.Attribute)):
            base = base.value
            path = context.scope.path(base)
            if path in self._component_aliases:
                return True
            if self._roles.is_training(path) and not isinstance(target, ast.Subscript):
                return not context.scope.is_self(path)
        return False

    def _is_decision(self, value: ast.expr, context: Context) -> bool:
        """Whether an argument of a save says if it saves; others are what it saves and where to."""
        if isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return True
        return context.scope.path(value) in self._program.flags

    def _role(self, node: ast.expr, context: Context) -> Role | None:
        return self._roles.of(context.scope.path(base_of(node)))

    def _is_logging(self, node: ast.Call, context: Context) -> bool:
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_logger = receiver is not None and self._role(receiver, context) is Role.LOGGING
        return is_logger or calls.is_logging(node)

    def _takes_training_object(self, node: ast.Call, context: Context) -> bool:
        """Whether a model, an optimizer or the like is an argument, also as ``m.parameters()``."""
        for value in calls.arguments_of(node):
            while isinstance(value, (ast.Call, ast.Starred)):
                if isinstance(value, ast.Starred):
                    value = value.value
                else:
                    value = (
                        value.func.value if isinstance(value.func, ast.Attribute) else value.func
                    )
            if self._roles.is_training(context.scope.path(value)):
                return True
        return False

    def _is_training_method(self, node: ast.Call, context: Context) -> bool:
        """Whether it is an unknown method of a model, an optimizer or the like."""
        func = node.func
        if not isinstance(func, ast.Attribute) or func.attr in calls.OF_TRAINING_OBJECTS:
            return False
        path = context.scope.path(func.value)
        return self._roles.is_training(path) and not context.scope.is_self(path)

    def _calls_model(self, node: ast.Call, context: Context) -> bool:
        path = context.scope.path(node.func)
        is_own = isinstance(node.func, ast.Attribute) and context.scope.is_self(path)
        return self._roles.is_training(path) and not is_own

    def _effect(self, node: ast.Call, context: Context, *, is_statement: bool) -> tuple[bool, bool]:
        """Whether a call has an effect on the training, and whether its arguments count then."""
        name = calls.method(node)
        is_method = isinstance(node.func, ast.Attribute)
        if is_method and name in calls.TRAINING_METHODS:
            return True, name != "zero_grad"
        is_step = is_statement and is_method and name == "step"
        if is_step or calls.is_saving(node) or calls.trains(node):
            return True, True
        if self._calls_model(node, context):
            return True, not context.no_grad
        looks = calls.is_query(node)
        takes = not looks and self._takes_training_object(node, context)
        acts = is_statement and (
            self._is_training_method(node, context) or self._is_unknown_function(node, context)
        )
        decides = (
            name in ("train", "eval")
            or calls.is_evaluation(node)
            or calls.is_stopping(node)
            or calls.draws_random_numbers(node)
        )
        return decides or acts or takes, not looks and is_statement and (acts or takes)

    def _is_unknown_function(self, node: ast.Call, context: Context) -> bool:
        """Whether a function from elsewhere is called for what it does to its arguments."""
        path = context.scope.path(node.func)
        if path is None:
            return False
        is_method = isinstance(node.func, ast.Attribute)
        if is_method and variable_of(path) not in self._program.imported:
            return False
        return calls.may_train(node)

    def _remembers(self, node: ast.Call, path: str | None, context: Context) -> bool:
        """Whether the receiver decides what the call does: a loss, a saver that keeps the best."""
        if calls.method(node) == "backward":
            return True
        if path is None or self._roles.of(path) is not None:
            return False
        return calls.is_saving(node) and variable_of(path) not in self._program.imported

    def _changes(self, node: ast.Call, path: str, *, is_statement: bool) -> bool:
        if variable_of(path) in self._program.imported or self._roles.of(path) is not None:
            return False
        if self._roles.remembers(path) and not calls.only_looks(node):
            return True
        return calls.changes_receiver(node, is_statement=is_statement)
