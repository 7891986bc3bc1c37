//! [`TokenCache`]: the tokens of one data source in a memory-mapped file.
//!
//! ```text
//! header   256 bytes: magic, version, width, vocab_size, eod, tokens, documents, key, body digest,
//!          loss mask flag, zeros, header digest
//! tokens   tokens * width bytes, padded with zeros to a multiple of 8
//! offsets  (documents + 1) * 8 bytes: the start of each document in the stream, and its end
//! ```
//! All numbers are little-endian. `width` is 2 bytes if vocab_size is at most 65,536 and the stream
//! has no loss mask, otherwise 4. In a stream with a loss mask, [`NO_LOSS_BIT`] is set in every
//! token that does not count for the loss. Each document is at least one token and the
//! end-of-document token after it.
//!
//! A file is either complete or absent, because it is renamed after it was written and synced.
//! Opening checks the whole file: the sizes, both digests, that every token is below vocab_size,
//! and that the offsets rise.
use super::error::TokenCacheDamage;
use memmap2::{Mmap, UncheckedAdvice};
use rayon::prelude::*;
use std::{
    fs::File,
    io::{self, BufWriter, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::Path,
};

/// The first bytes of a token cache file, which identify its format.
const MAGIC: [u8; 8] = *b"LNCHTOKS";
/// The version of the file format of token caches. It also increases when documents are split or
/// tokenized differently. The key of every cache depends on the version.
pub(crate) const FORMAT_VERSION: u32 = 2;
/// The bit of a stored token that is set if the token does not count for the loss. Only set in
/// streams with a loss mask.
pub(crate) const NO_LOSS_BIT: u32 = 1 << 31;
/// The size in bytes of the header at the beginning of a token cache file.
const HEADER_BYTES: usize = 256;
/// The size in bytes of the blocks of a token cache file, each of which has a separate hash so that
/// threads can check blocks in parallel. The digest of the body is the digest of the blocks'
/// digests.
const BLOCK_BYTES: usize = 1 << 20;
/// The granularity, in bytes, in which memory-mapped pages of a token cache file are released,
/// equal to the memory that Linux maps per page fault.
const FAULT_AROUND_BYTES: usize = 64 << 10;

/// The header of a token cache file, which describes the stored tokens and contains digests to
/// detect damage and outdated content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCacheHeader {
    /// The vocabulary size. Every token id is below this number.
    pub(crate) vocab_size: u32,
    /// The id of the end-of-document token.
    pub(crate) eod: u32,
    /// Number of tokens, end-of-document tokens included.
    pub(crate) tokens: u64,
    /// Number of documents.
    pub(crate) documents: u64,
    /// The key of the cache, a digest of the data that the file was built from.
    pub(crate) key: [u8; 32],
    /// The digest of the body, which is everything after the header: tokens and document offsets.
    pub(crate) body_digest: [u8; 32],
    /// Whether tokens may have the bit [`NO_LOSS_BIT`].
    pub(crate) has_loss_mask: bool,
}

impl TokenCacheHeader {
    /// Encodes the header of a token cache, which ends with the header's digest.
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = MAGIC.to_vec();
        for word in [FORMAT_VERSION, self.token_width_bytes() as u32, self.vocab_size, self.eod] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.tokens.to_le_bytes());
        out.extend_from_slice(&self.documents.to_le_bytes());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.body_digest);
        out.extend_from_slice(&u32::from(self.has_loss_mask).to_le_bytes());
        out.resize(HEADER_BYTES - 32, 0);
        let digest = blake3::hash(&out);
        out.extend_from_slice(digest.as_bytes());
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }

    /// Decodes the header of a token cache, and checks its version, digest and consistency.
    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, TokenCacheDamage> {
        if bytes[..8] != MAGIC {
            return Err(TokenCacheDamage::NotATokenCache);
        }
        let word = |at: usize| parse_le_u32(&bytes[at..at + 4]);
        if word(8) != FORMAT_VERSION {
            return Err(TokenCacheDamage::Version { version: word(8), expected: FORMAT_VERSION });
        }
        if *blake3::hash(&bytes[..HEADER_BYTES - 32]).as_bytes() != bytes[HEADER_BYTES - 32..] {
            return Err(TokenCacheDamage::HeaderCorrupt);
        }
        let digest = |at: usize| <[u8; 32]>::try_from(&bytes[at..at + 32]).unwrap_or_default();
        let header = TokenCacheHeader {
            vocab_size: word(16),
            eod: word(20),
            tokens: parse_le_u64(&bytes[24..32]),
            documents: parse_le_u64(&bytes[32..40]),
            key: digest(40),
            body_digest: digest(72),
            has_loss_mask: word(104) != 0,
        };
        if header.encode() != *bytes || header.eod >= header.vocab_size {
            return Err(TokenCacheDamage::HeaderInconsistent);
        }
        Ok(header)
    }

    /// Returns the size of a token in the cache file, 2 or 4 bytes.
    fn token_width_bytes(&self) -> usize {
        if self.vocab_size <= 1 << 16 && !self.has_loss_mask { 2 } else { 4 }
    }

    /// Returns the bit mask of the flags in a stored token, which is [`NO_LOSS_BIT`] if the token
    /// cache has a loss mask, otherwise 0.
    fn flag_mask(&self) -> u32 {
        if self.has_loss_mask { NO_LOSS_BIT } else { 0 }
    }

    /// Computes two byte counts for the part of a token cache file after the header: the position
    /// of the list of document starts in this part, and the part's total length. Returns `None` if
    /// no file can be so long.
    fn compute_body_layout(&self) -> Option<(u64, u64)> {
        let offsets =
            self.tokens.checked_mul(self.token_width_bytes() as u64)?.checked_next_multiple_of(8)?;
        let end = self.documents.checked_add(1)?.checked_mul(8)?.checked_add(offsets)?;
        (end <= i64::MAX as u64 - HEADER_BYTES as u64).then_some((offsets, end))
    }
}

