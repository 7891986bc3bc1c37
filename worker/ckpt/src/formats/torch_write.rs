//! Writes files as `torch.save` does: a zip of stored members, each aligned to 64 bytes, CRCs in the central directory.
//!
//! Nothing of a storage is kept: its bytes go through to the disk and into a CRC-32. Every member's CRC and sizes also
//! follow its bytes (a data descriptor), because they are known only then.
use crate::disk::{Buffers, FileWriter, WritePath};
use crate::error::{CkptError, Result};
use crate::pickle::{self, Object};
use std::path::PathBuf;

/// Members begin at multiples of this.
const ALIGNMENT: u64 = 64;
/// Sizes and offsets from here on need 64-bit fields.
const WIDE: u64 = u32::MAX as u64;
const LOCAL_BYTES: u64 = 30;
/// Data descriptor, UTF-8 name.
const FLAGS: u16 = 0x0808;
/// Files below this go through the page cache: one large aligned write is no gain for them.
const SMALL: u64 = 1 << 20;

/// One member whose bytes are written.
struct Written {
    name: String,
    at: u64,
    size: u64,
    crc: u32,
}

/// A file on its way.
pub(crate) struct TorchWriter {
    out: FileWriter,
    root: String,
    at: u64,
    members: Vec<Written>,
    storages: usize,
    /// The member under way: where its header is, its bytes so far, their CRC.
    open: Option<(String, u64, u64, crc32fast::Hasher)>,
}

impl TorchWriter {
    /// A new file of about `size` bytes: everything but the storages of `value` is written. `root` is the folder inside
    /// it, by custom the file's name without its ending.
    pub(crate) fn create(
        path: PathBuf,
        root: &str,
        value: &Object,
        size: u64,
        buffers: &Buffers,
    ) -> Result<TorchWriter> {
        let pickle = pickle::encode(value).map_err(CkptError::invalid)?;
        let mut writer = TorchWriter::empty(path, root, size, buffers)?;
        writer.member("data.pkl", &pickle)?;
        writer.member(".format_version", b"1")?;
        writer.member(".storage_alignment", ALIGNMENT.to_string().as_bytes())?;
        writer.member("byteorder", b"little")?;
        Ok(writer)
    }

    /// A new file without members, for [`TorchWriter::begin`].
    pub(crate) fn empty(path: PathBuf, root: &str, size: u64, buffers: &Buffers) -> Result<TorchWriter> {
        let how = if size < SMALL { WritePath::Buffered } else { WritePath::Direct };
        let out = FileWriter::with(path, how, false, buffers.clone())?;
        Ok(TorchWriter { out, root: root.into(), at: 0, members: Vec::new(), storages: 0, open: None })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn member(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.begin(name)?;
        self.write(bytes)?;
        self.end()
    }

    /// Begins the next storage.
    pub(crate) fn begin_storage(&mut self) -> Result<()> {
        let name = format!("data/{}", self.storages);
        self.storages += 1;
        self.begin(&name)
    }

    /// Begins the member `name` of the root's folder.
    pub(crate) fn begin(&mut self, name: &str) -> Result<()> {
        let name = format!("{}/{name}", self.root);
        let at = self.at;
        // an extra field `FB` of filler moves the data to a multiple of the alignment
        let unaligned = at + LOCAL_BYTES + name.len() as u64 + 4;
        let filler = (unaligned.next_multiple_of(ALIGNMENT) - unaligned) as u16;
        let mut header = Vec::with_capacity(256);
        header.extend(b"PK\x03\x04");
        header.extend(45u16.to_le_bytes());
        header.extend(FLAGS.to_le_bytes());
        // method, time, date, CRC and sizes: stored, none, and later
        header.extend([0u8; 18]);
        header.extend((name.len() as u16).to_le_bytes());
        header.extend((filler + 4).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(b"FB");
        header.extend(filler.to_le_bytes());
        header.resize(header.len() + filler as usize, b'Z');
        self.put(&header)?;
        self.open = Some((name, at, 0, crc32fast::Hasher::new()));
        Ok(())
    }

    /// Appends to the member under way.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.open {
            Some((_, _, size, hasher)) => {
                hasher.update(bytes);
                *size += bytes.len() as u64;
            }
            None => return Err(CkptError::invalid("bytes outside of a storage")),
        }
        self.put(bytes)
    }

