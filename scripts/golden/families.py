#!/usr/bin/env python3
"""Writes tests/golden/families/<case>/ with real transformers and real torch on the CPU: every family and variant.

    python scripts/golden/families.py [OUT [CASE…]]        # OUT: tests/golden/families

As scripts/golden/llama.py, whose arithmetic it uses, but each case is a folder as save_pretrained makes it (config.json and
model.safetensors: the initial weights), with the answers beside it. tests/golden/families/README.md says what the files hold.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config,
                          GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import llama as base

SIZES = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.15, rms_norm_eps=1e-5,
             use_cache=False, bos_token_id=None, eos_token_id=None)
GPT2_SIZES = dict(vocab_size=61, n_embd=20, n_inner=None, n_layer=2, n_head=4, n_positions=32, initializer_range=0.15,
                  attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None)
GEMMA = dict(attention_dropout=0.0, pad_token_id=0, tie_word_embeddings=True, head_dim=6, query_pre_attn_scalar=9)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}

CASES = {
    "llama_biases_tied": dict(kind=(LlamaConfig, LlamaForCausalLM), clip_norm=1.0, seed=1,
                              config=dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama_linear": dict(kind=(LlamaConfig, LlamaForCausalLM), clip_norm=None, seed=2,
                         config=dict(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})),
    "llama_llama3": dict(kind=(LlamaConfig, LlamaForCausalLM), clip_norm=None, seed=3,
                         config=dict(rope_parameters=LLAMA3, head_dim=8, tie_word_embeddings=True)),
    "mistral_window": dict(kind=(MistralConfig, MistralForCausalLM), clip_norm=1.0, seed=4,
                           config=dict(sliding_window=5)),
    "mistral_packed": dict(kind=(MistralConfig, MistralForCausalLM), clip_norm=None, seed=5,
                           config=dict(sliding_window=7), documents=[[9, 11], [20], [3, 12, 5]]),
    "qwen2": dict(kind=(Qwen2Config, Qwen2ForCausalLM), clip_norm=1.0, seed=6, config=dict(tie_word_embeddings=True)),
    "qwen2_sliding_layers": dict(kind=(Qwen2Config, Qwen2ForCausalLM), clip_norm=None, seed=7,
                                 config=dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": dict(kind=(Qwen3Config, Qwen3ForCausalLM), clip_norm=1.0, seed=8,
                  config=dict(head_dim=6, tie_word_embeddings=True)),
    "qwen3_biases": dict(kind=(Qwen3Config, Qwen3ForCausalLM), clip_norm=None, seed=9,
                         config=dict(attention_bias=True, num_key_value_heads=1)),
    # without a rotation a bias of k changes no score: AdamW must not make steps of the rounding errors of its gradient
    "gpt2": dict(kind=(GPT2Config, GPT2LMHeadModel), clip_norm=1.0, seed=10, eps=1e-4, config={}),
    "gpt2_packed": dict(kind=(GPT2Config, GPT2LMHeadModel), clip_norm=None, seed=11, eps=1e-4, documents=[[9, 11], [20], [3, 12, 5]],
                        config=dict(n_inner=36, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True,
                                    reorder_and_upcast_attn=True, layer_norm_epsilon=1e-4)),
    # caps that bite, a window shorter than the sequence in every second layer
    "gemma2": dict(kind=(Gemma2Config, Gemma2ForCausalLM), clip_norm=1.0, seed=12,
                   config=GEMMA | dict(sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": dict(kind=(Gemma3TextConfig, Gemma3ForCausalLM), clip_norm=None, seed=13,
                   config=GEMMA | dict(num_hidden_layers=3, sliding_window=5,
                                       layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                                       rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                                        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}})),
}


def make_config(case):
    if case["kind"][0] is GPT2Config:
        return GPT2Config(**{**GPT2_SIZES, **case["config"]}, attn_implementation="eager")
    extra = {} if "sliding_window" in case["config"] else (
        {"sliding_window": None} if case["kind"][0] is MistralConfig else {})
    return case["kind"][0](**{"rope_parameters": PLAIN, "tie_word_embeddings": False, **SIZES, **extra,
                              **case["config"]}, attn_implementation="eager")


def make_model(case):
    torch.manual_seed(case["seed"])
    model = case["kind"][1](make_config(case))
    with torch.no_grad():  # norms away from 1 and biases away from 0, so that a missing one shows
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.25 * torch.randn_like(p))
    return model


def window_of(config, layer):
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def forward(model, tokens, starts, dtype):
    """With several documents the mask is given; else the model makes its own, windows included."""
    b, t = tokens.shape
    if dtype is torch.float64:  # which reordering "up" to float32 refuses
        for module in model.modules():
            if hasattr(module, "reorder_and_upcast_attn"):
                module.reorder_and_upcast_attn = False
    i = torch.arange(t)
    positions = i[None].expand(b, t)
    if not bool((starts > 0).any()):
        return model(input_ids=tokens, position_ids=positions).logits
    windows = {window_of(model.config, l) for l in range(model.config.num_hidden_layers)}
    assert len(windows) == 1, "a mask for each kind of layer isn't needed here"
    window = windows.pop() or t
    allowed = ((i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= starts[:, :, None])
               & (i[None, None, :] > i[None, :, None] - window))
    mask = torch.zeros(b, 1, t, t, dtype=dtype).masked_fill(~allowed[:, None], torch.finfo(dtype).min)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits


def check_window(case):
    """A token outside of the window of a one-layer reach must not be seen: the case tests what it says."""
    config = make_config(case)
    windows = [window_of(config, l) for l in range(config.num_hidden_layers)]
    if any(windows):
        assert min(w for w in windows if w) < case["seq"], "a window that holds the whole sequence tests nothing"


def write(name, case, out):
    case = {"batch": 2, "seq": 20, **case}
    case["config"] = {"vocab_size": SIZES["vocab_size"], **case["config"]}
    base.make_model, base.forward = make_model, forward
    base.ADAMW["eps"] = case.get("eps", 1e-8)
    check_window(case)
    single, double = base.run(case, torch.float32), base.run(case, torch.float64)
    far = max(base.distance(single[k], double[k]) for k in single
              if "/" in k or k in ("logits", "loss", "losses", "grad_norms"))
    assert far < 5e-6, f"{name}: ill-conditioned: {far}"
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(case)
    model.save_pretrained(folder)
    names = {n for n, _ in model.named_parameters()}
    answers = {k: v.contiguous() for k, v in single.items() if k not in names}
    save_file(answers, folder / "answers.safetensors")
    for file in folder.iterdir():
        file.chmod(0o644)
    flat = lambda x: [base.IGNORE if n == -100 else n for n in x.flatten().tolist()]
    about = dict(batch=case["batch"], seq=case["seq"],
                 optimizer=dict(lr=base.ADAMW["lr"], eps=base.ADAMW["eps"], weight_decay=base.WEIGHT_DECAY, clip_norm=case["clip_norm"]),
                 torch=torch.__version__, float64_distance=far,
                 batches=[dict(tokens=flat(t), labels=flat(l), starts=flat(s)) for t, l, s in base.make_batches(case)])
    (folder / "case.json").write_text(json.dumps(about) + "\n")
    print(f"{name}: loss {single['loss'].item():.6f} -> {single['losses'][-1].item():.6f}, float64 distance {far:.1e}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests/golden/families"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            write(name, case, out)


if __name__ == "__main__":
    main()
