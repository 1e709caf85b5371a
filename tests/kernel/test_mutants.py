"""One-line mutations of the kernel, each of which the tests of the kernel must notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import st_magnitude

pytestmark = pytest.mark.slow

PACKAGE = Path(st_magnitude.__file__).parent
TESTS = Path(__file__).parent

INFONCE, TARGETS, RING = "test_infonce.py", "test_targets.py", "test_ring.py"
# (file, line, what takes its place, tests that must fail)
MUTANTS = {
    "plain: excluded ids ignored": (
        "plain.py",
        "said = [self._same(ids) for ids in batch.excluded_ids]",
        "said = []",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "plain: excluded ids ignored between queries": (
        "plain.py",
        "shared = [self._same(ids) for ids in self.batch.excluded_ids]",
        "shared = []",
        f"{INFONCE}::test_joint_softmax",
    ),
    "plain: labels ignored between queries": (
        "plain.py",
        "shared.append(self._same(self.batch.positives))",
        "pass",
        f"{INFONCE}::test_joint_softmax",
    ),
    "plain: positives can be left out": (
        "plain.py",
        "self.left_out = self._false_negatives(scores) & ~self.own & (self.targets == 0)",
        "self.left_out = self._false_negatives(scores) & ~self.own",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "plain: booleans not transposed": (
        "plain.py",
        "found = batch.positives[:, batch.own].T if self.to_query else batch.positives",
        "found = batch.positives[:, batch.own] if self.to_query else batch.positives",
        f"{INFONCE}::test_booleans_as_positives",
    ),
    "plain: a row that names nothing": (
        "plain.py",
        "found = found + self.own * names_nothing",
        "found = found + 1e-9 * names_nothing",
        f"{INFONCE}::test_booleans_as_positives",
    ),
    "plain: frequencies of queries ignored": (
        "plain.py",
        "log_q = batch.log_q_queries if self.to_query else batch.log_q",
        "log_q = None if self.to_query else batch.log_q",
        f"{INFONCE}::test_log_q",
    ),
    "plain: a gradient through the hardness": (
        "plain.py",
        "logits = logits + self.hardness * scores.detach()",
        "logits = logits + self.hardness * scores",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "plain: offset of queries ignored": (
        "plain.py",
        "start = batch.offset if self.to_query and batch.all_queries is None else 0",
        "start = 0",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "plain: weights of rows ignored": (
        "plain.py",
        "losses.append(term.weight * (weights * loss).mean())",
        "losses.append(term.weight * loss.mean())",
        f"{TARGETS}::test_weights_multiply_the_losses_of_rows",
    ),
    "tiled: excluded ids ignored": (
        "rules.py",
        "ids = [x[rows] for x in batch.excluded_ids if is_block or _may_repeat(x)]",
        "ids = []",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: excluded ids ignored between queries": (
        "rules.py",
        "excluded += [same_id(of_row, of_column, dtype) for of_row, of_column in pairs]",
        'excluded += [same_id(r, c, dtype) for r, c in pairs if direction.count("query") == 1]',
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: labels ignored between queries": (
        "rules.py",
        "excluded.append(same_label)",
        "pass",
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: a text is a negative of itself": (
        "rules.py",
        "excluded.append(equal(rows.owner, columns.owner))",
        "pass",
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: booleans not transposed": (
        "rules.py",
        'named = named[:, batch.own].T if direction == "doc_to_query" else named',
        'named = named[:, batch.own] if direction == "doc_to_query" else named',
        f"{INFONCE}::test_booleans_as_positives",
    ),
    "tiled: frequencies of gathered queries ignored": (
        "rules.py",
        "bias = bias if covers_own_only else bias[rows]",
        "bias = bias if covers_own_only else bias[rows] * (not is_query)",
        f"{INFONCE}::test_log_q",
    ),
    "tiled: hard negatives of another query": (
        "rules.py",
        "return unequal(rows.owner, columns.owner)",
        "return equal(rows.owner, columns.owner)",
        f"{INFONCE}::test_hardness_is_a_constant_weight",
    ),
    "tiled: a row that names nothing": (
        "tiles.py",
        "targets.diagonal(panel.own + tile.start).add_(targets.sum(dim=1) == 0)",
        "pass",
        f"{INFONCE}::test_booleans_as_positives",
    ),
    "tiled: positives can be left out": (
        "tiles.py",
        "mask.mul_(targets == 0)",
        "pass",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: the diagonal of the first tile": (
        "tiles.py",
        "mask.diagonal(panel.own + tile.start).zero_()",
        "mask.diagonal(panel.own).zero_()",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: prefixes without the norms of columns": (
        "tiles.py",
        "scores[k].mul_(columns.scale[k])",
        "pass",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: slopes without the norms of rows": (
        "tiles.py",
        "slope.mul_(rows.scale[k][:, None])",
        "pass",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: gradient of the norms of a prefix": (
        "tiles.py",
        "rows.grad_scale[k] += moments.sum(dim=1) / rows.scale[k]",
        "rows.grad_scale[k] += moments.sum(dim=1)",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: half of the attraction": (
        "tiles.py",
        "slope.diagonal(own + tile.start).sub_(push)",
        "slope.diagonal(own + tile.start).sub_(push / 2)",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: expected score without the shift": (
        "tiles.py",
        "expected = torch.linalg.vecdot(weighted, scores) + best * total",
        "expected = torch.linalg.vecdot(weighted, scores)",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: biases of several positives ignored": (
        "tiles.py",
        "softmax.biases[tile] += targets @ panel.bias",
        "pass",
        f"{INFONCE}::test_log_q",
    ),
    "tiled: every power a square": (
        "panels.py",
        "powers[after] = round(ratio)",
        "powers[after] = 2",
        f"{INFONCE}::test_powers_of_an_exponential",
    ),
    "tiled: gradient of learned exponents": (
        "norms.py",
        "whole = torch.linalg.vecdot(x, grad)",
        "whole = torch.linalg.vecdot(x, grad) * 1.01",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "ring: blocks of other ranks taken for the own": (
        "ring.py",
        "place = own.own if hop == 0 else None",
        "place = own.own",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: pairs of other ranks taken for the own": (
        "ring.py",
        "is_other_rank=hop > 0",
        "is_other_rank=False",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: gradients of earlier ranks lost": (
        "ring.py",
        "_add(gradient, returned())",
        "returned()",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: the mean over the rows of the first rank": (
        "ring.py",
        "num_rows = sum(sizes[0]) / len(sizes[0])",
        "num_rows = sizes[0][0]",
        f"{RING}::test_equals_the_joined_batch",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(tmp_path, mutant):
    file, line, mutated, test = mutant
    shutil.copytree(
        PACKAGE, tmp_path / "st_magnitude", ignore=shutil.ignore_patterns("__pycache__")
    )
    source = tmp_path / "st_magnitude" / "kernel" / file
    text = source.read_text()
    assert text.count(line) == 1, f"{file} has the line {text.count(line)} times"
    source.write_text(text.replace(line, mutated))
    path = os.pathsep.join(map(str, (tmp_path, TESTS.parent)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    result = subprocess.run(
        [*command, "-m", "not slow", str(TESTS / test)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]
    assert "Error" in result.stdout
    assert "ImportError" not in result.stdout
