"""The emoji of the CLIP study: names, rendering and splits of made-up drawings, no network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.data import emoji

COUNT = 40


def code(i: int) -> str:
    return f"1f{i:03x}"


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def test_names(tmp_path: Path) -> None:
    rows = [
        {"label": f"thing {i}", "hexcode": code(i).upper(), "group": i % 2, "order": i}
        for i in range(3)
    ]
    rows = [row | {"tags": ["thing", row["label"]]} for row in rows] + [
        {"label": "regional F", "hexcode": "1F1EB"}
    ]
    rows[1]["hexcode"] += "-FE0F"  # a variation selector
    write(
        tmp_path,
        en__data=rows[::-1],
        meta__groups={"groups": {"0": "smileys-emotion", "1": "food-drink"}},
    )
    names = emoji.read_names(tmp_path)
    assert [entry.code for entry in names] == [code(i) for i in range(3)]
    assert names[1] == emoji.Emoji(code(1), "thing 1", ("thing",), "food drink")


def test_rendering(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    square = {"body": '<rect width="16" height="16" fill="#ff0000"/>'}
    icons = {"a": square, "wide": square | {"width": 32}}  # half of it filled
    drawings = {"icons": icons, "aliases": {"b": {"parent": "a"}}, "width": 16, "height": 16}
    write(
        tmp_path,
        icons=drawings,
        chars={code(0): "a", code(1): "b", code(2): "wide", code(3): "missing"},
    )
    emoji._render(tmp_path, 16, tmp_path / "rendered.npz")
    with np.load(tmp_path / "rendered.npz") as found:
        pixels = dict(zip(found["codes"].tolist(), found["pixels"], strict=True))
    assert pixels.keys() == {code(0), code(1), code(2)}
    assert (pixels[code(0)] == [255, 0, 0]).all()
    assert (pixels[code(1)] == [255, 0, 0]).all()
    assert (pixels[code(2)][8, 2] == [255, 0, 0]).all()
    assert (pixels[code(2)][8, 12] == 255).all()  # white, as are the rows above the middle
    assert (pixels[code(2)][1, 2] == 255).all()


def test_splits() -> None:
    names = [emoji.Emoji(code(i), f"thing {i}", (f"t{i}",), f"group {i % 2}") for i in range(COUNT)]
    owners = {"noto": range(COUNT), "fluent-emoji-flat": range(COUNT), "openmoji": range(10, COUNT)}
    images = {
        style: np.full((len(x), 8, 8, 3), 50 * k) for k, (style, x) in enumerate(owners.items())
    }
    data = emoji.EmojiImages(names, images, {style: np.array(x) for style, x in owners.items()})
    splits = data.split(0, num_unseen=8, num_dev=5, num_known=10)
    texts = {e.text: i for i, e in enumerate(data.emoji)}
    train = set(splits.owners.tolist())
    unseen, known = (
        {texts[text] for text in test.texts} for test in (splits.unseen_emoji, splits.unseen_style)
    )
    assert (len(unseen), len(known), len(train)) == (8, 10, COUNT - 13)
    assert not unseen & train
    assert known <= train
    assert (splits.unseen_style.images == 50).all()
    for pixels in (splits.images, splits.unseen_emoji.images):
        assert not (pixels == 50).any()
    relevance = splits.unseen_emoji.relevance
    assert (relevance.sum(axis=1) == 1).all()
    images_of = [1 if texts[t] < 10 else 2 for t in splits.unseen_emoji.texts]
    assert relevance.sum(axis=0).tolist() == images_of
    other = data.split(1, num_unseen=8, num_dev=5, num_known=10)
    assert other.unseen_emoji.texts != splits.unseen_emoji.texts
