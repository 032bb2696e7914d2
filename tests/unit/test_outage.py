"""The circuit breaker in front of the registry."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

import pytest

from celery_capacity.errors import InvalidDemandError, RegistryError, RegistryUnavailable
from celery_capacity.outage import Outage

URL = "redis://db:6379/1"
RETRY_SECONDS = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Stands in for a registry that can be away."""

    def __init__(self) -> None:
        self.away: Exception | None = None
        self.calls = 0

    def ask(self, *args: object, **kwargs: object) -> tuple[object, object]:
        self.calls += 1
        if self.away is not None:
            raise self.away
        return args, kwargs


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    return Outage(URL, RETRY_SECONDS, clock)


def actions(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.action for record in caplog.records]


def test_arguments_and_answer_pass_through(outage, store):
    assert outage.call(store.ask, 1, two=2) == ((1,), {"two": 2})
    assert not outage.active


def test_error_of_the_store_is_raised_as_it_is(outage, store):
    store.away = RegistryUnavailable("no route to host")
    with pytest.raises(RegistryUnavailable) as caught:
        outage.call(store.ask)
    assert caught.value is store.away
    assert outage.active


def test_while_it_is_away_calls_fail_at_once(outage, store, clock):
    store.away = RegistryUnavailable("gone")
    with pytest.raises(RegistryUnavailable):
        outage.call(store.ask)
    clock.now += RETRY_SECONDS - 0.001
    for _ in range(100):
        with pytest.raises(RegistryUnavailable, match=r"registry redis://db:6379/1 is away"):
            outage.call(store.ask)
    assert store.calls == 1


def test_one_attempt_is_made_each_interval(outage, store, clock):
    store.away = RegistryUnavailable("gone")
    for _ in range(4):
        for _ in range(10):
            with pytest.raises(RegistryUnavailable):
                outage.call(store.ask)
        clock.now += RETRY_SECONDS
    assert store.calls == 4


def test_interval_begins_when_the_attempt_has_failed(outage, store, clock):
    """An attempt may itself take as long as the time-out of the store."""

    def slow() -> None:
        clock.now += 3.0
        raise RegistryUnavailable("timed out")

    with pytest.raises(RegistryUnavailable, match="timed out"):
        outage.call(slow)
    clock.now += RETRY_SECONDS - 0.001
    with pytest.raises(RegistryUnavailable, match="is away"):
        outage.call(store.ask)
    clock.now += 0.001
    outage.call(store.ask)


def test_it_is_over_with_the_first_answer(outage, store, clock):
    store.away = RegistryUnavailable("gone")
    with pytest.raises(RegistryUnavailable):
        outage.call(store.ask)
    store.away = None
    clock.now += RETRY_SECONDS
    for _ in range(3):
        outage.call(store.ask)
    assert not outage.active
    assert store.calls == 4


def test_one_warning_for_each_outage_and_one_at_its_end(outage, store, clock, caplog):
    caplog.set_level(logging.DEBUG, "celery_capacity.outage")
    for _ in range(2):
        store.away = RegistryUnavailable("gone")
        for _ in range(3):
            with pytest.raises(RegistryUnavailable):
                outage.call(store.ask)
            clock.now += RETRY_SECONDS
        store.away = None
        outage.call(store.ask)
        outage.call(store.ask)
    assert actions(caplog) == ["registry_away", "registry_back"] * 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert caplog.messages[0] == f"registry {URL} is away; going on without it: gone"


def test_one_that_answers_now_and_then_is_one_outage(outage, store, clock, caplog):
    other = Outage(URL, 0.0, clock, peer=outage)
    for _ in range(5):
        with pytest.raises(RegistryUnavailable):
            outage.call(_away)
        other.call(store.ask)
        # It was told to hurry.
        outage.call(store.ask)
        clock.now += RETRY_SECONDS / 2
    assert actions(caplog) == ["registry_away"]
    clock.now += RETRY_SECONDS
    outage.call(store.ask)
    outage.call(store.ask)
    assert actions(caplog) == ["registry_away", "registry_back"]


