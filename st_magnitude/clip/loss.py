"""AsymmetricClipLoss: open_clip's ClipLoss with a choice of the norm exponents and of the direction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from st_magnitude.clip import require_open_clip
from st_magnitude.kernel.infonce import Direction as InfoNCEDirection
from st_magnitude.kernel.infonce import infonce
from st_magnitude.kernel.terms import LearnedTemperature, Term
from st_magnitude.losses._penalties import Penalties, Regularizer
from st_magnitude.similarity import Similarity

require_open_clip()

from open_clip.loss import ClipLoss, gather_features  # noqa: E402

__all__ = ["PRESETS", "AsymmetricClipLoss", "AsymmetricCoCaLoss", "Direction"]

logger = logging.getLogger(__name__)

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

DIRECTIONS: dict[str, InfoNCEDirection] = {
    "i2t": "query_to_document",
    "t2i": "document_to_query",
    "sym": "both",
}

TEMPERATURE = 0.05  # of a Term whose logits are logit_scale · s: the default of Term

_HALF = (torch.float16, torch.bfloat16)


class AsymmetricClipLoss(ClipLoss):
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
        direction: With ``"i2t"``, the softmax of an image runs over texts, so that the norms of texts are trained; with
            ``"t2i"``, that of a text runs over images; ``"sym"`` is the mean of both.
        terms: Terms with several temperatures and Matryoshka prefixes. A term with the temperature 0.05, the default of
            Term, has the logits logit_scale · s, and others are in proportion. The loss is their weighted sum. None is
            one such term.
        regularizers: Functions of embeddings that return a scalar, or pairs of a function and a weight. A regularizer
            with a method ``of_columns`` (SIGReg) gets [images, texts], (B, D) each; others get both in one (2B, D).
        **clip_arguments: Further arguments of ClipLoss: ``local_loss``, ``gather_with_grad``, ``cache_labels``,
            ``rank``, ``world_size``.

    Raises:
        ValueError: If an argument is out of range, or ``direction`` is one-sided with ``local_loss=True`` and
            ``gather_with_grad=False``, which would train one tower only; at the first batch, if all norms are 1 on a
            side whose magnitude is kept.

    It is called like ClipLoss, also by open_clip's ``train_one_epoch``. With ``output_dict=True`` it returns
    {"contrastive_loss": ...} and an entry ``<name>_loss`` for each regularizer, else their sum. A ``logit_bias`` is a
    constant in every softmax: it is accepted, and its gradient is zero.

    On several ranks under DistributedDataParallel, loss and gradients are those of one process on the joined batch,
    with one exception: ``local_loss=True, gather_with_grad=False`` in both directions leaves out the effect of a rank's
    features on the losses of other ranks, as in ClipLoss. With neither flag, ClipLoss divides the gradient of features,
    but not that of logit_scale, by the number of ranks; this loss does not.

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
        **clip_arguments: Any,
    ) -> None:
        super().__init__(**known_arguments(ClipLoss.__init__, clip_arguments))
        if direction not in get_args(Direction):
            raise ValueError(f"direction must be one of {get_args(Direction)}, got {direction!r}.")
        self.similarity = Similarity(float(image_norm), float(text_norm))
        self.direction = direction
        self.terms = (Term(temperature=TEMPERATURE),) if terms is None else tuple(terms)
        if not self.terms:
            raise ValueError("terms is empty: leave it out for one term at logit_scale, or give e.g. [Term(dim=128)].")
        if any(isinstance(term.temperature, LearnedTemperature) for term in self.terms):
            raise ValueError("open_clip learns the temperature of all terms, logit_scale; give each term a number.")
        self.regularizers = Penalties(regularizers)
        self._checked = False
        if self.world_size > 1 and self.local_loss and not self.gather_with_grad:
            if direction != "sym":
                tower = "text" if direction == "i2t" else "image"
                raise ValueError(
                    f"local_loss=True with gather_with_grad=False and direction={direction!r} trains nothing in the "
                    f"{tower} tower: its features come from other ranks without a gradient. Set gather_with_grad=True "
                    "(--gather-with-grad)."
                )
            logger.warning(
                "local_loss=True with gather_with_grad=False leaves out the gradient of a rank's features through the "
                "losses of other ranks, as in ClipLoss. gather_with_grad=True (--gather-with-grad) includes it."
            )

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> AsymmetricClipLoss:
        """Makes the loss of a row of Table 6. Other arguments are passed by name.

        ================  =============  ==============  =====================
        name              images         texts           trained
        ================  =============  ==============  =====================
        ``norm-sym``      normalised     normalised      both: CLIP itself
        ``nonorm-sym``    raw            raw             both
        ``imgnorm-i2t``   normalised     raw             image to text
        ``nonorm-i2t``    raw            raw             image to text
        ``txtnorm-t2i``   raw            normalised      text to image
        ``nonorm-t2i``    raw            raw             text to image
        ================  =============  ==============  =====================

        Raises:
            ValueError: If there is no preset of that name.

        Example:
            >>> from st_magnitude.clip import AsymmetricClipLoss
            >>> AsymmetricClipLoss.from_preset("txtnorm-t2i").similarity
            Similarity(query=0.0, document=1.0)
        """
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; choose one of {list(PRESETS)}.")
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
            positives: Pairs that belong together, if not only image i and text i do: integer labels (B,) that are equal
                for pairs of the same content, or (B, B) booleans for image i with text j (one process only). The loss
                of an image is then the mean of -log softmax over all its texts, and that of a text over its images.
        """
        self._check_norms(image_features, text_features)
        losses = {"contrastive_loss": self._contrastive(image_features, text_features, logit_scale, positives)}
        if logit_bias is not None:
            # The gradient is zero; DistributedDataParallel wants the parameter in the graph all the same.
            losses["contrastive_loss"] = losses["contrastive_loss"] + 0.0 * logit_bias.sum()
        penalties = self.regularizers([image_features, text_features])
        losses |= {f"{name}_loss": penalty for name, penalty in penalties.items()}
        return losses if output_dict else torch.stack(list(losses.values())).sum()

    def get_logits(
        self, image_features: Tensor, text_features: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """ClipLoss' logits, per image and per text, with this similarity. The loss itself does not compute them."""
        image_features, text_features = self.similarity.query(image_features), self.similarity.document(text_features)
        logits: tuple[Tensor, Tensor] = super().get_logits(image_features, text_features, *args, **kwargs)
        return logits

    def _contrastive(
        self, images: Tensor, texts: Tensor, logit_scale: Tensor | float, positives: Tensor | None
    ) -> Tensor:
        if isinstance(logit_scale, Tensor):  # open_clip can make it of shape (1,), and of half precision
            logit_scale = logit_scale.reshape(()).to(torch.promote_types(logit_scale.dtype, torch.float32))
        terms = [Term(t.dim, t.temperature / TEMPERATURE / logit_scale, t.weight) for t in self.terms]
        positives = self._checked_positives(positives, len(images))
        all_images, all_texts = self._gathered(images, texts)  # (M, D) each
        offset = 0
        if self.local_loss and self.world_size > 1:
            offset = self.rank * len(images)
        else:
            images, texts = all_images, all_texts
        return infonce(
            images,
            all_texts,
            terms,
            self.similarity,
            DIRECTIONS[self.direction],
            offset,
            all_queries=all_images,
            own_documents=texts,
            positives=positives,
        )

    def _gathered(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of all ranks."""
        if self.world_size == 1:
            return images, texts
        if not self.local_loss and not self.gather_with_grad:
            # The loss is the same on all ranks and has the gradient of this rank's part: DDP's mean cancels the factor.
            images, texts = (x.detach() + self.world_size * (x - x.detach()) for x in (images, texts))
        options = {
            "local_loss": self.local_loss,
            "gather_with_grad": self.gather_with_grad,
            "rank": self.rank,
            "world_size": self.world_size,
            "use_horovod": getattr(self, "use_horovod", False),
        }
        gathered: tuple[Tensor, Tensor] = gather_features(images, texts, **known_arguments(gather_features, options))
        return gathered

    def _checked_positives(self, positives: Tensor | None, size: int) -> Tensor | None:
        """The positives as booleans (B, B), or as labels of all ranks (M,)."""
        if positives is None:
            return None
        if positives.dtype == torch.bool and positives.shape == (size, size):
            if self.world_size > 1:
                raise ValueError("On several ranks, positives must be integer labels (B,), which can be gathered.")
            if not (positives.any(dim=0).all() and positives.any(dim=1).all()):
                raise ValueError("Every image and every text needs a positive: a row or column of positives is False.")
            return positives
        if positives.is_floating_point() or positives.dtype == torch.bool or positives.shape != (size,):
            raise ValueError(
                f"positives must be integer labels ({size},) or booleans ({size}, {size}), got "
                f"{positives.dtype} of shape {tuple(positives.shape)}."
            )
        if self.world_size == 1:
            return positives
        parts = [torch.empty_like(positives) for _ in range(self.world_size)]
        dist.all_gather(parts, positives.contiguous())
        return torch.cat(parts)

    def _check_norms(self, images: Tensor, texts: Tensor) -> None:
        """Checks at the first batch that no side whose magnitude is kept has been normalised already."""
        if self._checked or torch.compiler.is_compiling():
            return
        for side, features, gamma in zip(("image", "text"), (images, texts), self.similarity.exponents, strict=True):
            if gamma == 1 or len(features) < 2:
                continue
            norms = torch.linalg.vector_norm(features.detach().float(), dim=-1)  # (B,)
            if (norms - 1).abs().max() < (1e-2 if features.dtype in _HALF else 1e-5):
                raise ValueError(
                    f"{type(self).__name__} with {self.similarity} learns from the norms of {side} features, but all "
                    f"{len(features)} of this batch have norm 1. Call stm.clip.unnormalize(model) before training: "
                    "it removes the normalisation from the model's forward pass."
                )
        self._checked = True

    def extra_repr(self) -> str:
        return f"{self.similarity}, direction={self.direction!r}"


class AsymmetricCoCaLoss(AsymmetricClipLoss):
    """:class:`AsymmetricClipLoss` and the caption loss of CoCa; replaces open_clip's CoCaLoss.

    Args:
        caption_loss_weight: Weight of the cross entropy of caption tokens.
        clip_loss_weight: Weight of the contrastive loss.
        pad_id: Id of the token that is not predicted.
        **options: Arguments of AsymmetricClipLoss.

    With ``output_dict=True`` it returns {"contrastive_loss": ..., "caption_loss": ...}, else a tuple of both, where the
    first includes the regularizers.
    """

    def __init__(self, caption_loss_weight: float, clip_loss_weight: float, pad_id: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.caption_loss_weight = caption_loss_weight
        self.clip_loss_weight = clip_loss_weight
        self.pad_id = pad_id

    def forward(  # type: ignore[override]
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        positives: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        """The losses of a batch; logits (B, L, V) and labels (B, L) are those of the caption tokens."""
        losses = super().forward(image_features, text_features, logit_scale, logit_bias, True, positives=positives)
        assert isinstance(losses, dict)
        losses["contrastive_loss"] = self.clip_loss_weight * losses["contrastive_loss"]
        caption = functional.cross_entropy(logits.permute(0, 2, 1), labels, ignore_index=self.pad_id)
        caption = self.caption_loss_weight * caption
        return (
            {**losses, "caption_loss": caption} if output_dict else (torch.stack(list(losses.values())).sum(), caption)
        )


def known_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Drops arguments that are off and unknown to the function, such as ``use_horovod``, which open_clip 4 lacks.

    Example:
        >>> known_arguments(lambda rank: None, {"rank": 1, "use_horovod": False})
        {'rank': 1}
    """
    known = signature(function).parameters
    return {name: value for name, value in arguments.items() if value or name in known}
