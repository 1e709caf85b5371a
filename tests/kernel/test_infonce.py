"""The kernel against a float64 loop, against autograd, and against sentence-transformers."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from _memory import peak_bytes
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score
from torch import nn

import st_magnitude as stm
from st_magnitude import COSINE, DNORM, DOT, QNORM, Similarity, Term
from st_magnitude.kernel.batch import Above, Ids
from st_magnitude.kernel.infonce import softmaxes_of

FORWARD, BACKWARD, BOTH = DIRECTIONS = [
    ("query_to_doc",),
    ("doc_to_query",),
    ("query_to_doc", "doc_to_query"),
]
# unless a test names its own partition_mode
infonce, infonce_reference = (
    partial(stm.infonce, backend=backend, partition_mode="per_direction")
    for backend in ("tiled", "plain")
)
CORNERS = [COSINE, DOT, QNORM, DNORM]


def embeddings(num_queries=6, num_documents=13, dim=8, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        (
            torch.randn(number, dim, generator=generator, dtype=torch.float64) * scale
        ).requires_grad_()
        for number in (num_queries, num_documents)
    )


def loop_infonce(
    queries,
    documents,
    terms,
    gammas,
    directions,
    offset,
    ids=None,
    margin=-math.inf,
    positives=None,
    query_ids=None,
    hardness=0.0,
    spares=None,
    log_q=None,
):
    """The definition, one softmax at a time, in float64 and with autograd through the scores.

    Documents whose id is that of the positive, or that of the query if queries have some, or that
    score higher than the positive less a margin and share none of the spares, are left out.
    """
    backward = directions == BACKWARD
    own = slice(offset, offset + len(queries))

    def labels(ids):
        ids = list(range(len(documents))) if ids is None else ids.tolist()
        return ids[own], ids[own] if backward else ids

    (row_ids, column_ids), (row_labels, column_labels) = labels(ids), labels(positives)

    def rows_and_columns(of_queries, of_documents):
        rows, columns = of_queries[own].tolist(), of_documents.tolist()
        return (columns[own], rows) if backward else (rows, columns)

    if query_ids is not None:
        row_ids, column_ids = rows_and_columns(query_ids, ids)
    if spares is not None:
        row_spares, column_spares = rows_and_columns(spares.queries, spares.documents)

    def scores_of(dim):
        sides = queries, documents
        q, d = (
            x[:, :dim] / x[:, :dim].norm(dim=1, keepdim=True) ** g
            for x, g in zip(sides, gammas, strict=True)
        )
        return d[own] @ q.T if backward else q @ d.T

    longest, total = scores_of(max(t.dim or queries.shape[1] for t in terms)), 0.0
    for term in terms:
        scores = scores_of(term.dim)
        for i in range(len(queries)):
            own_column, attractions, logits = i if backward else offset + i, [], []
            for j, score in enumerate(scores[i]):
                logit = score / term.temperature - (0 if log_q is None else log_q[j])
                if column_labels[j] == row_labels[i]:
                    logits.append(logit)
                    attractions.append(logit)
                elif column_ids[j] != row_ids[i] and (
                    longest[i, j] <= longest[i, own_column] - margin
                    or (spares is not None and column_spares[j] == row_spares[i])
                ):
                    logits.append(logit + hardness * score.detach())
            total += term.weight * (
                torch.stack(logits).logsumexp(0) - torch.stack(attractions).mean()
            )
    return total / len(queries)


def of_type(dtype, queries, documents, *arguments, **options):
    """Loss and gradients of embeddings in some precision, as float64."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (queries, documents)]
    loss = infonce(*leaves, *arguments, **options)
    return [x.double() for x in (loss.detach(), *torch.autograd.grad(loss, leaves))]


def in_both_types(*arguments, **options):
    return [of_type(dtype, *arguments, **options) for dtype in (torch.float32, torch.float64)]


MANY = (Term(2, 0.3), Term(2, 0.7, 0.5), Term(5, 0.5, 2.0), Term(None, 0.4), Term(8, 1.3, 0.25))

