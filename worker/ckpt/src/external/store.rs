//! [`Store`]: the files of an external checkpoint. Reads parts of tensors in place, and verifies
//! the CRC-32 of a span of a file before its first use.
use super::crc_combine::PartialCrcs;
pub(crate) use super::part::TensorPart;
use crate::disk::{Directory, ReadAt, Scratch};
use crate::dtype::Dtype;
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::formats::torch_file::{TensorView, TorchFile};
use crate::formats::zip::Member;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// The files of an external checkpoint.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) files: Vec<StoredFile>,
    pub(super) scratch: Scratch,
}

/// A file and its spans with tensors.
pub(crate) struct StoredFile {
    directory: Arc<Directory>,
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(super) spans: Vec<CrcSpan>,
}

/// Consecutive bytes of a file with one CRC-32: a member of a torch file, or a safetensors tensor.
pub(super) struct CrcSpan {
    name: String,
    pub(super) bytes: Range<u64>,
    /// `None` for legacy torch files and safetensors, which cannot be verified.
    pub(super) crc: Option<u32>,
    /// The CRC-32 was verified.
    verified: AtomicBool,
    /// CRC-32s of the bytes that were read before verification.
    pub(super) partial_crcs: PartialCrcs,
}

impl CrcSpan {
    pub(super) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Acquire)
    }

    pub(super) fn set_verified(&self) {
        self.verified.store(true, Ordering::Release);
    }
}

/// A request to read elements of a part into a buffer.
pub(crate) struct PartRead<'a> {
    pub(crate) part: &'a TensorPart,
    pub(crate) dtype: Dtype,
    /// Range of elements in the tensor, inside of the part.
    pub(crate) range: Range<u64>,
    pub(crate) out: &'a mut [f32],
}

impl StoredFile {
    /// A file of `size` bytes without spans.
    pub(crate) fn new(directory: Arc<Directory>, name: String, size: u64) -> StoredFile {
        StoredFile { directory, name, size, spans: Vec::new() }
    }

    /// A torch file. Each member is a span with the same index.
    pub(crate) fn torch(directory: Arc<Directory>, name: String, file: TorchFile) -> StoredFile {
        let mut stored = StoredFile::new(directory, name, file.size);
        stored.add(file.members);
        stored
    }

    /// Adds spans; returns the index of the first.
    pub(crate) fn add(&mut self, members: Vec<Member>) -> usize {
        let first = self.spans.len();
        self.spans.extend(members.into_iter().map(|m| CrcSpan {
            name: m.name,
            bytes: m.data,
            crc: m.crc,
            verified: AtomicBool::new(m.crc.is_none()),
            partial_crcs: PartialCrcs::default(),
        }));
        first
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    pub(super) fn open<'a>(&'a self, scratch: &'a Scratch) -> Result<ReadAt<'a>> {
        let (file, size) = ReadAt::open(&self.directory, &self.name, scratch)?;
        match size == self.size {
            true => Ok(file),
            false => Err(self.damaged(DamageReason::SizeMismatch { expected: self.size, found: size })),
        }
    }

    /// The damage of a span with a wrong CRC-32.
    pub(super) fn crc_damage(&self, span: &CrcSpan, tensors: Vec<String>) -> Damage {
        let reason = DamageReason::CrcMismatch { member: span.name.clone() };
        Damage { file: self.name.clone(), block: None, tensors, reason }
    }

    fn damaged(&self, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), &self.name, reason)
    }

    /// Computes the CRC-32 of a byte range.
    pub(super) fn crc(&self, open: &mut ReadAt<'_>, bytes: Range<u64>) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        open.each(bytes, |piece| hasher.update(piece)).map_err(|e| self.read_error(e))?;
        Ok(hasher.finalize())
    }

    /// Reads bytes of a span, and records their CRC-32 unless the span is verified.
    fn read_with_crc(&self, open: &mut ReadAt<'_>, span: &CrcSpan, at: u64, out: &mut [u8]) -> Result<()> {
        if span.is_verified() {
            return self.read(open, at, out);
        }
        // in pieces, so that the CRC of each is computed while it is in the CPU cache
        let mut hasher = crc32fast::Hasher::new();
        open.fill(at, out, |piece| hasher.update(piece)).map_err(|e| self.read_error(e))?;
        span.partial_crcs.add(at..at + out.len() as u64, hasher.finalize());
        Ok(())
    }

    fn read(&self, open: &mut ReadAt<'_>, at: u64, out: &mut [u8]) -> Result<()> {
        open.fill(at, out, |_| {}).map_err(|e| self.read_error(e))
    }

    fn read_error(&self, e: io::Error) -> CkptError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged(DamageReason::Truncated),
            _ => CkptError::io("read", &self.directory.path().join(&self.name))(e),
        }
    }
}

impl Store {
    /// Reads all requested parts and verifies them first. `tensors_with(predicate)` names the
    /// tensors with a matching part, for errors.
    pub(crate) fn read(
        &self,
        wanted: Vec<PartRead<'_>>,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_wanted(wanted, true, tensors_with)
    }

