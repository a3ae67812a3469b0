"""A forced token history: the record that the prompt step writes and that later steps read."""

from typing import Literal

from pydantic import Field

from kldaudit.records import Frozen, Record


class Span(Frozen):
    """Tokens start … end - 1 of the history."""

    kind: Literal["generated", "tool_call", "tool_result"]
    turn: int = Field(description="Index of the message.")
    start: int
    end: int


class PromptRecord(Record):
    """A forced token history (``prompts/{id}.json``)."""

    prompt: str
    about: str = Field(description="What the text is and where it comes from.")
    rendering: str = Field(description="How messages became text.")
    bos: str = Field(description="How a BOS token is handled.")
    begins_with_bos: bool
    tokenizer_sha256: str = Field(description="SHA-256 of tokenizer.json.")
    chat_template_sha256: str = Field(description="SHA-256 of the chat template, or `unknown: why`.")
    text_sha256: str = Field(description="SHA-256 of the rendered text.")
    n_tokens: int
    token_ids: list[int]
    spans: list[Span]
