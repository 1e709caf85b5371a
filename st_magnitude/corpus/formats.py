"""Markdown, reStructuredText and HTML to plain text and sections, by markdown-it-py, docutils and lxml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from st_magnitude._checks import needs

__all__ = ["Section", "names", "parse_html", "parse_markdown", "parse_rst", "trim_lines"]


def names(text: str, separator: str | None = None) -> frozenset[str]:
    """The names in a text, by default those between whitespace."""
    return frozenset(name.strip() for name in text.split(separator))


@dataclass(frozen=True)
class Section:
    """A part of a document under its own heading.

    Attributes:
        title: The heading as plain text; empty for the part before the first heading.
        text: The text up to the next heading of any level. Subsections are sections of their own.
        level: Level of the heading; 1 is the highest in the document.
    """

    title: str
    text: str
    level: int = 1


class Heading(NamedTuple):
    """A heading among the lines (or paragraphs) of a document."""

    first: int
    """Index of its first line."""
    after: int
    """Index of the line after it."""
    title: str
    level: int


def trim_lines(text: str) -> str:
    """The text without blank lines around it; the indentation of its first line stays."""
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()


def _cut(lines: Sequence[str], headings: Sequence[Heading], separator: str = "\n") -> list[Section]:
    """The sections before the first heading and after each heading; an empty list if there are no headings."""
    if not headings:
        return []
    highest = min(heading.level for heading in headings)
    sections = [Section("", trim_lines(separator.join(lines[: headings[0].first])))]
    ends = [heading.first for heading in headings[1:]] + [len(lines)]
    for heading, end in zip(headings, ends, strict=True):
        text = trim_lines(separator.join(lines[heading.after : end]))
        sections.append(Section(" ".join(heading.title.split()), text, heading.level - highest + 1))
    return sections if sections[0].text else sections[1:]


# ---------------------------------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------------------------------

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?^---[ \t]*$\n?", re.M | re.S)
_ANCHOR = re.compile(r"\s*\{[#.:][^{}]*\}$")


def parse_markdown(text: str) -> tuple[str, list[Section]]:
    """Text without front matter, and its sections; the Markdown of the text stays as it is."""
    with needs("Reading Markdown", "revela"):
        from markdown_it import MarkdownIt
    text = _FRONT_MATTER.sub("", text, count=1)
    blocks = MarkdownIt("commonmark").disable("inline")  # of the text inside blocks, only headings are parsed
    inline = MarkdownIt("commonmark")
    headings = []
    tokens = blocks.parse(text)
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and not token.level and token.map:  # not in a quotation or a list
            title = _markdown_text(inline.parseInline(_ANCHOR.sub("", tokens[i + 1].content))[0].children or [])
            headings.append(Heading(token.map[0], token.map[1], title, int(token.tag[1])))
    headings = [heading for heading in headings if heading.title.strip()]
    return text, _cut(text.split("\n"), headings)


def _markdown_text(tokens: Sequence[Any]) -> str:
    kept = (token for token in tokens if token.type != "html_inline")
    return "".join(" " if token.type.endswith("break") else token.content for token in kept)


# ---------------------------------------------------------------------------------------------------------------------
# reStructuredText
# ---------------------------------------------------------------------------------------------------------------------

_LABEL = re.compile(r"^\.\. _[^:\n]+:[ \t]*\n", re.M)
_LINE_ENDS = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")  # lines end there for docutils, but not for us
_ROLE = re.compile(r":[\w:+.-]+:`[!~]?([^`<]*?)(?:\s*<[^<>`]*>)?`")  # Sphinx's, such as :mod:`os`
_RST_SETTINGS = {
    "report_level": 5,  # says nothing about mistakes
    "halt_level": 6,  # and never stops at one
    "file_insertion_enabled": False,  # directives that read files or URLs, such as include, do nothing
    "raw_enabled": False,
    "syntax_highlight": "none",
    "line_length_limit": 10**9,
}


def parse_rst(text: str) -> tuple[str, list[Section]]:
    """Text without labels, and its sections; the markup of the text stays as it is. No directive reads a file."""
    with needs("Reading .rst and .txt", "revela"):
        from docutils import nodes
        from docutils.frontend import get_default_settings
        from docutils.parsers.rst import Parser
        from docutils.parsers.rst.states import Inliner
        from docutils.utils import new_document
    text = _LABEL.sub("", text)
    lines = text.split("\n")
    inliner = Inliner()
    parse_inline = inliner.parse

    def with_line(text: str, lineno: int, memo: Any, parent: Any) -> tuple[list[Any], list[Any]]:
        """Notes the line of every piece of text, and parses its markup if it may be a title."""
        found = [nodes.Text(text)]
        if "\n" not in text and len(text) < 300:
            found, _ = parse_inline(_ROLE.sub(r"\1", text), lineno, memo, parent)
        return [nodes.inline(text, "", *found, line=lineno)], []

    inliner.parse = with_line  # type: ignore[method-assign]
    settings = get_default_settings(Parser)
    vars(settings).update(_RST_SETTINGS)
    document = new_document("text", settings)
    with suppress(RecursionError):  # hundreds of lists or quotations inside each other
        Parser(inliner=inliner).parse(_LINE_ENDS.sub(" ", text), document)
    headings = []
    for section in document.findall(nodes.section):
        title, level, above = section[0], 1, section.parent
        while isinstance(above, nodes.section):
            level, above = level + 1, above.parent
        line = title[0]["line"]  # counted from 1; the underline follows it
        overlined = line > 1 and lines[line - 2].strip() != "" and lines[line - 2].rstrip() == lines[line].rstrip()
        headings.append(Heading(line - 1 - overlined, line + 1, title.astext(), level))
    return text, _cut(lines, headings)


# ---------------------------------------------------------------------------------------------------------------------
# HTML
# ---------------------------------------------------------------------------------------------------------------------

_DROPPED = names(
    """
    script style nav footer header noscript template svg math button select textarea iframe
    """
)
_BLOCKS = names(
    """
    p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote figure figcaption address
    details summary form fieldset hr pre body html head h1 h2 h3 h4 h5 h6 title
    """
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_SEPARATORS = {"br": "\n", "td": " ", "th": " "}


def parse_html(text: str) -> tuple[str | None, str, list[Section]]:
    """Title, text and sections of a page, without scripts, styles, navigation, headers, footers and hidden parts."""
    with needs("Reading HTML", "revela"):
        from lxml import etree
    options = {"encoding": "utf-8", "remove_comments": True, "remove_pis": True, "huge_tree": True}
    root = etree.fromstring(f"<html>{text}".encode(), etree.HTMLParser(**options))
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
    headings: list[Heading] = []
    for block, group in groupby(pieces, key=lambda piece: piece[0]):
        joined = "".join(part for _, part in group)
        if block is None:
            continue
        if block.tag == "pre":
            joined = trim_lines(joined)
        else:
            joined = "\n".join(filter(None, (" ".join(line.split()) for line in joined.split("\n"))))
        if block.tag == "title":
            title = title or " ".join(joined.split())
        elif joined:
            if block.tag in _HEADINGS:
                headings.append(Heading(len(paragraphs), len(paragraphs) + 1, joined, _HEADINGS[block.tag]))
            paragraphs.append(joined)
    return title or None, "\n\n".join(paragraphs), _cut(paragraphs, headings, "\n\n")


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
