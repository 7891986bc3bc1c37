//! Tensors as pieces of files that others wrote: read where they lie, each stretch of a file checked before its first use.
pub(crate) use super::part::Part;
use super::sums::Sums;
use crate::disk::{Folder, ReadAt, Scratch};
use crate::dtype::Dtype;
use crate::error::{CkptError, Damage, Result};
use crate::formats::torch_file::{TensorView, TorchFile, crc_flaw};
use crate::formats::zip::Member;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes read at a time to check or convert.
const CHUNK: usize = 1 << 20;

/// The files of a checkpoint.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) files: Vec<StoredFile>,
    pub(super) scratch: Scratch,
}

/// One file and the stretches of it that hold tensors.
pub(crate) struct StoredFile {
    folder: Arc<Folder>,
    pub(crate) name: String,
    pub(crate) size: u64,
    pub(super) stretches: Vec<Stretch>,
}

/// Consecutive bytes of a file under one CRC.
pub(super) struct Stretch {
    name: String,
    pub(super) bytes: Range<u64>,
    /// Legacy torch files and safetensors have none: what they hold can't be checked.
    pub(super) crc: Option<u32>,
    /// Its CRC fits.
    sound: AtomicBool,
    /// Of what was read before it was known to be sound.
    pub(super) sums: Sums,
}

impl Stretch {
    pub(super) fn is_sound(&self) -> bool {
        self.sound.load(Ordering::Acquire)
    }

    pub(super) fn set_sound(&self) {
        self.sound.store(true, Ordering::Release);
    }
}

/// Elements of a part and where they go.
pub(crate) struct Wanted<'a> {
    pub(crate) part: &'a Part,
    pub(crate) dtype: Dtype,
    /// Elements of the tensor, all in the part.
    pub(crate) range: Range<u64>,
    pub(crate) out: &'a mut [f32],
}

impl StoredFile {
    /// A file of `size` bytes of which no stretch is known yet.
    pub(crate) fn new(folder: Arc<Folder>, name: String, size: u64) -> StoredFile {
        StoredFile { folder, name, size, stretches: Vec::new() }
    }

    /// A file of torch's; members of the file are stretches of the same index.
    pub(crate) fn torch(folder: Arc<Folder>, name: String, file: TorchFile) -> StoredFile {
        let mut stored = StoredFile::new(folder, name, file.size);
        stored.add(file.members);
        stored
    }

    /// Adds stretches; returns the index of the first.
    pub(crate) fn add(&mut self, members: Vec<Member>) -> usize {
        let first = self.stretches.len();
        self.stretches.extend(members.into_iter().map(|m| Stretch {
            name: m.name,
            bytes: m.data,
            crc: m.crc,
            sound: AtomicBool::new(m.crc.is_none()),
            sums: Sums::default(),
        }));
        first
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    pub(super) fn open<'a>(&'a self, scratch: &'a Scratch) -> Result<ReadAt<'a>> {
        let (file, size) = ReadAt::open(&self.folder, &self.name, scratch)?;
        match size == self.size {
            true => Ok(file),
            false => Err(self.damaged(format!("it has {size} bytes now, it had {} before", self.size))),
        }
    }

    /// A stretch whose CRC doesn't fit.
    pub(super) fn flaw(&self, stretch: &Stretch, tensors: Vec<String>) -> Damage {
        Damage { file: self.name.clone(), block: None, tensors, why: crc_flaw(&stretch.name) }
    }

    fn damaged(&self, why: String) -> CkptError {
        CkptError::damaged(self.folder.path(), &self.name, why)
    }

    /// The CRC of a range of bytes.
    pub(super) fn crc(&self, open: &mut ReadAt<'_>, bytes: Range<u64>) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        open.each(bytes, |piece| hasher.update(piece)).map_err(|e| self.unread(e))?;
        Ok(hasher.finalize())
    }

    /// Reads bytes of a stretch; their CRC is kept until the stretch is known to be sound.
    fn read_summed(&self, open: &mut ReadAt<'_>, stretch: &Stretch, at: u64, out: &mut [u8]) -> Result<()> {
        if stretch.is_sound() {
            return self.read(open, at, out);
        }
        // piece by piece, so that each is summed while it is in the core's cache
        let mut hasher = crc32fast::Hasher::new();
        open.fill(at, out, |piece| hasher.update(piece)).map_err(|e| self.unread(e))?;
        stretch.sums.add(at..at + out.len() as u64, hasher.finalize());
        Ok(())
    }

    fn read(&self, open: &mut ReadAt<'_>, at: u64, out: &mut [u8]) -> Result<()> {
        open.fill(at, out, |_| {}).map_err(|e| self.unread(e))
    }

    fn unread(&self, e: io::Error) -> CkptError {
        match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged("it is cut short".into()),
            _ => CkptError::io("read", &self.folder.path().join(&self.name))(e),
        }
    }
}

