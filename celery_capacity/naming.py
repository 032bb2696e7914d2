"""Names that producers, workers and sweepers must agree on."""

from __future__ import annotations

from uuid import uuid4

__all__ = (
    "HEADER",
    "dead_letter_queue",
    "is_ours",
    "is_own_queue",
    "later_lot",
    "new_token",
    "node_lot",
    "node_of",
    "own_queue_name",
    "unacked_name",
    "unknown_lot",
)

#: How the names of the plugin's other queues go on after the namespace.
_OTHERS = ("lot.", "unknown.", "later.", "dead.")

#: The message header that carries the token and the origin.
HEADER = "capacity"


def is_ours(queue: object) -> bool:
    """Is it the name of one of the plugin's queues (own queues, lots, dead letters), of whatever namespace?"""
    return isinstance(queue, str) and queue.startswith("capacity.")


def is_own_queue(queue: str) -> bool:
    """Is it the name of a worker's own queue, of whatever namespace?

    A worker that is named like a lot ("lot.a@host") is not recognised.
    """
    _, _, rest = queue.partition(".") if queue.startswith("capacity.") else ("", "", "")
    _, _, worker = rest.partition(".")
    return bool(worker) and not worker.startswith(_OTHERS)


def own_queue_name(namespace: str, worker: str) -> str:
    """The durable queue that only ``worker`` consumes."""
    return f"capacity.{_part(namespace)}.{worker}"


def dead_letter_queue(namespace: str, queue: str) -> str:
    """The durable queue for tasks of ``queue`` that killed every worker they ran on."""
    return f"capacity.{_part(namespace)}.dead.{queue}"


def node_lot(namespace: str, queue: str, node: str) -> str:
    """The durable lot where tasks of ``queue`` that are pinned to ``node`` wait."""
    return f"capacity.{_part(namespace)}.lot.{_part(queue)}.{node}"


def unknown_lot(namespace: str, queue: str) -> str:
    """The durable lot of ``queue`` for tasks that the worker which fetched them does not know."""
    return f"capacity.{_part(namespace)}.unknown.{queue}"


def later_lot(namespace: str, queue: str) -> str:
    """The durable lot of ``queue`` for tasks that are not due, when the worker that fetched them holds enough."""
    return f"capacity.{_part(namespace)}.later.{queue}"


def unacked_name(namespace: str, worker: str) -> str:
    """The key, on a Redis broker, of the delivery tags that ``worker`` fetched from lots.  No queue is called that."""
    return f"capacity-unacked.{_part(namespace)}.{worker}"


def node_of(worker: str) -> str:
    """The default node of a worker: the host part of its nodename."""
    _, separator, host = worker.partition("@")
    return host if separator else worker


def new_token(worker: str, epoch: int) -> str:
    """A token that no other slot ever had.  It names its owner, so that a store can find it without an index."""
    return f"{uuid4().hex}.{epoch}.{worker}"


def _part(name: str) -> str:
    # Or queue "gpu.test" on node "a" would share its lot with queue "gpu" on node "test.a".
    return name.replace("%", "%25").replace(".", "%2E")
