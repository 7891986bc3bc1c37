//! Tests that compare rendered chats with the output of transformers, and Parquet records with
//! those that pyarrow wrote. The expected files are in tests/golden/data.
use super::{
    chat_record::ChatRecord,
    dataset::Dataset,
    interpreter::{
        CompiledTemplate, Document, DocumentOptions, DocumentResult, ParquetRows, RowRecord, TemplateSource,
    },
    split::SplitFilter,
    token_cache::NO_LOSS_BIT,
    *,
};
use diagnostic::{Code, Diagnostic, codes::data as codes};
use jobspec::{DataSource, DataSpec, LossTargets, RecordFormat, TokenizerSpec};
use minijinja::Value;
use std::path::{Path, PathBuf};

/// Returns the path of the file `name` in tests/golden/data.
fn golden_file_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/data").join(name)
}

/// Opens the tokenizer.json in tests/golden/data.
fn open_golden_tokenizer() -> TextTokenizer {
    TextTokenizer::open(&TokenizerSpec::File(golden_file_path("tokenizer.json")), Path::new("/")).unwrap()
}

#[derive(serde::Deserialize)]
/// One chat in the test file chats.json, with the text that transformers renders for it.
struct GoldenChatCase {
    name: String,
    /// The source of the chat template.
    template: String,
    chat: GoldenChatInput,
    /// The rendered chat; `None` if the template rejects the chat.
    text: Option<String>,
    /// The token ids of `text`.
    tokens: Option<Vec<u32>>,
    /// For each token, 1 if it counts for the loss and 0 otherwise.
    mask: Option<Vec<u32>>,
    /// The message with which the template rejects the chat.
    error: Option<String>,
}

#[derive(serde::Deserialize)]
/// The input part of a [`GoldenChatCase`]: the messages and settings of a chat.
struct GoldenChatInput {
    messages: Value,
    tools: Option<Value>,
}

/// Reads all test cases of the file chats.json.
fn read_golden_cases() -> Vec<GoldenChatCase> {
    let text = std::fs::read_to_string(golden_file_path("chats.json")).unwrap();
    let cases: Vec<GoldenChatCase> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 40);
    cases
}

/// The special tokens of the tokenizer in tests/golden/data.
const SPECIAL_TOKENS: [(&str, &str); 2] = [("bos_token", "<s>"), ("eos_token", "</s>")];

/// Compiles a chat template in a sandbox process, with the special tokens of the tokenizer in
/// tests/golden/data.
fn compile_template(source: &str) -> CompiledTemplate {
    CompiledTemplate::new(source, &SPECIAL_TOKENS).unwrap()
}

/// Converts the chat of a test case to a record.
fn create_chat_record(case: &GoldenChatCase) -> ChatRecord {
    ChatRecord { messages: case.chat.messages.clone(), tools: case.chat.tools.clone() }
}

/// Renders and tokenizes a chat in the sandbox process of `tokenizer`.
fn interpret_chat(case: &GoldenChatCase, tokenizer: &TextTokenizer, loss_on: LossTargets) -> DocumentResult {
    let template =
        TemplateSource { source: case.template.clone(), special_tokens: tokenizer.list_special_tokens() };
    tokenizer.interpreter().compile_template(template).unwrap().unwrap();
    let options = DocumentOptions { field: "messages", loss_on, filter: SplitFilter::All, tokenize: true };
    // The values keep the order of their keys, unlike those of serde_json.
    let [messages, tools] = [&case.chat.messages, &case.chat.tools.clone().unwrap_or(Value::from(()))]
        .map(|value| serde_json::to_string(value).unwrap());
    let line = format!("{{\"messages\": {messages}, \"tools\": {tools}}}");
    tokenizer.interpreter().interpret_document(Document::ChatLine(&line), options).unwrap()
}

