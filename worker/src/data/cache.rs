//! The token cache: a data set's token stream in one file, memory-mapped.
//!
//! ```text
//! header    256 bytes: magic, version, width, vocab_size, eod, tokens, documents, key, digest of the body, marked, digest of the header
//! tokens    tokens × width bytes (2 when vocab_size ≤ 65,536 and none is marked, else 4), padded with zeros to a multiple of 8
//! offsets   (documents + 1) × 8 bytes: where each document begins in the stream, and the stream's end
//! ```
//! All little-endian. In a marked stream the top bit of a token says that it is no target. Each document is at least one token and the end-of-document token after it. A file is complete or absent (written aside, synced,
//! renamed), and checked whole when opened: sizes, both digests, every token below vocab_size, offsets rising.
use memmap2::{Mmap, UncheckedAdvice};
use rayon::prelude::*;
use std::{
    fs::File,
    io::{self, BufWriter, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::Path,
};

const MAGIC: [u8; 8] = *b"LNCHTOKS";
/// Also stands for how documents are cut and tokenized: it is part of every key.
pub(crate) const VERSION: u32 = 2;
/// Of a token in a marked stream: it is no target.
pub(crate) const NO_LOSS: u32 = 1 << 31;
const HEADER: usize = 256;
/// The body is hashed in blocks of this many bytes, so that many threads can check it; its digest is that of the blocks' digests.
const BLOCK: usize = 1 << 20;
/// A touch maps this many aligned bytes at once (Linux's fault-around), bytes.
const FAULT_AROUND: usize = 64 << 10;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) vocab_size: u32,
    pub(crate) eod: u32,
    pub(crate) tokens: u64,
    pub(crate) documents: u64,
    pub(crate) key: [u8; 32],
    pub(crate) body: [u8; 32],
    /// Tokens may carry [`NO_LOSS`].
    pub(crate) marked: bool,
}

/// Bytes a token takes.
fn width(vocab_size: u32, marked: bool) -> usize {
    if vocab_size <= 1 << 16 && !marked { 2 } else { 4 }
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut out = Vec::with_capacity(HEADER);
        out.extend_from_slice(&MAGIC);
        for word in [VERSION, self.width() as u32, self.vocab_size, self.eod] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.tokens.to_le_bytes());
        out.extend_from_slice(&self.documents.to_le_bytes());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.body);
        out.extend_from_slice(&u32::from(self.marked).to_le_bytes());
        out.resize(HEADER - 32, 0);
        let digest = blake3::hash(&out);
        out.extend_from_slice(digest.as_bytes());
        let mut bytes = [0; HEADER];
        bytes.copy_from_slice(&out);
        bytes
    }

    fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("it is not a token cache".into());
        }
        let word = |at: usize| le_u32(&bytes[at..at + 4]);
        if word(8) != VERSION {
            return Err(format!("its version is {}, not {VERSION}", word(8)));
        }
        if *blake3::hash(&bytes[..HEADER - 32]).as_bytes() != bytes[HEADER - 32..] {
            return Err("its header is damaged".into());
        }
        let digest = |at: usize| <[u8; 32]>::try_from(&bytes[at..at + 32]).unwrap_or_default();
        let header = Header {
            vocab_size: word(16),
            eod: word(20),
            tokens: le_u64(&bytes[24..32]),
            documents: le_u64(&bytes[32..40]),
            key: digest(40),
            body: digest(72),
            marked: word(104) != 0,
        };
        if header.encode() != *bytes || header.eod >= header.vocab_size {
            return Err("its header contradicts itself".into());
        }
        Ok(header)
    }

    fn width(&self) -> usize {
        width(self.vocab_size, self.marked)
    }

    /// Where the offsets begin in the body, and the body's length; `None` if no file can be so long.
    fn layout(&self) -> Option<(u64, u64)> {
        let offsets = self.tokens.checked_mul(self.width() as u64)?.checked_next_multiple_of(8)?;
        let end = self.documents.checked_add(1)?.checked_mul(8)?.checked_add(offsets)?;
        (end <= i64::MAX as u64 - HEADER as u64).then_some((offsets, end))
    }
}

fn le_u32(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}

fn le_u64(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

/// An open token cache.
pub(crate) struct TokenCache {
    pub(crate) header: Header,
    map: Mmap,
    /// Where the offsets begin in the file.
    offsets_at: usize,
}

/// Why a cache could not be opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    Absent,
    /// There is one but it can't be trusted.
    Damaged(String),
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::NotFound { OpenError::Absent } else { OpenError::Io(e) }
    }
}

