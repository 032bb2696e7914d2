"""The producer's side, when the publish fails or the registry is away."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from kombu.exceptions import EncodeError
from kombu.transport import memory
from support.dispatched import HEADER, own

from celery_capacity.errors import (
    RegistryError,
    RegistryUnavailable,
)
from celery_capacity.naming import node_lot

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


@pytest.mark.parametrize(("operation", "workers"), [("census", 1), ("overview", 0)])
def test_registry_that_goes_away_before_it_has_said_why_it_refused(make, monkeypatch, operation, workers):
    def away(*args: Any) -> None:
        raise RegistryUnavailable("no route to host")

    for policy, conf in (("park", {}), ("raise", {"capacity_on_registry_error": "raise"})):
        fx = make(capacity_when_full="refuse", **conf)
        for _ in range(workers):
            fx.worker("w1@n", 0)
        monkeypatch.setattr(fx.registry, operation, away)
        if policy == "park":
            fx.t.delay()
            assert fx.one().queue == "q"
        else:
            with pytest.raises(RegistryUnavailable):
                fx.t.delay()
            assert fx.taken() == []
