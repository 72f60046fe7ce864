"""The models that a server has, as its routes see them: one that is there for good, or several that come and go."""

from __future__ import annotations

import asyncio
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
from metal_engine.server.errors import APIError, model_not_found, shutting_down
from metal_engine.server.generation.admission import RETRY_AFTER_SECONDS, Admission, overloaded
from metal_engine.server.generation.log_once import Notices
from metal_engine.server.generation.parameters import ParameterPolicy
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.workers import Workers
from metal_engine.settings.args import ANY_NAME, ServerArgs

# In the ASGI scope of a request: the models that it uses, and the one that it asked for, for whoever counts requests.
_LEASES = "metal_engine.leases"
MODEL_NAME = "metal_engine.model_name"


def served_model(
    engine: AsyncEngine,
    names: Sequence[str],
    args: ServerArgs,
    answer_format: AnswerFormat,
    workers: Workers,
    parameters: ParameterPolicy,
    notices: Notices | None = None,
) -> ServedModel:
    """A model that is loaded, as the settings want it to be served. Names are as :func:`create_app` takes them."""
    own_names = tuple(name for name in names if name != ANY_NAME) or (engine.config.model.name,)
    return ServedModel(
        engine,
        own_names,
        parameters,
        answer_format,
        Admission(engine, args.max_num_queued_reqs, args.max_num_queued_tokens, args.request_timeout),
        workers,
        auto_tool_choice=args.enable_auto_tool_choice,
        any_name=ANY_NAME in names,
        notices=notices or Notices(),
    )


class Models(ABC):
    """What a server has to answer with.

    Attributes:
        workers: threads for all of them.
        parameters: the policy about parameters, for all of them.
    """

    workers: Workers
    parameters: ParameterPolicy

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What models are called; the first is meant where a request names none."""

    @property
    def all_names(self) -> Sequence[str]:
        """These, and those of adapters."""
        return self.names

    @property
    @abstractmethod
    def loaded(self) -> Sequence[ServedModel]:
        """Those that are loaded."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """What ended the server's ability to answer; None while it can."""

    @abstractmethod
    def check(self, model: str | None) -> None:
        """Raises APIError, a 404, for a name that no model has."""

    @abstractmethod
    def is_ready(self, model: str | None) -> bool:
        """Whether :meth:`use` would not have to wait. Raises as :meth:`check`, and a 503 if it may not wait."""

    @abstractmethod
    def find_loaded(self, model: str | None) -> ServedModel | None:
        """A model if it is loaded; for looking at it, not for using it. Raises as :meth:`check`."""

    @abstractmethod
    async def use(self, request: Request, model: str | None) -> ServedModel:
        """The model that a request names, with the adapter that it names, for as long as the request is served.

        Raises:
            APIError: no model has that name; or it cannot be loaded.
        """

    @abstractmethod
    def cut_requests(self, message: str) -> None:
        """End every request, now and from now on."""


class SingleModel(Models):
    """A server's only model."""

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


class MultiModel(Models):
    """Models of a registry."""

    def __init__(self, registry: ModelRegistry, args: ServerArgs, workers: Workers) -> None:
        self.registry = registry
        self.workers = workers
        self.parameters = ParameterPolicy(strict=args.strict_params)
        self._args = args
        self._notices: dict[str, Notices] = {}
        # What is unloaded is forgotten by itself.
        self._served: WeakKeyDictionary[LoadedEngine, ServedModel] = WeakKeyDictionary()

    @property
    def names(self) -> tuple[str, ...]:
        return self.registry.names

    @property
    def loaded(self) -> Sequence[ServedModel]:
        return [served for entry in self.registry.entries if (served := self.served(entry)) is not None]

    @property
    def error(self) -> BaseException | None:
        return None  # a model that fails takes nobody with it

    def check(self, model: str | None) -> None:
        self.entry(model)

    def entry(self, model: str | None) -> ModelEntry:
        """The model of a name. Raises APIError, a 404, if there is none."""
        names = self.registry.names
        name = names[0] if model is None and names else model or ""
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
        """A model if it is loaded."""
        return None if entry.running is None else self._of(entry, entry.running)

    def find_loaded(self, model: str | None) -> ServedModel | None:
        return self.served(self.entry(model))

    async def use(self, request: Request, model: str | None) -> ServedModel:
        entry = self.entry(model)
        leases: list[ModelEntry] = request.scope[_LEASES]
        if entry in leases:
            assert entry.running is not None  # it stays as long as it is leased
            return self._of(entry, entry.running)
        request.scope[MODEL_NAME] = entry.name
        self.is_ready(model)
        async with self._in_time(entry, "loaded"):
            running = await self.registry.use(entry)
        leases.append(entry)
        return self._of(entry, running)

    async def load(self, entry: ModelEntry) -> None:
        """Have a model loaded, within the limits on requests. Raises as :meth:`use`."""
        self.is_ready(entry.name)
        async with self._in_time(entry, "loaded"):
            await self.registry.load(entry)

    async def unload(self, entry: ModelEntry) -> None:
        """Have a model unloaded. Raises APIError, a 504, if its requests go on for too long; it goes after them."""
        async with self._in_time(entry, "unloaded"):
            await self.registry.unload(entry)

    @asynccontextmanager
    async def _in_time(self, entry: ModelEntry, done: str) -> AsyncIterator[None]:
        seconds = self._args.request_timeout
        try:
            with load_errors_as_api_errors():
                async with asyncio.timeout(seconds or None):
                    yield
        except TimeoutError as error:
            message = f"{entry.name} was not {done} within {seconds:g} s (--request-timeout)"
            raise APIError(504, message, code="timeout") from error

    def leasing(self, app: ASGIApp) -> ASGIApp:
        """``app``, with the models that a request uses held until it has been answered."""

        async def leased(scope: Scope, receive: Receive, send: Send) -> None:
            leases: list[ModelEntry] = []
            scope[_LEASES] = leases
            try:
                await app(scope, receive, send)
            finally:
                for entry in leases:
                    self.registry.release(entry)

        return leased

    def cut_requests(self, message: str) -> None:
        self.registry.cut(message)

    def _of(self, entry: ModelEntry, running: LoadedEngine) -> ServedModel:
        served = self._served.get(running)
        if served is None:
            notices = self._notices.setdefault(entry.name, Notices())
            served = self._served[running] = served_model(
                running.engine, (entry.name,), self._args, running.answer_format, self.workers, self.parameters, notices
            )
        return served


@contextmanager
def load_errors_as_api_errors() -> Iterator[None]:
    """Within it, what a model cannot be loaded for is told as an APIError."""
    try:
        yield
    except ModelTooLargeError as error:
        raise APIError(400, str(error), param="model", code="model_too_large") from error
    except LoadCancelledError as error:
        headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
        raise APIError(503, str(error), param="model", code="model_unloaded", headers=headers) from error
    except (ModelLoadError, ConfigError) as error:
        raise APIError(500, str(error), param="model", code="model_load_failed") from error
    except RegistryClosedError as error:
        raise shutting_down() from error
