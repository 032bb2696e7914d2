"""``celery capacity status`` and ``explain``, against a registry that is filled through its API."""

from __future__ import annotations

import json
import sys

import pytest
from support.command_line import FOR_EVER, advert, reasons, reserve, state_of
from support.waiting import wait_until

from celery_capacity import tables
from celery_capacity.models import Demand, Lot, WorkerState
from celery_capacity.registry import Reservation

# -- status --------------------------------------------------------------------------------------------------


def test_json_has_the_fixed_form_and_nothing_else_is_on_stdout(registry, run):
    epoch = registry.register(advert("w1@north", 3))
    registry.register(advert("w2@south", None, queues=("q", "r", "capacity.default.w2@south")))
    registry.set_limit("r", 7)
    registry.add_counters({"moved": 12, "healed": 1})
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
        "counters": {"healed": 1, "moved": 12},
    }
    assert list(document) == ["namespace", "workers", "queues", "counters"]
    assert list(document["counters"]) == ["healed", "moved"]
    assert [list(worker) for worker in document["workers"]] == 2 * [
        ["name", "node", "epoch", "state", "capacity", "held", "reserved", "committed", "queues"]
    ]
    assert [list(queue) for queue in document["queues"]] == 2 * [["name", "limit", "held", "waiting"]]


def test_json_of_an_empty_namespace(run):
    result = run("status", "--json", capacity_namespace="empty")
    assert json.loads(result.stdout) == {"namespace": "empty", "workers": [], "queues": [], "counters": {}}


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


def test_counters_that_are_not_zero_are_one_line(registry, run):
    registry.add_counters({"moved": 12, "healed": 1})
    assert run("status").stdout == "no worker in namespace 'default'\ncounters: healed 1, moved 12\n"


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
        "lots": [],
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


def test_limit_on_a_worker_is_the_reason_and_shown(registry, run):
    registry.register(advert("w@n", 5, queues=("q", "r"), worker_queues={"q": 1}))
    reserve(registry)
    result = run("explain", "q", "--json")
    assert reasons(result)["w@n"] == (
        "limit of the queue on this worker",
        "has free slots, but not for this queue: 1 of 1 held on this worker",
    )
    assert "  q 1/1, r  " in run("status").stdout


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
