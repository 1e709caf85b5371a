"""The emoji of the CLIP study: packages, rendering, splits; made-up packages, no network."""

from __future__ import annotations

import doctest
import importlib.util
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from st_magnitude.data.beir import DataError

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
def test_build(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    data = emoji.build(cache, 16, ALL)
    assert [e.label for e in data.emoji] == [f"thing {i}" for i in range(COUNT)]  # in order, the letter left out
    assert data.emoji[3] == emoji.Emoji(code(3), "thing 3", ("thing", "t3"), "food drink")
    assert data.emoji[3].text == "thing 3, thing, t3"
    assert data.owners["openmoji"].tolist() == list(range(10, COUNT))
    assert repr(data) == "EmojiImages(40 emoji; images: 40 noto, 40 fluent-emoji-flat, 30 openmoji)"
    calls = (store / "calls").read_text().splitlines()
    assert calls[0] == "pack --silent --ignore-scripts emojibase-data@17.0.0"
    assert [call.split()[-1] for call in calls[1:]] == [f"@iconify-json/{s}@{emoji._STYLES[s].version}" for s in ALL]
    assert not list(cache.glob(".*"))
    (tmp_path / "bin" / "npm").unlink()  # all is there
    again = emoji.build(str(cache), 16, ALL)
    for style in ALL:
        np.testing.assert_array_equal(again.images[style], data.images[style])
    attribution = (cache / "ATTRIBUTION.md").read_text()
    assert "CC BY-SA 4.0, OpenMoji" in attribution
    assert "Apache-2.0, Google" in attribution
    assert "Twitter" not in attribution  # not fetched
    assert (cache / "openmoji-1.2.29" / "README.md").read_text() == "Thanks."
    monkeypatch.setenv("ST_MAGNITUDE_CACHE", str(tmp_path / "mine"))
    with pytest.raises(DataError, match="there is no npm here"):
        emoji.build()


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


@pytest.mark.usefixtures("flat")
def test_split_errors(store: Path, tmp_path: Path) -> None:
    data = emoji.build(tmp_path, 8, ("noto", "openmoji"))
    with pytest.raises(DataError, match=r"held_out_style='fluent-emoji-flat' must be one of .* noto, openmoji"):
        data.split()
    with pytest.raises(DataError, match="250 unseen, 150 dev and 500 known emoji were asked for, of 40"):
        data.split(held_out_style="noto")
    with pytest.raises(DataError, match="0 unseen, 5 dev and 5 known"):
        data.split(held_out_style="noto", num_unseen=0, num_dev=5, num_known=5)
    with pytest.raises(DataError, match="at least two styles"):
        emoji.build(tmp_path, 8, ("noto",)).split(held_out_style="noto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"styles": ("noto", "emojione")}, "There is no style 'emojione'; those known here are noto, "),
        ({"styles": ()}, r"one style or more .*got \(\) and 48"),
        ({"size": 4}, "a size of 8 to 1024 pixels, got .* and 4"),
    ],
)
def test_build_errors(store: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        emoji.build(tmp_path, **options)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no npm here"),
        ("echo 'npm error code ENOTFOUND' >&2; exit 1", r"npm pack failed \(npm error code ENOTFOUND\)"),
        ("exit 1", "npm pack failed \\(exit 1; --silent hides why\\)"),
        (":", r"what npm downloaded cannot be read \(no archive\)"),
        ("echo text > out.tgz", "what npm downloaded cannot be read"),
        ("mkdir package; tar czf out.tgz package", "what npm downloaded cannot be read .*en/data.json"),
    ],
)
def test_what_to_do_by_hand(store: Path, tmp_path: Path, script: str | None, reason: str) -> None:
    if script is None:
        (tmp_path / "bin" / "npm").unlink()
    else:
        npm(tmp_path / "bin", script)
    with pytest.raises(DataError, match=rf"Cannot fetch the npm package emojibase-data@17.0.0: {reason}") as error:
        emoji.build(tmp_path / "cache")
    said = str(error.value)
    assert "npm (it comes with Node.js) and a network" in said
    assert f"extract what is in its folder `package` into {tmp_path}/cache/emojibase-data-17.0.0" in said
    assert "ST_MAGNITUDE_CACHE" in said
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.usefixtures("flat")
def test_damaged_cache(store: Path, tmp_path: Path) -> None:
    emoji.build(tmp_path, 8)
    data = tmp_path / "emojibase-data-17.0.0" / "en" / "data.json"
    data.write_text("[")
    with pytest.raises(DataError, match=r"en/data\.json cannot be read .* remove its folder"):
        emoji.build(tmp_path, 8)
    data.unlink()
    with pytest.raises(DataError, match=r"emojibase-data-17.0.0 has no en/data\.json: remove that folder"):
        emoji.build(tmp_path, 8)


def test_without_resvg(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(DataError, match=r"needs resvg-py and Pillow .*: pip install resvg-py pillow"):
        emoji.build(tmp_path)


def test_script(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["emoji.py", "--cache", str(tmp_path / "cache"), "--styles", "emojione"])
    with pytest.raises(SystemExit) as error:
        emoji.main()
    assert error.value.code == 1
    assert capsys.readouterr().err.startswith("There is no style 'emojione'")
