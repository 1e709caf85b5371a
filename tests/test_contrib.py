"""The patches in contrib/ change the files that their README names, as it says."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sentence_transformers.base.losses import merged_forward
from sentence_transformers.sentence_transformer.losses import (
    MultipleNegativesRankingLoss,
    multiple_negatives_ranking,
)
from torch import Tensor, nn

FOLDER = Path(__file__).parents[1] / "contrib" / "sentence-transformers"
MTEB = FOLDER.with_name("mteb") / "0001-run-folders.patch"
PATCHES = sorted(FOLDER.glob("*-mnrl-*.patch"))
GROUPS = FOLDER / "0003-group-by-length.patch"
LOSS = "sentence_transformers/sentence_transformer/losses/multiple_negatives_ranking.py"
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = [
    {},
    {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    {"directions": FOUR, "hardness_mode": "all_negatives", "hardness_strength": 5.0},
]


def git(tree: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    """Git in a folder that is part of no repository."""
    if shutil.which("git") is None:
        pytest.skip("git is not here to read the patches")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    return subprocess.run(
        ["git", *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def patched_module(installed: ModuleType, name: str, tree: Path, patches: list[Path]) -> ModuleType:
    """An installed module, with patches applied to a copy."""
    copy = tree / name
    copy.parent.mkdir(parents=True)
    # the wheel's lines end in \r\n
    text = Path(installed.__file__).read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8", newline="\n")
    for path in patches:
        # their tests are not installed
        result = git(tree, "apply", "--exclude=tests/*", path)
        if result.returncode:  # the nightly job has the newest releases
            stop = pytest.fail if "PATCHES_MUST_APPLY" in os.environ else pytest.skip
            stop(f"{path.name} does not fit the installed version: {result.stderr}")
    spec = importlib.util.spec_from_file_location(f"patched_{copy.stem}", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    tree = tmp_path_factory.mktemp("tree")
    return patched_module(multiple_negatives_ranking, LOSS, tree, PATCHES)


def value_and_gradients(loss: nn.Module, embeddings: list[Tensor]) -> list[Tensor]:
    value = loss.compute_loss_from_embeddings(embeddings, None)
    return [value.detach(), *torch.autograd.grad(value, embeddings)]


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradient_stay_the_same(patched, options, chunk_size):
    embeddings = [torch.randn(7, 16, requires_grad=True) for _ in range(3)]
    theirs = MultipleNegativesRankingLoss(nn.Identity(), **options)
    expected = value_and_gradients(theirs, embeddings)
    loss = patched.MultipleNegativesRankingLoss(nn.Identity(), **options, chunk_size=chunk_size)
    actual = value_and_gradients(loss, embeddings)
    exact = {"rtol": 0, "atol": 0} if chunk_size is None else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(actual, expected, **exact)
    assert loss.get_config_dict().get("chunk_size") == chunk_size


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_duplicates_count_as_little_as_if_they_were_removed(patched, model, chunk_size):
    def results(loss: nn.Module, *batches: list[list[str]]) -> list[Tensor]:
        model.zero_grad()
        columns = [[model.preprocess(column) for column in batch] for batch in batches]
        value = torch.stack([loss(batch, None) for batch in columns]).mean()
        value.backward()
        return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    # Both rows have one anchor; its positives and a negative are repeated.
    query, positive = "how long does green tea steep", "two minutes"
    another = "a much longer text about green tea"
    repeated = [[query, query], [positive, another], [query, "rain"], ["snow", another]]
    removed = [
        # the negative `another` is no copy of `positive`
        [[query], [positive], ["rain"], ["snow"], [another]],
        [[query], [another], ["rain"], ["snow"]],
    ]
    loss = patched.MultipleNegativesRankingLoss(model, mask_duplicates=True, chunk_size=chunk_size)
    expected = results(MultipleNegativesRankingLoss(model), *removed)
    torch.testing.assert_close(results(loss, repeated), expected, rtol=1e-4, atol=1e-5)


def test_groups_by_length_keep_loss_and_gradients(tmp_path, model, monkeypatch):
    name = "sentence_transformers/base/losses/merged_forward.py"
    module = patched_module(merged_forward, name, tmp_path, [GROUPS])
    monkeypatch.setattr(multiple_negatives_ranking, "embed_columns", module.embed_columns)
    loss = MultipleNegativesRankingLoss(model)
    columns = [
        ["tea", "how long does green tea steep"],
        ["two minutes", "rain"],
        ["snow", "a leaf"],
    ]
    shapes = []
    model.register_forward_pre_hook(lambda _, args: shapes.append(args[0]["input_ids"].shape))

    def results() -> list[Tensor]:
        value = loss([model.preprocess(column) for column in columns], None)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        return [value.detach(), *(x for x in gradients if x is not None)]

    expected = results()
    tokens = sum(shape.numel() for shape in shapes)
    for number in (2, 4):
        shapes.clear()
        with module.columns_grouped_by_length(number):
            torch.testing.assert_close(results(), expected, rtol=1e-4, atol=1e-5)
        assert len(shapes) == number
        assert sum(shape.numel() for shape in shapes) < tokens


def test_mteb_takes_a_folder(tmp_path: Path, minilm_path: str) -> None:
    found = pytest.importorskip("mteb.models.get_model_meta")
    module = patched_module(found, "mteb/models/get_model_meta.py", tmp_path, [MTEB])
    model = module.get_model(minilm_path, device="cpu")
    assert model.mteb_model_meta.name == "local/model"
    assert model.mteb_model_meta.revision == module.get_model(minilm_path).mteb_model_meta.revision
    with pytest.raises(NotImplementedError, match="No model implementation"):
        found.get_model(minilm_path)
