"""Kombu's filesystem transport, with messages that are seen whole or not at all.

Kombu creates the file under its final name and writes into it afterwards, and nothing keeps a worker from
fetching it in between: with workers that look 50 times a second, six messages in a thousand were read empty and
so lost.  And it takes a message by moving its file to the system's temporary folder, which is no single step
if that is another filesystem.  Here both are one rename within the folder.  The format is Kombu's, so other
producers and workers may use ``filesystem://`` as it comes.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from queue import Empty
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps, loads

__all__ = ("Channel", "Transport")


class Channel(filesystem.Channel):  # type: ignore[misc]
    """Writes and takes each message in one step."""

    def _put(self, queue: str, payload: Any, **_kwargs: Any) -> None:
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        # Readers look at what follows the first dot, so they pass over a name that begins with one.
        draft = os.path.join(self.data_folder_out, f".{name}")
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(dumps(payload))
            os.rename(draft, os.path.join(self.data_folder_out, name))
        except OSError as exc:
            raise ChannelError(f"Cannot add file {name!r} to directory") from exc

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        name = f"{exchange}.exchange"
        file = os.path.join(self.control_folder, name)
        # A name that leads elsewhere is for Kombu to refuse.
        if os.path.basename(name) == name and not os.path.exists(file):
            os.makedirs(self.control_folder, exist_ok=True)
            draft = os.path.join(self.control_folder, f".{uuid.uuid4()}")
            with open(draft, "w", encoding="utf-8") as empty:
                empty.write("[]")
            # Kombu empties the file of another worker that begins at the same time, or reads it before it is written.
            with suppress(FileExistsError):
                os.link(draft, file)
            os.remove(draft)
        super()._queue_bind(exchange, routing_key, pattern, queue)

    def _get(self, queue: str) -> Any:
        if self.store_processed:
            return super()._get(queue)
        folder = self.data_folder_in
        for name in sorted(os.listdir(folder)):
            if name.partition(".")[2] != f"{queue}.msg":
                continue
            taken = os.path.join(folder, f".{name}")
            try:
                os.rename(os.path.join(folder, name), taken)
            except OSError:
                continue  # another worker was quicker
            try:
                with open(taken, encoding="utf-8") as file:
                    payload = file.read()
                os.remove(taken)
            except OSError as exc:
                raise ChannelError(f"Cannot read file {taken!r} from queue.") from exc
            return loads(payload)
        raise Empty


class Transport(filesystem.Transport):  # type: ignore[misc]
    """What ``filesystem://`` means for an app with the plugin."""

    Channel = Channel
