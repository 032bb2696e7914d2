"""Kinds of queues, exchanges and priorities; which queues are managed, and which are Celery's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from celery import Celery
from celery.exceptions import QueueNotFound
from celery.utils.nodenames import worker_direct
from kombu import Exchange, Queue
from support.fleet import Fleet, Fleets
from support.sampling import Sampler
from support.servers import unique

TWO = {"w1@north": {}, "w2@south": {}}
ONE_SLOT = {"w1@north": {"concurrency": 1}}
SHORT = {"capacity_lease_seconds": 1.5, "capacity_lapse_seconds": 3, "capacity_sweep_seconds": 0.5}
BROKERS = ["redis", "rabbitmq-quorum", pytest.param("rabbitmq", marks=pytest.mark.soak)]

#: Of one topic exchange: one queue, so it is managed; of the other two, so it copies to both.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "topical": {"exchange": "x.topical", "exchange_type": "topic", "routing_key": "a.*"},
    "copy.all": {"exchange": "x.copies", "exchange_type": "topic", "routing_key": "#"},
    "copy.one": {"exchange": "x.copies", "exchange_type": "topic", "routing_key": "one.#"},
    "fan.a": {"exchange": "x.fan", "exchange_type": "fanout"},
    "fan.b": {"exchange": "x.fan", "exchange_type": "fanout"},
}
HEADERS: dict[str, dict[str, Any]] = {
    "headed": {
        "exchange": "x.headed",
        "exchange_type": "headers",
        "binding_arguments": {"x-match": "all", "tenant": "acme"},
    }
}


@pytest.fixture(params=["redis", "rabbitmq"])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two workers that consume all of them."""
    kinds = KINDS if request.param == "redis" else {**KINDS, **HEADERS}
    workers = {name: {"queues": list(kinds)} for name in TWO}
    with fleets.use(request.param, workers, {"task_queues": kinds, "task_default_queue": "plain"}) as fleet:
        yield fleet


def send(app: Celery, key: str, count: int = 1, name: str = "record", **options: Any) -> None:
    for number in range(count):
        app.tasks[name].apply_async(kwargs={"key": f"{key}-{number}"}, **options)


def served(fleet: Fleet, worker: str = "w1@north") -> set[str]:
    view = fleet.view(worker)
    assert view is not None
    return set(view.queues) - {fleet.own_queue(worker)}


def dispatched(fleet: Fleet, queue: str) -> bool:
    """Whether a slot was ever claimed for it: then the registry knows the queue."""
    return any(view.name == queue for view in fleet.registry.overview().queues)


