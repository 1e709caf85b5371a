"""Model surgery: functions on a SentenceTransformer that decide what its embeddings, and what it saves, look like.

Everything works in place and returns the model, so that a call can wrap the constructor:
``model = stm.prepare(SentenceTransformer("..."), "qnorm")``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
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

from st_magnitude._upstream import load_with_classes, stored_similarity_name
from st_magnitude.geometry import spearman
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, Similarity, safe_norm
from st_magnitude.surgery.raw import is_sentence_norm, normalizes_output, raw_embeddings, routes_of, unwrapped

__all__ = [
    "CutReport",
    "add_normalize",
    "cut_init",
    "export",
    "load",
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
    while len(model) > 1 and (is_sentence_norm(model[-1]) or isinstance(model[-1], ExponentNorm)):
        del model[-1]
    if normalizes_output(model):
        if not isinstance(model[-1], Router):
            raise ValueError(
                f"The Normalize of this model is followed by {type(model[-1]).__name__} and cannot be stripped from "
                "the end: remove it from the list of modules."
            )
        routes = routes_of(model[-1])
        for name, route in routes.items():
            if all(is_sentence_norm(module) for module in route):
                raise ValueError(
                    f"The route {name!r} of the last Router is nothing but Normalize (a model exported with "
                    "calibrated_scores=True?): remove the Router with `del model[-1]`."
                )
        for route in routes.values():
            while is_sentence_norm(route[-1]):
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
    before = stored_similarity_name(model)
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
    with raw_embeddings(model):
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


# --- cut-initialisation -----------------------------------------------------------------------------------------------

NEVER_CUT = ("logit_scale", "logit_bias", "query_bias", "document_bias")  # logarithms and logits, not weights
Probe = Callable[[], dict[str, Tensor]]  # embeddings before they are normalised, by role


@dataclass(frozen=True)
class CutReport:
    """What :func:`cut_init` divided, and what became of the embeddings of a probe.

    Attributes:
        c: The divisor.
        parameters: Names and shapes of the parameters that were divided.
        norms_before: Norms of the probe's embeddings by role, (n,) each, before they are normalised.
        norms_after: The same afterwards.
        spearman: Rank correlation of the cosines of all pairs of the probe, before against after, by role. 1 means
            that the model says what it said; nan, that all pairs are alike.
    """

    c: float
    parameters: dict[str, tuple[int, ...]]
    norms_before: dict[str, NDArray[np.float64]]
    norms_after: dict[str, NDArray[np.float64]]
    spearman: dict[str, float]

    def __str__(self) -> str:
        lines = [f"{len(self.parameters)} parameter(s) divided by {self.c:g}"]
        lines += [f"  {name}  {' x '.join(map(str, shape)) or 'scalar'}" for name, shape in self.parameters.items()]
        for role, before in self.norms_before.items():
            after = self.norms_after[role]
            lines.append(
                f"norms of {role}: {before.mean():.4g} -> {after.mean():.4g}, ratio {after.mean() / before.mean():.4f} "
                f"({len(before)} probes); Spearman of similarities {self.spearman[role]:.3f}"
            )
        return "\n".join(lines)


def cut_init(
    model: nn.Module,
    c: float = 3.0,
    where: Literal["output", "all"] | Callable[[str, nn.Parameter], bool] = "output",
    probe: Any = None,
) -> CutReport:
    """Divides weights by c before training, so that embeddings begin short and cosine gradients large. In place.

    - ``"output"``: weight and bias of the last affine map, as in :func:`rescale_output`, and the projections of a
      CLIP. Norms become exactly 1/c, similarities stay: safe on pretrained models. A Normalize at the end is looked
      behind. It is checked on the probe. Under a cosine loss the last map alone learns faster, c² times under SGD:
      since similarities stay, the layers below get the gradient that they got before.
    - ``"all"``: every parameter, the paper's Listing 1, for models that are not trained yet. In a trained one it
      destroys what was learned (see the Spearman correlation of the report), and a warning says so.
    - A function of name and parameter chooses freely.

    A tied parameter is divided once; ``logit_scale``, ``logit_bias`` and learned exponents never.

    Args:
        model: A SentenceTransformer, a CLIP of open_clip or, with "all" or a function, any module.
        c: The divisor; the paper takes 3 for contrastive and 9 for attraction-only losses, with weight decay.
        where: See above.
        probe: Texts; for a CLIP a pair (images, tokens); for any other module its input. None: eight sentences, or
            eight random images and token sequences; any other module is then not measured.

    Returns:
        What was cut, norms before and after, and the Spearman correlation of similarities: print it.

    Raises:
        ValueError: If c is not positive, no last affine map is found or the embeddings do not follow it (the model is
            then unchanged), or nothing was chosen.

    A model counts as trained for the warning if some normalisation layer has a bias that is not 0, or a weight that
    is not one constant: where every layer of that kind begins.

    Example:
        >>> from sentence_transformers.base.modules import Dense
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> modules = [BoW(["red", "green"]), Dense(2, 2, bias=False, activation_function=None)]
        >>> report = cut_init(SentenceTransformer(modules=modules, device="cpu"), c=4, probe=["red", "red green"])
        >>> report.parameters
        {'1.linear.weight': (2, 2)}
        >>> (report.norms_after["text"] / report.norms_before["text"]).round(6)
        array([0.25, 0.25])

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 6, Listing 1.
    """
    if not c > 0 or c == float("inf"):
        raise ValueError(f"c must be a positive number, got {c}; the paper takes 3 and 9.")
    if not callable(where) and where not in ("output", "all"):
        raise ValueError(f"where is 'output', 'all' or a function of (name, parameter), got {where!r}.")
    model = unwrapped(model)
    if where == "all" and _looks_trained(model):
        logger.warning(
            "cut_init(where='all') on a model whose weights look trained: dividing all of them destroys what it has "
            "learned. where='output' changes norms only."
        )
    is_text = isinstance(model, SentenceTransformer)
    with raw_embeddings(model) if is_text else nullcontext():  # type: ignore[arg-type]
        chosen = _chosen(model, where, probe)
        measure = _probe(model, probe)
        before = measure()
        if where == "output" and is_text:
            rescale_output(model, 1 / c, probe)  # type: ignore[arg-type]
        else:
            originals = {name: p.detach().clone() for name, p in chosen.items()}
            with torch.no_grad():
                for parameter in chosen.values():
                    parameter.div_(c)
        after = measure()
    if where == "output" and not is_text and any(not _is_multiple(after[r], before[r], 1 / c, chosen) for r in before):
        with torch.no_grad():
            for name, parameter in chosen.items():
                parameter.copy_(originals[name])
        raise ValueError(
            f"The embeddings of this model do not follow {', '.join(chosen)}: something nonlinear comes after. Choose "
            "the parameters yourself, where=lambda name, parameter: ..."
        )
    return CutReport(
        c,
        {name: tuple(p.shape) for name, p in chosen.items()},
        {role: x.norm(dim=1).numpy() for role, x in before.items()},
        {role: x.norm(dim=1).numpy() for role, x in after.items()},
        {role: _similarity_ranks(before[role], after[role]) for role in before},
    )


def _chosen(model: nn.Module, where: str | Callable[[str, nn.Parameter], bool], probe: Any) -> dict[str, nn.Parameter]:
    """The parameters to divide, by name; of tied ones the first."""
    named: Iterable[tuple[str, nn.Parameter]] = model.named_parameters()
    if where == "output" and isinstance(model, SentenceTransformer):
        last = {id(p) for p in last_affine_parameters(model, list(probe or _PROBE))}
        named = ((name, p) for name, p in named if id(p) in last)
    elif where == "output":
        named = _clip_projections(model)
    chosen: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, p in named:
        storage = p.data_ptr() or id(p)
        if name.rpartition(".")[2] in NEVER_CUT or storage in seen or (callable(where) and not where(name, p)):
            continue
        seen.add(storage)
        chosen[name] = p
    if not chosen:
        raise ValueError("cut_init found no parameter to divide: `where` chose none, or the model has none.")
    return chosen


def _looks_trained(model: nn.Module) -> bool:
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            if isinstance(bias, nn.Parameter) and bias.any():
                return True
            if (weight != weight[0]).any():
                return True
    return False


# Where open_clip keeps the last projection of each tower, in the order of trial.
_PROJECTIONS = {
    "image": ("visual.proj", "visual.attnpool.c_proj", "visual.head"),
    "text": ("text_projection", "text.text_projection", "text.proj"),
}


def _clip_projections(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights and biases of the last projection of the image tower, and of the text tower."""
    for tower, paths in _PROJECTIONS.items():
        found = clip_projection(model, tower)
        if not found:
            raise ValueError(
                f"No last affine map found in the {tower} tower of {type(model).__name__} (looked for "
                f"{', '.join(paths)}): choose it, where=lambda name, parameter: ..., or take a SentenceTransformer or "
                "a CLIP of open_clip."
            )
        yield from found


