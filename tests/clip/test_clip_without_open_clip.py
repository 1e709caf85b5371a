"""Where open_clip is missing, or broken by a torchvision that does not fit torch."""

from __future__ import annotations

import runpy
import sys

import pytest


class Broken:
    """A finder of modules that fails as a torchvision that does not fit does."""

    def find_spec(self, name, *_):
        if name == "open_clip":
            raise RuntimeError("operator torchvision::nms\ndoes not exist")


@pytest.mark.parametrize("reason", ["open_clip", "operator torchvision::nms does not exist"])
def test_the_program_ends_in_one_line(reason, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("st_magnitude.clip.", "open_clip")):
            monkeypatch.delitem(sys.modules, name)
    if reason == "open_clip":
        monkeypatch.setitem(sys.modules, "open_clip", None)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["st_magnitude.clip", "norm-sym", "--", "--model", "RN50"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("st_magnitude.clip", run_name="__main__")
    message = str(ended.value)
    assert reason in message
    assert 'pip install ".[clip]"' in message
    assert "\n" not in message
