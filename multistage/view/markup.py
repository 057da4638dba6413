"""Templates, and what text may stand in markup: the only place where text becomes HTML.

Every expression of a template is escaped by jinja2, which is imported when the first page
is made.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = Path(__file__).parent / "templates"
# What neither XML nor UTF-8 can hold.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def writable(text: str) -> str:
    r"""Return text with a replacement character for each that markup cannot hold.

    Examples
    --------
    >>> writable("a\x1bb")
    'a\ufffdb'
    """
    return _UNWRITABLE.sub("\ufffd", text)


@lru_cache
def environment(*folders: Path) -> Environment:
    """Return the environment of this package's templates, and of those in other folders."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return value if isinstance(value, Markup) else writable(str(value))

    return Environment(
        loader=FileSystemLoader([*folders, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
