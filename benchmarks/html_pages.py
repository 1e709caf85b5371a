"""HTML pages with their sections, for the studies that read Python's documentation from a Debian package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from lxml import etree
from titles import Page, Section

from st_magnitude.revela.documents import trim_lines

_HIDDEN_TAGS = "script style nav footer header noscript template svg math button select textarea iframe"
_DROPPED = frozenset(_HIDDEN_TAGS.split())
_BLOCK_TAGS = """
    p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote figure figcaption address
    details summary form fieldset hr pre body html head h1 h2 h3 h4 h5 h6 title
"""
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_SEPARATORS = {"br": "\n", "td": " ", "th": " "}


def parse(text: str) -> tuple[str | None, str, list[Section]]:
    """Title, text and sections of a page, without scripts, styles, navigation, headers, footers and hidden parts."""
    parser = etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    root = etree.fromstring(f"<html>{text}".encode(), parser)
    blocks: list[Any] = [root]  # the closest block of every open tag; None inside of what is dropped
    pieces: list[tuple[Any, str]] = []  # a block, and text in it
    for event, tag in etree.iterwalk(root, events=("start", "end")):
        if event == "start":
            block = blocks[-1]
            if block is not None and _is_dropped(tag):
                block = None
            elif block is not None and tag.tag in _BLOCKS and block.tag != "pre":
                block = tag
            blocks.append(block)
            pieces.append((block, _SEPARATORS.get(tag.tag, "") + _spaced(tag.text, block)))
        else:
            blocks.pop()
            pieces.append((blocks[-1], _spaced(tag.tail, blocks[-1])))
    title = ""
    paragraphs: list[str] = []
    headings: list[tuple[int, str, int]] = []  # place, title, level
    for block, group in groupby(pieces, key=lambda piece: piece[0]):
        if block is None:
            continue
        joined = "".join(part for _, part in group)
        if block.tag == "pre":
            joined = trim_lines(joined)
        else:
            joined = "\n".join(filter(None, (" ".join(line.split()) for line in joined.split("\n"))))
        if block.tag == "title":
            title = title or " ".join(joined.split())
        elif joined:
            if re.fullmatch("h[1-6]", block.tag):
                headings.append((len(paragraphs), joined, int(block.tag[1])))
            paragraphs.append(joined)
    return title or None, "\n\n".join(paragraphs), _sections(paragraphs, headings)


def _is_dropped(tag: Any) -> bool:
    return (
        tag.tag in _DROPPED
        or tag.get("role") in ("navigation", "search")
        or tag.get("aria-hidden") == "true"
        or "hidden" in tag.attrib
        or "headerlink" in tag.get("class", "").split()
    )


def _spaced(text: str | None, block: Any) -> str:
    """Text with single spaces for all white space, except in ``pre``."""
    return text or "" if block is not None and block.tag == "pre" else re.sub(r"\s+", " ", text or "")


def read_pages(folder: str | Path) -> Iterator[Page]:
    """The pages of a folder and its subfolders, sorted by name."""
    folder = Path(folder)
    names = sorted(file.relative_to(folder) for file in folder.rglob("*.html"))
    for name in names:
        if any(part.startswith(".") for part in name.parts):
            continue
        title, text, sections = parse((folder / name).read_text(encoding="utf-8-sig"))
        if text.strip():
            highest = [section.title for section in sections if section.title and section.level == 1]
            yield Page(text, name.as_posix(), highest[0] if highest else title, sections=tuple(sections))


def _sections(paragraphs: list[str], headings: list[tuple[int, str, int]]) -> list[Section]:
    """The sections before the first heading and after each heading; an empty list if there are no headings."""
    if not headings:
        return []
    highest = min(level for *_, level in headings)
    found = [Section("", trim_lines("\n\n".join(paragraphs[: headings[0][0]])))]
    ends = [first for first, *_ in headings[1:]] + [len(paragraphs)]
    for (first, title, level), end in zip(headings, ends, strict=True):
        text = trim_lines("\n\n".join(paragraphs[first + 1 : end]))
        found.append(Section(" ".join(title.split()), text, level - highest + 1))
    return found if found[0].text else found[1:]
