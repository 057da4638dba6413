"""`multistage demo`: demonstrations on real data; `multistage.demos` holds them."""

from __future__ import annotations

from ..demos import lstm_demo, torch_lstm, wave_demo
from .options import Commands


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    demo = commands.add_parser("demo", help="run a demonstration on real data")
    demos = demo.add_subparsers(dest="demo", required=True, metavar="NAME")
    for each in (lstm_demo, wave_demo, torch_lstm):
        each.add(demos)