IDS = torch.tensor([3, 3, 8, 5, 8, 3, 6, 5, 7])  # the positives are rows 2 to 5: 8, 5, 8, 3
QUERY_IDS = torch.tensor([3, 8, 3, 8, 3, 5, 9])  # of rows 2 to 5: 3, 8, 3, 5
LABELS = torch.tensor([40, 7, 11, 7, 11, 40, 11, 9, 7])  # of the positives: 11, 7, 11, 40

# of a query and its explicit negative, and of queries 1 and 3
SPARES = Ids(torch.tensor([9, 9, 0, 1, 2, 1, 9]), torch.tensor([2, 0, 4, 1, 4, 4, 0, 0, 2]))


def above_the_positive(margin, spares=None):
    return Above(lambda positives: positives - margin, spares=spares)


RULES = {
    "nothing": {},
    "ids": {"ids": IDS},
    "ids of queries": {"ids": IDS, "query_ids": QUERY_IDS},
    "margin": {"margin": 0.5},
    "spares": {"margin": 0.5, "spares": SPARES},
    "ids and margin": {"ids": IDS, "margin": 0.5},
    "positives": {"positives": LABELS},
    "all": {"ids": IDS, "margin": 0.5, "positives": LABELS},
}


@pytest.mark.parametrize(
    ("terms", "gammas"),
    [((Term(5, 0.5),), (1, 0)), (MANY, (0, 1)), (MANY, (0.3, 0.8))],
    ids=["one", "many", "other exponents"],
)
@pytest.mark.parametrize("directions", DIRECTIONS[:2])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equals_the_definition(terms, gammas, directions, rule):
    """Positives stay in the softmax whatever is excluded."""
    queries, documents = embeddings(4, 9)
    taus = [
        torch.tensor(float(t.temperature), dtype=torch.float64, requires_grad=True) for t in terms
    ]
    terms = [Term(t.dim, tau, t.weight) for t, tau in zip(terms, taus, strict=True)]
    leaves, arguments = [queries, documents, *taus], (directions, 2)
    expected = loop_infonce(queries, documents, terms, gammas, *arguments, **rule)
    wanted = torch.autograd.grad(expected, leaves)
    without = loop_infonce(queries, documents, terms, gammas, *arguments)
    assert not rule or abs(expected - without) > 1e-4
    if "spares" in rule:
        without = loop_infonce(queries, documents, terms, gammas, *arguments, margin=rule["margin"])
        assert abs(expected - without) > 1e-4
    options = {"positives": rule.get("positives")}
    options["exclude"] = [rule["ids"]] if "ids" in rule else []
    if "query_ids" in rule:
        options["exclude"] = Ids(rule["query_ids"], rule["ids"])
    if "margin" in rule:
        options["exclude"].append(above_the_positive(rule["margin"], rule.get("spares")))
    for function in (
        infonce_reference,
        infonce,
        partial(infonce, tile_rows=1),
        partial(infonce, tile_rows=3),
    ):
        loss = function(queries, documents, terms, Similarity(*gammas), *arguments, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted, rtol=1e-8, atol=1e-11)


