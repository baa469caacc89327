"""Random functions, stopped at random calls: what is not live must not matter, the rest suffices.

``python tests/live/fuzz_bytecode.py [NUM_PROGRAMS [SEED]]`` runs on any CPython from 3.10 on,
without other packages; first all tests of this folder that need no arguments, then the programs.

A program computes with a few variables and calls `probe()` at random points. Two properties:

- *Soundness*: at one probe every variable that is not live gets a value that raises on any use.
  The result must be that of an undisturbed run.
- *Completeness*: at one probe of a run with other arguments, which executes the same instructions
  in all frames, the live variables are set to those of the first run. From there on the result
  must be that of the first run.

Each has a negative control: with one live variable left out, many programs must differ.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import random
import runpy
import sys
import weakref
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from resumekit.live.bytecode import live_names, loaded_globals, operands  # noqa: E402
from resumekit.live.frames import find_frames  # noqa: E402  the path comes first

FILENAME = "<generated>"
MODULUS = 1009
NAMES = ("a", "b", "c", "d", "e", "f")


class PoisonUsedError(BaseException):
    """A variable that was not live was used."""


class Poison:
    """A value that raises on any use, and that a result cannot contain unseen."""


def _raise(*_args, **_named):
    raise PoisonUsedError


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "iadd", "neg", "bool", "eq"),
    *("lt", "gt", "le", "ge", "ne", "iter", "next", "call", "index", "format", "str", "len"),
    *("getattr", "getitem", "enter", "exit", "contains", "deepcopy"),
):
    setattr(Poison, f"__{_name}__", _raise)


class OopsError(Exception):
    """Raised by programs."""


# What programs call


class Items:
    """An iterator whose position is restored like that of the data."""

    def __init__(self, world, site, num):
        self.position, self.num = 0, num
        world.items.setdefault(site, weakref.WeakSet()).add(self)

    def __iter__(self):
        return self

    def __next__(self):
        if self.position >= self.num:
            raise StopIteration
        self.position += 1
        return self.position


class Manager:
    """A context manager without state."""

    def __init__(self, world, number, suppresses):
        self.world, self.number, self.suppresses = world, number, suppresses

    def __enter__(self):
        return self.number

    def __exit__(self, kind, _value, _traceback):
        self.world.out.append(("exit", self.number))
        return self.suppresses and kind is OopsError


class World:
    """One run of a program: its output, its counters, and what happens at a probe.

    Args:
        at_probe: called at each probe with the world.
    """

    def __init__(self, at_probe):
        self.at_probe, self.num_probes, self.draws = at_probe, 0, 0
        self.frame: FrameType | None = None
        self.value, self.out = 0, []
        self.items: dict[int, weakref.WeakSet] = {}

    def probe(self, value=0):
        self.num_probes += 1
        if self.num_probes > 60:
            raise RuntimeError("the program does not end")
        self.value, self.frame = value, sys._getframe(1)
        self.at_probe(self)
        self.frame = None
        self.draws += 1
        return (self.draws * 7 + self.value) % MODULUS

    def frames(self):
        """The program's frames, the innermost first."""
        assert self.frame is not None
        found = find_frames(self, self.frame)
        return [each for each in found if each.code.co_filename == FILENAME]

    def read_items(self):
        """The position and the length of each iterator; None if a site has several."""
        found = {site: list(items) for site, items in self.items.items() if items}
        if any(len(items) > 1 for items in found.values()):
            return None
        return {site: (items[0].position, items[0].num) for site, items in found.items()}

    def set_items(self, saved):
        """Sets what `read_items` has returned, in another world."""
        for site, items in self.items.items():
            for each in items:
                each.position, each.num = saved[site]

    def run(self, program, arguments):
        """The result of a program."""
        self.program = program
        names = {
            "__name__": "generated",
            "probe": self.probe,
            "emit": self.out.append,
            "items": lambda site, num: Items(self, site, num),
            "manager": lambda number, suppresses: Manager(self, number, suppresses),
            "add": lambda *values: sum(values) % MODULUS,
            "Oops": OopsError,
            **dict(zip(NAMES, arguments, strict=False)),
            "L": [arguments[0]],
        }
        try:
            exec(program, names)  # noqa: S102  the program is generated here
            result = names["main"](*arguments[:4]) if "main" in names else None
        except (OopsError, RuntimeError, NameError) as error:
            result = type(error).__name__
        return "result", result


