"""Shapes of training loops continue from their live variables. Needs no pytest.

Each loop runs whole, then until a fetch at which its variables are saved, then again with these
set at its first fetch. The state of the data is restored by the test, as the library does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import types

from resumekit.live.bytecode import operands
from resumekit.live.frames import find_frames

NUM_ITEMS = 17
SAVED_AT = 8


class KilledError(BaseException):
    """Ends a run at the fetch that saved it."""


class Batches:
    """Batches whose position is restored at the first fetch, like that of a Checkpointer.

    Args:
        saved: what a run that was killed has saved; None for a new run.
        kill_at: number of the fetch that saves and ends the run.
        left_out: a variable that is not set.
    """

    def __init__(self, saved=None, kill_at=None, left_out=None):
        self.position, self.epoch = 0, 0
        self.num_fetches, self.kill_at, self.left_out = 0, kill_at, left_out
        self.saved, self.result = saved, {}

    def epochs(self, num):
        while self.epoch < num:
            yield self.epoch
            self.epoch += 1
            self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num_fetches += 1
        frames = self._frames()
        if self.num_fetches == self.kill_at:
            self._save(frames)
            raise KilledError
        if self.saved is not None:
            self._restore(frames)
        if self.position >= NUM_ITEMS:
            raise StopIteration
        self.position += 1
        return float(self.position)

    def _frames(self):
        frames = find_frames(self, sys._getframe(2))
        return [frame for frame in frames if frame.code.co_name.startswith("loop")]

    def _save(self, frames):
        memo = {id(self): None}
        self.result = {
            "sites": [frame.site for frame in frames],
            "values": [
                {name: _copy(value, memo) for name, value in frame.variables().items()}
                for frame in frames
            ],
            "position": (self.epoch, self.position),
            "operands": [operands(frame.code, frame.lasti) for frame in frames],
        }

    def _restore(self, frames):
        saved, self.saved = self.saved, None
        matches = [
            frame.site.matches(site) for frame, site in zip(frames, saved["sites"], strict=True)
        ]
        assert matches == ["same"] * len(frames), matches
        self.epoch, self.position = saved["position"]
        for frame, values in zip(frames, saved["values"], strict=True):
            given = {}
            for name, value in values.items():
                if isinstance(value, types.SimpleNamespace) or name == self.left_out:
                    continue
                if isinstance(value, Attributes):
                    vars(frame.variables()[name]).update(value)  # an object, in place
                else:
                    given[name] = value
            frame.set(given)


class Attributes(dict):
    """The attributes of an object of the script."""


SKIPPED = types.SimpleNamespace()  # restored by other means, or without state


def _copy(value, memo):
    """A copy of a value; objects of the script as their attributes."""
    if isinstance(value, (Batches, types.FunctionType, types.GeneratorType, types.ModuleType)):
        return SKIPPED
    if hasattr(value, "__dict__") and not isinstance(value, type):
        attributes = {
            name: _copy(each, memo)
            for name, each in vars(value).items()
            if not isinstance(each, Batches)
        }
        return Attributes(attributes)
    return copy.deepcopy(value, memo)


def run(loop, **options):
    """The result of a loop and its batches, also if it is killed."""
    batches = Batches(**options)
    try:
        return loop(batches), batches
    except KilledError:
        return None, batches


def continues(loop, kill_at=SAVED_AT, left_out=None):
    """Whether a loop gives the same result when it is killed and continued."""
    expected, _ = run(loop)
    _, killed = run(loop, kill_at=kill_at)
    found, _ = run(loop, saved=killed.result, left_out=left_out)
    return expected == found


# The shapes


def loop_with_a_hidden_value(batches):
    hidden, out = 0.0, []
    for batch in batches:
        hidden = hidden * 0.5 + batch
        out.append(hidden)
    return hidden, out


def loop_train_epoch(batches, hidden, history, best=0.0):
    count = 0
    for batch in batches:
        hidden = hidden * 0.5 + batch
        count += 1
        best = max(best, hidden % 7)
    history.append((count, best))
    return hidden, best


def loop_in_a_function(batches):
    hidden, best = 0.0, 0.0
    outer: list[int] = []
    history: list[tuple[int, float]] = []
    for epoch in batches.epochs(2):
        hidden, best = loop_train_epoch(batches, hidden, history, best)
        outer.append(epoch)
    return hidden, best, outer, history


class Trainer:
    """A script's object that changes itself."""

    def __init__(self, batches):
        self.batches, self.total, self.seen = batches, 0.0, []

    def loop_fit(self):
        for batch in self.batches:
            self.total = self.total * 0.5 + batch
            self.seen.append(batch)
        return self.total, self.seen


