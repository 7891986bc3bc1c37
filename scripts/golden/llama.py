#!/usr/bin/env python3
"""Writes tests/golden/llama/<case>/ with transformers (LlamaForCausalLM) and torch on the CPU.

    python scripts/golden/llama.py [OUT]        # OUT: tests/golden/llama

One thread, fp32, eager attention. tests/golden/llama/README.md describes the files.

Each case is also computed in float64. The distance between the results is written to case.json
(`float64_distance`) and must be small, because a case with an inaccurate fp32 result would test nothing.
"""
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED_LABEL = 4294967295  # a position without a loss, as a u32
STEPS = 10
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1
NO_DECAY_PATTERN = "norm"  # parameters whose names contain this have no weight decay

CASES = {
    # multi-head attention, untied head, clipped gradients
    "mha": dict(
        config=dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=False),
        batch=2, seq=12, clip_norm=1.0, seed=11),
    # grouped-query attention, tied head, no clipping
    "gqa_tied": dict(
        config=dict(vocab_size=128, hidden_size=32, intermediate_size=72, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True),
        batch=3, seq=10, clip_norm=None, seed=22),
    # sizes without common divisors, and a head dimension that is not a power of two
    "odd": dict(
        config=dict(vocab_size=257, hidden_size=42, intermediate_size=57, num_hidden_layers=1,
                    num_attention_heads=3, num_key_value_heads=1, head_dim=14, rms_norm_eps=1e-5,
                    tie_word_embeddings=False),
        batch=2, seq=9, clip_norm=None, seed=33),
    # several documents in one sequence, which do not attend to each other; positions are not reset
    "packed": dict(
        config=dict(vocab_size=64, hidden_size=24, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6,
                    tie_word_embeddings=True),
        batch=3, seq=16, clip_norm=1.0, seed=44, documents=[[5, 11], [16], [3, 7, 6]]),
}


def create_config(case):
    """Returns the transformers config of a case."""
    return LlamaConfig(max_position_embeddings=64, initializer_range=0.1, attention_bias=False, mlp_bias=False,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, use_cache=False,
                       bos_token_id=None, eos_token_id=None, attn_implementation="eager", **case["config"])


def create_model(case):
    """Creates the model of a case with initial weights from the seed of the case."""
    torch.manual_seed(case["seed"])
    model = LlamaForCausalLM(create_config(case))
    with torch.no_grad():  # norms differ from 1, so that a missing factor is detected
        for name, p in model.named_parameters():
            if NO_DECAY_PATTERN in name:
                p.add_(0.25 * torch.randn_like(p))
    return model


def create_batches(case):
    """Returns one batch per optimizer step: tokens, labels (labels[i] is the target of position i),
    and the start of each position's document."""
    g = torch.Generator().manual_seed(case["seed"] + 1000)
    b, t, v = case["batch"], case["seq"], case["config"]["vocab_size"]
    out = []
    for step in range(STEPS):
        tokens = torch.randint(0, v, (b, t + 1), generator=g)
        labels = tokens[:, 1:].clone()
        starts = torch.zeros(b, t, dtype=torch.int64)
        if "documents" in case:
            for row in range(b):
                lengths = case["documents"][(row + step) % b]
                assert sum(lengths) == t
                at = 0
                for n in lengths:
                    starts[row, at:at + n] = at
                    at += n
                    if at < t:
                        labels[row, at - 1] = -100  # the next token belongs to another document
        labels[torch.rand(b, t, generator=g) < 0.08] = -100
        out.append((tokens[:, :t].contiguous(), labels, starts))
    return out


def compute_logits(model, tokens, starts, dtype):
    """Computes the logits with an attention mask that separates documents."""
    b, t = tokens.shape
    i = torch.arange(t)
    allowed = (i[None, None, :] <= i[None, :, None]) & (i[None, None, :] >= starts[:, :, None])  # [b, query, key]
    mask = torch.zeros(b, 1, t, t, dtype=dtype).masked_fill(~allowed[:, None], torch.finfo(dtype).min)
    return model(input_ids=tokens, attention_mask=mask, position_ids=i[None].expand(b, t)).logits


def compute_loss(logits, labels):
    """Returns the loss per token and the mean loss over positions with a label."""
    per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return per_token, per_token.sum() / (labels != -100).sum()


