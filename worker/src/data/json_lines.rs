//! Reads the records of JSON lines files. Each line is an object, and one field of the object is
//! the document.
use super::{
    chat_template::ChatRecord,
    error::{DataError, RecordPosition, RecordProblem},
    record::{Record, RecordReadOptions, RecordSink, TOOLS_FIELD},
};
use minijinja::Value;
use serde::de::{self, Deserialize, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use std::{
    fmt,
    io::{BufRead, BufReader, Read},
    marker::PhantomData,
    path::Path,
};

/// Longest line of a JSON lines file, bytes. A longer line is an error.
pub(crate) const MAX_LINE_BYTES: usize = 16 << 20;
/// Largest number of fields that an error lists.
const FIELDS_LISTED: usize = 8;
/// An error lists only fields with names shorter than this many bytes.
const LISTED_NAME_BYTES: usize = 64;

/// Reads records of a JSON lines file and passes them to `sink`. Ends without error after `limit`
/// records or at the end of the file. Skips blank lines. Keeps only one line in memory. `path` is
/// for error messages.
pub(crate) fn read_json_lines(
    input: &mut impl Read,
    path: &Path,
    format: RecordReadOptions,
    limit: u64,
    sink: &mut RecordSink,
) -> Result<(), DataError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let (mut bytes, mut line, mut offset, mut records) = (Vec::new(), 0u64, 0u64, 0u64);
    while records < limit {
        bytes.clear();
        line += 1;
        let n = (&mut input)
            .take(MAX_LINE_BYTES as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| DataError::Unreadable { path: path.to_path_buf(), source })?;
        if n == 0 {
            break;
        }
        let invalid = |problem| DataError::InvalidRecord {
            path: path.to_path_buf(),
            position: RecordPosition::Line(line),
            problem,
        };
        if n > MAX_LINE_BYTES {
            return Err(invalid(RecordProblem::LineTooLong { limit: MAX_LINE_BYTES }));
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| DataError::NotUtf8 {
            path: path.to_path_buf(),
            line,
            offset: offset + e.valid_up_to() as u64,
        })?;
        offset += n as u64;
        let text = if line == 1 { text.strip_prefix('\u{feff}').unwrap_or(text) } else { text };
        if !text.trim().is_empty() {
            sink(parse_record(text, format).map_err(invalid)?)?.map_err(invalid)?;
            records += 1;
        }
    }
    Ok(())
}

/// Parses one line as a text record or, if `format` has a template, as a chat record.
fn parse_record(line: &str, format: RecordReadOptions) -> Result<Record, RecordProblem> {
    if format.chat_template.is_none() {
        return parse_two_fields::<String>(line, format.field, None).map(|(text, _)| Record::Text(text));
    }
    let (messages, tools) = parse_two_fields::<Value>(line, format.field, Some(TOOLS_FIELD))?;
    Ok(Record::Chat(ChatRecord { messages, tools: tools.filter(|t| !t.is_none()) }))
}

/// Parses a JSON object and returns the value of a required field and of an optional one. Skips all
/// other fields.
fn parse_two_fields<'de, T: Deserialize<'de>>(
    line: &'de str,
    required: &str,
    optional: Option<&str>,
) -> Result<(T, Option<T>), RecordProblem> {
    let mut input = serde_json::Deserializer::from_str(line);
    let selector = FieldVisitor { required, optional, value_type: PhantomData };
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
struct FieldVisitor<'a, T> {
    required: &'a str,
    optional: Option<&'a str>,
    value_type: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for FieldVisitor<'_, T> {
    type Value = Result<(T, Option<T>), RecordProblem>;
    fn deserialize<D: de::Deserializer<'de>>(self, input: D) -> Result<Self::Value, D::Error> {
        input.deserialize_map(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for FieldVisitor<'_, T> {
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
            if present.len() < FIELDS_LISTED && key.len() < LISTED_NAME_BYTES {
                present.push(key);
            }
        }
        let field = || self.required.to_owned();
        Ok(value
            .map(|v| (v, optional))
            .ok_or_else(|| RecordProblem::FieldMissing { field: field(), present }))
    }
}
