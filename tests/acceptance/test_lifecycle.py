"""Workers that come, go, grow, are drained, and lose their broker, their registry or their life."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import RabbitServer, RedisServer, unique

from celery_capacity import CapacityExhausted
from celery_capacity.models import WorkerState

ONE = {"w1@north": {}}
TWO = {"w1@north": {}, "w2@south": {}}
#: The others are slower, and run with the same code.
MATRIX = ["redis", "rabbitmq-quorum", pytest.param("rabbitmq", marks=pytest.mark.soak)]
#: So short that a test can wait for them; long enough for a machine that is out of breath.
SHORT = {
    "capacity_lease_seconds": 1.5,
    "capacity_lapse_seconds": 3,
    "capacity_sweep_seconds": 0.5,
    "capacity_reservation_seconds": 2,
}


def counters(fleet: Fleet) -> dict[str, int]:
    return dict(fleet.registry.overview().counters)


class TestWarmShutdown:
    @pytest.mark.parametrize("broker_kind", MATRIX)
    def test_what_runs_ends_and_what_waits_stays(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, ONE, SHORT) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(2)
            for number in range(5):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            worker = fleet.workers["w1@north"]

            worker.terminate()
            worker.wait_log("Warm shutdown", 10)
            fleet.wait(lambda: getattr(fleet.view("w1@north"), "capacity", None) is None, 10, "it to offer no slots")
            fleet.journal.open_gate(gate)
            worker.wait(30)

            assert [run.outcome for run in fleet.ended(gate, 2)] == ["returned"] * 2
            assert fleet.runs(key) == []
            assert fleet.left() == {fleet.queue: 5}
            view = fleet.view("w1@north")
            assert view is None or (view.state is WorkerState.LAPSED and view.held == 0)
            # Nobody serves the queue now: this one joins the others, as with plain Celery.
            fleet.tasks["record"].delay(key=f"{key}-5")
            assert fleet.left() == {fleet.queue: 6}

            fleet.start("w2@south")
            assert len(fleet.ended(key, 6, 60)) == 6
            fleet.settle()
            assert set(fleet.journal.executions().values()) == {1}

    @pytest.mark.parametrize(
        "pool", ["gevent", *(pytest.param(pool, marks=pytest.mark.soak) for pool in ("threads", "solo"))]
    )
    def test_with_every_pool(self, fleets: Fleets, pool: str, key: str) -> None:
        size = 1 if pool == "solo" else 2
        own = fleets.own("redis", {"w1@north": {"pool": pool, "concurrency": size}}, SHORT)
        with own as fleet, Sampler(fleet.registry):
            gate = fleet.fill(size)
            for number in range(4):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            worker = fleet.workers["w1@north"]
            worker.terminate()
            worker.wait_log("Warm shutdown", 10)
            fleet.journal.open_gate(gate)
            worker.wait(30)
            assert [run.outcome for run in fleet.ended(gate, size)] == ["returned"] * size
            # A solo worker looks at the signal only between two tasks, and may have begun another by then.
            begun = len(fleet.runs(key))
            assert begun <= (1 if pool == "solo" else 0)
            assert fleet.left() == {fleet.queue: 4 - begun}

    def test_of_one_under_load_loses_nothing(self, fleets: Fleets, key: str) -> None:
        with fleets.own("rabbitmq", TWO, SHORT) as fleet, Sampler(fleet.registry):
            for number in range(60):
                fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.05)
                if number == 20:
                    fleet.workers["w1@north"].terminate()
            fleet.workers["w1@north"].wait(30)
            assert len(fleet.ended(key, 60, 60)) == 60
            assert set(fleet.journal.executions().values()) == {1}
            fleet.settle()


class TestDrain:
    def test_a_drained_worker_takes_nothing_until_it_is_admitted(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(1, node="north")
            assert fleet.registry.drain("w1@north", "a new kernel")
            fleet.workers["w1@north"].wait_log("drains: a new kernel", 10)
            for number in range(12):
                fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.05)
            assert {run.worker for run in fleet.ended(key, 12)} == {"w2@south"}
            with pytest.raises(CapacityExhausted, match="draining"):
                fleet.tasks["record"].apply_async(node="north", when_full="refuse")
            fleet.tasks["record"].apply_async(kwargs={"key": f"pinned-{key}"}, node="north")
            # What it had goes on.
            assert fleet.held() == {"w1@north": 1}
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 1)
            fleet.wait(lambda: not fleet.held(), 10, "the slot to be given back")
            assert fleet.runs(f"pinned-{key}") == []

            assert fleet.registry.admit("w1@north")

            assert [run.worker for run in fleet.ended(f"pinned-{key}", 1)] == ["w1@north"]
            fleet.settle()


class TestSize:
    def resized(self, fleet: Fleet, capacity: int) -> None:
        def now() -> int | None:
            view = fleet.view("w1@north")
            return view and view.capacity

        fleet.wait(lambda: now() == capacity, 15, f"a capacity of {capacity}")

    def test_the_pool_grows_and_shrinks(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE) as fleet, Sampler(fleet.registry):
            fleet.control.pool_grow(2, reply=True)
            self.resized(fleet, 4)
            fleet.assert_takes(4)
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            fleet.control.pool_shrink(3, reply=True)
            self.resized(fleet, 1)
            fleet.assert_takes(1)
            fleet.settle()

    def test_a_busy_pool_that_cannot_shrink(self, fleets: Fleets, key: str) -> None:
        """J9: what is advertised is what there is."""
        with fleets.own("redis", ONE) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(2)
            fleet.control.pool_shrink(1, reply=True)
            fleet.tasks["record"].delay(key=key)
            fleet.journal.open_gate(gate)
            fleet.ended(key, 1)
            view = fleet.view("w1@north")
            assert view is not None
            assert view.capacity
            fleet.assert_takes(view.capacity)
            fleet.settle()

    def test_an_autoscaled_pool_offers_its_maximum(self, fleets: Fleets, key: str) -> None:
        args = ("--autoscale", "4,1", "--without-mingle", "--without-gossip")
        with fleets.own("redis", {"w1@north": {"args": args}}) as fleet, Sampler(fleet.registry):
            self.resized(fleet, 4)
            fleet.assert_takes(4)
            fleet.settle()


class TestBroker:
    def served(self, fleet: Fleet, key: str) -> None:
        """As before: every slot of both workers, and nothing that is left over."""
        fleet.wait(lambda: len([view for view in fleet.views() if view.capacity]) == 2, 60, "both workers to be back")
        for name in TWO:
            fleet.workers[name].wait_log(r"(?s)Connected to.*Connected to", 60)
        fleet.assert_takes(4)
        fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")

    @pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
    def test_a_restart(self, fleets: Fleets, broker_kind: str, key: str, tmp_path: Path) -> None:
        server: RedisServer | RabbitServer
        server = RedisServer(tmp_path, persistence=True) if broker_kind == "redis" else RabbitServer(tmp_path)
        conf = {"broker_transport_options": {"confirm_publish": True}} if broker_kind == "rabbitmq" else {}
        with server, fleets.own(broker_kind, TWO, conf, broker=server.url) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(3)
            for number in range(6):
                fleet.tasks["record"].delay(key=f"{key}-{number}")

            server.restart()

            fleet.journal.open_gate(gate)
            runs = fleet.ended(key, 6, 60)
            assert {run.key for run in runs} == {f"{key}-{number}" for number in range(6)}
            assert [run.outcome for run in fleet.ended(gate, 3)][:3] == ["returned"] * 3
            self.served(fleet, key)
            assert fleet.max_parallel(worker="w1@north") == fleet.max_parallel(worker="w2@south") == 2

    def test_connections_that_are_closed_three_times(self, fleets: Fleets, key: str) -> None:
        """K2, K6, K7: what is full stays full on the new connection."""
        with fleets.own("redis", TWO) as fleet, Sampler(fleet.registry):
            gate = fleet.fill(4)
            for number in range(10):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            for turn in range(3):
                with fleets.redis.client() as client:
                    client.client_kill_filter(_type="normal", skipme=True)
                    client.client_kill_filter(_type="pubsub")
                if turn == 0:
                    for name in TWO:
                        fleet.workers[name].wait_log(r"(?s)Connected to.*Connected to", 30)
                fleet.wait(lambda: len([v for v in fleet.views() if v.capacity]) == 2, 30, "both workers to be back")
            assert fleet.held() == {"w1@north": 2, "w2@south": 2}
            assert fleet.runs(key) == []
            fleet.journal.open_gate(gate)
            assert len(fleet.ended(key, 10)) == 10
            self.served(fleet, key)


class TestRegistry:
    """Own registries, that the tests take away."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[RedisServer]:
        with RedisServer(tmp_path / "registry", persistence=True) as server:
            yield server

    CONF: Mapping[str, Any] = {
        **SHORT,
        "capacity_lapse_seconds": 60,
        "capacity_registry_timeout_seconds": 0.5,
        "capacity_registry_retry_seconds": 0.5,
    }

    @pytest.mark.parametrize("keeps", [True, False], ids=["a restart", "the loss of all data"])
    def test_an_outage(self, fleets: Fleets, server: RedisServer, key: str, keeps: bool) -> None:
        with fleets.own("redis", TWO, self.CONF, registry=server.url) as fleet:
            sampler = Sampler(fleet.registry).start()
            gate = fleet.fill(3)

            server.stop()
            for number in range(10):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            # Parked by the producer, and admitted by the workers' own count.
            assert len(fleet.ended(key, 10, 60)) == 10
            assert fleet.max_parallel(worker="w1@north") <= 2
            assert fleet.max_parallel(worker="w2@south") <= 2
            if not keeps:
                shutil.rmtree(server.log_path.parent / "appendonlydir")
            server.start()

            fleet.wait(lambda: sum(fleet.held().values()) == 3, 30, "the slots of what still runs, and no others")
            fleet.journal.open_gate(gate)
            fleet.ended(gate, 3)
            fleet.assert_takes(4)
            fleet.wait(lambda: not fleet.held() and not fleet.left(), 20, "a quiet fleet")
            sampler.stop()
            sampler.assert_clean()
            for name in TWO:
                assert fleet.workers[name].logs().count("is away; going on without it") == 1

    def test_a_worker_that_starts_without_it(self, fleets: Fleets, server: RedisServer, key: str) -> None:
        with fleets.own("redis", {}, self.CONF, registry=server.url) as fleet:
            server.stop()
            worker = fleet.start("w1@north")
            worker.wait_ready()
            for number in range(8):
                fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.1)
            assert len(fleet.ended(key, 8, 60)) == 8
            assert fleet.max_parallel() == 2

            server.start()

            fleet.wait(lambda: fleet.view("w1@north"), 30, "it to register")
            fleet.assert_takes(2)
            fleet.wait(lambda: not fleet.held(), 20, "all slots to be free")

    def test_a_producer_that_would_rather_fail(self, fleets: Fleets, server: RedisServer, key: str) -> None:
        from celery_capacity import RegistryUnavailable

        conf = {**self.CONF, "capacity_on_registry_error": "raise"}
        with fleets.own("redis", {}, conf, registry=server.url) as fleet:
            server.stop()
            with pytest.raises(RegistryUnavailable):
                fleet.tasks["record"].delay(key=key)
            assert fleet.left() == {}
            server.start()


