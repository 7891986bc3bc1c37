//! Tensors as pieces of files that others wrote: read where they lie, each stretch of a file checked before its first use.
use super::sums::Sums;
use crate::disk::Folder;
use crate::dtype::Dtype;
use crate::error::{CkptError, Damage, Result};
use crate::formats::torch_file::{TensorView, TorchFile, crc_flaw};
use crate::formats::zip::Member;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes read at a time to check or convert.
const CHUNK: usize = 1 << 20;

/// The files of a checkpoint.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) files: Vec<StoredFile>,
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

/// Consecutive elements of a tensor, in one file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// First element, in the tensor.
    pub(crate) start: u64,
    pub(crate) count: u64,
    file: usize,
    stretch: usize,
    /// Element of the stretch at which the view begins.
    offset: u64,
    /// How a view that isn't contiguous is laid out, and how many of its elements come before this part.
    strided: Option<Box<Strided>>,
}

#[derive(Clone, Debug)]
struct Strided {
    shape: Vec<u64>,
    strides: Vec<u64>,
    skip: u64,
}

impl Part {
    /// Elements `taken` of a view in a file, as elements `start..` of a tensor.
    pub(crate) fn of(file: usize, view: &TensorView, taken: Range<u64>, start: u64) -> Part {
        let contiguous = view.is_contiguous();
        let strided = || {
            Box::new(Strided { shape: view.shape.clone(), strides: view.strides.clone(), skip: taken.start })
        };
        Part {
            start,
            count: taken.end - taken.start,
            file,
            stretch: view.member,
            offset: view.offset + if contiguous { taken.start } else { 0 },
            strided: (!contiguous).then(strided),
        }
    }

    /// Elements of the tensor.
    pub(crate) fn elements(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.count)
    }

    /// True when its bytes are in this stretch of this file.
    pub(super) fn is_in(&self, file: usize, stretch: usize) -> bool {
        (self.file, self.stretch) == (file, stretch)
    }

    /// Calls `run(element in the stretch, elements)` for each run of neighbours in elements `range` of the tensor.
    fn runs(&self, range: Range<u64>, mut run: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
        let (first, count) = (range.start - self.start, range.end - range.start);
        let Some(strided) = &self.strided else { return run(self.offset + first, count) };
        let inner = match (strided.shape.last(), strided.strides.last()) {
            (Some(&size), Some(1)) => size,
            _ => 1,
        };
        let (mut at, end) = (strided.skip + first, strided.skip + first + count);
        while at < end {
            let len = (inner - at % inner).min(end - at);
            run(self.offset + strided.position(at), len)?;
            at += len;
        }
        Ok(())
    }
}

impl Strided {
    /// Where element `index` of the view is, from its beginning.
    fn position(&self, mut index: u64) -> u64 {
        let mut position = 0;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            position += index % size * stride;
            index /= size;
        }
        position
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

