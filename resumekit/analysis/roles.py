"""Which variables are models, optimizers and loaders, and which are loggers, by how they are used.

Names never count. Where objects exist, their types decide (``live``); the uses decide elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from enum import Enum

from resumekit.analysis import calls
from resumekit.analysis.scopes import (
    LOCAL,
    Function,
    Scope,
    pairs_of,
    prefixes,
    variable_of,
)
from resumekit.analysis.source_file import Callee, Program

_OF_TRAINING_OBJECTS = frozenset({"param_groups", "require_backward_grad_sync"})


class Role(Enum):
    """What an object is for."""

    TRAINING = "training"
    LOGGING = "logging"
    NONE = "none"  # an object that exists, and is neither


class Roles:
    """The roles of all paths of a program.

    Args:
        program: the source file.
        live: gives the role of the object at a path if the object exists.
    """

    def __init__(self, program: Program, live: Callable[[str], Role | None] | None = None) -> None:
        self._program = program
        self._live = live
        self._leader: dict[str, str] = {}
        self._found: dict[str, set[Role]] = {}
        self._environments: set[str] = set()
        self._remembering: set[str] = set()
        self._given_to: dict[str, list[str]] = {}
        for function in program.functions.values():
            self._read(function)

    def of(self, path: str | None) -> Role | None:
        """The role of the object at a path; that of an object around it if it has none."""
        if path is None:
            return None
        known = self._live(path) if self._live is not None else None
        if known is not None:
            return None if known is Role.NONE else known
        owner = self._program.class_of(path)
        if owner is not None:
            is_average = calls.AVERAGE.search(owner.name)
            return Role.TRAINING if owner.is_module or is_average else None
        if self._has_state(path):
            return None
        found = self._found.get(self._find(path), ())
        return next((role for role in (Role.TRAINING, Role.LOGGING) if role in found), None)

    def of_whole(self, path: str) -> Role | None:
        """The role of the object at a path or of one around it; ``self`` has none."""
        roles = (self.of(p) for p in prefixes(path) if not self._program.is_receiver(p))
        return next((role for role in roles if role is not None), None)

    def is_training(self, path: str | None) -> bool:
        """Whether it is a model, an optimizer, a loader or the like."""
        return self.of(path) is Role.TRAINING

    def remembers(self, path: str | None) -> bool:
        """Whether it is an object that changes when it is asked, as a filter or a stopping rule."""
        if path is None or self.of(path) is not None:
            return False
        return self._is_one_of(self._remembering, path)

    def changed_by_unknown(self, call: ast.Call, scope: Scope) -> list[str]:
        """The buffers, filters and the like of ``self`` that an unknown method may change."""
        func, receiver = call.func, scope.receiver
        is_own = isinstance(func, ast.Attribute) and scope.path(func.value) == receiver
        if not is_own or receiver is None or self._program.called(call, scope) is not None:
            return []
        if calls.method(call) in self._program.property_names or calls.only_looks(call):
            return []
        attributes = map(self._program.own_attribute, self._remembering)
        return [f"{receiver}.{each}" for each in attributes if each is not None]

    def given_to(self, path: str) -> list[str]:
        """What an object was made of and may change: the filter and the environment of an agent."""
        given = [each for each in self._given_to.get(path, ()) if self._has_state(each)]
        return [] if self._has_state(path) else given

    def _has_state(self, path: str) -> bool:
        return self._is_one_of(self._environments | self._remembering, path)

    def _is_one_of(self, paths: set[str], path: str) -> bool:
        leader = self._find(path)
        return any(self._find(each) == leader for each in paths)

    def note_training(self, path: str) -> None:
        """Says that the object at a path is a loader."""
        self._note(path, Role.TRAINING)

    # ---------------------------------------------------------------- evidence

    def _find(self, path: str) -> str:
        path = self._canonical(path)
        while path in self._leader:
            path = self._leader[path]
        return path

    def _canonical(self, path: str) -> str:
        """The path with an object of a known class in place of the variable that refers to it."""
        for each in reversed(prefixes(path)[:-1]):
            owner = self._program.class_of(each)
            if owner is not None:
                return f"{owner.name}{LOCAL}self{path[len(each) :]}"
        return path

    def _link(self, one: str, other: str) -> None:
        one, other = self._find(one), self._find(other)
        if one != other:
            self._leader[one] = other
            self._found.setdefault(other, set()).update(self._found.pop(one, ()))

    def _note(self, path: str | None, role: Role) -> None:
        if path is not None and variable_of(path) not in self._program.imported:
            self._found.setdefault(self._find(path), set()).add(role)

    def _read(self, function: Function) -> None:
        scope = Scope(function)
        for node in function.own_nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._read_assignment(target, node.value, scope)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._read_assignment(node.optional_vars, node.context_expr, scope)
            elif isinstance(node, ast.Call):
                self._read_call(node, scope)
            elif isinstance(node, ast.Attribute) and node.attr in _OF_TRAINING_OBJECTS:
                self._note(scope.path(node.value), Role.TRAINING)

    def _read_assignment(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            pairs = pairs_of(target, value)
            if pairs != [(target, value)]:
                for pair in pairs:
                    self._read_assignment(*pair, scope)
            elif self._made(value, scope) is Role.TRAINING:
                for each in target.elts:
                    self._note(scope.path(each), Role.TRAINING)
            else:
                self._link_results(target, value, scope)
            return
        path = scope.path(target)
        if path is not None and isinstance(value, ast.Call):
            given = map(scope.path, calls.arguments_of(value))
            self._given_to.setdefault(path, []).extend(each for each in given if each)
        self._link_results(target, value, scope)
        maker = calls.dotted(value) if isinstance(value, ast.Call) else ""
        role = self._made(value, scope)
        if role is not None:
            self._note(path, role)
        elif path is not None and calls.REMEMBERING_MAKERS.search(maker):
            self._remembering.add(path)

    def _link_results(self, target: ast.expr, made: ast.expr, scope: Scope) -> None:
        """A variable that a function of the file returns has the role that it has there."""
        found = self._program.called(made, scope) if isinstance(made, ast.Call) else None
        if found is None:
            return
        inner = Scope(found.function)
        for value in found.function.returned:
            for each, returned in pairs_of(target, value):
                one, other = scope.path(each), inner.path(returned)
                if one is not None and other is not None:
                    self._link(other, one)

    def _made(self, value: ast.expr, scope: Scope) -> Role | None:
        """What an expression makes: the calls from the outside in, ``Net().to(device)``."""
        if isinstance(value, ast.IfExp):
            return self._made(value.body, scope) or self._made(value.orelse, scope)
        while isinstance(value, ast.Call):
            name = calls.maker(value)
            owner = self._program.classes.get(name)
            if owner is not None:
                return Role.TRAINING if owner.is_module else None
            if calls.TRAINING_MAKERS.search(name):
                return Role.TRAINING
            if calls.LOGGER_MAKERS.search(name):
                return Role.LOGGING
            if not isinstance(value.func, ast.Attribute):
                return None
            value = value.func.value
        return None

    def _read_call(self, call: ast.Call, scope: Scope) -> None:
        given = calls.arguments_of(call)
        if isinstance(call.func, ast.Attribute):
            self._read_method(call, call.func.attr, scope.path(call.func.value))
        elif any(isinstance(e, ast.Call) and calls.method(e) == "parameters" for e in given):
            self._note(scope.path(call.func), Role.TRAINING)  # a loss scaler
        found = self._program.called(call, scope)
        if found is not None:
            self._link_arguments(call, scope, found)

    def _link_arguments(self, call: ast.Call, scope: Scope, callee: Callee) -> None:
        """A parameter of a function of the file has the role of its argument."""
        entered, copied = self._program.enter(call, scope, callee)
        for name, path in entered.bindings:
            if path != callee.receiver:
                self._link(Scope(callee.function).path_of(name), path)
        for parameter, value in copied.items():
            given = scope.path(value)
            if given is not None:
                self._link(parameter, given)

    def _read_method(self, call: ast.Call, name: str, receiver: str | None) -> None:
        if name == "reset" and receiver is not None:
            self._environments.add(receiver)
        if name in ("train", "eval"):
            takes_mode = len(call.args) <= 1 and not call.keywords
            if takes_mode and (not call.args or isinstance(call.args[0], ast.Constant)):
                self._note(receiver, Role.TRAINING)
        elif name == "backward":
            takes = bool(call.args or call.keywords)
            if takes and not any(each.arg for each in call.keywords):
                self._note(receiver, Role.TRAINING)
        elif name in calls.OF_TRAINING_OBJECTS:
            self._note(receiver, Role.TRAINING)
        elif calls.is_logger_method(call):
            self._note(receiver, Role.LOGGING)
