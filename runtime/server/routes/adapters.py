"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: adapters come and go while requests run, as in vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from qserve.checkpoint.errors import UsageError
from qserve.runtime.sampling import RequestError
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.authentication import require_admin
from qserve.runtime.server.openai.openapi import described
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.openai.strict import NotDone, Strict
from qserve.runtime.server.service import Service


class LoadRequest(Strict):
    """``load_inplace``: the name may be taken; requests that have begun with the other adapter end with it."""

    not_done: ClassVar[NotDone] = {"base_model_name": (), "is_3d_lora_weight": (False,)}

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None


class UnloadRequest(Strict):
    lora_name: str = Field(min_length=1, max_length=200)
    lora_int_id: int | None = None


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", **described(LoadRequest))
    async def load(request: Request) -> Response:
        require_admin(request)
        body = parse(LoadRequest, await service.body(request))
        path = _allowed(service.config.lora_dir, body.lora_path)
        try:
            service.check_adapter_name(body.lora_name)
        except UsageError as error:
            raise RequestError(str(error), "lora_name") from None
        await service.engine.load_adapter(body.lora_name, str(path), replace=bool(body.load_inplace))
        return JSONResponse(service.model_card(body.lora_name))

    @routes.post("/v1/unload_lora_adapter", **described(UnloadRequest))
    async def unload(request: Request) -> Response:
        require_admin(request)
        body = parse(UnloadRequest, await service.body(request))
        if body.lora_name not in service.engine.adapters:
            raise APIError(404, f"no adapter {body.lora_name!r} is loaded", param="lora_name", code="model_not_found")
        await service.engine.unload_adapter(body.lora_name)
        return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True})

    return routes


def _allowed(folder: Path | None, path: str) -> Path:
    """The directory that ``path`` names, absolute or below ``folder``. Raises ``APIError`` 403 for one outside."""
    if folder is None:
        raise APIError(403, "this server loads no adapter while it runs; start it with --lora-dir DIR")
    found = Path(os.path.realpath(folder / path))
    if not found.is_relative_to(os.path.realpath(folder)):
        raise APIError(403, "lora_path is outside the directory that --lora-dir allows", param="lora_path")
    return found
