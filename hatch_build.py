"""The README for PyPI, which shows it away from the repository: relative links lead to the files of
the release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url := metadata.get("urls", {}).get("Repository"):
            text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{url}/raw/v{metadata['version']}/", text)
            text = re.sub(r"(\]\()(?!\w+:|#)", rf"\1{url}/blob/v{metadata['version']}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