#[test]
fn chats_have_the_text_tokens_and_loss_mask_of_transformers() {
    let tokenizer = open_golden_tokenizer();
    assert_eq!(tokenizer.list_special_tokens(), SPECIAL_TOKENS.map(|(a, b)| (a.to_owned(), b.to_owned())));
    for case in read_golden_cases() {
        let rendered =
            compile_template(&case.template).render_chat(&create_chat_record(&case), LossTargets::Assistant);
        let interpreted = interpret_chat(&case, &tokenizer, LossTargets::Assistant);
        let Some(text) = &case.text else {
            let ChatProblem::Template(failure) = rendered.unwrap_err() else { panic!("{}", case.name) };
            assert_eq!(Some(&failure.detail), case.error.as_ref(), "{}", case.name);
            let problem = RecordProblem::Chat(ChatProblem::Template(failure));
            assert_eq!(interpreted, DocumentResult::Invalid(problem), "{}", case.name);
            continue;
        };
        let masked = rendered.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(&masked.text, text, "{}", case.name);
        let DocumentResult::Tokens(tokens) = interpreted else { panic!("{}", case.name) };
        let ids: Vec<u32> = tokens.0.iter().map(|t| t & !NO_LOSS_BIT).collect();
        assert_eq!(&ids, case.tokens.as_ref().unwrap(), "{}", case.name);
        let mask: Vec<u32> = tokens.0.iter().map(|t| u32::from(t & NO_LOSS_BIT == 0)).collect();
        assert_eq!(&mask, case.mask.as_ref().unwrap(), "{}", case.name);
        let unmasked =
            compile_template(&case.template).render_chat(&create_chat_record(&case), LossTargets::All);
        let unmasked = unmasked.unwrap();
        assert_eq!(
            (&unmasked.text, unmasked.loss_ranges.len(), &unmasked.loss_ranges[0]),
            (text, 1, &(0..text.len())),
            "{}",
            case.name
        );
        let DocumentResult::Tokens(all) = interpret_chat(&case, &tokenizer, LossTargets::All) else {
            panic!("{}", case.name)
        };
        assert_eq!(all.0, ids, "{}", case.name);
        assert_eq!(tokenizer.decode(&ids).unwrap().is_empty(), ids.is_empty());
    }
}

/// Checks that the assistant's text is found in a template without generation tags. The located
/// ranges contain at least the text between the tags.
#[test]
fn assistant_text_is_located_without_generation_tags() {
    const TAG_END: &str = "generation %}";
    let mut compared = 0;
    for case in read_golden_cases().iter().filter(|c| c.text.is_some()) {
        let untagged = case.template.replace("{%- generation %}", "{%- if true %}{%- endif %}");
        let untagged = untagged.replace("{%- endgeneration %}", "{%- if true %}{%- endif %}");
        if untagged.contains(TAG_END) {
            continue;
        }
        let chat = create_chat_record(case);
        let tagged = compile_template(&case.template).render_chat(&chat, LossTargets::Assistant).unwrap();
        let located = compile_template(&untagged).render_chat(&chat, LossTargets::Assistant);
        let located = located.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(located.text, tagged.text);
        assert_eq!(located.loss_ranges.len(), tagged.loss_ranges.len(), "{}", case.name);
        for (located_range, tagged_range) in located.loss_ranges.iter().zip(&tagged.loss_ranges) {
            let reply = tagged.text[tagged_range.clone()].trim();
            let located_text = &tagged.text[located_range.clone()];
            assert!(
                located_range.start <= tagged_range.start && located_text.contains(reply),
                "{}",
                case.name
            );
            // At most 12 bytes longer: the range contains no text of another message.
            assert!(located_range.len() <= tagged_range.len() + 12, "{}: {located_text:?}", case.name);
        }
        compared += 1;
    }
    assert!(compared >= 15, "{compared}");
}

#[test]
fn a_template_that_changes_earlier_messages_is_ambiguous() {
    let source =
        "{% for m in messages %}{{ m.role }}{% if loop.last %}: {{ m.content }}{% endif %};{% endfor %}";
    let case = &read_golden_cases()[0];
    let (template, chat) = (compile_template(source), create_chat_record(case));
    let problem = template.render_chat(&chat, LossTargets::Assistant).unwrap_err();
    assert_eq!(problem, ChatProblem::TargetsAmbiguous { message: 2 });
    assert!(template.render_chat(&chat, LossTargets::All).is_ok());
}

