"""Rewrite the tables of docs/reproduce.md from a run's `all.json`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`: `run` is where
and how it was measured, the ids of papers are their claims, `ours` the other
benchmarks.  Everything else on the page is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.catalog import CATALOG
from benchmarks.claims import Judged, load, number

_MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.S)


def rewrite(path: Path, data: dict[str, Any]) -> None:
    """Rewrite the tables of a page.

    Raises
    ------
    ValueError
        If the page names a table that there is not.
    """
    fill(path, lambda name: _table(name, data))


def fill(path: Path, made: Callable[[str], str]) -> None:
    """Rewrite what stands between the marks of a page."""
    text = path.read_text(encoding="utf-8")
    path.write_text(_MARKED.sub(lambda m: m[1] + made(m[2]) + m[3], text), encoding="utf-8")


def _table(name: str, data: dict[str, Any]) -> str:
    if name == "run":
        return _run(data)
    if name == "ours":
        return _ours(data)
    if name not in load()["papers"]:
        raise ValueError(f"table {name!r} is not known; use run, ours or the id of a paper")
    rows = [("where", "claim", "published", "measured here", "", "how, and where it differs why")]
    for claim in judged_of(data):
        if claim.claim["paper"] != name:
            continue
        place = f"{claim.claim['item']}, {claim.claim['place']}"
        sign = {"agrees": "agrees", "differs": "**differs**"}.get(claim.verdict, claim.verdict)
        published = claim.published_text
        if claim.claim["source"] == "figure" and claim.claim["published"] is not None:
            published += " (read off the figure)"
        rows.append((place, claim.claim["claim"], published, claim.measured_text, sign, claim.note))
    return markdown(rows)


def judged_of(data: dict[str, Any]) -> list[Judged]:
    """Return the judged claims that `all.json` holds."""
    return [
        Judged(
            {k: v for k, v in claim.items() if k not in ("value", "verdict")},
            claim["verdict"],
            claim["value"],
        )
        for claim in data["claims"]
    ]


def _run(data: dict[str, Any]) -> str:
    machine = data["machine"]
    loads = [r["load_before"][0] for r in data["benchmarks"].values() if r.get("load_before")]
    versions = ", ".join(
        f"{name} {version}"
        for name, version in machine["versions"].items()
        if version != "not installed"
    )
    load_text = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "not known"
    return (
        f"`--{data['mode']}` on {machine['processor'] or 'a processor without a name'}, "
        f"{machine['cores']} cores; {versions}; load before each benchmark {load_text}.\n"
    )


def _ours(data: dict[str, Any]) -> str:
    rows = [("benchmark", "what", "ratios")]
    for entry in CATALOG:
        record = data["benchmarks"].get(entry.name, {"status": "not run"})
        if entry.items:
            continue
        found = record.get("ratios", {})
        text = ", ".join(
            f"{key} {value if isinstance(value, str) else number(value)}"
            for key, value in list(found.items())[:8]
        )
        reason = f": {record['reason']}" if "reason" in record else ""
        rows.append((f"`{entry.name}`", entry.title, text or f"{record['status']}{reason}"))
    return markdown(rows)


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as a table, the first as its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
