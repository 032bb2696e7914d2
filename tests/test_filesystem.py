"""The filesystem transport of an app with the plugin."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_capacity

MESSAGES = 400


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    app = Celery("fs", broker="filesystem://", set_as_current=False)
    app.conf.capacity_registry = "memory://"
    app.conf.broker_transport_options = {
        "data_folder_in": str(tmp_path / "queue"),
        "data_folder_out": str(tmp_path / "queue"),
        "control_folder": str(tmp_path / "control"),
    }
    (tmp_path / "queue").mkdir()
    celery_capacity.install(app)
    return app


@pytest.fixture
def channel(app: Celery) -> Any:
    with app.connection_for_write() as connection:
        yield connection.channel()


def test_no_message_is_read_half_written(app: Celery, channel: Any) -> None:
    """Kombu's own loses six in a thousand of these."""
    got: list[int] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        with app.connection_for_read() as connection:
            mine = connection.channel()
            try:
                while True:
                    ended = done.is_set()
                    message = mine.basic_get("q", no_ack=True)
                    if message is not None:
                        got.append(message.payload["n"])
                    elif ended:
                        return
            except BaseException as exc:  # noqa: BLE001 - for the test to see
                failed.append(exc)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    producer = app.amqp.Producer(channel)
    for n in range(MESSAGES):
        producer.publish({"n": n}, exchange="", routing_key="q")
    done.set()
    for reader in readers:
        reader.join(60.0)
    assert not failed
    assert sorted(got) == list(range(MESSAGES))


def test_messages_are_kombus(app: Celery, channel: Any, tmp_path: Path) -> None:
    """Written by this one, read by Kombu's own, and the other way round."""
    from kombu import Connection

    options = app.conf.broker_transport_options
    with Connection("filesystem://", transport_options=options) as connection:
        plain = connection.channel()
        app.amqp.Producer(channel).publish({"to": "plain"}, exchange="", routing_key="q")
        assert plain.basic_get("q", no_ack=True).payload == {"to": "plain"}
        app.amqp.Producer(plain).publish({"to": "ours"}, exchange="", routing_key="q")
        assert channel.basic_get("q", no_ack=True).payload == {"to": "ours"}
    assert not list((tmp_path / "queue").iterdir())


def test_processed_messages_are_kept_if_asked(app: Celery, tmp_path: Path) -> None:
    processed = tmp_path / "processed"
    processed.mkdir()
    app.conf.broker_transport_options |= {"store_processed": True, "processed_folder": str(processed)}
    with app.connection_for_write() as connection:
        channel = connection.channel()
        app.amqp.Producer(channel).publish({"n": 1}, exchange="", routing_key="q")
        assert channel.basic_get("q", no_ack=True).payload == {"n": 1}
    assert len(list(processed.iterdir())) == 1


def test_a_folder_that_is_gone_is_the_brokers_error(app: Celery, channel: Any, tmp_path: Path) -> None:
    (tmp_path / "queue").rmdir()
    with pytest.raises(app.connection_for_write().channel_errors, match="Cannot add file"):
        app.amqp.Producer(channel).publish({"n": 1}, exchange="", routing_key="q")


@pytest.mark.parametrize("url", ["memory://", "pyro://localhost"])
def test_other_transports_stay_as_they_are(url: str) -> None:
    from kombu import Connection

    from celery_capacity.connection import CapacityConnection

    assert CapacityConnection(url).get_transport_cls() is Connection(url).get_transport_cls()


def test_producers_of_a_pool_use_it(app: Celery) -> None:
    from celery_capacity.filesystem import Transport

    with app.producer_pool.acquire(block=True) as producer:
        assert type(producer.connection.transport) is Transport
    clone = app.connection_for_write().clone()
    assert clone.get_transport_cls() is Transport
    assert clone.clone().get_transport_cls() is Transport


def test_workers_that_begin_at_once_all_bind_their_queues(app: Celery) -> None:
    names = [f"q{n}" for n in range(8)]
    start = threading.Barrier(len(names))
    failed: list[BaseException] = []

    def bind(name: str) -> None:
        try:
            with app.connection_for_write() as connection:
                channel = connection.channel()
                start.wait(30.0)
                for n in range(20):
                    channel._queue_bind(f"e{n}", name, "", name)
        except BaseException as exc:  # noqa: BLE001 - for the test to see
            failed.append(exc)

    threads = [threading.Thread(target=bind, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed
    with app.connection_for_write() as connection:
        channel = connection.channel()
        for n in range(20):
            assert sorted(entry.queue for entry in channel.get_table(f"e{n}")) == names
