"""``stm.compare``: which loss to train with, within a budget."""

import errno
import json
import math
import re
import shlex
import shutil
import time
from dataclasses import replace

import pytest
import torch
from _cli import figures as command_figures
from _lookup import bag
from _tiny import load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.judge import Difference
from st_magnitude.result import to_plain
from st_magnitude.surgery.vocabulary import remembered_tokens
from st_magnitude.workbench.comparison import compare as compare_module
from st_magnitude.workbench.comparison.compare import Comparison
from st_magnitude.workbench.comparison.config import Candidate, CompareConfig, grid_of
from st_magnitude.workbench.comparison.exam import exam_of
from st_magnitude.workbench.comparison.result import CompareResult, Entry
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.finetune.trainer import make_trainer
from st_magnitude.workbench.judging.choice import Decision, System
from st_magnitude.workbench.judging.verdict import BEFORE, Scored, Verdict

THINGS = (
    "bread bicycle cat tomato sofa wine carpet tea leaf autumn river bridge horse piano lamp forest"
    " engine doctor"
)
PLACES = "kitchen garden cellar harbour market library station castle meadow office"
CORPUS = {f"{t}-{p}": f"A {t} was left in the {p}." for t in THINGS.split() for p in PLACES.split()}
QUERIES = {key: "who saw the {} at the {}?".format(*key.split("-")) for key in CORPUS}
SMALL = CompareConfig(
    max_steps=7, losses=["qnorm"], temperatures=[0.05, 0.1], learning_rates=[0.03], batch_size=8
)
NOVICE = bag(["a"])


def part(first: int, step: int = 3) -> RetrievalData:
    """Every third query, with the whole corpus."""
    chosen = list(QUERIES)[first::step]
    return RetrievalData({q: QUERIES[q] for q in chosen}, CORPUS, {q: {q} for q in chosen})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    replace(part(0), queries=QUERIES).save(place, "train")
    for name, data in (("dev", part(1)), ("test", part(2))):
        data.save_qrels(place / "qrels" / f"{name}.tsv")
    return place


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, small_static):
    """A table of 32 dimensions, of which searches keep 8: all make no mistake on these texts."""
    (whole,) = stm.load(small_static, device="cpu")
    weights = whole.embedding.weight.detach()[:, :32].clone()
    table = StaticEmbedding(whole.tokenizer, embedding_weights=weights)
    place = str(tmp_path_factory.mktemp("static"))
    SentenceTransformer(modules=[table], truncate_dim=8, device="cpu").save_pretrained(place)
    return place


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("config", [CompareConfig(), SMALL, CompareConfig(losses=["dot"])])
def test_every_loss_has_each_setting_before_the_next_and_cosine_is_first(config, is_static):
    grid = grid_of(config, is_static)
    losses = list(dict.fromkeys(c.loss for c in grid))
    assert losses[0] == "cosine"
    settings = [(c.temperature, c.learning_rate) for c in grid if c.loss == "cosine"]
    assert grid == [Candidate(loss, *setting) for setting in settings for loss in losses]
    assert len({*settings}) == len(settings)
    rates = list(dict.fromkeys(rate for _, rate in settings))
    assert [rate for _, rate in settings[: len(rates)]] == rates


@pytest.mark.parametrize("steps", [None, 2])
def test_the_defaults_of_train_are_the_first_candidate(folder, model_path, tmp_path, steps):
    base = stm.load(model_path)
    config = CompareConfig(max_steps=steps, budget="9h")
    trials = comparison(base, folder, config, tmp_path)
    found = trials.grid[0].settings(config, trials.steps)
    with remembered_tokens(base):
        trainers = [
            make_trainer(base, trials.exam.train, trials.rows, given, tmp_path, saves=False)
            for given in (found, TrainConfig(max_steps=steps or -1))
        ]
    ours, usual = (trainer.args.to_dict() for trainer in trainers)
    assert {name for name in usual if ours[name] != usual[name]} <= {"max_steps", "logging_dir"}
    if steps is None:
        of_epoch = len(trainers[1].get_train_dataloader())
        assert ours["max_steps"] == math.ceil(usual["num_train_epochs"] * of_epoch)
    ours, usual = (trainer.loss.get_config_dict() for trainer in trainers)
    assert ours == usual


def exam(data, config):
    found = exam_of(stm.load_splits(data), NOVICE, (), config)
    assert not found.folds
    return found