def assert_equals_the_reference(
    queries, documents, terms, similarity, directions, offset, leaves=(), **options
):
    """Value and gradients, those of all_queries among them."""
    leaves = [queries, documents, *leaves]
    leaves += [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    arguments = queries, documents, terms, similarity, directions, offset
    ours, expected = (f(*arguments, **options) for f in (infonce, infonce_reference))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    found, wanted = (
        torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in (ours, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("similarity", [COSINE, DOT], ids=str)
def test_powers_of_an_exponential(similarity):
    """Temperatures of ratio 2 and 3 share one; one is so low that 2 ** (s / tau) is infinite."""
    queries, documents = embeddings(5, 9, scale=8.0)
    many = [Term(dim, tau, 0.5) for dim in (3, None) for tau in (0.12, 0.36, 0.5, 0.06, 1e-3)]
    for terms in (many, [Term(3, 0.2), Term(None, 0.1)]):  # prefixes share none
        assert_equals_the_reference(queries, documents, terms, similarity, FORWARD, 0)


@pytest.mark.parametrize("backend", ["plain", "tiled"])
def test_a_score_at_the_threshold_is_a_negative(backend):
    documents = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    of_all = stm.infonce(documents[:2], documents, backend=backend)
    found = stm.infonce(documents[:2], documents, exclude=above_the_positive(0), backend=backend)
    assert found == of_all


LOG_Q = {"log_q": torch.arange(9) / 2.0, "log_q_queries": torch.arange(4) / 2.0}
LEARNED = {
    "exponents": {},
    "exclude": {"exclude": IDS},
    "positives": {"positives": LABELS},
    "log_q": LOG_Q,
}
CHECKED = {s.name: (s, {}) for s in CORNERS} | {
    name: (None, options) for name, options in LEARNED.items()
}


@pytest.mark.parametrize("terms", [(Term(temperature=0.5),), MANY], ids=["one", "many"])
@pytest.mark.parametrize(("similarity", "options"), CHECKED.values(), ids=CHECKED)
@pytest.mark.parametrize("directions", DIRECTIONS)
def test_gradcheck(terms, similarity, options, directions):
    """Of learned temperatures, and of learned exponents too."""
    queries, documents = embeddings(4, 9)
    gammas = [torch.tensor(g, dtype=torch.float64, requires_grad=True) for g in (0.3, 0.8)]
    temperatures = [
        torch.tensor(float(t.temperature), dtype=torch.float64, requires_grad=True) for t in terms
    ]

    def loss(queries, documents, gamma_query, gamma_document, *temperatures):
        learned = [Term(t.dim, tau, t.weight) for t, tau in zip(terms, temperatures, strict=True)]
        kind = similarity or Similarity(gamma_query, gamma_document)
        return infonce(queries, documents, learned, kind, directions, 2, **options)

    leaves = queries, documents, *gammas, *temperatures
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def log_frequencies(size):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(size, generator=generator, dtype=torch.float64) * 2 - 7


@pytest.mark.parametrize("similarity", [DOT, QNORM, COSINE], ids=str)
@pytest.mark.parametrize("scale", [1e4, 1e30, -1e4])
def test_an_excluded_column_is_as_if_it_were_not_there(similarity, scale):
    """In float32, also where it has by far the best or the worst score of the row."""
    torch.manual_seed(1)
    queries = torch.randn(4, 8, requires_grad=True)
    documents = torch.cat(
        [torch.randn(6, 8), scale * queries.detach().sum(dim=0, keepdim=True)]
    ).requires_grad_()
    terms = [Term(4, 0.5), Term(None, 0.3), Term(None, 0.1)]
    of = partial(infonce, terms=terms, similarity=similarity)
    last_column = Ids(torch.zeros(4, dtype=torch.int64), 6 - torch.arange(7))
    losses = [of(queries, documents, exclude=last_column), of(queries, documents[:6])]
    torch.testing.assert_close(*losses)
    found, expected = (torch.autograd.grad(loss, [queries, documents]) for loss in losses)
    assert (found[1][6] == 0).all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


SOFTMAXES = {
    "forward": {},
    "symmetric": {"directions": BOTH, "partition_mode": "per_direction"},
    "both": {"directions": BOTH},
    "queries": {"directions": ("query_to_doc", "query_to_query")},
    "documents": {"directions": ("doc_to_doc", "query_to_doc")},
    "gte": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    "hardness": {"hardness_mode": "all_negatives", "hardness_strength": 9.0},
}


@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize("name", ["cosine", "dot"])
@pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES)
def test_equals_sentence_transformers(num_negatives, name, softmax):
    columns = [
        torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
        for _ in range(2 + num_negatives)
    ]
    scale = 20.0 if name == "cosine" else 1.5
    similarity_fct = {"cosine": cos_sim, "dot": dot_score}[name]
    theirs = MultipleNegativesRankingLoss(nn.Identity(), scale, similarity_fct, **softmax)
    expected = theirs.compute_loss_from_embeddings(columns, None)
    wanted = torch.autograd.grad(expected, columns)
    arguments = columns[0], torch.cat(columns[1:]), [Term(temperature=1 / scale)], name
    for options in ({"backend": "plain"}, {"backend": "tiled", "tile_rows": 4}):
        options |= {name: x for name, x in softmax.items() if name != "hardness_mode"}
        ours = stm.infonce(*arguments, **options)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(ours, columns), wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gammas", [(1, 1), (0, 0), (0.3, 0.8)])
@pytest.mark.parametrize("terms", [(Term(5, 0.5),), (*MANY, Term(2, 0.35))], ids=["one", "many"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "ids"])
def test_hardness_weighs_negatives(gammas, terms, ids):
    queries, documents = embeddings(4, 9, scale=0.7)
    leaves = queries, documents
    expected = loop_infonce(*leaves, terms, gammas, FORWARD, 2, ids, hardness=3.0)
    wanted = torch.autograd.grad(expected, leaves)
    options = {"exclude": ids, "hardness_strength": 3.0}
    for backend in ({"backend": "plain"}, {"backend": "tiled", "tile_rows": 3}):
        loss = infonce(*leaves, terms, Similarity(*gammas), FORWARD, 2, **options, **backend)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), wanted)


