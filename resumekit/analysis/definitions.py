"""What a source file defines: functions, classes, and what its variables are made of."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from resumekit.analysis import calls
from resumekit.analysis.scopes import (
    LOCAL,
    Class,
    Function,
    FunctionNode,
    Scope,
    own_nodes,
    prefixes,
    root_of,
)

_WRAPPERS = frozenset({"enumerate", "zip", "reversed", "sorted", "list", "tuple", "tqdm", "islice"})


@dataclass
class Definitions:
    """The definitions of a parsed source file.

    Attributes:
        imported: module-level and local names that an import statement binds.
        flags: the paths of variables that hold the result of a comparison.
        aliases: the path that a local refers to, or to an element of, by the path of the local.
        optimized: paths of tensors that an optimizer is made of one by one.
    """

    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    optimized: set[str] = field(default_factory=set)
    _variable_classes: dict[str, str] = field(default_factory=dict)
    _variable_functions: dict[str, Function] = field(default_factory=dict)
    _num_bound: dict[str, int] = field(default_factory=dict)
    _decorated: dict[str, Function] = field(default_factory=dict)
    _lists: dict[str, ast.expr] = field(default_factory=dict)
    _mentioned: dict[object, frozenset[str]] = field(default_factory=dict)
    _overriding: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.functions[""] = Function("", self.tree)
        self._collect(self.tree.body, "", self.functions[""], None)
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported.update((a.asname or a.name).split(".")[0] for a in node.names)
        if "*" in self.imported:
            self.imported |= self._never_stored()
        self._read_decorators()
        for function in list(self.functions.values()):
            self._read_assignments(function)
        for function in list(self.functions.values()):
            self._read_aliases(function)

    @property
    def module(self) -> Function:
        """The file's own statements."""
        return self.functions[""]

    def _collect(
        self, body: list[ast.stmt], prefix: str, parent: Function | None, owner: str | None
    ) -> None:
        for node in own_nodes(body):
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}{node.name}"
                self._collect(node.body, f"{name}.", None, name)
                self.classes[name] = self._class(name, node)
            elif isinstance(node, FunctionNode):
                enclosing = parent if parent and parent.name else None
                function = Function(f"{prefix}{node.name}", node, enclosing, owner)
                self.functions[function.name] = function
                self._collect(node.body, f"{function.name}.", function, None)

    def _never_stored(self) -> set[str]:
        """The names that only an import with a star can bind."""
        names = [each for each in ast.walk(self.tree) if isinstance(each, ast.Name)]
        stored = {each.id for each in names if not isinstance(each.ctx, ast.Load)}
        parameters = {name for each in self.functions.values() for name in each.parameters}
        defined = {*self.functions, *self.classes}
        return {each.id for each in names} - stored - parameters - defined

    def _class(self, name: str, node: ast.ClassDef) -> Class:
        texts = [ast.unparse(each) for each in node.bases]
        bases = tuple(self.classes[each] for each in texts if each in self.classes)
        methods = {method: found for b in reversed(bases) for method, found in b.methods.items()}
        defined = [each for each in node.body if isinstance(each, FunctionNode)]
        methods.update((each.name, self.functions[f"{name}.{each.name}"]) for each in defined)
        for base in bases:
            self._overriding.setdefault(base.name, []).append(name)
        is_module = any(each.endswith("Module") for each in texts) or any(
            each.is_module for each in bases
        )
        return Class(name, bases, methods, {}, is_module)

    # ---------------------------------------------------------------- what variables are made of

    def _read_assignments(self, function: Function) -> None:
        scope = Scope(function)
        for node in function.own_nodes:
            if isinstance(node, ast.Call):
                self._read_optimizer(node, scope)
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                self._read_value([node.target], node.value, scope)
            elif isinstance(node, ast.Assign):
                self._read_value(node.targets, node.value, scope)

    def _read_value(self, targets: list[ast.expr], value: ast.expr, scope: Scope) -> None:
        if isinstance(value, (ast.Compare, ast.BoolOp)):
            self.flags.update(p for p in map(scope.path, targets) if p)
        maker = value.func if isinstance(value, ast.Call) else None
        made = maker.id if isinstance(maker, ast.Name) else ""
        for target in targets:
            if isinstance(value, (ast.List, ast.Tuple)):
                self._lists[scope.path(target) or ""] = value
            if made in self.classes:
                self._note_class(scope, target, made)
            elif isinstance(target, ast.Name):
                self._note_function(scope, scope.path_of(target.id), value)

    def _note_class(self, scope: Scope, target: ast.expr, made: str) -> None:
        path = scope.path(target)
        if path is None:
            return
        owner, attribute = scope.function.owner, self.own_attribute(path)
        if owner is not None and attribute is not None and "." not in attribute:
            self.classes[owner].attribute_classes[attribute] = made
        else:
            self._variable_classes[path] = made

    def _note_function(self, scope: Scope, path: str, value: ast.expr) -> None:
        """A variable that refers to a function: a lambda, ``partial(f)``, what a factory makes."""
        if isinstance(value, ast.Lambda):
            node = _definition_of(value, path.rpartition(LOCAL)[2])
            name = f"{scope.function.name}.{node.name}".lstrip(".")
            parent = scope.function if scope.function.name else None
            made = Function(name, node, parent)
            self.functions.setdefault(name, made)
            self._variable_functions[path] = made
            return
        num_bound = 0
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("partial"):
            num_bound = len(value.args) - 1
            value = value.args[0] if value.args else value
        elif isinstance(value, ast.Call):
            factory = self.function_named(value.func, scope)
            returned = factory and _returned_name(factory)
            inner = self.functions.get(f"{factory.name}.{returned}") if factory else None
            if inner is not None:
                self._variable_functions[path] = inner
            return
        function = self.function_named(value, scope)
        if function is not None:
            self._variable_functions[path] = function
            self._num_bound[path] = num_bound

    def _read_optimizer(self, call: ast.Call, scope: Scope) -> None:
        """``Adam([log_alpha])``: the optimizer changes a tensor that no module has."""
        if "optim" not in ast.unparse(call.func).lower() and calls.method(call) not in _OPTIMIZERS:
            return
        for value in [*call.args[:1], *(e.value for e in call.keywords if e.arg == "params")]:
            listed = self._lists.get(scope.path(value) or "-", value)
            if not isinstance(listed, (ast.List, ast.Tuple)):
                continue
            found = (scope.path(each) for each in _listed(listed))
            self.optimized.update(each for each in found if each is not None)

    def _read_decorators(self) -> None:
        """A decorator of the file that is used once: a call runs the function that it returns."""
        uses: defaultdict[str, list[Function]] = defaultdict(list)
        for function in self.functions.values():
            for name in function.decorators:
                uses[name].append(function)
        for name, decorated in uses.items():
            decorator = self.functions.get(name)
            inner = decorator and self.functions.get(f"{name}.{_returned_name(decorator)}")
            if decorator is not None and inner and decorator.parameters and len(decorated) == 1:
                self._decorated[decorated[0].name] = inner
                self._variable_functions[decorator.local(decorator.parameters[0])] = decorated[0]

    # ---------------------------------------------------------------- aliases

    def _read_aliases(self, function: Function) -> None:
        scope = Scope(function)
        inner = {
            id(each)
            for node in function.nodes_of(ast.comprehension)
            for each in ast.walk(node.target)
        }
        names = (each for each in function.nodes_of(ast.Name) if id(each) not in inner)
        stored = Counter(each.id for each in names if isinstance(each.ctx, ast.Store))
        found: defaultdict[str, list[str]] = defaultdict(list)
        for target, value in (pair for node in function.own_nodes for pair in _bound(node)):
            path = _base_path(value, scope)
            if isinstance(target, ast.Name) and path is not None:
                found[target.id].append(path)
        for name, paths in found.items():
            path = scope.path_of(name)
            if stored[name] == len(paths) and set(paths) != {path} and len(set(paths)) == 1:
                self.aliases[path] = paths[0]

    # ---------------------------------------------------------------- questions

    @cached_property
    def property_names(self) -> frozenset[str]:
        """The names of all properties of the file."""
        methods = self.functions.items()
        return frozenset(name.rpartition(".")[2] for name, each in methods if each.is_property)

    def function_named(self, node: ast.expr, scope: Scope) -> Function | None:
        """The function of this file that a name refers to; None for a method."""
        if not isinstance(node, ast.Name):
            return None
        path = scope.path_of(node.id)
        names = []
        enclosing: Function | None = scope.function
        while enclosing is not None:
            names.append(f"{enclosing.name}.{node.id}")
            enclosing = enclosing.parent
        for name in (*names, path):
            found = self.functions.get(name)
            if found is not None and found.owner is None:
                return self._decorated.get(name, found)
        return self._variable_functions.get(path)

    def num_bound(self, node: ast.expr, scope: Scope) -> int:
        """How many arguments ``partial`` has given to the function that a name refers to."""
        return self._num_bound.get(scope.path(node) or "", 0)

    def optimized_in(self, scope: Scope) -> Iterator[str]:
        """The paths of ``optimized`` as a function has them: ``self`` is one object in a class."""
        for path in self.optimized:
            attribute = self.own_attribute(path)
            if attribute is None:
                yield path
            elif scope.receiver is not None:
                yield f"{scope.receiver}.{attribute}"

    def is_receiver(self, path: str) -> bool:
        """Whether a path is ``self`` in a method."""
        name, _, variable = path.rpartition(LOCAL)
        function = self.functions.get(name)
        return function is not None and function.receiver == variable

    def own_attribute(self, path: str) -> str | None:
        """The name of the attribute where a path is one of ``self`` in a method."""
        receiver = root_of(path)
        return path[len(receiver) + 1 :] or None if self.is_receiver(receiver) else None

    def is_variable(self, path: str) -> bool:
        """Whether a path is no function, class, module or builtin."""
        if path in self.functions or path in self.classes:
            return False
        root = path.split(".")[0]
        return LOCAL in path or (root in self.module.local_names and root not in self.imported)

    def origin_of(self, path: str) -> str:
        """The path that a local took its object from; the path itself where it is no alias."""
        seen = {path}
        while path in self.aliases and self.aliases[path] not in seen:
            path = self.aliases[path]
            seen.add(path)
        return path

    def class_of(self, path: str | None) -> Class | None:
        """The class of this file that the object at a path is an instance of, if that is known."""
        if path is None:
            return None
        if path in self._variable_classes:
            return self.classes[self._variable_classes[path]]
        *_, base, _ = ["", *prefixes(path)]
        if base:
            owner = self.class_of(base)
            made = owner and owner.class_of_attribute(path[len(base) + 1 :])
            return self.classes.get(made) if made else None
        if not self.is_receiver(path):
            return None
        owner_name = self.functions[path.rpartition(LOCAL)[0]].owner or ""
        while len(self._overriding.get(owner_name, ())) == 1:
            owner_name = self._overriding[owner_name][0]  # the only class that it can be
        return self.classes.get(owner_name)


_OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "RMSprop", "Adagrad"})


def _definition_of(node: ast.Lambda, name: str) -> ast.FunctionDef:
    """A lambda as the definition of a function."""
    body: list[ast.stmt] = [ast.copy_location(ast.Return(value=node.body), node)]
    made = ast.FunctionDef(name=name, args=node.args, body=body, decorator_list=[], returns=None)
    return ast.copy_location(made, node)


def _returned_name(function: Function) -> str | None:
    """The name that a function returns, where it returns nothing else."""
    values = function.returned
    found = {each.id if isinstance(each, ast.Name) else None for each in values}
    return found.pop() if len(found) == 1 else None


def _listed(value: ast.expr) -> list[ast.expr]:
    """The elements of a list, those of ``{"params": [...]}`` inside of it too."""
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        given = (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "params")
        return [each for found in given for each in _listed(found)]
    if isinstance(value, (ast.List, ast.Tuple)):
        return [each for element in value.elts for each in _listed(element)]
    return [value] if isinstance(value, (ast.Name, ast.Attribute)) else []


def _bound(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment or a ``for``, each with what it is, or is an element of."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _elements(node.target, node.iter)


def _elements(target: ast.expr, iterable: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of a ``for``, each with what it is an element of."""
    if not isinstance(iterable, ast.Call):
        yield target, iterable
        return
    name, arguments = calls.method(iterable), iterable.args
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if name == "enumerate" and len(elements) == 2 and arguments:
        yield from _elements(elements[1], arguments[0])
    elif name == "zip" and elements and len(elements) == len(arguments):
        for each, value in zip(elements, arguments, strict=True):
            yield from _elements(each, value)
    elif name in ("values", "items") and isinstance(iterable.func, ast.Attribute):
        yield elements[-1] if elements and name == "items" else target, iterable.func.value
    elif name in _WRAPPERS and arguments and not elements:
        yield from _elements(target, arguments[0])


def _base_path(node: ast.expr, scope: Scope) -> str | None:
    while isinstance(node, ast.Subscript):
        node = node.value
    return scope.path(node)
