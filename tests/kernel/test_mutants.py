"""One-line mutations of the kernel, each of which the tests of the kernel must notice."""

import os
import shutil
from pathlib import Path

import pytest
from _processes import python

import st_magnitude

pytestmark = pytest.mark.slow

PACKAGE = Path(st_magnitude.__file__).parent
TESTS = Path(__file__).parent

# (file, tests that must fail): the line, and what takes its place
MUTANTS = {
    ("plain.py", "test_infonce.py::test_equals_the_definition"): [
        ("said = [self._same(ids) for ids in batch.excluded_ids]", "said = []"),
        ("& ~self.is_pair & (self.targets == 0)", "& ~self.is_pair"),
        ("batch.offset if self.to_query and batch.all_queries is None else 0", "0"),
        ("self.scores[max(dims)].detach()", "self._scores(self.rows.shape[1])"),
    ],
    ("plain.py", "test_targets.py::test_constants_change_neither_type_nor_gradient"): [
        ("batch.weights.detach()", "batch.weights"),
        ("self.log_q.detach()", "self.log_q"),
        ("found = found.detach()", "found = found"),
    ],
    ("plain.py", "test_infonce.py::test_equals_the_plain_formula"): [
        ("shared = [self._same(ids) for ids in self.batch.excluded_ids]", "shared = []"),
        ("shared += [self._same(labels) for labels in self.batch.labels]", "pass"),
        ("batch.log_q_queries if self.to_query", "None if self.to_query"),
    ],
    ("plain.py", "test_infonce.py::test_booleans_as_targets"): [
        ("given = batch.targets[:, batch.pairs].T", "given = batch.targets[:, batch.pairs]"),
        ("found = found + self.is_pair * names_nothing", "found = found + 1e-9 * names_nothing"),
    ],
    ("plain.py", "test_targets.py::test_weights_multiply_the_losses_of_rows"): [
        ("(weights * loss).mean()", "loss.mean()"),
    ],
    ("tiled.py", "test_targets.py::test_weights_multiply_the_losses_of_rows"): [
        ("row_weights = batch.weights.detach().to(row_weights)", "pass"),
    ],
    ("tiled.py", "test_targets.py::test_targets_are_the_formula"): [
        ("targets, push[:, None], value=-1)", "targets, push[:, None], value=-0.9)"),
    ],
    ("panels.py", "test_infonce.py::test_equals_the_definition"): [
        ("excluded = _same_ids(rows.ids, columns.ids, rows.x.dtype)", "excluded = []"),
    ],
    ("vectors.py", "test_infonce.py::test_equals_the_definition"): [
        ("part_of(ids.queries if is_query else ids.documents)", "part_of(ids.documents)"),
        ("torch.linalg.vecdot(x, grad)[:, None]", "torch.linalg.vecdot(x, grad)[:, None] * 1.01"),
    ],
    ("vectors.py", "test_infonce.py::test_equals_the_plain_formula"): [
        ("bias=None if log_q is None", "bias=None if log_q is None or is_query"),
    ],
    ("panels.py", "test_infonce.py::test_equals_the_plain_formula"): [
        ("rows.ids, columns.ids,", "rows.ids if '_to_doc' in direction else None, columns.ids,"),
        ("[_same_pair(batch, rows, columns, offset), *same_label]", "[*same_label]"),
        ("columns, offset), *same_label]", "columns, offset)]"),
    ],
    ("panels.py", "test_ring.py::test_equals_the_joined_batch"): [
        ("positives = of_pairs[tile]", "positives = of_pairs[: len(scores)]"),
        ("too_close.mul_(same(tile, scores) == 0)", "pass"),
    ],
    ("panels.py", "test_infonce.py::test_booleans_as_targets"): [
        ("given = batch.targets[:, batch.pairs].T", "given = batch.targets[:, batch.pairs]"),
        ("targets.diagonal(offset + tile.start).add_(targets.sum(dim=1) == 0)", "pass"),
    ],
    ("tiled.py", "test_infonce.py::test_equals_the_definition"): [
        ("mask.mul_(targets == 0)", "pass"),
        ("mask.diagonal(panel.offset + tile.start).zero_()", "mask.diagonal(panel.offset).zero_()"),
        ("x[:, part].mul_(columns.scale[:, k].contiguous())", "pass"),
        ("_multiply_factors(block, k, slope)", "pass"),
        ("moments.sum(dim=dim) / vectors.scale[:, k]", "moments.sum(dim=dim)"),
        (".sub_(push)", ".sub_(push / 2)"),
        ("scores[k]) - shift * total", "scores[k])"),
    ],
    ("tiled.py", "test_infonce.py::test_equals_the_plain_formula"): [
        ("softmax.pair_biases[tile] = bias[offset + tile.start : offset + tile.stop]", "pass"),
        ("logits + bias - self.pair_biases[tile]", "logits + bias"),
    ],
    ("tiled.py", "test_infonce.py::test_log_q_is_the_definition"): [
        ("return bias, middle, (bias - middle).exp()", "return bias, 0 * middle, bias.exp()"),
    ],
    ("tiled.py", "test_infonce.py::test_float32_holds_where_probabilities_underflow"): [
        ("share = 1 / total if finds_sums else", "share ="),
    ],
    ("terms.py", "test_infonce.py::test_powers_of_an_exponential"): [
        ("return round(ratio) if", "return 2 if"),
        ("MAX_EXPONENT = 100.0", "MAX_EXPONENT = 1e9"),
    ],
    ("ring.py", "test_ring.py::test_equals_the_joined_batch"): [
        ("offset = 0 if hop == 0 else None", "offset = 0"),
        ("returned = _pass_on(gradient, arriving)", "returned = None"),
        ("_add(gradient, returned())", "returned()"),
        ("sum(num_queries) / len(num_queries) * len", "num_queries[0] * len"),
    ],
}
CASES = [(*place, *change) for place, changes in MUTANTS.items() for change in changes]


@pytest.mark.parametrize(("file", "test", "line", "mutated"), CASES)
def test_a_mutant_is_noticed(tmp_path, file, test, line, mutated):
    shutil.copytree(
        PACKAGE, tmp_path / "st_magnitude", ignore=shutil.ignore_patterns("__pycache__")
    )
    source = tmp_path / "st_magnitude" / "kernel" / file
    text = source.read_text()
    assert text.count(line) == 1, f"{file} has the line {text.count(line)} times"
    source.write_text(text.replace(line, mutated))
    path = os.pathsep.join(map(str, (tmp_path, TESTS.parent)))
    options = ["-xq", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not slow"]
    arguments = ("-m", "pytest", *options, TESTS / test)
    result = python(*arguments, code=1, cwd=tmp_path, environment={"PYTHONPATH": path})
    assert "Error" in result.stdout
    assert "ImportError" not in result.stdout
