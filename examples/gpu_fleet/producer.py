"""Pins, queues of one node, and a refusal that says why."""

from app import calibrate, infer, train

from celery_capacity import CapacityExhausted


def show(what: str, results: list) -> None:
    """Which workers ran them."""
    print(f"{what}: {', '.join(sorted(result.get(timeout=30) for result in results))}")


# One per node, in turn.
show("2 anywhere", [infer.delay() for _ in range(2)])
# Pinned by the call, by the signature, and by the task.
show("2 pinned to gpu1", [infer.apply_async(node="gpu1"), infer.s().set(node="gpu1").apply_async()])
show("1 calibration", [calibrate.delay()])
# A queue that one node alone serves.  More than it has slots: they wait.
show("3 on the data of gpu1", [train.apply_async((0.2,), queue="train-gpu1") for _ in range(3)])

waiting = [infer.apply_async((2,), node="gpu1") for _ in range(2)]
for node in ("gpu1", "gpu3"):
    try:
        infer.apply_async(node=node)
    except CapacityExhausted as exc:
        print(exc)
show("meanwhile, on gpu2", [infer.apply_async(node="gpu2")])
show("and then, on gpu1", waiting)
