"""/v1/documents: put, get, list, search, delete, warm, pin and unpin. Everybody sees their own only."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Query

from tamis.engine.library import StoredDocument
from tamis.server.keys import Key
from tamis.server.openapi import DocumentShown, refusals
from tamis.server.runs import Serving
from tamis.server.schema import DocumentPut, SearchRequest

SHOWN: dict[int | str, dict[str, Any]] = {200: {"model": DocumentShown}}


def router(serving: Serving, owner: Any) -> APIRouter:
    """All of them. `owner`: the dependency that gives whose key was sent."""
    made = APIRouter(prefix="/v1/documents", tags=["documents"])
    library = serving.library

    async def put(key: Key, body: DocumentPut, name: str | None) -> dict[str, Any]:
        document = await asyncio.to_thread(library.put, key.name, body.text, title=body.title, name=name)
        if body.warm or body.pin:
            await asyncio.to_thread(library.warm, key.name, document.id)
        if body.pin:
            document = await asyncio.to_thread(library.pin, key.name, document.id)
        return shown(serving, key, document)

    @made.post("", responses=refusals(400, 503) | SHOWN)
    async def put_document(body: DocumentPut, key: Key = owner) -> dict[str, Any]:
        """Add a document; its id is made of what it says."""
        return await put(key, body, None)

    @made.post("/search", responses=refusals(400))
    async def search_documents(body: SearchRequest, key: Key = owner) -> dict[str, Any]:
        """The documents that fit a question best, by wording: one's own, and the passages of the server's index."""
        return {"object": "list", "data": await asyncio.to_thread(found, serving, key, body)}

    @made.put("/{name}", responses=refusals(400, 503) | SHOWN)
    async def put_document_as(name: str, body: DocumentPut, key: Key = owner) -> dict[str, Any]:
        """Add a document under an id of one's own."""
        return await put(key, body, name)

    @made.get("", responses=refusals(400))
    async def list_documents(
        after: str = "", limit: int = Query(100, ge=1, le=1000), key: Key = owner
    ) -> dict[str, Any]:
        """One's documents by id, without their texts."""
        found, more = library.list(key.name, after=after, limit=limit)
        return {"object": "list", "data": [shown(serving, key, d) for d in found], "has_more": more}

    @made.get("/{name}", responses=refusals(404) | SHOWN)
    async def get_document(name: str, key: Key = owner) -> dict[str, Any]:
        """One document with its text."""
        document = library.get(key.name, name)
        return shown(serving, key, document) | {"text": document.text}

    @made.delete("/{name}", responses=refusals(404, 503))
    async def delete_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Forget it. Requests that read it finish with it."""
        await asyncio.to_thread(library.delete, key.name, name)
        return {"id": name, "object": "document.deleted", "deleted": True}

    _stored(made, serving, owner)
    return made


def _stored(made: APIRouter, serving: Serving, owner: Any) -> None:
    """What is kept of a document's keys and values."""
    library = serving.library

    @made.post("/{name}/warm", responses=refusals(400, 404, 503) | SHOWN)
    async def warm_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Have its keys and values computed and stored now."""
        origin = await asyncio.to_thread(library.warm, key.name, name)
        return shown(serving, key, library.get(key.name, name)) | {"origin": origin}

    @made.post("/{name}/pin", responses=refusals(400, 404, 503) | SHOWN)
    async def pin_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Keep them in the fastest tier."""
        return shown(serving, key, await asyncio.to_thread(library.pin, key.name, name))

    @made.post("/{name}/unpin", responses=refusals(404, 503) | SHOWN)
    async def unpin_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Let them be evicted again."""
        return shown(serving, key, await asyncio.to_thread(library.unpin, key.name, name))


def shown(serving: Serving, key: Key, document: StoredDocument) -> dict[str, Any]:
    """A document without its text. tier: where its keys and values lie now, null if they are not stored."""
    return {
        **document.shown(),
        "pinned": document.pinned,
        "tier": serving.library.tier(key.name, document),
    }


def found(serving: Serving, key: Key, asked: SearchRequest) -> list[dict[str, Any]]:
    """What a search finds, best first, each with the part that fits best."""
    return [
        {
            "id": hit.id,
            "object": "document.hit",
            "title": hit.title,
            "score": hit.score,
            "snippet": hit.snippet(asked.query),
            "within": hit.place,
            "source": hit.source or None,
        }
        for hit in serving.library.search(key.name, asked.query, asked.top_k, within=asked.within)
    ]
