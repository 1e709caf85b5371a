"""Where open_clip is missing, or broken by a torchvision that does not fit torch."""

import sys

import pytest

import st_magnitude as stm


class Broken:
    """A finder of modules that fails as a torchvision that does not fit does."""

    def find_spec(self, name, *_):
        if name == "open_clip":
            raise RuntimeError("operator torchvision::nms\ndoes not exist")


@pytest.mark.parametrize("reason", ["open_clip", "operator torchvision::nms does not exist"])
def test_the_error_is_one_line(reason, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("st_magnitude.clip.", "open_clip")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(stm.clip), "unnormalize", raising=False)
    if reason == "open_clip":
        monkeypatch.setitem(sys.modules, "open_clip", None)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ImportError, match=reason) as missing:
        stm.clip.unnormalize  # noqa: B018
    assert 'pip install ".[clip]"' in str(missing.value)
    assert "\n" not in str(missing.value)
