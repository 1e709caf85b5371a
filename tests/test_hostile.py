"""Models and data from strangers: none of their code runs, and nothing is written elsewhere."""

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _processes import python
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW, Dense

import st_magnitude as stm
from st_magnitude._upstream import SINCE_6_2
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.training.run_folder import WORK
from st_magnitude.workbench.finetune.train import TrainConfig, train

DATA = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {query: {"d19"} for query in QUERIES})


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that must not come to be."""
    return tmp_path / "mark"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model with weights of sentence-transformers' and of ours."""
    model = SentenceTransformer(modules=[BoW(["bread", "tea", "cat"]), Dense(3, 2)], device="cpu")
    stm.prepare(model, stm.Similarity(1.0, 0.5)).save_pretrained(str(tmp_path / "model"))
    return tmp_path / "model"


def edit(path: Path, change: Callable) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("module", ["1_Dense", "2_ExponentNorm"])
@pytest.mark.parametrize("torch_format", [False, True])
def test_pickled_weights_are_not_unpickled(
    saved: Path, mark: Path, module: str, torch_format: bool
) -> None:
    path = saved / module / "pytorch_model.bin"
    if torch_format:
        torch.save({"linear.weight": Payload(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(Payload(mark)))
    stm.load(saved, device="cpu")  # the weights in safetensors go before
    (saved / module / "model.safetensors").unlink()
    with pytest.raises(OSError, match="Take safetensors") as refused:
        stm.load(saved, device="cpu")
    assert "weights_only" not in str(refused.value)  # upstream advises to run it
    assert not mark.exists()
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert mark.exists()  # it would have, else


@pytest.mark.parametrize(
    "name", ["evil.Evil", "os.system", "st_magnitude.workbench.commands.app.main"]
)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_no_class_of_the_models_own_is_imported(saved, mark, monkeypatch, name, place) -> None:
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass Evil: pass\n"
    (saved / "evil.py" if place == "inside" else saved.parent / "evil.py").write_text(code)
    monkeypatch.syspath_prepend(saved.parent)
    edit(saved / "modules.json", lambda modules: [modules[0] | {"type": name}, *modules[1:]])
    with pytest.raises(ValueError, match="trust_remote_code") as refused:
        stm.load(saved, device="cpu")
    assert name not in str(refused.value)
    assert not mark.exists()
    if (name, place) == ("evil.Evil", "inside"):
        cache = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
        monkeypatch.setattr(cache, str(saved.parent / "cache"))
        with contextlib.suppress(AttributeError):  # it is no module of sentence-transformers
            stm.load(saved, device="cpu", trust_remote_code=True)
        assert mark.exists()  # it would have, else


@pytest.mark.parametrize("name", ["load", "load_retriever"])
def test_no_code_for_a_tokenizer_or_a_model_is_imported(tiny_path, mark, monkeypatch, name) -> None:
    """Nor does transformers ask at the terminal whether to trust it."""
    package = stm if name == "load" else pytest.importorskip("st_magnitude.revela.trainer")
    load = getattr(package, name)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks whether to run the code"))
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (tiny_path / "evil.py").write_text(code)
    auto = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoModelForCausalLM": "evil.M"}
    evil = {"auto_map": auto | {"AutoTokenizer": ["evil.T"] * 2}, "model_type": "evil"}
    edit(tiny_path / "config.json", lambda config: config | evil)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(tiny_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda content: content[:-9]),
        ("config.json", lambda content: content[:-9]),
        ("1_Pooling/config.json", lambda _: b"[]"),
        ("modules.json", lambda _: b"[5]"),
        ("config_sentence_transformers.json", lambda _: b'{"prompts": {"query": 5}}'),
        ("config.json", lambda content: content.replace(b'"dim": 32', b'"dim": "x"')),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named(tiny_path, name, damage) -> None:
    """A file is damaged, or files do not fit each other."""
    content = (tiny_path / name).read_bytes()
    (tiny_path / name).write_bytes(damage(content))
    assert (tiny_path / name).read_bytes() != content
    with pytest.raises(OSError, match=str(tiny_path)):
        stm.load(tiny_path)
    with pytest.raises(ValueError, match="name of the model is empty"):
        stm.load("")


@pytest.mark.parametrize("outside", ["../elsewhere", "/etc"])
def test_modules_and_splits_lie_within_their_folder(saved, outside) -> None:
    edit(saved / "modules.json", lambda modules: [*modules[:-1], modules[-1] | {"path": outside}])
    refusal = "relative path" if SINCE_6_2 else "Could not find"  # which looks there
    with pytest.raises(ValueError, match=refusal):
        stm.load(saved, device="cpu")
    with pytest.raises(DataError, match="usable as a file name"):
        DATA.save(saved / "data", outside)


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin"])
def test_a_checkpoint_to_resume_from_is_not_unpickled(tiny_path, tmp_path, mark, name) -> None:
    options = {"loss": "dot", "batch_size": 4, "save_steps": 1, "keep_checkpoints": True}
    place = (str(tiny_path), DATA, tmp_path / "out")
    train(*place, TrainConfig(max_steps=1, **options))
    for file in (tmp_path / "out").iterdir():
        if file.name != WORK:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    torch.save({"state": Payload(mark)}, tmp_path / "out" / WORK / "checkpoint-1" / name)
    # not of training_args.bin, which nobody reads
    with contextlib.suppress(pickle.UnpicklingError):
        train(*place, TrainConfig(max_steps=2, resume=True, **options))
    assert not mark.exists()
    assert (tmp_path / "out" / "modules.json").exists() == (name == "training_args.bin")


AUDITED = """
import json, os, sys

seen = []

def hook(event, args):
    paths = []
    if event == "open" and isinstance(args[0], (str, bytes)):
        _, mode, flags = args
        writes = set(mode or "") & set("wax+") or not mode and flags & (os.O_WRONLY | os.O_RDWR)
        paths = args[:1] if writes else []
    elif event in ("os.rename", "os.link", "os.symlink"):
        paths = args[:2]
    elif event in ("os.mkdir", "os.truncate", "shutil.rmtree"):
        paths = args[:1]
    elif event in ("os.remove", "os.rmdir"):
        paths = args[:1] if args[1] == -1 else []  # else in a folder that is being removed
    elif event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "socket.connect"):
        seen.append((event, str(args)))
    elif event == "subprocess.Popen" and os.path.basename(args[0]) not in ("ldconfig", "fc-list"):
        seen.append((event, str(args)))
    seen.extend(("written", os.path.realpath(os.fsdecode(path))) for path in paths)

sys.addaudithook(hook)
from st_magnitude.workbench.commands.app import app

for arguments in json.loads(sys.argv[2]):
    try:
        app(arguments)
    except SystemExit as end:
        seen.append(("ended", end.code))
with open(sys.argv[1], "w") as file:
    json.dump(seen, file)
"""


@pytest.mark.slow
def test_commands_write_into_their_output_and_nowhere_else(tmp_path) -> None:
    """With ids like paths, and markup; and they run, unpickle and connect to nothing."""
    place = tmp_path / "place"
    markup = "<script>{}</script>\0\u2028{{{{7*7}}}}"
    corpus = {f"../../{key}": markup.format(text) for key, text in CORPUS.items()}
    queries = {f"/tmp/{key}": f"$(touch x); {text}" for key, text in QUERIES.items()}
    relevant = {f"/tmp/{q}": {f"../../{d}" for d in found} for q, found in RELEVANT_DOCS.items()}
    for split, asked in (("train", list(relevant)[:4]), ("dev", list(relevant)[4:])):
        judged = {query: relevant[query] for query in asked}
        RetrievalData(queries, corpus, judged).save(place / "data", split)
    load_transformer(save_transformer(tmp_path / "plain")).save_pretrained(str(place / "model"))
    options = (
        "--loss qnorm --keep-scoring --batch-size 4 --max-steps 2 --save-steps 1 --keep-anyway"
    )
    commands = [
        f"train --data data --model model --output out/trained {options}",
        "calibrate out/trained --data data --output out/calibrated",
        "compress out/trained --data data",
    ]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    names = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TORCHINDUCTOR_CACHE_DIR")
    caches = dict.fromkeys(names, str(scratch))
    environment = caches | {"PYTHONDONTWRITEBYTECODE": "1"}
    split = json.dumps([command.split() for command in commands])
    arguments = ("-c", AUDITED, tmp_path / "seen", split)
    done = python(*arguments, cwd=place, environment=environment)
    seen = json.loads((tmp_path / "seen").read_text())
    codes = [what for kind, what in seen if kind == "ended"]
    assert codes == [0] * len(commands), done.stderr[-2000:]
    assert {kind for kind, _ in seen} == {"ended", "written"}, seen
    allowed = (str(place / "out"), str(scratch), str(tmp_path / "seen"), "/dev/null")
    assert not [what for kind, what in seen if kind == "written" and not what.startswith(allowed)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["place", "plain", "scratch", "seen"]
    assert sorted(p.name for p in place.iterdir()) == ["data", "model", "out"]
