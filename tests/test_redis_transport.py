"""The Redis transport of an app with the plugin."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Consumer, Producer, Queue
from support.servers import RedisServer, sentinel_of, shared_redis_url, unique
from support.waiting import wait_until

import celery_capacity
from celery_capacity.connection import CapacityConnection
from celery_capacity.naming import own_queue_name
from celery_capacity.redis_transport import SentinelTransport, Transport
from celery_capacity.worker.unacked import pay_owed


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


class Worker:
    """A consumer of an own queue, and its raw Redis client.  What it receives is in ``received``."""

    def __init__(self, connection: Any, client: redis.Redis, *others: str) -> None:
        self.connection = connection
        self.client = client
        self.nodename = f"{unique('w')}@h"
        self.name = own_queue_name("default", self.nodename)
        self.channel = connection.channel()
        self.received: list[Any] = []
        self.consumer = Consumer(
            self.channel,
            [Queue(name, routing_key=name) for name in (self.name, *others)],
            on_message=self.received.append,
            accept=["json"],
        )
        self.consumer.consume()

    def send(self, body: Any, queue: str | None = None, **options: Any) -> None:
        with self.connection.clone() as connection:
            Producer(connection).publish(body, exchange="", routing_key=queue or self.name, **options)

    def turn(self, seconds: float = 0.05) -> None:
        try:
            self.connection.drain_events(timeout=seconds)
        except TimeoutError:
            pass

    def receive(self, count: int, limit: float = 20.0) -> list[Any]:
        def received() -> bool:
            self.turn()
            return len(self.received) >= count

        wait_until(received, limit, 0.0, what=f"{count} messages")
        return [message.payload for message in self.received]

    def waits(self) -> None:
        """Send the command that waits for messages."""
        self.turn(0.0)
        wait_until(lambda: self.command() in ("blmove", "brpop"), 10.0, what="the consumer to wait")

    def command(self) -> str:
        listed = self.client.client_list()
        return next((one["cmd"] for one in listed if "b" in one["flags"]), "")

    def waiting(self) -> int:
        return int(self.client.llen(self.name))

    def unacknowledged(self) -> int:
        tags, records = self.client.zcard("unacked_index"), self.client.hlen("unacked")
        assert tags == records
        return int(tags)


@contextmanager
def worker_on(url: str, *others: str, **options: Any) -> Iterator[Worker]:
    with (
        CapacityConnection(url, transport_options=options) as connection,
        redis.Redis.from_url(url, decode_responses=True) as client,
    ):
        yield Worker(connection, client, *others)


class TestOwnQueue:
    def test_a_message_is_taken_only_when_it_is_read(self, url: str) -> None:
        """Kombu's own command takes it, for a process that may be dead."""
        with worker_on(url) as worker:
            worker.waits()
            assert worker.command() == "blmove"
            worker.send({"n": 1})
            wait_until(lambda: not worker.command(), 10.0, what="the answer")
            assert (worker.waiting(), worker.unacknowledged()) == (1, 0)
            assert worker.receive(1) == [{"n": 1}]
            assert (worker.waiting(), worker.unacknowledged()) == (0, 1)
            worker.received[0].ack()
            assert worker.unacknowledged() == 0

    def test_what_is_not_acknowledged_is_restored_as_by_kombu(self, url: str) -> None:
        with worker_on(url) as worker:
            worker.send({"n": 1}, priority=6)
            worker.receive(1)
            worker.channel.qos.restore_by_tag(worker.received[0].delivery_tag)
            assert (worker.waiting(), worker.unacknowledged()) == (1, 0)
            worker.receive(2)
            assert worker.received[1].delivery_info["redelivered"]
            assert worker.received[1].properties["priority"] == 6
            worker.received[1].reject(requeue=True)
            worker.receive(3)
            worker.received[2].reject()
            assert (worker.waiting(), worker.unacknowledged()) == (0, 0)

    def test_messages_of_all_priorities_arrive_in_order(self, url: str) -> None:
        with worker_on(url) as worker:
            for number, priority in enumerate((0, 9, 3, 6)):
                worker.send(number, priority=priority)
            assert worker.receive(4) == [0, 1, 2, 3]
            assert [message.properties["priority"] for message in worker.received] == [0, 9, 3, 6]

    def test_what_a_process_without_the_plugin_gave_back_arrives(self, url: str) -> None:
        with worker_on(url) as worker:
            with Connection(url) as plain:
                Producer(plain).publish({"n": 1}, exchange="", routing_key=worker.name, priority=6)
            assert worker.waiting() == 0, "in another of the queue's lists"
            assert worker.receive(1) == [{"n": 1}]

    def test_beside_other_queues_it_waits_as_kombu_does(self, url: str) -> None:
        other = unique("other")
        with worker_on(url, other) as worker:
            worker.waits()
            assert worker.command() == "brpop"
            worker.send(1)
            worker.send(2, other)
            assert sorted(worker.receive(2)) == [1, 2]

    @pytest.mark.parametrize("line", ['rename-command BLMOVE ""', "user default on nopass ~* &* +@all -blmove"])
    def test_where_it_cannot_look(self, tmp_path: Path, line: str) -> None:
        """An old server, and one that does not let everybody use everything."""
        (tmp_path / "more.conf").write_text(f"{line}\n")
        config = {"include": str(tmp_path / "more.conf")}
        with RedisServer(tmp_path, config=config) as server, worker_on(server.url) as worker:
            worker.send(1)
            assert worker.receive(1) == [1]
            worker.waits()
            assert worker.command() == "brpop"

    def test_nothing_is_taken_after_it_was_cancelled(self, url: str) -> None:
        with worker_on(url) as worker:
            worker.waits()
            worker.consumer.cancel()
            worker.send(1)
            for _ in range(3):
                worker.turn()
            worker.channel.close()
            assert worker.received == []
            assert (worker.waiting(), worker.unacknowledged()) == (1, 0)

    def test_closing_does_not_wait_for_an_answer(self, url: str) -> None:
        with worker_on(url) as worker:
            worker.channel.brpop_timeout = 60
            worker.waits()
            closing = threading.Thread(target=worker.channel.close, daemon=True)
            closing.start()
            closing.join(10)
            assert not closing.is_alive()

    @pytest.mark.parametrize("pending", ["before", "never"])
    def test_closing_what_a_dead_server_was_asked(self, tmp_path: Path, pending: str) -> None:
        """Celery closes the connection that failed, and then whatever had a channel of it, which knows of no server."""
        other = unique("q")
        with RedisServer(tmp_path) as server, worker_on(server.url, other) as worker:
            worker.send({}, other)
            worker.receive(1)
            if pending == "before":
                worker.turn(0.0)
                assert worker.channel._in_poll
            server.kill()
            worker.connection._close()
            worker.consumer.cancel()
            worker.channel.close()
            assert worker.channel.closed

    def test_with_a_prefix_of_all_keys(self, url: str) -> None:
        with worker_on(url, global_keyprefix="mine:") as worker:
            worker.send(1, priority=3)
            assert worker.receive(1) == [1]
            assert worker.command() in ("", "blmove")
            assert worker.client.hlen("mine:unacked") == 1
            worker.received[0].ack()
            assert worker.client.keys("mine:unacked*") == []

    def test_a_full_server_keeps_it(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server, worker_on(server.url) as worker:
            worker.waits()
            worker.send(1)
            wait_until(lambda: not worker.command(), 10.0, what="the answer")
            worker.client.config_set("maxmemory", "1")
            with pytest.raises(redis.ResponseError, match="memory"):
                worker.receive(1)
            assert (worker.waiting(), worker.unacknowledged()) == (1, 0)
            worker.client.config_set("maxmemory", "0")
            assert worker.receive(1) == [1]

    def test_through_a_sentinel(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path) as server, sentinel_of(server, tmp_path) as port:
            options = {"master_name": "fleet"}
            url = f"sentinel://127.0.0.1:{port}/0"
            with CapacityConnection(url, transport_options=options) as connection, server.client() as client:
                assert type(connection.transport) is SentinelTransport
                worker = Worker(connection, client)
                worker.waits()
                assert worker.command() == "blmove"
                worker.send(1)
                assert worker.receive(1) == [1]
                assert worker.unacknowledged() == 1


class TestOwedAcknowledgements:
    def test_one_that_is_cut_off_is_remembered(self, tmp_path: Path) -> None:
        with RedisServer(tmp_path, persistence=True) as server, worker_on(server.url) as worker:
            owed: set[str] = set()
            worker.connection.transport.owed = owed
            worker.send(1)
            worker.send(2)
            worker.receive(2)
            first, second = worker.received
            server.stop()
            with pytest.raises(worker.connection.connection_errors):
                first.ack()
            with pytest.raises(worker.connection.connection_errors):
                second.reject(requeue=True)
            assert owed == {first.delivery_tag}
            server.start()
            worker.channel.close()
            # Closing has given back the other one, and not this one.
            assert list(worker.client.hgetall("unacked")) == [first.delivery_tag]
            assert worker.waiting() == 1

    def test_it_is_made_up_for_unless_the_message_is_another_worker_s(self, url: str) -> None:
        with worker_on(url) as worker:
            worker.send(1)
            worker.send(2)
            worker.receive(2)
            tags = {message.delivery_tag for message in worker.received}
            owed = {*tags, "unknown"}
            with worker.connection.clone() as connection:
                assert pay_owed(connection, "default", "another@h", owed) == 0
                assert owed == set()
                assert worker.unacknowledged() == 2
                owed = set(tags)
                assert pay_owed(connection, "default", worker.nodename, owed) == 2
            assert owed == set()
            assert (worker.waiting(), worker.unacknowledged()) == (0, 0)
