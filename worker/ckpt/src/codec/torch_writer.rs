//! [`TorchWriter`]: writes files in the format of `torch.save`, a zip container with a pickle and
//! the storages of tensors. Members are stored (uncompressed) and aligned to 64 bytes, and their
//! CRC-32s are in the central directory.
//!
//! Storages are streamed to the disk. The CRC-32 and size of a member are known only after its
//! bytes were written, and follow the bytes in a data descriptor.
use super::disk::{DiskBufferPool, FileWriter, HashMode, IoMode, WrittenFile};
use super::pickle::{self, PythonObject};
use crate::error::{CkptError, Result};
use std::path::PathBuf;

/// Alignment in bytes of each member's data in a torch file.
const MEMBER_DATA_ALIGNMENT: u64 = 64;
/// The smallest size or offset in bytes that is stored in a zip64 field.
const ZIP64_MIN: u64 = u32::MAX as u64;
/// Size in bytes of the header before the data of a zip member, without the name and the extra
/// field.
const LOCAL_HEADER_BYTES: u64 = 30;
/// Flags in the header of every zip member: a data descriptor follows the data, and the name is
/// UTF-8.
const MEMBER_FLAGS: u16 = 0x0808;
/// The smallest file that is written with direct I/O, in bytes. Direct I/O does not make smaller
/// files faster.
const DIRECT_IO_BYTES_MIN: u64 = 1 << 20;

/// Name, size, CRC-32 and header offset of a zip member that is completely written, for its entry
/// in the zip container's central directory.
struct WrittenZipMember {
    name: String,
    /// Offset of the local header in the file.
    at: u64,
    size: u64,
    crc: u32,
}

/// Writes a torch file, one member of the zip container after another.
pub(crate) struct TorchWriter {
    out: FileWriter,
    /// The directory inside of the zip container in which all members are stored.
    root: String,
    /// Number of bytes written to the file so far.
    at: u64,
    members: Vec<WrittenZipMember>,
    /// Number of storages begun so far.
    storages: usize,
    /// Name of the open member, offset of its header, number of bytes written so far, and the
    /// CRC-32 of these bytes. `None` between members.
    open: Option<(String, u64, u64, crc32fast::Hasher)>,
}

impl TorchWriter {
    /// Creates a torch file that contains `value`, and writes everything that precedes the data of
    /// the tensors. The caller must then write every storage of `value`. `size` is the approximate
    /// size of the complete file in bytes. `root` is the directory inside of the container, which
    /// torch names after the file without its extension.
    ///
    /// # Errors
    /// Fails if the path exists, or `value` cannot be pickled.
    pub(crate) fn create(
        path: PathBuf,
        root: &str,
        value: &PythonObject,
        size: u64,
        buffers: &DiskBufferPool,
    ) -> Result<TorchWriter> {
        let pickle = pickle::encode_pickle(value).map_err(CkptError::invalid_save)?;
        let mut writer = TorchWriter::create_empty(path, root, size, buffers)?;
        writer.write_member("data.pkl", &pickle)?;
        writer.write_member(".format_version", b"1")?;
        writer.write_member(".storage_alignment", MEMBER_DATA_ALIGNMENT.to_string().as_bytes())?;
        writer.write_member("byteorder", b"little")?;
        Ok(writer)
    }

    /// Creates a torch file (a zip container) that has no members yet. The caller must add every
    /// member with [`TorchWriter::begin_member`], except `version` and `.data/serialization_id`,
    /// which [`TorchWriter::finish`] writes. `size` is the approximate size of the complete file in
    /// bytes.
    pub(crate) fn create_empty(
        path: PathBuf,
        root: &str,
        size: u64,
        buffers: &DiskBufferPool,
    ) -> Result<TorchWriter> {
        let io_mode = if size < DIRECT_IO_BYTES_MIN { IoMode::Buffered } else { IoMode::Direct };
        let out = FileWriter::with_buffers(path, io_mode, HashMode::File, buffers.clone())?;
        Ok(TorchWriter { out, root: root.into(), at: 0, members: Vec::new(), storages: 0, open: None })
    }

    /// Appends bytes that belong to no zip member, such as headers, to the torch file.
    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Writes a zip member with the name `name` and the content `bytes`.
    fn write_member(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.begin_member(name)?;
        self.write(bytes)?;
        self.end_member()
    }

    /// Begins the zip member `data/N` for the elements of the next tensor storage, where N counts
    /// the storages from 0. The caller must write the storages in the order of their indices, and
    /// end each member before the next one begins.
    pub(crate) fn begin_storage(&mut self) -> Result<()> {
        let name = format!("data/{}", self.storages);
        self.storages += 1;
        self.begin_member(&name)
    }

