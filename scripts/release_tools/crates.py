"""Finds the crates that are linked into the executable, or build it, and their licenses."""
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = "launch"
LICENSE_FILE = re.compile(r"(un)?licen[cs]e|copying|notice|copyright", re.IGNORECASE)
# How deep in the directory of a crate the license of a C library is, such as libz-sys/src/zlib/LICENSE.
LICENSE_DEPTH = 3
MAX_LICENSE_BYTES = 200 << 10


def run(*command):
    """Runs a command in the repository and returns its stdout."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def find_host_target():
    """Returns the target triple of this machine."""
    return re.search(r"^host: (\S+)$", run("rustc", "-vV"), re.MULTILINE).group(1)


def read_metadata(target):
    """Returns the packages that `cargo metadata` resolves for a target triple."""
    command = ("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target)
    return json.loads(run(*command))


def find_linked_packages(metadata):
    """Returns the packages that the product needs, without those of tests, with their dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    product = next(p["id"] for p in metadata["packages"] if p["name"] == PRODUCT)
    needed, pending = {}, [product]
    while pending:
        package = pending.pop()
        if package in needed:
            continue
        is_needed = lambda dependency: any(kind["kind"] != "dev" for kind in dependency["dep_kinds"])
        needed[package] = sorted({d["pkg"] for d in nodes[package]["deps"] if is_needed(d)})
        pending.extend(needed[package])
    return product, needed


def format_license(expression):
    """Returns a license expression of SPDX: older crates have the form `MIT/Apache-2.0`."""
    return re.sub(r"\s*/\s*", " OR ", expression)


def find_license_texts(package):
    """Returns the texts of the license files of a crate, sorted by path."""
    directory, texts = Path(package["manifest_path"]).parent, []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        is_text = path.suffix.lower() in ("", ".txt", ".md") or LICENSE_FILE.match(path.suffix[1:])
        if len(relative.parts) > LICENSE_DEPTH or not LICENSE_FILE.match(path.name) or not is_text:
            continue
        if path.is_file() and path.stat().st_size <= MAX_LICENSE_BYTES:
            lines = path.read_bytes().decode("utf-8", "replace").splitlines()
            texts.append("\n".join(line.rstrip() for line in lines).strip())
    return [text for text in texts if text]


def build_license_notice(metadata):
    """Returns the licenses of all crates of other projects that the executable contains. Each text
    appears once, after the crates that have it."""
    packages = {package["id"]: package for package in metadata["packages"]}
    _, needed = find_linked_packages(metadata)
    others = [packages[identifier] for identifier in needed if packages[identifier]["source"]]
    others.sort(key=lambda package: (package["name"], package["version"]))
    crates_by_text, lines = {}, ["This executable contains the following libraries.", ""]
    for package in others:
        crate = f"{package['name']} {package['version']}"
        texts = find_license_texts(package)
        note = "" if texts else " (the crate contains no text of its license)"
        lines.append(f"{crate}: {format_license(package['license'] or 'see below')}{note}")
        for text in dict.fromkeys(texts):
            crates_by_text.setdefault(text, []).append(crate)
    for text, crates in crates_by_text.items():
        lines += ["", "-" * 80, f"License of {', '.join(crates)}:", "", text]
    return "\n".join(lines) + "\n"
