#!/usr/bin/env python3
"""Writes tests/golden/families/<case>/ with transformers and torch on the CPU: every family and variant.

    python scripts/golden/families.py [OUT [CASE…]]        # OUT: tests/golden/families

Uses the code of scripts/golden/llama.py. Each case is a directory that save_pretrained writes
(config.json and the initial weights in model.safetensors), with the results in the same directory.
tests/golden/families/README.md describes the files.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config,
                          GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          MixtralConfig, MixtralForCausalLM, Olmo2Config, Olmo2ForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import llama as base

cross_entropy, load_balancing_loss = base.compute_loss, 0.0

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
    # parameters for which some pairs of a head are blended
    "qwen2_yarn": dict(kind=(Qwen2Config, Qwen2ForCausalLM), clip_norm=None, seed=17,
                       config=dict(head_dim=8, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
                                                                "original_max_position_embeddings": 16})),
    "mistral_window": dict(kind=(MistralConfig, MistralForCausalLM), clip_norm=1.0, seed=4,
                           config=dict(sliding_window=5)),
    "mistral_packed": dict(kind=(MistralConfig, MistralForCausalLM), clip_norm=None, seed=5,
                           config=dict(sliding_window=7), documents=[[9, 11], [20], [3, 12, 5]]),
    # the padding token 1, Olmo2Config's default, occurs in the input
    "olmo2": dict(kind=(Olmo2Config, Olmo2ForCausalLM), clip_norm=1.0, seed=18, config={}),
    "olmo2_biases_tied": dict(kind=(Olmo2Config, Olmo2ForCausalLM), clip_norm=None, seed=20,
                              config=dict(attention_bias=True, tie_word_embeddings=True, pad_token_id=None, rope_parameters=LLAMA3),
                              documents=[[9, 11], [20], [3, 12, 5]]),
    "qwen2": dict(kind=(Qwen2Config, Qwen2ForCausalLM), clip_norm=1.0, seed=6, config=dict(tie_word_embeddings=True)),
    "qwen2_sliding_layers": dict(kind=(Qwen2Config, Qwen2ForCausalLM), clip_norm=None, seed=7,
                                 config=dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": dict(kind=(Qwen3Config, Qwen3ForCausalLM), clip_norm=1.0, seed=8,
                  config=dict(head_dim=6, tie_word_embeddings=True)),
    "qwen3_biases": dict(kind=(Qwen3Config, Qwen3ForCausalLM), clip_norm=None, seed=9,
                         config=dict(attention_bias=True, num_key_value_heads=1)),
    "mixtral": dict(kind=(MixtralConfig, MixtralForCausalLM), clip_norm=1.0, seed=10,
                    config=dict(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.05)),
    "mixtral_window": dict(kind=(MixtralConfig, MixtralForCausalLM), clip_norm=None, seed=11,
                           config=dict(num_local_experts=3, num_experts_per_tok=1, router_aux_loss_coef=0.3,
                                       sliding_window=6, tie_word_embeddings=True)),
    "qwen3_moe": dict(kind=(Qwen3MoeConfig, Qwen3MoeForCausalLM), clip_norm=1.0, seed=12,
                      config=dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=True,
                                  num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True,
                                  router_aux_loss_coef=0.02)),
    "qwen3_moe_sparse_step": dict(kind=(Qwen3MoeConfig, Qwen3MoeForCausalLM), clip_norm=None, seed=15,
                                  config=dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
                                              norm_topk_prob=False, num_hidden_layers=4, decoder_sparse_step=2,
                                              attention_bias=True, num_key_value_heads=1, use_sliding_window=True,
                                              sliding_window=7, router_aux_loss_coef=0.1)),
    # Without a rotary embedding the bias of k does not change the scores. The larger eps keeps AdamW
    # from turning the rounding errors of its gradient into steps.
    "gpt2": dict(kind=(GPT2Config, GPT2LMHeadModel), clip_norm=1.0, seed=10, eps=1e-4, config={}),
    "gpt2_packed": dict(kind=(GPT2Config, GPT2LMHeadModel), clip_norm=None, seed=11, eps=1e-4, documents=[[9, 11], [20], [3, 12, 5]],
                        config=dict(n_inner=36, tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True,
                                    reorder_and_upcast_attn=True, layer_norm_epsilon=1e-4)),
    # softcaps small enough to have an effect, and a window shorter than the sequence in every second layer
    "gemma2": dict(kind=(Gemma2Config, Gemma2ForCausalLM), clip_norm=1.0, seed=12,
                   config=GEMMA | dict(sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": dict(kind=(Gemma3TextConfig, Gemma3ForCausalLM), clip_norm=None, seed=13,
                   config=GEMMA | dict(num_hidden_layers=3, sliding_window=5,
                                       layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                                       rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                                        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}})),
}


def create_config(case):
    """Returns the transformers config of a case."""
    if case["kind"][0] is GPT2Config:
        return GPT2Config(**{**GPT2_SIZES, **case["config"]}, attn_implementation="eager")
    extra = {} if "sliding_window" in case["config"] else (
        {"sliding_window": None} if case["kind"][0] in (MistralConfig, MixtralConfig) else {})
    if has_experts(case):
        extra["experts_implementation"] = "eager"
    return case["kind"][0](**{"rope_parameters": PLAIN, "tie_word_embeddings": False, **SIZES, **extra,
                              **case["config"]}, attn_implementation="eager")


def has_experts(case):
    """Returns whether the model of a case is a mixture of experts."""
    return "router_aux_loss_coef" in case["config"]


def create_model(case):
    """Creates the model of a case with initial weights from the seed of the case."""
    torch.manual_seed(case["seed"])
    model = case["kind"][1](create_config(case))
    with torch.no_grad():  # norms differ from 1 and biases from 0, so that a missing one is detected
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.25 * torch.randn_like(p))
    return model


def find_layer_window(config, layer):
    """Returns the attention window of a layer, or None for full attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def compute_logits(model, tokens, starts, dtype):
    """Computes the logits. Passes an attention mask if a row has several documents; otherwise the
    model creates the mask. Sets the global load_balancing_loss."""
    b, t = tokens.shape
    if dtype is torch.float64:  # reorder_and_upcast_attn does not support it
        for module in model.modules():
            if hasattr(module, "reorder_and_upcast_attn"):
                module.reorder_and_upcast_attn = False
    i = torch.arange(t)
    positions = i[None].expand(b, t)
    if not bool((starts > 0).any()):
        out = model(input_ids=tokens, position_ids=positions,
                    **({"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}))
        global load_balancing_loss
        load_balancing_loss = 0.0
        if hasattr(model, "router_aux_loss_coef"):  # the loss that the model's forward pass adds if it gets labels
            load_balancing_loss = model.router_aux_loss_coef * load_balancing_loss_func(
                out.router_logits, model.config.num_local_experts, model.config.num_experts_per_tok)
            assert torch.equal(load_balancing_loss, model.router_aux_loss_coef * out.aux_loss)
        return out.logits
    windows = {find_layer_window(model.config, l) for l in range(model.config.num_hidden_layers)}
    assert len(windows) == 1, "layers with different masks are not supported"
    window = windows.pop() or t
    allowed = ((i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= starts[:, :, None])
               & (i[None, None, :] > i[None, :, None] - window))
    mask = torch.zeros(b, 1, t, t, dtype=dtype).masked_fill(~allowed[:, None], torch.finfo(dtype).min)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits


def compute_loss(logits, labels):
    """Returns the loss per token, and the mean loss plus the load-balancing loss of the last
    forward pass."""
    per_token, mean = cross_entropy(logits, labels)
    return per_token, mean + load_balancing_loss


def convert_to_stored_names(answers, model):
    """Splits the tensors with all experts of a layer into one tensor per expert, with the names
    that save_pretrained writes."""
    names = ("w1", "w3", "w2") if isinstance(model, MixtralForCausalLM) else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for key, value in answers.items():
        prefix, _, kind = key.rpartition(".experts.")
        if not prefix:
            out[key] = value
            continue
        if isinstance(model, MixtralForCausalLM):
            prefix = prefix.replace(".mlp", ".block_sparse_moe")
        for e, expert in enumerate(value):
            parts = zip(names[:2], expert.chunk(2)) if kind == "gate_up_proj" else [(names[2], expert)]
            out |= {f"{prefix}.experts.{e}.{name}.weight": part for name, part in parts}
    if isinstance(model, MixtralForCausalLM):
        out = {k.replace(".mlp.gate.", ".block_sparse_moe.gate."): v for k, v in out.items()}
    return out


def assert_window_is_shorter(case):
    """Asserts that the window of a case is shorter than its sequences."""
    config = create_config(case)
    windows = [find_layer_window(config, l) for l in range(config.num_hidden_layers)]
    if any(windows):
        assert min(w for w in windows if w) < case["seq"], "the window contains the whole sequence"


def write_case(name, case, out):
    """Computes a case in fp32 and float64, and writes its files. Fails if the two results differ
    too much."""
    case = {"batch": 2, "seq": 20, **case}
    case["config"] = {"vocab_size": SIZES["vocab_size"], **case["config"]}
    base.create_model, base.compute_logits, base.compute_loss = create_model, compute_logits, compute_loss
    base.ADAMW["eps"] = case.get("eps", 1e-8)
    assert_window_is_shorter(case)
    single, double = base.compute_case(case, torch.float32), base.compute_case(case, torch.float64)
    error = max(base.compute_distance(single[k], double[k]) for k in single
              if "/" in k or k in ("logits", "loss", "losses", "grad_norms"))
    assert error < 5e-6, f"{name}: ill-conditioned: {error}"
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    model = create_model(case)
    model.save_pretrained(directory)
    names = {n for n, _ in model.named_parameters()}
    answers = {k: v.contiguous() for k, v in single.items() if k not in names}
    if has_experts(case):
        answers = {k: v.contiguous() for k, v in convert_to_stored_names(answers, model).items()}
        stored = set(load_file(directory / "model.safetensors"))
        assert {k.removeprefix("grad/") for k in answers if k.startswith("grad/")} == stored
    save_file(answers, directory / "answers.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)
    flat = lambda x: [base.IGNORED_LABEL if n == -100 else n for n in x.flatten().tolist()]
    about = dict(batch=case["batch"], seq=case["seq"],
                 optimizer=dict(lr=base.ADAMW["lr"], eps=base.ADAMW["eps"], weight_decay=base.WEIGHT_DECAY, clip_norm=case["clip_norm"]),
                 torch=torch.__version__, float64_distance=error,
                 batches=[dict(tokens=flat(t), labels=flat(l), starts=flat(s)) for t, l, s in base.create_batches(case)])
    (directory / "case.json").write_text(json.dumps(about) + "\n")
    print(f"{name}: loss {single['loss'].item():.6f} -> {single['losses'][-1].item():.6f}, float64 distance {error:.1e}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests/golden/families"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    only = sys.argv[2:]
    for name, case in CASES.items():
        if not only or name in only:
            write_case(name, case, out)


if __name__ == "__main__":
    main()
