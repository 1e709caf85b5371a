"""The recipes of CONTRIBUTING.md for a similarity, a loss and a regularizer, followed in a copy of
the package."""

import json
import shutil
from pathlib import Path

import pytest
from _processes import forked

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.losses.named import LOSSES
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import make_trainer

FILES = {
    "losses/double.py": '''
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.similarity import QNORM


class DoubleLoss(MagnitudeRankingLoss):
    """Twice InfoNCE."""

    fixed_similarity = QNORM

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        return 2 * super().compute_loss_from_embeddings(embeddings, labels)
''',
    "losses/shortness.py": '''
def shortness(embeddings):
    """The mean square of embeddings (n, D)."""
    return embeddings.float().square().mean()
''',
}
# a line of a file, and what stands before it
LINES = [
    ("similarity.py", "_NAMED = {", "HALF = Similarity(1.0, 0.5)\n"),
    ("similarity.py", '"cosine": COSINE', '"half": HALF, '),
    ("__init__.pyi", "from .similarity import QNORM", "from .similarity import HALF as HALF\n"),
    ("__init__.pyi", "from .losses import Dot", "from .losses import DoubleLoss as DoubleLoss\n"),
    (
        "__init__.pyi",
        "from .losses.prior",
        "from .losses.shortness import shortness as shortness\n",
    ),
    ("losses/__init__.pyi", "from .exponents", "from .double import DoubleLoss as DoubleLoss\n"),
    (
        "losses/named.py",
        '    "cosine": NamedLoss',
        '    "double": NamedLoss("double.DoubleLoss", "qnorm", keeps_norms=True),\n',
    ),
]
USE = """
import sys
import torch
from sentence_transformers import SentenceTransformer
import st_magnitude as stm

assert stm.HALF == stm.Similarity.named("half") and stm.HALF.name == "half"
model = SentenceTransformer(sys.argv[1], device="cpu").eval()
columns = [["tea", "maps", "bees"], ["leaves", "a country", "honey"]]
features = lambda: [model.preprocess(column) for column in columns]
stm.MagnitudeRankingLoss(stm.prepare(model, "half"), "half")(features()).backward()
stm.prepare(model, "qnorm")
one = stm.QNormRankingLoss(model)(features())
for size in (None, 2):
    loss = stm.DoubleLoss(model, mini_batch_size=size)
    torch.testing.assert_close(loss(features()), 2 * one)
terms = stm.QNormRankingLoss(model, regularizers=[(stm.shortness, 0.5)])(features())
assert list(terms) == ["infonce", "shortness"]

from st_magnitude.workbench.commands.app import app
app(sys.argv[2:])
"""


@pytest.mark.slow  # a new process, which imports a copy of the package
def test_recipes(tiny_path, data_folder, tmp_path):
    """Of a similarity, a loss and a regularizer, and a training with the loss."""
    package = tmp_path / "st_magnitude"
    shutil.copytree(Path(stm.__file__).parent, package)
    for name, text in FILES.items():
        (package / name).write_text(text, encoding="utf-8")
    for name, line, before in LINES:
        text = (package / name).read_text(encoding="utf-8")
        assert line in text, (name, line)
        (package / name).write_text(text.replace(line, before + line, 1), encoding="utf-8")
    output = tmp_path / "model"
    options = ("--loss", "double", "--max-steps", 2, "--mini-batch-size", 2, "--dims", "8,16")
    command = ("train", "--model", tiny_path, "--data", data_folder, "--output", output)
    forked("-c", USE, tiny_path, *command, *options, "--keep-anyway", cwd=tmp_path)
    record = json.loads((output / "training.json").read_text(encoding="utf-8"))
    assert record["loss"] == "DoubleLoss"
    assert stm.load(output).similarity_fn_name == "dot"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "setting", [{}, {"dims": (4, 8)}, {"temperatures": (0.1, 0.2)}, {"prior": True}], ids=str
)
def test_losses_of_the_table_take_what_train_passes(name, setting, static_model, task, tmp_path):
    assert issubclass(LOSSES[name].load("dims" in setting), stm.MagnitudeRankingLoss)
    if name == "tempspec" and {"dims", "temperatures"} & setting.keys():  # one for each
        setting = {"dims": (4, 8), "temperatures": (0.1, 0.2)}
    data = RetrievalData(*task.values())
    config = TrainConfig(loss=name, batch_size=2, **setting)
    rows = data.triplets(0)
    loss = make_trainer(static_model, data, rows, config, tmp_path, saves=False).loss
    dims = {term.dim for term in loss.terms} - {None}
    assert dims >= {*setting.get("dims", ())}
    assert {term.temperature for term in loss.terms} >= {*setting.get("temperatures", ())}
    assert (loss.prior is not None) <= setting.get("prior", False)


def test_losses_of_the_table_are_exported_and_documented():
    page = (Path(__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")
    names = {loss.load().__name__ for loss in LOSSES.values()}
    assert names <= set(stm.__all__)
    assert all(f"`{name}`" in page for name in names)
