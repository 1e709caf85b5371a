"""A diagnosis as text, as tables and as JSON."""

import json
import math

import numpy as np
import pytest
from _planted import planted, quick
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import Similarity
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import judge


def test_text_json_and_tables():
    model, *task = planted(0, "relevance", normalize=True)
    found = quick(model, *task)
    short = str(found)
    shown = "\n".join(map(str, [short, *found.measurements]))
    assert max(map(len, shown.splitlines())) <= 80
    assert "scored by cosine (recommended: exponents 1 and" in short
    assert short.index("\n[do] Score with document exponent") < short.rindex("\n[")
    assert "nan" not in shown
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["documents"]["values"] == found.documents.values.tolist()
    assert back["exponent"]["per_query"] == found.exponent.per_query.tolist()
    assert back["recommendations"][0]["gain"] == vars(found["exponent"].gain)
    for r in found.recommendations:
        assert all(text in found.to_markdown() for text in (r.action, r.reason, r.choice))
    cells = {value for table in found.measurements for row in table.rows for value in row}
    d = found.documents
    expected = {found.cohens_d, found.adjusted_cohens_d, d.mean, d.cv, d.length_spearman}
    expected |= {*d.quantiles, *found.queries.quantiles}
    expected |= {
        found.isoscore,
        found.isoscore_ceiling,
        found.mean_cosine,
        *(c.ndcg for c in found.cells),
    }
    assert not expected - cells


@pytest.mark.parametrize("present", [0.33, 0.55])
def test_exponents_are_compared_with_today(present):
    model, *task = planted(0, "relevance", num_queries=60)
    found = quick(model, *task, similarity=Similarity(1.0, present))
    choice = found.exponent
    expected = MagnitudeEvaluator(*task, similarity=Similarity(1.0, present))(model)
    assert choice.ndcg(present).mean() == pytest.approx(expected["matched_ndcg@10"], abs=1e-12)
    assert choice.candidate != present
    rows = found.measurements[1].rows
    assert [row[1] for row in rows] == pytest.approx(choice.per_query.mean(axis=1))
    gain = judge(choice.per_query[0] - choice.ndcg(present), num_samples=2000)
    assert rows[0][2] == gain
    marked = {row[3]: row[0] for row in rows if row[3]}
    assert marked == {"today": f"{present:g}", "chosen by one half": f"{choice.candidate:.2g}"}


def test_tiny_and_infinite(tmp_path):
    """All documents relevant alike, one dimension or few, an effect that is infinite."""
    model = SentenceTransformer(modules=[BoW(["bee"])], similarity_fn_name="dot", device="cpu")
    queries = {f"q{i}": "bee" for i in range(2)}
    corpus = {f"d{i}": "bee " * (2 if i < 2 else 1) for i in range(4)}
    found = quick(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(2)})
    assert found.cohens_d == math.inf
    found.save(tmp_path / "new" / "d.json")
    assert json.loads((tmp_path / "new" / "d.json").read_text())["cohens_d"] == "inf"
    assert np.inf in [row[-1] for row in found.measurements[0].rows]
