"""What the registry knows, in a form for others: JSON documents, and a sentence for each reason.  No I/O."""

from __future__ import annotations

from typing import TypedDict

from .models import Census, Overview, QueueView, Reason, WorkerState, WorkerView
from .naming import node_lot, own_queue_name

__all__ = (
    "ExplainDocument",
    "StatusDocument",
    "explain_document",
    "public_queues",
    "public_views",
    "queues_with_shares",
    "status_document",
    "summary",
    "waiting_lots",
    "what_waits",
    "why",
)


class WorkerDocument(TypedDict):
    """One worker of a status.  ``capacity`` is ``None`` while it is not known; ``held`` = reserved + committed."""

    name: str
    node: str
    epoch: int
    state: str
    capacity: int | None
    held: int
    reserved: int
    committed: int
    queues: list[str]


class QueueDocument(TypedDict):
    """One queue of a status.  ``limit`` is ``None`` if it has none."""

    name: str
    limit: int | None
    held: int
    waiting: bool


class StatusDocument(TypedDict):
    """The fixed form of ``celery capacity status --json``; scripts rely on its keys and their order."""

    namespace: str
    workers: list[WorkerDocument]
    queues: list[QueueDocument]
    counters: dict[str, int]


class CandidateDocument(TypedDict):
    """One worker of an explanation.  ``reason`` is ``None`` exactly if it could be chosen now."""

    name: str
    node: str
    state: str
    capacity: int | None
    held: int
    free: int
    reason: str | None
    why: str


class LotDocument(TypedDict):
    """A lot beside its queue where tasks wait.  ``node`` is ``None`` unless they are pinned to one; ``served``: whether
    a registered worker that serves the queue is of that node."""

    name: str
    queue: str
    node: str | None
    served: bool


class ExplainDocument(TypedDict):
    """The form of ``celery capacity explain --json``.  ``free`` are slots of workers that could be chosen now."""

    namespace: str
    queue: str
    task: str | None
    node: str | None
    served: bool
    free: int
    limit: int | None
    held: int
    waiting: bool
    lots: list[LotDocument]
    workers: list[CandidateDocument]


def status_document(overview: Overview) -> StatusDocument:
    """All workers, queues and counters; the queues that the plugin makes for itself are left out."""
    namespace = overview.namespace
    return {
        "namespace": namespace,
        "workers": [
            {
                "name": worker.name,
                "node": worker.node,
                "epoch": worker.epoch,
                "state": worker.state.value,
                "capacity": worker.capacity,
                "held": worker.held,
                "reserved": worker.reserved,
                "committed": worker.committed,
                "queues": public_queues(worker.queues, namespace),
            }
            for worker in overview.workers
        ],
        "queues": [
            {"name": queue.name, "limit": queue.limit, "held": queue.held, "waiting": queue.waiting}
            for queue in public_views(overview)
        ],
        "counters": dict(overview.counters),
    }


def explain_document(census: Census, overview: Overview) -> ExplainDocument:
    """For every worker whether it could be chosen, and if not, why; and the queue's lots where tasks wait."""
    namespace = overview.namespace
    return {
        "namespace": namespace,
        "queue": census.queue,
        "task": census.task,
        "node": census.node,
        "served": is_served(census),
        "free": census.free,
        "limit": census.limit,
        "held": census.held,
        "waiting": census.waiting,
        "lots": waiting_lots(overview, census.queue),
        "workers": [
            {
                "name": worker.name,
                "node": worker.node,
                "state": worker.state.value,
                "capacity": worker.capacity,
                "held": worker.held,
                "free": worker.free,
                "reason": None if worker.reason is None else worker.reason.value,
                "why": why(worker, census, namespace),
            }
            for worker in census.workers
        ],
    }


def waiting_lots(overview: Overview, queue: str | None = None) -> list[LotDocument]:
    """The lots beside their queues where tasks wait; of one queue, or of all."""
    found: list[LotDocument] = []
    for lot in overview.lots:
        if lot.name == lot.queue or queue not in (None, lot.queue):
            continue
        prefix = node_lot(overview.namespace, lot.queue, "")
        node = lot.name.removeprefix(prefix) if lot.name.startswith(prefix) else None
        served = any(
            lot.queue in worker.queues and node in (None, worker.node) and worker.state is not WorkerState.LAPSED
            for worker in overview.workers
        )
        found.append({"name": lot.name, "queue": lot.queue, "node": node, "served": served})
    return found