def _show(out, result):
    """A result as text in which a `Poison` can be seen."""

    def plain(value):
        if isinstance(value, (tuple, list)):
            return [plain(each) for each in value]
        return value if isinstance(value, (int, str, type(None))) else type(value).__name__

    return repr([plain(out), plain(result)])


# The generator


class Writer:
    """Writes one random program.

    Args:
        rng: the source of all choices.
        is_module: without functions: all variables are globals.
    """

    def __init__(self, rng, is_module):
        self.rng, self.is_module = rng, is_module
        self.lines, self.number, self.functions = [], 0, []
        self.in_loop, self.in_function, self.budget = False, not is_module, 0

    def write(self):
        rng = self.rng
        for kind in range(rng.randint(0, 2)):
            self._generator(f"gen{kind}")
        if self.is_module:
            self.budget = 16
            self._block(0, 5)
            self._line(0, f"emit(({', '.join(NAMES)}, L))")
            return "\n".join(self.lines)
        self._line(0, f"def main({', '.join(NAMES[:4])}):")
        self._line(1, "e = a + 1; f = b + 2; L = [c]")
        for number in range(rng.randint(0, 2)):
            self._closure(f"inner{number}")
        self.budget = 16
        self._block(1, 5)
        self._line(1, f"return ({', '.join(rng.sample(NAMES, 4))}, sum(L))")
        return "\n".join(self.lines)

    def _line(self, depth, text):
        self.lines.append("    " * depth + text)

    def _new(self):
        self.number += 1
        return self.number

    def _generator(self, name):
        self._line(0, f"def {name}(n, a, b):")
        self._line(1, "c = d = e = f = a; L = [b]")
        self._line(1, f"for d in items({self._new()}, n % 3 + 1):")
        outer, self.in_loop, self.budget = self.in_loop, True, 3
        self._block(2, 2)
        self._line(2, f"yield {self._expression(2)}")
        self.in_loop = outer
        if self.rng.random() < 0.3:
            self._line(1, f"yield from items({self._new()}, 2)")
        self.functions.append(name)

    def _closure(self, name):
        shared = self.rng.sample(NAMES, 2)
        self._line(1, f"def {name}(p):")
        self._line(2, f"nonlocal {shared[0]}")
        self._line(2, f"{shared[0]} = ({shared[0]} + p * {shared[1]}) % {MODULUS}")
        if self.rng.random() < 0.7:
            self._line(2, "p = p + probe()")
        self._line(2, f"emit(p); return ({shared[0]} + p) % {MODULUS}")
        self.functions.append(name)

    def _block(self, depth, size):
        for _ in range(self.rng.randint(1, size)):
            self._statement(depth)

    def _statement(self, depth):
        self.budget -= 1
        simple = [self._assign, self._assign, self._assign, self._probe, self._probe]
        simple += [self._augment, self._emit, self._append, self._delete, self._swap]
        compound = [self._if, self._while, self._for, self._for, self._with, self._try, self._match]
        if self.in_loop:
            simple.append(self._leave)
        is_simple = depth > 5 or self.budget < 0 or self.rng.random() < 0.5
        self.rng.choice(simple if is_simple else compound)(depth)

    def _name(self):
        return self.rng.choice(NAMES)

    def _expression(self, depth=0):
        rng, name = self.rng, self._name()
        if depth > 2 or rng.random() < 0.35:
            return rng.choice((name, name, str(rng.randint(0, 99))))
        one, other = self._expression(depth + 1), self._expression(depth + 1)
        choices = [
            f"({one} {rng.choice('+-*')} {other}) % {MODULUS}",
            f"add({one}, {other})",
            f"({one} if {other} % 2 else {name})",
            f"({one} and {other})",
            f"len(f'{{{one}}}')",
            f"sum([{name} for {name} in ({one}, {other})])",
            f"sum([{name} + {one} for {self._name()} in (1, 2)]) % {MODULUS}",
            f"sum({{{name}: {one} for {name} in (1, 2)}}) % {MODULUS}",
            f"probe({one})",
            f"add({one}, probe({other}), {name})",
        ]
        if self.in_function:
            choices += [f"({name} := {one} % 17)", f"(lambda q: q + {one})({other})"]
            choices += [f"sum([{name} + probe() for {name} in (1, 2)]) % {MODULUS}"]
        closures = [each for each in self.functions if each.startswith("inner")]
        if closures:
            choices += [f"{rng.choice(closures)}({one})"] * 2
        return rng.choice(choices)

    def _assign(self, depth):
        self._line(depth, f"{self._name()} = {self._expression()}")

    def _augment(self, depth):
        self._line(depth, f"{self._name()} += {self._expression()}")

    def _swap(self, depth):
        one, other = self.rng.sample(NAMES, 2)
        self._line(depth, f"{one}, {other} = {other}, {self._expression()}")

    def _probe(self, depth):
        self._line(depth, self.rng.choice(("probe()", f"probe({self._name()})")))

    def _emit(self, depth):
        self._line(depth, f"emit({self._expression()})")

    def _append(self, depth):
        lines = (f"L.append({self._expression()})", f"L = [*L[-3:], {self._expression()}]")
        self._line(depth, self.rng.choice(lines))

    def _delete(self, depth):
        name = self._name()
        self._line(depth, f"emit({name}); del {name}")
        if self.rng.random() < 0.3:
            self._line(depth, "probe()")
        self._line(depth, f"{name} = {self.rng.randint(0, 99)}")

    def _leave(self, depth):
        keyword = self.rng.choice(("break", "continue"))
        self._line(depth, f"if {self._expression(2)} % 5 == 0: {keyword}")

    def _body(self, depth, *, in_loop=None):
        outer = self.in_loop
        self.in_loop = outer if in_loop is None else in_loop
        self._block(depth + 1, 3)
        self.in_loop = outer

    def _if(self, depth):
        self._line(depth, f"if {self._expression()} % 3 {self.rng.choice('<>')} 1:")
        self._body(depth)
        if self.rng.random() < 0.5:
            self._line(depth, "else:")
            self._body(depth)

    def _while(self, depth):
        counter = f"w{self._new()}"
        self._line(depth, f"{counter} = 0")
        self._line(depth, f"while {counter} < {self.rng.randint(1, 3)}:")
        self._line(depth + 1, f"{counter} += 1")
        self._body(depth, in_loop=True)

    def _for(self, depth):
        number, rng = self.rng.randint(1, 3), self.rng
        generators = [each for each in self.functions if each.startswith("gen")]
        iterable = f"items({self._new()}, {number})"
        if generators and rng.random() < 0.4:
            iterable = f"{rng.choice(generators)}({self._name()}, {self._name()}, {self._name()})"
        elif rng.random() < 0.15:
            iterable = f"range({number})"
        self._line(depth, f"for {self._name()} in {iterable}:")
        self._body(depth, in_loop=True)
        if rng.random() < 0.2:
            self._line(depth, "else:")
            self._body(depth)

    def _with(self, depth):
        suppresses = self.rng.random() < 0.5
        target = f" as {self._name()}" if self.rng.random() < 0.5 else ""
        self._line(depth, f"with manager({self._new()}, {suppresses}){target}:")
        self._body(depth)
        if self.rng.random() < 0.5:
            self._line(depth + 1, f"if {self._name()} % 2: raise Oops({self._name()})")

    def _try(self, depth):
        rng = self.rng
        self._line(depth, "try:")
        self._body(depth)
        if rng.random() < 0.7:
            self._line(depth + 1, f"if {self._expression(2)} % 2: raise Oops({self._name()})")
        has_except = rng.random() < 0.8
        if has_except:
            name = rng.choice(("", " as x"))
            self._line(depth, f"except Oops{name}:")
            if name:
                self._line(depth + 1, f"{self._name()} = x.args[0]")
            self._body(depth)
            if rng.random() < 0.3:
                self._line(depth, "else:")
                self._body(depth)
        if not has_except or rng.random() < 0.5:
            self._line(depth, "finally:")
            self._body(depth, in_loop=False)

    def _match(self, depth):
        self._line(depth, f"match {self._expression(1)} % 4:")
        self._line(depth + 1, "case 0:")
        self._body(depth + 1)
        self._line(depth + 1, f"case {self._name()} if {self._name()} % 2:")
        self._body(depth + 1)
        self._line(depth + 1, "case _:")
        self._body(depth + 1)


