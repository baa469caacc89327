"""Live variables and operands of running functions. Needs no pytest: other interpreters run it."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import time
from types import CodeType
from typing import Any

from resumekit.live.bytecode import (
    clock_names,
    is_in_comprehension,
    live_names,
    loaded_globals,
    operands,
)
from resumekit.live.value_stack import (
    UnsupportedBytecodeError,
    count_effect,
    find_executed,
    read_instructions,
    simulate,
)

SEEN: list[tuple[CodeType, int]] = []


def spot(value=0):
    """Records the instruction that the caller executes."""
    frame = sys._getframe(1)
    SEEN.append((frame.f_code, frame.f_lasti))
    return value


class Batches:
    """An iterable whose fetch records the caller, like a loader's."""

    def __iter__(self):
        return self

    def __init__(self, num=2):
        self.num = num

    def __next__(self):
        self.num -= 1
        if self.num < 0:
            raise StopIteration
        SEEN.append((sys._getframe(1).f_code, sys._getframe(1).f_lasti))
        return self.num


class Checkpoint:
    """Has loops, like a Checkpointer."""

    def epochs(self, num):
        return Batches(num)

    def batches(self, num, **_options):
        return Batches(num)


def watch(function, *arguments):
    """The instructions at which a function calls `spot` or fetches a batch."""
    SEEN.clear()
    function(*arguments)
    return list(SEEN)


def live(function, *arguments):
    """The live names at the first of them."""
    return live_names(*watch(function, *arguments)[0])


def stack(function, *arguments):
    """The operands at the last of them."""
    return [(each.kind, each.path) for each in operands(*watch(function, *arguments)[-1])]


# Live variables


def test_a_variable_is_live_if_it_is_read_before_it_is_written():
    def function(a, b, c):
        spot()
        b = a
        return b + c

    assert live(function, 1, 2, 3) == {"a", "c"}


def test_a_loop_reads_in_its_next_round():
    def function(total, batch):
        for batch in Batches(1):
            loss = batch * 2
            total = total + loss
        return total

    assert live(function, 0, 0) == {"total"}


def test_a_name_of_a_handler_only_is_live():
    def function(a, b, c):
        try:
            spot()
        except ValueError:
            return a
        except KeyError as error:
            return error, b
        finally:
            c.append(1)

    assert live(function, 1, 2, []) == {"a", "b", "c"}


def test_a_name_after_a_with_statement_that_may_suppress_is_live():
    def function(a, b):
        try:
            with open(__file__):
                spot()
                a = 1
                return a
        except OSError:
            pass
        return b

    assert live(function, 1, 2) == {"b"}


def test_a_deleted_name_is_live_before_and_not_after():
    def function(a):
        spot()
        del a
        spot()

    first, second = watch(function, 1)
    assert live_names(*first) == {"a"}
    assert live_names(*second) == set()


def test_variables_of_closures_are_live():
    def function(a, b):
        def inner():
            nonlocal a
            a += 1
            spot()
            return a

        inner()
        b = 2
        return b

    inner, *_ = watch(function, 1, 2)
    assert live_names(*inner) == {"a"}

    def outer(a):
        add = lambda: a  # noqa: E731  a closure
        spot()
        return add

    assert live(outer, 1) == {"a", "add"}


def test_a_variable_that_a_comprehension_hides_is_live_only_if_it_is_read_afterwards():
    def hidden(batch, rows):
        spot()
        return [batch for batch in rows]

    def read(batch, rows):
        spot()
        return [batch for batch in rows], batch

    def nested(batch, rows):
        spot()
        found = [[batch for batch in range(row)] for row in rows]
        return found, batch

    assert live(hidden, 1, [2]) == {"rows"}
    assert live(read, 1, [2]) == {"rows", "batch"}
    assert live(nested, 1, [2]) == {"rows", "batch"}


def test_names_are_stored_and_loaded_in_the_order_of_a_pair():
    def function(a, b, c):
        spot()
        c = a
        b = c
        a, c = b, a
        return a, b, c

    assert live(function, 1, 2, 3) == {"a"}


def test_a_walrus_stores():
    def function(a, b):
        spot()
        if (b := a) > 1:
            return b
        return a

    assert live(function, 1, 2) == {"a"}