def loop_of_a_method(batches):
    return Trainer(batches).loop_fit()


class Average:
    """A helper object."""

    def __init__(self):
        self.value = 0.0

    def update(self, batch):
        self.value = self.value * 0.9 + batch


def loop_with_a_helper(batches):
    average = Average()
    for batch in batches:
        average.update(batch)
    return average.value


def loop_bar(iterable):
    """Like tqdm."""
    num = 0
    for item in iterable:
        yield item
        num += 1


def loop_through_a_generator(batches):
    total = 0.0
    for batch in loop_bar(batches):
        total = total * 0.5 + batch
    return total


def loop_with_blocks(batches):
    total = 0.0
    with contextlib.suppress(ValueError):
        for batch in batches:
            try:
                if batch % 3 == 0:
                    continue
                total = total * 0.5 + batch
            finally:
                total += 0.25
    return total


def loop_with_next(batches):
    step, average, iterator = 0, 0.0, iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        step += 1
        average = average * 0.9 + batch * step
    return step, average


def loop_with_a_closure(batches):
    count, seen = 0, []

    def update(batch):
        nonlocal count
        count += batch
        seen.append(count)

    for batch in batches:
        update(batch)
    return count, seen


def loop_with_a_comprehension(batches):
    history = [0.0]
    for batch in batches:
        history = [each * 0.5 for each in history] + [batch]
    return history


def loop_with_sums(batches):
    result, total_all = [], 0.0
    for epoch in batches.epochs(3):
        total = 0.0
        for batch in batches:
            total = total * 0.5 + batch
        total_all = total_all + total * epoch
        result.append(total)
    return total_all, result


def loop_keep_previous(batches):
    previous = 0.0
    for batch in batches:
        yield previous + batch
        previous = batch


def loop_over_a_generator_with_state(batches):
    total = 0.0
    for batch in loop_keep_previous(batches):
        total = total * 0.5 + batch
    return total


def loop_with_enumerate(batches):
    total = 0.0
    for number, batch in enumerate(batches):
        total += number * batch
    return total


def loop_with_an_operand(batches):
    total = 0.0
    for _ in batches.epochs(2):
        total += loop_train_epoch(batches, total, [])[0]
    return total


def loop_one_ahead(batches):
    iterator, total = iter(batches), 0.0
    following = next(iterator)
    for batch in iterator:
        total = total * 0.5 + batch * following
        following = batch
    return total


EXACT = {
    loop_with_a_hidden_value: "hidden",
    loop_in_a_function: "hidden",
    loop_of_a_method: "self",
    loop_with_a_helper: "average",
    loop_through_a_generator: "total",
    loop_with_blocks: "total",
    loop_with_next: "average",
    loop_with_a_closure: "count",
    loop_with_a_comprehension: "history",
    loop_with_sums: "total",
    loop_over_a_generator_with_state: "previous",
}


def test_each_shape_continues_from_its_live_variables():
    for loop in EXACT:
        for kill_at in (2, SAVED_AT, NUM_ITEMS):
            assert continues(loop, kill_at), (loop.__name__, kill_at)


def test_each_shape_differs_with_one_variable_left_out():
    for loop, name in EXACT.items():
        if name in ("self", "average") and loop is not loop_with_next:
            continue  # objects: their attributes are restored, not the variable
        assert not continues(loop, left_out=name), loop.__name__


def test_later_epochs_continue_too():
    for loop in (loop_in_a_function, loop_with_sums):
        for kill_at in (NUM_ITEMS + 1, NUM_ITEMS + 2, 2 * NUM_ITEMS + 1):
            assert continues(loop, kill_at), (loop.__name__, kill_at)


def saved_operands(loop):
    _, killed = run(loop, kill_at=SAVED_AT + NUM_ITEMS)
    return list(itertools.chain(*killed.result["operands"]))


def test_a_count_inside_an_iterator_differs_and_is_an_operand():
    assert not continues(loop_with_enumerate)
    _, killed = run(loop_with_enumerate, kill_at=SAVED_AT)
    (operand,) = killed.result["operands"][0]
    assert (operand.path, operand.inner_paths) == (("enumerate",), (("batches",),))


def test_an_operand_of_a_call_differs_and_is_named():
    assert not continues(loop_with_an_operand, SAVED_AT + NUM_ITEMS)
    values = [each for each in saved_operands(loop_with_an_operand) if each.kind == "value"]
    assert [each.text for each in values] == ["total"]


def test_a_batch_that_is_fetched_ahead_has_another_site():
    try:
        continues(loop_one_ahead)
    except AssertionError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("no other site")
