import json

import pytest

from kldaudit.prompt.render import fold_tools, render_chat, to_tokens


class Tokenizer:
    """A ChatML template in Python: one that knows tools if its text names them."""

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt=False):
        assert tokenize is False
        text = f"TOOLS{json.dumps(tools)}\n" if tools else ""
        for message in messages:
            calls = [one["function"] for one in message.get("tool_calls", [])] if "tools" in self.chat_template else []
            content = "\n".join(
                [message["content"]] * bool(message["content"])
                + [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
            )
            if message["role"] == "tool" and "tools" in self.chat_template:
                content = f"<tool_response>\n{content}\n</tool_response>"
            text += f"<{message['role']}>{content}</s>"
        return text + "<assistant>" * add_generation_prompt


PLAIN, NATIVE = Tokenizer("{{ messages }}"), Tokenizer("{{ messages }}{{ tools }}")


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "ping", "parameters": {}}}, {"type": "function", "function": {}}]


@pytest.fixture
def chat():
    return {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": "You run networks."},
            {"role": "user", "content": "Is r1 up?"},
            {
                "role": "assistant",
                "content": "I ask.",
                "tool_calls": [call("ping", host="r1"), call("ping", host="r2")],
            },
            {"role": "tool", "content": "alive"},
            {"role": "assistant", "content": "It is."},
        ],
    }


def texts(kind, text, spans):
    return [text[one["start"] : one["end"]] for one in spans if one["kind"] == kind]


def test_tool_definitions_are_folded_into_the_first_message_one_a_line(chat):
    content = fold_tools(chat["messages"], TOOLS)[0]["content"]
    listing = "<tools>\n" + json.dumps(TOOLS[0]) + "\n" + json.dumps(TOOLS[1]) + "\n</tools>"
    assert content.startswith("You run networks.\n\n# Tools\n")
    assert listing in content


def test_without_tools_nothing_is_added(chat):
    assert fold_tools(chat["messages"][:2], []) == chat["messages"][:2]


def test_a_call_is_folded_behind_the_text_between_tags(chat):
    assert fold_tools(chat["messages"], TOOLS)[2] == {
        "role": "assistant",
        "content": "I ask.\n"
        '<tool_call>\n{"name": "ping", "arguments": {"host": "r1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {"host": "r2"}}\n</tool_call>',
    }


def test_a_call_without_text_has_no_empty_line_before_it():
    (folded,) = fold_tools([{"role": "assistant", "content": "", "tool_calls": [call("ping")]}], [])
    assert folded["content"] == '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def test_a_result_is_folded_between_tags(chat):
    assert fold_tools(chat["messages"], TOOLS)[3] == {
        "role": "tool",
        "content": "<tool_response>\nalive\n</tool_response>",
    }


def test_folding_leaves_the_messages_alone(chat):
    before = json.dumps(chat)
    fold_tools(chat["messages"], TOOLS)
    assert json.dumps(chat) == before


def test_a_template_that_names_tools_renders_them_itself(chat):
    text, _, native = render_chat(chat, NATIVE)
    assert native is True
    assert text == NATIVE.apply_chat_template(chat["messages"], TOOLS, False)


def test_for_a_template_that_names_no_tools_they_are_folded(chat):
    text, _, native = render_chat(chat, PLAIN)
    assert native is False
    assert text == PLAIN.apply_chat_template(fold_tools(chat["messages"], TOOLS), None, False)


@pytest.mark.parametrize("tokenizer", [PLAIN, NATIVE], ids=["folded", "native"])
def test_every_call_and_every_result_is_a_span(chat, tokenizer):
    text, spans, _ = render_chat(chat, tokenizer)
    calls = texts("tool_call", text, spans)
    assert [json.loads(one[len("<tool_call>\n") : -len("\n</tool_call>")])["arguments"] for one in calls] == [
        {"host": "r1"},
        {"host": "r2"},
    ]
    assert texts("tool_result", text, spans) == ["<tool_response>\nalive\n</tool_response>"]


@pytest.mark.parametrize("tokenizer", [PLAIN, NATIVE], ids=["folded", "native"])
def test_spans_name_the_message_they_are_in(chat, tokenizer):
    _, spans, _ = render_chat(chat, tokenizer)
    assert [(one["kind"], one["turn"]) for one in spans] == [
        ("generated", 2),
        ("tool_call", 2),
        ("tool_call", 2),
        ("tool_result", 3),
        ("generated", 4),
    ]


def test_what_the_assistant_wrote_is_inside_its_generated_span(chat):
    text, spans, _ = render_chat(chat, PLAIN)
    first, last = texts("generated", text, spans)
    assert "I ask." in first
    assert "It is." in last
    assert "alive" not in first + last


def test_a_generated_span_is_only_what_the_assistant_wrote(chat):
    text, spans, _ = render_chat(chat, PLAIN)
    assert texts("generated", text, spans)[1] in ("It is.", "It is.</s>")


def test_tags_in_what_the_user_wrote_are_no_calls(chat):
    chat["messages"][1]["content"] = "<tool_call>\n{}\n</tool_call>"
    text, spans, _ = render_chat(chat, PLAIN)
    assert len(texts("tool_call", text, spans)) == 2


def test_a_chat_without_tools_has_only_generated_spans():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text, spans, _ = render_chat({"messages": messages}, PLAIN)
    assert text == "<user>Hi</s><assistant>Hello</s>"
    assert [one["kind"] for one in spans] == ["generated"]


OFFSETS = [(0, 0), (0, 3), (3, 5), (5, 9), (9, 10)]
"""Five tokens; the first stands for no text, as BOS does."""


@pytest.mark.parametrize(
    ("start", "end", "tokens"),
    [
        (0, 3, (1, 2)),  # exactly one token
        (3, 9, (2, 4)),  # exactly two
        (4, 5, (2, 3)),  # the end of a token
        (2, 4, (1, 3)),  # parts of two tokens
        (0, 10, (1, 5)),  # all the text
        (9, 10, (4, 5)),  # the last
    ],
)
def test_a_span_has_every_token_with_a_character_of_it(start, end, tokens):
    (span,) = to_tokens([{"kind": "tool_call", "turn": 2, "start": start, "end": end}], OFFSETS)
    assert span == {"kind": "tool_call", "turn": 2, "start": tokens[0], "end": tokens[1]}


def test_a_span_without_a_token_is_left_out():
    assert to_tokens([{"kind": "generated", "turn": 0, "start": 10, "end": 12}], OFFSETS) == []


def test_spans_keep_their_order():
    spans = [{"kind": "a", "turn": 0, "start": 5, "end": 9}, {"kind": "b", "turn": 1, "start": 0, "end": 3}]
    assert [one["kind"] for one in to_tokens(spans, OFFSETS)] == ["a", "b"]
