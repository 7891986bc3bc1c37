//! [`StoredFiles`]: reads parts of tensors in the files of an external checkpoint, and verifies the
//! CRC-32 of each span of a file.
use super::partial_crcs::PartialCrcs;
use super::tensor_part::TensorPart;
use crate::codec::disk::{Directory, OffsetReader, ReadBuffers};
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::codec::zip::ZipMember;
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::tensor::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of 16-bit floats that are read and converted at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The files of an external checkpoint that hold tensors.
#[derive(Default)]
pub(crate) struct StoredFiles {
    pub(crate) files: Vec<StoredFile>,
    pub(super) read_buffers: ReadBuffers,
}

/// A file of an external checkpoint, and its spans that hold tensors.
pub(crate) struct StoredFile {
    directory: Arc<Directory>,
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(super) spans: Vec<CrcSpan>,
}

/// Consecutive bytes of a file with one CRC-32. A span is a zip member of a torch file, a storage
/// of a legacy torch file, or a safetensors tensor.
pub(super) struct CrcSpan {
    /// Name of the zip member or of the tensor.
    name: String,
    pub(super) bytes: Range<u64>,
    /// The expected CRC-32. `None` for legacy torch files and safetensors, which have no CRC-32s.
    pub(super) crc: Option<u32>,
    /// True if the content was found to match `crc`, or if there is no CRC-32 to verify.
    verified: AtomicBool,
    /// CRC-32s of the bytes that were read before the span was verified.
    pub(super) partial_crcs: PartialCrcs,
}

impl CrcSpan {
    /// Returns true if the span needs no verification any more.
    pub(super) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Acquire)
    }

    /// Records that the content matches the CRC-32, so that the span is not verified again.
    pub(super) fn mark_verified(&self) {
        self.verified.store(true, Ordering::Release);
    }
}

/// A request to read elements of one part of a tensor into a buffer of f32.
pub(crate) struct PartRead<'a> {
    pub(crate) part: &'a TensorPart,
    pub(crate) dtype: Dtype,
    /// Range of element indices in the tensor. The part must have all of these elements.
    pub(crate) range: Range<u64>,
    pub(crate) out: &'a mut [f32],
}

impl StoredFile {
    /// Describes the file `name` of `size` bytes in `directory`, without spans.
    pub(crate) fn new(directory: Arc<Directory>, name: String, size: u64) -> StoredFile {
        StoredFile { directory, name, size, spans: Vec::new() }
    }

    /// Describes the torch file `name` in `directory`. Each member of the file becomes a span with
    /// the same index.
    pub(crate) fn from_torch_file(directory: Arc<Directory>, name: String, file: TorchFile) -> StoredFile {
        let mut stored = StoredFile::new(directory, name, file.size);
        stored.add_spans(file.members);
        stored
    }