impl TokenCache {
    /// Opens and checks a cache that must have this key.
    pub(crate) fn open(path: &Path, key: &[u8; 32]) -> Result<Self, OpenError> {
        let damaged = |why: String| OpenError::Damaged(why);
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        if length < HEADER as u64 {
            return Err(damaged(format!("it has {length} bytes, fewer than its header needs")));
        }
        let mut head = [0; HEADER];
        file.read_exact_at(&mut head, 0)?;
        let header = Header::decode(&head).map_err(damaged)?;
        if header.key != *key {
            return Err(damaged("it belongs to other data".into()));
        }
        let (offsets, body) = header.layout().ok_or_else(|| damaged("its header is damaged".into()))?;
        if length != HEADER as u64 + body {
            return Err(damaged(format!("it has {length} bytes, not {}", HEADER as u64 + body)));
        }
        check_body(&file, &header, body)?;
        // SAFETY: caches are never written in place: a new one replaces an old one by rename, so the mapped bytes don't change.
        let map = unsafe { Mmap::map(&file)? };
        let cache = TokenCache { header, map, offsets_at: HEADER + offsets as usize };
        cache.check_offsets().map_err(damaged)?;
        cache.release(0, cache.map.len());
        Ok(cache)
    }

    /// Takes pages out of this process's memory again; the system keeps them as it sees fit. Without it a rank's memory would grow by all
    /// that it has read, up to the whole cache.
    fn release(&self, at: usize, len: usize) {
        let from = at / FAULT_AROUND * FAULT_AROUND;
        let to = (at + len).next_multiple_of(FAULT_AROUND).min(self.map.len());
        // SAFETY: the mapping is shared, read-only and of a file, so a page that goes comes back with the same content at the next touch.
        // Where it fails, the pages stay.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, to - from) };
    }

    fn check_offsets(&self) -> Result<(), String> {
        let documents = self.header.documents;
        let rising = (0..documents).all(|d| {
            let (from, to) = (self.offset(d), self.offset(d + 1));
            from.checked_add(2).is_some_and(|least| least <= to)
        });
        match self.offset(0) == 0 && rising && self.offset(documents) == self.header.tokens {
            true => Ok(()),
            false => Err("its document offsets are wrong".into()),
        }
    }
}

/// Checks the body's digest and that every token is below vocab_size. Reads instead of mapping, so that checking a large cache does not
/// count as this process's memory.
fn check_body(file: &File, header: &Header, length: u64) -> Result<(), OpenError> {
    let width = header.width();
    let mark = if header.marked { NO_LOSS } else { 0 };
    let token_bytes = header.tokens * width as u64;
    let blocks = length.div_ceil(BLOCK as u64);
    let digests: Result<Vec<[u8; 32]>, OpenError> = (0..blocks)
        .into_par_iter()
        .map(|b| {
            let from = b * BLOCK as u64;
            let mut block = vec![0; BLOCK.min((length - from) as usize)];
            file.read_exact_at(&mut block, HEADER as u64 + from)?;
            let tokens = &block[..(token_bytes.saturating_sub(from) as usize).min(block.len())];
            match tokens.chunks_exact(width).all(|t| le_u32(t) & !mark < header.vocab_size) {
                true => Ok(*blake3::hash(&block).as_bytes()),
                false => Err(OpenError::Damaged("it holds tokens beyond its vocabulary".into())),
            }
        })
        .collect();
    match *blake3::hash(digests?.as_flattened()).as_bytes() == header.body {
        true => Ok(()),
        false => Err(OpenError::Damaged("its content does not match its digest".into())),
    }
}

/// A stream of tokens with document boundaries: what packing needs to know.
pub(crate) trait TokenStream {
    fn documents(&self) -> u64;
    /// Where document `d` begins; for `d = documents()` the stream's end.
    fn offset(&self, d: u64) -> u64;
    /// Copies tokens `from .. from + out.len()`, marks included.
    fn read(&self, from: u64, out: &mut [u32]);
    /// May tokens carry [`NO_LOSS`]?
    fn marked(&self) -> bool;
}

impl TokenStream for TokenCache {
    fn documents(&self) -> u64 {
        self.header.documents
    }

    fn offset(&self, d: u64) -> u64 {
        let at = self.offsets_at + d as usize * 8;
        le_u64(&self.map[at..at + 8])
    }

