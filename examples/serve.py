"""A small server of embeddings, to try `st-magnitude check-serving` on.

    python examples/serve.py my-retriever --port 8000
    st-magnitude check-serving http://localhost:8000/v1 --model my-retriever

It answers POST /v1/embeddings as OpenAI's API does, one request after the other, and puts no
prompts before the texts. For more than a trial, choose one of the servers in docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sentence_transformers import SentenceTransformer

import st_magnitude as stm


class Handler(BaseHTTPRequestHandler):
    model: SentenceTransformer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        vectors = self.model.encode(body["input"], show_progress_bar=False).tolist()
        data = [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        answer = json.dumps({"object": "list", "data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Prints no line for each request."""


def deployed(folder: str) -> str:
    """The model that deploy.json names: that of the folder, or one elsewhere."""
    file = Path(folder, "deploy.json")
    place = json.loads(file.read_text(encoding="utf-8"))["model"] if file.is_file() else "."
    return folder if place in ("", ".") else place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    arguments = parser.parse_args()
    Handler.model = stm.load(deployed(arguments.model), device="cpu")
    with HTTPServer(("127.0.0.1", arguments.port), Handler) as server:
        address = f"http://localhost:{server.server_port}/v1"
        print(f"Serving {arguments.model} at {address}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
