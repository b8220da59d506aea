"""/v1/documents in vLLM's own server: put, get, list, delete, warm, pin and unpin, as Tamis's server has them.

An endpoint plugin of vLLM: loaded where `VLLM_PLUGINS` names "tamis", of use where the connector is configured. Texts
lie in tables beside the shelf, so that replicas and restarts share them; without a directory they are this process's.
What a document's answer holds (`key`, `namespace`, and `token_ids` of one that is asked for by id) is what `client`
builds requests of. With API keys every key has documents of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tamis.cache.keys import DOCUMENTS, namespaced
from tamis.core.errors import InvalidInput, NotCached, NothingFound, TamisError, Unavailable
from tamis.core.log import logger, show_with
from tamis.corpus.stored import SharedTexts, StoredDocument, namespace_of, new_document
from tamis.integrations.vllm import fingerprint
from tamis.integrations.vllm.client import warm
from tamis.integrations.vllm.config import Settings, settings_of
from tamis.integrations.vllm.scheduler_side import KEEPS
from tamis.integrations.vllm.shelf import Shelf
from tamis.prompt.segments import document_id
from tamis.prompt.texts import document_text

TEXTS = "texts"  # folder of the tables in the shelf's directory
STATE = "tamis_documents"  # where the server's state has a `Library`
log = logger("vllm")


class DocumentPut(BaseModel):
    """POST /v1/documents and PUT /v1/documents/ID. warm: compute its keys and values now; pin: and keep them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(min_length=1)
    title: str = ""
    warm: bool = False
    pin: bool = False


@dataclass
class Library:
    """The documents of one server: texts, what the shelf has of them, and the engine that computes the rest."""

    engine: Any
    texts: SharedTexts
    shelf: Shelf | None
    settings: Settings
    block_size: int
    keyed: bool
    max_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of a document that fits into a prompt: whole blocks, a token that asks, and one that answers."""
        return max(0, self.max_tokens - 2) // self.block_size * self.block_size

    def owner(self, http: Request) -> str:
        """A word for the API key that was sent; vLLM has checked it. "" where the server has no keys."""
        if not self.keyed:
            return ""
        token = http.headers.get("Authorization", "").partition(" ")[2]
        return hashlib.sha256(token.encode()).hexdigest()

    def namespace(self, owner: str) -> str:
        """Where the keys and values of an owner's documents lie; requests have to name it, signed."""
        return namespaced(DOCUMENTS, namespace_of(owner)) if owner else self.settings.namespace

    def tokens(self, document: StoredDocument) -> list[int]:
        """What stands for it in a prompt. Raises Unavailable without a tokenizer."""
        tokenizer = self.engine.renderer.tokenizer
        if tokenizer is None:
            raise Unavailable("the server runs without a tokenizer (--skip-tokenizer-init), so it takes no texts.")
        said = document_text(document.title, document.text)
        ids: list[int] = list(tokenizer.encode(said, add_special_tokens=False)) if said else []
        return ids

    def put(self, owner: str, body: DocumentPut, name: str | None) -> StoredDocument:
        """Add a document. Raises InvalidInput, also for one that no prompt of this server has room for."""
        ids = self.tokens(StoredDocument("", body.title, body.text, 0, 0))
        self._check_fits(ids)
        return self.texts.put(owner, new_document(body.title, body.text, len(ids), name))

    async def warm(self, owner: str, document: StoredDocument) -> str:
        """Have its keys and values computed, and kept if there is a shelf; "shelf" if they were there already."""
        ids, namespace = self.tokens(document), self.namespace(owner)
        if self.shelf is not None and self.shelf.has(document_id(ids), namespace):
            return "shelf"
        self._check_fits(ids)  # another server may have put it
        from vllm import SamplingParams

        for body in warm([ids], block_size=self.block_size, namespace=self.settings.signed(namespace)):
            extra = {"kv_transfer_params": body["kv_transfer_params"], KEEPS: True}
            sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
            prompt = {"prompt_token_ids": body["prompt"]}
            async for _ in self.engine.generate(prompt, sampling, f"tamis-warm-{uuid.uuid4().hex}"):
                pass
        return "computed"

    async def pin(self, owner: str, document: StoredDocument) -> None:
        """Keep its keys and values on the shelf until `unpin`. Raises Unavailable without one."""
        shelf, key, namespace = self._shelf(), document_id(self.tokens(document)), self.namespace(owner)
        await self.warm(owner, document)
        for wait_s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0):  # what was computed is written beside the requests
            try:
                return await asyncio.to_thread(shelf.pin, key, namespace)
            except NotCached:
                await asyncio.sleep(wait_s)
        raise Unavailable(f"document {document.id!r} did not reach the shelf; see the server's log for the reason.")

    def unpin(self, owner: str, document: StoredDocument) -> None:
        """Let them make way again."""
        self._shelf().unpin(document_id(self.tokens(document)), self.namespace(owner))

    def delete(self, owner: str, name: str) -> None:
        """Forget a document and what the shelf has of it; blocks in the engine's cache go as any others do."""
        document = self.texts.delete(owner, name)
        if self.shelf is not None and not self.texts.same(owner, document):
            self.shelf.delete(document_id(self.tokens(document)), self.namespace(owner))

    def shown(self, owner: str, document: StoredDocument) -> dict[str, Any]:
        """A document without its text. tier: "shelf" if its keys and values lie there."""
        key, namespace = document_id(self.tokens(document)), self.namespace(owner)
        kept = self.shelf is not None and self.shelf.has(key, namespace)
        return {
            **document.shown(),
            "pinned": kept and self.shelf is not None and self.shelf.pinned(key, namespace),
            "tier": "shelf" if kept else None,
            "key": key.hex(),
            "namespace": self.settings.signed(namespace),
        }

    def _check_fits(self, ids: list[int]) -> None:
        if len(ids) > self.longest:
            raise InvalidInput(
                f"the document has {len(ids)} tokens; at most {self.longest} fit into a prompt of this server "
                f"(--max-model-len {self.max_tokens}, less a block for what is asked). Split it, or serve the model "
                "with a larger --max-model-len."
            )

    def _shelf(self) -> Shelf:
        if self.shelf is None:
            raise Unavailable("nothing is kept here; give `directory` in kv_connector_extra_config to pin documents.")
        return self.shelf


