//! safetensors: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes without holes.
use crate::catalog::{Role, check_name, elements};
use crate::dtype::Dtype;
use crate::formats::or_stand_in;
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// Longest header that is read or written, bytes (the same as everywhere else).
pub const HEADER_MAX: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Bytes in the file (not relative to the data, as the header has them).
    pub bytes: Range<u64>,
}

/// What a file says about itself, checked: the entries are sorted by offset and fill the file without holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub entries: Vec<Entry>,
    pub metadata: BTreeMap<String, String>,
}

/// Reads the header of a file of `size` bytes; `read_at(offset, buffer)` fills the buffer. `Err` is one line that says
/// what is wrong with the file.
pub fn read_header(
    size: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
) -> Result<Header, String> {
    let mut length = [0u8; 8];
    if size < 8 {
        return Err(format!("a safetensors file of {size} bytes has no header"));
    }
    read_at(0, &mut length).map_err(|e| e.to_string())?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_MAX || length > size - 8 {
        let why = format!(
            "its safetensors header claims {length} bytes, but the file has {size} and {HEADER_MAX} are allowed"
        );
        return Err(or_stand_in(size, &mut read_at, why));
    }
    let mut text = vec![0u8; length as usize];
    read_at(8, &mut text).map_err(|e| e.to_string())?;
    if text.first() != Some(&b'{') {
        return Err("its safetensors header is no JSON object".into());
    }
    let raw: RawHeader = serde_json::from_slice(&text).map_err(|e| format!("its safetensors header: {e}"))?;
    raw.check(8 + length, size)
}

/// As it stands in the file.
struct RawHeader {
    entries: Vec<(String, RawEntry)>,
    metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawHeader {
    fn check(self, data: u64, size: u64) -> Result<Header, String> {
        let mut entries = Vec::with_capacity(self.entries.len());
        for (name, raw) in self.entries {
            check_name(&name)?;
            let dtype = Dtype::deserialize(de::value::StrDeserializer::<de::value::Error>::new(&raw.dtype))
                .map_err(|_| format!("{name} has the unknown dtype {:?}", raw.dtype))?;
            let (begin, end) = raw.data_offsets;
            let bytes = elements(&raw.shape).and_then(|n| n.checked_mul(dtype.size()));
            if begin > end || end > size - data || bytes != Some(end - begin) {
                return Err(format!(
                    "{name}: bytes {begin}..{end} of {} do not fit {dtype} {:?}",
                    size - data,
                    raw.shape
                ));
            }
            entries.push(Entry { name, dtype, shape: raw.shape, bytes: data + begin..data + end });
        }
        entries.sort_by_key(|e| (e.bytes.start, e.bytes.end));
        let mut at = data;
        for entry in &entries {
            if entry.bytes.start != at {
                return Err(format!(
                    "{} begins at byte {}, not at {at}: a hole or an overlap",
                    entry.name, entry.bytes.start
                ));
            }
            at = entry.bytes.end;
        }
        if at != size {
            return Err(format!("its tensors end at byte {at}, the file at {size}"));
        }
        Ok(Header { entries, metadata: self.metadata })
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<RawHeader, D::Error> {
        struct Visitor;
        impl<'de> de::Visitor<'de> for Visitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut raw = RawHeader { entries: Vec::new(), metadata: BTreeMap::new() };
                let mut seen = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("{name:?} is there twice")));
                    }
                    match name.as_str() {
                        "__metadata__" => raw.metadata = map.next_value()?,
                        _ => raw.entries.push((name, map.next_value()?)),
                    }
                }
                Ok(raw)
            }
        }
        d.deserialize_map(Visitor)
    }
}

/// A tensor that is going to be written.
pub(crate) struct Planned<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [u64],
}

impl Planned<'_> {
    /// Its bytes; the shape has been checked.
    pub(crate) fn bytes(&self) -> u64 {
        elements(self.shape).unwrap_or(0) * self.dtype.size()
    }
}

