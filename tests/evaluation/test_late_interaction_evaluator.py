"""LateInteractionEvaluator against plain loops, and against sentence-transformers."""

import math

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.multi_vector_encoder.evaluation import (
    MultiVectorInformationRetrievalEvaluator,
)
from sentence_transformers.multi_vector_encoder.modules import (
    HierarchicalTokenPooling,
    MultiVectorMask,
)
from sentence_transformers.sentence_transformer.modules import WordEmbeddings
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

from st_magnitude import Similarity
from st_magnitude.evaluation import LateInteractionEvaluator
from st_magnitude.evaluation.late_interaction import METHODS
from st_magnitude.geometry import paired_bootstrap

pytestmark = pytest.mark.usefixtures("one_thread")

RNG = np.random.default_rng(0)
WORDS = [f"w{i}" for i in range(200)]
VECTORS = (RNG.normal(size=(200, 8)) * np.exp(RNG.normal(size=(200, 1)))).astype(np.float32)
CORPUS = {f"d{j:02}": " ".join(RNG.choice(WORDS, 3 + 3 * (j % 7))) for j in range(40)}
TEXTS = [text.split() for text in CORPUS.values()]
QUERIES = {f"q{i:02}": " ".join(RNG.choice(CORPUS[f"d{i:02}"].split(), 4)) for i in range(30)}
RELEVANT = {query: {f"d{query[1:]}", f"d{39 - i % 10:02}"} for i, query in enumerate(QUERIES)}
TASK = (QUERIES, CORPUS, RELEVANT)


def words_model(*modules) -> MultiVectorEncoder:
    """Every word has its row of VECTORS, in queries and documents."""
    tokenizer = WhitespaceTokenizer(WORDS, stop_words=())
    return MultiVectorEncoder(
        modules=[WordEmbeddings(tokenizer, VECTORS, True), *modules], device="cpu"
    )


def unit_model():
    return words_model(Normalize(module_input_name="token_embeddings"))


def rows(words):
    return [VECTORS[WORDS.index(word)].astype(float) for word in words]


def reference(documents, gamma, sign=1):
    """nDCG@10 of every query from token vectors, by loops; -1 ranks the last of equals first."""
    values = []
    for query, text in QUERIES.items():
        asked = [q / np.linalg.norm(q) for q in rows(text.split())]
        stored = [[d / np.linalg.norm(d) ** gamma for d in document] for document in documents]
        scores = [sum(max(float(q @ d) for d in document) for q in asked) for document in stored]
        ranking = sorted(range(len(scores)), key=lambda j: (-round(scores[j], 5), sign * j))[:10]
        names = list(CORPUS)
        gain = sum(
            1 / math.log2(rank + 2) for rank, j in enumerate(ranking) if names[j] in RELEVANT[query]
        )
        values.append(gain / sum(1 / math.log2(rank + 2) for rank in range(len(RELEVANT[query]))))
    return np.array(values)


