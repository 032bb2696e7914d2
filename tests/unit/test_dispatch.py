"""The producer's side without any worker: an in-memory broker, and workers that are only registered."""

from __future__ import annotations

import json
import logging
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group, signals
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.exceptions import EncodeError
from kombu.transport import memory

from celery_capacity.dispatch import Dispatcher, own_queue
from celery_capacity.errors import (
    CapacityExhausted,
    ConfigurationError,
    RegistryError,
    RegistryUnavailable,
)
from celery_capacity.models import Advert, Reason, Slot
from celery_capacity.naming import node_lot, own_queue_name
from celery_capacity.outage import Outage
from celery_capacity.registry import Registry, open_registry
from celery_capacity.settings import load_settings

FOR_EVER = 1e6
HEADER = "capacity"


class Sent(SimpleNamespace):
    """One message in the broker."""

    queue: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    body: Any

    @property
    def mark(self) -> dict[str, Any]:
        found: dict[str, Any] = self.headers.get(HEADER, {})
        return found


class Counting:
    """Passes everything on to a registry, and remembers the operations; ``error`` is raised by all of them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.operations: list[str] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._registry, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.operations.append(name)
            if self.error is not None:
                raise self.error
            return operation(*args, **kwargs)

        return call


class Fixture:
    """An app with the hook, its registry, and what was published."""

    def __init__(self, **conf: Any) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self.registry = open_registry(self.url)
        self.asked = Counting(self.registry)
        self.now = 0.0
        self.app = app = Celery("dispatched", broker="memory://", set_as_current=False)
        app.amqp_cls = "celery_capacity.dispatch:CapacityAMQP"
        app.conf.update(
            {"result_backend": "cache+memory://", "task_default_queue": "q", "capacity_registry": self.url, **conf}
        )
        self.settings = load_settings(app.conf)
        self.outage = Outage(self.url, self.settings.registry_retry_seconds, lambda: self.now)
        dispatcher = Dispatcher(app, self.settings, lambda: self.asked, self.outage)  # type: ignore[arg-type,return-value]
        app.capacity = SimpleNamespace(dispatcher=dispatcher, task_consumer=lambda *args, **kwargs: None)

        @app.task(name="t", shared=False, ignore_result=True)
        def t(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("nothing runs here")

        self.t = t

    def worker(self, name: str = "w1@north", slots: int | None = 1, **fields: Any) -> None:
        """Register a worker, as if it ran and had declared its own queue."""
        advert = {
            "node": name.partition("@")[2],
            "queues": ("q",),
            "tasks": frozenset({"t"}),
            "lease_seconds": FOR_EVER,
            "lapse_seconds": FOR_EVER,
            **fields,
        }
        self.registry.register(Advert(name, capacity=slots, **advert))
        with self.app.connection() as connection:
            own_queue(self.settings.namespace, name)(connection.default_channel).declare()

    def held(self) -> int:
        return sum(worker.held for worker in self.registry.overview().workers)

    def waiting(self, queue: str = "q") -> bool:
        return any(view.waiting for view in self.registry.overview().queues if view.name == queue)

    def taken(self) -> list[Sent]:
        """Take all messages out of the broker, queue by queue."""
        found = []
        with self.app.connection() as connection:
            channel = connection.default_channel
            for name in sorted(memory.Channel.queues):
                while (message := channel.basic_get(name, no_ack=True)) is not None:
                    found.append(
                        Sent(
                            queue=name,
                            headers=message.headers,
                            properties=message.properties,
                            body=json.loads(message.body),
                        )
                    )
        return found

    def one(self) -> Sent:
        (sent,) = self.taken()
        return sent


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fixture]]:
    """Makes apps; each test finds an empty broker."""
    made: list[Fixture] = []

    def clear() -> None:
        memory.Channel.queues.clear()
        memory.Transport.global_state.clear()

    def build(**conf: Any) -> Fixture:
        made.append(Fixture(**conf))
        return made[-1]

    clear()
    yield build
    for fixture in made:
        fixture.app.close()
        fixture.registry.close()
    clear()


@pytest.fixture
def fx(make: Callable[..., Fixture]) -> Fixture:
    return make()


@contextmanager
def publishing() -> Iterator[list[dict[str, Any]]]:
    """What Celery is about to publish: exchange, routing key, what is declared, …"""
    found: list[dict[str, Any]] = []

    def note(**details: Any) -> None:
        found.append(details)

    signals.before_task_publish.connect(note, weak=False)
    try:
        yield found
    finally:
        signals.before_task_publish.disconnect(note)


def own(name: str) -> str:
    return own_queue_name("default", name)


# -- to a worker ---------------------------------------------------------------------------------------------


def test_message_goes_to_the_own_queue_of_the_worker_whose_slot_it_holds(fx):
    fx.worker("w1@north", 2)

    result = fx.t.apply_async((1,), {"k": 2}, headers={"mine": "kept"})

    sent = fx.one()
    assert sent.queue == own("w1@north")
    assert sent.headers["id"] == result.id
    assert sent.headers["mine"] == "kept"
    assert sent.body[:2] == [[1], {"k": 2}]
    (worker,) = fx.registry.overview().workers
    assert (worker.reserved, worker.committed) == (1, 0)
    token = sent.mark["token"]
    assert sent.mark == {
        "token": token,
        "worker": "w1@north",
        "epoch": worker.epoch,
        "queue": "q",
        "exchange": "",
        "routing_key": "q",
    }
    assert fx.registry.commit(token, "w1@north", worker.epoch).value == "committed"
    assert fx.held() == 1


def test_slot_records_task_and_id(fx):
    fx.worker()
    seen: list[Slot] = []
    select = fx.registry.select_and_reserve

    def spy(demand: Any) -> Any:
        claim = select(demand)
        seen.append(claim.slot)
        return claim

    fx.registry.select_and_reserve = spy  # type: ignore[method-assign]
    fx.t.apply_async(task_id="the-id")
    assert [(slot.task, slot.task_id, slot.queue) for slot in seen] == [("t", "the-id", "q")]


def test_workers_take_turns(fx):
    for name in ("w1@n", "w2@n", "w3@n"):
        fx.worker(name, 4)
    for _ in range(6):
        fx.t.delay()
    assert [sent.queue for sent in fx.taken()] == [own(f"w{i}@n") for i in (1, 1, 2, 2, 3, 3)]


def test_publishing_costs_one_registry_operation(fx):
    fx.worker("w1@n", 5)
    for _ in range(5):
        fx.t.delay()
    assert fx.asked.operations == ["select_and_reserve"] * 5


def test_nothing_is_declared_when_publishing_to_a_worker(fx):
    """A declaration that a producer remembers says nothing about a queue that was deleted since."""
    fx.worker()
    with publishing() as published:
        fx.t.delay()
    declared = [details["declare"] for details in published]
    assert declared == [[]]


def test_properties_of_the_call_are_kept(fx):
    fx.worker()
    fx.t.apply_async(priority=7, expires=3600, reply_to="me", time_limit=9)
    sent = fx.one()
    assert sent.properties["priority"] == 7
    assert sent.properties["reply_to"] == "me"
    assert sent.headers["timelimit"] == [9, None]
    assert sent.headers["expires"]
    assert sent.properties["expiration"]


def test_transient_queue_stays_transient(make):
    transient = Queue("q", Exchange("q", delivery_mode=1), routing_key="q")
    fx = make(task_queues=[transient])
    fx.worker()
    fx.t.delay()
    assert fx.one().properties["delivery_mode"] == 1


def test_send_task_by_name_needs_no_task_here(fx):
    fx.worker(tasks=frozenset({"elsewhere"}))
    fx.app.send_task("elsewhere", args=(1,))
    sent = fx.one()
    assert (sent.queue, sent.headers["task"]) == (own("w1@north"), "elsewhere")


def test_send_task_to_a_queue_that_is_declared_nowhere(fx):
    fx.worker(queues=("q", "made-up"))
    fx.app.send_task("t", queue="made-up")
    assert fx.one().mark["queue"] == "made-up"


def test_protocol_1(make):
    fx = make(task_protocol=1)
    fx.worker()
    result = fx.t.apply_async((1,))
    sent = fx.one()
    assert (sent.queue, sent.body["id"], sent.body["args"]) == (own("w1@north"), result.id, [1])
    assert set(sent.mark) == {"token", "worker", "epoch", "queue", "exchange", "routing_key"}
    fx.t.apply_async(countdown=60)
    assert fx.one().queue == "q"


def test_topic_queue_without_another_reader_keeps_its_origin(make):
    topic = Queue("q", Exchange("topics", type="topic"), routing_key="a.#")
    fx = make(task_queues=[topic])
    fx.worker()
    fx.t.apply_async(routing_key="a.b")
    sent = fx.one()
    assert sent.queue == own("w1@north")
    assert (sent.mark["queue"], sent.mark["exchange"], sent.mark["routing_key"]) == ("q", "topics", "a.b")


def test_token_that_comes_with_the_headers_is_never_trusted(fx):
    fx.worker()
    fx.t.apply_async(headers={HEADER: {"token": "forged", "worker": "w9", "epoch": 1, "queue": "other"}})
    sent = fx.one()
    assert sent.mark["token"] != "forged"
    assert sent.mark["worker"] == "w1@north"
    assert sent.mark["queue"] == "q"


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


# -- full ----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_parked_in_its_queue_with_a_mark(fx):
    fx.worker()
    fx.t.delay()
    assert not fx.waiting()
    fx.t.delay()
    first, second = fx.taken()
    assert first.queue == own("w1@north")
    assert second.queue == "q"
    assert HEADER not in second.headers
    assert fx.waiting()
    assert fx.held() == 1


def test_pinned_task_is_parked_in_the_lot_of_its_node(fx):
    fx.worker("w1@north", 0)
    fx.worker("w2@south", 5)
    fx.t.apply_async(node="north")
    sent = fx.one()
    assert sent.queue == node_lot("default", "q", "north")
    assert sent.mark == {"node": "north", "queue": "q", "exchange": "", "routing_key": "q"}
    assert fx.waiting()


def test_lot_of_a_node_is_of_the_same_type_as_the_queue(make):
    quorum = Queue("q", Exchange("q"), routing_key="q", queue_arguments={"x-queue-type": "quorum", "x-max-length": 3})
    fx = make(task_queues=[quorum])
    fx.worker("w1@north", 0)
    with publishing() as published:
        fx.t.apply_async(node="north")
    declared = [details["declare"] for details in published]
    ((lot,),) = declared
    assert (lot.name, lot.durable, lot.queue_arguments) == (
        node_lot("default", "q", "north"),
        True,
        {"x-queue-type": "quorum"},
    )


@pytest.mark.parametrize("how", ["setting", "queue", "call", "signature", "route", "task"])
def test_refusal_raises_with_the_census_and_publishes_nothing(make, how):
    conf = {
        "setting": {"capacity_when_full": "refuse"},
        "queue": {"capacity_when_full": {"q": "refuse"}},
        "route": {"task_routes": {"t": {"queue": "q", "when_full": "refuse"}}},
    }.get(how, {})
    fx = make(**conf)
    if how == "task":
        fx.t.when_full = "refuse"
    fx.worker("w1@n", 1)
    fx.worker("w2@n", None)
    send = {
        "call": lambda: fx.t.apply_async(when_full="refuse"),
        "signature": lambda: fx.t.s().set(when_full="refuse").apply_async(),
    }.get(how, fx.t.delay)
    send()
    assert fx.one().queue == own("w1@n")

    with pytest.raises(CapacityExhausted) as caught:
        send()

    assert fx.taken() == []
    assert fx.held() == 1
    assert not fx.waiting(), "a refusal writes nothing down"
    error = caught.value
    assert (error.queue, error.task, error.reason) == ("q", "t", "full")
    assert error.retry_after > 0
    assert {view.name: view.reason for view in error.census.workers} == {
        "w1@n": Reason.FULL,
        "w2@n": Reason.UNKNOWN_CAPACITY,
    }
    assert str(error).startswith("task 't' for queue 'q' refused (full): w1@n full (1/1), w2@n unknown capacity (0/?)")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_policy_of_the_call_wins_over_the_setting(make):
    fx = make(capacity_when_full="refuse")
    fx.worker("w1@n", 0)
    fx.t.apply_async(when_full="park")
    sent = fx.one()
    assert (sent.queue, sent.mark) == ("q", {"when_full": "park"})


def test_refusal_where_the_fleet_serves_other_queues(make):
    fx = make(capacity_when_full="refuse")
    fx.worker(queues=("other",))
    with pytest.raises(CapacityExhausted, match="no worker for queue 'q'"):
        fx.t.delay()
    assert fx.taken() == []


def test_refusal_by_the_limit_of_the_queue(make):
    fx = make(capacity_when_full="refuse")
    fx.worker("w1@n", 5)
    fx.registry.set_limit("q", 1)
    fx.t.delay()
    with pytest.raises(CapacityExhausted) as caught:
        fx.t.delay()
    assert caught.value.reason == "limit"
    assert (caught.value.census.limit, caught.value.census.held) == (1, 1)


# -- nobody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["park", "refuse"])
def test_without_any_worker_it_is_plain_celery(make, policy):
    fx = make(capacity_when_full=policy)
    fx.t.delay()
    sent = fx.one()
    assert sent.queue == "q"
    assert HEADER not in sent.headers
    assert not fx.waiting()


def test_queue_that_nobody_serves_is_logged_once_in_a_while(fx, caplog):
    caplog.set_level(logging.INFO, "celery_capacity.dispatch")
    for _ in range(5):
        fx.t.delay()
    assert [record.action for record in caplog.records] == ["unserved"]
    fx.t.apply_async(queue="other")
    assert [record.queue for record in caplog.records] == ["q", "other"]


# -- pinned --------------------------------------------------------------------------------------------------


def by_call(fx: Fixture) -> None:
    fx.t.apply_async(node="south")


def by_signature(fx: Fixture) -> None:
    fx.t.s().set(node="south").delay()


def by_frozen_signature(fx: Fixture) -> None:
    fx.app.signature(json.loads(json.dumps(fx.t.s().set(node="south")))).apply_async()


def by_name(fx: Fixture) -> None:
    fx.app.send_task("t", node="south")


def by_route(fx: Fixture) -> None:
    fx.app.conf.task_routes = {"t": {"queue": "q", "node": "south"}}
    fx.t.delay()


def by_task(fx: Fixture) -> None:
    fx.t.node = "south"
    fx.t.delay()


def by_call_against_task_and_route(fx: Fixture) -> None:
    fx.t.node = "east"
    fx.app.conf.task_routes = {"t": {"queue": "q", "node": "west"}}
    fx.t.apply_async(node="south")


def by_route_against_task(fx: Fixture) -> None:
    fx.t.node = "east"
    by_route(fx)


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
def test_node_pins_the_task(fx, send):
    for node in ("north", "south", "east", "west"):
        fx.worker(f"w@{node}", 5)
    send(fx)
    sent = fx.one()
    assert sent.queue == own("w@south")
    assert sent.mark["node"] == "south"
    assert "node" not in sent.headers
    assert "node" not in sent.properties
    assert sent.body[1] == {}, "it is no argument of the task"


@pytest.mark.parametrize("option", [{"node": ""}, {"node": 7}, {"when_full": "wait"}, {"when_full": "explode"}])
def test_wrong_option_is_named_and_nothing_is_published(fx, option):
    fx.worker()
    ((name, value),) = option.items()
    with pytest.raises(ConfigurationError) as caught:
        fx.t.apply_async(**option)
    assert (caught.value.name, caught.value.value) == (name, value)
    assert fx.taken() == []
    assert fx.held() == 0


# -- again ---------------------------------------------------------------------------------------------------


def retried(fx: Fixture, sent: Sent, **options: Any) -> Sent:
    """The message that a worker publishes when the task of ``sent`` asks for a retry."""
    fields = {**sent.headers, "args": sent.body[0], "kwargs": sent.body[1]}
    fields.update(called_directly=False, is_eager=False, delivery_info={"exchange": "", "routing_key": "q"})
    fx.t.push_request(**fields)
    try:
        fx.t.retry(throw=False, exc=RuntimeError("again"), **options)
    finally:
        fx.t.pop_request()
    return fx.one()


def test_retry_keeps_the_node_but_never_the_token(fx):
    fx.worker("w1@north", 2)
    fx.worker("w2@south", 2)
    fx.t.apply_async(node="south", when_full="park")
    first = fx.one()

    later = retried(fx, first, countdown=30)
    assert later.queue == "q"
    assert later.mark == {"node": "south", "when_full": "park"}
    assert later.headers["retries"] == 1

    again = retried(fx, first, countdown=0)
    assert again.queue == own("w2@south")
    assert again.mark["token"] != first.mark["token"]
    assert (again.mark["node"], again.mark["when_full"]) == ("south", "park")
    assert fx.held() == 2


def test_retry_that_does_not_fit_is_parked_without_the_old_token(fx):
    fx.worker("w1@north", 1)
    fx.t.delay()
    parked = retried(fx, fx.one(), countdown=0)
    assert parked.queue == "q"
    assert HEADER not in parked.headers


# -- canvas --------------------------------------------------------------------------------------------------


def test_group_takes_a_slot_for_each_task(fx):
    fx.worker("w1@n", 2)
    fx.worker("w2@n", 2)
    group(fx.t.s(i) for i in range(5)).apply_async()
    sent = fx.taken()
    assert [message.queue for message in sent] == [own("w1@n")] * 2 + [own("w2@n")] * 2 + ["q"]
    assert len({message.headers["group"] for message in sent}) == 1
    assert sent[0].headers["group"]
    assert sorted(message.headers["group_index"] for message in sent) == [0, 1, 2, 3, 4]
    assert fx.held() == 4


def test_chain_sends_its_first_task_and_carries_the_rest(fx):
    fx.worker("w1@n", 5)
    chain(fx.t.s(1), fx.t.s(2).set(node="south"), fx.t.s(3)).apply_async()
    sent = fx.one()
    assert sent.queue == own("w1@n")
    rest = sent.body[2]["chain"]
    assert [signature["args"] for signature in rest] == [[3], [2]]
    assert rest[1]["options"]["node"] == "south"
    assert fx.held() == 1, "what is not sent yet holds nothing"


def test_chord_keeps_its_body(fx):
    fx.worker("w1@n", 5)
    fx.t.ignore_result = False
    chord([fx.t.s(1), fx.t.s(2)], fx.t.s().set(node="south")).apply_async()
    sent = [message for message in fx.taken() if message.headers["task"] == "t"]
    assert [message.queue for message in sent] == [own("w1@n")] * 2
    for message in sent:
        body = message.body[2]["chord"]
        assert (body["task"], body["options"]["node"]) == ("t", "south")
        assert message.headers["group"] == sent[0].headers["group"]
        assert message.headers["group"]


def test_links_are_kept(fx):
    fx.worker()
    fx.t.apply_async(link=fx.t.s("done").set(node="n"), link_error=fx.t.s("failed"))
    embedded = fx.one().body[2]
    assert embedded["callbacks"][0]["options"]["node"] == "n"
    assert embedded["errbacks"][0]["args"] == ["failed"]


def test_same_message_as_celery_but_for_the_mark(fx):
    def send() -> Sent:
        fx.t.apply_async((1,), {"a": "b"}, task_id="id", root_id="r", parent_id="p", headers={"x": "y"})
        return fx.one()

    plain = send()
    fx.worker()
    sent = send()
    assert sent.headers.pop(HEADER)
    assert plain.queue == "q"
    assert sent.headers == plain.headers
    assert sent.body == plain.body
    ignored = {"delivery_tag", "delivery_info"}
    assert {k: v for k, v in sent.properties.items() if k not in ignored} == {
        k: v for k, v in plain.properties.items() if k not in ignored
    }


# -- eager ---------------------------------------------------------------------------------------------------


def test_eager_task_touches_no_registry(make):
    fx = make(task_always_eager=True)
    fx.worker("w1@n", 0)

    @fx.app.task(name="sum", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    assert add.delay(1, 2).get() == 3
    assert add.apply_async((1, 2), node="nowhere", when_full="refuse").get() == 3
    assert add.s(1, 2).set(node="nowhere").apply().get() == 3
    assert fx.asked.operations == []
    assert fx.taken() == []


# -- what goes wrong -----------------------------------------------------------------------------------------


def test_slot_is_given_back_when_the_publish_fails(fx, monkeypatch):
    fx.worker()

    def fail(*args: Any, **kwargs: Any) -> None:
        assert fx.held() == 1, "the slot was claimed before"
        raise ConnectionResetError("broker gone")

    with monkeypatch.context() as patch:
        patch.setattr(memory.Channel, "basic_publish", fail)
        with pytest.raises(Exception, match="broker gone"):
            fx.t.apply_async(retry=False)
    assert fx.held() == 0
    assert fx.taken() == []
    fx.t.delay()
    assert fx.one().queue == own("w1@north")


def test_slot_is_given_back_when_the_arguments_cannot_be_encoded(fx):
    fx.worker()
    with pytest.raises(EncodeError):
        fx.t.delay(object())
    assert fx.held() == 0


def test_error_of_the_publish_is_not_replaced_when_the_slot_cannot_be_given_back(fx, monkeypatch, caplog):
    fx.worker()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionResetError("broker gone")

    def cancel(token: str) -> None:
        raise RegistryUnavailable("and the registry too")

    monkeypatch.setattr(memory.Channel, "basic_publish", fail)
    monkeypatch.setattr(fx.registry, "cancel", cancel)
    with pytest.raises(Exception, match="broker gone"):
        fx.t.apply_async(retry=False)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (record.action, record.worker) == ("release_failed", "w1@north")


def test_while_the_registry_is_away_tasks_are_parked_with_one_warning(fx, caplog):
    fx.worker()
    fx.asked.error = RegistryUnavailable("no route to host")
    for _ in range(5):
        fx.t.delay()
    sent = fx.taken()
    assert [message.queue for message in sent] == ["q"] * 5
    assert not any(HEADER in message.headers for message in sent)
    assert fx.asked.operations == ["select_and_reserve"], "the others did not pay for the time-out"
    assert [record.action for record in caplog.records] == ["registry_away"]

    fx.asked.error = None
    fx.now += fx.settings.registry_retry_seconds
    fx.t.delay()
    assert fx.one().queue == own("w1@north")


def test_while_the_registry_is_away_a_pinned_task_waits_in_the_lot_of_its_node(fx):
    fx.asked.error = RegistryUnavailable("no route to host")
    fx.t.apply_async(node="north")
    sent = fx.one()
    assert sent.queue == node_lot("default", "q", "north")
    assert sent.mark["node"] == "north"


def test_while_the_registry_is_away_no_task_is_refused(make):
    fx = make(capacity_when_full="refuse")
    fx.asked.error = RegistryError("READONLY")
    fx.t.delay()
    assert fx.one().queue == "q"


def test_on_registry_error_raise(make, caplog):
    fx = make(capacity_on_registry_error="raise")
    fx.worker()
    fx.asked.error = RegistryUnavailable("no route to host")
    with pytest.raises(RegistryUnavailable, match="no route to host"):
        fx.t.delay()
    with pytest.raises(RegistryUnavailable, match="is away"):
        fx.t.delay()
    assert fx.taken() == []
    assert [record.action for record in caplog.records] == ["registry_away"]
    fx.t.apply_async(countdown=60)
    assert fx.one().queue == "q", "what needs no slot is not held up"