/// Renders a chat with the messages `messages`, a JSON text, and returns the error. Panics if the
/// chat can be rendered.
fn expect_chat_problem(messages: &str) -> ChatProblem {
    let messages = serde_json::from_str(messages).unwrap();
    let template = compile_template(&read_golden_cases()[0].template);
    template.render_chat(&ChatRecord { messages, tools: None }, LossTargets::Assistant).unwrap_err()
}

#[test]
fn invalid_messages_are_errors_with_their_number() {
    for (messages, expected) in [
        ("3", ChatProblem::MessagesNotAList),
        ("\"user\"", ChatProblem::MessagesNotAList),
        ("[]", ChatProblem::NoMessages),
        ("[\"a\"]", ChatProblem::RoleMissing { message: 1 }),
        (r#"[{"role":"user","content":"a"},{"content":"b"}]"#, ChatProblem::RoleMissing { message: 2 }),
        (r#"[{"role":"user","content":"a"}]"#, ChatProblem::NoAssistantText),
        (
            r#"[{"role":"assistant","content":"a\udb9c\udca1"}]"#,
            ChatProblem::ReservedCharacter { message: 1 },
        ),
    ] {
        assert_eq!(expect_chat_problem(messages), expected, "{messages}");
    }
    let failed = expect_chat_problem(r#"[{"role":"assistant"}]"#);
    assert!(matches!(failed, ChatProblem::Template(TemplateFailure { line: Some(_), .. })), "{failed:?}");
}

#[test]
fn endless_templates_are_stopped() {
    let chat = create_chat_record(&read_golden_cases()[0]);
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let stopped = compile_template(endless).render_chat(&chat, LossTargets::All).unwrap_err();
    assert!(
        matches!(stopped, ChatProblem::Template(TemplateFailure { is_endless: true, .. })),
        "{stopped:?}"
    );
    let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(compile_template(recursion).render_chat(&chat, LossTargets::All).is_err());
    let unpaired = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endif %}{% endfor %}";
    let rejected = compile_template(unpaired).render_chat(&chat, LossTargets::Assistant).unwrap_err();
    assert_eq!(rejected, ChatProblem::UnpairedGenerationTags);
    let syntax = CompiledTemplate::new("{% for %}", &[]).err().unwrap();
    assert!(!syntax.is_endless && syntax.line == Some(1), "{syntax}");
}

/// Reads a Parquet file and returns its documents. Of a chat, returns only the parts that count for
/// the loss, joined by `|`.
fn read_rows(
    path: &Path,
    field: &str,
    template: Option<&CompiledTemplate>,
) -> Result<Vec<String>, DataError> {
    let file = std::fs::File::open(path).unwrap();
    let rows = ParquetRows::open(file, field, template.is_some());
    let rows = rows.map_err(|problem| DataError::InvalidParquet { path: path.into(), problem })?;
    let render = |chat: &ChatRecord| -> Result<String, RecordProblem> {
        let masked = template.expect("a template").render_chat(chat, LossTargets::Assistant)?;
        let replies: Vec<&str> = masked.loss_ranges.iter().map(|r| &masked.text[r.clone()]).collect();
        Ok(replies.join("|"))
    };
    let text = |(row, number): (Result<RowRecord, RecordProblem>, u64)| {
        let text = row.and_then(|record| match record {
            RowRecord::Text(text) => Ok(text),
            RowRecord::Chat(chat, _) => render(&chat),
        });
        text.map_err(|problem| DataError::invalid_record(path, RecordPosition::Row(number), problem))
    };
    rows.zip(1..).map(text).collect()
}

#[test]
fn parquet_files_have_the_texts_that_pyarrow_wrote() {
    let text = std::fs::read_to_string(golden_file_path("texts.json")).unwrap();
    let want: Vec<String> = serde_json::from_str(&text).unwrap();
    for name in ["snappy.parquet", "zstd_v2.parquet", "plain_large.parquet"] {
        assert_eq!(read_rows(&golden_file_path(name), "text", None).unwrap(), want, "{name}");
    }
    let template = compile_template(&read_golden_cases()[0].template);
    let chats = read_rows(&golden_file_path("chats.parquet"), "messages", Some(&template));
    let replies: Vec<String> = chats.unwrap().iter().map(|c| c.replace("<|im_end|>", "")).collect();
    assert_eq!(replies, ["4, of course.|Sure:\n  1. é\n  2. 🦀 \n", "4, of course.", "4, of course."]);
}

/// Creates the data section of a job with one file of tests/golden/data, its tokenizer and its
/// first chat template.
fn create_golden_spec(dir: &Path, name: &str, format: RecordFormat, field: &str) -> DataSpec {
    std::fs::write(dir.join("t.jinja"), &read_golden_cases()[0].template).unwrap();
    DataSpec {
        sources: vec![DataSource {
            name: String::new(),
            weight: 1.0,
            files: vec![golden_file_path(name).display().to_string()],
            format,
            field: field.into(),
            loss_on: LossTargets::Assistant,
        }],
        chat_template: Some("t.jinja".into()),
        tokenizer: TokenizerSpec::File(golden_file_path("tokenizer.json")),
        seq_len: 10,
        pack: true,
        shuffle: false,
        held_out: 0.0,
        cache: "cache".into(),
    }
}

/// Checks that a Parquet file and a JSON lines file with the same texts give the same tokens, with
/// both tokenizers.
#[test]
fn parquet_files_have_the_tokens_of_json_lines_files() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(golden_file_path("texts.json")).unwrap();
    let texts: Vec<String> = serde_json::from_str(&text).unwrap();
    let lines: Vec<String> = texts.iter().map(|text| serde_json::json!({"text": text}).to_string()).collect();
    std::fs::write(dir.path().join("a.jsonl"), lines.join("\n")).unwrap();
    for tokenizer in [TokenizerSpec::Bytes, TokenizerSpec::File(golden_file_path("tokenizer.json"))] {
        for held_out in [0.0, 0.5] {
            let digest = |name: &str| {
                let spec = create_golden_spec(dir.path(), name, RecordFormat::Text, "text");
                let spec = DataSpec { tokenizer: tokenizer.clone(), held_out, ..spec };
                Dataset::open(&spec, None, Split::Train, dir.path()).unwrap().digest().to_owned()
            };
            let expected = digest(dir.path().join("a.jsonl").to_str().unwrap());
            for name in ["snappy.parquet", "zstd_v2.parquet", "plain_large.parquet"] {
                assert_eq!(digest(name), expected, "{name} {held_out}");
            }
        }
    }
}

#[test]
fn unusable_parquet_files_are_errors_with_field_and_row() {
    let dir = tempfile::tempdir().unwrap();
    // Code, field and row of the error, from the check before a job and from the job.
    let error = |name: &str, format: RecordFormat, field: &str| -> (Code, Option<String>, Option<u64>) {
        let spec = create_golden_spec(dir.path(), name, format, field);
        let summary = |error: DataError| {
            let diagnostic = Diagnostic::from(error);
            let field = diagnostic.field("field").and_then(|f| f.as_str()).map(str::to_owned);
            (diagnostic.code(), field, diagnostic.field("row").and_then(|r| r.as_u64()))
        };
        let checked = check_data(&spec, &[], dir.path()).errors.pop().unwrap();
        let opened = Dataset::open(&spec, None, Split::Train, dir.path()).err().unwrap();
        let (checked, opened) = (summary(checked), summary(opened));
        assert_eq!(checked, opened);
        opened
    };
    let missing = error("snappy.parquet", RecordFormat::Text, "txt");
    assert_eq!(missing, (codes::DATA_FIELD_MISSING, Some("txt".into()), None));
    let not_text = error("snappy.parquet", RecordFormat::Text, "id");
    assert_eq!(not_text, (codes::DATA_FIELD_INVALID, Some("id".into()), Some(1)));
    let chat = error("snappy.parquet", RecordFormat::Chat, "text");
    assert_eq!(chat, (codes::CHAT_MESSAGES_INVALID, None, Some(1)));
    let text = error("README.md", RecordFormat::Chat, "text");
    assert_eq!(text, (codes::DATA_FORMAT_NOT_CHAT, None, None));
}

/// Checks that a Parquet file with a changed byte gives texts, an error or a panic, which the
/// sandbox process converts to an error.
#[test]
fn damaged_parquet_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.parquet");
    let good = std::fs::read(golden_file_path("chats.parquet")).unwrap();
    let template = compile_template(&read_golden_cases()[0].template);
    let is_rejected = || {
        let read = || read_rows(&path, "messages", Some(&template)).is_err();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).unwrap_or(true)
    };
    let mut rejected = 0;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x41;
        std::fs::write(&path, &bad).unwrap();
        rejected += usize::from(is_rejected());
    }
    assert!(rejected > good.len() / 4, "{rejected} of {}", good.len());
    for cut in [0, 4, 8, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..cut]).unwrap();
        assert!(is_rejected());
    }
}

