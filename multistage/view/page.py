"""Pages of HTML: one file, no script, nothing fetched, light or dark as the reader has it.

A page is a list of parts, each a piece of HTML made here; whatever text comes
from elsewhere passes through `escaped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .chart import Chart
from .svg import escaped, to_svg

# Nothing may be loaded or run, whatever a page comes to hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_TABLES = """\
.multistage table{border-collapse:collapse;margin:.4rem 0;font-variant-numeric:tabular-nums}
.multistage th,.multistage td{padding:.2rem .7rem;text-align:right;white-space:nowrap;\
border-bottom:1px solid color-mix(in srgb,currentColor 15%,transparent)}
.multistage th{font-weight:600}
.multistage .first,.multistage .words{text-align:left}
.multistage .words{white-space:normal;min-width:12rem}
.multistage .marked{font-weight:600;background:color-mix(in srgb,currentColor 9%,transparent)}
.multistage .wide{overflow-x:auto}
.multistage svg{display:block;width:100%;min-width:620px;max-width:1000px;height:auto}
"""
_PAGE = """\
:root{color-scheme:light dark;--ground:#fff;--ink:#1b1f24;--soft:#5b6570;--card:#f3f5f7}
@media (prefers-color-scheme:dark){\
:root{--ground:#14171b;--ink:#e4e7ea;--soft:#a0a9b2;--card:#1f242a}}
@media print{:root{--ground:#fff;--ink:#000;--soft:#444;--card:#eee}}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1.2rem}
h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:1.8rem 0 .4rem}
p{margin:.4rem 0;overflow-wrap:anywhere}
.soft,footer{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:.7rem;\
margin:1rem 0}
.cards div{background:var(--card);border-radius:8px;padding:.6rem .8rem}
.cards b{display:block;font-size:1.25rem}
.cards span{color:var(--soft);font-size:.85rem}
.alert{border-left:4px solid #d23b68;padding:.3rem .8rem;background:var(--card)}
footer{margin-top:2.5rem;font-size:.85rem}
"""


def heading(text: str) -> str:
    """Return a heading."""
    return f"<h2>{escaped(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph for each line: plain, "soft" or "alert"."""
    attribute = f' class="{kind}"' if kind else ""
    return "".join(f"<p{attribute}>{escaped(line)}</p>" for line in text.split("\n") if line)


def cards(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return figures that stand out: what, how much, a remark."""
    found = (
        f"<div><span>{escaped(what)}</span><b>{escaped(much)}</b><span>{escaped(more)}</span></div>"
        for what, much, more in entries
    )
    return f'<div class="cards">{"".join(found)}</div>'


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    marked: int | None = None,
    words: int | None = None,
) -> str:
    """Return a table: the first column to the left, one row marked, one column of words."""

    def cell(kind: str, k: int, value: object) -> str:
        name = "words" if k == words else "first" if k == 0 else ""
        attribute = f' class="{name}"' if name else ""
        return f"<{kind}{attribute}>{escaped(value)}</{kind}>"

    head = "".join(cell("th", k, text) for k, text in enumerate(headers))
    body = [
        ('<tr class="marked">' if number == marked else "<tr>")
        + "".join(cell("td", k, value) for k, value in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    ]
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def picture(chart: Chart) -> str:
    """Return a chart, drawn."""
    return f'<div class="wide">{to_svg(chart)}</div>'


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page."""
    name = escaped(title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_PAGE}{_TABLES}</style></head>\n"
        f'<body><main class="multistage"><h1>{name}</h1>\n'
        + "\n".join(parts)
        + "\n<footer>multistage</footer></main></body></html>\n"
    )


def fragment(parts: Iterable[str]) -> str:
    """Return parts for a notebook's cell."""
    return f'<div class="multistage"><style>{_TABLES}</style>{"".join(parts)}</div>'
