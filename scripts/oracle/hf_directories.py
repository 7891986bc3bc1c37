#!/usr/bin/env python3
"""Creates Hugging Face directories, and compares them with the directories that launch writes.

    python hf_directories.py make DIRECTORY CASE        saves a tiny model with a tokenizer
    python hf_directories.py compare SOURCE GATHERED    prints all visible differences as one line of JSON
"""
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig,
                          GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

SIZES = dict(vocab_size=300, hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=256, eos_token_id=256)
CASES = {
    # name: config, model, dtype, shard size
    "llama": (LlamaConfig(**SIZES, head_dim=6, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
                          rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                           "high_freq_factor": 4.0, "original_max_position_embeddings": 512}),
              LlamaForCausalLM, torch.float32, "60KB"),
    "mistral": (MistralConfig(**SIZES, head_dim=6, sliding_window=5), MistralForCausalLM, torch.bfloat16, "5GB"),
    "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=True), Qwen2ForCausalLM, torch.bfloat16, "20KB"),
    "gpt2": (GPT2Config(vocab_size=300, n_embd=36, n_layer=3, n_head=6, n_positions=80, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
                        bos_token_id=256, eos_token_id=256), GPT2LMHeadModel, torch.float32, "50KB"),
    "gpt2_untied": (GPT2Config(vocab_size=300, n_embd=36, n_layer=3, n_head=6, n_positions=80, bos_token_id=256, eos_token_id=256,
                               tie_word_embeddings=False), GPT2LMHeadModel, torch.bfloat16, "5GB"),
    "gemma2": (Gemma2Config(**SIZES, head_dim=6, query_pre_attn_scalar=6, sliding_window=5), Gemma2ForCausalLM, torch.float32, "40KB"),
    "gemma3": (Gemma3TextConfig(**SIZES, head_dim=6, query_pre_attn_scalar=6, sliding_window=5), Gemma3ForCausalLM, torch.bfloat16, "20KB"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True), Qwen3ForCausalLM, torch.float32, "40KB"),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=4), MixtralForCausalLM, torch.bfloat16, "50KB"),
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, head_dim=6, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                                 mlp_only_layers=[1], tie_word_embeddings=True), Qwen3MoeForCausalLM, torch.float32, "40KB"),
}


def create_tokenizer():
    """Creates a tokenizer in which each byte is a token, and token 256 ends a document."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<|endoftext|>": 256}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def save_model(directory, name):
    """Saves the model of a case and the tokenizer in a directory."""
    config, kind, dtype, shard = CASES[name]
    torch.manual_seed(5)
    model = kind(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.generation_config = GenerationConfig(bos_token_id=256, eos_token_id=256, temperature=0.5, do_sample=True)
    model.save_pretrained(directory, max_shard_size=shard)
    create_tokenizer().save_pretrained(directory)


def read_tensors(directory):
    """Reads all tensors of a directory by name."""
    out = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        out |= load_file(file)
    return out


INDEX_FILE = "model.safetensors.index.json"


def read_index(directory):
    """Returns the content of the index file. Returns an empty dict if there is only one weight
    file."""
    path = Path(directory) / INDEX_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def list_shard_sizes(directory):
    """Returns the bytes of tensors in each shard file, in order."""
    files = sorted(Path(directory).glob("*.safetensors"))
    return [sum(t.numel() * t.element_size() for t in load_file(f).values()) for f in files]


class WarningRecorder(logging.Handler):
    """Records the messages of all logged warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def compare_directories(source, gathered):
    """Loads `gathered` with transformers, compares it with `source`, and prints the differences as
    JSON."""
    recorder = WarningRecorder()
    logging.getLogger("transformers").addHandler(recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, info = AutoModelForCausalLM.from_pretrained(gathered, dtype="auto", output_loading_info=True)
        AutoTokenizer.from_pretrained(gathered)
        all_warnings = recorder.messages + [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    ours, theirs = read_tensors(gathered), read_tensors(source)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    is_same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits[a.dtype]), b.view(bits[b.dtype]))
    config = [json.loads((Path(f) / "config.json").read_text()) for f in (gathered, source)]
    names = [{p.name for p in Path(f).iterdir() if p.suffix != ".safetensors"} for f in (gathered, source)]
    texts = [n for n in sorted(names[1] - {"config.json", "model.safetensors.index.json"})
             if n not in names[0] or (Path(gathered) / n).read_text() != (Path(source) / n).read_text()]
    print(json.dumps({
        "class": type(model).__name__, "tensors": len(theirs), "warnings": all_warnings,
        "missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"]),
        "names": sorted(set(ours) ^ set(theirs)),
        "values": sorted(n for n in set(ours) & set(theirs) if not is_same(ours[n], theirs[n])),
        "config": sorted(k for k in config[0].keys() | config[1].keys() if config[0].get(k) != config[1].get(k)),
        "files": [what for what, f in (("index", read_index), ("sizes", list_shard_sizes)) if f(source) != f(gathered)],
        "texts": texts, "more": sorted(names[0] - names[1]),
    }))


def main():
    torch.set_num_threads(1)
    {"make": save_model, "compare": compare_directories}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
