"""Raw embeddings: the output of a model before any Normalize or ExponentNorm at its end.

This module alone knows where they are: :func:`encode_raw` and :func:`raw_embeddings` encode them, :func:`raw_features`
gives them to a loss, and :func:`raw_producers` names the modules that compute them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.modules import Dropout
from torch import Tensor, nn

from st_magnitude._upstream import encodes_alone
from st_magnitude.modules import ExponentNorm

__all__ = [
    "encode_raw",
    "normalizes_output",
    "output_width",
    "prompt_of",
    "raw_embeddings",
    "raw_end",
    "raw_features",
    "raw_producers",
    "refuse_other_models",
    "unwrapped",
    "warn_of_unused_prompt",
]

logger = logging.getLogger(__name__)

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


def refuse_other_models(model: object, who: str, takes_sparse: bool = False) -> None:
    """Refuses (TypeError) CrossEncoder, MultiVectorEncoder and SparseEncoder, by the name of who was called."""
    model = unwrapped(model)
    if isinstance(model, (CrossEncoder, MultiVectorEncoder)) or (isinstance(model, SparseEncoder) and not takes_sparse):
        advice = " For late interaction there is LateInteractionLoss." if isinstance(model, MultiVectorEncoder) else ""
        raise TypeError(
            f"{who} needs a model with one dense embedding per text, such as a SentenceTransformer; got a "
            f"{type(model).__name__}.{advice}"
        )


def is_sentence_norm(module: nn.Module) -> bool:
    """Whether a module is sentence-transformers' Normalize of the sentence embedding."""
    return isinstance(module, Normalize) and module.module_output_name == "sentence_embedding"


def normalizes_output(model: nn.Module, routes: Callable[[Iterable[bool]], bool] = any) -> bool:
    """Whether a model ends in ``Normalize``, which Dropout and ExponentNorm may follow: its embeddings carry no norm.

    Args:
        model: A SentenceTransformer, or one route of a Router.
        routes: Rule for a model that ends in a ``Router``: ``any`` or ``all`` of its routes end in Normalize.
    """
    for module in reversed(list(model.children())):
        if isinstance(module, Router):
            return routes(normalizes_output(route, routes) for route in routes_of(module).values())
        if not isinstance(module, (Dropout, ExponentNorm)):
            return is_sentence_norm(module)
    return False


def routes_of(router: Router) -> dict[str, nn.Sequential]:
    """The routes of a Router by name."""
    return {name: route for name, route in router.sub_modules.items() if isinstance(route, nn.Sequential)}


def raw_end(modules: Sequence[nn.Module], keep_normalize: bool = False) -> int:
    """The number of modules before Normalize (unless kept) and ExponentNorm at the end, which Dropout may follow."""
    end = len(modules)
    for i in reversed(range(len(modules))):
        if isinstance(modules[i], ExponentNorm) or (is_sentence_norm(modules[i]) and not keep_normalize):
            end = i
        elif not isinstance(modules[i], Dropout):
            break
    return end


@contextmanager
def raw_embeddings(model: SentenceTransformer, keep_normalize: bool = False) -> Iterator[None]:
    """Within the block, ``model.encode*`` returns raw embeddings. The model is the same again afterwards.

    When the Trainer evaluates on several processes, each of them encodes a share of the texts with its own copy of the
    model, and the copies of the others keep Normalize and ExponentNorm. If this model ends in one that is left out, the
    first process encodes all texts itself, which takes as long as on one process.

    Args:
        model: Any SentenceTransformer. If it ends in a Router, every route ends before its own Normalize.
        keep_normalize: Whether a model that ends in Normalize keeps it, and only ExponentNorm is left out. Evaluators
            that score a model as it is served use this: such a model serves unit embeddings.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> with raw_embeddings(model):
        ...     raw = model.encode("red red red")
        >>> raw, model.encode("red red red")
        (array([3.], dtype=float32), array([1.], dtype=float32))
    """
    refuse_other_models(model, "Encoding")
    removed: list[tuple[nn.Sequential, list[nn.Module]]] = []

    def cut(sequence: nn.Sequential) -> None:
        modules = list(sequence.children())
        end = raw_end(modules, keep_normalize)
        removed.append((sequence, modules[end:]))
        for _ in modules[end:]:
            del sequence[-1]
        last = modules[end - 1] if end else None
        if isinstance(last, Router):
            for route in routes_of(last).values():
                cut(route)

    try:
        cut(model)
        with ExitStack() as stack:
            if any(modules for _, modules in removed):
                stack.enter_context(encodes_alone(model))
            yield
    finally:
        for sequence, modules in removed:
            sequence.extend(modules)


