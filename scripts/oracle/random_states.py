"""Creates and checks the RNG states that HF Trainer and Accelerate save, with Python, numpy and torch.

    random_states.py make DIR trainer|accelerate WORLD [--per-rank KIND…] [--cuda one|all]
    random_states.py check DIR WORLD SOURCE SOURCE_WORLD

`make` writes the files of WORLD ranks. `check` loads those of DIR as the programs do and sets every
generator. Then it compares the states and the next 1,000 draws with those that docs/numerics.md requires:
those of SOURCE, or those of a generator that this script seeds by the rule (with a separate BLAKE3).
`check` prints one line of JSON.
"""
import argparse
import json
import os
import random
import struct
import sys

import numpy as np
import torch

DRAW_COUNT = 1000


def compute_blake3(message):
    """Returns the BLAKE3 hash of at most 64 bytes (one block). Written from the specification."""
    assert len(message) <= 64
    mask = 0xFFFFFFFF
    iv = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
    words = list(struct.unpack("<16I", message.ljust(64, b"\0")))
    v = iv + iv[:4] + [0, 0, len(message), 1 | 2 | 8]  # chunk start, chunk end, root

    def rotate(x, n):
        return (x >> n | x << (32 - n)) & mask

    def mix(a, b, c, d, x, y):
        v[a] = (v[a] + v[b] + x) & mask
        v[d] = rotate(v[d] ^ v[a], 16)
        v[c] = (v[c] + v[d]) & mask
        v[b] = rotate(v[b] ^ v[c], 12)
        v[a] = (v[a] + v[b] + y) & mask
        v[d] = rotate(v[d] ^ v[a], 8)
        v[c] = (v[c] + v[d]) & mask
        v[b] = rotate(v[b] ^ v[c], 7)

    for _ in range(7):
        m = words
        mix(0, 4, 8, 12, m[0], m[1]), mix(1, 5, 9, 13, m[2], m[3]), mix(2, 6, 10, 14, m[4], m[5]), mix(3, 7, 11, 15, m[6], m[7])
        mix(0, 5, 10, 15, m[8], m[9]), mix(1, 6, 11, 12, m[10], m[11]), mix(2, 7, 8, 13, m[12], m[13]), mix(3, 4, 9, 14, m[14], m[15])
        words = [words[i] for i in (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)]
    return struct.pack("<8I", *(v[i] ^ v[i + 8] for i in range(8)))


STATE_KEYS = {
    "trainer": dict(python="python", numpy="numpy", torch_cpu="cpu", torch_cuda="cuda"),
    "accelerate": dict(python="random_state", numpy="numpy_random_seed", torch_cpu="torch_manual_seed", torch_cuda="torch_cuda_manual_seed"),
}


def get_state_path(directory, style, rank, world):
    """Returns the file in which a program saves the RNG states of a rank."""
    if style == "accelerate":
        return os.path.join(directory, f"random_states_{rank}.pkl")
    return os.path.join(directory, "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth")


def write_states(args):
    """Writes the RNG state files of all ranks, as the program of `args.style` does."""
    keys = STATE_KEYS[args.style]
    for rank in range(args.world):
        extra = {kind: rank if kind in args.per_rank else 0 for kind in keys}
        random.seed(11), np.random.seed(12), torch.manual_seed(13)
        for _ in range(3 + extra["python"]):
            random.random(), random.gauss(0, 1)
        np.random.random(700 + extra["numpy"]), np.random.standard_normal(1)  # numpy caches a second one
        torch.rand(5 + extra["torch_cpu"]), torch.randn(1)
        states = {keys["python"]: random.getstate(), keys["numpy"]: np.random.get_state(), keys["torch_cpu"]: torch.get_rng_state()}
        if args.style == "accelerate":
            states = {"step": 7, **states}
        device = lambda n: torch.tensor(list(struct.pack("<Qq", 13, 4 * n)), dtype=torch.uint8)
        if args.cuda == "one":
            states[keys["torch_cuda"]] = device(9)
        if args.cuda == "all":
            # A rank only uses its own device, so the states of the others are unchanged.
            states[keys["torch_cuda"]] = [device(9 + extra["torch_cuda"] if d == rank else 0) for d in range(args.world)]
        torch.save(states, get_state_path(args.dir, args.style, rank, args.world))


def load_states(directory, style, rank, world):
    """Loads the RNG states of a rank, as the program of `style` does."""
    from transformers.trainer_pt_utils import safe_globals  # the types that Trainer allows

    with safe_globals():
        states = torch.load(get_state_path(directory, style, rank, world), weights_only=True)
    return {kind: states[key] for kind, key in STATE_KEYS[style].items() if key in states} | {"step": states.get("step")}


