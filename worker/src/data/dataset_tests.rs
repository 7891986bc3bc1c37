//! Tests of data sets, from data files to samples.
use super::{dataset::Dataset, *};
use diagnostic::{Code, Diagnostic, codes::data as codes};
use jobspec::{DataSource, DataSpec, LossTargets, RecordFormat, TokenizerSpec};
use proptest::prelude::*;
use sandbox::SandboxError;
use std::{collections::HashSet, fs, path::Path};

/// Returns the data section of a job with one unnamed text source.
fn create_data_spec(files: &[&str], seq_len: u32) -> DataSpec {
    DataSpec {
        sources: vec![create_text_source(files.iter().map(|f| f.to_string()).collect())],
        chat_template: None,
        tokenizer: TokenizerSpec::Bytes,
        seq_len,
        pack: true,
        shuffle: true,
        held_out: 0.0,
        cache: ".launch-cache".into(),
    }
}

/// Returns a text source without a name, with the files `files`.
fn create_text_source(files: Vec<String>) -> DataSource {
    DataSource {
        name: String::new(),
        weight: 1.0,
        files,
        format: RecordFormat::Text,
        field: "text".into(),
        loss_on: LossTargets::All,
    }
}

/// Creates a temporary directory with the given files (names and contents).
fn create_directory_with(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

/// Opens the training data in `dir`, without the held-out part.
fn open_train_data(spec: &DataSpec, dir: &tempfile::TempDir) -> Result<Dataset, DataError> {
    Dataset::open(spec, None, Split::Train, dir.path())
}

/// Returns the error of opening a data set. Panics if the data set was opened.
fn expect_open_error(result: Result<Dataset, DataError>) -> DataError {
    result.err().expect("opening the data failed")
}

/// The tokens and labels of several samples, and the position at which the document of each token
/// starts.
type SampleBatch = [Vec<u32>; 3];

/// Reads `micro` samples, the first at position `first`, and checks that their labels are counted
/// correctly.
fn read_batch(data: &Dataset, order: &SampleOrder, first: u64, micro: usize) -> SampleBatch {
    let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; micro * data.seq_len]);
    data.fill_samples(order, first, micro, &mut tokens, &mut labels, &mut starts);
    let targets = labels.iter().filter(|&&l| l != IGNORE_INDEX).count() as u64;
    assert_eq!(data.count_targets(order, first, micro as u64), targets);
    [tokens, labels, starts]
}

#[test]
fn files_become_samples() {
    let dir = create_directory_with(&[
        ("a.txt", "ab"),
        ("b.txt", ""),
        ("c.jsonl", "{\"text\":\"cd\"}\n{\"text\":\"e\"}\n"),
    ]);
    let data = open_train_data(&create_data_spec(&["*"], 4), &dir).unwrap();
    assert_eq!((data.len(), data.token_count(), data.document_count(), data.vocab_size()), (2, 8, 3, 257));
    let i = IGNORE_INDEX;
    let [tokens, labels, starts] = read_batch(&data, &data.create_sample_order(0, false), 0, 2);
    assert_eq!(tokens, [97, 98, 256, 99, 100, 256, 101, 256]);
    assert_eq!(labels, [98, 256, i, 100, 256, i, 256, i]);
    assert_eq!(starts, [0, 0, 0, 3, 0, 0, 2, 2]);
    assert!(data.warnings().is_empty());
}

#[test]
fn the_digest_depends_on_the_samples_only() {
    let dir = create_directory_with(&[
        ("a.txt", "some text"),
        ("b.txt", "some more"),
        ("z.jsonl", "{\"text\":\"some more\"}"),
    ]);
    let digest = |files: &[&str], change: &dyn Fn(&mut DataSpec)| {
        let mut spec = create_data_spec(files, 4);
        change(&mut spec);
        open_train_data(&spec, &dir).unwrap().digest().to_string()
    };
    let same = |_: &mut DataSpec| {};
    let base = digest(&["a.txt", "b.txt"], &same);
    assert_eq!(base.len(), 64);
    assert_eq!(base, digest(&["[ab].txt"], &|s| s.cache = "elsewhere".into()));
    // Equal documents in equal order have one digest, however they are divided among files.
    assert_eq!(base, digest(&["a.txt", "z.jsonl"], &same));
    let others = [
        digest(&["a.txt"], &same),
        digest(&["a.txt", "b.txt"], &|s| s.seq_len = 5),
        digest(&["a.txt", "b.txt"], &|s| s.pack = false),
    ];
    assert!(others.iter().all(|o| *o != base));
}

