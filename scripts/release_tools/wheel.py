"""Builds a Python wheel, from which `pip` installs the executable, man pages, completions and
documents into an environment."""
import base64
import hashlib
import re

from release_tools.archives import FileContent, build_zip
from release_tools.error import ReleaseError

# Phases of a version of Cargo.toml, in the notation of PEP 440.
PHASES = {"alpha": "a", "beta": "b", "rc": "rc"}


def convert_version(version):
    """Returns a version of Cargo.toml, such as 0.2.0-rc.1, in the notation of PEP 440."""
    match = re.fullmatch(r"(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.?(\d+))?", version)
    if not match:
        raise ReleaseError(f"the version {version} has no equivalent in PEP 440; expected 1.2.3 or 1.2.3-rc.1")
    release, phase, number = match.groups()
    return release + (PHASES[phase] + number if phase else "")


def build_metadata(package):
    """Returns the core metadata (version 2.4) of the wheel."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {package.name}",
        f"Version: {convert_version(package.version)}",
        f"Summary: {package.summary}",
        f"License-Expression: {package.license}",
        "License-File: LICENSE",
        "License-File: THIRD-PARTY-LICENSES",
        "Classifier: Environment :: Console",
        "Classifier: Environment :: GPU :: NVIDIA CUDA",
        "Classifier: Operating System :: POSIX :: Linux",
        "Classifier: Programming Language :: Rust",
        "Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Description-Content-Type: text/markdown",
        "",
        package.description,
        "",
        "The wheel contains the executable `launch` and no Python module. In the environment into",
        "which pip installs it, `share/doc/launch` has the documentation and example jobs, and",
        "`share/man` has the man pages.",
    ]
    return "\n".join(lines) + "\n"


def build_wheel(package, prefix, glibc, epoch, level):
    """Returns file name and bytes of the wheel of the files of `prefix`, for a machine with glibc
    `glibc` or newer."""
    version = convert_version(package.version)
    tag = f"py3-none-manylinux_{glibc[0]}_{glibc[1]}_{package.machine}"
    name = f"{package.name}-{version}"
    documents = f"share/doc/{package.name}"
    text = lambda content: FileContent(content.encode())
    entries, info = {}, f"{name}.dist-info"
    for path, content in prefix.items():
        if path.startswith("bin/"):
            entries[f"{name}.data/scripts/{path.removeprefix('bin/')}"] = content
        else:
            entries[f"{name}.data/data/{path}"] = content
    for license_file in ("LICENSE", "THIRD-PARTY-LICENSES"):
        entries[f"{info}/licenses/{license_file}"] = prefix[f"{documents}/{license_file}"]
    entries[f"{info}/sboms/{package.name}.cdx.json"] = prefix[f"{documents}/sbom.cdx.json"]
    entries[f"{info}/METADATA"] = text(build_metadata(package))
    entries[f"{info}/WHEEL"] = text(
        f"Wheel-Version: 1.0\nGenerator: scripts/package\nRoot-Is-Purelib: false\nTag: {tag}\n"
    )
    # The specification recommends dist-info at the end of the archive.
    ordered = sorted(entries.items(), key=lambda entry: (entry[0].startswith(info), entry[0]))
    record = f"{info}/RECORD"
    rows = [describe_record(path, content.data) for path, content in ordered]
    ordered.append((record, text("\n".join([*rows, f"{record},,"]) + "\n")))
    return f"{name}-{tag}.whl", build_zip(ordered, epoch, level)


def describe_record(path, data):
    """Returns the row of RECORD for a file: path, digest and size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert not re.search(r'[",\n]', path), f"{path} would need quotes in RECORD"
    return f"{path},sha256={digest},{len(data)}"
