"""What only the SQLite store has: a file that can be lost, locked or damaged, and processes that share it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

import pytest

from celery_capacity.errors import ConfigurationError, RegistryError, RegistryUnavailable
from celery_capacity.models import Advert, CommitOutcome, Demand, Lot, Reason, Refusal, Slot, Standing
from celery_capacity.registry import Registry, Reservation, open_registry
from celery_capacity.registry._sqlite_lock import FairLock
from celery_capacity.registry._sqlite_schema import VERSION

DEMAND = Demand("q", "t", ttl_seconds=600.0)
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
posix = pytest.mark.skipif(sys.platform == "win32", reason="no fork, no signals")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "capacity.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def registry(url: str):
    with open_registry(url) as registry:
        yield registry


def advert(name: str = "w1", capacity: int = 1, **changes) -> Advert:
    values = {"node": "node", "queues": ("q",), "tasks": frozenset({"t"}), "lease_seconds": 1e6, "lapse_seconds": 1e6}
    return Advert(name, capacity=capacity, **{**values, **changes})


def take(registry: Registry, demand: Demand = DEMAND) -> Slot:
    answer = registry.select_and_reserve(demand)
    assert isinstance(answer, Reservation), answer
    return answer.transfer()


def in_child(call: Callable[[], object], wait: bool = True) -> int:
    """Run ``call`` in a forked child, expecting a true answer; its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if call() else 2
        except BaseException as exc:  # noqa: BLE001  # whatever it is, the parent must hear of it
            print(f"in the child: {exc!r}", file=sys.stderr)
        finally:
            os._exit(status)
    if wait:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pid