    pub(super) fn open(&self) -> Result<File> {
        let (file, size) = self.folder.open_file(&self.name, nix::fcntl::OFlag::empty())?;
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
    pub(super) fn crc(&self, open: &File, bytes: Range<u64>, buffer: &mut [u8]) -> Result<u32> {
        let mut hasher = crc32fast::Hasher::new();
        let mut at = bytes.start;
        while at < bytes.end {
            let len = (bytes.end - at).min(buffer.len() as u64) as usize;
            self.read(open, at, &mut buffer[..len])?;
            hasher.update(&buffer[..len]);
            at += len as u64;
        }
        Ok(hasher.finalize())
    }

    /// Reads bytes of a stretch; their CRC is kept until the stretch is known to be sound.
    fn read_summed(&self, open: &File, stretch: &Stretch, at: u64, out: &mut [u8]) -> Result<()> {
        self.read(open, at, out)?;
        if !stretch.is_sound() {
            stretch.sums.add(at..at + out.len() as u64, crc32fast::hash(out));
        }
        Ok(())
    }

    fn read(&self, open: &File, at: u64, out: &mut [u8]) -> Result<()> {
        open.read_exact_at(out, at).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged("it is cut short".into()),
            _ => CkptError::io("read", &self.folder.path().join(&self.name))(e),
        })
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
        let mut buffer = vec![0u8; CHUNK];
        for of_file in wanted.chunk_by_mut(|a, b| a.part.file == b.part.file) {
            let index = of_file[0].part.file;
            let file = &self.files[index];
            let open = file.open()?;
            for w in of_file {
                let stretch = &file.stretches[w.part.stretch];
                // elements here and there make no pieces of a sum
                let first = checked || w.part.strided.is_some();
                if first && !stretch.is_sound() {
                    if !self.is_sound(index, stretch, &open, &mut buffer)? {
                        let tensors = holders(&|p: &Part| p.is_in(index, w.part.stretch));
                        let damage = file.flaw(stretch, tensors);
                        return Err(CkptError::Damaged { path: file.folder.path().to_owned(), damage });
                    }
                    stretch.set_sound();
                }
                read_part(file, &open, stretch, w, &mut buffer)?;
            }
        }
        Ok(())
    }

    fn is_sound(&self, index: usize, stretch: &Stretch, open: &File, buffer: &mut [u8]) -> Result<bool> {
        let crc = self.files[index].crc(open, stretch.bytes.clone(), buffer)?;
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
        let open = file.open()?;
        if !stretch.is_sound() {
            if !self.is_sound(part.file, stretch, &open, &mut vec![0u8; CHUNK])? {
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
            file.read(&open, stretch.bytes.start + element * size, out)
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
    open: &File,
    stretch: &Stretch,
    w: &mut Wanted<'_>,
    buffer: &mut [u8],
) -> Result<()> {
    let size = w.dtype.size();
    let mut done = 0;
    let out = &mut *w.out;
    w.part.runs(w.range.clone(), |element, count| {
        let mut at = stretch.bytes.start + element * size;
        let mut rest = &mut out[done..done + count as usize];
        done += count as usize;
        if w.dtype == Dtype::F32 {
            // piece by piece, so that each is summed while it is in the cache
            for piece in bytemuck::cast_slice_mut::<f32, u8>(rest).chunks_mut(CHUNK) {
                file.read_summed(open, stretch, at, piece)?;
                at += piece.len() as u64;
            }
            return Ok(());
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(shape: &[u64], strides: &[u64], offset: u64, taken: Range<u64>) -> Part {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        Part::of(0, &TensorView { dtype: Dtype::F32, shape, strides, member: 0, offset }, taken, 100)
    }

    fn positions(part: &Part, range: Range<u64>) -> Vec<u64> {
        let mut all = Vec::new();
        let ok = part.runs(range, |at, n| {
            all.extend(at..at + n);
            Ok(())
        });
        ok.expect("nothing fails");
        all
    }

    #[test]
    fn runs_of_a_transposed_and_of_a_sliced_view() {
        assert_eq!(positions(&part(&[2, 3], &[1, 2], 5, 0..6), 100..106), [5, 7, 9, 6, 8, 10]);
        assert_eq!(positions(&part(&[2, 3], &[10, 1], 0, 1..6), 100..105), [1, 2, 10, 11, 12]);
        assert_eq!(positions(&part(&[4], &[0], 3, 0..4), 101..103), [3, 3]);
    }

    proptest! {
        #[test]
        fn runs_are_what_indexing_gives(
            dims in proptest::collection::vec((1u64..4, 0u64..12), 0..4), offset in 0u64..5, a in 0u64..64, b in 0u64..64,
        ) {
            let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
            let total: u64 = shape.iter().product();
            let (from, to) = (a.min(b) % (total + 1), a.max(b) % (total + 1));
            let (from, to) = (from.min(to), from.max(to));
            let whole: Vec<u64> = (0..total).map(|mut i| {
                let mut at = offset;
                for (&n, &s) in shape.iter().zip(&strides).rev() { at += i % n * s; i /= n; }
                at
            }).collect();
            let part = part(&shape, &strides, offset, 0..total);
            prop_assert_eq!(positions(&part, 100 + from..100 + to), &whole[from as usize..to as usize]);
        }
    }
}
