"""CompressionEvaluator against plain loops in float64 and faiss."""

import math

import numpy as np
import pytest
import torch
from _lookup import judged, lookup

from st_magnitude import COSINE, DOT, Similarity
from st_magnitude.evaluation import CompressionCell, CompressionEvaluator
from st_magnitude.evaluation.compression import rabitq, recommended, summary
from st_magnitude.judge import judge

HALF = Similarity(1.0, 0.5)
CELLS = {  # keys of metrics, and bytes for 13 dimensions
    ("float32", "none"): ("float32_{}", 52),
    ("int8", "none"): ("int8_{}", 13),
    ("rabitq", "none"): ("rabitq_{}", 10),
    ("binary", "none"): ("binary_{}", 2),
    ("binary", "query"): ("binary_{}_rescored", 2),
    ("binary", "norm"): ("binary_{}_norm_rescored", 4),
}


def crafted(num_queries=16, num_documents=45, dim=13, seed=0):
    """Random embeddings with zero entries, a zero query, a zero document, doubles and twins."""
    rng = np.random.default_rng(seed)
    d = rng.normal(size=(num_documents, dim)) * np.exp(0.7 * rng.normal(size=(num_documents, 1)))
    d[rng.random(d.shape) < 0.15] = 0.0
    relevant = [
        rng.choice(num_documents, size=1 + i % 4, replace=False).tolist()
        for i in range(num_queries)
    ]
    q = np.stack([d[columns[0]] / np.linalg.norm(d[columns[0]]) for columns in relevant])
    q += 0.5 * rng.normal(size=q.shape)
    q[rng.random(q.shape) < 0.15] = 0.0
    for j in range(0, num_documents - 9, 9):
        d[j + 5], d[j + 8] = d[j], 2 * d[j]
    q[3] = d[7] = 0.0
    return q.astype(np.float32), d.astype(np.float32), relevant


def reference(q, d, relevant, dim, precision, rescoring, similarity, top_k) -> list[float]:
    """nDCG@10 of every query, from the definition; the norm of a query changes no ranking."""
    q, d = ([[float(x) for x in row[:dim]] for row in matrix] for matrix in (q, d))
    gamma = similarity.gamma_document
    lengths = [math.sqrt(math.fsum(x * x for x in row)) for row in d]
    d = [
        [x / length**gamma if length else x for x in row]
        for row, length in zip(d, lengths, strict=True)
    ]
    bits = [[1 if x > 0 else -1 for x in row] for row in d]
    powers = [length ** (1 - gamma) if length else 0.0 for length in lengths]
    if precision == "int8":
        d = round_trip(d)
    if precision == "rabitq":
        q, d = (torch.tensor(x, dtype=torch.float64) for x in (q, d))
        # its length counts here; FAISS scores alike, below
        q, d = (x.tolist() for x in rabitq(similarity.query(q), d))

    def inner(a, b):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    values = []
    for query, columns in zip(q, relevant, strict=True):
        if precision == "binary":
            own = [1 if x > 0 else -1 for x in query]
            ranking = sorted(range(len(d)), key=lambda j: (-sum(map(int.__eq__, own, bits[j])), j))
            if rescoring != "none":
                scores = [inner(query, b) for b in bits]
                if rescoring == "norm":
                    scores = [
                        s * float(np.float16(p / max(powers)))
                        for s, p in zip(scores, powers, strict=True)
                    ]
                ranking = sorted(ranking[:top_k], key=lambda j: (-scores[j], j))
        else:
            scores = [inner(query, row) for row in d]
            ranking = sorted(range(len(d)), key=lambda j: (-scores[j], j))
        gain = sum(1 / math.log2(r + 2) for r, j in enumerate(ranking[:10]) if j in columns)
        values.append(gain / sum(1 / math.log2(r + 2) for r in range(min(len(columns), 10))))
    return values


def round_trip(d):
    """Rows through their int8 codes."""
    back = [[0.0] * len(row) for row in d]
    for column in range(len(d[0])):
        low, high = min(row[column] for row in d), max(row[column] for row in d)
        step = (high - low) / 255
        for row, out in zip(d, back, strict=True):
            out[column] = low + math.floor((row[column] - low) / step) * step if step else low
    return back


