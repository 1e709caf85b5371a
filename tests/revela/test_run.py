"""st-magnitude revela: from a folder of text to a plain retriever, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from revela_tiny import language_model, retriever
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_magnitude.commands.app import app
from st_magnitude.revela.run import run

PAGES = {
    "tea.md": "# Green tea\n\nGreen tea steeps for two minutes. The water is not too hot.\n\n"
    "## Black tea\n\nBlack tea takes five minutes. Milk goes well with it.\n",
    "rain.md": "# What is rain\n\nRain is water that falls from clouds. It falls in drops.\n\n"
    "## The blue sky\n\nShort waves of light scatter more. So the sky is blue.\n",
    "eggs.md": "# Boil an egg\n\nPut the egg in hot water. Six minutes are enough for it.\n\n"
    "## Flat tyres\n\nTake off the wheel. Patch the tube and put it back.\n",
    "bees.md": "# How bees talk\n\nBees talk with a dance. The dance points to the flowers.\n\n"
    "## Old trees\n\nA pine in the white mountains is old. It has seen five thousand years.\n",
}
QUICK = {"group_size": 3, "max_words": 8, "max_steps": 2, "lora_rank": 2, "held_out": 0.3, "warmup_steps": 0}


@pytest.fixture
def places(tmp_path) -> dict[str, Path]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in PAGES.items():
        (corpus / name).write_text(text, encoding="utf-8")
    retriever(tmp_path / "transformer").save_pretrained(str(tmp_path / "retriever"))
    lm, tokens = language_model()
    tokens.add_special_tokens({"eos_token": "[EOS]"})
    lm.resize_token_embeddings(len(tokens))
    lm.save_pretrained(tmp_path / "lm")
    tokens.save_pretrained(tmp_path / "lm")
    return {
        "corpus": corpus,
        "retriever": tmp_path / "retriever",
        "lm": tmp_path / "lm",
        "output": tmp_path / "out",
    }


@pytest.mark.parametrize("kind", ["retriever", "lm"])
def test_from_text_to_a_plain_model(places, kind: str) -> None:
    """An encoder is trained as a whole; a bare decoder gets last-token pooling and a LoRA, which is merged."""
    said: list[str] = []
    record = run(places["corpus"], places[kind], places["lm"], places["output"], **QUICK, say=said.append)
    model = SentenceTransformer(str(places["output"]), device="cpu")
    assert model.prompts["query"] == "Query: "
    assert not (places["output"] / "adapter_config.json").exists()
    assert json.loads((places["output"] / "revela.json").read_text())["after"] == record["after"]
    assert {"dense_ndcg@10", "bm25_ndcg@10", "hybrid_ndcg@10"} <= record["before"].keys()
    assert record["before"]["bm25_ndcg@10"] == record["after"]["bm25_ndcg@10"]
    assert any("next_token" in entry for entry in record["log"])
    assert any(line.startswith("after") for line in said)
    if kind == "retriever":
        untrained = SentenceTransformer(str(places["retriever"]), device="cpu").encode("tea")
        assert np.abs(model.encode("tea") - untrained).max() > 0


def test_nothing_held_out_is_trained_on(places, monkeypatch) -> None:
    from st_magnitude.revela import run as module

    seen = {}
    build, task = module.build_groups, module.title_task
    monkeypatch.setattr(module, "build_groups", lambda docs, **kw: build(seen.setdefault("train", docs), **kw))
    monkeypatch.setattr(module, "title_task", lambda docs, **kw: task(seen.setdefault("test", docs), **kw))
    module.run(places["corpus"], places["retriever"], places["lm"], places["output"], **QUICK, say=lambda line: None)
    assert seen["test"]
    assert not {d.name for d in seen["train"]} & {d.name for d in seen["test"]}
    assert {d.name for d in seen["train"]} | {d.name for d in seen["test"]} == set(PAGES)


def command(places, **changes: object) -> list[str]:
    options = {**places, "group-size": 3, "max-words": 8, "max-steps": 1, "lora-rank": 2, "held-out": 0.3} | changes
    return ["revela", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


def test_the_command_line(places) -> None:
    result = CliRunner().invoke(app, command(places))
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
        ({"lm": "nowhere/model"}, "The language model 'nowhere/model' could not be loaded"),
        ({"retriever": "nowhere/model"}, "The retriever 'nowhere/model' could not be loaded"),
        ({"temperature": 0}, "temperature must be positive, got 0"),
        ({"held-out": 2}, "held_out"),
    ],
)
def test_errors_come_before_training(places, changes: dict, says: str) -> None:
    result = CliRunner().invoke(app, command(places, **changes))
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert not places["output"].exists()
