"""The directions of imports, and what every module must have; read from the source, so that a late import counts too."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import celery_capacity

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "celery_capacity"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
LONGEST_MODULE = 420

#: Package -> the modules, without ``celery_capacity.``, that may import it.
BORDERS = {
    "celery": ("dispatch", "parts", "worker", "worker.*", "install", "cli", "demo", "demo.*"),
    "kombu": (
        "connection",
        "filesystem",
        "redis_transport",
        "dispatch",
        "worker",
        "worker.*",
        "install",
        "cli",
        "demo",
        "demo.*",
    ),
    "click": ("cli", "demo", "demo.*", "worker.steps"),
    "rich": ("tables", "demo", "demo.*"),
    "redis": ("redis_transport", "registry.redis", "registry._redis*"),
    "sqlite3": ("registry.sqlite", "registry._sqlite*"),
    "fcntl": ("registry._sqlite*",),
    "pytest": ("testing", "testing.*"),
    "pydantic": ("settings",),
}
#: Module -> the modules of the package that it may import.  Those that are not named are at the top.
BELOW = {
    "errors": (),
    "models": ("errors", "outcomes"),
    "outcomes": (),
    "naming": (),
    "outage": ("errors",),
    "notices": (),
    "configuration": ("errors", "registry.urls"),
    "settings": ("configuration", "errors", "naming"),
    "views": ("models", "naming"),
    "tables": (),
    "registry": ("registry.contract", "registry.urls"),
    "registry.contract": ("errors", "models"),
    "registry.urls": ("errors", "registry.contract"),
    "connection": (),
    "filesystem": (),
    "redis_fetch": (),
    "redis_transport": ("naming", "redis_fetch"),
    "continuation": (),
    "options": ("errors",),
    "parts": (),
    "dispatch": (
        "connection",
        "continuation",
        "errors",
        "models",
        "naming",
        "notices",
        "options",
        "outage",
        "parts",
        "registry",
        "registry.contract",
        "settings",
    ),
    "worker*": (
        "errors",
        "models",
        "naming",
        "notices",
        "options",
        "outage",
        "redis_fetch",
        "registry",
        "registry.contract",
        "settings",
        "dispatch",
        "worker*",
    ),
    "testing*": ("errors", "models", "naming", "registry", "registry.*", "testing*"),
    "": ("*",),
}
#: What a store may import beside the modules that begin with its own name.
STORES = ("memory", "sqlite", "redis")
BESIDE_A_STORE = ("errors", "models", "naming", "registry.contract", "registry.urls", "registry._sorted_names")


def short(module: str) -> str:
    return module.removeprefix("celery_capacity").removeprefix(".")


def imported(module: str) -> Iterator[str]:
    """What a module imports when it runs, in full."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for_checkers = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *filter(None, [base])])
            for alias in node.names:
                # `from . import views` names a module, `from .views import why` a thing in it.
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def store_of(module: str) -> str | None:
    name = short(module).removeprefix("registry.").lstrip("_")
    found = [store for store in STORES if short(module).startswith("registry.") and name.startswith(store)]
    return found[0] if found else None


@pytest.mark.parametrize("module", MODULES)
def test_foreign_packages_are_imported_at_their_border_alone(module):
    for name in imported(module):
        allowed = BORDERS.get(name.partition(".")[0])
        assert allowed is None or fits(short(module), allowed), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    inside = [short(name) for name in imported(module) if name.partition(".")[0] == "celery_capacity"]
    store = store_of(module)
    if store is not None:
        allowed = (*BESIDE_A_STORE, f"registry.{store}*", f"registry._{store}*")
    else:
        rules = [rule for rule in BELOW if fnmatchcase(short(module), rule)]
        allowed = BELOW[rules[0]] if rules else ("*",)
    for name in inside:
        assert fits(name, allowed), f"{module} imports {name}"


def test_dispatch_worker_and_command_line_are_imported_by_the_top_alone():
    top = ("", "install", "cli", "demo", "demo.*", "__main__")
    below = ("dispatch", "worker*", "cli", "install")
    for module in MODULES:
        for name in imported(module):
            inner = short(name)
            if not name.startswith("celery_capacity.") or not fits(inner, below):
                continue
            # The worker publishes, too: it hands tasks back the way they came.
            same = fits(short(module), ("worker*",)) and fits(inner, ("worker*", "dispatch"))
            assert same or fits(short(module), top), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_docstring_and_a_readable_length(module):
    text = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert len(text.splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("module", ["celery_capacity", *(m for m in MODULES if m != "celery_capacity")])
def test_all_names_what_is_there(module):
    if module.endswith("__main__"):
        pytest.skip("runs when it is imported")
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        assert hasattr(loaded, name), f"{module}.{name}"


def test_public_names_can_be_imported():
    names = celery_capacity.__all__
    assert len(set(names)) == len(names)
    namespace: dict[str, object] = {}
    exec("from celery_capacity import *", namespace)
    assert set(names) <= set(namespace)


@pytest.mark.parametrize("driver", ["redis", "sqlite3", "rich", "pytest"])
def test_importing_the_package_is_cheap(driver):
    """A driver is imported when its URL is opened, and not before."""
    code = f"import sys, celery_capacity; sys.exit({driver!r} in sys.modules and 'imported')"
    # Nothing else of this environment: coverage, for one, imports sqlite3 itself.
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- the tests themselves ------------------------------------------------------------------------------------

#: Where a test, or what it starts, may sleep, and why.
SLEEPERS = {
    "support/waiting.py": "it is what waits, between two looks",
    "support/tasks_app.py": "a task that waits for its gate, in a worker",
    "support/proxy.py": "it is the delay of a slow road",
    "faults/test_epochs.py": "a worker that hangs, and a registry that is away, for so long",
    "faults/test_registries.py": "paces a producer for as long as the registry is away",
    "faults/test_visibility.py": "lets the visibility timeout pass, and looks in between",
    "soak/__main__.py": "time between two faults",
    "soak/faults.py": "how long a fault lasts",
    "soak/verdict.py": "between two looks, of which several must agree",
    "faults/test_unacked.py": "a worker that hangs for so long; looks at a set in between",
    "registry/test_sqlite.py": "holds the file for a while, to see that others wait; paces threads",
}


def sleeps(path: Path) -> list[int]:
    """Lines that call ``time.sleep``, by whatever name, outside the body of a Celery task."""
    tree = ast.parse(path.read_text())
    names = {"time.sleep"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "sleep"}
    in_tasks = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("task" in ast.unparse(d) for d in node.decorator_list)
        for inner in ast.walk(node)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names and node not in in_tasks
    ]


def test_no_test_sleeps_instead_of_waiting():
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if name not in SLEEPERS and not name.startswith("benchmarks/") and (lines := sleeps(path)):
            found[name] = lines
    assert found == {}, "use support.waiting.wait_until"


def test_list_of_sleepers_has_nobody_who_does_not():
    assert [name for name in SLEEPERS if not sleeps(TESTS / name)] == []
