//! [`parse_open_metrics`]: a strict parser of that part of the OpenMetrics text format that launch
//! uses.
use std::collections::{BTreeMap, BTreeSet};

/// Parses a text in the format OpenMetrics 1.0. Returns the value of each sample by its name and
/// labels. Panics if the text violates a rule of the format.
#[track_caller]
pub(crate) fn parse_open_metrics(text: &str) -> BTreeMap<String, f64> {
    let (mut samples, mut families) = (BTreeMap::new(), BTreeSet::new());
    let mut family: Option<(String, String)> = None;
    let body = text.strip_suffix("# EOF\n").expect("the text ends with # EOF");
    let mut lines = body.lines();
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let name = help.split_once(' ').expect("a help text").0;
            assert!(is_name(name) && families.insert(name.to_owned()), "{line}: a family is not repeated");
            let kind = lines.next().and_then(|line| line.strip_prefix(&format!("# TYPE {name} ")));
            assert!(matches!(kind, Some("gauge" | "counter")), "{line}: {kind:?}");
            family = Some((name.to_owned(), kind.unwrap_or_default().to_owned()));
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = sample.split_once('{').expect("labels");
        let (family, kind) = family.as_ref().expect("a family");
        let suffix = if kind == "counter" { "_total" } else { "" };
        assert_eq!(name, format!("{family}{suffix}"), "a sample belongs to the family before it");
        check_labels(labels.strip_suffix('}').expect("the end of the labels"));
        let value: f64 = value.parse().expect("a number");
        assert!(value.is_finite() && (kind == "gauge" || value >= 0.0), "{line}");
        assert_eq!(samples.insert(sample.to_owned(), value), None, "{line}: a sample is not repeated");
    }
    samples
}

/// Returns whether a text is the name of a metric or of a label.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Checks the labels of a sample: different names, and values with correct escapes.
#[track_caller]
fn check_labels(labels: &str) {
    let (mut rest, mut names) = (labels, BTreeSet::new());
    loop {
        let (name, value) = rest.split_once("=\"").expect("a label");
        assert!(is_name(name) && names.insert(name), "{labels}");
        let mut escaped = false;
        let end = value.char_indices().find(|(_, c)| match (escaped, c) {
            (true, '\\' | '"' | 'n') => {
                escaped = false;
                false
            }
            (true, _) => panic!("an invalid escape in {labels}"),
            (false, '\\') => {
                escaped = true;
                false
            }
            (false, c) => *c == '"',
        });
        rest = &value[end.expect("the end of the value").0 + 1..];
        match rest.strip_prefix(',') {
            Some(more) => rest = more,
            None => return assert!(rest.is_empty(), "{labels}"),
        }
    }
}
