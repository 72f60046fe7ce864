"""Tries LlamaIndex with its packages for servers like OpenAI's: chat, a stream, a tool call and embeddings."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from tried import KEY, MODEL, QUESTION, URL, expect, expect_paris, try_all

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0,
    max_tokens=60,
    max_retries=0,
    timeout=300,
)


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


def chat() -> None:
    expect_paris(llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content)


def stream() -> None:
    chunks = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
    expect_paris("".join(chunk.delta or "" for chunk in chunks))


def tools() -> None:
    weather = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([weather], user_msg="What is the weather in Rome?", tool_required=True)
    call, *_ = llm.get_tool_calls_from_response(answer)
    expect(call.tool_name == "get_weather" and isinstance(call.tool_kwargs["city"], str), call)


def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_retries=0)
    first, second = embedder.get_text_embedding_batch(["a cat", "a kitten"])
    expect(len(first) == len(second) > 1, len(first))


if __name__ == "__main__":
    try_all(chat, stream, tools, embeddings)
