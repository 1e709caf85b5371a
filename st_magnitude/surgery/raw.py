"""Raw embeddings: the output of a model before any Normalize or ExponentNorm at its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.modules import Dropout
from torch import Tensor, nn
from transformers import PreTrainedModel

from st_magnitude._checks import InputError, InputTypeError
from st_magnitude._upstream import encodes_alone
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import at_least_float32

logger = logging.getLogger(__name__)

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")

Model = TypeVar("Model", bound=nn.Module)


def unwrapped(model: Model) -> Model:
    """The model inside DistributedDataParallel and torch.compile (TypeError: it is none)."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(
            f"Give a model, such as st_magnitude.load(name); got a {type(model).__name__}."
        )
    inner = getattr(model, "_orig_mod", getattr(model, "module", None))
    return cast(Model, unwrapped(inner)) if isinstance(inner, nn.Module) else model


def refuse_other_models(model: Model, who: str) -> Model:
    """The `unwrapped` model, which must have one embedding per text (TypeError)."""
    model = unwrapped(model)
    if isinstance(model, MultiVectorEncoder | SparseEncoder | CrossEncoder):
        raise InputTypeError(
            f"{who} needs a model with one dense embedding per text, such as a "
            f"SentenceTransformer; got a {type(model).__name__}."
        )
    return model


# --- the end of a model ---------------------------------------------------------------------------


def is_sentence_norm(module: nn.Module) -> bool:
    """Whether a module is sentence-transformers' Normalize of the sentence embedding."""
    return isinstance(module, Normalize) and module.module_output_name == "sentence_embedding"


def routes_of(router: Router) -> dict[str, nn.Sequential]:
    routes = router.sub_modules.items()
    return {name: route for name, route in routes if isinstance(route, nn.Sequential)}


def readers_of(model: SentenceTransformer) -> list[nn.Module]:
    """The modules that read texts: the first one, or the first one of each route of a Router."""
    first = model[0]
    routes = routes_of(first).values() if isinstance(first, Router) else [[first]]
    return [route[0] for route in routes]


def num_positions(reader: nn.Module) -> float:
    """The number of tokens for which a transformer has learned positions; infinity without them."""
    for model in reader.modules():
        if isinstance(model, PreTrainedModel):
            most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            for name, table in model.named_modules():
                is_of_positions = "position" in name or name.endswith("wpe")
                if is_of_positions and isinstance(table, nn.Embedding) and most:
                    skipped = 0 if table.padding_idx is None else table.padding_idx + 1
                    return most - skipped if table.num_embeddings >= most else math.inf
    return math.inf


def normalizes_output(model: nn.Module, routes: Callable[[Iterable[bool]], bool] = any) -> bool:
    """Whether a model, and any or all ``routes`` of a last Router, ends in ``Normalize``, which
    Dropout and ExponentNorm may follow."""
    for module in reversed(list(unwrapped(model).children())):
        if isinstance(module, Router):
            return routes(normalizes_output(route, routes) for route in routes_of(module).values())
        if not isinstance(module, (Dropout, ExponentNorm)):
            return is_sentence_norm(module)
    return False


def returns_unit_vectors(model: nn.Module) -> bool:
    """Whether ``encode`` returns unit vectors; ``truncate_dim`` cuts them after Normalize."""
    return normalizes_output(model, all) and not is_cut(model)


def is_cut(model: nn.Module) -> bool:
    """Whether ``truncate_dim`` leaves out dimensions of what a model computes."""
    dim = getattr(unwrapped(model), "truncate_dim", None)
    return dim is not None and dim < (output_width(model) or math.inf)


def prompt_of(model: nn.Module, role: str) -> str:
    """The prompt that ``encode_query`` or ``encode_document`` puts before a text, or ""; documents
    get that of the first name that is a key of ``model.prompts``, even if it is empty."""
    model = unwrapped(model)
    prompts: Mapping[str | None, str] = getattr(model, "prompts", {})
    names = ("query",) if role == "query" else _DOCUMENT_PROMPTS
    default = getattr(model, "default_prompt_name", None)
    return prompts.get(next((name for name in names if name in prompts), default)) or ""


def warn_of_unused_prompt(model: SentenceTransformer) -> None:
    """Warns if ``encode_document`` reads none of the prompts that are meant for documents."""
    meant = [name for name in _DOCUMENT_PROMPTS if model.prompts.get(name)]
    if meant and not prompt_of(model, "document"):
        logger.warning(
            f"The model has the prompt {model.prompts[meant[0]]!r} for documents under the name"
            f" {meant[0]!r}, but encode_document takes the one named 'document', which is empty:"
            " documents are encoded without a prompt. If the model needs it, set"
            f" model.prompts['document'] = model.prompts[{meant[0]!r}]."
        )


