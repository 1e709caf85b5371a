"""Every fault of a server is found, with its remedy, and no error shows a secret."""

import json
import re
from copy import deepcopy

import pytest
import torch
from _embedding_server import EmbeddingServer, serving
from _tiny import load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.commands.app import app
from st_magnitude.modules import ExponentNorm


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
    assert check.same == (not check.findings)
    return [finding.name for finding in check.findings]


def check_at(path, server, model, **options):
    with serving(server) as base:
        return stm.check_serving(base + path, model, **options)


@pytest.mark.parametrize(
    ("path", "kind", "switch"),
    [
        ("/v1", "vllm", {"use_activation": False}),
        ("/embed", "tei", {"normalize": False}),
        ("/v1/embeddings", "tei", None),
        ("/embeddings", "infinity", None),
        ("", "llamacpp", {"embd_normalize": -1}),
    ],
)
def test_servers_that_normalise(model, path, kind, switch):
    served = EmbeddingServer(model, kind, normalize=True)
    check = check_at(path, served, model)
    assert found(check) == ["norms"]
    assert check.served_norms == pytest.approx((1, 1))
    assert check.changed_rankings > 0
    assert all(len(line) <= 80 for line in str(check).splitlines() if "http" not in line)
    if switch:
        assert check_at(path, served, model, request=switch).same


def test_a_server_that_keeps_norms_is_the_same(model):
    check = check_at("", EmbeddingServer(model), model, name="tiny")
    assert (found(check), check.changed_rankings) == ([], 0)
    assert check.error < 1e-5
    assert check.local_norms == pytest.approx(check.served_norms, rel=1e-5)
    assert (check.num_queries, check.num_documents) == (8, 18)


@pytest.mark.parametrize(
    ("faults", "names", "says"),
    [
        ({"pooling": "cls"}, ["vectors"], "1[4-8] of 18 document texts"),
        ({"limit": 32}, ["truncation"], "from 35 tokens on differ: .* 64 tokens"),
        ({"limit": 128}, ["truncation"], "from 64 tokens on differ"),
        ({"refuse": 60}, ["refused"], "2 texts, .* 64 tokens: HTTP 413: .*Input"),
        ({"dtype": torch.bfloat16}, ["precision"], "relative error of .*e-03"),
        ({"dtype": torch.float16}, ["precision"], "relative error of .*e-04"),
        ({"dim": 16}, ["dimensions"], "16 dimensions"),
        ({"factor": 3.0}, ["norms"], "norms of 1"),
        ({"normalize": True, "limit": 32}, ["norms", "truncation"], ""),
    ],
)
def test_each_fault_is_one_finding(model, faults, names, says):
    check = check_at("", EmbeddingServer(model, **faults), model)
    assert found(check) == names
    assert re.search(says, check.findings[0].text)
    if "precision" in names:
        assert check_at("", EmbeddingServer(model, **faults), model, tolerance=1e-2).same


def test_prompts(transformer):
    model = with_modules(transformer, prompts={"query": "how do ", "document": "see also "})
    plain = EmbeddingServer(transformer)
    check = check_at("", plain, model)
    assert found(check) == ["prompt"]
    assert "'how do ' for queries and 'see also ' for documents" in check.findings[0].text
    assert check_at("", plain, model, send_prompts=True).same


def every_second_text_by_another_pooling(model):
    cls = with_modules([model[0], Pooling(32, "cls")])
    return lambda texts: [(cls if len(text) % 2 else model).encode(text) for text in texts]


def rows_in_another_order(model):
    return lambda texts: model.encode(texts)[::-1]


@pytest.mark.parametrize("client", [every_second_text_by_another_pooling, rows_in_another_order])
def test_other_vectors(model, client):
    embed = client(model)
    assert found(stm.check_serving(lambda texts, role: embed(texts), model)) == ["vectors"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Dense(32, 32, bias=False, activation_function=torch.nn.Identity()), "vectors"),
        (Normalize(), "norms"),
        (ExponentNorm(1.0, 0.5), "norms"),
    ],
)
def test_modules_that_do_not_run(transformer, module, name):
    """Norms of queries are not compared: a server that reads them as documents ranks alike."""
    model = with_modules(transformer, module)
    assert check_at("", EmbeddingServer(model), model).same
    assert name in found(check_at("", EmbeddingServer(model, skip=True), model))


