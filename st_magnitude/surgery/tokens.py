"""The normalisation of tokens in a MultiVectorEncoder, for each role, in stock modules."""

from __future__ import annotations

from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import (
    BaseTokenPooling,
    HierarchicalTokenPooling,
)
from torch import nn

from st_magnitude.similarity import Similarity

__all__ = ["normalized_roles", "prepare_tokens", "token_norm"]

ROLES = ("query", "document")


def token_norm(*roles: str) -> nn.Module:
    """A stock module that normalises the tokens of texts in one or both `ROLES`.

    For one role it is HierarchicalTokenPooling with ``pool_factor=1``, which pools nothing and
    normalises: the Trainer would ask for the ``router_mapping`` of a Router.
    """
    if len(roles) == 2:
        return Normalize(module_input_name="token_embeddings")
    return HierarchicalTokenPooling(pool_factor=1.0, normalize_embeddings=True, tasks=list(roles))


def _is_token_norm(module: nn.Module) -> bool:
    """Whether a module does nothing but normalise tokens."""
    if isinstance(module, HierarchicalTokenPooling):
        return module.pool_factor == 1 and module.normalize_embeddings
    return isinstance(module, Normalize) and module.module_output_name == "token_embeddings"


def normalized_roles(model: MultiVectorEncoder) -> set[str]:
    """The roles whose tokens a model normalises, of ``"query"`` and ``"document"``."""
    roles: set[str] = set()
    for module in model.children():
        if isinstance(module, HierarchicalTokenPooling) and module.normalize_embeddings:
            roles |= {role for role in ROLES if module.applies_to(role)}
        elif _is_token_norm(module) or _normalizes_inside(module):
            roles |= set(ROLES)
    return roles


def prepare_tokens(model: MultiVectorEncoder, similarity: Similarity) -> None:
    """:func:`~st_magnitude.prepare` of a MultiVectorEncoder, in place."""
    if not set(similarity.exponents) <= {0.0, 1.0}:
        raise ValueError(
            f"{similarity} divides tokens by a fractional power of their norm, which no stock "
            "module does. Prepare the model for 'qnorm' or 'dot', and give the exponent to "
            "stm.NormPruning(exponent=...) when you encode."
        )
    inside = [module for module in model.children() if _normalizes_inside(module)]
    if inside and similarity.exponents != (1, 1):
        raise ValueError(
            f"The {type(inside[0]).__name__} of this model normalises tokens itself, so their "
            "norms cannot be kept. Use a model with a Normalize module, or without normalisation."
        )
    norms = [i for i, module in enumerate(model.children()) if _is_token_norm(module)]
    pools = [module for module in model.children() if isinstance(module, BaseTokenPooling)]
    pools = [module for module in pools if not _is_token_norm(module)]
    if pools:
        raise ValueError(
            f"This model pools tokens by {type(pools[0]).__name__}. Remove it from the model "
            "before you prepare and train, and append it again afterwards."
        )
    for i in reversed(norms):
        del model[i]
    exponents = zip(ROLES, similarity.exponents, strict=True)
    roles = [role for role, exponent in exponents if exponent == 1]
    if roles and not inside:
        model.insert(norms[0] if norms else len(model), token_norm(*roles))


def _normalizes_inside(module: nn.Module) -> bool:
    """Whether a retriever of transformers or a route of a Router normalises tokens."""
    if isinstance(module, Router):
        return any(_is_token_norm(part) for part in module.modules())
    return isinstance(module, Transformer) and module.transformer_task == "retrieval"
