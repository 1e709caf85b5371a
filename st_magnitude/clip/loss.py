"""AsymmetricClipLoss: open_clip's ClipLoss with any norm exponents, in one direction or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor, nn

from st_magnitude._checks import one_of
from st_magnitude._distributed import agree, num_ranks
from st_magnitude.kernel.infonce import infonce
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.regularizers import Penalties, Regularizer
from st_magnitude.similarity import Similarity, at_least_float32

ClipDirection = Literal["sym", "i2t", "t2i"]

# The rows of Table 6: (image_norm, text_norm, direction)
PRESETS: dict[str, tuple[bool, bool, ClipDirection]] = {
    "norm-sym": (True, True, "sym"),
    "nonorm-sym": (False, False, "sym"),
    "imgnorm-i2t": (True, False, "i2t"),
    "nonorm-i2t": (False, False, "i2t"),
    "txtnorm-t2i": (False, True, "t2i"),
    "nonorm-t2i": (False, False, "t2i"),
}

DIRECTIONS: dict[str, tuple[Literal["query_to_doc", "doc_to_query"], ...]] = {
    "i2t": ("query_to_doc",),
    "t2i": ("doc_to_query",),
    "sym": ("query_to_doc", "doc_to_query"),
}


class AsymmetricClipLoss(nn.Module):
    """CLIP's contrastive loss with any norm exponents, in one direction or both.

    With images x_i and texts y_i of a batch, and logit_scale as open_clip learns it:

        s(x, y) = x / |x|^image_norm · y / |y|^text_norm
        i2t = mean_i [ -log softmax_j( logit_scale · s(x_i, y_j) ) at j = i ]
        t2i = mean_j [ -log softmax_i( logit_scale · s(x_i, y_j) ) at i = j ]
        sym = (i2t + t2i) / 2

    It is called like ClipLoss, with raw features, as ``stm.clip.unnormalize(model)`` gives them.
    With both sides normalised and direction "sym" it equals ClipLoss.

    Args:
        image_norm: Whether images are divided by their norm. A number in [0, 1] is its exponent.
        text_norm: The same for texts.
        direction: ``"i2t"``, which trains the norms of texts, ``"t2i"`` or ``"sym"``.
        regularizers: Functions that return a scalar, or pairs of a function and a weight. One with
            a method ``of_columns`` gets [images, texts], (B, D) each; others get one (2B, D).
        gather_across_devices: Whether the features of all processes, B of each, are candidates, as
            with open_clip's ``local_loss=True, gather_with_grad=True``.

    Raises:
        ValueError: If an argument is out of range; at the first batch, if all norms are 1 on a side
            whose magnitude is kept; on all processes, if their batches are of unequal size.

    Example:
        >>> images = torch.eye(3, 4)
        >>> texts = images * torch.tensor([[1.0], [2.0], [3.0]])
        >>> loss = AsymmetricClipLoss.from_preset("imgnorm-i2t")
        >>> round(loss(images, texts, logit_scale=torch.tensor(2.0)).item(), 4)
        0.0935

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.5, Table 6 and App. F.2;
    several positives: Yang et al. 2022, arXiv 2204.03610, Eq. 2 and 3.
    """

    def __init__(
        self,
        image_norm: bool | float = True,
        text_norm: bool | float = True,
        direction: ClipDirection = "sym",
        *,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__()
        one_of("direction", direction, tuple(DIRECTIONS))
        self.similarity = Similarity(float(image_norm), float(text_norm))
        self.direction = direction
        self.regularizers = Penalties(regularizers)
        self.gather_across_devices = gather_across_devices
        self._checked = False

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        gather_across_devices: bool = False,
    ) -> AsymmetricClipLoss:
        """Makes the loss of a row of Table 6, by a name in ``PRESETS``; ``"norm-sym"`` is CLIP."""
        one_of("name", name, tuple(PRESETS))
        return cls(
            *PRESETS[name], regularizers=regularizers, gather_across_devices=gather_across_devices
        )

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
        """The loss of a batch of raw image and text features, (B, D) each.

        Args:
            logit_scale: Factor of s after exp(), a scalar or one-element tensor.
            logit_bias: A constant in every softmax, whose gradient is zero.
            output_dict: Whether to return "contrastive_loss" and a ``<name>_loss`` for each
                regularizer instead of their sum.
            positives: Integer labels (B,), equal for pairs of the same content. The loss of a row
                is then the mean of -log softmax over all texts, or images, with its label.
        """
        loss = self._contrastive(image_features, text_features, logit_scale, positives)
        if logit_bias is not None:
            # DistributedDataParallel wants the parameter in the graph, though its gradient is zero.
            loss = loss + 0.0 * logit_bias.sum()
        losses = {"contrastive_loss": loss}
        for name, penalty in self.regularizers([image_features, text_features]).items():
            losses[f"{name}_loss"] = penalty
        return losses if output_dict else torch.stack(list(losses.values())).sum()

    def _contrastive(
        self, images: Tensor, texts: Tensor, logit_scale: Tensor | float, positives: Tensor | None
    ) -> Tensor:
        logit_scale = at_least_float32(logit_scale).reshape(())
        all_images = images
        all_texts = texts
        offset = 0
        if self.gather_across_devices and num_ranks() > 1:
            sizes = agree(images.device, lambda: self._checked_sizes(images, texts), 2)
            if len({number for pair in sizes for number in pair}) > 1:
                raise ValueError(
                    "Batches of unequal size cannot be gathered; the processes have (images, "
                    f"texts) {sizes}. Drop the last, incomplete batch of an epoch."
                )
            # the rows of this process against the columns of all, (M, D) each
            all_images = all_gather_with_grad(images)
            all_texts = all_gather_with_grad(texts)
            offset = get_rank() * len(images)
            positives = None if positives is None else all_gather(positives)
        else:
            self._checked_sizes(images, texts)
        return infonce(
            images,
            all_texts,
            [Term(temperature=1 / logit_scale)],
            self.similarity,
            DIRECTIONS[self.direction],
            offset,
            partition_mode="per_direction",
            all_queries=all_images,
            positives=positives,
        )

    def _checked_sizes(self, images: Tensor, texts: Tensor) -> tuple[int, int]:
        """The numbers of images and texts, after a check that the first batch is not normalised."""
        sizes = len(images), len(texts)
        if self._checked or min(sizes) < 2 or torch.compiler.is_compiling():
            return sizes
        gamma_image, gamma_text = self.similarity.exponents
        for side, features, gamma in (("image", images, gamma_image), ("text", texts, gamma_text)):
            norms = torch.linalg.vector_norm(features.detach().float(), dim=-1)  # (B,)
            is_half = features.dtype in (torch.float16, torch.bfloat16)
            if gamma != 1 and (norms - 1).abs().max() < (1e-2 if is_half else 1e-5):
                raise ValueError(
                    f"AsymmetricClipLoss with {self.similarity} learns from the norms of {side} "
                    f"features, but all {len(features)} of this batch have norm 1. Call "
                    "stm.clip.unnormalize(model) before training."
                )
        self._checked = True
        return sizes
