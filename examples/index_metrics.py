"""What the metric of an index does to a model whose norm carries information: the right one, and
the cost of a wrong one.

    pip install ".[dev]" faiss-cpu
    python examples/magnitude_retriever.py
    python examples/index_metrics.py --model runs/magnitude_retriever/model

The script puts the test documents into five FAISS indexes. The picture shows how much of the
model's own top 10 each of them returns, and the nDCG@10 of the documents that it returns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import faiss
import numpy as np
import torch
from _data import build_docstring_task

import st_magnitude as stm
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.task import EncodedTask


def augment(documents: np.ndarray) -> np.ndarray:
    """Documents of one norm M, (x, sqrt(M² - |x|²)): L2 then ranks as the inner product does.
    Queries get a 0."""
    squares = (documents.astype(np.float64) ** 2).sum(axis=1)
    return np.column_stack([documents, np.sqrt(squares.max() - squares)]).astype(np.float32)


def plot(found: dict[str, tuple[float, float]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    for axis, column, label in (
        (axes[0], 0, "share of the model's top 10"),
        (axes[1], 1, "nDCG@10"),
    ):
        values = [pair[column] for pair in found.values()]
        bars = axis.barh(
            list(found),
            values,
            color=["#c8500f" if "wrong" in name else "#1f6fb4" for name in found],
        )
        axis.bar_label(bars, fmt="%.3f", padding=3)
        axis.set(xlim=(0, 1.2 * max(values)), xticks=[])
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("runs/magnitude_retriever/model"))
    parser.add_argument(
        "--data", type=Path, help="BEIR folder with qrels of test, instead of the docs"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/index_metrics"))
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(
            f"{arguments.model} is not a folder. Run examples/magnitude_retriever.py first, or pass"
            " --model."
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.data:
        test = stm.load_splits(arguments.data)["test"]
    else:
        data = build_docstring_task(
            train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings"
        )
        test = data.test

    model = stm.load(arguments.model)
    task = test
    # A loaded model divides by its document exponent itself, so its embeddings are what the index
    # stores.
    # (n, D) float32
    queries = model.encode_query([test.queries[query] for query in task.query_ids])
    # (m, D)
    documents = model.encode_document([test.corpus[document] for document in task.document_ids])
    sides = (torch.from_numpy(queries), torch.from_numpy(documents))
    encoded = EncodedTask(test, task.query_ids, *sides, stm.DOT)
    unit_queries = stm.COSINE.query(encoded.queries).numpy()
    unit_documents = stm.COSINE.document(encoded.documents).numpy()

    dim = documents.shape[1]
    graph = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efSearch = 80
    indexes = {
        "inner product": (faiss.IndexFlatIP(dim), documents, queries),
        "inner product, HNSW": (graph, documents, queries),
        "L2, augmented": (
            faiss.IndexFlatL2(dim + 1),
            augment(documents),
            np.pad(queries, ((0, 0), (0, 1))),
        ),
        "cosine (wrong)": (faiss.IndexFlatIP(dim), unit_documents, unit_queries),
        "L2 (wrong)": (faiss.IndexFlatL2(dim), documents, queries),
    }

    own = encoded.search(10).columns  # (n, 10)
    found = {}
    for name, (index, stored, sent) in indexes.items():
        index.add(stored)
        scores, columns = index.search(sent, 10)  # (n, 10)
        overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(columns, own, strict=True)])
        found[name] = float(overlap), Ranking(test, task.query_ids, columns, scores).mean
        print(f"{name:20} {found[name][0]:.3f} of the model's top 10, nDCG@10 {found[name][1]:.3f}")
    plot(found, arguments.output / "index_metrics.png")
    faiss.write_index(graph, str(arguments.output / "documents.faiss"))
    print(
        f"saved {arguments.output / 'documents.faiss'} and {arguments.output / 'index_metrics.png'}"
    )


if __name__ == "__main__":
    main()
