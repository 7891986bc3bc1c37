#!/usr/bin/env python3
"""Lets a CUDA build of torch run without the CUDA libraries it links to (several GB): CPU only.

    python cuda_stub_libraries.py SITE_PACKAGES/torch

One stub library defines every CUDA function that torch's libraries leave undefined. Each function
returns 100 ("no device"); functions that describe errors return a text. Every missing CUDA library is
replaced by an empty library that loads the stubs. The dynamic linker accepts a versioned symbol from
any library, except an unversioned one in the library that the version names.

Needs cc, nm and readelf.
"""
import re
import subprocess
import sys
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)[A-Za-z_]*\.so")
CUDA_FUNCTION = re.compile(r"(__)?(cu|nv|nccl)\w*$")
FUNCTIONS = "libcuda_functions.so"
EMPTY = "libcuda_empty.so"


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library))


def symbols(library, which):
    """Names of dynamic symbols without their version; `which` is --undefined-only or --defined-only."""
    return {line.split()[-1].split("@")[0] for line in output("nm", "-D", which, library).splitlines() if line.strip()}


def compile_library(source, path, *flags):
    command = ["cc", "-shared", "-fPIC", "-w", "-O0", "-fno-builtin", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", path]
    subprocess.run([*command, *flags], input=source, text=True, check=True)


def definition(name):
    if re.search("(String|Name)$", name):
        return f'const char *{name}(void) {{ return "no CUDA libraries here"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def main():
    lib = Path(sys.argv[1]) / "lib"
    libraries = [p for p in [*lib.glob("*.so*"), *lib.parent.glob("_C*.so")]
                 if p.name not in (FUNCTIONS, EMPTY) and not p.is_symlink()]
    missing = {n for p in libraries for n in needed(p) if CUDA_LIBRARY.match(n) and ((lib / n).is_symlink() or not (lib / n).is_file())}
    undefined = {n for p in libraries for n in symbols(p, "--undefined-only") if CUDA_FUNCTION.match(n)}
    defined = {n for p in libraries for n in symbols(p, "--defined-only")}
    source = "".join(map(definition, sorted(undefined - defined)))
    compile_library(source, lib / FUNCTIONS)
    compile_library("", lib / EMPTY, "-Wl,--no-as-needed", f"-L{lib}", f"-l:{FUNCTIONS}", "-Wl,-rpath,$ORIGIN")
    for name in sorted(missing):
        (lib / name).unlink(missing_ok=True)
        (lib / name).symlink_to(EMPTY)
    print(f"{len(missing)} CUDA libraries, {len(undefined - defined)} functions replaced by stubs")


if __name__ == "__main__":
    main()
