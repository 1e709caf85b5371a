"""A check of every save: the written model is loaded again and compared with that in memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from torch import Tensor

from st_magnitude._checks import InputError
from st_magnitude._upstream import encodes_alone, load_with_classes
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import at_least_float32
from st_magnitude.surgery.adapters import has_adapter
from st_magnitude.surgery.gradients import GradScale

logger = logging.getLogger(__name__)

REFERENCE = "install_st_magnitude.ExponentNorm"  # a file in the folder of a model, and its class
OURS: dict[str, type] = {
    f"{ExponentNorm.__module__}.ExponentNorm": ExponentNorm,
    f"{GradScale.__module__}.GradScale": GradScale,
    REFERENCE: ExponentNorm,
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
