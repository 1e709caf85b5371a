"""Every fault of a server is named, with its fix; every error is one line that says what to do."""

import json
import re
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from _embedding_server import EmbeddingServer, serving
from _tiny import load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.commands.app import app
from st_magnitude.modules import ExponentNorm
from st_magnitude.serving.check import probe_documents

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    return load_transformer(save_transformer(tmp_path_factory.mktemp("serving")))


@pytest.fixture
def model(transformer):
    """A model that is scored by dot, with norms of 4 to 6 and a limit of 64 tokens."""
    return with_modules(transformer)


def with_modules(transformer, *more, similarity="dot", prompts=None):
    """The model with further modules; it shares the Transformer."""
    made = SentenceTransformer(modules=[*transformer, *more], device="cpu", prompts=prompts)
    made.similarity_fn_name = similarity
    return made


def found(check):
    return [finding.name for finding in check.findings]


def check_at(path, server, model, **options):
    with serving(server) as base:
        return stm.check_serving(base + path, model, **options)


@pytest.mark.parametrize(
    ("path", "kind", "server", "fix", "switch"),
    [
        ("/v1", "vllm", "vLLM 0.32.0", "use_activation", {"use_activation": False}),
        ("/embed", "tei", "TEI 1.9.3", '"normalize": false', {"normalize": False}),
        ("/v1/embeddings", "tei", "TEI 1.9.3", '"normalize": false to /embed', None),
        ("/embeddings", "infinity", "Infinity", "always normalises", None),
        ("/v1", "llamacpp", "llama.cpp", "--embd-normalize -1", {"embd_normalize": -1}),
        ("/v1", "ollama", "Ollama 0.33.0", "always normalise", None),
    ],
)
def test_every_server_can_normalise_and_the_fix_is_its_own(model, path, kind, server, fix, switch):
    check = check_at(path, EmbeddingServer(model, kind, normalize=True), model)
    assert (found(check), check.same, check.server) == (["norms lost"], False, server)
    assert re.match(
        r"All norms are 1.000; the model's documents have 4.\d+ to 6.\d+\.", check.findings[0].text
    )
    assert fix in check.findings[0].fix
    assert check.served_norms == pytest.approx((1, 1))
    assert check.changed_rankings > 0
    assert all(len(line) <= 80 for line in str(check).splitlines() if "http" not in line)
    if switch:
        assert check_at(
            path, EmbeddingServer(model, kind, normalize=True), model, request=switch
        ).same


def test_a_server_that_keeps_norms_is_the_same(model):
    check = check_at("", EmbeddingServer(model), model)
    assert check.same, str(check)
    assert (check.findings, check.changed_rankings) == ((), 0)
    assert check.error < 1e-5
    assert check.local_norms == pytest.approx(check.served_norms, rel=1e-5)
    assert (check.num_queries, check.num_documents) == (10, 24)


@pytest.mark.parametrize(
    ("faults", "finding", "says"),
    [
        ({"pooling": "cls"}, "pooling", "pools by cls; the model pools by mean"),
        ({"limit": 32}, "truncation", "from 35 tokens on differ: .* the model's 64 tokens"),
        ({"limit": 128}, "truncation", "from 64 tokens on differ"),
        (
            {"refuse": 60},
            "refused",
            "refuses 2 of 34 texts, the shortest of 64 or more tokens: HTTP 413: .*Input",
        ),
        ({"dtype": torch.bfloat16}, "precision", "relative error of .*e-03"),
        ({"dtype": torch.float16}, "precision", "relative error of .*e-04"),
        ({"dim": 16}, "dimensions", "16 dimensions"),
        ({"factor": 3.0}, "cause unknown", "documents differ.*norms are 1[2-9]"),
    ],
)
def test_one_fault_is_one_finding(model, faults, finding, says):
    check = check_at("", EmbeddingServer(model, **faults), model)
    assert found(check) == [finding], str(check)
    assert re.search(says, check.findings[0].text)
    assert check.findings[0].fix
    assert not check.same
    if faults.get("dtype") == torch.float16:
        assert check_at("", EmbeddingServer(model, **faults), model, tolerance=1e-3).same


def test_two_faults_are_two_findings(model):
    check = check_at("", EmbeddingServer(model, pooling="cls", normalize=True, limit=32), model)
    assert found(check) == ["pooling", "norms lost", "truncation"]
    low, high = check.local_norms
    told = re.search(r"documents have (\S+) to (\d+\.\d+)", check.findings[1].text)
    # of the model, not of the other pooling
    assert low - 1e-3 <= float(told[1]) < float(told[2]) <= high + 1e-3


