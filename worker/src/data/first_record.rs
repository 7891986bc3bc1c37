//! [`has_record`]: checks whether a data file has a record, and whether its first record is valid.
use super::{
    document_reader::{DataFileFormat, RecordReadOptions, check_first_text_piece, open_data_file},
    error::{DataError, FailedRecord, InterpretationStep, RecordPosition},
    interpreter::{
        Document, DocumentOptions, DocumentResult, InterpreterFailure, OpenParquetReply, Request, RowsReply,
        SandboxInterpreter, rows_request_limits,
    },
    json_lines::{parse_text_record, read_json_lines},
    split::SplitFilter,
    tokenizer::to_interpretation_error,
};
use jobspec::LossTargets;
use sandbox::SandboxError;
use std::{fs::File, path::Path};

/// Returns whether a data file contains a record, or any text if it is a text file. Reads only the
/// first record or piece, and fails if this record or piece is invalid.
pub(crate) fn has_record(
    path: &Path,
    options: RecordReadOptions,
    interpreter: &SandboxInterpreter,
) -> Result<bool, DataError> {
    let mut data = open_data_file(path, options)?;
    match data.format {
        DataFileFormat::Text => check_first_text_piece(&mut data.file, path),
        DataFileFormat::JsonLines => jsonl_has_record(&mut data.file, path, options, interpreter),
        DataFileFormat::Parquet => parquet_has_row(&data.file, path, options, interpreter),
    }
}

/// Returns whether a JSON lines file contains a record. Fails if the first record is invalid.
fn jsonl_has_record(
    file: &mut File,
    path: &Path,
    options: RecordReadOptions,
    interpreter: &SandboxInterpreter,
) -> Result<bool, DataError> {
    let mut found = false;
    read_json_lines(file, path, 1, &mut |line, text| {
        found = true;
        let position = RecordPosition::Line(line);
        let Some(template) = options.chat_template else {
            let parsed = parse_text_record(text, options.field);
            return parsed.map(drop).map_err(|problem| DataError::invalid_record(path, position, problem));
        };
        let result = interpreter.interpret_document(Document::ChatLine(text), to_check_only_options(options));
        let range = FailedRecord { first: position, is_exact: true };
        let failed = |failure| {
            to_interpretation_error(
                failure,
                InterpretationStep::RenderChats,
                path,
                Some(range),
                Some(template.path()),
            )
        };
        require_valid_result(result.map_err(failed)?, path, position)
    })?;
    Ok(found)
}

/// Returns whether a Parquet file contains a row. Fails if the file or its first row is invalid.
fn parquet_has_row(
    file: &File,
    path: &Path,
    options: RecordReadOptions,
    interpreter: &SandboxInterpreter,
) -> Result<bool, DataError> {
    let position = RecordPosition::Row(1);
    let range = FailedRecord { first: position, is_exact: true };
    let rules = options.chat_template.map(|template| template.path());
    let failed = |failure: InterpreterFailure| {
        let rules = rules.filter(|_| failure.step == Some(InterpretationStep::RenderChats));
        to_interpretation_error(failure, InterpretationStep::ReadRows, path, Some(range), rules)
    };
    let mut stream = interpreter.open_stream();
    let limits = rows_request_limits(interpreter.threads());
    let is_chat = options.chat_template.is_some();
    let open = Request::OpenParquet { field: options.field, is_chat };
    let options = to_check_only_options(options);
    let read = Request::ReadRows { rows: 1, long_row_bytes: 0, options };
    stream.send(&open, Some(file), &limits).map_err(failed)?;
    stream.send(&read, None, &limits).map_err(failed)?;
    let opened: OpenParquetReply = stream.receive().map_err(failed)?;
    opened.map_err(|problem| DataError::InvalidParquet { path: path.to_path_buf(), problem })?;
    let mut reply: RowsReply = stream.receive().map_err(failed)?;
    match reply.rows.pop() {
        None => Ok(false),
        Some(result) => require_valid_result(result, path, position).map(|()| true),
    }
}

/// Returns the options of requests that make the sandbox process check records without tokenizing
/// them.
fn to_check_only_options(options: RecordReadOptions<'_>) -> DocumentOptions<'_> {
    DocumentOptions {
        field: options.field,
        loss_on: options.chat_template.map_or(LossTargets::All, |template| template.loss_on()),
        filter: SplitFilter::All,
        tokenize: false,
    }
}

/// Fails unless `result`, the sandbox process's result for one record of a data file, states that
/// the record is valid or was skipped.
fn require_valid_result(
    result: DocumentResult,
    path: &Path,
    position: RecordPosition,
) -> Result<(), DataError> {
    match result {
        DocumentResult::Valid | DocumentResult::Skipped => Ok(()),
        DocumentResult::Invalid(problem) => Err(DataError::invalid_record(path, position, problem)),
        DocumentResult::Tokens(_) | DocumentResult::TokenizerFailed(_) => {
            let range = FailedRecord { first: position, is_exact: true };
            let failure = SandboxError::InvalidReply.into();
            Err(to_interpretation_error(failure, InterpretationStep::RenderChats, path, Some(range), None))
        }
    }
}
