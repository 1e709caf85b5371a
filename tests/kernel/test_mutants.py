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
        "given = batch.targets[:, batch.own].T",
        "given = batch.targets[:, batch.own]",
        f"{INFONCE}::test_booleans_as_targets",
    ),
    "plain: a row that names nothing": (
        "plain.py",
        "found = found + self.own * names_nothing",
        "found = found + 1e-9 * names_nothing",
        f"{INFONCE}::test_booleans_as_targets",
    ),
    "plain: frequencies of queries ignored": (
        "plain.py",
        "self.log_q = batch.log_q_queries if self.to_query else batch.log_q",
        "self.log_q = None if self.to_query else batch.log_q",
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
        "panels.py",
        "ids=torch.stack(ids, dim=1) if ids else None",
        "ids=None",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: excluded ids ignored between queries": (
        "panels.py",
        "excluded += [same_id(row, column, rows.x.dtype) for row, column in pairs]",
        "excluded += [same_id(*p, rows.x.dtype) for p in pairs if direction.count('query') == 1]",
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: labels ignored between queries": (
        "panels.py",
        "excluded += [] if same_label is None else [same_label]",
        "pass",
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: a text is a negative of itself": (
        "panels.py",
        "excluded.append(_same_pair(rows, columns))",
        "pass",
        f"{INFONCE}::test_joint_softmax",
    ),
    "tiled: booleans not transposed": (
        "panels.py",
        "given = batch.targets[:, batch.own].T",
        "given = batch.targets[:, batch.own]",
        f"{INFONCE}::test_booleans_as_targets",
    ),
    "tiled: frequencies of gathered queries ignored": (
        "panels.py",
        "bias=None if log_q is None else -log_q.to(x.dtype)",
        "bias=None if log_q is None else -log_q.to(x.dtype) * (not is_query)",
        f"{INFONCE}::test_log_q",
    ),
    "tiled: hard negatives of another query": (
        "panels.py",
        "return (lambda tile, scores: 1 - same(tile, scores)) if in_batch else same",
        "return same",
        f"{INFONCE}::test_hardness_is_a_constant_weight",
    ),
    "tiled: a row that names nothing": (
        "panels.py",
        "targets.diagonal(own + tile.start).add_(targets.sum(dim=1) == 0)",
        "pass",
        f"{INFONCE}::test_booleans_as_targets",
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
        "x[:, part].mul_(columns.scale[k])",
        "pass",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: slopes without the norms of prefixes": (
        "tiles.py",
        "_multiply_factors(block, k, slope)",
        "pass",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: gradient of the norms of a prefix": (
        "tiles.py",
        "side.grad_scale[k] += moments.sum(dim=dim) / side.scale[k]",
        "side.grad_scale[k] += moments.sum(dim=dim)",
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
        "expected = torch.linalg.vecdot(weighted, scores[k]) + best * total",
        "expected = torch.linalg.vecdot(weighted, scores[k])",
        f"{INFONCE}::test_equals_the_definition",
    ),
    "tiled: biases of several positives ignored": (
        "tiles.py",
        "softmax.biases[tile] += targets @ bias",
        "pass",
        f"{INFONCE}::test_log_q",
    ),
    "tiled: every power a square": (
        "softmax.py",
        "return round(ratio) if",
        "return 2 if",
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
        "own, pairs = (0, columns.owner) if hop == 0 else (None, None)",
        "own, pairs = 0, columns.owner if hop == 0 else None",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: pairs of other ranks taken for the own": (
        "ring.py",
        "own, pairs = (0, columns.owner) if hop == 0 else (None, None)",
        "own, pairs = 0 if hop == 0 else None, columns.owner[:1]",
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
        "num_losses = sum(num_queries) / len(num_queries) * len(softmaxes)",
        "num_losses = num_queries[0] * len(softmaxes)",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: targets of the own documents for those of all ranks": (
        "ring.py",
        "owner = (rank - hop) % ranks",
        "owner = rank",
        f"{RING}::test_equals_the_joined_batch",
    ),
    "ring: the own column of the first rank": (
        "ring.py",
        "place = edges[rank], slice(",
        "place = 0, slice(",
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
