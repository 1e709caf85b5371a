"""A static table tokenizes a text once, and its tokenizer does all else as before."""

import copy
import pickle

from _tables import TEXTS, static
from _trainer import make_trainer
from tokenizers import Tokenizer

import st_magnitude as stm
from st_magnitude.surgery.vocabulary import remembered_tokens


class Counts:
    def __init__(self, tokenizer):
        self.tokenizer, self.read = tokenizer, []

    def encode_batch(self, texts, **options):
        self.read += texts
        return self.tokenizer.encode_batch(texts, **options)


def test_a_text_is_tokenized_once(tmp_path):
    """Whatever is copied; then the tokenizer is the model's own again."""
    model = static()
    model[0].tokenizer = counts = Counts(model[0].tokenizer)
    trainer = make_trainer(model, stm.CosineRankingLoss(model), tmp_path)
    counts.read.clear()  # examples of the card
    with stm.trimmed_vocabulary(trainer):
        trainer.train()
        copy.deepcopy(model).encode(TEXTS)
        assert sorted(counts.read) == sorted(set(TEXTS))
        model[0].tokenizer.encode_batch(TEXTS, add_special_tokens=True)
        assert len(counts.read) == len(set(TEXTS)) + len(TEXTS)
    assert model[0].tokenizer is counts


def test_the_tokenizer_does_all_else():
    model = static()
    own = model[0].tokenizer
    with remembered_tokens(model):
        remembering = model[0].tokenizer
        model.encode(TEXTS)
        words = [text.split() for text in TEXTS]
        for texts, args, options in [
            (TEXTS, (), {}),
            (words, (True,), {}),
            (words, (), {"is_pretokenized": True, "add_special_tokens": False}),
        ]:
            found, expected = (x.encode_batch(texts, *args, **options) for x in (remembering, own))
            for mine, other in zip(found, expected, strict=True):
                assert list(mine.ids) == other.ids
                assert mine.tokens == other.tokens
        pickled = pickle.loads(pickle.dumps(remembering))
    assert type(pickled) is Tokenizer
    assert pickled.to_str() == own.to_str()