def clip_projection(model: nn.Module, tower: str) -> list[tuple[str, nn.Parameter]]:
    """Weight and bias of the last projection of a tower, ``"image"`` or ``"text"``, by name; none if it has none."""
    for path in _PROJECTIONS[tower]:
        try:
            projection: Any = model.get_submodule(path.rpartition(".")[0])
        except AttributeError:
            continue
        projection = getattr(projection, path.rpartition(".")[2], None)
        if isinstance(projection, nn.Parameter):
            return [(path, projection)]
        if isinstance(projection, nn.Module):
            linear = [m for m in projection.named_modules(prefix=path) if isinstance(m[1], nn.Linear)]
            if linear:
                return [(f"{linear[-1][0]}.{name}", p) for name, p in linear[-1][1].named_parameters()]
    return []


def _probe(model: nn.Module, probe: Any) -> Probe:
    """What measures the embeddings, by role, in float64 on the CPU."""
    if isinstance(model, SentenceTransformer):
        texts = list(probe) if probe is not None else list(_PROBE)
        return lambda: {"text": model.encode(texts, convert_to_tensor=True, show_progress_bar=False).double().cpu()}
    if all(hasattr(model, name) for name in ("encode_image", "encode_text")):
        images, tokens = random_pair(model) if probe is None else probe
        return lambda: {
            "image": _embed(model, model.encode_image, images),  # type: ignore[arg-type]
            "text": _embed(model, model.encode_text, tokens),  # type: ignore[arg-type]
        }
    return lambda: {} if probe is None else {"output": _embed(model, model, probe)}


