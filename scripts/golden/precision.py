#!/usr/bin/env python3
"""Writes tests/golden/precision/errors.json: the errors of torch in bf16 and fp16, compared with fp32.

    python scripts/golden/precision.py [OUT]        # OUT: tests/golden/precision

The cases are those of scripts/golden/llama.py and scripts/golden/families.py, whose fp32 results are
golden files. The experts of a layer count as one tensor for each of their matrices.

The whole model is converted to 16 bits (`model.to(torch.bfloat16)`): weights, activations and
gradients have 16 bits, the logits become fp32 before the loss, and the optimizer updates fp32 master
weights. fp16 scales the loss by 2^10, with which no case overflows. Each tensor has two numbers: `rms`
is |a - b| / |b| over the whole tensor, and `max` the largest difference relative to the largest value.
tests/golden/precision/README.md describes how the file is used.
"""
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import families  # noqa: E402
import llama  # noqa: E402

DTYPES = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 1024.0)}


def compute_errors(a, b):
    """Returns the relative errors of `a` compared with `b`: `rms` and `max`."""
    a, b = a.double(), b.double()
    return dict(rms=((a - b).norm() / b.norm().clamp_min(1e-300)).item(),
                max=((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item())


def compute_gradients(case, model, batch, dtype, scale):
    """Returns logits and losses of one batch in fp32, and its gradients without the loss scale.
    Clears the gradients of the model."""
    tokens, labels, starts = batch
    logits = llama.compute_logits(model, tokens, starts, dtype).float()
    per_token, mean = llama.compute_loss(logits, labels)
    (mean * scale).backward()
    grads = {n: p.grad.float() / scale for n, p in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), per_token.detach(), mean.detach(), grads


def compute_16bit_case(case, dtype, scale):
    """Computes a case in 16 bits with fp32 master weights. Returns its tensors by name."""
    model = llama.create_model(case)
    master = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    model = model.to(dtype)
    batches = llama.create_batches(case)
    logits, per_token, loss, grads = compute_gradients(case, model, batches[0], dtype, scale)
    out = {"logits": logits, "loss_per_token": per_token, "loss": loss.reshape(1)}
    out |= {f"grad/{n}": g for n, g in grads.items()}
    decayed = [p for n, p in master.items() if llama.NO_DECAY_PATTERN not in n]
    plain = [p for n, p in master.items() if llama.NO_DECAY_PATTERN in n]
    optimizer = torch.optim.AdamW([dict(params=decayed, weight_decay=llama.WEIGHT_DECAY),
                                   dict(params=plain, weight_decay=0.0)], foreach=False, fused=False, **llama.ADAMW)
    losses, norms = [], []
    for batch in batches:
        _, _, loss, grads = compute_gradients(case, model, batch, dtype, scale)
        for n, g in grads.items():
            master[n].grad = g
        norms.append(torch.nn.utils.clip_grad_norm_(master.values(), case["clip_norm"] or float("inf"), foreach=False))
        optimizer.step()
        losses.append(loss)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(master[n])
    out |= {"losses": torch.stack(losses), "grad_norms": torch.stack(norms)}
    return out


def merge_experts(answers, model):
    """Concatenates the experts of a layer to one tensor per matrix."""
    out = {}
    for key, value in families.convert_to_stored_names(answers, model).items():
        before, _, rest = key.partition(".experts.")
        name = f"{before}.experts.{rest.split('.', 1)[1]}" if rest else key
        out.setdefault(name, []).append(value.flatten())
    return {name: torch.cat(values) for name, values in out.items()}


def generate_cases():
    """Yields each case. Before the cases of families.py, replaces functions of llama.py by those of
    families.py."""
    for name, case in llama.CASES.items():
        yield name, case
    llama.create_model, llama.compute_logits, llama.compute_loss = families.create_model, families.compute_logits, families.compute_loss
    for name, case in families.CASES.items():
        case = {"batch": 2, "seq": 20, **case}
        case["config"] = {"vocab_size": families.SIZES["vocab_size"], **case["config"]}
        llama.ADAMW["eps"] = case.get("eps", 1e-8)
        yield name, case


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/precision")
    out.mkdir(parents=True, exist_ok=True)
    answers = dict(torch=torch.__version__)
    for name, case in generate_cases():
        model = llama.create_model(case)
        exact = merge_experts(llama.compute_case(case, torch.float32), model)
        answers[name] = {}
        for precision, (dtype, scale) in DTYPES.items():
            got = merge_experts(compute_16bit_case(case, dtype, scale), model)
            answers[name][precision] = {k: compute_errors(v, exact[k]) for k, v in got.items()}
            worst = max(e["rms"] for e in answers[name][precision].values())
            assert worst < 10, f"{name} {precision}: {worst}"
            print(f"{name} {precision}: largest relative error {worst:.3f}", flush=True)
    lines = [f' "{name}": {{\n' + ",\n".join(f'  "{p}": ' + json.dumps({k: {n: float(f"{x:.3e}") for n, x in e.items()}
             for k, e in errs.items()}) for p, errs in per.items()) + "\n }" for name, per in answers.items() if name != "torch"]
    text = "{\n" + f' "torch": "{answers["torch"]}",\n' + ",\n".join(lines) + "\n}\n"
    json.loads(text)
    (out / "errors.json").write_text(text)
    print(f"{out / 'errors.json'}: {len(text)} bytes")


main()
