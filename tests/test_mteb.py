"""Local data scored by mteb equals what sentence-transformers' own evaluator says."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.commands.app import app
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.mteb import clustering_task, evaluate_retrieval, local_model, local_task, run

pytest.importorskip("mteb")


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_equals_the_evaluator(static_model, task, similarity):
    data = RetrievalData(*task.values())
    stm.prepare(static_model, similarity)
    expected = InformationRetrievalEvaluator(**task, main_score_function=similarity)(static_model)
    scores = evaluate_retrieval(static_model, data)
    assert scores["ndcg_at_10"] == pytest.approx(expected[f"{similarity}_ndcg@10"], abs=1e-4)
    assert scores["recall_at_10"] == pytest.approx(expected[f"{similarity}_recall@10"], abs=1e-4)


def test_cosine_and_dot_differ_here(static_model, task):
    """Else the test above could not tell which similarity mteb had used."""
    results = stm.MagnitudeEvaluator(**task)(stm.prepare(static_model, "dot"))
    assert abs(results["cosine_ndcg@10"] - results["dot_ndcg@10"]) > 1e-3


@pytest.mark.slow
def test_in_a_fresh_process(static_model, task, tmp_path):
    stm.export(stm.prepare(static_model, stm.Similarity(1.0, 0.5)), tmp_path / "model")
    RetrievalData(*task.values()).save(tmp_path / "data")
    command = [sys.executable, "-m", "st_magnitude.mteb", str(tmp_path / "model"), str(tmp_path / "data")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    scores = json.loads(finished.stdout.splitlines()[-1])
    evaluator = stm.MagnitudeEvaluator(**task)
    assert scores["ndcg_at_10"] == pytest.approx(evaluator(static_model)["matched_ndcg@10"], abs=1e-4)


@pytest.mark.parametrize(("similarity", "score"), [("cosine", "cosine"), ("qnorm", "dot")])
def test_a_model_trained_for_prefixes(static_model, task, tmp_path, similarity, score):
    """Trained, saved, and scored by others: mteb at full size, sentence-transformers' evaluator when truncated."""
    loss = stm.TempAggMRLLoss(stm.prepare(static_model, similarity), [64, 256], similarity=similarity)
    pairs = [(task["queries"][q], task["corpus"][d]) for q, docs in task["relevant_docs"].items() for d in sorted(docs)]
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs, strict=True), strict=True)))
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=3, learning_rate=0.02, use_cpu=True, report_to=[], save_strategy="no"
    )
    SentenceTransformerTrainer(static_model, arguments, rows, loss=loss).train()
    evaluator = stm.CompressionEvaluator(**task, dims=[64, 256], precisions=["float32"])
    metrics = evaluator(static_model)

    static_model.save_pretrained(str(tmp_path / "model"))
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    scores = evaluate_retrieval(loaded, RetrievalData(*task.values()))
    assert scores["ndcg_at_10"] == pytest.approx(metrics["full_ndcg@10"], abs=1e-4)

    short = SentenceTransformer(str(tmp_path / "model"), device="cpu", truncate_dim=64)
    theirs = InformationRetrievalEvaluator(**task, main_score_function=score)(short)
    assert theirs[f"{score}_ndcg@10"] == pytest.approx(metrics["float32_64_ndcg@10"], abs=1e-6)
    assert metrics["float32_64_ndcg@10"] != metrics["full_ndcg@10"]


def scores_of(folder):
    """All main scores under mteb's results folder, by model, revision and task."""
    found = {}
    for file in folder.rglob("*.json"):
        if file.name != "model_meta.json":
            record = json.loads(file.read_text())
            found[file.parts[-3], record["task_name"]] = record["scores"]["test"][0]
    return found