/// Converts up to 4 little-endian bytes to a number.
fn parse_le_u32(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}

/// Converts up to 8 little-endian bytes to a number.
fn parse_le_u64(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

/// A memory-mapped token cache file with the tokens of one data source, which was checked for
/// damage when it was opened.
pub(crate) struct TokenCache {
    pub(crate) header: TokenCacheHeader,
    map: Mmap,
    /// The position of the document offsets in the file, in bytes.
    offsets_at: usize,
}

/// Why a token cache was not opened: its content is damaged, or an operation of the operating
/// system failed.
#[derive(Debug)]
pub(crate) enum CacheOpenError {
    /// The file exists but cannot be used.
    Damaged(TokenCacheDamage),
    /// The file does not exist, or the operating system reported another error.
    Io(io::Error),
}

impl From<io::Error> for CacheOpenError {
    fn from(e: io::Error) -> Self {
        CacheOpenError::Io(e)
    }
}

impl From<TokenCacheDamage> for CacheOpenError {
    fn from(damage: TokenCacheDamage) -> Self {
        CacheOpenError::Damaged(damage)
    }
}

impl TokenCache {
    /// Opens the token cache file at `path`. Checks the whole content, and that the key in the
    /// header equals `key`.
    pub(crate) fn open(path: &Path, key: &[u8; 32]) -> Result<Self, CacheOpenError> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        if length < HEADER_BYTES as u64 {
            return Err(TokenCacheDamage::TooSmall { bytes: length }.into());
        }
        let mut head = [0; HEADER_BYTES];
        file.read_exact_at(&mut head, 0)?;
        let header = TokenCacheHeader::decode(&head)?;
        if header.key != *key {
            return Err(TokenCacheDamage::OtherKey.into());
        }
        let (offsets, body) = header.compute_body_layout().ok_or(TokenCacheDamage::HeaderCorrupt)?;
        let expected = HEADER_BYTES as u64 + body;
        if length != expected {
            return Err(TokenCacheDamage::Length { bytes: length, expected }.into());
        }
        check_body_digest_and_tokens(&file, &header, body)?;
        // SAFETY: a cache is never written in place. A new file replaces an old one by rename, so
        // the mapped bytes do not change.
        let map = unsafe { Mmap::map(&file)? };
        let cache = TokenCache { header, map, offsets_at: HEADER_BYTES + offsets as usize };
        cache.check_document_offsets()?;
        cache.release_pages(0, cache.map.len());
        Ok(cache)
    }

    /// Removes a byte range of the memory-mapped token cache from the resident memory of this
    /// process, until the range is read again. The range stays readable: a later access loads the
    /// page again, usually from the system's page cache. Without this call the resident memory of a
    /// rank would grow up to the size of the cache file.
    fn release_pages(&self, at: usize, len: usize) {
        let from = at / FAULT_AROUND_BYTES * FAULT_AROUND_BYTES;
        let to = (at + len).next_multiple_of(FAULT_AROUND_BYTES).min(self.map.len());
        // SAFETY: the mapping is shared, read-only and backed by a file, so the next access to a
        // released page reads the same bytes. If the call fails, the pages stay mapped.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, to - from) };
    }

    /// Checks that the positions at which the documents of a token cache begin rise from 0 to the
    /// number of tokens.
    fn check_document_offsets(&self) -> Result<(), TokenCacheDamage> {
        let documents = self.header.documents;
        let rising = (0..documents).all(|d| {
            let (from, to) = (self.document_offset(d), self.document_offset(d + 1));
            from.checked_add(2).is_some_and(|least| least <= to)
        });
        match self.document_offset(0) == 0 && rising && self.document_offset(documents) == self.header.tokens
        {
            true => Ok(()),
            false => Err(TokenCacheDamage::InvalidOffsets),
        }
    }
}

