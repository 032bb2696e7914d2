"""What projects add to Celery, and messages that Celery did not make; see :mod:`support.custom_app`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.custom_app import OTHER_QUEUE, SERIALIZER, register_serializer
from support.fleet import Fleet, Fleets, close_app
from support.sampling import Sampler
from support.servers import unique

CAPACITY = 2
#: A worker that accepts pickles asks for it, when it is run by root.
FORCED = {"C_FORCE_ROOT": "1"}
WORKERS = {"w1@test": {"concurrency": CAPACITY, "app": "support.custom_app", "env": FORCED}}
CONF = {
    "worker_consumer": "support.custom_app:NotingConsumer",
    "accept_content": ["json", "pickle", SERIALIZER],
    "result_accept_content": ["json", "pickle", SERIALIZER],
    # No sweep finds what was forgotten before the end of a test.
    "capacity_sweep_seconds": 30,
}


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, WORKERS, CONF) as fleet:
        yield fleet
        fleet.assert_takes(CAPACITY)


def notes(fleet: Fleet) -> list[str]:
    return [line.partition("NOTE ")[2] for line in fleet.workers["w1@test"].logs().splitlines() if "NOTE " in line]


def noted(fleet: Fleet, text: str, times: int = 1) -> None:
    fleet.wait(lambda: notes(fleet).count(text) >= times, 20, f"a note of {text!r}")


class TestTasks:
    @pytest.mark.parametrize(
        ("end", "state", "ends"),
        [
            ("return", "SUCCESS", []),
            ("fail", "FAILURE", ["on_failure requested"]),
            ("retry", "SUCCESS", ["on_failure requested", "on_retry requested"]),
            ("hang", "FAILURE", ["on_timeout requested hard"]),
        ],
    )
    def test_with_a_request_of_their_own(self, fleet: Fleet, key: str, end: str, state: str, ends: list[str]) -> None:
        before = Counter(notes(fleet))
        results = [fleet.app.send_task("requested", (end,), {"key": f"{key}-{n}"}) for n in range(2 * CAPACITY)]
        fleet.wait(lambda: all(result.ready() for result in results), 30, "all results")
        assert {result.state for result in results} == {state}
        for text in ends:
            noted(fleet, text, before[text] + 2 * CAPACITY)
        fleet.journal.note_dead()

    def test_with_a_strategy_that_drops_messages(self, fleet: Fleet, key: str) -> None:
        before = notes(fleet).count("dropped")
        for number in range(3 * CAPACITY):
            fleet.app.send_task("selective", kwargs={"key": f"{key}-{number}"}, headers={"unwanted": True})
        fleet.app.send_task("selective", kwargs={"key": f"{key}-wanted"})
        noted(fleet, "dropped", before + 3 * CAPACITY)
        assert [run.key for run in fleet.ended(key, 1)] == [f"{key}-wanted"]

    def test_with_a_strategy_that_collects_them(self, fleet: Fleet, key: str) -> None:
        """Batches are wider than the worker: what is collected holds no slot."""
        for number in range(9):
            fleet.app.send_task("batched", kwargs={"key": f"{key}-{number}"})
        runs = fleet.ended(key, 3)
        assert sorted(name for run in runs for name in run.key.split("+")) == [f"{key}-{n}" for n in range(9)]
        fleet.wait(lambda: not fleet.left(), 10, "all messages to be acknowledged")


class TestWorkerParts:
    def test_a_consumer_class_of_the_project(self, fleet: Fleet, key: str) -> None:
        before = notes(fleet).count("consumer record")
        for number in range(5):
            fleet.tasks["record"].delay(key=f"{key}-{number}")
        fleet.ended(key, 5)
        assert notes(fleet).count("consumer record") == before + 5

    def test_steps_of_others(self, fleet: Fleet, key: str) -> None:
        """One with a consumer of its own on the worker's connection, also while every slot is taken."""
        gate = fleet.fill(CAPACITY)
        other = OTHER_QUEUE.format(queue=fleet.queue)
        for number in range(5):
            fleet.publish_raw({"hello": f"{key}-{number}"}, routing_key=other)
        for number in range(5):
            noted(fleet, f"other {{'hello': '{key}-{number}'}}")
        noted(fleet, "tick", notes(fleet).count("tick") + 2)
        assert fleet.held() == {"w1@test": CAPACITY}
        fleet.journal.open_gate(gate)

    def test_all_of_it_stops_and_starts_again(self, fleets: Fleets, key: str) -> None:
        with fleets.own("redis", WORKERS, CONF) as fleet, Sampler(fleet.registry):
            worker = fleet.workers["w1@test"]
            fleet.tasks["record"].delay(key=f"{key}-0").get(timeout=20)
            assert worker.terminate(30) == 0
            noted(fleet, "ticker stopped")
            assert fleet.view("w1@test") is None
            worker.close()
            worker.start()
            fleet.tasks["record"].delay(key=f"{key}-1").get(timeout=40)
            fleet.settle()


