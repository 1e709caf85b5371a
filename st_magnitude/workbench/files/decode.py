"""The text of a file whose encoding nobody named."""

from __future__ import annotations

import codecs
import re
from itertools import islice
from pathlib import Path

from charset_normalizer import from_bytes

from st_magnitude._checks import counted, shown
from st_magnitude.data.beir import DataError

WRONG = "\ufffd"  # what stands for bytes that are no letter
# Encodings that people use, of which a sample is in one. Others fit by chance.
_KNOWN = """cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp932 cp949 gb18030
    big5 euc_jp koi8_r koi8_u cp866 cp850 cp852 iso8859_2 iso8859_5 mac_roman mac_cyrillic"""
_WESTERN = "àáâãäåæçèéêëìíîïñòóôõöøùúûüßœ¿¡·‘’“”„«»…–—"
_NEVER = (("õû", "öü"), ("ã", "î"), ("æ", "è"))  # of which no Western language has two together


class LeftOut(str):
    """A note on what was left out, moved or read otherwise than it stands."""


def encoding_of(start: bytes) -> str:
    """UTF-32 or UTF-16, by its mark or by the first letter, which is a plain one; else UTF-8."""
    if start[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if start[:2].count(0) == 1:
        return "utf-16-be" if start[0] == 0 else "utf-16-le"
    return "utf-8-sig"


def decoded(path: Path, raw: bytes, notes: list[str]) -> str:
    """The text of a file. In UTF-8, single bytes that are wrong are replaced; a file that has as
    many of them as right letters beyond ASCII is cp1252, or refused."""
    encoding = encoding_of(raw)
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + len(re.findall(rb"\r\n?|\n", raw[: error.start]))
    text = raw.decode(encoding, "replace")
    wrong = text.count(WRONG)
    how = f"with {counted(wrong, 'wrong byte')} replaced by {WRONG}"
    if encoding == "utf-8-sig" and 2 * wrong > len(re.findall(r"[^\x00-\x7f]", text)):
        text = _western(path, raw)
        how = "as cp1252 (Windows, Western European)"
    name = encoding.upper().removesuffix("-SIG")
    notes.append(LeftOut(f"{path}, line {line:,}: is not {name}; the file was read {how}."))
    return text


def _western(path: Path, raw: bytes) -> str:
    """The text of a file in cp1252. DataError: it seems to be in another encoding."""
    lines = (line for line in raw.splitlines() if not line.isascii())
    sample = b"\n".join(islice(lines, 200))
    matches = from_bytes(sample, cp_isolation=_KNOWN.split())
    next_to_small = r"(?<=[a-z])[^\x00-\x7f\s]|[^\x00-\x7f\sÀ-Þ](?=[a-z])"
    found = re.findall(next_to_small, sample.decode("cp1252", "replace"))
    is_western = 10 * sum(letter not in _WESTERN for letter in found) <= len(found)
    usual = {letter for letter in {*found} if 50 * found.count(letter) > len(found)}
    is_western &= not any(usual & {*some} and usual & {*others} for some, others in _NEVER)
    guesses = [match for match in matches if "cp1252" not in match.could_be_from_charset]
    if len(guesses) < len(matches) and is_western:
        return raw.decode("cp1252")
    if not guesses:
        raise DataError(f"{path} is not UTF-8; name its encoding with --encoding NAME.")
    read = [f"{x.encoding} {shown(str(x).strip().splitlines()[0])}" for x in guesses[:3]]
    raise DataError(
        f"{path} is not UTF-8. It reads as {', as '.join(read)}. Name its encoding, as with"
        f" --encoding {guesses[0].encoding}."
    )
