"""Every fault of a server is found, with its remedy, and no error shows a secret."""

import json
import math
import re
from base64 import b64encode
from copy import deepcopy
from traceback import format_exc
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
import torch
from _embedding_server import EmbeddingServer, serving
from _tiny import load_transformer, save_transformer
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import BoW, Pooling
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.workbench.commands.app import app
from st_magnitude.workbench.serving.explain import Side, explain


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    return load_transformer(save_transformer(tmp_path_factory.mktemp("serving")))


@pytest.fixture
def model(transformer):
    """A model that is scored by dot, with norms of 4 to 6 and a limit of 64 tokens."""
    return with_modules(transformer)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """For a busy server."""
    no_time = SimpleNamespace(sleep=lambda seconds: None)
    monkeypatch.setattr("st_magnitude.workbench.serving.server.time", no_time)


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
    assert check.local_norms == pytest.approx(check.served_norms, rel=1e-5)
    assert str(check).endswith("Texts of up to 64 tokens were compared.")


def other_pooling(model, texts):
    """For every second text."""
    cls = with_modules([model[0], Pooling(32, "cls")])
    return [(cls if len(text) % 2 else model).encode(text) for text in texts]


def without_two(model, texts):
    return [row if i > 1 else 0 * row for i, row in enumerate(model.encode(texts))]


def bits(model, texts):
    return np.packbits(model.encode(texts) > 0, axis=1).astype(int)


# what a server or a client does, the findings, and what the first one says with its remedy
DIFFERENCES = [
    ({"pooling": "cls"}, ["vectors"], "1[4-8] of 18 document texts"),
    ({"limit": 32}, ["truncation"], "from 35 tokens on differ: .* 64 tokens"),
    ({"limit": 128}, ["truncation"], "from 64 tokens on differ"),
    ({"says": (413, "Too long"), "over": 60}, ["refused"], "2 texts, .* 64 tokens: HTTP 413"),
    ({"says": (500, "too large to process"), "over": 60}, ["refused"], "2 texts, .*HTTP 500"),
    ({"normalize": True, "limit": 32}, ["norms", "truncation"], ""),
    (lambda model, texts: np.float16(model.encode(texts)), ["precision"], "error of .*e-04"),
    (lambda model, texts: model.encode(texts)[:, :16], ["dimensions"], "16 dim.* truncate_dim"),
    (lambda model, texts: 3 * model.encode(texts), ["norms"], "norms of 1"),
    (without_two, ["zeros"], "[26] of (8|18) .*loaded the weights"),
    (bits, ["dimensions"], "Ask the server for 32 floats, not for bits"),
    (lambda *given: np.repeat(given[0].encode(given[1]), 2, 1), ["dimensions"], "another model"),
    (other_pooling, ["vectors"], "another pooling"),
    (lambda model, texts: model.encode(texts)[::-1], ["vectors"], "rows in another order"),
    (lambda model, texts: model.encode([x[1:] or x for x in texts]), ["vectors"], "that strips"),
]


@pytest.mark.parametrize(("target", "names", "says"), DIFFERENCES)
def test_each_difference_is_one_finding(model, target, names, says):
    def check(**options):
        if callable(target):
            return stm.check_serving(lambda texts, role: target(model, texts), model, **options)
        return check_at("", EmbeddingServer(model, **target), model, **options)

    first = check()
    assert found(first) == names
    assert re.search(says, f"{first.findings[0].text} {first.findings[0].fix}")
    if "precision" in names:
        assert check(tolerance=1e-2).same


def test_prompts(transformer):
    model = with_modules(transformer, prompts={"query": "how do ", "document": "see also "})
    plain = EmbeddingServer(transformer)
    check = check_at("", plain, model)
    assert found(check) == ["prompt"]
    assert "'how do ' for queries and 'see also ' for documents" in check.findings[0].text
    assert check_at("", plain, model, send_prompts=True).same


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
    check = check_at("/v1", EmbeddingServer(raw, "vllm", normalize=True), raw)
    assert check.same
    assert "under cosine, change no ranking" in " ".join(str(check).split())


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


