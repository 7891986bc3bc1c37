//! The whole way, from files to samples.
use super::*;
use contract::job::{LossOn, Tokenizer};
use proptest::prelude::*;
use std::{collections::HashSet, fs};

fn spec(files: &[&str], seq_len: u32) -> DataSpec {
    DataSpec {
        sources: vec![source(files.iter().map(|f| f.to_string()).collect())],
        chat_template: None,
        tokenizer: Tokenizer::Bytes,
        seq_len,
        pack: true,
        shuffle: true,
        held_out: 0.0,
        cache: ".launch-cache".into(),
    }
}

fn source(files: Vec<String>) -> DataSource {
    DataSource {
        name: String::new(),
        weight: 1.0,
        files,
        format: Format::Text,
        field: "text".into(),
        loss_on: LossOn::All,
    }
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn train(spec: &DataSpec, dir: &tempfile::TempDir) -> Result<Dataset, DataError> {
    Dataset::open(spec, None, Split::Train, dir.path())
}

fn error(result: Result<Dataset, DataError>) -> DataError {
    result.err().expect("it opened")
}

type Batch = [Vec<u32>; 3];

fn batch(data: &Dataset, order: &Order, first: u64, micro: usize) -> Batch {
    let [mut tokens, mut labels, mut starts] = [0; 3].map(|_| vec![0; micro * data.seq_len]);
    data.fill(order, first, micro, &mut tokens, &mut labels, &mut starts);
    let targets = labels.iter().filter(|&&l| l != IGNORE).count() as u64;
    assert_eq!(data.count_targets(order, first, micro as u64), targets);
    [tokens, labels, starts]
}

#[test]
fn files_to_samples() {
    let dir = folder(&[("a.txt", "ab"), ("b.txt", ""), ("c.jsonl", "{\"text\":\"cd\"}\n{\"text\":\"e\"}\n")]);
    let data = train(&spec(&["*"], 4), &dir).unwrap();
    assert_eq!((data.len(), data.tokens(), data.documents(), data.vocab_size()), (2, 8, 3, 257));
    let i = IGNORE;
    let [tokens, labels, starts] = batch(&data, &data.order(0, false), 0, 2);
    assert_eq!(tokens, [97, 98, 256, 99, 100, 256, 101, 256]);
    assert_eq!(labels, [98, 256, i, 100, 256, i, 256, i]);
    assert_eq!(starts, [0, 0, 0, 3, 0, 0, 2, 2]);
    assert!(data.notices().is_empty());
}

#[test]
fn digest_is_of_what_is_trained_on() {
    let dir =
        folder(&[("a.txt", "some text"), ("b.txt", "some more"), ("z.jsonl", "{\"text\":\"some more\"}")]);
    let digest = |files: &[&str], change: &dyn Fn(&mut DataSpec)| {
        let mut spec = spec(files, 4);
        change(&mut spec);
        train(&spec, &dir).unwrap().digest().to_string()
    };
    let same = |_: &mut DataSpec| {};
    let base = digest(&["a.txt", "b.txt"], &same);
    assert_eq!(base.len(), 64);
    assert_eq!(base, digest(&["[ab].txt"], &|s| s.cache = "elsewhere".into()));
    // equal documents in equal order, whatever they came from
    assert_eq!(base, digest(&["a.txt", "z.jsonl"], &same));
    let others = [
        digest(&["a.txt"], &same),
        digest(&["a.txt", "b.txt"], &|s| s.seq_len = 5),
        digest(&["a.txt", "b.txt"], &|s| s.pack = false),
    ];
    assert!(others.iter().all(|o| *o != base));
}

#[test]
fn held_out_and_eval_files() {
    let lines: String = (0..500).map(|i| format!("{{\"text\":\"document {i:03}\"}}\n")).collect();
    let dir = folder(&[("a.jsonl", &lines), ("eval.txt", "held out by name")]);
    let mut spec = spec(&["a.jsonl"], 8);
    assert!(matches!(
        error(Dataset::open(&spec, None, Split::HeldOut, dir.path())),
        DataError::NothingHeldOut
    ));
    spec.held_out = 0.1;
    let open = |eval: Option<&[String]>, split| Dataset::open(&spec, eval, split, dir.path()).unwrap();
    let (train, held) = (open(None, Split::Train), open(None, Split::HeldOut));
    assert_eq!(train.documents() + held.documents(), 500);
    assert!((25..80).contains(&held.documents()), "{}", held.documents());
    assert_ne!(train.digest(), held.digest());
    let eval = open(Some(&["eval.txt".into()]), Split::HeldOut);
    assert_eq!((eval.documents(), eval.tokens()), (1, 17));
    assert_eq!(open(Some(&[]), Split::HeldOut).digest(), held.digest());
    assert_eq!(open(Some(&["eval.txt".into()]), Split::Train).digest(), train.digest());
}

#[test]
fn too_little_says_how_much() {
    let dir = folder(&[("a.txt", "abc"), ("empty.txt", "")]);
    let e = error(train(&spec(&["a.txt"], 5), &dir));
    assert_eq!(e.to_string(), "the training data has 4 tokens in 1 documents; one sample needs 5");
    assert!(train(&spec(&["a.txt"], 4), &dir).is_ok());
    for pack in [true, false] {
        let e = error(train(&DataSpec { pack, ..spec(&["empty.txt"], 5) }, &dir));
        assert!(matches!(e, DataError::TooLittle { documents: 0, tokens: 0, .. }), "{e}");
        assert!(e.hint().unwrap().contains("seq_len"));
    }
    let e = error(Dataset::open(
        &DataSpec { held_out: 1e-9, ..spec(&["a.txt"], 2) },
        None,
        Split::HeldOut,
        dir.path(),
    ));
    assert!(e.to_string().starts_with("the held-out data has 0 tokens"), "{e}");
}

#[test]
fn bad_settings() {
    let dir = folder(&[("a.txt", "abc")]);
    for held_out in [1.0, -0.1, f64::NAN, f64::INFINITY] {
        let e = error(train(&DataSpec { held_out, ..spec(&["a.txt"], 2) }, &dir));
        assert_eq!(e.key(), "train.data.held_out");
    }
    assert_eq!(error(train(&spec(&["a.txt"], 0), &dir)).key(), "train.data.seq_len");
}

#[test]
fn estimates() {
    let dir = folder(&[("a.txt", "abc"), ("b.txt", "defgh")]);
    let facts = estimate(&spec(&["*.txt"], 4), dir.path()).unwrap();
    assert_eq!(facts, DataFacts { files: 2, bytes: 8, tokens: 10, vocab_size: 257 });
    assert_eq!(train(&spec(&["*.txt"], 4), &dir).unwrap().tokens(), facts.tokens);
    let none = estimate(&spec(&["*.md"], 4), dir.path()).unwrap_err();
    assert!(matches!(none[..], [DataError::NoMatch { .. }]));
    assert!(estimate(&spec(&["*.txt"], 0), dir.path()).is_err());
    let tokenizer = Tokenizer::File("none.json".into());
    let e = estimate(&DataSpec { tokenizer, ..spec(&["*.txt"], 4) }, dir.path()).unwrap_err();
    assert_eq!(e.iter().map(DataError::key).collect::<Vec<_>>(), ["train.data.tokenizer"]);
}

/// What the plan says of files whose first records can't be used: all at once, and no more than was read.
#[test]
fn first_records_are_looked_at() {
    let long = "é".repeat(20_000);
    let dir = folder(&[
        ("empty.txt", ""),
        ("blank.jsonl", "\n \n"),
        ("good.jsonl", "{\"text\": \"a\"}\nthis line is not looked at"),
        ("other.jsonl", "\n{\"body\": \"a\"}\n"),
        ("number.jsonl", "{\"text\": 3}"),
        ("cut.jsonl", "{\"text\": \"a"),
        ("long.txt", &format!("x{long}")),
        ("packed.gz", "x"),
    ]);
    std::fs::write(dir.path().join("latin.txt"), b"a\nb\xe9").unwrap();
    let said = |files: &[&str]| match estimate(&spec(files, 4), dir.path()) {
        Ok(_) => Vec::new(),
        Err(faults) => {
            assert!(faults.iter().all(|e| e.key() == "train.data.files"));
            let prefix = format!("{}/", dir.path().display());
            faults.iter().map(|e| e.to_string().replace(&prefix, "")).collect()
        }
    };
    assert_eq!(said(&["long.txt", "good.jsonl", "empty.txt"]), [""; 0]);
    assert_eq!(said(&["empty.txt"]), ["empty.txt is empty"]);
    assert_eq!(said(&["empty.txt", "blank.jsonl"]), ["blank.jsonl and 1 more files are empty"]);
    let all = said(&["other.jsonl", "latin.txt", "long.txt", "number.jsonl"]);
    assert_eq!(all[0], "latin.txt:2: not UTF-8 text at byte 3 of the file");
    assert!(all[1].starts_with("number.jsonl:1: invalid type: integer `3`, expected a string"), "{all:?}");
    assert_eq!(all[2], "other.jsonl:2: the object has no field `text`; it has `body`");
    assert_eq!(all.len(), 3);
    assert!(said(&["cut.jsonl"])[0].starts_with("cut.jsonl:1: EOF"));
    assert!(said(&["packed.gz"])[0].contains("unpack it first"));
    assert_eq!(said(&["*"]).len(), 4, "no more are told");
    let held_out = look_at_held_out(&spec(&["long.txt"], 4), &["number.jsonl".into()], dir.path());
    assert!(matches!(held_out[..], [DataError::BadLine { line: 1, .. }]), "{held_out:?}");
}

/// A tokenizer.json gives the same stream as the embedded tokenizer that it describes.
#[test]
fn tokenizer_file_all_the_way() {
    let dir = folder(&[("a.txt", "Größe 🦀\n\n  x"), ("b.txt", "more")]);
    for (name, text) in TextTokenizer::Bytes.hf_files() {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let bytes = train(&spec(&["*.txt"], 4), &dir).unwrap();
    let tokenizer = Tokenizer::File("tokenizer.json".into());
    let file = train(&DataSpec { tokenizer, ..spec(&["*.txt"], 4) }, &dir).unwrap();
    assert_eq!(file.digest(), bytes.digest());
    assert_eq!(
        fs::read_dir(dir.path().join(".launch-cache")).unwrap().count(),
        5,
        "two caches, two locks, .gitignore"
    );
}

/// A mixture of three corpora of different sizes.
fn mixture() -> (tempfile::TempDir, DataSpec) {
    let lines = |name: &str, n: usize| -> String {
        (0..n).map(|i| format!("{{\"text\":\"{name} {i} {}\"}}\n", "x".repeat(i % 40))).collect()
    };
    let dir =
        folder(&[("a.jsonl", &lines("a", 200)), ("b.jsonl", &lines("b", 30)), ("c.jsonl", &lines("c", 90))]);
    let part = |name: &str, weight| DataSource {
        name: name.into(),
        weight,
        ..source(vec![format!("{name}.jsonl")])
    };
    let sources = vec![part("a", 0.5), part("b", 0.2), part("c", 0.3)];
    (dir, DataSpec { sources, ..spec(&[], 16) })
}

#[test]
fn a_mixture_has_its_shares_and_each_source_its_own_epochs() {
    let (dir, spec) = mixture();
    let data = train(&spec, &dir).unwrap();
    let order = data.order(5, true);
    let lengths: Vec<u64> = order.lengths().collect();
    assert_eq!(data.len(), lengths.iter().sum::<u64>());
    let mut seen = vec![Vec::new(); 3];
    for place in 0..2000 {
        let (source, epoch, sample) = order.sample(place);
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
        train(&spec, &dir).unwrap().digest().to_string()
    };
    assert_eq!(other(&|s| s.sources.iter_mut().for_each(|s| s.weight *= 10.0)), data.digest());
    assert_ne!(other(&|s| s.sources[0].weight = 0.6), data.digest());
    assert_ne!(other(&|s| s.sources[0].name = "d".into()), data.digest());
}

#[test]
fn what_is_wrong_with_a_source_names_it() {
    let (dir, mut spec) = mixture();
    spec.sources[1].files = vec!["none*.jsonl".into()];
    let e = error(train(&spec, &dir));
    assert!(e.to_string().starts_with("source `b`: `none*.jsonl` matches no file"), "{e}");
    assert_eq!(e.key(), "train.data.mixture");
    assert!(estimate(&spec, dir.path()).unwrap_err()[0].to_string().starts_with("source `b`"));
    let (dir, mut spec) = mixture();
    spec.sources[2].field = "txt".into();
    assert!(error(train(&spec, &dir)).to_string().contains("has no field `txt`"));
    let files = ["a.jsonl".to_string()];
    let e = error(Dataset::open(&spec, Some(&files), Split::HeldOut, dir.path()));
    assert_eq!(e.key(), "train.eval.files");
}

/// Many documents of many lengths, to be opened once and cut up by the properties below.
fn corpus(pack: bool) -> (tempfile::TempDir, Dataset) {
    let text = |i: usize| (0..i * i % 97).map(|k| char::from(b'a' + (k % 26) as u8)).collect::<String>();
    let lines: String = (0..300).map(|i| format!("{{\"text\":\"{i}{}\"}}\n", text(i))).collect();
    let dir = folder(&[("a.jsonl", &lines)]);
    let data = train(&DataSpec { pack, ..spec(&["a.jsonl"], 16) }, &dir).unwrap();
    (dir, data)
}

#[test]
fn an_epoch_visits_every_sample_once_and_epochs_differ() {
    for pack in [true, false] {
        let (_dir, data) = corpus(pack);
        let n = data.len();
        let order = data.order(5, true);
        let epoch = |e: u64| (0..n).map(|i| batch(&data, &order, e * n + i, 1)).collect::<Vec<_>>();
        let plain: HashSet<Batch> = (0..n).map(|i| batch(&data, &data.order(0, false), i, 1)).collect();
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

    /// Stopped after any number of steps with one world and micro batch, resumed with another: the same samples in the same slots.
    #[test]
    fn resume_on_another_world_goes_on_exactly(
        pack: bool,
        mixed: bool,
        seed: u64,
        stop in 0u64..40,
        (before, after) in (1u64..9, 1u64..9),
        micros in (prop_oneof![Just(1usize), Just(2), Just(4)], prop_oneof![Just(1usize), Just(2), Just(4)]),
    ) {
        const GLOBAL: usize = 8;
        const STEPS: u64 = 40;
        let (_dir, data) = if mixed { let (dir, spec) = mixture(); let data = train(&spec, &dir).unwrap(); (dir, data) } else { corpus(pack) };
        let order = data.order(seed, true);
        let whole: Vec<Batch> = (0..STEPS).map(|t| batch(&data, &order, t * GLOBAL as u64, GLOBAL)).collect();
        // a rank owns a stretch of slots; the ranks' parts in rank order are the step
        let step = |t: u64, world: u64, micro: usize| {
            let slots = (GLOBAL / micro) as u64;
            let mut parts: Batch = Default::default();
            for rank in 0..world {
                for slot in rank * slots / world..(rank + 1) * slots / world {
                    let part = batch(&data, &order, t * GLOBAL as u64 + slot * micro as u64, micro);
                    parts.iter_mut().zip(part).for_each(|(whole, p)| whole.extend(p));
                }
            }
            parts
        };
        let run: Vec<Batch> = (0..STEPS)
            .map(|t| if t < stop { step(t, before, micros.0) } else { step(t, after, micros.1) })
            .collect();
        prop_assert_eq!(run, whole);
    }
}
