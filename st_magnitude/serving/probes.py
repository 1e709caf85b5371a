"""A few dozen texts on which a server can go wrong: short, long, over the token limit, Unicode, nearly empty."""

from __future__ import annotations

from dataclasses import dataclass

from sentence_transformers import SentenceTransformer

__all__ = ["Probe", "make_probes", "prompt_of"]

QUERIES = (
    "How do I keep bread from going stale?",
    "what makes a bicycle easier to pedal uphill",
    "Why does my cat scratch the sofa?",
    "tomatoes frost",
    "When is the next train from platform nine to the coast, and does it take bicycles?",
    "photosynthesis",
    "RuntimeError: CUDA out of memory",
    "Who painted the ceiling of the chapel?",
    "¿Dónde viven los pingüinos?",
    "東京の天気は?",
    "x",
    "?",
)
DOCUMENTS = (
    "Bread stays fresh longer in a paper bag or a bread box than in the fridge.",
    "Slice the loaf and freeze it, and it will not go stale.",
    "Low gears let a cyclist climb steep hills with less force on the pedals.",
    "Cats scratch furniture to mark territory and to care for their claws.",
    "Plant tomatoes outdoors after the last frost, when the soil is warm.",
    "It leaves every hour from platform nine. Bicycles travel in the last carriage and need a ticket of their own.",
    "Plants turn light, water and carbon dioxide into sugar and oxygen.",
    "def merge(a, b):\n    return sorted([*a, *b])  # O(n log n)",
    "The contract may be ended by either party with thirty days' notice in writing.",
    "Interest rates were left unchanged for the third month in a row.",
    "Add the onions, lower the heat and let everything simmer for an hour.",
    "See also: index. Parameters: none. Returns: none.",
    "THE GUARANTEE DOES NOT COVER DAMAGE BY WATER.",
    "https://example.org/a/very/long/path?with=arguments&and=more#fragment",
    "3.14159 26535 89793 23846 26433",
    "Los pingüinos viven en el hemisferio sur, cerca del hielo.",
    "naïve café, Ångström, ﬁne print, e\u0301 and é",
    "猫はソファで爪を研ぐ。",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם",
    "👩‍🔬 measured 20 µm ± 5 %",
    "  two   spaces,\ttab,\nnew line  ",
    "a",
    ".",
    "-" * 40,
)
LONGEST = 2048  # words: a text over a limit of 32,000 tokens would take minutes
SUBJECTS = ("the harbour", "a violin", "winter wheat", "the tax office", "old glass", "a river delta", "the comet")
VERBS = ("changes", "outlives", "explains", "divides", "feeds", "hides", "measures", "repairs", "follows")


@dataclass(frozen=True)
class Probe:
    """One text that is sent to a server.

    Attributes:
        text: The text without a prompt.
        role: ``"query"`` or ``"document"``.
        tokens: Number of tokens that the model reads of it.
    """

    text: str
    role: str
    tokens: int


def make_probes(model: SentenceTransformer) -> list[Probe]:
    """Queries, documents, and documents of a quarter to twice as many words as the model reads tokens."""
    limit = max_tokens(model) or 512
    lengths = [limit // 4, limit // 2, limit, 2 * limit]
    texts = [*DOCUMENTS, *(_long_text(n) for n in lengths if 0 < n <= LONGEST)]
    return [
        Probe(text, role, _num_tokens(model, text))
        for role, group in (("query", QUERIES), ("document", texts))
        for text in group
    ]


def max_tokens(model: SentenceTransformer) -> int | None:
    """The number of tokens that a model reads, or None if it reads all."""
    limit = getattr(model, "max_seq_length", None)
    return int(limit) if limit and limit < 10**9 else None


def prompt_of(model: SentenceTransformer, role: str) -> str:
    """The prompt that ``encode_query`` or ``encode_document`` puts before a text; empty without one."""
    names = ("query",) if role == "query" else ("document", "passage", "corpus")
    name = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return (model.prompts.get(name) or "") if name else ""


def _num_tokens(model: SentenceTransformer, text: str) -> int:
    features = model.preprocess([text])
    if "attention_mask" in features:
        return int(features["attention_mask"].sum())
    return features["input_ids"].numel() if "input_ids" in features else len(text.split())


def _long_text(words: int) -> str:
    """A text that says something new in every sentence, so that every cut changes its embedding."""
    sentences: list[str] = []
    count = 0
    while count < words:
        n = len(sentences)
        subject, thing = SUBJECTS[n % 7], SUBJECTS[(n * n + 3) % 7]
        sentences.append(f"{subject} {VERBS[n * 2 % 9]} {thing} in chapter {n + 1}".capitalize())
        count += len(sentences[-1].split())
    return " ".join((". ".join(sentences) + ".").split()[:words])
