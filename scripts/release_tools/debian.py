"""Builds a Debian package."""
import hashlib
import re
import textwrap
import time

from release_tools.archives import FileContent, build_ar, build_tar, compress
from release_tools.elf import format_version
from release_tools.error import ReleaseError

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
REVISION = 1  # of the package, if the version of the product is unchanged

# Debian packages of the libraries that the executable may need, in addition to those of glibc.
LIBRARY_PACKAGES = {"libgcc_s.so.1": "libgcc-s1 | libgcc1", "libz.so.1": "zlib1g"}

# Where Debian has the completions of zsh.
MOVED = {"share/zsh/site-functions/": "share/zsh/vendor-completions/"}

# Findings of lintian that are intended.
LINTIAN_OVERRIDES = """\
# The executable runs on all distributions, with the same versions of its libraries.
{name}: embedded-library *
# Each command has a page. Some have names that other programs could have as executables.
{name}: spare-manual-page *
"""


def convert_version(version):
    """Returns a version of Cargo.toml, such as 0.2.0-rc.1, in Debian's notation, in which ~ sorts
    before the release."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?", version):
        raise ReleaseError(f"the version {version} has no equivalent in Debian's notation")
    return f"{version.replace('-', '~', 1)}-{REVISION}"


def build_package(package, prefix, requirements, epoch, level):
    """Returns file name and bytes of the Debian package of the files of `prefix`. `requirements` are
    those of the executable."""
    version, architecture = convert_version(package.version), ARCHITECTURES[package.machine]
    files = {f"usr/{path}": content for path, content in convert_prefix(package, prefix, epoch).items()}
    kibibytes = sum(-(-len(content.data) // 1024) for content in files.values())
    control = {
        "control": FileContent(build_control(package, version, architecture, requirements, kibibytes)),
        "md5sums": FileContent(build_checksums(files)),
    }
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", compress(build_tar(control, epoch, "./"), level)),
        ("data.tar.gz", compress(build_tar(files, epoch, "./"), level)),
    ]
    return f"{package.name}_{version}_{architecture}.deb", build_ar(members, epoch)


def convert_prefix(package, prefix, epoch):
    """Returns the files of a prefix, such as /usr, as the policy of Debian requires them: compressed
    man pages and changelogs, a file `copyright`, and the directories of Debian."""
    documents, files = f"share/doc/{package.name}", {}
    for path, content in prefix.items():
        for before, after in MOVED.items():
            path = path.replace(before, after)
        if path.startswith("share/man/"):
            path, content = f"{path}.gz", FileContent(compress(content.data, 9))
        files[path] = content
    # The license is in `copyright`, and `changelog.gz` is the name of Debian for CHANGELOG.md.
    del files[f"{documents}/LICENSE"]
    changelog = prefix[f"{documents}/CHANGELOG.md"].data
    files[f"{documents}/changelog.gz"] = FileContent(compress(changelog, 9))
    debian_changelog = build_changelog(package, epoch).encode()
    files[f"{documents}/changelog.Debian.gz"] = FileContent(compress(debian_changelog, 9))
    files[f"{documents}/copyright"] = FileContent(build_copyright(package).encode())
    overrides = LINTIAN_OVERRIDES.format(name=package.name).encode()
    files[f"share/lintian/overrides/{package.name}"] = FileContent(overrides)
    return files


def build_control(package, version, architecture, requirements, kibibytes):
    """Returns the control file. The installed size has one block per file and directory."""
    depends = [f"libc6 (>= {format_version(requirements.find_glibc())})"]
    depends += [LIBRARY_PACKAGES[l] for l in sorted(requirements.libraries) if l in LIBRARY_PACKAGES]
    description = textwrap.fill(package.description, 78, initial_indent=" ", subsequent_indent=" ")
    fields = [
        ("Package", package.name),
        ("Version", version),
        ("Architecture", architecture),
        ("Maintainer", package.maintainer),
        ("Installed-Size", kibibytes),
        ("Depends", ", ".join(depends)),
        ("Section", "science"),
        ("Priority", "optional"),
        ("Description", f"{package.summary}\n{description}"),
    ]
    return "".join(f"{name}: {value}\n" for name, value in fields).encode()


def build_checksums(files):
    """Returns the content of `md5sums`, with which `dpkg --verify` checks the installed files."""
    digest = lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest()
    return "".join(f"{digest(c.data)}  {path}\n" for path, c in sorted(files.items())).encode()


def build_changelog(package, epoch):
    """Returns the changelog of the Debian package, which refers to the one of the product."""
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch))
    version = convert_version(package.version)
    return (
        f"{package.name} ({version}) unstable; urgency=medium\n\n"
        f"  * Release {package.version}, which changelog.gz describes.\n\n"
        f" -- {package.maintainer}  {date}\n"
    )


def build_copyright(package):
    """Returns the file `copyright` in Debian's machine-readable format."""
    return (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        f"Upstream-Name: {package.name}\n"
        "Comment: The executable contains the libraries that sbom.cdx.json lists.\n"
        " THIRD-PARTY-LICENSES has their licenses.\n\n"
        "Files: *\n"
        f"Copyright: the developers of {package.name}\n"
        f"License: {package.license}\n"
        " On Debian systems, the text of the license is in\n"
        f" /usr/share/common-licenses/{package.license.replace('Apache-2.0', 'Apache-2.0')}.\n"
    )
