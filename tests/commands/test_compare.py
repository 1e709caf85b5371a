"""``stm.compare``: which loss to train with, by successive halving within a budget."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.commands.app import app
from st_magnitude.commands.compare.bench import Bench
from st_magnitude.commands.compare.candidates import Candidate, grids
from st_magnitude.commands.compare.config import Budget
from st_magnitude.commands.compare.data import make_splits, read_splits
from st_magnitude.commands.compare.plan import FACTOR, Costs, least_budget, plan, plan_after, price
from st_magnitude.commands.compare.result import CompareResult, Entry, OnTest
from st_magnitude.commands.compare.run import PROBE_SECONDS, _Run
from st_magnitude.commands.compare.study import Measurement, Record
from st_magnitude.commands.compare.workers import InTurn
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.comparison import own_ndcg

THINGS = "bread bicycle cat tomato sofa wine carpet tea leaf autumn river bridge horse piano lamp forest engine doctor"
PLACES = "kitchen garden cellar harbour market library station castle meadow office"
CORPUS = {f"{t}-{p}": f"A {t} was left in the {p}." for t in THINGS.split() for p in PLACES.split()}
QUERIES = {key: "who saw the {} at the {}?".format(*key.split("-")) for key in CORPUS}
SMALL = stm.CompareConfig(
    budget="400 steps",
    epochs=1,
    losses=["qnorm"],
    temperatures=[0.05, 0.1],
    learning_rates=[0.03],
    sigreg=[0],
    batch_size=8,
)


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
def model_path(tmp_path_factory, static_parts):
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer, weights = static_parts
    place = tmp_path_factory.mktemp("static")
    SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=weights[:, :32].clone())], device="cpu"
    ).save_pretrained(str(place))
    return str(place)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidates", [1, 3, 7, 10, 20, 80])
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 8.0), Costs(0.01, 2.0)])
@pytest.mark.parametrize("pilot", [False, True])
def test_a_plan_fits_its_budget_and_uses_it(candidates, costs, pilot):
    least = least_budget(candidates, costs, 100_000, pilot)
    for amount in (least, 1.5 * least, 4 * least):
        rungs = plan(candidates, amount, costs, 100_000, pilot)
        assert 0.9 * amount < price(rungs, costs) <= amount * (1 + 1e-9)
        assert rungs[0].candidates == candidates
        assert rungs[0].steps >= 19
        assert rungs[-1].steps >= 99
        for a, b in pairwise(rungs):
            assert b.steps == pytest.approx(FACTOR * a.steps, abs=FACTOR)
            assert b.candidates == min(a.candidates, max(3, math.ceil(a.candidates / FACTOR)) + 2)  # the two controls
    assert len(rungs) > 1 or not pilot


def test_a_plan_makes_no_more_epochs_than_asked_for():
    assert [rung.steps for rung in plan(20, 1e9, Costs(), most=300)] == [33, 100, 300]
    assert plan(20, 1e9, Costs(), most=12) == [(12, 20)]
    assert plan_after(33, 9, 1e9, Costs(), most=300) == [(100, 9), (300, 5)]
    assert plan_after(300, 5, 1e9, Costs(), most=300) == []


@pytest.mark.parametrize("config", [stm.CompareConfig(), SMALL, stm.CompareConfig(sigreg=[0.1], losses=["dot"])])
def test_every_loss_has_the_same_settings(config):
    for grid in grids(config, is_static=True):
        plain = {(c.temperature, c.learning_rate) for c in grid if c.is_plain_cosine}
        for kind in {(c.loss, c.sigreg) for c in grid}:
            same_kind = {(c.temperature, c.learning_rate) for c in grid if (c.loss, c.sigreg) == kind}
            assert same_kind == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"losses": ["q-norm"]}, "losses has 'q-norm'. Did you mean 'qnorm'?"),
        ({"budget": "soon"}, "such as '30m', '2h' or '500 steps'; got 'soon'"),
        ({"temperatures": [0.0]}, "temperatures must be a positive number; got 0.0"),
        ({"sigreg": [-1.0]}, "sigreg must be weights of at least 0"),
        ({"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace("(", r"\(")):
        stm.CompareConfig(**settings)


# --- the data ---------------------------------------------------------------------------------------------------------


def test_missing_splits_are_held_out_of_the_training_queries(folder):
    splits = make_splits(RetrievalData(QUERIES, CORPUS, {q: {q} for q in QUERIES}), documents=100)
    queries = [set(data.queries) for data in (splits.train, splits.dev, splits.test)]
    assert [len(part) for part in queries] == [116, 36, 28]
    assert set.union(*queries) == QUERIES.keys()
    assert len(splits.dev.corpus) == len(splits.test.corpus) == 100
    assert "There is no dev split, so 36 of the training queries are held out for it." in splits.notes
    assert "The dev split has 36 queries, on which differences" in splits.notes[2]
    given = read_splits(folder)
    assert given == read_splits(folder)
    assert (given.dev.queries, given.test.queries) == (part(1).queries, part(2).queries)
    assert not given.notes


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        (part(0), "60 queries of the dev split are also trained on, such as"),
        (part(2), "60 queries of the test split are also in the dev split"),
        (RetrievalData({"x": "who?"}, {"d": "he"}, {}), "No query of the dev split has a relevant document"),
        (RetrievalData({"x": "who?"}, {"d": "he"}, {"x": {"d"}}), "Every document of the dev split is relevant"),
    ],
)
def test_data_that_cannot_choose_is_refused(dev, message):
    with pytest.raises(DataError, match=message):
        make_splits(part(0), dev, part(2))


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(folder, model_path, tmp_path_factory):
    """A comparison by the command for 16 of 32 dimensions: eight candidates, two rungs, a stop in the second."""
    pytest.importorskip("optuna")
    output = tmp_path_factory.mktemp("runs") / "compare"
    options = ["--budget", "470 steps", "--losses", "qnorm,tempaggmrl,learnable", "--temperatures", "0.05,0.1"]
    options += ["--sigreg", "0", "--learning-rates", "0.03", "--batch-size", "4", "--epochs", "4", "--dim", "16"]
    command = ["compare", "--data", str(folder), "--model", model_path, "--output", str(output), *options, "--json"]
    measured, seen = Bench.measured, []

    def stop_once(self, candidate, steps, *arguments, **more):
        if len(seen) == 10:
            seen.append("stop")
            raise KeyboardInterrupt
        seen.append((candidate.name, steps))
        return measured(self, candidate, steps, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(Bench, "measured", stop_once)
        stopped, done = (CliRunner().invoke(app, command) for _ in range(2))
    assert stopped.exit_code == 130
    assert "Give the same command again" in stopped.stderr
    assert done.exit_code == 0, done.output
    assert "Continuing after 10 training runs" in done.stderr
    assert len(seen) == len(set(seen))
    return output, json.loads(done.stdout), stopped.stderr + done.stderr


@pytest.mark.slow
def test_the_output(finished):
    output, figures, said = finished
    assert json.loads((output / "compare.json").read_text()) == figures
    assert {path.name for path in output.iterdir()} == {
        *("model", "compare.json", "compare.md", "compare-curves.png", "report.html", "train_winner.py", "study.log")
    }
    result = CompareResult.load(output)
    assert result.to_dict() == figures
    assert len(result.candidates) == 8
    assert figures["rungs"][0] == [20, 8]
    assert sum(steps * n for steps, n in figures["rungs"]) <= 470
    lines = [*said.splitlines(), *(output / "compare.md").read_text().splitlines()]
    assert [line for line in lines if len(line) > 80 and str(output) not in line] == []
    assert "left] 1/2 1/8 cosine tau=0.05 lr=0.03" in said
    assert result.recommendation.split(".")[0] in (output / "report.html").read_text()


@pytest.mark.slow
def test_controls_reach_the_last_rung_and_the_best_third_with_them(finished):
    entries = CompareResult.load(finished[0]).candidates
    last = max(entry.last.steps for entry in entries)
    finalists = {entry.candidate.name for entry in entries if entry.last.steps == last}
    first_rung = sorted(entries, key=lambda entry: -entry.rungs[0].ndcg)
    plain = [e.candidate.name for e in first_rung if e.candidate.is_plain_cosine]
    third = first_rung[2].rungs[0].ndcg
    best = {entry.candidate.name for entry in first_rung if entry.rungs[0].ndcg >= third}
    controls = {plain[0], "cosine tau=0.05 lr=0.03"}
    assert controls <= finalists <= best | controls
    assert len(finalists) >= 3


@pytest.mark.slow
def test_the_saved_model_is_the_winner_and_its_figures_are_those_of_the_test_split(finished, folder):
    output, figures, _ = finished
    model, test = stm.load(str(output / "model")), part(2)
    per_query = own_ndcg(model, test)
    assert per_query.mean() == pytest.approx(figures["test"]["ndcg"][figures["winner"]], abs=1e-9)
    assert json.loads((output / "model" / "training.json").read_text())["dev"]["queries"] == 60
    assert model.truncate_dim == 16


@pytest.mark.slow
def test_the_script_trains_the_winner_again(finished, monkeypatch):
    output, _, _ = finished
    source = (output / "train_winner.py").read_text()
    assert len(source.strip().splitlines()) <= 14
    exec(compile(source, "train_winner.py", "exec"), {})
    again, before = (stm.load(str(output / name)) for name in ("again", "model"))
    assert again.truncate_dim == before.truncate_dim == 16
    weights = again.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in before.state_dict().items())


@pytest.mark.slow
def test_a_finished_comparison_is_not_overwritten(finished, folder, model_path):
    with pytest.raises(FileExistsError, match="holds a finished comparison"):
        stm.compare(model_path, folder, finished[0], SMALL)


def test_a_stopped_comparison_continues_after_its_last_measurement(folder, model_path, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    measured = Bench.measured
    seen = []

    def stop_at_third(self, candidate, *arguments, **options):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(candidate.name)
        return measured(self, candidate, *arguments, **options)

    monkeypatch.setattr(Bench, "measured", stop_at_third)
    lines = []
    model = SentenceTransformer(model_path, device="cpu")
    data = {"dev": RetrievalData(part(1).queries, CORPUS, part(1).relevant), "test": part(2)}
    with pytest.raises(KeyboardInterrupt, match="Give the same command again"):
        stm.compare(model, part(0), tmp_path / "out", SMALL, **data, say=lines.append)
    monkeypatch.setattr(Bench, "measured", lambda self, c, *a, **o: seen.append(c.name) or measured(self, c, *a, **o))
    with pytest.raises(FileExistsError, match=r"other settings: batch_size \(8 there, 4 now\)"):
        stm.compare(model, part(0), tmp_path / "out", replace(SMALL, batch_size=4), **data, say=lines.append)
    before = model.state_dict()
    result = stm.compare(
        lambda: SentenceTransformer(model_path, device="cpu"),
        part(0),
        tmp_path / "out",
        SMALL,
        **data,
        say=lines.append,
    )
    assert "Continuing after 3 training runs" in lines[-2]
    assert seen == [entry.name for entry in grids(SMALL, is_static=True)[0]]  # each of the four once
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(result.candidates) == 4
    exec(compile((tmp_path / "out" / "train_winner.py").read_text(), "train_winner.py", "exec"), {})


KILLED = """
import os, signal, sys
from st_magnitude.commands.compare.bench import Bench
from st_magnitude.commands.compare.run import PROBE_SECONDS
measured, seen = Bench.measured, []
def counted(self, candidate, steps, keep, limit):
    if limit == PROBE_SECONDS:
        return measured(self, candidate, steps, keep, limit)
    if len(seen) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(candidate.name)
    print("trains", candidate.name, flush=True)
    return measured(self, candidate, steps, keep, limit)
