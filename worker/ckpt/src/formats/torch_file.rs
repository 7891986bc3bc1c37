//! What `torch.save` writes: a zip with a pickle of the values and one member per storage, or the legacy form of the
//! same. Tensors are byte ranges.
use super::legacy;
use super::zip::{self, Member};
use crate::catalog::elements;
use crate::disk::Folder;
use crate::dtype::Dtype;
use crate::error::{CkptError, Result};
use crate::pickle::{self, Items, Tree, View};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Globals of tensors: every file with tensors may name them.
pub(crate) const TENSORS: &[&str] = &[
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._tensor._rebuild_from_type_v2",
    "torch.Tensor",
    "torch.Size",
    "torch.BFloat16Storage",
    "torch.BoolStorage",
    "torch.ByteStorage",
    "torch.CharStorage",
    "torch.DoubleStorage",
    "torch.FloatStorage",
    "torch.HalfStorage",
    "torch.IntStorage",
    "torch.LongStorage",
    "torch.ShortStorage",
    "torch.storage.UntypedStorage",
    "torch.bfloat16",
    "torch.bool",
    "torch.float16",
    "torch.float32",
    "torch.float64",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
    "torch.int16",
    "torch.int32",
    "torch.int64",
    "torch.int8",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.uint8",
];
/// Globals of plain values that programs keep beside tensors. Nothing of them is executed, so they may be named.
pub(crate) const PLAIN: &[&str] = &[
    "__builtin__.set",
    "__builtin__.complex",
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.complex",
    "builtins.frozenset",
    "builtins.set",
    "collections.Counter",
    "collections.defaultdict",
    "builtins.dict",
    "builtins.int",
    "builtins.list",
    "datetime.datetime",
    "datetime.timedelta",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "torch.device",
];
/// Files up to this size are read in one go.
const SMALL: u64 = 64 << 10;
/// Most dimensions of a tensor.
const RANK_MAX: usize = 16;

/// One file: its values, and where its storages lie.
pub(crate) struct TorchFile {
    /// Bytes of the whole file.
    pub(crate) size: u64,
    /// The folder inside the container: the name of the file when it was written.
    pub(crate) root: String,
    pub(crate) members: Vec<Member>,
    /// Key of a storage → index of its member.
    storages: HashMap<String, usize>,
    tree: Tree,
}

/// A tensor in a file: elements of one storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorView {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Per dimension, elements.
    pub(crate) strides: Vec<u64>,
    /// Index of the member.
    pub(crate) member: usize,
    /// First element in the storage.
    pub(crate) offset: u64,
}

impl TensorView {
    /// Nothing yet: one number of the first member.
    pub(crate) fn scalar() -> TensorView {
        TensorView { dtype: Dtype::F32, shape: Vec::new(), strides: Vec::new(), member: 0, offset: 0 }
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(0)
    }

    /// Which elements of the file it is: those of another tensor at the same place are the same.
    pub(crate) fn place(&self) -> (usize, u64, &[u64], &[u64]) {
        (self.member, self.offset, &self.shape, &self.strides)
    }

    /// True when the elements lie one after the other.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        }) || self.elements() == 0
    }
}