def draw_numbers(states):
    """Sets every generator to these states and returns its next numbers."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch_cpu"])
    return dict(
        python=[random.gauss(0, 1) for _ in range(3)] + [random.random() for _ in range(DRAW_COUNT)],
        numpy=np.random.standard_normal(3).tolist() + np.random.random(DRAW_COUNT).tolist(),
        torch_cpu=torch.randn(1).tolist() + torch.randint(0, 1 << 31, (DRAW_COUNT,)).tolist())


def to_comparable(state):
    """Converts a state to a value that is equal only for bit-equal states."""
    if isinstance(state, tuple) and state[0] == "MT19937":
        name, words, *rest = state
        return name, str(words.dtype), words.tolist(), *rest
    return bytes(state.tolist()) if torch.is_tensor(state) else state


def draw_seeded_numbers(record, kind, rank):
    """Seeds an RNG stream by the rule of docs/numerics.md. Returns its next numbers, its seed, and
    its initial state."""
    number = lambda n: struct.pack("<Q", n)
    digest = compute_blake3(number(record["run_seed"]) + b"rng-reconcile" + number(record["generation"]) + number(record["step"]) + kind.encode() + number(rank))
    words, seed = list(struct.unpack("<8I", digest)), struct.unpack("<Q", digest[:8])[0]
    if kind == "python":
        random.seed(int.from_bytes(digest, "little"))
        state = random.getstate()
        return [random.gauss(0, 1) for _ in range(3)] + [random.random() for _ in range(DRAW_COUNT)], seed, state
    np.random.seed(words)
    state = np.random.get_state()
    if kind == "numpy":
        return np.random.standard_normal(3).tolist() + np.random.random(DRAW_COUNT).tolist(), seed, to_comparable(state)
    if kind == "torch_cuda":
        return [], seed, struct.pack("<Qq", seed, 0)
    # torch uses the same Mersenne Twister. Its state is that after manual_seed, with numpy's words.
    torch.manual_seed(seed)
    fresh = bytes(torch.get_rng_state().tolist())
    state = fresh[:24] + struct.pack("<624Q", *state[1].tolist()) + fresh[24 + 8 * 624:]
    return [int(w) for w in np.random.randint(0, 1 << 32, DRAW_COUNT, dtype=np.uint32)], seed, state


def check_states(args):
    """Checks the prepared RNG states of all ranks and prints one line of JSON."""
    style = "accelerate" if os.path.exists(os.path.join(args.dir, "random_states_0.pkl")) else "trainer"
    files = sorted(f for f in os.listdir(args.dir) if f.startswith(("rng_state", "random_states")))
    assert files == sorted(os.path.basename(get_state_path("", style, r, args.world)) for r in range(args.world)), files
    record = json.load(open(os.path.join(args.dir, "launch_rng.json")))
    modes = {s["kind"]: s["mode"] for s in record["streams"]}
    streams = set()
    for rank in range(args.world):
        new = load_states(args.dir, style, rank, args.world)
        now = draw_numbers(new)
        for kind, mode in modes.items():
            if mode in ("restored", "replicated"):
                old = load_states(args.source, style, rank if mode == "restored" else 0, args.source_world)
                want = draw_numbers(old).get(kind)
            else:
                scope = next(s["scope"] for s in record["streams"] if s["kind"] == kind)
                want, seed, state = draw_seeded_numbers(record, kind, 0 if scope == "replicated" else rank)
            if kind == "torch_cuda":
                current = new[kind] if torch.is_tensor(new[kind]) else new[kind][rank % len(new[kind])]
                if mode == "reseeded":
                    assert to_comparable(current) == state, (kind, rank)
                else:
                    before = old[kind] if torch.is_tensor(old[kind]) else old[kind][(rank if mode == "restored" else 0) % len(old[kind])]
                    assert torch.equal(current, before), (kind, rank)
                streams.add((kind, bytes(current.tolist())))
                continue
            assert to_comparable(new[kind]) == (state if mode == "reseeded" else to_comparable(old[kind])), (kind, rank, mode)
            if kind == "torch_cpu" and mode == "reseeded":
                torch.set_rng_state(new[kind])
                assert torch.initial_seed() == seed, (kind, rank)
                # torch makes a float of the lower 24 bits of a draw.
                now[kind] = (torch.rand(DRAW_COUNT, dtype=torch.float32).double() * (1 << 24)).long().tolist()
                want = [w & 0xFFFFFF for w in want]
            assert now[kind] == want, (kind, rank, mode, now[kind][:3], want[:3])
            streams.add((kind, tuple(now[kind][:8])))
    counts = {kind: sum(k == kind for k, _ in streams) for kind in modes}
    print(json.dumps(dict(modes=modes, different=counts, steps=new["step"], record=record)))


arguments = argparse.ArgumentParser()
verbs = arguments.add_subparsers(required=True)
verb = verbs.add_parser("make")
verb.add_argument("dir"), verb.add_argument("style", choices=STATE_KEYS), verb.add_argument("world", type=int)
verb.add_argument("--per-rank", nargs="*", default=[]), verb.add_argument("--cuda", choices=["one", "all"])
verb.set_defaults(run=write_states)
verb = verbs.add_parser("check")
verb.add_argument("dir"), verb.add_argument("world", type=int), verb.add_argument("source"), verb.add_argument("source_world", type=int)
verb.set_defaults(run=check_states)

if __name__ == "__main__":
    # `--` separates several calls, which share a process because importing torch takes long.
    calls, call = [], []
    for word in sys.argv[1:] + ["--"]:
        if word == "--":
            calls.append(call)
            call = []
        else:
            call.append(word)
    for call in calls:
        parsed = arguments.parse_args(call)
        parsed.run(parsed)
