"""Routes of vLLM that load and unload LoRA adapters while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from metal_engine.errors import AdapterError
from metal_engine.server.errors import APIError, invalid
from metal_engine.server.generation.preparation import ServedModel
from metal_engine.server.workers import Weight
from metal_engine.settings.lora_args import MAX_NAME

_MAX_PATH = 4096


class LoadLoRABody(BaseModel):
    """Body of ``POST /v1/load_lora_adapter``. ``lora_path`` is a path below --lora-dir."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_path: str = Field(min_length=1, max_length=_MAX_PATH)
    load_inplace: bool = False


class UnloadLoRABody(BaseModel):
    """Body of ``POST /v1/unload_lora_adapter``. ``lora_int_id`` has no effect."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_int_id: int | None = None


def add_lora_routes(app: FastAPI, served: ServedModel, lora_dir: Path) -> None:
    """Add routes with which clients load adapters from folders below ``lora_dir``, and unload adapters.

    Loads run one at a time. A load goes on if its client disconnects.
    """
    one_at_a_time = asyncio.Lock()

    @app.post("/v1/load_lora_adapter", tags=["models"], response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadLoRABody) -> str:
        if body.lora_name in served.names:
            raise invalid(f" {body.lora_name!r} is the model's own name", where="lora_name")

        def load() -> None:
            served.engine.load_adapter(body.lora_name, body.lora_path, lora_dir, in_place=body.load_inplace)

        try:
            await one_at_a_time.acquire()
            loading = asyncio.ensure_future(served.workers.run(Weight.HEAVY, load))
            loading.add_done_callback(lambda _: one_at_a_time.release())
            await asyncio.shield(loading)  # if the client disconnects, the load goes on and keeps the lock
        except AdapterError as error:
            raise invalid(str(error), param=error.param) from error
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @app.post("/v1/unload_lora_adapter", tags=["models"], response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadLoRABody) -> str:
        adapters = served.engine.adapters
        if adapters is None or not adapters.unload(body.lora_name):
            message = f"The lora adapter '{body.lora_name}' cannot be found."
            raise APIError(404, message, param="lora_name", code="model_not_found")
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
