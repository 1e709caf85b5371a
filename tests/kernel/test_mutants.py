"""Changes to the functions of the kernel, which its tests must notice.

A change makes one node of the syntax tree simpler, whatever the names in it are. It takes effect in
this process.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from itertools import cycle, product
from pkgutil import iter_modules
from types import CodeType, FunctionType, ModuleType

import pytest
import test_infonce
import test_targets
import torch

from st_magnitude import COSINE, DOT, Term, kernel

pytestmark = pytest.mark.slow

# The share of changes that must be noticed; the others change the time, and not the value.
SHARES = {"terms": 0.6, "panels": 0.85}  # of other modules 0.9
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
MODULES = [info.name for info in iter_modules(kernel.__path__)]
MODULES.remove("infonce")  # which checks, and chooses an engine


def functions(module: ModuleType) -> dict[int, FunctionType]:
    """Those of a module and its classes, by the line in which they begin."""
    found = {}
    for thing in vars(module).values():
        for member in [thing, *(vars(thing).values() if inspect.isclass(thing) else ())]:
            function = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(function) and function.__code__.co_filename == module.__file__:
                found[function.__code__.co_firstlineno] = function
    return found


def simpler(node: ast.AST) -> list[ast.AST]:
    """The nodes that can stand in the place of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            return [ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators)]
        case ast.BinOp() if not isinstance(node.op, ast.BitOr):  # of types
            return [node.left]
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.If():
            return [ast.If(ast.Constant(False), node.body, node.orelse)]
        case ast.ListComp():
            return [ast.List([], ast.Load())]
        case ast.Call(func=ast.Attribute(attr="detach")):
            return [node.func.value]
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return [ast.Pass()]
    return []


def changes(tree: ast.AST) -> Iterator[str]:
    """Makes one change after the other; the tree has only the last one."""
    for parent in ast.walk(tree):
        for field, value in list(ast.iter_fields(parent)):
            nodes = value if isinstance(value, list) else [value]
            for place, node in enumerate(nodes):
                for new in simpler(node):
                    changed = [*nodes[:place], new, *nodes[place + 1 :]]
                    setattr(parent, field, changed if isinstance(value, list) else new)
                    yield f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(new)}"
                    setattr(parent, field, value)


def code_of(tree: ast.AST, old: CodeType) -> CodeType:
    """The code of the function with the name and line of another code."""
    codes = [compile(ast.fix_missing_locations(tree), old.co_filename, "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if (code.co_name, code.co_firstlineno) == (old.co_name, old.co_firstlineno):
            return code
    raise LookupError(old)


def check() -> None:
    """The tests, of which one must fail: a few of each kind, the quick ones first."""
    for backend, kind in product(test_targets.BACKENDS, ["function", "matrix"]):
        test_targets.test_targets_are_the_formula(backend, kind, (0.3, 0.8))
    for backend in test_targets.BACKENDS:
        test_targets.test_weights_multiply_the_losses_of_rows(backend)
        test_targets.test_constants_change_neither_type_nor_gradient(backend)
        test_infonce.test_a_score_at_the_threshold_is_a_negative(backend)
    for similarity in (COSINE, DOT):
        test_infonce.test_powers_of_an_exponential(similarity)
        test_infonce.test_an_excluded_column_is_as_if_it_were_not_there(similarity, 1e30)
    test_infonce.test_booleans_as_targets()
    test_infonce.test_float32_holds_where_probabilities_underflow()
    test_infonce.test_computes_in_float32_under_autocast(torch.bfloat16)
    test_infonce.test_outer_gradient_scales()
    cases = cycle(product(test_infonce.MASKS.values(), [False, True]))
    for partition, case in zip(test_infonce.PARTITIONS, cases, strict=False):
        test_infonce.test_equals_the_plain_formula((0.3, 0.8), *partition, *case)
    terms = (*test_infonce.MANY, Term(2, 0.35))  # the exponential is the square of another
    test_infonce.test_hardness_weighs_negatives((0.3, 0.8), terms, test_infonce.IDS)
    direction = test_infonce.DIRECTIONS[1]
    for name in ("nothing", "spares", "all"):
        rule = test_infonce.RULES[name]
        test_infonce.test_equals_the_definition(test_infonce.MANY, (0.3, 0.8), direction, rule)


@pytest.mark.parametrize("name", MODULES)
def test_changes_are_noticed(name):
    module = import_module(f"{kernel.__name__}.{name}")
    check()  # without a change they pass
    tree = ast.parse(inspect.getsource(module))
    number, survivors = 0, []
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        function = functions(module).get((node.decorator_list or [node])[0].lineno)
        if function is None or any(isinstance(part, ast.Raise) for part in ast.walk(node)):
            continue  # inside of another one; or it checks arguments, which other tests do
        original = function.__code__
        for change in changes(node):
            number += 1
            function.__code__ = code_of(tree, original)
            try:
                check()
                survivors.append(change)
            except Exception:
                continue
            finally:
                function.__code__ = original
    share = 1 - len(survivors) / number
    assert share >= SHARES.get(name, 0.9), "\n".join([f"{share:.2f}", *survivors])