def test_queries_are_held_out_and_a_search_has_a_sample_of_the_documents(folder, caplog):
    config = CompareConfig(documents=100)
    found = exam(RetrievalData(QUERIES, CORPUS, {q: {q} for q in QUERIES}), config)
    queries = [set(data.queries) for data in (found.choose, found.judged, found.train)]
    assert [len(part) for part in queries] == [36, 29, 115]
    assert set.union(*queries) == QUERIES.keys()
    assert len(found.choose.corpus) == len(found.judged.corpus) == 100
    assert "a prior would change nothing" in found.notes[-1]
    assert caplog.text.count("29 queries are few") == 1
    given = exam(folder, CompareConfig())
    assert given == exam(folder, CompareConfig())
    assert given.notes == found.notes[-1:]


def comparison(model, folder, config, output):
    return Comparison(model, None, exam(folder, config), config, output, str, time.perf_counter())


@pytest.fixture
def trials(folder, model_path, tmp_path):
    return comparison(stm.load(model_path), folder, replace(SMALL, max_steps=None), tmp_path)


def test_a_candidate_is_measured_early_and_ends_where_another_of_its_loss_was_better(trials):
    candidate = Candidate("qnorm", 0.05, 0.03)
    whole = trials.train(candidate)
    assert [steps for steps, _ in whole.curve] == [7, 21]
    model = stm.load(trials.folder(candidate))
    assert stm.encode(model, trials.dev).search(10).mean == pytest.approx(whole.score, abs=1e-9)
    shutil.rmtree(trials.folder(candidate))
    for loss, ends in (("qnorm", True), ("dot", False)):
        better = replace(whole, candidate=Candidate(loss, 0.1, 0.03), curve=[(7, 2.0), (21, 2.0)])
        trials.entries = [better] * 2  # which are the first two
        again = trials.train(candidate)
        assert again.curve == whole.curve[: 1 if ends else 2]
        assert not trials.folder(candidate).exists()


def test_a_candidate_that_diverges_is_measured_as_such(trials):
    entry = trials.train(Candidate("qnorm", 1e-45, 1.0))
    assert [math.isnan(ndcg) for _, ndcg in entry.curve] == [True]
    assert entry.shown_score == "diverged"


def test_max_length_limits_training_alone(folder, tmp_path):
    config, lengths = replace(SMALL, max_length=4, max_steps=6), []
    model = load_transformer(save_transformer(tmp_path / "tiny"))
    model.max_seq_length = 24
    trials = comparison(model, folder, config, tmp_path)
    trials.base.register_forward_pre_hook(  # of the copies that are trained, too
        lambda model, inputs: lengths.append((model.training, inputs[0]["input_ids"].shape[1]))
    )
    candidate = Candidate("cosine", 0.05, 1e-3)
    ndcg = trials.train(candidate).score
    assert max(length for is_training, length in lengths if is_training) == 4
    assert max(length for is_training, length in lengths if not is_training) > 4
    model = stm.load(trials.folder(candidate))
    assert model.max_seq_length == 24
    assert stm.encode(model, trials.dev).search(10).mean == pytest.approx(ndcg, abs=1e-9)
    model.max_seq_length = 4
    assert stm.encode(model, trials.dev).search(10).mean != pytest.approx(ndcg, abs=1e-9)


FILES = {"model", "compare.json", "compare.md"}


@pytest.fixture(scope="module")
def finished(folder, model_path, tmp_path_factory):
    """A comparison of eight candidates by the command, and its figures."""
    output = tmp_path_factory.mktemp("runs") / "compare"
    options = {"temperatures": "0.02,0.1", "learning_rates": 0.03}
    options |= {"batch_size": 4, "epochs": 2, "output": output}
    return output, command_figures("compare", data=folder, model=model_path, **options)


@pytest.mark.slow
def test_the_saved_model_is_the_winner_which_train_makes_again_of_its_settings(
    finished, folder, model_path
):
    output, figures = finished
    assert figures == json.loads((output / "compare.json").read_text())
    assert (len(figures["candidates"]), figures["not_compared"]) == (8, [])
    assert figures["candidates"][0]["curve"][-1][0] == 30
    test = figures["test"]
    for path, ndcg in ((output / "model", test["saved"]["ndcg"]), (model_path, test["pretrained"])):
        found = stm.encode(stm.load(str(path)), part(2)).search(10).mean
        assert found == pytest.approx(ndcg, abs=1e-9)
    assert stm.load(str(output / "model")).truncate_dim == 8
    row = f"| {figures['winner']}, cosine | {test['saved']['ndcg']:.4f} |"
    assert row in (output / "model" / "README.md").read_text().replace(" (saved)", "")
    decision = Decision.load(output / "model")
    assert to_plain(decision) == test["decision"]
    options = {"data": folder, "output": output / "again"}
    command_figures("train", *shlex.split(figures["train_options"]), **options)
    again, before = (stm.load(str(output / name)).state_dict() for name in ("again", "model"))
    assert all(torch.equal(again[name], value) for name, value in before.items())
    with pytest.raises(FileExistsError, match="is not empty"):
        stm.compare(model_path, folder, output, SMALL)