# The two properties


def _force(frame: FrameType, values):
    """Sets variables, live or not."""
    frame_locals = frame.f_locals
    frame_locals.update(values)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        frame_locals.clear()


def _poison(world, left_out=None):
    """Poisons each variable of a program that is not live, and perhaps one that is."""
    poisoned: list[str] = []
    running_globals: set[str] = set()  # what functions that run now load
    for each in world.frames():
        frame = each.frame
        if each.reason and frame.f_code.co_cellvars:
            return poisoned  # some versions crash when such a frame is read
        bound = dict(frame.f_locals)
        live = live_names(each.code, each.lasti) | running_globals
        running_globals |= loaded_globals(each.code)
        if left_out is not None:
            data = [name for name in sorted(live & bound.keys()) if isinstance(bound[name], int)]
            if not data:
                continue
            live -= {left_out.choice(data)}
        dead = [name for name in bound if name not in live and _is_variable(each.code, name)]
        _force(frame, {name: Poison() for name in dead})
        poisoned += dead
        bound.clear()
    return poisoned


def _is_variable(code: CodeType, name):
    if code.co_flags & inspect.CO_OPTIMIZED:
        return name.isidentifier()
    return name in (*NAMES, "L") or (name[:1] == "w" and name[1:].isdigit())


def check_soundness(program, arguments, probe, left_out=None):
    """Whether the result stays the same when all that is not live is poisoned at one probe."""

    def poison(world):
        if world.num_probes == probe:
            poisoned.extend(_poison(world, left_out))

    poisoned: list[str] = []
    undisturbed, disturbed = World(lambda _: None), World(poison)
    expected = _show(undisturbed.out, undisturbed.run(program, arguments))
    try:
        found = _show(disturbed.out, disturbed.run(program, arguments))
    except PoisonUsedError:
        found = "poison used"
    return found == expected, len(poisoned)


