"""Where the count of a loop over `enumerate` goes, looked up in its running function."""

from __future__ import annotations

import functools
import logging
import sys

import pytest

from resumekit.capture import is_left_out
from resumekit.live import LiveFrame, is_library_file
from resumekit.live.loop_counts import begins_at_position, reaches_only_logging

tqdm = pytest.importorskip("tqdm").tqdm
logger = logging.getLogger(__name__)
FOUND: list[tuple[bool, bool]] = []


class Batches:
    """Looks at the function that fetches, as a loop of a Checkpointer does."""

    initial = 0

    def __init__(self, *_args):
        self.num = 3

    def __iter__(self):
        return self

    def __next__(self):
        self.num -= 1
        if self.num < 0:
            raise StopIteration
        if self.num == 2:
            caller = sys._getframe(1)
            while is_library_file(caller.f_code.co_filename):  # of a progress bar
                assert caller.f_back is not None
                caller = caller.f_back
            frame = LiveFrame(caller)
            FOUND.append((begins_at_position(frame), reaches_only_logging(frame, is_left_out)))
        return Value()

    batches = __init__


class Value:
    """A batch, a loss: made in each step."""

    def __mul__(self, _other):
        return self

    def __len__(self):
        return 2

    def __format__(self, _spec):
        return "value"

    __call__ = item = mean = __len__


def only_logs(function, *arguments):
    FOUND.clear()
    function(Batches(), *arguments)
    return FOUND[0][1]


def begins(function, *arguments):
    FOUND.clear()
    function(*arguments)
    return [first for first, _ in FOUND]


class Stateless:
    """A helper of the user's that shows what it gets."""

    interval = 100

    def __init__(self):
        self.prefix, self.fmt, self.parts, self.stream = "Epoch", "[{}/3]", ["a"], sys.stderr

    def display(self, batch):
        entries = [self.prefix + self.fmt.format(batch)]
        entries += [str(part) for part in self.parts]
        entries.append(self._named(step=batch))
        print("\t".join(entries))

    def _named(self, **values):
        return ", ".join(f"{name}: {value}" for name, value in values.items())

    def info(self, *args, **options):
        if self.interval > 1:
            print(*args, **options)
        self.stream.write(str(args))
        logger.debug("%s", args)

    __call__ = display


class Keeping:
    """Helpers that keep what they get."""

    def __init__(self):
        self.rows, self.last = list[int](), 0
        self.parts: list[list[int]] = [[]]

    def log(self, i):
        self.rows.append(i)

    def info(self, i):
        self.last = i

    def debug(self, i):
        self.log(i)

    def warning(self, i):
        rows = self.rows
        rows += [i]

    def error(self, i):
        self.parts[0][0:] = [i]

    def print(self, i):
        global LAST
        LAST = i

    def item(self):
        self.last += 1
        return self.last

    def add_scalar(self, i):
        for _ in self.rows_of(i):
            pass

    def rows_of(self, i):
        self.last = i
        yield i

    def __call__(self, i):
        self.last = i


LAST = 0


def test_a_count_that_is_only_logged_is_recognised():
    def printed(batches, log, bar):
        for i, batch in enumerate(batches):
            loss = batch * 2
            print(i, loss)
            if i % 100 == 0:
                print(f"{i}: {loss:.3f}")
                log.info("step %d", i)
                sys.stdout.flush()
            if (i + 1) % 10 == 0 and loss:
                bar.set_postfix(step=i, loss=len(loss))
            if i % (log.level + 5) == 0:
                print("{} of {}: {}".format(i * len(batch), len(str(bar.total)), loss.item()))  # noqa: UP032  programs do
                print("%d" % i, ", ".join([str(i)]))  # noqa: UP031
        return loss

    def unused(batches):
        for _i, batch in enumerate(batches):
            batch()

    def written(batches):
        for i, batch in enumerate(batches):
            sys.stdout.write(f"\r{i} {batch}")
            sys.stdout.flush()

    def displayed(batches, progress):
        for i, batch in enumerate(batches):
            batch()
            progress(i)
            if i % progress.interval == 0:
                progress.display(i)
                progress.info(i, end="\n")

    def aliased(batches):
        shown, note = functools.partial(print, flush=True), logger.info
        for i, batch in enumerate(batches):
            batch()
            shown(i)
            note(i)

    def named(batches):
        pairs = enumerate(batches)
        for i, batch in pairs:
            print(i, batch)

    assert only_logs(printed, logging.getLogger("a"), tqdm(disable=True, desc="d"))
    assert only_logs(unused)
    assert only_logs(written)
    assert only_logs(displayed, Stateless())
    assert only_logs(aliased)
    assert only_logs(named)


