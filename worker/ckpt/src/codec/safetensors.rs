//! Reads and writes the headers of safetensors files. A file has the header length (8 bytes,
//! little-endian), a JSON header, and the bytes of the tensors without gaps.
use super::disk::Directory;
use super::json::deserialize_map;
use super::placeholder_file;
use crate::error::{CkptError, SafetensorsError, shorten_text};
use crate::format_constants::{SAFETENSORS_HEADER_MAX, TENSORS_MAX};
use crate::tensor::{Dtype, TensorRole, check_tensor_name, count_elements, deserialize_shape};
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Limit on the number of entries of `__metadata__` in the header of a safetensors file.
const METADATA_ENTRIES_MAX: usize = 1 << 16;

/// The description of one tensor in the header of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SafetensorsEntry {
    /// Name of the tensor.
    pub name: String,
    /// Dtype of the elements.
    pub dtype: Dtype,
    /// Size of each dimension.
    pub shape: Vec<u64>,
    /// Byte range in the file. The header stores offsets relative to the end of the header instead.
    pub bytes: Range<u64>,
}

/// The header of a safetensors file. The tensors fill the rest of the file without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SafetensorsHeader {
    /// The tensors, sorted by their byte ranges.
    pub entries: Vec<SafetensorsEntry>,
    /// Maps the keys in `__metadata__` of the file to their text values.
    pub metadata: BTreeMap<String, String>,
}

/// The result of reading or writing the header of a safetensors file.
type Result<T> = std::result::Result<T, SafetensorsError>;

/// Opens the safetensors file `name` in `directory` and reads its header. Returns the header and
/// the size of the file in bytes.
pub(crate) fn open_header(
    directory: &Directory,
    name: &str,
) -> crate::error::Result<(SafetensorsHeader, u64)> {
    let (file, size) = directory.open_file(name, nix::fcntl::OFlag::empty())?;
    let header = read_header(size, |at, out| file.read_exact_at(out, at));
    Ok((header.map_err(|error| CkptError::damaged(directory.path(), name, error))?, size))
}

/// Reads the header of a safetensors file of `size` bytes. `read_at(offset, buffer)` must fill the
/// buffer with the bytes at the offset.
///
/// # Errors
/// Fails if the header is invalid, or does not describe exactly the bytes of the file.
pub(crate) fn read_header(
    size: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> Result<SafetensorsHeader> {
    let mut length = [0u8; 8];
    if size < 8 {
        return Err(SafetensorsError::NoHeader { size });
    }
    read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > SAFETENSORS_HEADER_MAX || length > size - 8 {
        let error = SafetensorsError::HeaderLength { claimed: length, size };
        let placeholder = placeholder_file::detect_placeholder_file(size, &mut read_at);
        return Err(placeholder.map_or(error, SafetensorsError::Placeholder));
    }
    let mut text = vec![0u8; length as usize];
    read_at(8, &mut text)?;
    if text.first() != Some(&b'{') {
        return Err(SafetensorsError::NotAnObject);
    }
    let raw: RawHeader =
        serde_json::from_slice(&text).map_err(|e| SafetensorsError::Json(shorten_text(e.to_string())))?;
    raw.validate(8 + length, size)
}

/// The unchecked header of a safetensors file, in the form in which the file stores it.
struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

/// The unchecked description of a tensor in a safetensors header, in the form in which the file
/// stores it.
#[derive(Deserialize)]
struct RawEntry {
    dtype: RawDtype,
    #[serde(deserialize_with = "deserialize_shape")]
    shape: Vec<u64>,
    /// Offsets of the tensor's first byte and of its end, relative to the end of the header.
    data_offsets: (u64, u64),
}

/// The dtype of a tensor in a safetensors header. Of an unknown dtype, the beginning of its name is
/// kept.
enum RawDtype {
    Known(Dtype),
    Unknown(Box<str>),
}

impl<'de> Deserialize<'de> for RawDtype {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<RawDtype, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = RawDtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a dtype")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<RawDtype, E> {
                let dtype = Dtype::deserialize(de::value::StrDeserializer::<de::value::Error>::new(text));
                Ok(dtype.map_or_else(|_| RawDtype::Unknown(text.chars().take(40).collect()), RawDtype::Known))
            }
        }
        d.deserialize_str(Visitor)
    }
}

