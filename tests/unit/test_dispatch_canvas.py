"""The producer's side: retries, groups, chains and chords."""

from __future__ import annotations

from typing import Any

from celery import chain, chord, group
from support.dispatched import HEADER, Dispatched, Sent, own

# -- again ---------------------------------------------------------------------------------------------------


def retried(fx: Dispatched, sent: Sent, **options: Any) -> Sent:
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


def test_retry_may_choose_another_node(fx):
    fx.worker("w1@north", 1)
    fx.worker("w2@south", 2)
    fx.t.apply_async(node="south")
    again = retried(fx, fx.one(), countdown=0, node="north")
    assert (again.queue, again.mark["node"]) == (own("w1@north"), "north")


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
