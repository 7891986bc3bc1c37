//! Each rank's shard of a save, in the hidden folder that is committed afterwards.
use crate::catalog::Role;
use crate::disk::{FileWriter, WritePath};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::formats::safetensors::{self, Planned};
use crate::hash::Hash;
use crate::manifest::shard_name;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// Some elements of a logical tensor that this rank holds.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub name: &'a str,
    pub role: Role,
    /// Index in the whole tensor of the first element of `data`.
    pub start_element: u64,
    pub data: Elements<'a>,
}

/// Elements as a shard keeps them.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    /// Of weights only: those of a run that has no others.
    Bf16(&'a [u16]),
}

impl<'a> From<&'a [f32]> for Elements<'a> {
    fn from(values: &'a [f32]) -> Self {
        Elements::F32(values)
    }
}

impl Elements<'_> {
    fn len(&self) -> usize {
        match self {
            Elements::F32(values) => values.len(),
            Elements::Bf16(values) => values.len(),
        }
    }

    fn dtype(&self) -> Dtype {
        match self {
            Elements::F32(_) => Dtype::F32,
            Elements::Bf16(_) => Dtype::BF16,
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Elements::F32(values) => bytemuck::cast_slice(values),
            Elements::Bf16(values) => bytemuck::cast_slice(values),
        }
    }
}

/// Where a piece lies in its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceReport {
    pub name: String,
    pub role: Role,
    pub dtype: Dtype,
    pub start: u64,
    pub count: u64,
    /// Byte offset in the file.
    pub offset: u64,
}

/// What rank 0 needs to know of a written shard; small, and serialisable in any serde format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    pub rank: u32,
    pub world: u32,
    pub file: String,
    pub bytes: u64,
    /// BLAKE3 of each MiB of the file.
    pub blocks: Vec<Hash>,
    pub pieces: Vec<PieceReport>,
}

/// Writes this rank's shard into the folder of [`crate::Staging::path`] and makes it durable: a safetensors file with a tensor
/// `role/name@start` per piece, in the order given. Empty pieces are left out. Needs 24 MiB beside the pieces.
pub fn write_shard(staging: &Path, rank: u32, world: u32, pieces: &[Piece<'_>]) -> Result<ShardReport> {
    if rank >= world {
        return Err(CkptError::invalid(format!("rank {rank} of a world of {world}")));
    }
    let pieces: Vec<&Piece<'_>> = pieces.iter().filter(|p| p.data.len() > 0).collect();
    let shapes: Vec<[u64; 1]> = pieces.iter().map(|p| [p.data.len() as u64]).collect();
    let key = |p: &Piece<'_>| safetensors::piece_key(p.role, p.name, p.start_element);
    let planned: Vec<Planned<'_>> = pieces
        .iter()
        .zip(&shapes)
        .map(|(p, shape)| Planned { name: key(p), dtype: p.data.dtype(), shape })
        .collect();
    let mut seen = HashSet::new();
    if let Some(twice) = planned.iter().find(|p| !seen.insert(p.name.as_str())) {
        return Err(CkptError::invalid(format!("rank {rank} gives {} twice", twice.name)));
    }
    let header = safetensors::shard_header(rank, world, &planned).map_err(CkptError::invalid)?;

    let file = shard_name(rank, world);
    let mut writer = FileWriter::create(staging.join(&file), WritePath::Direct, true)?;
    let mut offset = header.len() as u64;
    writer.write(&header)?;
    let mut reports = Vec::with_capacity(pieces.len());
    for p in pieces {
        writer.write(p.data.bytes())?;
        let (name, dtype, count) = (p.name.to_owned(), p.data.dtype(), p.data.len() as u64);
        reports.push(PieceReport { name, role: p.role, dtype, start: p.start_element, count, offset });
        offset += count * dtype.size();
    }
    let (bytes, blocks) = writer.finish()?;
    Ok(ShardReport { rank, world, file, bytes, blocks, pieces: reports })
}