impl RawHeader {
    /// Checks that the byte ranges of the tensors in the header fit their shapes and cover the data
    /// of the file, and returns the checked header. `data` is the offset of the first byte after
    /// the header, and `size` the file's size in bytes.
    fn validate(self, data: u64, size: u64) -> Result<SafetensorsHeader> {
        let mut entries = Vec::with_capacity(self.entries.len());
        for (name, raw) in self.entries {
            check_tensor_name(&name)?;
            let dtype = match raw.dtype {
                RawDtype::Known(dtype) => dtype,
                RawDtype::Unknown(text) => {
                    return Err(SafetensorsError::UnknownDtype { tensor: name, dtype: text.into() });
                }
            };
            let (begin, end) = raw.data_offsets;
            let bytes = count_elements(&raw.shape).and_then(|n| n.checked_mul(dtype.size()));
            if begin > end || end > size - data || bytes != Some(end - begin) {
                return Err(SafetensorsError::Extent {
                    tensor: name,
                    begin,
                    end,
                    data: size - data,
                    dtype,
                    shape: raw.shape,
                });
            }
            entries.push(SafetensorsEntry { name, dtype, shape: raw.shape, bytes: data + begin..data + end });
        }
        check_unique_names(&entries)?;
        entries.sort_by_key(|e| (e.bytes.start, e.bytes.end));
        let mut at = data;
        for entry in &entries {
            if entry.bytes.start != at {
                return Err(SafetensorsError::Gap {
                    tensor: entry.name.clone(),
                    found: entry.bytes.start,
                    expected: at,
                });
            }
            at = entry.bytes.end;
        }
        if at != size {
            return Err(SafetensorsError::TrailingData { end: at, size });
        }
        Ok(SafetensorsHeader { entries, metadata: self.metadata })
    }
}

/// Fails if two tensors of the safetensors file have the same name.
fn check_unique_names(entries: &[SafetensorsEntry]) -> Result<()> {
    let mut names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SafetensorsError::DuplicateTensor(pair[0].to_owned())),
        None => Ok(()),
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<RawHeader, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<RawHeader, A::Error> {
                let mut raw = RawHeader { entries: Vec::new(), metadata: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        raw.metadata = map.next_value_seed(MetadataSeed)?;
                        continue;
                    }
                    if raw.entries.len() == TENSORS_MAX {
                        return Err(de::Error::custom(format_args!("more than {TENSORS_MAX} tensors")));
                    }
                    raw.entries.push((name, map.next_value()?));
                }
                Ok(raw)
            }
        }
        d.deserialize_map(Visitor)
    }
}

/// A serde seed that deserializes the entry `__metadata__` of a safetensors header, and accepts at
/// most [`METADATA_ENTRIES_MAX`] entries.
struct MetadataSeed;

impl<'de> de::DeserializeSeed<'de> for MetadataSeed {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Self::Value, D::Error> {
        deserialize_map::<D, String, METADATA_ENTRIES_MAX>(d)
    }
}

/// The name, dtype and shape of a tensor that is to be written to a safetensors file.
pub(crate) struct PlannedTensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [u64],
}

impl PlannedTensor<'_> {
    /// Returns the size of the tensor's elements in bytes. The caller must have checked that the
    /// size does not overflow.
    pub(crate) fn size_in_bytes(&self) -> u64 {
        count_elements(self.shape).unwrap_or(0) * self.dtype.size()
    }
}