#[test]
fn eval_files_have_precedence_over_the_held_out_share() {
    let lines: String = (0..500).map(|i| format!("{{\"text\":\"document {i:03}\"}}\n")).collect();
    let dir = create_directory_with(&[("a.jsonl", &lines), ("eval.txt", "held out by name")]);
    let mut spec = create_data_spec(&["a.jsonl"], 8);
    assert!(matches!(
        expect_open_error(Dataset::open(&spec, None, Split::HeldOut, dir.path())),
        DataError::NoEvalData
    ));
    spec.held_out = 0.1;
    let open = |eval: Option<&[String]>, split| Dataset::open(&spec, eval, split, dir.path()).unwrap();
    let (train, held) = (open(None, Split::Train), open(None, Split::HeldOut));
    assert_eq!(train.document_count() + held.document_count(), 500);
    assert!((25..80).contains(&held.document_count()), "{}", held.document_count());
    assert_ne!(train.digest(), held.digest());
    let eval = open(Some(&["eval.txt".into()]), Split::HeldOut);
    assert_eq!((eval.document_count(), eval.token_count()), (1, 17));
    assert_eq!(open(Some(&[]), Split::HeldOut).digest(), held.digest());
    assert_eq!(open(Some(&["eval.txt".into()]), Split::Train).digest(), train.digest());
}

#[test]
fn data_shorter_than_a_sample_are_an_error_with_both_lengths() {
    let dir = create_directory_with(&[("a.txt", "abc"), ("empty.txt", "")]);
    let e = expect_open_error(open_train_data(&create_data_spec(&["a.txt"], 5), &dir));
    assert!(
        matches!(e, DataError::TooShort { split: Split::Train, tokens: 4, documents: 1, required: 5 }),
        "{e}"
    );
    assert!(open_train_data(&create_data_spec(&["a.txt"], 4), &dir).is_ok());
    for pack in [true, false] {
        let e = expect_open_error(open_train_data(
            &DataSpec { pack, ..create_data_spec(&["empty.txt"], 5) },
            &dir,
        ));
        assert!(matches!(e, DataError::TooShort { documents: 0, tokens: 0, .. }), "{e}");
        assert_eq!(e.to_diagnostic().subject(), Some("train.data.seq_len"));
    }
    let e = expect_open_error(Dataset::open(
        &DataSpec { held_out: 1e-9, ..create_data_spec(&["a.txt"], 2) },
        None,
        Split::HeldOut,
        dir.path(),
    ));
    assert!(matches!(e, DataError::TooShort { split: Split::HeldOut, tokens: 0, .. }), "{e}");
}

#[test]
fn invalid_settings_are_errors_of_their_keys() {
    let dir = create_directory_with(&[("a.txt", "abc")]);
    for held_out in [1.0, -0.1, f64::NAN, f64::INFINITY] {
        let e = expect_open_error(open_train_data(
            &DataSpec { held_out, ..create_data_spec(&["a.txt"], 2) },
            &dir,
        ));
        assert_eq!(e.to_diagnostic().subject(), Some("train.data.held_out"));
        assert_eq!(e.to_diagnostic().code(), codes::DATA_HELD_OUT_INVALID);
    }
    let e = expect_open_error(open_train_data(&create_data_spec(&["a.txt"], 0), &dir));
    let diagnostic = e.to_diagnostic();
    assert_eq!(diagnostic.subject(), Some("train.data.seq_len"));
    assert_eq!(diagnostic.code(), codes::DATA_SEQUENCE_LENGTH_INVALID);
}

