"""The page of a report: its figures are the rankings', and texts of strangers stay texts."""

import json
import re
from html.parser import HTMLParser

import numpy as np

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import judge
from st_magnitude.workbench.judging.choice import Fusion, System
from st_magnitude.workbench.report import write_report

HOSTILE = [
    "</script></SCRIPT ><!--<script>alert(1)</script>",
    "<img src='https://example.org/x.png' onerror=alert(1)>",
    "{{ data }}",
    "a \"quote\", an 'apostrophe', \\u003c and a `tick` & more",
    "one\u2028two\u2029three\r\n\0",
    "שלום \u202eabc and a lone \ud800",
]


class Page(HTMLParser):
    """The tags of a page with their attributes and the text after each."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append([tag, dict(attributes), ""])

    def handle_data(self, text):
        if self.tags:
            self.tags[-1][2] += text


def written(path, before, after, systems=(), title="", headline="", **settings):
    """The data of the page, as text, and its other tags."""
    write_report(path, title, headline, systems, before, after, settings)
    tags = Page(path.read_text(encoding="utf-8")).tags
    place = next(i for i, tag in enumerate(tags) if tag[1].get("id") == "data")
    return tags.pop(place)[2], tags


def rankings(number, texts=("text",)):
    """Two rankings: the first query has no answer, and nothing is found for the last."""
    rng = np.random.default_rng(number)
    queries = {f"q{i}": texts[i % len(texts)] for i in range(number)}
    corpus = {f"d{i}": texts[i % len(texts)] for i in range(30)}
    relevant = {f"q{i}": {f"d{i % 29}": 1, f"d{i % 29 + 1}": 2} for i in range(1, number)}
    data = RetrievalData(queries, corpus, relevant)
    sizes = [30] * (number - 1) + [0]
    found = [[(np.arange(size), rng.random(size)) for size in sizes] for _ in range(2)]
    return [Ranking.of(data, list(queries), one, k=12) for one in found]


def test_the_data_of_the_page_are_the_figures_of_the_rankings(tmp_path):
    before, after = sides = rankings(90)
    systems = [System("a", before), System("b", after, how=Fusion(0.3, 1, 4, "words"))]
    systems.append(System("again", before))
    page = json.loads(written(tmp_path / "new.html", *sides, systems, rate=2e-5, dims=None)[0])
    assert page["sides"] == [{"name": "a", "ndcg": before.mean}, {"name": "b", "ndcg": after.mean}]
    assert page["settings"] == [["rate", "2e-05"], ["dims", "-"]]
    first, second, _ = page["systems"]
    assert first == {"name": "a", "how": "", "ndcg": before.mean, "gain": None}
    gain = judge((after.ndcg - before.ndcg)[1:])
    assert (second["gain"], second["verdict"]) == (vars(gain), gain.verdict)
    assert (second["how"], second["said"]) == ("0.3 model + 0.7 BM25 of words", str(gain))

    pairs = [pair for *pair, number in page["changes"] for _ in range(number)]
    assert pairs == sorted(np.stack([before.ndcg, after.ndcg], axis=1)[1:].tolist())
    ids = [row["id"] for row in page["queries"]]
    assert (len({*ids}), ids[-1]) == (90, "q0")  # whose change is unknown
    changes = [-abs(row["ndcg"][1] - row["ndcg"][0]) for row in page["queries"][:-1]]
    assert changes == sorted(changes)
    for row in page["queries"]:
        ndcg = [one.ndcg[after.query_ids.index(row["id"])] for one in sides]
        np.testing.assert_array_equal(np.array(row["ndcg"], dtype=float), ndcg)
        grades = after.data.relevant.get(row["id"], {})
        assert row["found"] == [list(one[row["id"]])[:3] for one in sides]
        assert row["right"] == [[document in grades for document in x] for x in row["found"]]
        best = [document for document in grades if grades[document] == 2]
        assert (row["answer"], row["relevant"]) == (best, len(grades))


def test_texts_of_strangers_stay_texts_and_nothing_is_loaded(tmp_path):
    sides = rankings(20, HOSTILE)
    tags = written(tmp_path / "r.html", *sides)[1]
    for text in HOSTILE:
        systems = [System(text, sides[1], how=text)]
        data, others = written(tmp_path / "r.html", *sides, systems, text, text, **{text: text})
        assert others == tags
        assert not re.search("[<>&\u2028\u2029]", data)
        page = json.loads(data)
        shown = [page["title"], page["headline"], *page["settings"][0], page["sides"][1]["name"]]
        assert {*shown, page["systems"][0]["name"], page["systems"][0]["how"]} == {text}
    assert {*page["documents"].values()} == {row["text"] for row in page["queries"]} == {*HOSTILE}
    attributes = {name: value for tag in tags for name, value in tag[1].items()}
    assert not attributes.keys() & {"src", "srcset", "href", "data", "action", "style", "onload"}
    assert attributes["content"].startswith("default-src 'none'; ")
    sinks = r"https?:|(inner|outer)HTML|insertAdjacent|document\.write|eval|url\(|@import|fetch"
    assert not re.search(sinks, "".join(tag[2] for tag in tags))
    assert {*re.findall(r"\bdata\.(\w+)", tags[-1][2])} == {*page}  # all of it is shown


def test_a_page_of_many_queries_and_long_texts(tmp_path):
    page = json.loads(written(tmp_path / "r.html", *rankings(2050, ["長" * 300, "x" * 301]))[0])
    assert (page["left_out"], len(page["queries"])) == (50, 2000)
    texts = {row["text"] for row in page["queries"]}
    assert texts == {*page["documents"].values()} == {"長" * 300, "x" * 299 + "…"}
