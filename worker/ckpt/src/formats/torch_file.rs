//! Reads files of `torch.save`: a zip container with a pickle of the values and one member per
//! storage, or the legacy format. Tensors are byte ranges of the file; their data are not read
//! here.
use super::torch_error::TorchFileError;
use super::torch_legacy;
use super::zip::{self, Member};
use crate::catalog::elements;
use crate::disk::Directory;
use crate::dtype::Dtype;
use crate::error::CkptError;
use crate::pickle::{self, Items, Tree, View};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Globals that describe tensors. Every file may name them.
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
/// Globals of plain values that programs save in addition to tensors. They are never called.
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
/// Files up to this size are read into memory at once, bytes.
const SMALL: u64 = 64 << 10;
/// Limit on the dimensions of a tensor.
const RANK_MAX: usize = 16;

/// A file: its values, and the byte ranges of its storages.
pub(crate) struct TorchFile {
    /// Size of the file, bytes.
    pub(crate) size: u64,
    /// The directory inside of the container: the stem of the name under which the file was
    /// written.
    pub(crate) root: String,
    pub(crate) members: Vec<Member>,
    /// Index of the member of each storage, by key.
    storages: HashMap<String, usize>,
    tree: Tree,
}

/// A tensor in a file: a strided view of one storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorView {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Elements between neighbours, per dimension.
    pub(crate) strides: Vec<u64>,
    /// Index of the member.
    pub(crate) member: usize,
    /// First element in the storage.
    pub(crate) offset: u64,
}

impl TensorView {
    /// A scalar at the start of the first member; a placeholder.
    pub(crate) fn scalar() -> TensorView {
        TensorView { dtype: Dtype::F32, shape: Vec::new(), strides: Vec::new(), member: 0, offset: 0 }
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(0)
    }

    /// The location of the elements in the file. Tensors with equal locations are the same tensor.
    pub(crate) fn location(&self) -> (usize, u64, &[u64], &[u64]) {
        (self.member, self.offset, &self.shape, &self.strides)
    }

