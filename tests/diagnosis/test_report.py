"""write_report: what is on the page, that it is sound HTML, and that a browser shows it, light, dark and narrow."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from _planted import found_beside_a_baseline, model_of, planted, quick, table_of, unit
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import Diagnosis
from st_magnitude._plot import Picture
from st_magnitude.diagnosis import report
from st_magnitude.diagnosis.report import write_report
from st_magnitude.diagnosis.sections import Section, sections
from st_magnitude.evaluation import CompressionCell

pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
NASTY = "<script>alert(\"x\")</script> & 'co'"
LOG = [
    *({"step": s, "epoch": s / 40, "loss": 40.0 / s, "learning_rate": 1e-5, "query_norm_mean": 1.0 + s, "x": NASTY}
      for s in (10, 20, 30, 40)),
    *({"step": s, "eval_loss": 2.0, "eval_dev_ndcg@10": s / 100, "eval_runtime": 3.0, NASTY: 1.0} for s in (20, 40)),
]  # fmt: skip
CELLS = [
    CompressionCell(16, "float32", "none", 64, 0.5, 1.0),
    CompressionCell(16, "binary", "query", 2, 0.45, 0.9),
    CompressionCell(8, "int8", "none", 8, 0.3, 0.6),
]
VOID = {"br", "img", "meta", "source"}


@pytest.fixture(scope="module")
def found():
    return found_beside_a_baseline()


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


def draw_once(paint, size):
    """Draws a figure without files: for tests that read the page only."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=size)
    paint(axis)
    plt.close(figure)
    return Picture(b"light", b"dark", b"\x89PNG")


@pytest.fixture
def sketch(monkeypatch):
    monkeypatch.setattr(report, "draw", draw_once)


@pytest.fixture(scope="module")
def nasty(found) -> Diagnosis:
    """Every text in it that comes from outside has markup."""
    return replace(
        found,
        similarity=NASTY,
        provenance=replace(found.provenance, title="", model=NASTY, baseline=NASTY, versions={NASTY: NASTY}),
        symmetry=replace(found.symmetry, reason=NASTY),
        effects={name: replace(effect, undefined=NASTY) for name, effect in found.effects.items()},
        recommendations=[
            replace(r, action=NASTY, choice=NASTY, reason=NASTY, gain_of=NASTY, evidence={NASTY: 1.0})
            for r in found.recommendations
        ],
        baseline=replace(found.baseline, similarity=NASTY),
    )


@pytest.fixture(scope="module")
def written(nasty, tmp_path_factory):
    """The report of the nasty one, with everything that can be given."""
    return write_report(nasty, tmp_path_factory.mktemp("report") / "new" / "folder", log=LOG, compression=CELLS)