    fn marked(&self) -> bool {
        self.header.marked
    }

    fn read(&self, from: u64, out: &mut [u32]) {
        let width = self.header.width();
        let at = HEADER + from as usize * width;
        let bytes = &self.map[at..at + out.len() * width];
        match width {
            2 => {
                bytes.as_chunks::<2>().0.iter().zip(out).for_each(|(b, t)| *t = u16::from_le_bytes(*b).into())
            }
            _ => bytes.as_chunks::<4>().0.iter().zip(out).for_each(|(b, t)| *t = u32::from_le_bytes(*b)),
        }
        self.release(at, bytes.len());
    }
}

/// Writes a cache, streaming. The file is not a cache until [`Writer::finish`] has written its header.
pub(crate) struct Writer {
    out: BufWriter<File>,
    block: Vec<u8>,
    digests: Vec<[u8; 32]>,
    vocab_size: u32,
    eod: u32,
    marked: bool,
    tokens: u64,
    offsets: Vec<u64>,
}

impl Writer {
    pub(crate) fn new(mut file: File, vocab_size: u32, eod: u32, marked: bool) -> io::Result<Self> {
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&[0; HEADER])?;
        Ok(Writer {
            out: BufWriter::with_capacity(1 << 20, file),
            block: Vec::with_capacity(BLOCK),
            digests: Vec::new(),
            vocab_size,
            eod,
            marked,
            tokens: 0,
            offsets: vec![0],
        })
    }

    /// Appends tokens to the current document; each must be below vocab_size, its mark apart.
    pub(crate) fn push(&mut self, tokens: &[u32]) -> io::Result<()> {
        let mark = if self.marked { NO_LOSS } else { 0 };
        if let Some(t) = tokens.iter().find(|&&t| t & !mark >= self.vocab_size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("token {t} is beyond the vocabulary"),
            ));
        }
        self.tokens += tokens.len() as u64;
        let width = width(self.vocab_size, self.marked);
        let mut rest = tokens;
        while !rest.is_empty() {
            let room = (BLOCK - self.block.len()) / width;
            let (now, later) = rest.split_at(room.min(rest.len()));
            match width {
                2 => now.iter().for_each(|&t| self.block.extend_from_slice(&(t as u16).to_le_bytes())),
                _ => now.iter().for_each(|&t| self.block.extend_from_slice(&t.to_le_bytes())),
            }
            if self.block.len() == BLOCK {
                self.end_block()?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Ends the current document; one without tokens never was.
    pub(crate) fn end_document(&mut self) -> io::Result<()> {
        if self.offsets.last() == Some(&self.tokens) {
            return Ok(());
        }
        // a chat's own template ends what the assistant says
        self.push(&[if self.marked { self.eod | NO_LOSS } else { self.eod }])?;
        self.offsets.push(self.tokens);
        Ok(())
    }

    fn end_block(&mut self) -> io::Result<()> {
        self.digests.push(*blake3::hash(&self.block).as_bytes());
        self.out.write_all(&self.block)?;
        self.block.clear();
        Ok(())
    }

    /// Writes offsets and header and syncs.
    pub(crate) fn finish(mut self, key: [u8; 32]) -> io::Result<()> {
        self.block.resize(self.block.len().next_multiple_of(8), 0);
        let offsets = std::mem::take(&mut self.offsets);
        for offset in &offsets {
            if self.block.len() == BLOCK {
                self.end_block()?;
            }
            self.block.extend_from_slice(&offset.to_le_bytes());
        }
        if !self.block.is_empty() {
            self.end_block()?;
        }
        let header = Header {
            vocab_size: self.vocab_size,
            eod: self.eod,
            tokens: self.tokens,
            documents: offsets.len() as u64 - 1,
            key,
            body: *blake3::hash(self.digests.as_flattened()).as_bytes(),
            marked: self.marked,
        };
        let file = self.out.into_inner()?;
        file.write_all_at(&header.encode(), 0)?;
        file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::PathBuf};

    const KEY: [u8; 32] = [3; 32];

    fn write(dir: &Path, vocab_size: u32, documents: &[&[u32]]) -> PathBuf {
        let path = dir.join("x.tokens");
        let mut writer =
            Writer::new(File::create(&path).unwrap(), vocab_size, vocab_size - 1, false).unwrap();
        for d in documents {
            let (a, b) = d.split_at(d.len() / 2);
            writer.push(a).unwrap();
            writer.push(b).unwrap();
            writer.end_document().unwrap();
        }
        writer.finish(KEY).unwrap();
        path
    }

    fn why(path: &Path) -> String {
        match TokenCache::open(path, &KEY) {
            Err(OpenError::Damaged(why)) => why,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("opened"),
        }
    }

    #[test]
    fn round_trip_in_both_widths() {
        let dir = tempfile::tempdir().unwrap();
        for vocab in [300, 1 << 16, (1 << 16) + 1] {
            let path = write(dir.path(), vocab, &[&[1, 2, 3], &[], &[vocab - 2]]);
            let cache = TokenCache::open(&path, &KEY).unwrap();
            assert_eq!((cache.documents(), cache.header.tokens, cache.header.eod), (2, 6, vocab - 1));
            assert_eq!([0, 1, 2].map(|d| cache.offset(d)), [0, 4, 6]);
            let mut out = [0; 6];
            cache.read(0, &mut out);
            assert_eq!(out, [1, 2, 3, vocab - 1, vocab - 2, vocab - 1]);
            cache.read(3, &mut out[..2]);
            assert_eq!(out[..2], [vocab - 1, vocab - 2]);
        }
    }

    #[test]
    fn many_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..5_000_000u32).map(|i| i % 999).collect();
        let path = write(dir.path(), 1000, &[&tokens, &[5]]);
        let cache = TokenCache::open(&path, &KEY).unwrap();
        let mut out = vec![0; tokens.len() + 3];
        cache.read(0, &mut out);
        assert_eq!(out[..tokens.len()], tokens);
        assert_eq!(out[tokens.len()..], [999, 5, 999]);
        // the last byte, in the last block
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(why(&path), "its content does not match its digest");
    }

    #[test]
    fn every_flipped_byte_and_every_truncation_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), 300, &[&[1, 2, 3], &[4]]);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            for bit in [1, 128] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                fs::write(&path, bad).unwrap();
                why(&path);
            }
            fs::write(&path, &good[..at]).unwrap();
            why(&path);
        }
        fs::write(&path, [&good[..], b"\0"].concat()).unwrap();
        why(&path);
        fs::write(&path, &good).unwrap();
        assert!(TokenCache::open(&path, &KEY).is_ok());
        assert!(matches!(TokenCache::open(&path, &[4; 32]), Err(OpenError::Damaged(_))));
        assert!(matches!(TokenCache::open(&dir.path().join("none"), &KEY), Err(OpenError::Absent)));
    }

    /// Digests that fit do not make a file true.
    #[test]
    fn forged_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forged");
        let forge = |header: &Header, body: &[u8]| {
            let digests: Vec<[u8; 32]> = body.chunks(BLOCK).map(|b| *blake3::hash(b).as_bytes()).collect();
            let header = Header { body: *blake3::hash(digests.as_flattened()).as_bytes(), ..header.clone() };
            fs::write(&path, [&header.encode()[..], body].concat()).unwrap();
            why(&path)
        };
        let header = Header {
            vocab_size: 300,
            eod: 299,
            tokens: 4,
            documents: 2,
            key: KEY,
            body: [0; 32],
            marked: false,
        };
        let body = |tokens: [u16; 4], offsets: [u64; 3]| {
            [tokens.map(u16::to_le_bytes).as_flattened(), offsets.map(u64::to_le_bytes).as_flattened()]
                .concat()
        };
        assert!(forge(&header, &body([1, 300, 2, 299], [0, 2, 4])).contains("beyond its vocabulary"));
        for offsets in [[0, 3, 4], [1, 2, 4], [0, 2, 5], [0, 5, 4], [0, u64::MAX, 4]] {
            assert!(forge(&header, &body([1, 299, 2, 299], offsets)).contains("offsets"), "{offsets:?}");
        }
        for (tokens, documents) in [(u64::MAX, 2), (4, u64::MAX), (1 << 62, 1 << 60), (1 << 40, 2)] {
            forge(&Header { tokens, documents, ..header.clone() }, &[]);
        }
        assert!(forge(&Header { eod: 300, ..header }, &[]).contains("contradicts itself"));
    }

    #[test]
    fn tokens_beyond_the_vocabulary_are_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(File::create(dir.path().join("x")).unwrap(), 10, 9, false).unwrap();
        assert_eq!(writer.push(&[10]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
