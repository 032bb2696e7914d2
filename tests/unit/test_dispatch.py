"""The producer's side: to a worker, or not, if all are full or nobody is there."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from kombu import Exchange, Queue
from support.dispatched import HEADER, own, publishing

from celery_capacity.errors import (
    CapacityExhausted,
)
from celery_capacity.models import Reason, Slot
from celery_capacity.naming import node_lot

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
    caplog.set_level(logging.INFO, "celery_capacity.notices")
    for _ in range(5):
        fx.t.delay()
    assert [record.action for record in caplog.records] == ["unserved"]
    fx.t.apply_async(queue="other")
    assert [record.queue for record in caplog.records] == ["q", "other"]