@pytest.fixture(scope="module")
def plain(found, tmp_path_factory):
    """The report of the ordinary one, with a log, in a folder with a file; its pictures are empty."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.txt").write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", draw_once)
        return write_report(found, folder, log=LOG)


@pytest.fixture(scope="module")
def page(written) -> Page:
    return Page(written.read_text(encoding="utf-8"))


def test_further_sections_stand_before_the_task(found, sketch, tmp_path):
    page = write_report(found, tmp_path, more=[Section("mine", "Mine", notes=["By hand."])]).read_text()
    ids = re.findall(r'<section id="([^"]+)">', page)
    assert ids.index("mine") == len(ids) - 4
    assert "<p>By hand.</p>" in page


# ---------------------------------------------------------------------------------------------------------------------
# Sound HTML
# ---------------------------------------------------------------------------------------------------------------------


def test_structure(page):
    assert page.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(headings))
    assert len(page.all("table")) == len(page.all("caption")) >= 9
    assert {cell.get("scope") for cell in page.all("th")} == {"col", "row"}
    assert all(len(image["alt"]) > 20 for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [link["href"] for link in page.all("a") if link["href"].startswith("#")] == [f"#{i}" for i in ids]
    assert ids[:2] == ["recommendations", "norms"]
    assert ids[-3:] == ["task", "made", "glossary"]
    assert "training" in ids


def test_markup_in_names_stays_text(page, written):
    assert "<script" not in written.read_text(encoding="utf-8")
    assert not page.all("script")
    assert page.texts[0][1].strip() == ""
    assert dict(page.texts)["title"] == dict(page.texts)["h1"] == f"Diagnosis of {NASTY}"
    assert page.text.count(NASTY) > 30


def test_one_file_without_requests(page, written):
    text = written.read_text(encoding="utf-8")
    for name in ("src", "srcset", "href"):
        targets = {attributes[name] for _, attributes in page.elements if name in attributes}
        assert all(re.match(r"data:image/|#|https://arxiv\.org/abs/\d", target) for target in targets), name
    style = next(text for tag, text in page.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    policy = next(meta for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy["content"]
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
    assert "on" not in {key[:2] for _, attributes in page.elements for key in attributes}
    assert text.endswith("</html>\n")


def test_pictures_lie_beside_it_too(page, written):
    names = {path.name for path in written.parent.iterdir()}
    assert {"report.html", "gains.png", "norms-documents.png", "norms-queries.png", "exponents.png"} <= names
    assert {"compression.png", "variance.png", "hubs.png", "training-loss.png", "training-norm-mean.png"} <= names
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written.parent.glob("*.png"))
    assert len(page.all("img")) == len(page.all("picture")) == len(names) - 1
    assert {source["media"] for source in page.all("source")} == {"screen and (prefers-color-scheme: dark)"}
    assert all(
        image["src"] != source["srcset"] for image, source in zip(page.all("img"), page.all("source"), strict=True)
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is on it
# ---------------------------------------------------------------------------------------------------------------------


def test_recommendations_come_first_with_interval_and_evidence(found, plain):
    page = Page(plain.read_text(encoding="utf-8"))
    verdicts = [text for tag, text in page.texts if tag == "span"]
    order = ["Do", "No benefit expected", "Not enough data"]
    assert verdicts == sorted(verdicts, key=order.index)
    assert len(verdicts) == len(found.recommendations)
    for r in found.recommendations:
        assert r.action in page.text
        assert r.reason in page.text
        gain = "{}: {:+.3f} [{:+.3f}, {:+.3f}] on {} queries. Scoring: {}."
        assert gain.format(r.gain_of, *r.gain, r.num_queries, r.scoring) in page.text
    assert page.text.index(found["baseline"].action) < page.text.index("Norms of documents")
    assert "nDCG@10 at the chosen exponent" + format(found["exponent"].evidence["ndcg_candidate"], ".3f") in page.text
    assert not [label for tag, label in page.texts if tag == "dt" and "_" in label]


def test_every_figure_is_in_a_table(found, plain):
    page = Page(plain.read_text(encoding="utf-8"))
    cells = {text for tag, text in page.texts if tag in ("td", "th")}
    effect, d, g, hub, task = (
        found.effects["hard"],
        found.documents,
        found.geometry,
        found.hubness["dot"],
        found.symmetry,
    )
    expected = [
        *(f"{x:+.2f}" for e in found.effects.values() if not e.undefined for x in (e.d, e.without_length)),
        *(format(x, ".3f") for x in (d.mean, d.cv, *d.quantiles, *found.queries.quantiles)),
        *(format(d.length_spearman, "+.2f"), format(d.cv_ratio, ".2f"), f"{effect.d:+.2f}"),
        *(f"{x:.3f}" for x in found.exponent.curve.ndcg),
        *(f"{x:+.3f}" for x in (*found.exponent.gain, *found.exponent.curve.versus_dot)),
        *(str(g.intrinsic_dimension), f"{g.isoscore:.3f}", f"{g.isoscore_ceiling:.3f}", f"{g.mean_cosine:.3f}"),
        *(f"{g.uniformity:.3f}", f"{g.alignment:.3f}", f"{g.explained[9]:.1%}"),
        *(f"{hub.skewness:.2f}", f"{hub.by_chance:.2f}", f"{hub.most:.1%}", f"{hub.counts[0]:,}"),
        *(f"{c.ndcg:.3f}" for c in found.cells),
        *(f"{task.length_auc:.1%}", f"{found.baseline.ndcg.mean():.3f}", f"{found.baseline.document_cv:.3f}"),
        *(found.provenance.model, "Planted", "st-magnitude", "0.02 nDCG@10", "1,000 (2,000 for the band of the curve)"),
        *("query_norm_mean", "11", "41", "eval_dev_ndcg@10"),
    ]
    assert not [text for text in expected if text not in cells]
    assert "nan" not in re.findall(r"\w+", page.text)
    assert not {"eval_runtime", "epoch"} & cells


def test_the_storage_table_appears_once(page, plain):
    for shown in (page, Page(plain.read_text(encoding="utf-8"))):
        assert [text for tag, text in shown.texts if tag == "th"].count("stored as") == 1
    assert "Measured by a CompressionEvaluator" in page.text
    assert "Measured with" in Page(plain.read_text(encoding="utf-8")).text


def test_numbers_of_a_column_have_equal_decimals(found):
    for table in (table for section in sections(found) for table in section.tables):
        named = table.header[0] not in ("measure", "setting")  # whose rows are different quantities
        for column in zip(*table.rows, strict=True) if named else []:
            decimals = {len(m[1]) for cell in column if (m := re.fullmatch(r"[-+]?\d+\.(\d+)%?(?: x)?", cell))}
            assert len(decimals) <= 1, column


def test_without_magnitude_no_norm_is_drawn(tmp_path, sketch):
    model, queries, corpus, relevant = planted(0, "relevance", num_queries=30)
    flat = model_of({text: unit(x) for text, x in table_of(model).items()})
    answers = {key: text for key, text in corpus.items() if key.endswith("-0")}
    page = Page(write_report(quick(flat, queries, answers, relevant), tmp_path).read_text(encoding="utf-8"))
    assert "All norms are 1" in page.text
    assert not list(tmp_path.glob("norms*"))
    assert "30 documents are relevant to at least one query, 0 to no query" in page.text
    assert page.text.count("undefined") >= 4


def test_tiny_and_infinite(tmp_path, sketch):
    """All documents relevant alike, one dimension or few, an effect that is infinite."""
    model = SentenceTransformer(modules=[BoW(["bee"])], similarity_fn_name="dot", device="cpu")
    queries = {f"q{i}": "bee" for i in range(2)}
    corpus = {f"d{i}": "bee " * (2 if i < 2 else 1) for i in range(4)}
    found = quick(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(2)})
    assert found.effects["corpus"].d == math.inf
    found.save(tmp_path / "d.json")
    assert Diagnosis.load(tmp_path / "d.json").effects["corpus"].d == math.inf
    assert "infinite" in Page(write_report(tmp_path / "d.json", tmp_path).read_text(encoding="utf-8")).text


@pytest.mark.slow
def test_the_same_input_gives_the_same_files(nasty, written, tmp_path):
    nasty.save(tmp_path / "d.json")
    again = write_report(tmp_path / "d.json", tmp_path / "out", log=LOG, compression=CELLS)
    assert {path.name: path.read_bytes() for path in again.parent.iterdir()} == {
        path.name: path.read_bytes() for path in written.parent.iterdir()
    }


def test_other_files_stay(plain):
    assert (plain.parent / "mine.txt").read_text() == "mine"
    assert dict(Page(plain.read_text(encoding="utf-8")).texts)["h1"] == "a title"


def test_nothing_is_written_without_matplotlib_or_into_a_file(found, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"output must be a folder, but .*file is a file"):
        write_report(found, tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "nowhere.json", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "st-magnitude\[plot\]"'):
        write_report(found, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_training_is_drawn_from_the_rows_of_a_monitor(tmp_path, found, sketch):
    rows = [{"step": s, "query_norm_mean": 1.0, "query_norm_p05": 0.5, "query_norm_p95": 2.0} for s in (3, 1, 2)]
    page = Page(write_report(found, tmp_path, log=rows, title="mine").read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.glob("training*")] == ["training-norm-mean.png"]
    assert "The run has 3 steps." in page.text
    assert dict(page.texts)["h1"] == "mine"


# ---------------------------------------------------------------------------------------------------------------------
# A browser
# ---------------------------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is on PATH")
DARK = "--blink-settings=preferredColorScheme=0"  # what a reader's dark desktop does


def browse(folder, url, *options):
    """Standard output of a headless browser on a page."""
    base = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
    command = [CHROMIUM, *base, *options, url if "://" in url else f"file://{url}"]
    return subprocess.run(command, capture_output=True, check=True, timeout=120, text=True).stdout


def measure(folder, written, script, width, *options):
    """What a script finds in the page, shown in a frame of a width; browsers' own windows have a least width."""
    frame = folder / "frame.html"
    text = json.dumps(written.read_text(encoding="utf-8")).replace("</", "<\\/")
    frame.write_text(
        f"<!doctype html><body><iframe id=f style='width:{width}px;height:900px;border:0'></iframe><pre id=out></pre>"
        f"<script>f.onload = () => {{ const d = f.contentDocument; out.textContent = JSON.stringify({script}); }};"
        f"f.srcdoc = {text};</script>",
        encoding="utf-8",
    )
    dom = browse(folder, str(frame), "--window-size=1200,900", "--virtual-time-budget=5000", "--dump-dom", *options)
    return json.loads(re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)[1])


