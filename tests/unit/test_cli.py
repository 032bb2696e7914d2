"""``celery -A proj capacity``, in this process against a registry that is filled through its API, and as a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result
from support.waiting import wait_until

from celery_capacity import tables
from celery_capacity.cli import capacity
from celery_capacity.errors import RegistryError, RegistryUnavailable
from celery_capacity.models import Advert, Demand, Lot, WorkerState
from celery_capacity.registry import Registry, Reservation, open_registry
from celery_capacity.registry.sqlite import SQLiteRegistry

FOR_EVER = 1e6
Run = Callable[..., Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/capacity.db"


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with open_registry(url) as opened:
        yield opened


@pytest.fixture
def run(url: str) -> Run:
    def call(*arguments: str, **conf: Any) -> Result:
        app = Celery("proj", broker="memory://", set_as_current=False)
        app.conf.update({"capacity_registry": url, **conf})
        context = CLIContext(app, no_color=True, workdir=None)
        return CliRunner().invoke(capacity, list(arguments), obj=context, catch_exceptions=False)

    return call


def advert(name: str, slots: int | None = 2, **fields: Any) -> Advert:
    queues = fields.pop("queues", ("q", f"capacity.default.{name}"))
    fields = {"lease_seconds": FOR_EVER, "lapse_seconds": FOR_EVER, "tasks": frozenset({"t"}), **fields}
    return Advert(name, fields.pop("node", name.partition("@")[2]), queues, capacity=slots, **fields)


def reserve(registry: Registry, count: int = 1, queue: str = "q") -> list[Reservation]:
    claims = [registry.select_and_reserve(Demand(queue, ttl_seconds=FOR_EVER)) for _ in range(count)]
    assert all(isinstance(claim, Reservation) for claim in claims)
    return claims  # type: ignore[return-value]


def state_of(registry: Registry, name: str) -> WorkerState:
    return next(view.state for view in registry.overview().workers if view.name == name)


def reasons(result: Result) -> dict[str, tuple[str | None, str]]:
    return {w["name"]: (w["reason"], w["why"]) for w in json.loads(result.stdout)["workers"]}


# -- status --------------------------------------------------------------------------------------------------


def test_json_has_the_fixed_form_and_nothing_else_is_on_stdout(registry, run):
    epoch = registry.register(advert("w1@north", 3))
    registry.register(advert("w2@south", None, queues=("q", "r", "capacity.default.w2@south")))
    registry.set_limit("r", 7)
    first, _ = reserve(registry, 2)
    registry.commit(first.slot.token, "w1@north", epoch)
    registry.reserve_worker("w1@north", epoch, Demand("capacity.default.w1@north"), commit=True)

    result = run("status", "--json")

    assert result.exit_code == 0
    assert result.stderr == ""
    document = json.loads(result.stdout)
    epochs = {view.name: view.epoch for view in registry.overview().workers}
    assert document == {
        "namespace": "default",
        "workers": [
            {
                "name": "w1@north",
                "node": "north",
                "epoch": epochs["w1@north"],
                "state": "ready",
                "capacity": 3,
                "held": 3,
                "reserved": 1,
                "committed": 2,
                "queues": ["q"],
            },
            {
                "name": "w2@south",
                "node": "south",
                "epoch": epochs["w2@south"],
                "state": "unknown",
                "capacity": None,
                "held": 0,
                "reserved": 0,
                "committed": 0,
                "queues": ["q", "r"],
            },
        ],
        "queues": [
            {"name": "q", "limit": None, "held": 2, "waiting": False},
            {"name": "r", "limit": 7, "held": 0, "waiting": False},
        ],
    }
    assert list(document) == ["namespace", "workers", "queues"]
    assert [list(worker) for worker in document["workers"]] == 2 * [
        ["name", "node", "epoch", "state", "capacity", "held", "reserved", "committed", "queues"]
    ]
    assert [list(queue) for queue in document["queues"]] == 2 * [["name", "limit", "held", "waiting"]]


def test_json_of_an_empty_namespace(run):
    result = run("status", "--json", capacity_namespace="empty")
    assert json.loads(result.stdout) == {"namespace": "empty", "workers": [], "queues": []}


def test_json_names_every_state(registry, run):
    registry.register(advert("drained@n"))
    registry.drain("drained@n", "deploy")
    registry.register(advert("late@n", lease_seconds=0.01))
    registry.register(advert("ready@n"))
    registry.register(advert("unknown@n", None))
    registry.deregister("gone@n", registry.register(advert("gone@n")))
    wait_until(lambda: state_of(registry, "late@n") is WorkerState.LATE, 10)

    states = {w["name"]: w["state"] for w in json.loads(run("status", "--json").stdout)["workers"]}

    assert states == {
        "drained@n": "draining",
        "gone@n": "lapsed",
        "late@n": "late",
        "ready@n": "ready",
        "unknown@n": "unknown",
    }


def test_json_says_that_a_task_waits(registry, run):
    registry.register(advert("w@n", 0))
    registry.select_and_reserve(Demand("q", park_lot="q"))
    assert json.loads(run("status", "--json").stdout)["queues"] == [
        {"name": "q", "limit": None, "held": 0, "waiting": True}
    ]


def test_table_shows_slots_reasons_and_limits(registry, run):
    registry.register(advert("full@n", 1))
    registry.register(advert("paused@n", 0))
    registry.register(advert("drained@n", 1, queues=("other",)))
    registry.drain("drained@n", "new release")
    registry.set_limit("q", 5)
    reserve(registry)

    lines = run("status").stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}

    assert rows["full@n"] == ["full@n", "n", "ready", "1", "1", "(1+0)", "0", "q", *rows["full@n"][8:11], "full"]
    assert rows["paused@n"][-1] == "paused"
    assert rows["drained@n"][6] == "-", "no slot of a draining worker can be claimed"
    assert rows["drained@n"][-2:] == ["new", "release"]
    assert rows["q"] == ["q", "5", "1", "no"]
    assert rows["other"] == ["other", "none", "0", "no"]
    assert not any("capacity.default" in line for line in lines)


def test_table_of_an_empty_namespace_says_so(run):
    result = run("status")
    assert (result.exit_code, result.stdout) == (0, "no worker in namespace 'default'\n")


def test_columns_are_aligned_and_not_cut():
    long = "w" * 300
    assert tables.render("title", ("a", "bb"), [[long, "x"], ["y", ""]]) == (
        f"title\n  A{' ' * 299}  BB\n  {long}  x\n  y\n"
    )


def test_names_are_not_read_as_markup_on_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    tables.show("workers", ("worker", "why"), [["[red]w1", "free"]], color=False)
    assert "[red]w1" in capsys.readouterr().out


def test_table_without_rich_is_plain(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    tables.show("workers", ("worker",), [["w1"]])
    assert capsys.readouterr().out == "workers\n  WORKER\n  w1\n"


# -- explain -------------------------------------------------------------------------------------------------


def test_every_reason_is_explained(registry, run):
    registry.register(advert("drained@n"))
    registry.drain("drained@n", "deploy")
    registry.register(advert("elsewhere@m"))
    registry.register(advert("free@n", 2))
    registry.register(advert("full@n", 1))
    registry.register(advert("late@n", lease_seconds=0.01))
    registry.register(advert("old@n", tasks=frozenset({"other"})))
    registry.register(advert("paused@n", 0))
    registry.register(advert("queue@n", queues=("r", "capacity.default.queue@n")))
    registry.register(advert("unknown@n", None))
    epoch = next(view.epoch for view in registry.overview().workers if view.name == "full@n")
    assert isinstance(registry.reserve_worker("full@n", epoch, Demand("q", ttl_seconds=FOR_EVER)), Reservation)
    wait_until(lambda: state_of(registry, "late@n") is WorkerState.LATE, 10)

    result = run("explain", "q", "--task", "t", "--node", "n", "--json")

    assert result.exit_code == 0
    found = reasons(result)
    assert found.pop("late@n")[0] == "late"
    assert found == {
        "drained@n": ("draining", "draining: deploy"),
        "elsewhere@m": ("other node", "is on node 'm', not 'n'"),
        "free@n": (None, "could be chosen now: 2 free slots"),
        "full@n": ("full", "full: 1 of 1 slot held"),
        "old@n": ("task not registered there", "task 't' is not registered there"),
        "paused@n": ("full", "paused: its capacity is 0"),
        "queue@n": ("other queue", "does not serve queue 'q', only r"),
        "unknown@n": ("unknown capacity", "has not said yet how many slots it has"),
    }
    document = json.loads(result.stdout)
    facts = {key: document[key] for key in list(document)[:-1]}
    assert facts == {
        "namespace": "default",
        "queue": "q",
        "task": "t",
        "node": "n",
        "served": True,
        "free": 2,
        "limit": None,
        "held": 1,
        "waiting": False,
    }


def test_limit_is_the_reason_where_slots_are_free(registry, run):
    registry.register(advert("w@n", 5))
    registry.set_limit("q", 1)
    reserve(registry)
    result = run("explain", "q", "--json")
    assert reasons(result)["w@n"] == ("limit", "has free slots, but the queue is at its limit: 1 of 1 held")
    assert run("explain", "q").stdout.startswith(
        "queue 'q': 0 free slots on 0 of 1 worker; limit 1, 1 held; nothing is waiting\n"
    )


def test_text_is_a_summary_and_a_row_for_each_worker(registry, run):
    epoch = registry.register(advert("w@n", 1))
    reserve(registry)
    registry.select_and_reserve(Demand("q", park_lot="q"))
    assert registry.claim_parked("w@n", epoch, [Lot("q", "q")])
    assert run("explain", "q").stdout == (
        "queue 'q': 0 free slots on 0 of 1 worker; no limit; tasks are waiting\n"
        "workers\n"
        "  WORKER  NODE  STATE  HELD  WHY\n"
        "  w@n     n     ready  1/1   full: 1 of 1 slot held\n"
    )


def test_nobody_serves_the_queue(registry, run):
    registry.register(advert("w@n", queues=("r",)))
    result = run("explain", "q", "--task", "t", "--node", "n")
    assert result.exit_code == 0
    assert result.stdout.startswith("queue 'q', task 't', node 'n': no worker serves queue 'q'\n")


def test_nobody_is_there_at_all(run):
    result = run("explain", "q")
    assert (result.exit_code, result.stdout) == (0, "queue 'q': no worker serves queue 'q'\n")


def test_queue_that_is_not_managed_is_pointed_out_on_stderr(registry, run):
    registry.register(advert("w@n"))
    result = run("explain", "q", "--json", capacity_queues="other")
    assert result.exit_code == 0
    assert "'q' is not selected by capacity_queues" in result.stderr
    assert json.loads(result.stdout)["served"] is True


@pytest.mark.parametrize("arguments", [("",), ("q", "--task", ""), ("q", "--node", "")])
def test_empty_names_are_refused(run, arguments):
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert "is empty; it takes a name" in result.stderr


def test_explaining_moves_no_turn(registry, run):
    for name in ("w1@n", "w2@n"):
        registry.register(advert(name))
    (first,) = reserve(registry)
    run("explain", "q")
    (second,) = reserve(registry)
    assert (first.slot.worker, second.slot.worker) == ("w1@n", "w2@n")


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

    monkeypatch.setattr("celery_capacity.cli.open_registry", fail)
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
