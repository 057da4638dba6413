"""Ctrl-C put off, and raised after; in tests too, whatever those before them have imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from signals import ctrl_c_works as ctrl_c_works

from multistage.support.interrupts import Shield


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_after_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Shield(up=True):
        ctrl_c()
        done.append("rest")
    assert done == ["rest"]


def test_an_interrupt_outside_the_shield_is_raised_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Shield() as shield:
        shield.up = True
        shield.up = False
        ctrl_c()
        done.append("rest")
    assert done == []


def test_it_is_raised_when_let_go() -> None:
    with Shield() as shield:
        shield.up = True
        ctrl_c()
        shield.up = False
        with pytest.raises(KeyboardInterrupt):
            shield.let_go()
        shield.let_go()  # once


def test_a_second_interrupt_is_raised_at_once() -> None:
    """The way out of a block that hangs."""
    done = []
    with pytest.raises(KeyboardInterrupt), Shield(up=True):
        ctrl_c()
        done.append("first")
        ctrl_c()
        done.append("second")
    assert done == ["first"]


def test_nested() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), Shield(up=True):
        with Shield(up=True):
            ctrl_c()
            done.append("inner")
        done.append("outer")  # the outer one is up still
    assert done == ["inner", "outer"]


def test_other_handlers_are_called() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Shield(up=True):
            ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
        with Shield(up=True):  # its user installs another in the block: it stays
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with Shield(up=True):
            ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_shield_is_a_no_op_in_other_threads() -> None:
    found: list[object] = []

    def run() -> None:
        with Shield(up=True):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_an_error_in_the_block_is_the_context() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Shield(up=True):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("in the block")
    assert isinstance(caught.value.__context__, ValueError)


JAX = """
import gc

def collected(phase, info):
    seen.append(phase)

seen = []
gc.callbacks.append(collected)
"""
IN_A_MODULE = """
import gc

def test_one_that_imports_jax():
    import jax
    gc.collect()
    assert jax.seen == ["start", "stop"]

def test_the_next():
    import jax
    gc.collect()
    assert len(jax.seen) == 2
"""


def test_jax_imported_within_a_module_runs_nothing_in_collections_of_the_tests_after(
    tmp_path: Path,
) -> None:
    """A KeyboardInterrupt raised there would be printed and lost."""
    (tmp_path / "jax.py").write_text(JAX)
    (tmp_path / "test_in_a_module.py").write_text(IN_A_MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    done = subprocess.run(
        [*command, "-p", "no:randomly", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
