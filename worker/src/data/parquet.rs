//! Records of Parquet files: one row each, of which one column is the document. Memory holds a page of each column that is read.
use super::{
    chat::Chat,
    documents::Reading,
    error::DataError,
    records::{Record, TOOLS, Take},
};
use minijinja::Value;
use parquet::{
    file::{reader::FileReader, serialized_reader::SerializedFileReader},
    record::{Field, Row},
    schema::types::Type,
};
use std::{
    fs::File,
    io::{Read, Seek},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

/// Most columns of a file.
const MAX_COLUMNS: usize = 4096;
/// Deepest nesting of a chat's value.
const MAX_DEPTH: usize = 32;

/// Reads a Parquet file. Its bytes pass through `input` once more at the end, to be hashed.
pub(crate) fn read<R: Read + AsFile>(
    input: &mut R,
    path: &Path,
    reading: Reading,
    take: &mut Take,
) -> Result<(), DataError> {
    let read = |source| DataError::Read { path: path.to_path_buf(), source };
    let file = input.as_file().try_clone().map_err(read)?;
    read_rows(file, path, reading, u64::MAX, take)?;
    input.as_file().rewind().map_err(read)?;
    std::io::copy(input, &mut std::io::sink()).map_err(read)?;
    Ok(())
}

/// Reads `most` rows.
pub(crate) fn read_rows(
    file: File,
    path: &Path,
    reading: Reading,
    most: u64,
    take: &mut Take,
) -> Result<(), DataError> {
    // The library promises errors for damaged files; should it break that promise, the file is still only a bad file.
    let rows = catch_unwind(AssertUnwindSafe(|| rows(file, path, reading, most, take)));
    let why = "it is damaged: its reader gave up".into();
    rows.unwrap_or_else(|_| Err(DataError::BadFile { path: path.to_path_buf(), why }))
}

/// What is read here is a file.
pub(crate) trait AsFile {
    fn as_file(&mut self) -> &mut File;
}

fn rows(file: File, path: &Path, reading: Reading, most: u64, take: &mut Take) -> Result<(), DataError> {
    let bad = |why: String| DataError::BadFile { path: path.to_path_buf(), why };
    let broken = |e: parquet::errors::ParquetError| bad(format!("not a Parquet file that can be read: {e}"));
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let schema = reader.metadata().file_metadata().schema();
    let columns = columns(schema, reading).map_err(bad)?;
    for (row, number) in reader.get_row_iter(Some(columns)).map_err(broken)?.zip(1..=most) {
        let bad = |why: String| DataError::BadLine { path: path.to_path_buf(), line: number, why };
        let row = row.map_err(|e| bad(e.to_string()))?;
        take(record(row, reading).map_err(bad)?)?.map_err(bad)?;
    }
    Ok(())
}

/// The schema of the columns that are needed.
fn columns(schema: &Type, reading: Reading) -> Result<Type, String> {
    let all = schema.get_fields();
    if all.len() > MAX_COLUMNS {
        return Err(format!("it has {} columns, more than {MAX_COLUMNS}", all.len()));
    }
    if !all.iter().any(|c| c.name() == reading.field) {
        let names: Vec<String> = all.iter().take(8).map(|c| format!("`{}`", c.name())).collect();
        return Err(format!("it has no column `{}`; it has {}", reading.field, names.join(", ")));
    }
    let wanted = |c: &&Arc<Type>| c.name() == reading.field || (reading.chat.is_some() && c.name() == TOOLS);
    let fields: Vec<Arc<Type>> = all.iter().filter(wanted).cloned().collect();
    Type::group_type_builder(schema.name()).with_fields(fields).build().map_err(|e| e.to_string())
}

fn record(row: Row, reading: Reading) -> Result<Record, String> {
    let (mut found, mut tools) = (None, None);
    for (name, field) in row.into_columns() {
        match name == reading.field {
            true => found = Some(field),
            false => tools = Some(field),
        }
    }
    match (found, reading.chat) {
        (Some(Field::Str(text)), None) => Ok(Record::Text(text)),
        (Some(Field::Null) | None, _) => Err(format!("the column `{}` has no value", reading.field)),
        (Some(_), None) => Err(format!("the column `{}` is not text", reading.field)),
        (Some(messages), Some(_)) => {
            let tools = tools.map(|t| value(t, 0)).transpose()?.filter(|t| !t.is_none());
            Ok(Record::Chat(Chat { messages: value(messages, 0)?, tools }))
        }
    }
}

/// A nested value as templates see it; absent fields of an object are left out, as they are in JSON lines.
fn value(field: Field, depth: usize) -> Result<Value, String> {
    if depth > MAX_DEPTH {
        return Err(format!("its values are nested deeper than {MAX_DEPTH}"));
    }
    Ok(match field {
        Field::Null => Value::from(()),
        Field::Bool(b) => b.into(),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float(x) => x.into(),
        Field::Double(x) => x.into(),
        Field::Str(s) => s.into(),
        Field::Group(row) => {
            let present = row.into_columns().into_iter().filter(|(_, f)| !matches!(f, Field::Null));
            let values = present.map(|(name, f)| Ok((name, value(f, depth + 1)?)));
            Value::from_pairs(values.collect::<Result<Vec<_>, String>>()?)
        }
        Field::ListInternal(list) => {
            let items = list.elements().iter().map(|f| value(f.clone(), depth + 1));
            items.collect::<Result<Vec<Value>, String>>()?.into()
        }
        other => return Err(format!("a value such as {other} has no place in a chat")),
    })
}
