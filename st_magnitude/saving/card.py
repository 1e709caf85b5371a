"""The section of a model card on scoring: the metric that an index needs."""

from __future__ import annotations

import re
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import INSTALL
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import returns_unit_vectors, unwrapped

_BEGIN, _END = "<!-- st-magnitude: scoring -->", "<!-- /st-magnitude: scoring -->"

# The sections on scoring. docs/serving.md has the sources of the names.
_COSINE = """### Indexing and scoring

The norms of embeddings are not part of the score. Index by cosine similarity.

This is `METRIC_INNER_PRODUCT` of normalised embeddings in FAISS, `metric="cos"` in usearch,
`Distance.COSINE` in Qdrant, `metric_type="COSINE"` in Milvus, `<=>` and `vector_cosine_ops` in
pgvector, and `similarity: "cosine"` in Elasticsearch."""
_INNER_PRODUCT = """### Indexing and scoring

The norms of document embeddings are part of the score. Index by inner product, and do not
normalise embeddings.{division}

This is `METRIC_INNER_PRODUCT` or `IndexFlatIP` in FAISS, `metric="ip"` in usearch, `Distance.DOT`
in Qdrant, `metric_type="IP"` in Milvus, `<#>` and `vector_ip_ops` in pgvector, and
`similarity: "max_inner_product"` in Elasticsearch. With cosine similarity, or behind a server that
normalises embeddings, the model ranks differently from how it was evaluated."""

# The lines of a card's example that load the model: sentence-transformers' own, and ours.
_LOADING = {
    "from sentence_transformers import SentenceTransformer\n": "import st_magnitude as stm\n",
    'model = SentenceTransformer("': 'model = stm.load("',
}

NEEDS_PACKAGE = (
    "This model ends in the module ExponentNorm of the Python package st-magnitude. Install it "
    f"({INSTALL} .), and load the model with st_magnitude.load instead of SentenceTransformer."
)


def scoring_text(model: SentenceTransformer) -> str:
    """The section of a model card on indexing and scoring, in Markdown.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"])], device="cpu")
        >>> print(scoring_text(model).splitlines()[2])
        The norms of embeddings are not part of the score. Index by cosine similarity.
    """
    if model.similarity_fn_name != "dot" or returns_unit_vectors(model):
        return _COSINE
    division = ""
    if isinstance(last := model[-1], ExponentNorm):
        power = f"{last.gamma_document:.4f}"
        division = f" The model has divided documents by their norm to the power {power}."
    return _INNER_PRODUCT.format(division=division)


def complete_card(card: Path, model: SentenceTransformer) -> None:
    """Writes the section on scoring and, for a model with ExponentNorm, how to load it."""
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    text = re.sub(rf"\n?{_BEGIN}.*?{_END}\n", "", text, flags=re.S)
    # a teacher's embeddings in the examples, and what aligns their column
    text = re.sub(r"(<code>\[[^|\n]{99})[^|\n]*</code>", r"\1 ...</code>", text)
    text = re.sub(r"-{300,}", "---", re.sub(r" {300,}", " ", text))
    section = f"{_BEGIN}\n{scoring_text(model)}\n\n{_END}"
    needs_package = isinstance(model[-1], ExponentNorm)
    usage = re.search(r"^## Usage\n.*?^```python\n.*?^```\n", text, flags=re.S | re.M)
    end = usage.end() if usage else len(text)
    before = text[:end]
    for stock, ours in _LOADING.items():
        before = before.replace(stock, ours) if needs_package else before.replace(ours, stock)
    if needs_package:
        notice = f"{_BEGIN}\n> {NEEDS_PACKAGE}\n{_END}\n\n# "
        before = re.sub(r"^# ", notice, before, count=1, flags=re.M)
    card.write_text(f"{before}\n{section}\n{text[end:]}", encoding="utf-8")


def add_section(card: Path, section: str) -> None:
    """Puts a section under the heading "Evaluation" of a model card, or at its end."""
    text = card.read_text(encoding="utf-8")
    heading = re.search(r"^## Evaluation\n", text, flags=re.M)
    end = heading.end() if heading else len(text)
    card.write_text(f"{text[:end]}\n{section}\n{text[end:]}", encoding="utf-8")


def model_name(model: SentenceTransformer) -> str:
    """The name of a model: a hub id, the last two names of a path, or the names of its modules."""
    model = unwrapped(model)
    known = model.model_card_data.model_id or model.model_card_data.base_model
    for module in model.modules():
        known = known or getattr(module, "name_or_path", None)  # of a model of transformers
    if not known:
        return " + ".join(type(module).__name__ for module in model)
    path = Path(known)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(known)
