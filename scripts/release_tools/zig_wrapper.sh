#!/bin/sh
# Runs zig for cargo-zigbuild, which takes this script for a Python (CARGO_ZIGBUILD_PYTHON_PATH) and
# calls it as `zig_wrapper.sh -m ziglang ARGUMENT…`. An executable is linked by link_folded.py instead.
# LAUNCH_ZIG is the path of zig, and LAUNCH_ZIG_PYTHON that of a Python.
if [ "$1" = -m ]; then shift 2; fi
is_link=
if [ "$1" = cc ]; then is_link=yes; fi
for argument in "$@"; do
    case "$argument" in
        -c | -E | -S | -M | -MM | -v | -V | --version | -shared | -dump* | -print*) is_link= ;;
    esac
done
if [ -z "$is_link" ]; then exec "$LAUNCH_ZIG" "$@"; fi
exec "$LAUNCH_ZIG_PYTHON" "${0%/*}/link_folded.py" "$LAUNCH_ZIG" "$@"