def test_variables_of_a_module_are_live_by_their_names():
    source = (
        "hist, best, lr = [], 0, 0.1\n"
        "def scale(x): return x * lr\n"
        "spot()\n"
        "best = max(best, 1)\n"
        "print_ = [x + len(hist) for x in (1,)]\n"
    )
    SEEN.clear()
    exec(compile(source, "<module>", "exec"), {"spot": spot})  # noqa: S102  the line above
    names = live_names(*SEEN[0])
    assert {"best", "hist"} <= names
    assert not names & {"print_", "lr", "x"}


def test_functions_that_read_any_variable_are_known():
    def reading(a, b):
        spot()
        return locals()

    def finished(a, b):
        locals()
        spot()
        return a

    class Model:
        def function(self):
            spot()
            return super().__str__()

    assert live(reading, 1, 2) >= {"a", "b"}
    assert live(finished, 1, 2) == {"a"}
    assert live(Model().function) == {"self"}
    SEEN.clear()
    source = "a = b = 1\nspot()\nnames = {key: globals()[key] for key in ('a',)}\n"
    exec(compile(source, "<module>", "exec"), {"spot": spot})  # noqa: S102  the line above
    assert {"a", "b"} <= live_names(*SEEN[0])


def test_names_of_the_interpreter_are_not_live():
    class Model:
        def function(self):
            spot()
            return super().__str__(), self

    assert live(Model().function) == {"self"}


def test_an_offset_inside_an_instruction_is_that_instruction():
    def function(a):
        spot()
        return a

    code, lasti = watch(function, 1)[0]
    offset = find_executed(code, lasti)
    following = min(each for each in read_instructions(code) if each > offset)
    for inside in range(offset, following, 2):
        assert find_executed(code, inside) == offset
        assert live_names(code, inside) == {"a"}


def test_a_specialized_call_executes_the_same_instruction():
    def function(iterator, out):
        for _ in range(30):
            out.append(next(iterator))
        return out

    offsets = {find_executed(*each) for each in watch(function, Batches(30), [])}
    assert len(offsets) == 1


def test_functions_with_long_arguments_and_jumps_are_read():
    lines = [f"    v{number} = {number}.5 + a" for number in range(600)]
    source = "\n".join(["def function(a, b):", "  for _ in (1, 2):", *lines, "    spot()"])
    names = {"spot": spot}
    exec(f"{source}\n    b = v599\n  return b", names)  # noqa: S102  the lines above
    assert live(names["function"], 1, 2) == {"a", "v599"}


# Operands


def test_the_left_side_of_an_augmented_assignment_is_an_operand():
    def function(total):
        total += spot()
        return total

    (operand,) = operands(*watch(function, 1)[0])
    assert (operand.kind, operand.names, operand.text) == ("value", {"total"}, "total")
    assert live(function, 1) == set()


def test_a_method_that_is_called_later_is_no_value():
    def function(r, self):
        r.append(spot())
        self.best = max(self.best * 0.9, spot())

    class Model:
        best = 1.0

    first, second = watch(function, [], Model())
    assert [(each.kind, each.path) for each in operands(*first)] == [("method", ("r", "append"))]
    method, value = operands(*second)
    assert (method.kind, method.path) == ("method", ("max",))
    assert (value.kind, value.names, value.path) == ("value", {"self"}, ())


def test_functions_constants_and_values_are_distinguished():
    def function(a, items):
        return max(1, a, items[0], len(items), [a, 2], {"k": 1}, spot(), key=lambda x: str(x))

    found = operands(*watch(function, 1, [2])[0])
    kinds = [(each.kind, each.text) for each in found]
    assert kinds == [
        ("method", "max"),
        ("constant", "1"),
        ("value", "a"),
        ("value", "items[0]"),
        ("value", "len(...)"),
        ("value", "[a, 2]"),
        ("constant", kinds[6][1]),
    ]
    assert found[4].names == {"len", "items"}
    assert found[4].path == ("len",)


def test_an_attribute_has_its_path():
    def function(run):
        run.meter.total += spot()

    class Run:
        meter = None
        total = 1

    run = Run()
    run.meter = run
    found = operands(*watch(function, run)[0])
    assert [(each.kind, each.path) for each in found] == [
        ("value", ("run", "meter")),
        ("value", ("run", "meter", "total")),
    ]


