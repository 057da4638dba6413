"""Runs of loops in the C core: whatever is lost, a load answers with a state that was saved."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from multistage import native

pytest.importorskip("jax")

from multistage.jax import handlers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or native.LIBRARY is None, reason="needs Linux and the C core"
)
HOOKS: list[object] = []


Asked = native.HEADER.structure("loop_load_t")  # what a load asks for


@pytest.fixture(autouse=True)
def library() -> Iterator[ctypes.CDLL]:
    """Give the core, with no run open; leave none."""
    core = native.library()
    core.ms_loop_clear()
    yield core
    core.ms_loop_hooks(native.Transfer(), native.Transfer())
    core.ms_loop_clear()
    assert core.ms_loop_open_runs() == 0


def pieces_of(arrays: Sequence[np.ndarray]) -> tuple[ctypes.Array, int]:
    found, at = (native.Piece * len(arrays))(), 0
    for piece, array in zip(found, arrays, strict=True):
        piece.data, piece.offset, piece.nbytes = array.ctypes.data, at, array.nbytes
        at += -(-array.nbytes // 64) * 64
    return found, len(arrays)


class Run:
    """A run of a loop whose state before block k is known."""

    def __init__(self, steps=100, shapes=((5,), (3, 7)), folder="", **options):
        self.steps, self.shapes, self.library = steps, shapes, native.library()
        self.given = handlers.Options(
            **{
                "site": 1,
                "steps": steps,
                "least_every": 1,
                "most_every": 1,
                "buffer_bytes": 1 << 16,
                "capacity_bytes": -1,
                **options,
            }
        )
        number, every = ctypes.c_int64(), ctypes.c_int64()
        self.folder = os.fsencode(folder)
        self.site = self.folder, len(self.folder), ctypes.byref(self.given)
        self.failed = self.library.ms_loop_begin(
            *self.site, ctypes.byref(number), ctypes.byref(every)
        )
        self.number, self.every = number.value, every.value

    def state(self, k):
        noise = np.random.default_rng(k)
        return [noise.random(shape) for shape in self.shapes]

    def save(self, k):
        arrays = self.state(k)
        return self.library.ms_loop_save(self.number, k, *pieces_of(arrays))

    def load(self, k):
        """Return the block whose state a load gave; that is looked at."""
        arrays = [np.full(shape, np.nan) for shape in self.shapes]
        asked = Asked(run=self.number, k=k, steps=self.steps, every=self.every)
        given = ctypes.byref(asked), *pieces_of(arrays)
        assert self.library.ms_loop_load(*self.site, *given) == 0
        assert 0 <= asked.found <= k
        if asked.found:
            for one, other in zip(arrays, self.state(asked.found), strict=True):
                assert one.tobytes() == other.tobytes()
        else:
            assert all(np.isnan(one).all() for one in arrays), "state 0 is the program's"
        return asked.found

    def there_and_back(self, blocks):
        """Return which state each load gave, the last block first."""
        assert [self.save(k) for k in range(blocks)] == [0] * blocks
        return [self.load(k) for k in reversed(range(blocks))]


def report() -> native.Struct:
    found = handlers.Seen()
    assert native.library().ms_loop_report(ctypes.byref(found))
    return found


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("shapes", [((1,),), ((3,), (4, 5)), ((70_000,),), ((300_000,), (1,))])
def test_every_state_comes_back(tmp_path, folder, shapes):
    run = Run(folder=tmp_path if folder else "", shapes=shapes, buffer_bytes=16 << 20)
    found = run.there_and_back(24)
    told = report()
    assert (told.run, told.kept + told.refused) == (run.number, 23)
    assert told.lost == told.late == 0
    assert told.again == sum(k != one for k, one in zip(reversed(range(24)), found, strict=True))
    assert run.library.ms_loop_open_runs() == 0, "a load of state 0 ends the run"


def test_what_does_not_fit_is_left_out_and_answered_by_the_one_before(tmp_path):
    run = Run(folder=tmp_path, shapes=((1000,),), capacity_bytes=6 * 8192, buffer_bytes=1 << 14)
    found = run.there_and_back(40)
    told = report()
    assert told.refused > 0 and told.kept > 0
    assert told.again == sum(k != one for k, one in zip(reversed(range(40)), found, strict=True))


def hooks(write=None, read=None):
    """Have what moves bytes fail: each is given the number of the call, and returns an errno."""
    counts = {"write": 0, "read": 0}
    system = {"write": os.pwritev, "read": os.preadv}

    def hook(kind, fails):
        def move(fd, data, nbytes, position):
            counts[kind] += 1
            failed = 0 if fails is None else fails(counts[kind])
            if failed:
                return -failed
            view = memoryview((ctypes.c_char * nbytes).from_address(data)).cast("B")
            done = system[kind](fd, [view], position)
            if failed is None and kind == "read":
                view[0] ^= 1  # a byte that is not what was written
            return done

        return native.Transfer() if fails is None else native.Transfer(move)

    made = hook("write", write), hook("read", read)
    native.library().ms_loop_hooks(*made)
    HOOKS.append(made)  # threads call them until the stream is closed


def test_states_that_cannot_be_read_or_are_others_are_lost():
    noise = random.Random(7)
    hooks(read=lambda n: noise.choice([0, 0, errno.EIO, None]))
    run = Run(shapes=((1000,),), buffer_bytes=1 << 14)
    found = run.there_and_back(300)
    told = report()
    assert told.lost > 0
    assert told.again == sum(k != one for k, one in zip(reversed(range(300)), found, strict=True))


def test_states_that_cannot_be_written_are_lost():
    hooks(write=lambda n: errno.ENOSPC if n % 3 == 0 else 0)
    Run(shapes=((1000,),), buffer_bytes=1 << 14).there_and_back(300)
    assert report().again > 0


def test_a_read_that_does_not_end_is_not_waited_for():
    stuck, written = threading.Event(), threading.Semaphore(0)
    hooks(write=lambda n: written.release() or 0, read=lambda n: int(not stuck.wait()))
    run = Run(shapes=((40_000,),), buffer_bytes=1 << 20)
    assert run.save(0) == 0
    for k in range(1, 9):
        assert run.save(k) == 0
        written.acquire(timeout=1)  # or it was left out
    assert [run.load(k) for k in reversed(range(9))][-1] == 0
    stuck.set()
    assert report().late > 0


def test_runs_of_one_site_do_not_meet():
    runs = [Run() for _ in range(50)]
    for k in range(20):
        assert [run.save(k) for run in runs] == [0] * 50
    for k in reversed(range(20)):
        for run in runs:
            run.load(k)


def test_random_runs_of_random_sites_on_tiers_that_fail(tmp_path):
    noise = random.Random(1)
    hooks(
        write=lambda n: errno.EIO if noise.random() < 0.05 else 0,
        read=lambda n: noise.choice([0] * 20 + [errno.EIO, None]),
    )
    open_runs = []
    for _ in range(4000):
        if len(open_runs) < 12 and noise.random() < 0.1:
            site = noise.randrange(4)
            shapes = [((3,),), ((600,), (5,)), ((40_000,),), ((1,), (1,), (1,))][site]
            run = Run(
                site=site,
                shapes=shapes,
                folder=noise.choice(["", tmp_path]),
                capacity_bytes=noise.choice([-1, 1 << 18]),
                buffer_bytes=1 << 20,
            )
            open_runs.append([run, 0, noise.randrange(1, 60), False])
        if not open_runs:
            continue
        entry = noise.choice(open_runs)
        run, at, blocks, back = entry
        if not back:
            assert run.save(at) == 0
            entry[1], entry[3] = (at + 1, False) if at + 1 < blocks else (at, True)
            continue
        run.load(at)
        entry[1] = at - 1
        if not at:
            open_runs.remove(entry)


def test_states_of_other_orders_and_sizes_are_left_out():
    run = Run()
    assert [run.save(k) for k in (0, 1, 3, 2, 3, 4)] == [0] * 6
    shapes, run.shapes = run.shapes, ((5,),)
    assert run.save(5) == 0
    assert run.load(4) == 0, "another size"
    run.shapes = shapes
    assert [run.load(k) for k in (5, 3, 2)] == [4, 3, 1]
    assert run.save(2) == 0, "nobody asks for it again"
    assert [run.load(k) for k in (2, 1, 0)] == [1, 1, 0]
    assert report().kept == 3


def test_a_folder_that_is_gone_is_told(tmp_path):
    run = Run(folder=tmp_path / "none")
    assert run.save(0) == 0
    assert run.save(1) == errno.ENOENT


def test_blocks_are_as_long_as_a_transfer_takes_once_that_is_known():
    first = Run(least_every=2, most_every=30)
    assert first.every == 30, "nothing is known yet"
    first.shapes = ((40_000,),)
    first.there_and_back(12)
    assert 2 <= Run(least_every=2, most_every=30).every <= 30
    assert Run(steps=20, most_every=30).every == 30, "all steps are one block"


def test_blocks_are_long_enough_for_all_states_to_fit_in_the_tier():
    def every(capacity_bytes):
        options = {"steps": 12 * 10**9, "most_every": 10**9, "buffer_bytes": 1 << 14}
        options |= {"shapes": ((1024,),), "capacity_bytes": capacity_bytes}
        for _ in range(100):
            run = Run(**options)
            if run.every < 10**9:  # what steps and transfers take is known
                break
            run.there_and_back(12)
        return run.every

    assert 1 <= every(-1) < every(30 * 8192) == 4 * 10**8


def test_a_pullback_that_is_never_called_is_forgotten_by_clear(library):
    run = Run()
    assert run.save(0) == run.save(1) == 0
    assert library.ms_loop_open_runs() == 1
    library.ms_loop_clear()
    assert run.load(1) == 0
    assert run.save(2) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_states_of_a_run_that_is_forgotten_are_saved_again(library, ended):
    run = Run()
    assert [run.save(k) for k in range(20)] == [0] * 20
    if ended:
        assert run.load(0) == 0
    else:
        library.ms_loop_clear()
    assert run.load(19) == 0
    assert [run.save(k) for k in range(1, 19)] == [0] * 18
    assert [run.load(k) for k in reversed(range(19))] == [*reversed(range(19))]
    told = report()
    assert (told.run, told.steps, told.every, told.kept, told.again) == (run.number, 100, 1, 18, 1)
    assert library.ms_loop_open_runs() == 0


FORKS = """
import ctypes, os
from multistage import native
from multistage.jax import handlers
library = native.library()
def begin():
    given = handlers.Options(site=1, steps=1, most_every=1, buffer_bytes=1 << 16)
    made = [ctypes.byref(ctypes.c_int64()) for _ in range(2)]
    return library.ms_loop_begin(b"", 0, ctypes.byref(given), *made)
assert begin() == 0
child = os.fork()
if child == 0:
    os._exit(begin())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_is_refused():
    made = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    assert (made.stdout.strip(), made.stderr) == (str(errno.ECHILD), "")


def test_nothing_grows_from_run_to_run(tmp_path):
    def counted():
        return [len([*Path(f"/proc/self/{kind}").iterdir()]) for kind in ("fd", "task")]

    Run(folder=tmp_path).there_and_back(20)
    before = counted()
    for site in range(200):
        Run(site=site, folder=tmp_path).there_and_back(20)
    assert counted() == before
    native.library().ms_loop_clear()
    after = counted()
    assert after[0] < before[0] and after[1] < before[1]