def test_directions_keep_their_order():
    """A set would have another order in each process, and so other last digits of the loss."""
    first, *others = SOFTMAXES["gte"]["directions"]
    for ordered in (others, others[::-1]):
        assert softmaxes_of((*ordered, first), "joint") == [(first, *ordered)]


JOINT = [SOFTMAXES[name]["directions"] for name in ("both", "queries", "documents", "gte")]

MASKS = {
    "all": {},
    "exclude": {"exclude": [IDS, Ids(QUERY_IDS, IDS), above_the_positive(0.3)]},
    "positives": {"positives": LABELS, "exclude": IDS},
}
PARTITIONS = [(x, "per_direction") for x in DIRECTIONS] + [(x, "joint") for x in JOINT]


@pytest.mark.parametrize("gammas", [(0.3, 0.8), (1, 0)])
@pytest.mark.parametrize(("directions", "partition_mode"), PARTITIONS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("corrected", [False, True])
def test_equals_the_plain_formula(gammas, directions, partition_mode, masks, corrected):
    """With prefixes, powers of exponentials, learned temperatures, and queries of other devices."""
    queries, documents = embeddings(4, 9)
    leaves = [
        torch.tensor(float(x), dtype=torch.float64, requires_grad=True)
        for x in (*gammas, 0.1, 0.45)
    ]
    terms = [Term(dim, tau, 0.5) for dim in (3, None) for tau in (0.3, 0.6, *leaves[2:])]
    similarity = Similarity(*leaves[:2]) if 0.3 in gammas else Similarity(*gammas)
    arguments = queries, documents, terms, similarity, directions
    for offset, all_queries in ((0, None), (2, embeddings(7, seed=1)[0])):
        options = {"partition_mode": partition_mode, "all_queries": all_queries}
        if corrected:
            number = 4 if all_queries is None else 7
            options |= {"log_q": log_frequencies(9), "log_q_queries": log_frequencies(number)}
        assert_equals_the_reference(*arguments, offset, leaves=leaves, **masks, **options)


def test_outer_gradient_scales():
    queries, documents = embeddings()
    expected = torch.autograd.grad(infonce(queries, documents, MANY), [queries, documents])
    loss = infonce(queries, documents, MANY)
    scaled = torch.autograd.grad(loss * 2.0**10 / 4, [queries, documents], retain_graph=True)
    # a second backward sees the first one's tensors unharmed
    again = torch.autograd.grad(loss, [queries, documents])
    torch.testing.assert_close([x / 256 for x in scaled], list(expected))
    torch.testing.assert_close(again, expected)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(infonce(queries, documents), queries, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(infonce)(queries, documents)


def test_without_gradients():
    queries, documents = embeddings()
    expected = infonce(queries, documents, MANY, QNORM)
    with torch.no_grad():
        loss = infonce(queries, documents, MANY, QNORM)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    frozen = infonce(queries.detach(), documents, MANY, QNORM)
    (gradient,) = torch.autograd.grad(frozen, documents)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, documents)[0])
    for function in (infonce, infonce_reference, stm.infonce):  # on a device without autocast
        assert function(queries.to("meta"), documents.to("meta")).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float32_under_autocast(dtype):
    queries, documents = (x.detach().to(dtype).requires_grad_() for x in embeddings())
    exact = infonce(queries.float(), documents.float(), MANY)
    [exact_gradient] = torch.autograd.grad(exact, queries)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = stm.infonce(queries, documents, MANY)
        [gradient] = torch.autograd.grad(loss, queries)  # as gradient caching does
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, exact_gradient)