def test_the_iterators_of_the_loops_are_operands():
    def function(ckpt):
        for _phase in ["a", "b"]:
            for _epoch in ckpt.epochs(1):
                for _batch in ckpt.batches(1):
                    pass

    found = operands(*watch(function, Checkpoint())[1])
    assert [(each.kind, each.path, each.is_current) for each in found] == [
        ("iterator", (), False),
        ("iterator", ("ckpt", "epochs"), False),
        ("iterator", ("ckpt", "batches"), True),
    ]
    assert found[0].text.strip("()[]") == "'a', 'b'"
    assert found[1].text == "ckpt.epochs(...)"
    assert found[2].names == {"ckpt"}


def test_a_list_of_constants_is_one_operand():
    def function():
        for _phase in [["a"], 2, 3]:
            spot()

    (operand,) = operands(*watch(function)[0])
    assert (operand.kind, operand.text[1:-1]) == ("iterator", "['a'], 2, 3")

    def adding():
        return [1, 2, 3] + spot([1])

    (operand,) = operands(*watch(adding)[0])
    assert (operand.kind, operand.text) == ("constant", "[1, 2, 3]")


def test_the_exit_of_a_with_statement_is_an_operand_without_state():
    def function(path):
        with open(path) as file, file:
            spot()

    assert stack(function, __file__) == [("exit", ("open",)), ("exit", ("file",))]


def test_a_delegated_iterator_is_the_current_one():
    def generator(batches):
        yield from batches

    def function():
        for _ in generator(Batches(1)):
            pass

    code, lasti = watch(function)[0]
    assert code.co_name == "generator"
    (operand,) = operands(code, lasti)
    assert (operand.kind, operand.path, operand.is_current) == ("iterator", ("batches",), True)


def test_one_of_two_values_has_the_names_of_both():
    def function(a, b, c):
        for _ in (1, 2):
            c = max(a if c else b, spot())
        return c

    _, method, value = operands(*watch(function, 1, 2, 3)[0])
    assert method.path == ("max",)
    assert (value.kind, value.names, value.path) == ("value", {"a", "b"}, ())


def test_the_callee_and_its_arguments_are_no_operands():
    def function(a):
        spot(a)
        spot(*[a])
        spot(value=a)
        spot(**{"value": a})

    for code, lasti in watch(function, 1):
        assert operands(code, lasti) == ()


def test_a_comprehension_under_way_is_found():
    def function(x):
        return [x + spot() for x in (1, 2)], x

    code, lasti = watch(function, 1)[0]
    is_inlined = sys.version_info >= (3, 12)
    assert is_in_comprehension(code, lasti) is is_inlined
    found = [(each.kind, each.text) for each in operands(code, lasti)]
    assert ("value", "[]") in found
    assert ("value", "x") in found


def test_a_handled_exception_is_not_an_operand_of_an_except_body():
    def function(a):
        try:
            raise ValueError
        except ValueError:
            return a + spot()

    assert stack(function, 1) == [("value", ("a",))]


# Globals, attributes, clocks


def test_globals_of_nested_functions_are_found():
    def function():
        def inner():
            return time.perf_counter(), [Batches for _ in "a"]

        return inner, itertools.count

    assert {"time", "Batches", "itertools"} <= loaded_globals(function.__code__)
    assert "inner" not in loaded_globals(function.__code__)


def test_variables_that_are_only_stored_from_clocks_are_found():
    def function(given):
        from datetime import datetime
        from time import perf_counter

        start = last = time.time()
        tick = perf_counter()
        given = time.time()
        day = datetime.now()
        zero, mixed = 0.0, time.time()
        while given:
            now = time.monotonic_ns()
            last = now
            mixed = 1.0
            length = time.time() - start
            either = time.time() if given else 0
        return start, last, tick, day, zero, mixed, length, either

    assert clock_names(function.__code__) == {"start", "last", "tick", "day", "now"}


