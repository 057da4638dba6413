"""No plan of the corpus is slower than the one recorded, and none is refused that was not."""

import json

import pytest
from corpus import CHAINS, RECORDED, STEPS, makespan_of_chain, makespan_of_steps

from multistage import native

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")

MORE = 1.001
SHORT = range(0, CHAINS, 5)
recorded = json.loads(RECORDED.read_text(encoding="utf-8"))


def worse(found, numbers, kind):
    """Return the problems whose plan is slower than the recorded one, with both makespans."""
    pairs = {k: (found(k), recorded[kind][k]) for k in numbers}
    return {
        k: (now, before)
        for k, (now, before) in pairs.items()
        if before is not None and (now is None or now > before * MORE)
    }


def test_the_corpus_is_whole():
    assert (len(recorded["steps"]), len(recorded["chains"])) == (STEPS, CHAINS)
    assert sum(seconds is None for kind in recorded.values() for seconds in kind) < 80


@pytest.mark.long(but="0")
@pytest.mark.parametrize("first", range(4))
def test_plans_of_steps_are_as_fast_as_recorded(first):
    assert worse(makespan_of_steps, range(first, STEPS, 4), "steps") == {}


def test_plans_of_some_chains_are_as_fast_as_recorded():
    assert worse(makespan_of_chain, SHORT, "chains") == {}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1, 5))
def test_plans_of_all_chains_are_as_fast_as_recorded(first):
    assert worse(makespan_of_chain, range(first, CHAINS, 5), "chains") == {}
