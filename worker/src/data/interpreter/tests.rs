//! Tests of the sandbox process with untrusted tokenizers, chat templates and Parquet files, and of
//! the errors that a job reports.
use super::*;
use crate::data::{
    Dataset, Split, TextTokenizer, check_data,
    error::{DataError, FailedRecord, InterpretationStep, RecordPosition},
};
use jobspec::{DataSource, DataSpec, LossTargets, RecordFormat, TokenizerSpec};
use sandbox::SandboxError;
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

/// Environment variable by which a process recognizes that it is the sandbox process of a test.
pub(super) const SANDBOX_VARIABLE: &str = "LAUNCH_TEST_IS_SANDBOX";
/// The longest time that a job may take to report an error in these tests. The target is 10 s. The
/// tests share the machine with others.
const LONGEST_TIME: Duration = Duration::from_secs(30);

/// Runs the sandbox process of the tests. Does nothing in a usual run of the tests.
#[test]
fn run_sandbox() {
    if std::env::var_os(SANDBOX_VARIABLE).is_some() {
        std::process::exit(crate::data::run_sandbox().into());
    }
}

/// Returns a tokenizer.json with the words a, b and c and an end-of-document token, and with the
/// given normalizer, pre-tokenizer and model.
pub(super) fn build_tokenizer_json(normalizer: Value, pre_tokenizer: Value, model: Option<Value>) -> String {
    let vocab = json!({"a": 0, "b": 1, "c": 2});
    let model = model.unwrap_or(json!({"type": "WordLevel", "vocab": vocab, "unk_token": "c"}));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 3, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model,
    })
    .to_string()
}

/// Returns a data section with `file` as its only source.
pub(super) fn create_spec(file: &str, format: RecordFormat, tokenizer: TokenizerSpec) -> DataSpec {
    let source = DataSource {
        name: String::new(),
        weight: 1.0,
        files: vec![file.to_owned()],
        format,
        field: if format == RecordFormat::Chat { "messages" } else { "text" }.into(),
        loss_on: LossTargets::All,
    };
    DataSpec {
        sources: vec![source],
        chat_template: (format == RecordFormat::Chat).then(|| "t.jinja".into()),
        tokenizer,
        seq_len: 4,
        pack: true,
        shuffle: false,
        held_out: 0.0,
        cache: "cache".into(),
    }
}

/// Opens data that must fail, and returns the error. Panics if the data are opened or the error
/// takes longer than [`LONGEST_TIME`].
fn expect_error(spec: &DataSpec, dir: &Path) -> DataError {
    let began = Instant::now();
    let error = Dataset::open(spec, None, Split::Train, dir).err().expect("an error");
    assert!(began.elapsed() < LONGEST_TIME, "{:?}: {error}", began.elapsed());
    error
}

/// Returns what an error states: the step of the work, the line or row, and the name of the
/// exceeded limit.
fn summarize(error: &DataError) -> (InterpretationStep, Option<u64>, Option<&'static str>) {
    let DataError::Uninterpretable(failure) = error else { panic!("{error:?}") };
    let position = failure.records.map(|range| match range {
        FailedRecord { first: RecordPosition::Line(number) | RecordPosition::Row(number), .. } => number,
    });
    (failure.step, position, failure.error.exceeded_limit().map(|(name, _)| name))
}

