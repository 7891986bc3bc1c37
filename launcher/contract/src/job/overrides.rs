//! `--set path=value`: changes the tree before it is decoded, so that a value from there is treated like a written one.
use super::{
    keys,
    source::{SourceMap, Span, join},
    tree::{Entry, Fault, Node, Value, parse, shown},
};
use crate::problem::Problem;

/// Deepest path accepted.
const MAX_SEGMENTS: usize = 16;

/// One step of a path.
enum Step {
    Key(String),
    Index(usize),
}

/// Applies one `path=value` (value in YAML) to the tree.
pub(crate) fn apply(root: &mut Node, map: &mut SourceMap, text: &str) -> Result<(), Box<Problem>> {
    let source = map.add_override(text);
    let whole = Span { source, start: 0, end: text.len() as u32 };
    let problem = |map: &SourceMap, path: &str, fault: Fault| {
        Box::new(Problem {
            path: path.to_owned(),
            place: map.place(fault.span.unwrap_or(whole)),
            message: format!("`--set` {}", fault.message),
            hint: fault.hint,
        })
    };
    let Some((path, value)) = text.split_once('=') else {
        let fault = Fault::at(whole, "needs `path=value`").hint("for example --set train.steps=50");
        return Err(problem(map, "", fault));
    };
    let value = parse_value(value, source, path.len() as u32 + 1).map_err(|fault| {
        problem(map, path, Fault { message: format!("has a bad value: {}", fault.message), ..fault })
    })?;
    let steps = parse_path(path, source).map_err(|fault| problem(map, path, fault))?;
    set(root, steps, value).map_err(|fault| problem(map, path, fault))
}

fn parse_value(text: &str, source: u32, base: u32) -> Result<Node, Fault> {
    if let Some(at) = text.find(|c: char| c.is_control() && !matches!(c, '\n' | '\t')) {
        let at = base + at as u32;
        return Err(Fault::at(Span { source, start: at, end: at + 1 }, "a control character"));
    }
    let end = base + text.len() as u32;
    let nothing = Node { span: Span { source, start: end, end }, value: Value::Null, raw: String::new() };
    Ok(parse(text, source, base)?.unwrap_or(nothing))
}

/// `a.b[2].c` → its steps and where each is written.
fn parse_path(path: &str, source: u32) -> Result<Vec<(Step, Span)>, Fault> {
    let mut steps = Vec::new();
    let mut at = 0;
    for part in path.split('.') {
        let span = Span { source, start: at, end: at + part.len() as u32 };
        at = span.end + 1;
        let (name, indices) = part.find('[').map_or((part, ""), |i| part.split_at(i));
        if name.trim().is_empty() {
            return Err(
                Fault::at(span, "has a path with an empty part").hint("a path is like train.batch.global")
            );
        }
        steps.push((Step::Key(name.trim().to_owned()), span));
        for index in indices.split_inclusive(']').filter(|s| !s.trim().is_empty()) {
            let number = index.trim().strip_prefix('[').and_then(|s| s.strip_suffix(']'));
            let Some(number) = number.and_then(|s| s.parse().ok()) else {
                return Err(Fault::at(span, "has a path with a bad index").hint("an index is like files[0]"));
            };
            steps.push((Step::Index(number), span));
        }
        if steps.len() > MAX_SEGMENTS {
            return Err(Fault::at(span, format!("has a path of more than {MAX_SEGMENTS} parts")));
        }
    }
    Ok(steps)
}

fn set(root: &mut Node, steps: Vec<(Step, Span)>, value: Node) -> Result<(), Fault> {
    let mut node = root;
    let mut path = String::new();
    for (step, span) in steps {
        if matches!(node.value, Value::Null) && matches!(step, Step::Key(_)) {
            node.value = Value::Map(Vec::new());
        }
        let (is_map, found) = (matches!(node.value, Value::Map(_)), node.found());
        match (&mut node.value, step) {
            (Value::Map(entries), Step::Key(name)) => {
                path = keys::canonical(&join(&path, &name));
                node = entry(entries, name, span, &path);
            }
            (Value::List(items), Step::Index(i)) => {
                path = format!("{path}[{i}]");
                let len = items.len();
                if i == len {
                    items.push(Node { span, value: Value::Null, raw: String::new() });
                }
                node = items.get_mut(i).ok_or_else(|| {
                    Fault::at(span, format!("names item {i} of a list of {len}"))
                        .hint(format!("items count from 0; [{len}] adds one"))
                })?;
            }
            (_, Step::Key(name)) => {
                return Err(Fault::at(span, format!("can't set `{}` inside {found}", shown(&name))));
            }
            (_, Step::Index(_)) => {
                let what = if is_map { "a mapping".to_owned() } else { found };
                return Err(Fault::at(span, format!("has an index into {what}")));
            }
        }
    }
    *node = value;
    Ok(())
}

/// The value of the key with this documented path, whatever name it was given under; made when absent.
fn entry<'e>(entries: &'e mut Vec<Entry>, name: String, span: Span, path: &str) -> &'e mut Node {
    let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
    let position = entries.iter().position(|e| keys::canonical(&join(parent, &e.key)) == path);
    let position = position.unwrap_or_else(|| {
        let value = Node { span, value: Value::Null, raw: String::new() };
        entries.push(Entry { key: name.clone(), key_span: span, value });
        entries.len() - 1
    });
    let entry = &mut entries[position];
    entry.key = name;
    entry.key_span = span;
    &mut entry.value
}
