"""Workers and slots for the tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

from celery_capacity.models import Advert, Demand, WorkerState
from celery_capacity.registry import Registry, Reservation

FOR_EVER = 1e6
Run = Callable[..., Result]


def advert(name: str, slots: int | None = 2, **fields: Any) -> Advert:
    queues = fields.pop("queues", ("q", f"capacity.default.{name}"))
    fields = {"lease_seconds": FOR_EVER, "lapse_seconds": FOR_EVER, "tasks": frozenset({"t"}), **fields}
    return Advert(name, fields.pop("node", name.partition("@")[2]), queues, capacity=slots, **fields)


def reserve(registry: Registry, count: int = 1, queue: str = "q") -> list[Reservation]:
    claims = [registry.select_and_reserve(Demand(queue, ttl_seconds=FOR_EVER)) for _ in range(count)]
    assert all(isinstance(claim, Reservation) for claim in claims)
    return claims  # type: ignore[return-value]


def state_of(registry: Registry, name: str) -> WorkerState:
    return next(view.state for view in registry.overview().workers if view.name == name)


def reasons(result: Result) -> dict[str, tuple[str | None, str]]:
    return {w["name"]: (w["reason"], w["why"]) for w in json.loads(result.stdout)["workers"]}
