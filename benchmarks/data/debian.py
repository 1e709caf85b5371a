"""From the package manager of Debian: the files of a package, and the descriptions of all.

Everything is kept in one cache folder: ``$ST_MAGNITUDE_CACHE``, else ``st_magnitude`` in
``$XDG_CACHE_HOME`` or ``~/.cache``. Nothing of it is part of this repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from st_magnitude.data.beir import DataError

_PATIENCE = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=30")


def cache_folder() -> Path:
    if folder := os.environ.get("ST_MAGNITUDE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "st_magnitude"


def fetch(package: str) -> Path:
    """The folder of a package, which holds ``usr/share/...``; downloaded once, and not installed.

    Raises:
        DataError: If the package cannot be downloaded or extracted here.
    """
    target = cache_folder() / package
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # a rename makes it complete
    with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=target.parent) as folder:
        root = ("-o", "APT::Sandbox::User=root") if getattr(os, "geteuid", lambda: 1)() == 0 else ()
        try:
            _call(folder, "apt-get", "-qq", *_PATIENCE, *root, "download", package)
            for archive in Path(folder).glob("*.deb"):
                _call(folder, "dpkg-deb", "-x", archive.name, "extracted")
            Path(folder, "extracted").rename(target)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or error
            if not target.is_dir():  # else another process was faster
                raise DataError(
                    f"Cannot fetch the Debian package {package} ({said}): run `apt-get download"
                    f" {package} && dpkg -x {package}_*.deb {target}` where there is a network."
                ) from None
    return target


def _call(folder: str, *command: str) -> None:
    options = {"capture_output": True, "text": True, "timeout": 900, "check": True}
    subprocess.run(command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, **options)


def package_lists(pattern: str) -> list[str]:
    """The texts of the lists of apt, which stay in the cache; needs apt and, once, a network."""
    lists = cache_folder() / "package-descriptions"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    if not (files := sorted(lists.glob(pattern))):
        options = (f"Dir::State::Lists={lists}", "Acquire::Languages=en", "APT::Sandbox::User=root")
        flags = [x for option in options for x in ("-o", option)]
        subprocess.run(["apt-get", "-qq", *flags, "update"], check=True)
        files = sorted(lists.glob(pattern))
    read = ["/usr/lib/apt/apt-helper", "cat-file"]
    how = {"capture_output": True, "check": True, "text": True}
    return [subprocess.run([*read, path], **how).stdout for path in files]


def package_descriptions() -> list[tuple[str, str]]:
    """The short and the long description of each of Debian's packages, sorted; needs apt."""
    found = set()
    for text in package_lists("*Translation-en*"):
        for short, long in re.findall(r"^Description-en: (.*)((?:\n .*)*)", text, re.M):
            lines = re.sub(r"^ \.$", "", long, flags=re.M)  # a dot alone is an empty line
            found.add((" ".join(short.split()), " ".join(lines.split())))
    return sorted(found)
