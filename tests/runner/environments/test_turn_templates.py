"""What an environment says, in the tokens of a chat template: which templates are refused, and no special token."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from talkers import CHATML, chat_tokenizer, sentencepiece_spaces
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from dapo_runner.config import ConfigError
from dapo_runner.environments.environment import Message
from dapo_runner.environments.template import TurnTemplate

TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "", "parameters": {"properties": {}}}}]
LISTED = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}" + CHATML
OLD = LISTED.replace("{{ m['content']", "{% if 2 < loop.index != loop.length %}old {% endif %}{{ m['content']")
TRL = importlib.util.find_spec("trl")
SMOLLM2 = Path(__file__).parents[3] / "models" / "smollm2-135m"  # docs/smollm2.md


def template_of(name: str) -> str:
    if name.endswith("%}") or TRL is None:
        return name
    return (Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "takes_user", "takes_tool"),
    [
        (LISTED, True, True),
        (CHATML, True, False),  # lists no tools
        (CHATML.replace("{{ m['content']", "{% if loop.last %}now: {% endif %}{{ m['content']"), False, False),
        (OLD, False, False),
        (LISTED.replace("m['content']", "m['content'] + (1 if m['role'] == 'tool' else '')"), True, False),  # fails
        ("qwen3", False, True),  # drops thoughts once the user has said more, not after a tool
        ("qwen3_training", True, True),
        ("qwen3_5_think", False, False),  # writes calls in another form
        ("glm4moe", False, False),
        ("gptoss", False, False),  # a tool's message names a call of the message before
        ("deepseekv3", False, False),  # takes the arguments of a call only as text
        ("phi3", True, False),  # leaves out messages of tools
        ("gemma", True, False),
        ("llama3_1", True, False),
    ],
)
def test_templates_that_do_not_only_append_are_refused(name: str, takes_user: bool, takes_tool: bool) -> None:
    if TRL is None and not name.endswith("%}"):
        pytest.skip("trl, which has copies of models' templates, is not installed")
    tokenizer = chat_tokenizer(template_of(name))
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $A", special_tokens=[("<pad>", 0)])
    for tools, takes in ((None, takes_user), (TOOLS, takes_tool)):
        if not takes:
            with pytest.raises(ConfigError, match=r"^env\b"):
                TurnTemplate(tokenizer, chat=True, tools=tools)
            continue
        template = TurnTemplate(tokenizer, chat=True, tools=tools)
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        message = Message("tool" if tools else "user", "three")
        options = {"tokenize": False, "tools": tools, "add_generation_prompt": True}
        whole = tokenizer.apply_chat_template([*turns, message._asdict()], **options)
        written = tokenizer.decode(template.reply([message], tokenizer.convert_tokens_to_ids("2")))
        assert whole.endswith(f"2{written}")
        assert "three" in written
        if written.startswith("<|im_end|>"):  # the policy may have closed its turn itself
            closed = template.reply([message], tokenizer.eos_token_id)
            assert f"<|im_end|>{tokenizer.decode(closed)}" == written
        opened = tokenizer.decode(template.open_episode([("user", "1")], "?"))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1?"}], **options).endswith(opened)


@pytest.mark.parametrize("before", ["", " ", "<pad>"], ids=repr)  # the end of a turn: Llama 2; Command R7B has two ends
@pytest.mark.parametrize("rstrip", [False, True])  # Phi-3's end takes the space behind it
def test_a_reply_has_the_tokens_of_a_whole_conversation(before: str, rstrip: bool) -> None:
    tokenizer = chat_tokenizer(CHATML.replace("<|im_end|>", f"{before}<|im_end|>"))
    tokenizer.eos_token = AddedToken("<|im_end|>", special=True, rstrip=rstrip)
    sentencepiece_spaces(tokenizer)
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))["input_ids"]
    _, end, _ = (index for index, token in enumerate(whole) if token == tokenizer.eos_token_id)
    reply = TurnTemplate(tokenizer, chat=True, tools=None).reply([Message("user", "3")], tokenizer.eos_token_id)
    assert reply == whole[end + 1 :]


def test_a_refusal_shows_the_first_difference() -> None:
    with pytest.raises(ConfigError, match=r"'A reply\..*into 'old A reply\."):
        TurnTemplate(chat_tokenizer(OLD), chat=True, tools=TOOLS)


WRITTEN = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}CALL{% endfor %}")
FUNCTION = "{{ c['function'] | tojson }}"


@pytest.mark.parametrize(
    ("call", "is_read"),
    [
        (f"<tool_call>{FUNCTION}</tool_call>", True),
        (f"</think><tool_call>{FUNCTION}</tool_call>", True),
        ("", True),  # the template leaves calls out
        (FUNCTION, False),
        (f"<tool_call>{FUNCTION}</tool_call></think>", False),
        ("<tool_call><function={{ c['function']['name'] }}>{{ c['function']['arguments']['text'] }}", False),
        ("{{ 'call' + c['function']['arguments'] }}", False),  # a text is expected
    ],
)
def test_a_template_that_writes_calls_in_another_form_needs_a_response_template(call: str, is_read: bool) -> None:
    example = '<tool_call>{"name": "multiply", "arguments": {"text": "A call."}}</tool_call>'  # in the system message
    tokenizer = chat_tokenizer(LISTED.replace(CHATML, example + WRITTEN.replace("CALL", call)))
    if is_read:
        TurnTemplate(tokenizer, chat=True, tools=TOOLS)
        return
    with pytest.raises(ConfigError, match=r"^env\b"):
        TurnTemplate(tokenizer, chat=True, tools=TOOLS)
    if "+" not in call:
        tokenizer.response_template = {"fields": {}}
        TurnTemplate(tokenizer, chat=True, tools=TOOLS)


def test_a_template_may_show_how_to_call_tools() -> None:
    for template, is_shown in ((LISTED, False), (LISTED.replace("{{ t", "<tool_call>{{ t"), True)):
        tokenizer = chat_tokenizer(template)
        assert TurnTemplate(tokenizer, chat=True, tools=TOOLS).shows_calls == is_shown
        assert TurnTemplate(tokenizer, chat=True, tools=None).shows_calls
        tokenizer.response_template = {"fields": {}}
        assert TurnTemplate(tokenizer, chat=True, tools=TOOLS).shows_calls


PIECES = [
    *("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|", "<pad>", "<unk>", "<role>", "<end_of_turn>", "\n", "x"),
    *("\ud800", "\udfff\ud800", "\0", "\x1b[2J", "\u202e", "\ue000cut\ue000", "x" * 5000, "{{ 1/0 }}", "{% raw %}"),
]


@cache
def turn_template(chat: bool, real: bool) -> TurnTemplate:
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2) if real else chat_tokenizer(CHATML + "{# <role> #}")
    if not real:  # tokens that the tokenizer has no name for
        tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True), AddedToken("<role>")])
    return TurnTemplate(tokenizer, chat=chat, tools=None)


@pytest.mark.parametrize(("chat", "real"), [(True, False), (False, False), (True, True)])
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8).map("".join), min_size=1))
def test_no_text_of_an_environment_is_a_special_token(chat: bool, real: bool, texts: list[str]) -> None:
    if real and not SMOLLM2.exists():
        pytest.skip("models/smollm2-135m is not there")
    template = turn_template(chat, real)
    tokenizer: Any = template.tokenizer
    unknown, role = tokenizer.convert_tokens_to_ids(["<unk>", "<role>"])
    ids, plain = (
        template.reply([Message("user", text) for text in found], tokenizer.eos_token_id)
        for found in (texts, ["."] * len(texts))
    )
    special, expected = (
        [one for one in found if template.is_special(one) and one != unknown] for found in (ids, plain)
    )
    assert special == expected
    assert real or role not in ids
    assert real or 2 * len(ids) >= len("".join(texts))  # nothing is left out
    assert tokenizer.eos_token_id not in template.open_episode([("user", "go")], texts[0])[: -len(plain)]