/// Checks the digest of the part of a token cache after the header, and that every token is below
/// the vocabulary size. Reads the file instead of mapping it, so that a large cache does not add to
/// the resident memory of the process.
fn check_body_digest_and_tokens(
    file: &File,
    header: &TokenCacheHeader,
    length: u64,
) -> Result<(), CacheOpenError> {
    let width = header.token_width_bytes();
    let mask = header.flag_mask();
    let token_bytes = header.tokens * width as u64;
    let blocks = length.div_ceil(BLOCK_BYTES as u64);
    let digests: Result<Vec<[u8; 32]>, CacheOpenError> = (0..blocks)
        .into_par_iter()
        .map(|b| {
            let from = b * BLOCK_BYTES as u64;
            let mut block = vec![0; BLOCK_BYTES.min((length - from) as usize)];
            file.read_exact_at(&mut block, HEADER_BYTES as u64 + from)?;
            let tokens = &block[..(token_bytes.saturating_sub(from) as usize).min(block.len())];
            match tokens.chunks_exact(width).all(|t| parse_le_u32(t) & !mask < header.vocab_size) {
                true => Ok(*blake3::hash(&block).as_bytes()),
                false => Err(TokenCacheDamage::TokenOutOfVocabulary.into()),
            }
        })
        .collect();
    match *blake3::hash(digests?.as_flattened()).as_bytes() == header.body_digest {
        true => Ok(()),
        false => Err(TokenCacheDamage::DigestMismatch.into()),
    }
}

/// A stream of tokens with boundaries of documents, which [`super::packer::Packer`] divides into
/// samples.
pub(crate) trait TokenizedDocuments {
    /// Returns the number of documents in the stream.
    fn document_count(&self) -> u64;
    /// Returns the position of the first token of document number `d`, or the end of the stream if
    /// `d` is the number of documents.
    fn document_offset(&self, d: u64) -> u64;
    /// Copies tokens of the stream, beginning with token number `from`, until the slice `out` is
    /// full, and keeps the bit [`NO_LOSS_BIT`] of tokens that do not count for the loss.
    fn read_tokens(&self, from: u64, out: &mut [u32]);
    /// Returns whether the stream marks tokens that do not count for the loss, by the bit
    /// [`NO_LOSS_BIT`].
    fn has_loss_mask(&self) -> bool;
}

impl TokenizedDocuments for TokenCache {
    fn document_count(&self) -> u64 {
        self.header.documents
    }

    fn document_offset(&self, d: u64) -> u64 {
        let at = self.offsets_at + d as usize * 8;
        parse_le_u64(&self.map[at..at + 8])
    }

    fn has_loss_mask(&self) -> bool {
        self.header.has_loss_mask
    }

    fn read_tokens(&self, from: u64, out: &mut [u32]) {
        let width = self.header.token_width_bytes();
        let at = HEADER_BYTES + from as usize * width;
        let bytes = &self.map[at..at + out.len() * width];
        match width {
            2 => {
                bytes.as_chunks::<2>().0.iter().zip(out).for_each(|(b, t)| *t = u16::from_le_bytes(*b).into())
            }
            _ => bytes.as_chunks::<4>().0.iter().zip(out).for_each(|(b, t)| *t = u32::from_le_bytes(*b)),
        }
        self.release_pages(at, bytes.len());
    }
}

/// The error which reports that the id of a token is not below the vocabulary size.
#[derive(Debug, thiserror::Error)]
#[error("token id {token} is beyond the vocabulary of {vocab_size}")]
struct TokenOutOfVocabulary {
    token: u32,
    vocab_size: u32,
}

/// Writes a new token cache file, to which documents are appended. The file is not a valid cache
/// until [`TokenCacheWriter::finish`] has written the header.
pub(crate) struct TokenCacheWriter {
    out: BufWriter<File>,
    /// The bytes at the end of the body that are not written yet, fewer than a block.
    block: Vec<u8>,
    /// Digests of the written blocks.
    digests: Vec<[u8; 32]>,
    /// The header of the new file. Only its number of tokens is updated while documents are
    /// appended. [`TokenCacheWriter::finish`] completes the header.
    header: TokenCacheHeader,
    offsets: Vec<u64>,
}

