"""The name of a tier, taken apart: `TierUrl`."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from ..errors import OPTIONS, ArgumentError, redacted
from ..support.units import parse_bytes


def told(tier: str) -> str:
    """Return a tier as messages name it, without the values of options that may be secret.

    Examples
    --------
    >>> told("s3://bucket?secret=4711&capacity=1GiB")
    "'s3://bucket?secret=***&capacity=1GiB'"
    """
    place, mark, text = tier.partition("?")
    options = [each.partition("=") for each in text.split("&")] if mark else []
    kept = []
    for name, equals, value in options:
        secret = name not in OPTIONS or not equals
        kept.append(f"{name}={'***' if secret else value}" if equals else "***")
    return repr(redacted(place + mark + "&".join(kept)))


class TierUrl:
    """A tier's name as its scheme, its place and its options, each of which is taken once.

    Parameters
    ----------
    tier : str

    Attributes
    ----------
    shown : str
        For messages.
    scheme, host, path : str
        As in `scheme://host/path`.

    Raises
    ------
    ArgumentError
        If it is no URL, or its options are not written as they should be.

    Examples
    --------
    >>> url = TierUrl("file:///scratch?capacity=10GiB&queue=4")
    >>> url.path, url.size("capacity"), url.number("queue"), url.option("engine")
    ('/scratch', 10737418240, 4, None)
    """

    def __init__(self, tier: str) -> None:
        self.shown = told(tier)
        try:
            parts = urlsplit(tier)
        except ValueError:  # whose message may hold a password
            raise ArgumentError(f"tier {self.shown} is not a valid URL") from None
        if parts.fragment:
            raise ArgumentError(f"tier {self.shown}: write '#' in a path as %23")
        if not all("=" in option for option in parts.query.split("&") if option):
            raise ArgumentError(f"tier {self.shown}: write options as name=value")
        self.scheme, self.host, self.path = parts.scheme, parts.netloc, parts.path
        self._options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in self._options:
                raise ArgumentError(f"tier {self.shown} gives {name!r} twice; keep one")
            self._options[name] = value

    def option(self, name: str) -> str | None:
        """Take an option; None if it is not given."""
        return self._options.pop(name, None)

    def size(self, name: str) -> int | None:
        """Take an option that is a number of bytes.  Raises ArgumentError."""
        value = self.option(name)
        return None if value is None else parse_bytes(value, name)

    def number(self, name: str) -> int | None:
        """Take an option that is a whole number.  Raises ArgumentError."""
        value = self.option(name)
        if value is not None and not value.isdecimal():
            raise ArgumentError(f"tier {self.shown}: {name}={value!r} must be a whole number")
        return None if value is None else int(value)

    def left(self) -> str | None:
        """Return the name of an option that was not taken, None if all were."""
        return next(iter(self._options), None)
