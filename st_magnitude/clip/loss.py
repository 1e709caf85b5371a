"""AsymmetricClipLoss: open_clip's ClipLoss with a choice of the norm exponents and of the direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor, nn

from st_magnitude._checks import one_of
from st_magnitude.kernel import batch
from st_magnitude.kernel.infonce import infonce
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.regularizers import Penalties, Regularizer
from st_magnitude.similarity import Similarity

__all__ = ["PRESETS", "AsymmetricClipLoss", "Direction"]

Direction = Literal["sym", "i2t", "t2i"]

# The rows of Table 6: (image_norm, text_norm, direction)
PRESETS: dict[str, tuple[bool, bool, Direction]] = {
    "norm-sym": (True, True, "sym"),
    "nonorm-sym": (False, False, "sym"),
    "imgnorm-i2t": (True, False, "i2t"),
    "nonorm-i2t": (False, False, "i2t"),
    "txtnorm-t2i": (False, True, "t2i"),
    "nonorm-t2i": (False, False, "t2i"),
}

DIRECTIONS: dict[str, tuple[batch.Direction, ...]] = {
    "i2t": ("query_to_doc",),
    "t2i": ("doc_to_query",),
    "sym": ("query_to_doc", "doc_to_query"),
}

TEMPERATURE = 0.05  # of a Term whose logits are logit_scale · s: the default of Term


class AsymmetricClipLoss(nn.Module):
    """CLIP's contrastive loss with any norm exponents, in one direction or both; replaces open_clip's ClipLoss.

    With images x_i and texts y_i of a batch, and logit_scale as open_clip learns it:

        s(x, y) = x / |x|^image_norm · y / |y|^text_norm
        i2t = mean_i [ -log softmax_j( logit_scale · s(x_i, y_j) ) at j = i ]
        t2i = mean_j [ -log softmax_i( logit_scale · s(x_i, y_j) ) at i = j ]
        sym = (i2t + t2i) / 2

    It takes raw features, as ``stm.clip.unnormalize(model)`` gives them. With both sides normalised and direction
    "sym" it equals ClipLoss, whether or not the model normalises. :func:`~st_magnitude.infonce` computes it, without
    a B x B matrix of logits, and in float32 under autocast as well.

    Args:
        image_norm: Whether images are divided by their norm. A number in [0, 1] is the exponent of the norm.
        text_norm: Whether texts are divided by their norm. A number in [0, 1] is the exponent of the norm.
        direction: With ``"i2t"``, the softmax of an image runs over texts, which trains the norms of texts; with
            ``"t2i"``, the softmax of a text runs over images; ``"sym"`` is the mean of both.
        terms: Terms with several temperatures and Matryoshka prefixes. A term with the temperature 0.05, the default of
            Term, has the logits logit_scale · s, and others are in proportion. The loss is their weighted sum. None is
            one such term.
        regularizers: Functions of embeddings that return a scalar, or pairs of a function and a weight. A regularizer
            with a method ``of_columns`` gets [images, texts], (B, D) each; others get both in one (2B, D).
        gather_across_devices: Whether the features of all processes are candidates. Under DistributedDataParallel,
            the gradient is then the gradient of one process on the joined batch, as with open_clip's
            ``local_loss=True, gather_with_grad=True``.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if all norms are 1 on a side whose magnitude is
            kept.

    It is called like ClipLoss, also by open_clip's ``train_one_epoch``. With ``output_dict=True`` it returns
    {"contrastive_loss": ...} and an entry ``<name>_loss`` for each regularizer, else their sum. A ``logit_bias`` is a
    constant in every softmax: it is accepted, and its gradient is zero.

    Example:
        >>> import torch
        >>> from st_magnitude.clip import AsymmetricClipLoss
        >>> images, texts = torch.eye(3, 4), torch.eye(3, 4) * torch.tensor([[1.0], [2.0], [3.0]])
        >>> loss = AsymmetricClipLoss.from_preset("imgnorm-i2t")
        >>> round(loss(images, texts, logit_scale=torch.tensor(2.0)).item(), 4)
        0.0935

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.5, Table 6 and App. F.2; several positives:
    Yang et al. 2022, arXiv 2204.03610, Eq. 2 and 3.
    """

    def __init__(
        self,
        image_norm: bool | float = True,
        text_norm: bool | float = True,
        direction: Direction = "sym",
        *,
        terms: Sequence[Term] | None = None,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        one_of("direction", direction, tuple(DIRECTIONS))
        self.similarity = Similarity(float(image_norm), float(text_norm))
        self.direction = direction
        self.terms = (Term(temperature=TEMPERATURE),) if terms is None else tuple(terms)
        self.regularizers = Penalties(regularizers)
        self.gather_across_devices = gather_across_devices
        self._checked = False

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> AsymmetricClipLoss:
        """Makes the loss of a row of Table 6, by a name in ``PRESETS``; ``"norm-sym"`` is CLIP itself.

        Example:
            >>> from st_magnitude.clip import AsymmetricClipLoss
            >>> AsymmetricClipLoss.from_preset("txtnorm-t2i").similarity
            Similarity(query=0.0, document=1.0)
        """
        one_of("name", name, tuple(PRESETS))
        image_norm, text_norm, direction = PRESETS[name]
        return cls(**{"image_norm": image_norm, "text_norm": text_norm, "direction": direction, **overrides})

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        positives: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of a batch.

        Args:
            image_features: Raw image features, (B, D).
            text_features: Raw text features, (B, D). Row i belongs to image i.
            logit_scale: Factor of s after exp(), a scalar or one-element tensor.
            logit_bias: A constant in every softmax.
            output_dict: Whether to return the terms by name instead of their sum.
            positives: Integer labels (B,) that are equal for pairs of the same content. The loss of an image is then
                the mean of -log softmax over all texts with its label, and likewise for a text.
        """
        self._check_norms(image_features, text_features)
        losses = {"contrastive_loss": self._contrastive(image_features, text_features, logit_scale, positives)}
        if logit_bias is not None:
            # The gradient is zero; DistributedDataParallel wants the parameter in the graph all the same.
            losses["contrastive_loss"] = losses["contrastive_loss"] + 0.0 * logit_bias.sum()
        penalties = self.regularizers([image_features, text_features])
        losses |= {f"{name}_loss": penalty for name, penalty in penalties.items()}
        return losses if output_dict else torch.stack(list(losses.values())).sum()

    def _contrastive(
        self, images: Tensor, texts: Tensor, logit_scale: Tensor | float, positives: Tensor | None
    ) -> Tensor:
        if isinstance(logit_scale, Tensor):  # open_clip can make it of shape (1,), and of half precision
            logit_scale = logit_scale.reshape(()).to(torch.promote_types(logit_scale.dtype, torch.float32))
        terms = [Term(t.dim, t.temperature / TEMPERATURE / logit_scale, t.weight) for t in self.terms]
        all_images, all_texts, offset = images, texts, 0
        if self.gather_across_devices:  # the rows of this process against the columns of all: (M, D) each
            all_images, all_texts = all_gather_with_grad(images), all_gather_with_grad(texts)
            offset = get_rank() * len(images)
            positives = None if positives is None else all_gather(positives)
        return infonce(
            images,
            all_texts,
            terms,
            self.similarity,
            DIRECTIONS[self.direction],
            offset,
            partition_mode="per_direction",
            all_queries=all_images,
            own_documents=texts,
            positives=positives,
        )

    def _check_norms(self, images: Tensor, texts: Tensor) -> None:
        """Checks at the first batch that no side whose magnitude is kept has been normalised already."""
        if self._checked or torch.compiler.is_compiling():
            return
        for side, features, gamma in zip(("image", "text"), (images, texts), self.similarity.exponents, strict=True):
            if gamma == 1 or len(features) < 2:
                continue
            norms = torch.linalg.vector_norm(features.detach().float(), dim=-1)  # (B,)
            is_half = features.dtype in (torch.float16, torch.bfloat16)
            if (norms - 1).abs().max() < (1e-2 if is_half else 1e-5):
                raise ValueError(
                    f"{type(self).__name__} with {self.similarity} learns from the norms of {side} features, but all "
                    f"{len(features)} of this batch have norm 1. Call stm.clip.unnormalize(model) before training: "
                    "it removes the normalisation from the model's forward pass."
                )
        self._checked = True

    def extra_repr(self) -> str:
        return f"{self.similarity}, direction={self.direction!r}"
