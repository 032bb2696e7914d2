"""How much of a queue may run at once: on one worker, and over the fleet.

The numbers of the cases are those of the collection of public reports that the project keeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest
from support.fleet import Fleet, Fleets
from support.servers import unique

from celery_capacity.models import Share

#: Names that no other test uses, since tests share a broker.
Q1, Q2, Q3, LIMITED, HEAVY, LIGHT = (unique(name) for name in ("q1", "q2", "q3", "limited", "heavy", "light"))
ALL = (Q1, Q2, Q3, LIMITED, HEAVY, LIGHT)
#: Seconds; on an idle machine it is a few hundredths.
SOON = 3.0


@pytest.fixture(params=["redis", "rabbitmq"])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    workers = {
        "w1@north": {"concurrency": 6, "pool": "threads", "queues": ALL},
        "w2@south": {"concurrency": 6, "pool": "threads", "queues": ALL},
    }
    conf = {
        "capacity_worker_queues": {Q1: 1, Q2: 1, Q3: 4, HEAVY: 2, LIGHT: 4},
        "capacity_queue_limits": {LIMITED: 1},
        # So that nothing is left in a queue that the fleet does not look into at the end.
        "task_create_missing_queues": True,
    }
    with fleets.use(request.param, workers, conf) as fleet:
        yield fleet
        for queue in ALL:
            assert fleet.depth(queue) == 0


def _send(fleet: Fleet, queue: str, key: str, count: int, seconds: float = 0.0, **options: object) -> None:
    for number in range(count):
        fleet.tasks["record"].apply_async(
            kwargs={"key": f"{key}-{number:03}", "seconds": seconds}, queue=queue, **options
        )


def test_each_queue_has_its_own_concurrency_on_a_worker(fleet: Fleet, key: str) -> None:
    """C1: -c 6 with q1=1, q2=1, q3=4."""
    for queue in (Q1, Q2, Q3):
        _send(fleet, queue, f"{key}-{queue}", 10, 0.2)
    fleet.ended(key, 30)
    for worker in ("w1@north", "w2@south"):
        at_once = {queue: fleet.max_parallel(f"{key}-{queue}", worker) for queue in (Q1, Q2, Q3)}
        assert at_once[Q1] == at_once[Q2] == 1
        assert 2 <= at_once[Q3] <= 4
        assert fleet.max_parallel(key, worker) <= 6


def test_a_backlog_of_one_queue_does_not_hold_back_another(fleet: Fleet, key: str) -> None:
    """C2: two heavy ones and four light ones at once, on each worker."""
    for number in range(20):
        fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-heavy-{number}"}, queue=HEAVY)
    fleet.started(f"{key}-heavy", 4)
    sent = time.monotonic()
    for number in range(8):
        fleet.tasks["hold"].apply_async(kwargs={"gate": f"{key}-light", "key": f"{key}-light-{number}"}, queue=LIGHT)
    light = fleet.started(f"{key}-light", 8)
    assert max(run.start for run in light) - sent < SOON
    assert len(fleet.runs(f"{key}-heavy")) == 4
    for view in fleet.views():
        shares = {share.queue: (share.held, share.limit) for share in view.shares}
        assert (shares[HEAVY], shares[LIGHT]) == ((2, 2), (4, 4))
    fleet.journal.open_gate(f"{key}-light")
    fleet.journal.open_gate(key)
    fleet.ended(key, 28)
    assert max(fleet.max_parallel(f"{key}-heavy", worker) for worker in fleet.workers) == 2


def test_a_limit_over_the_fleet_holds_from_the_first_task_on(fleet: Fleet, key: str) -> None:
    """B11, B12: never two at once on two workers."""
    _send(fleet, LIMITED, key, 20, 0.02)
    fleet.ended(key, 20)
    assert fleet.max_parallel(key) == 1


def test_what_waits_at_a_limit_keeps_its_order(fleet: Fleet, key: str) -> None:
    """C7: twenty are parked behind one, and run as they were sent."""
    fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": key}, queue=LIMITED)
    fleet.started(key, 1)
    _send(fleet, LIMITED, key, 20)
    fleet.wait(lambda: fleet.depth(LIMITED) == 20, 10, "all of them to be parked")
    fleet.journal.open_gate(key)
    runs = sorted(fleet.ended(f"{key}-", 20), key=lambda run: run.start)
    assert [run.key for run in runs] == [f"{key}-{number:03}" for number in range(20)]
    assert fleet.max_parallel(key) == 1


def test_the_limit_is_changed_while_tasks_run(fleet: Fleet, key: str) -> None:
    """C12, E7: raised, it is used within a second or so; lowered, nothing is taken away and nothing is admitted."""
    for number in range(12):
        fleet.tasks["hold"].apply_async(kwargs={"gate": f"{key}-{number}", "key": f"{key}-{number:02}"}, queue=LIMITED)
    fleet.started(key, 1)
    try:
        fleet.registry.set_limit(LIMITED, 5)
        fleet.started(key, 5, limit=10)
        assert len(fleet.runs(key)) == 5
        fleet.registry.set_limit(LIMITED, 2)
        for number in range(4):
            assert len(fleet.runs(key)) == 5
            running = sorted(run.key for run in fleet.runs(key) if run.open)
            fleet.journal.open_gate(f"{key}-{int(running[0].rpartition('-')[2])}")
            fleet.ended(key, number + 1)
            if number < 3:
                fleet.wait(lambda: sum(fleet.held().values()) == 4 - number, 10, "the slot to be given back")  # noqa: B023
        # One was left, and one may come in beside it.
        fleet.started(key, 6)
        assert sum(fleet.held().values()) <= 2
    finally:
        fleet.registry.set_limit(LIMITED, None)
        for number in range(12):
            fleet.journal.open_gate(f"{key}-{number}")
    fleet.ended(key, 12)


def test_what_waits_at_a_limit_holds_no_slot(fleets: Fleets, key: str) -> None:
    """C8: forty slots, a limit of five, forty tasks: 35 slots are free, and other tasks use them at once."""
    other = unique("other")
    queue = unique("five")
    workers = {"w1@test": {"concurrency": 40, "pool": "threads", "queues": [queue, other]}}
    with fleets.own("redis", workers, {"capacity_queue_limits": {queue: 5}}) as fleet:
        for number in range(40):
            fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, queue=queue)
        fleet.started(key, 5)
        (view,) = fleet.views()
        assert (view.held, view.free) == (5, 35)
        _send(fleet, other, f"other-{key}", 35)
        fleet.ended(f"other-{key}", 35, 10)
        assert len(fleet.runs(key)) == 5
        fleet.journal.open_gate(key)
        fleet.ended(key, 40)
        assert fleet.max_parallel(key) == 5


def test_waiting_at_a_limit_costs_next_to_nothing(fleets: Fleets, key: str) -> None:
    """Five hundred tasks behind a limit of one: no spinning, neither in the broker nor on the workers."""
    queue = unique("one")
    workers = {name: {"concurrency": 2, "pool": "threads", "queues": [queue]} for name in ("w1@test", "w2@test")}
    with fleets.own("redis", workers, {"capacity_queue_limits": {queue: 1}}) as fleet:
        for number in range(500):
            fleet.tasks["hold"].apply_async(kwargs={"gate": key, "key": f"{key}-{number}"}, queue=queue)
        fleet.started(key, 1)
        assert fleet.depth(queue) == 499
        client = fleets.redis.client()
        processes = [psutil.Process(worker.pid) for worker in fleet.workers.values()]

        def spent() -> tuple[float, int]:
            cpu = sum(sum(process.cpu_times()[:2]) for process in processes)
            return cpu, int(client.info("stats")["total_commands_processed"])

        began, (cpu, commands) = time.monotonic(), spent()
        fleet.wait(lambda: time.monotonic() - began > 5, 10, "five seconds")
        seconds = time.monotonic() - began
        cpu_after, commands_after = spent()
        assert (cpu_after - cpu) / seconds < 0.05 * len(processes)
        # Broker, registry and heartbeats of all fleets on this server; a poll a second, and not a loop.
        assert (commands_after - commands) / seconds < 500
        assert len(fleet.runs(key)) == 1
        with fleet.app.connection_for_write() as connection:
            connection.default_channel.queue_purge(queue)
        fleet.journal.open_gate(key)
        fleet.ended(key, 1)


def test_a_worker_says_its_shares(fleet: Fleet) -> None:
    (view, _) = fleet.views()
    shares = (Share(Q1, 0, 1), Share(Q2, 0, 1), Share(Q3, 0, 4), Share(HEAVY, 0, 2), Share(LIGHT, 0, 4))
    assert view.shares == tuple(sorted(shares))
