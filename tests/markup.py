"""Pages: well formed, and nothing in them fetches or runs anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_EMPTY = frozenset({"meta", "br"})


class Checker(HTMLParser):
    """Keeps the tree's balance, and what could fetch or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.faults: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _EMPTY and tag != "img":
            self.open.append(tag)
        fetching = ("src", "href", "xlink:href", "action", "data", "srcset")
        for name, value in attrs:
            embedded = tag == "img" and (value or "").startswith("data:")
            if name.startswith("on") or (name in fetching and not embedded):
                self.faults.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(text: str) -> Checker:
    """Return what a page holds; it must parse, fetch nothing and run nothing."""
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == [] and checker.faults == []
    assert not checker.tags & {"script", "link", "iframe", "object", "embed", "base"}
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    assert "url(" not in styles and "@import" not in styles
    assert "\x00" not in text and "\x1b" not in text
    text.encode()  # no lone surrogate
    return checker
