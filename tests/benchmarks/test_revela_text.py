"""Revela on real text: stored cells, groups, and a language model that reads before it is trained."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from st_magnitude.revela.attention import Neighbours, next_token_loss, two_streams

FOLDER = Path(__file__).parents[2] / "benchmarks" / "evidence"
sys.path.insert(0, str(FOLDER))
study = importlib.import_module("revela_text")
sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("path", sorted((study.RESULTS / "revela").glob("*/*-seed*.json")), ids=lambda path: path.stem)
def test_a_stored_cell_has_the_name_of_its_settings(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert study.Cell(**found["settings"]).name == path.stem
    assert len(found["test"]["start"]) == len(found["test"]["best"])


def test_partners_are_neighbours_unless_groups_are_random() -> None:
    pairs = [(f"a{i}", f"b{i}") for i in range(40)]
    for apart in (False, True):
        rows = study.group_rows(pairs, 4, 0, apart)["chunks"]
        assert [len(row) for row in rows] == [8] * 10
        found = {(row[i], row[i + 1]) for row in rows for i in range(0, 8, 2)}
        assert (found == set(pairs)) is not apart


def test_the_language_model_can_copy_from_another_document_before_it_is_trained() -> None:
    torch.manual_seed(0)
    lm = study.new_lm(1)
    text = torch.randint(1, study.VOCABULARY, (60,))
    ids = torch.stack([text[:40], text[17:57]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        e, h = two_streams(lm, ids, mask, Neighbours.of(torch.eye(2).flip(0), mask))
    assert next_token_loss(lm, h, ids, mask) < next_token_loss(lm, e, ids, mask) - 0.1
