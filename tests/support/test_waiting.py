"""Waits between threads: what they return, and that Ctrl-C leaves no lock taken."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from multistage.support.waiting import Latch, Monitor

_FILES = ("waiting.py", "threading.py")
# After these instructions, and nowhere else, Python looks whether a signal has come.
LOOKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


class CtrlC:
    """Raises KeyboardInterrupt in this thread, the n-th time that it can be told of it."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._before: dict[FrameType, str] = {}

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(_FILES):
            return None
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            self.left -= self._before.get(frame) in LOOKS
            self._before[frame] = name
            if self.left == 0:
                self.left = -1
                raise KeyboardInterrupt
        return self._instruction


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Whether Ctrl-C before instruction number `at` came before the end of `work`."""
    try:
        with CtrlC(at):
            work()
    except KeyboardInterrupt:
        return True
    return False


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_is_found_is_returned_and_taken_under_the_lock() -> None:
    monitor, held = Monitor(), list[int]()
    found: list[int] = []
    threads = [
        in_a_thread(lambda: found.append(monitor.wait_for(lambda: held and held.pop())))
        for _ in range(3)
    ]
    for number in (5, 6, 7):
        with monitor.lock:
            held.append(number)
            monitor.notify_all()
    for thread in threads:
        thread.join()
    assert sorted(found) == [5, 6, 7]


def struck_everywhere(trial: Callable[[int], bool]) -> None:
    """Try with Ctrl-C at each instruction, until it would come after the end."""
    at = 1
    while trial(at):
        at += 1
    assert at > 3


def test_an_interrupted_wait_leaves_the_lock_free_and_can_be_repeated() -> None:
    def trial(at: int) -> bool:
        monitor, held, free = Monitor(), list[bool](), list[bool]()

        def give() -> None:
            with monitor.lock:
                held.append(True)
                monitor.notify_all()

        def wait() -> None:
            monitor.wait_for(lambda: bool(held))

        thread = in_a_thread(give)
        hit = interrupted(wait, at)
        wait()
        thread.join()
        in_a_thread(lambda: free.append(monitor.lock.acquire(blocking=False))).join()
        assert free == [True]
        return hit

    struck_everywhere(trial)


def test_an_interrupted_notification_can_be_repeated() -> None:
    def trial(at: int) -> bool:
        monitor, held = Monitor(), list[bool]()
        waiting = [in_a_thread(lambda: monitor.wait_for(lambda: bool(held))) for _ in range(2)]

        def give() -> None:
            with monitor.lock:
                held.append(True)
                monitor.notify_all()

        hit = interrupted(give, at)
        give()
        for thread in waiting:
            thread.join()
        return hit

    struck_everywhere(trial)


def test_an_interrupted_latch_is_set_and_waited_for_again() -> None:
    def trial(at: int) -> bool:
        latch, other = Latch(), Latch()
        waiting, setting = in_a_thread(latch.wait), in_a_thread(other.set)
        hit = interrupted(lambda: (latch.set(), other.wait()), at)
        latch.set()
        other.wait()
        waiting.join()
        setting.join()
        return hit

    struck_everywhere(trial)


def test_a_wait_for_a_latch_times_out() -> None:
    latch = Latch()
    assert not latch.wait(0.0) and not latch.is_set()
    latch.set()
    assert latch.wait(0.0) and latch.is_set()
