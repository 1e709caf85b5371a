"""Models whose word tables have far more rows than their texts use."""

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from _surgery import routes
from _tiny import ROWS, load_transformer, save_transformer, tokenizer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

NUM_ROWS = 2_000
TEXTS = [text for row in ROWS for text in row[:2]]
UNSEEN = ["zzz qqq", "[UNK] parameters", "jjj", ""]


def static():
    torch.manual_seed(1)
    table = StaticEmbedding(tokenizer(), torch.randn(NUM_ROWS, 32))
    return SentenceTransformer(modules=[table], device="cpu")


@cache
def folder():
    temporary = TemporaryDirectory()
    save_transformer(temporary.name, "bert")
    return temporary


def encoder():
    model = load_transformer(folder().name)
    torch.manual_seed(1)
    model[0].model.resize_token_embeddings(NUM_ROWS, mean_resizing=False)
    return model


def scaled():
    """A table of a class that multiplies what it reads, as Gemma's, with padding amid the words."""
    model = encoder()
    padding = model.tokenizer.convert_tokens_to_ids("tea")
    table = Gemma3TextScaledWordEmbedding(NUM_ROWS, 32, padding, embed_scale=3.0)
    table.weight = table_of(model).weight
    model[0].model.set_input_embeddings(table)
    return model


def two_tables():
    """Routes whose tokenizers have other ids for the same words."""
    words = {word: NUM_ROWS - 1 - i for i, word in enumerate(sorted({*" ".join(TEXTS).split()}))}
    other = Tokenizer(WordLevel({"[UNK]": 0} | words, unk_token="[UNK]"))
    other.pre_tokenizer = WhitespaceSplit()
    document = StaticEmbedding(other, static()[0].embedding.weight.detach().clone())
    return SentenceTransformer(modules=[routes([static()[0]], [document])], device="cpu")


MODELS = {"static": static, "bert": encoder}
both = pytest.mark.parametrize(
    "build", [static, pytest.param(encoder, marks=pytest.mark.slow)], ids=MODELS
)


class LARS(torch.optim.SGD):
    """Divides a step by the norm of the whole gradient."""

    def step(self):
        for weight in (x for group in self.param_groups for x in group["params"]):
            weight.grad /= weight.grad.norm()
        super().step()


def table_of(model):
    first = model[0]
    return getattr(first, "embedding", None) or first.model.get_input_embeddings()


def assert_same(found, expected):
    found, expected = (x.state_dict() if isinstance(x, nn.Module) else x for x in (found, expected))
    assert list(found) == list(expected)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}  # an empty text in half before 6.2
    torch.testing.assert_close(dict(found), dict(expected), **exactly)