@pytest.mark.parametrize("similarity", ["cosine", pytest.param("dot", marks=pytest.mark.slow)])
def test_four_ways_to_one_score(static_model, task, tmp_path, similarity):
    """ST's evaluator, ours, mteb.evaluate and mteb's command line (which round to five digits)."""
    import mteb

    stm.prepare(static_model, similarity).save_pretrained(str(tmp_path / "model"))
    RetrievalData(*task.values()).save(tmp_path / "data")
    expected = InformationRetrievalEvaluator(**task, main_score_function=similarity)(static_model)
    expected = expected[f"{similarity}_ndcg@10"]
    assert stm.MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"] == pytest.approx(expected, abs=1e-6)
    loaded = local_model(tmp_path / "model").load_model(device="cpu")
    result = mteb.evaluate(loaded, local_task(tmp_path / "data"), cache=None, show_progress_bar=False)
    assert result.task_results[0].scores["test"][0]["ndcg_at_10"] == pytest.approx(expected, abs=6e-6)
    arguments = ["run", "-m", str(tmp_path / "model"), "-t", str(tmp_path / "data")]
    arguments += ["--output-folder", str(tmp_path / "results")]
    if similarity == "dot":
        command = [sys.executable, "-m", "st_magnitude", "mteb", *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    else:
        ((name, (metric, found)),) = run(arguments).items()
        printed = f"{name}: {metric} {found:.4f}"
    ((_, name), score) = scores_of(tmp_path / "results").popitem()
    assert score["ndcg_at_10"] == pytest.approx(expected, abs=6e-6)
    assert printed == f"{name}: ndcg_at_10 {expected:.4f}"


def test_the_cache_never_mixes_models_or_data(static_model, task, tmp_path):
    """A dot model in the place of a cosine one, then changed data: mteb's cache is on, and each is scored anew."""
    import mteb
    from mteb.cache import ResultCache

    cache, found = ResultCache(tmp_path / "results"), []
    RetrievalData(*task.values()).save(tmp_path / "data")
    for similarity in ("cosine", "dot"):
        stm.prepare(static_model, similarity).save_pretrained(str(tmp_path / "model"))
        loaded = local_model(tmp_path / "model").load_model(device="cpu")
        result = mteb.evaluate(loaded, local_task(tmp_path / "data"), cache=cache, show_progress_bar=False)
        expected = stm.MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"]
        found.append(result.task_results[0].scores["test"][0]["ndcg_at_10"])
        assert found[-1] == pytest.approx(expected, abs=6e-6)
    assert abs(found[0] - found[1]) > 1e-3
    before = local_task(tmp_path / "data").metadata.name
    fewer = RetrievalData(task["queries"], task["corpus"] | {"extra": "x"}, task["relevant_docs"])
    fewer.save(tmp_path / "data2")
    (tmp_path / "data2").replace(tmp_path / "moved")
    for name in ("corpus.jsonl", "queries.jsonl"):
        (tmp_path / "moved" / name).replace(tmp_path / "data" / name)
    assert local_task(tmp_path / "data").metadata.name != before


def test_a_model_card_does_not_make_another_model(static_model, tmp_path):
    static_model.save_pretrained(str(tmp_path / "model"))
    revision = local_model(tmp_path / "model").revision
    (tmp_path / "model" / "README.md").write_text("New words.")
    assert local_model(tmp_path / "model").revision == revision
    (tmp_path / "model" / "config_sentence_transformers.json").write_text("{}")
    assert local_model(tmp_path / "model").revision != revision


def test_scored_pairs_and_clusters(static_model, task, tmp_path):
    import mteb

    texts = list(task["corpus"].values())
    pairs = [(a, b, float(len(set(a.split()) & set(b.split())))) for a, b in itertools.pairwise(texts)]
    lines = ["sentence1\tsentence2\tscore", *("\t".join(map(str, pair)) for pair in pairs)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [{"text": text, "label": "short" if len(text) < 40 else "long"} for text in texts]
    (tmp_path / "classes.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    stm.prepare(static_model, "cosine").save_pretrained(str(tmp_path / "model"))
    loaded = local_model(tmp_path / "model").load_model(device="cpu")
    tasks = [local_task(tmp_path / name) for name in ("pairs.tsv", "classes.jsonl")]
    result = mteb.evaluate(loaded, tasks, cache=None, show_progress_bar=False)
    sts, clusters = (one.scores["test"][0] for one in result.task_results)
    x, y = (static_model.encode(list(side)) for side in list(zip(*pairs, strict=True))[:2])
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert sts["cosine_spearman"] == pytest.approx(stm.geometry.spearman(cosines, [p[2] for p in pairs]), abs=1e-4)
    assert 0 <= clusters["v_measure"] <= 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "sentence1,sentence2,score\nx,y,high\n", r"a.csv:2: the score 'high' is not a number"),
        ("a.csv", "sentence1,sentence2,score\nx,y\n", r"a.csv:2: this line has another number of fields"),
        ("a.csv", "one,two\n1,2\n", r"the columns \['one', 'two'\].*text and label a clustering task"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.jsonl", '{"text": "x", "label": 1}\nnonsense\n', r"a.jsonl, line 2: is not valid JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl, line 1: is a list, not an object"),
        ("a.png", "x", "is not a table"),
    ],
)
def test_bad_tables_name_file_and_line(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        local_task(tmp_path / name)


def test_bad_models_and_arguments(tmp_path):
    with pytest.raises(DataError, match=r"no modules\.json"):
        local_model(tmp_path)
    with pytest.raises(DataError, match="2 texts and 1 labels"):
        clustering_task(["a", "b"], [1], "x")


def test_the_command_line_names_what_is_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, error, message in (
        (["-m", str(tmp_path / "empty"), "-t", "STS12"], DataError, r"no modules\.json"),
        (["-t", "nothere"], DataError, "^nothere is neither a folder nor one of mteb's tasks"),
        (["-m", "nothere"], DataError, "^nothere is neither a folder nor the id of a model on the hub"),
        (["--output-folder", str(tmp_path / "file")], FileExistsError, "is a file; --output-folder takes a folder"),
        (["--model=x"], DataError, "Write --model x instead of"),
    ):
        with pytest.raises(error, match=message):
            run(["run", *arguments])
    refused = CliRunner().invoke(app, ["mteb", "run", "-m", str(tmp_path / "empty"), "-t", "STS12"])
    assert refused.exit_code == 2
    assert "no modules.json" in refused.stderr


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_mtebs_faiss_backend_and_compression(static_model, task, tmp_path, similarity):
    """FAISS searches by the model's similarity; bits compare as the wrapper of mteb has them: directions alone."""
    import mteb
    from mteb.models import CompressionWrapper, SearchEncoderWrapper
    from mteb.models.search_encoder_index import FaissSearchIndex
    from mteb.types import OutputDType

    pytest.importorskip("faiss")
    stm.prepare(static_model, similarity).save_pretrained(str(tmp_path / "model"))
    RetrievalData(*task.values()).save(tmp_path / "data")

    def ndcg(wrap):
        model = wrap(local_model(tmp_path / "model").load_model(device="cpu"))
        result = mteb.evaluate(model, local_task(tmp_path / "data"), cache=None, show_progress_bar=False)
        return result.task_results[0].scores["test"][0]["ndcg_at_10"]

    expected = stm.MagnitudeEvaluator(**task)(static_model)["matched_ndcg@10"]
    faiss = ndcg(lambda model: SearchEncoderWrapper(model, index_backend=FaissSearchIndex(model)))
    assert faiss == pytest.approx(expected, abs=6e-6)
    for dtype, least in ((OutputDType.FLOAT16, 0.99), (OutputDType.BINARY, 0.5)):
        assert least * expected <= ndcg(lambda model, dtype=dtype: CompressionWrapper(model, dtype)) <= 1