def _can_continue(frames):
    """Whether nothing but variables, and iterators that the world restores, is in the frames."""
    for number, frame in enumerate(frames):
        if frame.reason:
            return False
        for operand in operands(frame.code, frame.lasti):
            is_data = operand.kind == "iterator" and operand.path == ("items",)
            is_frame = operand.is_current and number > 0  # a generator, whose frame is inside
            is_fixed = operand.kind in ("constant", "exit") or (
                operand.kind == "method" and len(operand.path) == 1
            )
            if not (is_data or is_frame or is_fixed):
                return False
    return True


def _is_plain(value):
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in (int, str, bool, type(None))


def _read(frames):
    """The values of the live variables, functions excepted; None if one cannot be copied."""
    memo: dict[int, Any] = {}
    saved = []
    for frame in frames:
        values = frame.variables()
        data = {name: value for name, value in values.items() if not callable(value)}
        if not all(map(_is_plain, data.values())):
            return None
        saved.append(copy.deepcopy(data, memo))
    return saved


def check_completeness(program, arguments, others, probe, left_out=None):
    """Whether a run with other arguments gives the same result once its variables are set.

    None if the run with other arguments does not execute the same instructions at any probe.
    """
    saved: dict[str, Any] = {}

    def save(world):
        if world.num_probes == probe:
            frames = world.frames()
            values = _read(frames) if _can_continue(frames) else None
            if values is not None and world.read_items() is not None:
                saved.update(sites=[each.site for each in frames], values=values)
                saved.update(draws=world.draws, items=world.read_items())
                saved.update(length=len(world.out), num_probes=world.num_probes)
                saved.update(value=world.value)  # of the call under way, which is not in the frames

    def resume(world):
        if "resumed" in saved or not saved:
            return
        frames = world.frames()
        sites = [each.site for each in frames]
        if len(sites) != len(saved["sites"]) or any(
            site.matches(other) != "same" for site, other in zip(sites, saved["sites"], strict=True)
        ):
            return
        if any(
            frame.variables().keys() - values.keys()
            for frame, values in zip(frames, _bound(frames, saved), strict=True)
        ):
            return
        items = world.read_items()
        if items is None or items.keys() != saved["items"].keys():
            return
        saved["resumed"] = len(world.out)
        for frame, values in zip(frames, copy.deepcopy(saved["values"]), strict=True):
            if left_out is not None and values:
                del values[left_out.choice(sorted(values))]
            frame.set(values)
        world.draws, world.num_probes = saved["draws"], saved["num_probes"]
        world.value = saved["value"]
        world.set_items(saved["items"])

    first, second = World(save), World(resume)
    expected = first.run(program, arguments)
    if not saved:
        return None
    found = second.run(program, others)
    if "resumed" not in saved:
        return None
    return _show(first.out[saved["length"] :], expected) == _show(
        second.out[saved["resumed"] :], found
    )


