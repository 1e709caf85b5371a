"""The emoji of the CLIP study: names, rendering and splits of made-up drawings, no network."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data import emoji

COUNT = 40


def code(i: int) -> str:
    return f"1f{i:03x}"


def test_names(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"label": "regional F", "hexcode": "1F1EB"}]
    for i in range(3):
        row = {"label": f"thing {i}", "hexcode": code(i).upper(), "group": i % 2, "order": i}
        rows.insert(0, row | {"tags": ["thing", row["label"]]})
    rows[1]["hexcode"] += "-FE0F"  # a variation selector
    groups = {"groups": {"0": "smileys-emotion", "1": "food-drink"}}
    for name, content in {"en/data": rows, "meta/groups": groups}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    names = emoji.read_names(tmp_path)
    assert [entry.code for entry in names] == [code(i) for i in range(3)]
    assert names[1] == emoji.Emoji(code(1), "thing 1", ("thing",), "food drink")


def test_splits() -> None:
    names = [emoji.Emoji(code(i), f"thing {i}", (f"t{i}",), f"group {i % 2}") for i in range(COUNT)]
    owners = {"noto": range(COUNT), "fluent-emoji-flat": range(COUNT), "openmoji": range(10, COUNT)}
    sizes = {style: len(x) for style, x in owners.items()}
    images = {x: np.full((n, 8, 8, 3), 50 * k) for k, (x, n) in enumerate(sizes.items())}
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
