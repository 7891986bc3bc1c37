//! Tests of the limits for Parquet files: long rows, and text that a few bytes of a file expand to.
use super::{
    limits::{documents_request_limits, long_row_request_limits, rows_request_limits},
    tests::{build_tokenizer_json, create_spec},
};
use crate::data::{
    Dataset, Split,
    error::{DataError, RecordPosition, RecordProblem},
};
use jobspec::{RecordFormat, TokenizerSpec};
use parquet::{
    basic::Compression,
    column::writer::ColumnWriter,
    data_type::ByteArray,
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};
use serde_json::{Value, json};
use std::{fs, fs::File, path::Path, sync::Arc};

/// Writes a Parquet file with a column `text`. Equal texts are stored once, in a dictionary.
fn write_parquet_file(path: &Path, texts: &[&str]) {
    let schema = Arc::new(parse_message_type("message m { required binary text (UTF8); }").unwrap());
    let properties = WriterProperties::builder()
        .set_compression(Compression::UNCOMPRESSED)
        .set_dictionary_page_size_limit(16 << 20)
        .build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let ColumnWriter::ByteArrayColumnWriter(texts_writer) = column.untyped() else { panic!("a text column") };
    let values: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
    texts_writer.write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// Tokenizes the data file `name` in `dir`, and returns the number of tokens.
fn count_tokens(dir: &Path, name: &str, tokenizer: TokenizerSpec) -> Result<u64, DataError> {
    let spec = create_spec(name, RecordFormat::Text, tokenizer);
    Dataset::open(&spec, None, Split::Train, dir).map(|data| data.token_count())
}

#[test]
fn rows_longer_than_a_reply_have_the_tokens_of_json_lines() {
    let dir = tempfile::tempdir().unwrap();
    // Long words need less memory for each byte than short ones.
    let (word, other_word) = ("x".repeat(99) + " ", "y".repeat(199) + " ");
    let long = [word.repeat(12_000), other_word.repeat(7_000)];
    let texts = ["a", &long[0], "b", "c", &long[1], &long[0]];
    write_parquet_file(&dir.path().join("a.parquet"), &texts);
    let lines: Vec<String> = texts.iter().map(|text| json!({ "text": text }).to_string()).collect();
    fs::write(dir.path().join("a.jsonl"), lines.join("\n")).unwrap();
    let tokenizer = build_tokenizer_json(Value::Null, json!({"type": "Whitespace"}), None);
    fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    let count = |name| {
        let tokenizer = TokenizerSpec::File("tokenizer.json".into());
        count_tokens(dir.path(), name, tokenizer).unwrap()
    };
    let expected = 3 + 2 * 12_000 + 7_000 + 6;
    assert_eq!([count("a.parquet"), count("a.jsonl")], [expected; 2]);
}

#[test]
fn a_small_file_with_much_text_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let text = "word ".repeat(100);
    write_parquet_file(&dir.path().join("a.parquet"), &vec![text.as_str(); 10_000]);
    assert!(fs::metadata(dir.path().join("a.parquet")).unwrap().len() < 4000);
    let error = count_tokens(dir.path(), "a.parquet", TokenizerSpec::Bytes).expect_err("too much text");
    let DataError::InvalidRecord { position: RecordPosition::Row(row), problem, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(problem.clone(), RecordProblem::TooMuchText { limit: 4 << 20 });
    // Each row has 500 bytes of text, and counts as 64 bytes more.
    assert_eq!(*row, (4 << 20) / 564 + 1);
}

#[test]
fn rows_above_the_size_limit_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let long = "x".repeat((16 << 20) + 1);
    write_parquet_file(&dir.path().join("a.parquet"), &["a", &long]);
    let error = count_tokens(dir.path(), "a.parquet", TokenizerSpec::Bytes).expect_err("a long row");
    let DataError::InvalidRecord { position: RecordPosition::Row(2), problem, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(problem.clone(), RecordProblem::RowTooLong { limit: 16 << 20 });
}

/// Checks that the limits of a long row follow from its text, but not more than the size of the
/// file justifies.
#[test]
fn a_small_file_gets_no_additional_memory_for_a_long_row() {
    let base = rows_request_limits(2);
    let small = long_row_request_limits(8 << 20, 9000);
    assert_eq!(small.memory_bytes, base.memory_bytes);
    assert_eq!(small.cpu, documents_request_limits([1 << 20].into_iter(), 1).cpu);
    let large = long_row_request_limits(8 << 20, 2 << 20);
    assert_eq!(large, documents_request_limits([8 << 20].into_iter(), 1));
    assert!(large.memory_bytes > base.memory_bytes);
    for threads in [1, 2, 64] {
        assert_eq!(rows_request_limits(threads).memory_bytes, base.memory_bytes);
    }
}