def test_float32_holds_where_probabilities_underflow():
    inputs = [x.detach() for x in embeddings(scale=40.0)]
    inputs[1][6:] = inputs[1][6]
    inputs[1][:, 0] = 1  # whose gradient is that of the sum of the probabilities of a row
    (loss, *gradients), (expected, *_) = in_both_types(*inputs, similarity=DOT)
    assert expected > 1e3  # the positive's own probability is far below what float32 can say
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 0].abs().max() < 1e-5


ALL_OUT = torch.zeros(9, dtype=torch.int64)
# the positive in units of the query, where it is not as others, and what is left out
PAIRS = {
    "best": (3.0, None),
    "best of some": (3.0, IDS),
    "others": (None, IDS),
    "worst": (-3.0, None),
    "worst and alone": (-3.0, ALL_OUT),
}


@pytest.mark.parametrize(
    ("directions", "hardness"), [(FORWARD, 0.0), (FORWARD, 9.0), (FORWARD, 200.0), (BACKWARD, 0.0)]
)
@pytest.mark.parametrize("log_range", [0, 100, 5000])
@pytest.mark.parametrize(("of_pairs", "left_out"), PAIRS.values(), ids=PAIRS)
def test_the_largest_logit_is_the_anchor(of_pairs, left_out, log_range, directions, hardness):
    """Of a row whose best score has not the largest logit: exponentials relative to the score's
    would all vanish in float32, or overflow."""
    queries, documents = (x.detach() for x in embeddings(4, 9))
    if of_pairs is not None:
        documents[2:6] = of_pairs * queries
    log_q = torch.linspace(-log_range, 0, 9, dtype=torch.float64)[[7, 2, 8, 0, 5, 3, 1, 6, 4]]
    inputs = [x.float().double().requires_grad_() for x in (queries, documents)]
    taus = [torch.tensor(tau, dtype=torch.float64, requires_grad=True) for tau in (0.5, 0.25, 0.1)]
    terms = [Term(dim, tau) for dim, tau in zip((5, None, None), taus, strict=True)]
    arguments = (terms, (1, 0), directions, 2, left_out)
    expected = loop_infonce(*inputs, *arguments, hardness=hardness, log_q=log_q)
    wanted = torch.autograd.grad(expected, [*inputs, *taus])
    options = {"hardness_strength": hardness, "exclude": left_out}
    options["log_q" if directions == FORWARD else "log_q_queries"] = (
        log_q if directions == FORWARD else log_q[:4]
    )
    for engine in ({}, {"tile_rows": 1}, {"backend": "plain"}):
        leaves = [x.detach().float().requires_grad_() for x in (*inputs, *taus)]
        terms = [Term(dim, tau) for dim, tau in zip((5, None, None), leaves[2:], strict=True)]
        loss = infonce(*leaves[:2], terms, QNORM, directions, 2, **options, **engine)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4)
        found = torch.autograd.grad(loss, leaves)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * (1 + b.abs().max()))


