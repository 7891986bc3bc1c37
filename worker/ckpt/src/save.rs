//! Writes a rank's shard to the staging directory of a save.
use crate::catalog::TensorRole;
use crate::disk::{FileWriter, IoMode};
use crate::dtype::Dtype;
use crate::error::{CkptError, Result, SaveProblem};
use crate::formats::safetensors::{self, PlannedTensor};
use crate::hash::Hash;
use crate::manifest::shard_name;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// Consecutive elements of a logical tensor, stored by this rank.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Purpose of the tensor.
    pub role: TensorRole,
    /// Index of the first element of `data` in the tensor.
    pub start_element: u64,
    /// The elements.
    pub data: Elements<'a>,
}

/// Elements in the dtype in which the shard stores them.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// F32.
    F32(&'a [f32]),
    /// BF16; only for weights, of a run without FP32 masters.
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

/// The position of a piece in its shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceReport {
    /// Name of the tensor.
    pub name: String,
    /// Purpose of the tensor.
    pub role: TensorRole,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Index of the first element in the tensor.
    pub start: u64,
    /// Number of elements.
    pub count: u64,
    /// Byte offset in the file.
    pub offset: u64,
}

/// Describes a written shard to rank 0. Small, and serializable in any serde format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Rank that wrote the shard.
    pub rank: u32,
    /// World size.
    pub world: u32,
    /// Name of the file.
    pub file: String,
    /// Size of the file.
    pub bytes: u64,
    /// BLAKE3 hash of each MiB of the file.
    pub blocks: Vec<Hash>,
    /// The pieces in the file.
    pub pieces: Vec<PieceReport>,
}

/// Writes this rank's shard to the directory [`crate::Staging::path`] and makes it durable. The
/// shard is a safetensors file with one tensor `role/name@start` per piece, in the given order.
/// Empty pieces are omitted. Needs 24 MiB in addition to the pieces.
pub fn write_shard(staging: &Path, rank: u32, world: u32, pieces: &[Piece<'_>]) -> Result<ShardReport> {
    if rank >= world {
        return Err(CkptError::invalid_save(SaveProblem::RankOutsideWorld { rank, world }));
    }
    let pieces: Vec<&Piece<'_>> = pieces.iter().filter(|p| p.data.len() > 0).collect();
    let shapes: Vec<[u64; 1]> = pieces.iter().map(|p| [p.data.len() as u64]).collect();
    let key = |p: &Piece<'_>| safetensors::piece_key(p.role, p.name, p.start_element);
    let planned: Vec<PlannedTensor<'_>> = pieces
        .iter()
        .zip(&shapes)
        .map(|(p, shape)| PlannedTensor { name: key(p), dtype: p.data.dtype(), shape })
        .collect();
    let mut seen = HashSet::new();
    if let Some(twice) = planned.iter().find(|p| !seen.insert(p.name.as_str())) {
        return Err(CkptError::invalid_save(SaveProblem::DuplicatePiece { rank, piece: twice.name.clone() }));
    }
    let header = safetensors::shard_header(rank, world, &planned).map_err(CkptError::invalid_save)?;

    let file = shard_name(rank, world);
    let mut writer = FileWriter::create(staging.join(&file), IoMode::Direct, true)?;
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
