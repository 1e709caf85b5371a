"""st-magnitude revela: from a folder of text to a plain retriever, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from _tiny import ROWS, save_decoder
from revela_tiny import retriever
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_magnitude.commands.app import app
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.revela import build_groups
from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.run import run

SECTIONS = [f"# {query}\n\n{passage}. {more}." for query, passage, more, _ in ROWS]
PAGES = {f"page{i}.md": "\n\n".join(SECTIONS[4 * i : 4 * i + 4]) for i in range(4)}
QUERIES, PASSAGES = ({f"t{i}": row[j] for i, row in enumerate(ROWS)} for j in (0, 1))
JUDGED = RetrievalData(QUERIES, PASSAGES, {"t0": {"t0"}, "t5": {"t5"}})
QUICK = {"group_size": 3, "max_words": 8, "max_steps": 2, "lora_rank": 2}


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in PAGES.items():
        (corpus / name).write_text(text, encoding="utf-8")
    retriever(tmp_path / "transformer").save_pretrained(str(tmp_path / "retriever"))
    save_decoder(tmp_path / "lm")
    return {name: tmp_path / name for name in ("corpus", "retriever", "lm", "output")}


def quick_run(places: dict[str, Path], **settings: object) -> dict:
    return run(**places, config=RevelaConfig(**QUICK | settings))


@pytest.mark.parametrize("kind", ["retriever", "lm"])
def test_from_text_to_a_plain_model(places, kind: str) -> None:
    """An encoder is trained as a whole; a bare decoder gets a LoRA, which is merged."""
    config = RevelaConfig(**QUICK, gradient_checkpointing=True)
    given = places | {"retriever": places[kind]}
    said: list[str] = []
    record = run(**given, config=config, data=JUDGED, say=said.append)
    model = SentenceTransformer(str(places["output"]), device="cpu")
    assert model.prompts["query"] == "Query: "
    assert not (places["output"] / "adapter_config.json").exists()
    assert json.loads((places["output"] / "revela.json").read_text())["after"] == record["after"]
    assert {"dense_ndcg@10", "bm25_ndcg@10", "hybrid_ndcg@10"} <= record["before"].keys()
    assert record["before"]["bm25_ndcg@10"] == record["after"]["bm25_ndcg@10"]
    shown = [line.split()[:2] for line in said if "nDCG@10:" in line]
    assert shown == [["before", "nDCG@10:"], ["after", "nDCG@10:"]]
    gains = {"reading_gain", "choice_gain"}
    assert {when: set(found) for when, found in record["gains"].items()} == dict.fromkeys(
        ("before", "after"), gains
    )
    if kind == "retriever":
        untrained = SentenceTransformer(str(places["retriever"]), device="cpu").encode("tea")
        assert np.abs(model.encode("tea") - untrained).max() > 0


def test_nothing_held_out_is_trained_on(places) -> None:
    record = quick_run(places, max_steps=-1)
    number = len(build_groups(places["corpus"], group_size=3, max_words=8))
    assert record["groups"] == {"train": number - 1, "held_out": 1}
    assert max(entry["step"] for entry in record["log"]) == number - 1
    assert "before" not in record  # nothing was judged


def test_a_single_group_is_trained_on(places) -> None:
    record = quick_run(places, group_size=99)
    assert record["groups"] == {"train": 1, "held_out": 0}
    assert not record["gains"]


def test_a_resumed_run_must_be_the_same_run(places, monkeypatch) -> None:
    """Another setting, another model and a changed text are named; more steps are accepted."""

    def stop(model: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("st_magnitude.revela.run.merge_lora", stop)  # after the last checkpoint
        with pytest.raises(KeyboardInterrupt):
            quick_run(places, save_steps=1)
    again = {"save_steps": 1, "resume": True}
    with pytest.raises(FileExistsError, match=r"temperature \(0\.05.*0\.3.*retriever"):
        quick_run(places | {"retriever": places["lm"]}, temperature=0.3, **again)
    page = places["corpus"] / "page0.md"
    page.write_text(PAGES["page0.md"].replace("two minutes", "two hours"))
    with pytest.raises(FileExistsError, match="groups"):
        quick_run(places, **again)
    page.write_text(PAGES["page0.md"])
    record = quick_run(places, max_steps=3, **again)
    assert [entry["step"] for entry in record["log"] if "next_token" in entry] == [1, 2, 3]
    assert not (places["output"] / "checkpoints").exists()


def command(places, **changes: object) -> list[str]:
    options = {**places, "group-size": 3, "max-words": 8, "max-steps": 1, "lora-rank": 2} | changes
    return ["revela", *(f"--{name}={value}" for name, value in options.items())]


def test_the_command_line(places) -> None:
    JUDGED.save(places["corpus"].with_name("data"), "dev")
    result = CliRunner().invoke(app, command(places, data=places["corpus"].with_name("data")))
    assert result.exit_code == 0, result.output
    assert "before  nDCG@10:  dense" in result.output
    assert "Saved to" in result.output
    again = CliRunner().invoke(app, command(places))
    assert again.exit_code == 2
    assert "already holds a trained model" in again.output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"corpus": "nowhere"}, "nowhere"),
        ({"lm": "nowhere/lm", "corpus": "unread"}, "nowhere/lm"),
        ({"retriever": "nowhere/model", "corpus": "unread"}, "nowhere/model"),
        ({"temperature": 0}, "temperature"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_errors_come_before_training(places, changes: dict, says: str) -> None:
    result = CliRunner().invoke(app, command(places, **changes))
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert not places["output"].exists()
