"""Rules of CONTRIBUTING.md that the source text shows: sizes, and where private names of other packages may stand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from test_layers import MODULES, PACKAGE


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield path.relative_to(PACKAGE).as_posix(), node


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_has_more_than_450_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


def test_no_function_has_more_than_70_lines_without_its_docstring():
    for file, node in nodes(ast.FunctionDef):
        first = node.body[0]
        docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
        assert node.end_lineno - node.lineno + 1 - docstring <= 70, f"{file}: {node.name}"


def test_private_names_of_other_packages_stand_in_one_place():
    for file, node in nodes(ast.ImportFrom):
        if file != "_upstream.py" and node.module and not node.module.startswith("st_magnitude"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{file} imports {private}; put them into _upstream.py"
    own = {node.name for _, node in nodes(ast.FunctionDef)}
    for kind in (ast.Attribute, ast.Name):  # what the package itself assigns
        for _, node in nodes(kind):
            own |= {getattr(node, "attr", getattr(node, "id", ""))} if isinstance(node.ctx, ast.Store) else set()
    for file, node in nodes(ast.Attribute):
        if file != "_upstream.py" and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert node.attr in own, f"{file} uses {ast.unparse(node)}; put it into _upstream.py"


def test_no_code_is_put_into_other_packages():
    """No attribute of an imported module is set: the host's process stays as it is."""
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            a.asname or a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
        }
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in imported, f"{path.name} sets {ast.unparse(target)}"


def test_nothing_of_the_package_runs_code_from_a_file():
    """No pickle, eval or full YAML loader, and no trust in code of a model; docs/security.md says so."""
    for kind in (ast.Import, ast.ImportFrom):
        for file, node in nodes(kind):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}, file
    for file, node in nodes(ast.Call):
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "torch.load", "np.load"), (
            f"{file}: {called}"
        )
        trusted = [k for k in node.keywords if k.arg in ("trust_remote_code", "allow_pickle", "shell")]
        assert all(getattr(k.value, "value", None) is False for k in trusted), f"{file}: {ast.unparse(node)}"