impl TokenCacheWriter {
    /// Creates a writer of a token cache, and reserves space for the header at the beginning of
    /// `file`.
    pub(crate) fn new(mut file: File, vocab_size: u32, eod: u32, has_loss_mask: bool) -> io::Result<Self> {
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&[0; HEADER_BYTES])?;
        Ok(TokenCacheWriter {
            out: BufWriter::with_capacity(1 << 20, file),
            block: Vec::with_capacity(BLOCK_BYTES),
            digests: Vec::new(),
            header: TokenCacheHeader { vocab_size, eod, has_loss_mask, ..TokenCacheHeader::default() },
            offsets: vec![0],
        })
    }

    /// Appends tokens to the current document of the token cache file. Fails if a token, without
    /// the bit [`NO_LOSS_BIT`], is not below the vocabulary size.
    pub(crate) fn push_tokens(&mut self, tokens: &[u32]) -> io::Result<()> {
        let (mask, vocab_size) = (self.header.flag_mask(), self.header.vocab_size);
        if let Some(&token) = tokens.iter().find(|&&t| t & !mask >= vocab_size) {
            let error = TokenOutOfVocabulary { token, vocab_size };
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        self.header.tokens += tokens.len() as u64;
        let width = self.header.token_width_bytes();
        let mut rest = tokens;
        while !rest.is_empty() {
            let capacity = (BLOCK_BYTES - self.block.len()) / width;
            let (now, later) = rest.split_at(capacity.min(rest.len()));
            match width {
                2 => now.iter().for_each(|&t| self.block.extend_from_slice(&(t as u16).to_le_bytes())),
                _ => now.iter().for_each(|&t| self.block.extend_from_slice(&t.to_le_bytes())),
            }
            if self.block.len() == BLOCK_BYTES {
                self.write_block()?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Appends an end-of-document token to the token cache file, and begins a new document. Does
    /// nothing if the document has no tokens.
    pub(crate) fn end_document(&mut self) -> io::Result<()> {
        if self.offsets.last() == Some(&self.header.tokens) {
            return Ok(());
        }
        // The end-of-document token does not count for the loss, because a chat template ends the
        // assistant's text with another token.
        self.push_tokens(&[self.header.eod | self.header.flag_mask()])?;
        self.offsets.push(self.header.tokens);
        Ok(())
    }

    /// Hashes the tokens that were collected since the previous block, and writes them to the token
    /// cache file as one block.
    fn write_block(&mut self) -> io::Result<()> {
        self.digests.push(*blake3::hash(&self.block).as_bytes());
        self.out.write_all(&self.block)?;
        self.block.clear();
        Ok(())
    }

    /// Completes the token cache: writes the document offsets and the header, and syncs the file.
    pub(crate) fn finish(mut self, key: [u8; 32]) -> io::Result<()> {
        self.block.resize(self.block.len().next_multiple_of(8), 0);
        let offsets = std::mem::take(&mut self.offsets);
        for offset in &offsets {
            if self.block.len() == BLOCK_BYTES {
                self.write_block()?;
            }
            self.block.extend_from_slice(&offset.to_le_bytes());
        }
        if !self.block.is_empty() {
            self.write_block()?;
        }
        let header = TokenCacheHeader {
            documents: offsets.len() as u64 - 1,
            key,
            body_digest: *blake3::hash(self.digests.as_flattened()).as_bytes(),
            ..self.header
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

    /// Writes a token cache with the given documents, and returns its path.
    fn write_cache(dir: &Path, vocab_size: u32, documents: &[&[u32]]) -> PathBuf {
        let path = dir.join("x.tokens");
        let mut writer =
            TokenCacheWriter::new(File::create(&path).unwrap(), vocab_size, vocab_size - 1, false).unwrap();
        for d in documents {
            let (a, b) = d.split_at(d.len() / 2);
            writer.push_tokens(a).unwrap();
            writer.push_tokens(b).unwrap();
            writer.end_document().unwrap();
        }
        writer.finish(KEY).unwrap();
        path
    }

    /// Opens a damaged token cache, and returns what is wrong with it. Panics if the cache is
    /// intact.
    fn expect_damage(path: &Path) -> TokenCacheDamage {
        match TokenCache::open(path, &KEY) {
            Err(CacheOpenError::Damaged(damage)) => damage,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("the cache was opened"),
        }
    }

    #[test]
    fn tokens_of_both_widths_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        for vocab in [300, 1 << 16, (1 << 16) + 1] {
            let path = write_cache(dir.path(), vocab, &[&[1, 2, 3], &[], &[vocab - 2]]);
            let cache = TokenCache::open(&path, &KEY).unwrap();
            assert_eq!((cache.document_count(), cache.header.tokens, cache.header.eod), (2, 6, vocab - 1));
            assert_eq!([0, 1, 2].map(|d| cache.document_offset(d)), [0, 4, 6]);
            let mut out = [0; 6];
            cache.read_tokens(0, &mut out);
            assert_eq!(out, [1, 2, 3, vocab - 1, vocab - 2, vocab - 1]);
            cache.read_tokens(3, &mut out[..2]);
            assert_eq!(out[..2], [vocab - 1, vocab - 2]);
        }
    }

    #[test]
    fn a_stream_of_many_blocks_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        let tokens: Vec<u32> = (0..5_000_000u32).map(|i| i % 999).collect();
        let path = write_cache(dir.path(), 1000, &[&tokens, &[5]]);
        let cache = TokenCache::open(&path, &KEY).unwrap();
        let mut out = vec![0; tokens.len() + 3];
        cache.read_tokens(0, &mut out);
        assert_eq!(out[..tokens.len()], tokens);
        assert_eq!(out[tokens.len()..], [999, 5, 999]);
        // Change the last byte, which is in the last block.
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(expect_damage(&path), TokenCacheDamage::DigestMismatch);
    }

    #[test]
    fn every_flipped_byte_and_every_truncation_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let path = write_cache(dir.path(), 300, &[&[1, 2, 3], &[4]]);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            for bit in [1, 128] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                fs::write(&path, bad).unwrap();
                expect_damage(&path);
            }
            fs::write(&path, &good[..at]).unwrap();
            expect_damage(&path);
        }
        fs::write(&path, [&good[..], b"\0"].concat()).unwrap();
        expect_damage(&path);
        fs::write(&path, &good).unwrap();
        assert!(TokenCache::open(&path, &KEY).is_ok());
        assert!(matches!(TokenCache::open(&path, &[4; 32]), Err(CacheOpenError::Damaged(_))));
        let absent = TokenCache::open(&dir.path().join("none"), &KEY).err();
        assert!(matches!(absent, Some(CacheOpenError::Io(e)) if e.kind() == io::ErrorKind::NotFound));
    }

    /// Checks that token caches with valid digests but invalid content are rejected.
    #[test]
    fn forged_files_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forged");
        let forge = |header: &TokenCacheHeader, body: &[u8]| {
            let digests: Vec<[u8; 32]> =
                body.chunks(BLOCK_BYTES).map(|b| *blake3::hash(b).as_bytes()).collect();
            let header = TokenCacheHeader {
                body_digest: *blake3::hash(digests.as_flattened()).as_bytes(),
                ..header.clone()
            };
            fs::write(&path, [&header.encode()[..], body].concat()).unwrap();
            expect_damage(&path)
        };
        let header = TokenCacheHeader {
            vocab_size: 300,
            eod: 299,
            tokens: 4,
            documents: 2,
            key: KEY,
            body_digest: [0; 32],
            has_loss_mask: false,
        };
        let body = |tokens: [u16; 4], offsets: [u64; 3]| {
            [tokens.map(u16::to_le_bytes).as_flattened(), offsets.map(u64::to_le_bytes).as_flattened()]
                .concat()
        };
        let tokens = body([1, 300, 2, 299], [0, 2, 4]);
        assert_eq!(forge(&header, &tokens), TokenCacheDamage::TokenOutOfVocabulary);
        for offsets in [[0, 3, 4], [1, 2, 4], [0, 2, 5], [0, 5, 4], [0, u64::MAX, 4]] {
            let damage = forge(&header, &body([1, 299, 2, 299], offsets));
            assert_eq!(damage, TokenCacheDamage::InvalidOffsets, "{offsets:?}");
        }
        for (tokens, documents) in [(u64::MAX, 2), (4, u64::MAX), (1 << 62, 1 << 60), (1 << 40, 2)] {
            forge(&TokenCacheHeader { tokens, documents, ..header.clone() }, &[]);
        }
        let damage = forge(&TokenCacheHeader { eod: 300, ..header }, &[]);
        assert_eq!(damage, TokenCacheDamage::HeaderInconsistent);
    }

    #[test]
    fn tokens_beyond_the_vocabulary_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer =
            TokenCacheWriter::new(File::create(dir.path().join("x")).unwrap(), 10, 9, false).unwrap();
        assert_eq!(writer.push_tokens(&[10]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
