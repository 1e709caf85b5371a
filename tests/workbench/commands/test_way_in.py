"""From a file of pairs to a verdict, a retriever and a look at what it finds."""

import copy
import csv
import json
import re
import shlex

import pytest
from _calls import call, taking
from _cli import figures, invoke, refusal
from _lookup import bag
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.evaluation import bm25_run
from st_magnitude.result import to_plain
from st_magnitude.workbench.judging.choice import Decision, Fusion, Way

COLOURS = ["red", "green", "blue", "white", "black", "amber", "violet", "grey"]
THINGS = ["door", "roof", "wall", "lamp", "chair", "table", "shelf", "fence"]


@pytest.fixture
def pairs(tmp_path):
    """64 questions, each with a document of its own that shares no word with it."""
    pytest.importorskip("wordllama")
    file = tmp_path / "pairs.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["question", "answer"])
        for i, colour in enumerate(COLOURS):
            for j, thing in enumerate(THINGS):
                writer.writerow([f"{colour} {thing}", f"number {i} of the row {j}"])
    return file


def test_a_table_is_judged_in_folds_and_found_by_search(pairs, tmp_path):
    output = tmp_path / "out"
    options = {"model": "wordllama", "confirm": "test"}
    said = invoke("train", data=pairs, output=output, **options).output
    assert "'loss':" not in said
    modes = {path.stat().st_mode & 0o777 for path in output.rglob("*") if path.is_file()}
    (tmp_path / "new").touch()
    assert modes == {(tmp_path / "new").stat().st_mode & 0o777}
    assert not any(line.startswith(("BM25  ", "BM25 of")) for line in said.splitlines())
    assert "model with BM25 " not in said
    said = " ".join(said.split())
    assert (
        said.index("by cross-validation")
        < said.index("pretrained model 0.")
        < said.index("Deploy ")
        < said.index("Saved to")
    )
    assert "BM25 finds a word in common with an answer for 0 of 58 queries only" in said
    assert "test queries" in said
    SentenceTransformer(str(output))  # without the package
    card = (output / "README.md").read_text()
    assert "type: ndcg@10" in card
    assert "Trained from `wordllama`. An embedding takes 1,024 bytes, and 256 as int8." in card
    assert "on the pairs dataset" in card
    assert "1807.03748" in card
    assert "feng2026" not in card

    assert len(figures("search", output, "red door", data=pairs, top_k=3)["found"]) == 3
    shown = invoke("search", output, "red door", data=pairs, top_k=64).output
    assert shown.count(" yes ") == 1


@pytest.fixture
def recommended(tmp_path):
    """A folder with a model by which d1 is first, data in which BM25 puts d2 first, and a function
    that writes a decision into the folder."""
    words = BoW(["tea", "cup"], word_weights={"cup": 0.1})
    model = SentenceTransformer(modules=[words], similarity_fn_name="cosine", device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    rows = ["question,document", "tea cup,tea", "tea cup,cup cup cup", "cup,the cup"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))

    def decide(name, how, model):
        ways = {"the model": Way(".", ""), "BM25": Way("", "words"), name: Way(model, how)}
        Decision(name, 0.5, how, "", None, model, systems=ways).save(tmp_path / "model")

    return tmp_path / "model", tmp_path / "pairs.csv", decide


HALF = Fusion(0.5, 1.0, 2.0, "words")


@pytest.mark.parametrize(
    ("decision", "system", "weight", "said"),
    [
        (None, None, 1.0, ""),
        (("the trained", "", "."), None, 1.0, "the trained, as recommended. Others by --system: "),
        (("the trained one with BM25", HALF, "."), None, 0.5, "0.5 model + 0.5 BM25 of words"),
        (("the trained one with BM25", HALF, "."), "the model", 1.0, "Searching with the model."),
        (("the trained one with BM25", HALF, "."), "bm25", 0.0, "Searching with BM25 (words)."),
        (("BM25", "words", ""), None, 0.0, "Searching with BM25 (words), as recommended"),
        (("another", "", "{elsewhere}"), None, 1.0, "Searching with another, as recommended"),
        (("another", HALF, "{elsewhere}"), "another", 0.5, "Searching with another (0.5 model"),
    ],
)
def test_search_uses_what_was_recommended(recommended, monkeypatch, decision, system, weight, said):
    """BM25 alone neither loads nor runs a model."""
    model, file, decide = recommended
    if decision is not None:
        name, how, place = decision
        if place == "{elsewhere}":
            place = str(model.rename(model.with_name("elsewhere")))
            bag(["other"]).save_pretrained(str(model))
        decide(name, how, place)
    options = {"data": file} | ({"system": system} if system else {})
    data = stm.load_splits(file)["train"].asking(["tea cup"])
    used = place if decision is not None and place not in (".", "") else model
    dense = stm.encode(stm.load(used), data, "cosine", only=["tea cup"]).search()
    lexical = bm25_run(data)
    fused = Fusion(weight, 1.0, 2.0, "words")(dense, lexical)
    if weight == 0:
        monkeypatch.setattr("st_magnitude.workbench.searcher.load", None)
        monkeypatch.setattr(SentenceTransformer, "encode", None)
    found = figures("search", model, "tea cup", **options)["found"]
    expected = [(document, pytest.approx(score)) for document, score in fused["tea cup"].items()]
    assert [(hit["document"], hit["score"]) for hit in found] == expected
    shown = " ".join(invoke("search", model, "tea cup", **options).output.split())
    assert said in shown
    assert ("earching with" in shown) == bool(said)


