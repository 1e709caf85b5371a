"""GroupLoss: the base class of RevelaLoss and ReplugLoss."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from st_magnitude.corpus.chunking import looks_like_code
from st_magnitude.revela.groups import GroupCollator, split_batch
from st_magnitude.revela.models import tokenizer_of
from st_magnitude.similarity import COSINE
from st_magnitude.surgery.normalize import set_similarity_function
from st_magnitude.surgery.raw import unwrapped

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CITATION", "ONE_HOT", "GroupLoss"]

logger = logging.getLogger(__name__)

ONE_HOT = 0.999  # a row whose largest weight exceeds this value passes almost no gradient

CITATION = """
@inproceedings{cai2026revela,
    title={Revela: Dense Retriever Learning via Language Modeling},
    author={Fengyu Cai and Tong Chen and Xinran Zhao and Sihao Chen and Hongming Zhang and Sherry Tongshuang Wu and
        Iryna Gurevych and Heinz Koeppl},
    booktitle={The Fourteenth International Conference on Learning Representations},
    year={2026},
    eprint={2506.16552},
    archivePrefix={arXiv}
}
"""


class GroupLoss(nn.Module):
    """A loss of a retriever and a language model on groups of documents; RevelaLoss documents the arguments.

    The retriever gets the prefixes as prompts and cosine as its similarity, unless an argument is refused. ``logs`` has
    the figures of the last batch, whose means RevelaTrainer logs.
    """

    citation: ClassVar[str] = CITATION
    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(
        self,
        model: SentenceTransformer,
        lm: nn.Module,
        lm_tokenizer: PreTrainedTokenizerBase | None,
        prefixes: tuple[str, str],
        query_part: Literal["half", "full"],
        max_length: int,
    ) -> None:
        super().__init__()
        if lm_tokenizer is None:
            lm_tokenizer = tokenizer_of(lm)
        self.collator = GroupCollator(
            model.preprocess, lm_tokenizer, prefixes=prefixes, query_part=query_part, max_length=max_length
        )
        self.model = model
        self.lm = lm
        model.prompts.update(query=prefixes[0], document=prefixes[1])
        set_similarity_function(model, COSINE)
        self.logs: dict[str, Tensor] = {}
        self._warned: set[str] = set()

    @classmethod
    def preset(cls, name: str, model: SentenceTransformer, lm: nn.Module, *args: Any, **overrides: Any) -> Self:
        """The settings of a publication: ``"paper"``."""
        if name not in cls.presets:
            raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(sorted(cls.presets))}.")
        return cls(model, lm, *args, **(cls.presets[name] | overrides))

    def get_config_dict(self) -> dict[str, Any]:
        """Settings of this loss for the model card."""
        return {
            "lm": getattr(getattr(self.lm, "config", None), "name_or_path", "") or type(self.lm).__name__,
            "query_part": self.collator.query_part,
            "prefixes": list(self.collator.prefixes),
            "max_length": self.collator.max_length,
        }

    def _features(self, sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Features of query, passage and language model: those of the collator, or made from those of fit()."""
        features = list(sentence_features)
        return features if len(features) == 3 and "group" in features[2] else self._decode(features)

    def _decode(self, features: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Features from those of fit(), which have one column of tokens for each place in the group, (n, L) each."""
        if len(features) < 2 or any(column["input_ids"].ndim != 2 for column in features):
            raise ValueError(
                f"{type(self).__name__} needs whole groups. Train with RevelaTrainer, or give the Trainer "
                "data_collator=loss.collator and rows from build_groups; in fit(), each InputExample holds the texts "
                "of one group (at least two), and the retriever has a tokenizer with padding."
            )
        model: Any = unwrapped(self.model)
        columns = [model.tokenizer.batch_decode(column["input_ids"], skip_special_tokens=True) for column in features]
        if model.tokenizer.decode(model.tokenizer("A b")["input_ids"], skip_special_tokens=True) != "A b":
            self._warn(
                "decoded",
                "The language model gets texts as the retriever's tokenizer decodes them, perhaps without capitals. "
                "Use RevelaTrainer or data_collator=loss.collator to give it the texts themselves.",
            )
        groups = [list(row) for row in zip(*columns, strict=True)]
        batch = self.collator.texts_to_batch(groups, [[looks_like_code(text) for text in row] for row in groups])
        return split_batch(batch, features[0]["input_ids"].device)

    def _warn(self, name: str, message: str) -> None:
        """Logs a warning, once for each name."""
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(message)