OPTIONS = ("timeout", "tolerance", "name")
DEEP = "[" * 200_000
HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"says": (200, "[[1]]")}, "one vector of equally many numbers for each of 8 texts"),
        ({"says": (200, json.dumps([[math.nan]] * 8))}, "nan or infinity"),
        ({"says": (200, json.dumps([[1e200]] * 8))}, "numbers over 1e30"),
        ({"key": "right"}, "does not embed .* .HTTP 401 .*api_key"),
        ({"name": "other"}, "HTTP 404 .*name"),
        ({"says": (200, DEEP)}, "does not answer with embeddings"),
        ({"says": (200, f"[[{HUGE}]]")}, "no such vectors"),
        ({"says": (200, "[[],[],[],[],[],[],[],[]]")}, "no such vectors"),
        ({"says": (200, '{"data": [{"index": 0, "embedding": ["x"]}]}')}, "one vector"),
        ({"says": (413, "Too long")}, "does not embed"),
        ({"says": (500, "Overloaded"), "over": 60}, "HTTP 500 Internal Server Error"),
        ({"busy": [503] * 3}, "HTTP 503 .* try again later"),
        ({"moved": "http://elsewhere.example/"}, "HTTP 307"),
        ({"refuses": "encoding_format"}, "HTTP 422"),
        ({"drip": [b"HTTP/1.1 200 OK\r\n", *[b"X: x\r\n"] * 40], "timeout": 0.5}, "within 0.5 s"),
        ({"timeout": math.nan}, "timeout must be a positive number"),
        ({"tolerance": math.nan}, "tolerance must be at least 0"),
    ],
)
def test_a_target_that_cannot_be_checked(model, faults, says):
    options = {name: faults.pop(name) for name in OPTIONS if name in faults}
    with pytest.raises((ValueError, OSError), match=says) as raised:
        check_at("", EmbeddingServer(model, **faults), model, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "variable", "says"),
    [
        ("localhost:8000", "", "begin it with http:"),
        ("http://me:hidden@localhost:port/v1?api-key=hidden", "", "begin it with http:"),
        ("http://hidden?me@localhost/v1", "", "begin it with http:"),
        ("http://127.0.0.1:1/v1", "", "is it up"),
        ("https://{host}", "", "TLS.*SSL_CERT"),
        ("https://{host}", "SSL_CERT_FILE=/no/such/file", "TLS.*SSL_CERT"),
        ("http://example.org", "ALL_PROXY=socks5://localhost:1", "cannot be reached .*proxy"),
        ("http://example.org", "ALL_PROXY=x://", "cannot be reached .*proxy"),
    ],
)
def test_a_url_that_cannot_be_used(model, monkeypatch, url, variable, says):
    monkeypatch.setenv(*(variable or "OTHER=").split("="))
    with serving(EmbeddingServer(model)) as base:
        url = url.format(host=base[len("http://") :])
        with pytest.raises((ValueError, OSError), match=says) as raised:
            stm.check_serving(url, model, timeout=5)
    assert "hidden" not in str(raised.value)
    assert "\n" not in str(raised.value)


KEY = 'sk-Zq7/+<Yw\\3"kP%Xf9&vB2'
IN_URL = quote(KEY, safe="")


@pytest.mark.parametrize(
    ("place", "options", "status"),
    [
        ("{base}", {"api_key": KEY}, 200),
        ("{base}", {"api_key": KEY}, 413),
        ("{base}/v1?api-key={key}", {}, 401),
        ("{base}/{key}/v1#{key}", {}, 413),
        ("{base}", {"request": {"auth": {"token": KEY}}}, 200),
        ("http://user:{key}@{host}", {}, 401),
        ("http://{key}@{host}", {}, 413),
    ],
)
def test_no_part_of_a_key_leaves_the_process(model, caplog, status, place, options):
    """A server repeats it in its status, headers and words: in an error, or in a finding."""
    caplog.set_level("DEBUG")
    pairs = [KEY, f"user:{KEY}", f":{KEY}"]
    texts = [KEY, IN_URL, json.dumps(KEY), *(b64encode(pair.encode()).decode() for pair in pairs)]
    hidden = {text[i : i + 6] for text in texts for i in range(len(text) - 5)}
    faults = {"says": (413, KEY), "over": 60}
    if status != 413:
        head = f"HTTP/1.1 {status} {KEY}\r\nX-Key: {KEY}\r\nContent-Length: {len(KEY)}\r\n\r\n"
        faults = {"drip": [(head + KEY).encode()]}
    with serving(EmbeddingServer(model, **faults)) as base:
        url = place.format(base=base, key=IN_URL, host=base[len("http://") :])
        try:
            said = stm.check_serving(url, model, **options)
            shown = f"{said} {json.dumps(said.to_dict())}"
        except (ValueError, OSError):
            shown = format_exc()
    assert f"HTTP {status}" in shown or status == 200
    assert "127.0.0.1" in shown
    shown += caplog.text
    assert not [part for part in hidden if part in shown]