impl Store {
    /// Reads all that is wanted, checked. `holders(is it in the part?)` names the tensors with such a part, for an error.
    pub(crate) fn read(
        &self,
        wanted: Vec<Wanted<'_>>,
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_wanted(wanted, true, holders)
    }

    /// Reads all that is wanted, once; [`Store::settle`] says whether it was sound.
    pub(crate) fn read_unchecked(
        &self,
        wanted: Vec<Wanted<'_>>,
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<()> {
        self.read_wanted(wanted, false, holders)
    }

    fn read_wanted(
        &self,
        mut wanted: Vec<Wanted<'_>>,
        checked: bool,
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<()> {
        wanted.sort_by_key(|w| (w.part.file, w.part.stretch, w.part.offset, w.range.start));
        let mut buffer = Vec::new();
        for of_file in wanted.chunk_by_mut(|a, b| a.part.file == b.part.file) {
            let index = of_file[0].part.file;
            let file = &self.files[index];
            let mut open = file.open(&self.scratch)?;
            for w in of_file {
                let stretch = &file.stretches[w.part.stretch];
                // elements here and there make no pieces of a sum
                let first = checked || w.part.strided.is_some();
                if first && !stretch.is_sound() {
                    if !self.is_sound(index, stretch, &mut open)? {
                        let tensors = holders(&|p: &Part| p.is_in(index, w.part.stretch));
                        let damage = file.flaw(stretch, tensors);
                        return Err(CkptError::Damaged { path: file.folder.path().to_owned(), damage });
                    }
                    stretch.set_sound();
                }
                read_part(file, &mut open, stretch, w, &mut buffer)?;
            }
        }
        Ok(())
    }

    fn is_sound(&self, index: usize, stretch: &Stretch, open: &mut ReadAt<'_>) -> Result<bool> {
        let crc = self.files[index].crc(open, stretch.bytes.clone())?;
        Ok(stretch.crc.is_none_or(|expected| expected == crc))
    }

    /// Elements `range` of the tensor of which `part` is a part, as they are stored.
    pub(crate) fn read_raw(
        &self,
        part: &Part,
        dtype: Dtype,
        range: Range<u64>,
        out: &mut [u8],
        holders: impl Fn(&dyn Fn(&Part) -> bool) -> Vec<String>,
    ) -> Result<()> {
        let file = &self.files[part.file];
        let stretch = &file.stretches[part.stretch];
        let mut open = file.open(&self.scratch)?;
        if !stretch.is_sound() {
            if !self.is_sound(part.file, stretch, &mut open)? {
                let damage = file.flaw(stretch, holders(&|p: &Part| p.is_in(part.file, part.stretch)));
                return Err(CkptError::Damaged { path: file.folder.path().to_owned(), damage });
            }
            stretch.set_sound();
        }
        let (size, mut done) = (dtype.size(), 0usize);
        part.runs(range, |element, count| {
            let bytes = (count * size) as usize;
            let out = &mut out[done..done + bytes];
            done += bytes;
            file.read(&mut open, stretch.bytes.start + element * size, out)
        })
    }

    /// One number of a small tensor.
    pub(crate) fn scalar(&self, file: usize, view: &TensorView) -> Result<f32> {
        self.number(&Part::of(file, view, 0..1, 0), view.dtype)
    }

    /// The first number of a part.
    pub(crate) fn number(&self, part: &Part, dtype: Dtype) -> Result<f32> {
        let mut out = [0.0];
        let range = part.start..part.start + 1;
        self.read(vec![Wanted { part, dtype, range, out: &mut out }], |_| Vec::new())?;
        Ok(out[0])
    }
}

fn read_part(
    file: &StoredFile,
    open: &mut ReadAt<'_>,
    stretch: &Stretch,
    w: &mut Wanted<'_>,
    buffer: &mut Vec<u8>,
) -> Result<()> {
    let size = w.dtype.size();
    let mut done = 0;
    let out = &mut *w.out;
    w.part.runs(w.range.clone(), |element, count| {
        let mut at = stretch.bytes.start + element * size;
        let mut rest = &mut out[done..done + count as usize];
        done += count as usize;
        if w.dtype == Dtype::F32 {
            return file.read_summed(open, stretch, at, bytemuck::cast_slice_mut::<f32, u8>(rest));
        }
        buffer.resize(CHUNK, 0);
        while !rest.is_empty() {
            let n = rest.len().min(buffer.len() / size as usize);
            let bytes = &mut buffer[..n * size as usize];
            file.read_summed(open, stretch, at, bytes)?;
            let (now, later) = rest.split_at_mut(n);
            widen(w.dtype, bytes, now).map_err(|why| file.damaged(why))?;
            rest = later;
            at += n as u64 * size;
        }
        Ok(())
    })
}

/// Sixteen-bit numbers as f32, exactly. `Err`: the dtype has no exact place in f32.
fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) -> std::result::Result<(), String> {
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
        other => return Err(format!("a tensor of {other} is not read as F32")),
    }
    Ok(())
}