/// Encodes the header of a safetensors file that contains the data of `tensors`, one after another.
/// The result is the header length and the JSON header, padded to a multiple of 8 bytes.
///
/// # Errors
/// Fails if the header exceeds [`SAFETENSORS_HEADER_MAX`].
pub(crate) fn encode_header(metadata: &[(&str, String)], tensors: &[PlannedTensor<'_>]) -> Result<Vec<u8>> {
    let json = |s: &str| serde_json::Value::from(s).to_string();
    let mut text = String::from("{\"__metadata__\":{");
    for (i, (key, value)) in metadata.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        text.push_str(&format!("{comma}{}:{}", json(key), json(value)));
    }
    text.push('}');
    let mut at = 0;
    for t in tensors {
        let end = at + t.size_in_bytes();
        text.push_str(&format!(
            ",{}:{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{at},{end}]}}",
            json(&t.name),
            t.dtype,
            t.shape
        ));
        at = end;
    }
    text.push('}');
    while text.len() % 8 != 0 {
        text.push(' ');
    }
    if text.len() as u64 > SAFETENSORS_HEADER_MAX {
        return Err(SafetensorsError::TooManyTensors { tensors: tensors.len() });
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    Ok(bytes)
}

/// Encodes the safetensors header of the checkpoint file that rank `rank` writes in launch's own
/// format. `world` is the number of ranks.
pub(crate) fn encode_shard_header(rank: u32, world: u32, pieces: &[PlannedTensor<'_>]) -> Result<Vec<u8>> {
    let metadata =
        [("format", "launch shard".to_owned()), ("rank", rank.to_string()), ("world", world.to_string())];
    encode_header(&metadata, pieces)
}

/// Formats the name `role/name@start` under which one rank's safetensors file stores consecutive
/// elements of a tensor. `start` is the index of the piece's first element in the tensor.
pub(crate) fn format_piece_key(role: TensorRole, name: &str, start: u64) -> String {
    format!("{role}/{name}@{start}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads the header of a safetensors file whose bytes are `file`.
    fn parse_file(file: &[u8]) -> Result<SafetensorsHeader> {
        read_header(file.len() as u64, |at, out| {
            let at = at as usize;
            out.copy_from_slice(&file[at..at + out.len()]);
            Ok(())
        })
    }

    /// Creates a safetensors file in memory with the header `json` and `data` bytes of tensors.
    fn make_file(json: &str, data: usize) -> Vec<u8> {
        let mut f = (json.len() as u64).to_le_bytes().to_vec();
        f.extend_from_slice(json.as_bytes());
        f.extend(std::iter::repeat_n(7u8, data));
        f
    }

    #[test]
    fn a_written_header_reads_back_equal() {
        let tensors = [
            PlannedTensor { name: "a \"quoted\" näme".into(), dtype: Dtype::F32, shape: &[2, 3] },
            PlannedTensor { name: "empty".into(), dtype: Dtype::BF16, shape: &[0, 5] },
            PlannedTensor { name: "scalar".into(), dtype: Dtype::F16, shape: &[] },
        ];
        let mut bytes = encode_header(&[("format", "pt".into())], &tensors).expect("fits");
        assert_eq!(bytes.len() % 8, 0);
        let data = bytes.len() as u64;
        bytes.extend([0u8; 26]);
        let header = parse_file(&bytes).expect("sound");
        assert_eq!(header.metadata["format"], "pt");
        assert_eq!(header.entries[0].name, "a \"quoted\" näme");
        assert_eq!(header.entries[0].bytes, data..data + 24);
        assert_eq!(header.entries[1].shape, [0, 5]);
        assert_eq!(
            (header.entries[2].dtype, header.entries[2].bytes.clone()),
            (Dtype::F16, data + 24..data + 26)
        );
    }

    #[test]
    fn a_terabyte_header_is_rejected_without_reading_it() {
        let mut f = make_file("{}", 100);
        f[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
        let size = f.len() as u64;
        let error = parse_file(&f).expect_err("rejected");
        assert_eq!(error, SafetensorsError::HeaderLength { claimed: 1 << 40, size });
        // the limit also applies to a file that is as large as its header claims
        let error = read_header(2 << 40, |at, out| {
            assert!(at == 0 && out.len() < 64, "only the first bytes are read");
            out[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
            Ok(())
        });
        let expected = SafetensorsError::HeaderLength { claimed: 1 << 40, size: 2 << 40 };
        assert_eq!(error.expect_err("rejected"), expected);
    }

    #[test]
    fn malformed_headers_are_rejected_with_the_reason() {
        let t = |shape: &str, offsets: &str| {
            format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
        };
        /// A function that checks the error with which a malformed file is rejected.
        type Check = fn(&SafetensorsError) -> bool;
        let extent: Check = |e| matches!(e, SafetensorsError::Extent { .. });
        let json: Check = |e| matches!(e, SafetensorsError::Json(_));
        let gap: Check = |e| matches!(e, SafetensorsError::Gap { .. });
        let not_an_object: Check = |e| *e == SafetensorsError::NotAnObject;
        let cases = [
            (
                make_file(&t("[2]", "[0,8]"), 9),
                (|e| matches!(e, SafetensorsError::TrailingData { .. })) as Check,
            ),
            (make_file(&t("[2]", "[0,8]"), 7), extent),
            (make_file(&t("[2]", "[4,12]"), 12), gap),
            (make_file(&t("[3]", "[0,8]"), 8), extent),
            (make_file(&t("[2]", "[8,0]"), 8), extent),
            (make_file(&t("[4611686018427387904,4]", "[0,8]"), 8), extent),
            (make_file(&t("[0,18446744073709551615,18446744073709551615]", "[0,0]"), 0), extent),
            (make_file(&t("[-1]", "[0,8]"), 8), json),
            (make_file(&t("[2]", "[0,18446744073709551615]"), 8), extent),
            (
                make_file(&t("[2]", "[0,8]").replace("F32", "F31"), 8),
                |e| matches!(e, SafetensorsError::UnknownDtype { dtype, .. } if dtype == "F31"),
            ),
            (make_file(&t("[2]", "[0,8]").replace("\"a\"", "\"a\\u0000\""), 8), |e| {
                matches!(e, SafetensorsError::Name(_))
            }),
            (make_file("[]", 0), not_an_object),
            (make_file("", 0), not_an_object),
            (make_file("{\"a\":1}", 0), json),
            (vec![1, 2, 3], |e| *e == SafetensorsError::NoHeader { size: 3 }),
        ];
        for (bytes, check) in cases {
            let error = parse_file(&bytes).expect_err("rejected");
            assert!(check(&error), "{error:?}");
        }
        let entry = "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
        let twice =
            parse_file(&make_file(&format!("{{\"a\":{entry},\"a\":{entry}}}"), 1)).expect_err("twice");
        assert_eq!(twice, SafetensorsError::DuplicateTensor("a".into()));
        let overlap =
            parse_file(&make_file(&format!("{{\"a\":{entry},\"b\":{entry}}}"), 1)).expect_err("overlap");
        assert!(gap(&overlap), "{overlap:?}");
        let deep = "[".repeat(100_000);
        assert!(parse_file(&make_file(&format!("{{\"a\":{deep}"), 0)).is_err());
        let dimensions = vec!["1"; 17].join(",");
        let error = parse_file(&make_file(&t(&format!("[{dimensions}]"), "[0,4]"), 4)).expect_err("17");
        assert!(json(&error) && error.to_string().contains("at most 16 dimensions"), "{error}");
        let keys: Vec<String> = (0..=METADATA_ENTRIES_MAX).map(|i| format!("\"{i}\":\"\"")).collect();
        let metadata = format!("{{\"__metadata__\":{{{}}}}}", keys.join(","));
        let error = parse_file(&make_file(&metadata, 0)).expect_err("too many entries");
        assert!(json(&error) && error.to_string().contains("more than 65536 entries"), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), n in 0u64..200) {
            let mut f = n.to_le_bytes().to_vec();
            f.extend(bytes);
            let _ = parse_file(&f);
        }
    }
}
