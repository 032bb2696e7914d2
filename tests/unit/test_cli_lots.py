"""``celery capacity``: lots where tasks wait, and purge."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from kombu import Connection, Queue
from support.command_line import advert
from support.dispatched import clear_broker

from celery_capacity.models import Demand, Refusal
from celery_capacity.naming import later_lot, node_lot, unknown_lot
from celery_capacity.registry import Registry

WEST = node_lot("default", "q", "west")


@pytest.fixture(autouse=True)
def broker() -> Iterator[None]:
    clear_broker()
    yield
    clear_broker()


def park(registry: Registry, node: str, queue: str = "q") -> None:
    lot = node_lot("default", queue, node)
    # So short that the mark goes as soon as the lot is found empty.
    answer = registry.select_and_reserve(Demand(queue, node=node, park_lot=lot, ttl_seconds=0.001))
    assert isinstance(answer, Refusal)


def put(queue: str, count: int) -> None:
    with Connection("memory://") as connection:
        for _ in range(count):
            connection.default_channel.queue_declare(queue)
            connection.Producer().publish({}, exchange="", routing_key=queue)


def depth(queue: str) -> int:
    with Connection("memory://") as connection:
        return Queue(queue)(connection.default_channel).queue_declare().message_count


def test_status_lists_the_lots_where_tasks_wait(registry, run):
    registry.register(advert("w@n", 0))
    park(registry, "n")
    park(registry, "west")
    lines = run("status").stdout.splitlines()
    shown = [line.split(None, 2) for line in lines[lines.index("tasks wait") + 2 :]]
    assert shown == [
        ["q", node_lot("default", "q", "n"), "node 'n'"],
        ["q", WEST, "node 'west': no worker of it is there"],
    ]


def test_status_says_nothing_of_lots_where_none_waits(registry, run):
    registry.register(advert("w@n", 0))
    registry.select_and_reserve(Demand("q", park_lot="q"))
    assert "tasks wait" not in run("status").stdout


def test_explain_lists_the_lots_of_its_queue(registry, run):
    registry.register(advert("w@n", queues=("q", "r")))
    registry.register(advert("v@west", queues=("r",)))
    park(registry, "west")
    park(registry, "east", "r")
    registry.select_and_reserve(Demand("q", task="new", park_lot=unknown_lot("default", "q")))
    document = json.loads(run("explain", "q", "--json").stdout)
    assert document["lots"] == [
        {"name": WEST, "queue": "q", "node": "west", "served": False},
        {"name": unknown_lot("default", "q"), "queue": "q", "node": None, "served": True},
    ]
    text = run("explain", "q").stdout
    assert "node 'west': no worker of it is there" in text
    assert "a worker that knows the task" in text
    assert "east" not in text


def test_purge_empties_the_queue_and_its_lots(registry, run):
    registry.register(advert("w@n"))
    park(registry, "west")
    places = {"q": 3, node_lot("default", "q", "n"): 1, WEST: 2, unknown_lot("default", "q"): 1, "r": 1}
    places |= {later_lot("default", "q"): 4}
    for queue, count in places.items():
        put(queue, count)

    result = run("purge", "-f", "q")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "3 tasks deleted from q",
        f"4 tasks deleted from {later_lot('default', 'q')}",
        f"1 task deleted from {node_lot('default', 'q', 'n')}",
        f"2 tasks deleted from {WEST}",
        f"1 task deleted from {unknown_lot('default', 'q')}",
    ]
    assert {queue: depth(queue) for queue in places} == {**dict.fromkeys(places, 0), "r": 1}
    assert registry.overview().lots == ()


def test_purge_of_a_node_that_nobody_knows(run):
    put(WEST, 2)
    assert run("purge", "-f", "q").stdout == "no task was waiting\n"
    assert run("purge", "-f", "q", "--node", "west").stdout == f"2 tasks deleted from {WEST}\n"


def test_purge_without_a_queue_takes_the_managed_ones_of_the_app(run):
    queues = [Queue("q"), Queue("left")]
    for name in ("q", "left"):
        put(name, 1)
    result = run("purge", "-f", task_queues=queues, capacity_queues=("*", "!left"))
    assert result.stdout == "1 task deleted from q\n"
    assert depth("left") == 1


def test_purge_asks_first(run):
    put("q", 1)
    result = run("purge", "q")
    assert result.exit_code == 1
    assert "Delete all tasks in q, capacity.default.later.q, capacity.default.unknown.q?" in result.output
    assert depth("q") == 1


def test_purge_without_a_broker_is_one_line(run):
    result = run("purge", "-f", "q", broker_url="redis://:secret@127.0.0.1:1/0")
    assert result.exit_code == 69
    (line,) = result.stderr.splitlines()
    assert "broker redis://:**@127.0.0.1:1/0" in line
