#!/usr/bin/env python3
"""Writes tests/golden/data/: chats that transformers renders and tokenizes, and Parquet files of pyarrow.

    python scripts/golden/data.py chats       # a Python with transformers and jinja2
    python scripts/golden/data.py parquet     # a Python with pyarrow

tests/golden/data/README.md describes the files.
"""
import json
import sys
from pathlib import Path

GOLDEN_DIRECTORY = Path(__file__).resolve().parents[2] / "tests/golden/data"

# Written for this test, with the white space and control flow of the families' own templates.
CHATML = """{%- if messages[0]['role'] == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        MARK_BEGIN
        {{- message.content + '<|im_end|>' }}
        MARK_END
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{% for message in messages %}
    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- content }}
    {% if message['role'] == 'assistant' %}
        MARK_BEGIN
        {{- message['content'] | trim + '<|eot_id|>' }}
        MARK_END
    {% else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
INSTRUCTIONS = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}MARK_BEGIN{{ ' ' + message['content'] + eos_token }}MARK_END{% endif %}{% endfor %}"""
TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set lead = messages[0]['content'] + '\\n\\n' %}{% set rest = messages[1:] %}{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}
{% set ns = namespace(first=true) %}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message.role -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\\n' + (lead if ns.first else '') }}
{%- set ns.first = false -%}
{%- if message.role == 'assistant' -%}
MARK_BEGIN{{ message.content | trim }}{{ '<end_of_turn>\\n' }}MARK_END
{%- else -%}
{{ message.content | trim }}{{ '<end_of_turn>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
TOOLS = """{%- if tools %}{{- 'Tools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n' }}{%- endif %}
{%- for message in messages %}{%- if message.role == 'assistant' %}{{- 'A: ' }}MARK_BEGIN{%- if message.tool_calls %}{%- for call in message.tool_calls %}{{- call.name + '(' + (call.arguments | tojson) + ')' }}{%- endfor %}{%- else %}{{- message.content }}{%- endif %}{{- eos_token }}MARK_END{{- '\\n' }}{%- else %}{{- message.role.upper() + ': ' + message.content + '\\n' }}{%- endif %}{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instructions": INSTRUCTIONS, "turns": TURNS, "tools": TOOLS}

PLAIN_MESSAGES = [{"role": "user", "content": " What is 2 + 2?\n"}, {"role": "assistant", "content": "4, of course."},
        {"role": "user", "content": "Grüße — and <b>tags</b> & \"quotes\"?"}, {"role": "assistant", "content": "Sure:\n  1. é\n  2. 🦀 \n"}]
CHATS = {
    "talk": {"messages": PLAIN_MESSAGES},
    "system": {"messages": [{"role": "system", "content": "You are terse."}] + PLAIN_MESSAGES[:2]},
    "unanswered": {"messages": PLAIN_MESSAGES[:3]},
    "tools": {"messages": [{"role": "user", "content": "Weather?"},
                           {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}}]},
                           {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}],
              "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}, "days": {}}}}]},
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
           "<end_of_turn>", "[INST]", "[/INST]"]


def create_tokenizer():
    """Trains a BPE tokenizer with 300 tokens on the chats."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    inner.train_from_iterator([json.dumps(c, ensure_ascii=False) for c in CHATS.values()] * 5, trainer)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def write_chats():
    """Writes the tokenizer, and the text, tokens and mask with which transformers renders each chat
    in each template, or its error."""
    t = create_tokenizer()
    t.backend_tokenizer.save(str(GOLDEN_DIRECTORY / "tokenizer.json"))
    (GOLDEN_DIRECTORY / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}) + "\n")
    cases = []
    for name, template in TEMPLATES.items():
        for dashes in (("{%- generation %}", "{%- endgeneration %}"), ("{% generation %}", "{% endgeneration %}")):
            marked = template.replace("MARK_BEGIN", dashes[0]).replace("MARK_END", dashes[1])
            for chat_name, chat in CHATS.items():
                case = {"template": marked, "name": f"{name}/{chat_name}", "chat": chat}
                try:
                    options = dict(chat_template=marked, tools=chat.get("tools"))
                    case["text"] = t.apply_chat_template(chat["messages"], tokenize=False, **options)
                    got = t.apply_chat_template(chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options)
                    case["tokens"], case["mask"] = got["input_ids"], got["assistant_masks"]
                except Exception as e:
                    case["error"] = str(e).splitlines()[0]
                cases.append(case)
    (GOLDEN_DIRECTORY / "chats.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
    print(len(cases), "cases,", sum("error" in c for c in cases), "with an error")


def write_parquet_files():
    """Writes the same texts as Parquet files with different encodings, and the chats as a Parquet
    file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"document {i}: " + "é🦀 "[i % 3] * (i % 17) for i in range(200)]
    table = pa.table({"id": list(range(200)), "text": texts, "score": [i / 7 for i in range(200)]})
    pq.write_table(table, GOLDEN_DIRECTORY / "snappy.parquet", row_group_size=64, compression="snappy")
    pq.write_table(table, GOLDEN_DIRECTORY / "zstd_v2.parquet", row_group_size=150, compression="zstd", data_page_version="2.0", use_dictionary=False)
    pq.write_table(table.set_column(1, "text", pa.array(texts, pa.large_string())), GOLDEN_DIRECTORY / "plain_large.parquet", compression="none")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    rows = [c["messages"] for n, c in CHATS.items() if n != "tools"]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(message)), "source": ["a"] * len(rows)}), GOLDEN_DIRECTORY / "chats.parquet")
    (GOLDEN_DIRECTORY / "texts.json").write_text(json.dumps(texts, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    {"chats": write_chats, "parquet": write_parquet_files}[sys.argv[1]]()