def test_prompts(transformer):
    prompts = {"query": "how do ", "document": "see also ", "clustering": "topic "}
    model = with_modules(transformer, prompts=prompts)
    with serving(EmbeddingServer(transformer)) as base:
        check = stm.check_serving(base, model)
        assert found(check) == ["prompt", "prompt"]
        assert (
            "queries were read with '' before them; the model's prompt is 'how do '"
            in check.findings[0].text
        )
        assert "'how do '" in check.findings[0].fix
        assert stm.check_serving(base, model, send_prompts=True).same
    with serving(EmbeddingServer(transformer, prompt="topic ")) as base:
        # each prompt of the model
        assert "with 'topic '" in stm.check_serving(base, model).findings[1].text
    query_only = with_modules(transformer, prompts={"query": "how do ", "document": ""})
    with serving(EmbeddingServer(transformer, prompt="how do ")) as base:
        assert found(stm.check_serving(base, query_only)) == ["prompt"]
        check = stm.check_serving(base, query_only, send_prompts=True)
        assert "with 'how do how do '" in check.findings[0].text


def test_a_missing_end_token(transformer):
    """[SEP] is among the tokens of the model, and a server leaves it out."""
    ends = deepcopy(transformer)
    template = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    ends.tokenizer.backend_tokenizer.post_processor = template
    without = deepcopy(ends)
    template = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    without.tokenizer.backend_tokenizer.post_processor = template
    for pooling in ("mean", "lasttoken"):
        model = with_modules([ends[0], Pooling(32, pooling)])
        check = check_at(
            "", EmbeddingServer(with_modules([without[0], Pooling(32, pooling)])), model
        )
        assert found(check)[0] == "end token missing", str(check)
        assert "[SEP]" in check.findings[0].text


@pytest.mark.parametrize("fault", ["order", "every second row"])
def test_a_request_with_several_texts_is_another_one(model, fault):
    def client(texts, role):
        rows = model.encode(texts)
        if fault == "order":
            return rows[::-1]
        rows[1::2] += 0.3 * np.random.default_rng(0).normal(size=rows[1::2].shape)
        return rows

    check = stm.check_serving(client, model)
    assert found(check) == ["batch"]
    assert not check.same


def test_a_cause_that_does_not_explain_nearly_all_texts_is_not_named(model):
    """Every second text comes from another pooling, however it is sent."""
    cls = with_modules([model[0], Pooling(32, "cls")])

    def client(texts, role):
        return [(cls if len(text) % 2 else model).encode(text) for text in texts]

    check = stm.check_serving(client, model)
    assert found(check) == ["cause unknown"]
    assert re.match(r"1[0-4] of 24 documents differ, such as '", check.findings[0].text)


def test_modules_after_the_pooling(transformer):
    model = with_modules(
        transformer, Dense(32, 32, bias=False, activation_function=torch.nn.Identity())
    )
    check = check_at("", EmbeddingServer(model, skip=True), model)
    assert found(check) == ["modules skipped"]
    assert "Dense" in check.findings[0].text


def test_cosine(transformer):
    model = with_modules(transformer, Normalize(), similarity="cosine")
    assert check_at("", EmbeddingServer(model), model).same
    assert found(check_at("", EmbeddingServer(model, skip=True), model)) == ["not normalised"]
    raw = with_modules(transformer, similarity="cosine")
    check = check_at("/v1", EmbeddingServer(raw, "vllm", normalize=True), raw)
    assert (found(check), check.same) == (["norms lost"], True)  # which does not matter to cosine
    assert "SAME scores, with a note" in str(check)


def test_a_model_that_cuts_after_normalize(transformer):
    """Its prefixes are no unit vectors: it serves itself, and a server of unit prefixes is another
    one."""
    model = with_modules(transformer, Normalize())
    model.truncate_dim = 16
    assert stm.check_serving(lambda texts, role: model.encode(texts), model).same
    check = stm.check_serving(
        lambda texts, role: model.encode(texts, normalize_embeddings=True), model
    )
    assert (found(check), check.same) == (["norms lost"], False)
    whole = with_modules(transformer, Normalize())
    assert found(stm.check_serving(lambda texts, role: whole.encode(texts), model)) == [
        "dimensions"
    ]


