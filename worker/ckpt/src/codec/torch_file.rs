//! [`TorchFile`]: reads files that `torch.save` wrote: the pickled values, and where the elements
//! of tensors are stored. Such a file is a zip container with a pickle of the values and one member
//! per storage, or has the legacy format.
//!
//! Tensors become byte ranges of the file. This module does not read the data of tensors.
use super::disk::Directory;
use super::pickle::{self, PickleItems, PickleTree, PickleView, parse_shape};
use super::torch_legacy;
use super::zip::{self, ZipMember};
use crate::error::{CkptError, TorchFileError};
use crate::format_constants::PICKLE_BYTES_MAX;
use crate::tensor::{Dtype, count_elements};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Python classes and functions by which pickles describe tensors. The pickle of every torch file
/// may name them.
pub(crate) const TENSOR_GLOBALS: &[&str] = &[
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
];
/// Names of the torch dtypes to which the pickle of a torch file may refer, such as
/// `torch.float32`.
pub(crate) const DTYPE_GLOBALS: &[&str] = &[
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
/// Python classes and functions that the pickles of HF Trainer, Accelerate, DeepSpeed and similar
/// programs may name, except those of tensors. The reader never calls them.
pub(crate) const PLAIN_GLOBALS: &[&str] = &[
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
/// Size in bytes up to which a torch file is read into memory as a whole.
const SMALL_FILE_BYTES: u64 = 64 << 10;
/// Maximum number of elements of a tensor that has more elements than its storage, because torch
/// repeats the stored elements (`Tensor.expand`). Programs save small buffers in this way, such as
/// an expanded mask.
const EXPANDED_ELEMENTS_MAX: u64 = 1 << 20;

/// The parsed contents of a torch file: the pickled values, and the byte range of each tensor
/// storage in the file.
pub(crate) struct TorchFile {
    /// Size of the file in bytes.
    pub(crate) size: u64,
    /// The directory inside of the zip container, which torch names after the file that it writes.
    /// Empty for the legacy format.
    pub(crate) root: String,
    /// The zip members, or the storages of a legacy file.
    pub(crate) members: Vec<ZipMember>,
    /// Maps the key of each storage to the index, in `members`, of the member that contains the
    /// storage.
    storages: HashMap<String, usize>,
    tree: PickleTree,
}

/// The shape, strides and dtype of a tensor in a torch file, and the position of its elements in a
/// tensor storage of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorView {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Distance of neighbouring elements in each dimension, in elements.
    pub(crate) strides: Vec<u64>,
    /// Index of the member that contains the tensor's storage.
    pub(crate) member: usize,
    /// Index of the tensor's first element in the storage.
    pub(crate) offset: u64,
}

impl TensorView {
    /// Returns the number of elements of the tensor, which is the product of its dimensions.
    pub(crate) fn element_count(&self) -> u64 {
        count_elements(&self.shape).unwrap_or(0)
    }

    /// Returns where the file stores the tensor's elements: the zip member, the offset in it, the
    /// shape and the strides. Tensors of one file with equal locations share their elements.
    pub(crate) fn location(&self) -> (usize, u64, &[u64], &[u64]) {
        (self.member, self.offset, &self.shape, &self.strides)
    }

    /// Returns true if the elements are consecutive in the storage, in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        }) || self.element_count() == 0
    }
}

