"""The end of a SentenceTransformer, and the size of its embeddings: changed in place."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Literal, TypeVar

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import (
    Dropout,
    LayerNorm,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from st_magnitude._checks import positive
from st_magnitude._upstream import stored_similarity_name
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import (
    is_sentence_norm,
    normalizes_output,
    raw_embeddings,
    raw_producers,
    refuse_other_models,
    routes_of,
    unwrapped,
)
from st_magnitude.surgery.tokens import prepare_tokens

__all__ = ["prepare", "rescale_output", "set_similarity_function", "strip_normalize"]

logger = logging.getLogger(__name__)

PROBE = (
    "How do I reset a forgotten password?",
    "The train to the coast leaves every hour from platform nine.",
    "photosynthesis",
    "A function that merges two sorted lists into one sorted list.",
    "Interest rates were left unchanged for the third month in a row.",
    "Add the onions, lower the heat and let everything simmer for an hour.",
    "Who painted the ceiling of the chapel?",
    "The contract may be ended by either party with thirty days' notice in writing.",
)


def strip_normalize(model: SentenceTransformer) -> SentenceTransformer:
    """Removes ``Normalize`` and ``ExponentNorm`` from the end of a model, in place.

    Cosine similarities and ``similarity_fn_name`` do not change: see :func:`prepare`. A Router at
    the end loses them at the end of each route.

    Raises:
        ValueError: If another module follows Normalize, or a route consists of Normalize only.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red", "green"]), Normalize()])
        >>> [type(module).__name__ for module in strip_normalize(model)]
        ['BoW']
    """
    inner = refuse_other_models(model, "strip_normalize")
    raw_producers(inner)  # refuses a route of nothing but Normalize before anything changes
    _strip(inner)
    if normalizes_output(inner):
        raise ValueError(
            f"The Normalize of this model is followed by {type(inner[-1]).__name__}, so it cannot "
            "be stripped from the end: remove it from the list of modules."
        )
    return model


def _strip(modules: nn.Sequential) -> None:
    while is_sentence_norm(modules[-1]) or isinstance(modules[-1], ExponentNorm):
        del modules[-1]
    if isinstance(modules[-1], Router):
        for route in routes_of(modules[-1]).values():
            _strip(route)


Model = TypeVar("Model", SentenceTransformer, MultiVectorEncoder)


def prepare(model: Model, similarity: str | Similarity) -> Model:
    """Prepares a model for training with a similarity and for scoring by it. In place.

    ========================  =========================================  ======================
    similarity                the model ends in                          ``similarity_fn_name``
    ========================  =========================================  ======================
    ``"cosine"``              ``Normalize``                              cosine
    ``"dot"``, ``"qnorm"``    raw embeddings                             dot
    ``"dnorm"``               raw embeddings                             cosine
    0 < gamma_document < 1    ``ExponentNorm``                           dot
    ========================  =========================================  ======================

    The exponent of the query never changes a ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so
    stock modules rank like each of the four named similarities. In a MultiVectorEncoder the norm of
    a query token does: there, the tokens of a role are normalised where the similarity has the
    exponent 1.

    Args:
        model: Any SentenceTransformer or MultiVectorEncoder.
        similarity: A Similarity, or a name for :meth:`Similarity.named`.

    Raises:
        TypeError: If the model is a CrossEncoder or a SparseEncoder.
        ValueError: If Normalize cannot be removed, or a MultiVectorEncoder has exponents between 0
            and 1.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = prepare(SentenceTransformer(modules=[BoW(["red", "green"])]), "qnorm")
        >>> model.similarity_fn_name
        'dot'
    """
    similarity = Similarity.named(similarity)
    inner = unwrapped(model)
    if isinstance(inner, MultiVectorEncoder):
        prepare_tokens(inner, similarity)
        return model
    refuse_other_models(inner, "prepare")
    strip_normalize(inner)
    if similarity == COSINE:
        inner.append(Normalize())
    elif 0 < similarity.exponents[1] < 1:
        query, document = similarity.exponents
        inner.append(ExponentNorm(query, document).to(inner.device))
    set_similarity_function(inner, similarity)
    return model


def set_similarity_function(model: SentenceTransformer, similarity: Similarity) -> None:
    """Sets ``similarity_fn_name`` to the stock function that ranks alike: cosine or dot."""
    model = unwrapped(model)
    is_cosine = similarity.exponents[1] == 1 and not isinstance(model[-1], ExponentNorm)
    name: Literal["cosine", "dot"] = "cosine" if is_cosine else "dot"
    if (before := stored_similarity_name(model)) != name:
        logger.info(
            "similarity_fn_name: %s -> %s, which ranks like %s.", before, name, similarity.name
        )
        model.similarity_fn_name = name


def rescale_output(model: SentenceTransformer, factor: float | None = None) -> SentenceTransformer:
    """Multiplies every embedding by a factor, exactly, through the last affine map. In place.

    That is the final normalisation layer of a Transformer (weight and bias), a ``Dense`` or
    ``LayerNorm`` head, or a ``StaticEmbedding``. The result is checked on eight sentences.

    Args:
        model: A SentenceTransformer that does not end in ``Normalize``.
        factor: A positive factor; None takes one over the mean norm of the eight sentences.

    Raises:
        ValueError: If the model ends in Normalize, layers are shared, or the head is not linear.
            The model is then unchanged.
    """
    inner = refuse_other_models(model, "rescale_output")
    positive("factor", factor, [None])
    if normalizes_output(inner):
        raise ValueError(
            "The model ends in Normalize, so the norms of its embeddings are 1 whatever comes "
            "before. Call stm.strip_normalize(model) first."
        )
    with raw_embeddings(inner):
        _rescale(inner, factor)
    return model


def _rescale(model: SentenceTransformer, factor: float | None) -> None:
    def encode() -> Tensor:
        return model.encode(list(PROBE), convert_to_tensor=True).cpu().double()

    before = encode()
    if factor is None:
        factor = 1 / before.norm(dim=1).mean().item()
    parameters = _last_affine_parameters(model)
    originals = [p.detach().clone() for p in parameters]
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters)
    precision = 3e-2 if half else 1e-4
    smallest = precision * factor * before.abs().max().item()
    with torch.no_grad():
        # Gemma's last layer multiplies by 1 + weight, and has no bias.
        for shift in (0.0, 1.0) if len(parameters) == 1 else (0.0,):
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_((original + shift) * factor - shift)
            if torch.allclose(encode(), before * factor, rtol=precision, atol=smallest):
                return
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.copy_(original)
    raise ValueError(
        "The embeddings of this model do not follow its last normalisation layer or head, so they "
        "cannot be rescaled exactly. Append a Dense module with an identity activation, or pass a "
        "scale to the loss."
    )


def _last_affine_parameters(model: SentenceTransformer) -> list[nn.Parameter]:
    """Weight and bias of the last affine map. The modules after it pass on a factor unchanged."""
    *_, module = (part for part in model.children() if not isinstance(part, (Pooling, Dropout)))
    if isinstance(module, Dense) and isinstance(module.activation_function, (nn.Identity, nn.ReLU)):
        return _affine(module.linear)
    if isinstance(module, LayerNorm):
        return _affine(module.norm)
    if isinstance(module, StaticEmbedding):
        return _affine(module.embedding)
    if isinstance(module, Transformer):
        return _affine(_producer(module, model))
    raise ValueError(
        f"No last affine map is known in {type(module).__name__}. Rescaling works for a "
        "Transformer with pooling, Dense with identity or ReLU, LayerNorm and StaticEmbedding."
    )


def _affine(module: nn.Module) -> list[nn.Parameter]:
    both = (getattr(module, name, None) for name in ("weight", "bias"))
    return [parameter for parameter in both if isinstance(parameter, nn.Parameter)]


def _producer(transformer: Transformer, model: SentenceTransformer) -> nn.Module:
    """The leaf module whose output is the token embeddings."""
    outputs: list[tuple[nn.Module, object]] = []

    def record(module: nn.Module, _: object, output: object) -> None:
        outputs.append((module, output))

    features = batch_to_device(model.preprocess(list(PROBE[:2])), model.device)
    with ExitStack() as hooks, torch.no_grad():
        for module in transformer.modules():
            if not list(module.children()) and _affine(module):
                hooks.callback(module.register_forward_hook(record).remove)
        tokens = transformer(features)["token_embeddings"]
    for module, output in reversed(outputs):
        if isinstance(output, Tensor) and torch.equal(output, tokens):
            return module
    raise ValueError(
        "The token embeddings of this Transformer are not the output of one last normalisation "
        "layer: something nonlinear follows it. Append a Dense module."
    )
