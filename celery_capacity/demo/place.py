"""Where a run takes place: its folder, its broker, its registry, and names that nobody else has."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from kombu import Connection

from ..naming import later_lot, node_lot, own_queue_name, unknown_lot
from ..registry import mask_url, open_registry
from .errors import DemoFailed
from .plan import NODES, WORKERS

__all__ = ("POLLING_SECONDS", "Place")

#: Kombu's own is a second, and for that long a message can lie in a folder before a worker looks.
POLLING_SECONDS = 0.02
_CONNECT_SECONDS = 5.0
_KEYS_AT_ONCE = 500


class Place:
    """One run's broker, registry and files.

    :param folder: a folder of this run alone.
    :param broker: the URL, or ``None`` for the filesystem.
    :param registry: the URL, or ``None`` for SQLite.
    """

    def __init__(self, folder: Path, broker: str | None, registry: str | None) -> None:
        self.folder = folder
        self.queue = f"demo-{secrets.token_hex(4)}"
        self.namespace = self.queue
        self.broker = broker or "filesystem://"
        self.registry = registry or f"sqlite:///{folder / 'capacity.db'}"
        self.journal = folder / "journal.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def scheme(self) -> str:
        """The broker's, without what follows a plus."""
        return self.broker.partition("://")[0].partition("+")[0].lower()

    @property
    def transport_options(self) -> dict[str, Any]:
        """Kombu's, for this broker."""
        if self.scheme == "filesystem":
            for name in ("queue", "control"):
                (self.folder / name).mkdir(exist_ok=True)
            return {
                "data_folder_in": str(self.folder / "queue"),
                "data_folder_out": str(self.folder / "queue"),
                "control_folder": str(self.folder / "control"),
                "polling_interval": POLLING_SECONDS,
            }
        if self.scheme in ("redis", "rediss", "sentinel"):
            # Kombu keeps the unacknowledged messages of all its users of a database in one hash.
            return {"global_keyprefix": f"{self.queue}:"}
        return {}

    @property
    def conf(self) -> dict[str, Any]:
        """Celery's settings, the same with the plugin and without; what is not here is Celery's default."""
        return {
            "broker_url": self.broker,
            "broker_transport_options": self.transport_options,
            "broker_connection_retry_on_startup": False,
            "broker_connection_timeout": _CONNECT_SECONDS,
            "task_default_queue": self.queue,
            "task_ignore_result": True,
            # On a shared server it would leave exchanges behind.
            "worker_enable_remote_control": False,
        }

    @property
    def capacity_conf(self) -> dict[str, Any]:
        """The plugin's settings."""
        return {"capacity_registry": self.registry, "capacity_namespace": self.namespace}

    # -- servers -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """See whether broker and registry are there.

        :raises DemoFailed: naming the one that is not.
        :raises ConfigurationError: the registry's URL makes no sense.
        """
        with open_registry(self.registry, self.namespace) as registry:
            registry.overview()
        try:
            with self._connection() as connection:
                connection.ensure_connection(max_retries=1, interval_start=0.2, timeout=_CONNECT_SECONDS)
        except Exception as exc:
            # Whatever the driver raises, from a name that no transport has to a refused password.
            reason = str(exc) or type(exc).__name__
            raise DemoFailed(f"the broker {mask_url(self.broker)} cannot be used: {reason}") from exc

    def clean(self) -> None:
        """Take away what the run has left on servers.  The folder is the caller's."""
        if self.scheme in ("redis", "rediss", "sentinel"):
            self._clean_redis(self.broker, f"{self.queue}:*", self.transport_options)
        elif self.scheme in ("amqp", "amqps", "pyamqp"):
            self._clean_amqp()
        if self.registry.partition("://")[0].lower() in ("redis", "rediss"):
            self._clean_redis(self.registry, f"*{self.namespace}*", {})

    def _connection(self) -> Connection:
        options = self.transport_options
        return Connection(self.broker, transport_options=options, connect_timeout=_CONNECT_SECONDS)

    def _clean_redis(self, url: str, pattern: str, options: dict[str, Any]) -> None:
        with Connection(url, transport_options=options, connect_timeout=_CONNECT_SECONDS) as connection:
            client = connection.channel().client
            keys = list(client.scan_iter(match=pattern, count=_KEYS_AT_ONCE))
            for key in keys:
                # UNLINK is not among the commands that Kombu puts its prefix before.
                client.execute_command("UNLINK", key)

    def _clean_amqp(self) -> None:
        names = [
            self.queue,
            unknown_lot(self.namespace, self.queue),
            later_lot(self.namespace, self.queue),
            *(own_queue_name(self.namespace, worker) for worker in WORKERS),
            *(node_lot(self.namespace, self.queue, node) for node in NODES),
        ]
        with self._connection() as connection:
            channel = connection.channel()
            for name in names:
                channel.queue_delete(name)
            channel.exchange_delete(self.queue)