    /// Begins a zip member with the name `name` in the root directory of the container. The caller
    /// must have ended the previous member.
    pub(crate) fn begin_member(&mut self, name: &str) -> Result<()> {
        let name = format!("{}/{name}", self.root);
        let at = self.at;
        // an extra field `FB` with padding aligns the data
        let unaligned = at + LOCAL_HEADER_BYTES + name.len() as u64 + 4;
        let filler = (unaligned.next_multiple_of(MEMBER_DATA_ALIGNMENT) - unaligned) as u16;
        let mut header = Vec::with_capacity(256);
        header.extend(b"PK\x03\x04");
        header.extend(45u16.to_le_bytes());
        header.extend(MEMBER_FLAGS.to_le_bytes());
        // zeros: method (stored), time and date (none), CRC and sizes (in the data descriptor)
        header.extend([0u8; 18]);
        header.extend((name.len() as u16).to_le_bytes());
        header.extend((filler + 4).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(b"FB");
        header.extend(filler.to_le_bytes());
        header.resize(header.len() + filler as usize, b'Z');
        self.write_bytes(&header)?;
        self.open = Some((name, at, 0, crc32fast::Hasher::new()));
        Ok(())
    }

    /// Appends bytes to the zip member that was begun last.
    ///
    /// # Errors
    /// Fails if no member is open, or a write fails.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.open {
            Some((_, _, size, hasher)) => {
                hasher.update(bytes);
                *size += bytes.len() as u64;
            }
            None => return Err(CkptError::internal("bytes written outside of a zip member")),
        }
        self.write_bytes(bytes)
    }

    /// Ends the zip member that was begun last, and writes its CRC-32 and size in a data
    /// descriptor. Fails if no member is open.
    pub(crate) fn end_member(&mut self) -> Result<()> {
        let Some((name, at, size, hasher)) = self.open.take() else {
            return Err(CkptError::internal("no zip member is open"));
        };
        let crc = hasher.finalize();
        let mut descriptor = Vec::from(*b"PK\x07\x08");
        descriptor.extend(crc.to_le_bytes());
        for _ in 0..2 {
            match size >= ZIP64_MIN {
                true => descriptor.extend(size.to_le_bytes()),
                false => descriptor.extend((size as u32).to_le_bytes()),
            }
        }
        self.members.push(WrittenZipMember { name, at, size, crc });
        self.write_bytes(&descriptor)
    }

    /// Completes the torch file: writes the members that torch expects after the tensors, and the
    /// central directory of the zip container. The caller must have ended the previous member. The
    /// file is durable only after its file system has been synced. Returns the size and the hash of
    /// the file.
    pub(crate) fn finish(mut self) -> Result<WrittenFile> {
        self.write_member("version", b"3\n")?;
        let id = self.members.iter().fold(crc32fast::Hasher::new(), |mut h, m| {
            h.update(&m.crc.to_le_bytes());
            h
        });
        let id = format!("{:020}", id.finalize());
        self.write_member(".data/serialization_id", id.as_bytes())?;
        let start = self.at;
        let mut directory = Vec::new();
        for m in &self.members {
            append_directory_entry(&mut directory, m);
        }
        let count = self.members.len() as u64;
        let end = encode_end_records(start, directory.len() as u64, count);
        self.write_bytes(&directory)?;
        self.write_bytes(&end)?;
        self.out.finish_unsynced()
    }
}

/// Appends to `out` the entry of a zip container's central directory that describes the member `m`.
fn append_directory_entry(out: &mut Vec<u8>, m: &WrittenZipMember) {
    let wide = m.size >= ZIP64_MIN || m.at >= ZIP64_MIN;
    let mut extra = Vec::new();
    if wide {
        let mut fields = Vec::new();
        if m.size >= ZIP64_MIN {
            fields.extend(m.size.to_le_bytes());
            fields.extend(m.size.to_le_bytes());
        }
        if m.at >= ZIP64_MIN {
            fields.extend(m.at.to_le_bytes());
        }
        extra.extend(1u16.to_le_bytes());
        extra.extend((fields.len() as u16).to_le_bytes());
        extra.extend(fields);
    }
    let narrow = |n: u64| (n.min(ZIP64_MIN) as u32).to_le_bytes();
    out.extend(b"PK\x01\x02");
    for version in [45u16, 45] {
        out.extend(version.to_le_bytes());
    }
    out.extend(MEMBER_FLAGS.to_le_bytes());
    out.extend([0u8; 6]);
    out.extend(m.crc.to_le_bytes());
    out.extend(narrow(m.size));
    out.extend(narrow(m.size));
    out.extend((m.name.len() as u16).to_le_bytes());
    out.extend((extra.len() as u16).to_le_bytes());
    // zeros: no comment, first disk, no attributes
    out.extend([0u8; 10]);
    out.extend(narrow(m.at));
    out.extend(m.name.as_bytes());
    out.extend(extra);
}

/// Returns the bytes at the end of a zip container, the end records, from which a reader learns
/// where the central directory is. The directory has `length` bytes at offset `start` and `count`
/// entries. Includes zip64 records only if `start` or `count` needs them.
pub(crate) fn encode_end_records(start: u64, length: u64, count: u64) -> Vec<u8> {
    let mut out = Vec::new();
    if start >= ZIP64_MIN || count >= u64::from(u16::MAX) {
        out.extend(b"PK\x06\x06");
        out.extend(44u64.to_le_bytes());
        out.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for n in [count, count, length, start] {
            out.extend(n.to_le_bytes());
        }
        out.extend(b"PK\x06\x07\0\0\0\0");
        out.extend((start + length).to_le_bytes());
        out.extend(1u32.to_le_bytes());
    }
    let few = (count.min(u64::from(u16::MAX)) as u16).to_le_bytes();
    out.extend(b"PK\x05\x06\0\0\0\0");
    out.extend(few);
    out.extend(few);
    out.extend((length.min(ZIP64_MIN) as u32).to_le_bytes());
    out.extend((start.min(ZIP64_MIN) as u32).to_le_bytes());
    out.extend([0, 0]);
    out
}