class TestSerializers:
    @pytest.mark.parametrize("serializer", ["pickle", SERIALIZER, "json"])
    @pytest.mark.parametrize("compression", [None, "zlib"])
    def test_sent_straight_and_parked_and_moved(
        self, fleet: Fleet, key: str, serializer: str, compression: str | None
    ) -> None:
        register_serializer()
        options: dict[str, Any] = {"serializer": serializer, "compression": compression}
        straight = fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-straight"}, **options)
        assert straight.get(timeout=20) == f"{key}-straight"
        gate = fleet.fill(CAPACITY)
        # One waits in the queue, one in the lot of its node, and one, with an eta, is held by the worker.
        results = [
            fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-{name}"}, **more, **options)
            for name, more in (("parked", {}), ("pinned", {"node": "test"}), ("later", {"countdown": 1}))
        ]
        fleet.journal.open_gate(gate)
        assert [result.get(timeout=20) for result in results] == [f"{key}-{n}" for n in ("parked", "pinned", "later")]
        assert [run.outcome for run in fleet.ended(key, 4)] == ["returned"] * 4


class TestProtocols:
    def test_1(self, fleet: Fleet, key: str) -> None:
        app = fleet.build_app(conf={"task_protocol": 1})
        results = [app.tasks["hold"].delay(gate=key, key=f"{key}-{number}") for number in range(2 * CAPACITY)]
        fleet.started(key, CAPACITY)
        assert fleet.held() == {"w1@test": CAPACITY}
        results.append(app.tasks["retry_n"].delay(2, key=f"{key}-retry"))
        results.append(app.tasks["record"].apply_async(kwargs={"key": f"{key}-node"}, node="test"))
        results.append(app.tasks["record"].apply_async(kwargs={"key": f"{key}-later"}, countdown=1))
        fleet.journal.open_gate(key)
        assert [result.get(timeout=30) for result in results[-3:]] == [2, f"{key}-node", f"{key}-later"]
        assert len(fleet.ended(key, 2 * CAPACITY + 5)) == 2 * CAPACITY + 5
        close_app(app)

    @pytest.mark.parametrize(
        ("body", "headers"),
        [
            # As the protocol asks, and no more: what Celery's own producers add is missing.
            (lambda key: [[], {"key": key}, {}], {"task": "record", "lang": "js"}),
            (lambda key: [[], {"key": key}, None], {"task": "record", "lang": "go", "retries": 0, "eta": None}),
            # Protocol 1, all of it in the body.
            (lambda key: {"task": "record", "args": [], "kwargs": {"key": key}}, {}),
            # The hybrid that some clients send: the body of 1 and the headers of 2.
            (lambda key: {"args": [], "kwargs": {"key": key}}, {"task": "record", "lang": "php"}),
        ],
        ids=["2", "2 with less", "1", "hybrid"],
    )
    def test_of_other_languages(self, fleet: Fleet, key: str, body: Any, headers: dict[str, Any]) -> None:
        for number in range(2 * CAPACITY):
            content = body(f"{key}-{number}")
            sent = dict(headers)
            if sent:
                sent["id"] = unique("id")
            else:
                content["id"] = unique("id")
            fleet.publish_raw(
                json.dumps(content), headers=sent, content_type="application/json", content_encoding="utf-8"
            )
        assert {run.outcome for run in fleet.ended(key, 2 * CAPACITY)} == {"returned"}

    def test_headers_of_the_plugin_that_make_no_sense(self, fleet: Fleet, key: str) -> None:
        for number, header in enumerate(("x", 5, [], {"token": 7, "node": []}, {"queue": "elsewhere", "epoch": "x"})):
            headers = {"task": "record", "id": unique("id"), "lang": "py", "capacity": header}
            fleet.publish_raw([[], {"key": f"{key}-{number}"}, {}], headers=headers)
        assert {run.outcome for run in fleet.ended(key, 5)} == {"returned"}


@pytest.mark.parametrize(
    ("pool", "patch"),
    [
        ("gevent", "from gevent.monkey import patch_all; patch_all()"),
        ("eventlet", "import eventlet; eventlet.monkey_patch()"),
    ],
)
def test_green_pools_of_a_program(fleets: Fleets, key: str, pool: str, patch: str) -> None:
    """L11: started by app.worker_main, which, unlike the command, leaves the patching to the program."""
    with fleets.own("redis", {}) as fleet, Sampler(fleet.registry):
        worker = fleet.start("w1@test", pool=pool, concurrency=4, conf={"capacity_lease_seconds": 1.5})
        worker.close()
        main = f"{patch}; import sys; from support.tasks_app import app; app.worker_main(sys.argv[1:])"
        worker.argv = [worker.argv[0], "-c", main, *worker.argv[worker.argv.index("worker") :]]
        worker.start()
        fleet.wait_ready()
        for number in range(100):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.05)
        assert len(fleet.ended(key, 100, 40)) == 100
        view = fleet.view("w1@test")
        assert view is not None
        assert view.capacity == 4
        # Its lease is shorter than the time that it has been here.
        assert view.lease_age < 1.5
        assert fleet.journal.max_parallel() <= 4
        fleet.settle()


def test_many_solo_workers_share_alike(fleets: Fleets, key: str) -> None:
    """L10."""
    names = [f"w{number}@test" for number in range(4)]
    with (
        fleets.own("redis", {name: {"pool": "solo", "concurrency": 1} for name in names}) as fleet,
        Sampler(fleet.registry),
    ):
        for number in range(32):
            fleet.tasks["record"].delay(key=f"{key}-{number}", seconds=0.3)
        done = Counter(run.worker for run in fleet.ended(key, 32, 40))
        fleet.settle()
    assert set(done) == set(names)
    assert max(done.values()) - min(done.values()) <= 2, done
