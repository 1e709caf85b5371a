"""ExponentNorm, the module that saved models can contain."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

from st_magnitude.similarity import Similarity

__all__ = ["ExponentNorm"]

logger = logging.getLogger(__name__)

HUB_OPTIONS = ("token", "cache_folder", "revision", "local_files_only")  # of the files of a model


class ExponentNorm(Module):
    """Divides embeddings by a power of their norm, for queries one and for documents another.

    It is the last module of a model whose exponents were learned
    (:class:`~st_magnitude.LearnableNormLoss`) or chosen between 0 and 1
    (:func:`~st_magnitude.calibrate_exponent`). Inner products of its outputs are the scores of
    ``Similarity(gamma_query, gamma_document)``, so the model's ``similarity_fn_name`` is ``"dot"``.

    It treats text without a role (plain ``encode``) as a document. It leaves its input in
    ``features["raw_embedding"]``, where losses take it from. With ``truncate_dim`` a prefix is
    divided by a power of its own norm, as losses train prefixes and evaluators score them.

    Args:
        gamma_query: Exponent of the query norm in [0, 1].
        gamma_document: Exponent of the document norm in [0, 1].
        learnable: Whether the exponents are trained. They are stored as ``gamma = sigmoid(bias)``
            (arXiv 2602.09229, Eq. 7); the parameters are called biases because trainers exempt
            those from weight decay. An exponent of exactly 0 or 1 lies at the end of the sigmoid
            and cannot learn. :meth:`learn` makes exponents faster than the other weights.

    :func:`st_magnitude.load` loads a model with this module, and so does
    ``trust_remote_code=True``.

    Example:
        >>> import torch
        >>> from st_magnitude.modules import ExponentNorm
        >>> norm = ExponentNorm(gamma_query=1.0, gamma_document=0.5)
        >>> embedding = torch.tensor([[0.0, 4.0]])
        >>> norm({"sentence_embedding": embedding}, task="query")["sentence_embedding"]
        tensor([[0., 1.]])
        >>> norm({"sentence_embedding": embedding}, task="document")["sentence_embedding"]
        tensor([[0., 2.]])
    """

    forward_kwargs = {"task"}  # noqa: RUF012
    config_keys: list[str] = ["gamma_query", "gamma_document", "learnable"]  # noqa: RUF012

    def __init__(
        self, gamma_query: float = 0.5, gamma_document: float = 0.5, learnable: bool = False
    ) -> None:
        super().__init__()
        Similarity(gamma_query, gamma_document)  # checks the range
        self.learnable = learnable
        self.gain = 1.0
        self._was_saved = False
        self.scaled_query_bias = nn.Parameter(_logit(gamma_query), requires_grad=learnable)
        self.scaled_document_bias = nn.Parameter(_logit(gamma_document), requires_grad=learnable)
        self.register_state_dict_post_hook(_write_biases)
        self.register_load_state_dict_pre_hook(_read_biases)

    def learn(self, gain: float) -> None:
        """Lets the exponents learn, at ``gain`` times the learning rate of the optimizer.

        A parameter is bias / gain, and has the gradient of the bias: an optimizer moves it by its
        learning rate, and the bias by ``gain`` times as much. The exponents stay what they are,
        and a state dict holds the biases, whatever the gain.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(self.gain / gain)
        self.gain = gain
        self.learnable = True
        self.requires_grad_()

    @property
    def similarity(self) -> Similarity:
        """The similarity of the raw embeddings at the current exponents, differentiable in them."""
        return Similarity(*self._exponents())

    def _exponents(self) -> Tensor:
        """Of queries and documents, (2,)."""
        scaled = torch.stack([self.scaled_query_bias, self.scaled_document_bias])
        if self.gain == 1:  # a bias may be infinite
            return torch.sigmoid(scaled)
        fixed = scaled.detach()
        return torch.sigmoid(self.gain * fixed + (scaled - fixed))

    @property
    def gamma_query(self) -> float:
        return self.similarity.exponents[0]

    @property
    def gamma_document(self) -> float:
        return self.similarity.exponents[1]

    def forward(
        self, features: dict[str, Any], task: str | None = None, **kwargs: object
    ) -> dict[str, Any]:
        raw: Tensor = features["sentence_embedding"]
        role = task or features.get("task")
        # Losses take the exponents from the module. DistributedDataParallel (the Trainer's, with
        # find_unused_parameters=True) believes that they are used only if both are in the output.
        exponents = self._exponents()
        output = features | {
            "raw_embedding": raw,
            "exponents": exponents.expand(len(raw), 2),
            "sentence_embedding": _divided(raw, Similarity(*exponents), role),
        }
        return output if self.training else _CutFirst(output | {"task": role})

    def __repr__(self) -> str:  # which sentence-transformers prints on the model card
        return f"{super().__repr__()}  # load the model with st_magnitude.load"

    def save(
        self, output_path: str, *args: object, safe_serialization: bool = True, **kwargs: object
    ) -> None:
        if not self._was_saved:
            self._was_saved = True
            logger.warning(
                "The model ends in ExponentNorm of st_magnitude: load it with st_magnitude.load."
                " For stock modules, which load anywhere, round its document exponent of"
                f" {self.gamma_document:.3g}: calibrate_exponent(model, dev) says to which end and"
                " what it costs."
            )
        self.save_config(output_path)
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(  # type: ignore[override]
        cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any
    ) -> ExponentNorm:
        place = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        place["subfolder"] = subfolder
        module = super().load(model_name_or_path, **place)
        return cls.load_torch_weights(model_name_or_path, model=module, **place)


class _CutFirst(dict[str, Any]):
    """Features in which a prefix of the divided embedding becomes that of the raw one, divided.

    ``encode`` applies ``truncate_dim`` after all modules, and no module is told of it:
    ``features["sentence_embedding"] = features["sentence_embedding"][..., :truncate_dim]``. All
    that is needed is among the items: accelerate, which converts the output of a model in half
    precision, makes a new dict of the converted ones.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "sentence_embedding" and isinstance(value, Tensor):
            whole = self.get(name, value)
            if value.data_ptr() == whole.data_ptr() and value.shape[-1] < whole.shape[-1]:
                prefix = self["raw_embedding"][..., : value.shape[-1]]
                value = _divided(prefix, Similarity(*self["exponents"][0]), self["task"])
        super().__setitem__(name, value)


def _divided(raw: Tensor, similarity: Similarity, role: str | None) -> Tensor:
    """Raw embeddings (n, D) as they enter the inner product, in their own precision."""
    side = similarity.query if role == "query" else similarity.document
    return side(raw).to(raw.dtype)


def _write_biases(
    norm: ExponentNorm, state: dict[str, Any], prefix: str, _metadata: object
) -> None:
    for name in ("query_bias", "document_bias"):
        state[prefix + name] = norm.gain * state.pop(f"{prefix}scaled_{name}")


def _read_biases(norm: ExponentNorm, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name in ("query_bias", "document_bias"):
        if prefix + name in state:
            state[f"{prefix}scaled_{name}"] = state.pop(prefix + name) / norm.gain


def _logit(gamma: float) -> Tensor:
    if gamma in (0.0, 1.0):
        return torch.tensor(math.inf if gamma else -math.inf)
    return torch.tensor(math.log(gamma / (1 - gamma)))
