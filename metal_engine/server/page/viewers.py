"""Viewers of the engine's activity.

Each viewer has a separate stream of events, and cannot delay the engine or other viewers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.engine.step_observer import Frame
from metal_engine.model_pool.model_entry import LoadedEngine
from metal_engine.server.errors import APIError, model_not_loaded, shutting_down, unavailable
from metal_engine.server.generation.model_provider import ModelProvider, MultiModel
from metal_engine.server.generation.streaming import sse
from metal_engine.server.page.events import event, frame_data, piece_data, snapshot, stats
from metal_engine.server.page.pool_mirror import PoolMirror

MAX_VIEWERS = 16
# Maximum number and total bytes of a viewer's unread events. A viewer that exceeds a limit gets a new snapshot later.
MAX_UNREAD = 64
MAX_UNREAD_BYTES = 1 << 20


class Viewer:
    """Queue of unread events of one viewer.

    Attributes:
        must_begin: True if the viewer needs a snapshot, because it is new or was too slow.
    """

    def __init__(self) -> None:
        self.must_begin = True
        self._unread: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_more = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Append an event. If the queue is full, drop all events and request a new snapshot.

        If :attr:`must_begin` is True, the event is dropped, because the coming snapshot includes its change.
        """
        if not self.must_begin:
            self._unread.append(data)
            self._num_bytes += len(data)
            if len(self._unread) > MAX_UNREAD or self._num_bytes > MAX_UNREAD_BYTES:
                self.begin_again()
        self._has_more.set()

    def begin_again(self) -> None:
        """Drop all unread events and request a new snapshot."""
        self.must_begin = True
        self._unread.clear()
        self._num_bytes = 0
        self._has_more.set()

    async def wait(self) -> None:
        """Wait until there are events, or a snapshot is needed."""
        await self._has_more.wait()

    def take(self) -> bytes:
        """Remove all unread events. Return them as one byte string, which may be empty."""
        data = b"".join(self._unread)
        self._unread.clear()
        self._num_bytes = 0
        self._has_more.clear()
        return data


class Viewers:
    """Distributes a model's frames to its viewers. The engine creates frames only while there are viewers.

    Must be used in the event loop's thread.

    Args:
        names: names of the model in the API.
    """

    def __init__(self, engine: AsyncEngine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._viewers: set[Viewer] = set()
        self._mirror = PoolMirror(0)
        self._num_watches = 0
        self._closed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._viewers)

    def check_capacity(self) -> None:
        """Raise APIError, a 503, if the number of viewers is at its limit."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise unavailable(f"{MAX_VIEWERS} viewers are connected already", retry_after=10)

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        for viewer in self._viewers:
            viewer.begin_again()

    async def events(self, seconds: float | None = None) -> AsyncGenerator[bytes, None]:
        """Add a viewer and yield its events: a snapshot, then frames.

        Ends after ``seconds``, if given, or after :meth:`close`. If there are ``MAX_VIEWERS`` already, the only event
        is an error.
        """
        try:
            self.check_capacity()
        except APIError as error:  # other clients took the last place in the meantime
            yield sse(error.body)
            return
        viewer = self._join()
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        try:
            while not self._closed.is_set():
                if viewer.must_begin:
                    async for piece in self._snapshot(viewer):
                        yield piece
                try:
                    async with asyncio.timeout_at(end):
                        await viewer.wait()
                except TimeoutError:
                    return
                if data := viewer.take():
                    yield data
                if end is not None and loop.time() >= end:  # `wait` does not time out while there are unread events
                    return
        finally:
            self._leave(viewer)

    async def _snapshot(self, viewer: Viewer) -> AsyncGenerator[bytes, None]:
        """Drop the viewer's unread events, and yield the events that describe the current state.

        Later frames stay in the viewer's queue until the snapshot is complete.
        """
        viewer.take()
        viewer.must_begin = False
        mirror = self._mirror
        pieces, is_whole = list(mirror.pieces()), mirror.is_whole
        yield event("snapshot", snapshot(self._engine, self._names, list(mirror.requests.values())))
        for i, (tables, cached) in enumerate(pieces, start=1):
            yield event("frame", piece_data(tables, cached, is_whole and i == len(pieces)))
            await asyncio.sleep(0)

    def _join(self) -> Viewer:
        if not self._viewers:
            self._num_watches += 1
            self._mirror = PoolMirror(self._engine.config.cache.num_blocks)
            self._engine.watch(partial(self._on_frame, self._num_watches))
        viewer = Viewer()
        self._viewers.add(viewer)
        return viewer

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self._engine.unwatch()
            self._mirror = PoolMirror(0)

    def _on_frame(self, watch: int, frame: Frame) -> None:
        if not self._viewers or watch != self._num_watches:
            return  # frame was in flight when the last viewer left
        self._mirror.apply(frame)
        if frame.forget:
            for viewer in self._viewers:
                viewer.begin_again()
            return
        data = event("frame", frame_data(frame, stats(self._engine)))
        for viewer in self._viewers:
            viewer.put(data)


class ViewerRegistry:
    """Viewers of each loaded model. Unloading a model ends the streams of its viewers.

    Must be used in the event loop's thread.
    """

    def __init__(self, models: ModelProvider) -> None:
        self._models = models
        self._viewers: dict[AsyncEngine, Viewers] = {}
        self._is_closed = False
        if isinstance(models, MultiModel):
            models.registry.at_unload.append(self._close_viewers)

    def of(self, model: str | None) -> Viewers:
        """Return the viewers of a model. Without a name, the first loaded model is used.

        Raises:
            APIError: status 404 for an unknown model; 503 if the model is not loaded, because viewing does not load it;
                503 if the server is about to end.
        """
        loaded = self._models.loaded
        served = self._models.find_loaded(model) if model is not None else loaded[0] if loaded else None
        if served is None:
            raise model_not_loaded()
        if served.engine not in self._viewers:
            if self._is_closed:
                raise shutting_down()
            self._viewers[served.engine] = Viewers(served.engine, served.names)
        return self._viewers[served.engine]

    def close(self) -> None:
        """End all streams. Afterwards, :meth:`of` raises for a model that has had no viewers."""
        self._is_closed = True
        for viewers in self._viewers.values():
            viewers.close()

    def _close_viewers(self, loaded: LoadedEngine) -> None:
        viewers = self._viewers.pop(loaded.engine, None)
        if viewers is not None:
            viewers.close()
