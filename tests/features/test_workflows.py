"""Chains, groups, chords and the rest of Celery's canvas, on fleets that are smaller than what they are asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.canvas import Signature, StampingVisitor
from celery.exceptions import ChordError
from celery.exceptions import TimeoutError as ResultTimeout
from support.fleet import Fleet, Fleets
from support.sampling import Sampler

from celery_capacity import CapacityExhausted

TWO = {"w1@north": {}, "w2@south": {}}
TOTAL = 4
ONE_SLOT = {"w1@north": {"concurrency": 1}}
REFUSE = {"capacity_when_full": "refuse"}


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def fleet(fleets: Fleets, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleets.use(request.param, TWO) as fleet:
        yield fleet


class TestEveryPrimitive:
    """As the user guide has them."""

    def test_a_chain_with_a_partial_and_an_immutable_signature(self, fleet: Fleet) -> None:
        add = fleet.tasks["add"]
        assert (add.s(1, 2) | add.s(10) | add.si(100, 1) | add.s(1000)).apply_async().get(timeout=30) == 1101

    def test_a_group_of_chains_and_a_chain_of_groups(self, fleet: Fleet) -> None:
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        chains = group(chain(add.s(n, n), add.s(1)) for n in range(6))
        assert chains.apply_async().get(timeout=30) == [2 * n + 1 for n in range(6)]
        # Each group is upgraded to a chord.
        groups = chain(group(add.s(n, n) for n in range(6)), total.s(), group(add.s(n) for n in range(3)), total.s())
        assert groups.apply_async().get(timeout=30) == 93

    def test_a_chord_of_chords(self, fleet: Fleet) -> None:
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        inner = [chord([add.s(n, m) for m in range(3)], total.s()) for n in range(4)]
        assert chord(inner, total.s()).apply_async().get(timeout=60) == 30

    def test_a_chord_whose_body_is_a_chain(self, fleet: Fleet) -> None:
        add, total, double = fleet.tasks["add"], fleet.tasks["total"], fleet.tasks["double"]
        body = chain(total.s(), add.s(1), double.s())
        assert chord((add.s(n, n) for n in range(8)), body).apply_async().get(timeout=30) == 114

    def test_map_starmap_and_chunks(self, fleet: Fleet) -> None:
        add, double = fleet.tasks["add"], fleet.tasks["double"]
        assert double.map([1, 2, 3]).apply_async().get(timeout=30) == [2, 4, 6]
        assert add.starmap(zip(range(5), range(5), strict=True)).apply_async().get(timeout=30) == [0, 2, 4, 6, 8]
        chunks = add.chunks(zip(range(10), range(10), strict=True), 3).group().apply_async()
        assert chunks.get(timeout=30) == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18]]

    def test_links_and_error_links(self, fleet: Fleet, key: str) -> None:
        add, fail, record = fleet.tasks["add"], fleet.tasks["fail"], fleet.tasks["note"]
        add.apply_async((1, 2), link=record.si(key=f"{key}-link").set(node="south"))
        fail.apply_async(link_error=record.si(key=f"{key}-error").set(node="north"))
        broken = chain(add.s(1, 1), fail.si(), record.si(key=f"{key}-never")).on_error(record.si(key=f"{key}-chain"))
        broken.apply_async()
        runs = {run.key.rpartition("-")[2]: run.worker for run in fleet.ended(key, 3)}
        assert set(runs) == {"link", "error", "chain"}
        assert (runs["link"], runs["error"]) == ("w2@south", "w1@north")

    @pytest.mark.parametrize(("kind", "expected"), [("task", 3), ("chain", 6), ("group", [0, 2, 4])])
    def test_a_replacement(self, fleet: Fleet, key: str, kind: str, expected: Any) -> None:
        replaced = fleet.tasks["replace_with"]
        assert replaced.delay(kind, key=key).get(timeout=30) == expected
        assert chain(replaced.si("task"), fleet.tasks["double"].s()).apply_async().get(timeout=30) == 6

    def test_stamps(self, fleet: Fleet, key: str) -> None:
        class Stamp(StampingVisitor):
            def on_signature(self, sig: Signature, **headers: Any) -> dict[str, Any]:
                return {"tenant": "acme", "stamped_headers": ["tenant"]}

        canvas = group(
            fleet.tasks["stamps"].si(key=f"{key}-{n}").set(node="south" if n % 2 else None) for n in range(6)
        )
        canvas.stamp(Stamp())
        for stamps in canvas.apply_async().get(timeout=30):
            assert stamps in ({"tenant": "acme"}, {"tenant": ["acme"]})
        assert {run.worker for run in fleet.ended(key, 6) if int(run.key[-1]) % 2} == {"w2@south"}

    def test_a_signature_from_json(self, fleet: Fleet) -> None:
        add = fleet.tasks["add"]
        text = json.dumps(chain(add.s(1, 2), add.s(3).set(node="south")))
        assert Signature.from_dict(json.loads(text), app=fleet.app).apply_async().get(timeout=30) == 6

    def test_with_a_countdown(self, fleet: Fleet) -> None:
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        later = [
            group(add.s(n, n) for n in range(6)).apply_async(countdown=1),
            chain(add.s(1, 2), add.s(3).set(countdown=1)).apply_async(countdown=1),
            chord((add.s(n, n).set(countdown=1) for n in range(6)), total.s().set(countdown=1)).apply_async(),
        ]
        fleet.assert_takes(TOTAL)
        assert [result.get(timeout=30) for result in later] == [[0, 2, 4, 6, 8, 10], 6, 30]


class TestWiderThanTheFleet:
    def test_a_chord_of_hundreds(self, fleet: Fleet) -> None:
        """G11."""
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        result = chord((add.s(n, 0) for n in range(300)), total.s()).apply_async()
        assert result.get(timeout=90) == sum(range(300))
        assert not fleet.left()
        assert fleet.held() == {}

    def test_a_group_runs_each_part_once(self, fleet: Fleet, key: str) -> None:
        results = group(fleet.tasks["record"].si(key=f"{key}-{n}") for n in range(5 * TOTAL)).apply_async()
        assert results.get(timeout=60) == [f"{key}-{n}" for n in range(5 * TOTAL)]
        assert set(Counter(run.key for run in fleet.runs(key)).values()) == {1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
def test_in_every_pool(fleets: Fleets, pool: str, key: str) -> None:
    """The tests above are on prefork.  The tasks send the next ones from the worker's own process, and thread."""
    options = {"pool": pool, "concurrency": 1 if pool == "solo" else 2}
    with fleets.own("redis", {"w1@north": options}, REFUSE) as fleet, Sampler(fleet.registry):
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        header = group(add.s(n).set(when_full="park") for n in range(6))
        assert chain(add.s(1, 2), header, total.s(), add.s(100)).apply_async().get(timeout=60) == 133
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
        assert fleet.tasks["retry_n"].delay(2, key=f"{key}-retried").get(timeout=30) == 2
        fleet.tasks["record"].apply_async(kwargs={"key": f"{key}-later"}, countdown=1)
        fleet.ended(f"{key}-later", 1)
        fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")
        assert fleet.complaints() == []