class TestExchanges:
    def test_which_are_managed(self, fleet: Fleet) -> None:
        assert served(fleet) == {"plain", "topical"}
        names = fleet.control.inspect(["w1@north"], timeout=10, limit=1).active_queues()["w1@north"]
        assert {queue["name"] for queue in names} >= set(KINDS)

    def test_topic_with_one_reader(self, fleet: Fleet, key: str) -> None:
        send(fleet.app, key, 4, queue="topical", routing_key="a.b")
        runs = fleet.ended(key, 4)
        assert {run.queue for run in runs} == {"a.b"}
        assert {run.worker for run in runs} == set(TWO)
        gate = fleet.fill(4)
        send(fleet.app, f"waits-{key}", 3, queue="topical", routing_key="a.c")
        assert fleet.depth("topical") == 3
        fleet.journal.open_gate(gate)
        assert len(fleet.ended(f"waits-{key}", 3)) == 3

    def test_topic_with_several_readers(self, fleet: Fleet, key: str) -> None:
        """A copy in each queue that matches, as without the plugin; each takes a slot when it begins."""
        send(fleet.app, key, 2, queue="copy.one", routing_key="one.x")
        assert len(fleet.ended(key, 4)) == 4
        send(fleet.app, f"all-{key}", 2, queue="copy.all", routing_key="two")
        assert len(fleet.ended(f"all-{key}", 2)) == 2
        assert not dispatched(fleet, "copy.one")

    def test_fanout(self, fleet: Fleet, key: str) -> None:
        send(fleet.app, key, 3, queue="fan.a")
        assert len(fleet.ended(key, 6)) == 6
        assert fleet.max_parallel(key, "w1@north") <= 2
        assert not dispatched(fleet, "fan.a")

    def test_headers(self, fleet: Fleet, key: str) -> None:
        if fleet.broker.startswith("redis"):
            pytest.skip("Kombu's emulation has no headers exchange")
        options = {"exchange": "x.headed", "exchange_type": "headers", "routing_key": ""}
        send(fleet.app, key, 2, headers={"tenant": "acme"}, **options)
        send(fleet.app, f"other-{key}", 2, headers={"tenant": "other"}, **options)
        assert len(fleet.ended(key, 2)) == 2
        fleet.assert_takes(4)
        assert fleet.runs(f"other-{key}") == []

    def test_what_the_caller_says_wins_over_a_router(self, fleet: Fleet, key: str) -> None:
        """N1: the router is called, and nothing is reserved for what it says."""
        app = fleet.build_app(conf={"task_routes": {"record": {"queue": "plain"}}})
        send(app, key, 2, queue="topical", routing_key="a.z")
        assert {run.queue for run in fleet.ended(key, 2)} == {"a.z"}
        send(app, f"exchange-{key}", 2, exchange="x.copies", routing_key="one.y")
        runs = fleet.ended(f"exchange-{key}", 4)
        assert {run.queue for run in runs} == {"one.y"}
        app.close()

    def test_a_route_to_an_exchange(self, fleet: Fleet, key: str) -> None:
        """N13: with an exchange alone, and a router after it in the list."""
        routes: list[Mapping[str, Any]] = [
            {"record": {"exchange": "x.copies", "exchange_type": "topic", "routing_key": "one.n"}},
            {"record": {"queue": "plain"}},
        ]
        app = fleet.build_app(conf={"task_routes": routes})
        send(app, key, 2)
        runs = fleet.ended(key, 4)
        assert {run.queue for run in runs} == {"one.n"}
        app.close()

    def test_a_full_fleet_holds_back_what_comes_by_an_exchange(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(4)
        send(fleet.app, key, 3, queue="fan.b")
        fleet.wait(lambda: not fleet.depth("fan.a") + fleet.depth("fan.b"), 10, "the workers to have taken them")
        assert fleet.runs(key) == []
        fleet.journal.open_gate(gate)
        assert len(fleet.ended(key, 6)) == 6
        assert fleet.max_parallel() == 4


class TestWhichAreManaged:
    def test_wildcards_include_and_exclude(self, fleets: Fleets, key: str) -> None:
        queues = {"cap.a": {}, "cap.b": {}, "cap.plain": {}, "other": {}}
        conf = {"task_queues": queues, "task_default_queue": "cap.a", "capacity_queues": "cap.*,!*.plain"}
        with fleets.own("redis", {"w1@north": {"queues": list(queues)}}, conf) as fleet, Sampler(fleet.registry):
            assert served(fleet) == {"cap.a", "cap.b"}
            for queue in queues:
                send(fleet.app, f"{key}-{queue}", 3, queue=queue)
            assert len(fleet.ended(key, 12)) == 12
            assert dispatched(fleet, "cap.b")
            assert not dispatched(fleet, "cap.plain")
            assert fleet.max_parallel() <= 2
            fleet.settle()

    def test_selected_and_excluded_on_the_command_line(self, fleets: Fleets, key: str) -> None:
        """-Q and -X, and a queue that -Q creates."""
        queues: dict[str, Any] = {"one": {}, "two": {}, "three": {}}
        conf = {"task_queues": queues, "task_default_queue": "one"}
        quick = ("--without-mingle", "--without-gossip")
        workers = {
            "w1@north": {"queues": [], "args": ("-X", "three", *quick)},
            "w2@south": {"queues": ["three", "made.up"]},
        }
        with fleets.own("redis", workers, conf) as fleet, Sampler(fleet.registry):
            assert served(fleet) == {"one", "two"}
            assert served(fleet, "w2@south") == {"three", "made.up"}
            for queue in (*queues, "made.up"):
                send(fleet.app, f"{key}-{queue}", 3, queue=queue)
            for queue, worker in (("one", "w1"), ("two", "w1"), ("three", "w2"), ("made.up", "w2")):
                assert {run.worker[:2] for run in fleet.ended(f"{key}-{queue}", 3)} == {worker}
            fleet.settle()

    @pytest.mark.parametrize("broker_kind", BROKERS)
    def test_worker_direct(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        with fleets.own(broker_kind, TWO, {"worker_direct": True}) as fleet, Sampler(fleet.registry):
            direct = worker_direct("w2@south")
            assert direct.name in served(fleet, "w2@south")
            send(fleet.app, key, 6, queue=direct)
            assert {run.worker for run in fleet.ended(key, 6)} == {"w2@south"}
            gate = fleet.fill(4)
            send(fleet.app, f"waits-{key}", 3, queue=direct)
            assert fleet.depth(direct.name) == 3
            fleet.journal.open_gate(gate)
            assert {run.worker for run in fleet.ended(f"waits-{key}", 3)} == {"w2@south"}
            fleet.settle()

    def test_one_consumer_at_a_time(self, fleets: Fleets, key: str) -> None:
        """Such a queue keeps its order over two workers, so it is left to Celery."""
        conf = {
            "task_queues": {"plain": {}, "single": {"queue_arguments": {"x-single-active-consumer": True}}},
            "task_default_queue": "plain",
            "task_acks_late": True,
            "worker_prefetch_multiplier": 1,
        }
        workers = {name: {"queues": ["plain", "single"], "concurrency": 1} for name in TWO}
        with fleets.own("rabbitmq", workers, conf) as fleet, Sampler(fleet.registry):
            assert served(fleet) == {"plain"}
            send(fleet.app, key, 8, queue="single")
            runs = fleet.ended(key, 8)
            assert [run.key for run in runs] == [f"{key}-{number}" for number in range(8)]
            assert len({run.worker for run in runs}) == 1
            fleet.settle()


class TestMissingQueues:
    def test_created(self, fleets: Fleets, key: str) -> None:
        """N6: by name and through a router, by apply_async and send_task, before there is a worker and after."""
        made = unique("made")
        with fleets.own("rabbitmq", {}) as fleet, Sampler(fleet.registry):
            routed = fleet.build_app(conf={"task_routes": {"record": {"queue": made}}})
            fleet.app.send_task("record", kwargs={"key": f"{key}-0"}, queue=made)
            routed.send_task("record", kwargs={"key": f"{key}-1"})
            assert fleet.depth(made) == 2
            fleet.start("w1@north", queues=[made])
            fleet.wait_ready()
            fleet.app.send_task("record", kwargs={"key": f"{key}-2"}, queue=made)
            routed.tasks["record"].delay(key=f"{key}-3")
            runs = fleet.ended(key, 4)
            assert {run.queue for run in runs} == {made}
            assert dispatched(fleet, made)
            routed.close()

    def test_not_created(self, fleets: Fleets, key: str) -> None:
        known = unique("known")
        conf = {"task_create_missing_queues": False, "task_queues": {known: {}}, "task_default_queue": known}
        with fleets.own("redis", {"w1@north": {"queues": [known]}}, conf) as fleet, Sampler(fleet.registry):
            with pytest.raises(QueueNotFound):
                send(fleet.app, key, queue="unknown")
            assert fleet.held() == {}
            send(fleet.app, key, 3, queue=known)
            # The lots and the worker's own queue are none of the app's.
            gate = fleet.fill(2)
            send(fleet.app, f"pinned-{key}", 3, node="north")
            fleet.journal.open_gate(gate)
            assert len(fleet.ended(f"pinned-{key}", 3)) == 3
            assert len(fleet.ended(key, 3)) == 3


class TestArguments:
    ARGUMENTS: Mapping[str, Any] = {"x-max-priority": 5, "x-message-ttl": 60000, "x-max-length": 100}

    @pytest.mark.parametrize("worker_first", [True, False])
    def test_both_sides_declare_the_same(self, fleets: Fleets, worker_first: bool, key: str) -> None:
        """N5."""
        name = unique("argued")
        conf = {"task_queues": {name: {"queue_arguments": self.ARGUMENTS}}, "task_default_queue": name}
        workers = {"w1@north": {"queues": [name]}}
        with fleets.own("rabbitmq", workers if worker_first else {}, conf) as fleet:
            send(fleet.app, key, 3)
            if not worker_first:
                fleet.start("w1@north", queues=[name])
                fleet.wait_ready()
            assert len(fleet.ended(key, 3)) == 3
            send(fleet.app, f"pinned-{key}", 3, node="north")
            assert len(fleet.ended(f"pinned-{key}", 3)) == 3
            self.assert_declared(fleet, name, self.ARGUMENTS)
            assert "PRECONDITION_FAILED" not in fleet.workers["w1@north"].logs()

    def test_of_a_queue_that_a_router_made(self, fleets: Fleets, key: str) -> None:
        """N17: what a router answers at run time keeps its arguments."""
        name = unique("routed")

        def route(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"queue": Queue(name, Exchange(name), routing_key=name, queue_arguments={"x-max-priority": 5})}

        with fleets.own("rabbitmq", {}) as fleet:
            app = fleet.build_app()
            app.conf.task_routes = (route,)
            send(app, key, 2)
            self.assert_declared(fleet, name, {"x-max-priority": 5})
            conf = {"task_queues": {name: {"queue_arguments": {"x-max-priority": 5}}}}
            fleet.start("w1@north", queues=[name], conf=conf)
            fleet.wait_ready()
            send(app, f"later-{key}", 2)
            assert len(fleet.ended(key, 2)) == 2
            assert len(fleet.ended(f"later-{key}", 2)) == 2
            assert dispatched(fleet, name)
            app.close()

    def assert_declared(self, fleet: Fleet, name: str, arguments: Mapping[str, Any]) -> None:
        with fleet.app.connection_for_write() as connection:
            Queue(name, queue_arguments=dict(arguments))(connection.channel()).queue_declare()
            with pytest.raises(PreconditionFailed):
                Queue(name)(connection.channel()).queue_declare()


class TestPriorities:
    #: On RabbitMQ the highest number comes first, on Redis the lowest.
    LEVELS: Mapping[str, tuple[int, ...]] = {"redis": (0, 3, 6, 9), "rabbitmq": (9, 6, 3, 0)}

    def conf(self, broker_kind: str, name: str) -> dict[str, Any]:
        conf: dict[str, Any] = {"task_default_queue": name, "task_queues": {name: {}}}
        if broker_kind == "redis":
            conf["broker_transport_options"] = {"queue_order_strategy": "priority", "priority_steps": [0, 3, 6, 9]}
        else:
            conf["task_queues"] = {name: {"queue_arguments": {"x-max-priority": 10}}}
        return conf

    @pytest.mark.parametrize("broker_kind", ["redis", "rabbitmq"])
    def test_order_and_value_are_kept(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """I5, I6: of parked tasks, pinned ones and ones for a queue, the highest comes next, and has its priority."""
        name, levels = unique("ranked"), self.LEVELS[broker_kind]
        workers = {"w1@north": {"queues": [name], "concurrency": 1}}
        with fleets.own(broker_kind, workers, self.conf(broker_kind, name)) as fleet, Sampler(fleet.registry):
            for pin in ({}, {"node": "north"}):
                which = f"{key}-{'pinned' if pin else 'free'}"
                gate = fleet.fill(1)
                for level in reversed(levels):
                    send(fleet.app, f"{which}-{level}", 2, priority=level, **pin)
                fleet.journal.open_gate(gate)
                runs = fleet.ended(which, 8)
                assert [run.priority for run in runs] == [level for level in levels for _ in range(2)]
                assert [run.key for run in runs] == [f"{which}-{level}-{n}" for level in levels for n in range(2)]
                # As one that is sent to a free worker has.
                send(fleet.app, f"direct-{which}", priority=levels[1])
                assert [run.priority for run in fleet.ended(f"direct-{which}", 1)] == [levels[1]]
                fleet.wait(lambda: not fleet.held(), 10, "the slot to be free")
            fleet.settle()

    @pytest.mark.parametrize("broker_kind", ["rabbitmq", pytest.param("redis", marks=pytest.mark.soak)])
    def test_an_urgent_one_is_next(self, fleets: Fleets, broker_kind: str, key: str) -> None:
        """I5: five of low priority were sent first; nothing of them is prefetched."""
        name, levels = unique("ranked"), self.LEVELS[broker_kind]
        workers = {"w1@north": {"queues": [name], "concurrency": 1}}
        with fleets.own(broker_kind, workers, self.conf(broker_kind, name)) as fleet:
            for number in range(5):
                fleet.tasks["record"].apply_async(
                    kwargs={"key": f"{key}-low-{number}", "seconds": 0.7}, priority=levels[-1]
                )
            fleet.started(key, 1)
            send(fleet.app, f"{key}-high", priority=levels[0])
            assert [run.key for run in fleet.ended(key, 6)][1] == f"{key}-high-0"
