"""AMQP connections of an app with the plugin, against a real RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu import Connection
from kombu.asynchronous import Hub
from support.servers import shared_rabbit_url

from celery_capacity.connection import CapacityConnection


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with shared_rabbit_url() as url:
        yield url


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def test_one_that_is_lost_before_the_loop_listens_is_a_lost_connection(url: str, hub: Hub) -> None:
    """Celery connects again after any of these errors; another one ends the worker."""
    with CapacityConnection(url) as connection:
        lost = connection.connection
        lost.transport.close()
        with pytest.raises(connection.recoverable_connection_errors, match="the broker closed the connection"):
            connection.transport.register_with_event_loop(lost, hub)
        # And what is connected anew is listened to.
        connection.transport.register_with_event_loop(connection.connection, hub)
        assert connection.connection.sock.fileno() in hub.readers


@pytest.mark.parametrize("scheme", ["amqp", "pyamqp", "amqps"])
def test_what_is_shown_of_a_connection_is_as_with_kombu(scheme: str) -> None:
    url = f"{scheme}://user:secret@localhost:5673/place"
    ours, theirs = CapacityConnection(url), Connection(url)
    assert ours.as_uri() == theirs.as_uri()
    assert ours.info() == theirs.info()
    assert ours.clone().info() == theirs.info()
    assert isinstance(ours.transport, theirs.get_transport_cls())
    assert repr(ours.transport).partition(" at ")[0] == repr(theirs.transport).partition(" at ")[0]
    assert bool(ours.ssl) == bool(theirs.ssl) == (scheme == "amqps")