impl TorchFile {
    /// Opens the torch file `name` in `directory` and parses its pickle, which may name only the
    /// classes and functions in `globals`. Does not read the storages.
    ///
    /// # Errors
    /// Fails if the file is missing or damaged, or if the pickle names another class or function.
    pub(crate) fn open(
        directory: &Directory,
        name: &str,
        globals: &[&[&'static str]],
    ) -> crate::error::Result<TorchFile> {
        let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
        TorchFile::open_range(&file, 0..size, globals)
            .map_err(|why| CkptError::damaged(directory.path(), name, why))
    }

    /// Parses a torch file that is embedded in the file `file` at the byte range `bytes`, such as
    /// in a larger checkpoint file. The byte ranges of the returned members are relative to the
    /// start of `file`. `globals` lists the classes and functions that the pickle may name.
    pub(crate) fn open_range(
        file: &File,
        bytes: Range<u64>,
        globals: &[&[&'static str]],
    ) -> Result<TorchFile> {
        let size = bytes.end.saturating_sub(bytes.start);
        let mut found = if size <= SMALL_FILE_BYTES {
            let mut content = vec![0u8; size as usize];
            file.read_exact_at(&mut content, bytes.start)?;
            TorchFile::parse(size, |at, out| copy_bytes_at(&content, at, out), globals)
        } else {
            TorchFile::parse(size, |at, out| file.read_exact_at(out, bytes.start + at), globals)
        }?;
        for member in &mut found.members {
            member.data = bytes.start + member.data.start..bytes.start + member.data.end;
        }
        Ok(found)
    }

    /// Reads the values of a torch file of `size` bytes. `read_at(offset, buffer)` must fill the
    /// buffer with the bytes at the offset. `globals` lists the classes and functions that the
    /// pickle may name.
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
            let legacy = torch_legacy::parse_legacy_file(size, &mut read_at, globals, width)?;
            return Ok(TorchFile::from_parts(size, String::new(), legacy.members, legacy.tree));
        }
        let members = zip::read_members(size, &mut read_at)?;
        let mut pickles = members.iter().filter(|m| m.name.split('/').nth(1) == Some("data.pkl"));
        let (Some(data), None) = (pickles.next(), pickles.next()) else {
            return Err(TorchFileError::NoDataPickle);
        };
        let root = data.name.split('/').next().unwrap_or_default().to_owned();
        let input = read_member(data, PICKLE_BYTES_MAX, &mut read_at)?;
        let prefix = |part: &str| format!("{root}/{part}");
        if let Some(order) = members.iter().find(|m| m.name == prefix("byteorder"))
            && read_member(order, 16, &mut read_at)? != b"little"
        {
            return Err(TorchFileError::BigEndian);
        }
        let tree = pickle::parse_pickle(&input, globals)?;
        Ok(TorchFile::from_parts(size, root, members, tree))
    }

    /// Creates a [`TorchFile`] from the list of members of a zip container and the parsed pickle in
    /// it, without reading tensor data. The members in the container's directory `data` are the
    /// storages.
    fn from_parts(size: u64, root: String, members: Vec<ZipMember>, tree: PickleTree) -> TorchFile {
        let keys = if root.is_empty() { "data/".to_owned() } else { format!("{root}/data/") };
        let key = |(i, m): (usize, &ZipMember)| Some((m.name.strip_prefix(&keys)?.to_owned(), i));
        let storages = members.iter().enumerate().filter_map(key).collect();
        TorchFile { size, root, storages, tree, members }
    }

    /// Returns the value that was passed to `torch.save`, without the elements of its tensors.
    pub(crate) fn value(&self) -> PickleView<'_> {
        self.tree.root_value()
    }

    /// Returns the tensor that a pickled value describes, or `None` if the value does not describe
    /// a tensor.
    ///
    /// # Errors
    /// Fails if the description is invalid, or the tensor reaches beyond its storage.
    pub(crate) fn parse_tensor(&self, value: PickleView<'_>) -> Result<Option<TensorView>> {
        let Some((function, args, _)) = value.as_object() else { return Ok(None) };
        let args = args.as_items();
        let arg = |i: usize| args.and_then(|a| a.get(i));
        match function {
            "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor" => {
                self.parse_rebuild_arguments(args.ok_or(UNKNOWN_TENSOR_FORM_ERROR)?, None).map(Some)
            }
            "torch._utils._rebuild_tensor_v3" => {
                let dtype = arg(6)
                    .and_then(PickleView::as_global)
                    .and_then(parse_dtype)
                    .ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
                self.parse_rebuild_arguments(args.ok_or(UNKNOWN_TENSOR_FORM_ERROR)?, Some(dtype)).map(Some)
            }
            "torch._utils._rebuild_parameter" => self.parse_tensor(arg(0).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?),
            "torch._tensor._rebuild_from_type_v2" => match arg(0).and_then(PickleView::as_global) {
                Some("torch._utils._rebuild_tensor_v2") => self
                    .parse_rebuild_arguments(
                        arg(2).and_then(PickleView::as_items).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?,
                        None,
                    )
                    .map(Some),
                _ => Err(UNKNOWN_TENSOR_FORM_ERROR),
            },
            _ => Ok(None),
        }
    }

    /// Parses the arguments `(storage, offset, size, stride, …)` of a torch function that rebuilds
    /// a tensor from a pickle. `dtype` is the tensor's dtype if the storage is untyped, and `None`
    /// otherwise.
    fn parse_rebuild_arguments(&self, args: PickleItems<'_>, dtype: Option<Dtype>) -> Result<TensorView> {
        let counts = |i: usize| {
            let value = args.get(i).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
            parse_shape(value).ok_or(UNKNOWN_TENSOR_FORM_ERROR)
        };
        let storage = args
            .get(0)
            .and_then(PickleView::as_persistent_id)
            .and_then(PickleView::as_items)
            .ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
        let (dtype, member, held) = self.resolve_storage(storage, dtype)?;
        let stored = held.end;
        let offset = args
            .get(1)
            .and_then(PickleView::as_count)
            .and_then(|o| o.checked_add(held.start))
            .ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
        let (shape, strides) = (counts(2)?, counts(3)?);
        let total = count_elements(&shape).ok_or_else(|| TorchFileError::ImpossibleShape(shape.clone()))?;
        if shape.len() != strides.len() {
            return Err(UNKNOWN_TENSOR_FORM_ERROR);
        }
        let reach = |last: Option<u64>, (&size, &stride): (&u64, &u64)| {
            last?.checked_add(size.checked_sub(1)?.checked_mul(stride)?)
        };
        let last = shape.iter().zip(&strides).fold(Some(offset), reach);
        if total > 0 && last.is_none_or(|last| last >= stored) {
            return Err(TorchFileError::OutsideStorage { shape, strides, offset, elements: stored });
        }
        // a tensor whose elements share memory could claim any size
        if total > EXPANDED_ELEMENTS_MAX && total > held.end - held.start {
            return Err(TorchFileError::Expanded { shape, strides, elements: stored });
        }
        Ok(TensorView { dtype, shape, strides, member, offset })
    }

    /// Parses a pickled reference to a tensor storage, the tuple `('storage', class, key, device,
    /// elements[, view])` that torch writes. Returns the dtype, the index of the storage's member,
    /// and the range of elements that the tensor may use. `untyped` is the dtype of the tensor if
    /// the storage is untyped, and `None` otherwise.
    fn resolve_storage(
        &self,
        id: PickleItems<'_>,
        untyped: Option<Dtype>,
    ) -> Result<(Dtype, usize, Range<u64>)> {
        let class = id.get(1).and_then(PickleView::as_global).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
        let width = storage_dtype(class).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
        let dtype = match (class == UNTYPED_STORAGE_CLASS, untyped) {
            (true, Some(dtype)) => dtype,
            (false, None) => width,
            _ => return Err(UNKNOWN_TENSOR_FORM_ERROR),
        };
        let key = id.get(2).and_then(PickleView::as_short_str).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
        let count = id.get(4).and_then(PickleView::as_count).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
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
                let part = |i: usize| view.as_items().and_then(|v| v.get(i)).and_then(PickleView::as_count);
                let (start, count) = part(1).zip(part(2)).ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
                let end = start
                    .checked_add(count)
                    .filter(|&end| end <= count_of_dtype)
                    .ok_or(UNKNOWN_TENSOR_FORM_ERROR)?;
                start..end
            }
        };
        Ok((dtype, member, held))
    }
}