def test_norms_do_not_count_for_cosine(transformer):
    raw = with_modules(transformer, similarity="cosine")
    assert check_at("/v1", EmbeddingServer(raw, "vllm", normalize=True), raw).same


@pytest.mark.parametrize(("noise", "finding"), [(0.0, "precision"), (0.02, "vectors")])
def test_another_checkpoint_is_not_precision(model, noise, finding):
    """Weights in int8 turn directions a little; another checkpoint turns them more."""
    other = deepcopy(model)
    generator = torch.manual_seed(0)
    with torch.no_grad():
        for weight in (p for p in other.parameters() if p.ndim == 2):
            step = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / step).round() * step)
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    check = stm.check_serving(lambda texts, role: other.encode(texts), model)
    assert found(check) == [finding]


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"drop": 1}, "one vector of equally many numbers for each of 8 texts"),
        ({"nan": True}, "nan or infinity"),
        ({"key": "right"}, "does not embed .* .HTTP 401: .*--api-key-env"),
        ({"name": "other"}, "HTTP 404: .*`other` does not exist.*--name"),
        ({"raw_text": "<html>proxy</html>"}, "'<html>proxy"),
        ({"raw_text": '{"data": [{"index": 0, "embedding": ["x"]}]}'}, "one vector"),
        ({"refuse": 0}, "does not embed"),
        ({"sleep": 1.0, "timeout": 0.05}, "within 0.05 s"),
        ({"busy": True}, "HTTP 429"),
    ],
)
def test_a_target_that_cannot_be_checked(model, faults, says):
    options = {name: faults.pop(name) for name in ("timeout", "name") if name in faults}
    with pytest.raises((ValueError, OSError), match=says) as raised:
        check_at("", EmbeddingServer(model, **faults), model, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000", "'localhost:8000' is not a URL"),
        ("http://me:hidden@localhost:port/v1?api-key=hidden", "'localhost:port/v1' is not a URL"),
        ("http://127.0.0.1:1/v1", "cannot be reached"),
    ],
)
def test_a_url_that_cannot_be_used(model, url, says):
    with pytest.raises((ValueError, OSError), match=says):
        stm.check_serving(url, model, timeout=2)


@pytest.mark.parametrize(
    ("account", "key", "says"),
    [
        ("", "sk-wrong-secret", r"Bearer \*\*\*"),
        ("me:secret@", None, "HTTP 401"),
        ("", "sk-sécret\x07", "no HTTP header may hold"),
    ],
)
def test_a_secret_appears_nowhere(model, account, key, says):
    with serving(EmbeddingServer(model, key="right")) as base:
        with pytest.raises(ValueError, match=says) as raised:
            stm.check_serving(base.replace("//", "//" + account), model, api_key=key)
        assert not re.search("s[eé]cret", str(raised.value))
        check = stm.check_serving(base, model, api_key=" right\n")  # it is stripped
        assert check.same
        assert "right" not in json.dumps(check.to_dict())


def test_the_command(model, tmp_path, monkeypatch):
    stm.export(model, tmp_path / "model")
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(EmbeddingServer(model, "vllm", normalize=True, key="secret")) as base:

        def run(code, *options):
            arguments = ["check-serving", base, "--model", str(tmp_path / "model"), *options]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == code, result.output
            assert "secret" not in result.output
            return result

        assert "[norms]" in run(1, "--api-key-env", "MY_KEY").output
        kept = run(0, "--api-key-env", "MY_KEY", "--json", "--request", '{"use_activation": false}')
        figures = json.loads(kept.stdout)
        assert (figures["same"], figures["findings"], figures["exit_code"]) == (True, [], 0)
        run(2)  # without the key
        run(2, "--api-key-env", "NOT_SET")
        for no_object in ("{", "[]"):
            run(2, "--request", no_object)