#[test]
fn the_estimate_counts_files_bytes_and_tokens() {
    let dir = create_directory_with(&[("a.txt", "abc"), ("b.txt", "defgh")]);
    let estimate = check_data(&create_data_spec(&["*.txt"], 4), &[], dir.path()).estimate.unwrap();
    assert_eq!(estimate, DataEstimate { files: 2, bytes: 8, tokens: 10, vocab_size: 257 });
    assert_eq!(
        open_train_data(&create_data_spec(&["*.txt"], 4), &dir).unwrap().token_count(),
        estimate.tokens
    );
    let none = check_data(&create_data_spec(&["*.md"], 4), &[], dir.path());
    assert!(matches!(none.errors[..], [DataError::NoMatch { .. }]) && none.estimate.is_none());
    assert!(check_data(&create_data_spec(&["*.txt"], 0), &[], dir.path()).estimate.is_none());
    let tokenizer = TokenizerSpec::File("none.json".into());
    let report = check_data(&DataSpec { tokenizer, ..create_data_spec(&["*.txt"], 4) }, &[], dir.path());
    let [e] = &report.errors[..] else { panic!("{report:?}") };
    assert_eq!(e.to_diagnostic().subject(), Some("train.data.tokenizer"));
}

/// Checks that one preflight check reports all files whose first record is invalid, and reads no
/// further records.
#[test]
fn the_first_record_of_each_file_is_checked() {
    let long = "é".repeat(20_000);
    let dir = create_directory_with(&[
        ("empty.txt", ""),
        ("blank.jsonl", "\n \n"),
        ("good.jsonl", "{\"text\": \"a\"}\nthis line is not checked"),
        ("other.jsonl", "\n{\"body\": \"a\"}\n"),
        ("number.jsonl", "{\"text\": 3}"),
        ("cut.jsonl", "{\"text\": \"a"),
        ("long.txt", &format!("x{long}")),
        ("packed.gz", "x"),
    ]);
    std::fs::write(dir.path().join("latin.txt"), b"a\nb\xe9").unwrap();
    // File name, line or row, and code of each error.
    let errors = |files: &[&str]| -> Vec<(String, Option<u64>, Code)> {
        let errors = check_data(&create_data_spec(files, 4), &[], dir.path()).errors;
        let summary = |error: DataError| {
            let diagnostic = Diagnostic::from(error);
            assert_eq!(diagnostic.subject(), Some("train.data.files"));
            let path = diagnostic.field("path").and_then(|p| p.as_str()).expect("a path").to_owned();
            let path = Path::new(&path).strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned();
            (path, diagnostic.field("line").and_then(|l| l.as_u64()), diagnostic.code())
        };
        errors.into_iter().map(summary).collect()
    };
    let one = |name: &str, line: Option<u64>, code: Code| vec![(name.to_owned(), line, code)];
    assert_eq!(errors(&["long.txt", "good.jsonl", "empty.txt"]), []);
    assert_eq!(errors(&["empty.txt"]), one("empty.txt", None, codes::DATA_EMPTY));
    assert_eq!(errors(&["empty.txt", "blank.jsonl"]), one("blank.jsonl", None, codes::DATA_EMPTY));
    assert_eq!(
        errors(&["other.jsonl", "latin.txt", "long.txt", "number.jsonl"]),
        [
            one("latin.txt", Some(2), codes::DATA_NOT_UTF8),
            one("number.jsonl", Some(1), codes::DATA_RECORD_INVALID),
            one("other.jsonl", Some(2), codes::DATA_FIELD_MISSING),
        ]
        .concat()
    );
    assert_eq!(errors(&["cut.jsonl"]), one("cut.jsonl", Some(1), codes::DATA_RECORD_INVALID));
    assert_eq!(errors(&["packed.gz"]), one("packed.gz", None, codes::DATA_FILE_COMPRESSED));
    assert_eq!(errors(&["*"]).len(), 4, "at most four errors are reported");
    let report = check_data(&create_data_spec(&["long.txt"], 4), &["number.jsonl".into()], dir.path());
    let eval = report.eval_errors;
    assert!(report.estimate.is_some() && report.errors.is_empty());
    assert!(
        matches!(eval[..], [DataError::InvalidRecord { position: RecordPosition::Line(1), .. }]),
        "{eval:?}"
    );
}

