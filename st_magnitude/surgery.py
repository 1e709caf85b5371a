"""Model surgery: functions on a SentenceTransformer that decide what its embeddings, and what it saves, look like.

Everything works in place and returns the model, so that a call can wrap the constructor:
``model = stm.prepare(SentenceTransformer("..."), "qnorm")``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import (
    Dropout,
    LayerNorm,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from torch import Tensor, nn

from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, Similarity

__all__ = [
    "add_normalize",
    "export",
    "load",
    "normalizes_output",
    "prepare",
    "rescale_output",
    "set_similarity_function",
    "strip_normalize",
]

logger = logging.getLogger(__name__)

_PROBE = (
    "How do I reset a forgotten password?",
    "The train to the coast leaves every hour from platform nine.",
    "photosynthesis",
    "A function that merges two sorted lists into one sorted list.",
    "Interest rates were left unchanged for the third month in a row.",
    "Add the onions, lower the heat and let everything simmer for an hour.",
    "Who painted the ceiling of the chapel?",
    "The contract may be ended by either party with thirty days' notice in writing.",
)


def _is_sentence_norm(module: nn.Module) -> bool:
    return isinstance(module, Normalize) and module.module_output_name == "sentence_embedding"


def normalizes_output(model: nn.Module, routes: Callable[[Iterable[bool]], bool] = any) -> bool:
    """Whether the embeddings of a model leave it with unit length: for any route of a trailing ``Router``, or for all.

    True for a trailing ``Normalize``, also as the end of a route. Neither Dropout nor ExponentNorm behind it hides it.
    """
    for module in reversed(list(model.children())):
        if isinstance(module, Router):
            return routes(normalizes_output(route, routes) for route in _routes(module).values())
        if not isinstance(module, (Dropout, ExponentNorm)):
            return _is_sentence_norm(module)
    return False


def _routes(router: Router) -> dict[str, nn.Sequential]:
    return {name: route for name, route in router.sub_modules.items() if isinstance(route, nn.Sequential)}


def strip_normalize(model: SentenceTransformer) -> SentenceTransformer:
    """Removes the trailing ``Normalize`` or ``ExponentNorm``, so that embeddings keep their length. In place.

    Directions, and with them cosine similarities, stay as they were. ``similarity_fn_name`` is not touched: see
    :func:`prepare`.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.base.modules import Normalize
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red", "green"]), Normalize()])
        >>> [type(module).__name__ for module in strip_normalize(model)]
        ['BoW']
    """
    while len(model) > 1 and (_is_sentence_norm(model[-1]) or isinstance(model[-1], ExponentNorm)):
        del model[-1]
    if normalizes_output(model):
        if not isinstance(model[-1], Router):
            raise ValueError(
                f"The Normalize of this model is followed by {type(model[-1]).__name__} and cannot be stripped from "
                "the end: remove it from the list of modules."
            )
        routes = _routes(model[-1])
        for name, route in routes.items():
            if all(_is_sentence_norm(module) for module in route):
                raise ValueError(
                    f"The route {name!r} of the last Router is nothing but Normalize (a model exported with "
                    "calibrated_scores=True?): remove the Router with `del model[-1]`."
                )
        for route in routes.values():
            while _is_sentence_norm(route[-1]):
                del route[-1]
    return model


def add_normalize(model: SentenceTransformer) -> SentenceTransformer:
    """Appends ``Normalize``, so that all embeddings have length 1, unless the model has one. In place.

    An ``ExponentNorm`` at the end gives way.
    """
    if isinstance(model[-1], ExponentNorm):
        strip_normalize(model)
    if not normalizes_output(model, all):
        model.append(Normalize())
    return model


def prepare(model: SentenceTransformer, similarity: str | Similarity) -> SentenceTransformer:
    """Makes a model fit for training with, and scoring by, a similarity. In place.

    ========================  =========================================  ======================
    similarity                the model ends in                          ``similarity_fn_name``
    ========================  =========================================  ======================
    ``"cosine"``              ``Normalize``                              cosine
    ``"dot"``, ``"qnorm"``    raw embeddings                             dot
    ``"dnorm"``               raw embeddings                             cosine
    0 < gamma_document < 1    ``ExponentNorm``                           dot
    ========================  =========================================  ======================

    The exponent of the query never changes a ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so that stock modules and
    a stock similarity rank by each of the four named ones.

    Args:
        model: Any SentenceTransformer.
        similarity: A name for :meth:`Similarity.named`, or a Similarity.

    Raises:
        ValueError: If there is no similarity of that name, or Normalize cannot be removed.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = prepare(SentenceTransformer(modules=[BoW(["red", "green"])]), "qnorm")
        >>> model.similarity_fn_name
        'dot'
    """
    similarity = Similarity.named(similarity)
    strip_normalize(model)
    if similarity == COSINE:
        add_normalize(model)
    elif 0 < similarity.exponents[1] < 1:
        query, document = similarity.exponents
        model.append(ExponentNorm(query, document).to(model.device))
    set_similarity_function(model, similarity)
    return model


def set_similarity_function(model: SentenceTransformer, similarity: Similarity) -> None:
    """Sets ``similarity_fn_name`` to the stock function that ranks as the similarity does: cosine or dot."""
    name: Literal["cosine", "dot"]
    name = "cosine" if similarity.exponents[1] == 1 and not isinstance(model[-1], ExponentNorm) else "dot"
    before = model._similarity_fn_name  # the public property would turn "never set" into "cosine"
    if before != name:
        logger.info("similarity_fn_name: %s -> %s, which ranks as %s does.", before, name, similarity.name)
        model.similarity_fn_name = name


def rescale_output(
    model: SentenceTransformer, factor: float | None = None, probe: Sequence[str] | None = None
) -> SentenceTransformer:
    """Multiplies every embedding by a factor, exactly, through the weights of the last affine map. In place.

    Norms change by the factor, directions and cosine similarities not at all. The last affine map is the final
    normalisation layer of a Transformer (weight and bias), a ``Dense`` or ``LayerNorm`` head, or the table of a
    ``StaticEmbedding``. The result is checked on the probe.

    Args:
        model: A SentenceTransformer that does not end in ``Normalize``.
        factor: Positive. None: one over the mean norm of the probe's embeddings, which so becomes 1.
        probe: Texts for the check, and for the factor. None: eight sentences on as many subjects.

    Raises:
        ValueError: If the factor is not positive, the model ends in Normalize, or no last affine map is found
            (shared layers, a nonlinear head); the model is then unchanged.
    """
    if factor is not None and not factor > 0:
        raise ValueError(f"factor must be positive, got {factor}.")
    if normalizes_output(model):
        raise ValueError(
            "The model ends in Normalize, so its embeddings have length 1 whatever comes before. "
            "Call stm.strip_normalize(model) first."
        )
    texts = list(probe or _PROBE)
    with _trailing_exponents_off(model):
        before: Tensor = model.encode(texts, convert_to_tensor=True).double()
        if factor is None:
            factor = 1 / before.norm(dim=1).mean().item()
        parameters = last_affine_parameters(model, texts)
        originals = [p.detach().clone() for p in parameters]

        def apply(shift: float) -> bool:
            """Scales shift + weight, where the layer multiplies by that, and says whether embeddings followed."""
            with torch.no_grad():
                for parameter, original in zip(parameters, originals, strict=True):
                    parameter.copy_((original + shift) * factor - shift)
            after = model.encode(texts, convert_to_tensor=True).double()
            precision = 3e-2 if parameters[0].dtype in (torch.float16, torch.bfloat16) else 1e-4
            return torch.allclose(
                after, before * factor, rtol=precision, atol=precision * factor * before.abs().max().item()
            )

        if not (apply(shift=0.0) or (len(parameters) == 1 and apply(shift=1.0))):  # Gemma multiplies by 1 + weight
            with torch.no_grad():
                for parameter, original in zip(parameters, originals, strict=True):
                    parameter.copy_(original)
            raise ValueError(
                "The embeddings of this model do not follow its last normalisation layer or head, so they cannot be "
                "rescaled exactly. Append a Dense module with an identity activation, or pass a scale to the loss."
            )
    return model


@contextmanager
def _trailing_exponents_off(model: SentenceTransformer) -> Iterator[None]:
    """The model without its trailing ExponentNorm, for the duration of the block."""
    removed = model[-1] if isinstance(model[-1], ExponentNorm) else None
    if removed is not None:
        del model[-1]
    try:
        yield
    finally:
        if removed is not None:
            model.append(removed)


def last_affine_parameters(model: SentenceTransformer, probe: Sequence[str]) -> list[nn.Parameter]:
    """Weight (and bias) of the last affine map: what follows it keeps multiples multiples.

    Raises:
        ValueError: If there is none, or it is used more than once.
    """
    for module in reversed(list(model.children())):
        if isinstance(module, (Pooling, Dropout)):
            continue
        if isinstance(module, Dense) and isinstance(module.activation_function, (nn.Identity, nn.ReLU)):
            return _affine(module.linear)
        if isinstance(module, LayerNorm):
            return _affine(module.norm)
        if isinstance(module, StaticEmbedding):
            return _affine(module.embedding)
        if isinstance(module, Transformer):
            return _affine(_producer(module, model, probe))
        break
    raise ValueError(
        f"No last affine map in front of {type(module).__name__}: rescaling works behind a Transformer with pooling, "
        "Dense (identity or ReLU), LayerNorm and StaticEmbedding."
    )


def _affine(module: nn.Module) -> list[nn.Parameter]:
    return [p for name in ("weight", "bias") if isinstance(p := getattr(module, name, None), nn.Parameter)]


def _producer(transformer: Transformer, model: SentenceTransformer, probe: Sequence[str]) -> nn.Module:
    """The leaf module whose output the token embeddings are."""
    calls: list[tuple[nn.Module, Tensor]] = []
    handles = [
        leaf.register_forward_hook(lambda m, _, out: calls.append((m, out)) if isinstance(out, Tensor) else None)
        for leaf in transformer.modules()
        if not list(leaf.children()) and _affine(leaf)
    ]
    try:
        features = model.preprocess(list(probe)[:2])
        features = {k: v.to(model.device) if isinstance(v, Tensor) else v for k, v in features.items()}
        was_training = transformer.training
        with torch.no_grad():
            tokens = transformer.eval()(features)["token_embeddings"]
        transformer.train(was_training)
    finally:
        for handle in handles:
            handle.remove()
    makers = [m for m, out in calls if out.shape == tokens.shape and torch.equal(out, tokens)]
    if not makers or sum(m is makers[-1] for m, _ in calls) > 1:
        raise ValueError(
            "The token embeddings of this Transformer are not the output of one last normalisation layer "
            "(it is shared between layers, or something nonlinear follows). Append a Dense module instead."
        )
    return makers[-1]


def export(
    model: SentenceTransformer,
    path: str | Path,
    calibrated_scores: bool = False,
    bake_exponent: bool = False,
) -> Path:
    """Saves a model so that what everybody downstream loads scores as it was trained to. The model is not changed.

    For the discrete similarities the folder holds stock modules and the matching ``similarity_fn_name``:
    SentenceTransformer, mteb and every vector database load it without ``trust_remote_code`` and without this package.
    A fractional document exponent keeps its ``ExponentNorm`` (load with :func:`st_magnitude.load`), unless it is baked.

    Args:
        model: The trained model.
        path: The folder to write.
        calibrated_scores: Also normalise queries, so that the scores of different queries can be compared: a stock
            ``Router`` behind the model, one route for queries and one for documents. For models whose document norm
            counts (dot, QNorm). Queries must then be encoded with ``encode_query``.
        bake_exponent: Leave ExponentNorm out; the saved model gives raw embeddings. Whoever writes the index divides
            document vectors by |d|^gamma, ``Similarity(document=gamma).document(vectors)``, with the gamma in the
            log and in ``st_magnitude.json``; queries need nothing, their norm does not change a ranking.

    Returns:
        The folder.

    Raises:
        ValueError: If calibrated_scores is asked of a model whose documents are normalised, or bake_exponent of one
            without ExponentNorm.
    """
    path = Path(path)
    norm = model[-1] if isinstance(model[-1], ExponentNorm) else None
    if calibrated_scores and (norm is not None or model.similarity_fn_name != "dot" or normalizes_output(model)):
        raise ValueError(
            "calibrated_scores=True normalises the queries of a model whose document norms count (raw embeddings, "
            'similarity_fn_name="dot"). '
            + (
                "ExponentNorm normalises queries itself: set gamma_query to 1 instead."
                if norm is not None
                else f"This one has similarity_fn_name={model.similarity_fn_name!r}: "
                "its scores are comparable as they are, or call stm.prepare(model, 'qnorm') first."
            )
        )
    if bake_exponent and norm is None:
        raise ValueError("bake_exponent=True needs a model that ends in ExponentNorm; this one has no exponent.")

    if calibrated_scores:
        # A Normalize that writes elsewhere does nothing to the embedding: the stock identity.
        router = Router(
            {"query": [Normalize()], "document": [Normalize(module_output_name="_unit")]}, default_route="document"
        )
        model.append(router)
        try:
            model.save_pretrained(str(path))
        finally:
            del model[-1]
    elif norm is not None and bake_exponent:
        with _trailing_exponents_off(model):
            model.save_pretrained(str(path))
        note = {"document_exponent": norm.gamma_document}
        (path / "st_magnitude.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        logger.warning(
            "Exported raw embeddings: divide document vectors by their norm to the power %.4f when indexing, "
            "stm.Similarity(document=%.4f).document(vectors).",
            norm.gamma_document,
            norm.gamma_document,
        )
    else:
        model.save_pretrained(str(path))
        if norm is not None:
            logger.info("This model ends in ExponentNorm: load it with stm.load(%r).", str(path))
    return path


def load(path: str | Path, **kwargs: Any) -> SentenceTransformer:
    """Loads a model that may end in ``ExponentNorm``, without ``trust_remote_code`` and without running code from it.

    Any other model loads as ``SentenceTransformer(path, **kwargs)`` would load it.

    Args:
        path: A folder or hub id.
        **kwargs: For the constructor of SentenceTransformer.

    Raises:
        ValueError: If the model has other modules that are not sentence-transformers' own.
    """
    ours = {f"{ExponentNorm.__module__}.{ExponentNorm.__qualname__}": ExponentNorm}
    # The one private method of sentence-transformers that this package calls: it names the class to use for a type
    # in modules.json, and leaves all other types behind the usual gate.
    return SentenceTransformer._load_with_module_classes(str(path), ours, **kwargs)