def test_error_that_is_not_the_registrys_begins_no_outage(outage, store):
    store.away = InvalidDemandError("queue", "", "a name")
    with pytest.raises(InvalidDemandError):
        outage.call(store.ask)
    assert not outage.active


def test_error_that_is_not_the_registrys_leaves_a_known_outage_alone(outage, store, clock):
    store.away = RegistryUnavailable("gone")
    with pytest.raises(RegistryUnavailable):
        outage.call(store.ask)
    clock.now += RETRY_SECONDS
    store.away = ValueError("a bug of the caller")
    with pytest.raises(ValueError, match="a bug"):
        outage.call(store.ask)
    assert outage.active
    with pytest.raises(RegistryUnavailable):
        outage.call(store.ask)
    assert store.calls == 2


def test_wrong_answer_counts_as_an_outage_too(outage, store):
    store.away = RegistryError("read-only replica")
    with pytest.raises(RegistryError, match="read-only"):
        outage.call(store.ask)
    assert outage.active


def test_of_many_threads_one_makes_the_attempt(outage, store, clock):
    store.away = RegistryUnavailable("gone")
    with pytest.raises(RegistryUnavailable):
        outage.call(store.ask)
    clock.now += RETRY_SECONDS
    entered, done, start = threading.Semaphore(0), threading.Event(), threading.Barrier(8)
    refused: list[str] = []

    def attempt() -> None:
        entered.release()
        done.wait(30)

    def producer() -> None:
        start.wait(30)
        try:
            outage.call(attempt)
        except RegistryUnavailable as exc:
            refused.append(str(exc))
            if len(refused) == 7:
                done.set()

    threads = [threading.Thread(target=producer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(refused) == 7, "they did not wait for the one that tries"
    assert entered.acquire(blocking=False)
    assert not entered.acquire(blocking=False)
    assert not outage.active


def test_of_two_clients_of_one_store_the_first_tells(outage, store, clock, caplog):
    other = Outage(URL, RETRY_SECONDS, clock, peer=outage)
    store.away = RegistryUnavailable("gone")
    for one in (outage, other, outage):
        with pytest.raises(RegistryUnavailable):
            one.call(store.ask)
    store.away = None
    clock.now += RETRY_SECONDS
    other.call(store.ask)
    assert actions(caplog) == ["registry_away"], "the other one is still away"
    outage.call(store.ask)
    assert actions(caplog) == ["registry_away", "registry_back"]
    with pytest.raises(RegistryUnavailable):
        other.call(_away)
    assert actions(caplog)[2:] == ["registry_away"]


def test_when_one_client_is_back_the_other_tries_at_once(outage, store, clock):
    quick = Outage(URL, 1.0, clock, peer=outage)
    for one in (outage, quick):
        with pytest.raises(RegistryUnavailable):
            one.call(_away)
    clock.now += 1.0
    quick.call(store.ask)
    outage.call(store.ask)
    assert not outage.active
    # Once.
    with pytest.raises(RegistryUnavailable):
        outage.call(_away)
    with pytest.raises(RegistryUnavailable, match="the next attempt"):
        outage.call(store.ask)


def test_a_forked_child_tells_of_its_own_outages(outage, store, clock):
    other = Outage(URL, RETRY_SECONDS, clock, peer=outage)
    with pytest.raises(RegistryUnavailable):
        other.call(_away)
    with outage._lock:
        pid = os.fork()
        if pid == 0:
            try:
                told: list[str] = []
                logger = logging.getLogger("celery_capacity.outage")
                logger.addFilter(lambda record: bool(told.append(record.action)))
                with suppress(RegistryUnavailable):
                    outage.call(_away)
                os._exit(0 if told == ["registry_away"] else 1)
            finally:
                os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def _away() -> None:
    raise RegistryUnavailable("gone")
