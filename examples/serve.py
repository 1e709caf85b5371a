"""A model whose lengths mean something in a vector database: the right metric, and what the wrong ones cost.

    pip install "st-magnitude[demo]" faiss-cpu
    python examples/magnitude_retriever.py
    python examples/serve.py --model runs/magnitude_retriever/model

Puts the test documents into five FAISS indexes. The picture: how much of the model's own top 10 each of them returns,
and the nDCG@10 of what it returns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import faiss
import numpy as np

import st_magnitude as stm
from st_magnitude.commands.demo import build_docstring_task
from st_magnitude.corpus.beir import load_beir
from st_magnitude.evaluation.metrics import ndcg
from st_magnitude.serving import augment, augment_queries, index_vectors, query_vectors


def plot(found: dict[str, tuple[float, float]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    for axis, column, label in ((axes[0], 0, "share of the model's top 10"), (axes[1], 1, "nDCG@10")):
        values = [pair[column] for pair in found.values()]
        bars = axis.barh(list(found), values, color=["#c8500f" if "wrong" in name else "#1f6fb4" for name in found])
        axis.bar_label(bars, fmt="%.3f", padding=3)
        axis.set(xlim=(0, 1.2 * max(values)), xticks=[])
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/magnitude_retriever/model"))
    parser.add_argument("--data", type=Path, help="a BEIR folder with qrels of test, in place of the docs")
    parser.add_argument("--output", type=Path, default=Path("runs/serve"))
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        raise SystemExit(
            f"There is no model in {arguments.model}: run examples/magnitude_retriever.py or pass --model."
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.data:
        test = load_beir(arguments.data, "test")
    else:
        task = build_docstring_task(train_queries=1000, dev_queries=100, test_queries=200, cache="runs/docstrings")
        test = task.test

    model = stm.load(arguments.model)
    raw_queries = model.encode_query(list(test.queries.values()))
    raw_documents = model.encode_document(list(test.corpus.values()))
    # What a loaded model returns is divided by its exponent already, and ranks by dot. Embeddings that are raw would
    # take the similarity that was calibrated: index_vectors(x, curve.best_similarity).
    queries, documents = query_vectors(raw_queries, "dot"), index_vectors(raw_documents, "dot")  # float32, contiguous
    dim = documents.shape[1]
    graph = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efSearch = 80
    indexes = {
        "inner product": (faiss.IndexFlatIP(dim), documents, queries),
        "inner product, HNSW": (graph, documents, queries),
        "L2, augmented": (faiss.IndexFlatL2(dim + 1), augment(documents), augment_queries(queries)),
        "cosine (wrong)": (
            faiss.IndexFlatIP(dim),
            index_vectors(documents, "cosine"),
            query_vectors(queries, "cosine"),
        ),
        "L2 (wrong)": (faiss.IndexFlatL2(dim), documents, queries),
    }

    own = model.similarity(raw_queries, raw_documents).topk(10).indices.numpy()  # (n, 10)
    relevant = [{i for i, d in enumerate(test.corpus) if d in test.relevant_docs[q]} for q in test.queries]
    found = {}
    for name, (index, stored, sent) in indexes.items():
        index.add(stored)
        _, ids = index.search(sent, 10)  # (n, 10)
        overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, own, strict=True)])
        hits = [[i in answers for i in row] for row, answers in zip(ids, relevant, strict=True)]
        found[name] = float(overlap), float(ndcg(hits, [len(answers) for answers in relevant]).mean())
        print(f"{name:20} {found[name][0]:.3f} of the model's top 10, nDCG@10 {found[name][1]:.3f}")
    plot(found, arguments.output / "serve.png")
    faiss.write_index(graph, str(arguments.output / "documents.faiss"))
    print(f"saved {arguments.output / 'documents.faiss'} and {arguments.output / 'serve.png'}")


if __name__ == "__main__":
    main()