def test_a_sure_row_has_no_loss_in_float32():
    """Logits of 18,000, whose last digit is .002: probabilities sum to 1 all the same."""
    queries = 30 * nn.functional.normalize(embeddings(64, dim=32)[0].detach())
    terms = [Term(temperature=tau) for tau in (0.1, 0.05, 0.03)]
    found, expected = in_both_types(queries, queries, terms, DOT, log_q=torch.arange(64) / 6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_gradients_of_short_vectors_among_long_ones():
    """In one softmax of several prefixes."""
    queries, documents = (x.detach() for x in embeddings(8, 16, 32))
    documents[3], queries[5] = documents[3] * 1e-9, queries[5] * 1e-9
    arguments = queries, documents, [Term(8, 0.5), Term(None, 0.5)], Similarity(0.3, 0.8)
    options = {"directions": ("query_to_doc", "query_to_query"), "partition_mode": "joint"}
    found, expected = in_both_types(*arguments, **options)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert ((a - b).norm(dim=1) / b.norm(dim=1)).max() < 1e-5


@pytest.mark.parametrize("similarity", [COSINE, QNORM, Similarity(0.5, 0.5)], ids=str)
def test_short_vectors(similarity):
    """Gradients grow as norms fall, whose square is 0 in float32."""
    inputs = [torch.randn(n, 8) * 1e-20 for n in (3, 5)]
    found, expected = in_both_types(*inputs, [Term(4), Term()], similarity)
    for gradient, reference in zip(found[1:], expected[1:], strict=True):
        assert reference.norm() > 0
        torch.testing.assert_close(
            gradient, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max())
        )


@pytest.mark.parametrize("norm", [1e18, 1e30])
@pytest.mark.parametrize("similarity", [COSINE, QNORM, DNORM], ids=lambda s: s.name)
def test_long_vectors(norm, similarity):
    """In float32 the square of such a norm is infinite."""
    queries, documents = ((x.detach().float() * norm).requires_grad_() for x in embeddings())
    loss = infonce(queries, documents, [Term(4), Term()], similarity)
    loss.backward()
    assert loss.isfinite()
    assert queries.grad.isfinite().all()
    assert documents.grad.isfinite().all()
    COSINE(queries, documents).sum().backward()  # the plain formula, too
    assert queries.grad.isfinite().all()


def test_zero_vectors():
    queries, documents = embeddings()
    with torch.no_grad():
        queries[0], documents[2], documents[4, :2] = 0, 0, 0
    for similarity in [*CORNERS, Similarity(0.5, 0.5)]:
        loss = infonce(queries, documents, MANY, similarity)
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [queries, documents]))


MATRIX = torch.ones(4, 9)


WRONG = {
    "shapes": ({"documents": torch.ones(9, 4)}, r"documents \(M, D\)"),
    "precision": ({"documents": torch.ones(9, 8)}, "in torch.float64 and others in torch.float32"),
    "offset": ({"offset": 10}, "offset 10"),
    "dim": ({"terms": [Term(9)]}, r"\[9\] exceed the 8"),
    "all_queries": ({"all_queries": torch.ones(3, 8)}, r"with Q from 4 to 9; got \(3, 8\)"),
    "two rules": ({"exclude": [above_the_positive(0), above_the_positive(1)]}, "one Above"),
    "hardness": ({"hardness_strength": -1}, "hardness_strength must be at least 0"),
    "positives and hardness": ({"hardness_strength": 1, "positives": IDS}, "one positive"),
    "tile_rows": ({"tile_rows": 0}, "tile_rows must be at least 1"),
    "ids": ({"exclude": torch.arange(8)}, r"exclude takes the shape \(9,\); got \(8,\)"),
    "spares": (
        {"exclude": above_the_positive(0, Ids(IDS[:3], IDS))},
        r"for queries, takes the shape \(4,\)",
    ),
    "mask for ids": ({"exclude": IDS > 2}, r"exclude takes whole numbers as ids; got torch.bool"),
    "positives": ({"positives": MATRIX.bool()}, r"positives takes the shape \(9,\)"),
    "scores for positives": ({"positives": IDS / 2}, r"positives takes whole numbers as ids"),
    "targets": ({"targets": MATRIX[:, :8]}, r"targets takes the shape \(4, 9\)"),
    "both": ({"positives": LABELS, "targets": MATRIX}, "give one of the two"),
    "gathered": (
        {"targets": MATRIX, "directions": BACKWARD, "all_queries": torch.ones(9, 8).double()},
        "needs targets_queries",
    ),
    "function": (
        {"targets": lambda rows: MATRIX[rows], "directions": BACKWARD},
        "needs targets_queries",
    ),
    "targets_queries": (
        {"targets_queries": MATRIX, "directions": BACKWARD},
        r"targets_queries takes the shape \(4, 4\)",
    ),
    "weights": ({"weights": torch.ones(5)}, r"weights takes the shape \(4,\)"),
    "log_q": ({"log_q": torch.arange(8)}, r"log_q takes the shape \(9,\); got \(8,\)"),
    "no positives": ({"directions": ("query_to_query",)}, "must include 'query_to_doc'"),
    "direction": ({"directions": ("sideways",)}, "directions must be one of .*; got 'sideways'"),
    "per_direction": ({"directions": JOINT[-1]}, "Use partition_mode='joint'"),
    "doc_to_doc": (
        {"directions": JOINT[-1], "partition_mode": "joint", "offset": 2},
        "give all_queries with offset 2",
    ),
    "backend": ({"backend": "ring"}, "backend must be one of 'auto', 'plain' and 'tiled'"),
    "pairs": (
        {"directions": JOINT[-1], "partition_mode": "joint", "offset": 0, "targets": MATRIX},
        r"give integer ids \(M,\)",
    ),
}