Bench.measured = counted
from st_magnitude.commands.app import app
app(sys.argv[2:])
"""


@pytest.mark.slow
def test_a_killed_process_loses_the_candidate_at_hand_only(folder, model_path, tmp_path):
    pytest.importorskip("optuna")
    options = ["compare", "--data", folder, "--model", model_path, "--output", tmp_path / "out", "--budget", "20m"]
    options += ["--losses", "dot", "--temperatures", "0.05,0.1", "--sigreg", "0", "--learning-rates", "0.03"]
    trained = []
    for stop_after, code in ((2, -signal.SIGKILL), (99, 0)):
        command = [sys.executable, "-c", KILLED, str(stop_after), *map(str, options)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == code, done.stderr[-2000:]
        trained += [line for line in done.stdout.splitlines() if line.startswith("trains")]
    assert len(trained) == len(set(trained)) == 4
    assert (tmp_path / "out" / "model" / "modules.json").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "20 steps"}, "A budget of 20 steps is too small: 4 candidates need --budget '.* steps' at least"),
        ({"budget": "1s"}, "A budget of 1 s is too small: 4 candidates need --budget '.*m' at least"),
        ({"max_length": 8}, "reads texts of any number of tokens"),
        ({"dim": 33}, "dim is 33, and the embeddings of this model have 32 dimensions; give at most that"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_candidate(folder, model_path, tmp_path, change, message):
    pytest.importorskip("optuna")
    with pytest.raises(ValueError, match=message):
        stm.compare(model_path, folder, tmp_path / "out", replace(SMALL, **change), say=lambda line: None)


def test_other_files_and_several_processes_are_refused(folder, model_path, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        stm.compare(model_path, folder, tmp_path, SMALL)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        stm.compare(model_path, folder, tmp_path / "out", SMALL)


def test_without_optuna_the_extra_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'compare needs optuna: pip install "st-magnitude\[compare\]"'):
        stm.compare("anything", folder, tmp_path / "out", SMALL)


def test_a_candidate_that_diverges_is_measured_as_such(folder, model_path, tmp_path):
    bench = Bench.of(model_path, read_splits(folder), tmp_path, SMALL)
    candidate = Candidate("qnorm", 0.05, 1e38)
    measured = bench.measured(candidate, 3)
    assert math.isnan(measured.ndcg)
    assert "diverged" in Entry(candidate, [measured]).row


def test_a_shorter_index_is_what_every_search_has_and_training_has_all_dimensions(folder, model_path, tmp_path):
    bench = Bench.of(model_path, read_splits(folder), tmp_path, replace(SMALL, dim=8))
    candidate = Candidate("tempaggmrl", 0.05, 0.03)
    assert bench.settings(candidate, 3).dims == [8, 16, 32]
    measured = bench.measured(candidate, 3, keep=True)
    model = stm.load(str(bench.folder(candidate)))
    assert model.truncate_dim == model.get_embedding_dimension() == 8

    dev = bench.dev.encode(model)
    assert dev.documents.shape[1] == 8
    with model.truncate_embeddings(None):
        whole = bench.dev.encode(model)
    prefix = whole.prefix(8)
    assert measured.ndcg == pytest.approx(prefix.ndcg(prefix.top(stm.COSINE)).mean(), abs=1e-9)
    assert measured.ndcg != pytest.approx(whole.ndcg(whole.top(stm.COSINE)).mean(), abs=1e-9)
    assert "keeps the first 8 dimensions" in bench.notes[-1]


def test_the_record_is_read_again_by_another_process(tmp_path):
    pytest.importorskip("optuna")
    record, found = Record(tmp_path / "study.log", {"seed": 0}), {}
    for i, score in enumerate([0.1, math.nan, 0.4]):
        candidate = Candidate("cosine", 0.01 * (i + 1), 0.1)
        found[candidate] = Measurement(10, score, 1.0, 2.0, 0.1)
        record.add(candidate, found[candidate])
    again = Record(tmp_path / "study.log", {"seed": 0})
    assert repr(again.measured) == repr({candidate: [measured] for candidate, measured in found.items()})
    assert [trial.state.name for trial in again.study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert again.study.best_params == {**vars(candidate), "steps": 10}


# --- the budget -------------------------------------------------------------------------------------------------------


class Machine:
    """A clock, and a bench on which a training run takes as long as its speed at that time says."""

    def __init__(self, speed, config, most_steps=10**6, fixed=2.0, step=0.05):
        self.speed, self.most_steps, self.fixed, self.step = speed, most_steps, fixed, step
        self.candidates, self.now, self.seen = grids(config, is_static=False), 0.0, []
        self.dev = self.test = RetrievalData({"q": "who?"}, {"d": "he", "e": "she"}, {"q": {"d"}})

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        began = self.now
        while seconds > 0:
            part = min(0.1, seconds)
            self.now += part / self.speed(self.now)
            seconds -= part
        return self.now - began

    @cached_property
    def pretrained(self):
        self.work(self.fixed / 2)
        return np.zeros(3)

    def measured(self, candidate, steps, keep=False, limit=math.inf):
        other, training, done = self.work(self.fixed), 0.0, 0
        cost = self.step * (1.4 if candidate.loss == "learnable" else 1.2 if candidate.sigreg else 1.0)
        while done < steps and training < limit:
            training, done = training + self.work(10 * cost), done + 10
        self.seen += [(candidate, steps)] if done >= steps and limit != PROBE_SECONDS else []
        steps = min(done, steps)
        score = 0.3 + 0.01 * math.log10(steps) + 0.001 * (candidate.learning_rate > 3e-5) - 0.1 * candidate.temperature
        return Measurement(steps, score, 1.0, other + training, training / steps)

    def compare(self, budget, folder, monkeypatch):
        pytest.importorskip("optuna")
        monkeypatch.setattr("st_magnitude.commands.compare.run.time", self)
        run = _Run(self, InTurn(), Record(folder / "study.log", {}), Budget.parse(budget), lambda line: None, 0.0)
        return run, run.halve()


SPEEDS = {
    "steady": lambda now: 1.0,
    "slow start": lambda now: 0.3 if now < 30 else 1.0,
    "faster and faster": lambda now: 0.7 + now / 1800,
    "slower and slower": lambda now: 1.5 - now / 1800,
    "twice as fast in the middle": lambda now: 1.0 if now < 900 else 2.0,
    "half as fast in the middle": lambda now: 1.0 if now < 900 else 0.5,
    "three times as fast at two thirds": lambda now: 1.0 if now < 1200 else 3.0,
    "a tenth as fast near the end": lambda now: 1.0 if now < 1500 else 0.1,
    "up and down": lambda now: 1.0 + 0.5 * math.sin(now / 50),
}


SIZES = {
    "80": stm.CompareConfig(),
    "10": stm.CompareConfig(temperatures=[0.02, 0.05], learning_rates=[2e-5], sigreg=[0]),
}
SIZES["2"] = replace(SIZES["10"], losses=["qnorm"], temperatures=[0.05])


@pytest.mark.parametrize(
    ("speed", "size"),
    [*((speed, "10") for speed in SPEEDS), *((speed, "80") for speed in list(SPEEDS)[:3]), ("steady", "2")],
)
def test_a_time_budget_is_honoured_within_ten_percent(speed, size, tmp_path, monkeypatch):
    machine = Machine(SPEEDS[speed], SIZES[size])
    run, finalists = machine.compare("30m", tmp_path, monkeypatch)
    assert 0.9 * 1800 < machine.now + run.end < 1.1 * 1800
    assert len(machine.seen) == len(set(machine.seen))
    assert finalists[0].last.steps == max(steps for _, steps in machine.seen)
    assert any(entry.candidate.is_plain_cosine for entry in finalists)
    assert len(finalists) >= 2


def test_time_is_left_over_where_the_epochs_end(tmp_path, monkeypatch):
    machine = Machine(SPEEDS["steady"], SIZES["10"], most_steps=300)
    _, finalists = machine.compare("30m", tmp_path, monkeypatch)
    assert sorted(Counter(steps for _, steps in machine.seen).items()) == [(100, 10), (300, 5)]
    assert len(finalists) == 5


# --- on a cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_workers():
    ray = pytest.importorskip("ray", reason="pip install 'st-magnitude[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray
    ray.shutdown()


class Fatal:
    """A hook of a model that kills the process of a worker, once."""

    def __init__(self, once):
        self.once, self.driver = once, os.getpid()

    def __call__(self, module, inputs):
        if self.once.exists() and os.getpid() != self.driver:
            self.once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_finds_what_one_process_finds_when_a_worker_is_killed_and_after_a_stop(
    two_workers, model_path, tmp_path, monkeypatch
):
    data = {"dev": part(1), "test": part(2)}
    config = replace(SMALL, epochs=10, budget="500 steps")
    alone = stm.compare(model_path, part(0), tmp_path / "one", config, **data, say=lambda line: None)
    once, lines, add = tmp_path / "once", [], Record.add
    once.touch()
    model = SentenceTransformer(model_path, device="cpu")
    model[0].register_forward_pre_hook(Fatal(once))

    def stop(self, *arguments):
        add(self, *arguments)
        if sum(map(len, self.measured.values())) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Record, "add", stop)
    config = replace(config, ray="auto")
    with pytest.raises(KeyboardInterrupt, match="Give the same command again"):
        stm.compare(model, part(0), tmp_path / "out", config, **data, say=lines.append)
    assert not once.exists()
    deadline = time.monotonic() + 20
    while two_workers.available_resources().get("CPU") != 2.0:  # the other task has ended too
        assert time.monotonic() < deadline
        time.sleep(0.1)
    result = stm.compare(model, part(0), tmp_path / "out", config, **data, say=lines.append)
    assert "Continuing after 1 training runs" in "".join(lines)
    assert result.winner.name == alone.winner.name
    for a, b in zip(result.candidates, alone.candidates, strict=True):
        assert (a.name, [m.steps for m in a.rungs]) == (b.name, [m.steps for m in b.rungs])
        assert [m.ndcg for m in a.rungs] == pytest.approx([m.ndcg for m in b.rungs], abs=1e-6)
    assert result.test.ndcg == pytest.approx(alone.test.ndcg, abs=1e-6)


@pytest.mark.slow
def test_a_killed_driver_on_a_cluster_loses_what_was_being_trained_only(folder, model_path, tmp_path):
    pytest.importorskip("ray")
    options = ["compare", "--data", folder, "--model", model_path, "--output", tmp_path / "out", "--ray", "local"]
    options += ["--budget", "400 steps", "--epochs", "1", "--losses", "dot", "--temperatures", "0.05,0.1"]
    options += ["--sigreg", "0", "--learning-rates", "0.03", "--batch-size", "8"]
    for stop_after, code in ((2, -signal.SIGKILL), (99, 0)):
        command = [sys.executable, "-c", KILLED_DRIVER, str(stop_after), *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr[-2000:]
    assert "Continuing after 2 training runs" in done.stdout
    assert done.stdout.count(" 1/1 ") == 2
    assert (tmp_path / "out" / "model" / "modules.json").is_file()


KILLED_DRIVER = """
import os, signal, sys
from st_magnitude.commands.compare.study import Record
add, seen = Record.add, []
def counted(self, *arguments):
    add(self, *arguments)
    seen.append(arguments)
    if len(seen) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
