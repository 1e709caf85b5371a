"""Documents for the tests of chunks, groups and titles."""

import random
from pathlib import Path

from st_magnitude.revela import chunk

CODE = '''import os


def size(path):
    """Bytes of a file."""
    if not os.path.exists(path):

        return 0
    return os.stat(path).st_size


class Walker:
    def walk(self, top):
        for entry in os.scandir(top):
            yield entry.path
'''


def document(name: str, number: int, words: int = 6) -> str:
    """So many chunks of one sentence each, when ``max_words`` is the number of words."""
    return " ".join(f"{name.title()} says {'very ' * (words - 4)}much {i}." for i in range(number))


def chunks_of(name: str, number: int) -> list[str]:
    return chunk(document(name, number), 6)


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by name, ``__`` for a dot."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def words(rng: random.Random, number: int) -> str:
    """Made-up words of three syllables."""
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    return " ".join("".join(rng.sample(syllables, 3)) for _ in range(number))
