"""A diagnosis in the terminal and as a page: its figures, sound HTML, and its look in a browser."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from _planted import model_of, planted, quick, small, table_of, unit
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude.diagnosis.findings import Diagnosis
from st_magnitude.diagnosis.page import measurements, write_page
from st_magnitude.result import cell

pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "<script>alert(\"x\")</script> & 'co'"
VOID = {"br", "img", "meta", "source"}


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return small()


class Page(HTMLParser):
    """Elements with their attributes and text; complains where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []  # (innermost element, text)
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return "".join(text for tag, text in self.texts if tag != "style")


def read(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nasty(found) -> Diagnosis:
    """A diagnosis with markup in every text from outside."""
    texts = dict.fromkeys(("action", "choice", "reason", "gain_of"), NASTY)
    return replace(
        found,
        model=NASTY,
        similarity=NASTY,
        settings=found.settings | {"title": "", NASTY: NASTY},
        recommendations=[replace(r, **texts) for r in found.recommendations],
    )


@pytest.fixture(scope="module")
def written(nasty, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "mine.txt").write_text("mine")
    return write_page(nasty, folder)


@pytest.fixture(scope="module")
def page(written) -> Page:
    return read(written)


def test_text_and_json():
    model, *task = planted(0, "relevance", normalize=True)
    found = quick(model, *task)
    short, long = str(found), measurements(found)
    assert max(map(len, (*short.splitlines(), *long.splitlines()))) <= 80
    assert "scored by cosine (recommended: exponents 1 and" in short
    assert short.index("\n[do] Score with document exponent") < short.index("\n[not enough data]")
    assert cell(found.cohens_d) in long
    assert "nan" not in short + long
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["documents"]["values"] == found.documents.values.tolist()
    assert back["exponent"]["per_query"] == found.exponent.per_query.tolist()
    assert back["recommendations"][0]["gain"] == list(found["exponent"].gain)


def test_structure(page):
    assert page.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert (headings[0], headings.count(1)) == (1, 1)
    assert all(b <= a + 1 for a, b in pairwise(headings))
    assert len(page.all("table")) == len(page.all("caption")) == 4
    assert all(len(image["alt"]) > 20 for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 6
    assert [link["href"] for link in page.all("a")] == [f"#{i}" for i in ids]


def test_one_file_without_requests_or_foreign_markup(page, written):
    targets = [a[name] for _, a in page.elements for name in ("src", "href") if name in a]
    assert all(re.match("data:image/|#", target) for target in targets)
    style = next(text for tag, text in page.texts if tag == "style")
    assert not re.search(r"url\(|@import", style)
    policies = {meta.get("http-equiv"): meta.get("content") for meta in page.all("meta")}
    assert "default-src 'none'" in policies["Content-Security-Policy"]
    assert not {"link", "iframe", "object", "embed", "script"} & {tag for tag, _ in page.elements}
    assert "on" not in {key[:2] for _, attributes in page.elements for key in attributes}
    assert dict(page.texts)["title"] == dict(page.texts)["h1"] == f"Diagnosis of {NASTY}"
    assert page.text.count(NASTY) > 20
    assert {path.name for path in written.parent.iterdir()} == {"report.html", "mine.txt"}
    assert len({image["src"] for image in page.all("img")}) == 2


def test_every_figure_is_on_the_page(found, tmp_path):
    page = read(write_page(found, tmp_path))
    assert dict(page.texts)["h1"] == "a title"
    verdicts = [text for tag, text in page.texts if tag == "span"]
    assert verdicts == sorted(verdicts, key=["Do", "No benefit expected", "Not enough data"].index)
    assert len(verdicts) == len(found.recommendations)
    for r in found.recommendations:
        assert all(text in page.text for text in (r.action, r.reason, r.choice, r.measured))
    assert page.text.index(found["centring"].action) < page.text.index("Norms of documents")

    cells = {text for tag, text in page.texts if tag in ("td", "th")}
    d, g = found.documents, found.geometry
    expected = [
        *(found.cohens_d, found.adjusted_cohens_d),
        *(d.mean, d.cv, *d.quantiles, *found.queries.quantiles, d.length_spearman),
        *(g.isoscore, g.isoscore_ceiling, g.mean_cosine),
        *(c.ndcg for c in found.cells),
        *(found.model, "st-magnitude", "0.02"),
    ]
    assert not [value for value in expected if cell(value) not in cells]
    assert "nan" not in re.findall(r"\w+", page.text)


def test_without_magnitude_no_norm_is_drawn(tmp_path):
    model, queries, corpus, relevant = planted(0, "relevance", num_queries=30)
    flat = model_of({text: unit(x) for text, x in table_of(model).items()})
    answers = {key: text for key, text in corpus.items() if key.endswith("-0")}
    page = read(write_page(quick(flat, queries, answers, relevant), tmp_path))
    assert "All norms are 1" in page.text
    assert len(page.all("img")) == 1


def test_tiny_and_infinite(tmp_path):
    """All documents relevant alike, one dimension or few, an effect that is infinite."""
    model = SentenceTransformer(modules=[BoW(["bee"])], similarity_fn_name="dot", device="cpu")
    queries = {f"q{i}": "bee" for i in range(2)}
    corpus = {f"d{i}": "bee " * (2 if i < 2 else 1) for i in range(4)}
    found = quick(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(2)})
    assert found.cohens_d == math.inf
    found.save(tmp_path / "new" / "d.json")
    assert json.loads((tmp_path / "new" / "d.json").read_text())["cohens_d"] == "inf"
    assert "inf" in read(write_page(found, tmp_path)).text


def test_nothing_is_written_without_matplotlib(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="plot"):
        write_page(found, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is on PATH")
@pytest.mark.parametrize("width", [320, 1100])
def test_nothing_is_wider_than_the_page(written, tmp_path, width):
    """The page is shown in a frame of a width, because browsers' own windows have a least width."""
    script = (
        "{wide: d.documentElement.scrollWidth, over: [...d.querySelectorAll('p, h1, h2, h3, "
        f"figure, article, li, caption')].filter(e => e.getBoundingClientRect().right > {width} + "
        "1).map(e => e.textContent), images: [...d.images].map(i => i.naturalWidth)}"
    )
    frame = tmp_path / "frame.html"
    text = json.dumps(written.read_text(encoding="utf-8")).replace("</", "<\\/")
    frame.write_text(
        f"<!doctype html><body><iframe id=f style='width:{width}px;height:900px;border:0'></iframe>"
        "<pre id=out></pre><script>f.onload = () => { const d = f.contentDocument; "
        f"out.textContent = JSON.stringify({script}); }};f.srcdoc = {text};</script>",
        encoding="utf-8",
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--user-data-dir={tmp_path}/profile", "--window-size=1200,900"]
    options += ["--virtual-time-budget=5000", "--dump-dom", f"file://{frame}"]
    run = subprocess.run([CHROMIUM, *options], capture_output=True, timeout=300, text=True)
    found = json.loads(re.search(r'<pre id="out">(.*?)</pre>', run.stdout, re.DOTALL)[1])
    assert (found["wide"], found["over"]) == (width, [])
    assert len(found["images"]) == 2
    assert min(found["images"]) > 100
