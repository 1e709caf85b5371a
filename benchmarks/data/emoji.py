"""Real images with names: emoji in up to four drawing styles, rendered from npm packages.

Names, tags and groups are those of Unicode's CLDR, from ``emojibase-data``; images are vector
drawings, rendered by resvg-py (``pip install resvg-py``). Each emoji has one text, such as "nerd
face, brainy, clever, geek", and one image a style. Packages are fetched by ``npm pack`` at a fixed
version, without their dependencies and without running anything of theirs, and kept in a cache
folder with their notices; nothing of them is part of this repository.

- ``emojibase-data``: MIT, Miles Johnson;
- ``@iconify-json/noto``: Apache-2.0, Google;
- ``@iconify-json/fluent-emoji-flat``: MIT, Microsoft;
- ``@iconify-json/twemoji``: CC BY 4.0, Twitter and contributors (attribution asked for);
- ``@iconify-json/openmoji``: CC BY-SA 4.0, OpenMoji (attribution, and share alike).

The cache has an ATTRIBUTION.md that says the same of what is in it: keep it with pictures that
you pass on.

Two questions can be asked, by :meth:`EmojiImages.split`: a *style* that training never saw, of
emoji that it knows; and *emoji* that training never saw, in styles that it knows.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.data.cache import cache_folder
from numpy.typing import NDArray

from st_magnitude.data.beir import DataError


def chance(seed: int, *what: str) -> float:
    """A random number in [0, 1) that depends on nothing but the seed and the strings."""
    digest = hashlib.blake2b("\t".join([str(seed), *what]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Package(NamedTuple):
    name: str
    version: str
    licence: str
    author: str
    files: tuple[str, ...]


_FILES = ("en/data.json", "meta/groups.json", "LICENSE", "package.json")
_NAMES = _Package("emojibase-data", "17.0.0", "MIT", "github.com/milesj/emojibase", _FILES)
_ICONS = ("icons.json", "chars.json", "info.json", "README.md", "package.json")
_STYLES = {
    name: _Package(f"@iconify-json/{name}", *rest, _ICONS)
    for name, *rest in (
        ("noto", "1.2.9", "Apache-2.0", "Google, github.com/googlefonts/noto-emoji"),
        ("fluent-emoji-flat", "1.2.6", "MIT", "Microsoft, github.com/microsoft/fluentui-emoji"),
        ("twemoji", "1.2.5", "CC BY 4.0", "Twitter and others, github.com/jdecked/twemoji"),
        ("openmoji", "1.2.29", "CC BY-SA 4.0", "OpenMoji, github.com/hfg-gmuend/openmoji"),
    )
}
STYLES = tuple(_STYLES)
PERMISSIVE = ("noto", "fluent-emoji-flat")
SIZE = 48  # pixels of a side


@dataclass(frozen=True)
class Emoji:
    """One emoji.

    Attributes:
        code: Its code points in lower-case hexadecimal, without variation selectors: ``1f913``.
        label: Its name: ``nerd face``.
        tags: Keywords, without the name itself.
        group: One of nine: ``smileys emotion``.

    Example:
        >>> Emoji("1f913", "nerd face", ("geek", "smart"), "smileys emotion").text
        'nerd face, geek, smart'
    """

    code: str
    label: str
    tags: tuple[str, ...]
    group: str

    @property
    def text(self) -> str:
        """Name and tags."""
        return ", ".join((self.label, *self.tags))


class Split(NamedTuple):
    """Images and texts of one test: ``relevance[i, j]`` says whether text j describes image i."""

    images: NDArray[np.uint8]  # (n, S, S, 3)
    texts: list[str]  # m
    relevance: NDArray[np.bool_]  # (n, m)
    groups: list[str]  # of the texts, m


class Splits(NamedTuple):
    """See :meth:`EmojiImages.split`."""

    images: NDArray[np.uint8]  # of training, (N, S, S, 3)
    owners: NDArray[np.int64]  # the emoji of each, (N,)
    unseen_style: Split
    unseen_emoji: Split


@dataclass(repr=False)
class EmojiImages:
    """All emoji, and their images by style.

    Attributes:
        emoji: In Unicode's order.
        images: Style to pixels, (n, S, S, 3) on white.
        owners: Style to the index of the emoji of each image, (n,).
    """

    emoji: list[Emoji]
    images: dict[str, NDArray[np.uint8]]
    owners: dict[str, NDArray[np.int64]]

    def split(
        self,
        seed: int = 0,
        *,
        held_out_style: str = "fluent-emoji-flat",
        num_unseen: int = 250,
        num_dev: int = 150,
        num_known: int = 500,
    ) -> Splits:
        """Training and two tests, which depend on the seed and on code points alone.

        - ``unseen_emoji``: emoji that are in no training image and no training text, in the styles
          of training.
        - ``unseen_style``: emoji of the training, in the style that it has no image of.
        """
        known_styles = [style for style in self.images if style != held_out_style]
        drawn = np.argsort([chance(seed, "emoji", emoji.code) for emoji in self.emoji])
        unseen, _, train = np.split(drawn, [num_unseen, num_unseen + num_dev])
        held_out = set(self.owners[held_out_style].tolist())
        known = [int(i) for i in train if int(i) in held_out][:num_known]
        is_train = np.zeros(len(self.emoji), dtype=bool)
        is_train[train] = True
        kept = {style: is_train[self.owners[style]] for style in known_styles}
        return Splits(
            np.concatenate([self.images[style][kept[style]] for style in known_styles]),
            np.concatenate([self.owners[style][kept[style]] for style in known_styles]),
            self._test(known, [held_out_style]),
            self._test(unseen, known_styles),
        )

    def _test(self, which: Sequence[int] | NDArray[np.int64], styles: Sequence[str]) -> Split:
        """All images of these emoji in these styles, and one text an emoji that has an image."""
        wanted = {int(i) for i in which}
        kept = {style: np.isin(self.owners[style], list(wanted)) for style in styles}
        images = np.concatenate([self.images[style][kept[style]] for style in styles])
        owners = np.concatenate([self.owners[style][kept[style]] for style in styles])
        shown = np.unique(owners)
        emoji = [self.emoji[i] for i in shown]
        return Split(
            images, [e.text for e in emoji], owners[:, None] == shown, [e.group for e in emoji]
        )


def build(styles: Sequence[str] = PERMISSIVE) -> EmojiImages:
    """Fetch packages if need be, render what is not in the cache yet, and read it.

    Args:
        styles: Of :data:`STYLES`; the default are those of a permissive licence.

    Raises:
        DataError: If a package cannot be had.
    """
    emoji = read_names(fetch(_NAMES))
    cache = cache_folder() / "emoji"
    index = {e.code: i for i, e in enumerate(emoji)}
    images, owners = {}, {}
    for style in dict.fromkeys(styles):
        package = _STYLES[style]
        rendered = cache / f"{style}-{package.version}-{SIZE}px.npz"
        if not rendered.is_file():
            _render(fetch(package), SIZE, rendered)
        with np.load(rendered) as arrays:
            codes, pixels = arrays["codes"].tolist(), arrays["pixels"]
        known = [i for i, code in enumerate(codes) if code in index]
        order = np.array(sorted(known, key=lambda i: index[codes[i]]), dtype=int)
        images[style] = pixels[order]
        owners[style] = np.array([index[codes[i]] for i in order], dtype=np.int64)
    _attribute(cache)
    return EmojiImages(emoji, images, owners)


# --- packages -------------------------------------------------------------------------------------


def fetch(package: _Package) -> Path:
    """The folder with the files of a package; downloaded once.

    Raises:
        DataError: If npm is missing or cannot download it, or a file is missing.
    """
    cache = cache_folder() / "emoji"
    target = cache / f"{package.name.split('/')[-1]}-{package.version}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    spec = f"{package.name}@{package.version}"
    # a rename makes it complete
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=cache) as folder:
        out = Path(folder, "extracted")
        try:
            command = ["npm", "pack", "--silent", "--ignore-scripts", spec]
            subprocess.run(command, cwd=folder, capture_output=True, timeout=600, check=True)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as tar:
                for name in package.files:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    source: Any = tar.extractfile(f"package/{name}")
                    (out / name).write_bytes(source.read())
            out.rename(target)
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            if not target.is_dir():  # else another process was faster
                raise DataError(
                    f"Cannot fetch the npm package {spec} ({error}): run `npm pack {spec}` where"
                    f" there is a network, and extract its folder `package` into {target}."
                ) from None
    return target


def _attribute(cache: Path) -> None:
    lines = ["# Where these files come from", "", "Names of emoji, and drawings of them:", ""]
    for package in (_NAMES, *_STYLES.values()):
        stem = f"{package.name.split('/')[-1]}-{package.version}"
        if (cache / stem).is_dir():
            lines.append(f"- `{stem}*`: npm {package.name}, {package.licence}, {package.author}")
    lines += ["", "The images are the drawings as they are, on white. CC BY-SA: share alike.", ""]
    (cache / "ATTRIBUTION.md").write_text("\n".join(lines), encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _code(code: str) -> str:
    """Without the selectors of emoji presentation, which packages write or leave out as they like.

    Example:
        >>> _code("2764-FE0F-200D-1F525")
        '2764-200d-1f525'
    """
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def read_names(folder: Path) -> list[Emoji]:
    """The emoji of emojibase-data that belong to a group, in Unicode's order, without skin
    tones."""
    groups = _read_json(folder / "meta/groups.json")["groups"]
    rows = [row for row in _read_json(folder / "en/data.json") if "group" in row]
    return [
        Emoji(
            _code(row["hexcode"]),
            row["label"],
            tuple(tag for tag in row.get("tags", ()) if tag != row["label"]),
            groups[str(row["group"])].replace("-", " "),
        )
        for row in sorted(rows, key=lambda row: row["order"])
    ]


def _render(folder: Path, size: int, path: Path) -> None:
    """Every emoji of a style into one file: ``codes`` (n,) and ``pixels`` (n, S, S, 3)."""
    from PIL import Image
    from resvg_py import svg_to_bytes

    icons, chars = _read_json(folder / "icons.json"), _read_json(folder / "chars.json")
    codes, pixels = [], []
    for code, name in sorted(chars.items()):
        if re.search("1f3f[bcdef]", code) and "-" in code:
            continue  # the same emoji in five skin tones
        drawing = icons["icons"].get(icons.get("aliases", {}).get(name, {}).get("parent", name))
        if drawing is None:
            continue
        left, top = drawing.get("left", 0), drawing.get("top", 0)
        width, height = (drawing.get(side, icons.get(side, 16)) for side in ("width", "height"))
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
            f' width="{size}" height="{size}" viewBox="{left} {top} {width}'
            f' {height}">{drawing["body"]}</svg>'
        )
        png = svg_to_bytes(
            svg_string=svg, background="#ffffff", width=size, height=size, skip_system_fonts=True
        )
        codes.append(_code(code))
        pixels.append(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")))
    if len(set(codes)) < len(codes):  # with and without a selector: the first
        first = np.unique(codes, return_index=True)[1]
        codes, pixels = [codes[i] for i in first], [pixels[i] for i in first]
    partial = path.with_name(f".{path.name}-{os.getpid()}.npz")
    np.savez_compressed(partial, codes=np.array(codes), pixels=np.stack(pixels))
    partial.replace(path)
