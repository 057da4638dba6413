"""Secrets in the names of tiers: planted in every form, looked for in all that comes out."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multistage as ms
from multistage.backends import RemoteStore
from multistage.cli import main
from multistage.errors import CheckpointWarning, MultistageError, ShotError, redacted
from multistage.interop.pyrevolve import Revolver

SECRET = "hUnTeR2"
FORMS = [
    f"s3://me:{SECRET}@bucket/run",
    f"s3://{SECRET}@bucket/run",
    f"s3://me:wJal/{SECRET}@bucket/run",
    f"s3://me:wJal/rX/{SECRET}/bP@bucket/run",
    f"s3://me:what?{SECRET}@bucket/run",
    f"s3://me:{SECRET} with a space@bucket",
    f"s3://me:it's {SECRET}@bucket",
    f's3://me:"{SECRET}"@bucket',
    f"s3://bucket/run?secret={SECRET}",
    f"s3://bucket/run?capacity=1GiB&token=a{SECRET}&queue=2",
    f"s3://bucket/run?secret=two words {SECRET}",
    f"s3://bucket/run?secret='{SECRET}'",
    f"s3://bucket/run?{SECRET}",
    f"s3://bucket/run?capacity=1GiB&{SECRET}",
    f"s3://bucket/run?endpoint=https://me:{SECRET}@localhost:1",
    f"s3://bucket/run?endpoint=http://localhost:1/?key={SECRET}",
    f"s3://bucket/run?secret={SECRET}#x",
    f"s3://[me:{SECRET}@bucket/run",
    f"s3://me:{SECRET}@b\N{VULGAR FRACTION ONE HALF}\N{CARE OF}cket/run",
    f"gs://me:{SECRET}@bucket",
    f"fsspec:ftp://me:{SECRET}@localhost/run",
    f"fsspec:sftp://me:{SECRET}@localhost:1/run",
    f"fsspec:ftp%3A%2F%2Fme%3A{SECRET}%40localhost/run",
    f"fsspec:nonsense://me:{SECRET}@localhost/run",
    f"fsspec:https://localhost:1/run?sig={SECRET}",
    f"fsspec:https://localhost:1/run%3Fsig={SECRET}",
    f"fsspec:https://localhost:1/run%3fa=1%26sig%3D{SECRET}?zip=1",
    f"fsspec:ftp:me:{SECRET}@localhost/run",
    f"s3//me:{SECRET}@bucket/run",
    f"me:{SECRET}@bucket/run",
    f"me:{SECRET}%40bucket/run",
    f"http://me:{SECRET}@localhost/run",
    f"file://me:{SECRET}@host/run",
    f"file:///run?password={SECRET}",
    f"memory:1GiB?password={SECRET}",
    f"memory://me:{SECRET}@x",
    f"numa://me:{SECRET}@1",
    f"pinned://me:{SECRET}@1?token={SECRET}",
]
FORMS += [f"memory:1MiB > {form}" for form in FORMS[:16:5]]
FORMS += [f"{form} > memory:" for form in FORMS[1:16:5]]


def _reversal(tier: str) -> None:
    with ms.Reversal(lambda x, i: x, lambda x, a, i: a, 5, memory="2 slots", tiers=tier) as run:
        run.forward(np.ones(3))


def _pyrevolve(tier: str) -> None:
    Revolver(None, None, None, None, 5, memory="1 MiB", tiers=tier)


def _unroll(tier: str) -> None:
    torch = pytest.importorskip("torch")
    import multistage.torch as mst

    mst.unroll(torch.nn.RNNCell(1, 1), torch.zeros(1, 1), torch.zeros(5, 1, 1), tiers=tier)


def _unroll_two(tier: str) -> None:
    torch = pytest.importorskip("torch")
    import multistage.torch as mst

    tiers = ["memory:", tier]
    mst.unroll(torch.nn.RNNCell(1, 1), torch.zeros(1, 1), torch.zeros(5, 1, 1), tiers=tiers)


def _offload(tier: str) -> None:
    pytest.importorskip("torch")
    import multistage.torch as mst

    with mst.offload(tier):
        pass


def _demo(tier: str) -> None:
    assert main(["demo", "lstm", "--n-steps=9", "--width=2", f"--tiers={tier}"]) == 2


def _probe(tier: str) -> None:
    assert main(["probe", tier]) == 2


ENTRIES = [_reversal, _pyrevolve, _unroll, _unroll_two, _offload, _probe, _demo]
NAMES = ["Reversal", "pyrevolve", "unroll", "two tiers", "offload", "probe", "demo"]


@pytest.mark.parametrize("use", ENTRIES, ids=NAMES)
def test_no_message_contains_a_secret(
    use: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    caplog.set_level(logging.DEBUG, "multistage")
    forms = FORMS if use in (_reversal, _probe) else FORMS[::4]
    for form in forms:
        said = ""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                use(form)
            except MultistageError as error:
                said = "".join(traceback.format_exception(error))
                said += repr(error) + str(error.args)
        out, err = capfd.readouterr()
        # The line of this file that raised is shown by a traceback, not its values.
        everything = said + out + err + caplog.text + "".join(str(w.message) for w in warned)
        assert SECRET not in everything, (form, everything)
        assert "error" in (said + err).lower(), f"{form} was taken"
    assert not any(SECRET in path.read_text(errors="replace") for path in tmp_path.rglob("*.*"))


def test_reports_and_plans_tell_no_options() -> None:
    pytest.importorskip("fsspec")
    store = RemoteStore("memory://run", options={"token": SECRET})
    with ms.Reversal(
        lambda x, i: x + 1, lambda x, a, i: a, 9, memory="2 slots", tiers=store
    ) as run:
        run.forward(np.ones(3))
        run.reverse(np.ones(3))
        report = run.report()
        texts = [str(run.plan), str(report), repr(report), repr(run.plan), repr(store), repr(run)]
        texts += [json.dumps(run.plan.to_dict()), run.costs.to_json(), report._repr_html_()]
    assert not any(SECRET in text for text in texts)


def test_text_without_secrets_is_unchanged() -> None:
    for text in (
        "tier 'file:///home/me@work/a?engine=native&capacity=1GiB' is full",
        "budget 7 < 9: is that so? raise the budget & go on",
        "s3://bucket/prefix?endpoint=http://localhost:9000&connections=8",
        "see https://docs.python.org/3/library/os.html",
        "",
    ):
        assert redacted(text) == text
    with pytest.raises(ms.errors.ArgumentError, match=r"'s3://bucket/run\?secret=\*\*\*&queue=2'"):
        ms.open_store("s3://bucket/run?secret=4711&queue=2")


@pytest.mark.parametrize(
    "error",
    [
        MultistageError(f"tier s3://me:{SECRET}@b"),
        ms.errors.ScheduleError(f"tier s3://me:{SECRET}@b", 3),
        ShotError(3, f"tier s3://me:{SECRET}@b"),
        CheckpointWarning(f"tier s3://me:{SECRET}@b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_without_it(error: Any) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert SECRET not in str(each) + repr(each)
        assert "s3://***@b" in str(each)


@pytest.mark.parametrize("name", [f"memory:{SECRET}@x", f"memory:{SECRET}%40x"])
def test_a_size_may_be_a_secret(name: str) -> None:
    with pytest.raises(ms.errors.ArgumentError) as caught:
        _reversal(name)
    assert SECRET not in str(caught.value)
    with pytest.raises(ms.errors.ArgumentError, match="is no byte count") as caught:
        ms.Budget.parse(name.partition(":")[2] or name)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("piece", ["a://", "a:?", "a-", "a:b", "?a=b&", "%3a%2f%2fa", "file:///"])
def test_odd_text_is_redacted_in_linear_time(piece: str) -> None:
    """Seconds at 30 kB, once: work that grows as the square would not end within the timeout."""
    assert len(redacted((piece * 1_000_000)[:1_000_000] + ":")) > 1000


def test_text_after_the_last_at_sign_is_kept() -> None:
    text = f"s3://a:{SECRET}@b@host > me:{SECRET}@x 's3://{SECRET}@y' file:///a@b"
    assert redacted(text) == "s3://***@host > me:***@x 's3://***@b"
