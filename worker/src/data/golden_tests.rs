//! Chats and Parquet files beside what transformers and pyarrow make of them (tests/golden/data).
use super::{
    cache::NO_LOSS,
    chat::{Chat, ChatTemplate},
    documents::{Choice, Part, Reading, read_file},
    *,
};
use contract::job::{LossOn, Tokenizer};
use minijinja::Value;
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/data").join(name)
}

fn tokenizer() -> TextTokenizer {
    TextTokenizer::open(&Tokenizer::File(golden("tokenizer.json")), Path::new("/")).unwrap()
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    template: String,
    chat: GoldenChat,
    text: Option<String>,
    tokens: Option<Vec<u32>>,
    mask: Option<Vec<u32>>,
    refused: Option<String>,
}

#[derive(serde::Deserialize)]
struct GoldenChat {
    messages: Value,
    tools: Option<Value>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(golden("chats.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 40);
    cases
}

fn template(source: &str, loss_on: LossOn) -> ChatTemplate {
    ChatTemplate::new(source, tokenizer().special_tokens(), loss_on).unwrap()
}

fn chat(case: &Case) -> Chat {
    Chat { messages: case.chat.messages.clone(), tools: case.chat.tools.clone() }
}

#[test]
fn chats_are_written_tokenized_and_marked_as_by_transformers() {
    let tokenizer = tokenizer();
    for case in cases() {
        let written = template(&case.template, LossOn::Assistant).write(&chat(&case));
        let Some(text) = &case.text else {
            let why = written.unwrap_err();
            assert!(why.contains(case.refused.as_ref().unwrap()), "{}: {why}", case.name);
            continue;
        };
        let marked = written.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(&marked.text, text, "{}", case.name);
        let mut tokens = Vec::new();
        tokenizer.encode_marked(&marked, &mut tokens).unwrap();
        let ids: Vec<u32> = tokens.iter().map(|t| t & !NO_LOSS).collect();
        assert_eq!(&ids, case.tokens.as_ref().unwrap(), "{}", case.name);
        let mask: Vec<u32> = tokens.iter().map(|t| u32::from(t & NO_LOSS == 0)).collect();
        assert_eq!(&mask, case.mask.as_ref().unwrap(), "{}", case.name);
        let all = template(&case.template, LossOn::All).write(&chat(&case)).unwrap();
        assert_eq!(
            (&all.text, all.targets),
            (text, std::iter::once(0..text.len()).collect::<Vec<_>>()),
            "{}",
            case.name
        );
    }
}

/// Without marks, what an assistant message adds is found by writing fewer messages: at least what the marks say.
#[test]
fn without_marks_the_prefixes_tell() {
    let mut tried = 0;
    for case in cases().iter().filter(|c| c.text.is_some()) {
        let plain = case.template.replace("{%- generation %}", "{%- if true %}{%- endif %}");
        let plain = plain.replace("{%- endgeneration %}", "{%- if true %}{%- endif %}");
        if plain.contains("generation %}") {
            continue;
        }
        let marked = template(&case.template, LossOn::Assistant).write(&chat(case)).unwrap();
        let found = template(&plain, LossOn::Assistant).write(&chat(case));
        // these end no assistant message by themselves, or begin the prompt elsewhere: refused or found, never wrong
        let found = found.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(found.text, marked.text);
        assert_eq!(found.targets.len(), marked.targets.len(), "{}", case.name);
        for (found, marked_range) in found.targets.iter().zip(&marked.targets) {
            let said = marked.text[marked_range.clone()].trim();
            assert!(
                found.start <= marked_range.start && marked.text[found.clone()].contains(said),
                "{}",
                case.name
            );
            // nothing of another message
            assert!(
                found.len() <= marked_range.len() + 12,
                "{}: {:?}",
                case.name,
                &marked.text[found.clone()]
            );
        }
        tried += 1;
    }
    assert!(tried >= 15, "{tried}");
}

#[test]
fn a_template_that_writes_the_past_differently_is_refused() {
    let source =
        "{% for m in messages %}{{ m.role }}{% if loop.last %}: {{ m.content }}{% endif %};{% endfor %}";
    let talk = &cases()[0];
    let why = template(source, LossOn::Assistant).write(&chat(talk)).unwrap_err();
    assert!(why.contains("message 2") && why.contains("{% generation %}"), "{why}");
    assert!(template(source, LossOn::All).write(&chat(talk)).is_ok());
}

fn write(messages: &str) -> Result<String, String> {
    let messages = serde_json::from_str(messages).unwrap();
    template(&cases()[0].template, LossOn::Assistant).write(&Chat { messages, tools: None }).map(|m| m.text)
}

#[test]
fn wrong_messages_are_named() {
    for (messages, said) in [
        ("3", "the messages aren't a list"),
        ("\"user\"", "the messages aren't a list"),
        ("[]", "the messages aren't a list of at least one"),
        ("[\"a\"]", "message 1 has no `role`"),
        (r#"[{"role":"user","content":"a"},{"content":"b"}]"#, "message 2 has no `role`"),
        (r#"[{"role":"user","content":"a"}]"#, "the assistant says nothing"),
        (r#"[{"role":"assistant","content":"a\udb9c\udca1"}]"#, "stands for a mark"),
        (r#"[{"role":"assistant"}]"#, "the chat template's line"),
    ] {
        let why = write(messages).unwrap_err();
        assert!(why.contains(said), "{messages}: {why}");
    }
}

#[test]
fn templates_without_end_are_ended() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let why = template(endless, LossOn::All).write(&chat(&cases()[0])).unwrap_err();
    assert!(why.contains("fuel"), "{why}");
    let loops = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(template(loops, LossOn::All).write(&chat(&cases()[0])).is_err());
    let open = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endif %}{% endfor %}";
    let why = template(open, LossOn::Assistant).write(&chat(&cases()[0])).unwrap_err();
    assert!(why.contains("don't pair"), "{why}");
    assert!(ChatTemplate::new("{% for %}", Vec::new(), LossOn::All).is_err());
}

/// Documents of a file, the targets of chats in brackets.
fn documents(path: &Path, reading: Reading) -> Result<Vec<String>, DataError> {
    let mut out = Vec::new();
    let hash = read_file(path, reading, Choice::All, &mut |part| {
        match part {
            Part::Text(text) => out.push(text),
            Part::Marked(m) => {
                let said: Vec<&str> = m.targets.iter().map(|r| &m.text[r.clone()]).collect();
                out.push(said.join("|"));
            }
            Part::End => {}
        }
        Ok(())
    })?;
    assert_eq!(hash, blake3::hash(&std::fs::read(path).unwrap()));
    Ok(out)
}

#[test]
fn parquet_holds_what_pyarrow_wrote() {
    let text = std::fs::read_to_string(golden("texts.json")).unwrap();
    let want: Vec<String> = serde_json::from_str(&text).unwrap();
    for name in ["snappy.parquet", "zstd_v2.parquet", "plain_large.parquet"] {
        let got = documents(&golden(name), Reading { field: "text", chat: None }).unwrap();
        assert_eq!(got, want, "{name}");
    }
    let template = template(&cases()[0].template, LossOn::Assistant);
    let chats = documents(&golden("chats.parquet"), Reading { field: "messages", chat: Some(&template) });
    let said: Vec<String> = chats.unwrap().iter().map(|c| c.replace("<|im_end|>", "")).collect();
    assert_eq!(said, ["4, of course.|Sure:\n  1. é\n  2. 🦀 \n", "4, of course.", "4, of course."]);
}

#[test]
fn wrong_parquet_files_are_named() {
    let said = |name: &str, field: &str| {
        documents(&golden(name), Reading { field, chat: None }).unwrap_err().to_string()
    };
    assert!(said("snappy.parquet", "txt").ends_with("it has no column `txt`; it has `id`, `text`, `score`"));
    assert!(said("snappy.parquet", "id").ends_with(":1: the column `id` is not text"));
    let template = template(&cases()[0].template, LossOn::Assistant);
    let chat = Reading { field: "text", chat: Some(&template) };
    let why = documents(&golden("snappy.parquet"), chat).unwrap_err().to_string();
    assert!(why.contains(":1: the messages aren't a list"), "{why}");
    let why = documents(&golden("README.md"), chat).unwrap_err().to_string();
    assert!(why.contains("running text, not chats"), "{why}");
}

/// Each byte of a file changed in turn: the same texts, other texts of a checked page, or an error; never a panic that gets out.
#[test]
fn damaged_parquet_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.parquet");
    let good = std::fs::read(golden("chats.parquet")).unwrap();
    let template = template(&cases()[0].template, LossOn::Assistant);
    let mut refused = 0;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x41;
        std::fs::write(&path, &bad).unwrap();
        refused +=
            usize::from(documents(&path, Reading { field: "messages", chat: Some(&template) }).is_err());
    }
    assert!(refused > good.len() / 4, "{refused} of {}", good.len());
    for cut in [0, 4, 8, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..cut]).unwrap();
        assert!(documents(&path, Reading { field: "messages", chat: Some(&template) }).is_err());
    }
}

