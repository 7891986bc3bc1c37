//! Reads JSON lines files, in which each line is an object and one field of the object is a text or
//! a chat.
use super::{
    chat_record::{ChatRecord, TOOLS_FIELD},
    error::{DataError, RecordPosition, RecordProblem},
};
use minijinja::Value;
use serde::de::{self, Deserialize, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use std::{
    fmt,
    io::{BufRead, BufReader, Read},
    marker::PhantomData,
    path::Path,
};

/// Longest line of a JSON lines file, in bytes. A longer line is an error.
pub(crate) const MAX_LINE_BYTES: usize = 16 << 20;
/// Largest number of field names that an error message lists.
const MAX_LISTED_FIELDS: usize = 8;
/// The length in bytes at which a field name becomes too long for the lists of field names in error
/// messages.
const MAX_LISTED_NAME_BYTES: usize = 64;

/// A callback that receives each line of a JSON lines file: its number, from 1, and its text.
pub(crate) type LineSink<'a> = dyn FnMut(u64, &str) -> Result<(), DataError> + 'a;

/// Reads a JSON lines file and passes the number and text of each line that is not blank to the
/// callback `sink`. Ends without error after `limit` records or at the end of the file. Skips blank
/// lines. Keeps only one line in memory. `path` is for error messages.
pub(crate) fn read_json_lines(
    input: &mut impl Read,
    path: &Path,
    limit: u64,
    sink: &mut LineSink,
) -> Result<(), DataError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let (mut bytes, mut line, mut offset, mut records) = (Vec::new(), 0u64, 0u64, 0u64);
    while records < limit {
        bytes.clear();
        line += 1;
        let n = (&mut input)
            .take(MAX_LINE_BYTES as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| DataError::unreadable(path, source))?;
        if n == 0 {
            break;
        }
        if n > MAX_LINE_BYTES {
            let problem = RecordProblem::LineTooLong { limit: MAX_LINE_BYTES };
            return Err(DataError::invalid_record(path, RecordPosition::Line(line), problem));
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| DataError::NotUtf8 {
            path: path.to_path_buf(),
            line,
            offset: offset + e.valid_up_to() as u64,
        })?;
        offset += n as u64;
        let text = if line == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        if !text.trim().is_empty() {
            sink(line, text)?;
            records += 1;
        }
    }
    Ok(())
}

/// Parses one line of a JSON lines file as an object, and returns the text in its field `field`.
pub(crate) fn parse_text_record(line: &str, field: &str) -> Result<String, RecordProblem> {
    parse_two_fields::<String>(line, field, None).map(|(text, _)| text)
}

/// Parses one line of a JSON lines file as an object, and returns the chat whose messages are in
/// its field `field`.
pub(crate) fn parse_chat_record(line: &str, field: &str) -> Result<ChatRecord, RecordProblem> {
    let (messages, tools) = parse_two_fields::<Value>(line, field, Some(TOOLS_FIELD))?;
    Ok(ChatRecord { messages, tools: tools.filter(|t| !t.is_none()) })
}

/// Parses one line of a JSON lines file as an object, and returns the values of two of its fields,
/// of which the second may be missing. Skips all other fields.
fn parse_two_fields<'de, T: Deserialize<'de>>(
    line: &'de str,
    required: &str,
    optional: Option<&str>,
) -> Result<(T, Option<T>), RecordProblem> {
    let mut input = serde_json::Deserializer::from_str(line);
    let selector = TwoFieldsVisitor { required, optional, value_type: PhantomData };
    let values = selector.deserialize(&mut input).and_then(|values| input.end().map(|()| values));
    values.map_err(|e| {
        // The parser's position would be "line 1", but the record's line in the file is known.
        let position = format!(" at line {} column {}", e.line(), e.column());
        let message = e.to_string();
        let reason = message.strip_suffix(&position).unwrap_or(&message).to_owned();
        RecordProblem::InvalidJson { category: e.classify(), reason, column: e.column() }
    })?
}

/// A serde visitor that deserializes a required and an optional field of an object, and skips all
/// other fields.
struct TwoFieldsVisitor<'a, T> {
    required: &'a str,
    optional: Option<&'a str>,
    value_type: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for TwoFieldsVisitor<'_, T> {
    type Value = Result<(T, Option<T>), RecordProblem>;
    fn deserialize<D: de::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for TwoFieldsVisitor<'_, T> {
    type Value = Result<(T, Option<T>), RecordProblem>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut value, mut optional, mut present) = (None, None, Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            if key == self.required {
                value = Some(map.next_value::<T>()?);
                continue;
            }
            if Some(key.as_str()) == self.optional {
                optional = Some(map.next_value::<T>()?);
                continue;
            }
            map.next_value::<IgnoredAny>()?;
            if present.len() < MAX_LISTED_FIELDS && key.len() < MAX_LISTED_NAME_BYTES {
                present.push(key);
            }
        }
        let field = || self.required.to_owned();
        Ok(value
            .map(|v| (v, optional))
            .ok_or_else(|| RecordProblem::FieldMissing { field: field(), present }))
    }
}
