"""Writes the packages of one executable."""
import hashlib
import os
import re
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from release_tools import container, debian, wheel
from release_tools.archives import FileContent, build_tar, compress
from release_tools.crates import PRODUCT, ROOT, build_license_notice, read_metadata
from release_tools.elf import check_libraries, read_requirements
from release_tools.error import ReleaseError

DEFAULT_MAINTAINER = f"The developers of {PRODUCT} <{PRODUCT}@packages.invalid>"
DESCRIPTION = (
    "launch replaces torchrun, accelerate launch and deepspeed. After a failure, it reports which "
    "rank failed and why, and ends every process of the job on every host. It also trains language "
    "models without Python, and shards them over the workers as DeepSpeed's ZeRO does."
)
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "docs", "configs")
COMPLETIONS = {
    "bash": f"share/bash-completion/completions/{PRODUCT}",
    "zsh": f"share/zsh/site-functions/_{PRODUCT}",
    "fish": f"share/fish/vendor_completions.d/{PRODUCT}.fish",
}
# The oldest glibc that a wheel states. The executable may need an older one.
MIN_WHEEL_GLIBC = (2, 28)


@dataclass(frozen=True)
class Package:
    """What all packages of an executable state about the product."""

    name: str
    version: str
    machine: str
    license: str
    summary: str
    maintainer: str
    description: str = DESCRIPTION


def run(command):
    """Runs a command in the repository and returns its stdout as bytes."""
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    if result.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} failed with exit code {result.returncode}")
    return result.stdout


def find_epoch():
    """Returns the time of all files in the packages, in seconds: SOURCE_DATE_EPOCH or, without it,
    the time of the commit."""
    text = os.environ.get("SOURCE_DATE_EPOCH") or run(["git", "log", "-1", "--format=%ct"]).decode()
    if not re.fullmatch(r"\d{1,11}", text.strip()):
        raise ReleaseError(f"SOURCE_DATE_EPOCH is {text.strip()!r}; expected seconds since 1970")
    return int(text)


def describe(machine, generator, maintainer):
    """Returns the `Package` for an executable. `generator` is the executable for this machine, whose
    version must be that of Cargo.toml."""
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text())
    version, common = manifest["workspace"]["package"]["version"], manifest["workspace"]["package"]
    printed = run([generator, "--version"]).decode().strip()
    if printed != f"{PRODUCT} {version}":
        raise ReleaseError(f"{generator} prints the version {printed!r}; Cargo.toml has {version}")
    if not re.fullmatch(r"[^<>\n]+ <[^<>@\s]+@[^<>@\s]+>", maintainer):
        raise ReleaseError(f"the maintainer is {maintainer!r}; expected NAME <ADDRESS>")
    summary = manifest["package"]["description"][0].lower() + manifest["package"]["description"][1:]
    return Package(PRODUCT, version, machine, common["license"], summary, maintainer)


def list_documents():
    """Returns the documents of the repository, as paths relative to its root."""
    paths = []
    for name in DOCUMENTS:
        path = ROOT / name
        found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        paths += [p.relative_to(ROOT).as_posix() for p in found]
    return sorted(paths)


def build_prefix(executable, generator, bill, notice):
    """Returns the files of a prefix, such as /usr/local, with `FileContent` by relative path."""
    files = {f"bin/{PRODUCT}": FileContent(executable.read_bytes(), is_executable=True)}
    with tempfile.TemporaryDirectory() as directory:
        run([generator, "man", directory])
        for page in Path(directory).iterdir():
            files[f"share/man/man1/{page.name}"] = FileContent(page.read_bytes())
    for shell, path in COMPLETIONS.items():
        files[path] = FileContent(run([generator, "completions", shell]))
    documents = f"share/doc/{PRODUCT}"
    for name in list_documents():
        files[f"{documents}/{name}"] = FileContent((ROOT / name).read_bytes())
    files[f"{documents}/sbom.cdx.json"] = FileContent(bill)
    files[f"{documents}/THIRD-PARTY-LICENSES"] = FileContent(notice.encode())
    return dict(sorted(files.items()))


def write_packages(
    executable, out, *, generator, epoch, maintainer=DEFAULT_MAINTAINER, compression_level=9
):
    """Writes all packages of `executable` and their checksums to the directory `out`. `generator` is
    an executable for this machine, which prints man pages and completions. Returns the paths of the
    packages, with the tarball first."""
    requirements = read_requirements(executable)
    check_libraries(requirements)
    target = f"{requirements.machine}-unknown-linux-gnu"
    package = describe(requirements.machine, generator, maintainer)
    bill = run([ROOT / "scripts/sbom", "--executable", executable, "--target", target])
    prefix = build_prefix(executable, generator, bill, build_license_notice(read_metadata(target)))
    name = f"{package.name}-{package.version}-{package.machine}"
    glibc = max(requirements.find_glibc(), MIN_WHEEL_GLIBC)
    tarball = compress(build_tar(prefix, epoch, f"{name}/"), compression_level)
    packages = [
        (f"{name}.tar.gz", tarball),
        wheel.build_wheel(package, prefix, glibc, epoch, compression_level),
        debian.build_package(package, prefix, requirements, epoch, compression_level),
        (f"{name}.cdx.json", bill),
        ("Containerfile", container.build_containerfile(package).encode()),
    ]
    out.mkdir(parents=True, exist_ok=True)
    for file_name, data in packages:
        write_file(out / file_name, data)
        digest = hashlib.sha256(data).hexdigest()
        write_file(out / f"{file_name}.sha256", f"{digest}  {file_name}\n".encode())
    return [out / file_name for file_name, _ in packages]


def write_file(path, data):
    """Writes a file so that it has either its previous content or all of `data`, also after a loss
    of power."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    partial.replace(path)
