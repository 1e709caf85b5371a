"""The source text keeps to the layers and the rules of CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "st_magnitude"

# From the bottom up, the plugin and on it the workbench. A module may import from lower layers and
# from its own; __init__ and __main__ of the package stand above all others.
PLUGIN = (
    ("similarity", "result", "judge", "_distributed", "_upstream", "_checks", "_files"),
    ("geometry", "kernel"),
    ("modules",),
    ("losses", "surgery", "saving", "data"),
    ("training",),
    ("clip", "revela", "evaluation", "mteb"),
)
WORKBENCH = (
    ("_config", "files", "memory"),
    ("judging",),
    ("calibration", "report", "searcher"),
    ("serving", "finetune"),
    ("comparison",),
    ("commands",),
)
LAYERS = (*PLUGIN, *WORKBENCH, ("__init__", "__main__"))
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
STRANGERS = {("clip", "revela"), ("revela", "clip")}  # on one layer, but neither may know the other
MODULES = sorted(PACKAGE.rglob("*.py"))
PARSED = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def home_of(parts: tuple[str, ...]) -> str:
    """The folder of a wing, or the module itself, from the parts of a name below the package."""
    name = parts[1] if parts[0] == "workbench" and len(parts) > 1 else parts[0]
    return "__init__" if name == "workbench" else name


def home(path: Path) -> str:
    return home_of(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> Iterator[str]:
    """The names of the package that a module imports, in functions too."""
    for node in ast.walk(PARSED[path]):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == PACKAGE.name)


def test_imports_point_down():
    assert {*map(home, MODULES)} <= LAYER.keys()
    for path, name in ((file, name) for file in MODULES for name in imports(file)):
        parts = name.split(".")[1:]
        target = home_of((*parts, ""))
        target = target if target in LAYER else "__init__"
        if parts != ["__version__"]:
            assert LAYER[target] <= LAYER[home(path)], f"{path} imports {name}, which lies above it"
            assert (home(path), target) not in STRANGERS, f"{path} imports {name}"


def module_of(name: str) -> Path | None:
    """The file of a module of the package, by the name of it or of something in it."""
    place = PACKAGE.parent.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py", place.parent.with_suffix(".py"))
    return next((file for file in files if file in PARSED), None)


def test_no_modules_know_each_other():
    """Not for a type alone either (TYPE_CHECKING), and not in a function."""
    known = {path: {*map(module_of, imports(path))} - {path, None} for path in MODULES}
    assert sum(map(len, known.values())) > 4 * len(known)
    TopologicalSorter(known).prepare()  # CycleError: these modules import each other


def test_the_plugin_knows_nothing_of_the_workbench():
    """Not in a name of a string either, as importlib takes one."""
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] not in ("workbench", "__main__.py"):
            assert "workbench" not in path.read_text(encoding="utf-8"), path


def test_the_drawing_of_contributing_is_this_table():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.split("### The layers")[1].split("```")[1]
    words = [set(re.findall(r"\w+", layer)) & LAYER.keys() for layer in re.split("---+", drawn)]
    assert words == [set(names) for names in reversed(LAYERS[:-1])]


@pytest.mark.parametrize(
    ("names", "homes"),
    [
        ("typer", ("commands",)),
        ("open_clip", ("clip",)),
    ],
)
def test_only_these_import(names, homes):
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        found = re.search(rf"^\s*(import|from) ({names})", text, re.M)
        assert home(path) in homes or not found, path


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in PARSED.items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path.relative_to(PACKAGE).as_posix(), node


def test_no_file_has_more_than_450_lines():
    for path in MODULES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, path


def test_no_function_has_more_than_60_lines_after_its_docstring():
    for file, node in nodes(ast.FunctionDef):
        statements = node.body[1:] if ast.get_docstring(node) else node.body
        lines = node.end_lineno - statements[0].lineno + 1 if statements else 0
        most = 61 if node.name == "_visit_tile" else 60  # whose comments give the order
        assert lines <= most, f"{file}: {node.name}"


def test_what_commands_reach_refuses_by_a_class_of_its_own():
    """The others keep their traceback on the command line (`_checks.InputError`)."""
    for file, node in nodes(ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if not file.startswith(("kernel/", "geometry", "clip/", "revela/")):
            name = getattr(raised, "id", "")
            assert name not in ("ValueError", "TypeError", "ImportError"), file


def test_private_names_of_other_packages_stand_in_one_place():
    for file, node in nodes(ast.ImportFrom):
        if file != "_upstream.py" and node.module and not node.module.startswith("st_magnitude"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{file} imports {private}; put them into _upstream.py"
    own = {node.name for _, node in nodes(ast.FunctionDef)}
    for kind in (ast.Attribute, ast.Name):  # what the package itself assigns
        assigned = [node for _, node in nodes(kind) if isinstance(node.ctx, ast.Store)]
        own |= {getattr(node, "attr", getattr(node, "id", "")) for node in assigned}
    for file, node in nodes(ast.Attribute):
        if file != "_upstream.py" and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert node.attr in own, f"{file} uses {ast.unparse(node)}; put it into _upstream.py"


def test_no_code_is_put_into_other_packages():
    """No attribute of an imported module is set: the host's process stays as it is."""
    for path, tree in PARSED.items():
        imported = {
            a.asname or a.name.split(".")[0]
            for n in ast.walk(tree)
            if isinstance(n, ast.Import)
            for a in n.names
        }
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in imported, (
                        f"{path.name} sets {ast.unparse(target)}"
                    )


PICKLES = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
LOADERS = ("eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "np.load")
TRUSTING = ("trust_remote_code", "allow_pickle", "shell")


def test_nothing_of_the_package_runs_code_from_a_file():
    """No pickle, eval or full YAML loader, and no trust in code of a model (SECURITY.md)."""
    for kind in (ast.Import, ast.ImportFrom):
        for file, node in nodes(kind):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & PICKLES, file
    for file, node in nodes(ast.Call):
        called = ast.unparse(node.func)
        assert called not in LOADERS, f"{file}: {called}"
        for option in node.keywords:
            is_off = getattr(option.value, "value", None) is False
            assert is_off or option.arg not in TRUSTING, f"{file}: {ast.unparse(node)}"
