"""Pages that name what is asked for and do not say it: about a name, and fragments of a site."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path

TEMPLATES: dict[str, tuple[str, ...]] = {
    "title": ("{0}",),
    "question": (
        "What does {0} mean?",
        "Does anybody know what {0} is?",
        "Looking for the meaning of {0}, thanks",
    ),
    "stub": (
        "This entry on {0} is a stub. You can help by expanding it.",
        "Nobody has defined {0} yet.",
    ),
    "list": ("{1}, {0}, {2}", "Entries near {0}: {1}, {2}, {3}"),
    "see": ("{0}: see {1}.", "For {0}, see also {1} and {2}."),
    "sound": (
        "How to pronounce {0}: listen to a recording",
        "Audio of {0}, spoken slowly by a native speaker",
    ),
    "translation": (
        "Translations of {0} into French, German and Spanish",
        "Add a translation of {0}",
    ),
    "talk": (
        "Talk page of {0}. Please sign your comments.",
        "Edit history of {0}, last changed by a guest",
    ),
}
SHOWN, UNSEEN = ("title", "question", "stub", "list"), ("see", "sound", "translation", "talk")
SHOWN_FRAGMENTS, UNSEEN_FRAGMENTS = ("navigation", "url", "word"), ("contents", "licence")
KINDS = (*SHOWN, *UNSEEN, *SHOWN_FRAGMENTS, *UNSEEN_FRAGMENTS)


def page(kind: str, name: str, names: list[str], rng: random.Random) -> str:
    """A page about a name that answers nothing.

    Example:
        >>> page("see", "sea lion", ["otary"], random.Random(2))
        'sea lion: see otary.'
    """
    return rng.choice(TEMPLATES[kind]).format(name, *(rng.choice(names) for _ in range(3)))


def fragments(
    corpus: Mapping[str, str],
    number: int,
    seed: int = 0,
    kinds: Sequence[str] = (*SHOWN_FRAGMENTS, *UNSEEN_FRAGMENTS),
) -> dict[str, str]:
    """Fragments of the kinds in turn, all different, from the words of a corpus.

    Example:
        >>> made = fragments({"d": "sparse matrices are stored by rows and columns"}, 4)
        >>> sorted(made)
        ['contents-3', 'navigation-0', 'url-1', 'word-2']
        >>> made["url-1"].startswith("https://"), len(made["word-2"].split())
        (True, 1)
    """
    rng = random.Random(seed)
    found_words = {word.strip(".,:;()`'\"") for text in corpus.values() for word in text.split()}
    words = [word for word in sorted(found_words - {""}) if word.isalpha() and len(word) > 3]
    licences = licence_chunks()
    found: dict[str, str] = {}  # text to kind
    attempts = 0
    while len(found) < number:
        kind = kinds[attempts % len(kinds)] if attempts < 20 * number else "contents"
        attempts += 1
        text = fragment(kind, [rng.choice(words or ["page"]) for _ in range(4)], licences, rng)
        found.setdefault(text, kind)
    return {f"{kind}-{i}": text for i, (text, kind) in enumerate(found.items())}


def fragment(kind: str, words: Sequence[str], licences: Sequence[str], rng: random.Random) -> str:
    a, b, c, _ = words
    navigation = rng.choice(
        (
            f"Home » {a.title()} » {b.title()} | Next | Previous",
            f"Skip to content  {a}  {b}  Search  About",
        )
    )
    entries = enumerate(words, 1)
    contents = [f"{i}. {w.title()} {' .' * 5} {7 * i + rng.randrange(9)}" for i, w in entries]
    copyright = f"Copyright (c) {a.title()} and {b.title()} contributors."
    return {
        "navigation": navigation,
        "url": f"https://docs.{a.lower()}.org/en/stable/{b.lower()}/{c.lower()}.html",
        "word": a,
        "contents": " ".join(contents),
        "licence": rng.choice(licences) if licences else copyright,
    }[kind]


@lru_cache(maxsize=1)
def licence_chunks(words: int = 40, most: int = 400) -> list[str]:
    """Pieces of the licences of the installed packages, of so many words."""
    texts = set()
    for distribution in distributions():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            is_text = path.suffix.lower() in ("", ".txt", ".md")
            if "licen" in path.name.lower() and is_text and path.is_file():
                texts.add(path.read_text(encoding="utf-8", errors="ignore"))
    chunks = set()
    for found in (text.split() for text in texts):
        starts = range(0, min(len(found), 2000), words)
        chunks |= {" ".join(found[i : i + words]) for i in starts}
    return random.Random(0).sample(sorted(chunks), min(most, len(chunks)))
