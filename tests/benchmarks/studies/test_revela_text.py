"""Revela on real text: groups, and a language model that reads before it is trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies.revela import reader, texts
from benchmarks.studies.revela import revela_text as study
from benchmarks.studies.store import Store

from st_magnitude.revela.attention import Neighbours, next_token_loss, two_streams


def test_partners_are_neighbours_unless_groups_are_random() -> None:
    pairs = [(f"a{i}", f"b{i}") for i in range(40)]
    for apart in (False, True):
        rows = texts.group_rows(pairs, 0, apart)["chunks"]
        assert [len(row) for row in rows] == [8] * 10
        found = {(row[i], row[i + 1]) for row in rows for i in range(0, 8, 2)}
        assert (found == set(pairs)) is not apart


def test_the_language_model_can_copy_from_another_document_before_it_is_trained() -> None:
    torch.manual_seed(0)
    lm = reader.new_lm()
    text = torch.randint(1, reader.VOCABULARY, (60,))
    ids = torch.stack([text[:40], text[17:57]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        e, h = two_streams(lm, ids, Neighbours.of(torch.eye(2).flip(0), mask))
    assert next_token_loss(lm, h, ids, mask) < next_token_loss(lm, e, ids, mask) - 0.1


def test_an_ablation_is_compared_with_the_same_seeds(tmp_path: Path) -> None:
    stored = Store(tmp_path / "cells.jsonl", study.Cell)

    def store(cell: Any, best: int) -> None:
        curve = [{"step": 0, "choice_gain": 0.01, "partner": 0.2}]
        figures = {"curve": curve, "best": {"step": 0, "dev": 0.5}}
        figures["test"] = {"start": [0, 1000], "best": [best, 1000 + best]}
        stored.add(cell, figures)

    assert study.table(stored) == ["(No cells are stored yet.)"]
    random = study.SETTINGS["random groups"]
    for seed, (plain, changed) in enumerate([(3000, 2000), (4000, 3000)]):
        store(replace(study.SETTINGS["Revela"], seed=seed), plain)
        store(replace(random, seed=seed), changed)
    store(replace(study.SETTINGS["Revela"], seed=2), 9000)  # without a partner
    *_, revela, ablation = study.table(stored)
    assert revela.startswith("| Revela | 3 | 0.500 | 0.583 |")
    assert ablation.startswith("| random groups | 2 | 0.500 | 0.300 | +25.0")
    assert "| -10.0 [" in ablation
