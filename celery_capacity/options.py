"""What one call may say of its dispatch, beside Celery's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError

__all__ = ("OPTIONS", "CallOptions")

#: Options of a call that are the plugin's: taken out before the message is built.  They may be given in
#: ``apply_async``, in ``Signature.set``, in a value of ``task_routes``, or as attributes of the task.
OPTIONS = ("node", "prefer_node", "when_full")
POLICIES = ("park", "refuse")


@dataclass(frozen=True)
class CallOptions:
    """What was said, by the call or by the task; ``None`` = nothing."""

    #: Only a worker of this node.
    node: str | None = None
    #: A worker of this node if one has a free slot, else any.
    prefer_node: str | None = None
    when_full: str | None = None

    @classmethod
    def of(cls, task: Any, said: Mapping[str, Any]) -> CallOptions:
        """From what the call said; what it did not say, from the attributes of the task (or ``None``).

        :raises ConfigurationError: one of them makes no sense.
        """
        found = {option: said.get(option) for option in OPTIONS}
        if task is not None:
            for option in OPTIONS:
                own = getattr(task, option, None)
                # An attribute of that name that is no name of a node has another meaning in this app.
                if found[option] is None and (option == "when_full" or (isinstance(own, str) and own)):
                    found[option] = own
        for option in ("node", "prefer_node"):
            if found[option] is not None and (not isinstance(found[option], str) or not found[option]):
                raise ConfigurationError(option, found[option], "the name of a node, a non-empty string")
        if found["when_full"] is not None and found["when_full"] not in POLICIES:
            raise ConfigurationError("when_full", found["when_full"], " or ".join(map(repr, POLICIES)))
        return cls(**found)

    @property
    def kept(self) -> dict[str, str]:
        """What travels with the message, for whoever dispatches it again."""
        return {option: value for option in OPTIONS if (value := getattr(self, option)) is not None}
