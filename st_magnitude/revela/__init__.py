"""Revela: dense retrievers from raw text, by language modelling with in-batch attention (arXiv 2506.16552)."""

from st_magnitude.revela.data import (
    Document,
    GroupCollator,
    Section,
    TitleTask,
    build_groups,
    chunk,
    looks_like_code,
    read_documents,
    split_documents,
    title_task,
)

__all__ = [
    "Document",
    "GroupCollator",
    "Section",
    "TitleTask",
    "build_groups",
    "chunk",
    "looks_like_code",
    "read_documents",
    "split_documents",
    "title_task",
]
