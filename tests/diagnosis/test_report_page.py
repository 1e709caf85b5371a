"""write_report: what is on the page, that it is sound HTML, and that a browser shows it, light, dark and narrow."""

from __future__ import annotations

import csv
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
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW
from test_diagnose import model_of, planted, quick, unit

from st_magnitude import Diagnosis, NormMonitor, geometry
from st_magnitude.diagnosis.report import read_compression, read_log, write_report
from st_magnitude.evaluation import CompressionCell, CompressionEvaluator

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


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    model, *task = planted(0, "relevance", num_queries=60, normalize=True)
    return quick(model, *task, baseline=planted(0, "noise", 60, similarity="dot")[0], title="a title")


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
    """The report of the ordinary one, with a log."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.txt").write_text("mine")
    return write_report(found, folder, log=LOG)


@pytest.fixture(scope="module")
def page(written) -> Page:
    return Page(written.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# Sound HTML
# ---------------------------------------------------------------------------------------------------------------------


def test_structure(page):
    assert page.all("html") == [{"lang": "en"}]
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(headings))
    assert len(page.all("table")) == len(page.all("caption")) >= 10
    assert {cell.get("scope") for cell in page.all("th")} == {"col", "row"}
    assert all(len(image["alt"]) > 20 for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [link["href"] for link in page.all("a") if link["href"].startswith("#")] == [f"#{i}" for i in ids]
    assert ids[:2] == ["recommendations", "norms"]


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
        assert "{}: {:+.3f} [{:+.3f}, {:+.3f}] on {} queries.".format(r.gain_of, *r.gain, r.num_queries) in page.text
    assert page.text.index(found["baseline"].action) < page.text.index("Norms of documents")
    assert "nDCG@10 at the exponent chosen" + format(found["read-out"].evidence["ndcg_candidate"], ".3f") in page.text
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
        *(format(x, ".4g") for x in (d.mean, d.cv, *d.quantiles, *found.queries.quantiles)),
        *(format(d.length_spearman, "+.2f"), format(d.cv_ratio, ".2f"), f"{effect.d:+.2f}"),
        *(f"{x:.4f}" for x in found.read_out.curve.ndcg),
        *(f"{x:+.4f}" for x in (*found.read_out.gain, *found.read_out.curve.versus_dot)),
        *(str(g.intrinsic_dimension), f"{g.isoscore:.3f}", f"{g.isoscore_ceiling:.3f}", f"{g.mean_cosine:.3f}"),
        *(f"{g.uniformity:.2f}", f"{g.alignment:.2f}", f"{g.explained[9]:.1%}"),
        *(f"{hub.skewness:.2f}", f"{hub.by_chance:.2f}", f"{hub.most:.1%}", f"{hub.counts[0]:,}"),
        *(f"{x:.4f}" for c in found.cells for x in (c.ndcg,)),
        *(f"{task.length_auc:.1%}", f"{found.baseline.ndcg.mean():.4f}", f"{found.baseline.document_cv:.4f}"),
        *(found.provenance.model, "Planted", "st-magnitude", "0.02 nDCG@10", "1,000 (of the curve's band 2,000)"),
        *("query_norm_mean", "11", "41", "eval_dev_ndcg@10"),
    ]
    assert not [text for text in expected if text not in cells]
    assert "nan" not in re.findall(r"\w+", page.text)
    assert not {"eval_runtime", "epoch"} & cells


def test_without_length_no_norm_is_drawn(tmp_path):
    model, queries, corpus, relevant = planted(0, "relevance", num_queries=30)
    flat = model_of({text: unit(x.numpy()) for text, x in model[0].table.items()})
    answers = {key: text for key, text in corpus.items() if key.endswith("-0")}
    page = Page(write_report(quick(flat, queries, answers, relevant), tmp_path).read_text(encoding="utf-8"))
    assert "All norms are 1" in page.text
    assert not list(tmp_path.glob("norms*"))
    assert "30 documents are relevant to some query, 0 to none" in page.text
    assert page.text.count("undefined") >= 4


def test_tiny_and_infinite(tmp_path):
    """All documents relevant alike, one dimension or few, an effect that is infinite."""
    model = SentenceTransformer(modules=[BoW(["bee"])], similarity_fn_name="dot", device="cpu")
    queries = {f"q{i}": "bee" for i in range(2)}
    corpus = {f"d{i}": "bee " * (2 if i < 2 else 1) for i in range(4)}
    found = quick(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(2)})
    assert found.effects["corpus"].d == math.inf
    found.save(tmp_path / "d.json")
    assert Diagnosis.load(tmp_path / "d.json").effects["corpus"].d == math.inf
    assert "infinite" in Page(write_report(tmp_path / "d.json", tmp_path).read_text(encoding="utf-8")).text


# ---------------------------------------------------------------------------------------------------------------------
# The file of a diagnosis
# ---------------------------------------------------------------------------------------------------------------------


def test_a_saved_diagnosis_is_the_same(found, tmp_path):
    path = tmp_path / "new" / "d.json"
    found.save(path)
    back = Diagnosis.load(path)
    assert back.to_dict() == found.to_dict()
    assert str(back) == str(found)
    assert isinstance(back.read_out.gain, tuple)
    assert back.is_relevant.dtype == bool
    other = quick(*planted(0, "noise", num_queries=30))
    assert Diagnosis.from_dict(json.loads(json.dumps(other.to_dict()))).baseline is None


def test_the_same_input_gives_the_same_files_and_others_stay(found, plain, tmp_path):
    found.save(tmp_path / "d.json")
    again = write_report(tmp_path / "d.json", tmp_path / "out", log=LOG)
    assert again.read_bytes() == plain.read_bytes()
    assert {path.name for path in plain.parent.iterdir()} == {path.name for path in again.parent.iterdir()} | {
        "mine.txt"
    }
    for path in again.parent.glob("*.png"):
        assert path.read_bytes() == (plain.parent / path.name).read_bytes()
    assert dict(Page(plain.read_text(encoding="utf-8")).texts)["h1"] == "a title"


def change(entries, path, value):
    *parents, last = path
    for key in parents:
        entries = entries[key]
    if value is ...:
        del entries[last]
    else:
        entries[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["hubness", "dot", "counts"], ..., "hubness.dot has no 'counts'"),
        (["provenance"], ..., "it has no 'provenance'"),
        (["documents", "mean"], "long", "documents.mean is not made of numbers"),
        (["documents", "values"], [1.0], r"documents.values has the shape \(1,\), not \(300,\)"),
        (["read_out", "curve", "per_query"], [[1.0], [1.0, 2.0]], "read_out.curve.per_query is not made of numbers"),
        (["read_out", "gain"], [1.0, 2.0], "read_out.gain has 2 entries, not 3"),
        (["recommendations", 0, "name"], 3, r"recommendations\[0\].name is int, not str"),
        (["normalizes"], 1, "normalizes is int, not bool"),
        (["provenance", "seed"], True, "provenance.seed is bool, not int"),
        (["cells"], {}, "cells is dict, not list"),
    ],
)
def test_what_is_no_diagnosis_is_named(found, tmp_path, path, value, message):
    entries = json.loads(json.dumps(found.to_dict()))
    change(entries, path, value)
    file = tmp_path / "d.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"d\.json is not a diagnosis .*{message}.*--output FOLDER"):
        write_report(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff\xfe\x00", b""])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"d\.json is not a diagnosis of this version .*diagnosis\.save"):
        write_report(tmp_path / "d.json", tmp_path / "out")


def test_nothing_is_written_without_matplotlib_or_into_a_file(found, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"written into a folder, but .*file is a file"):
        write_report(found, tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "nowhere.json", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "st-magnitude\[plot\]"'):
        write_report(found, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


# ---------------------------------------------------------------------------------------------------------------------
# Logs and tables
# ---------------------------------------------------------------------------------------------------------------------


def test_logs_of_a_trainer_and_of_a_monitor(tmp_path):
    for step, folder in ((9, "checkpoint-9"), (10, "checkpoint-10")):
        (tmp_path / folder).mkdir()
        rows = [{"step": 0, "auto_scale": 2.0}, {"step": step, "loss": 1.0}, {"total": 3}, {"step": "?"}]
        state = {"log_history": rows, "global_step": step}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
    assert read_log(tmp_path) == [{"step": 0, "auto_scale": 2.0}, {"step": 10, "loss": 1.0}]
    assert read_log(tmp_path / "checkpoint-9") == read_log(tmp_path / "checkpoint-9" / "trainer_state.json")
    monitor = NormMonitor(every=1, csv=tmp_path / "norms.csv")
    for _ in range(3):
        monitor.update(queries=torch.eye(4), documents=2 * torch.eye(4), lr=0.1)
    assert read_log(str(tmp_path / "norms.csv")) == monitor.rows


def test_a_log_without_steps_is_refused(found, tmp_path):
    with pytest.raises(ValueError, match="The log has logged no step"):
        write_report(found, tmp_path / "out", log=[{"loss": 1.0}])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.json", "{", "s.json is not the state of a Trainer"),
        ("s.json", "[]", "s.json is not the state of a Trainer"),
        ("s.json", '{"log_history": []}', "s.json has logged no step"),
        ("s.json", '{"log_history": {"step": 1}}', "s.json has logged no step"),
        ("s.csv", "a,b\n1,2\n", "s.csv has logged no step"),
        ("s.csv", "", "s.csv has logged no step"),
        ("folder/x.txt", "", "folder has neither training.json, revela.json, trainer_state.json nor checkpoints"),
    ],
)
def test_what_is_no_log_is_named(found, tmp_path, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    log = file.parent if "/" in name else file
    with pytest.raises(ValueError, match=rf"{message}.*: name the trainer_state\.json"):
        write_report(found, tmp_path / "out", log=log)
    assert not (tmp_path / "out").exists()


def test_tables_of_compression(tmp_path):
    model, *task = planted(0, "relevance", num_queries=30, similarity="dot")
    evaluator = CompressionEvaluator(*task, dims=[16, 8])
    for epoch in (1, 2):
        evaluator(model, output_path=str(tmp_path), epoch=epoch, steps=5)
    assert read_compression(tmp_path / evaluator.csv_file) == evaluator.cells
    with (tmp_path / "c.csv").open("w", newline="") as file:  # as the command writes it
        writer = csv.DictWriter(file, fieldnames=list(CELLS[0].row))
        writer.writeheader()
        writer.writerows(cell.row for cell in CELLS)
    assert read_compression(tmp_path / "c.csv") == CELLS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dim,precision\n16,int8\n", "has no column"),
        ("dim,precision,rescoring,bytes_per_document,ndcg@10,retention\n16,int8,none,many,.5,1\n", "'many'"),
        ("", "has no rows"),
        ("dim,precision,rescoring,bytes_per_document,ndcg@10,retention\n", "has no rows"),
    ],
)
def test_what_is_no_table_is_named(found, tmp_path, content, message):
    (tmp_path / "c.csv").write_text(content)
    with pytest.raises(ValueError, match=rf"c\.csv .*{message}.*st-magnitude compress"):
        write_report(found, tmp_path / "out", compression=tmp_path / "c.csv")
    with pytest.raises(ValueError, match="There are no cells"):
        write_report(found, tmp_path / "out", compression=[])
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def axis():
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def test_the_band_is_that_of_the_difference(found, axis):
    from st_magnitude.diagnosis import _figures as figures

    out = found.read_out
    intervals = figures.band(out, seed=0)
    assert intervals[3] == geometry.paired_bootstrap(out.curve.per_query[3], out.ndcg(1.0), num_samples=2000)
    figures.exponents(axis, out, intervals)
    curve = next(line for line in axis.lines if len(line.get_xdata()) == len(out.curve.exponents))
    assert np.asarray(curve.get_ydata()) == pytest.approx(out.curve.ndcg)
    band = axis.collections[0].get_paths()[0].vertices
    today = out.ndcg(1.0).mean()
    assert [today + intervals[0][1], today + intervals[0][2]] == pytest.approx(sorted(set(band[band[:, 0] == 0, 1])))
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in axis.lines}
    assert points["today"] == pytest.approx([1.0, today])
    assert points["chosen by one half"] == pytest.approx([out.candidate, out.ndcg(out.candidate).mean()])


def test_histograms_are_shares_and_lose_nobody(axis):
    from st_magnitude.diagnosis import _figures as figures

    rng = np.random.default_rng(0)
    groups = {"a": np.append(rng.normal(size=3000), 1e6), "b": rng.normal(3, size=50)}
    figures.histogram(axis, groups, "norm", "documents")
    assert axis.dataLim.x1 < 1e3  # one outlier does not squeeze the rest
    outlines = [p for p in axis.patches if not p.get_fill()]
    assert len(outlines) == 2
    for outline in outlines:
        x, y = outline.get_xy().T
        steps = [b for a, b, c, d in zip(x, y, x[1:], y[1:], strict=False) if b == d and c > a]
        assert sum(steps) == pytest.approx(1.0)


def test_equal_values_are_one_bar(axis):
    from st_magnitude.diagnosis import _figures as figures

    figures.histogram(axis, {"a": np.full(20, 2.0)}, "norm", "queries")
    assert axis.dataLim.intervalx.tolist() == [1.5, 2.5]


def test_hubs_begin_at_all_documents_and_chance_is_binomial(found, axis):
    from scipy.stats import binom

    from st_magnitude.diagnosis import _figures as figures

    figures.hubs(axis, found.hubness, 60)
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in axis.lines}
    counts = np.array(found.hubness["dot"].counts)
    assert drawn["dot"][0] == drawn["by chance"][0] == 1.0
    assert drawn["dot"][-1] == counts[-1] / 300
    assert drawn["dot"][1] == pytest.approx(1 - counts[0] / 300)
    assert drawn["by chance"][2] == pytest.approx(binom.sf(1, 60, 10 / 300))


def test_training_is_drawn_from_the_rows_of_a_monitor(tmp_path, found):
    rows = [{"step": s, "query_norm_mean": 1.0, "query_norm_p05": 0.5, "query_norm_p95": 2.0} for s in (3, 1, 2)]
    page = Page(write_report(found, tmp_path, log=rows, title="mine").read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.glob("training*")] == ["training-norm-mean.png"]
    assert "3 steps" in page.text
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
