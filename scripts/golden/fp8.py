#!/usr/bin/env python3
"""Writes tests/golden/fp8/casts.txt: torch's conversions to float8_e4m3fn and float8_e5m2.

    python scripts/golden/fp8.py [OUT]        # OUT: tests/golden/fp8

tests/golden/fp8/README.md describes the lines.
"""
import struct
import sys
from pathlib import Path

import torch

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def decode_float_bits(bits):
    """Returns the fp32 numbers with these bits."""
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def encode_fp8(bits, dtype):
    """Converts fp32 numbers, given by their bits, to fp8. Returns the bytes."""
    return decode_float_bits(bits).to(dtype).view(torch.uint8).tolist()


def encode_float_bits(x):
    """Returns the bits of a number in fp32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def generate_lines(name, dtype):
    """Yields the lines of one fp8 type: the value of each byte, the bf16 inputs at which the result
    changes, and fp32 inputs near the middle of two neighbours."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().view(torch.int32).tolist()
    for code, bits in enumerate(values):
        yield f"{name} value {bits & 0xffffffff:08x} {code:02x}"
    last = None
    for bits, code in enumerate(encode_fp8([b << 16 for b in range(1 << 16)], dtype)):
        if code != last:
            yield f"{name} bf16 {bits:04x} {code:02x}"
        last = code
    finite = sorted({abs(x) for x in decode_float_bits([v & 0xffffffff for v in values]).tolist() if abs(x) < float("inf")})
    finite.append(2 * finite[-1] - finite[-2])  # the number that would follow the largest one
    middles = [encode_float_bits((a + b) / 2) for a, b in zip(finite, finite[1:])]
    near = [b + offset for b in middles for offset in (-1, 0, 1)]
    near += [b | 1 << 31 for b in near]
    for bits, code in zip(near, encode_fp8(near, dtype)):
        yield f"{name} f32 {bits:08x} {code:02x}"


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "tests/golden/fp8")
    out.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" for name, dtype in FP8_DTYPES.items() for line in generate_lines(name, dtype))
    (out / "casts.txt").write_text(text)
    print(f"{out / 'casts.txt'}: torch {torch.__version__}")


main()
