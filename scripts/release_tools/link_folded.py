"""Links an executable so that equal machine code and equal constants are stored once.

    link_folded.py ZIG cc ARGUMENT…

`zig cc` has no options for this, but prints the command of the linker, LLD. This program runs zig, and
then the command of the linker again with the options.
"""
import os
import subprocess
import sys

# With these options, different functions and different constants can have the same address. Rust does
# not promise that addresses differ, and no C library in the executable compares those of equal objects.
OPTIONS = ["--icf=all", "--ignore-data-address-equality", "--hash-style=gnu"]


def main():
    zig, *arguments = sys.argv[1:]
    environment = os.environ | {"ZIG_VERBOSE_LINK": "1"}
    result = subprocess.run([zig, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    commands = [line.split() for line in result.stderr.splitlines() if line.startswith("ld.lld ")]
    if result.returncode != 0 or not commands:
        sys.stderr.write(result.stderr)
        return result.returncode
    # The paths contain no spaces (build.py). Zig links parts of the C library before the executable.
    return subprocess.run([zig, *commands[-1], *OPTIONS]).returncode


if __name__ == "__main__":
    sys.exit(main())
