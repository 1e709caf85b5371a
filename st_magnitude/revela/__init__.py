"""Revela: dense retrievers from raw text, by language modelling (arXiv 2506.16552).

Every name is imported when it is first used. Most of them need the extra ``revela``, and raise
ImportError without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.revela.config import RevelaConfig
    from st_magnitude.revela.documents import chunk, read_documents
    from st_magnitude.revela.groups import build_groups
    from st_magnitude.revela.loss import RevelaLoss, group_similarity
    from st_magnitude.revela.run import load_lm, load_retriever
    from st_magnitude.revela.trainer import RevelaTrainer, lora_config
    from st_magnitude.surgery.adapters import merge_lora

__all__ = [
    "RevelaConfig",
    "RevelaLoss",
    "RevelaTrainer",
    "build_groups",
    "chunk",
    "group_similarity",
    "load_lm",
    "load_retriever",
    "lora_config",
    "merge_lora",
    "read_documents",
]

__getattr__, __dir__ = lazy_names(__name__)
