"""The page of Celery's features names a test for each; they are all there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "celery-features.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)*)`", PAGE.read_text("utf-8"))))


def test_the_page_names_tests():
    assert len(NAMED) > 40


@pytest.mark.parametrize("name", NAMED)
def test_named_test_is_there(name):
    path, *parts = name.split("::")
    body = ast.parse((ROOT / path).read_text("utf-8")).body
    for part in parts:
        found = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
        assert found, f"{part} of {name}"
        body = found[0].body


def test_every_row_of_a_table_of_tests_names_one():
    table_of_tests = False
    for line in PAGE.read_text("utf-8").splitlines():
        if not line.startswith("|"):
            table_of_tests = False
        elif line.rstrip().endswith("| test |"):
            table_of_tests = True
        elif table_of_tests and not line.startswith("|-"):
            assert "`tests/" in line.rstrip("| ").rpartition("|")[2], line
