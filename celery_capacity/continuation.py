"""Who publishes a task: a caller, who can be told no, or Celery, in the name of a task that has been admitted.

A retry, a replacement, the next task of a chain, a callback, the body of a chord and the poll of ``chord_unlock`` are
published by Celery inside a worker.  Nobody there can catch a refusal: Celery rejects a message whose retry could not
be published, and drops a chain whose next task could not.  So what has been admitted goes on, and parks if it must.

The message does not say which it is (a chain's next task looks like any other), and there is no signal between the
end of a task's code and its callbacks.  The stack does say it.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ("goes_on",)

_TRACE = "celery.app.trace"
#: What Celery's tracer calls itself, once the code of the task has ended.
_AFTERWARDS = (_TRACE, "celery.canvas", "celery.app.amqp", "celery.backends.")
#: What the code of a task calls for the task itself to go on.
_SELF = ("retry", "replace")


def goes_on() -> bool:
    """Whether the caller publishes for a task that has been admitted already.  Reads the stack: some microseconds."""
    frame: FrameType | None = sys._getframe(1)
    called = ("", "")
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module == "celery.app.task" and name in _SELF:
            return True
        if module == _TRACE and name == "trace_task":
            return called[0].startswith(_AFTERWARDS) or called == ("celery.app.builtins", "unlock_chord")
        called, frame = (module, name), frame.f_back
    return False