@torch.no_grad()
def _embed(model: nn.Module, encode: Callable[[Any], Any], inputs: Any) -> Tensor:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        output = encode(inputs)
    finally:
        for module, training in modes.items():
            module.training = training
    if isinstance(output, Mapping):
        output = output["sentence_embedding"]
    return (output[0] if isinstance(output, tuple) else output).double().cpu()


def random_pair(model: Any) -> tuple[Tensor, Tensor]:
    """Eight random images, in the model's precision, and token sequences of the sizes that an open_clip model names."""
    try:
        size = model.visual.image_size
        text = getattr(model, "text", model)
        context, vocabulary = text.context_length, text.vocab_size
    except AttributeError as error:
        raise ValueError(f"This model does not say its input sizes ({error}): pass probe=(images, tokens).") from None
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    parameters = list(model.visual.parameters())
    like = next((p for p in parameters if p.ndim == 4), parameters[0])  # the convolution that reads the pixels
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, height, width, generator=generator).to(like)
    return images, torch.randint(1, vocabulary, (8, context), generator=generator).to(like.device)


def _is_multiple(after: Tensor, before: Tensor, factor: float, chosen: Mapping[str, nn.Parameter]) -> bool:
    precision = 3e-2 if any(p.dtype in (torch.float16, torch.bfloat16) for p in chosen.values()) else 1e-4
    return torch.allclose(after, before * factor, rtol=precision, atol=precision * factor * before.abs().max().item())


def _similarity_ranks(before: Tensor, after: Tensor) -> float:
    rows, columns = torch.triu_indices(len(before), len(before), offset=1)
    if len(rows) < 2:
        return float("nan")
    cosines = [(unit @ unit.T)[rows, columns].numpy().round(6) for unit in (x / safe_norm(x) for x in (before, after))]
    return spearman(*cosines)


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
        del model[-1]
        try:
            model.save_pretrained(str(path))
        finally:
            model.append(norm)
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
        OSError: If there is no model of that name.
        ValueError: If the model has other modules that are not sentence-transformers' own, or its files are damaged.
    """
    ours = {f"{ExponentNorm.__module__}.{ExponentNorm.__qualname__}": ExponentNorm}
    try:
        return load_with_classes(str(path), ours, **kwargs)
    except OSError as error:
        raise OSError(f"No model at {str(path)!r}, neither a folder nor on the hub: {error}") from error
    except (AttributeError, KeyError, RuntimeError, SafetensorError, TypeError, UnpicklingError, ValueError) as error:
        is_argument = any(f"'{name}'" in str(error) for name in kwargs)
        is_device = isinstance(error, RuntimeError) and re.search("device|cuda|memory", str(error), re.I)
        is_explained = isinstance(error, ValueError) and str(path) in str(error)
        if is_argument or is_device or is_explained or not Path(path).is_dir():
            raise
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"The model in {str(path)!r} cannot be loaded: {reason}. If nobody has edited its files, they are damaged: "
            "get another copy."
        ) from error
