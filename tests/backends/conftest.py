"""No test of a store may leave a thread, a descriptor or a file behind."""

import pytest
from leaks import no_leak as no_leak

from multistage.backends import streamed

# What they show are states that share an extent, as none does without the C core.
IN_EXTENTS = {
    "test_small_states_fill_the_buffers",
    "test_small_states_take_the_buffers_they_say",
    "test_records_with_extents_of_their_own_come_back_from_fewer_buffers",
    "test_the_bound_holds",
}


@pytest.fixture(autouse=True)
def without_the_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of tests that have "plain" in their name or parameters do without the C core."""
    if "plain" in request.node.name.lower():
        monkeypatch.setattr("multistage.backends.streamed.has_streams", lambda: False)
    if not streamed.has_streams() and request.function.__name__ in IN_EXTENTS:
        pytest.skip("no state shares an extent")