@needs_browser
def test_a_browser_shows_it_light_and_dark(written, tmp_path):
    from matplotlib.image import imread

    shots = {}
    for name, options in (("light", []), ("dark", [DARK])):
        target = tmp_path / f"{name}.png"
        browse(tmp_path, str(written), "--window-size=1100,1400", f"--screenshot={target}", *options)
        shots[name] = imread(target)[..., :3].mean(axis=2)
    assert shots["light"].shape == (1400, 1100)
    assert np.median(shots["light"]) > 0.9
    assert np.median(shots["dark"]) < 0.2
    for shot in shots.values():
        inked = np.abs(shot - np.median(shot)) > 0.25
        assert inked.mean() > 0.01
        assert inked[:150].any()  # the title
        assert inked[1250:].any()  # and on and on
    figure = np.s_[450:1000, 100:500]  # the picture of the gains has a ground of its own in neither
    assert shots["light"][figure].mean() > 0.8
    assert shots["dark"][figure].mean() < 0.3


@needs_browser
@pytest.mark.parametrize("width", [320, 400, 1100])
def test_nothing_is_wider_than_the_page(written, tmp_path, width):
    script = (
        "{room: d.documentElement.clientWidth, wide: d.documentElement.scrollWidth,"
        " over: [...d.querySelectorAll('p, h1, h2, h3, figure, article, dl, li, caption')]"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1).map(e => e.textContent.slice(0, 40)),"
        " images: [...d.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width])}"
    )
    found = measure(tmp_path, written, script, width)
    assert found["room"] == found["wide"] == width
    assert found["over"] == []
    assert len(found["images"]) >= 10
    assert all(
        complete and natural > 100 and shown > 0.6 * min(width, 400) for complete, natural, shown in found["images"]
    )


@needs_browser
def test_it_prints(written, tmp_path):
    browse(tmp_path, str(written), DARK, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) >= 3