#[test]
fn compressed_files_are_rejected_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    for (name, command) in [("a.jsonl.gz", "gunzip"), ("a.txt.ZST", "zstd -d"), ("a.arrow", "Parquet")] {
        let path = dir.path().join(name);
        std::fs::write(&path, "x").unwrap();
        let spec = create_golden_spec(dir.path(), path.to_str().unwrap(), RecordFormat::Text, "text");
        let error = Dataset::open(&spec, None, Split::Train, dir.path()).err().unwrap();
        let DataError::CompressedFile { remedy, .. } = error else { panic!("{error}") };
        assert!(remedy.contains(command), "{remedy}");
    }
}

/// Checks that in samples of chats only the assistant's tokens are labels, each exactly once.
#[test]
fn only_the_assistants_tokens_count_for_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let case = &read_golden_cases()[0];
    let text = std::fs::read_to_string(golden_file_path("chats.json")).unwrap();
    let raw: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let line = raw[0]["chat"].to_string();
    std::fs::write(dir.path().join("a.jsonl"), format!("{line}\n{line}\n")).unwrap();
    for pack in [true, false] {
        let file = dir.path().join("a.jsonl");
        let spec = create_golden_spec(dir.path(), file.to_str().unwrap(), RecordFormat::Chat, "messages");
        let spec = DataSpec { pack, ..spec };
        let data = Dataset::open(&spec, None, Split::Train, dir.path()).unwrap();
        let order = data.create_sample_order(0, false);
        let (tokens, mask) = (case.tokens.as_ref().unwrap(), case.mask.as_ref().unwrap());
        let assistant = mask.iter().filter(|&&m| m == 1).count() as u64;
        assert_eq!(data.token_count(), 2 * (tokens.len() as u64 + 1));
        let [mut t, mut l, mut s] = [0; 3].map(|_| vec![0; 10]);
        let mut labels = Vec::new();
        for i in 0..data.len() {
            data.fill_samples(&order, i, 1, &mut t, &mut l, &mut s);
            assert!(t.iter().all(|&t| t < data.vocab_size()));
            let targets: Vec<u32> = l.iter().copied().filter(|&l| l != IGNORE_INDEX).collect();
            assert_eq!(data.count_targets(&order, i, 1), targets.len() as u64);
            labels.extend(targets);
        }
        let want: Vec<u32> = tokens.iter().zip(mask).filter(|(_, m)| **m == 1).map(|(t, _)| *t).collect();
        assert_eq!(labels.len() as u64, 2 * assistant, "pack {pack}");
        assert_eq!(labels, [want.clone(), want].concat());
    }
}
