"""Revela: dense retrievers from raw text, by language modelling (arXiv 2506.16552).

Every name is imported when it is first used. Most of them need the extra ``revela``, and raise
ImportError without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.data.documents import chunk as chunk
    from st_magnitude.data.documents import read_documents as read_documents
    from st_magnitude.revela.groups import build_groups as build_groups
    from st_magnitude.revela.loss import RevelaLoss as RevelaLoss
    from st_magnitude.revela.loss import group_similarity as group_similarity
    from st_magnitude.revela.models import load_retriever as load_retriever
    from st_magnitude.revela.trainer import RevelaTrainer as RevelaTrainer
    from st_magnitude.revela.trainer import lora_config as lora_config
    from st_magnitude.surgery.adapters import merge_lora as merge_lora

__getattr__, __dir__, __all__ = lazy_names(__name__)