impl TorchFile {
    /// Reads the values of a file; `globals` may be named in it. Storages are not read.
    pub(crate) fn open(folder: &Folder, name: &str, globals: &[&[&'static str]]) -> Result<TorchFile> {
        let (file, size) = folder.open_file(name, nix::fcntl::OFlag::empty())?;
        TorchFile::within(&file, 0..size, globals).map_err(|why| CkptError::damaged(folder.path(), name, why))
    }

    /// The same of a file that is a stretch of another one.
    pub(crate) fn within(
        file: &File,
        bytes: Range<u64>,
        globals: &[&[&'static str]],
    ) -> std::result::Result<TorchFile, String> {
        let size = bytes.end.saturating_sub(bytes.start);
        let mut found = if size <= SMALL {
            let mut all = vec![0u8; size as usize];
            file.read_exact_at(&mut all, bytes.start).map_err(|e| e.to_string())?;
            TorchFile::parse(size, |at, out| copy(&all, at, out), globals)
        } else {
            TorchFile::parse(size, |at, out| file.read_exact_at(out, bytes.start + at), globals)
        }?;
        for member in &mut found.members {
            member.data = bytes.start + member.data.start..bytes.start + member.data.end;
        }
        Ok(found)
    }

    /// Reads the values of `size` bytes that `read_at(offset, buffer)` gives.
    pub(crate) fn parse(
        size: u64,
        mut read_at: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
        globals: &[&[&'static str]],
    ) -> std::result::Result<TorchFile, String> {
        let mut magic = [0u8; legacy::MAGIC.len()];
        if size >= magic.len() as u64 {
            read_at(0, &mut magic).map_err(|e| e.to_string())?;
        }
        if magic == legacy::MAGIC {
            let width = |class: &str| storage_dtype(class).map(Dtype::size);
            let legacy = legacy::parse(size, &mut read_at, globals, width)?;
            return Ok(TorchFile::of(size, String::new(), legacy.members, legacy.tree));
        }
        let members = zip::members(size, &mut read_at)?;
        let mut pickles = members.iter().filter(|m| m.name.split('/').nth(1) == Some("data.pkl"));
        let (Some(data), None) = (pickles.next(), pickles.next()) else {
            return Err("it is a zip without exactly one data.pkl, so not of torch.save".into());
        };
        let root = data.name.split('/').next().unwrap_or_default().to_owned();
        let input = contents(data, pickle::BYTES_MAX, &mut read_at)?;
        let prefix = |part: &str| format!("{root}/{part}");
        if let Some(order) = members.iter().find(|m| m.name == prefix("byteorder"))
            && contents(order, 16, &mut read_at)? != b"little"
        {
            return Err("its numbers are not little-endian".into());
        }
        let tree = pickle::load(&input, globals)?;
        Ok(TorchFile::of(size, root, members, tree))
    }

    fn of(size: u64, root: String, members: Vec<Member>, tree: Tree) -> TorchFile {
        let keys = if root.is_empty() { "data/".to_owned() } else { format!("{root}/data/") };
        let key = |(i, m): (usize, &Member)| Some((m.name.strip_prefix(&keys)?.to_owned(), i));
        let storages = members.iter().enumerate().filter_map(key).collect();
        TorchFile { size, root, storages, tree, members }
    }

    /// What was saved.
    pub(crate) fn value(&self) -> View<'_> {
        self.tree.root()
    }

    /// The tensor that a value is, checked against its storage; `None` when it is no tensor.
    pub(crate) fn tensor(&self, value: View<'_>) -> std::result::Result<Option<TensorView>, String> {
        let Some((function, args, _)) = value.object() else { return Ok(None) };
        let args = args.items();
        let arg = |i: usize| args.and_then(|a| a.get(i));
        match function {
            "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor" => {
                self.rebuilt(args.ok_or_else(unusual)?, None).map(Some)
            }
            "torch._utils._rebuild_tensor_v3" => {
                let dtype = arg(6).and_then(View::global).and_then(named_dtype).ok_or_else(unusual)?;
                self.rebuilt(args.ok_or_else(unusual)?, Some(dtype)).map(Some)
            }
            "torch._utils._rebuild_parameter" => self.tensor(arg(0).ok_or_else(unusual)?),
            "torch._tensor._rebuild_from_type_v2" => match arg(0).and_then(View::global) {
                Some("torch._utils._rebuild_tensor_v2") => {
                    self.rebuilt(arg(2).and_then(View::items).ok_or_else(unusual)?, None).map(Some)
                }
                _ => Err(unusual()),
            },
            _ => Ok(None),
        }
    }

    /// `(storage, offset, size, stride, …)`; an untyped storage is of elements of `dtype`.
    fn rebuilt(&self, args: Items<'_>, dtype: Option<Dtype>) -> std::result::Result<TensorView, String> {
        let counts = |i: usize| {
            let value = args.get(i).ok_or_else(unusual)?;
            let sizes = shape_of(value).ok_or_else(unusual)?;
            (sizes.len() <= RANK_MAX).then_some(sizes).ok_or_else(unusual)
        };
        let storage = args.get(0).and_then(View::persistent).and_then(View::items).ok_or_else(unusual)?;
        let (dtype, member, held) = self.storage(storage, dtype)?;
        let stored = held.end;
        let offset =
            args.get(1).and_then(View::count).and_then(|o| o.checked_add(held.start)).ok_or_else(unusual)?;
        let (shape, strides) = (counts(2)?, counts(3)?);
        let total = elements(&shape).ok_or_else(|| format!("a tensor has the impossible shape {shape:?}"))?;
        if shape.len() != strides.len() {
            return Err(unusual());
        }
        let reach = |last: Option<u64>, (&size, &stride): (&u64, &u64)| {
            last?.checked_add(size.checked_sub(1)?.checked_mul(stride)?)
        };
        let last = shape.iter().zip(&strides).fold(Some(offset), reach);
        if total > 0 && last.is_none_or(|last| last >= stored) {
            return Err(format!(
                "a tensor of shape {shape:?}, strides {strides:?} at {offset} is beyond its storage of {stored} elements"
            ));
        }
        Ok(TensorView { dtype, shape, strides, member, offset })
    }

    /// `('storage', class, key, device, elements[, view])` → dtype, member and which of its elements. A view is
    /// `(key, first element, elements)`.
    fn storage(
        &self,
        id: Items<'_>,
        untyped: Option<Dtype>,
    ) -> std::result::Result<(Dtype, usize, Range<u64>), String> {
        let class = id.get(1).and_then(View::global).ok_or_else(unusual)?;
        let width = storage_dtype(class).ok_or_else(unusual)?;
        let dtype = match (class == UNTYPED, untyped) {
            (true, Some(dtype)) => dtype,
            (false, None) => width,
            _ => return Err(unusual()),
        };
        let key = id.get(2).and_then(View::str).ok_or_else(unusual)?;
        let count = id.get(4).and_then(View::count).ok_or_else(unusual)?;
        let member = *self.storages.get(key).ok_or_else(|| format!("its storage {key} is missing"))?;
        let data = &self.members[member].data;
        if count.checked_mul(width.size()) != Some(data.end - data.start) {
            return Err(format!(
                "its storage {key} should have {count} elements of {dtype}, but has {} bytes",
                data.end - data.start
            ));
        }
        let all = (data.end - data.start) / dtype.size();
        let held = match id.get(5).filter(|v| !v.is_none()) {
            None => 0..all,
            Some(view) => {
                let part = |i: usize| view.items().and_then(|v| v.get(i)).and_then(View::count);
                let (start, count) = part(1).zip(part(2)).ok_or_else(unusual)?;
                let end = start.checked_add(count).filter(|&end| end <= all).ok_or_else(unusual)?;
                start..end
            }
        };
        Ok((dtype, member, held))
    }
}

/// Storages of bytes, whose tensors say the dtype.
const UNTYPED: &str = "torch.storage.UntypedStorage";

fn copy(all: &[u8], at: u64, out: &mut [u8]) -> std::io::Result<()> {
    let start = usize::try_from(at).ok();
    match start.and_then(|s| all.get(s..)?.get(..out.len())) {
        Some(bytes) => {
            out.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The dtype that a global such as `torch.float32` is.
pub(crate) fn named_dtype(global: &str) -> Option<Dtype> {
    use Dtype::*;
    let all = [F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL];
    let name = global.strip_prefix("torch.")?;
    all.into_iter().find(|d| d.torch_name() == name)
}

/// A `torch.Size`, list or tuple of sizes.
pub(crate) fn shape_of(value: View<'_>) -> Option<Vec<u64>> {
    match value.object() {
        Some(("torch.Size", args, _)) => args.items()?.get(0)?.items()?.counts(),
        Some(_) => None,
        None => value.items()?.counts(),
    }
}

fn unusual() -> String {
    "a tensor in it is described in an unknown way".into()
}

fn storage_dtype(class: &str) -> Option<Dtype> {
    Some(match class {
        "torch.BFloat16Storage" => Dtype::BF16,
        "torch.BoolStorage" => Dtype::BOOL,
        "torch.ByteStorage" => Dtype::U8,
        "torch.CharStorage" => Dtype::I8,
        "torch.DoubleStorage" => Dtype::F64,
        "torch.FloatStorage" => Dtype::F32,
        "torch.HalfStorage" => Dtype::F16,
        "torch.IntStorage" => Dtype::I32,
        "torch.LongStorage" => Dtype::I64,
        "torch.ShortStorage" => Dtype::I16,
        UNTYPED => Dtype::U8,
        _ => return None,
    })
}

/// A whole small member, checked against its CRC.
fn contents(
    member: &Member,
    max: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> std::result::Result<Vec<u8>, String> {
    let len = member.data.end - member.data.start;
    if len > max {
        return Err(format!("its zip member {:?} has {len} bytes, more than the {max} allowed", member.name));
    }
    let mut bytes = vec![0u8; len as usize];
    read_at(member.data.start, &mut bytes).map_err(|e| e.to_string())?;
    match member.crc.is_none_or(|crc| crc32fast::hash(&bytes) == crc) {
        true => Ok(bytes),
        false => Err(crc_flaw(&member.name)),
    }
}

/// What is said of a member whose bytes changed.
pub(crate) fn crc_flaw(member: &str) -> String {
    format!("the bytes of its zip member {member} don't fit their CRC-32: they changed after it was written")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `_rebuild_tensor_v2` of a float storage `0` of `stored` elements; sizes below 256.
    fn tensor(stored: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
        let mut p =
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
                .to_vec();
        p.extend(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK");
        p.extend([stored, b't', b'Q', b'K', offset]);
        for list in [shape, strides] {
            p.push(b'(');
            p.extend(list.iter().flat_map(|&n| [b'K', n]));
            p.push(b't');
        }
        p.extend(b"\x89ccollections\nOrderedDict\n)RtR.");
        p
    }

    fn open(pickle: &[u8], data: &[u8]) -> std::result::Result<TorchFile, String> {
        let file = zip::pack(&[("x/data.pkl", pickle), ("x/byteorder", b"little"), ("x/data/0", data)]);
        read(&file)
    }

    fn read(file: &[u8]) -> std::result::Result<TorchFile, String> {
        TorchFile::parse(
            file.len() as u64,
            |at, out| {
                out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
                Ok(())
            },
            &[TENSORS],
        )
    }

    fn view(pickle: &[u8], data: &[u8]) -> std::result::Result<TensorView, String> {
        let file = open(pickle, data)?;
        let view = file.tensor(file.value())?;
        view.ok_or_else(|| "no tensor".into())
    }

    #[test]
    fn views_of_storages_are_found() {
        let v = view(&tensor(10, 2, &[2, 3], &[3, 1]), &[0; 40]).expect("sound");
        assert_eq!((v.offset, v.elements(), v.is_contiguous()), (2, 6, true));
        let v = view(&tensor(10, 0, &[2, 3], &[1, 2]), &[0; 40]).expect("transposed");
        assert!(!v.is_contiguous());
        let v = view(&tensor(10, 9, &[1, 1], &[77, 5]), &[0; 40])
            .expect("strides of single elements don't matter");
        assert!(v.is_contiguous());
        assert_eq!(view(&tensor(0, 0, &[0], &[1]), &[]).expect("empty").elements(), 0);
    }

    #[test]
    fn tensors_beyond_their_storage_are_refused() {
        for (pickle, bytes, reason) in [
            (tensor(10, 5, &[2, 3], &[3, 1]), 40, "beyond its storage"),
            (tensor(10, 0, &[2, 3], &[8, 1]), 40, "beyond its storage"),
            (tensor(10, 0, &[2, 3], &[3, 1]), 39, "has 39 bytes"),
            (tensor(10, 0, &[2, 3], &[1]), 40, "unknown way"),
        ] {
            let why = view(&pickle, &vec![0; bytes]).expect_err(reason);
            assert!(why.contains(reason), "{why}");
        }
    }

    #[test]
    fn files_that_are_not_of_torch_are_named() {
        let flipped = {
            let mut file = zip::pack(&[("x/data.pkl", b"N."), ("x/data/0", b"")]);
            let at = file.windows(2).position(|w| w == b"N.").expect("there");
            file[at] = b')';
            file
        };
        for (file, reason) in [
            (vec![], "no zip directory"),
            (vec![0; 100_000], "no zip directory"),
            (b"\x80\x02\x8a\x0al\xfc\x9c".to_vec(), "no zip directory"),
            (legacy::MAGIC.to_vec(), "cut short"),
            (zip::pack(&[("x/other", b"N.")]), "without exactly one data.pkl"),
            (zip::pack(&[("x/data.pkl", b"N."), ("y/data.pkl", b"N.")]), "without exactly one data.pkl"),
            (zip::pack(&[("x/data.pkl", b"N."), ("x/byteorder", b"big")]), "not little-endian"),
            (zip::pack(&[("x/data.pkl", b"cos\nsystem\n.")]), "names os.system"),
            (flipped, "x/data.pkl don't fit their CRC-32"),
        ] {
            let why = read(&file).err().expect(reason);
            assert!(why.contains(reason), "{why} lacks {reason}");
        }
    }
}