def test_what_a_method_makes_of_a_clock_and_constants_alone_is_a_clock():
    def function(given):
        import datetime as dt
        from datetime import datetime
        from time import strftime

        start = datetime.now().replace(microsecond=0)
        text = strftime("%H:%M")
        day = dt.datetime.now(dt.timezone.utc).date().isoformat()
        now = datetime.now()
        name = now.strftime("%Y%m%d")
        moved = now.replace(hour=given)
        later = datetime.now().replace(second=given).isoformat()
        other = given.replace(microsecond=0)
        path = "/".join(["runs", time.strftime("%Y")])
        seed = int(time.time())
        either = (now if given else other).isoformat()
        return start, text, day, name, moved, later, path, seed, either

    assert clock_names(function.__code__) == {"start", "text", "day", "now", "name"}


def test_a_clock_that_another_function_may_store_is_none():
    def function():
        start = time.time()

        def reset():
            nonlocal start
            start = 1

        return reset, start

    assert clock_names(function.__code__) == set()
    source = (
        "import time\nstart = time.time()\nlast = time.time()\ndef f():\n global last\n last = 1"
    )
    assert clock_names(compile(source, "<module>", "exec")) == {"start"}


def test_functions_of_imported_modules_have_their_path():
    def function():
        return max(time.time(), Checkpoint().batches, spot(), key=str)

    found = [(each.text, each.path) for each in operands(*watch(function)[0])]
    assert found == [
        ("max", ("max",)),
        ("time.time()", ("time", "time")),
        ("Checkpoint().batches", ()),
    ]


# The tables


def _argument(opcode, name, arg):
    is_pair = "FAST_LOAD_FAST" in name or "FAST_STORE_FAST" in name
    values: dict[str, Any] = {
        "opname": name,
        "opcode": opcode,
        "arg": arg,
        "argval": ("a", "b") if is_pair else "a",
    }
    return dis.Instruction._make(values.get(each) for each in dis.Instruction._fields)


def test_the_tables_agree_with_the_interpreter():
    pushes_argument = {"RETURN_GENERATOR"}  # until 3.12 the interpreter's table leaves it out
    splits_call = {"PRECALL", "CALL"} if sys.version_info < (3, 12) else set()
    unused = {"CACHE", "RESERVED", "INTERPRETER_EXIT", "EXIT_INIT_CHECK", "ENTER_EXECUTOR"}
    num_checked = 0
    for name, opcode in dis.opmap.items():
        if opcode > 255 or name.startswith("INSTRUMENTED_") or name in unused:
            continue
        has_arg = opcode in getattr(dis, "hasarg", ()) or opcode >= dis.HAVE_ARGUMENT
        for arg in range(8) if has_arg else (None,):
            num_popped, num_pushed = count_effect(_argument(opcode, name, arg))
            try:
                expected = dis.stack_effect(opcode, arg, jump=False)
            except ValueError:  # not an argument of this instruction
                continue
            if name not in splits_call | pushes_argument:
                assert num_pushed - num_popped == expected, (name, arg)
                num_checked += 1
    assert num_checked > 100


def test_the_stack_of_code_of_the_standard_library_is_simulated():
    import argparse
    import dataclasses
    import tarfile
    import typing

    num_functions = 0
    for module in (argparse, dataclasses, tarfile, typing):
        waiting = [compile(inspect.getsource(module), module.__name__, "exec")]
        while waiting:
            code = waiting.pop()
            waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
            assert simulate(code).states.keys() <= read_instructions(code).keys()
            live_names(code, 0)
            num_functions += 1
    assert num_functions > 500


def test_an_instruction_that_is_not_known_is_an_error():
    opcode = dis.opmap["NOP"]
    try:
        count_effect(_argument(opcode, "LOAD_FROM_THE_FUTURE", None))
    except UnsupportedBytecodeError as error:
        assert "LOAD_FROM_THE_FUTURE" in str(error)
    else:
        raise AssertionError("no error")


def test_another_implementation_of_python_is_an_error():
    class Other:
        name = "pypy"

    def function(a):
        return a + 1

    implementation = sys.implementation
    sys.implementation = Other  # type: ignore[assignment]
    try:
        live_names(function.__code__, 0)
    except UnsupportedBytecodeError as error:
        assert "pypy" in str(error)
    else:
        raise AssertionError("no error")
    finally:
        sys.implementation = implementation