def output_width(model: nn.Module) -> int | None:
    """Number of dimensions before ``encode`` cuts them to ``truncate_dim``; None if unknown."""
    if not isinstance(model := unwrapped(model), SentenceTransformer):
        return None
    with model.truncate_embeddings(None):
        return model.get_embedding_dimension()


def ends_of(
    modules: nn.Sequential, keep_normalize: bool = False, name: str = "model"
) -> Iterator[tuple[str, nn.Sequential, int]]:
    """A model and the routes of a Router at its raw end: the name, the modules, and how many come
    before the Normalize (unless kept), ExponentNorm and Dropout that close it."""
    end = len(modules)
    for i in reversed(range(len(modules))):
        if isinstance(modules[i], ExponentNorm) or (
            is_sentence_norm(modules[i]) and not keep_normalize
        ):
            end = i
        elif not isinstance(modules[i], Dropout):
            break
    yield name, modules, end
    if end and isinstance(last := modules[end - 1], Router):
        for route, parts in routes_of(last).items():
            yield from ends_of(parts, keep_normalize, f"route {route!r}")


def raw_producers(model: nn.Module) -> list[nn.Module]:
    """The modules that compute raw embeddings: one, or one per route. Other modules: themselves."""
    model = refuse_other_models(model, "Finding raw embeddings")
    if not isinstance(model, SentenceTransformer):
        return [model]
    ends = list(ends_of(model))
    if empty := [name for name, _, end in ends if end == 0]:
        raise InputError(
            f"The {empty[0]} consists of Normalize only, so there is no embedding before it. If it "
            "is a route of a last Router, remove that with `del model[-1]`."
        )
    last = [modules[end - 1] for _, modules, end in ends]
    return [module for module in last if not isinstance(module, Router)]


# --- raw embeddings -------------------------------------------------------------------------------


@contextmanager
def raw_embeddings(model: SentenceTransformer, keep_normalize: bool = False) -> Iterator[None]:
    """Within the block, ``model.encode*`` returns raw embeddings, by every route of a last Router.

    Afterwards the model is the same again, in its training mode too, which ``encode`` ends. In an
    evaluation by several processes, the first one encodes all texts itself if something is left
    out, because the others have copies. With ``keep_normalize`` only ExponentNorm is left out.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> with raw_embeddings(model):
        ...     raw = model.encode("red red red")
        >>> raw, model.encode("red red red")
        (array([3.], dtype=float32), array([1.], dtype=float32))
    """
    model = refuse_other_models(model, "Encoding")
    ends = [(modules, list(modules)[end:]) for _, modules, end in ends_of(model, keep_normalize)]
    try:
        for modules, removed in ends:
            del modules[len(modules) - len(removed) :]
        with ExitStack() as stack:
            stack.enter_context(keeps_modes(model))
            if any(removed for _, removed in ends):
                stack.enter_context(encodes_alone(model))
            yield
    finally:
        for modules, removed in ends:
            modules.extend(removed)


@contextmanager
def keeps_modes(model: nn.Module) -> Iterator[None]:
    """After the block, every module is in training or not as before; ``encode`` ends training."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def encode_raw(
    model: SentenceTransformer,
    texts: list[str],
    role: str,
    keep_normalize: bool = False,
    **encode: Any,
) -> Tensor:
    """Raw embeddings of texts in at least float32, see `raw_embeddings`: n texts -> (n, D).

    ``role`` is ``"query"`` or ``"document"``, and ``encode`` has options of sentence-transformers'
    ``encode``, such as ``batch_size``.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["wax"]), ExponentNorm(1, 0.5)], device="cpu")
        >>> encode_raw(model, ["wax wax wax wax"], "document")
        tensor([[4.]])
    """
    model = unwrapped(model)
    with raw_embeddings(model, keep_normalize):
        by_role = model.encode_query if role == "query" else model.encode_document
        try:
            return at_least_float32(by_role(texts, convert_to_tensor=True, **encode))
        except IndexError as error:
            raise InputError(
                f"The model has no embedding for a token or a place in a {role} ({error}): its"
                " tokenizer knows more tokens than its weights, or reads more than it has positions"
                " for. Take both from one model, or lower max_seq_length."
            ) from error


def raw_features(
    model: Callable[[dict[str, Tensor]], dict[str, Tensor]], features: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Runs the model and returns its embedding before ExponentNorm, (n, D), for a loss."""
    features = model(features)
    return {"sentence_embedding": features.get("raw_embedding", features["sentence_embedding"])}
