//! [`StoredFiles`]: reads parts of tensors from the files of another program's checkpoint, and
//! verifies their CRC-32s.
use super::partial_crcs::PartialCrcs;
use super::strided_cache::StridedCache;
use super::tensor_part::{ExternalTensor, TensorPart};
use crate::codec::disk::{Directory, OffsetReader, ReadBuffers};
use crate::codec::torch_file::TensorView;
use crate::codec::zip::ZipMember;
use crate::error::{CkptError, Damage, DamageReason, Result};
use crate::tensor::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of bytes of 16-bit floats that are read from a file and converted at a time.
const WIDEN_CHUNK_BYTES: usize = 1 << 20;

/// Identifies a byte range (span) with tensors by the index of its file in the checkpoint and the
/// index of the range in this file.
pub(super) type SpanIndex = (usize, usize);

/// The files of another program's checkpoint that contain tensors.
#[derive(Default)]
pub(crate) struct StoredFiles {
    pub(crate) files: Vec<StoredFile>,
    pub(super) read_buffers: ReadBuffers,
    strided: StridedCache,
}

/// A file of another program's checkpoint, and the byte ranges (spans) of the file that contain
/// tensors.
pub(crate) struct StoredFile {
    directory: Arc<Directory>,
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(super) spans: Vec<CrcSpan>,
}

/// Consecutive bytes of a file for which the file stores one CRC-32. A span is a zip member of a
/// torch file, a storage of a legacy torch file, or a safetensors tensor.
pub(super) struct CrcSpan {
    /// Name of the zip member or of the tensor.
    name: String,
    pub(super) bytes: Range<u64>,
    /// The expected CRC-32. `None` for legacy torch files and safetensors, which have no CRC-32s.
    pub(super) crc: Option<u32>,
    /// True if the content was found to match `crc`, or if there is no CRC-32 to verify.
    verified: AtomicBool,
    /// CRC-32s of those bytes of the span that were read before the whole span was verified.
    pub(super) partial_crcs: PartialCrcs,
}

impl CrcSpan {
    /// Returns true if the bytes were found to match their stored CRC-32, or if no CRC-32 is stored
    /// for them.
    pub(super) fn is_verified(&self) -> bool {
        self.verified.load(Ordering::Acquire)
    }

    /// Records that the bytes of this range of a file match their stored CRC-32, so that they are
    /// not verified again.
    pub(super) fn mark_verified(&self) {
        self.verified.store(true, Ordering::Release);
    }
}

/// The optimizer step of a parameter as stored in a file, which is a number or a tensor with one
/// element.
pub(crate) enum StepValue {
    Number(f64),
    Tensor(TensorView),
}

/// A request to read elements of one part of a tensor into a buffer of f32.
pub(crate) struct PartReadRequest<'a> {
    pub(crate) part: &'a TensorPart,
    pub(crate) dtype: Dtype,
    /// Range of element indices in the tensor. The part must have all of these elements.
    pub(crate) range: Range<u64>,
    pub(crate) out: &'a mut [f32],
}

impl StoredFile {
    /// Creates the description of the checkpoint file `name` of `size` bytes, to which the byte
    /// ranges of its tensors are added later.
    pub(crate) fn new(directory: Arc<Directory>, name: String, size: u64) -> StoredFile {
        StoredFile { directory, name, size, spans: Vec::new() }
    }

    /// Adds the byte ranges of the zip members or tensor storages `members` to the description of
    /// this file. Returns the index of the first added span.
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

    /// Returns true if the file stores a CRC-32 for every byte of its tensors.
    pub(crate) fn has_checksums(&self) -> bool {
        self.spans.iter().all(|span| span.crc.is_some() || span.bytes.is_empty())
    }

