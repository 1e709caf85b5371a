"""Batches without padding: the embeddings and the gradients are those of padded ones."""

import torch
from benchmarks.studies.models import without_padding
from sentence_transformers import SentenceTransformer

TEXTS = [
    "Tea",
    "Low gears let a cyclist climb steep hills with less force on the pedals.",
    "My cat",
    "Good night!",
]


def test_packed_texts_have_the_embeddings_and_gradients_of_padded_ones(minilm_path: str) -> None:
    weight = torch.randn(len(TEXTS), 384)
    found = []
    for change in (lambda model: model, without_padding):
        model = change(SentenceTransformer(minilm_path, device="cpu")).eval()  # no dropout
        features = model.preprocess(TEXTS)
        embeddings = model(features)["sentence_embedding"]
        (embeddings * weight).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((embeddings.detach(), gradients))
        assert ("cu_seq_lens_q" in features) == (change is without_padding)
    (padded, before), (packed, after) = found
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)
    assert before.keys() == after.keys()
    for name, grad in before.items():
        torch.testing.assert_close(after[name], grad, atol=1e-4, rtol=1e-3, msg=name)