@pytest.mark.parametrize("tokens", ["words", "4-grams"])
def test_short_texts_are_found_and_an_empty_ranking_says_why(recommended, tokens):
    model, file, decide = recommended
    file.write_text("question,document\nVPN?,vpn\nC++?,c++\ncup,the cup")
    decide("BM25", tokens, "")
    for question, first in (("VPN", "vpn"), ("c++", "c++"), ("cup", "the cup")):
        said = invoke("search", model, question, data=file).output
        assert re.search(rf"^ +1 .* {re.escape(first)}$", said, re.MULTILINE)
    said = invoke("search", model, "zebra", data=file).output
    assert "No document has a word of this question" in said
    assert "rank" not in said


@pytest.mark.parametrize("command", taking("data", but=["train", "compare"]))
def test_known_data_are_told_of_in_short(static_path, tmp_path, command):
    """What was left out is, and nothing before a model that is missing."""
    rows = [f"question {i},word{i}_a" for i in range(30)]
    (tmp_path / "pairs.csv").write_text("\n".join(["query,document", *rows, "lost,"]))
    words = call(command, model=static_path, data=tmp_path / "pairs.csv")
    said = invoke(*words).output
    assert "Left out 1 row without text" in " ".join(said.split())
    assert "30 documents; queries" not in said
    if command != "search":
        said = invoke(*call(command, model="none", data=tmp_path / "pairs.csv")).output
        assert said.startswith("Error: There is no model at")
        assert said.count(". ") == 1
        assert max(map(len, said.splitlines())) <= 80


def test_decisions_that_cannot_be_followed_are_refused(recommended):
    model, file, decide = recommended

    def refused(**options):
        return refusal("search", model, "tea", data=file, **options)

    assert "has no deploy.json, so 'BM25' is unknown there" in refused(system="BM25")
    decide("the trained one", "", ".")
    said = refused(system="BM52")
    assert "There is no system 'BM52'; the folder knows 'the model', 'BM25'" in said
    decide("gone", "", str(model / "gone"))
    assert "deploys 'gone' with a model elsewhere. There is no" in refused()
    (model / "deploy.json").write_text("{}")
    assert "deploy.json is damaged" in refused()


def test_what_a_newer_version_has_written_is_left_out(recommended):
    model, _, decide = recommended
    decide("the trained one with BM25", HALF, ".")
    path = model / "deploy.json"
    known = json.loads(path.read_text())
    more = copy.deepcopy(known) | {"news": 1, "how": known["how"] | {"news": 1}}
    more["systems"]["BM25"]["news"] = 1
    path.write_text(json.dumps(more))
    assert to_plain(Decision.load(model)) == known


@pytest.mark.parametrize("command", ["train", "compare"])
def test_another_model_is_weighed_and_a_table_compared_in_folds(
    pairs, tmp_path, small_static, command
):
    """58 of 64 queries are in train and dev of `train`, and outside of dev in `compare`."""
    words = [*COLOURS, *THINGS, *"01234567"]
    bag(words, similarity="cosine").save_pretrained(str(tmp_path / "bow"))
    pairs = pairs.rename(tmp_path / "my pairs.csv")
    options = {"data": pairs, "model": small_static, "output": tmp_path / "out", "batch_size": 8}
    options |= {"columns": "query=question,document=answer", "report": tmp_path / "report.html"}
    if command == "compare":
        options |= {"losses": "cosine", "learning_rates": 0.03, "temperatures": 0.1, "epochs": 1}
    done = invoke(command, also=tmp_path / "bow", json=True, **options)
    found = json.loads(done.stdout)
    screen = done.stderr.splitlines()[-24:]
    is_deployed = [line.startswith("Deploy ") for line in screen]
    assert any(is_deployed[screen.index(next(x for x in screen if "over it" in x)) :])
    words = shlex.split(screen[-1].removeprefix("Try it: st-magnitude "))
    assert words[-1] == "a question"
    assert invoke(*words).exit_code == 0
    verdict = found["dev" if command == "train" else "test"]
    assert verdict["where"] == "58 queries, held out in 5 folds"
    names = [row["name"] for row in verdict["rows"]]
    (also,) = (name for name in names if name.endswith("/bow"))
    assert also == "/".join((tmp_path / "bow").parts[-2:])
    folder = tmp_path / "out" / ("model" if command == "compare" else "")
    decision = Decision.load(folder)
    assert to_plain(decision) == verdict["decision"]
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("the pretrained model", also, "number 1"))


def test_search_shows_norms_where_they_count(tmp_path):
    (tmp_path / "pairs.csv").write_text("question,document\nred?,red red\nblue?,blue")
    for similarity, norm in (("dot", {"norm": 2.0}), ("cosine", {})):
        bag(["red", "blue"], similarity=similarity).save_pretrained(str(tmp_path / similarity))
        first = figures("search", tmp_path / similarity, "red", data=tmp_path / "pairs.csv")
        score = pytest.approx(2.0 if norm else 1.0)
        assert first["found"][0] == {"document": "d0", "score": score} | norm
