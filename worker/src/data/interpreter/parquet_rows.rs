//! [`ParquetRows`]: reads the rows of a Parquet file as texts or chats. Memory holds one page of
//! each column that is read.
use crate::data::{
    chat_record::{ChatRecord, TOOLS_FIELD},
    error::{ParquetProblem, RecordProblem},
    json_lines::MAX_LINE_BYTES,
};
use minijinja::Value;
use parquet::{
    errors::ParquetError,
    file::{reader::FileReader, serialized_reader::SerializedFileReader},
    record::{Field, Row, reader::RowIter},
    schema::types::Type,
};
use std::{fs::File, sync::Arc};

/// Largest number of columns that a Parquet file may have. A file with more columns is an error.
const MAX_COLUMNS: usize = 4096;
/// The deepest accepted nesting of lists and objects in a chat that is stored in a Parquet file.
/// Deeper nesting is an error.
const MAX_DEPTH: usize = 32;
/// Largest number of column names that an error message lists.
const MAX_LISTED_COLUMNS: usize = 8;
/// The estimated memory in bytes of each value inside a chat (such as a string or a list), in
/// addition to the bytes of its text.
const VALUE_OVERHEAD_BYTES: usize = 64;

/// The size in bytes of the text in all rows that any Parquet file may have. The tests have smaller
/// files.
const MAX_TEXT_OF_SMALL_FILE_BYTES: u64 = if cfg!(test) { 4 << 20 } else { 64 << 20 };
/// The size in bytes of the text in all rows that a Parquet file may have for each byte of the
/// file. The compression of text by a factor of 20 is unusual. Without this limit, the text of a
/// few bytes of a dictionary and of a run length fills every disk.
const MAX_TEXT_PER_FILE_BYTE: u64 = 64;

/// The content of one row of a Parquet file: a text or a chat.
pub(crate) enum RowRecord {
    /// A complete text.
    Text(String),
    /// A chat, and its size in bytes.
    Chat(ChatRecord, usize),
}

impl RowRecord {
    /// Returns the size of the text, or the estimated size of the chat, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            RowRecord::Text(text) => text.len(),
            RowRecord::Chat(_, bytes) => *bytes,
        }
    }
}

/// Reads the rows of an open Parquet file in order, each as a text or a chat.
pub(crate) struct ParquetRows {
    rows: RowIter<'static>,
    field: String,
    is_chat: bool,
    /// The size in bytes of the rows that were read.
    read_bytes: u64,
    /// The largest size in bytes of all rows.
    max_bytes: u64,
}

impl ParquetRows {
    /// Opens a Parquet file for reading its rows as texts or chats. `field` is the column with the
    /// text or, if `is_chat` is set, the messages. Fails if the file has no such column or too many
    /// columns.
    pub(crate) fn open(file: File, field: &str, is_chat: bool) -> Result<Self, ParquetProblem> {
        let undecodable = |e: ParquetError| ParquetProblem::Undecodable(e.to_string());
        let size = file.metadata().map_err(|e| ParquetProblem::Undecodable(e.to_string()))?.len();
        let max_bytes = size.saturating_mul(MAX_TEXT_PER_FILE_BYTE).max(MAX_TEXT_OF_SMALL_FILE_BYTES);
        let reader = SerializedFileReader::new(file).map_err(undecodable)?;
        let columns = select_columns_to_read(reader.metadata().file_metadata().schema(), field, is_chat)?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(Some(columns)).map_err(undecodable)?;
        Ok(ParquetRows { rows, field: field.to_owned(), is_chat, read_bytes: 0, max_bytes })
    }

    /// Checks the size of a row, and the size of all rows that were read.
    fn check_size(&mut self, row: RowRecord) -> Result<RowRecord, RecordProblem> {
        if row.bytes() > MAX_LINE_BYTES {
            return Err(RecordProblem::RowTooLong { limit: MAX_LINE_BYTES });
        }
        self.read_bytes += (row.bytes() + VALUE_OVERHEAD_BYTES) as u64;
        match self.read_bytes > self.max_bytes {
            true => Err(RecordProblem::TooMuchText { limit: self.max_bytes }),
            false => Ok(row),
        }
    }