    /// Adds a span for each member. Returns the index of the first added span.
    pub(crate) fn add_spans(&mut self, members: Vec<ZipMember>) -> usize {
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

    /// Returns the open directory that contains the file.
    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Opens the file for reads at any offset. The reads use the buffers of `scratch`.
    ///
    /// # Errors
    /// Fails if the size has changed since the checkpoint was opened.
    pub(super) fn open<'a>(&'a self, scratch: &'a ReadBuffers) -> Result<OffsetReader<'a>> {
        let (file, size) = OffsetReader::open(&self.directory, &self.name, scratch)?;
        match size == self.size {
            true => Ok(file),
            false => Err(self.damaged(DamageReason::SizeMismatch { expected: self.size, found: size })),
        }
    }

    /// Returns the damage of a span whose content does not match its CRC-32. `tensors` names the
    /// tensors in the span.
    pub(super) fn crc_damage(&self, span: &CrcSpan, tensors: Vec<String>) -> Damage {
        let reason = DamageReason::CrcMismatch { member: span.name.clone() };
        Damage { file: self.name.clone(), block: None, tensors, reason }
    }

    /// Returns [`CkptError::Damaged`] for this file.
    fn damaged(&self, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), &self.name, reason)
    }

    /// Reads the byte range `bytes` of the file and computes its CRC-32.
    pub(super) fn compute_crc(&self, open: &mut OffsetReader<'_>, bytes: Range<u64>) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        open.for_each_piece(bytes, |piece| hasher.update(piece)).map_err(|e| self.read_error(e))?;
        Ok(hasher.finalize())
    }

    /// Fills `out` with bytes of `span` from offset `at` of the file on. Records the CRC-32 of the
    /// bytes if the span is not verified yet.
    fn read_and_record_crc(
        &self,
        open: &mut OffsetReader<'_>,
        span: &CrcSpan,
        at: u64,
        out: &mut [u8],
    ) -> Result<()> {
        if span.is_verified() {
            return self.read_bytes(open, at, out);
        }
        // read in pieces, so that each is hashed while it is in the CPU cache
        let mut hasher = crc32fast::Hasher::new();
        open.read_into(at, out, |piece| hasher.update(piece)).map_err(|e| self.read_error(e))?;
        span.partial_crcs.add_crc(at..at + out.len() as u64, hasher.finalize());
        Ok(())
    }

    /// Fills `out` with the bytes from offset `at` of the file on, without verification.
    fn read_bytes(&self, open: &mut OffsetReader<'_>, at: u64, out: &mut [u8]) -> Result<()> {
        open.read_into(at, out, |_| {}).map_err(|e| self.read_error(e))
    }

    /// Converts an I/O error of a read in this file. The unexpected end of the file becomes
    /// [`DamageReason::Truncated`].
    fn read_error(&self, e: io::Error) -> CkptError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged(DamageReason::Truncated),
            _ => CkptError::io("read", &self.directory.path().join(&self.name))(e),
        }
    }
}

impl StoredFiles {
    /// Reads all requested parts, and verifies the span of each part first. For errors,
    /// `tensors_with(predicate)` must name the tensors with a part that satisfies the predicate.
    pub(crate) fn read_verified_parts(
        &self,
        part_reads: Vec<PartRead<'_>>,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_parts(part_reads, true, tensors_with)
    }

    /// Reads all requested parts, without verifying the spans of contiguous parts. The caller must
    /// call [`StoredFiles::verify_read_spans`] after the last read, and must discard the elements
    /// if that call fails. The span of a part that is not contiguous is verified before the part is
    /// read.
    /// `tensors_with(predicate)` must name the tensors with a part that satisfies the predicate.
    pub(crate) fn read_unverified_parts(
        &self,
        part_reads: Vec<PartRead<'_>>,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_parts(part_reads, false, tensors_with)
    }

    /// Reads all requested parts in the order of their files and offsets. Verifies the span of a
    /// part before the part is read if `checked` is true or the part is not contiguous.
    fn read_parts(
        &self,
        mut part_reads: Vec<PartRead<'_>>,
        checked: bool,
        tensors_with: impl Fn(&dyn Fn(&TensorPart) -> bool) -> Vec<String>,
    ) -> Result<()> {
        part_reads.sort_by_key(|w| (w.part.file, w.part.span, w.part.offset, w.range.start));
        let mut buffer = Vec::new();
        for in_file in part_reads.chunk_by_mut(|a, b| a.part.file == b.part.file) {
            let index = in_file[0].part.file;
            let file = &self.files[index];
            let mut open = file.open(&self.read_buffers)?;
            for w in in_file {
                let span = &file.spans[w.part.span];
                // strided elements are not consecutive, so their CRC-32s cannot be combined
                let verify_first = checked || w.part.strided.is_some();
                if verify_first && !span.is_verified() {
                    if !self.verify_span_crc(index, span, &mut open)? {
                        let tensors = tensors_with(&|p: &TensorPart| p.is_in_span(index, w.part.span));
                        let damage = file.crc_damage(span, tensors);
                        return Err(CkptError::Damaged {
                            path: file.directory.path().to_owned(),
                            damage: Box::new(damage),
                        });
                    }
                    span.mark_verified();
                }
                read_part(file, &mut open, span, w, &mut buffer)?;
            }
        }
        Ok(())
    }