    /// Reads all requested parts without verifying them; [`Store::verify_reads`] verifies them
    /// afterwards.
    pub(crate) fn read_unchecked(
        &self,
        wanted: Vec<PartRead<'_>>,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_wanted(wanted, false, tensors_with)
    }

    fn read_wanted(
        &self,
        mut wanted: Vec<PartRead<'_>>,
        checked: bool,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        wanted.sort_by_key(|w| (w.part.file, w.part.span, w.part.offset, w.range.start));
        let mut buffer = Vec::new();
        for in_file in wanted.chunk_by_mut(|a, b| a.part.file == b.part.file) {
            let index = in_file[0].part.file;
            let file = &self.files[index];
            let mut open = file.open(&self.scratch)?;
            for w in in_file {
                let span = &file.spans[w.part.span];
                // strided elements are not consecutive, so their CRC-32s cannot be combined
                let verify_first = checked || w.part.strided.is_some();
                if verify_first && !span.is_verified() {
                    if !self.is_verified(index, span, &mut open)? {
                        let tensors = tensors_with(&|p: &TensorPart| p.is_in(index, w.part.span));
                        let damage = file.crc_damage(span, tensors);
                        return Err(CkptError::Damaged {
                            path: file.directory.path().to_owned(),
                            damage: Box::new(damage),
                        });
                    }
                    span.set_verified();
                }
                read_part(file, &mut open, span, w, &mut buffer)?;
            }
        }
        Ok(())
    }

    fn is_verified(&self, index: usize, span: &CrcSpan, open: &mut ReadAt<'_>) -> Result<bool> {
        let crc = self.files[index].crc(open, span.bytes.clone())?;
        Ok(span.crc.is_none_or(|expected| expected == crc))
    }

    /// Reads elements `range` of the tensor of `part` in their stored form.
    pub(crate) fn read_raw(
        &self,
        part: &TensorPart,
        dtype: Dtype,
        range: Range<u64>,
        out: &mut [u8],
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        let file = &self.files[part.file];
        let span = &file.spans[part.span];
        let mut open = file.open(&self.scratch)?;
        if !span.is_verified() {
            if !self.is_verified(part.file, span, &mut open)? {
                let damage =
                    file.crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in(part.file, part.span)));
                return Err(CkptError::Damaged {
                    path: file.directory.path().to_owned(),
                    damage: Box::new(damage),
                });
            }
            span.set_verified();
        }
        let (size, mut done) = (dtype.size(), 0usize);
        part.runs(range, |element, count| {
            let bytes = (count * size) as usize;
            let out = &mut out[done..done + bytes];
            done += bytes;
            file.read(&mut open, span.bytes.start + element * size, out)
        })
    }

    /// Reads the number in a scalar tensor.
    pub(crate) fn scalar(&self, file: usize, view: &TensorView) -> Result<f32> {
        self.number(&TensorPart::new(file, view, 0..1, 0), view.dtype)
    }

    /// Reads the first number of a part.
    pub(crate) fn number(&self, part: &TensorPart, dtype: Dtype) -> Result<f32> {
        let mut out = [0.0];
        let range = part.start..part.start + 1;
        self.read(vec![PartRead { part, dtype, range, out: &mut out }], |_| Vec::new())?;
        Ok(out[0])
    }
}

fn read_part(
    file: &StoredFile,
    open: &mut ReadAt<'_>,
    span: &CrcSpan,
    w: &mut PartRead<'_>,
    buffer: &mut Vec<u8>,
) -> Result<()> {
    let size = w.dtype.size();
    let mut done = 0;
    let out = &mut *w.out;
    w.part.runs(w.range.clone(), |element, count| {
        let mut at = span.bytes.start + element * size;
        let mut rest = &mut out[done..done + count as usize];
        done += count as usize;
        if w.dtype == Dtype::F32 {
            return file.read_with_crc(open, span, at, bytemuck::cast_slice_mut::<f32, u8>(rest));
        }
        buffer.resize(CHUNK, 0);
        while !rest.is_empty() {
            let n = rest.len().min(buffer.len() / size as usize);
            let bytes = &mut buffer[..n * size as usize];
            file.read_with_crc(open, span, at, bytes)?;
            let (now, later) = rest.split_at_mut(n);
            if !widen(w.dtype, bytes, now) {
                return Err(CkptError::internal("a tensor that is neither BF16, F16 nor F32 is read as F32"));
            }
            rest = later;
            at += n as u64 * size;
        }
        Ok(())
    })
}

/// Widens 16-bit floats to F32 exactly. False for other dtypes.
fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> bool {
    let pairs = bytes.as_chunks::<2>().0;
    match dtype {
        Dtype::BF16 => {
            for (o, &b) in out.iter_mut().zip(pairs) {
                *o = bf16::from_le_bytes(b).to_f32();
            }
        }
        Dtype::F16 => {
            let narrow: Vec<f16> = pairs.iter().map(|&b| f16::from_le_bytes(b)).collect();
            narrow.convert_to_f32_slice(out);
        }
        _ => return false,
    }
    true
}
