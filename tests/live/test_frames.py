"""Frames of the user, and their variables. Needs no pytest: other interpreters run it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import types
import weakref

from resumekit.errors import StateMismatchError
from resumekit.live.frames import LiveFrame, Site, digest_code, find_frames


class Owner:
    """A Checkpointer as far as its variables are concerned."""

    found: list[LiveFrame]

    def __init__(self, at_fetch):
        self.at_fetch = at_fetch
        self.num_fetches = 0

    def fetch(self):
        """Looks at the caller's frames, like the fetch of a batch."""
        self.num_fetches += 1
        self.at_fetch(find_frames(self, sys._getframe(1)))
        return self.num_fetches


def names_of(frames):
    return [each.code.co_name for each in frames]


def recorder():
    """An owner that records which frames it finds, not the frames."""
    seen: list = []
    return Owner(lambda frames: seen.append(names_of(frames))), seen


# Which frames


def test_the_frames_end_with_the_outermost_that_refers_to_the_owner():
    ckpt, seen = recorder()

    def step(fetch):
        fetch()

    def train(ckpt):
        step(ckpt.fetch)

    class Trainer:
        def __init__(self, ckpt):
            self.ckpt = ckpt

        def fit(self):
            train(self.ckpt)

    def launch(trainers):
        trainers[0].fit()

    launch([Trainer(ckpt)])
    # This test has the owner as a variable, and what runs the test has not.
    assert seen == [
        [
            *("step", "train", "fit", "launch"),
            "test_the_frames_end_with_the_outermost_that_refers_to_the_owner",
        ]
    ]

    def make():
        return launch([Trainer(recorder_of(seen))])

    def recorder_of(seen):
        return Owner(lambda frames: seen.append(names_of(frames)))

    make()
    assert seen[1] == ["step", "train", "fit"]


def test_frames_of_libraries_are_passed_over():
    ckpt, seen = recorder()

    def train(_):
        return ckpt.fetch()

    assert list(map(train, [1])) == [1]
    import functools

    @functools.lru_cache
    def cached():
        return functools.reduce(lambda _, __: ckpt.fetch(), [1, 2])

    cached()
    assert seen[0][0] == "train"
    assert seen[1][:2] == ["<lambda>", "cached"]


def run_module(name, filename, source, **names):
    """Runs a source as a module of that name and file."""
    module = types.ModuleType(name)
    vars(module).update(names)
    exec(compile(source, filename, "exec"), vars(module))  # noqa: S102  sources of these tests
    return module


LOOP = "def loop(fetch, ckpt=None):\n    return fetch()\n"
OUTER = "def outer(loop, *arguments):\n    return loop(*arguments)\n"


def test_an_installed_package_is_a_library_unless_it_has_the_owner():
    ckpt, seen = recorder()
    folder = "/opt/python/lib/python3.11/site-packages"
    loop = run_module("trainlib.loops", f"{folder}/trainlib/loops.py", LOOP).loop
    outer = run_module("trainlib.cli", f"{folder}/trainlib/cli.py", OUTER).outer
    bar = run_module("tqdm.std", f"{folder}/tqdm/std.py", OUTER).outer
    frozen = run_module("importlib", "<frozen importlib._bootstrap>", OUTER).outer

    def train():
        frozen(outer, bar, loop, ckpt.fetch)
        frozen(outer, bar, loop, ckpt.fetch, ckpt)

    train()
    assert seen[0][0] == "train"
    assert seen[1][:3] == ["loop", "outer", "train"]


def test_frames_of_resumekit_and_its_adapters_are_passed_over():
    ckpt, seen = recorder()
    loop = run_module("resumekit.adapters.torch", "/checkout/adapters/torch.py", LOOP).loop

    def train():
        loop(ckpt.fetch, ckpt)

    train()
    assert seen[0][0] == "train"


def test_a_generator_of_the_user_is_one_of_the_frames():
    ckpt, seen = recorder()

    def smooth(fetch):
        last = 0
        for _ in range(2):
            last = (last + fetch()) / 2
            yield last

    def train():
        return list(smooth(ckpt.fetch))

    train()
    assert [names[:2] for names in seen] == [["smooth", "train"]] * 2


def test_the_globals_of_a_module_refer_to_the_owner():
    ckpt, seen = recorder()
    source = f"{LOOP}def main():\n    loop(ckpt.fetch)\nmain()\n"

    def launch():
        run_module("script", "/home/user/script.py", source, ckpt=seen[0])

    seen.append(ckpt)
    del ckpt
    launch()
    assert seen[1] == ["loop", "main", "<module>"]


def test_without_a_reference_the_frames_end_with_the_main_script():
    seen: list = []

    def fetch():
        seen.append(names_of(find_frames(object(), sys._getframe(1))))

    run_module("__main__", "/home/user/train.py", f"{LOOP}loop(fetch)\n", fetch=fetch)
    assert seen[0][:2] == ["loop", "<module>"]


