#!/usr/bin/env python3
"""Reads TensorBoard event files by the format's own description: one JSON line.

    python event_files.py FOLDER

With the package tensorboard its own loader reads them; without it this file does: TFRecords, whose checksums must fit, of
tensorflow/core/util/event.proto. scalars: [step, tag, value] in order; marks: steps of session starts; version: the first record's.
"""
import json
import struct
import sys
from pathlib import Path

POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    TABLE.append(byte)


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    at = 0
    while at < len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        assert crc == masked_crc(data[at:at + 8]), f"checksum of the length at {at}"
        record = data[at + 12:at + 12 + length]
        assert len(record) == length, "a record is cut"
        (crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert crc == masked_crc(record), f"checksum of the record at {at}"
        yield record
        at += 16 + length


def fields(data):
    """(number, value) of a message: integers, 8 or 4 bytes, or bytes."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
            value = data[at:at + size]
            assert len(value) == size
            at += size
        yield key >> 3, value


def by_hand(file):
    version, scalars, marks = None, [], []
    for i, record in enumerate(records(file.read_bytes())):
        event = dict(fields(record))
        assert struct.unpack("<d", event[1])[0] > 1.7e9, "seconds since 1970"
        step = event.get(2, 0)
        if i == 0:
            version = event[3].decode()
        if 7 in event:
            assert dict(fields(event[7])) == {1: 1}, "a session's start"
            marks.append(step)
        for number, value in fields(event.get(5, b"")):
            assert number == 1
            value = dict(fields(value))
            scalars.append([step, value[1].decode(), struct.unpack("<f", value[2])[0]])
    return version, scalars, marks


def by_tensorboard(file):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    version, scalars, marks = None, [], []
    for event in LegacyEventFileLoader(str(file)).Load():
        if event.HasField("file_version"):
            version = event.file_version
        if event.HasField("session_log"):
            marks.append(event.step)
        scalars += [[event.step, v.tag, v.simple_value] for v in event.summary.value]
    return version, scalars, marks


def main():
    try:
        import tensorboard  # noqa: F401
        read = by_tensorboard
    except ImportError:
        read = by_hand
    files = sorted(Path(sys.argv[1]).rglob("events.out.tfevents.*"))
    assert len(files) == 1, files
    version, scalars, marks = read(files[0])
    print(json.dumps({"version": version, "scalars": scalars, "marks": marks}))


if __name__ == "__main__":
    main()
