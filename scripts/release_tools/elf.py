"""Reads from an ELF executable which machine, libraries and versions of glibc it needs."""
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from release_tools.error import ReleaseError

MACHINES = {62: "x86_64", 183: "aarch64"}
SECTION_DYNAMIC = 6
SECTION_VERSIONS_NEEDED = 0x6FFFFFFE
DYNAMIC_END, DYNAMIC_NEEDED = 0, 1
MAX_ENTRIES = 4096  # limit on the entries of each table of an executable

# Libraries that every distribution with glibc has (the policy of manylinux), as regular expressions.
COMMON_LIBRARIES = (
    r"lib(c|m)\.so\.6",
    r"lib(dl|util)\.so\.2",
    r"librt\.so\.1",
    r"libpthread\.so\.0",
    r"libgcc_s\.so\.1",
    r"ld-linux-(x86-64\.so\.2|aarch64\.so\.1)",
)
# A library that wheels may need, but small container images lack. An ordinary build links to that of
# the machine, but the executable of a release contains it.
SYSTEM_LIBRARIES = (*COMMON_LIBRARIES, r"libz\.so\.1")
# The newest version of libgcc_s whose symbols RHEL 8 has.
MAX_LIBGCC_VERSION = (7, 0, 0)


@dataclass(frozen=True)
class Requirements:
    """What an executable needs from the machine that starts it."""

    machine: str  # x86_64 or aarch64
    libraries: tuple  # names of shared libraries, in the order of the file
    versions: frozenset  # pairs of library and version, such as ("libc.so.6", "GLIBC_2.28")

    def find_glibc(self):
        """Returns the oldest version of glibc that has all symbols, such as (2, 28). Fails if the
        executable needs an interface of glibc that has no version number."""
        numbers = [(2, 0)]
        for library, version in sorted(self.versions):
            if match := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version):
                numbers.append((int(match[1]), int(match[2])))
            elif version.startswith("GLIBC_"):
                raise ReleaseError(f"the executable needs {version} of {library}, which has no version number")
        return max(numbers)


def read_requirements(path):
    """Returns the `Requirements` of the executable file `path`. Fails if the file is not a
    dynamically linked 64-bit executable for a supported machine."""
    data = Path(path).read_bytes()
    try:
        return parse_executable(data)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise ReleaseError(f"{path} is not a valid ELF executable: {error}") from error
    except ReleaseError as error:
        raise ReleaseError(f"{path}: {error}") from error


def parse_executable(data):
    """Returns the `Requirements` of the executable whose content is `data`."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ReleaseError("not a little-endian 64-bit ELF file")
    file_type, machine = struct.unpack_from("<HH", data, 16)
    if file_type not in (2, 3):
        raise ReleaseError(f"not an executable (ELF type {file_type})")
    if machine not in MACHINES:
        raise ReleaseError(f"for another machine (ELF machine {machine}) than {' and '.join(MACHINES.values())}")
    sections = read_sections(data)
    libraries = [
        read_text(data, sections[link], value)
        for section in sections
        if section.kind == SECTION_DYNAMIC
        for link, value in read_needed(data, section)
    ]
    if not libraries:
        raise ReleaseError("the executable names no shared library, so that it cannot load those of GPUs")
    versions = set()
    for section in sections:
        if section.kind == SECTION_VERSIONS_NEEDED:
            versions.update(read_versions(data, section, sections[section.link]))
    return Requirements(MACHINES[machine], tuple(libraries), frozenset(versions))


@dataclass(frozen=True)
class Section:
    """A section of an ELF file: kind, offset and size in bytes, and the index of a linked section."""

    kind: int
    offset: int
    size: int
    link: int


def read_sections(data):
    """Returns the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    if not 0 < count <= MAX_ENTRIES:
        raise ReleaseError(f"{count} sections; expected 1 to {MAX_ENTRIES}")
    sections = []
    for index in range(count):
        kind, offset, size, link = struct.unpack_from("<4xI16xQQI", data, table + index * entry_size)
        sections.append(Section(kind, offset, size, link))
    return sections


def read_needed(data, section):
    """Yields the index of the string table and the offset in it of each needed library."""
    for offset in range(section.offset, section.offset + section.size, 16):
        tag, value = struct.unpack_from("<QQ", data, offset)
        if tag == DYNAMIC_END:
            return
        if tag == DYNAMIC_NEEDED:
            yield section.link, value


def read_versions(data, section, strings):
    """Yields each needed version as a pair of library and version."""
    offset = section.offset
    for _ in range(MAX_ENTRIES):
        _, count, file_name, first, following = struct.unpack_from("<HHIII", data, offset)
        library, entry = read_text(data, strings, file_name), offset + first
        for _ in range(count):
            _, _, _, name, next_entry = struct.unpack_from("<IHHII", data, entry)
            yield library, read_text(data, strings, name)
            entry += next_entry
        if following == 0:
            return
        offset += following
    raise ReleaseError(f"more than {MAX_ENTRIES} tables of versions")


def read_text(data, strings, offset):
    """Returns the text at `offset` of the string table `strings`."""
    start = strings.offset + offset
    return data[start : data.index(b"\0", start)].decode("ascii")


def check_portability(requirements, max_glibc):
    """Fails if the executable needs a newer glibc than `max_glibc`, or a library that some
    distribution of that age may lack."""
    needed = requirements.find_glibc()
    if needed > max_glibc:
        newer = sorted({v for _, v in requirements.versions if is_newer_glibc(v, max_glibc)})
        limit = format_version(max_glibc)
        raise ReleaseError(f"the executable needs {', '.join(newer)}; a release may need GLIBC_{limit} or older")
    check_libraries(requirements, COMMON_LIBRARIES)


def check_libraries(requirements, allowed=SYSTEM_LIBRARIES):
    """Fails if the executable needs a library that matches no pattern of `allowed`, or a version of
    libgcc_s that a distribution may lack."""
    for library in requirements.libraries:
        if not any(re.fullmatch(pattern, library) for pattern in allowed):
            raise ReleaseError(f"the executable needs {library}, which some distributions lack")
    for library, version in requirements.versions:
        match = re.fullmatch(r"GCC_(\d+)\.(\d+)(?:\.(\d+))?", version)
        if match and tuple(int(n or 0) for n in match.groups()) > MAX_LIBGCC_VERSION:
            raise ReleaseError(f"the executable needs {version} of {library}, which RHEL 8 lacks")


def is_newer_glibc(version, max_glibc):
    """True if the symbol version `version` is of a newer glibc than `max_glibc`."""
    match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version)
    return bool(match) and (int(match[1]), int(match[2])) > max_glibc


def format_version(version):
    """Returns a version such as (2, 28) as text."""
    return ".".join(map(str, version))