def _bound(frames, saved):
    """What is bound in the saved frames: the saved values, and functions, which are not saved."""
    for frame, values in zip(frames, saved["values"], strict=True):
        functions = {name for name, value in frame.variables().items() if callable(value)}
        yield {**values, **dict.fromkeys(functions)}


class Tally:
    """Numbers of checks, and the programs that failed one."""

    def __init__(self):
        self.num_sound = self.num_poisoned = self.num_complete = 0
        self.unsound_without = self.tried_without = self.missed_set = self.tried_set = 0
        self.failures = []


def _write_program(rng, *, is_module):
    while True:
        source = Writer(rng, is_module).write()
        try:
            return source, compile(source, FILENAME, "exec")
        except SyntaxError:  # a named expression in an iterable of a comprehension
            continue


def fuzz(num_programs, seed, tally, *, negative=True):
    """Checks random programs at random probes."""
    for number in range(num_programs):
        rng = random.Random(f"{seed}/{number}")
        source, program = _write_program(rng, is_module=number % 8 == 7)
        arguments, others = ([rng.randint(1, 99) for _ in range(4)] for _ in range(2))
        arguments += [5, 6]
        others += [7, 8]
        counting = World(lambda _: None)
        counting.run(program, arguments)
        probes = list(range(1, counting.num_probes + 1))
        for probe in rng.sample(probes, min(3, len(probes))):
            is_equal, num_poisoned = check_soundness(program, arguments, probe)
            tally.num_sound += 1
            tally.num_poisoned += num_poisoned
            if not is_equal:
                tally.failures.append(("soundness", number, probe, source))
            is_equal = check_completeness(program, arguments, others, probe)
            tally.num_complete += is_equal is not None
            if is_equal is False:
                tally.failures.append(("completeness", number, probe, source))
            if negative and number % 4 == 0:
                _control(program, arguments, others, probe, rng, tally)


def _control(program, arguments, others, probe, rng, tally):
    is_equal, num_poisoned = check_soundness(program, arguments, probe, rng)
    tally.tried_without += num_poisoned > 0
    tally.unsound_without += not is_equal
    is_equal = check_completeness(program, arguments, others, probe, rng)
    tally.tried_set += is_equal is not None
    tally.missed_set += is_equal is False


def _trace(_frame, _event, _argument):
    return _trace


def run_unit_tests():
    """Runs the tests of this folder that need no fixture."""
    num_tests = 0
    for name in ("test_bytecode", "test_enumerate_counts", "test_frames", "test_loop_shapes"):
        path = Path(__file__).with_name(f"{name}.py")
        names = runpy.run_path(str(path), run_name=name)
        for key, test in names.items():
            if key.startswith("test_") and not inspect.signature(test).parameters:
                test()
                num_tests += 1
    return num_tests


def main(num_programs=320, seed=0):
    """Prints what was checked; exits with 1 on a failure or an ineffective control."""
    num_tests = run_unit_tests()
    tally = Tally()
    fuzz(num_programs, seed, tally)
    sys.settrace(_trace)
    fuzz(num_programs // 10, seed + 1, tally, negative=False)
    sys.settrace(None)
    for kind, number, probe, source in tally.failures[:3]:
        print(f"--- {kind}: program {number}, probe {probe}\n{source}")
    print(
        f"Python {sys.version_info[0]}.{sys.version_info[1]}: {num_tests} tests, "
        f"{tally.num_sound} soundness checks ({tally.num_poisoned} variables poisoned), "
        f"{tally.num_complete} completeness checks, {len(tally.failures)} failures; "
        f"with one name less {tally.unsound_without} of {tally.tried_without} unsound, "
        f"{tally.missed_set} of {tally.tried_set} incomplete"
    )
    is_effective = tally.unsound_without > tally.tried_without / 4 > 10
    is_effective &= tally.missed_set > tally.tried_set / 4 > 10
    return bool(tally.failures) or not is_effective


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