def test_an_exponent_that_is_not_applied(transformer):
    model = with_modules(transformer, ExponentNorm(1.0, 0.5))
    check = check_at("", EmbeddingServer(model, skip=True), model)
    assert found(check) == ["exponent not applied"]
    assert "stm.Similarity(1, 0.5).document(vectors)" in check.findings[0].fix
    # a server that encodes queries as documents
    check = check_at("", EmbeddingServer(model), model)
    assert (found(check), check.same, check.changed_rankings) == (["role ignored"], True, 0)


def test_another_model(transformer, tmp_path):
    other = load_transformer(save_transformer(tmp_path, "bert"))
    check = check_at("", EmbeddingServer(other), with_modules(transformer))
    assert (found(check), check.same) == (["cause unknown"], False)


@pytest.mark.parametrize(("noise", "finding"), [(0.0, "precision"), (0.02, "cause unknown")])
def test_another_checkpoint_is_not_precision(model, noise, finding):
    """Weights in int8 turn directions a little; another checkpoint turns them more."""
    other, torch_seed = deepcopy(model), torch.manual_seed(0)
    with torch.no_grad():
        for weight in (p for p in other.parameters() if p.ndim == 2):
            step = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / step).round() * step)
            weight += noise * weight.std() * torch.randn(weight.shape, generator=torch_seed)
    check = stm.check_serving(lambda texts, role: other.encode(texts), model)
    assert found(check) == [finding], str(check)


def test_another_tokenizer(model):
    check = stm.check_serving(
        lambda texts, role: model.encode([text.replace("?", " e") for text in texts]), model
    )
    assert found(check) == ["cause unknown"]
    assert "?" in check.findings[0].text


@pytest.mark.parametrize("returns_scores", [False, True])
def test_an_index(model, returns_scores):
    documents = [f"{text} {i}" for i, text in enumerate(probe_documents(64))]
    stored = model.encode_document(documents)

    def check_by(scores):
        def search(vectors, k):
            order = np.argsort(-scores(vectors), axis=1)[:, :k]
            return (np.zeros(order.shape), order) if returns_scores else order

        return stm.check_serving(search, model, documents=documents)

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    check = check_by(lambda x: x @ stored.T)
    assert (check.same, check.changed_rankings) == (True, 0)
    check = check_by(lambda x: unit(x) @ unit(stored).T)
    assert found(check) == ["metric"]
    assert "ranks by cosine; the model is scored by dot" in check.findings[0].text
    assert check.changed_rankings > 0
    check = check_by(lambda x: x @ stored[::-1].T)
    assert found(check) == ["recall"]
    assert "order of the index" in check.findings[0].fix


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"drop": 1}, "must return one vector of equally many numbers for each of 1 texts"),
        ({"nan": True}, "nan or infinity in vector 0"),
        ({"key": "right"}, "refuses the key .HTTP 401"),
        ({"names": ["a", "b"]}, "serves a, b: say which with name="),
        ({"names": ["other"]}, "does not know this route or the model 'other'.*it serves other"),
        (
            {"raw_text": "<html>proxy</html>"},
            "does not answer with embeddings, but with '<html>proxy",
        ),
        ({"raw_text": '{"data": [{"index": 0, "embedding": ["x"]}]}'}, "must return one vector"),
        ({"refuse": 0}, "does not embed"),
        ({"sleep": 1.0, "timeout": 0.05}, "did not answer within 0.05 s"),
    ],
)
def test_a_target_that_cannot_be_checked(model, faults, says):
    timeout = faults.pop("timeout", 20.0)
    with pytest.raises((ValueError, OSError), match=says) as raised:
        check_at("", EmbeddingServer(model, **faults), model, timeout=timeout)
    assert "\n" not in str(raised.value)


def test_an_index_that_misses_documents(model):
    """FAISS fills rows up with -1, others return short rows: a missing hit is a miss."""
    documents = [f"{text} {i}" for i, text in enumerate(probe_documents(64))]
    stored = model.encode_document(documents)

    def search(vectors, k, fill):
        best = (-(vectors @ stored.T)).argsort(axis=1)[:, :k].tolist()
        return [row[:7] + fill for row in best[:5]] + best[5:]

    for fill in ([-1] * 3, [], [0, 0, 0]):
        check = stm.check_serving(partial(search, fill=fill), model, documents=documents)
        assert found(check) == ["recall"]
        assert check.changed_rankings == 5


