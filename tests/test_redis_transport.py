"""The Redis transport of an app with the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from support.servers import shared_redis_url, unique

import celery_capacity
from celery_capacity.connection import CapacityConnection
from celery_capacity.redis_transport import Transport


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with shared_redis_url() as url:
        yield url


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = Celery("redis", broker=url, set_as_current=False)
    app.conf.capacity_registry = "memory://"
    celery_capacity.install(app)
    yield app
    app.close()


def test_no_client_is_made_for_a_message(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kombu's own makes one to publish it, one to write it down as unacknowledged, and one to acknowledge it."""
    made: list[redis.Redis] = []
    name, init = unique("one-client"), redis.Redis.__init__

    def counted(self: redis.Redis, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    with app.connection_for_write() as connection:
        channel = connection.channel()
        queue = Queue(name, routing_key=name)(channel)
        queue.declare()
        producer = app.amqp.Producer(channel)
        try:
            producer.publish({"n": 0}, exchange="", routing_key=name)
            monkeypatch.setattr(redis.Redis, "__init__", counted)
            for n in range(1, 5):
                producer.publish({"n": n}, exchange="", routing_key=name)
            got = []
            while (message := queue.get()) is not None:
                got.append(message.payload["n"])
                message.ack()
            unacknowledged = channel.client.hlen(channel.unacked_key)
        finally:
            monkeypatch.undo()
            queue.delete()
    assert got == [0, 1, 2, 3, 4]
    assert unacknowledged == 0
    assert made == []


def test_another_pool_has_another_client(app: Celery) -> None:
    with app.connection_for_write() as connection:
        channel = connection.channel()
        before = channel._create_client()
        assert channel._create_client() is before
        assert channel.client is not before, "waiting for messages has a client of its own"
        channel._disconnect_pools()
        after = channel._create_client()
        assert after is not before
        assert after.ping()


def test_a_child_opens_connections_of_its_own(app: Celery) -> None:
    with app.connection_for_write() as connection:
        channel = connection.channel()
        mine = channel._create_client().client_id()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            channel._after_fork()
            os.write(write, str(channel._create_client().client_id()).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        theirs = int(os.read(read, 64))
        os.close(read)
        assert theirs != mine
        assert channel._create_client().client_id() == mine


def test_connections_of_the_pools_use_it(app: Celery) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        assert type(producer.connection.transport) is Transport
    clone = app.connection_for_write().clone()
    assert clone.get_transport_cls() is Transport
    assert clone.clone().get_transport_cls() is Transport


def test_what_is_shown_of_a_connection_is_as_with_kombu() -> None:
    url = "redis://user:secret@localhost:6379/3"
    assert CapacityConnection(url).as_uri() == Connection(url).as_uri()
    assert CapacityConnection(url).transport.driver_type == "redis"


def test_tls_stays_tls_in_a_copy() -> None:
    connection = CapacityConnection("rediss://localhost:6380/3")
    assert connection.get_transport_cls() is Transport
    assert connection.ssl
    assert connection.clone().clone().ssl == connection.ssl == Connection("rediss://localhost:6380/3").ssl