# Frames that cannot continue


def reasons(function, *arguments):
    found: list = []
    ckpt = Owner(lambda frames: found.append([(each.reason, set(each.names)) for each in frames]))
    result = function(ckpt, *arguments)
    return found[0], result


def test_a_frame_that_can_continue_has_no_reason():
    def train(ckpt, total):
        total = ckpt.fetch() + 1
        return total

    found, _ = reasons(train, 1)
    assert found[0][0] is None


def test_a_comprehension_cannot_continue():
    def train(ckpt, x):
        return [ckpt.fetch() for x in (1, 2)], {ckpt.fetch() for _ in (1,)}, lambda: x

    found, (result, *_) = reasons(train, 1)
    assert found[0] == ("a comprehension", set())
    assert result == [1, 2]


def test_a_coroutine_cannot_continue():
    def run(ckpt):
        async def train():
            return ckpt.fetch()

        return asyncio.run(train())

    found, _ = reasons(run)
    assert found[0][0] == "a coroutine"


# Variables


def test_the_variables_are_the_live_ones_that_are_bound():
    found: list = []
    ckpt = Owner(lambda frames: found.append(frames[0].variables()))

    def train(ckpt, total, batch):
        if total < 0:
            late = 0
        for number in (1, 2):
            if number == 2:
                total = total + late
            batch = ckpt.fetch()
            late = batch
        return total

    train(ckpt, 10, 20)
    assert found == [{"ckpt": ckpt, "total": 10}, {"ckpt": ckpt, "total": 11}]


def setting(values, at=1, depth=0):
    """An owner that sets variables at one fetch."""

    def at_fetch(frames):
        if ckpt.num_fetches == at:
            frames[depth].set(values)

    ckpt = Owner(at_fetch)
    return ckpt


def test_variables_of_a_function_are_set():
    def train(ckpt, total, history):
        kept = "kept"
        for _ in (1, 2):
            batch = ckpt.fetch()
            total += batch
            history = [*history, total]
        return total, history, kept

    assert train(setting({"total": 100, "history": ["x"]}), 0, []) == (103, ["x", 101, 103], "kept")
    assert train(setting({}), 0, []) == (3, [1, 3], "kept")


def test_a_variable_without_a_value_is_set():
    def train(ckpt):
        if ckpt.num_fetches:
            best = 0
        ckpt.fetch()
        return best

    assert train(setting({"best": 5})) == 5


def test_variables_that_functions_share_are_set():
    def train(ckpt, total):
        seen = []

        def inner(count=0):
            nonlocal total
            item = ckpt.fetch()
            total += item + count
            seen.append(total)

        inner()
        inner()
        return total, seen

    assert train(setting({"total": 50}, depth=0), 0) == (53, [51, 53])
    seen = ["s"]
    assert train(setting({"total": 50, "seen": seen}, depth=1), 0) == (53, ["s", 51, 53])


def test_variables_of_a_generator_are_set():
    def smooth(ckpt, last):
        for _ in (1, 2, 3):
            item = ckpt.fetch()
            last = last * 2 + item
            yield last

    def train(ckpt):
        return [item for item in smooth(ckpt, 0)]

    assert train(setting({"last": 10}, at=2)) == [1, 22, 47]


def test_variables_of_a_module_are_set():
    ckpt = setting({"total": 7}, depth=1)
    source = f"{LOOP}total = 1\nloop(ckpt.fetch)\ntotal += 1\nrows = [total for total in (1, 2)]\n"
    assert run_module("script", "/home/user/script.py", source, ckpt=ckpt).total == 8


def raised(function, *arguments):
    try:
        function(*arguments)
    except StateMismatchError as error:
        return str(error)
    raise AssertionError("no error")


def test_a_variable_that_is_not_live_cannot_be_set():
    def train(ckpt, total, other):
        total += ckpt.fetch()
        total = 1
        return total

    for name in ("total", "unknown", "__class__"):
        assert f"{name}: not read after this line" in raised(train, setting({name: 1}), 1, 2)


def test_a_module_keeps_its_special_names():
    source = f"{LOOP}loop(ckpt.fetch)\nprint(__name__, file=None if __file__ else None)\n"
    for name in ("__name__", "__file__"):
        ckpt = setting({name: "x"}, depth=1)
        assert name in raised(
            lambda ckpt=ckpt: run_module("script", "/u/s.py", source, ckpt=ckpt, __file__="f")
        )


# Memory


class Batch:
    """Something whose lifetime can be seen."""


