"""The producer's side: parts of groups and chords that are refused."""

from __future__ import annotations

import pickle

import pytest
from celery import chain, chord, group
from celery.backends.base import Backend
from celery.canvas import Signature

from celery_capacity import CapacityExhausted
from celery_capacity.errors import RegistryUnavailable
from celery_capacity.notices import Notices


def failed(fx, canvas: Signature, error: type[Exception] = CapacityExhausted, **options) -> Exception:
    with pytest.raises(error) as caught:
        canvas.apply_async(**options)
    return caught.value


@pytest.fixture
def strict(make):
    fx = make(capacity_when_full="refuse")
    fx.worker("w1@n", 1)
    fx.t.ignore_result = False
    return fx


def test_the_error_says_which_part(strict):
    exc = failed(strict, group(strict.t.s(n) for n in range(3)))
    sent = strict.one()
    assert (exc.group_id, exc.group_index) == (sent.headers["group"], 1)
    assert f"part 1 of group {exc.group_id} (1 before it are published): task 't'" in str(exc)


def test_the_error_of_a_single_task_says_nothing_of_groups(strict):
    strict.t.delay()
    exc = failed(strict, strict.t.s())
    assert (exc.group_id, exc.group_index) == (None, None)
    assert str(exc).startswith("task 't' for queue 'q' refused")


def test_the_error_can_be_pickled_and_stored(strict):
    exc = failed(strict, group(strict.t.s(n) for n in range(3)))
    assert str(pickle.loads(pickle.dumps(exc))) == str(exc)
    backend: Backend = strict.app.backend
    back = backend.exception_to_python(backend.prepare_exception(exc))
    assert isinstance(back, CapacityExhausted)
    assert "part 1 of group" in str(back)
    assert "refused (full)" in str(back)


@pytest.mark.parametrize("of_chains", [False, True])
def test_a_chord_fails(strict, of_chains):
    parts = [chain(strict.t.s(n), strict.t.s()) if of_chains else strict.t.s(n) for n in range(3)]
    exc = failed(strict, chord(parts, strict.t.s()), task_id=f"{strict.url}-body")
    assert exc.group_index == 1
    assert strict.app.AsyncResult(f"{strict.url}-body").state == "FAILURE"


def test_a_chord_in_a_group_and_what_waits_for_it_fail(strict):
    inner = chord([strict.t.s(1), strict.t.s(2)], strict.t.s().set(task_id="inner"))
    failed(strict, chord([strict.t.s(0), inner], strict.t.s()), task_id=f"{strict.url}-outer")
    assert strict.app.AsyncResult(f"{strict.url}-outer").state == "FAILURE"


def test_of_a_chord_that_was_refused_as_a_whole_nothing_is_stored(strict):
    strict.t.delay()
    exc = failed(strict, chord([strict.t.s(n) for n in range(3)], strict.t.s()), task_id=f"{strict.url}-body")
    assert "(nothing is published)" in str(exc)
    assert strict.app.AsyncResult(f"{strict.url}-body").state == "PENDING"


def test_without_native_chords_the_parts_fail_that_the_unlock_task_waits_for(make, tmp_path):
    fx = make(capacity_when_full="refuse", result_backend=f"file://{tmp_path}")
    fx.worker("w1@n", 1)
    fx.t.ignore_result = False
    failed(fx, chord([fx.t.s(n) for n in range(3)], fx.t.s()))
    unlock = next(message for message in fx.taken() if message.headers["task"] == "celery.chord_unlock")
    states = [fx.app.AsyncResult(result[0][0]).state for result in unlock.body[1]["result"]]
    assert states == ["PENDING", "FAILURE", "FAILURE"]


def test_the_registry_goes_away_between_two_parts(make, monkeypatch):
    fx = make(capacity_on_registry_error="raise")
    fx.worker("w1@n", 5)
    fx.t.ignore_result = False
    reserve, calls = fx.registry.select_and_reserve, []

    def once(demand):
        calls.append(demand)
        if len(calls) > 1:
            raise RegistryUnavailable("away")
        return reserve(demand)

    monkeypatch.setattr(fx.registry, "select_and_reserve", once)
    failed(fx, chord([fx.t.s(n) for n in range(3)], fx.t.s()), RegistryUnavailable, task_id=f"{fx.url}-body")
    assert fx.app.AsyncResult(f"{fx.url}-body").state == "FAILURE"


def test_a_result_backend_that_fails_does_not_hide_the_refusal(strict, monkeypatch, caplog):
    def away(*args, **kwargs):
        raise OSError("away")

    monkeypatch.setattr(type(strict.app.backend), "chord_error_from_stack", away)
    assert isinstance(failed(strict, chord([strict.t.s(n) for n in range(3)], strict.t.s())), CapacityExhausted)
    assert [record.action for record in caplog.records if hasattr(record, "action")] == ["chord_not_failed"]


def test_notices_come_once_in_a_minute(caplog, monkeypatch):
    now = 0.0
    monkeypatch.setattr("celery_capacity.notices.time.monotonic", lambda: now)
    notices = Notices()
    for _ in range(3):
        notices.parked_by_task("child", "parent")
        notices.parked_by_task("other", "parent")
    assert len(caplog.records) == 2
    now = 61.0
    notices.parked_by_task("child", "parent")
    assert len(caplog.records) == 3
