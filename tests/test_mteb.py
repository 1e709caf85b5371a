"""Local data scored by mteb equals what sentence-transformers' own evaluator and ours say."""

import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from _cli import figures, refusal
from _processes import python
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator

pytest.importorskip("mteb")
from st_magnitude.mteb import evaluate, local_model

PUSHED = "me/retriever"
MTEB_RUN = """
import mteb
from mteb.cli import build_cli
from st_magnitude.data.pairs import load_splits
from st_magnitude.mteb import retrieval_task
tasks = [retrieval_task(load_splits("data")["test"])]
mteb.get_tasks = lambda **_: tasks
try:
    build_cli.main()
except ValueError as error:
    print(error)
    model = mteb.get_model("me/retriever", trust_remote_code=True)
    mteb.evaluate(model, tasks, cache=mteb.ResultCache("results"))
"""


def ndcg(result):
    """nDCG@10 of the only task, which mteb rounds to five digits."""
    return result.task_results[0].scores["test"][0]["ndcg_at_10"]


@pytest.fixture
def graded(task):
    """Every relevant document has a grade of 1 to 3, and half of the others were judged, with 0."""
    grades = {
        q: {d: 1 + i % 3 for i, d in enumerate(sorted(ids))}
        for q, ids in task["relevant_docs"].items()
    }
    for i, (query, judged) in enumerate(grades.items()):
        extra = sorted(task["corpus"].keys() - judged.keys())
        grades[query] = judged | dict.fromkeys(extra[i::4], 3) | dict.fromkeys(extra[i + 1 :: 4], 0)
    return task | {"relevant_docs": grades}


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_equals_the_evaluator(static_model, task, similarity):
    raw = MagnitudeEvaluator(**task)(static_model)
    # else nothing would tell which one mteb used
    assert abs(raw["cosine_ndcg@10"] - raw["dot_ndcg@10"]) > 1e-3
    stm.prepare(static_model, similarity)
    expected = InformationRetrievalEvaluator(**task, main_score_function=similarity)(static_model)
    result = evaluate(static_model, [RetrievalData(*task.values())])
    assert ndcg(result) == pytest.approx(expected[f"{similarity}_ndcg@10"], abs=6e-6)
    scores = result.task_results[0].scores["test"][0]
    assert scores["recall_at_10"] == pytest.approx(expected[f"{similarity}_recall@10"], abs=6e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_grades_count_as_in_mteb_and_ir_measures(static_model, graded, similarity):
    ir_measures = pytest.importorskip("ir_measures")
    data = RetrievalData(*graded.values())
    evaluator = MagnitudeEvaluator(**graded)
    ours = evaluator(stm.prepare(static_model, similarity))["matched_ndcg@10"]
    assert ndcg(evaluate(static_model, [data])) == pytest.approx(ours, abs=6e-6)
    encoded = data.encode(static_model)
    run = static_model.similarity(encoded.queries, encoded.documents).tolist()
    rows = zip(data.query_ids, run, strict=True)
    scores = {q: dict(zip(data.document_ids, row, strict=True)) for q, row in rows}
    found = ir_measures.calc_aggregate([ir_measures.nDCG @ 10], graded["relevant_docs"], scores)
    assert found[ir_measures.nDCG @ 10] == pytest.approx(ours, abs=1e-9)
    flat = graded | {"relevant_docs": {q: set(grades) for q, grades in data.relevant.items()}}
    assert abs(MagnitudeEvaluator(**flat)(static_model)["matched_ndcg@10"] - ours) > 1e-3


def test_the_query_itself_does_not_count(static_model, task):
    """Every query is in the corpus; for q2 the id is that of another text, which counts."""
    task["corpus"] |= task["queries"] | {"q2": task["queries"]["q2"] + " Uphill!"}
    task["relevant_docs"]["q2"] = {"q2"}
    raw = MagnitudeEvaluator(**task)(static_model)["cosine_ndcg@10"]
    result = evaluate(stm.prepare(static_model, "cosine"), [RetrievalData(*task.values())])
    assert ndcg(result) == pytest.approx(raw, abs=6e-6)


@pytest.fixture
def hub(tmp_path):
    """The environment of a process whose hub has one model, the files in ``model``."""
    commit = {"id": "1" * 40, "title": "", "message": "", "authors": []}
    answers = {
        f"/api/models/{PUSHED}": {"id": PUSHED, "sha": commit["id"]},
        f"/api/models/{PUSHED}/commits/main": [commit | {"date": "2026-01-01T00:00:00Z"}],
    }
    (tmp_path / "answers").mkdir()
    for i, answer in enumerate(answers.values()):
        (tmp_path / "answers" / str(i)).write_text(json.dumps(answer))

    class Hub(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            path = path.partition("?")[0]
            if path in answers:
                return str(tmp_path / "answers" / str([*answers].index(path)))
            return str(tmp_path / "model" / path.partition("/resolve/")[2].partition("/")[2])

        def end_headers(self):
            self.send_header("ETag", f'"{self.path.replace("/", "-")}"')  # names a blob
            self.send_header("X-Repo-Commit", commit["id"])
            self.send_header("X-Error-Code", "EntryNotFound")  # read where the status is 404
            super().end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        own = {"HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        yield {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", **own}
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_mteb_run_takes_a_pushed_model(static_model, task, tmp_path, hub, exponent):
    """One of stock modules by its name; an ``ExponentNorm`` needs ``trust_remote_code``."""
    stm.export(stm.prepare(static_model, stm.Similarity(1.0, exponent)), tmp_path / "model")
    RetrievalData(*task.values()).save(tmp_path / "data", "test")

    arguments = ("-c", MTEB_RUN, "run", "-m", PUSHED, "--output-folder", "results")
    done = python(*arguments, cwd=tmp_path, environment=hub)
    assert ("Please pass the argument `trust_remote_code=True`" in done.stdout) == bool(exponent)
    (found,) = (tmp_path / "results").rglob("data-*.json")
    value = json.loads(found.read_text())["scores"]["test"][0]["ndcg_at_10"]
    expected = MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"]
    assert value == pytest.approx(expected, abs=6e-6)


def test_the_command_and_its_cache(static_model, task, tmp_path):
    """Another model in the same place and changed data are scored anew, and nothing else is."""

    def score():
        """The name of the task and its nDCG@10, which is what our evaluator finds."""
        places = [tmp_path / name for name in ("model", "data")]
        found = figures("mteb", *places, output=tmp_path / "results")
        ((name, value),) = found["scores"].items()
        expected = MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"]
        assert value == pytest.approx(expected, abs=6e-6)
        return name, value

    RetrievalData(*task.values()).save(tmp_path / "data")
    values = {}
    for similarity in ("cosine", "dot"):
        stm.prepare(static_model, similarity).save_pretrained(str(tmp_path / "model"))
        name, values[similarity] = score()
    assert name.startswith("data-test-split-")
    assert abs(values["cosine"] - values["dot"]) > 1e-3

    results = (tmp_path / "results").rglob(f"{name}.json")
    before = {path: path.stat().st_mtime_ns for path in results}
    assert len(before) == 2
    assert score() == (name, values["dot"])
    assert before == {path: path.stat().st_mtime_ns for path in before}
    next(iter(before)).write_text("{")
    places = [tmp_path / name for name in ("model", "data")]
    assert f"{name}.json is torn" in refusal("mteb", *places, output=tmp_path / "results")
    task["relevant_docs"]["q1"] = {"d20"}
    next(iter(before)).unlink()
    RetrievalData(*task.values()).save(tmp_path / "data")
    other, value = score()
    assert other != name
    assert value != values["dot"]


@pytest.mark.parametrize("name", ["../../../../data", "..", "a/b", "w" * 255])
def test_names_stay_within_the_folder_of_results(static_model, task, tmp_path, name):
    model = tmp_path / ("m" * 255)
    static_model.save_pretrained(str(model))
    data = RetrievalData(*task.values(), name=name)
    (tmp_path / "here").mkdir()
    evaluate(model, [data], tmp_path / "here" / "results")
    assert {path.name for path in tmp_path.iterdir()} == {"here", model.name}
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["results"]


def test_a_model_card_does_not_make_another_model(static_model, tmp_path):
    def revision():
        return local_model(tmp_path / "model").mteb_model_meta.revision

    static_model.save_pretrained(str(tmp_path / "model"))
    before = revision()
    (tmp_path / "model" / "README.md").write_text("New words.")
    assert revision() == before
    (tmp_path / "model" / "config_sentence_transformers.json").write_text("{}")
    assert revision() != before


def test_unknown_names_are_refused(static_model, task, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="pass its folder"):
        evaluate(static_model, [], tmp_path)
    monkeypatch.chdir(tmp_path)
    RetrievalData(*task.values()).save(tmp_path / "data")
    for model, task, split, named in (
        ("nowhere", "data", "test", "nowhere"),
        ("data", "NoSuchTask", "test", "NoSuchTask"),
        ("data", "data", "dev", "['test']"),
    ):
        assert named in refusal("mteb", model, task, split=split)
