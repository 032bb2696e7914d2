"""What a producer is told once, and queues that are none of the plugin's."""

from __future__ import annotations

import logging

import pytest
from kombu import Queue
from support.dispatched import HEADER

from celery_capacity import dispatch, notices


def test_node_without_a_worker_is_a_warning_once_and_again_when_it_was_there(fx, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "REFUSED_SECONDS", 0.0)
    caplog.set_level(logging.WARNING, "celery_capacity.notices")

    def warned() -> list[tuple[str, str]]:
        return [(record.action, record.node) for record in caplog.records if hasattr(record, "action")]

    fx.worker("w1@north", slots=50)
    for _ in range(3):
        fx.t.apply_async(node="west")
    assert warned() == [("nowhere", "west")]
    assert "waits in" in caplog.text
    fx.t.apply_async(node="east")
    fx.t.apply_async(node="north")
    assert warned() == [("nowhere", "west"), ("nowhere", "east")]

    fx.worker("w2@west")
    fx.t.apply_async(node="west")
    fx.t.apply_async(node="west")
    assert len(warned()) == 2, "full is not missing"
    epoch = next(view.epoch for view in fx.registry.overview().workers if view.name == "w2@west")
    fx.registry.deregister("w2@west", epoch)
    fx.t.apply_async(node="west")
    assert warned()[2:] == [("nowhere", "west")]


def test_what_is_remembered_of_missing_nodes_has_a_bound(monkeypatch, caplog):
    monkeypatch.setattr(notices, "_NAMES", 3)
    told = notices.Notices()
    for number in range(9):
        told.nowhere("q", f"n{number}", None, "lot")
        told.unserved(f"q{number}")
    assert len(told._nowhere) <= 3
    assert len(told._again_at) <= 3
    assert len(caplog.records) >= 9


@pytest.mark.parametrize("arguments", [{"x-single-active-consumer": True}, {"x-queue-type": "stream"}])
def test_queue_with_one_reader_at_a_time_is_left_to_celery(make, arguments):
    fx = make(task_queues=[Queue("q", queue_arguments=arguments)])
    fx.worker("w1@north")
    fx.t.delay()
    sent = fx.one()
    assert (sent.queue, HEADER in sent.headers) == ("q", False)
