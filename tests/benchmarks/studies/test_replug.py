"""REPLUG against loops over its formula, one pair after the other."""

import math

import pytest
import torch
from _tiny import decoder, tokenizer
from benchmarks.studies.revela import replug
from sentence_transformers import SentenceTransformer

from st_magnitude.revela.groups import split_batch

GROUPS = [
    ["two minutes for green tea", "the pole is south", "a sorted list of words"],
    ["put the egg in", "rain falls"],
]


def test_the_loss_is_the_formula(model: SentenceTransformer) -> None:
    lm, tokens = decoder("llama", 1, std=0.3, max_position_embeddings=128), tokenizer()
    loss = replug.ReplugLoss(
        model.eval(), lm, tokens, temperature=0.2, lm_temperature=0.1, prefixes=("", "")
    )
    found = loss.eval()(split_batch(loss.collator([{"chunks": group} for group in GROUPS])))
    terms = []
    for group in GROUPS:
        ids = [tokens(text)["input_ids"] for text in group]
        halves = [" ".join(text.split()[: (len(text.split()) + 1) // 2]) for text in group]
        for i, half in enumerate(halves):
            target, predicted = {}, {}
            for j in {*range(len(group))} - {i}:
                with torch.no_grad():
                    nats = lm(torch.tensor([ids[j] + ids[i]])).logits[0].log_softmax(-1)
                total = sum(
                    nats[len(ids[j]) + place - 1, token].item()
                    for place, token in enumerate(ids[i])
                )
                target[j] = math.exp(total / len(ids[i]) / 0.1)
                query, passage = (
                    torch.tensor(model.encode(text, prompt="")) for text in (half, group[j])
                )
                predicted[j] = math.exp(torch.cosine_similarity(query, passage, 0).item() / 0.2)
            for j, weight in target.items():
                p = weight / sum(target.values())
                terms.append(p * math.log(p / (predicted[j] / sum(predicted.values()))))
    assert found.item() == pytest.approx(sum(terms) / 5, abs=1e-5)
    found.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in lm.parameters())