class Documents:
    """The plugin, as vLLM makes it."""

    name = "tamis"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and how their errors are told."""
        app.include_router(_router())
        app.add_exception_handler(TamisError, _told)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Open texts and shelf, if the connector is configured."""
        show_with("vllm")
        state.tamis_documents = None
        config = None if engine_client is None else engine_client.vllm_config
        settings = None if config is None else settings_of(config)
        if config is None or settings is None:
            log.warning("/v1/documents answers 503: TamisConnector is not configured")
            return
        parallel = config.parallel_config
        shelf = settings.shelf(
            fingerprint.of(config), (0, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
        )
        texts = SharedTexts(Path(settings.directory).expanduser() / TEXTS if settings.directory else None)
        keyed = bool([k for k in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if k])
        block_size = config.cache_config.block_size
        state.tamis_documents = Library(
            engine_client, texts, shelf, settings, block_size, keyed, config.model_config.max_model_len
        )


def _router() -> APIRouter:
    made = APIRouter(prefix="/v1/documents", tags=["documents"])

    async def put(http: Request, body: DocumentPut, name: str | None) -> dict[str, Any]:
        library = _library(http)
        owner = library.owner(http)
        document = await asyncio.to_thread(library.put, owner, body, name)
        if body.pin:
            await library.pin(owner, document)
        elif body.warm:
            await library.warm(owner, document)
        return await asyncio.to_thread(library.shown, owner, document)

    @made.post("")
    async def put_document(http: Request, body: DocumentPut) -> dict[str, Any]:
        """Add a document; its id is made of what it says."""
        return await put(http, body, None)

    @made.put("/{name}")
    async def put_document_as(http: Request, name: str, body: DocumentPut) -> dict[str, Any]:
        """Add a document under an id of one's own."""
        return await put(http, body, name)

    @made.get("")
    async def list_documents(http: Request, after: str = "", limit: int = Query(100, ge=1, le=1000)) -> dict[str, Any]:
        """One's documents by id, without their texts."""
        library = _library(http)
        owner = library.owner(http)

        def listed() -> dict[str, Any]:
            found, more = library.texts.list(owner, after=after, limit=limit)
            own = library.settings.signed(library.namespace(owner))
            data = [library.shown(owner, d) for d in found]
            return {"object": "list", "namespace": own, "data": data, "has_more": more}

        return await asyncio.to_thread(listed)

    @made.get("/{name}")
    async def get_document(http: Request, name: str) -> dict[str, Any]:
        """One document with its text and token ids."""
        library = _library(http)
        owner = library.owner(http)
        document = library.texts.get(owner, name)
        return library.shown(owner, document) | {"text": document.text, "token_ids": library.tokens(document)}

    @made.delete("/{name}")
    async def delete_document(http: Request, name: str) -> dict[str, Any]:
        """Forget it. Requests that read it finish with it."""
        library = _library(http)
        await asyncio.to_thread(library.delete, library.owner(http), name)
        return {"id": name, "object": "document.deleted", "deleted": True}

    _kept(made)
    return made


def _kept(made: APIRouter) -> None:
    """What is kept of a document's keys and values."""

    @made.post("/{name}/warm")
    async def warm_document(http: Request, name: str) -> dict[str, Any]:
        """Have its keys and values computed and kept now."""
        library = _library(http)
        owner = library.owner(http)
        document = library.texts.get(owner, name)
        origin = await library.warm(owner, document)
        return await asyncio.to_thread(library.shown, owner, document) | {"origin": origin}

    @made.post("/{name}/pin")
    async def pin_document(http: Request, name: str) -> dict[str, Any]:
        """Keep them on the shelf."""
        library = _library(http)
        owner = library.owner(http)
        document = library.texts.get(owner, name)
        await library.pin(owner, document)
        return await asyncio.to_thread(library.shown, owner, document)

    @made.post("/{name}/unpin")
    async def unpin_document(http: Request, name: str) -> dict[str, Any]:
        """Let them make way again."""
        library = _library(http)
        owner = library.owner(http)
        document = library.texts.get(owner, name)
        await asyncio.to_thread(library.unpin, owner, document)
        return await asyncio.to_thread(library.shown, owner, document)


def _library(http: Request) -> Library:
    library: Library | None = getattr(http.app.state, STATE, None)
    if library is None:
        raise Unavailable("TamisConnector is not configured in this server, so it keeps no documents.")
    return library


async def _told(http: Request, error: Exception) -> JSONResponse:
    """An error as OpenAI's clients know it."""
    status, kind = 503, "server_error"
    if isinstance(error, InvalidInput):
        status, kind = 400, "invalid_request_error"
    elif isinstance(error, NothingFound):
        status, kind = 404, "not_found_error"
    detail = {"message": str(error), "type": kind, "param": None, "code": getattr(error, "code", None)}
    return JSONResponse({"error": detail}, status_code=status)
