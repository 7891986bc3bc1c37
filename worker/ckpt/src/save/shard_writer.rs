//! [`write_shard`]: writes a rank's file (shard) of a checkpoint in launch's own format to the
//! hidden directory of a save.
use crate::codec::disk::{FileWriter, HashMode, IoMode, WrittenFile};
use crate::codec::safetensors::{self, PlannedTensor};
use crate::error::{CkptError, Result, SaveProblem};
use crate::hash::Hash;
use crate::layout::native::shard_file_name;
use crate::tensor::{Dtype, TensorRole};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;

/// Number of bytes of a rank's file (shard) that are written between two calls of the callback that
/// shows the progress of a save.
const PROGRESS_INTERVAL_BYTES: usize = 8 << 20;

/// A piece of a tensor that this rank saves: consecutive elements of the tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorPiece<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// Role of the tensor: weight, optimizer state or buffer.
    pub role: TensorRole,
    /// Row-major index in the tensor of the first element of `data`.
    pub start_element: u64,
    /// The elements of the piece, one after another.
    pub data: PieceElements<'a>,
}

/// The elements of a tensor piece that a rank saves, in the dtype in which the file stores them.
#[derive(Clone, Copy, Debug)]
pub enum PieceElements<'a> {
    /// Elements as F32 numbers.
    F32(&'a [f32]),
    /// Elements as the bits of BF16 numbers. Allowed only for weights, in a run without FP32 master
    /// weights.
    Bf16(&'a [u16]),
}

impl<'a> From<&'a [f32]> for PieceElements<'a> {
    fn from(values: &'a [f32]) -> Self {
        PieceElements::F32(values)
    }
}

impl PieceElements<'_> {
    /// Returns the number of elements of the piece.
    fn len(&self) -> usize {
        match self {
            PieceElements::F32(values) => values.len(),
            PieceElements::Bf16(values) => values.len(),
        }
    }

    /// Returns the dtype of the piece's elements.
    fn dtype(&self) -> Dtype {
        match self {
            PieceElements::F32(_) => Dtype::F32,
            PieceElements::Bf16(_) => Dtype::BF16,
        }
    }

    /// Returns the bytes of the piece's elements.
    fn as_bytes(&self) -> &[u8] {
        match self {
            PieceElements::F32(values) => bytemuck::cast_slice(values),
            PieceElements::Bf16(values) => bytemuck::cast_slice(values),
        }
    }
}

/// A rank's report on one tensor piece in its checkpoint file: which elements the piece contains,
/// and at which byte of the file they begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenPieceReport {
    /// Name of the tensor.
    pub name: String,
    /// Role of the tensor: weight, optimizer state or buffer.
    pub role: TensorRole,
    /// Dtype of the stored elements.
    pub dtype: Dtype,
    /// Index of the first element in the tensor.
    pub start: u64,
    /// Number of elements in the piece.
    pub count: u64,
    /// Byte offset in the shard's file of the first element of the piece.
    pub offset: u64,
}

/// A rank's description of the checkpoint file (shard) that it wrote, sent to rank 0 for
/// [`crate::commit_save`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Rank that wrote the shard.
    pub rank: u32,
    /// World size of the save.
    pub world: u32,
    /// Name of the file.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// BLAKE3 hash of each MiB of the file.
    pub blocks: Vec<Hash>,
    /// The pieces in the file.
    pub pieces: Vec<WrittenPieceReport>,
}

