#!/usr/bin/env python3
"""Reads a TensorBoard event file and prints its content as one line of JSON.

    python event_files.py DIRECTORY

The package tensorboard reads the file if it is installed. Otherwise this script does: TFRecords with
checksums that contain messages of tensorflow/core/util/event.proto. `scalars` has [step, tag, value]
in order, `marks` the steps of session starts, and `version` the version in the first record.
"""
import json
import struct
import sys
from pathlib import Path

POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
CRC_TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
    CRC_TABLE.append(byte)


def compute_masked_crc(data):
    """Returns the masked CRC-32C that TFRecords contain."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_tfrecords(data):
    """Yields the payload of each TFRecord. Fails if a checksum is wrong."""
    at = 0
    while at < len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        assert crc == compute_masked_crc(data[at:at + 8]), f"checksum of the length at {at}"
        record = data[at + 12:at + 12 + length]
        assert len(record) == length, "a record is truncated"
        (crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert crc == compute_masked_crc(record), f"checksum of the record at {at}"
        yield record
        at += 16 + length


def parse_fields(data):
    """Yields (number, value) of the fields of a protobuf message. A value is an integer or
    bytes."""
    at = 0

    def read_varint():
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
        key = read_varint()
        kind = key & 7
        if kind == 0:
            value = read_varint()
        else:
            size = {1: 8, 5: 4}[kind] if kind != 2 else read_varint()
            value = data[at:at + size]
            assert len(value) == size
            at += size
        yield key >> 3, value


def read_without_tensorboard(file):
    """Reads an event file with this script. Returns version, scalars and marks."""
    version, scalars, marks = None, [], []
    for i, record in enumerate(read_tfrecords(file.read_bytes())):
        event = dict(parse_fields(record))
        assert struct.unpack("<d", event[1])[0] > 1.7e9, "the time is not in seconds since 1970"
        step = event.get(2, 0)
        if i == 0:
            version = event[3].decode()
        if 7 in event:
            assert dict(parse_fields(event[7])) == {1: 1}, "the event is not a session start"
            marks.append(step)
        for number, value in parse_fields(event.get(5, b"")):
            assert number == 1
            value = dict(parse_fields(value))
            scalars.append([step, value[1].decode(), struct.unpack("<f", value[2])[0]])
    return version, scalars, marks


def read_with_tensorboard(file):
    """Reads an event file with the package tensorboard. Returns version, scalars and marks."""
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
        read = read_with_tensorboard
    except ImportError:
        read = read_without_tensorboard
    files = sorted(Path(sys.argv[1]).rglob("events.out.tfevents.*"))
    assert len(files) == 1, files
    version, scalars, marks = read(files[0])
    print(json.dumps({"version": version, "scalars": scalars, "marks": marks}))


if __name__ == "__main__":
    main()
