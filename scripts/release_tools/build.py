"""Builds the executable for an older glibc and for other machines than this one, so that equal
sources give equal bytes."""
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

from release_tools.crates import PRODUCT, ROOT
from release_tools.elf import check_portability, format_version, read_requirements
from release_tools.error import ReleaseError

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MACHINES = ("x86_64", "aarch64")
# The glibc of RHEL 8. Ubuntu 20.04 has 2.31.
MAX_GLIBC = (2, 28)
MAX_EXECUTABLE_BYTES = 25_500_000
# With frame pointers, unwind tables and accesses to the stack are shorter on x86_64.
RUST_FLAGS = {"x86_64": ["-Cforce-frame-pointers=yes"], "aarch64": []}
# launch only decompresses zstd, but the compressor is linked with the crate parquet. These flags leave
# out all of its strategies but the fastest, and second copies of the decompressor for CPUs with BMI2.
ZSTD_FLAGS = [
    *(
        f"-DZSTD_EXCLUDE_{strategy}_BLOCK_COMPRESSOR"
        for strategy in ("DFAST", "GREEDY", "LAZY", "LAZY2", "BTLAZY2", "BTOPT", "BTULTRA")
    ),
    "-DDYNAMIC_BMI2=0",
]
# Variables of the user that would change the executable.
DROPPED_VARIABLES = (
    "AR",
    "CARGO_BUILD_",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_INCREMENTAL",
    "CARGO_PROFILE_",
    "CARGO_TARGET_",
    "CC",
    "CFLAGS",
    "CPATH",
    "CPPFLAGS",
    "CXX",
    "C_INCLUDE_PATH",
    "LDFLAGS",
    "LIBRARY_PATH",
    "OPENSSL_",
    "PKG_CONFIG",
    "RANLIB",
    "RUSTC",
    "RUSTDOC",
    "RUSTFLAGS",
    "ZSTD_",
)


def run(command, **options):
    """Runs a command, whose stdout becomes stderr. Fails with a `ReleaseError`."""
    result = subprocess.run(command, stdout=sys.stderr, **options)
    if result.returncode != 0:
        raise ReleaseError(f"{Path(command[0]).name} failed with exit code {result.returncode}")


def install_tools(directory):
    """Installs the pinned build tools into a virtual environment in `directory`, unless they are
    installed already. Returns the directory of their commands."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    environment = directory / f"tools-{digest}"
    complete = environment / "complete"
    if not complete.exists():
        venv.create(environment, clear=True, with_pip=True)
        pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run([*pip, "--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", REQUIREMENTS])
        complete.touch()
    return environment / "bin"


def find_zig(tools):
    """Returns the path of zig in the virtual environment whose commands are in `tools`."""
    command = [tools / "python", "-c", "import ziglang; print(ziglang.__path__[0])"]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(result.stdout.strip()) / "zig"


def find_home(variable, name):
    """Returns the directory of cargo or rustup."""
    return Path(os.environ.get(variable) or Path.home() / name)


def build_environment(machine, tools, directory, epoch):
    """Returns the environment variables of the build for `machine` in `directory` with the commands in
    `tools`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED_VARIABLES)}
    sysroot = subprocess.run(
        ["rustc", "--print", "sysroot"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    cargo = find_home("CARGO_HOME", ".cargo")
    # rustc applies the last prefix that matches. The paths of sources are a part of the executable,
    # so they are short.
    replaced = [
        (ROOT, "/launch"),
        (cargo, "/cargo"),
        *((path, "") for path in sorted(cargo.glob("registry/src/*"))),
        (sysroot, "/rust"),
        (directory, "/build"),
    ]
    remap = [f"--remap-path-prefix={path}={name}" for path, name in replaced]
    prefix_maps = " ".join(f"-ffile-prefix-map={path}={name}" for path, name in replaced)
    # C needs no unwind tables: Rust functions that C calls never unwind (`extern "C"` aborts).
    c_flags = f"{prefix_maps} -fno-asynchronous-unwind-tables {' '.join(ZSTD_FLAGS)}"
    if any(character.isspace() for character in prefix_maps.replace(" -", "")):
        raise ReleaseError(f"a path of {', '.join(str(path) for path, _ in replaced)} contains a space")
    return kept | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CARGO_TARGET_DIR": str(directory),
        "CARGO_INCREMENTAL": "0",
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(remap + RUST_FLAGS[machine]),
        "CARGO_ZIGBUILD_CACHE_DIR": str(directory / "linker"),
        "CARGO_ZIGBUILD_PYTHON_PATH": str(Path(__file__).with_name("zig_wrapper.sh")),
        "LAUNCH_ZIG": str(find_zig(tools)),
        "LAUNCH_ZIG_PYTHON": sys.executable,
        "CFLAGS": c_flags,
        "CXXFLAGS": prefix_maps,
        "ZIG_GLOBAL_CACHE_DIR": str(directory / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(directory / "zig"),
        "LIBZ_SYS_STATIC": "1",
        "SOURCE_DATE_EPOCH": str(epoch),
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def build_executable(machine, directory, epoch):
    """Builds the executable for `machine` in `directory`, checks it and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    tools = install_tools(directory)
    target = f"{machine}-unknown-linux-gnu"
    command = ["cargo-zigbuild", "zigbuild", "--profile", "dist", "--locked"]
    command += ["--package", PRODUCT, "--bin", PRODUCT]
    # The directory of the sources must exist, because its path is replaced.
    run(["cargo", "fetch", "--locked"], cwd=ROOT)
    environment = build_environment(machine, tools, directory, epoch)
    # The search for the command uses the variable PATH of this process, not that of the build.
    command[0] = tools / command[0]
    run([*command, "--target", f"{target}.{format_version(MAX_GLIBC)}"], cwd=ROOT, env=environment)
    executable = directory / target / "dist" / PRODUCT
    check_executable(executable, machine)
    return executable


def check_executable(path, machine):
    """Fails if the executable is for another machine, does not start on RHEL 8 and Ubuntu 20.04, or
    is too large."""
    requirements = read_requirements(path)
    if requirements.machine != machine:
        raise ReleaseError(f"{path} is for {requirements.machine}; expected {machine}")
    try:
        check_portability(requirements, MAX_GLIBC)
    except ReleaseError as error:
        raise ReleaseError(f"{path}: {error}") from error
    size = path.stat().st_size
    if size > MAX_EXECUTABLE_BYTES:
        raise ReleaseError(f"{path} has {size:,} bytes; the limit is {MAX_EXECUTABLE_BYTES:,}")
