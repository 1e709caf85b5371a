"""Revela: dense retrievers from raw text, by language modelling (arXiv 2506.16552).

LoRA and cutting text into sentences need the extra ``revela``, and raise ImportError without it.
"""

from st_magnitude.data.documents import chunk, read_documents
from st_magnitude.revela.groups import build_groups
from st_magnitude.revela.loss import RevelaLoss, group_similarity
from st_magnitude.revela.trainer import RevelaTrainer, load_retriever
from st_magnitude.surgery.adapters import lora_config, merge_lora

__all__ = [
    "RevelaLoss",
    "RevelaTrainer",
    "build_groups",
    "chunk",
    "group_similarity",
    "load_retriever",
    "lora_config",
    "merge_lora",
    "read_documents",
]