def compute_case(case, dtype):
    """Computes a case. Returns its tensors by name: weights, results, and the losses and gradient
    norms of the steps."""
    model = create_model(case).to(dtype)
    batches = create_batches(case)
    out = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens, labels, starts = batches[0]
    logits = compute_logits(model, tokens, starts, dtype)
    per_token, mean = compute_loss(logits, labels)
    mean.backward()
    out |= {"logits": logits.detach().clone(), "loss_per_token": per_token.detach().clone(),
            "loss": mean.detach().reshape(1).clone()}
    out |= {f"grad/{name}": p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    decayed = [p for n, p in model.named_parameters() if NO_DECAY_PATTERN not in n]
    plain = [p for n, p in model.named_parameters() if NO_DECAY_PATTERN in n]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=plain, weight_decay=0.0)],
                                  foreach=False, fused=False, **ADAMW)
    losses, norms = [], []
    for tokens, labels, starts in batches:
        _, mean = compute_loss(compute_logits(model, tokens, starts, dtype), labels)
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"] or float("inf"), foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.detach())
        norms.append(norm.detach())
    out |= {"losses": torch.stack(losses), "grad_norms": torch.stack(norms)}
    out |= {f"after10/{name}": p.detach().clone() for name, p in model.named_parameters()}
    return out


def compute_distance(a, b):
    """Returns |a - b| / |b| over a whole tensor, or 0 if both are 0."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()


def assert_documents_are_separate(case):
    """Asserts that a changed token of a document does not affect the other documents."""
    model = create_model(case)
    tokens, _, starts = create_batches(case)[0]
    row = next(r for r in range(case["batch"]) if starts[r].max() > 0)
    first = int((starts[row] > 0).nonzero()[0])
    before = compute_logits(model, tokens, starts, torch.float32)
    tokens = tokens.clone()
    tokens[row, 0] = (tokens[row, 0] + 1) % case["config"]["vocab_size"]
    after = compute_logits(model, tokens, starts, torch.float32)
    assert torch.equal(before[row, first:], after[row, first:]), "a document attends to another one"
    assert not torch.equal(before[row, :first], after[row, :first])


def write_case(name, case, out):
    """Computes a case in fp32 and float64, and writes its files. Fails if the two results differ
    too much."""
    single, double = compute_case(case, torch.float32), compute_case(case, torch.float64)
    errors = {}
    for key in single:
        kind = key.split("/")[0] if "/" in key else (key if key in ("logits", "loss", "losses", "grad_norms") else None)
        if kind:
            errors[kind] = max(errors.get(kind, 0.0), compute_distance(single[key], double[key]))
    assert max(errors.values()) < 4e-6, f"{name}: ill-conditioned: {errors}"
    if "documents" in case:
        assert_documents_are_separate(case)
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    # named_parameters() lists a tied head once, as model.embed_tokens.weight
    save_file({k: v.contiguous() for k, v in single.items()}, directory / "tensors.safetensors")
    (directory / "tensors.safetensors").chmod(0o644)
    config = {k: v for k, v in create_config(case).to_dict().items() if k != "transformers_version"}
    config["architectures"] = ["LlamaForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    flat = lambda x: [IGNORED_LABEL if n == -100 else n for n in x.flatten().tolist()]
    about = dict(
        batch=case["batch"], seq=case["seq"], ignore=IGNORED_LABEL,
        optimizer=dict(name="adamw", lr=ADAMW["lr"], betas=ADAMW["betas"], eps=ADAMW["eps"],
                       weight_decay=WEIGHT_DECAY, no_decay=[f"*{NO_DECAY_PATTERN}*"], clip_norm=case["clip_norm"]),
        torch=torch.__version__, transformers=transformers.__version__, float64_distance=errors,
        batches=[dict(tokens=flat(t), labels=flat(l), starts=flat(s)) for t, l, s in create_batches(case)])
    text = json.dumps(about, indent=1)
    # joins each list of numbers to one line
    lines, depth = [], None
    for line in text.splitlines():
        if depth is None and line.endswith("[") and "batches" not in line:
            depth, joined = len(line) - len(line.lstrip()), [line]
        elif depth is not None:
            joined.append(line.strip())
            if line.strip() in ("]", "],") and len(line) - len(line.lstrip()) == depth:
                lines.append(joined[0] + " ".join(joined[1:-1]) + joined[-1])
                depth = None
        else:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    assert json.loads(text) == json.loads(json.dumps(about))
    (directory / "case.json").write_text(text)
    size = (directory / "tensors.safetensors").stat().st_size
    print(f"{name}: {sum(p.numel() for p in create_model(case).parameters())} parameters, {size} bytes, "
          f"loss {single['loss'].item():.6f} -> {single['losses'][-1].item():.6f}, "
          f"grad norms {min(single['grad_norms']).item():.3f}..{max(single['grad_norms']).item():.3f}, "
          f"float64 distance {max(errors.values()):.1e}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests/golden/llama"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        write_case(name, case, out)


if __name__ == "__main__":
    main()
