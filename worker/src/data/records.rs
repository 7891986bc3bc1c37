//! Records of JSON lines files: one object a line, of which one field is the document.
use super::{chat::Chat, documents::Reading, error::DataError};
use minijinja::Value;
use serde::de::{self, Deserialize, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use std::{
    fmt,
    io::{BufRead, BufReader, Read},
    marker::PhantomData,
    path::Path,
};

/// Longest line of a JSON lines file, bytes.
pub(crate) const MAX_LINE: usize = 16 << 20;
/// The field of a chat's record with the tools that the assistant may call.
pub(crate) const TOOLS: &str = "tools";

/// What one record holds.
pub(crate) enum Record {
    Text(String),
    Chat(Chat),
}

/// Takes a record; the inner error is why it can't be used.
pub(crate) type Take<'a> = dyn FnMut(Record) -> Result<Result<(), String>, DataError> + 'a;

/// Reads a JSON lines file, `most` records of it. Memory holds one line.
pub(crate) fn read_json_lines(
    input: &mut impl Read,
    path: &Path,
    reading: Reading,
    most: u64,
    take: &mut Take,
) -> Result<(), DataError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let (mut bytes, mut line, mut offset, mut taken) = (Vec::new(), 0u64, 0u64, 0u64);
    while taken < most {
        bytes.clear();
        line += 1;
        let n = (&mut input)
            .take(MAX_LINE as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| DataError::Read { path: path.to_path_buf(), source })?;
        if n == 0 {
            break;
        }
        let bad = |why: String| DataError::BadLine { path: path.to_path_buf(), line, why };
        if n > MAX_LINE {
            return Err(bad(format!("the line is longer than {} MiB", MAX_LINE >> 20)));
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| DataError::NotUtf8 {
            path: path.to_path_buf(),
            line,
            offset: offset + e.valid_up_to() as u64,
        })?;
        offset += n as u64;
        let text = if line == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        if !text.trim().is_empty() {
            take(record(text, reading).map_err(bad)?)?.map_err(bad)?;
            taken += 1;
        }
    }
    Ok(())
}

fn record(line: &str, reading: Reading) -> Result<Record, String> {
    if reading.chat.is_none() {
        return fields::<String>(line, reading.field, None).map(|(text, _)| Record::Text(text));
    }
    let (messages, tools) = fields::<Value>(line, reading.field, Some(TOOLS))?;
    Ok(Record::Chat(Chat { messages, tools: tools.filter(|t| !t.is_none()) }))
}

/// The value of one field of a JSON object, and of another if it is there; everything else is skipped without being stored.
fn fields<'de, T: Deserialize<'de>>(
    line: &'de str,
    field: &str,
    other: Option<&str>,
) -> Result<(T, Option<T>), String> {
    let mut input = serde_json::Deserializer::from_str(line);
    let fields = Fields { field, other, of: PhantomData };
    let found = fields.deserialize(&mut input).and_then(|found| input.end().map(|()| found));
    // the line is known better than the parser's "line 1"
    found.map_err(|e| {
        let said = e.to_string();
        format!("{} (column {})", said.split(" at line ").next().unwrap_or(&said), e.column())
    })?
}

struct Fields<'a, T> {
    field: &'a str,
    other: Option<&'a str>,
    of: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Fields<'_, T> {
    type Value = Result<(T, Option<T>), String>;
    fn deserialize<D: de::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<'_, T> {
    type Value = Result<(T, Option<T>), String>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut value, mut other, mut names) = (None, None, Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            if key == self.field {
                value = Some(map.next_value::<T>()?);
                continue;
            }
            if Some(key.as_str()) == self.other {
                other = Some(map.next_value::<T>()?);
                continue;
            }
            map.next_value::<IgnoredAny>()?;
            if names.len() < 8 && key.len() < 64 {
                names.push(format!("`{key}`"));
            }
        }
        Ok(value.map(|v| (v, other)).ok_or_else(|| match names.len() {
            0 => format!("the object has no field `{}`", self.field),
            _ => format!("the object has no field `{}`; it has {}", self.field, names.join(", ")),
        }))
    }
}