/// Writes and syncs this rank's file (shard) of a checkpoint in the hidden directory of a save
/// ([`crate::StagingDir::path`]). The shard is a safetensors file with one tensor `role/name@start`
/// per piece, in the order of `pieces`. Omits empty pieces. Needs 24 MiB of memory in addition to
/// the pieces.
///
/// # Errors
/// Fails with [`CkptError::InvalidSave`] if `rank` is not below `world`, or a piece is given twice.
/// Also fails if I/O fails.
pub fn write_shard(staging: &Path, rank: u32, world: u32, pieces: &[TensorPiece<'_>]) -> Result<ShardReport> {
    let written = write_shard_until(staging, rank, world, pieces, |_| ControlFlow::Continue(()));
    written?.ok_or_else(|| CkptError::internal("writing the shard ended early"))
}

/// Writes this rank's file (shard) of a checkpoint to the hidden directory of a save, and stops
/// without a result when `progress` returns [`ControlFlow::Break`]. Before every 8 MiB of elements,
/// calls `progress` with the number of bytes of elements that were written so far. Returns `None`
/// after a break, which leaves an incomplete file.
pub fn write_shard_until(
    staging: &Path,
    rank: u32,
    world: u32,
    pieces: &[TensorPiece<'_>],
    mut progress: impl FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<ShardReport>> {
    let plan = ShardPlan::new(rank, world, pieces)?;
    let file = shard_file_name(rank, world);
    let mut writer = FileWriter::create(staging.join(&file), IoMode::Direct, HashMode::Blocks)?;
    writer.write(&plan.header)?;
    let mut written = 0;
    for bytes in &plan.contents {
        for chunk in bytes.chunks(PROGRESS_INTERVAL_BYTES) {
            if progress(written).is_break() {
                return Ok(None);
            }
            writer.write(chunk)?;
            written += chunk.len() as u64;
        }
    }
    let WrittenFile { bytes, blocks, .. } = writer.finish()?;
    Ok(Some(ShardReport { rank, world, file, bytes, blocks, pieces: plan.reports }))
}

/// What a rank's file (shard) of a checkpoint will contain: the header, and the pieces of tensors
/// in order.
pub(super) struct ShardPlan<'a> {
    /// The header of the safetensors file.
    pub(super) header: Vec<u8>,
    /// The bytes of the pieces that are not empty, in the order in which they follow the header.
    pub(super) contents: Vec<&'a [u8]>,
    /// The descriptions of the pieces in `contents`, in the same order.
    pub(super) reports: Vec<WrittenPieceReport>,
}

impl<'a> ShardPlan<'a> {
    /// Plans the content of the file (shard) of `rank` from the given pieces of tensors. Omits
    /// empty pieces.
    ///
    /// # Errors
    /// Fails with [`CkptError::InvalidSave`] if `rank` is not below `world`, or a piece is given
    /// twice.
    pub(super) fn new(rank: u32, world: u32, pieces: &'a [TensorPiece<'_>]) -> Result<ShardPlan<'a>> {
        if rank >= world {
            return Err(CkptError::invalid_save(SaveProblem::RankOutsideWorld { rank, world }));
        }
        let pieces: Vec<&TensorPiece<'_>> = pieces.iter().filter(|p| p.data.len() > 0).collect();
        let shapes: Vec<[u64; 1]> = pieces.iter().map(|p| [p.data.len() as u64]).collect();
        let key = |p: &TensorPiece<'_>| safetensors::format_piece_key(p.role, p.name, p.start_element);
        let planned: Vec<PlannedTensor<'_>> = pieces
            .iter()
            .zip(&shapes)
            .map(|(p, shape)| PlannedTensor { name: key(p), dtype: p.data.dtype(), shape })
            .collect();
        let mut seen = HashSet::new();
        if let Some(twice) = planned.iter().find(|p| !seen.insert(p.name.as_str())) {
            let piece = twice.name.clone();
            return Err(CkptError::invalid_save(SaveProblem::DuplicatePiece { rank, piece }));
        }
        let header =
            safetensors::encode_shard_header(rank, world, &planned).map_err(CkptError::invalid_save)?;
        let mut offset = header.len() as u64;
        let mut reports = Vec::with_capacity(pieces.len());
        for p in &pieces {
            let (name, dtype, count) = (p.name.to_owned(), p.data.dtype(), p.data.len() as u64);
            reports.push(WrittenPieceReport {
                name,
                role: p.role,
                dtype,
                start: p.start_element,
                count,
                offset,
            });
            offset += count * dtype.size();
        }
        let contents = pieces.iter().map(|p| p.data.as_bytes()).collect();
        Ok(ShardPlan { header, contents, reports })
    }
}
