"""The producer's side: whose pool it is, when it is due, and on which node."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Task
from kombu import Exchange, Queue
from kombu.common import Broadcast
from support.dispatched import HEADER, Dispatched, own, publishing

from celery_capacity.errors import (
    ConfigurationError,
)

# -- which queue ---------------------------------------------------------------------------------------------


def test_queue_of_the_caller_chooses_the_pool(fx):
    fx.worker("w1@n", queues=("q",))
    fx.worker("w2@n", queues=("q2",))
    fx.t.apply_async(queue="q2")
    sent = fx.one()
    assert (sent.queue, sent.mark["queue"]) == (own("w2@n"), "q2")


def test_queue_of_the_caller_wins_over_routes(make):
    fx = make(task_routes={"t": {"queue": "q3"}})
    fx.worker("w2@n", queues=("q2",))
    fx.worker("w3@n", queues=("q3",))
    fx.t.apply_async(queue="q2")
    assert fx.one().mark["queue"] == "q2"
    fx.t.delay()
    assert fx.one().mark["queue"] == "q3"


def test_queue_that_is_not_managed_is_left_to_celery(make):
    fx = make(capacity_queues=("q", "!plain"))
    fx.worker(queues=("q", "plain"))
    fx.t.apply_async(queue="plain")
    sent = fx.one()
    assert sent.queue == "plain"
    assert HEADER not in sent.headers
    assert fx.asked.operations == []


def test_own_queues_are_never_managed(fx):
    fx.worker()
    fx.t.apply_async(queue=own("w1@north"))
    assert HEADER not in fx.one().headers
    assert fx.asked.operations == []


def test_exchange_and_routing_key_of_the_caller_are_not_touched(fx):
    fx.worker()
    with fx.app.connection() as connection:
        Queue("far", Exchange("ex", type="direct"), routing_key="rk")(connection.default_channel).declare()
    fx.t.apply_async(exchange="ex", routing_key="rk")
    sent = fx.one()
    assert sent.queue == "far"
    assert HEADER not in sent.headers
    assert fx.asked.operations == []
    assert fx.held() == 0


def test_exchange_and_routing_key_win_over_a_router(make):
    routed: list[str] = []

    def router(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        routed.append(name)
        return {"queue": "q"}

    fx = make(task_routes=[router])
    fx.worker()
    with fx.app.connection() as connection:
        Queue("far", Exchange("ex", type="direct"), routing_key="rk")(connection.default_channel).declare()
    fx.t.apply_async(exchange="ex", routing_key="rk")
    assert fx.one().queue == "far"
    assert routed == ["t"], "the router is called all the same"
    assert fx.held() == 0


def test_route_to_an_exchange_alone(make):
    fx = make(task_routes={"t": {"exchange": "ex", "routing_key": "rk", "exchange_type": "topic"}})
    fx.worker()
    with fx.app.connection() as connection:
        Queue("far", Exchange("ex", type="topic"), routing_key="rk")(connection.default_channel).declare()
    fx.t.delay()
    assert fx.one().queue == "far"
    assert fx.asked.operations == []


def test_broadcast_is_left_to_celery(make):
    fx = make(task_queues=[Queue("q"), Broadcast("everybody")])
    fx.worker(queues=("q", "everybody"))
    with fx.app.connection() as connection:
        for name in ("reader-1", "reader-2"):
            Queue(name, Exchange("everybody", type="fanout"))(connection.default_channel).declare()
    fx.t.apply_async(queue="everybody")
    sent = fx.taken()
    assert {message.queue for message in sent} >= {"reader-1", "reader-2"}
    assert not any(HEADER in message.headers for message in sent)
    assert fx.asked.operations == []


def test_topic_exchange_with_several_readers_is_left_to_celery(make):
    topics = Exchange("topics", type="topic")
    fx = make(task_queues=[Queue("q", topics, routing_key="a.#"), Queue("copy", topics, routing_key="#")])
    fx.worker()
    with fx.app.connection() as connection:
        for queue in fx.app.amqp.queues.values():
            queue(connection.default_channel).declare()
    fx.t.apply_async(routing_key="a.b")
    assert [sent.queue for sent in fx.taken()] == ["copy", "q"]
    assert fx.asked.operations == []


@pytest.mark.filterwarnings("ignore:\\s*The 'queue' task attribute:celery.exceptions.CDeprecationWarning")
def test_base_class_that_overrides_apply_async_keeps_its_queue(fx):
    class Base(Task):  # type: ignore[misc]
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            options.setdefault("headers", {})["by"] = "base"
            return super().apply_async(*args, **options)

    @fx.app.task(name="based", base=Base, queue="q2", shared=False)
    def based() -> None:
        pass

    fx.worker("w1@n", 5, queues=("q", "q2"), tasks=frozenset({"based"}))
    based.delay()
    sent = fx.one()
    assert (sent.mark["queue"], sent.headers["by"]) == ("q2", "base")
    fx.app.send_task("based", queue="q")
    assert fx.one().mark["queue"] == "q"


def test_router_that_answers_with_a_queue_keeps_its_arguments(make):
    decided = Queue("decided", Exchange("decided"), routing_key="decided", queue_arguments={"x-max-length": 9})
    fx = make(task_routes=[lambda *args, **kwargs: {"queue": decided}])
    fx.worker(queues=("decided",))
    with publishing() as published:
        fx.t.delay()
        fx.t.delay()
    declared = [details["declare"] for details in published]
    first, second = fx.taken()
    assert (first.queue, first.mark["queue"]) == (own("w1@north"), "decided")
    assert second.queue == "decided", "no slot was left, so it is parked"
    assert declared[0] == []
    assert [(queue.name, queue.queue_arguments) for queue in declared[1]] == [("decided", {"x-max-length": 9})]


# -- later ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "when",
    [
        {"countdown": 60},
        {"eta": datetime.now(timezone.utc) + timedelta(hours=1)},
        {"eta": (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()},
    ],
    ids=["countdown", "eta", "text"],
)
def test_task_that_is_not_due_takes_no_slot(fx, when):
    fx.worker()
    fx.t.apply_async(**when)
    sent = fx.one()
    assert sent.queue == "q"
    assert HEADER not in sent.headers
    assert fx.asked.operations == []


def test_task_that_is_not_due_keeps_its_node(fx):
    fx.worker()
    fx.t.apply_async(countdown=60, node="north")
    sent = fx.one()
    assert (sent.queue, sent.mark) == ("q", {"node": "north"})


def test_task_that_has_been_due_for_long_takes_a_slot(fx):
    fx.worker()
    fx.t.apply_async(eta=datetime.now(timezone.utc) - timedelta(seconds=1))
    assert fx.one().queue == own("w1@north")


def test_countdown_on_quorum_queues_is_left_to_celerys_delayed_delivery(make, monkeypatch):
    """Celery sends it to an exchange of its own, which brings it back when it is due."""
    quorum = Queue("q", Exchange("q", type="topic"), routing_key="q", queue_arguments={"x-queue-type": "quorum"})
    fx = make(task_queues=[quorum])
    fx.worker()
    monkeypatch.setattr("celery.app.base.detect_quorum_queues", lambda app, driver: (True, "q"))
    with publishing() as published:
        fx.t.apply_async(countdown=5)
    (details,) = published
    assert details["exchange"].name == "celery_delayed_27"
    assert details["routing_key"].endswith(".1.0.1.q")
    assert fx.asked.operations == []
    assert fx.held() == 0


# -- pinned --------------------------------------------------------------------------------------------------


def by_call(fx: Dispatched, option: str) -> None:
    fx.t.apply_async(**{option: "south"})


def by_signature(fx: Dispatched, option: str) -> None:
    fx.t.s().set(**{option: "south"}).delay()


def by_frozen_signature(fx: Dispatched, option: str) -> None:
    fx.app.signature(json.loads(json.dumps(fx.t.s().set(**{option: "south"})))).apply_async()


def by_name(fx: Dispatched, option: str) -> None:
    fx.app.send_task("t", **{option: "south"})


def by_route(fx: Dispatched, option: str) -> None:
    fx.app.conf.task_routes = {"t": {"queue": "q", option: "south"}}
    fx.t.delay()


def by_task(fx: Dispatched, option: str) -> None:
    setattr(fx.t, option, "south")
    fx.t.delay()


def by_call_against_task_and_route(fx: Dispatched, option: str) -> None:
    setattr(fx.t, option, "east")
    fx.app.conf.task_routes = {"t": {"queue": "q", option: "west"}}
    fx.t.apply_async(**{option: "south"})


def by_route_against_task(fx: Dispatched, option: str) -> None:
    setattr(fx.t, option, "east")
    by_route(fx, option)


@pytest.mark.parametrize(
    "send",
    [
        by_call,
        by_signature,
        by_frozen_signature,
        by_name,
        by_route,
        by_task,
        by_call_against_task_and_route,
        by_route_against_task,
    ],
)
@pytest.mark.parametrize("option", ["node", "prefer_node"])
def test_node_of_the_task(fx, send, option):
    for node in ("north", "south", "east", "west"):
        fx.worker(f"w@{node}", 5)
    send(fx, option)
    sent = fx.one()
    assert sent.queue == own("w@south")
    assert sent.mark[option] == "south"
    assert option not in sent.headers
    assert option not in sent.properties
    assert sent.body[1] == {}, "it is no argument of the task"


def test_preferred_node_is_left_when_it_is_full(fx):
    """H1: the first on the node, the second elsewhere at once, the third waits where anybody may take it."""
    for node in ("north", "south"):
        fx.worker(f"w@{node}")
    for _ in range(3):
        fx.t.apply_async(prefer_node="south")
    sent = fx.taken()
    assert sorted(message.queue for message in sent) == sorted([own("w@south"), own("w@north"), "q"])
    assert {message.mark["prefer_node"] for message in sent} == {"south"}


def test_preferred_node_means_nothing_beside_a_pin(fx):
    for node in ("north", "south"):
        fx.worker(f"w@{node}", 5)
    fx.t.prefer_node = "south"
    fx.t.apply_async(node="north")
    assert fx.one().queue == own("w@north")


@pytest.mark.parametrize(
    "option",
    [
        {"node": ""},
        {"node": 7},
        {"prefer_node": ""},
        {"prefer_node": 7},
        {"when_full": "wait"},
        {"when_full": "explode"},
    ],
)
def test_wrong_option_is_named_and_nothing_is_published(fx, option):
    fx.worker()
    ((name, value),) = option.items()
    with pytest.raises(ConfigurationError) as caught:
        fx.t.apply_async(**option)
    assert (caught.value.name, caught.value.value) == (name, value)
    assert fx.taken() == []
    assert fx.held() == 0
