"""DocumentPrior: how often each text is drawn into a batch, which corrects in-batch negatives."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude._checks import InputError, positive
from st_magnitude.losses.keys import (
    BatchRule,
    Features,
    Texts,
    text_keys,
    tokens_of,
    vocabulary_of,
)
from st_magnitude.losses.ranks import Gathered

logger = logging.getLogger(__name__)


class DocumentPrior(BatchRule):
    """The sampling probabilities q of documents, ``prior=`` of a ranking loss.

    With in-batch negatives, which are drawn as often as they occur in the training pairs, a softmax
    learns p(d|q) / q(d) (docs/losses.md). With

        logits(q_i, d_j) = s(q_i, d_j) / tau - log q(d_j),
        q(d) = (n(d) + smoothing) / (N + smoothing · K)

    it learns p(d|q). n(d) is how often the text d occurs among N, of which K are different.

    Columns of explicit negatives are corrected by how often a text occurs as a negative, if there
    are such counts. Queries in a softmax (``directions``) count as drawn once in N pairs.

    Two texts are the same if the model gets the same tokens: make the prior with the
    ``max_seq_length`` of the training. Checkpoints do not contain it; build it again for a run that
    resumes. Several data sets have a loss and a prior each.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> import st_magnitude as stm
        >>> tokenizer = Tokenizer(models.WordLevel({"?": 0, "tea": 1, "maps": 2}, unk_token="?"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> table = StaticEmbedding(tokenizer, embedding_dim=8)
        >>> model = SentenceTransformer(modules=[table], device="cpu")
        >>> positives = ["tea", "tea", "tea", "maps"]  # of four training pairs
        >>> prior = stm.DocumentPrior.from_texts(model, positives, smoothing=0.5)
        >>> [log_q] = prior.log_q([model.preprocess(["maps", "tea", "maps tea"])])
        >>> log_q.exp()  # 1.5, 3.5 and, for an unknown text, 0.5 of 5
        tensor([0.3000, 0.7000, 0.1000])
        >>> loss = stm.CosineRankingLoss(model, prior=prior)

    Source: Yi et al. 2019, Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
        Recommendations, RecSys, Eq. 3 to 5.
    """

    def __init__(
        self,
        positives: _Frequencies,
        negatives: _Frequencies | None,
        smoothing: float,
        vocabulary: int,
    ) -> None:
        self._positives = positives
        self._negatives = negatives
        self._smoothing = smoothing
        self._vocabulary = vocabulary
        self.start()

    @classmethod
    def from_texts(
        cls,
        model: SentenceTransformer,
        positives: Iterable[str] | Mapping[str, float],
        negatives: Iterable[str] | Mapping[str, float] | None = None,
        *,
        smoothing: float = 1.0,
        prompt: str | None = None,
        task: str | None = None,
    ) -> DocumentPrior:
        """Counts the texts of the training data.

        Args:
            model: The model to train, whose tokenizer decides which texts are the same.
            positives: The positives of all training pairs, such as ``dataset["positive"]``; or a
                dict of their counts, or of numbers in proportion to them, such as clicks.
            negatives: The same for columns of negatives; None: as frequent as among positives.
            smoothing: Number above 0 that is added to every count, and the count of a text that
                does not occur.
            prompt: The prompt of the documents, if the Trainer has ``prompts``.
            task: Their task, if the Trainer has a ``router_mapping``.

        Raises:
            ValueError: If there are no texts, a number is out of range, or the model has no tokens.
        """
        positive("smoothing", smoothing)
        features = dict(model.preprocess([""], prompt, task=task))
        if tokens_of(features) is None:
            raise InputError(
                "A DocumentPrior tells texts apart by their token ids, and this model has none."
            )
        vocabulary = vocabulary_of(features | {"task": task}, model)
        tables = []
        for name, texts in (("positives", positives), ("negatives", negatives)):
            if texts is None:
                continue
            counts: Mapping[str, float] = texts if isinstance(texts, Mapping) else Counter(texts)
            if not counts:
                raise InputError(
                    f"There are no {name}; a DocumentPrior counts the texts of the training data."
                )
            if wrong := [text for text, count in counts.items() if not 0 <= count < math.inf]:
                raise InputError(
                    f"Counts must be 0 or more; got {counts[wrong[0]]} for {wrong[0]!r} of the"
                    f" {name}."
                )
            given = list(counts)
            parts = [given[start : start + 1024] for start in range(0, len(given), 1024)]
            read = (model.preprocess(part, prompt, task=task) for part in parts)
            keys = torch.cat([text_keys(x, vocabulary=vocabulary).cpu() for x in read])
            numbers = torch.tensor(list(counts.values()), dtype=torch.float64)
            tables.append(_Frequencies(keys, numbers, smoothing))
        return cls(tables[0], tables[1] if len(tables) > 1 else None, smoothing, vocabulary)

    def start(self) -> None:
        self._has_begun = False

    def log_q(self, documents: Sequence[Features]) -> list[Tensor]:
        """log q of the texts of each column of documents, the positives first, (B,) each."""
        return self._log_q([text_keys(x, vocabulary=self._vocabulary) for x in documents])

    def _log_q(self, keys: Sequence[Tensor]) -> list[Tensor]:
        first, *others = keys
        log_q = [self._positives(first), *map(self._negatives or self._positives, others)]
        if not self._has_begun:
            self._has_begun = True
            unknown = log_q[0] == log_q[0].new_full((), self._positives.floor)
            if (number := int(unknown.sum())) > len(unknown) / 10:
                logger.warning(
                    f"The prior does not contain {number} of the {len(unknown)} positives of the"
                    " first batch, and takes them for the rarest. Make it from the same data, with"
                    " the max_seq_length of the training (also max_length of the training"
                    " arguments) and with the prompt of the documents:"
                    " DocumentPrior.from_texts(model, texts, prompt=...)."
                )
        return log_q

    def fields(self, texts: Texts, ranks: Gathered) -> dict[str, Any]:
        """``log_q`` and ``log_q_queries``."""
        if not texts.keys:
            raise InputError(
                "A DocumentPrior needs the texts of a batch, and compute_loss_from_embeddings gets"
                " embeddings alone. Call the loss with the features of the batch. A loss of"
                " sentence-transformers around it does not: give its other terms to this one as"
                " regularizers=."
            )
        of_documents = ranks.join_columns(self._log_q(texts.keys[1:]))
        of_a_query = -math.log(max(1.0, self._positives.occurrences))
        of_queries = of_documents.new_full((ranks.num_columns,), of_a_query)
        return {"log_q": of_documents, "log_q_queries": of_queries}

    def get_config_dict(self) -> dict[str, object]:
        negatives = None if self._negatives is None else len(self._negatives.keys)
        texts = len(self._positives.keys)
        found = {"texts": texts, "negatives": negatives, "smoothing": self._smoothing}
        return {"prior": found}


class _Frequencies:
    """log q by the key of a text: sorted keys (K,), and their log q (K,)."""

    def __init__(self, keys: Tensor, counts: Tensor, smoothing: float) -> None:
        self.keys, texts = keys.unique(return_inverse=True)  # texts may have the same tokens
        counts = counts.new_zeros(len(self.keys)).index_add_(0, texts, counts)
        self.occurrences = counts.sum().item()
        log_total = math.log(self.occurrences + smoothing * len(self.keys))
        self.values = ((counts + smoothing).log() - log_total).float()
        self.floor = math.log(smoothing) - log_total

    def __call__(self, keys: Tensor) -> Tensor:
        if self.keys.device != keys.device:
            self.keys, self.values = self.keys.to(keys.device), self.values.to(keys.device)
        place = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return torch.where(self.keys[place] == keys, self.values[place], self.floor)
