"""A fleet with the plugin and without, in the same run, on the same broker.  Prints a table::

    python tests/benchmarks/bench_fleet.py [--broker redis rabbitmq] [--waves 6] [--ticks 4000] [--only wave|ticks|publish]

Four workers with two processes each, early acknowledgement, results ignored, Celery's default settings.

wave
    5 tasks of 2 s among 32 of 0.05 s in random order, so many waves; the makespan of each against that of a
    perfect queue (the next task goes to the first free process, at no cost).
ticks
    So many tasks that do nothing: the throughput against plain Celery's, in rounds that are taken in turns; the ratio is the
    median of the ratios of each round, and behind it are the rounds.  Then the processor time that a task takes (user and system,
    the least of all rounds) of the producer, the workers' main processes and their pool processes: unlike the throughput it does
    not depend on what else the machine does.
publish
    The time that the plugin adds to ``apply_async``, against one EVALSHA that does nothing: what such a one adds to
    ``apply_async`` when it is called right before it, and what it takes in a loop of its own, where nothing has to be woken up
    and everything is in the processor's caches.  Medians; all cases in turns, ten calls each.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

BROKERS = {
    "redis": os.environ.get("CAPACITY_BENCH_REDIS", "redis://127.0.0.1:6379/11"),
    "rabbitmq": os.environ.get("CAPACITY_BENCH_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//"),
}
REGISTRY = os.environ.get("CAPACITY_BENCH_REGISTRY", "redis://127.0.0.1:6379/12")
WORKERS, PROCESSES = 4, 2
LONG, SHORT = (5, 2.0), (32, 0.05)


class Fleet:
    """Workers of one kind, and the app that sends to them."""

    def __init__(self, broker: str, plugin: bool, directory: Path) -> None:
        self.plugin = plugin
        self.namespace = f"bench-{uuid.uuid4().hex[:8]}"
        self.log = directory / f"{self.namespace}.log"
        self.log.touch()
        self.env = {
            "BENCH_BROKER": BROKERS[broker],
            "BENCH_REGISTRY": REGISTRY if plugin else "",
            "BENCH_NAMESPACE": self.namespace,
            "BENCH_LOG": str(self.log),
            "PYTHONPATH": os.pathsep.join(sys.path[:2] + [os.environ.get("PYTHONPATH", "")]),
        }
        os.environ.update(self.env)
        sys.modules.pop("fleet_app", None)
        self.app = importlib.import_module("fleet_app").app
        self.workers: list[subprocess.Popen[bytes]] = []
        self.outputs = [directory / f"{self.namespace}-{n}.out" for n in range(WORKERS)]

    def start(self) -> None:
        for n, output in enumerate(self.outputs):
            argv = [sys.executable, "-m", "celery", "-A", "fleet_app", "worker", "-c", str(PROCESSES), "-l", "INFO"]
            argv += ["-n", f"w{n}-{self.namespace}@bench"]
            with output.open("wb") as out:
                env = {**os.environ, **self.env}
                self.workers.append(
                    subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
                )
        wait(lambda: all(b"ready." in output.read_bytes() for output in self.outputs), 60, "the workers")
        # One task for each process and more, so that everything is connected and imported.
        self.ticks(100)

    def stop(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        with self.app.connection_for_write() as connection:
            connection.default_channel.queue_delete(self.namespace)
        self.app.close()

    def processor_seconds(self) -> dict[str, float]:
        """What has been used up so far, by role."""
        mains = [psutil.Process(worker.pid) for worker in self.workers]
        children = [child for main in mains for child in main.children()]
        return {"producer": used([psutil.Process()]), "main": used(mains), "pool": used(children)}

    def ticks(self, number: int) -> float:
        """Seconds from the first publish until the last of so many tasks has run."""
        self.log.write_bytes(b"")
        task = self.app.tasks["tick"]
        started = time.perf_counter()
        for _ in range(number):
            task.apply_async()
        wait(lambda: self.log.stat().st_size >= 2 * number, 300, f"{number} ticks", interval=0.005)
        return time.perf_counter() - started

    def wave(self, durations: list[float]) -> tuple[float, float]:
        """Makespan, and the mean wait of the short tasks, in seconds."""
        self.log.write_bytes(b"")
        task = self.app.tasks["nap"]
        started = time.time()
        for n, seconds in enumerate(durations):
            task.apply_async((f"{n}", seconds))
        wait(lambda: self.log.read_bytes().count(b"\n") >= len(durations), 120, "a wave", interval=0.01)
        runs = [line.split() for line in self.log.read_text().splitlines()]
        if len({run[0] for run in runs}) != len(durations) or len(runs) != len(durations):
            raise SystemExit(f"{len(runs)} runs of {len(durations)} tasks")
        waits = [float(run[1]) - started for run in runs if durations[int(run[0])] == SHORT[1]]
        return max(float(run[2]) for run in runs) - started, statistics.fmean(waits)


def used(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def wait(condition: Any, limit: float, what: str, interval: float = 0.05) -> None:
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not there after {limit} s")
        time.sleep(interval)


def perfect(durations: list[float]) -> float:
    """The makespan of a perfect queue."""
    free = [0.0] * (WORKERS * PROCESSES)
    for seconds in durations:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


def one_at_a_time(broker: str, name: str) -> Iterator[Fleet]:
    """Only one fleet runs at any time: the other would take its processors."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(broker, name == "capacity", Path(directory))
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.stop()


