"""A server that speaks embedding APIs as documented, with faults to switch on one by one."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

NAME = "tiny"


class EmbeddingServer:
    """Serves a model of a Transformer, a Pooling and more, as some kind of server does.

    vLLM takes ``normalize`` from modules.json and from --pooler-config.
    """

    def __init__(self, model: SentenceTransformer, kind: str = "openai", **faults: object) -> None:
        self.kind = kind
        self.faults = faults
        first = model[0]
        pooling = Pooling(
            model[1].embedding_dimension, str(faults.get("pooling", model[1].pooling_mode))
        )
        rest = [] if faults.get("skip") else list(model)[2:]
        self.model = SentenceTransformer(modules=[first, pooling, *rest], device="cpu")

    def embed(self, texts: list[str], normalize: bool) -> list[list[float]]:
        limit, own = self.faults.get("limit"), self.model.max_seq_length
        self.model.max_seq_length = limit or own
        rows = torch.from_numpy(self.model.encode(texts))
        self.model.max_seq_length = own
        if normalize:
            rows = torch.nn.functional.normalize(rows)
        return rows.tolist()

    def answer(self, path: str, body: dict, headers: dict) -> tuple[int, object]:
        faults = self.faults
        if faults.get("key") and headers.get("Authorization") != f"Bearer {faults['key']}":
            return 401, {
                "error": {"message": f"Incorrect API key provided: {headers.get('Authorization')}"}
            }
        if body.get("model", NAME) != NAME:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if faults.get("refuses") in body:
            return 422, {"detail": "Extra inputs are not permitted"}
        if faults.get("busy"):
            return faults["busy"].pop(), "Too many requests"
        texts = body["input"] if "input" in body else body["inputs"]
        # of some status, to all texts or to those over a number of words
        if "says" in faults and max(len(text.split()) for text in texts) > faults.get("over", -1):
            return faults["says"]
        normalize = {
            "openai": faults.get("normalize", False),
            "vllm": body.get("use_activation", faults.get("normalize", False)),
            "tei": body.get("normalize", True) or path != "/embed",
            "llamacpp": body.get("embd_normalize", 2) != -1,
            "infinity": True,
        }[self.kind]
        rows = self.embed(texts, normalize)
        if path == "/embed":
            return 200, rows
        data = [
            {"embedding": row} | faults.get("index", {"index": i}) for i, row in enumerate(rows)
        ]
        data = data if "index" in faults else data[::-1]
        return 200, {"object": "list", "data": data, "model": NAME}


@contextmanager
def serving(server: EmbeddingServer) -> Iterator[str]:
    """The base URL of a server that runs within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.split("?")[0]
            status, answer = 404, {"detail": "Not Found"}
            if "moved" in server.faults:
                status, answer = 307, ""
                path = ""
            if path.endswith(("/embeddings", "/embed")):
                status, answer = server.answer(path, body, dict(self.headers))
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            with suppress(OSError):  # the client has given up waiting
                for part in server.faults.get("drip", ()):
                    self.wfile.write(part)
                    time.sleep(0.05)
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", server.faults["moved"])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
