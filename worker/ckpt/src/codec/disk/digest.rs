//! Computes BLAKE3 hashes of whole files.
use super::directory::Directory;
use super::offset_reader::{OffsetReader, ReadBuffers};
use crate::error::Result;
use crate::hash::{FileHasher, Hash};

/// Computes the BLAKE3 hash of the whole file `name` in `directory`. Returns the file's size in
/// bytes, and the hash.
///
/// # Errors
/// Fails if the file is missing, is not a regular file, or cannot be read.
pub(crate) fn hash_file(directory: &Directory, name: &str, scratch: &ReadBuffers) -> Result<(u64, Hash)> {
    let (mut reader, size) = OffsetReader::open(directory, name, scratch)?;
    Ok((size, hash_open_file(&mut reader, size)?))
}

/// Computes the BLAKE3 hash of the open file in `reader`, which has `size` bytes. Reads the holes
/// of a sparse file as zeros.
///
/// # Errors
/// Fails if the file has fewer bytes, or a read fails.
pub(crate) fn hash_open_file(reader: &mut OffsetReader<'_>, size: u64) -> Result<Hash> {
    let mut hasher = FileHasher::default();
    let read = reader.for_each_piece(0..size, |piece| hasher.update(piece));
    read.map_err(|e| reader.convert_read_error(e))?;
    Ok(hasher.finish())
}