def test_no_batch_lives_longer_than_without_a_look_at_the_frames():
    gc.disable()
    try:
        alive: list = []
        ckpt = Owner(lambda frames: [each.variables() for each in frames])

        def train(ckpt, hidden, last):
            for _ in (1, 2, 3):
                batch = Batch()
                last = weakref.ref(batch)
                ckpt.fetch()
                del batch
                alive.append(last() is not None)
                hidden = ckpt.num_fetches + hidden
            return hidden

        train(ckpt, 0, 0)
        assert alive == [False] * 3
        alive.clear()
        train(setting({"hidden": 3}, at=2), 0, 0)
        assert alive == [False] * 3
    finally:
        gc.enable()


def test_frames_are_not_kept():
    gc.disable()
    try:
        references: list = []
        ckpt = Owner(lambda frames: references.extend(map(len, map(LiveFrame.variables, frames))))

        def train(ckpt):
            batch = Batch()
            references.append(weakref.ref(batch))
            ckpt.fetch()

        train(ckpt)
        assert references[0]() is None
    finally:
        gc.enable()


def test_a_dict_that_the_function_got_from_locals_is_not_cleared():
    def train(ckpt, rate):
        options = locals()
        ckpt.fetch()
        return options["rate"]

    assert train(setting({}), 0.5) == 0.5


def test_setting_leaves_variables_of_other_frames_alone():
    def inner(ckpt, a, b):
        ckpt.fetch()
        ckpt.fetch()
        return a + b

    def outer(ckpt):
        a, b = 1, 2
        result = inner(ckpt, 10, 20)
        return a, b, result

    assert outer(setting({"a": 100}, at=2)) == (1, 2, 120)


# Sites


def site_of(source, name="function", file="/home/user/train.py"):
    names: dict = {}
    exec(compile(source, file, "exec"), names)  # noqa: S102  sources of these tests
    found: list = []
    ckpt = Owner(lambda frames: found.append(frames[0].site))
    names[name](ckpt)
    return found[0]


SOURCE = "def function(ckpt):\n    ckpt.fetch()\n    if ckpt in {'a', 'b', 'c'}: return 1.5\n"


def test_a_site_is_recognised():
    site = site_of(SOURCE)
    assert (site.file, site.line) == ("train.py", 2)
    assert site.matches(site_of(SOURCE)) == "same"
    assert site.matches(site_of(f"# a comment\n\n{SOURCE}")) == "same"
    assert site.matches(site_of(SOURCE.replace("1.5", "2.5"))) == "edited"
    assert site.matches(site_of(SOURCE.replace("function", "other"), "other")) == "other"
    twice = SOURCE.replace("    if", "    ckpt.fetch()\n    if")
    assert site.matches(site_of(twice)) == "edited"


def test_an_edited_cell_of_a_notebook_in_another_kernel_is_the_same_file():
    check_cells("/tmp/ipykernel_4711/1987456118.py", "/tmp/ipykernel_815/2659482648.py")
    check_cells("<ipython-input-4-3e2f0c9d1b7a>", "<ipython-input-9-5d41402abc4b>")
    assert site_of(SOURCE, file="/home/user/1987456118.py").file == "1987456118.py"


def check_cells(first, second):
    site = site_of(SOURCE, file=first)
    assert site.file == "cell"
    assert site.matches(site_of(SOURCE, file=second)) == "same"
    assert site.matches(site_of(SOURCE.replace("1.5", "2.5"), file=second)) == "edited"


def test_another_call_of_the_same_function_is_another_site():
    found: list = []
    ckpt = Owner(lambda frames: found.append(frames[0].site))

    def train(ckpt):
        ckpt.fetch()
        ckpt.fetch()

    train(ckpt)
    train(ckpt)
    first, second, third, _ = found
    assert first.matches(second) == "other"
    assert first.matches(third) == "same"


def test_a_site_is_stored_as_json():
    site = site_of(SOURCE)
    assert Site.from_plain(json.loads(json.dumps(site.as_plain()))) == site


def test_the_digest_is_equal_in_another_process_and_under_a_trace_function():
    def function(ckpt):
        def inner():
            return {"x": ckpt} if ckpt in {"a", "b", "c", None, 1.5} else (b"1", -0.0)

        return [inner for _ in (1, 2)]

    expected = digest_code(function.__code__)
    source = os.path.abspath(__file__)
    command = (
        "import runpy, types; names = runpy.run_path(FILE)\n"
        "code = names['test_the_digest_is_equal_in_another_process_and_under_a_trace_function']"
        ".__code__\n"
        "code = next(each for each in code.co_consts if isinstance(each, types.CodeType))\n"
        "print(names['digest_code'](code))"
    ).replace("FILE", repr(source))
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == expected
    for _ in range(100):
        function("a")
    previous = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        function("a")
        digest_code.cache_clear()
        assert digest_code(function.__code__) == expected
    finally:
        sys.settrace(previous)