WRONG_TERMS = [({"dim": dim}, "Term.dim must be at least 1 and whole") for dim in (0, 2.5, True)]
WRONG_TERMS += [
    ({"temperature": tau}, "Term.temperature must be a positive number")
    for tau in (0, math.nan, math.inf, "0.05", True)
]
WRONG_TERMS += [
    ({"temperature": torch.full(shape, 0.05)}, r"Term.temperature must be a 0-d tensor.*got \(")
    for shape in ((1,), (1, 1))
]
WRONG_TERMS += [
    ({"weight": weight}, "Term.weight must be a finite number") for weight in ("1", True, math.nan)
]


@pytest.mark.parametrize(("options", "message"), WRONG_TERMS)
def test_terms_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Term(**options)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(1)])
def test_terms_take_numbers_of_numpy(number):
    assert Term(dim=np.int64(3), temperature=number, weight=number) == Term(3, number, number)


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_input_is_checked(options, message):
    queries, documents = embeddings(4, 9)
    with pytest.raises(ValueError, match=message):
        infonce(queries, **({"documents": documents} | options))


def test_booleans_as_targets():
    """Where the own document is none of them, and where a row names none and keeps its own."""
    queries, documents = embeddings(4, 9)
    matrix = torch.rand(4, 9, generator=torch.Generator().manual_seed(2)) > 0.6
    matrix[0], matrix[1] = False, torch.arange(9) == 7
    terms = [Term(3, 0.5), Term(None, 0.3)]
    for directions in DIRECTIONS:
        options = {
            "log_q": log_frequencies(9),
            "log_q_queries": log_frequencies(4),
            "tile_rows": 3,
        }
        assert_equals_the_reference(
            queries, documents, terms, QNORM, directions, 2, targets=matrix, **options
        )
    shares = matrix.double()
    shares[0, 2] = 1
    log_probability = (QNORM(queries, documents) / 0.5).log_softmax(dim=1)
    expected = -((log_probability * shares).sum(dim=1) / shares.sum(dim=1)).mean()
    loss = infonce(queries, documents, [Term(temperature=0.5)], QNORM, offset=2, targets=matrix)
    torch.testing.assert_close(loss, expected)


def test_memory_never_holds_the_matrix():
    """In units of the B x B matrix: two tiles of 1/32, and little else at so small a D."""
    size, dim = 2048, 32
    pair = [torch.randn(size, dim, requires_grad=True) for _ in range(2)]
    peak = peak_bytes(lambda: infonce(*pair, tile_rows=64).backward())
    assert 2 / 32 <= peak / (4 * size * size) < 5 / 32


@pytest.mark.parametrize(
    "terms", [(Term(),), (Term(64), Term(128, 0.1), Term(256), Term())], ids=["one", "many"]
)
def test_memory_of_wide_embeddings(terms):
    """Both sides divided by their norms and both gradients: four tensors of B x D."""
    size, dim = 256, 2048
    pair = [torch.randn(size, dim, requires_grad=True) for _ in range(2)]
    peak = peak_bytes(lambda: infonce(*pair, terms, tile_rows=8).backward())
    assert 4 <= peak / (4 * size * dim) < 4.5
