"""What a worker counts reaches the registry, once; and every counter is in the documentation."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery

import celery_capacity
from celery_capacity.errors import RegistryUnavailable
from celery_capacity.models import StoreCounter
from celery_capacity.registry.memory import MemoryRegistry
from celery_capacity.worker.agent import WorkerAgent
from celery_capacity.worker.heart import Heart, last_words

PACKAGE = Path(celery_capacity.__file__).parent
TABLES = PACKAGE.parent / "docs" / "reference" / "counters.md"


class Told(MemoryRegistry):
    """A registry that writes down what it is asked to count, and fails as often as it is told to."""

    def __init__(self, world: str) -> None:
        super().__init__(f"memory://{world}")
        self.failures = 0
        self.calls: list[str] = []

    def add_counters(self, counts) -> None:
        self.calls.append("add_counters")
        if self.failures:
            self.failures -= 1
            raise RegistryUnavailable("away")
        super().add_counters(counts)

    def deregister(self, worker: str, epoch: int) -> bool:
        self.calls.append("deregister")
        return super().deregister(worker, epoch)

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.overview().counters)


@pytest.fixture
def registry(request) -> Told:
    return Told(request.node.nodeid)


@pytest.fixture
def agent(registry) -> Iterator[WorkerAgent]:
    app = Celery("proj", broker="memory://", set_as_current=False)
    # No pause, neither between heartbeats nor after a failure: every look is a beat.
    settings = {"heartbeat_seconds": 1e-9, "lease_seconds": 60.0, "lapse_seconds": 60.0, "registry_retry_seconds": 1e-9}
    app.conf.update({f"capacity_{name}": value for name, value in settings.items()}, capacity_registry=registry.url)
    runtime = celery_capacity.install(app)
    controller = SimpleNamespace(app=app, hostname="w@n", pool=SimpleNamespace(num_processes=2))
    agent = WorkerAgent(controller, runtime.settings, registry, lambda: registry, runtime.outage)
    agent.consuming = True
    yield agent
    app.close()


@pytest.fixture
def heart(agent) -> Heart:
    heart = Heart(agent)
    heart.look()
    assert agent.epoch, "registered"
    return heart


def test_beat_without_anything_to_tell_makes_no_call(registry, heart):
    heart.look()
    assert registry.calls == []


def test_beat_tells_what_was_counted_since_the_last_one(registry, agent, heart):
    agent.count("moved", 2)
    agent.count("swept")
    heart.look()
    assert registry.counters == {"moved": 2, "swept": 1}
    heart.look()
    agent.count("moved")
    heart.look()
    assert registry.counters == {"moved": 3, "swept": 1}
    assert len(registry.calls) == 2
    assert agent.counters == {"moved": 3, "swept": 1}


def test_what_could_not_be_told_is_told_the_next_time_and_once(registry, agent, heart):
    agent.count("moved", 2)
    registry.failures = 1
    with pytest.raises(RegistryUnavailable):
        heart.look()
    assert registry.counters == {}
    agent.count("moved")
    agent.count("swept")
    heart.look()
    heart.look()
    assert registry.counters == {"moved": 3, "swept": 1}
    assert registry.calls == ["add_counters"] * 2


def test_what_the_beat_itself_finds_is_told_at_once(registry, agent, heart):
    registry.deregister(agent.name, agent.epoch)
    heart.look()
    assert registry.counters == {"lapsed": 1}


def test_worker_that_was_replaced_still_tells(registry, agent, heart):
    registry.register(agent.advert())
    heart.look()
    assert registry.counters == {"replaced": 1, "stale_refused": 1}
    agent.count("handed_away")
    heart.look()
    assert registry.counters == {"handed_away": 1, "replaced": 1, "stale_refused": 1}


def test_the_rest_is_told_before_the_worker_deregisters(registry, agent, heart):
    agent.count("moved", 5)
    last_words(agent)
    assert registry.calls == ["add_counters", "deregister"]
    assert registry.counters == {"moved": 5}


def test_worker_ends_though_nothing_can_be_told(registry, agent, heart, caplog):
    agent.count("moved")
    registry.failures = 1
    last_words(agent)
    assert "counters_lost" in [getattr(record, "action", None) for record in caplog.records]
    assert registry.calls == ["add_counters", "deregister"]


def test_threads_count_while_it_is_told_and_nothing_is_lost_or_told_twice(agent):
    told: dict[str, int] = {}
    ended = threading.Event()
    failures = cycle([True, False])

    def tell(counts) -> None:
        if next(failures):
            raise RegistryUnavailable("away")
        for name, n in counts.items():
            told[name] = told.get(name, 0) + n

    def keep_telling() -> None:
        while not ended.is_set():
            with suppress(RegistryUnavailable):
                agent.tell_counters(tell)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        teller = threading.Thread(target=keep_telling)
        counting = [threading.Thread(target=lambda: [agent.count("moved") for _ in range(5000)]) for _ in range(4)]
        for thread in (teller, *counting):
            thread.start()
        for thread in counting:
            thread.join()
        ended.set()
        teller.join()
    finally:
        sys.setswitchinterval(interval)
    with suppress(RegistryUnavailable):
        agent.tell_counters(tell)
    with suppress(RegistryUnavailable):
        agent.tell_counters(tell)
    assert told == agent.counters == {"moved": 20_000}


# -- what is documented ------------------------------------------------------------------------------------------


def documented(heading: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    text = TABLES.read_text("utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) == len(set(names))
    return set(names)


def calls(directory: Path) -> Iterator[ast.Call]:
    for path in directory.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                yield node


def literal(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def counted_by_workers() -> set[str]:
    found = set()
    for call in calls(PACKAGE / "worker"):
        name = getattr(call.func, "attr", "")
        if name in ("count", "_count"):
            counter = literal(call.args[0])
            assert counter, f"a name that cannot be read off: {ast.unparse(call)}"
            found.add(counter)
    return found


def logged_actions() -> set[str]:
    """Of every ``extra={"action": …}`` and, as the SQLite store says it, ``action=…``."""
    found = set()
    for call in calls(PACKAGE):
        for keyword in call.keywords:
            if keyword.arg == "action":
                found.add(literal(keyword.value))
            if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
                found |= {literal(value) for key, value in pairs if key is not None and literal(key) == "action"}
    return {action for action in found if action is not None}


def test_counters_of_workers_are_documented():
    assert documented("Counted by workers") == counted_by_workers()


def test_counters_of_the_registry_are_documented():
    assert documented("Counted by the registry") == {counter.value for counter in StoreCounter}


def test_every_action_has_a_counter_or_a_reason_to_have_none():
    with_counter = counted_by_workers()
    assert documented("Actions without a counter") == logged_actions() - with_counter
    assert with_counter <= logged_actions(), "every counter has its log line"


def test_registry_of_redis_counts_what_the_others_count():
    scripts = "".join(path.read_text("utf-8") for path in (PACKAGE / "registry" / "lua").glob("*.lua"))
    assert set(re.findall(r"\bcount\('(\w+)'", scripts)) == {counter.value for counter in StoreCounter}