    /// True when the elements are consecutive in the storage.
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
    /// Reads the values of a file that may name `globals`. Storages are not read.
    pub(crate) fn open(
        directory: &Directory,
        name: &str,
        globals: &[&[&'static str]],
    ) -> crate::error::Result<TorchFile> {
        let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
        TorchFile::within(&file, 0..size, globals)
            .map_err(|why| CkptError::damaged(directory.path(), name, why))
    }

    /// Reads the values of a torch file that is a byte range of another file.
    pub(crate) fn within(file: &File, bytes: Range<u64>, globals: &[&[&'static str]]) -> Result<TorchFile> {
        let size = bytes.end.saturating_sub(bytes.start);
        let mut found = if size <= SMALL {
            let mut content = vec![0u8; size as usize];
            file.read_exact_at(&mut content, bytes.start)?;
            TorchFile::parse(size, |at, out| copy_content(&content, at, out), globals)
        } else {
            TorchFile::parse(size, |at, out| file.read_exact_at(out, bytes.start + at), globals)
        }?;
        for member in &mut found.members {
            member.data = bytes.start + member.data.start..bytes.start + member.data.end;
        }
        Ok(found)
    }

    /// Reads the values of a file of `size` bytes; `read_at(offset, buffer)` fills the buffer.
    pub(crate) fn parse(
        size: u64,
        mut read_at: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
        globals: &[&[&'static str]],
    ) -> Result<TorchFile> {
        let mut magic = [0u8; torch_legacy::MAGIC.len()];
        if size >= magic.len() as u64 {
            read_at(0, &mut magic)?;
        }
        if magic == torch_legacy::MAGIC {
            let width = |class: &str| storage_dtype(class).map(Dtype::size);
            let legacy = torch_legacy::parse(size, &mut read_at, globals, width)?;
            return Ok(TorchFile::from_parts(size, String::new(), legacy.members, legacy.tree));
        }
        let members = zip::members(size, &mut read_at)?;
        let mut pickles = members.iter().filter(|m| m.name.split('/').nth(1) == Some("data.pkl"));
        let (Some(data), None) = (pickles.next(), pickles.next()) else {
            return Err(TorchFileError::NoDataPickle);
        };
        let root = data.name.split('/').next().unwrap_or_default().to_owned();
        let input = contents(data, pickle::BYTES_MAX, &mut read_at)?;
        let prefix = |part: &str| format!("{root}/{part}");
        if let Some(order) = members.iter().find(|m| m.name == prefix("byteorder"))
            && contents(order, 16, &mut read_at)? != b"little"
        {
            return Err(TorchFileError::BigEndian);
        }
        let tree = pickle::load(&input, globals)?;
        Ok(TorchFile::from_parts(size, root, members, tree))
    }

    fn from_parts(size: u64, root: String, members: Vec<Member>, tree: Tree) -> TorchFile {
        let keys = if root.is_empty() { "data/".to_owned() } else { format!("{root}/data/") };
        let key = |(i, m): (usize, &Member)| Some((m.name.strip_prefix(&keys)?.to_owned(), i));
        let storages = members.iter().enumerate().filter_map(key).collect();
        TorchFile { size, root, storages, tree, members }
    }

    /// The saved value.
    pub(crate) fn value(&self) -> View<'_> {
        self.tree.root()
    }

    /// The tensor that a value describes, checked against its storage; `None` when it is not a
    /// tensor.
    pub(crate) fn tensor(&self, value: View<'_>) -> Result<Option<TensorView>> {
        let Some((function, args, _)) = value.object() else { return Ok(None) };
        let args = args.items();
        let arg = |i: usize| args.and_then(|a| a.get(i));
        match function {
            "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor" => {
                self.rebuilt(args.ok_or(UNKNOWN)?, None).map(Some)
            }
            "torch._utils._rebuild_tensor_v3" => {
                let dtype = arg(6).and_then(View::global).and_then(named_dtype).ok_or(UNKNOWN)?;
                self.rebuilt(args.ok_or(UNKNOWN)?, Some(dtype)).map(Some)
            }
            "torch._utils._rebuild_parameter" => self.tensor(arg(0).ok_or(UNKNOWN)?),
            "torch._tensor._rebuild_from_type_v2" => match arg(0).and_then(View::global) {
                Some("torch._utils._rebuild_tensor_v2") => {
                    self.rebuilt(arg(2).and_then(View::items).ok_or(UNKNOWN)?, None).map(Some)
                }
                _ => Err(UNKNOWN),
            },
            _ => Ok(None),
        }
    }

    /// Interprets `(storage, offset, size, stride, …)`. `dtype` is that of an untyped storage.
    fn rebuilt(&self, args: Items<'_>, dtype: Option<Dtype>) -> Result<TensorView> {
        let counts = |i: usize| {
            let value = args.get(i).ok_or(UNKNOWN)?;
            let sizes = shape_of(value).ok_or(UNKNOWN)?;
            (sizes.len() <= RANK_MAX).then_some(sizes).ok_or(UNKNOWN)
        };
        let storage = args.get(0).and_then(View::persistent).and_then(View::items).ok_or(UNKNOWN)?;
        let (dtype, member, held) = self.storage(storage, dtype)?;
        let stored = held.end;
        let offset =
            args.get(1).and_then(View::count).and_then(|o| o.checked_add(held.start)).ok_or(UNKNOWN)?;
        let (shape, strides) = (counts(2)?, counts(3)?);
        let total = elements(&shape).ok_or_else(|| TorchFileError::ImpossibleShape(shape.clone()))?;
        if shape.len() != strides.len() {
            return Err(UNKNOWN);
        }
        let reach = |last: Option<u64>, (&size, &stride): (&u64, &u64)| {
            last?.checked_add(size.checked_sub(1)?.checked_mul(stride)?)
        };
        let last = shape.iter().zip(&strides).fold(Some(offset), reach);
        if total > 0 && last.is_none_or(|last| last >= stored) {
            return Err(TorchFileError::OutsideStorage { shape, strides, offset, elements: stored });
        }
        Ok(TensorView { dtype, shape, strides, member, offset })
    }

    /// Interprets `('storage', class, key, device, elements[, view])`, where a view is `(key, first
    /// element, elements)`. Returns the dtype, the index of the member and the range of its
    /// elements.
    fn storage(&self, id: Items<'_>, untyped: Option<Dtype>) -> Result<(Dtype, usize, Range<u64>)> {
        let class = id.get(1).and_then(View::global).ok_or(UNKNOWN)?;
        let width = storage_dtype(class).ok_or(UNKNOWN)?;
        let dtype = match (class == UNTYPED, untyped) {
            (true, Some(dtype)) => dtype,
            (false, None) => width,
            _ => return Err(UNKNOWN),
        };
        let key = id.get(2).and_then(View::str).ok_or(UNKNOWN)?;
        let count = id.get(4).and_then(View::count).ok_or(UNKNOWN)?;
        let member = *self.storages.get(key).ok_or_else(|| TorchFileError::StorageMissing(key.into()))?;
        let data = &self.members[member].data;
        if count.checked_mul(width.size()) != Some(data.end - data.start) {
            return Err(TorchFileError::StorageSize {
                key: key.to_owned(),
                elements: count,
                dtype,
                bytes: data.end - data.start,
            });
        }
        let count_of_dtype = (data.end - data.start) / dtype.size();
        let held = match id.get(5).filter(|v| !v.is_none()) {
            None => 0..count_of_dtype,
            Some(view) => {
                let part = |i: usize| view.items().and_then(|v| v.get(i)).and_then(View::count);
                let (start, count) = part(1).zip(part(2)).ok_or(UNKNOWN)?;
                let end = start.checked_add(count).filter(|&end| end <= count_of_dtype).ok_or(UNKNOWN)?;
                start..end
            }
        };
        Ok((dtype, member, held))
    }
}

/// The class of storages without a dtype; the dtype is that of the tensor.
const UNTYPED: &str = "torch.storage.UntypedStorage";

fn copy_content(content: &[u8], at: u64, out: &mut [u8]) -> std::io::Result<()> {
    let start = usize::try_from(at).ok();
    match start.and_then(|s| content.get(s..)?.get(..out.len())) {
        Some(bytes) => {
            out.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The dtype that a global such as `torch.float32` names.
pub(crate) fn named_dtype(global: &str) -> Option<Dtype> {
    use Dtype::*;
    let dtypes = [F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL];
    let name = global.strip_prefix("torch.")?;
    dtypes.into_iter().find(|d| d.torch_name() == name)
}

/// The sizes in a `torch.Size`, list or tuple.
pub(crate) fn shape_of(value: View<'_>) -> Option<Vec<u64>> {
    match value.object() {
        Some(("torch.Size", args, _)) => args.items()?.get(0)?.items()?.counts(),
        Some(_) => None,
        None => value.items()?.counts(),
    }
}

type Result<T> = std::result::Result<T, TorchFileError>;

const UNKNOWN: TorchFileError = TorchFileError::UnknownTensorForm;

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

/// Reads a small member and checks its CRC-32.
fn contents(
    member: &Member,
    max: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> Result<Vec<u8>> {
    let len = member.data.end - member.data.start;
    if len > max {
        return Err(TorchFileError::MemberTooLarge { member: member.name.clone(), bytes: len, limit: max });
    }
    let mut bytes = vec![0u8; len as usize];
    read_at(member.data.start, &mut bytes)?;
    match member.crc.is_none_or(|crc| crc32fast::hash(&bytes) == crc) {
        true => Ok(bytes),
        false => Err(TorchFileError::CrcMismatch { member: member.name.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pickle of `_rebuild_tensor_v2` on float storage `0` of `stored` elements; all numbers
    /// below 256.
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

    fn open(pickle: &[u8], data: &[u8]) -> Result<TorchFile> {
        let file = zip::pack(&[("x/data.pkl", pickle), ("x/byteorder", b"little"), ("x/data/0", data)]);
        read(&file)
    }

    fn read(file: &[u8]) -> Result<TorchFile> {
        TorchFile::parse(
            file.len() as u64,
            |at, out| {
                out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
                Ok(())
            },
            &[TENSORS],
        )
    }

    fn view(pickle: &[u8], data: &[u8]) -> Result<TensorView> {
        let file = open(pickle, data)?;
        let view = file.tensor(file.value())?;
        view.ok_or(UNKNOWN)
    }

    #[test]
    fn contiguous_and_strided_views_are_recognized() {
        let v = view(&tensor(10, 2, &[2, 3], &[3, 1]), &[0; 40]).expect("sound");
        assert_eq!((v.offset, v.elements(), v.is_contiguous()), (2, 6, true));
        let v = view(&tensor(10, 0, &[2, 3], &[1, 2]), &[0; 40]).expect("transposed");
        assert!(!v.is_contiguous());
        let v = view(&tensor(10, 9, &[1, 1], &[77, 5]), &[0; 40])
            .expect("strides of dimensions of size 1 are ignored");
        assert!(v.is_contiguous());
        assert_eq!(view(&tensor(0, 0, &[0], &[1]), &[]).expect("empty").elements(), 0);
    }

    #[test]
    fn tensors_outside_of_their_storage_are_rejected() {
        let outside = |strides: [u64; 2], offset| TorchFileError::OutsideStorage {
            shape: vec![2, 3],
            strides: strides.to_vec(),
            offset,
            elements: 10,
        };
        let size =
            TorchFileError::StorageSize { key: "0".into(), elements: 10, dtype: Dtype::F32, bytes: 39 };
        for (pickle, bytes, expected) in [
            (tensor(10, 5, &[2, 3], &[3, 1]), 40, outside([3, 1], 5)),
            (tensor(10, 0, &[2, 3], &[8, 1]), 40, outside([8, 1], 0)),
            (tensor(10, 0, &[2, 3], &[3, 1]), 39, size),
            (tensor(10, 0, &[2, 3], &[1]), 40, UNKNOWN),
        ] {
            assert_eq!(view(&pickle, &vec![0; bytes]), Err(expected));
        }
    }

    #[test]
    fn files_that_torch_did_not_write_are_rejected() {
        let flipped = {
            let mut file = zip::pack(&[("x/data.pkl", b"N."), ("x/data/0", b"")]);
            let at = file.windows(2).position(|w| w == b"N.").expect("there");
            file[at] = b')';
            file
        };
        let no_directory = || TorchFileError::Zip(zip::ZipError::NoDirectory);
        let forbidden = crate::pickle::PickleError::ForbiddenGlobal { name: "os.system".into() };
        for (file, expected) in [
            (vec![], no_directory()),
            (vec![0; 100_000], no_directory()),
            (b"\x80\x02\x8a\x0al\xfc\x9c".to_vec(), no_directory()),
            (torch_legacy::MAGIC.to_vec(), TorchFileError::Truncated { part: "a pickle".into() }),
            (zip::pack(&[("x/other", b"N.")]), TorchFileError::NoDataPickle),
            (zip::pack(&[("x/data.pkl", b"N."), ("y/data.pkl", b"N.")]), TorchFileError::NoDataPickle),
            (zip::pack(&[("x/data.pkl", b"N."), ("x/byteorder", b"big")]), TorchFileError::BigEndian),
            (zip::pack(&[("x/data.pkl", b"cos\nsystem\n.")]), forbidden.into()),
            (flipped, TorchFileError::CrcMismatch { member: "x/data.pkl".into() }),
        ] {
            assert_eq!(read(&file).err(), Some(expected));
        }
    }
}
