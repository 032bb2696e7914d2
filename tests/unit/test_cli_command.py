"""``celery capacity``: drain and admit, what goes wrong, and the command as Celery finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from support.command_line import advert, reserve, state_of
from support.waiting import wait_until

from celery_capacity.errors import RegistryError, RegistryUnavailable
from celery_capacity.install import Runtime
from celery_capacity.models import Demand, WorkerState
from celery_capacity.registry import Registry, Reservation
from celery_capacity.registry.sqlite import SQLiteRegistry

# -- drain, admit --------------------------------------------------------------------------------------------


def test_drain_and_admit(registry, run):
    registry.register(advert("w@n"))

    result = run("drain", "w@n", "--reason", "new release")
    assert (result.exit_code, result.stdout) == (0, "worker w@n is draining until it is admitted: new release\n")
    assert state_of(registry, "w@n") is WorkerState.DRAINING
    assert registry.overview().workers[0].detail == "new release"
    assert not isinstance(registry.select_and_reserve(Demand("q")), Reservation)

    result = run("admit", "w@n")
    assert (result.exit_code, result.stdout) == (0, "worker w@n is admitted\n")
    assert run("admit", "w@n").exit_code == 0
    reserve(registry)


def test_drain_with_seconds_ends_by_itself(registry, run):
    registry.register(advert("w@n"))
    result = run("drain", "w@n", "--seconds", "0.05")
    assert result.stdout == "worker w@n is draining for 0.05 s: by hand\n"
    wait_until(lambda: state_of(registry, "w@n") is WorkerState.READY, 10)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_wrong_seconds_change_nothing(registry, run, seconds):
    registry.register(advert("w@n"))
    result = run("drain", "w@n", "--seconds", seconds)
    assert result.exit_code == 2
    assert "--seconds" in result.stderr
    assert seconds in result.stderr
    assert state_of(registry, "w@n") is WorkerState.READY


# -- limit ---------------------------------------------------------------------------------------------------


def test_limit_is_set_and_taken_back(registry, run):
    registry.register(advert("w@n", queue_limits={"q": 7}))
    result = run("limit", "q", "2")
    assert (result.exit_code, result.stdout) == (0, "queue q: limit 2, 0 held\n")
    assert registry.census("q").limit == 2
    result = run("limit", "q", "default")
    assert (result.exit_code, result.stdout) == (0, "queue q: limit 7, 0 held (as the workers declare)\n")
    registry.register(advert("w@n"))
    assert run("limit", "q", "default").stdout == "queue q: no limit, 0 held (as the workers declare)\n"


@pytest.mark.parametrize("value", ["-1", "2.5", "none", ""])
def test_limit_takes_whole_numbers(registry, run, value):
    result = run("limit", "--", "q", value)
    assert result.exit_code == 2
    assert f"{value!r} is not a whole number from 0 up, or 'default'" in result.stderr
    assert registry.census("q").limit is None


def test_limit_of_a_queue_that_is_not_managed_is_refused(registry, run):
    result = run("limit", "q", "1", capacity_queues="other")
    assert result.exit_code == 2
    assert "'q' is not selected by capacity_queues" in result.stderr
    assert registry.census("q").limit is None


@pytest.mark.parametrize("command", ["drain", "admit"])
def test_unknown_worker_is_named_with_the_known_ones(registry, run, command):
    registry.register(advert("w1@n"))
    registry.register(advert("w2@n"))
    result = run(command, "w3@n")
    assert result.exit_code == 1
    assert result.stderr == "Error: no worker 'w3@n' in namespace 'default'; known are w1@n, w2@n\n"
    assert result.stdout == ""


def test_unknown_worker_where_none_is_registered(run):
    assert run("drain", "w@n").stderr == "Error: no worker 'w@n' in namespace 'default'; none is registered\n"


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [("status",), ("status", "--json"), ("explain", "q"), ("drain", "w"), ("admit", "w")]
)
def test_registry_that_cannot_be_opened_is_one_line(run, tmp_path, arguments):
    result = run(*arguments, capacity_registry=f"sqlite:///{tmp_path}/missing/x.db")
    assert result.exit_code == 69
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert f"{tmp_path}/missing/x.db" in result.stderr


def test_registry_that_fails_in_the_middle_is_one_line(run, url, monkeypatch):
    def fail(self: SQLiteRegistry) -> None:
        raise RegistryUnavailable("disk\n  on fire")

    monkeypatch.setattr(SQLiteRegistry, "overview", fail)
    result = run("status", "--json")
    assert (result.exit_code, result.stdout) == (69, "")
    assert result.stderr == f"Error: registry {url}: disk on fire\n"


def test_message_of_a_driver_does_not_show_the_password(run, monkeypatch):
    secret = "rediss://user:hunter2@db:6380/1"

    def fail(url: str, namespace: str, **options: Any) -> Registry:
        assert options == {"timeout_seconds": 0.5}
        raise RegistryError(f"{url} said no")

    # By its module: celery_capacity.install itself is the function.
    monkeypatch.setattr(sys.modules[Runtime.__module__], "open_registry", fail)
    result = run("status", capacity_registry=secret, capacity_registry_timeout_seconds=0.5)
    assert (result.exit_code, result.stderr) == (69, "Error: rediss://user:**@db:6380/1 said no\n")


def test_wrong_settings_are_named(run):
    result = run("status", capacity_lease_seconds=-1, capacity_namespase="x")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "2 settings are wrong" in result.stderr
    assert "capacity_lease_seconds is -1" in result.stderr
    assert "did you mean capacity_namespace?" in result.stderr


def test_app_without_a_registry_is_told_what_is_missing(run):
    result = run("status", capacity_registry=None)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: capacity_registry is not set; it takes a URL")


def test_unknown_scheme_is_a_wrong_setting(run):
    result = run("status", capacity_registry="carrier-pigeon://coop")
    assert result.exit_code == 2
    assert "capacity_registry is 'carrier-pigeon://coop'" in result.stderr


def test_memory_registry_says_that_it_sees_nobody(run):
    result = run("status", "--json", capacity_registry="memory://only-here")
    assert result.exit_code == 0
    assert "memory:// has only what this process put there" in result.stderr
    assert json.loads(result.stdout)["workers"] == []


def test_unknown_command_suggests_the_right_one(run):
    result = run("stauts")
    assert result.exit_code == 2
    assert "status" in result.stderr


def test_reference_shows_the_keys_of_the_documents(registry, run):
    registry.register(advert("w@n"))
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    status = json.loads(run("status", "--json").stdout)
    assert list(example) == list(status)
    assert list(example["workers"][0]) == list(status["workers"][0])
    assert list(example["queues"][0]) == list(status["queues"][0])
    explained = json.loads(run("explain", "q", "--json").stdout)
    for key in (*explained, *explained["workers"][0]):
        assert f"`{key}`" in page


# -- as a command --------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    if not any(found.name == "capacity" for found in entry_points(group="celery.commands")):
        pytest.fail("the command is not installed: run pip install -e . again")
    (tmp_path / "proj.py").write_text(
        "from celery import Celery\n"
        "from celery.bin.base import CeleryOption\n"
        "app = Celery('proj', broker='memory://')\n"
        f"app.conf.capacity_registry = {url!r}\n"
        "app.user_options['preload'].add(CeleryOption(('--flavour',), default='plain'))\n"
    )
    path = [str(tmp_path), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "proj", "capacity", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


def test_celery_finds_the_command(registry, command):
    registry.register(advert("w@n", 4))
    reserve(registry)

    done = command("status", "--json")

    assert (done.returncode, done.stderr) == (0, "")
    (worker,) = json.loads(done.stdout)["workers"]
    assert (worker["name"], worker["capacity"], worker["held"]) == ("w@n", 4, 1)


def test_app_with_the_plugin_installed(registry, command, tmp_path):
    with (tmp_path / "proj.py").open("a") as module:
        module.write("import celery_capacity\ncelery_capacity.install(app)\n")
    registry.register(advert("w@n"))
    done = command("drain", "w@n", "--reason", "deploy")
    assert (done.returncode, done.stderr) == (0, "")
    assert registry.overview().workers[0].detail == "deploy"


def test_celery_passes_the_exit_status_on(registry, command):
    registry.register(advert("w@n"))
    done = command("drain", "nobody@n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: no worker 'nobody@n' in namespace 'default'; known are w@n\n"


def test_preload_options_of_the_app_are_taken(registry, command):
    registry.register(advert("w@n"))
    done = command("--flavour", "sweet", "explain", "q")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "queue 'q': 2 free slots on 1 of 1 worker; no limit; nothing is waiting"
