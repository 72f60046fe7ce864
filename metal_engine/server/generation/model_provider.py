"""Models of a server: one permanent model, or several models that are loaded and unloaded. Used by the routes."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_engine.answers.answer_format import AnswerFormat
from metal_engine.engine.async_engine import AsyncEngine
from metal_engine.errors import ConfigError, LoadCancelledError, ModelLoadError, ModelTooLargeError
from metal_engine.model_pool.model_entry import LoadedEngine, ModelEntry
from metal_engine.model_pool.registry import ModelRegistry, RegistryClosedError
from metal_engine.server.errors import APIError, model_not_found, shutting_down, unavailable
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.preparation import ServedModel, own_name
from metal_engine.server.generation.queue_limit import QueueLimit, overloaded
from metal_engine.server.logs import UniqueWarnings
from metal_engine.server.workers import Workers
from metal_engine.settings.server_args import ANY_NAME, ServerArgs

# Keys in the ASGI scope of a request: the models that it uses, and the name of its model, which metrics need.
_LEASES = "metal_engine.leases"
MODEL_NAME = "metal_engine.model_name"


def served_model(
    engine: AsyncEngine,
    names: Sequence[str],
    args: ServerArgs,
    answer_format: AnswerFormat,
    workers: Workers,
    parameters: ParameterPolicy,
    warnings: UniqueWarnings | None = None,
) -> ServedModel:
    """Return a loaded model with the settings for serving it.

    Args:
        names: names of the model in the API, in the format of :func:`metal_engine.server.app.create_app`.
        warnings: log of warnings about requests to the model; None for a new one.
    """
    own_names = tuple(name for name in names if name != ANY_NAME) or (engine.config.model.name,)
    return ServedModel(
        engine,
        own_names,
        parameters,
        answer_format,
        QueueLimit(engine, args.max_num_queued_reqs, args.max_num_queued_tokens, args.request_timeout),
        workers,
        auto_tool_choice=args.enable_auto_tool_choice,
        tool_grammar=args.tool_grammar,
        any_name=ANY_NAME in names,
        allowed_media_domains=args.allowed_media_domains,
        warnings=warnings or UniqueWarnings(),
    )


class ModelProvider(ABC):
    """Interface to the models of a server.

    Attributes:
        workers: threads that all models share.
        parameters: policy about unknown parameters for all models.
    """

    workers: Workers
    parameters: ParameterPolicy

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the models. A request without a model uses the first one."""

    @property
    def all_names(self) -> Sequence[str]:
        """Names of the models and of their LoRA adapters."""
        return self.names

    @property
    @abstractmethod
    def loaded(self) -> Sequence[ServedModel]:
        """Loaded models."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """Error that ended the engine of the only model; None while the engine runs or restarts.

        Always None with several models.
        """

    @property
    @abstractmethod
    def is_restarting(self) -> bool:
        """True if the engine of the only model has ended and a new engine is being started. Requests wait meanwhile.

        Always False with several models. Valid only while :attr:`error` is None.
        """

    @abstractmethod
    def check(self, model: str | None) -> None:
        """Raise APIError, a 404, if no model or LoRA adapter has this name. None names the first model."""

    @abstractmethod
    def is_ready(self, model: str | None) -> bool:
        """Return True if :meth:`use` would return the model at once. After a failed load, the result is False.

        Raises as :meth:`check`. Also raises APIError, a 503, if too many requests wait for the model already.
        """

    @abstractmethod
    def find_loaded(self, model: str | None) -> ServedModel | None:
        """Return the model; None if it is not loaded.

        Use the result only to read the model's state, not for requests. Raises as :meth:`check`.
        """

    @abstractmethod
    async def use(self, request: Request, model: str | None) -> ServedModel:
        """Return the model that a request names. Load the model if necessary. It stays loaded during the request.

        If the name is a LoRA adapter's, return its model with the adapter.

        Raises:
            APIError: status 404 if no model has that name. Status 400 if the model is too large. Status 503 if the load
                is cancelled, or if too many requests wait for the load. Status 504 if the load takes too long. Status
                500 for any other failed load.
        """

    @contextmanager
    def detached(self, request: Request, model: str | None) -> Iterator[Request]:
        """Yield a copy of ``request`` for work that may continue after the response was sent.

        Models that the work uses through the copy stay loaded until the context ends. With several models, this method
        raises as :meth:`check` for an unknown name. With one model, it does not check the name.

        Args:
            model: name of the model that the request uses.
        """
        yield Request(dict(request.scope))

    @abstractmethod
    def cut_requests(self, message: str) -> None:
        """End every current and future request with an error that has this message."""

    @abstractmethod
    def release_memory(self, idle_seconds: float) -> None:
        """Free memory of idle models, because the machine lacks memory.

        The only model of a server frees its KV cache. If the server has several models, the idle models are unloaded.

        Args:
            idle_seconds: minimum time since the last request of a model in seconds.
        """


class SingleModel(ModelProvider):
    """Provider of the only model of a server."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.workers = served.workers
        self.parameters = served.parameters

    @property
    def names(self) -> tuple[str, ...]:
        return self.served.names

    @property
    def all_names(self) -> Sequence[str]:
        return self.served.all_names

    @property
    def loaded(self) -> Sequence[ServedModel]:
        return (self.served,)

    @property
    def error(self) -> BaseException | None:
        return self.served.engine.error

    @property
    def is_restarting(self) -> bool:
        return self.served.engine.is_restarting

    def check(self, model: str | None) -> None:
        self.served.resolve(model)

    def is_ready(self, model: str | None) -> bool:
        self.served.resolve(model)
        return True

    def find_loaded(self, model: str | None) -> ServedModel | None:
        self.served.resolve(model)
        return self.served

    async def use(self, request: Request, model: str | None) -> ServedModel:
        return self.served.resolve(model)

    def cut_requests(self, message: str) -> None:
        self.served.engine.cut_requests(message)

    def release_memory(self, idle_seconds: float) -> None:
        engine = self.served.engine
        if not engine.num_open_requests and time.monotonic() - engine.last_used >= idle_seconds:
            engine.release_memory()


