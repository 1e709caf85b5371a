"""From a docstring to its summary, the chunks of its description and the chunks of its other
sections.

griffe finds the sections (numpydoc, Google and Sphinx styles). This module adds what is specific to
the task: which of them are boilerplate, how a description is separated from the code samples in it,
and how chunks are made.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import griffe

__all__ = ["MIN_WORDS", "first_sentence", "split_docstring"]

MIN_WORDS = 8  # a chunk with fewer words is a fragment
MAX_WORDS = 60  # of a chunk
_MAX_SECTION_CHUNKS = 2

_KNOWN_TITLES = (
    r"Args|Arguments|Parameters|Params|Keyword Args|Keyword"
    r" Arguments|Attributes|Returns?|Yields?|Raises|Examples?"
)
_BOILERPLATE_TITLE = re.compile(
    rf"(?:{_KNOWN_TITLES}|usage|example usage|basic usage|doctests?|see["
    r" -]also|related|references?|citations?|links?|"
    r"exceptions?|warns|kwargs|methods|properties|fields|options|routine listings|call"
    r" signatures?|signature|"
    r"(?:expected )?(?:in|out)puts?|shapes?|types?|dtypes?|default"
    r" config|tests?|todo|authors?|copyright|license):*",
    re.I,
)
_DIRECTIVE = re.compile(r"\.\. ([\w:-]+)::")
_PROSE = "note warning tip hint important attention caution danger admonition topic"
_CODE = "code code-block sourcecode ipython plot doctest testcode parsed-literal"
_DIRECTIVE_KINDS = dict.fromkeys(_PROSE.split(), "prose")
_DIRECTIVE_KINDS |= dict.fromkeys(_CODE.split(), "code")
_FENCE = re.compile(r"^( *)(```|~~~).*\n([\s\S]*?)(?:^ *\2.*|\Z)", re.M)
# in this order: numpydoc may contain a line such as "Warning:"
_STYLES: Any = ["numpy", "sphinx", "google"]
_OPTIONS: Any = {
    "google": {"warnings": False, "returns_multiple_items": False, "returns_named_value": False},
    "numpy": {"warnings": False},
    "sphinx": {"warnings": False},
}


def split_docstring(docstring: str) -> tuple[str, list[str], list[str]]:
    """Summary, chunks of the description, and chunks of the boilerplate of a docstring, without
    markup.

    Notes and warnings belong to the description; parameters, returned values, exceptions,
    cross-references, literature, examples and code samples are boilerplate. "See foo for details",
    deprecations, version notes and chunks of fewer than eight words are left out.

    Example:
        >>> text = "Overflow wraps around silently, as it does in C, for all integer types."
        >>> parameter = ":param a: The first of the two numbers, an integer."
        >>> summary, found, others = split_docstring(f"Add two.\\n\\n{text}\\n\\n{parameter}")
        >>> summary, found == [text], others
        ('Add two.', True, ['a: The first of the two numbers, an integer.'])
    """
    sentences: list[str] = []  # the first is the summary
    boilerplate: list[str] = []
    entries: list[str] = []  # of the current section, and of short sections before it
    for is_boilerplate, blocks in groupby(_blocks(docstring), key=lambda block: block[0]):
        texts = [_plain(text) for _, text in blocks]
        if not is_boilerplate:
            sentences += [
                sentence for text in texts for sentence in _SENTENCE_END.split(text) if sentence
            ]
            continue
        entries += filter(None, texts)
        if len(" ".join(entries).split()) >= MIN_WORDS:
            chunks = _pack(entries)[:_MAX_SECTION_CHUNKS]
            boilerplate += [chunk for chunk in chunks if len(chunk.split()) >= MIN_WORDS]
            entries = []
    summary, rest = (sentences[0], sentences[1:]) if sentences else ("", [])
    prose = _pack(sentence for sentence in rest if not _DEBRIS.match(sentence))
    return summary, [chunk for chunk in prose if _is_prose(chunk)], boilerplate


def first_sentence(docstring: str) -> str:
    """The summary of a docstring, found without parsing the rest of it."""
    return _SENTENCE_END.split(_plain(inspect.cleandoc(docstring).partition("\n\n")[0]))[0]


def _blocks(docstring: str) -> Iterator[tuple[Any, str]]:
    """Paragraphs and entries in their order, each with a falsy key (prose) or the number of its
    boilerplate section."""
    text = inspect.cleandoc(docstring)
    # griffe wants one blank line above the title of a Google section and none below it.
    text = re.sub(rf"\n+((?:{_KNOWN_TITLES}):)\n+(?= )", r"\n\n\1\n", text)
    has_fields = re.search(r"^:(?:param|return|rtype|raise)", text, re.M)
    sections = griffe.parse_auto(
        griffe.Docstring(text),
        style_order=_STYLES,
        default="sphinx" if has_fields else "numpy",
        per_style_options=_OPTIONS,
    )
    for number, section in enumerate(sections, start=1):
        value: Any = section.value
        if section.kind is griffe.DocstringSectionKind.text:
            yield from _paragraphs(value, number)
        elif section.kind is griffe.DocstringSectionKind.admonition:
            if _BOILERPLATE_TITLE.fullmatch((section.title or "").strip()):
                yield from ((number, paragraph) for paragraph in value.description.split("\n"))
            else:
                yield from _paragraphs(value.description, number)
        elif section.kind is griffe.DocstringSectionKind.examples:
            yield from ((number, example) for _, example in value)
        elif section.kind is not griffe.DocstringSectionKind.deprecated:
            yield from ((number, _entry(item)) for item in value)


def _entry(item: Any) -> str:
    """One parameter, returned value or exception on a line, in the same form whatever the style of
    the docstring."""
    name, annotation = getattr(item, "name", ""), str(item.annotation or "")
    head = f"{name} ({annotation})" if name and annotation else name or annotation
    return ": ".join(filter(None, (head, item.description)))


def _paragraphs(text: str, section: int) -> Iterator[tuple[Any, str]]:
    """The paragraphs of running text; code samples get a key of their own, comments and tables are
    dropped."""
    text = _FENCE.sub(_as_directive, text)
    # the directive or "::" that more deeply indented paragraphs belong to
    owner_indent, owner_kind = 0, "prose"
    for number, paragraph in enumerate(
        re.split(r"\n\s*\n|\n(?=\s*(?:[-*•] |\.\. ))", text.strip("\n"))
    ):
        first, _, rest = paragraph.strip("\n").partition("\n")
        indent, first = len(first) - len(first.lstrip()), first.strip()
        if indent <= owner_indent:
            owner_kind = "prose"
        kind = "code" if first.startswith((">>>", "In [")) else owner_kind
        if first.startswith(".. "):
            directive = _DIRECTIVE.match(first)
            kind = _DIRECTIVE_KINDS.get(directive[1], "dropped") if directive else "dropped"
            owner_indent, owner_kind = indent, kind
            first = first[directive.end() :] if directive and kind == "prose" else ""
        body = f"{first}\n{rest}".strip()
        if kind == "prose" and body.endswith("::"):
            owner_indent, owner_kind = indent, "code"
            body = f"{body[:-2]}."
        if kind == "dropped" or _BOILERPLATE_TITLE.fullmatch(body) or _TABLE.match(first):
            continue
        yield (None if kind == "prose" else (section, number)), body


def _as_directive(fence: re.Match[str]) -> str:
    """Fenced code as a reStructuredText directive, without blank lines."""
    lines = [line for line in fence[3].splitlines() if line.strip()]
    return "\n".join(["", f"{fence[1]}.. code::", *(f"{fence[1]}    {line}" for line in lines), ""])


_MARKUP = (
    (re.compile(r"</?[a-zA-Z][^<>\n]{0,80}>"), " "),  # HTML
    (re.compile(r"!?\[([^\[\]]*)\]\((?:[^()]|\([^()]*\))*\)"), r"\1"),  # [text](target)
    # :class:`~module.Name`
    (re.compile(r"\[?(?::[\w:+-]+:)?`+~(?:[^`<>]*\.)?([^`.]*)`+\]?"), r"\1"),
    # :ref:`text <target>`, `text <url>`_
    (re.compile(r"(?::[\w:+-]+:)?`+!?([^`<>]+?)\s*<[^`>]+>`+_{0,2}"), r"\1"),
    (re.compile(r":[a-z][\w:+-]*:(?=`)"), ""),  # :role:
    (re.compile(r"\[`+([^`]*)`+\]"), r"\1"),  # [`Name`]
    (re.compile(r"`+~?([^`]*)`+_{0,2}"), r"\1"),  # `code`
    (re.compile(r"\s?\[[#\w*]{1,12}\]_"), ""),  # [1]_
    (re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])"), r"\1"),  # *emphasis*
    # doctest prompts, .. [1]
    (re.compile(r"^\s*(?:[>.]{3}|In \[\d+\]:|\.\. (?=\[))(?= |$|\[)", re.M), ""),
    (re.compile(r"^\s*>(?: |$)(?:\[!\w+\])?", re.M), ""),  # quoted lines
    (re.compile(r"^\s*[-*•] "), ""),
    (re.compile(r"\s+"), " "),
)
_TABLE = re.compile(r"[-=+|\s:]{4,}$|\|.*\|$|[+|].*[+|]$")
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!cf\.)\)?\s+(?=[\"'(\[]?[A-Z0-9])"
)
_DEBRIS = re.compile(
    r"\(?(?:please |also |but |and )*(?:see|refer to|cf\.?|compare|consult)\b.{0,140}$"
    r"|(?:for|more|further|full|additional|detailed|complete) (?:more |further |additional |full"
    r" |complete |a |the )*"
    r"(?:details?|information|documentation|descriptions?|examples?|explanations?|usage|list)\b.{0,60}"
    r"\b(?:see|refer|can be found|is available|are available|visit|check|in the)\b.*$"
    r"|(?:read|learn|find)(?: \w+)? (?:more|out) .{0,120}$"
    r"|.{0,60}\b(?:deprecated|new in version|(?:removed|added) in (?:version|v?\d)|changed in"
    r" version)\b.*$"
    r"|(?:an? )?(?:alias|synonym|shorthand|shortcut|equivalent|identical|inherited|same)"
    r" (?:of|for|to|as|from)\b"
    r".{0,60}$"
    r"|(?:this|the) (?:function|method|class|docstring|page|section) (?:was|is)"
    r" (?:copied|inherited|an alias)\b.*$"
    r"|(?:copyright|licensed under|author:|version:|todo|fixme|xxx)\b.*$",
    re.I,
)


def _plain(text: str) -> str:
    """Text without reStructuredText and Markdown markup, on one line."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def _pack(pieces: Iterable[str]) -> list[str]:
    """Joins pieces to chunks of at most ``MAX_WORDS`` words and cuts pieces that are longer."""
    chunks: list[list[str]] = [[]]
    for piece in pieces:
        words = piece.split()
        if chunks[-1] and len(chunks[-1]) + len(words) > MAX_WORDS:
            chunks.append([])
        chunks[-1] += words
        while len(chunks[-1]) > MAX_WORDS:
            chunks[-1:] = [chunks[-1][:MAX_WORDS], chunks[-1][MAX_WORDS:]]
    return [" ".join(words) for words in chunks if words]


def _is_prose(chunk: str) -> bool:
    """Whether a chunk reads as text: enough words, most of them in letters."""
    words = chunk.split()
    plain = sum(word.strip(".,;:()!?'\"-").isalpha() for word in words)
    return len(words) >= MIN_WORDS and plain >= 0.7 * len(words)
