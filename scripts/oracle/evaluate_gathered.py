#!/usr/bin/env python3
"""Loads a gathered directory with transformers and prints what it contains as one line of JSON.

    python evaluate_gathered.py DIRECTORY TEXT SEQ_LEN

`loss` is the mean cross-entropy of the file TEXT in windows of SEQ_LEN tokens. The text is one
document, followed by the end-of-document token.
"""
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


class WarningRecorder(logging.Handler):
    """Records the messages of all logged warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def compute_mean_loss(model, tokens, seq_len):
    """Returns the mean loss over all windows of `seq_len` tokens that have targets (summed in
    float64), and the number of windows."""
    windows = (len(tokens) - 1) // seq_len
    total = torch.zeros((), dtype=torch.float64)
    for i in range(windows):
        window = torch.tensor(tokens[i * seq_len:(i + 1) * seq_len + 1])
        logits = model(input_ids=window[None, :-1]).logits[0]
        total += F.cross_entropy(logits, window[1:], reduction="none").double().sum()
    return total.item() / (windows * seq_len), windows


def main():
    directory, text, seq_len = sys.argv[1], Path(sys.argv[2]).read_bytes().decode("utf-8"), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = WarningRecorder()
    logging.getLogger("transformers").addHandler(recorder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        all_warnings = recorder.messages + [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    model.eval()
    ids = tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        loss, windows = compute_mean_loss(model, [*ids, tokenizer.eos_token_id], seq_len)
        prompt = torch.tensor([ids[:16]])
        out = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(json.dumps({
        "class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters()),
        "missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(map(str, info["mismatched_keys"])), "warnings": all_warnings,
        "round_trip": tokenizer.decode(ids) == text, "windows": windows, "loss": loss,
        "generated": tokenizer.decode(out[0, 16:], skip_special_tokens=True),
    }))


if __name__ == "__main__":
    main()
