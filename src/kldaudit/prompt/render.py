"""Render one prompt: ``python -m kldaudit.prompt.render SOURCE CHECKPOINT OUT``.

Chat templates differ in what they know of tools. A template that names ``tools`` renders definitions and calls itself;
for one that does not, they are folded into the messages as Hermes-style JSON between tags, and the record says so.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)

TOOLS_INTRODUCTION = "# Tools\n\nYou can call the functions listed here.\n<tools>\n{tools}\n</tools>\n\n"
TOOLS_USE = (
    "To call one, answer with its name and arguments as JSON inside tags:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)


def fold_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Write tool definitions, calls and results into the messages' text, for a template that knows no tools."""
    listing = TOOLS_INTRODUCTION.replace("{tools}", "\n".join(json.dumps(tool) for tool in tools)) + TOOLS_USE
    folded = []
    for index, message in enumerate(messages):
        content = message["content"]
        if index == 0 and tools:
            content = f"{content}\n\n{listing}"
        calls = [json.dumps(_call(call)) for call in message.get("tool_calls", [])]
        parts = [content] if content else []
        content = "\n".join(parts + [f"<tool_call>\n{call}\n</tool_call>" for call in calls])
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        folded.append({"role": message["role"], "content": content})
    return folded


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def render_chat(source: dict[str, Any], tokenizer: Any) -> tuple[str, list[dict[str, Any]], bool]:
    """Text of a chat, its spans in characters, and whether the template itself rendered the tools.

    A span is {kind, turn, start, end}: ``generated`` for what the assistant wrote, ``tool_call`` for each call in it,
    ``tool_result`` for each answer of a tool.
    """
    native = "tools" in (tokenizer.chat_template or "")
    messages, tools = source["messages"], source.get("tools", [])
    if not native:
        messages, tools = fold_tools(messages, tools), None
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    spans = []

    def length(turns: int, **options: bool) -> int:
        prefix = tokenizer.apply_chat_template(messages[:turns], tools=tools, tokenize=False, **options)
        return _common_length(prefix, text)

    for turn, message in enumerate(messages):
        if message["role"] not in ("assistant", "tool"):
            continue
        start = length(turn, add_generation_prompt=message["role"] == "assistant")
        end = length(turn + 1)
        inside = text[start:end]
        if message["role"] == "assistant":
            spans.append({"kind": "generated", "turn": turn, "start": start, "end": end})
            spans += _found(CALL, "tool_call", inside, start, turn)
        else:
            spans += _found(RESULT, "tool_result", inside, start, turn)
    return text, spans, native


def _common_length(prefix: str, text: str) -> int:
    """Length of the common beginning: templates may close the last turn differently."""
    for index, (one, other) in enumerate(zip(prefix, text, strict=False)):
        if one != other:
            return index
    return min(len(prefix), len(text))


def _found(pattern: re.Pattern[str], kind: str, text: str, offset: int, turn: int) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "turn": turn, "start": offset + match.start(), "end": offset + match.end()}
        for match in pattern.finditer(text)
    ]


def to_tokens(spans: list[dict[str, Any]], offsets: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Spans in characters to spans in tokens: every token that has a character of the span, end exclusive."""
    converted = []
    for span in spans:
        inside = [index for index, (start, end) in enumerate(offsets) if start < span["end"] and end > span["start"]]
        if inside:
            converted.append({**span, "start": inside[0], "end": inside[-1] + 1})
    return converted


def render(source: Path, checkpoint: Path) -> dict[str, Any]:
    """Token ids, spans and how they came about."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if source.suffix == ".json":
        chat = json.loads(source.read_text(encoding="utf-8"))
        text, spans, native = render_chat(chat, tokenizer)
        calls = sum(len(message.get("tool_calls", [])) for message in chat["messages"])
        how = "tools rendered by the template" if native else "tools folded into the messages: the template knows none"
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        bos = "as the chat template writes it; none added"
    else:
        text, spans, calls = source.read_text(encoding="utf-8"), [], 0
        how = "plain text, no chat template"
        encoded = tokenizer(text, return_offsets_mapping=True)
        bos = "as the tokenizer adds it by default"
    return {
        "text": text,
        "token_ids": encoded["input_ids"],
        "spans": to_tokens(spans, encoded["offset_mapping"]),
        "tool_calls": calls,
        "rendering": how,
        "bos": bos,
        "begins_with_bos": encoded["input_ids"][:1] == [tokenizer.bos_token_id],
        "vocab_size": len(tokenizer),
    }


if __name__ == "__main__":
    rendered = render(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(rendered), encoding="utf-8")
