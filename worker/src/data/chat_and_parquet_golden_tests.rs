//! Compares rendered chats with the output of transformers, and records of Parquet files with those
//! that pyarrow wrote. The golden files are in tests/golden/data.
use super::{
    chat_template::{ChatRecord, ChatTemplate},
    dataset::Dataset,
    document_reader::{DocumentPart, read_data_file},
    record::RecordReadOptions,
    split::SplitFilter,
    token_cache::NO_LOSS_BIT,
    *,
};
use diagnostic::{Code, Diagnostic, codes::data as codes};
use jobspec::{DataSource, DataSpec, LossTargets, RecordFormat, TokenizerSpec};
use minijinja::{ErrorKind, Value};
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
/// One chat of chats.json with the output of transformers.
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
/// The input of a [`GoldenChatCase`].
struct GoldenChatInput {
    messages: Value,
    tools: Option<Value>,
}

/// Reads all cases of chats.json.
fn read_golden_cases() -> Vec<GoldenChatCase> {
    let text = std::fs::read_to_string(golden_file_path("chats.json")).unwrap();
    let cases: Vec<GoldenChatCase> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 40);
    cases
}

/// Compiles a chat template with the special tokens of the golden tokenizer.
fn compile_template(source: &str, loss_on: LossTargets) -> ChatTemplate {
    ChatTemplate::new(source, open_golden_tokenizer().list_special_tokens(), loss_on).unwrap()
}

/// Converts the chat of a case to a record.
fn create_chat_record(case: &GoldenChatCase) -> ChatRecord {
    ChatRecord { messages: case.chat.messages.clone(), tools: case.chat.tools.clone() }
}

#[test]
fn chats_have_the_text_tokens_and_loss_mask_of_transformers() {
    let tokenizer = open_golden_tokenizer();
    for case in read_golden_cases() {
        let rendered =
            compile_template(&case.template, LossTargets::Assistant).render_chat(&create_chat_record(&case));
        let Some(text) = &case.text else {
            let ChatProblem::Template(failure) = rendered.unwrap_err() else { panic!("{}", case.name) };
            assert_eq!(Some(&failure.detail), case.error.as_ref(), "{}", case.name);
            continue;
        };
        let masked = rendered.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(&masked.text, text, "{}", case.name);
        let mut tokens = Vec::new();
        tokenizer.encode_masked(&masked, &mut tokens).unwrap();
        let ids: Vec<u32> = tokens.iter().map(|t| t & !NO_LOSS_BIT).collect();
        assert_eq!(&ids, case.tokens.as_ref().unwrap(), "{}", case.name);
        let mask: Vec<u32> = tokens.iter().map(|t| u32::from(t & NO_LOSS_BIT == 0)).collect();
        assert_eq!(&mask, case.mask.as_ref().unwrap(), "{}", case.name);
        let unmasked = compile_template(&case.template, LossTargets::All)
            .render_chat(&create_chat_record(&case))
            .unwrap();
        assert_eq!(
            (&unmasked.text, unmasked.loss_ranges.len(), &unmasked.loss_ranges[0]),
            (text, 1, &(0..text.len())),
            "{}",
            case.name
        );
    }
}

/// Without generation tags, the assistant's text is located by rendering fewer messages. The
/// located ranges contain at least the text between the tags.
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
        let tagged = compile_template(&case.template, LossTargets::Assistant)
            .render_chat(&create_chat_record(case))
            .unwrap();
        let located =
            compile_template(&untagged, LossTargets::Assistant).render_chat(&create_chat_record(case));
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
    let problem =
        compile_template(source, LossTargets::Assistant).render_chat(&create_chat_record(case)).unwrap_err();
    assert_eq!(problem, ChatProblem::TargetsAmbiguous { message: 2 });
    assert!(compile_template(source, LossTargets::All).render_chat(&create_chat_record(case)).is_ok());
}

/// Renders a chat with these messages, a JSON text, and returns the error. Panics if the chat can
/// be rendered.
fn expect_chat_problem(messages: &str) -> ChatProblem {
    let messages = serde_json::from_str(messages).unwrap();
    let template = compile_template(&read_golden_cases()[0].template, LossTargets::Assistant);
    template.render_chat(&ChatRecord { messages, tools: None }).unwrap_err()
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
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let stopped = compile_template(endless, LossTargets::All)
        .render_chat(&create_chat_record(&read_golden_cases()[0]))
        .unwrap_err();
    assert!(
        matches!(stopped, ChatProblem::Template(TemplateFailure { kind: ErrorKind::OutOfFuel, .. })),
        "{stopped:?}"
    );
    let recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(
        compile_template(recursion, LossTargets::All)
            .render_chat(&create_chat_record(&read_golden_cases()[0]))
            .is_err()
    );
    let unpaired = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endif %}{% endfor %}";
    let rejected = compile_template(unpaired, LossTargets::Assistant)
        .render_chat(&create_chat_record(&read_golden_cases()[0]))
        .unwrap_err();
    assert_eq!(rejected, ChatProblem::UnpairedGenerationTags);
    let syntax = ChatTemplate::new("{% for %}", Vec::new(), LossTargets::All).err().unwrap();
    assert!(matches!(syntax, ChatTemplateProblem::Syntax(_)), "{syntax}");
}

/// Reads a data file and returns its documents. For a chat, returns only the ranges that count for
/// the loss, joined by `|`.
fn read_documents(path: &Path, format: RecordReadOptions) -> Result<Vec<String>, DataError> {
    let mut out = Vec::new();
    let hash = read_data_file(path, format, SplitFilter::All, &mut |part| {
        match part {
            DocumentPart::Text(text) => out.push(text),
            DocumentPart::Masked(m) => {
                let replies: Vec<&str> = m.loss_ranges.iter().map(|r| &m.text[r.clone()]).collect();
                out.push(replies.join("|"));
            }
            DocumentPart::End => {}
        }
        Ok(())
    })?;
    assert_eq!(hash, blake3::hash(&std::fs::read(path).unwrap()));
    Ok(out)
}