class TestDeath:
    @pytest.mark.parametrize("broker_kind", MATRIX)
    def test_what_was_sent_to_a_dead_worker_runs_elsewhere(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, TWO, SHORT) as fleet, Sampler(fleet.registry):
            dead = fleet.workers["w1@north"]
            dead.kill()
            # Nobody knows yet.
            for number in range(4):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            assert fleet.held().get("w1@north") == 2

            assert {run.worker for run in fleet.ended(key, 4, 40)} == {"w2@south"}
            fleet.wait(lambda: fleet.view("w1@north") is None, 30, "the dead worker to be forgotten")
            assert not fleet.exists(fleet.own_queue("w1@north"))
            assert set(fleet.journal.executions().values()) == {1}
            fleet.assert_takes(2)
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.depth(fleet.own_queue("w1@north")) == 0
            fleet.wait(lambda: "rehomed" in counters(fleet), 20, "the sweeper's heartbeat to tell")
            assert counters(fleet)["workers_lapsed"] == 1
            assert counters(fleet)["moved"] >= counters(fleet)["rehomed"] > 0

    def test_of_one_with_running_tasks_frees_its_slots(self, fleets: Fleets, key: str) -> None:
        """D7, E2: restarted at once under the same name, it does not wait for the lapse."""
        with fleets.own("redis", ONE, {"capacity_sweep_seconds": 0.5}) as fleet, Sampler(fleet.registry):
            worker = fleet.workers["w1@north"]
            for _ in range(3):
                fleet.fill(2)
                worker.kill()
                worker.close()
                worker.start()
                fleet.wait(lambda: not fleet.held(), 30, "the new worker to register")
            fleet.assert_takes(2)

    def test_of_one_that_comes_back(self, fleets: Fleets, key: str) -> None:
        """H13: it hangs for longer than its lease, and then goes on."""
        with fleets.own("redis", TWO, SHORT) as fleet, Sampler(fleet.registry):
            worker = fleet.workers["w1@north"]
            worker.stop()
            for number in range(4):
                fleet.tasks["record"].delay(key=f"{key}-{number}")
            # On Redis one of them is on the way to the process that hangs: it has asked for it already.
            assert {run.worker for run in fleet.ended(key, 3, 40)} == {"w2@south"}
            worker.cont()
            fleet.ended(key, 4)
            worker.wait_log("registering again", 30)
            fleet.wait(lambda: len([v for v in fleet.views() if v.capacity]) == 2, 20, "it to be back")
            fleet.assert_takes(4)
            assert Counter(fleet.journal.executions_by_key()[f"{key}-{n}"] for n in range(4)) == {1: 4}

    def test_of_a_child(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", ONE) as fleet, Sampler(fleet.registry):
            for _ in range(3):
                gate = fleet.fill(2)
                for run in fleet.runs(gate):
                    os.kill(run.pid, signal.SIGKILL)
                fleet.wait(lambda: not fleet.held(), 15, "the slots to be given back")
                fleet.journal.note_dead()
            fleet.assert_takes(2)
            fleet.settle()


class TestNames:
    def test_two_workers_of_one_name(self, fleets: Fleets, key: str, tmp_path: Path) -> None:
        """L5, L13."""
        with fleets.own("redis", ONE, SHORT) as fleet, Sampler(fleet.registry):
            first = fleet.workers["w1@north"]
            second = fleet.start("w1@north", directory=tmp_path / "second")
            second.wait_ready()
            line = first.wait_log(r"CRITICAL.*worker name w1@north is used twice.*", 20).group(0)
            assert f"pid {first.pid}" in line
            assert f"pid={second.pid}" in line or f"pid {second.pid}" in line
            fleet.assert_takes(2)
            assert len(fleet.views()) == 1
            fleet.wait(lambda: "replaced" in counters(fleet), 20, "the one that was replaced to tell")
            assert counters(fleet)["stale_refused"] >= 1


class TestRemoteControl:
    @pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
    def test_a_queue_is_added_and_cancelled(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, TWO, SHORT) as fleet, Sampler(fleet.registry):
            other = unique("other")
            fleet.control.add_consumer(other, destination=["w2@south"], reply=True)

            def serving() -> set[str]:
                return {view.name for view in fleet.views() if other in view.queues}

            fleet.wait(lambda: serving() == {"w2@south"}, 15, "the queue to be served")
            for number in range(6):
                fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{number}"}, queue=other)
            assert {run.worker for run in fleet.ended(key, 6)} == {"w2@south"}

            fleet.control.cancel_consumer(other, destination=["w2@south"], reply=True)
            fleet.wait(lambda: not serving(), 15, "the queue to be served no longer")
            fleet.tasks["record"].apply_async(kwargs={"key": f"after-{key}"}, queue=other)
            fleet.assert_takes(4)
            assert fleet.depth(other) == 1
            assert fleet.runs(f"after-{key}") == []
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
            assert fleet.complaints() == []