    /// Returns the open directory that contains this file.
    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Opens this file to read bytes at any offset, and fails if the file's size has changed since
    /// the checkpoint was opened.
    pub(super) fn open<'a>(&'a self, scratch: &'a ReadBuffers) -> Result<OffsetReader<'a>> {
        let (file, size) = OffsetReader::open(&self.directory, &self.name, scratch)?;
        match size == self.size {
            true => Ok(file),
            false => {
                Err(self.damaged_file_error(DamageReason::SizeMismatch { expected: self.size, found: size }))
            }
        }
    }

    /// Returns the error [`CkptError::Damaged`] for this file, with the reason `reason`.
    fn damaged_file_error(&self, reason: impl Into<DamageReason>) -> CkptError {
        CkptError::damaged(self.directory.path(), &self.name, reason)
    }

    /// Reads the byte range `bytes` of the file and computes its CRC-32.
    pub(super) fn compute_crc(&self, open: &mut OffsetReader<'_>, bytes: Range<u64>) -> Result<u32> {
        open.compute_crc(bytes).map_err(|e| self.convert_read_error(e))
    }

    /// Fills `out` with bytes from the file offset `at` on, and records their CRC-32 if the byte
    /// range `span` is not verified yet.
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
        open.read_into(at, out, |piece| hasher.update(piece)).map_err(|e| self.convert_read_error(e))?;
        span.partial_crcs.add_crc(at..at + out.len() as u64, hasher.finalize());
        Ok(())
    }

    /// Fills `out` with the bytes of the file that begin at offset `at`, without verification.
    fn read_bytes(&self, open: &mut OffsetReader<'_>, at: u64, out: &mut [u8]) -> Result<()> {
        open.read_into(at, out, |_| {}).map_err(|e| self.convert_read_error(e))
    }

    /// Converts an I/O error of a read to a [`CkptError`] that names this file. The unexpected end
    /// of the file becomes [`DamageReason::Truncated`].
    fn convert_read_error(&self, e: io::Error) -> CkptError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged_file_error(DamageReason::Truncated),
            _ => CkptError::io("read", &self.directory.path().join(&self.name))(e),
        }
    }
}

impl StoredFiles {
    /// Adds a file to the list of the checkpoint's files, with `members`, the byte ranges of the
    /// file that contain tensors. Returns the index of the file.
    pub(crate) fn add_file(
        &mut self,
        directory: &Arc<Directory>,
        name: &str,
        size: u64,
        members: Vec<ZipMember>,
    ) -> usize {
        let mut file = StoredFile::new(directory.clone(), name.to_owned(), size);
        file.add_spans(members);
        self.files.push(file);
        self.files.len() - 1
    }

    /// Describes, as a [`Damage`], the mismatch between the bytes of a file range and the CRC-32
    /// that the file stores for this range. `tensors` are the labels of the tensors with a part in
    /// the span.
    pub(super) fn make_crc_mismatch_damage(&self, (file, span): SpanIndex, tensors: Vec<String>) -> Damage {
        let stored = &self.files[file];
        let reason = DamageReason::CrcMismatch { member: stored.spans[span].name.clone() };
        Damage { file: stored.name.clone(), block: None, tensors, reason }
    }

    /// Returns the error [`CkptError::Damaged`] for a byte range of a file whose content does not
    /// match its stored CRC-32. The error names the tensors of `entries` that have a part in the
    /// span.
    pub(super) fn crc_mismatch_error(&self, span: SpanIndex, entries: &[ExternalTensor]) -> CkptError {
        let tensors = list_tensors_in_spans(&[span], entries).remove(&span).unwrap_or_default();
        CkptError::from_damage(
            self.files[span.0].directory.path(),
            self.make_crc_mismatch_damage(span, tensors),
        )
    }

