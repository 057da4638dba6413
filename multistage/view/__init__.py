"""Pictures and pages of plans and runs.

`timeline` says what a picture of a run shows, `planners/pages.py` what those of plans
show, as a `chart`; `svg` draws it; `page` holds the parts of pages, which the templates make
HTML.  Users reach them as methods: `picture`, `save` and `_repr_html_` of plans and reports.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ArgumentError
from .chart import Chart

# Pixels of a `.png` for each pixel of a page.
_SCALE = 1.5
_CONVERTED = ("png", "pdf", "ps", "eps")
SUFFIXES = (".svg", *(f".{each}" for each in _CONVERTED))


def save_chart(chart: Chart, path: str | Path) -> None:
    """Draw a chart to a file: `.svg`, or converted from that to `.png`, `.pdf`, `.ps` or `.eps`.

    Raises
    ------
    ArgumentError
        For another suffix; if CairoSVG, which converts, or the cairo library is missing.
    """
    from .svg import to_svg

    suffix = Path(path).suffix[1:].lower()
    if suffix == "svg":
        Path(path).write_text(to_svg(chart, alone=True), encoding="utf-8")
        return
    if suffix not in _CONVERTED:
        raise ArgumentError(
            f"picture {str(path)!r} ends in {'.' + suffix if suffix else 'no suffix'}; use .svg, "
            f"or one of {', '.join('.' + each for each in _CONVERTED)} with CairoSVG"
        )
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # OSError: CairoSVG without the cairo library
        raise ArgumentError(
            f".{suffix} pictures need CairoSVG and the cairo library ({error}); pip install "
            "'multistage-checkpointing[report]', or draw to .svg, which needs nothing"
        ) from error
    convert = getattr(cairosvg, f"svg2{suffix}")
    convert(to_svg(chart, alone=True).encode(), write_to=str(path), scale=_SCALE)


def save_text(path: str | Path, **made: str) -> None:
    """Write what belongs to the suffix of `path`: `html=` or `json=`.

    Raises
    ------
    ArgumentError
        For another suffix.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix not in made:
        raise ArgumentError(
            f"{str(path)!r} ends in {'.' + suffix if suffix else 'no suffix'}; use "
            f"{' or '.join('.' + each for each in made)} here, and picture() for pictures"
        )
    Path(path).write_text(made[suffix], encoding="utf-8")