def kept_by_norm(share):
    """Token vectors by document: the longest of each, then the longest of all others."""
    tokens = [(j, i) for j, words in enumerate(TEXTS) for i in range(len(words))]
    ranked = sorted(tokens, key=lambda place: -np.linalg.norm(rows(TEXTS[place[0]])[place[1]]))
    best = {}
    for j, i in ranked:
        best.setdefault(j, (j, i))
    others = [place for place in ranked if place not in best.values()]
    kept = {*best.values(), *others[: max(0, round(share * len(tokens)) - len(best))]}
    return [
        rows(word for i, word in enumerate(words) if (j, i) in kept)
        for j, words in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_cell_is_the_loop(gamma):
    options = {"methods": ["pooling", "norm"], "similarity": Similarity(1.0, gamma)}
    evaluator = LateInteractionEvaluator(*TASK, shares=[0.3], **options)
    metrics = evaluator(words_model())
    found = evaluator.per_query
    kept = kept_by_norm(0.3)
    for key, documents in ((("full", 1.0), [*map(rows, TEXTS)]), (("norm", 0.3), kept)):
        expected = reference(documents, gamma)
        # documents with the same words have equal scores
        clear = expected == reference(documents, gamma, sign=-1)
        assert clear.sum() >= 15
        np.testing.assert_allclose(found[key][clear], expected[clear], atol=1e-12)
        assert 0.1 < expected.mean() < 0.95
    cell = {cell.method: cell for cell in evaluator.cells}["norm"]
    assert (cell.exponent, cell.ndcg) == (gamma, metrics["norm_30_ndcg@10"])
    assert cell.ndcg == pytest.approx(found["norm", 0.3].mean())
    assert cell.versus_pooling == paired_bootstrap(found["norm", 0.3], found["pooling", 0.3])


@pytest.mark.parametrize("score", ["maxsim", "meanmaxsim"])
@pytest.mark.parametrize("make", [words_model, unit_model])
def test_all_vectors_are_sentence_transformers_own_evaluation(make, score):
    model = make()
    model.similarity_fn_name = score
    metrics = LateInteractionEvaluator(*TASK, shares=[], similarity="dot")(model)
    theirs = MultiVectorInformationRetrievalEvaluator(*TASK)(model)
    assert metrics == {"full_ndcg@10": pytest.approx(theirs[f"{score}_ndcg@10"], abs=1e-12)}
    assert 0.1 < metrics["full_ndcg@10"] < 0.95


def test_pooling_is_sentence_transformers_own():
    """At a third, where all documents have a multiple of three tokens, the factor is three."""
    model = unit_model()
    metrics = LateInteractionEvaluator(*TASK, shares=[1 / 3], methods=["pooling"])(model)
    model.append(HierarchicalTokenPooling(3, num_protected_tokens=0))
    theirs = MultiVectorInformationRetrievalEvaluator(*TASK)(model)
    assert metrics[f"pooling_{100 / 3:g}_ndcg@10"] == pytest.approx(
        theirs["maxsim_ndcg@10"], abs=1e-12
    )


def test_bytes_and_at_least_one_vector_of_each_document():
    evaluator = LateInteractionEvaluator(*TASK, name="dev")
    metrics = evaluator(words_model())
    cells = [f"{m}_{share}" for share in ("50", "25", "15", "10", "5") for m in METHODS]
    assert metrics.keys() == {f"dev_{cell}_ndcg@10" for cell in ["full", *cells]}
    assert evaluator.primary_metric == "dev_full_ndcg@10"
    total = sum(map(len, TEXTS))
    for cell in evaluator.cells:
        number = round(cell.bytes_per_document * len(CORPUS) / (8 * 4))
        most = max(len(CORPUS), round(cell.share * total))
        if "pooling" in cell.method:
            assert max(len(CORPUS), 0.85 * cell.share * total) <= number <= most
            assert cell.exponent == 1.0
        else:
            assert number == most


def test_the_highest_exponent_is_chosen():
    """One query wants the longest vector, the other its direction."""
    vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [4.0, 4.0]])
    tokenizer = WhitespaceTokenizer(["a", "b", "c"], stop_words=())
    model = MultiVectorEncoder(modules=[WordEmbeddings(tokenizer, vectors)], device="cpu")
    corpus = {"near": "b", "long": "c"}

    def chosen(relevant, **options):
        judged = {"q": {relevant}}
        evaluator = LateInteractionEvaluator({"q": "a"}, corpus, judged, shares=[], **options)
        return evaluator(model)["full_ndcg@10"], evaluator.cells[0].exponent

    assert chosen("near") == (1.0, 1.0)
    assert chosen("long") == (1.0, 0.75)  # of 0, .5 and .75, the nearest to unit vectors
    assert chosen("near", similarity="dot")[1] == 0.0


def test_unit_vectors_have_pooling_only():
    evaluator = LateInteractionEvaluator(*TASK, shares=[0.2])
    evaluator(unit_model())
    assert {(c.method, c.exponent) for c in evaluator.cells} == {("full", 1.0), ("pooling", 1.0)}


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="got 'size'"):
        LateInteractionEvaluator(*TASK, methods=["size"])
    evaluator = LateInteractionEvaluator({"q": "w999"}, CORPUS, {"q": {"d01"}})
    with pytest.raises(TypeError, match="needs a MultiVectorEncoder"):
        evaluator(SentenceTransformer(modules=[words_model()[0]], device="cpu"))
    model = words_model()
    with torch.no_grad():
        model[0].emb_layer.weight[WORDS.index(CORPUS["d05"].split()[0])] = torch.nan
    with pytest.raises(ValueError, match="embeddings are not finite"):
        evaluator(model)


def test_the_query_itself_is_left_out():
    query = {"q03": QUERIES["q03"]}
    one, two = (
        LateInteractionEvaluator(query, corpus, RELEVANT, methods=[])(words_model())
        for corpus in (CORPUS, CORPUS | query)
    )
    assert one == two


def test_prompts_and_masks_reach_the_vectors():
    """A prompt adds its words to every text, and skipped words are not stored."""

    def bytes_of_all(model, **prompts):
        evaluator = LateInteractionEvaluator(*TASK, shares=[], **prompts)
        evaluator(model)
        return evaluator.cells[0].bytes_per_document

    plain = bytes_of_all(words_model())
    prompted = bytes_of_all(words_model(), corpus_prompt="w1 w2 ", query_prompt="w3 ")
    assert prompted - plain == pytest.approx(2 * 32)
    model = words_model(MultiVectorMask())
    model[-1]._skiplist_ids = torch.arange(100)
    stored = sum(WORDS.index(word) >= 100 for words in TEXTS for word in words)
    assert bytes_of_all(model) == pytest.approx(32 * stored / len(CORPUS))