@pytest.mark.parametrize("key", ["sk-s\xe9cret\x07", "sk-se\ncret", "'sk-secret'", '"sk-secret"'])
def test_a_key_that_no_header_may_hold(model, key):
    with pytest.raises(ValueError, match="without quotes") as raised:
        stm.check_serving("http://127.0.0.1:1", model, api_key=key)
    assert "cret" not in str(raised.value)


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
        for no_object in ("[]", "[" * 9999, "{'api_key': 'secret'}", '{"n": 1' + "0" * 9999 + "}"):
            run(2, "--request", no_object)
        weights = tmp_path / "model" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        assert f"'{tmp_path / 'model'}' is incomplete" in run(2).stderr


@pytest.mark.parametrize(
    ("faults", "options"),
    [
        ({"key": "right"}, {"api_key": " right\n"}),
        ({"busy": [429, 503]}, {}),
        ({"index": {"index": None}}, {}),
        ({"index": {}}, {}),
        ({"refuses": "encoding_format"}, {"request": {"encoding_format": None}}),
    ],
)
def test_what_servers_do(model, faults, options):
    assert check_at("", EmbeddingServer(model, **faults), model, **options).same


def test_a_model_that_tells_no_texts_apart_is_not_the_same():
    blind = SentenceTransformer(modules=[BoW(["nothing"])], device="cpu")
    with pytest.raises(ValueError, match="one vector to all"):
        stm.check_serving(lambda texts, role: blind.encode(texts), blind)


def test_two_models_at_one_url_are_named(model):
    with pytest.raises(ValueError, match="of 5 and of 8 dimensions"):
        stm.check_serving(lambda texts, role: np.ones((len(texts), len(role))), model)


def test_a_stray_key_is_not_repeated():
    for command in ("check-serving http://localhost:1/v1 --model x", "train --data x --output y"):
        done = CliRunner().invoke(app, [*command.split(), "sk-secret"])
        assert done.exit_code == 2
        assert "secret" not in done.output
        assert "too many arguments" in done.output


TOKENS = [3, 5, 8, 20, 30, 40, 64, 64]


@pytest.mark.parametrize(
    ("others", "limit", "name"),
    [
        ([], 64, None),
        ([6, 7], 64, "truncation"),
        ([5, 6, 7], 64, "truncation"),
        ([7], 64, "truncation"),  # of two with as many tokens as the limit, one is longer
        ([6, 7], None, "vectors"),  # of a model that reads whole texts
        ([5], 64, "vectors"),  # longer ones are equal
        ([3, 4, 5, 6, 7], 64, "vectors"),  # 20 tokens are a short text, which no limit cuts
    ],
)
def test_a_cut_changes_all_texts_from_a_length_on(others, limit, name):
    model = torch.nn.Module()
    vars(model).update(max_seq_length=limit, similarity_fn_name="cosine", prompts={})
    expected = np.eye(8)
    served = expected.copy()
    served[others] = np.roll(served[others], 1, axis=1)
    side = Side("document", [f"text {n}" for n in TOKENS], np.array(TOKENS), served, expected)
    findings, _ = explain(model, [side], 1e-4)
    assert [found.name for found in findings] == ([name] if name else [])
    if name == "truncation":
        assert f"from {TOKENS[others[0]]} tokens on" in findings[0].text
