"""Saves a model that everybody downstream scores as it was trained, and loads it again."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sentence_transformers.util import load_file_path
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from st_magnitude._checks import InputError, InputTypeError, MissingPackage, foreign
from st_magnitude._files import is_moving, locked_folder, moved_in, refuse_used_folder, with_remedy
from st_magnitude._upstream import encodes_alone, load_with_classes
from st_magnitude.modules import HUB_OPTIONS, ExponentNorm
from st_magnitude.saving.card import complete_card
from st_magnitude.saving.find import (
    ENCODER,
    TABLES,
    find_encoder,
    folder_of_table,
    not_found,
    refuse_other_folder,
)
from st_magnitude.similarity import at_least_float32
from st_magnitude.surgery.adapters import has_adapter, merge_lora
from st_magnitude.surgery.gradients import GradScale, without_grad_scale
from st_magnitude.surgery.raw import (
    keeps_modes,
    num_positions,
    readers_of,
    refuse_other_models,
    warn_of_unused_prompt,
)

logger = logging.getLogger(__name__)

OURS: dict[str, type] = {
    f"{kind.__module__}.{kind.__name__}": kind for kind in (ExponentNorm, GradScale)
}

TEXTS = (
    "How do I keep bread from going stale?",
    "a prime number has two divisors",
    "see also: notes, references",
    "x",
)
MOST_TEXTS = 8
MOST_CHARACTERS = 300
EXACT = 1e-4  # relative error of two computations in float32 on the same processor

_NO_CODE = "and no code of a model is run (SECURITY.md, trust_remote_code)."


def export(model: SentenceTransformer, path: str | Path, overwrite: bool = False) -> Path:
    """Saves a model for everybody to load and to score as it was trained. The model is not changed.

    For the discrete similarities the folder has stock modules and the ``similarity_fn_name`` that
    ranks alike: SentenceTransformer, mteb and every vector database load it without this package. A
    fractional document exponent keeps its ``ExponentNorm``: load it with
    :func:`st_magnitude.load`, or round the exponent before, as
    :func:`~st_magnitude.calibrate_exponent` says. An adapter (LoRA) is merged in a copy;
    ``model.save_pretrained`` saves it as such. The model card says how to index. What was written
    is loaded again, and has to embed a few texts as the model does.

    Args:
        model: The trained SentenceTransformer.
        path: A new or empty folder.
        overwrite: Whether a folder that is not empty is replaced, with all that it contains.

    Raises:
        FileExistsError: If the folder is not empty and overwrite is False.
        OSError: If the model cannot be written, as on a full disk, or another process writes to the
            folder. The folder is then as it was.
        TypeError: If the model is a CrossEncoder, MultiVectorEncoder or SparseEncoder.
        ValueError: If the weights under an adapter are quantized, or the model that was written
            embeds texts in another way. The folder is then as it was.
    """
    path = Path(path)
    model = refuse_other_models(model, "export")
    refuse_used_folder(path, overwrite)
    with (
        locked_folder(path, first_rank_only=False),
        with_remedy(path, "The folder is as it was."),
        moved_in(path, "modules.json", replace_all=True) as folder,
    ):
        write_model(model, folder)
    return path


def write_model(model: SentenceTransformer, folder: Path, texts: Sequence[str] = ()) -> None:
    """Writes the files of :func:`export` into a folder, keeps its other files, and compares the
    model in it with the one in memory (see `check_saved`)."""
    with keeps_modes(model), without_grad_scale(model):
        plain = merge_lora(copy.deepcopy(model)) if has_adapter(model) else model
        try:
            plain.save_pretrained(str(folder))
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            raise
        except Exception as error:  # of torch, safetensors and tokenizers, such as for a full disk
            raise OSError(f"{type(error).__name__}: {error}") from error
        complete_card(folder / "README.md", plain)
        del plain  # room for the copy that is loaded
        check_saved(model, folder, texts)


# --- every save is loaded again and compared with the model in memory -----------------------------


def check_saved(model: SentenceTransformer, folder: Path, texts: Sequence[str] = ()) -> None:
    """Loads a model that was written into a folder, on the CPU, and refuses it if its embeddings of
    the first 8 texts, or of fixed ones, are not those of the model in memory."""
    kinds = [type(module) for module in model.modules() if isinstance(module, Module)]
    classes = OURS | {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    read = [text[:MOST_CHARACTERS] for text in (list(texts) or TEXTS)[:MOST_TEXTS]]
    expected = _embeddings(model, read)
    if not expected.isfinite().all():
        raise InputError("The model has diverged: its embeddings are not finite.")
    options = {"trust_remote_code": model.trust_remote_code, "truncate_dim": model.truncate_dim}
    remedy = f"Nothing was moved into {folder.parent}, which is as it was."
    try:
        with torch.random.fork_rng(devices=[]):  # new modules draw weights before they read theirs
            saved = load_with_classes(str(folder), classes, device="cpu", **options)
        found = _embeddings(saved, read)
    except Exception as error:
        if "trust_remote_code" in str(error):
            logger.warning(f"The saved model was not compared: {error}")
            return
        raise InputError(
            f"The saved model cannot be loaded again ({type(error).__name__}: {error}). {remedy}"
        ) from error
    difference = torch.inf
    if found.shape == expected.shape:
        sizes = expected.norm(dim=1).clamp(min=torch.finfo(expected.dtype).tiny)
        difference = ((found - expected).norm(dim=1) / sizes).max().item()
    if not difference <= _rounding(model):
        raise InputError(
            f"The saved model is not the model in memory: its embeddings of {len(read)} texts"
            f" differ by up to {difference:.2g} of their norm. {remedy} Look for a module or an"
            " adapter that save_pretrained does not write as it computes."
        )


def _embeddings(model: SentenceTransformer, texts: list[str]) -> Tensor:
    """Of texts as queries and as documents, n texts -> (2n, D), as the modules compute them."""
    bare = copy.copy(model)
    # accelerate's forward computes in bfloat16 after a training, and losses wrap theirs around it
    vars(bare).pop("forward", None)
    with encodes_alone(bare):
        sides = [
            encode(texts, convert_to_tensor=True, show_progress_bar=False)
            for encode in (bare.encode_query, bare.encode_document)
        ]
    return at_least_float32(torch.cat(sides)).cpu()


def _rounding(model: SentenceTransformer) -> float:
    """The relative error that is not a difference: larger for another processor, and for a model in
    half precision whose adapter was merged in float32."""
    sizes = [torch.finfo(x.dtype).eps for x in model.parameters() if x.is_floating_point()]
    if model.device.type != "cpu":
        sizes.append(2**-10)  # of TF32
    elif not has_adapter(model):
        return EXACT
    return max([EXACT, *(16 * size for size in sizes)])


# --- loading --------------------------------------------------------------------------------------


def load(path: str | Path, **kwargs: Any) -> SentenceTransformer:
    """``SentenceTransformer(path, **kwargs)`` with ``ExponentNorm``; runs no code of the model.

    ``"wordllama"``, or ``"table"``, is the static table of the PyPI package wordllama, which the
    extra ``table`` installs: 32,000 tokens x 256 dimensions, mean of tokens. It needs no hub and
    trains in seconds. ``"sentence-transformers/all-MiniLM-L6-v2"`` comes from the cache, the hub or
    the PyPI package that the extra ``encoder`` installs.

    Raises:
        ImportError: If the table is asked for and not installed.
        OSError: If there is no model of that name, or a file of it is missing or damaged, such as
            those of its tokenizer.
        TypeError: If the model is a CrossEncoder in the format of transformers.
        ValueError: If the model has other modules that are not sentence-transformers' own.
    """
    path = str(path)
    if not path.strip():
        raise InputError("The name of the model is empty; give a folder or a hub id.")
    if path in TABLES and not os.path.isdir(path):
        return load_table(**kwargs)
    if path == ENCODER and kwargs.get("revision") is None:
        path = find_encoder() or path
    place = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    _refuse_cross_encoder(path, place)
    with loading("model", path, has_options=bool(kwargs)):
        model = load_with_classes(path, OURS, **kwargs)
    _refuse_unreadable(model, path)
    warn_of_unused_prompt(model)
    return model


def load_table(device: str | None = None) -> SentenceTransformer:
    """The static table of the PyPI package wordllama, a model that needs no hub."""
    folder = folder_of_table()
    weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"]
    file = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    table = StaticEmbedding(Tokenizer.from_file(str(file)), embedding_weights=weights.float())
    return SentenceTransformer(modules=[table], device=device)


def _refuse_unreadable(model: SentenceTransformer, path: str) -> None:
    """Refuses a model that reads nothing of a text, and so embeds all texts of a length alike."""
    for reader in readers_of(model):
        tokenizer = getattr(reader, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise OSError(
                f"The tokenizer of the model at {path!r} knows no word: files of it are missing"
                " (tokenizer.json). Copy them from the model that it was made of."
            )


@contextmanager
def loading(what: str, path: str, has_options: bool = False) -> Iterator[None]:
    """Turns the errors of loading into one that names the model."""
    try:
        with foreign():
            yield
    except Exception as error:
        where = f"The {what} at {path!r}"
        said = str(error)
        is_folder = os.path.isdir(path)
        if is_folder and is_moving(Path(path)):
            raise OSError(
                f"{where} cannot be loaded because of a killed process: move the files of"
                f" {path}/.st-magnitude.moving into {path}."
            ) from error
        if is_folder:
            refuse_other_folder(what, path)
        # Upstream advises to run the code, and shows names that the model has chosen.
        if "trust_remote_code" in said:
            raise InputError(
                f"{where} needs classes that are not part of sentence-transformers or transformers,"
                f" {_NO_CODE}"
            ) from error
        if "weights_only" in said:
            raise OSError(
                f"{where} has weights that are torn or hold code, {_NO_CODE} Take safetensors."
            ) from error
        is_explained = isinstance(error, (InputError, MissingPackage))
        if is_explained or (has_options and not isinstance(error, OSError)):
            raise
        if isinstance(error, OSError) and not is_folder:
            raise not_found(what, path, error) from error
        raise OSError(
            f"{where} is incomplete, or is an adapter whose base has moved, or is of other"
            f" versions: {type(error).__name__}: {said}"
        ) from error


def _refuse_cross_encoder(path: str, place: Mapping[str, Any]) -> None:
    """Refuses a CrossEncoder of older versions, a folder of transformers with a classification
    head, which sentence-transformers loads without a word."""
    try:
        if load_file_path(path, "modules.json", **place):
            return
        file = load_file_path(path, "config.json", **place)
        config = Path(file).read_text(encoding="utf-8") if file else "{}"
        architectures = str(json.loads(config)["architectures"])
    except (OSError, ValueError, KeyError, TypeError):  # the constructor says more about it
        return
    if "ForSequenceClassification" in architectures:
        raise InputTypeError(
            f"The model at {path!r} is a CrossEncoder, which scores pairs and embeds no texts. Load"
            f" it with sentence_transformers.CrossEncoder({path!r})."
        )


def limit_length(model: SentenceTransformer, length: int) -> None:
    """Limits how many tokens of a text a model reads, by every route of a Router, or by none."""
    readers = readers_of(model)
    for reader in readers:
        if getattr(reader, "max_seq_length", None) in (None, math.inf):
            raise InputError(
                f"This model reads texts of any number of tokens, in its {type(reader).__name__};"
                " leave out max_length."
            )
        if length > (positions := num_positions(reader)):
            raise InputError(
                f"max_length is {length:,}, which is more than the {positions:,} positions of this"
                f" model; give at most {positions:,}."
            )
    for reader in readers:
        reader.max_seq_length = length  # type: ignore[assignment]
