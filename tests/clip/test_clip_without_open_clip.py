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


@pytest.fixture(params=["missing", "broken"])
def no_open_clip(request, monkeypatch):
    """Returns a part of the reason why open_clip cannot be imported."""
    for name in list(sys.modules):
        if name.startswith(("st_magnitude.clip.", "open_clip")):
            monkeypatch.delitem(sys.modules, name)
    if request.param == "missing":
        monkeypatch.setitem(sys.modules, "open_clip", None)
        return "open_clip"
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    return "operator torchvision::nms does not exist"


def test_the_program_ends_in_one_line(no_open_clip, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["st_magnitude.clip", "norm-sym", "--", "--model", "RN50"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("st_magnitude.clip", run_name="__main__")
    message = str(ended.value)
    assert no_open_clip in message
    assert 'pip install ".[clip]"' in message
    assert "\n" not in message
