"""Revela: dense retrievers from raw text, by language modelling with in-batch attention (arXiv 2506.16552).

Every name is imported when it is first used, so ``import st_magnitude`` loads none of this. Most of them need the extra
``revela``, and raise ImportError without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_magnitude.corpus.chunking import chunk, looks_like_code
    from st_magnitude.corpus.documents import Document, Section, read_documents, split_documents
    from st_magnitude.revela.config import RevelaConfig
    from st_magnitude.revela.groups import GroupCollator, build_groups
    from st_magnitude.revela.loss import RevelaLoss, group_similarity
    from st_magnitude.revela.models import add_lora, load_lm, load_retriever, lora_config, merge_lora
    from st_magnitude.revela.replug import ReplugLoss
    from st_magnitude.revela.titles import TitleTask, title_task
    from st_magnitude.revela.trainer import RevelaTrainer

__all__ = [
    "Document",
    "GroupCollator",
    "ReplugLoss",
    "RevelaConfig",
    "RevelaLoss",
    "RevelaTrainer",
    "Section",
    "TitleTask",
    "add_lora",
    "build_groups",
    "chunk",
    "group_similarity",
    "load_lm",
    "load_retriever",
    "looks_like_code",
    "lora_config",
    "merge_lora",
    "read_documents",
    "split_documents",
    "title_task",
]

_HOMES = {
    "corpus.chunking": ("chunk", "looks_like_code"),
    "corpus.documents": ("Document", "Section", "read_documents", "split_documents"),
    "revela.config": ("RevelaConfig",),
    "revela.groups": ("GroupCollator", "build_groups"),
    "revela.loss": ("RevelaLoss", "group_similarity"),
    "revela.models": ("add_lora", "load_lm", "load_retriever", "lora_config", "merge_lora"),
    "revela.replug": ("ReplugLoss",),
    "revela.titles": ("TitleTask", "title_task"),
    "revela.trainer": ("RevelaTrainer",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"st_magnitude.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
