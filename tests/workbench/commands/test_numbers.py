"""Every numeric option of every command at its edges: it works, or one line refuses it."""

import itertools

import pytest
from _calls import COMMANDS, call
from _cli import invoke
from conftest import CORPUS, QUERIES, save_splits
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import BoW

PAIRS = list(itertools.product(QUERIES.values(), CORPUS.values()))
LISTS = ("N,N,...", "X,X,...")


def numeric():
    for name, command in COMMANDS.items():
        for option in command.params:
            kind = option.type_descriptor.annotation
            if kind in (int, float) or option.metavar in LISTS:
                yield name, option.opts[0]


OPTIONS = sorted(numeric())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("numbers")
    words = BoW(["bread", "tea", "cat", "wine", "leaves", "the", "when", "a", "night", "tomatoes"])
    model = SentenceTransformer(modules=[words, Dense(10, 8)], device="cpu")
    model.save_pretrained(str(place / "model"))
    rows = [f"{query} {i},{text},{i % 5}" for i, (query, text) in enumerate(PAIRS)]
    (place / "scored.csv").write_text("\n".join(["query,document,score", *rows]))
    save_splits(place / "data", "train", "dev", "test")
    return place


@pytest.mark.parametrize("values", [(-1, 2**63), pytest.param((0, 2**32), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_no_number_is_a_fault_of_ours(place, tmp_path, monkeypatch, name, option, values):
    monkeypatch.chdir(place)
    data = "scored.csv" if option == "--threshold" else "data"
    named = {option, option.strip("-").replace("-", "_"), option.strip("-s")}
    refused = []
    for i, value in enumerate(values):
        usual = call(name, data=data, out=tmp_path / str(i))
        if option == "--epochs" and name == "train":
            usual[usual.index("--max-steps") + 1] = "-1"
        done = invoke(*usual, f"{option}={value}")
        assert done.exit_code in (0, 2, 3), (value, done.output[-2000:])
        refused.append(done.exit_code == 2 and any(x in done.stderr for x in named))
    assert refused[1]
    assert refused[0] or values[0] == 0 or option in ("--max-steps", "--threshold")


def test_all_kinds_of_options_are_walked():
    assert {name for name, _ in OPTIONS} == set(COMMANDS)
    assert len(OPTIONS) > 35
    assert {"--dims", "--seed", "--timeout"} <= {option for _, option in OPTIONS}
