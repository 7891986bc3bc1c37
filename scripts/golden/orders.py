#!/usr/bin/env python3
"""Generates worker/ckpt/tests/golden/orders.json: the weights of tiny models in the order in which
transformers registers them. torch's optimizers number their states in this order.

    ~/.cache/launch-tests/python/bin/python scripts/golden/orders.py
"""
import json
import pathlib

import transformers as t

OUT = pathlib.Path(__file__).resolve().parents[2] / "worker/ckpt/tests/golden/orders.json"
SIZES = dict(vocab_size=32, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
EXPERTS = dict(SIZES, head_dim=4, moe_intermediate_size=3, num_experts=4, num_experts_per_tok=2)
MODELS = {
    "Llama": t.LlamaForCausalLM(t.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "Mistral": t.MistralForCausalLM(t.MistralConfig(**SIZES, head_dim=4)),
    "Qwen2": t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES)),
    "Qwen3": t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, head_dim=4)),
    "Gemma": t.GemmaForCausalLM(t.GemmaConfig(**SIZES, head_dim=4)),
    "Gemma 2": t.Gemma2ForCausalLM(t.Gemma2Config(**SIZES, head_dim=4)),
    "Gemma 3": t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SIZES, head_dim=4)),
    "Phi-3": t.Phi3ForCausalLM(t.Phi3Config(**SIZES)),
    "Mixtral": t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_local_experts=4)),
    "Qwen3-MoE": t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**EXPERTS)),
    "Qwen3-MoE, dense and sparse layers": t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**EXPERTS, mlp_only_layers=[0])),
    "GPT-2": t.GPT2LMHeadModel(t.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)),
    "GPT-NeoX": t.GPTNeoXForCausalLM(t.GPTNeoXConfig(vocab_size=32, hidden_size=8, intermediate_size=6, num_hidden_layers=2,
                                                      num_attention_heads=2)),
    "OPT": t.OPTForCausalLM(t.OPTConfig(vocab_size=32, hidden_size=8, ffn_dim=6, num_hidden_layers=2, num_attention_heads=2,
                                        word_embed_proj_dim=4, max_position_embeddings=16)),
    "BERT": t.BertForSequenceClassification(t.BertConfig(vocab_size=32, hidden_size=8, intermediate_size=6, num_hidden_layers=2,
                                                         num_attention_heads=2, max_position_embeddings=16)),
}
orders = {name: [[n, list(p.shape)] for n, p in model.named_parameters()] for name, model in MODELS.items()}
with OUT.open("w") as f:
    f.write('{\n"transformers": ' + json.dumps(t.__version__))
    for name, order in orders.items():
        f.write(",\n" + json.dumps(name) + ": [\n" + ",\n".join(map(json.dumps, order)) + "]")
    f.write("\n}\n")