class MultiModel(ModelProvider):
    """Provider of the models of a :class:`ModelRegistry`, which are loaded and unloaded."""

    def __init__(self, registry: ModelRegistry, args: ServerArgs, workers: Workers) -> None:
        self.registry = registry
        self.workers = workers
        self.parameters = ParameterPolicy(strict=args.strict_params)
        self._args = args
        self._warnings: dict[str, UniqueWarnings] = {}
        # Weak keys: entries of unloaded models disappear.
        self._served: WeakKeyDictionary[LoadedEngine, ServedModel] = WeakKeyDictionary()

    @property
    def names(self) -> tuple[str, ...]:
        return self.registry.names

    @property
    def loaded(self) -> Sequence[ServedModel]:
        return [served for entry in self.registry.entries if (served := self.served(entry)) is not None]

    @property
    def error(self) -> BaseException | None:
        return None  # a model that fails does not affect the others

    @property
    def is_restarting(self) -> bool:
        return False

    def check(self, model: str | None) -> None:
        self.entry(model)

    def entry(self, model: str | None) -> ModelEntry:
        """Return the entry of the model with this name. Raises APIError, a 404, for an unknown name."""
        names = self.registry.names
        name = names[0] if model is None and names else own_name(names, model or "")
        found = self.registry.find(name)
        if found is None:
            raise model_not_found(name, names)
        return found

    def is_ready(self, model: str | None) -> bool:
        entry = self.entry(model)
        if self.registry.is_ready(entry):
            return True
        most = self._args.max_num_queued_reqs
        if most and entry.num_waiting >= most:
            waiting = f"{entry.num_waiting} requests are waiting for {entry.name} to be loaded"
            raise overloaded(f"{waiting} (--max-num-queued-reqs)")
        return False

    def served(self, entry: ModelEntry) -> ServedModel | None:
        """Return the model of an entry; None if it is not loaded."""
        return None if entry.loaded_engine is None else self._of(entry, entry.loaded_engine)

    def find_loaded(self, model: str | None) -> ServedModel | None:
        return self.served(self.entry(model))

    async def use(self, request: Request, model: str | None) -> ServedModel:
        entry = self.entry(model)
        leases: list[ModelEntry] = request.scope[_LEASES]
        if entry in leases:
            assert entry.loaded_engine is not None  # a leased model is not unloaded
            return self._of(entry, entry.loaded_engine)
        request.scope[MODEL_NAME] = entry.name
        self.is_ready(model)
        async with self._in_time(entry, "loaded"):
            loaded = await self.registry.use(entry)
        leases.append(entry)
        return self._of(entry, loaded)

    async def load(self, entry: ModelEntry) -> None:
        """Load a model without using it. The limits on waiting requests and on time apply. Raises as :meth:`use`."""
        self.is_ready(entry.name)
        async with self._in_time(entry, "loaded"):
            await self.registry.load(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Unload a model after its requests have ended.

        Raises APIError, a 504, if the requests take too long. Even then, the model is unloaded when they have ended.
        """
        async with self._in_time(entry, "unloaded"):
            await self.registry.unload(entry)

    @asynccontextmanager
    async def _in_time(self, entry: ModelEntry, done: str) -> AsyncIterator[None]:
        """Within this context, convert errors of loading, and raise APIError, a 504, after ``--request-timeout``.

        Args:
            done: participle for the message: ``loaded`` or ``unloaded``.
        """
        seconds = self._args.request_timeout
        try:
            with load_errors_as_api_errors():
                async with asyncio.timeout(seconds or None):
                    yield
        except TimeoutError as error:
            message = f"{entry.name} was not {done} within {seconds:g} s (--request-timeout)"
            raise APIError(504, message, code="timeout") from error

    @contextmanager
    def detached(self, request: Request, model: str | None) -> Iterator[Request]:
        leases: list[ModelEntry] = []
        request.scope[MODEL_NAME] = self.entry(model).name
        try:
            yield Request({**request.scope, _LEASES: leases})
        finally:
            self._release(leases)

    def _release(self, leases: list[ModelEntry]) -> None:
        for entry in leases:
            self.registry.release(entry)

    def leasing(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app``: keep the models that a request uses loaded until its response is complete."""

        async def leased(scope: Scope, receive: Receive, send: Send) -> None:
            leases: list[ModelEntry] = []
            scope[_LEASES] = leases
            try:
                await app(scope, receive, send)
            finally:
                self._release(leases)

        return leased

    def cut_requests(self, message: str) -> None:
        self.registry.cut(message)

    def release_memory(self, idle_seconds: float) -> None:
        self.registry.unload_idle(idle_seconds)

    def _of(self, entry: ModelEntry, loaded: LoadedEngine) -> ServedModel:
        served = self._served.get(loaded)
        if served is None:
            warnings = self._warnings.setdefault(entry.name, UniqueWarnings())
            served = self._served[loaded] = served_model(
                loaded.engine, (entry.name,), self._args, loaded.answer_format, self.workers, self.parameters, warnings
            )
        return served


@contextmanager
def load_errors_as_api_errors() -> Iterator[None]:
    """Within this context, convert errors of loading a model to an APIError.

    A model that is too large gives status 400. A cancelled load or a shutdown gives 503. Any other failed load gives
    500.
    """
    try:
        yield
    except ModelTooLargeError as error:
        raise APIError(400, str(error), param="model", code="model_too_large") from error
    except LoadCancelledError as error:
        raise unavailable(str(error), code="model_unloaded", param="model") from error
    except (ModelLoadError, ConfigError) as error:
        raise APIError(500, str(error), param="model", code="model_load_failed") from error
    except RegistryClosedError as error:
        raise shutting_down() from error