@pytest.mark.parametrize("answer", [[[0]] * 12, np.full((10, 2), 7), None, [1] * 10, [["a"]] * 10])
def test_an_index_that_answers_nonsense(model, answer):
    with pytest.raises(ValueError, match=r"must return up to 2 row numbers of the 2 documents"):
        stm.check_serving(lambda vectors, k: answer, model, documents=["a", "b"])


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000", "'localhost:8000' is not a URL of http"),
        (
            "http://me:hidden@localhost:port/v1?api-key=hidden",
            "'localhost:port/v1' is not a URL of http",
        ),
        ("http://127.0.0.1:1/v1", "cannot be reached"),
    ],
)
def test_a_url_that_cannot_be_used(model, url, says):
    with pytest.raises((ValueError, OSError), match=says):
        stm.check_serving(url, model, timeout=2)


def test_a_key_and_a_password_appear_nowhere(model):
    secret = "sk-very-secret"
    with serving(EmbeddingServer(model, key="right")) as base:
        with pytest.raises(ValueError, match="refuses the key") as raised:
            stm.check_serving(base, model, api_key=secret)
        assert secret not in str(raised.value)
        assert "Bearer ***" in str(raised.value)
        with pytest.raises(ValueError, match="refuses the key") as raised:
            stm.check_serving(base.replace("http://", "http://me:hidden@"), model)
        assert "hidden" not in str(raised.value)
        check = stm.check_serving(base, model, api_key="right")
        assert check.same
        assert "right" not in json.dumps(check.to_dict())


@pytest.mark.parametrize(
    "key", ["sk-very-secret\n", " sk-very-secret ", "sk-very\x07secret", "sk-véry-secret"]
)
def test_a_key_that_no_header_may_hold(model, key):
    """It is stripped or refused, and never shown."""
    with serving(EmbeddingServer(model, key="sk-very-secret")) as base:
        if key.strip() == "sk-very-secret":
            assert stm.check_serving(base, model, api_key=key).same
            return
        with pytest.raises(ValueError, match="no HTTP header may hold") as raised:
            stm.check_serving(base, model, api_key=key)
        assert "sk-v" not in str(raised.value)


@pytest.mark.parametrize(
    "told",
    [
        {"data": None},
        {"data": [{"object": "model"}]},
        {"data": ["tiny"]},
        {"data": {"id": "tiny"}},
        [{"id": "a"}],
        None,
    ],
)
def test_models_that_are_listed_in_another_shape(model, told):
    assert check_at("/v1", EmbeddingServer(model, told=told), model, name="tiny").same


@pytest.mark.parametrize("answer", ["index missing", "index null", "base64"])
def test_answers_in_another_shape(model, answer):
    assert check_at("/v1", EmbeddingServer(model, answer=answer), model).same


def test_ollamas_own_route(model):
    check = check_at("/api/embed", EmbeddingServer(model, "ollama"), model)
    assert (found(check), check.server) == (["norms lost"], "Ollama 0.33.0")


def test_a_busy_server_is_asked_again(model):
    assert check_at("/v1", EmbeddingServer(model, busy=2), model).same
    with pytest.raises(OSError, match=r"too many requests .HTTP 429"):
        check_at("/v1", EmbeddingServer(model, busy=100), model)


def test_the_command(model, tmp_path, monkeypatch):
    stm.export(model, tmp_path / "model")
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(EmbeddingServer(model, "vllm", normalize=True, key="secret")) as base:

        def run(code, *options):
            result = CliRunner().invoke(
                app, ["check-serving", base, "--model", str(tmp_path / "model"), *options]
            )
            assert result.exit_code == code, result.output
            assert "secret" not in result.output
            return result

        assert "[norms lost] All norms are 1.000" in run(1, "--api-key-env", "MY_KEY").output
        kept = run(0, "--api-key-env", "MY_KEY", "--json", "--request", '{"use_activation": false}')
        figures = json.loads(kept.stdout)
        assert (figures["same"], figures["findings"], figures["exit_code"]) == (True, [], 0)
        run(2)  # without the key
        for name, value, says in [
            ("--api-key-env", "NOT_SET", "is not set"),
            ("--request", "{", "must be a JSON object"),
            ("--request", "[]", "must be a JSON object"),
        ]:
            assert says in " ".join(run(2, name, value).output.split())