    /// Ends the member under way.
    pub(crate) fn end(&mut self) -> Result<()> {
        let Some((name, at, size, hasher)) = self.open.take() else {
            return Err(CkptError::invalid("no storage is under way"));
        };
        let crc = hasher.finalize();
        let mut descriptor = Vec::from(*b"PK\x07\x08");
        descriptor.extend(crc.to_le_bytes());
        for _ in 0..2 {
            match size >= WIDE {
                true => descriptor.extend(size.to_le_bytes()),
                false => descriptor.extend((size as u32).to_le_bytes()),
            }
        }
        self.members.push(Written { name, at, size, crc });
        self.put(&descriptor)
    }

    /// Writes the rest. The file is durable only when its file system has been synced. Returns its size and the
    /// [`digest`] of its members.
    pub(crate) fn finish(mut self) -> Result<(u64, u32)> {
        self.member("version", b"3\n")?;
        let id = self.members.iter().fold(crc32fast::Hasher::new(), |mut h, m| {
            h.update(&m.crc.to_le_bytes());
            h
        });
        let id = format!("{:020}", id.finalize());
        self.member(".data/serialization_id", id.as_bytes())?;
        let start = self.at;
        let mut directory = Vec::new();
        for m in &self.members {
            entry(&mut directory, m);
        }
        let count = self.members.len() as u64;
        let end = end_of(start, directory.len() as u64, count);
        let members = digest(self.members.iter().map(|m| (m.name.as_str(), m.size, m.crc)));
        self.put(&directory)?;
        self.put(&end)?;
        Ok((self.out.finish_unsynced()?, members))
    }
}

/// A CRC of the names, sizes and CRCs of members.
pub(crate) fn digest<'m>(members: impl Iterator<Item = (&'m str, u64, u32)>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for (name, size, crc) in members {
        hasher.update(name.as_bytes());
        hasher.update(&size.to_le_bytes());
        hasher.update(&crc.to_le_bytes());
    }
    hasher.finalize()
}

/// One entry of the central directory.
fn entry(out: &mut Vec<u8>, m: &Written) {
    let wide = m.size >= WIDE || m.at >= WIDE;
    let mut extra = Vec::new();
    if wide {
        let mut fields = Vec::new();
        if m.size >= WIDE {
            fields.extend(m.size.to_le_bytes());
            fields.extend(m.size.to_le_bytes());
        }
        if m.at >= WIDE {
            fields.extend(m.at.to_le_bytes());
        }
        extra.extend(1u16.to_le_bytes());
        extra.extend((fields.len() as u16).to_le_bytes());
        extra.extend(fields);
    }
    let narrow = |n: u64| (n.min(WIDE) as u32).to_le_bytes();
    out.extend(b"PK\x01\x02");
    for version in [45u16, 45] {
        out.extend(version.to_le_bytes());
    }
    out.extend(FLAGS.to_le_bytes());
    out.extend([0u8; 6]);
    out.extend(m.crc.to_le_bytes());
    out.extend(narrow(m.size));
    out.extend(narrow(m.size));
    out.extend((m.name.len() as u16).to_le_bytes());
    out.extend((extra.len() as u16).to_le_bytes());
    // comment, disk, attributes
    out.extend([0u8; 10]);
    out.extend(narrow(m.at));
    out.extend(m.name.as_bytes());
    out.extend(extra);
}

/// The end records: the 64-bit ones only where they are needed.
fn end_of(start: u64, length: u64, count: u64) -> Vec<u8> {
    let mut out = Vec::new();
    if start >= WIDE || count >= u64::from(u16::MAX) {
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
    out.extend((length.min(WIDE) as u32).to_le_bytes());
    out.extend((start.min(WIDE) as u32).to_le_bytes());
    out.extend([0, 0]);
    out
}