def test_a_comparison_in_memory_ends_whole_or_leaves_nothing(model_path, tmp_path, monkeypatch):
    model = SentenceTransformer(model_path, device="cpu")
    output = tmp_path / "out"
    config = replace(SMALL, losses=("cosine",), max_steps=2)

    def run():
        data = {"train": part(0), "dev": part(1), "test": part(2)}
        return stm.compare(model, data, output, config, say=str)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    def stop(*_, **__):
        raise KeyboardInterrupt

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for place, fault, kind, said in (
        ("st_magnitude.training.run_folder.write_model", full, OSError, "Make room"),
        (f"{Comparison.__module__}.Comparison.judge", stop, KeyboardInterrupt, None),
        (f"{CompareResult.__module__}.CompareResult.save", full, OSError, "full"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, fault)
            with pytest.raises(kind, match=said):
                run()
        assert not output.exists()
    (output / ".st-magnitude.new").mkdir(parents=True)  # which a killed process leaves
    result = run()
    assert len(result.candidates) == len(grid_of(config, is_static=True)) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {path.name for path in output.iterdir()} == FILES
    with pytest.raises(FileExistsError, match="is not empty"):
        run()


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_budget_that_is_too_short_deploys_nothing(
    folder, model_path, tmp_path, monkeypatch, is_slow
):
    """It is over after one candidate, or cuts the steps of all."""
    clock, train = [0.0], Comparison.train

    def slow(*arguments):
        clock[0] += 40 * is_slow
        return replace(train(*arguments), seconds=40.0 * is_slow)

    monkeypatch.setattr(compare_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Comparison, "train", slow)
    monkeypatch.setattr(compare_module, "seconds_per_step", lambda *_: 0.0 if is_slow else 60.0)
    config = replace(SMALL, max_steps=40, epochs=99, budget="30s" if is_slow else "600s")
    result = stm.compare(model_path, folder, tmp_path / "out", config, say=str)
    said = " ".join(str(result).split())
    assert "this one has left out steps, or a loss" in said
    assert result.test.decision is None
    assert not (tmp_path / "out" / "model" / "deploy.json").exists()
    assert not re.search("Deploy|what is deployed", said)
    if is_slow:
        assert clock[0] == 40
        assert (result.left_out, result.not_compared) == (3, ("qnorm",))
        assert "The budget held 1 of 4 candidates. Not compared" in said
    else:
        assert result.winner.steps == 10
        assert "--max-steps 40" in result.train_options  # which the budget cut


@pytest.mark.parametrize(("pace", "steps"), [(0.0, 40), (10.0, 30), (50.0, 10)])
def test_a_budget_is_for_several_candidates(folder, model_path, tmp_path, monkeypatch, pace, steps):
    """Of two losses, whose steps take so many seconds."""
    monkeypatch.setattr(compare_module, "seconds_per_step", lambda *_: pace)
    config = replace(SMALL, max_steps=40, epochs=9, budget="600s")
    trials = comparison(stm.load(model_path), folder, config, tmp_path)
    said = []
    trials.say = said.append
    assert trials.steps == pytest.approx(steps, abs=1)
    assert any("600s are for a candidate of each" in line for line in said) == (steps < 40)


@pytest.mark.parametrize("folds", [0, 5])
def test_a_budget_is_used_up_and_kept(folder, model_path, tmp_path, monkeypatch, folds):
    """Each training takes 10 s, and so does one in a fold."""
    clock, train, judge = [0.0], Comparison.train, Comparison.judge
    monkeypatch.setattr(compare_module.time, "perf_counter", lambda: clock[0])

    def slow(*arguments):
        clock[0] += 10
        return replace(train(*arguments), seconds=10.0)

    def judged(*arguments):
        clock[0] += 10 * folds
        return judge(*arguments)

    monkeypatch.setattr(Comparison, "train", slow)
    monkeypatch.setattr(Comparison, "judge", judged)
    # in folds, the test takes 50 s, or 100 s if the first candidate is not plain cosine
    config = replace(SMALL, budget=f"{70 + 20 * folds}s", temperatures=[0.05, 0.1, 0.2, 0.02])
    data = RetrievalData(QUERIES, CORPUS, {q: {q} for q in QUERIES}) if folds else folder
    result = stm.compare(model_path, data, tmp_path / "out", config, say=str)
    assert bool(folds) == ("folds" in result.test.where)
    assert result.not_compared == ()
    number = 6 if not folds or result.over_cosine else 8
    assert len(result.candidates) == number
    assert ("The budget held 6 of 8 candidates." in result.recommendation) == (number == 6)
    assert clock[0] <= 70 + 20 * folds


def test_what_cannot_run_is_refused_before_any_search(folder, model_path, tmp_path, monkeypatch):
    monkeypatch.setattr(EncodedTask, "search", lambda *_, **__: pytest.fail("it has searched"))
    with pytest.raises(ValueError, match="reads texts of any number of tokens"):
        stm.compare(model_path, folder, tmp_path / "out", replace(SMALL, max_length=8), say=str)
    for run in (stm.compare, train):
        with pytest.raises(OSError, match="There is no model at 'no/such'"):
            run(model_path, "absent.csv", tmp_path / "out", also=["no/such"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        stm.compare(model_path, folder, tmp_path / "out", SMALL)


@pytest.mark.parametrize("finds", [True, False])
def test_plain_cosine_at_its_best_setting_on_dev_is_the_control(
    folder, model_path, tmp_path, monkeypatch, finds
):
    """On test qnorm finds all, and the cosine that is best on dev does so, too, or little."""
    train = Comparison.train
    monkeypatch.setattr(Comparison, "_may_be_tested", lambda *_: True)
    monkeypatch.setattr(Comparison, "ahead", lambda *_: [])
    dev = {("cosine", 0.05): 0.4, ("cosine", 0.1): 0.5, ("qnorm", 0.05): 0.6, ("qnorm", 0.1): 0.1}

    def fixed(self, candidate):
        entry = train(self, candidate)
        value = dev[candidate.loss, candidate.temperature]
        return replace(entry, curve=[(self.steps, value)])

    def judged(self, entry):
        model = stm.load(model_path)
        if entry.candidate.loss == "cosine" and not finds:
            model[0].embedding.weight.data[:, 2:] = 0
        ranking = stm.encode(model, self.exam.judged).search(100)
        return System(entry.name, ranking, entry.exponent, base=BEFORE)

    monkeypatch.setattr(Comparison, "train", fixed)
    monkeypatch.setattr(Comparison, "judge", judged)
    result = stm.compare(model_path, folder, tmp_path / "out", SMALL, say=str)
    assert result.first.name == "qnorm tau=0.05 lr=0.03"
    assert result.cosine.name == "cosine tau=0.1 lr=0.03"
    assert result.is_clear != finds
    assert result.winner == (result.cosine if finds else result.first)
    said = "no clear difference" if finds else "better"
    assert f"against {result.cosine.name}: {said}" in result.recommendation
    shown = str(result.test.table)
    assert result.cosine.name in shown
    assert "cosine tau=0.05" not in shown


CLEAR = Difference(0.02, 0.01, 0.03, 300, 99)
LEVEL = Difference(0.01, -0.01, 0.03, 300, 99)
LOSS = Difference(-0.03, -0.04, -0.01, 300, 99)


def result_with(first, over_cosine, over_pretrained=CLEAR):
    ranked = [
        Entry(Candidate(loss, 0.02, 2e-5), [(33, 0.4), (100, 0.5)], 1.0, 10.0)
        for loss in sorted(("cosine", "qnorm"), key=lambda loss: loss != first)
    ]
    test = Verdict((), Scored(1.0, 0.5, over_pretrained), "300 test queries")
    return CompareResult("base", ranked, test, over_cosine, 0.4, 100, 0, (), ())


@pytest.mark.parametrize(
    ("result", "winner", "parts"),
    [
        (result_with("qnorm", LOSS), "cosine", ["worse"]),
        (result_with("cosine", None), "cosine", ["Train with", "is better than the pretrained"]),
        (result_with("cosine", None, LEVEL), "cosine", ["There is no clear difference", ": +1.0"]),
        (result_with("qnorm", CLEAR, LOSS), "qnorm", ["If you train at all, train with"]),
    ],
)
def test_the_verdict(result, winner, parts):
    assert result.winner.candidate.loss == winner
    assert result.winner.name in result.recommendation
    assert all(part in result.recommendation for part in parts)