class TestBackendsWithoutNativeChords:
    """A task that polls, ``celery.chord_unlock``, sends the body: on one slot, and with eta."""

    @pytest.fixture(params=["park", "refuse"])
    def fleet(self, fleets: Fleets, results: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
        conf = {"result_backend": f"file://{results}", "result_chord_retry_interval": 0.2}
        with fleets.use("redis", ONE_SLOT, {**conf, "capacity_when_full": request.param}) as fleet:
            yield fleet

    def test_a_chord_on_one_slot(self, fleet: Fleet) -> None:
        """G9: the poll does not take the only slot for ever."""
        add, total = fleet.tasks["add"], fleet.tasks["total"]
        header = [add.s(n, n).set(when_full="park") for n in range(3)]
        assert chord(header, total.s()).apply_async().get(timeout=60) == 6

    def test_its_poll_holds_no_slot_while_the_header_runs(self, fleet: Fleet, key: str) -> None:
        hold, record = fleet.tasks["hold"], fleet.tasks["record"]
        header = [hold.si(gate=key, key=f"{key}-{n}").set(when_full="park") for n in range(2)]
        result = chord(header, record.si(key=f"{key}-body")).apply_async()
        fleet.started(key, 1)
        assert fleet.held() == {"w1@north": 1}
        fleet.journal.open_gate(key)
        assert result.get(timeout=60) == f"{key}-body"

    def test_a_header_that_fails(self, fleet: Fleet) -> None:
        """G12."""
        add, fail, total = fleet.tasks["add"], fleet.tasks["fail"], fleet.tasks["total"]
        header = [sig.set(when_full="park") for sig in (add.s(1, 1), fail.s(), add.s(2, 2))]
        result = chord(header, total.s()).apply_async()
        fleet.wait(result.ready, 60, "the chord to fail")
        assert (result.state, type(result.result)) == ("FAILURE", ChordError)

    def test_a_part_that_is_refused_ends_the_chord(self, fleet: Fleet, key: str) -> None:
        hold, total = fleet.tasks["hold"], fleet.tasks["total"]
        body = total.s().set(task_id=f"{key}-body")
        header = [hold.si(gate=key, key=f"{key}-{n}").set(when_full="refuse") for n in range(3)]
        with pytest.raises(CapacityExhausted, match="part 1 of group") as caught:
            chord(header, body).apply_async(task_id=f"{key}-body")
        assert caught.value.group_index == 1
        fleet.journal.open_gate(key)
        result = fleet.app.AsyncResult(f"{key}-body")
        fleet.wait(result.ready, 60, "the chord to fail")
        assert (result.state, type(result.result)) == ("FAILURE", ChordError)
        assert len(fleet.ended(key, 1)) == 1

    def test_the_body_keeps_its_queue(self, fleets: Fleets, results: Path, key: str) -> None:
        """G13."""
        conf = {"result_backend": f"file://{results}", "result_chord_retry_interval": 0.2}
        with fleets.own("redis", {"w1@north": {}}, conf) as fleet:
            fleet.start("w2@bodies", queues=[f"{key}-bodies"])
            fleet.wait_ready()
            add, record = fleet.tasks["add"], fleet.tasks["record"]
            body = record.si(key=f"{key}-body").set(queue=f"{key}-bodies")
            assert chord([add.s(n, n) for n in range(3)], body).apply_async().get(timeout=60) == f"{key}-body"
            assert [(run.worker, run.queue) for run in fleet.ended(key, 1)] == [("w2@bodies", f"{key}-bodies")]
            unlock = "Task celery.chord_unlock"
            assert unlock in fleet.workers["w2@bodies"].logs()
            assert unlock not in fleet.workers["w1@north"].logs()
            fleet.wait(lambda: not fleet.held(), 10, "all slots to be free")


# Celery's Redis backend, in this very process.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
class TestRefused:
    """``when_full="refuse"``: the caller is told which part was not published; what was admitted goes on."""

    @pytest.fixture
    def fleet(self, fleets: Fleets) -> Iterator[Fleet]:
        with fleets.use("redis", ONE_SLOT, REFUSE) as fleet:
            yield fleet

    def test_nothing_of_a_group_is_published_if_nothing_fits(self, fleet: Fleet, key: str) -> None:
        gate = fleet.fill(1)
        for canvas in (
            group(fleet.tasks["record"].si(key=key) for _ in range(3)),
            chord((fleet.tasks["record"].si(key=key) for _ in range(3)), fleet.tasks["total"].s()),
            chain(fleet.tasks["record"].si(key=key), fleet.tasks["record"].si(key=key)),
        ):
            with pytest.raises(CapacityExhausted) as caught:
                canvas.apply_async()
            assert caught.value.group_index in (0, None)
            assert not fleet.depth(fleet.queue)
        fleet.journal.open_gate(gate)
        fleet.ended(gate, 1)
        fleet.settle()
        assert fleet.runs(key) == []

    def test_the_error_names_what_was_not_published(self, fleet: Fleet, key: str) -> None:
        parts = group(fleet.tasks["hold"].si(gate=key, key=f"{key}-{n}") for n in range(3))
        with pytest.raises(CapacityExhausted, match=r"part 1 of group \S+ \(1 before it are published\)") as caught:
            parts.apply_async()
        assert caught.value.group_index == 1
        fleet.journal.open_gate(key)
        assert [run.key for run in fleet.ended(key, 1)] == [f"{key}-0"]
        fleet.settle()
        assert len(fleet.runs(key)) == 1

    @pytest.mark.parametrize("nested", [False, True], ids=["plain", "of chains"])
    def test_a_chord_of_which_a_part_was_refused_fails(self, fleet: Fleet, key: str, nested: bool) -> None:
        """G12."""
        hold, record = fleet.tasks["hold"], fleet.tasks["record"]
        header: list[Signature] = [hold.si(gate=key, key=f"{key}-{n}") for n in range(3)]
        if nested:
            header = [chain(part, record.si(key=f"{key}-second")) for part in header]
        with pytest.raises(CapacityExhausted, match="part 1 of group"):
            chord(header, fleet.tasks["total"].s()).apply_async(task_id=f"{key}-body")
        result = fleet.app.AsyncResult(f"{key}-body")
        fleet.wait(result.ready, 10, "the chord to fail")
        assert (result.state, type(result.result)) == ("FAILURE", ChordError)
        assert "part 1 was not published" in str(result.result)
        fleet.journal.open_gate(key)
        fleet.ended(key, 1)

    def test_what_was_admitted_goes_on(self, fleet: Fleet, key: str) -> None:
        """Its next tasks ask for a slot while it holds the only one itself; nobody there could catch a refusal."""
        add, record, total = fleet.tasks["add"], fleet.tasks["note"], fleet.tasks["total"]

        def a_free_slot() -> None:
            fleet.wait(lambda: not fleet.held(), 10, "the slot to be free")

        assert chain(add.s(1, 2), add.s(3), group(add.s(n) for n in range(3)), total.s()).apply_async().get(60) == 21
        a_free_slot()
        add.apply_async((1, 2), link=[record.si(key=f"{key}-a"), record.si(key=f"{key}-b")])
        fleet.ended(key, 2)
        a_free_slot()
        fleet.tasks["fail"].apply_async(link_error=record.si(key=f"{key}-c"))
        fleet.ended(key, 3)


class TestATaskThatWaitsForAnother:
    """G10: with every slot taken by tasks that wait for tasks which are parked, nothing goes on until one gives up."""

    @pytest.fixture
    def fleet(self, fleets: Fleets) -> Iterator[Fleet]:
        with fleets.use("redis", ONE_SLOT) as fleet:
            yield fleet

    def test_the_child_runs_when_the_parent_gives_up(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["wait_for_child"].delay({}, 2.0, key=key)
        with pytest.raises(ResultTimeout):
            result.get(timeout=30)
        assert [run.outcome for run in fleet.ended(key, 2)] == ["TimeoutError", "returned"]

    def test_it_is_said_in_the_log(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["wait_for_child"].delay({}, 1.0, key=key)
        fleet.wait(result.ready, 30, "the parent to give up")
        fleet.ended(key, 2)
        said = "task record is parked while every slot is taken, one of them by task wait_for_child, which sent it"
        assert said in fleet.workers["w1@north"].logs()

    def test_refused_it_is_told_at_once(self, fleet: Fleet, key: str) -> None:
        result = fleet.tasks["wait_for_child"].delay({"when_full": "refuse"}, 30.0, key=key)
        with pytest.raises(CapacityExhausted, match="refused"):
            result.get(timeout=10)
        assert fleet.runs(f"{key}-child") == []

    def test_with_a_slot_to_spare_it_does_not_wait(self, fleets: Fleets, key: str) -> None:
        with fleets.use("redis", TWO) as fleet:
            results = [fleet.tasks["wait_for_child"].delay({}, 20.0, key=f"{key}-{n}") for n in range(TOTAL - 1)]
            assert [result.get(timeout=30) for result in results] == [f"{key}-{n}-child" for n in range(TOTAL - 1)]
