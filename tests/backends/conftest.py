"""No test of a store may leave a thread, a descriptor or a file behind."""

import pytest
from leaks import no_leak as no_leak


@pytest.fixture(autouse=True)
def without_the_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of tests that have "plain" in their name or parameters do without the C core."""
    if "plain" in request.node.name.lower():
        monkeypatch.setattr("multistage.backends.streamed.has_streams", lambda: False)