/// The first bytes of a file whose data are these tensors one after the other: length, JSON, padding to 8 bytes.
pub(crate) fn header(metadata: &[(&str, String)], tensors: &[Planned<'_>]) -> Result<Vec<u8>, String> {
    let json = |s: &str| serde_json::Value::from(s).to_string();
    let mut text = String::from("{\"__metadata__\":{");
    for (i, (key, value)) in metadata.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        text.push_str(&format!("{comma}{}:{}", json(key), json(value)));
    }
    text.push('}');
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes();
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
    if text.len() as u64 > HEADER_MAX {
        return Err(format!("{} tensors need a header of more than {HEADER_MAX} bytes", tensors.len()));
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    Ok(bytes)
}

/// The first bytes of a rank's shard of a checkpoint of ours.
pub(crate) fn shard_header(rank: u32, world: u32, pieces: &[Planned<'_>]) -> Result<Vec<u8>, String> {
    let metadata =
        [("format", "launch shard".to_owned()), ("rank", rank.to_string()), ("world", world.to_string())];
    header(&metadata, pieces)
}

/// Name of a piece of a logical tensor in a shard.
pub(crate) fn piece_key(role: Role, name: &str, start: u64) -> String {
    format!("{role}/{name}@{start}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(file: &[u8]) -> Result<Header, String> {
        read_header(file.len() as u64, |at, out| {
            let at = at as usize;
            out.copy_from_slice(&file[at..at + out.len()]);
            Ok(())
        })
    }

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut f = (json.len() as u64).to_le_bytes().to_vec();
        f.extend_from_slice(json.as_bytes());
        f.extend(std::iter::repeat_n(7u8, data));
        f
    }

    #[test]
    fn what_is_written_is_read() {
        let tensors = [
            Planned { name: "a \"quoted\" näme".into(), dtype: Dtype::F32, shape: &[2, 3] },
            Planned { name: "empty".into(), dtype: Dtype::BF16, shape: &[0, 5] },
            Planned { name: "scalar".into(), dtype: Dtype::F16, shape: &[] },
        ];
        let mut bytes = header(&[("format", "pt".into())], &tensors).expect("fits");
        assert_eq!(bytes.len() % 8, 0);
        let data = bytes.len() as u64;
        bytes.extend([0u8; 26]);
        let header = parse(&bytes).expect("sound");
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
    fn a_terabyte_header_is_refused_without_reading_it() {
        let mut f = file("{}", 100);
        f[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
        let why = parse(&f).expect_err("refused");
        assert!(why.contains("claims 1099511627776 bytes"), "{why}");
        // and when the file is as large as it says: the cap
        let why = read_header(2 << 40, |at, out| {
            assert_eq!((at, out.len()), (0, 8), "only the length is read");
            out.copy_from_slice(&(1u64 << 40).to_le_bytes());
            Ok(())
        });
        assert!(why.expect_err("refused").contains("100000000 are allowed"));
    }

    #[test]
    fn hostile_headers_are_refused_with_the_reason() {
        let t = |shape: &str, offsets: &str| {
            format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}")
        };
        let cases = [
            (file(&t("[2]", "[0,8]"), 9), "the file at"),
            (file(&t("[2]", "[0,8]"), 7), "do not fit"),
            (file(&t("[2]", "[4,12]"), 12), "a hole"),
            (file(&t("[3]", "[0,8]"), 8), "do not fit"),
            (file(&t("[2]", "[8,0]"), 8), "do not fit"),
            (file(&t("[4611686018427387904,4]", "[0,8]"), 8), "do not fit"),
            (file(&t("[0,18446744073709551615,18446744073709551615]", "[0,0]"), 0), "do not fit"),
            (file(&t("[-1]", "[0,8]"), 8), "header"),
            (file(&t("[2]", "[0,18446744073709551615]"), 8), "do not fit"),
            (file(&t("[2]", "[0,8]").replace("F32", "F31"), 8), "unknown dtype \"F31\""),
            (file(&t("[2]", "[0,8]").replace("\"a\"", "\"a\\u0000\""), 8), "no name"),
            (file("[]", 0), "no JSON object"),
            (file("", 0), "no JSON object"),
            (file("{\"a\":1}", 0), "header"),
            (vec![1, 2, 3], "no header"),
        ];
        for (bytes, reason) in cases {
            let why = parse(&bytes).expect_err(reason);
            assert!(why.contains(reason), "{why} lacks {reason}");
        }
        let entry = "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}";
        let twice = parse(&file(&format!("{{\"a\":{entry},\"a\":{entry}}}"), 1)).expect_err("twice");
        assert!(twice.contains("twice"), "{twice}");
        let overlap = parse(&file(&format!("{{\"a\":{entry},\"b\":{entry}}}"), 1)).expect_err("overlap");
        assert!(overlap.contains("overlap"), "{overlap}");
        let deep = "[".repeat(100_000);
        assert!(parse(&file(&format!("{{\"a\":{deep}"), 0)).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), n in 0u64..200) {
            let mut f = n.to_le_bytes().to_vec();
            f.extend(bytes);
            let _ = parse(&f);
        }
    }
}
