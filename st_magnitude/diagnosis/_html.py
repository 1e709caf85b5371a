"""HTML out of functions: every text is escaped, because nothing else can be put in.

element("p", "1 < 2 ", element("b", "!"), class_="note")    ->    <p class="note">1 &lt; 2 <b>!</b></p>
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence

from st_magnitude._plot import Picture

__all__ = ["Html", "citing", "document", "element", "picture", "table"]

_VOID = ("br", "img", "meta", "source")
# No request leaves the page, whatever is in it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --muted: #59616d; --ground: #fbfbfa; --card: #fff; --line: #dcdfe3;
  --do: #1b6b3f; --no: #59616d; --open: #a1440b; --link: #1a5fa0; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 0 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: 1rem 0 0; list-style: none; }
.note, figcaption, caption { color: var(--muted); font-size: .9rem; }
article { background: var(--card); border: 1px solid var(--line); border-left: .35rem solid var(--no);
  border-radius: .3rem; padding: .8rem 1rem; margin: .8rem 0; }
article.do { border-left-color: var(--do); }
article.open { border-left-color: var(--open); }
.verdict { display: inline-block; margin-right: .5rem; padding: 0 .5rem; border: 1px solid; border-radius: 1rem;
  font-size: .8rem; font-weight: 600; color: var(--no); }
.do .verdict { color: var(--do); }
.open .verdict { color: var(--open); }
.choice { font-weight: 600; }
code { font: .92em ui-monospace, monospace; }
dl { display: flex; flex-wrap: wrap; gap: .1rem 1.4rem; margin: .5rem 0 0; font-size: .9rem; }
dl div { display: flex; gap: .4rem; }
dt { color: var(--muted); }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem;
  align-items: start; margin: 1rem 0; }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .3rem; }
.figures.one { max-width: 33rem; }
figure img { display: block; width: 100%; height: auto; margin: 0 auto .4rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; padding-bottom: .3rem; max-width: calc(100vw - 2rem); }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
thead th { vertical-align: bottom; }
th:first-child, td.text, th.text { text-align: left; }
tbody th { font-weight: 400; }
@media (max-width: 34rem) {
  figure { padding: .4rem; }
  table { font-size: .82rem; }
  th, td { padding-right: .5rem; }
}
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e7e9ec; --muted: #a4abb5; --ground: #15181c; --card: #1c2025; --line: #353b43; --do: #6fd39b;
    --no: #a4abb5; --open: #ff9e5e; --link: #6db3f2; }
}
@media print {
  :root { color-scheme: light; --ground: #fff; font-size: 10pt; }
  body { max-width: none; padding: 0; }
  nav { display: none; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures.one { grid-template-columns: 1fr; max-width: 13cm; }
  article, figure, tr { break-inside: avoid; }
  h2, h3, caption, thead { break-after: avoid; }
  .table { overflow: visible; }
  a { color: inherit; }
}
"""


class Html(str):
    """Text that is HTML already."""


def element(tag: str, /, *children: str, **attributes: str) -> Html:
    """An element; a child is escaped unless it is Html, and an attribute always. ``class_`` is class.

    Example:
        >>> element("p", "1 < 2 ", element("b", "!"), class_="note")
        '<p class="note">1 &lt; 2 <b>!</b></p>'
    """
    given = "".join(f' {key.strip("_").replace("_", "-")}="{html.escape(v)}"' for key, v in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{''.join(map(_escape, children))}</{tag}>")


def citing(text: str) -> Html:
    """Text in which papers on arXiv are links.

    Example:
        >>> citing("x < 1 (arXiv 2602.09229, App. M)")
        'x &lt; 1 (<a href="https://arxiv.org/abs/2602.09229">arXiv 2602.09229</a>, App. M)'
    """
    return Html(re.sub(r"(arXiv (\d{4}\.\d{4,5}))", r'<a href="https://arxiv.org/abs/\2">\1</a>', _escape(text)))


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """A table whose first column names the rows; columns of words stand to the left, figures to the right."""
    kinds = [{} if any(map(_is_figure, column)) else {"class_": "text"} for column in zip(*rows, strict=True)]
    head = (element("th", name, scope="col", **kind) for name, kind in zip(header, kinds, strict=True))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, **kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    )
    return element(
        "div",
        element(
            "table",
            element("caption", citing(caption)),
            element("thead", element("tr", *head)),
            element("tbody", *body),
        ),
        class_="table",
        tabindex="0",  # so that keys can scroll it
        role="region",
        aria_label=caption,
    )


def picture(drawing: Picture, alt: str, caption: str) -> Html:
    """A figure in the colours of the page, and in the light ones on paper."""
    dark = element("source", media="screen and (prefers-color-scheme: dark)", srcset=_data(drawing.dark))
    light = element("img", src=_data(drawing.light), alt=alt)
    return element("figure", element("picture", dark, light), element("figcaption", citing(caption)))


def document(title: str, *parts: str) -> str:
    """A whole page, in one file."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    body = element("body", element("main", *parts))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _escape(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def _data(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _is_figure(text: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.,]+(e[-+]\d+)? ?[%x]?", text) is not None