#[test]
fn packed_files_say_how_to_unpack() {
    let dir = tempfile::tempdir().unwrap();
    for (name, said) in [("a.jsonl.gz", "gunzip"), ("a.txt.ZST", "zstd -d"), ("a.arrow", "Parquet")] {
        let path = dir.path().join(name);
        std::fs::write(&path, "x").unwrap();
        let why = documents(&path, Reading { field: "text", chat: None }).unwrap_err().to_string();
        assert!(why.contains(said), "{why}");
    }
}

/// The whole way: labels only where the assistant speaks, each of its tokens a target once.
#[test]
fn loss_is_on_the_assistants_part_alone() {
    let dir = tempfile::tempdir().unwrap();
    let case = &cases()[0];
    std::fs::write(dir.path().join("t.jinja"), &case.template).unwrap();
    let text = std::fs::read_to_string(golden("chats.json")).unwrap();
    let raw: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let line = raw[0]["chat"].to_string();
    std::fs::write(dir.path().join("a.jsonl"), format!("{line}\n{line}\n")).unwrap();
    for pack in [true, false] {
        let spec = DataSpec {
            sources: vec![DataSource {
                name: String::new(),
                weight: 1.0,
                files: vec!["a.jsonl".into()],
                format: Format::Chat,
                field: "messages".into(),
                loss_on: LossOn::Assistant,
            }],
            chat_template: Some("t.jinja".into()),
            tokenizer: Tokenizer::File(golden("tokenizer.json")),
            seq_len: 10,
            pack,
            shuffle: false,
            held_out: 0.0,
            cache: "cache".into(),
        };
        let data = Dataset::open(&spec, None, Split::Train, dir.path()).unwrap();
        let order = data.order(0, false);
        let (tokens, mask) = (case.tokens.as_ref().unwrap(), case.mask.as_ref().unwrap());
        let assistant = mask.iter().filter(|&&m| m == 1).count() as u64;
        assert_eq!(data.tokens(), 2 * (tokens.len() as u64 + 1));
        let [mut t, mut l, mut s] = [0; 3].map(|_| vec![0; 10]);
        let mut labels = Vec::new();
        for i in 0..data.len() {
            data.fill(&order, i, 1, &mut t, &mut l, &mut s);
            assert!(t.iter().all(|&t| t < data.vocab_size()));
            let here: Vec<u32> = l.iter().copied().filter(|&l| l != IGNORE).collect();
            assert_eq!(data.count_targets(&order, i, 1), here.len() as u64);
            labels.extend(here);
        }
        let want: Vec<u32> = tokens.iter().zip(mask).filter(|(_, m)| **m == 1).map(|(t, _)| *t).collect();
        assert_eq!(labels.len() as u64, 2 * assistant, "pack {pack}");
        assert_eq!(labels, [want.clone(), want].concat());
    }
}