def run(script: str, *arguments: object) -> str:
    """Run a script in a new interpreter; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- the URL ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["sqlite://", "sqlite:///", "sqlite:////", "sqlite://:memory:", "sqlite:///:memory:"])
def test_url_without_a_file_points_to_the_memory_store(bad):
    with pytest.raises(ConfigurationError, match="memory://"):
        open_registry(bad)


@pytest.mark.parametrize("bad", ["sqlite://capacity.db", "sqlite://host/capacity.db"])
def test_url_with_two_slashes_is_explained(bad):
    with pytest.raises(ConfigurationError, match="three slashes"):
        open_registry(bad)


def test_url_with_a_query_is_refused():
    with pytest.raises(ConfigurationError, match="without a query"):
        open_registry("sqlite:///capacity.db?mode=ro")


def test_unknown_option_is_refused(url):
    with pytest.raises(TypeError, match="colour"):
        open_registry(url, colour="blue")


def test_relative_path_does_not_follow_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_registry("sqlite:///here.db") as registry:
        registry.register(advert())
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        registry.close()
        take(registry)
    assert (tmp_path / "here.db").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_path_may_be_percent_encoded(tmp_path):
    with open_registry(f"sqlite:///{tmp_path}/with%20space%3F.db") as registry:
        registry.overview()
    assert (tmp_path / "with space?.db").exists()


def test_nothing_is_touched_before_the_first_operation(path, url):
    open_registry(url).close()
    assert not path.exists()


def test_sqlite_that_is_too_old_is_refused(url, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 30, 1))
    with pytest.raises(ConfigurationError, match=r"3\.31"):
        open_registry(url)


# -- many processes --------------------------------------------------------------------------------------


def _compete(url, rounds, barrier, results):
    with open_registry(url) as registry:
        for _ in range(rounds):
            barrier.wait(60)
            answer = registry.select_and_reserve(DEMAND)
            results.put(answer.reason if isinstance(answer, Refusal) else answer.transfer().token)
            barrier.wait(60)


@posix
def test_twenty_processes_on_five_slots_get_exactly_five(registry, url):
    processes, rounds = 20, 25
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(processes + 1), fork.Queue()
    epochs = [registry.register(advert("w1", 2)), registry.register(advert("w2", 3))]
    crowd = [fork.Process(target=_compete, args=(url, rounds, barrier, results), daemon=True) for _ in range(processes)]
    for process in crowd:
        process.start()
    for _ in range(rounds):
        barrier.wait(60)
        answers = [results.get(timeout=60) for _ in range(processes)]
        granted = [answer for answer in answers if not isinstance(answer, Reason)]
        assert len(granted) == len(set(granted)) == 5
        assert [answer for answer in answers if isinstance(answer, Reason)] == [Reason.FULL] * 15
        assert [w.held for w in registry.overview().workers] == [2, 3]
        for token in granted:
            registry.cancel(token)
        barrier.wait(60)
    for process in crowd:
        process.join(60)
        assert process.exitcode == 0
    assert [w.epoch for w in registry.overview().workers] == epochs


@posix
def test_many_processes_that_open_a_new_file_at_once(tmp_path):
    script = """
        import sys, time
        from celery_capacity.registry import open_registry
        time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
        for index in range(20):
            with open_registry(sys.argv[1] + str(index)) as registry:
                registry.set_limit(f"q-{sys.argv[3]}", 1)
        """
    url, start = f"sqlite:///{tmp_path}/capacity.db", time.time() + 2
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda i: run(script, url, start, i), range(10)))
    for index in range(20):
        with open_registry(f"{url}{index}") as registry:
            assert len(registry.overview().queues) == 10


def test_namespaces_of_one_file_are_kept_apart(url):
    with open_registry(url, "one") as one, open_registry(url, "two") as two:
        for registry, capacity in ((one, 1), (two, 3)):
            registry.register(advert("w1", capacity))
            registry.set_limit("q", capacity)
        token = take(one).token
        assert isinstance(one.select_and_reserve(DEMAND), Refusal)
        assert two.cancel(token).value == "already released"
        assert [take(two).worker for _ in range(3)] == ["w1"] * 3
        assert two.drain("w1", "why")
        assert one.census("q").workers[0].reason is Reason.FULL


# -- a file that is lost ---------------------------------------------------------------------------------


def remove(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        Path(f"{path}{suffix}").unlink()


@pytest.mark.parametrize(
    "suffixes", [("",), ("", "-wal", "-shm"), ("", "-wal", "-shm", ".lock", ".lock-waiting"), ("", "-wal")]
)
def test_deleted_file_is_an_empty_registry_for_everybody(path, url, registry, suffixes):
    other = open_registry(url)
    epoch = registry.register(advert())
    slot = take(other)
    remove(path, *suffixes)
    assert registry.heartbeat("w1", epoch, [slot.token]).standing is Standing.GONE
    assert other.overview().workers == ()
    newer = other.register(advert(), holding=[slot])
    assert newer > epoch, "what the older registration says is still stale"
    assert registry.heartbeat("w1", newer, [slot.token]).standing is Standing.CURRENT
    registry.close()
    # Closing a connection to the deleted file must not take anything away from the new one.
    for _ in range(200):
        assert isinstance(other.select_and_reserve(DEMAND), Refusal)
        other.set_limit("q", random.randrange(9) + 1)
    with open_registry(url) as third:
        assert [(w.name, w.committed) for w in third.overview().workers] == [("w1", 1)]
    assert other.release(slot.token, newer).outcome.value == "released"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    other.close()


@posix
def test_file_deleted_under_busy_processes(path, url, registry):
    script = """
        import sys, time
        from celery_capacity.models import Advert, Demand
        from celery_capacity.registry import Reservation, open_registry
        name, end, rounds = sys.argv[2], time.monotonic() + 3, 0
        with open_registry(sys.argv[1]) as registry:
            def register():
                return registry.register(Advert(name, "node", ("q",), frozenset({"t"}), 2))
            epoch = register()
            while time.monotonic() < end:
                if registry.heartbeat(name, epoch).standing.name == "GONE":
                    epoch = register()
                answer = registry.select_and_reserve(Demand("q", "t"))
                if isinstance(answer, Reservation):
                    answer.release()
                    rounds += 1
        print(rounds)
        """
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(run, script, url, f"w{i}") for i in range(4)]
        time.sleep(1)
        for suffixes in (("",), ("", "-wal", "-shm"), ("", "-wal", "-shm", ".lock", ".lock-waiting")) * 2:
            time.sleep(0.2)
            for suffix in suffixes:
                Path(f"{path}{suffix}").unlink(missing_ok=True)
        rounds = [int(process.result()) for process in running]
    assert min(rounds) > 10
    assert [w.held for w in registry.overview().workers] == [0, 0, 0, 0]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# -- a file that says no ---------------------------------------------------------------------------------


def _unprivileged(call: Callable[[], object]) -> Callable[[], object]:
    """The superuser may write everything, so become somebody else."""

    def run_it() -> object:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return call()

    return run_it


@posix
@pytest.mark.parametrize("what", ["file", "directory"])
def test_read_only(what):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "capacity.db")
        with open_registry(f"sqlite:///{path}") as registry:
            registry.register(advert())
            registry.close()
            path.chmod(0o444)
            os.chmod(directory, 0o777 if what == "file" else 0o555)

            def attempt() -> bool:
                with pytest.raises(RegistryError) as raised:
                    registry.register(advert("w2"))
                return str(path) in str(raised.value) and raised.value.__cause__ is not None

            in_child(_unprivileged(attempt))
            os.chmod(directory, 0o755)
            path.chmod(0o644)
            assert [w.name for w in registry.overview().workers] == ["w1"]


def test_missing_directory(tmp_path):
    with open_registry(f"sqlite:///{tmp_path}/missing/capacity.db") as registry:
        with pytest.raises(RegistryUnavailable, match=r"missing/capacity\.db"):
            registry.overview()
        (tmp_path / "missing").mkdir()
        assert registry.overview().workers == ()


def test_full_disk_changes_nothing(registry):
    registry.register(advert("w0", 5))
    with registry._file.write() as tx:
        (pages,) = tx.one("PRAGMA page_count", {})
        tx.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RegistryError, match="full") as raised:
        for index in range(10_000):
            registry.register(advert(f"w{index + 1}", 5, tasks=frozenset(f"task-{index}-{i}" for i in range(50))))
    assert not isinstance(raised.value, RegistryUnavailable)
    assert registry._file.path in str(raised.value)
    assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
    assert len(registry.overview().workers) == 1 + index
    _check_derived(registry)
    take(registry)


@pytest.mark.parametrize("content", [b"this is not a database, but it is long enough to look like one" * 99])
def test_damaged_file(path, registry, content):
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(RegistryError, match=r"damaged.*delete it"):
            registry.select_and_reserve(DEMAND)
    path.unlink()
    registry.register(advert())
    take(registry)


def test_file_of_another_program_is_left_alone(path, registry):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE precious (a)")
    with pytest.raises(RegistryError, match="something else"):
        registry.register(advert())
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]


@pytest.mark.parametrize(("other", "whose"), [(VERSION + 1, "a newer"), (VERSION - 1, "an older")])
def test_schema_of_another_release_is_an_error_that_says_so(path, url, registry, other, whose):
    registry.register(advert())
    registry.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {other}")
    for attempt in (registry.overview, lambda: registry.select_and_reserve(DEMAND)):
        with pytest.raises(RegistryError, match=f"version {other}, of {whose} release"):
            attempt()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION}")
    assert [w.name for w in registry.overview().workers] == ["w1"]


# -- a file that somebody else has -----------------------------------------------------------------------


def test_file_locked_for_long_by_a_stranger(path, url):
    with open_registry(url, timeout_seconds=0.3) as registry, closing(sqlite3.connect(path)) as stranger:
        registry.register(advert())
        stranger.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(RegistryUnavailable, match=r"capacity\.db was locked by another program") as raised:
            registry.select_and_reserve(DEMAND)
        assert 0.25 < time.monotonic() - started < 3
        assert "database is locked" in str(raised.value.__cause__)
        assert [w.name for w in registry.overview().workers] == ["w1"], "looking waits for nobody"
        stranger.execute("ROLLBACK")
        take(registry)


def test_file_locked_for_a_moment_is_waited_for(path, url, registry):
    registry.register(advert())
    with closing(sqlite3.connect(path, check_same_thread=False)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, stranger.execute, ["ROLLBACK"])
        timer.start()
        take(registry)
        timer.join()


@posix
def test_process_stopped_inside_an_operation_does_not_hang_the_others(url):
    ready_read, ready_write = os.pipe()

    def stop_inside() -> bool:
        with open_registry(url) as mine, mine._file.write():
            os.write(ready_write, b".")
            os.kill(os.getpid(), signal.SIGSTOP)
        return True

    with open_registry(url, timeout_seconds=0.3) as registry:
        registry.register(advert())
        pid = in_child(stop_inside, wait=False)
        try:
            assert os.read(ready_read, 1) == b"."
            started = time.monotonic()
            with pytest.raises(RegistryUnavailable, match="in use by another process for more than"):
                registry.select_and_reserve(DEMAND)
            assert time.monotonic() - started < 3
        finally:
            os.kill(pid, signal.SIGCONT)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        take(registry)
    os.close(ready_read)
    os.close(ready_write)


@posix
def test_process_killed_inside_an_operation_leaves_no_half_of_it(url, registry):
    registry.register(advert())

    def die_inside() -> bool:
        with open_registry(url) as mine, mine._file.write() as tx:
            tx.execute("DELETE FROM worker", {})
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    pid = in_child(die_inside, wait=False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    take(registry)


def test_operation_that_is_interrupted_leaves_no_half_of_it(registry):
    registry.register(advert())
    with pytest.raises(KeyboardInterrupt), registry._file.write() as tx:
        tx.execute("DELETE FROM worker", {})
        raise KeyboardInterrupt
    take(registry)


# -- forks and threads -----------------------------------------------------------------------------------


def _open_files(path: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


@posix
def test_registry_goes_on_in_a_forked_child_and_in_the_parent(path, registry):
    epoch = registry.register(advert(capacity=4))
    tokens = [take(registry).token]

    def use() -> bool:
        inherited = _open_files(path) if os.path.isdir("/proc/self/fd") else []
        slot = take(registry)
        in_grandchild = in_child(lambda: registry.commit(slot.token, "w1", epoch) is CommitOutcome.COMMITTED)
        return not inherited and in_grandchild > 0 and slot.token != tokens[0] and take(registry).worker == "w1"

    in_child(use)
    tokens.append(take(registry).token)
    (worker,) = registry.overview().workers
    assert (worker.reserved, worker.committed) == (3, 1)


@posix
def test_fork_in_the_midst_of_busy_threads(url, registry):
    registry.register(advert(capacity=50))
    stop = threading.Event()
    other = open_registry(url)

    def work(mine: Registry) -> int:
        count = 0
        while not stop.is_set():
            mine.cancel(take(mine).token)
            count += 1
        return count

    def child() -> bool:
        for mine in (registry, other):
            for _ in range(20):
                mine.cancel(take(mine).token)
        return True

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, mine) for mine in (registry, other) * 2]
        try:
            children = []
            for _ in range(10):
                children.append(in_child(child, wait=False))
                time.sleep(0.02)
            for pid in children:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            stop.set()
        # None of them was left hanging; how much each got done is the machine's affair.
        assert min(thread.result() for thread in working) > 0
    assert registry.overview().workers[0].held == 0
    _check_derived(registry)
    other.close()


@posix
def test_fork_inside_an_operation(registry):
    """A signal handler may do that: the child must not touch what the parent has open."""
    registry.register(advert(capacity=2))
    with registry._file.write() as tx:
        tx.execute("UPDATE worker SET capacity = 3", {})
        pid = in_child(lambda: registry._file._connection is None and registry._file._pid == os.getpid(), wait=False)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert registry.overview().workers[0].capacity == 3


def test_fork_that_python_does_not_see(path, registry):
    """Made by a C library, say: only the process id tells.  What the parent had open is left alone."""
    registry.register(advert(capacity=2))
    before = registry._file._connection
    registry._file._mutex.acquire()  # by a thread that is not there in the child
    registry._file._pid = -1
    take(registry)
    assert registry._file._connection is not before
    assert before.execute("SELECT count(*) FROM slot").fetchone() == (1,)
    registry._file._pid = -1
    registry.close()
    take(registry)


def test_thread_that_has_it_for_long_does_not_hang_the_others(url):
    with open_registry(url, timeout_seconds=0.2) as registry:
        registry.register(advert())
        with registry._file.write(), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(registry.select_and_reserve, DEMAND)
            with pytest.raises(RegistryUnavailable, match="other threads of this process"):
                waiting.result(10)
        take(registry)


def test_closed_registry_opens_again(registry):
    registry.register(advert())
    registry.close()
    registry.close()
    take(registry)


def test_fair_lock_is_handed_on_in_order():
    lock, order = FairLock(), []

    def queue_up(index: int) -> None:
        with lock:
            order.append(index)

    lock.acquire()
    threads = []
    for index in range(5):
        threads.append(threading.Thread(target=queue_up, args=(index,)))
        threads[-1].start()
        while len(lock._waiting) <= index:
            time.sleep(0.001)
    assert not lock.acquire(timeout=0.01)
    lock.release()
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    assert lock.acquire(timeout=0)
    lock.release()


@posix
def test_interrupted_wait_does_not_lose_the_fair_lock():
    lock = FairLock()
    lock.acquire()
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError):
            lock.acquire(timeout=10)
    finally:
        signal.signal(signal.SIGALRM, previous)
    lock.release()
    assert lock.acquire(timeout=0)


def test_waiting_greenlet_lets_the_others_run(url):
    pytest.importorskip("gevent")
    script = """
        from gevent import monkey
        monkey.patch_all()
        import sys, time, gevent
        from celery_capacity.models import Advert, Demand
        from celery_capacity.registry import Reservation, open_registry
        holder, waiter = open_registry(sys.argv[1]), open_registry(sys.argv[1])
        waiter.register(Advert("w1", "node", ("q",), frozenset({"t"}), 1000))
        ticks, running = [], True

        def tick():
            while running:
                ticks.append(time.monotonic())
                gevent.sleep(0.01)

        def hold():
            with holder._file.write():
                gevent.sleep(0.5)

        def reserve(count):
            for _ in range(count):
                assert isinstance(waiter.select_and_reserve(Demand("q", "t")), Reservation)

        ticker = gevent.spawn(tick)
        gevent.joinall([gevent.spawn(hold), *[gevent.spawn(reserve, 50) for _ in range(10)]], raise_error=True)
        running = False
        ticker.join()
        print(waiter.overview().workers[0].held, max(b - a for a, b in zip(ticks, ticks[1:])) < 0.25, len(ticks) > 30)
        """
    assert run(script, url) == "500 True True"


# -- what is in the file ---------------------------------------------------------------------------------


def _check_derived(registry: Registry) -> None:
    """What the triggers keep is what the slots say."""
    with registry._file.read() as tx:
        wrong = tx.execute(
            "SELECT name FROM worker w WHERE held <> (SELECT count(*) FROM slot WHERE worker = w.id)", {}
        )
        assert wrong.fetchall() == []
        wrong = tx.execute(
            "SELECT name FROM queue q WHERE held <> "
            "(SELECT count(*) FROM slot s WHERE s.ns = q.ns AND s.queue = q.name)",
            {},
        )
        assert wrong.fetchall() == []
        wrong = tx.execute("SELECT s.name FROM seat s JOIN worker w ON w.id = s.worker WHERE s.open <> w.open", {})
        assert wrong.fetchall() == []
        assert tx.one("SELECT count(*) FROM slot WHERE worker NOT IN (SELECT id FROM worker)", {}) == (0,)


def test_nothing_is_left_of_queues_and_workers_that_are_gone(registry):
    for index in range(30):
        name, queue = f"w{index}", f"q{index}"
        epoch = registry.register(advert(name, node=name, queues=(queue, "r"), tasks=frozenset({"t", f"t{index}"})))
        take(registry, Demand(queue, "t", name))
        registry.set_limit(queue, 4)
        registry.set_limit(queue, None)
        registry.select_and_reserve(Demand(queue, "nothing"))
        registry.select_and_reserve(Demand(f"nobody-{index}", park_lot="lot"))
        registry.deregister(name, epoch)
        registry.expire("cleaner")
        registry.forget(name, epoch)
    with registry._file.read() as tx:
        tables = "worker", "seat", "pool", "cursor", "queue", "slot", "mark", "gone", "class", "class_task"
        assert {t: tx.one(f"SELECT count(*) FROM {t}", {})[0] for t in tables} == dict.fromkeys(tables, 0)


def test_refusal_without_a_mark_writes_nothing(path, url, registry):
    epoch = registry.register(advert(capacity=1))
    registry.register(advert("w2", queues=("r",)))
    take(registry)
    registry.set_limit("r", 0)
    demands = [
        DEMAND,
        Demand("q", "unknown"),
        Demand("q", "t", "elsewhere"),
        Demand("r", "t"),
        Demand("nobody"),
        Demand("nobody", park_lot="nobody"),
    ]
    with closing(sqlite3.connect(path)) as watcher:

        def version() -> object:
            return watcher.execute("PRAGMA data_version").fetchone()

        before = version()
        for demand in demands:
            assert isinstance(registry.select_and_reserve(demand), Refusal)
            assert isinstance(registry.reserve_worker("w1", epoch, demand), Refusal)
        assert isinstance(registry.claim_parked("w1", epoch, [Lot("q", "q")]), Refusal)
        registry.census("q", "t")
        registry.overview()
        assert version() == before
        assert isinstance(registry.select_and_reserve(Demand("q", "t", park_lot="q")), Refusal)
        assert version() != before


def test_late_worker_is_passed_over_until_its_next_heartbeat(url):
    now = [1000.0]
    with open_registry(url, clock=lambda: now[0]) as registry:
        epoch = registry.register(advert("w1", 5, lease_seconds=10, lapse_seconds=100))
        registry.register(advert("w2", 5))
        assert [take(registry).worker for _ in range(3)] == ["w1", "w2", "w1"]
        now[0] += 10
        assert [take(registry).worker for _ in range(3)] == ["w2", "w2", "w2"]
        registry.heartbeat("w1", epoch)
        assert [take(registry).worker for _ in range(3)] == ["w1", "w2", "w1"]
        _check_derived(registry)


def test_lost_slots_are_logged(url, caplog):
    now = [1000.0]
    with open_registry(url, clock=lambda: now[0]) as registry, caplog.at_level(logging.WARNING):
        epoch = registry.register(advert("w1", 5, lease_seconds=10, lapse_seconds=100))
        slot = take(registry, Demand("q", "t", ttl_seconds=5))
        kept = take(registry)
        registry.commit(kept.token, "w1", epoch)
        now[0] += 5
        take(registry)
        (record,) = caplog.records
        assert (record.action, record.token, record.worker) == ("reservation_expired", slot.token, "w1")
        caplog.clear()
        now[0] += 100
        registry.expire("cleaner")
        (record,) = caplog.records
        assert (record.action, record.worker, record.epoch) == ("slots_freed", "w1", epoch)
        assert "2 slots" in record.getMessage()


def test_cost_of_a_choice_does_not_grow_with_the_fleet(tmp_path):
    """The acceptance figure of 1.2 is measured by the benchmark, on a quiet machine; a walk over the workers would
    show here as a hundredfold."""

    def seconds(registry: Registry) -> float:
        started = time.perf_counter()
        for _ in range(300):
            registry.cancel(take(registry).token)
        return time.perf_counter() - started

    registries = []
    for count in (10, 2000):
        registries.append(open_registry(f"sqlite:///{tmp_path}/{count}.db"))
        for index in range(count):
            registries[-1].register(advert(f"w{index:05}", node=f"n{index % 50}"))
    few, many = registries
    assert median(seconds(many) / seconds(few) for _ in range(5)) < 3
    for registry in registries:
        registry.close()


# -- the clock -------------------------------------------------------------------------------------------


def _boot(registry: Registry) -> tuple[str, float]:
    with registry._file.read() as tx:
        return tx.one("SELECT boot, ahead FROM clock", {})


@pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/random/boot_id"), reason="no boot id")
def test_clock_goes_on_after_a_reboot(url, registry):
    epoch = registry.register(advert(lease_seconds=0.1, lapse_seconds=0.2))
    before = registry.heartbeat("w1", epoch).store_time
    assert before == pytest.approx(time.time(), abs=60)
    with registry._file.write() as tx:
        # As a file looks to the first process after a boot: the machine's clock is where it was long ago.
        tx.execute("UPDATE clock SET boot = 'an earlier one', ahead = ahead - 1e9", {})
        tx.execute("UPDATE worker SET beat = beat + 500", {})
    registry.close()
    with open_registry(url) as other:
        after = other.heartbeat("nobody", 1).store_time
        assert after >= before + 500, "never before anything that is in the file, whatever the wall clock says"
        assert other.heartbeat("nobody", 1).store_time == pytest.approx(
            registry.heartbeat("nobody", 1).store_time, abs=5
        )
        assert _boot(other) == _boot(registry)
        time.sleep(0.3)
        assert [gone.name for gone in other.expire("cleaner")] == ["w1"]


@pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/random/boot_id"), reason="no boot id")
def test_setting_the_wall_clock_moves_nothing(registry, monkeypatch):
    epoch = registry.register(advert())
    before = registry.heartbeat("w1", epoch).store_time
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 1e6)
    assert registry.heartbeat("w1", epoch).store_time == pytest.approx(before, abs=5)
    assert registry.register(advert()) > epoch


def test_without_a_boot_id_the_clock_is_the_wall_clock(registry, monkeypatch):
    monkeypatch.setattr("celery_capacity.registry._sqlite_clock._boot_id", lambda: "")
    epoch = registry.register(advert())
    assert registry.heartbeat("w1", epoch).store_time == pytest.approx(time.time(), abs=5)


def test_an_operation_writes_little(path, registry):
    """What is written is what it costs on a disk: a handful of short rows, not as many pages of 4 KiB."""
    registry.register(advert(capacity=2))
    log = Path(f"{path}-wal")
    before, pairs = log.stat().st_size, 50
    for _ in range(pairs):
        registry.cancel(take(registry).token)
    assert (log.stat().st_size - before) / pairs < 20_000
