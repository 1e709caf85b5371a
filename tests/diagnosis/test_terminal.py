"""The page in a terminal: what it says, and that it fits 80 columns."""

from __future__ import annotations

import json

from _planted import planted, quick


def test_page_and_dict():
    model, *task = planted(0, "relevance", normalize=True)
    found = quick(model, *task, baseline=planted(0, "noise", similarity="dot")[0])
    page = found.text()
    short = str(found)
    assert page.startswith(short + "\n\nNorms\n=====\n")
    assert "[do] Score with document exponent" in short
    assert max(map(len, page.splitlines())) <= 80
    for expected in (
        "Planted + Normalize, scored by cosine (recommended: exponents 1 and",
        "160 queries",
        "Do: stm.prepare(model, stm.Similarity(1, ",
        "not used today",
        f"{found.effects['corpus'].d:+.2f}",
        "Spearman",
        "[do] Score with document exponent",
        "Asymmetric: queries and documents share no texts",
        "baseline  dot",
        "baseline",
        "IsoScore",
        "by chance",
    ):
        assert expected in page, expected
    assert "nan" not in page
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["effects"]["corpus"]["d"] == found.effects["corpus"].d
    assert back["documents"]["values"] == found.documents.values.tolist()
    assert back["is_relevant"] == found.is_relevant.tolist()
    assert back["exponent"]["curve"]["per_query"] == found.exponent.curve.per_query.tolist()
    assert [r["verdict"] for r in back["recommendations"]] == [r.verdict for r in found.recommendations]
    assert back["recommendations"][0]["gain"] == list(found["exponent"].gain)


def test_page_of_a_raw_model_does_not_speak_of_normalize():
    model, *task = planted(0, "noise", num_queries=30)
    assert "Normalize" not in quick(model, *task).text()


def test_the_page_is_the_same_in_a_notebook(monkeypatch):
    model, *task = planted(0, "noise", num_queries=30)
    found = quick(model, *task)
    outside = found.text()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert found.text() == outside
