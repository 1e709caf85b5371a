"""A diagnosis as a JSON file."""

from __future__ import annotations

import json

import pytest
from _planted import found_beside_a_baseline, found_in

from st_magnitude import Diagnosis


@pytest.fixture(scope="module")
def found():
    return found_beside_a_baseline()


def test_a_saved_diagnosis_is_the_same(found, tmp_path):
    path = tmp_path / "new" / "d.json"
    found.save(path)
    back = Diagnosis.load(path)
    assert back.to_dict() == found.to_dict()
    assert back.text() == found.text()
    assert isinstance(back.exponent.gain, tuple)
    assert back.is_relevant.dtype == bool
    other = found_in(0, "noise", num_queries=30)
    assert Diagnosis.from_dict(json.loads(json.dumps(other.to_dict()))).baseline is None


def change(entries, path, value):
    *parents, last = path
    for key in parents:
        entries = entries[key]
    if value is ...:
        del entries[last]
    else:
        entries[last] = value


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff\xfe\x00", b""])
def test_what_is_no_json_is_named(tmp_path, content):
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"d\.json is not a diagnosis of this version .*diagnosis\.save"):
        Diagnosis.load(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["hubness", "dot", "counts"], ..., "hubness.dot has no 'counts'"),
        (["provenance"], ..., "it has no 'provenance'"),
        (["documents", "mean"], "long", "documents.mean is not made of numbers"),
        (["documents", "values"], [1.0], r"documents.values has shape \(1,\), not \(300,\)"),
        (["exponent", "curve", "per_query"], [[1.0], [1.0, 2.0]], "exponent.curve.per_query is not made of numbers"),
        (["exponent", "gain"], [1.0, 2.0], "exponent.gain has 2 entries, not 3"),
        (["recommendations", 0, "name"], 3, r"recommendations\[0\].name is int, not str"),
        (["normalizes"], 1, "normalizes is int, not bool"),
        (["provenance", "seed"], True, "provenance.seed is bool, not int"),
        (["cells"], {}, "cells is dict, not list"),
    ],
)
def test_what_is_no_diagnosis_is_named(found, tmp_path, path, value, message):
    entries = json.loads(json.dumps(found.to_dict()))
    change(entries, path, value)
    file = tmp_path / "d.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"d\.json is not a diagnosis .*{message}.*--output FOLDER"):
        Diagnosis.load(file)