def encode_raw(
    model: SentenceTransformer, texts: list[str], role: str, keep_normalize: bool = False, **encode: Any
) -> Tensor:
    """Raw embeddings of texts in at least float32: n texts -> (n, D).

    Args:
        model: Any SentenceTransformer.
        texts: The n texts.
        role: ``"query"`` or ``"document"``, for ``encode_query`` or ``encode_document``.
        keep_normalize: Whether a model that ends in Normalize keeps it, see :func:`raw_embeddings`.
        **encode: Options of sentence-transformers' ``encode``, such as ``batch_size`` and ``prompt``.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["honey"]), ExponentNorm(1.0, 0.5)], device="cpu")
        >>> encode_raw(model, ["honey honey honey honey"], "document")
        tensor([[4.]])
    """
    with raw_embeddings(model, keep_normalize):
        by_role = model.encode_query if role == "query" else model.encode_document
        embeddings: Tensor = by_role(texts, convert_to_tensor=True, **encode)
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def prompt_of(model: Any, role: str) -> str:
    """The prompt that ``encode_query`` or ``encode_document`` puts before a text; empty without one.

    As in sentence-transformers, documents get the first of "document", "passage" and "corpus" that is
    a key of ``model.prompts``, even if it is empty; a loaded model has the keys "query" and "document".

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> prompts = {"query": "ask: ", "passage": "answer: "}
        >>> model = SentenceTransformer(modules=[BoW(["red"])], prompts=prompts, device="cpu")
        >>> prompt_of(model, "query"), prompt_of(model, "document")
        ('ask: ', '')
    """
    model = unwrapped(model)
    prompts = getattr(model, "prompts", {})
    names = ("query",) if role == "query" else _DOCUMENT_PROMPTS
    default = getattr(model, "default_prompt_name", None)
    name = next((name for name in names if name in prompts), default)
    return prompts.get(name) or ""


def warn_of_unused_prompt(model: Any) -> None:
    """Warns if ``encode_document`` reads none of the prompts that are meant for documents."""
    meant = [name for name in _DOCUMENT_PROMPTS if model.prompts.get(name)]
    if meant and not prompt_of(model, "document"):
        logger.warning(
            "The model has the prompt %r for documents under the name %r, but encode_document takes the "
            "one named 'document', which is empty: documents are encoded without a prompt. If the model "
            "needs it, set model.prompts['document'] = model.prompts[%r].",
            model.prompts[meant[0]],
            meant[0],
            meant[0],
        )


def raw_features(model: Callable[[Any], dict[str, Any]], features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs the model in training and returns its embedding before ExponentNorm, (n, D), as ``sentence_embedding``.

    A model that ends in Normalize gives unit embeddings here too: losses that learn from the norm refuse it.
    """
    features = model(features)
    return {"sentence_embedding": features.get("raw_embedding", features["sentence_embedding"])}


def output_width(model: nn.Module) -> int | None:
    """Number of dimensions that a model computes, before ``encode`` cuts them to ``truncate_dim``; None if unknown.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey"])], truncate_dim=1, device="cpu")
        >>> model.get_embedding_dimension(), output_width(model)
        (1, 2)
    """
    if not isinstance(model := unwrapped(model), SentenceTransformer):
        return None
    with model.truncate_embeddings(None):
        return model.get_embedding_dimension()


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model


def raw_producers(model: nn.Module) -> list[nn.Module]:
    """The modules that compute the raw embeddings: one or, in a last Router, one a route. Any other module: itself.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> [type(module).__name__ for module in raw_producers(model)]
        ['BoW']
    """
    refuse_other_models(model, "Finding raw embeddings")
    model = unwrapped(model)
    return _last_producers(list(model), "model") if isinstance(model, SentenceTransformer) else [model]


def _last_producers(modules: Sequence[nn.Module], what: str) -> list[nn.Module]:
    end = raw_end(modules)
    if end == 0:
        raise ValueError(
            f"The {what} consists of Normalize only, so there is no embedding before it. If it is a route of a last "
            "Router, remove the Router with `del model[-1]`."
        )
    last = modules[end - 1]
    if not isinstance(last, Router):
        return [last]
    routes = routes_of(last).items()
    return [module for name, route in routes for module in _last_producers(list(route), f"route {name!r}")]
