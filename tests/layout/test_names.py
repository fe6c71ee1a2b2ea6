"""One name is one class, and no signature is longer than a person can keep in mind."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.packages import ROOT, modules

MOST_PARAMETERS = 8
OF_TYPER = "COMMAND"  # in a command's file: what typer reads as options is not called by us


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in modules():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_one_name_is_one_class() -> None:
    places = defaultdict(list)
    for path, module in parsed():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_signature_has_more_than_eight_parameters() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, module in parsed()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not _is_command(path, module, node)
        and len(_parameters(node)) > MOST_PARAMETERS
    ]
    assert long == []


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _is_command(path: str, module: ast.Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    has_record = any(isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == OF_TYPER for one in module.body)
    return has_record and node.name == Path(path).stem