def what_waits(lot: LotDocument) -> str:
    """What the tasks in a lot wait for."""
    if lot["node"] is None:
        return "a worker that knows the task"
    node = f"node {lot['node']!r}"
    return node if lot["served"] else f"{node}: no worker of it is there"


def public_queues(names: tuple[str, ...], namespace: str) -> list[str]:
    """The names without those of the plugin's own queues and lots."""
    internal = own_queue_name(namespace, "")
    return [name for name in names if not name.startswith(internal)]


def queues_with_shares(worker: WorkerView, namespace: str) -> str:
    """The queues of a worker; of those with a limit on it, what it holds and the limit: ``mail, reports 2/2``."""
    shares = {share.queue: f" {share.held}/{share.limit}" for share in worker.shares}
    return ", ".join(f"{name}{shares.get(name, '')}" for name in public_queues(worker.queues, namespace))


def public_views(overview: Overview) -> list[QueueView]:
    """The queues without the plugin's own ones and its lots."""
    internal = own_queue_name(overview.namespace, "")
    return [queue for queue in overview.queues if not queue.name.startswith(internal)]


def is_served(census: Census) -> bool:
    """Whether any registered worker serves the queue, be it able to take a task now or not."""
    return any(census.queue in worker.queues for worker in census.workers)


def summary(census: Census) -> str:
    """The answer in one line: who, how many slots are free, and what else bears on it."""
    asked = f"queue {census.queue!r}"
    if census.task is not None:
        asked += f", task {census.task!r}"
    if census.node is not None:
        asked += f", node {census.node!r}"
    if not is_served(census):
        return f"{asked}: no worker serves queue {census.queue!r}"
    able = len(census.eligible)
    facts = [
        f"{counted(census.free, 'free slot')} on {able} of {counted(len(census.workers), 'worker')}",
        "no limit" if census.limit is None else f"limit {census.limit}, {census.held} held",
        "tasks are waiting" if census.waiting else "nothing is waiting",
    ]
    return f"{asked}: {'; '.join(facts)}"


def why(worker: WorkerView, census: Census, namespace: str) -> str:
    """Why this worker could, or could not, be chosen for what the census asks."""
    if worker.reason is None:
        return f"could be chosen now: {counted(worker.free, 'free slot')}"
    detail = f": {worker.detail}" if worker.detail else ""
    if worker.reason is Reason.FULL:
        if worker.capacity == 0:
            return "paused: its capacity is 0"
        return f"full: {worker.held} of {counted(worker.capacity or 0, 'slot')} held"
    if worker.reason is Reason.OTHER_QUEUE:
        queues = public_queues(worker.queues, namespace)
        return f"does not serve queue {census.queue!r}, only {', '.join(queues) or 'none'}"
    if worker.reason is Reason.LATE:
        return f"late: its last heartbeat was {worker.lease_age:.0f} s ago"
    sentences = {
        Reason.DRAINING: f"draining{detail}",
        Reason.UNKNOWN_CAPACITY: "has not said yet how many slots it has",
        Reason.OTHER_NODE: f"is on node {worker.node!r}, not {census.node!r}",
        Reason.UNKNOWN_TASK: f"task {census.task!r} is not registered there",
        Reason.LAPSED: f"gone: its last heartbeat was {worker.lease_age:.0f} s ago",
        Reason.WORKER_LIMIT: f"has free slots, but not for this queue: {_share(worker, census.queue)} held on this worker",
        Reason.LIMIT: f"has free slots, but the queue is at its limit: {census.held} of {census.limit} held",
    }
    return sentences.get(worker.reason, f"{worker.reason.value}{detail}")


def _share(worker: WorkerView, queue: str) -> str:
    return next((f"{share.held} of {share.limit}" for share in worker.shares if share.queue == queue), "all")


def detail(worker: WorkerView) -> str:
    """What a status adds to the one word of a worker's state."""
    if worker.state is WorkerState.READY:
        if worker.capacity == 0:
            return "paused"
        return "" if worker.free else "full"
    if worker.state is WorkerState.UNKNOWN:
        return "capacity not known yet"
    if worker.state is WorkerState.LATE:
        return "no heartbeat in time"
    return worker.detail


def counted(number: int, noun: str) -> str:
    """``3 slots``, ``1 slot``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