/// Name of torch's class for tensor storages whose own pickled description states no dtype. The
/// description of a tensor then states it.
const UNTYPED_STORAGE_CLASS: &str = "torch.storage.UntypedStorage";

/// Copies `out.len()` bytes of `content`, starting at offset `at`, to `out`. Fails if `content` is
/// too short.
pub(crate) fn copy_bytes_at(content: &[u8], at: u64, out: &mut [u8]) -> std::io::Result<()> {
    let start = usize::try_from(at).ok();
    match start.and_then(|s| content.get(s..)?.get(..out.len())) {
        Some(bytes) => {
            out.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Returns the dtype that a pickled name such as `torch.float32` refers to, or `None` for other
/// names.
pub(crate) fn parse_dtype(global: &str) -> Option<Dtype> {
    let name = global.strip_prefix("torch.")?;
    Dtype::ALL.into_iter().find(|d| d.torch_name() == name)
}

/// Result of reading a torch file.
type Result<T> = std::result::Result<T, TorchFileError>;

/// The error for a tensor that the pickle of a torch file describes in an unsupported form.
const UNKNOWN_TENSOR_FORM_ERROR: TorchFileError = TorchFileError::UnknownTensorForm;

/// Returns the dtype of the elements of the storage class `class`: U8 for untyped storages, and
/// `None` for unknown classes.
fn storage_dtype(class: &str) -> Option<Dtype> {
    match class {
        UNTYPED_STORAGE_CLASS => Some(Dtype::U8),
        _ => Dtype::ALL.into_iter().find(|dtype| pickle::torch_storage_class(*dtype) == Some(class)),
    }
}

/// Reads the content of one member of a torch file's zip container. Fails if the member has more
/// than `max` bytes, or does not match its CRC-32.
fn read_member(
    member: &ZipMember,
    max: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> Result<Vec<u8>> {
    let len = member.size();
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
    use crate::error::ZipError;

    /// Returns a pickle of one tensor for tests, which calls `_rebuild_tensor_v2` with the float
    /// storage `0` of `stored` elements.
    fn tensor_pickle(stored: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
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

    /// Creates a torch file from a pickle and the bytes of one storage, and reads it.
    fn open_container(pickle: &[u8], data: &[u8]) -> Result<TorchFile> {
        let file =
            crate::tests::pack_zip(&[("x/data.pkl", pickle), ("x/byteorder", b"little"), ("x/data/0", data)]);
        parse_bytes(&file)
    }

    /// Reads the values of a torch file whose bytes are `file`.
    fn parse_bytes(file: &[u8]) -> Result<TorchFile> {
        TorchFile::parse(
            file.len() as u64,
            |at, out| {
                out.copy_from_slice(&file[at as usize..at as usize + out.len()]);
                Ok(())
            },
            &[TENSOR_GLOBALS],
        )
    }

    /// Returns the tensor that `pickle` describes in a torch file whose only storage has the bytes
    /// `data`.
    fn parse_view(pickle: &[u8], data: &[u8]) -> Result<TensorView> {
        let file = open_container(pickle, data)?;
        let view = file.parse_tensor(file.value())?;
        view.ok_or(UNKNOWN_TENSOR_FORM_ERROR)
    }

    #[test]
    fn contiguous_and_strided_views_are_recognized() {
        let v = parse_view(&tensor_pickle(10, 2, &[2, 3], &[3, 1]), &[0; 40]).expect("sound");
        assert_eq!((v.offset, v.element_count(), v.is_contiguous()), (2, 6, true));
        let v = parse_view(&tensor_pickle(10, 0, &[2, 3], &[1, 2]), &[0; 40]).expect("transposed");
        assert!(!v.is_contiguous());
        let v = parse_view(&tensor_pickle(10, 9, &[1, 1], &[77, 5]), &[0; 40])
            .expect("strides of dimensions of size 1 are ignored");
        assert!(v.is_contiguous());
        assert_eq!(parse_view(&tensor_pickle(0, 0, &[0], &[1]), &[]).expect("empty").element_count(), 0);
    }

    #[test]
    fn a_large_tensor_must_not_have_more_elements_than_its_storage() {
        let v = parse_view(&tensor_pickle(10, 0, &[128, 128, 64], &[0, 0, 0]), &[0; 40]).expect("2^20");
        assert_eq!(v.element_count(), 1 << 20);
        let error = parse_view(&tensor_pickle(10, 0, &[128, 128, 65], &[0, 0, 0]), &[0; 40]);
        let expected =
            TorchFileError::Expanded { shape: vec![128, 128, 65], strides: vec![0; 3], elements: 10 };
        assert_eq!(error, Err(expected));
        let overlapping = parse_view(&tensor_pickle(255, 0, &[128, 128, 65], &[1, 0, 1]), &[0; 1020]);
        assert!(matches!(overlapping, Err(TorchFileError::Expanded { elements: 255, .. })));
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
            (tensor_pickle(10, 5, &[2, 3], &[3, 1]), 40, outside([3, 1], 5)),
            (tensor_pickle(10, 0, &[2, 3], &[8, 1]), 40, outside([8, 1], 0)),
            (tensor_pickle(10, 0, &[2, 3], &[3, 1]), 39, size),
            (tensor_pickle(10, 0, &[2, 3], &[1]), 40, UNKNOWN_TENSOR_FORM_ERROR),
        ] {
            assert_eq!(parse_view(&pickle, &vec![0; bytes]), Err(expected));
        }
    }

    #[test]
    fn files_that_torch_did_not_write_are_rejected() {
        let flipped = {
            let mut file = crate::tests::pack_zip(&[("x/data.pkl", b"N."), ("x/data/0", b"")]);
            let at = file.windows(2).position(|w| w == b"N.").expect("there");
            file[at] = b')';
            file
        };
        let no_directory = || TorchFileError::Zip(ZipError::NoDirectory);
        let forbidden = crate::error::PickleError::ForbiddenGlobal { name: "os.system".into() };
        for (file, expected) in [
            (vec![], no_directory()),
            (vec![0; 100_000], no_directory()),
            (b"\x80\x02\x8a\x0al\xfc\x9c".to_vec(), no_directory()),
            (torch_legacy::MAGIC.to_vec(), TorchFileError::Truncated { part: "a pickle".into() }),
            (crate::tests::pack_zip(&[("x/other", b"N.")]), TorchFileError::NoDataPickle),
            (
                crate::tests::pack_zip(&[("x/data.pkl", b"N."), ("y/data.pkl", b"N.")]),
                TorchFileError::NoDataPickle,
            ),
            (
                crate::tests::pack_zip(&[("x/data.pkl", b"N."), ("x/byteorder", b"big")]),
                TorchFileError::BigEndian,
            ),
            (crate::tests::pack_zip(&[("x/data.pkl", b"cos\nsystem\n.")]), forbidden.into()),
            (flipped, TorchFileError::CrcMismatch { member: "x/data.pkl".into() }),
        ] {
            assert_eq!(parse_bytes(&file).err(), Some(expected));
        }
    }
}