@pytest.mark.parametrize("top_k", [12, 100])
@pytest.mark.parametrize(
    "similarity", [COSINE, DOT, HALF, Similarity(0.3, 0.8)], ids=lambda s: s.name
)
def test_every_cell_is_the_reference(similarity, top_k):
    q, d, relevant = crafted()
    evaluator = CompressionEvaluator(**judged(16, 45, relevant), top_k=top_k, similarity=similarity)
    metrics = evaluator(lookup(q, d))
    kinds = list(CELLS) if similarity.gamma_document < 1 else list(CELLS)[:-1]
    assert list(evaluator.per_query) == [(dim, *kind) for dim in (13, 6, 3, 1) for kind in kinds]
    for (dim, precision, rescoring), values in evaluator.per_query.items():
        arguments = (relevant, dim, precision, rescoring, similarity, top_k)
        expected = np.array(reference(q, d, *arguments))
        stable = np.ones(len(q), dtype=bool)
        # a value on the edge of a code, where float32 may fall on either side
        if precision in ("int8", "rabitq"):
            for i in range(4):
                wobble = 1 + 1e-6 * np.random.default_rng(i).normal(size=13)
                stable &= expected == reference(q.astype(float), d * wobble, *arguments)
            assert stable.sum() > 10
        np.testing.assert_allclose(
            values[stable], expected[stable], atol=1e-12, err_msg=f"{dim} {precision}"
        )
    means = {key: values.mean() for key, values in evaluator.per_query.items()}
    full = means[13, "float32", "none"]
    assert len(metrics) == 1 + 2 * len(evaluator.cells)
    for cell in evaluator.cells:
        mean = means[cell.dim, cell.precision, cell.rescoring]
        assert (cell.ndcg, cell.retention) == pytest.approx((mean, mean / full))
        key, size = CELLS[cell.precision, cell.rescoring]
        assert metrics[f"{key.format(cell.dim)}_ndcg@10"] == cell.ndcg
        assert metrics[f"{key.format(cell.dim)}_retention"] == cell.retention
        assert cell.dim < 13 or cell.bytes_per_document == size
    assert metrics["full_ndcg@10"] == full
    assert 0.1 < full < 0.95
    assert len(set(means.values())) > 10  # the cells differ


def test_rabitq_scores_as_faiss():
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(2)
    d = (rng.normal(size=(60, 16)) * rng.uniform(0.5, 2, size=(60, 1)) + 1).astype(np.float32)
    q = (rng.normal(size=(20, 16)) + 1).astype(np.float32)
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64))[0]
    rotation = faiss.RandomRotationMatrix(16, 16)
    rotation.init(0)
    faiss.copy_array_to_vector(turn.T.float().contiguous().numpy().ravel(), rotation.A)
    bits = faiss.IndexRaBitQ(16, faiss.METRIC_INNER_PRODUCT)
    bits.qb = 0  # the query in full precision
    index = faiss.IndexPreTransform(rotation, bits)
    index.train(d)
    index.add(d)
    expected, ranking = index.search(q, 60)
    sent, coded = rabitq(torch.from_numpy(q), torch.from_numpy(d))
    scores = (sent.double() @ coded.T).numpy()
    np.testing.assert_allclose(np.take_along_axis(scores, ranking, axis=1), expected, atol=1e-4)
    same = torch.ones(5, 16)  # nothing is left of the mean
    np.testing.assert_allclose(rabitq(same, same)[1][:, :16], same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": [8, 0]}, r"dims must be .* got \[8, 0\]"),
        ({"precisions": ["float32", "int4"]}, "got 'int4'"),
        ({"top_k": 0}, "top_k must be .* got 0"),
    ],
)
def test_arguments_are_checked(task, change, message):
    with pytest.raises(ValueError, match=message):
        CompressionEvaluator(**(task | change))


def cell_of(size, costs):
    """A format of so many bytes, and what it costs each of 300 queries of nDCG@10 .8."""
    change = judge(-np.asarray(costs) * np.ones(300))
    mean = 0.8 + change.mean
    return CompressionCell(size, "int8", "none", size, mean, mean / 0.8, change)


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ((0.0, 0.01), "Store 4 dimensions in int8, 4 bytes a document: it costs 1.0"),
        ((0.0, 0.06), "Store 8 dimensions in int8, 8 bytes a document: it costs 0.0"),
        ((0.06, 0.2), "Keep all 16 dimensions in int8: 8 dimensions in int8 costs 6.0"),
        ((0.039, 0.2), "Keep all 16 dimensions in int8, or measure more queries: 8 dim"),
    ],
)
def test_the_smallest_format_that_clearly_costs_little_is_recommended(costs, said):
    cells = [cell_of(size, cost) for size, cost in zip((16, 8, 4), (0.0, *costs), strict=True)]
    sentence = recommended(cells)
    assert sentence.startswith(said)
    assert "allowed are 4.0 (5 %)." in sentence
    assert sentence == summary(cells).note
    assert recommended(cells[:1]) == ""
