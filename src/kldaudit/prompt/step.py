"""On the host: check a prompt's source, have it rendered, and record token ids and spans."""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kldaudit.digests import file_sha256, text_sha256
from kldaudit.errors import PromptError
from kldaudit.history import PromptRecord
from kldaudit.records import Frozen, digests_of, first_error, read_json, read_text
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import last_lines, run_in_engine


class Function(Frozen):
    """A called function."""

    name: str
    arguments: dict[str, Any]


class ToolCall(Frozen):
    """One call in an assistant message, in OpenAI's form."""

    type: Literal["function"]
    function: Function


class Message(Frozen):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: list[ToolCall] = Field(default_factory=list)


class Chat(BaseModel):
    """A prompt's source: chat messages with tool definitions."""

    model_config = ConfigDict(extra="forbid")

    id: str
    title: str
    licence: str
    tools: list[dict[str, Any]] = []
    messages: list[Message] = Field(min_length=1)


def render_prompt(
    name: str, source: Path, about: str, image_path: Path, checkpoint_path: Path, log: Path
) -> PromptRecord:
    """Render a prompt with the tokenizer and template of the reference checkpoint.

    Raises:
        PromptError: the source is not valid, cannot be rendered, or a tool call got lost in rendering.
    """
    _check_source(source)
    folder = checkpoint_path.with_suffix("")
    with tempfile.TemporaryDirectory() as temporary:
        reads = [source.absolute(), folder.absolute()]
        output = Path(temporary) / "rendered.json"
        status = run_in_engine(
            Image.read(image_path),
            "kldaudit.prompt.render",
            [str(path) for path in (*reads, output)],
            log=log,
            reads=reads,
            writes=[Path(temporary)],
        )
        if status:
            raise PromptError(
                f"prompt {name} cannot be rendered",
                where=f"{source}, log {log}",
                expected="text from the checkpoint's chat template and tokenizer",
                found=last_lines(log, 1),
                do="check the messages against what the template accepts",
            )
        rendered = read_json(output)
    calls = [span for span in rendered["spans"] if span["kind"] == "tool_call"]
    if len(calls) != rendered["tool_calls"]:
        raise PromptError(
            f"the tool calls of prompt {name} cannot be found in the rendered text",
            where=str(source),
            expected=f"{rendered['tool_calls']} calls between <tool_call> and </tool_call>",
            found=str(len(calls)),
            do="use a model whose template writes calls this way, or a prompt without calls",
        )
    template = folder / "chat_template.jinja"
    return PromptRecord(
        parents=digests_of(source=source, image=image_path, checkpoint=checkpoint_path),
        prompt=name,
        about=about,
        rendering=rendered["rendering"],
        bos=rendered["bos"],
        begins_with_bos=rendered["begins_with_bos"],
        tokenizer_sha256=file_sha256(folder / "tokenizer.json"),
        chat_template_sha256=file_sha256(template)
        if template.exists()
        else "unknown: the checkpoint has no chat_template.jinja",
        text_sha256=text_sha256(rendered["text"]),
        n_tokens=len(rendered["token_ids"]),
        token_ids=rendered["token_ids"],
        spans=rendered["spans"],
    )


def _check_source(source: Path) -> None:
    text = read_text(source)
    if source.suffix not in (".json", ".txt") or not text.strip():
        raise PromptError(
            "the prompt's source is not one",
            where=str(source),
            expected="chat messages in a .json file, or a .txt file with text",
            found="an empty file" if not text.strip() else f"a {source.suffix or 'suffixless'} file",
            do="correct the prompt's file in the audit",
        )
    if source.suffix == ".json":
        try:
            Chat.model_validate(json.loads(text))
        except (ValidationError, json.JSONDecodeError) as error:
            found = first_error(error) if isinstance(error, ValidationError) else str(error)
            raise PromptError(
                "the prompt's messages are not valid",
                where=str(source),
                expected="id, title, licence, tools, messages in OpenAI's form",
                found=found,
                do="correct the file",
            ) from error