    /// Reads the tensor elements that `part_reads` requests into the buffers of these requests, in
    /// the order of the elements' positions in the files. Verifies the span of a part before the
    /// part is read if `checked` is true or the part is not contiguous. An error about a span names
    /// the tensors of `entries` in the span.
    ///
    /// If `checked` is false, the caller must verify the read spans after the last read with
    /// [`super::crc_check::verify_read_spans`], and must discard the elements if that fails.
    pub(crate) fn read_parts(
        &self,
        mut part_reads: Vec<PartReadRequest<'_>>,
        checked: bool,
        entries: &[ExternalTensor],
    ) -> Result<()> {
        part_reads.sort_by_key(|w| (w.part.file, w.part.span, w.part.offset, w.range.start));
        let mut buffer = Vec::new();
        for in_file in part_reads.chunk_by_mut(|a, b| a.part.file == b.part.file) {
            let file = &self.files[in_file[0].part.file];
            let mut open = file.open(&self.read_buffers)?;
            for w in in_file {
                // strided elements are not consecutive, so their CRC-32s cannot be combined
                if checked || w.part.strided.is_some() {
                    self.verify_span_of_part(w.part, &mut open, entries)?;
                }
                match self.load_strided_span(w.part, &mut open)? {
                    Some(content) => copy_strided_elements_as_f32(&content, w)?,
                    None => read_part_as_f32(file, &mut open, &file.spans[w.part.span], w, &mut buffer)?,
                }
            }
        }
        Ok(())
    }

    /// Verifies the stored CRC-32 of the byte range that contains the tensor part `part`, unless it
    /// was verified before. Fails if the content does not match.
    fn verify_span_of_part(
        &self,
        part: &TensorPart,
        open: &mut OffsetReader<'_>,
        entries: &[ExternalTensor],
    ) -> Result<()> {
        let file = &self.files[part.file];
        let span = &file.spans[part.span];
        if span.is_verified() {
            return Ok(());
        }
        let crc = file.compute_crc(open, span.bytes.clone())?;
        if span.crc.is_some_and(|expected| expected != crc) {
            return Err(self.crc_mismatch_error((part.file, part.span), entries));
        }
        span.mark_verified();
        Ok(())
    }

    /// Returns all bytes of the byte range (span) that contains a non-contiguous tensor part, from
    /// a cache or from the file. Returns `None` for contiguous parts, and if the span is too large
    /// for the cache. The caller must have verified the span.
    fn load_strided_span(&self, part: &TensorPart, open: &mut OffsetReader<'_>) -> Result<Option<Arc<[u8]>>> {
        if part.strided.is_none() {
            return Ok(None);
        }
        let file = &self.files[part.file];
        let bytes = file.spans[part.span].bytes.clone();
        let read = |buffer: &mut [u8]| file.read_bytes(open, bytes.start, buffer);
        self.strided.get_or_read((part.file, part.span), bytes.end - bytes.start, read)
    }

    /// Reads the elements `range` of a tensor from one stored part into `out`, after verifying the
    /// part, as bytes in their stored dtype. `part` must have all of these elements. Verifies the
    /// span of the part first.
    pub(crate) fn read_raw(
        &self,
        part: &TensorPart,
        dtype: Dtype,
        range: Range<u64>,
        out: &mut [u8],
        entries: &[ExternalTensor],
    ) -> Result<()> {
        let file = &self.files[part.file];
        let mut open = file.open(&self.read_buffers)?;
        self.verify_span_of_part(part, &mut open, entries)?;
        let content = self.load_strided_span(part, &mut open)?;
        let start = file.spans[part.span].bytes.start;
        let (size, mut done) = (dtype.size(), 0usize);
        part.for_each_run(range, |element, count| {
            let (at, bytes) = (element * size, (count * size) as usize);
            let out = &mut out[done..done + bytes];
            done += bytes;
            match &content {
                Some(content) => copy_bytes(content, at, out),
                None => file.read_bytes(&mut open, start + at, out),
            }
        })
    }

    /// Returns the index of the first element in `range` whose bytes are not in a hole of a sparse
    /// file. Elements in a hole are zero and need not be read. Returns the start of `range` if the
    /// part is not contiguous.
    pub(super) fn skip_file_holes(&self, part: &TensorPart, dtype: Dtype, range: Range<u64>) -> Result<u64> {
        if part.strided.is_some() {
            return Ok(range.start);
        }
        let (file, size) = (&self.files[part.file], dtype.size());
        let first = file.spans[part.span].bytes.start + (part.offset + range.start - part.start) * size;
        let data = file.open(&self.read_buffers)?.find_data(first..first + (range.end - range.start) * size);
        Ok(range.end.min(range.start + (data.start - first) / size))
    }

