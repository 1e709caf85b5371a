"""Local data scored by mteb equals what sentence-transformers' own evaluator and ours say."""

import pytest
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator

pytest.importorskip("mteb")
from st_magnitude.mteb import evaluate, local_model


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
def test_grades_count_as_in_mteb(static_model, graded, similarity):
    data = RetrievalData(*graded.values())
    evaluator = MagnitudeEvaluator(**graded)
    ours = evaluator(stm.prepare(static_model, similarity))["matched_ndcg@10"]
    assert ndcg(evaluate(static_model, [data])) == pytest.approx(ours, abs=6e-6)
    flat = graded | {"relevant_docs": {q: set(grades) for q, grades in data.relevant.items()}}
    assert abs(MagnitudeEvaluator(**flat)(static_model)["matched_ndcg@10"] - ours) > 1e-3


def test_the_query_itself_does_not_count(static_model, task):
    """Every query is in the corpus; for q2 the id is that of another text, which counts."""
    task["corpus"] |= task["queries"] | {"q2": task["queries"]["q2"] + " Uphill!"}
    task["relevant_docs"]["q2"] = {"q2"}
    raw = MagnitudeEvaluator(**task)(static_model)["cosine_ndcg@10"]
    result = evaluate(stm.prepare(static_model, "cosine"), [RetrievalData(*task.values())])
    assert ndcg(result) == pytest.approx(raw, abs=6e-6)


def test_results_are_kept_for_the_same_model_and_data(static_model, task, tmp_path):
    """Another model in the same place and changed data are scored anew, and nothing else is."""

    def score():
        """The name of the task and its nDCG@10, which is what our evaluator finds."""
        data = stm.load_splits(tmp_path / "data")["test"]
        (result,) = evaluate(tmp_path / "model", [data], tmp_path / "results").task_results
        value = result.get_score()
        expected = MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"]
        assert value == pytest.approx(expected, abs=6e-6)
        return result.task_name, value

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
    with pytest.raises(ValueError, match=f"{name}.json is torn"):
        score()
    task["relevant_docs"]["q1"] = {"d20"}
    next(iter(before)).unlink()
    RetrievalData(*task.values()).save(tmp_path / "data")
    other, value = score()
    assert other != name
    assert value != values["dot"]


@pytest.mark.parametrize("name", ["../../../../data", "w" * 255])
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


def test_unknown_names_are_refused(static_model, task, tmp_path):
    with pytest.raises(ValueError, match="pass its folder"):
        evaluate(static_model, [], tmp_path)
    for model, tasks, named in (("nowhere", [], "nowhere"), (static_model, ["None"], "None")):
        # older releases of mteb ask the hub first
        with pytest.raises((ValueError, OSError), match=named) as refused:
            evaluate(model, tasks)
        assert "KeyError" not in str(refused.value)