def bench_wave(broker: str, waves: int) -> None:
    orders = []
    for seed in range(waves):
        durations = [LONG[1]] * LONG[0] + [SHORT[1]] * SHORT[0]
        random.Random(seed).shuffle(durations)
        orders.append(durations)
    ideal = sum(perfect(durations) for durations in orders)
    row(broker, "wave", "perfect queue", f"{ideal / waves:.3f} s", "1.00")
    for name in ("plain", "capacity"):
        for fleet in one_at_a_time(broker, name):
            results = [fleet.wave(durations) for durations in orders]
            makespan = sum(result[0] for result in results)
            short = statistics.fmean(result[1] for result in results)
            row(
                broker,
                "wave",
                name,
                f"{makespan / waves:.3f} s",
                f"{makespan / ideal:.3f}",
                f"short wait {short:.3f} s",
            )


def bench_ticks(broker: str, number: int, rounds: int) -> None:
    rates: dict[str, list[float]] = {"plain": [], "capacity": []}
    least: dict[str, dict[str, float]] = {name: {} for name in rates}
    for _ in range(rounds):
        for name in rates:
            for fleet in one_at_a_time(broker, name):
                before = fleet.processor_seconds()
                rates[name].append(number / fleet.ticks(number))
                for role, seconds in fleet.processor_seconds().items():
                    micros = (seconds - before[role]) / number * 1e6
                    least[name][role] = min(micros, least[name].get(role, micros))
    for name, values in rates.items():
        ratio = statistics.median(rate / plain for rate, plain in zip(values, rates["plain"], strict=True))
        every = " ".join(f"{rate:.0f}" for rate in values)
        row(broker, "ticks", name, f"{statistics.median(values):.0f}/s", f"{ratio:.2f}", every)
    for role, plain in least["plain"].items():
        micros = least["capacity"][role]
        row(broker, "ticks", f"cpu, {role}", f"{micros:.0f} us", f"{micros / plain:.2f}", f"plain {plain:.0f} us")


def bench_publish(broker: str, number: int) -> None:
    """No worker runs: it is the producer's time that is measured.  A registered name stands for the fleet."""
    import redis

    from celery_capacity import open_registry
    from celery_capacity.models import Advert
    from celery_capacity.naming import own_queue_name

    client = redis.Redis.from_url(REGISTRY)
    sha = client.script_load("return 1")
    with tempfile.TemporaryDirectory() as directory:
        plain, capacity = (Fleet(broker, plugin, Path(directory)) for plugin in (False, True))
        # Nobody takes them over; none must end during the measurement, which would be one more thing to do.
        capacity.app.conf.capacity_reservation_seconds = 3600.0
        registry = open_registry(REGISTRY, capacity.namespace)
        advert = Advert("w@bench", "bench", (capacity.namespace,), frozenset({"tick"}), 10**6, 600.0, 600.0)
        epoch = registry.register(advert)
        own = own_queue_name(capacity.namespace, "w@bench")
        with capacity.app.connection_for_write() as connection:
            connection.default_channel.queue_declare(own, durable=True, auto_delete=False)
        publish = plain.app.tasks["tick"].apply_async

        def no_op() -> None:
            client.evalsha(sha, 1, "{x}")

        def no_op_and_publish() -> None:
            no_op()
            publish()

        calls: dict[str, Callable[[], object]] = {
            "plain": publish,
            "capacity": capacity.app.tasks["tick"].apply_async,
            "plain and no-op": no_op_and_publish,
            "no-op alone": no_op,
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(number // 10):
            for name, call in calls.items():
                for _ in range(10):
                    started = time.perf_counter()
                    call()
                    taken[name].append(time.perf_counter() - started)
        registry.deregister("w@bench", epoch)
        registry.forget("w@bench", epoch)
        registry.close()
        for fleet, queues in ((plain, [plain.namespace]), (capacity, [capacity.namespace, own])):
            with fleet.app.connection_for_write() as connection:
                for queue in queues:
                    connection.default_channel.queue_delete(queue)
            fleet.app.close()
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, median in medians.items():
        row(broker, "publish", name, f"{median * 1e6:.0f} us")
    added = medians["capacity"] - medians["plain"]
    in_place = medians["plain and no-op"] - medians["plain"]
    row(broker, "publish", "no-op adds", f"{in_place * 1e6:.0f} us", "1.00")
    ratios = f"{added / in_place:.2f}", f"{added / medians['no-op alone']:.2f} of one alone"
    row(broker, "publish", "capacity adds", f"{added * 1e6:.0f} us", *ratios)


def row(*cells: str) -> None:
    widths = (10, 9, 17, 12, 8, 0)
    print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--broker", nargs="+", default=list(BROKERS), choices=list(BROKERS))
    parser.add_argument("--waves", type=int, default=6)
    parser.add_argument("--ticks", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--publishes", type=int, default=2000)
    parser.add_argument("--only", nargs="+", default=["wave", "ticks", "publish"])
    options = parser.parse_args()
    row("broker", "what", "how", "measured", "ratio")
    for broker in options.broker:
        if "wave" in options.only:
            bench_wave(broker, options.waves)
        if "ticks" in options.only:
            bench_ticks(broker, options.ticks, options.rounds)
        if "publish" in options.only:
            bench_publish(broker, options.publishes)


if __name__ == "__main__":
    main()
