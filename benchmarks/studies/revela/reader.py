"""The language model of the Revela study, which learns to read before Revela.

It is small and learns from groups of two chunks, where the only other document has all the weight;
most of the groups are overlapping crops at first. Its embedding layer adds a rotation of the vector
of the token before ("smeared keys", Olsson et al. 2022), and its attention starts as an induction
head.
"""

from __future__ import annotations

import random

import torch
from benchmarks.studies.revela.texts import WORDS, cached, data
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from st_magnitude.revela.attention import (
    Neighbours,
    next_token_loss,
    set_in_batch_attention,
    two_streams,
)

LENGTH = 64  # tokens of a chunk
VOCABULARY = 2048
HIDDEN = 128
PAIRS = 32  # in a step
STEPS = 300


class SmearedEmbedding(nn.Embedding):
    """Adds a rotation of the vector of the token before, which tells keys what came before."""

    def __init__(self, number: int, dim: int) -> None:
        super().__init__(number, dim)
        nn.init.normal_(self.weight, std=0.05)
        self.before = nn.Linear(dim, dim, bias=False)
        nn.init.orthogonal_(self.before.weight)

    def forward(self, ids: Tensor) -> Tensor:
        own = super().forward(ids)
        return own + self.before(pad(own[:, :-1], (0, 0, 1, 0)))


def lm_tokenizer() -> PreTrainedTokenizerFast:
    """2,048 lower-case byte pairs of the training text."""
    core = Tokenizer.from_str(cached("tokenizer", _train_tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<pad>")


def _train_tokenizer() -> str:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel()
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>"], initial_alphabet=alphabet
    )
    core.train_from_iterator((text for pair in data().pairs for text in pair), trainer)
    return core.to_str()


def new_lm() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    lm = LlamaForCausalLM(config)
    embedding = SmearedEmbedding(VOCABULARY, HIDDEN)
    lm.set_input_embeddings(embedding)
    lm.tie_weights()
    with torch.no_grad():
        # an induction head: the token after the one that is like the present token
        attention, identity = lm.model.layers[0].self_attn, torch.eye(HIDDEN)
        attention.q_proj.weight.copy_(1.5 * identity)
        attention.k_proj.weight.copy_(1.5 * embedding.before.weight.T)
        attention.v_proj.weight.copy_(identity)
        attention.o_proj.weight.copy_(0.2 * identity)
    set_in_batch_attention(lm)
    return lm


def reading_lm() -> LlamaForCausalLM:
    """The language model after its own training, which knows how to read another document."""
    lm = new_lm()
    lm.load_state_dict(cached("lm", _warm))
    return lm


def _warm() -> dict[str, Tensor]:
    torch.manual_seed(0)
    lm, tokens, rng = new_lm(), lm_tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, pct_start=0.1)
    weights = torch.block_diag(*[torch.tensor([[0.0, 1.0], [1.0, 0.0]])] * PAIRS)
    for step in range(STEPS):
        crops = 0.8 * max(0.0, 1 - step / (0.7 * STEPS))  # share
        texts: list[str] = []
        for pair in rng.sample(data().pairs, PAIRS):
            words = " ".join(pair).split()
            first = rng.randrange(4, 25)
            cut = [" ".join(words[:WORDS]), " ".join(words[first : first + WORDS])]
            texts += cut if rng.random() < crops else pair
        ids, mask = _tokens(tokens, texts)
        e, h = two_streams(lm, ids, Neighbours(weights, mask, v_norm=True))
        alone, reading = (next_token_loss(lm, x, ids, mask) for x in (e, h))
        optimizer.zero_grad()
        (alone + reading).backward()
        nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return lm.state_dict()


def _tokens(tokens: PreTrainedTokenizerFast, texts: list[str]) -> tuple[Tensor, Tensor]:
    batch = tokens(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]
