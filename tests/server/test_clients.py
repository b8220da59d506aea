"""Clients that others wrote, against the running server with the real small model: openai, llm and LangChain."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, live

from tamis.attention.policy import Policy
from tamis.engine.llm import LLM

CAPITAL = "What is the capital of France?"
ASK: list[Any] = [{"role": "user", "content": CAPITAL}]
NOTE = "The keeper's dog at the lighthouse is called Pemba."


@pytest.fixture(scope="module")
def served(smollm2: Any) -> Iterator[Live]:
    settings = {"name": "smollm2"}
    with LLM(smollm2, policy=Policy(prefill="prefix"), cache_bytes=1 << 30) as llm, live(llm, settings=settings) as it:
        yield it


class TestOpenAI:
    def test_chat_whole_streamed_and_asynchronous(self, served: Live) -> None:
        from openai import AsyncOpenAI

        options: dict[str, Any] = {"model": "smollm2", "messages": ASK, "temperature": 0, "max_completion_tokens": 16}
        client = served.client()
        whole = client.chat.completions.create(**options)
        assert "Paris" in whole.choices[0].message.content and whole.usage.total_tokens > 20
        with client.chat.completions.stream(**options) as stream:
            final = stream.until_done().get_final_completion()
        assert final.choices[0].message.content == whole.choices[0].message.content

        async def several() -> list[str]:
            async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as other:
                made = await asyncio.gather(*(other.chat.completions.create(**options) for _ in range(4)))
            return [m.choices[0].message.content or "" for m in made]

        assert asyncio.run(several()) == [whole.choices[0].message.content] * 4

    def test_completions_models_and_raw_headers(self, served: Live) -> None:
        client = served.client()
        assert [m.id for m in client.models.list()] == ["smollm2"] and client.models.retrieve("smollm2").id == "smollm2"
        made = client.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in made.choices[0].text
        raw = client.chat.completions.with_raw_response.create(model="smollm2", messages=ASK, max_tokens=1)
        assert raw.headers["content-type"] == "application/json" and raw.parse().choices[0].finish_reason == "length"

    def test_what_is_refused_is_an_error_of_its_class(self, served: Live) -> None:
        from openai import BadRequestError, NotFoundError

        client = served.client()
        tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model="smollm2", messages=ASK, tools=[tool])
        assert refused.value.param == "tools" and refused.value.code == "unsupported_parameter"
        with pytest.raises(NotFoundError):
            client.chat.completions.create(model="smollm2", messages=ASK, extra_body={"documents": ["nobody"]})

    def test_documents_and_choices_of_tamis_go_in_extra_body(self, served: Live) -> None:
        extra = {
            "documents": [{"text": NOTE, "title": "Dog"}],
            "tamis": {"prefill": "reuse", "accept_block_attention": True},
        }
        made = served.client().chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the name of the dog?"}],
            max_tokens=32,
            temperature=0,
            extra_body=extra,
        )
        assert "Pemba" in made.choices[0].message.content
        assert made.model_extra["tamis"][0]["report"]["used"] == "reuse"


class TestLangChain:
    @pytest.fixture
    def chat(self, served: Live) -> Any:
        langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: tamis[dev]")
        return langchain.ChatOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            model="smollm2",
            temperature=0,
            max_tokens=16,
            max_retries=0,
            stream_usage=True,
        )

    def test_invoke_stream_and_batch(self, chat: Any) -> None:
        whole = chat.invoke(CAPITAL)
        assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] <= 16
        chunks = list(chat.stream(CAPITAL))
        assert "".join(c.content for c in chunks) == whole.content and len(chunks) > 3
        assert [m.content for m in chat.batch([CAPITAL] * 3)] == [whole.content] * 3
        assert asyncio.run(chat.ainvoke(CAPITAL)).content == whole.content

    def test_messages_of_all_kinds_logprobs_and_stop(self, chat: Any) -> None:
        from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

        talk = [SystemMessage("Answer in one word."), HumanMessage("Hi"), AIMessage("Hello"), HumanMessage(CAPITAL)]
        made = chat.bind(logprobs=True, stop=["\n"]).invoke(talk)
        assert "Paris" in made.content and made.response_metadata["logprobs"]["content"]

    def test_documents_of_a_retriever_go_in_extra_body(self, chat: Any) -> None:
        made = chat.bind(max_tokens=32, extra_body={"documents": [{"text": NOTE}]}).invoke(
            "What is the name of the dog?"
        )
        assert "Pemba" in made.content


class TestLlm:
    """The command `llm`, told of the server by its extra-openai-models.yaml."""

    @pytest.fixture
    def home(self, served: Live, tmp_path: Path) -> Path:
        pytest.importorskip("llm", reason="llm is not installed: pip install 'tamis[dev]'")
        for kind in ("chat", "completion"):
            entry = [
                f"- model_id: tamis-{kind}",
                "  model_name: smollm2",
                f'  api_base: "{served.url}/v1"',
                *(["  completion: true"] if kind == "completion" else []),
            ]
            with (tmp_path / "extra-openai-models.yaml").open("a") as file:
                file.write("\n".join(entry) + "\n")
        return tmp_path

    def llm(self, home: Path, *words: str) -> str:
        # without the packages' plugins: the one of the small model needs llama-cpp-python
        known = os.environ | {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
        command = [sys.executable, "-m", "llm", *words]
        made = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return made.stdout

    def test_streamed_whole_and_with_a_system_prompt(self, home: Path) -> None:
        options = ("-o", "temperature", "0", "-o", "max_tokens", "16")
        streamed = self.llm(home, "-m", "tamis-chat", *options, CAPITAL)
        assert "Paris" in streamed
        assert self.llm(home, "-m", "tamis-chat", "--no-stream", *options, CAPITAL) == streamed
        assert "Paris" in self.llm(home, "-m", "tamis-chat", "-s", "Answer in one word.", *options, CAPITAL)
        assert "Paris" in self.llm(home, "-m", "tamis-completion", *options, "The capital of France is")

    def test_its_log_has_the_usage(self, home: Path) -> None:
        self.llm(home, "-m", "tamis-chat", "-o", "max_tokens", "8", CAPITAL)
        logged = json.loads(self.llm(home, "logs", "--json", "-n", "1"))[0]
        assert logged["output_tokens"] == 8 and logged["input_tokens"] > 8