#[test]
fn parquet_files_have_the_texts_that_pyarrow_wrote() {
    let text = std::fs::read_to_string(golden_file_path("texts.json")).unwrap();
    let want: Vec<String> = serde_json::from_str(&text).unwrap();
    for name in ["snappy.parquet", "zstd_v2.parquet", "plain_large.parquet"] {
        let got =
            read_documents(&golden_file_path(name), RecordReadOptions { field: "text", chat_template: None })
                .unwrap();
        assert_eq!(got, want, "{name}");
    }
    let template = compile_template(&read_golden_cases()[0].template, LossTargets::Assistant);
    let chats = read_documents(
        &golden_file_path("chats.parquet"),
        RecordReadOptions { field: "messages", chat_template: Some(&template) },
    );
    let replies: Vec<String> = chats.unwrap().iter().map(|c| c.replace("<|im_end|>", "")).collect();
    assert_eq!(replies, ["4, of course.|Sure:\n  1. é\n  2. 🦀 \n", "4, of course.", "4, of course."]);
}

#[test]
fn unusable_parquet_files_are_errors_with_field_and_row() {
    // Code, field and row of the error.
    let error = |name: &str, format: RecordReadOptions| -> (Code, Option<String>, Option<u64>) {
        let diagnostic = Diagnostic::from(read_documents(&golden_file_path(name), format).unwrap_err());
        let field = diagnostic.field("field").and_then(|f| f.as_str()).map(str::to_owned);
        (diagnostic.code(), field, diagnostic.field("row").and_then(|r| r.as_u64()))
    };
    let text = |field| RecordReadOptions { field, chat_template: None };
    let missing = error("snappy.parquet", text("txt"));
    assert_eq!(missing, (codes::DATA_FIELD_MISSING, Some("txt".into()), None));
    let not_text = error("snappy.parquet", text("id"));
    assert_eq!(not_text, (codes::DATA_FIELD_INVALID, Some("id".into()), Some(1)));
    let template = compile_template(&read_golden_cases()[0].template, LossTargets::Assistant);
    let chat = RecordReadOptions { field: "text", chat_template: Some(&template) };
    assert_eq!(error("snappy.parquet", chat), (codes::CHAT_MESSAGES_INVALID, None, Some(1)));
    assert_eq!(error("README.md", chat), (codes::DATA_FORMAT_NOT_CHAT, None, None));
}

/// Changes single bytes of Parquet files. Each damaged file gives texts or an error, but never a
/// panic.
#[test]
fn damaged_parquet_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.parquet");
    let good = std::fs::read(golden_file_path("chats.parquet")).unwrap();
    let template = compile_template(&read_golden_cases()[0].template, LossTargets::Assistant);
    let mut rejected = 0;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x41;
        std::fs::write(&path, &bad).unwrap();
        rejected += usize::from(
            read_documents(&path, RecordReadOptions { field: "messages", chat_template: Some(&template) })
                .is_err(),
        );
    }
    assert!(rejected > good.len() / 4, "{rejected} of {}", good.len());
    for cut in [0, 4, 8, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..cut]).unwrap();
        assert!(
            read_documents(&path, RecordReadOptions { field: "messages", chat_template: Some(&template) })
                .is_err()
        );
    }
}

#[test]
fn compressed_files_are_rejected_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    for (name, command) in [("a.jsonl.gz", "gunzip"), ("a.txt.ZST", "zstd -d"), ("a.arrow", "Parquet")] {
        let path = dir.path().join(name);
        std::fs::write(&path, "x").unwrap();
        let error =
            read_documents(&path, RecordReadOptions { field: "text", chat_template: None }).unwrap_err();
        let DataError::CompressedFile { remedy, .. } = error else { panic!("{error}") };
        assert!(remedy.contains(command), "{remedy}");
    }
}

/// Reads chats from files into samples. Only the assistant's tokens are labels, each exactly once.
#[test]
fn only_the_assistants_tokens_count_for_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let case = &read_golden_cases()[0];
    std::fs::write(dir.path().join("t.jinja"), &case.template).unwrap();
    let text = std::fs::read_to_string(golden_file_path("chats.json")).unwrap();
    let raw: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let line = raw[0]["chat"].to_string();
    std::fs::write(dir.path().join("a.jsonl"), format!("{line}\n{line}\n")).unwrap();
    for pack in [true, false] {
        let spec = DataSpec {
            sources: vec![DataSource {
                name: String::new(),
                weight: 1.0,
                files: vec!["a.jsonl".into()],
                format: RecordFormat::Chat,
                field: "messages".into(),
                loss_on: LossTargets::Assistant,
            }],
            chat_template: Some("t.jinja".into()),
            tokenizer: TokenizerSpec::File(golden_file_path("tokenizer.json")),
            seq_len: 10,
            pack,
            shuffle: false,
            held_out: 0.0,
            cache: "cache".into(),
        };
        let data = Dataset::open(&spec, None, Split::Train, dir.path()).unwrap();
        let order = data.create_sample_order(0, false);
        let (tokens, mask) = (case.tokens.as_ref().unwrap(), case.mask.as_ref().unwrap());
        let assistant = mask.iter().filter(|&&m| m == 1).count() as u64;
        assert_eq!(data.tokens(), 2 * (tokens.len() as u64 + 1));
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
