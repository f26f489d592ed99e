"""Loading people's own code: what is found, and one sentence for everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.exits import Broken, Refused
from penstock.cli.loading.code import describe_error, load_attribute, load_module, resolve


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def test_an_attribute_of_a_file_a_module_and_a_package() -> None:
    write("one_file.py", "value = 1")
    write("a_package/inner.py", "class Holder:\n    value = 2")
    assert load_attribute("one_file.py", "value") == 1
    assert load_attribute("one_file", "value") == 1
    assert load_attribute("a_package.inner", "Holder.value") == 2


def test_a_file_finds_its_neighbours_and_may_have_the_name_of_a_module() -> None:
    write(
        "sub/json.py",
        "from neighbour import value\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    x: int = 1",
    )
    write("sub/neighbour.py", "value = 3")
    assert load_attribute("sub/json.py", "value") == 3


@pytest.mark.parametrize(
    ("module", "attribute", "expected"),
    [
        ("nowhere.py", "graph", "there is no file 'nowhere.py'"),
        ("folder.py", "graph", "folder.py is not a file"),
        ("no_such_module", "graph", "there is no module 'no_such_module', neither in this directory nor installed"),
        ("os.no_such", "graph", "there is no module 'os.no_such'"),
        ("not a name", "graph", "'not a name' is not the name of a module"),
        ("..", "graph", "'..' is not the name of a module"),
        ("small.py", "missing", "small.py has no attribute 'missing'; it has: here"),
        ("small.py", "here.deeper", "small.py has no attribute 'here.deeper'"),
    ],
)
def test_what_is_not_there_is_refused(module: str, attribute: str, expected: str) -> None:
    write("small.py", "here = 1")
    Path("folder.py").mkdir()
    with pytest.raises(Refused) as refused:
        load_attribute(module, attribute)
    assert expected in str(refused.value)
    assert refused.value.code == 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n1 / 0", "ZeroDivisionError: division by zero (broken.py, line 2)"),
        (
            "import nowhere_to_be_found",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found' (broken.py, line 1)",
        ),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("raise SystemExit(0)", "SystemExit: 0 (broken.py, line 1)"),
        ("raise Exception('x' * 10_000)", "xxx… (broken.py, line 1)"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "cannot be imported: E (broken.py, line 3)"),
        ("import json\njson.loads('{')", "(broken.py, line 2)"),
    ],
)
@pytest.mark.parametrize("name", ["broken.py", "broken"])
def test_import_error_is_reported_in_one_line_with_its_location(text: str, expected: str, name: str) -> None:
    write("broken.py", text)
    with pytest.raises(Broken) as broken:
        load_module(name)
    assert expected in str(broken.value)
    assert str(broken.value).startswith(f"{name} cannot be imported: ")
    assert "\n" not in str(broken.value)
    assert broken.value.code == 2


def test_a_function_is_called_and_anything_else_is_taken_as_it_is() -> None:
    assert resolve(lambda: 5, "here") == 5
    assert resolve(5, "here") == 5
    assert resolve(dict, "here") is dict


async def _async() -> None: ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x, "here is a function that needs arguments"),
        (_async, "here is an async function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(function: object, expected: str) -> None:
    with pytest.raises(Refused, match=expected):
        resolve(function, "here")


def test_error_of_a_factory_is_reported() -> None:
    with pytest.raises(Broken, match=r"here raised ZeroDivisionError: division by zero \(test_code.py, line \d+\)"):
        resolve(lambda: 1 / 0, "here")


def test_error_is_described_in_one_line() -> None:
    assert describe_error(ValueError("one\n  two")) == "ValueError: one two"
    assert describe_error(ValueError()) == "ValueError"
