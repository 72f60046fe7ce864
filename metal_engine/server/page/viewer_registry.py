"""Those who look at each model: one that is unloaded is looked at by nobody any more."""

from __future__ import annotations

from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.model_pool.model_entry import LoadedEngine
from metal_engine.server.errors import model_not_loaded
from metal_engine.server.generation.models import Models, MultiModel
from metal_engine.server.page.viewers import Viewers


class ViewerRegistry:
    """The viewers of each loaded model. Belongs to the event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._viewers: dict[AsyncEngine, Viewers] = {}
        if isinstance(models, MultiModel):
            models.registry.at_unload.append(self._unloaded)

    def of(self, model: str | None) -> Viewers:
        """Those who look at a model; without a name, at the first that is loaded.

        Raises:
            APIError: 404 for a name that no model has, 503 if the model is not loaded: to look at it loads nothing.
        """
        loaded = self._models.loaded
        served = self._models.find_loaded(model) if model is not None else loaded[0] if loaded else None
        if served is None:
            raise model_not_loaded()
        if served.engine not in self._viewers:
            self._viewers[served.engine] = Viewers(served.engine, served.names)
        return self._viewers[served.engine]

    def close(self) -> None:
        """End all streams."""
        for viewers in self._viewers.values():
            viewers.close()

    def _unloaded(self, running: LoadedEngine) -> None:
        viewers = self._viewers.pop(running.engine, None)
        if viewers is not None:
            viewers.close()
