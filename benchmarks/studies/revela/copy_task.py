"""The copy task: pairs of documents with shared words that only the other document of the pair
predicts.

A document is 8 words of its pair, from a large vocabulary, then 8 words of noise, from a small one.
The words of the pair have the same places in both documents, so a language model that attends to
the right document can copy them. The retriever has to learn which words count.
"""

from __future__ import annotations

import random

import torch
from benchmarks.studies.models import table_of
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from st_magnitude.revela.attention import (
    Neighbours,
    next_token_loss,
    set_in_batch_attention,
    two_streams,
)
from st_magnitude.revela.groups import Group
from st_magnitude.revela.loss import RevelaLoss, group_similarity

PAIRS = 4
GROUPS = 4  # in a step of the language model's own training
SHARED = [f"s{i}" for i in range(32)]
NOISE = [f"n{i}" for i in range(16)]


def group(rng: random.Random) -> list[str]:
    """A group of 2 PAIRS documents, of which 2k and 2k + 1 are partners."""
    documents = []
    for _ in range(PAIRS):
        shared = rng.choices(SHARED, k=8)
        documents += [" ".join(shared + rng.choices(NOISE, k=8)) for _ in range(2)]
    return documents


def row_of(documents: list[str]) -> Group:
    """A row to train on, whose queries are whole documents, as those of code are."""
    return {"chunks": documents, "code": [True] * len(documents)}


def partners() -> torch.Tensor:
    """(2 PAIRS, 2 PAIRS), 1 where two documents are partners."""
    return torch.eye(PAIRS).repeat_interleave(2, 0).repeat_interleave(2, 1) - torch.eye(2 * PAIRS)


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", *SHARED, *NOISE]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


def retriever(seed: int = 0) -> SentenceTransformer:
    """The mean of random word vectors; the vectors of noise words have large norms."""
    torch.manual_seed(seed)
    words = tokenizer().backend_tokenizer
    table = 0.1 * torch.randn(words.get_vocab_size(), 32)
    table[[words.token_to_id(word) for word in NOISE]] *= 3
    return table_of(words, table)


def decoder() -> PreTrainedModel:
    """A small one for the words of this task; its biases make attention by position easy."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def warmed_lm(seed: int, v_norm: bool, max_steps: int = 2000) -> PreTrainedModel | None:
    """A small decoder that was trained to copy from the partner, with Sim given.

    None if it did not learn that.
    """
    torch.manual_seed(seed)
    tokens = tokenizer()
    lm = decoder()
    set_in_batch_attention(lm)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    rng = random.Random(seed)
    given = torch.block_diag(*[partners()] * GROUPS)
    for _ in range(max_steps):
        batch = tokens([text for _ in range(GROUPS) for text in group(rng)], return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        _, h = two_streams(lm, ids, Neighbours(given, v_norm=v_norm))
        loss = next_token_loss(lm, h, ids, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 1.6:  # nats: 3.1 without copying, 1.5 with
            return lm
    return None


@torch.no_grad()
def partner_mass(loss: RevelaLoss, num_groups: int = 30, seed: int = 10_000) -> float:
    """Mean share of Sim on the partner, over new groups; 1 / (2 PAIRS - 1) by chance."""
    rng, total = random.Random(seed), 0.0
    for _ in range(num_groups):
        query, passage, text = loss.collator.features([row_of(group(rng))])
        embedded = [loss.model(features)["sentence_embedding"] for features in (query, passage)]
        similarity = group_similarity(*embedded, text["group"], loss.temperature)
        total += float((similarity * partners()).sum(1).mean())
    return total / num_groups
