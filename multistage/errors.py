"""Every error and warning multistage raises, in one tree.

A message states the rule that was broken, the values and the remedy.  Values include
the names of tiers, which are URLs: all errors replace possible secrets in their messages
by `***`, in one place.
"""

from __future__ import annotations

import functools
import re

# Options of a tier that are never secret; the values of all others are.
OPTIONS = frozenset(
    {"engine", "capacity", "buffers", "queue", "threads", "cpus", "share", "connections"}
    | {"compress", "tolerance", "endpoint"}
)
# Each looks ahead a bounded way, so that text of any kind takes time in proportion to its length.
_SCHEME = re.compile(r"(?i)\b(?!file:///)[a-z][a-z0-9+.-]{0,99}(?:://|%3a%2f%2f)")
# Of a URL that lacks its slashes, or its scheme.
_USER = re.compile(r"""(?i)(?<![\w.+:/~-])(?!file:)[a-z0-9][^\s'">:@]{0,100}:(?!//)""")
_URL = re.compile(r"""(?i)\b[a-z][a-z0-9+.-]{0,99}:[^\s'">]+""")
_LINE, _TOKEN = re.compile(r"[^>\n]+"), re.compile(r"""[^\s'">]+""")
_OPTION = re.compile(r"([?&])([^=&?]+)(=?)([^&?]*)")
# A tier's own options come after its "?": those of a URL within it are percent-encoded.
_ENCODED = re.compile(r"(?i)(%3f|%26)((?:(?!%3f|%26|%3d)[^=&?])+)(=|%3d|)((?:(?!%3f|%26)[^&?])*)")


def redacted(text: str) -> str:
    """Return text with the secrets of the URLs in it replaced by `***`.

    Users and passwords before a host, percent-encoded ones too, and the values of all
    options but those that tiers are known to take.  Paths of files are left alone.

    Examples
    --------
    >>> redacted("tier 's3://me:pa/ss@bucket/run?secret=abc&capacity=1GiB' is not known")
    "tier 's3://***@bucket/run?secret=***&capacity=1GiB' is not known"
    """
    if ":" not in text:
        return text
    if "@" in text or "%40" in text:
        text = _LINE.sub(functools.partial(_without_user, _SCHEME), text)
        text = _TOKEN.sub(functools.partial(_without_user, _USER), text)
    return _URL.sub(_without_options, text)


def _without_user(begins: re.Pattern[str], found: re.Match[str]) -> str:
    """Return a piece of text without what lies from where a URL begins to the last "@"."""
    piece = found[0]
    at = max(piece.rfind("@"), piece.rfind("%40"))
    first = begins.search(piece) if at >= 0 else None
    if first is None or first.end() > at:
        return piece
    return f"{piece[: first.end()]}***{piece[at:]}"


def _without_options(url: re.Match[str]) -> str:
    text = _OPTION.sub(_option, url[0])
    return text if text[:5].lower() == "file:" else _ENCODED.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    mark, name, equals, _ = found.groups()
    if name.lower() in OPTIONS:
        return found[0]
    return f"{mark}{name}{equals}***" if equals else f"{mark}***"


class _Redacted(Exception):
    """An exception whose messages hold no secrets."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class MultistageError(_Redacted):
    """Base of every error raised by multistage.

    Examples
    --------
    >>> import multistage as ms
    >>> try:
    ...     ms.open_store("file:/no/such/folder").check()
    ... except ms.errors.MultistageError as error:
    ...     print(type(error).__name__)
    StoreError
    """


class ArgumentError(MultistageError, ValueError):
    """An argument breaks a rule; raised before any step runs.

    Examples
    --------
    >>> import multistage as ms
    >>> try:
    ...     ms.Costs(-1.0, 2.0)
    ... except ms.errors.ArgumentError as error:
    ...     print("forward_step_s" in str(error))
    True
    """


class BudgetError(ArgumentError):
    """The memory budget is too small for any schedule.

    Attributes
    ----------
    least_bytes : int or None
        The smallest budget that works, if it is known.

    Examples
    --------
    >>> import multistage as ms
    >>> costs = ms.StageCosts.uniform(4, ms.Stage("a", 1.0, 2.0, 10, 30), input_bytes=10)
    >>> try:
    ...     ms.plan_chain(costs, 20)
    ... except ms.errors.BudgetError as error:
    ...     print(error.least_bytes == ms.smallest_memory(costs))
    True
    """

    least_bytes: int | None = None

    @classmethod
    def below(cls, message: str, least_bytes: int) -> BudgetError:
        """Return an error that knows the smallest budget that works."""
        error = cls(message)
        error.least_bytes = least_bytes
        return error


class StateError(MultistageError, ValueError):
    """A state is not a pytree of plain arrays, or changed its layout between steps.

    Attributes
    ----------
    state : int or None
        Index of the state whose layout differs from the first, if it is known.
    varies : bool
        Whether the state is valid in itself and only its tree, a shape or a dtype differs.

    Examples
    --------
    >>> import multistage as ms
    >>> run = ms.Reversal(lambda x, i: x, lambda x, a, i: a, n_steps=3, memory="2 slots")
    >>> try:
    ...     run.forward(1.0)
    ... except ms.errors.StateError as error:
    ...     print("numpy.asarray" in str(error))
    True
    """

    state: int | None = None
    varies: bool = False


class ScheduleError(MultistageError):
    """A schedule broke the rules of `multistage.check`.

    Attributes
    ----------
    index : int or None
        0-based position of the offending action, or the number of actions
        when the schedule ended too early; None if it was not counted.

    Examples
    --------
    >>> from multistage.actions import EndForward, Load, Tape
    >>> from multistage.schedule.rules import check
    >>> try:
    ...     check([Tape(0), EndForward(), Load(3)], n_steps=1, slots=2)
    ... except ScheduleError as error:
    ...     print(error.index)
    2
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message if index is None else f"action {index}: {message}")
        self.index = index


class ScheduleUsedError(ScheduleError, StopIteration):
    """A schedule that serves one adjoint calculation was asked for another.

    It ends a loop over the schedule as any iterator ends.
    """


class StoreError(MultistageError):
    """A slow tier cannot be used at all, for example because its folder cannot be written.

    Examples
    --------
    >>> import multistage as ms
    >>> try:
    ...     ms.open_store("file:/no/such/folder").check()
    ... except ms.errors.StoreError as error:
    ...     print("create it" in str(error))
    True
    """


class ShotError(MultistageError):
    """One of many shots failed; the cause is attached.

    Attributes
    ----------
    shot : int
        Its position among the shots, from 0.

    Examples
    --------
    >>> print(ShotError(3, "it raised ValueError('no source')"))
    shot 3 failed: it raised ValueError('no source')
    """

    def __init__(self, shot: int, reason: str) -> None:
        super().__init__(shot, reason)  # both: a worker's error travels as its arguments
        self.shot = shot

    def __str__(self) -> str:
        return f"shot {self.shot} failed: {self.args[1]}"


class CheckpointWarning(_Redacted, UserWarning):
    """A checkpoint was refused or lost; the run continues and recomputes it.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.filterwarnings("error", category=CheckpointWarning)  # ends such a run
    """


class SlowWarning(_Redacted, UserWarning):
    """A slower replacement of the C core or of direct transfers is used; results are the same."""


class DifferenceWarning(_Redacted, UserWarning):
    """A check with `check="warn"` found a difference from plain training; the run continues."""