/// Checks that the built-in tokenizer and its tokenizer.json produce the same tokens.
#[test]
fn the_embedded_tokenizer_equals_its_file() {
    let dir = create_directory_with(&[("a.txt", "Größe 🦀\n\n  x"), ("b.txt", "more")]);
    for (name, text) in TextTokenizer::new_byte_tokenizer().build_hf_tokenizer_files() {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let bytes = open_train_data(&create_data_spec(&["*.txt"], 4), &dir).unwrap();
    let tokenizer = TokenizerSpec::File("tokenizer.json".into());
    let file = open_train_data(&DataSpec { tokenizer, ..create_data_spec(&["*.txt"], 4) }, &dir).unwrap();
    assert_eq!(file.digest(), bytes.digest());
    assert_eq!(
        fs::read_dir(dir.path().join(".launch-cache")).unwrap().count(),
        5,
        "expected two caches, two locks and .gitignore"
    );
}

/// Creates a data set of three sources with different sizes, and returns its directory and data
/// section.
fn create_mixture() -> (tempfile::TempDir, DataSpec) {
    let lines = |name: &str, n: usize| -> String {
        (0..n).map(|i| format!("{{\"text\":\"{name} {i} {}\"}}\n", "x".repeat(i % 40))).collect()
    };
    let dir = create_directory_with(&[
        ("a.jsonl", &lines("a", 200)),
        ("b.jsonl", &lines("b", 30)),
        ("c.jsonl", &lines("c", 90)),
    ]);
    let part = |name: &str, weight| DataSource {
        name: name.into(),
        weight,
        ..create_text_source(vec![format!("{name}.jsonl")])
    };
    let sources = vec![part("a", 0.5), part("b", 0.2), part("c", 0.3)];
    (dir, DataSpec { sources, ..create_data_spec(&[], 16) })
}

#[test]
fn a_mixture_keeps_its_shares_and_each_source_has_separate_epochs() {
    let (dir, spec) = create_mixture();
    let data = open_train_data(&spec, &dir).unwrap();
    let order = data.create_sample_order(5, true);
    let lengths: Vec<u64> = order.samples_per_epoch_by_source().collect();
    assert_eq!(data.len(), lengths.iter().sum::<u64>());
    let mut seen = vec![Vec::new(); 3];
    for position in 0..2000 {
        let (source, epoch, sample) = order.locate_sample(position);
        assert_eq!(epoch, seen[source].len() as u64 / lengths[source]);
        seen[source].push(sample);
    }
    assert_eq!(seen.iter().map(Vec::len).collect::<Vec<_>>(), [1000, 400, 600]);
    for (samples, n) in seen.iter().zip(lengths) {
        for epoch in samples.chunks_exact(n as usize) {
            assert_eq!(epoch.iter().collect::<HashSet<_>>().len() as u64, n);
        }
    }
    let other = |change: &dyn Fn(&mut DataSpec)| {
        let mut spec = spec.clone();
        change(&mut spec);
        open_train_data(&spec, &dir).unwrap().digest().to_string()
    };
    assert_eq!(other(&|s| s.sources.iter_mut().for_each(|s| s.weight *= 10.0)), data.digest());
    assert_ne!(other(&|s| s.sources[0].weight = 0.6), data.digest());
    assert_ne!(other(&|s| s.sources[0].name = "d".into()), data.digest());
}

#[test]
fn an_error_in_a_source_has_its_name() {
    let (dir, mut spec) = create_mixture();
    spec.sources[1].files = vec!["none*.jsonl".into()];
    let is_in_b = |e: &DataError| {
        matches!(e, DataError::InSource { name, error }
            if name == "b" && matches!(**error, DataError::NoMatch { .. }))
    };
    let e = expect_open_error(open_train_data(&spec, &dir));
    assert!(is_in_b(&e), "{e}");
    assert_eq!(e.to_diagnostic().subject(), Some("train.data.mixture"));
    let errors = check_data(&spec, &[], dir.path()).errors;
    assert!(is_in_b(&errors[0]), "{errors:?}");
    let (dir, mut spec) = create_mixture();
    spec.sources[2].field = "txt".into();
    let diagnostic = Diagnostic::from(expect_open_error(open_train_data(&spec, &dir)));
    assert_eq!(diagnostic.code(), codes::DATA_FIELD_MISSING);
    assert_eq!(diagnostic.field("source").and_then(|s| s.as_str()), Some("c"));
    assert_eq!(diagnostic.field("field").and_then(|s| s.as_str()), Some("txt"));
    let files = ["a.jsonl".to_string()];
    let e = expect_open_error(Dataset::open(&spec, Some(&files), Split::HeldOut, dir.path()));
    assert_eq!(e.to_diagnostic().subject(), Some("train.eval.files"));
}

/// Creates an error of each step in which the sandbox interprets the file `data/a.jsonl`.
fn create_interpretation_errors() -> [DataError; 3] {
    let interpretation = |step, records, rules: Option<&str>, error| {
        let rules = rules.map(Into::into);
        DataError::Uninterpretable(Box::new(InterpretationError {
            step,
            path: "data/a.jsonl".into(),
            records,
            rules,
            error,
        }))
    };
    [
        interpretation(
            InterpretationStep::LoadTokenizer,
            None,
            None,
            SandboxError::OutOfMemory { limit_bytes: 896 << 20 },
        ),
        interpretation(
            InterpretationStep::Tokenize,
            Some(FailedRecord { first: RecordPosition::Line(3), is_exact: true }),
            Some("tokenizer.json"),
            SandboxError::OutOfCpuTime { limit_s: 3 },
        ),
        interpretation(
            InterpretationStep::ReadRows,
            Some(FailedRecord { first: RecordPosition::Row(1), is_exact: false }),
            None,
            SandboxError::Ended("by signal SIGKILL".into()),
        ),
    ]
}

/// Checks the texts that users see for every kind of data error.
#[test]
fn errors_render_with_message_cause_and_help() {
    let io = || std::io::Error::from(std::io::ErrorKind::PermissionDenied);
    let path = || std::path::PathBuf::from("data/a.jsonl");
    let record =
        |problem| DataError::InvalidRecord { path: path(), position: RecordPosition::Line(3), problem };
    let tokenizer = |problem| DataError::InvalidTokenizer { path: "tokenizer.json".into(), problem };
    let template = |problem| DataError::InvalidChatTemplate { problem };
    let errors = [
        DataError::NoFilesGiven,
        DataError::NoMatch { pattern: "*.txt".into(), directory: "/data".into() },
        DataError::InvalidPattern { pattern: "{a".into(), problem: FilePatternProblem::UnclosedBrace },
        DataError::NotAFile { pattern: "docs".into(), path: "/data/docs".into(), is_directory: true },
        DataError::Unreadable { path: path(), source: io() },
        DataError::NotUtf8 { path: path(), line: 3, offset: 99 },
        DataError::CompressedFile {
            path: "a.gz".into(),
            extension: "gz".into(),
            remedy: "decompress the file with gunzip",
        },
        DataError::NotAChatFile { path: "a.txt".into() },
        DataError::InvalidParquet {
            path: "a.parquet".into(),
            problem: ParquetProblem::ColumnMissing { column: "text".into(), present: vec!["body".into()] },
        },
        record(RecordProblem::FieldMissing { field: "text".into(), present: vec!["body".into()] }),
        record(RecordProblem::LineTooLong { limit: 16 << 20 }),
        record(ChatProblem::RoleMissing { message: 2 }.into()),
        record(ChatProblem::TargetsAmbiguous { message: 2 }.into()),
        DataError::Empty { path: path(), other_files: 0 },
        DataError::Empty { path: path(), other_files: 1 },
        DataError::ChangedWhileRead { path: path() },
        tokenizer(TokenizerProblem::FileMissing),
        tokenizer(TokenizerProblem::FileUnreadable(TokenizerTextFileError::NotUtf8 { offset: 7 })),
        template(ChatTemplateProblem::TokenizerHasNone),
        DataError::SandboxUnavailable { source: SandboxError::NotStarted(io()) },
        DataError::RecordNotTokenized {
            path: path(),
            position: Some(RecordPosition::Line(3)),
            message: "unknown word".into(),
        },
        DataError::CacheUnusable {
            path: "cache".into(),
            operation: TokenCacheOperation::Create,
            source: io(),
        },
        DataError::CacheCorrupt { path: "cache/x.tokens".into(), damage: TokenCacheDamage::DigestMismatch },
        DataError::InvalidSequenceLength,
        DataError::InvalidHeldOutShare { share: 1.5 },
        DataError::NoEvalData,
        DataError::AmbiguousEvalFormat,
        DataError::TooShort { split: Split::Train, documents: 1, tokens: 4, required: 5 },
        DataError::NoFilesGiven.with_source_name("web"),
    ];
    let errors = errors.into_iter().chain(create_interpretation_errors());
    let shown: Vec<String> = errors.map(|error| diagnostic::render(&error.into(), false)).collect();
    insta::assert_snapshot!(shown.join("\n"));
}

/// Creates a data set of 300 documents with different lengths, and returns it with its directory.
fn create_varied_dataset(pack: bool) -> (tempfile::TempDir, Dataset) {
    let text = |i: usize| (0..i * i % 97).map(|k| char::from(b'a' + (k % 26) as u8)).collect::<String>();
    let lines: String = (0..300).map(|i| format!("{{\"text\":\"{i}{}\"}}\n", text(i))).collect();
    let dir = create_directory_with(&[("a.jsonl", &lines)]);
    let data = open_train_data(&DataSpec { pack, ..create_data_spec(&["a.jsonl"], 16) }, &dir).unwrap();
    (dir, data)
}

#[test]
fn an_epoch_visits_every_sample_once_and_epochs_differ() {
    for pack in [true, false] {
        let (_dir, data) = create_varied_dataset(pack);
        let n = data.len();
        let order = data.create_sample_order(5, true);
        let epoch = |e: u64| (0..n).map(|i| read_batch(&data, &order, e * n + i, 1)).collect::<Vec<_>>();
        let plain: HashSet<SampleBatch> =
            (0..n).map(|i| read_batch(&data, &data.create_sample_order(0, false), i, 1)).collect();
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        for e in [first, second] {
            assert_eq!(e.len() as u64, n);
            assert_eq!(e.into_iter().collect::<HashSet<_>>(), plain);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Checks that a run which is stopped and resumed with other numbers of workers and
    /// micro-batches reads the same samples.
    #[test]
    fn a_resume_with_another_world_size_continues_exactly(
        pack: bool,
        mixed: bool,
        seed: u64,
        stop in 0u64..40,
        (before, after) in (1u64..9, 1u64..9),
        micros in (prop_oneof![Just(1usize), Just(2), Just(4)], prop_oneof![Just(1usize), Just(2), Just(4)]),
    ) {
        const GLOBAL: usize = 8;
        const STEPS: u64 = 40;
        let (_dir, data) = if mixed { let (dir, spec) = create_mixture(); let data = open_train_data(&spec, &dir).unwrap(); (dir, data) } else { create_varied_dataset(pack) };
        let order = data.create_sample_order(seed, true);
        let whole: Vec<SampleBatch> = (0..STEPS).map(|t| read_batch(&data, &order, t * GLOBAL as u64, GLOBAL)).collect();
        // Each rank has a range of micro-batches; the concatenation in rank order is the step.
        let step = |t: u64, world: u64, micro: usize| {
            let micro_batches = (GLOBAL / micro) as u64;
            let mut parts: SampleBatch = Default::default();
            for rank in 0..world {
                for micro_batch in rank * micro_batches / world..(rank + 1) * micro_batches / world {
                    let part = read_batch(&data, &order, t * GLOBAL as u64 + micro_batch * micro as u64, micro);
                    parts.iter_mut().zip(part).for_each(|(whole, p)| whole.extend(p));
                }
            }
            parts
        };
        let run: Vec<SampleBatch> = (0..STEPS)
            .map(|t| if t < stop { step(t, before, micros.0) } else { step(t, after, micros.1) })
            .collect();
        prop_assert_eq!(run, whole);
    }
}