KEEPING = ("log", "info", "debug", "warning", "error", "print", "add_scalar", "item", "__call__")


@pytest.mark.parametrize("name", KEEPING)
def test_a_method_that_keeps_the_count_is_no_logging_whatever_its_name(name):
    source = f"""
def function(batches, log):
    for i, batch in enumerate(batches):
        batch()
        {f"log.{name}(i)" if name != "item" else "if i: print(log.item())"}
"""
    names: dict[str, object] = {}
    exec(source, names)  # noqa: S102  of this test
    keeping = Keeping()
    assert not only_logs(names["function"], keeping)
    assert keeping.last or keeping.rows or LAST or name in ("error", "add_scalar")


def test_a_name_that_a_loop_around_binds_is_looked_up():
    def displayed(batches):
        for _ in range(1):
            progress = Stateless()
            for i, batch in enumerate(batches):
                batch()
                progress.display(i)

    def kept(batches):
        for _ in range(1):
            keeping = Keeping()
            for i, batch in enumerate(batches):
                batch()
                keeping.log(i)

    assert only_logs(displayed)
    assert not only_logs(kept)


def test_a_name_that_the_loop_binds_is_not_looked_up():
    def rebound(batches):
        show = functools.partial(print)
        for i, batch in enumerate(batches):
            batch()
            show(i)
            show = functools.partial(Keeping().log)

    def unknown(batches):
        for i, batch in enumerate(batches):
            batch()
            later = batch
            if i > 9:
                later.log(i)

    assert not only_logs(rebound)
    assert not only_logs(unknown)


def test_a_count_that_has_another_use_is_recognised():
    def computed(batches, weight=Value()):  # noqa: B008  never changed
        for i, batch in enumerate(batches):
            weight = batch * i
        return weight

    def guarding(batches, total=0):
        for i, batch in enumerate(batches):
            total += len(batch)
            if i % 10 == 9:
                print(total)
                total = 0
        return total

    def stopping(batches):
        for i, batch in enumerate(batches):
            if i == 3:
                break
            batch()

    def after(batches):
        for i, batch in enumerate(batches):  # noqa: B007  that is the case
            batch()
        return i

    def skipping(batches):
        for i, batch in enumerate(batches):
            if i % 2:
                continue
            batch()

    def captured(batches):
        for i, batch in enumerate(batches):
            print(batch, lambda: i)  # noqa: B023  that is the case

    def stored(batches, out=logging):
        for i, batch in enumerate(batches):
            out.count = i
            batch()

    def called(batches, schedule=Keeping()):  # noqa: B008  as above
        for i, batch in enumerate(batches):
            schedule(i)
            batch()

    def first_of_other_items(batches):
        for i, batch in map(tuple, enumerate(batches)):
            print(i, batch)

    for function in (computed, guarding, stopping, after, skipping, captured, stored, called):
        assert not only_logs(function), function.__name__
    assert not only_logs(first_of_other_items)


@pytest.mark.parametrize("definition", ["", "def f(): return i\n"])
def test_a_count_of_a_module_that_its_functions_read_has_another_use(definition):
    source = "for i, batch in enumerate(batches):\n    if i % 5 == 0: print(i, batch)\n"
    names = {"batches": Batches()}
    FOUND.clear()
    exec(compile(definition + source, "<module>", "exec"), names)  # noqa: S102  as above
    assert FOUND[0][1] == (not definition)


def test_a_start_is_that_of_the_batches_that_are_counted():
    def direct(first):
        for i, _ in enumerate(first, start=first.initial):
            print(i)
        for i, _ in enumerate(Batches(), first.initial + 1):
            print(i)
        for i, _ in enumerate(Batches()):
            print(i)

    def through_variables(first):
        bar, begin = tqdm(first, disable=True), first.initial
        for i, _ in enumerate(bar, begin):
            print(i)
        pairs = enumerate(second := Batches(), second.initial)
        for i, _ in pairs:
            print(i)

    class Trainer:
        def __init__(self):
            self.first, self.second = Batches(), Batches()

    def attributes(trainer):
        for i, _ in tqdm(enumerate(trainer.first, trainer.first.initial), disable=True):
            print(i)
        for i, _ in enumerate(trainer.second, trainer.first.initial):
            print(i)

    assert begins(direct, Batches()) == [True, False, False]
    assert begins(through_variables, Batches()) == [True, True]
    assert begins(attributes, Trainer()) == [True, False]
