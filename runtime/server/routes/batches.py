"""``/v1/files`` and ``/v1/batches``: OpenAI's API of batches. What one key has, no other key sees."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, StringConstraints

from qserve.runtime.server.batches.records import Batch, StoredFile
from qserve.runtime.server.batches.runner import BatchRunner
from qserve.runtime.server.errors import APIError
from qserve.runtime.server.http.body import read_json
from qserve.runtime.server.http.error_handlers import add_error_handlers
from qserve.runtime.server.limits.shared_pool import SharedPool
from qserve.runtime.server.openai.protocol import parse
from qserve.runtime.server.openai.strict import NotDone, Strict

MAX_BODY = 64 << 10
BODY_TIMEOUT = 30.0  # seconds

Item = TypeVar("Item", StoredFile, Batch)


class BatchRequest(Strict):
    not_done: ClassVar[NotDone] = {"output_expires_after": ()}

    input_file_id: str = Field(min_length=1, max_length=100)
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]] | None
    ) = Field(None, max_length=16)


def router(runner: BatchRunner | None) -> APIRouter:
    """``runner``: None where the server was given no directory."""
    routes = APIRouter(include_in_schema=False)
    uploads = SharedPool(256 * MAX_BODY)

    def kept() -> BatchRunner:
        if runner is None:
            raise APIError(403, "this server keeps no files; start it with --batch-dir DIR", code="no_batch_dir")
        return runner

    @routes.post("/v1/files")
    async def upload(request: Request) -> Response:
        from qserve.runtime.server.batches.upload import receive_file  # a parser of forms, which no other route needs

        file = await receive_file(request, kept().store, _owner(request))
        return JSONResponse(file.to_json())

    @routes.get("/v1/files")
    async def files(request: Request) -> Response:
        owner, purpose = _owner(request), request.query_params.get("purpose")
        found = [
            file for file in kept().store.files.values() if file.owner == owner and purpose in (None, file.purpose)
        ]
        return _page(request, found if request.query_params.get("order") == "asc" else found[::-1], 10_000, 10_000)

    @routes.get("/v1/files/{id}")
    async def file(request: Request, id: str) -> Response:
        return JSONResponse(kept().store.file(_owner(request), id).to_json())

    @routes.get("/v1/files/{id}/content")
    async def content(request: Request, id: str) -> Response:
        store = kept().store
        return FileResponse(store.path(store.file(_owner(request), id)), media_type="application/octet-stream")

    @routes.delete("/v1/files/{id}")
    async def delete(request: Request, id: str) -> Response:
        kept().store.delete_file(_owner(request), id)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    @routes.post("/v1/batches")
    async def create(request: Request) -> Response:
        runner = kept()
        body = await read_json(request, uploads, max_bytes=MAX_BODY, max_commas=MAX_BODY, timeout=BODY_TIMEOUT)
        asked = parse(BatchRequest, body)
        batch = runner.store.add_batch(_owner(request), asked.endpoint, asked.input_file_id, asked.metadata)
        runner.added()
        return JSONResponse(batch.to_json())

    @routes.get("/v1/batches")
    async def batches(request: Request) -> Response:
        owner = _owner(request)
        found = [batch for batch in kept().store.batches.values() if batch.owner == owner]
        return _page(request, found[::-1], 20, 100)

    @routes.get("/v1/batches/{id}")
    async def batch(request: Request, id: str) -> Response:
        return JSONResponse(kept().store.batch(_owner(request), id).to_json())

    @routes.post("/v1/batches/{id}/cancel")
    async def cancel(request: Request, id: str) -> Response:
        batch = kept().store.batch(_owner(request), id)
        kept().cancel(batch)
        return JSONResponse(batch.to_json())

    return routes


def batch_app(runner: BatchRunner | None) -> FastAPI:
    """These routes alone, for an application that has guards of its own."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(router(runner))
    return app


def _owner(request: Request) -> str:
    tenant: str = request.scope["qserve.tenant"]
    return tenant


def _page(request: Request, items: list[Item], usual: int, most: int) -> Response:
    """The items behind ``after``, ``limit`` of them."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", str(usual))
    if not (limit.isdecimal() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise APIError(400, f"limit must be 1..{most}, not {limit!r:.40}", param="limit")
    if after is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise APIError(400, f"there is nothing of the id {after!r:.100}", param="after")
        items = items[places[0] + 1 :]
    page: list[dict[str, Any]] = [item.to_json() for item in items[: int(limit)]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})
