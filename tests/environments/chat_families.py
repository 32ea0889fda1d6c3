"""Small checkpoints with chat templates in the form of several families, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

QWEN_3 = """
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- set role = "ipython" if message.role == "tool" else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Family:
    """A template, and the kind of tokenizer that goes with it."""

    template: str
    closes: str
    """The control token that ends a turn."""
    controls: tuple[str, ...]
    pieces: bool = False
    """A SentencePiece tokenizer, which puts ▁ before the first word; else bytes."""
    system: bool = True
    """Whether the template knows the role `system`."""

    def write(self, folder: Path) -> Path:
        """Write tokenizer.json, tokenizer_config.json and the template to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        bos, eos = self.controls[0], self.closes
        make_tokenizer(self.controls, self.pieces).save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": {"__type": "AddedToken", "content": eos, "special": True},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "qwen3": Family(QWEN_3, "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "llama3": Family(
        LLAMA_3,
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": Family(MISTRAL, "</s>", ("<s>", "</s>", "[INST]", "[/INST]"), pieces=True),
    "gemma": Family(
        GEMMA, "<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>"), True, system=False
    ),
}


def make_tokenizer(controls: tuple[str, ...], pieces: bool) -> Tokenizer:
    """A tokenizer with a few merges, so that a text has many tokenizations."""
    if pieces:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet += [chr(code) for code in range(33, 127)] + ["▁"]
        space, text = "▁", "the quick answer is nine user model"
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        space, text = "Ġ", "the quick answer is nine user model"
    vocabulary = {piece: id for id, piece in enumerate((*controls, *alphabet))}
    merges = []
    for word in text.split():
        joined = space
        for letter in word:
            if joined + letter not in vocabulary:
                vocabulary[joined + letter] = len(vocabulary)
                merges.append((joined, letter))
            joined += letter
    if pieces:
        tokenizer = Tokenizer(
            models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=None)
        )
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in controls])
    return tokenizer
