"""Two-layer models with random weights, a few texts, and the formula."""

import copy
import functools
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_TEXTS = """
how long does green tea steep | two minutes are enough for green tea | see below | see also tea
what is a prime | a prime number has two divisors | returns a number | raises an error
where do penguins live | penguins live in the south near the ice of the pole | see the notes | none
sort a list | a sorted copy of the list comes back | parameters list | returns a list
why is the sky blue | short waves of light scatter more | see also light | notes
who wrote the odyssey | homer is said to have written it | references | see the references below
boil an egg | put the egg in hot water for six minutes | parameters | examples
open a file | the file is opened for reading unless a mode is given | mode is a string | raises
capital of peru | lima | see also | returns none
train to the coast | it leaves every hour from platform nine | notes | parameters train
what is rain | water that falls from clouds in drops | examples below | see also snow
merge two tables | rows with the same key are joined into one | returns a table | raises key error
oldest tree | a pine in the white mountains is almost five thousand years old | none | see below
how do bees talk | with a dance that points to the flowers | references | notes on bees
fix a flat tyre | take off the wheel and patch the tube | examples | parameters
count words | a counter of all the words in the text | text is a string | returns a counter
"""
# (query, relevant passage, boilerplate, boilerplate); rows differ in length on purpose
ROWS = [tuple(line.split(" | ")) for line in _TEXTS.strip().splitlines()]
COLUMNS = ("anchor", "positive", "negative_1", "negative_2")


def columns(num_rows: int = len(ROWS), num_negatives: int = 0) -> dict[str, list[str]]:
    """{"anchor": [...], "positive": [...], "negative_1": [...]}: what Dataset.from_dict takes."""
    names = COLUMNS[: 2 + num_negatives]
    return {name: [row[i] for row in ROWS[:num_rows]] for i, name in enumerate(names)}


def tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece of the words above and of single letters for all others."""
    words = sorted({word for row in ROWS for text in row for word in text.split()})
    letters = [
        prefix + letter for prefix in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz'.,?"
    ]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = dict.fromkeys(special + letters + words)
    core = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )


def save_transformer(
    folder: Path | str, model_type: str = "distilbert", auto: type = AutoModel, **options: object
) -> str:
    """A folder with a random Transformer: no dropout, and norms of embeddings that vary."""
    tokens = tokenizer()
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokens), pad_token_id=0, **(_SIZES.get(model_type, {}) | options)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:  # far from the near-identity of the usual initialisation
                    parameter.normal_(std=0.3)
                elif "norm" in name.lower():
                    parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    tokens.save_pretrained(str(folder))
    return str(folder)


def load_transformer(folder: Path | str, pooling: str = "mean") -> SentenceTransformer:
    return copy.deepcopy(_loaded(str(folder), pooling))


@functools.lru_cache(8)
def _loaded(folder: str, pooling: str) -> SentenceTransformer:
    transformer = Transformer(folder)
    return SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_embedding_dimension(), pooling)], device="cpu"
    )


def decoder(
    family: str = "llama", seed: int = 0, std: float | None = None, **options: object
) -> PreTrainedModel:
    """A random causal decoder for the words above; with a std, its matrices are larger."""
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer())}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **(sizes | tokens | options))
        )
        if std is not None:
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=std)
    return model


def language_model(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return decoder(seed=seed), tokenizer()


def save_decoder(folder: Path, seed: int = 0) -> Path:
    """A folder with a language model that knows the end of a text."""
    lm, tokens = language_model(seed)
    tokens.add_special_tokens({"eos_token": "[EOS]"})
    lm.resize_token_embeddings(len(tokens))
    lm.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def raw_embeddings(model: SentenceTransformer, features: list[dict]) -> list[torch.Tensor]:
    """Without ExponentNorm, by the Transformer and the Pooling in front of it."""
    return [
        nn.Sequential(*list(model)[:2])(dict(column))["sentence_embedding"] for column in features
    ]


def formula(
    embeddings: list[torch.Tensor],
    exponents: tuple,
    scale: float,
    direction: tuple[str, ...] = ("query_to_doc",),
    dim: int | None = None,
    excluded: torch.Tensor | None = None,
    excluded_queries: torch.Tensor | None = None,
    log_q: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """cross_entropy(scale * similarity - log_q) without the pairs that are excluded, by rows of
    queries and of documents (their transpose): the definition of every ranking loss."""
    queries, *documents = (x[:, :dim] for x in embeddings)
    number, documents = len(queries), torch.cat(documents)
    queries = queries / queries.norm(dim=1, keepdim=True) ** exponents[0]
    documents = documents / documents.norm(dim=1, keepdim=True) ** exponents[1]
    scores = scale * queries @ documents.T
    if excluded is None:
        excluded = torch.zeros_like(scores, dtype=torch.bool)
    if excluded_queries is None:
        excluded_queries = excluded[:, :number].T
    forward, backward = (
        cross_entropy(
            x.masked_fill(mask.clone().fill_diagonal_(False), -torch.inf), torch.arange(number)
        )
        for x, mask in ((scores - log_q, excluded), (scores[:, :number].T, excluded_queries))
    )
    both = (forward + backward) / 2
    return {("query_to_doc",): forward, ("doc_to_query",): backward}.get(direction, both)


def auto_scale(
    embeddings: list[torch.Tensor], exponents: tuple, dim: int | None = None, unit: float = 20
):
    """``unit`` over the mean norms of queries and positives that the exponents leave in."""
    queries, positives = (x[:, :dim].norm(dim=1).mean() for x in embeddings[:2])
    return unit / (queries ** (1 - exponents[0]) * positives ** (1 - exponents[1]))


_SIZES: dict[str, dict[str, object]] = {
    "bert": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    | {"dropout": 0.0, "attention_dropout": 0.0},
}
