//! Reads the rows of Parquet files as records. Memory holds one page of each column that is read.
use super::{
    chat_template::ChatRecord,
    error::{DataError, ParquetProblem, RecordPosition, RecordProblem},
    record::{Record, RecordReadOptions, RecordSink, TOOLS_FIELD},
};
use minijinja::Value;
use parquet::{
    errors::ParquetError,
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

/// Largest number of columns of a Parquet file. More columns are an error.
const MAX_COLUMNS: usize = 4096;
/// Deepest nesting of the values of a chat. Deeper nesting is an error.
const MAX_DEPTH: usize = 32;
/// Largest number of columns that an error lists.
const COLUMNS_LISTED: usize = 8;

/// A reader that gives access to its file, because the Parquet library needs random access.
pub(crate) trait AsFile {
    /// Returns the file from which the reader reads.
    fn as_file(&mut self) -> &mut File;
}

/// Reads all rows of a Parquet file and passes them to `sink`. Then reads the whole file again
/// through `input`, which hashes the bytes.
pub(crate) fn read_rows_and_hash_file<R: Read + AsFile>(
    input: &mut R,
    path: &Path,
    format: RecordReadOptions,
    sink: &mut RecordSink,
) -> Result<(), DataError> {
    let unreadable = |source| DataError::Unreadable { path: path.to_path_buf(), source };
    let file = input.as_file().try_clone().map_err(unreadable)?;
    read_rows(file, path, format, u64::MAX, sink)?;
    input.as_file().rewind().map_err(unreadable)?;
    std::io::copy(input, &mut std::io::sink()).map_err(unreadable)?;
    Ok(())
}

/// Reads rows of a Parquet file and passes each row to `sink` as a record. Ends without error after
/// `limit` rows or at the end of the file. Converts panics of the Parquet library to errors. `path`
/// is for error messages.
pub(crate) fn read_rows(
    file: File,
    path: &Path,
    format: RecordReadOptions,
    limit: u64,
    sink: &mut RecordSink,
) -> Result<(), DataError> {
    // The library reports damaged files as errors. A panic also means that the file is invalid.
    let result = catch_unwind(AssertUnwindSafe(|| decode_rows(file, path, format, limit, sink)));
    result.unwrap_or_else(|_| Err(invalid_parquet_error(path, ParquetProblem::DecoderPanicked)))
}

/// Builds the error of a Parquet file that cannot be used as a whole.
fn invalid_parquet_error(path: &Path, problem: ParquetProblem) -> DataError {
    DataError::InvalidParquet { path: path.to_path_buf(), problem }
}

/// Reads rows and passes each row to `sink` as a record. Ends without error after `limit` rows or
/// at the end of the file. Does not catch panics of the Parquet library.
fn decode_rows(
    file: File,
    path: &Path,
    format: RecordReadOptions,
    limit: u64,
    sink: &mut RecordSink,
) -> Result<(), DataError> {
    let undecodable = |e: ParquetError| invalid_parquet_error(path, ParquetProblem::Undecodable(e));
    let reader = SerializedFileReader::new(file).map_err(undecodable)?;
    let schema = reader.metadata().file_metadata().schema();
    let columns =
        select_read_columns(schema, format).map_err(|problem| invalid_parquet_error(path, problem))?;
    for (row, number) in reader.get_row_iter(Some(columns)).map_err(undecodable)?.zip(1..=limit) {
        let invalid = |problem| DataError::InvalidRecord {
            path: path.to_path_buf(),
            position: RecordPosition::Row(number),
            problem,
        };
        let row = row.map_err(|e| invalid(RecordProblem::RowUnreadable(e)))?;
        sink(convert_row_to_record(row, format).map_err(invalid)?)?.map_err(invalid)?;
    }
    Ok(())
}

/// Returns the part of a schema with the columns that are read: the column of the text or chat, and
/// the tools of a chat. Fails if the column is missing or the file has too many columns.
fn select_read_columns(schema: &Type, format: RecordReadOptions) -> Result<Type, ParquetProblem> {
    let columns = schema.get_fields();
    if columns.len() > MAX_COLUMNS {
        return Err(ParquetProblem::TooManyColumns { count: columns.len(), limit: MAX_COLUMNS });
    }
    if !columns.iter().any(|c| c.name() == format.field) {
        let present = columns.iter().take(COLUMNS_LISTED).map(|c| c.name().to_owned()).collect();
        return Err(ParquetProblem::ColumnMissing { column: format.field.to_owned(), present });
    }
    let is_chat = format.chat_template.is_some();
    let is_read = |c: &&Arc<Type>| c.name() == format.field || (is_chat && c.name() == TOOLS_FIELD);
    let fields: Vec<Arc<Type>> = columns.iter().filter(is_read).cloned().collect();
    let group = Type::group_type_builder(schema.name()).with_fields(fields);
    group.build().map_err(ParquetProblem::Undecodable)
}

/// Converts a row to a text record or, if `format` has a template, to a chat record.
fn convert_row_to_record(row: Row, format: RecordReadOptions) -> Result<Record, RecordProblem> {
    let (mut content, mut tools) = (None, None);
    for (name, field) in row.into_columns() {
        match name == format.field {
            true => content = Some(field),
            false => tools = Some(field),
        }
    }
    let column = || format.field.to_owned();
    match (content, format.chat_template) {
        (Some(Field::Str(text)), None) => Ok(Record::Text(text)),
        (Some(Field::Null) | None, _) => Err(RecordProblem::ColumnNull { column: column() }),
        (Some(_), None) => Err(RecordProblem::ColumnNotText { column: column() }),
        (Some(messages), Some(_)) => {
            let tools = tools.map(|t| convert_field_to_value(t, 0)).transpose()?.filter(|t| !t.is_none());
            Ok(Record::Chat(ChatRecord { messages: convert_field_to_value(messages, 0)?, tools }))
        }
    }
}

/// Converts a nested Parquet value to a value for templates. Omits null fields of an object, so
/// that a chat equals one from a JSON lines file. `depth` is the number of enclosing values.
fn convert_field_to_value(field: Field, depth: usize) -> Result<Value, RecordProblem> {
    if depth > MAX_DEPTH {
        return Err(RecordProblem::NestedTooDeep { limit: MAX_DEPTH });
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
            let values = present.map(|(name, f)| Ok((name, convert_field_to_value(f, depth + 1)?)));
            Value::from_pairs(values.collect::<Result<Vec<_>, RecordProblem>>()?)
        }
        Field::ListInternal(list) => {
            let items = list.elements().iter().map(|f| convert_field_to_value(f.clone(), depth + 1));
            items.collect::<Result<Vec<Value>, RecordProblem>>()?.into()
        }
        other => return Err(RecordProblem::ValueUnsupported { value: other.to_string() }),
    })
}