Record.add = counted
from st_magnitude.commands.app import app
app(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "There is no Ray cluster at 127.0.0.1:1"), ("nonsense", "nonsense")],
)
def test_a_wrong_address_is_named_before_anything_is_loaded(address, message, tmp_path):
    pytest.importorskip("optuna")
    pytest.importorskip("ray").shutdown()
    with pytest.raises((ConnectionError, ValueError), match=message):
        stm.compare("no-model", tmp_path / "no-data", tmp_path / "out", replace(SMALL, ray=address))


# --- the verdict ------------------------------------------------------------------------------------------------------


def result_with(first, gain, customary=None, exponent=0.0):
    names = {"cosine": Candidate("cosine", 0.02, 2e-5), "qnorm": Candidate("qnorm", 0.02, 2e-5)}
    entries = [
        Entry(names[n], [Measurement(100, 0.5, e, 10.0, 0.08)]) for n, e in (("qnorm", exponent), ("cosine", 1.0))
    ]
    entries = entries[:: 1 if first == "qnorm" else -1]
    cosine = names["cosine"].name
    gains = {cosine: gain} if first == "qnorm" else {}
    gains |= {"cosine tau=0.05 lr=2e-05": customary} if customary else {}
    test = OnTest(300, 5000, dict.fromkeys((names[first].name, *gains), 0.5), gains)
    return CompareResult("base", entries, test, 0.4, 100, 384, "30 min", 1.0, [])


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (result_with("qnorm", (0.02, 0.01, 0.03)), "Use qnorm tau=0.02 lr=2e-05. On the test split,"),
        (
            result_with("qnorm", (0.02, 0.01, 0.03)),
            "by +0.0200 [+0.0100, +0.0300] against cosine tau=0.02 lr=2e-05: a clear gain.",
        ),
        (result_with("qnorm", (0.01, -0.01, 0.03)), "Use cosine tau=0.02 lr=2e-05. On the test"),
        (result_with("qnorm", (0.01, -0.01, 0.03)), ": no clear difference."),
        (result_with("qnorm", (-0.03, -0.04, -0.01)), ": a clear loss."),
        (result_with("cosine", None), "no other candidate has a higher nDCG@10 on dev"),
        (
            result_with("cosine", None, (0.01, -0.01, 0.02)),
            "differs from cosine at 0.05 by +0.0100 [-0.0100, +0.0200]: no clear difference.",
        ),
    ],
)
def test_the_verdict(result, says):
    assert says in result.recommendation
    assert max(map(len, str(result).splitlines())) <= 80


def test_what_serving_costs():
    assert "1,536 bytes per document" in result_with("cosine", None).costs
    assert "every server" in result_with("cosine", None).costs
    assert "docs/serving.md" in result_with("qnorm", (0.02, 0.01, 0.03), exponent=0.5).costs


def test_budgets_as_text():
    assert [str(Budget.parse(text)) for text in ("90s", "30m", "2h", "1.5 h", "70 steps")] == [
        *("90 s", "30 min", "120 min", "90 min", "70 steps")
    ]
    assert [Budget(x).rounded_up for x in (61.0, 3600.0)] == ["2m", "60m"]
