"""Pictures and pages of plans and runs.

`timeline`, `schedule` and `tradeoff` say what a picture shows (`chart`); `svg`
and `figure` draw it; `page` makes pages of HTML of pictures and tables, `plans`
those of plans.  Users reach them as methods: `picture`, `save` and
`_repr_html_` of plans and reports.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ArgumentError
from .chart import Chart
from .svg import to_svg


def save_chart(chart: Chart, path: str | Path) -> None:
    """Draw a chart to a file: .svg by ourselves, .png, .pdf and others with matplotlib.

    Raises
    ------
    ArgumentError
        If matplotlib is needed and not installed, or does not know the suffix.
    """
    suffix = Path(path).suffix[1:].lower()
    if suffix == "svg":
        Path(path).write_text(to_svg(chart, alone=True), encoding="utf-8")
        return
    from .figure import DPI, to_figure

    figure = to_figure(chart)
    known = figure.canvas.get_supported_filetypes()
    if suffix and suffix not in known:
        raise ArgumentError(
            f"picture {str(path)!r} ends in .{suffix}; use one of {', '.join(sorted(known))}"
        )
    figure.savefig(path, dpi=DPI)


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