    /// Returns a parameter's optimizer step, which a torch file stores as a number or as a tensor
    /// with one element.
    pub(crate) fn read_step(&self, file: usize, step: &StepValue) -> Result<f64> {
        match step {
            StepValue::Number(number) => Ok(*number),
            StepValue::Tensor(view) => self.read_scalar(file, view).map(f64::from),
        }
    }

    /// Reads the first element of a torch tensor in the checkpoint file with the index `file`, and
    /// converts it to F32. Verifies the span of the tensor first.
    pub(crate) fn read_scalar(&self, file: usize, view: &TensorView) -> Result<f32> {
        self.read_first_element(&TensorPart::new(file, view, 0..1, 0), view.dtype)
    }

    /// Reads the first element of a tensor part as F32. Verifies the span of the part first.
    pub(crate) fn read_first_element(&self, part: &TensorPart, dtype: Dtype) -> Result<f32> {
        let mut out = [0.0];
        let range = part.start..part.start + 1;
        self.read_parts(vec![PartReadRequest { part, dtype, range, out: &mut out }], true, &[])?;
        Ok(out[0])
    }
}

/// Finds the tensors that are stored in each of the byte ranges `spans`, and returns their names
/// for error messages by range.
pub(super) fn list_tensors_in_spans(
    spans: &[SpanIndex],
    entries: &[ExternalTensor],
) -> HashMap<SpanIndex, Vec<String>> {
    let mut found: HashMap<SpanIndex, Vec<String>> = spans.iter().map(|s| (*s, Vec::new())).collect();
    for entry in entries {
        let places: BTreeSet<SpanIndex> = entry.parts.iter().map(|p| (p.file, p.span)).collect();
        for place in places {
            if let Some(tensors) = found.get_mut(&place) {
                tensors.push(entry.info.label());
            }
        }
    }
    found
}

/// Reads the tensor elements of the request `w` from a byte range of a file, and converts them to
/// F32 in the request's buffer. `buffer` is scratch memory, whose content is overwritten.
fn read_part_as_f32(
    file: &StoredFile,
    open: &mut OffsetReader<'_>,
    span: &CrcSpan,
    w: &mut PartReadRequest<'_>,
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
        buffer.resize(WIDEN_CHUNK_BYTES, 0);
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

/// Fills `out` with bytes of `content` that begin at the offset `at`.
fn copy_bytes(content: &[u8], at: u64, out: &mut [u8]) -> Result<()> {
    let outside = || CkptError::internal("an element is outside of its span");
    let at = usize::try_from(at).map_err(|_| outside())?;
    let source = content.get(at..).and_then(|rest| rest.get(..out.len())).ok_or_else(outside)?;
    out.copy_from_slice(source);
    Ok(())
}

/// Copies non-contiguous tensor elements from `content`, the bytes of a file range, to the
/// request's buffer, converted to F32.
fn copy_strided_elements_as_f32(content: &[u8], w: &mut PartReadRequest<'_>) -> Result<()> {
    let size = w.dtype.size();
    let (mut done, mut bytes) = (0, Vec::new());
    let out = &mut *w.out;
    w.part.for_each_run(w.range.clone(), |element, count| {
        let out = &mut out[done..done + count as usize];
        done += count as usize;
        if w.dtype == Dtype::F32 {
            return copy_bytes(content, element * size, bytemuck::cast_slice_mut::<f32, u8>(out));
        }
        bytes.resize((count * size) as usize, 0);
        copy_bytes(content, element * size, &mut bytes)?;
        match widen_to_f32(w.dtype, &bytes, out) {
            true => Ok(()),
            false => Err(CkptError::internal("a tensor that is neither BF16, F16 nor F32 is read as F32")),
        }
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
