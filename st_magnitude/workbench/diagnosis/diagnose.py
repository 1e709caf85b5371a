"""diagnose: whether norms or smaller storage help a model on given queries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude import geometry
from st_magnitude._checks import InputError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import encode as encode_data
from st_magnitude.evaluation.compression import cells_of, search_formats
from st_magnitude.saving.card import model_name
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.surgery.scoring import are_unit
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.diagnosis import advice
from st_magnitude.workbench.diagnosis.findings import DO, Diagnosis, NormStatistics


def diagnose(
    model: SentenceTransformer,
    data: RetrievalData,
    *,
    similarity: Similarity | str | None = None,
    also_relevant: Collection[str] = (),
    min_gain: float = 0.02,
    tolerance: float = 0.05,
    seed: int = 0,
    **encode: Any,
) -> Diagnosis:
    """Encodes once, measures norms, storage and directions, and recommends what they support.

    The recommendation ``"exponent"`` comes first, and ``"storage"`` is measured with the similarity
    that it advises. docs/diagnose.md has each of them and says what the verdicts mean.

    Args:
        model: Embeddings are taken from before a Normalize or ExponentNorm at its end.
        data: Queries, documents and judgments. Queries without a relevant document do not count.
        similarity: Similarity, or its name, with which the model is scored today. By default the
            similarity that the model states, and cosine if the model normalizes.
        also_relevant: Ids of documents that are relevant to queries outside of these data, such as
            training queries, and so do not count as never relevant.
        min_gain: Smallest gain in nDCG@10 that is worth a change.
        tolerance: Share of nDCG@10 that smaller storage may cost.
        seed: Seed of the folds and of the draws.
        **encode: Options of `st_magnitude.encode`, such as ``batch_size=128``.

    Raises:
        TypeError: If the model is a CrossEncoder or a MultiVectorEncoder.
        ValueError: If the data have fewer than two judged queries or documents, an argument is out
            of range, the similarity of the model is a distance, or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> queries = {f"q{i}": "bee" for i in range(80)}
        >>> corpus = {f"d{i}": "bee " * (2 if i < 80 else 1) for i in range(160)}
        >>> relevant = {f"q{i}": {f"d{i}"} for i in range(80)}
        >>> found = diagnose(model, RetrievalData(queries, corpus, relevant), similarity="dot")
        >>> found.cohens_d, found["exponent"].verdict
        (inf, 'not enough data')
    """
    _check(data, min_gain, tolerance)
    task = encode_data(model, data, similarity, **encode | {"before_normalize": True})
    today = task.similarity
    answers = NormStatistics.of(task.documents, [data.corpus[i] for i in data.document_ids])
    is_relevant = data.is_relevant | np.isin(data.document_ids, list(also_relevant))
    curve = exponent_curve(task, seed=seed)
    has_magnitude = not are_unit(answers.values)
    tried = advice.tried_of(curve)
    first = advice.exponent(curve, tried, today.name, has_magnitude, min_gain)
    if first.verdict == DO:
        task = replace(task, similarity=Similarity(1.0, tried.value))
    cells = cells_of(search_formats(task))
    directions = COSINE.document(task.documents)
    return Diagnosis(
        model=model_name(model),
        data=data.name,
        similarity=today.name,
        recommended=task.similarity.name,
        normalizes=normalizes_output(model),
        has_magnitude=has_magnitude,
        query_ids=list(task.query_ids),
        document_ids=data.document_ids,
        is_relevant=is_relevant,
        queries=NormStatistics.of(task.queries, list(task.data.asked.values())),
        documents=answers,
        **answers.effect_sizes(is_relevant),
        exponent=curve,
        tried=tried,
        isoscore=geometry.isoscore(directions),
        isoscore_ceiling=geometry.isoscore_ceiling(*directions.shape),
        mean_cosine=geometry.mean_cosine(directions),
        cells=cells,
        recommendations=[first, advice.storage(cells, tolerance)],
        min_gain=min_gain,
        tolerance=tolerance,
        seed=seed,
    )


def _check(data: RetrievalData, min_gain: float, tolerance: float) -> None:
    """Refuses arguments, and data that are too few."""
    if len(data.query_ids) < 2 or len(data.document_ids) < 2:
        raise InputError(
            "A diagnosis needs at least two queries with a relevant document and two documents, "
            f"got {len(data.query_ids)} and {len(data.document_ids)}. Use some hundreds of queries."
        )
    if not (0 <= min_gain < 1 and 0 < tolerance < 1):
        raise InputError(
            "min_gain and tolerance must lie between 0 and 1, such as 0.02 and 0.05; got "
            f"{min_gain} and {tolerance}."
        )