    /// Converts a row of the Parquet file to the text or the chat that it contains.
    fn convert_row(&self, row: Row) -> Result<RowRecord, RecordProblem> {
        let (mut content, mut tools) = (None, None);
        for (name, field) in row.into_columns() {
            match name == self.field {
                true => content = Some(field),
                false => tools = Some(field),
            }
        }
        let column = || self.field.clone();
        match (content, self.is_chat) {
            (Some(Field::Str(text)), false) => Ok(RowRecord::Text(text)),
            (Some(Field::Null) | None, _) => Err(RecordProblem::ColumnNull { column: column() }),
            (Some(_), false) => Err(RecordProblem::ColumnNotText { column: column() }),
            (Some(messages), true) => {
                let mut bytes = 0;
                let tools = tools.map(|t| convert_field_to_value(t, 0, &mut bytes)).transpose()?;
                let messages = convert_field_to_value(messages, 0, &mut bytes)?;
                let chat = ChatRecord { messages, tools: tools.filter(|t| !t.is_none()) };
                Ok(RowRecord::Chat(chat, bytes))
            }
        }
    }
}

impl Iterator for ParquetRows {
    type Item = Result<RowRecord, RecordProblem>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.rows.next()?;
        Some(match row {
            Ok(row) => self.convert_row(row).and_then(|row| self.check_size(row)),
            Err(e) => Err(RecordProblem::RowUnreadable(e.to_string())),
        })
    }
}

/// Returns the part of a Parquet file's schema that is read: the column with the texts or chats
/// and, for chats, the column `tools`. Fails if the column is missing or the file has too many
/// columns.
fn select_columns_to_read(schema: &Type, field: &str, is_chat: bool) -> Result<Type, ParquetProblem> {
    let columns = schema.get_fields();
    if columns.len() > MAX_COLUMNS {
        return Err(ParquetProblem::TooManyColumns { count: columns.len(), limit: MAX_COLUMNS });
    }
    if !columns.iter().any(|c| c.name() == field) {
        let present = columns.iter().take(MAX_LISTED_COLUMNS).map(|c| c.name().to_owned()).collect();
        return Err(ParquetProblem::ColumnMissing { column: field.to_owned(), present });
    }
    let is_read = |c: &&Arc<Type>| c.name() == field || (is_chat && c.name() == TOOLS_FIELD);
    let fields: Vec<Arc<Type>> = columns.iter().filter(is_read).cloned().collect();
    let group = Type::group_type_builder(schema.name()).with_fields(fields);
    group.build().map_err(|e| ParquetProblem::Undecodable(e.to_string()))
}

/// Converts a value of a Parquet row and the values nested in it to values for chat templates, and
/// adds their estimated memory in bytes to the total `bytes`. Omits null fields of an object, so
/// that a chat equals one from a JSON lines file. `depth` is the number of enclosing values.
fn convert_field_to_value(field: Field, depth: usize, bytes: &mut usize) -> Result<Value, RecordProblem> {
    if depth > MAX_DEPTH {
        return Err(RecordProblem::NestedTooDeep { limit: MAX_DEPTH });
    }
    *bytes += VALUE_OVERHEAD_BYTES;
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
        Field::Str(s) => {
            *bytes += s.len();
            s.into()
        }
        Field::Group(row) => {
            let present = row.into_columns().into_iter().filter(|(_, f)| !matches!(f, Field::Null));
            let values = present.map(|(name, f)| Ok((name, convert_field_to_value(f, depth + 1, bytes)?)));
            Value::from_pairs(values.collect::<Result<Vec<_>, RecordProblem>>()?)
        }
        Field::ListInternal(list) => {
            let items = list.elements().iter().map(|f| convert_field_to_value(f.clone(), depth + 1, bytes));
            items.collect::<Result<Vec<Value>, RecordProblem>>()?.into()
        }
        other => return Err(RecordProblem::ValueUnsupported { value: other.to_string() }),
    })
}
