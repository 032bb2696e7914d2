"""``python -m soak --minutes 30 --broker redis``, with ``tests`` on the path.  0 if nothing was wrong."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from support.sampling import Sampler

from .faults import FAULTS, inject
from .load import Load
from .verdict import Verdict, open_tasks, settle
from .world import Fault, World

#: Generous: a machine that others use, too, heals slowly.  What is measured is printed.
_HEAL_LIMIT_SECONDS = 180.0
_SETTLE_LIMIT_SECONDS = 120.0


def main() -> int:
    """Run, print, and say whether it was clean."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of the load")
    parser.add_argument("--per-second", type=float, default=8.0, help="tasks and chains that are sent")
    parser.add_argument("--only", default=None, help="of the faults, those whose names have this in them")
    parser.add_argument("--keep", type=Path, default=None, help="a directory for logs and journal")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"soak: {options.minutes:g} minutes on {options.broker}, seed {seed}", flush=True)
    if options.keep is not None:
        # A journal and logs of an earlier run would be taken for this one's.
        options.keep.mkdir(parents=True)
        return _soak(options, seed, options.keep)
    with tempfile.TemporaryDirectory(prefix="capacity-soak-") as directory:
        return _soak(options, seed, Path(directory))


def _soak(options: argparse.Namespace, seed: int, directory: Path) -> int:
    world = World(directory, options.broker)
    try:
        rng = random.Random(seed)
        sampler = Sampler(world.fleet.registry)
        last_open = [0]
        load = Load(world.producer(), seed, options.per_second, lambda: last_open[0])
        faults = [(fault, often) for fault, often in FAULTS if (options.only or "") in fault.__name__]
        began = time.monotonic()
        sampler.start()
        load.start()
        failure = None
        while time.monotonic() - began < options.minutes * 60:
            last_open[0] = len(open_tasks(world, load))
            (chosen,) = rng.choices([fault for fault, _ in faults], [often for _, often in faults])
            try:
                fault = inject(world, rng, load.sent, chosen)
                world.wait_whole(_HEAL_LIMIT_SECONDS)
            except AssertionError as exc:
                failure = f"after {chosen.__name__}: {exc}"
                break
            fault.healed = time.monotonic()
            print(
                f"{fault.began - began:7.1f} s  {fault.what:18} {fault.whom:10} lasted {fault.undone - fault.began:5.1f} s,"
                f" whole after {fault.seconds:5.1f} s; {len(load.sent)} sent, {last_open[0]} open",
                flush=True,
            )
            time.sleep(rng.uniform(0.5, 3.0))
        load.end()
        world.revive()
        settle(world, load, _SETTLE_LIMIT_SECONDS)
        sampler.stop()
        verdict = Verdict(world, load, sampler)
        if failure is not None:
            verdict.violations.append(failure)
        verdict.reach()
        _print(world, load, sampler, verdict, time.monotonic() - began)
        return 1 if verdict.violations else 0
    finally:
        world.close()


def _print(world: World, load: Load, sampler: Sampler, verdict: Verdict, seconds: float) -> None:
    print(f"\n{seconds:.0f} s, {len(world.faults)} faults:")
    by_name: dict[str, list[Fault]] = defaultdict(list)
    for fault in world.faults:
        by_name[fault.what].append(fault)
    for name, faults in sorted(by_name.items()):
        healed = sorted(fault.seconds for fault in faults if fault.healed)
        took = f"whole after {healed[len(healed) // 2]:.1f} s (most {healed[-1]:.1f} s)" if healed else "never healed"
        print(f"  {name:18} {len(faults):4} times, {took}")
    runs = world.fleet.journal.runs()
    print(
        f"{len(load.sent)} sent ({sum(one.late for one in load.sent)} late), {len(runs)} runs,"
        f" {verdict.again} of them once more; {sum(one.unsure for one in load.sent)} publishes failed;"
        f" {sampler.samples} samples, {sampler.unanswered} unanswered"
    )
    print(f"lost with the process that ran them, which early acknowledgement allows: {len(verdict.lost)}")
    for key, why in verdict.lost.items():
        print(f"  {key}: {why}")
    print(f"workers that ended by themselves and were started anew: {len(world.ended)}")
    for ended in world.ended:
        print(f"  {ended[:200]}")
    print("counters:")
    for name, count in dict(world.fleet.registry.overview().counters).items():
        print(f"  {name:24} {count}")
    print(f"{len(verdict.violations)} violations")
    for violation in verdict.violations[:50]:
        print(f"  {violation}")


if __name__ == "__main__":
    sys.exit(main())
