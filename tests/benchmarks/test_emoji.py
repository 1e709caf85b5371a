"""The emoji of the CLIP study: rendering and splits of made-up packages, no network."""

from __future__ import annotations

import doctest
import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "emoji.py"


def load() -> ModuleType:
    """benchmarks/ is no package: the script by its path, under a name that no package has."""
    spec = importlib.util.spec_from_file_location("st_magnitude_benchmarks_emoji", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    sys.path.append(str(SCRIPT.parent))  # for lexicons
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


emoji = load()

COUNT = 40
GROUPS = {"0": "smileys-emotion", "1": "food-drink"}


def code(i: int) -> str:
    return f"1f{i:03x}"


def names() -> list[dict[str, Any]]:
    rows = [
        {"label": f"thing {i}", "hexcode": code(i).upper(), "tags": ["thing", f"thing {i}", f"t{i}"], "group": i % 2}
        | {"order": i}
        for i in range(COUNT)
    ]
    rows[3]["hexcode"] += "-FE0F"
    rows.append({"label": "regional indicator F", "hexcode": "1F1EB"})
    return rows[::-1]


def icons(colour: str, first: int = 0) -> tuple[dict[str, Any], dict[str, str]]:
    drawings = {f"thing-{i}": {"body": f'<rect width="16" height="16" fill="{colour}"/>'} for i in range(first, COUNT)}
    drawings["thing-39"] |= {"width": 32}  # twice as wide as high, half of it filled
    chars = {code(i): f"thing-{i}" for i in range(first, COUNT)}
    chars[f"{code(5)}-fe0f"] = "thing-5"
    chars[f"{code(6)}-1f3fb"] = "thing-6"
    chars[code(7)] = "another-name"  # of thing-7, where that is
    chars["1f999"] = "thing-8"  # none of the names
    chars["1f998"] = "missing"
    if first > 7:
        del chars[code(7)]
    return {"icons": drawings, "aliases": {"another-name": {"parent": "thing-7"}}, "width": 16, "height": 16}, chars


def archive(path: Path, files: dict[str, Any]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An npm that packs what is in a folder, and counts its calls there."""
    store, tools = tmp_path / "store", tmp_path / "bin"
    store.mkdir()
    tools.mkdir()
    meta = {"LICENSE": "MIT", "package.json": {}}
    archive(store / "emojibase-data.tgz", {"en/data.json": names(), "meta/groups.json": {"groups": GROUPS}} | meta)
    for style, colour, first in (
        ("noto", "#ff0000", 0),
        ("fluent-emoji-flat", "#00ff00", 0),
        ("openmoji", "#0000ff", 10),
    ):
        drawings, chars = icons(colour, first)
        files = {"icons.json": drawings, "chars.json": chars, "info.json": {}, "README.md": "Thanks.", **meta}
        archive(store / f"{style}.tgz", files)
    npm(tools, f'cp "{store}/$(basename "${{spec%@*}}").tgz" out-1.tgz && echo "$@" >> {store}/calls')
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("ST_MAGNITUDE_CACHE", raising=False)
    return store


def npm(folder: Path, script: str) -> None:
    (folder / "npm").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\nfor spec; do :; done\n{script}\n")
    (folder / "npm").chmod(0o755)


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering without resvg-py: one colour a drawing."""

    def render(folder: Path, size: int, path: Path) -> None:
        chars = json.loads((folder / "chars.json").read_text())
        codes = [c for c, name in chars.items() if name != "missing" and "-" not in c]
        np.savez(path, codes=codes, pixels=np.full((len(codes), size, size, 3), len(folder.name), dtype=np.uint8))

    monkeypatch.setattr(emoji, "_render", render)


ALL = ("noto", "fluent-emoji-flat", "openmoji")


def test_examples_in_docstrings() -> None:
    failed, attempted = doctest.testmod(emoji)
    assert failed == 0
    assert attempted >= 2


def test_rendering(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    pytest.importorskip("PIL")
    data = emoji.build(tmp_path / "cache", size=16, styles=("noto", "fluent-emoji-flat"))
    for style, colour in (("noto", [255, 0, 0]), ("fluent-emoji-flat", [0, 255, 0])):
        pixels = data.images[style]
        assert pixels.shape == (COUNT, 16, 16, 3)
        assert data.owners[style].tolist() == list(range(COUNT))
        assert (pixels[:39] == colour).all()
        wide = pixels[39]  # 32 x 16 in the middle of a square, its right half empty
        assert (wide[8, 2] == colour).all()
        assert (wide[8, 12] == 255).all()
        assert (wide[1, 2] == 255).all()


@pytest.mark.usefixtures("flat")
def test_splits(store: Path, tmp_path: Path) -> None:
    data = emoji.build(tmp_path, 8, ALL)
    sizes = {"num_unseen": 8, "num_dev": 5, "num_known": 10}
    drawn = set()
    for seed in range(4):
        splits = data.split(seed, **sizes)
        texts = {e.text: i for i, e in enumerate(data.emoji)}
        train = set(splits.owners.tolist())
        unseen, dev, known = (
            {texts[text] for text in test.texts} for test in (splits.unseen_emoji, splits.dev, splits.unseen_style)
        )
        assert (len(unseen), len(dev), len(known)) == (8, 5, 10)
        assert not unseen & dev
        assert not (unseen | dev) & train
        assert known <= train
        assert len(train) == COUNT - 13
        green = len("fluent-emoji-flat-1.2.6")
        assert (splits.unseen_style.images == green).all()
        for pixels in (splits.images, splits.unseen_emoji.images, splits.dev.images):
            assert not (pixels == green).any()
        assert len(splits.images) == len(train) + len([i for i in train if i >= 10])
        relevance = splits.unseen_emoji.relevance
        assert relevance.shape == (len(splits.unseen_emoji.images), 8)
        assert (relevance.sum(axis=1) == 1).all()
        assert relevance.sum(axis=0).tolist() == [1 if texts[t] < 10 else 2 for t in splits.unseen_emoji.texts]
        np.testing.assert_array_equal(splits.unseen_style.relevance, np.eye(10, dtype=bool))
        assert splits.dev.groups == [data.emoji[texts[t]].group for t in splits.dev.texts]
        drawn.add(tuple(sorted(unseen)))
        same = data.split(seed, **sizes)
        np.testing.assert_array_equal(same.owners, splits.owners)
        assert same.unseen_emoji.texts == splits.unseen_emoji.texts
    assert len(drawn) == 4
