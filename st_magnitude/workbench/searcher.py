"""Searching as `train` recommends it: by a model, by BM25, or by both with a weight."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import encode
from st_magnitude.evaluation.lexical import TOKENS, LexicalIndex
from st_magnitude.saving.export import load
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import score_by_cosine
from st_magnitude.surgery.raw import encode_raw
from st_magnitude.workbench.judging.choice import DEPLOY, HERE, Decision, Fusion

logger = logging.getLogger(__name__)

DEPTH = 100  # documents of the model and of BM25 that a fusion adds


class Searcher:
    """A model with the embeddings of a corpus, and with BM25 where a fusion asks for it.

    Args:
        model: The model; None for BM25 alone.
        data: The corpus.
        fusion: The weights of the model and of BM25; None for the model alone.
        **options: Options of `st_magnitude.encode`, such as ``batch_size=128``.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "wax"])], device="cpu")
        >>> data = RetrievalData({"q": "bees?"}, {"d1": "wax", "d2": "bees"}, {"q": {"d2"}})
        >>> found = Searcher(model, data).search(["wax of bees", "bees"], k=1)
        >>> {question: list(hits) for question, hits in found.items()}
        {'wax of bees': ['d1'], 'bees': ['d2']}
    """

    def __init__(
        self,
        model: SentenceTransformer | None,
        data: RetrievalData,
        fusion: Fusion | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.fusion = fusion
        self.about = ""  # what is searched with, if a decision says it
        self.data = data
        if model is not None:
            some = list(data.queries)[:1]  # it is asked nothing
            self.task = encode(model, data, only=some, **options)
        if fusion is not None:
            self.index = LexicalIndex(data, TOKENS[fusion.tokens])

    @classmethod
    def from_folder(
        cls, folder: str | Path, data: RetrievalData, system: str | None = None, **options: Any
    ) -> Searcher:
        """The model in a folder, searching as the ``deploy.json`` there recommends.

        Args:
            folder: Folder or hub id of the model.
            system: Name of another way to search that ``deploy.json`` knows.

        Raises:
            ValueError: If ``deploy.json`` is damaged, or knows no system of this name.
            OSError: If the model cannot be found.
        """
        decision = Decision.load(folder)
        if decision is None:
            if system is not None:
                raise InputError(f"{folder} has no {DEPLOY}, so {system!r} is unknown there.")
            return cls(load(str(folder)), data, **options)
        name, way = decision.way(system)
        fusion = None
        if isinstance(way.how, Fusion):
            fusion = way.how
        elif way.how:
            fusion = Fusion(weight=0.0, unit=1.0, scale=1.0, tokens=way.how)
        model = None
        if fusion is None or fusion.weight > 0:
            place = str(folder) if way.model in ("", HERE) else way.model
            try:
                model = load(place, **({"revision": way.revision} if way.revision else {}))
            except OSError as error:
                said = f"{folder} deploys {name!r} with a model elsewhere. {error}"
                raise OSError(said) from error
            score_by_cosine(model, logger.info)
        searcher = cls(model, data, fusion, **options)
        how = f" ({way.how})" if way.how else ""
        searcher.about = f"Searching with {name}{how}"
        if system is None:
            others = [repr(other) for other in decision.systems if other != name]
            searcher.about += f", as recommended. Others by --system: {', '.join(others) or 'none'}"
        searcher.about += "."
        return searcher

    def search(self, texts: Sequence[str], k: int = 10) -> Ranking:
        """The ranking of the best k documents for each text."""
        asked = list(dict.fromkeys(texts))
        data = self.data.asking(asked)
        if self.model is None:
            return self.index.search(data, k)
        queries = encode_raw(self.model, asked, "query", keep_normalize=True)  # (n, D)
        task = replace(self.task, data=data, query_ids=asked, queries=queries)
        if self.fusion is None:
            return task.search(k)
        depth = max(DEPTH, k)
        unit_queries = Similarity(1.0, task.similarity.exponents[1])
        dense = replace(task, similarity=unit_queries).search(depth)
        found = self.fusion(dense, self.index.search(data, depth))
        return Ranking.of_rows(found.data, found.query_ids, found.columns, found.scores, k)
