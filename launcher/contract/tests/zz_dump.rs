#![allow(missing_docs)]
use contract::{JobSource, load_job};
fn jobs() -> Vec<String> {
    let source = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/printing.rs")).unwrap();
    let file: String = source.split("const JOBS: &[&str] = &[").nth(1).unwrap().split("\n];").next().unwrap().to_owned();
    let mut out = Vec::new();
    // string literals
    let mut chars = file.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '"' { continue }
        let mut text = String::new();
        while let Some(c) = chars.next() {
            match c {
                '"' => break,
                '\\' => match chars.next().unwrap() {
                    'n' => text.push('\n'), '"' => text.push('"'), '\\' => text.push('\\'),
                    '\n' => while chars.peek().is_some_and(|c| c.is_whitespace()) { chars.next(); },
                    o => panic!("{o}"),
                },
                c => text.push(c),
            }
        }
        out.push(text);
    }
    for e in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs")).unwrap() {
        let p = e.unwrap().path();
        if p.extension().is_some_and(|e| e == "yaml") { out.push(std::fs::read_to_string(p).unwrap()); }
    }
    out
}
#[test]
fn dump() {
    let dir = std::env::var("DUMP").unwrap();
    for (i, text) in jobs().iter().enumerate() {
        let (job, _, warnings) = load_job(JobSource::Text { name: "a.yaml".to_owned(), text: text.clone() }, &[]).unwrap_or_else(|e| panic!("{text} {e:?}"));
        let out = format!("{text}\n\n{}\n\n{:#}\n\n{}\n\n{warnings:#?}\n", serde_json::to_string(&job).unwrap(), job.to_key_json(), job.to_yaml());
        std::fs::write(format!("{dir}/{i:02}"), out).unwrap();
    }
}
