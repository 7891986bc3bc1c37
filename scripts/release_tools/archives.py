"""Writes archives whose bytes depend only on their content: sorted names, fixed owner, modes and
times.

Content is a dictionary from the name of each file, relative to the root of the archive, to
`FileContent`.
"""
import gzip
import io
import tarfile
import time
import zipfile
from dataclasses import dataclass

DIRECTORY_MODE = 0o755
ZIP_EPOCH = 315532800  # 1980-01-01, before which ZIP cannot represent a time


@dataclass(frozen=True)
class FileContent:
    """The content of a file in an archive."""

    data: bytes
    is_executable: bool = False

    @property
    def mode(self):
        """The permissions of the file."""
        return 0o755 if self.is_executable else 0o644


def compress(data, level):
    """Returns `data` in gzip format, without a name and a time."""
    return gzip.compress(data, compresslevel=level, mtime=0)


def list_directories(names):
    """Returns all directories that contain the files `names`, parents first."""
    found = set()
    for name in names:
        parts = name.split("/")[:-1]
        found.update("/".join(parts[: n + 1]) for n in range(len(parts)))
    return sorted(found)


def build_tar(files, epoch, prefix):
    """Returns a tar archive of `files` and their directories. Each name starts with `prefix`.
    `epoch` is the time of modification of every entry, in seconds."""
    output = io.BytesIO()
    entries = [(name, None) for name in list_directories(files)] + list(files.items())
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in sorted(entries):
            entry = tarfile.TarInfo(prefix + name)
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "root", "root"
            if content is None:
                entry.type, entry.mode = tarfile.DIRTYPE, DIRECTORY_MODE
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content.data), content.mode
                archive.addfile(entry, io.BytesIO(content.data))
    return output.getvalue()


def build_zip(entries, epoch, level):
    """Returns a ZIP archive of `entries`, pairs of name and `FileContent`, in the given order."""
    output = io.BytesIO()
    moment = time.gmtime(max(epoch, ZIP_EPOCH))[:6]
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, content in entries:
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix, whose permissions the attributes contain
            entry.external_attr = (0o100000 | content.mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content.data, compresslevel=level)
    return output.getvalue()


def build_ar(members, epoch):
    """Returns an archive in the format of `ar`, as dpkg reads it, of `members`, pairs of name and
    bytes, in the given order. A name has at most 16 characters."""
    output = bytearray(b"!<arch>\n")
    for name, data in members:
        header = f"{name:<16}{epoch:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
        assert len(header) == 60, f"{name} does not fit into the header of an ar archive"
        output += header.encode() + data + b"\n" * (len(data) % 2)
    return bytes(output)
