#!/usr/bin/env python3
"""Writes tests/golden/lora/<case>/ with PEFT, transformers and torch on the CPU: low-rank adapters.

    ~/.cache/launch-tests/deepspeed/bin/python scripts/golden/lora.py [OUT]        # OUT: tests/golden/lora

Each case begins with the weights of a directory of tests/golden/families, and with the adapters in its
directory `adapter`, which PEFT's save_pretrained writes. tests/golden/lora/README.md describes the files.
"""
import json
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

import families
import llama as base

CASES = {
    "q_v": dict(family="llama_linear", lora=dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])),
    "all_linear": dict(family="llama_biases_tied", lora=dict(r=2, lora_alpha=5, target_modules="all-linear")),
    "rslora": dict(family="qwen3", lora=dict(r=5, lora_alpha=4, use_rslora=True, target_modules=["k_proj", "o_proj", "up_proj", "down_proj"])),
    "one_module": dict(family="mistral_window", lora=dict(r=4, lora_alpha=8, target_modules=["model.layers.1.mlp.gate_proj", "layers.0.self_attn.q_proj"])),
    "gemma": dict(family="gemma3", lora=dict(r=2, lora_alpha=2, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"])),
    "gpt2": dict(family="gpt2", lora=dict(r=3, lora_alpha=3, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)),
    # attention in a model with experts
    "experts": dict(family="mixtral", lora=dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj"])),
}
PEFT_PREFIX = "base_model.model."
# The default eps of 1e-8 is as small as some gradients, so AdamW would amplify their rounding errors.
base.ADAMW["eps"] = 1e-6


def create_model(case, dtype):
    """Creates the model of a case with random adapters."""
    family = families.CASES[case["family"]]
    model = get_peft_model(families.create_model(family), LoraConfig(task_type="CAUSAL_LM", **case["lora"]))
    torch.manual_seed(family["seed"] + 1000)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:  # not zero as in PEFT, because A would have no gradient
                p.copy_(0.1 * torch.randn_like(p))
            elif ".lora_A." in name:
                p.copy_(0.2 * torch.randn_like(p))
    return model.to(dtype)


def list_trained(model):
    """Returns the trained parameters by their names in adapter files, without PEFT's prefix."""
    return {n.removeprefix(PEFT_PREFIX).replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}


def compute_case(case, about, dtype):
    """Computes a case. Returns its tensors by name, and the trained model."""
    peft = create_model(case, dtype)
    model = peft.base_model.model
    batches = base.create_batches(about)
    tokens, labels, starts = batches[0]
    logits = families.compute_logits(model, tokens, starts, dtype)
    per_token, mean = families.compute_loss(logits, labels)
    mean.backward()
    out = {"logits": logits.detach().clone(), "loss_per_token": per_token.detach().clone(),
           "loss": mean.detach().reshape(1).clone()}
    out |= {f"grad/{n}": p.grad.clone() for n, p in list_trained(peft).items()}
    peft.zero_grad()
    optimizer = torch.optim.AdamW(list(list_trained(peft).values()), weight_decay=base.WEIGHT_DECAY, foreach=False, fused=False, **base.ADAMW)
    losses, norms = [], []
    for tokens, labels, starts in batches:
        _, mean = families.compute_loss(families.compute_logits(model, tokens, starts, dtype), labels)
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(list_trained(peft).values()), about["clip_norm"] or float("inf"), foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.detach())
        norms.append(norm.detach())
    out |= {"losses": torch.stack(losses), "grad_norms": torch.stack(norms)}
    out |= {f"after10/{n}": p.detach().clone() for n, p in list_trained(peft).items()}
    return out, peft


def write_case(name, case, out):
    """Computes a case in fp32 and float64, and writes its adapters and results. Fails if the two
    results differ too much."""
    family = families.CASES[case["family"]]
    shape = dict(batch=2, seq=20, seed=family["seed"], clip_norm=family["clip_norm"],
                 config={"vocab_size": families.SIZES["vocab_size"], **family["config"]})
    single, _ = compute_case(case, shape, torch.float32)
    double, _ = compute_case(case, shape, torch.float64)
    error = max(base.compute_distance(single[k], double[k]) for k in single if k != "loss_per_token")
    assert error < 5e-6, f"{name}: ill-conditioned: {error}"
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    fresh = create_model(case, torch.float32)
    fresh.save_pretrained(directory / "adapter")
    (directory / "adapter/README.md").unlink()
    assert {PEFT_PREFIX + n for n in list_trained(fresh)} == set(get_peft_model_state_dict(fresh))
    before = {n.replace(".base_layer.", "."): p.clone() for n, p in fresh.base_model.model.named_parameters()}
    merged = fresh.merge_and_unload()
    single |= {f"merged/{n}": p.detach() for n, p in merged.named_parameters() if not torch.equal(p, before[n])}
    save_file({k: v.contiguous() for k, v in single.items()}, directory / "answers.safetensors")
    for file in [*directory.iterdir(), *(directory / "adapter").iterdir()]:
        file.chmod(0o755 if file.is_dir() else 0o644)
    flat = lambda x: [base.IGNORED_LABEL if n == -100 else n for n in x.flatten().tolist()]
    about = dict(batch=2, seq=20, family=case["family"],
                optimizer=dict(lr=base.ADAMW["lr"], eps=base.ADAMW["eps"], weight_decay=base.WEIGHT_DECAY, clip_norm=family["clip_norm"]),
                torch=torch.__version__, float64_distance=error,
                batches=[dict(tokens=flat(t), labels=flat(l), starts=flat(s)) for t, l, s in base.create_batches(shape)])
    (directory / "case.json").write_text(json.dumps(about) + "\n")
    print(f"{name}: loss {single['losses'][0].item():.6f} -> {single['losses'][-1].item():.6f}, float64 distance {error:.1e}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests/golden/lora"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    for name, case in CASES.items():
        write_case(name, case, out)


if __name__ == "__main__":
    main()
