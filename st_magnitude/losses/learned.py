"""Learned temperatures of a ranking loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from st_magnitude._checks import positive
from st_magnitude.kernel.ring import num_ranks
from st_magnitude.kernel.terms import LearnedTemperature, Term
from st_magnitude.training.attach import Remembering

logger = logging.getLogger(__name__)


def with_temperature(
    terms: Iterable[Term], temperature: float | Literal["learned"] | None
) -> tuple[Term, ...]:
    """The terms of a loss with its argument ``temperature``."""
    positive("temperature", temperature, ["learned", None])
    terms = tuple(terms)
    if not terms:
        raise ValueError(
            "terms is empty; give at least one Term, such as terms=[Term(temperature=0.05)]."
        )
    if temperature is None:
        return terms
    if temperature == "learned":
        return tuple(
            replace(term, temperature=LearnedTemperature(float(term.temperature))) for term in terms
        )
    if len(terms) > 1:
        raise ValueError(
            f"temperature={temperature} is for a loss of one term, and this one has {len(terms)}."
            " Give each term its own, or temperature='learned' to learn all of them."
        )
    return (replace(terms[0], temperature=temperature),)


class Temperatures(Remembering):
    """The learned temperatures of a loss: exp(bias), one for each term with a LearnedTemperature.

    The parameter is called a bias, so trainers exempt it from weight decay. It is not saved with
    the model. :func:`~st_magnitude.attach` does for it what a Trainer does for the parameters of
    its model: the value is in the checkpoints, and all ranks take the same steps.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        super().__init__()
        self._members = [
            i for i, term in enumerate(terms) if isinstance(term.temperature, LearnedTemperature)
        ]
        self._initial = [float(terms[i].temperature) for i in self._members]
        self.bias = nn.Parameter(torch.tensor(self._initial).log())  # (L,)
        self._hook: RemovableHandle | None = None

    def start(self, model: nn.Module) -> None:
        """Starts anew, for a model whose loading of weights tells that a run resumes."""
        device = getattr(model, "device", self.bias.device)
        self.bias.data = torch.tensor(self._initial).log().to(device, self.bias.dtype)
        self.bias.grad = None
        self.is_restored = self._is_resumed = False
        if self._hook is not None:
            self._hook.remove()
        self._hook = model.register_load_state_dict_post_hook(self._note_loading)

    def _note_loading(self, _model: nn.Module, _incompatible_keys: object) -> None:
        """Weights were loaded after the loss was built: the sign of a run that resumes."""
        self._is_resumed = True

    def begin(self, who: str) -> None:
        """Refuses a run that resumes without its temperatures; warns of one for each process."""
        if self._hook is not None:
            self._hook.remove()
        if self._is_resumed and not self.is_restored:
            raise ValueError(
                "A learned temperature starts anew on the first batch of a run, but weights were"
                " loaded into the model after the loss was built. If the run resumes, call"
                " stm.attach(trainer) before train() in the first run and in the resumed one, which"
                " keeps the temperature in the checkpoints. If this is a new run, load the weights"
                " before you build the loss."
            )
        if num_ranks() > 1 and not self.is_attached:
            logger.warning(
                "The temperature of %s is learned on %d processes, which would each learn their"
                " own. Call stm.attach(trainer) before train(); in a loop of your own call"
                " loss.temperatures.before_step() before each step of the optimizer.",
                who,
                num_ranks(),
            )

    def forward(self) -> Tensor:
        self.bias.data.clamp_(min=math.log(LearnedTemperature.MINIMUM))  # as CLIP does
        return self.bias.exp()  # (L,)

    def fill(self, terms: Sequence[Term], learned: Iterable[Tensor]) -> list[Term]:
        """The terms with their present temperatures."""
        filled = list(terms)
        for i, temperature in zip(self._members, learned, strict=True):
            filled[i] = replace(terms[i], temperature=temperature)
        return filled

    @torch.no_grad()
    def before_step(self) -> None:
        """Gives all ranks the mean gradient; one that trained on another data set has none."""
        if num_ranks() == 1:
            return
        gradient = self.bias.grad
        found = self.bias.new_full((1,), float(gradient is not None))
        together = torch.cat([torch.zeros_like(self.bias) if gradient is None else gradient, found])
        dist.all_reduce(together)
        self.bias.grad = together[:-1] / num_ranks() if together[-1] > 0 else None

    def get_log(self) -> dict[str, float]:
        values = self().tolist()
        return {
            f"temperature_{i}" if len(values) > 1 else "temperature": x
            for i, x in enumerate(values, start=1)
        }

    def get_extra_state(self) -> dict[str, list[float]]:
        return {"temperatures_bias": self.bias.tolist()}

    def set_extra_state(self, state: dict[str, list[float]]) -> None:
        self.bias.data.copy_(torch.tensor(state["temperatures_bias"]))
        self.is_restored = True