/// Checks that each template which needs too much time or memory ends with an error that names the
/// limit and the record.
#[test]
fn untrusted_templates_exceed_a_limit_and_name_their_record() {
    let nested_list = format!("{{% set x = {}1{} %}}{{{{ x }}}}", "[".repeat(5000), "]".repeat(5000));
    let cases: Vec<(&str, String)> = vec![
        ("a deep negation", format!("{{{{ {} true }}}}", "not ".repeat(100_000))),
        ("a long sum", format!("{{{{ 1{} }}}}", "+1".repeat(100_000))),
        ("a nested list", nested_list),
        ("a deep value", "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}".into()),
        ("a wide indent", "{{ 'a\nb'|indent(10000000000) }}".into()),
        ("a wide format", "{{ '%10000000000d'|format(1) }}".into()),
        ("a string that doubles", "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}".into()),
        ("a list that doubles", "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}".into()),
        ("a join", "{{ range(99999)|join('x' * 100000) }}".into()),
        ("a replacement", "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = ns.x|replace('a', 'aaaa') %}{% endfor %}{{ ns.x }}".into()),
        ("a batch", "{{ range(99999)|batch(10000000000, 0)|list|length }}".into()),
        ("many slices", "{{ range(99999)|slice(100000000)|list|length }}".into()),
    ];
    let dir = tempfile::tempdir().unwrap();
    let line = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    fs::write(dir.path().join("a.jsonl"), format!("{line}\n{line}\n")).unwrap();
    let mut limits = Vec::new();
    for (name, template) in cases {
        fs::write(dir.path().join("t.jinja"), template).unwrap();
        let spec = create_spec("a.jsonl", RecordFormat::Chat, TokenizerSpec::Bytes);
        match Dataset::open(&spec, None, Split::Train, dir.path()).err() {
            Some(error @ DataError::Uninterpretable(_)) => {
                let (step, line, limit) = summarize(&error);
                assert!(
                    (step, line) == (InterpretationStep::CompileTemplate, None)
                        || (step, line) == (InterpretationStep::RenderChats, Some(1)),
                    "{name}: {error}"
                );
                let path = if line.is_some() { "a.jsonl:1 with" } else { "t.jinja" };
                assert!(error.to_string().contains(path), "{name}: {error}");
                limits.push(limit.unwrap_or_else(|| panic!("{name}: {error}")));
            }
            // The library rejects some of the templates itself.
            Some(DataError::InvalidRecord { .. } | DataError::InvalidChatTemplate { .. }) => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    limits.sort_unstable();
    limits.dedup();
    assert!(limits.len() >= 2, "the templates exceed only {limits:?}");
}

#[test]
fn a_check_of_a_job_with_an_untrusted_template_ends_soon() {
    let dir = tempfile::tempdir().unwrap();
    let line = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    for name in ["a.jsonl", "b.jsonl", "c.jsonl"] {
        fs::write(dir.path().join(name), &line).unwrap();
    }
    fs::write(dir.path().join("t.jinja"), "{{ '%10000000000d'|format(1) }}").unwrap();
    let spec = create_spec("*.jsonl", RecordFormat::Chat, TokenizerSpec::Bytes);
    let began = Instant::now();
    let report = check_data(&spec, &["c.jsonl".to_owned()], dir.path());
    assert!(began.elapsed() < LONGEST_TIME, "{:?}", began.elapsed());
    let [error] = &report.errors[..] else { panic!("{report:?}") };
    assert_eq!(summarize(error), (InterpretationStep::RenderChats, Some(1), Some("memory_limit_bytes")));
    let confinement = report.confinement.expect("a process ran");
    assert!(confinement.landlock && confinement.seccomp, "the kernel of the tests has both");
}

/// Checks that each tokenizer which panics or needs too much time or memory ends with an error that
/// names the record.
#[test]
fn untrusted_tokenizers_are_errors_that_name_their_record() {
    let slow_regex = json!({"type": "Split", "pattern": {"Regex": r"x(?!(x*)(x*)\2q)"}, "behavior": "Isolated", "invert": false});
    let growing: Vec<Value> =
        (0..40).map(|_| json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"})).collect();
    let long_prefix = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": [["a", "b"]],
        "continuing_subword_prefix": "x".repeat(100), "dropout": null, "unk_token": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false});
    // The library allocates as many bytes as the first four bytes of a character map state.
    let huge_map = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
    let short_map = json!({"type": "Precompiled", "precompiled_charsmap": "////"});
    let dir = tempfile::tempdir().unwrap();
    // The regular expression library gives up after a million steps of one match, but not of all
    // matches together.
    let text = format!("a b {}", format!("{} ", "x".repeat(600)).repeat(100));
    let lines = [json!({"text": "a"}), json!({"text": text}), json!({"text": "b"})];
    fs::write(dir.path().join("a.jsonl"), lines.map(|line| line.to_string()).join("\n")).unwrap();
    let open = |json: String| {
        fs::write(dir.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = TokenizerSpec::File("tokenizer.json".into());
        expect_error(&create_spec("a.jsonl", RecordFormat::Text, tokenizer), dir.path())
    };
    let error = open(build_tokenizer_json(Value::Null, slow_regex, None));
    assert_eq!(summarize(&error), (InterpretationStep::Tokenize, Some(2), Some("cpu_limit_s")), "{error}");
    let normalizer = json!({"type": "Sequence", "normalizers": growing});
    let error = open(build_tokenizer_json(normalizer, Value::Null, None));
    let (step, line, limit) = summarize(&error);
    assert_eq!((step, line), (InterpretationStep::Tokenize, Some(1)), "{error}");
    // A slow machine needs a second of CPU time before the text exceeds the memory.
    assert!(matches!(limit, Some("memory_limit_bytes" | "cpu_limit_s")), "{error}");
    let error = open(build_tokenizer_json(huge_map, Value::Null, None));
    assert_eq!(
        summarize(&error),
        (InterpretationStep::LoadTokenizer, None, Some("memory_limit_bytes")),
        "{error}"
    );
    for json in [
        build_tokenizer_json(Value::Null, Value::Null, Some(long_prefix)),
        build_tokenizer_json(short_map, Value::Null, None),
    ] {
        let error = open(json);
        assert!(
            matches!(error, DataError::InvalidTokenizer { .. } | DataError::RecordNotTokenized { .. }),
            "{error:?}"
        );
    }
    let nested = format!("{}{}", r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    assert!(matches!(open(nested), DataError::InvalidTokenizer { .. } | DataError::Uninterpretable(_)));
}

/// Checks that the sandbox process is started again after a failure, with the same tokenizer.
#[test]
fn an_interpreter_recovers_from_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let growing: Vec<Value> =
        (0..40).map(|_| json!({"type": "Replace", "pattern": {"String": "x"}, "content": "xxxx"})).collect();
    let normalizer = json!({"type": "Sequence", "normalizers": growing});
    let json = build_tokenizer_json(normalizer, json!({"type": "Whitespace"}), None);
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    let tokenizer = TextTokenizer::open(&TokenizerSpec::File("tokenizer.json".into()), dir.path()).unwrap();
    for _ in 0..2 {
        let mut tokens = Vec::new();
        tokenizer.encode("a b a", &mut tokens).unwrap();
        assert_eq!(tokens, [0, 1, 0]);
        assert_eq!(tokenizer.decode(&[0, 3, 1, 77]).unwrap(), "a b");
        let error = tokenizer.encode("a x", &mut tokens).expect_err("too much memory");
        let (step, record, limit) = summarize(&error);
        assert_eq!((step, record), (InterpretationStep::Tokenize, None), "{error}");
        // a slow CPU reaches its own limit first
        assert!(matches!(limit, Some("memory_limit_bytes" | "cpu_limit_s")), "{error}");
        tokenizer.end_sandbox_process();
    }
}

/// Checks that a stream of requests which is dropped with pending requests leaves no reply for the
/// next stream.
#[test]
fn an_abandoned_stream_does_not_affect_the_next_one() {
    let interpreter = SandboxInterpreter::new(2);
    let options = DocumentOptions {
        field: "text",
        loss_on: LossTargets::All,
        filter: crate::data::split::SplitFilter::All,
        tokenize: true,
    };
    let tokens_of = |text: &str| match interpreter.interpret_document(Document::Text(text), options).unwrap()
    {
        DocumentResult::Tokens(tokens) => tokens.0,
        other => panic!("{other:?}"),
    };
    assert_eq!(tokens_of("a"), [97]);
    let mut stream = interpreter.open_stream();
    let request = Request::Documents { documents: vec![Document::Text("abandoned")], options };
    stream.send(&request, None, &documents_request_limits([9].into_iter(), 2)).unwrap();
    drop(stream);
    assert_eq!(tokens_of("b"), [98]);
}

/// Checks that the tokens of many batches are written in the order of the documents, also if a
/// batch exceeds a limit and its documents are repeated one by one.
#[test]
fn many_batches_have_the_tokens_of_their_documents_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let json = build_tokenizer_json(Value::Null, json!({"type": "Whitespace"}), None);
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    let words = ["a", "b", "c"];
    let text = |i: usize| (0..i % 7 + 1).map(|k| words[(i + k) % 3]).collect::<Vec<_>>().join(" ");
    let mut lines = String::new();
    let mut expected = Vec::new();
    for i in 0..60_000 {
        lines += &format!("{{\"text\": \"{}\"}}\n", text(i));
        expected.extend((0..i % 7 + 1).map(|k| ((i + k) % 3) as u32));
        expected.push(3);
    }
    fs::write(dir.path().join("a.jsonl"), lines).unwrap();
    let tokenizer = TokenizerSpec::File("tokenizer.json".into());
    let spec = DataSpec { seq_len: 1000, ..create_spec("a.jsonl", RecordFormat::Text, tokenizer) };
    let data = Dataset::open(&spec, None, Split::Train, dir.path()).unwrap();
    assert_eq!(data.token_count(), expected.len() as u64);
    let order = data.create_sample_order(0, false);
    let mut read = Vec::new();
    for position in 0..data.len() {
        let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; 1000]);
        data.fill_samples(&order, position, 1, &mut tokens, &mut labels, &mut starts);
        read.extend(tokens);
    }
    assert_eq!(read, expected[..read.len()]);
    assert!(read.len() > expected.len() - 1100);
}

#[test]
fn invalid_replies_and_missing_programs_are_errors() {
    let mut reply = rmp_serde::to_vec(&DocumentResult::Skipped).unwrap();
    assert_eq!(rmp_serde::from_slice::<DocumentResult>(&reply).unwrap(), DocumentResult::Skipped);
    reply.truncate(1);
    assert!(rmp_serde::from_slice::<Vec<DocumentResult>>(&reply).is_err());
    assert!(matches!(
        InterpreterFailure::from(SandboxError::InvalidReply),
        InterpreterFailure { step: None, error: SandboxError::InvalidReply }
    ));
}
