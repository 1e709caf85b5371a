"""Evaluators in the manner of sentence-transformers: they go where its own evaluators go."""

from st_magnitude.evaluation.compression import CompressionCell, CompressionEvaluator
from st_magnitude.evaluation.geometry import GeometryEvaluator
from st_magnitude.evaluation.hybrid import HybridEvaluator, bm25_run, dense_run, reciprocal_rank_fusion
from st_magnitude.evaluation.magnitude import MagnitudeEvaluator
from st_magnitude.evaluation.pairs import ScoredPairsEvaluator
from st_magnitude.evaluation.rag import RAGEvaluator, exact_match, normalize_answer, rag_prompt, token_f1
from st_magnitude.evaluation.trec import read_run, write_run

__all__ = [
    "CompressionCell",
    "CompressionEvaluator",
    "GeometryEvaluator",
    "HybridEvaluator",
    "MagnitudeEvaluator",
    "RAGEvaluator",
    "ScoredPairsEvaluator",
    "bm25_run",
    "dense_run",
    "exact_match",
    "normalize_answer",
    "rag_prompt",
    "read_run",
    "reciprocal_rank_fusion",
    "token_f1",
    "write_run",
]
