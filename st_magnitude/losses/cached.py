"""Gradient caching of a ranking loss (GradCache, arXiv 2101.06983): what CachedLossMixin calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from torch import Tensor

from st_magnitude._upstream import minibatch_of
from st_magnitude.losses.regularizers import Penalties
from st_magnitude.losses.texts import Texts
from st_magnitude.surgery.raw import raw_features


class CachesGradients(CachedLossMixin):
    """The part of a loss that embeds mini-batch by mini-batch."""

    regularizers: Penalties

    if TYPE_CHECKING:

        def losses(
            self, embeddings: list[Tensor], learned: list[Tensor], texts: Texts
        ) -> dict[str, Tensor]: ...

        def _learned(self) -> list[Tensor]: ...

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Raw embeddings of a mini-batch, and what the loss learns as more columns: (n, D + L).

        The gradient of these numbers is therefore cached, scaled, accumulated and synchronised with
        the encoder's.
        """
        features = minibatch_of(sentence_feature, begin, end)
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            random_state = RandContext(*features.values()) if copy_random_state else None
            raw = raw_features(self.model, features)["sentence_embedding"]  # (n, D)
            if learned := self._learned():
                raw = torch.cat([raw, torch.stack(learned).expand(len(raw), -1)], dim=1)
            return raw, random_state

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        labels: Tensor | Texts | None = None,
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss of the whole batch, from the embeddings of its mini-batches."""
        width = reps[0][0].shape[1] - len(self._learned())
        texts = labels if isinstance(labels, Texts) else Texts()
        embeddings = [torch.cat(column)[:, :width] for column in reps]
        losses = self.losses(embeddings, list(reps[0][0][0, width:]), texts)
        self._last = {name: loss.detach() for name, loss in losses.items()}
        total = torch.stack(list(losses.values())).sum()
        if with_backward:
            total.backward()
            total = total.detach()
        return total

    def _named(self, total: Tensor) -> Tensor | dict[str, Tensor]:
        """Splits the total of a cached step, whose gradient belongs to one tensor, by terms."""
        if not self.regularizers:
            return total
        others = {name: loss for name, loss in self._last.items() if name != "infonce"}
        return {"infonce": total - sum(others.values()), **others}
