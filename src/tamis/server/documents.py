"""/v1/documents: put, get, list, delete, warm, pin and unpin. Everybody sees their own only."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Query

from tamis.engine.library import StoredDocument
from tamis.server.keys import Key
from tamis.server.runs import Serving
from tamis.server.schema import DocumentPut


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

    @made.post("")
    async def put_document(body: DocumentPut, key: Key = owner) -> dict[str, Any]:
        """Add a document; its id is made of what it says."""
        return await put(key, body, None)

    @made.put("/{name}")
    async def put_document_as(name: str, body: DocumentPut, key: Key = owner) -> dict[str, Any]:
        """Add a document under an id of one's own."""
        return await put(key, body, name)

    @made.get("")
    async def list_documents(
        after: str = "", limit: int = Query(100, ge=1, le=1000), key: Key = owner
    ) -> dict[str, Any]:
        """One's documents by id, without their texts."""
        found, more = library.list(key.name, after=after, limit=limit)
        return {"object": "list", "data": [shown(serving, key, d) for d in found], "has_more": more}

    @made.get("/{name}")
    async def get_document(name: str, key: Key = owner) -> dict[str, Any]:
        """One document with its text."""
        document = library.get(key.name, name)
        return shown(serving, key, document) | {"text": document.text}

    @made.delete("/{name}")
    async def delete_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Forget it. Requests that read it finish with it."""
        await asyncio.to_thread(library.delete, key.name, name)
        return {"id": name, "object": "document.deleted", "deleted": True}

    @made.post("/{name}/warm")
    async def warm_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Have its keys and values computed and stored now."""
        origin = await asyncio.to_thread(library.warm, key.name, name)
        return shown(serving, key, library.get(key.name, name)) | {"origin": origin}

    @made.post("/{name}/pin")
    async def pin_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Keep them in the fastest tier."""
        return shown(serving, key, await asyncio.to_thread(library.pin, key.name, name))

    @made.post("/{name}/unpin")
    async def unpin_document(name: str, key: Key = owner) -> dict[str, Any]:
        """Let them be evicted again."""
        return shown(serving, key, await asyncio.to_thread(library.unpin, key.name, name))

    return made


def shown(serving: Serving, key: Key, document: StoredDocument) -> dict[str, Any]:
    """A document without its text. tier: where its keys and values lie now, null if they are not stored."""
    return {
        "id": document.id,
        "object": "document",
        "title": document.title,
        "created": document.created,
        "tokens": document.tokens,
        "pinned": document.pinned,
        "tier": serving.library.tier(key.name, document),
    }
