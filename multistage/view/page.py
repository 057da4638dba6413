"""Pages of HTML: one file, no script, nothing fetched, light or dark as the reader has it.

A page is data: a title and parts.  The templates beside this module make it HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from .chart import Chart

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading below the title."""

    KIND: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph for each line of a text."""

    KIND: ClassVar[str] = "paragraph"
    text: str
    tone: Literal["", "soft", "alert"] = ""


@dataclass(frozen=True, slots=True)
class Cards:
    """Figures that stand out: what, how much, a remark."""

    KIND: ClassVar[str] = "cards"
    entries: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table, its first column to the left.

    Attributes
    ----------
    headers : sequence of str
    rows : sequence of rows
    marked : int, optional
        The row that stands out.
    words : int, optional
        The column of sentences, which are broken into lines.
    """

    KIND: ClassVar[str] = "table"
    headers: Sequence[str]
    rows: Sequence[Sequence[object]]
    marked: int | None = None
    words: int | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart, drawn."""

    KIND: ClassVar[str] = "picture"
    chart: Chart

    def svg(self) -> Markup:
        """Return the chart as an `<svg>` element."""
        from markupsafe import Markup

        from .svg import to_svg

        return Markup(to_svg(self.chart))


Part = Heading | Paragraph | Cards | Table | Picture


@lru_cache
def environment(*folders: Path) -> Environment:
    """Return the environment of this package's templates, and of those in other folders.

    Here alone text becomes HTML: every expression of a template is escaped by jinja2, which
    is imported when the first page is made.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from .svg import writable

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


def document(title: str, parts: Iterable[Part]) -> str:
    """Return a whole page.

    Examples
    --------
    >>> page = document("A page", [Heading("<1>"), Paragraph("text")])
    >>> "<h2>&lt;1&gt;</h2>" in page
    True
    """
    return environment().get_template("page.html").render(title=title, parts=[*parts])


def fragment(parts: Iterable[Part]) -> str:
    """Return parts for a notebook's cell."""
    return environment().get_template("fragment.html").render(parts=[*parts])
