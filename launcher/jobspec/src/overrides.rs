//! Applies `--set path=value` arguments to the YAML tree of a job before the tree is decoded. The
//! values are therefore checked like those in the file.
use crate::{
    key_table::canonicalize_key_path,
    yaml::{
        parse::parse_yaml,
        source_map::{SourceMap, join_key_path},
        tree::{SourceSpan, YamlEntry, YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::{Diagnostic, codes::job as codes};

/// The largest number of names and indices in the path of one `--set path=value` argument.
const MAX_PATH_STEPS: usize = 16;

/// A step in the path of a `--set path=value` argument: the name of a key, or the index of a list
/// item.
enum PathStep {
    Key(String),
    Index(usize),
}

/// Applies one `--set path=value` argument to the YAML tree of a job. The value is parsed as YAML.
/// Also adds the text of the argument to `sources`, so that errors can point at it.
pub(crate) fn apply_override(
    root: &mut YamlNode,
    sources: &mut SourceMap,
    text: &str,
) -> diagnostic::Result<()> {
    let source = sources.add_override_text(text);
    let Some((path, value)) = text.split_once('=') else {
        let whole = SourceSpan { source, start: 0, end: text.len() as u32 };
        let error = invalid_override_error(whole, "is not of the form `path=value`");
        return Err(override_diagnostic(
            sources,
            None,
            error.with_help("write for example --set train.steps=50"),
        ));
    };
    let subject = canonicalize_key_path(path);
    let value = parse_override_value(value, source, path.len() as u32 + 1).map_err(|error| {
        override_diagnostic(sources, Some(&subject), error.with_part("has an invalid value:"))
    })?;
    parse_override_path(path, source)
        .and_then(|steps| set_value_at_path(root, steps, value))
        .map_err(|error| override_diagnostic(sources, Some(&subject), error))
}

/// Creates the error that a `--set path=value` argument is malformed. `span` is the wrong part of
/// the argument.
fn invalid_override_error(span: SourceSpan, message: impl Into<String>) -> ValueError {
    ValueError::new(codes::SET_ARGUMENT_INVALID, span, message)
}

/// Converts an error about the path or value of a `--set path=value` argument to a diagnostic for
/// the user. `path` is the documented path of the key, if known.
fn override_diagnostic(sources: &SourceMap, path: Option<&str>, error: ValueError) -> Diagnostic {
    let code = error.code;
    let mut list = error.into_diagnostics(sources, path, "`--set` ");
    list.next().unwrap_or_else(|| Diagnostic::error(code, code.info().summary))
}

/// Parses `text`, the value in a `--set path=value` argument, as YAML. An empty value is `null`.
/// `source` is the index of the `--set` argument in the [`SourceMap`], and `base` the byte offset
/// of `text` in the argument.
fn parse_override_value(text: &str, source: u32, base: u32) -> Result<YamlNode, ValueError> {
    if let Some(at) = text.find(|c: char| c.is_control() && !matches!(c, '\n' | '\t')) {
        let at = base + at as u32;
        let span = SourceSpan { source, start: at, end: at + 1 };
        return Err(ValueError::new(codes::JOB_CONTROL_CHARACTER, span, "control character"));
    }
    let end = base + text.len() as u32;
    let empty =
        YamlNode { span: SourceSpan { source, start: end, end }, value: YamlValue::Null, raw: String::new() };
    Ok(parse_yaml(text, source, base)?.unwrap_or(empty))
}

/// Splits the path in a `--set path=value` argument, such as `a.b[2].c`, into the names of keys and
/// the indices of list items. Each step has its span in the `--set` argument. `source` is the index
/// of the argument in the [`SourceMap`]. Fails if there are more than [`MAX_PATH_STEPS`].
fn parse_override_path(path: &str, source: u32) -> Result<Vec<(PathStep, SourceSpan)>, ValueError> {
    let mut steps = Vec::new();
    let mut at = 0;
    for part in path.split('.') {
        let span = SourceSpan { source, start: at, end: at + part.len() as u32 };
        at = span.end + 1;
        let (name, indices) = part.find('[').map_or((part, ""), |i| part.split_at(i));
        if name.trim().is_empty() {
            let error = invalid_override_error(span, "has a path with an empty part");
            return Err(error.with_help("write a path as in train.batch.global"));
        }
        steps.push((PathStep::Key(name.trim().to_owned()), span));
        for index in indices.split_inclusive(']').filter(|s| !s.trim().is_empty()) {
            let number = index.trim().strip_prefix('[').and_then(|s| s.strip_suffix(']'));
            let Some(number) = number.and_then(|s| s.parse().ok()) else {
                let error = invalid_override_error(span, "has a path with an invalid index");
                return Err(error.with_help("write an index as in files[0]"));
            };
            steps.push((PathStep::Index(number), span));
        }
        if steps.len() > MAX_PATH_STEPS {
            return Err(invalid_override_error(
                span,
                format!("has a path of more than {MAX_PATH_STEPS} parts"),
            ));
        }
    }
    Ok(steps)
}

/// Replaces or adds the value at a path (names of keys and indices of list items) in the YAML tree
/// `root` of a job. Keys that are absent are added. An index equal to the length of a list appends
/// an item.
fn set_value_at_path(
    root: &mut YamlNode,
    steps: Vec<(PathStep, SourceSpan)>,
    value: YamlNode,
) -> Result<(), ValueError> {
    let mut node = root;
    let mut path = String::new();
    let last = steps.len().saturating_sub(1);
    for (index, (step, span)) in steps.into_iter().enumerate() {
        if matches!(node.value, YamlValue::Null) && matches!(step, PathStep::Key(_)) {
            node.value = YamlValue::Map(Vec::new());
        }
        let is_map = matches!(node.value, YamlValue::Map(_));
        // The text may be a secret.
        let found = if matches!(node.value, YamlValue::Text) { "a text".to_owned() } else { node.describe() };
        match (&mut node.value, step) {
            (YamlValue::Map(entries), PathStep::Key(name)) => {
                path = canonicalize_key_path(&join_key_path(&path, &name));
                let entry = find_or_insert_entry(entries, &name, span, &path);
                if index == last {
                    (entry.key, entry.key_span) = (name, span);
                }
                node = &mut entry.value;
            }
            (YamlValue::List(items), PathStep::Index(i)) => {
                path = format!("{path}[{i}]");
                let len = items.len();
                if i == len {
                    items.push(YamlNode { span, value: YamlValue::Null, raw: String::new() });
                }
                node = items.get_mut(i).ok_or_else(|| {
                    invalid_override_error(span, format!("names item {i} of a list of {len}"))
                        .with_help(format!("items are counted from 0; [{len}] appends one"))
                })?;
            }
            (_, PathStep::Key(name)) => {
                return Err(invalid_override_error(
                    span,
                    format!("cannot set `{}` inside {found}", make_excerpt(&name)),
                ));
            }
            (_, PathStep::Index(_)) => {
                let what = if is_map { "a mapping".to_owned() } else { found };
                return Err(invalid_override_error(span, format!("has an index into {what}")));
            }
        }
    }
    *node = value;
    Ok(())
}

/// Finds the key with the path `path` in a YAML mapping under any of its names, or adds the key
/// without a value. The added entry has the name and the span of the override.
fn find_or_insert_entry<'e>(
    entries: &'e mut Vec<YamlEntry>,
    name: &str,
    span: SourceSpan,
    path: &str,
) -> &'e mut YamlEntry {
    let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
    let position = entries.iter().position(|e| canonicalize_key_path(&join_key_path(parent, &e.key)) == path);
    let position = position.unwrap_or_else(|| {
        let value = YamlNode { span, value: YamlValue::Null, raw: String::new() };
        entries.push(YamlEntry { key: name.to_owned(), key_span: span, value });
        entries.len() - 1
    });
    &mut entries[position]
}