    /// Reads the whole span `span` of the file with index `index`. Returns true if the content
    /// matches the CRC-32. Does not mark the span as verified.
    fn verify_span_crc(&self, index: usize, span: &CrcSpan, open: &mut OffsetReader<'_>) -> Result<bool> {
        let crc = self.files[index].compute_crc(open, span.bytes.clone())?;
        Ok(span.crc.is_none_or(|expected| expected == crc))
    }

    /// Reads the elements `range` of the tensor into `out`, in the stored dtype. `part` must have
    /// all of these elements. Verifies the span of the part first.
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
        let mut open = file.open(&self.read_buffers)?;
        if !span.is_verified() {
            if !self.verify_span_crc(part.file, span, &mut open)? {
                let damage =
                    file.crc_damage(span, tensors_with(&|p: &TensorPart| p.is_in_span(part.file, part.span)));
                return Err(CkptError::Damaged {
                    path: file.directory.path().to_owned(),
                    damage: Box::new(damage),
                });
            }
            span.mark_verified();
        }
        let (size, mut done) = (dtype.size(), 0usize);
        part.for_each_run(range, |element, count| {
            let bytes = (count * size) as usize;
            let out = &mut out[done..done + bytes];
            done += bytes;
            file.read_bytes(&mut open, span.bytes.start + element * size, out)
        })
    }

    /// Reads the first element of the tensor `view` of the file with index `file`, as F32. Verifies
    /// the span of the tensor first.
    pub(crate) fn read_scalar(&self, file: usize, view: &TensorView) -> Result<f32> {
        self.read_first_element(&TensorPart::new(file, view, 0..1, 0), view.dtype)
    }

    /// Reads the first element of a part as F32. Verifies the span of the part first.
    pub(crate) fn read_first_element(&self, part: &TensorPart, dtype: Dtype) -> Result<f32> {
        let mut out = [0.0];
        let range = part.start..part.start + 1;
        self.read_verified_parts(vec![PartRead { part, dtype, range, out: &mut out }], |_| Vec::new())?;
        Ok(out[0])
    }
}

/// Reads the elements of the request `w` from the span `span`, and stores them as F32 in `w.out`.
/// `buffer` is scratch memory, whose content is overwritten.
fn read_part(
    file: &StoredFile,
    open: &mut OffsetReader<'_>,
    span: &CrcSpan,
    w: &mut PartRead<'_>,
    buffer: &mut Vec<u8>,
) -> Result<()> {
    let size = w.dtype.size();
    let mut done = 0;
    let out = &mut *w.out;
    w.part.for_each_run(w.range.clone(), |element, count| {
        let mut at = span.bytes.start + element * size;
        let mut rest = &mut out[done..done + count as usize];
        done += count as usize;
        if w.dtype == Dtype::F32 {
            return file.read_and_record_crc(open, span, at, bytemuck::cast_slice_mut::<f32, u8>(rest));
        }
        buffer.resize(CHUNK_BYTES, 0);
        while !rest.is_empty() {
            let n = rest.len().min(buffer.len() / size as usize);
            let bytes = &mut buffer[..n * size as usize];
            file.read_and_record_crc(open, span, at, bytes)?;
            let (now, later) = rest.split_at_mut(n);
            if !widen_to_f32(w.dtype, bytes, now) {
                return Err(CkptError::internal("a tensor that is neither BF16, F16 nor F32 is read as F32"));
            }
            rest = later;
            at += n as u64 * size;
        }
        Ok(())
    })
}

/// Converts little-endian 16-bit floats to F32 without loss. Returns false for dtypes other than
/// BF16 and F16.
fn widen_to_f32(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> bool {
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
