//! `train.data`: where text comes from, one source or a mixture of several.
use super::{
    decode::{Decoder, Table},
    read::{Read, choice, expected, list, nearest, number, text},
    tree::{Entry, Fault, Node, Value, shown},
};
use serde::{Deserialize, Serialize};

/// Files that are read in one way: all of `data`, or one part of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSource {
    /// Its name in `data.mixture`; empty for `data.files`.
    pub name: String,
    /// Share of the samples, relative to the other sources' weights.
    pub weight: f64,
    /// Files and globs, relative to the workdir.
    pub files: Vec<String>,
    pub format: Format,
    /// For files of records (JSON lines, Parquet): the field that holds the text or the messages.
    pub field: String,
    pub loss_on: LossOn,
}

/// What a record of a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// Running text.
    Text,
    /// A list of messages, written out by a chat template.
    Chat,
}

impl Format {
    /// The field of records that holds it, unless another is named.
    pub fn field(self) -> &'static str {
        match self {
            Format::Text => "text",
            Format::Chat => "messages",
        }
    }
}

/// Which tokens are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LossOn {
    All,
    /// Of a chat, what the assistant says.
    Assistant,
}

/// Most sources of one mixture.
const MOST: usize = 64;
const FORMATS: &[(&str, Format)] = &[("text", Format::Text), ("chat", Format::Chat)];
const LOSS_ON: &[(&str, LossOn)] = &[("assistant", LossOn::Assistant), ("all", LossOn::All)];
const MIXTURE: &str = "train.data.mixture";
/// What `data` and each source of a mixture can have.
const KEYS: [&str; 5] = ["files", "weight", "format", "field", "loss_on"];

/// The sources of `train.data`: those of its mixture, or its files.
pub(super) fn sources(d: &mut Decoder, t: &Table<'_>) -> Vec<DataSource> {
    let mixture = d.opt(t, MIXTURE, mixture);
    let files = d.opt(t, "train.data.files", files);
    let format = d.get(t, "train.data.format", choice(FORMATS, &[]));
    let field = d.opt(t, "train.data.field", text);
    let loss_on = d.opt(t, "train.data.loss_on", choice(LOSS_ON, &[]));
    if loss_on == Some(LossOn::Assistant) && format == Format::Text {
        d.refuse(
            "train.data.loss_on",
            "`train.data.loss_on: assistant` needs chats: text has no assistant",
            "set `train.data.format: chat`, or leave `loss_on` out",
        );
    }
    if d.map.is_given(MIXTURE) {
        for key in ["files", "format", "field", "loss_on"].map(|k| format!("train.data.{k}")) {
            if d.map.is_given(&key) {
                let message = format!("`{key}` can't stand beside `{MIXTURE}`");
                d.refuse(&key, message, "each source of the mixture has its own");
            }
        }
        return mixture.unwrap_or_default();
    }
    if !d.map.is_given("train.data.files") {
        d.refuse(
            "train.data.files",
            "`train.data.files` is missing: there is nothing to train on",
            "name text files, for example `data: {files: [\"docs/**/*.md\"]}`",
        );
    }
    let files = files.unwrap_or_default();
    vec![source(String::new(), 1.0, files, format, field, loss_on)]
}

fn source(
    name: String,
    weight: f64,
    files: Vec<String>,
    format: Format,
    field: Option<String>,
    loss_on: Option<LossOn>,
) -> DataSource {
    let default = match format {
        Format::Text => LossOn::All,
        Format::Chat => LossOn::Assistant,
    };
    let field = field.unwrap_or_else(|| format.field().to_owned());
    DataSource { name, weight, files, format, field, loss_on: loss_on.unwrap_or(default) }
}

/// At least one file or glob.
fn files(node: &Node) -> Read<Vec<String>> {
    let what = "a list of files and globs";
    let files = list(what, text)(node)?;
    if files.is_empty() { Err(expected(what, node)) } else { Ok(files) }
}

fn mixture(node: &Node) -> Read<Vec<DataSource>> {
    let what = "a mapping of names to sources such as `{files: [\"a/*.jsonl\"], weight: 2}`";
    let Value::Map(entries) = &node.value else { return Err(expected(what, node)) };
    if entries.is_empty() || entries.len() > MOST {
        return Err(Fault::at(node.span, format!("must have 1 to {MOST} sources, found {}", entries.len())));
    }
    let (mut read, mut faults) = (Vec::new(), Vec::new());
    for entry in entries {
        match part(entry) {
            Ok(source) => read.push(source),
            Err(fault) => faults.push(fault.of(&format!("source `{}`", shown(&entry.key)))),
        }
    }
    // a mapping has no order: what follows from it doesn't depend on the one that was written
    read.sort_by(|a: &DataSource, b| a.name.cmp(&b.name));
    Fault::all(faults).map_or(Ok(read), Err)
}

/// One source of a mixture; the faults of all its keys.
fn part(entry: &Entry) -> Read<DataSource> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if entry.key.is_empty() || entry.key.len() > 64 || !entry.key.chars().all(fits) {
        let fault = Fault::at(entry.key_span, "has a name that isn't one");
        return Err(fault.hint("names are up to 64 letters, digits, `.`, `_`, `-`"));
    }
    let Value::Map(keys) = &entry.value.value else {
        return Err(expected("a mapping with `files`", &entry.value));
    };
    let mut faults = Vec::new();
    for key in keys.iter().filter(|k| !KEYS.contains(&k.key.as_str())) {
        let fault = Fault::at(key.key_span, format!("has no key `{}`", shown(&key.key)));
        faults.push(match nearest(&key.key, KEYS.into_iter()) {
            Some(near) => fault.hint(format!("did you mean `{near}`?")),
            None => fault.hint(format!("the keys here are {}", KEYS.join(", "))),
        });
    }
    let mut values = Values { keys, faults };
    let given = values.read("files", files);
    let weight = values.read("weight", number("a number above 0", |x| x > 0.0)).unwrap_or(1.0);
    let format = values.read("format", choice(FORMATS, &[])).unwrap_or(Format::Text);
    let field = values.read("field", text);
    let loss_on = values.read("loss_on", choice(LOSS_ON, &[]));
    let mut faults = values.faults;
    if given.is_none() && !keys.iter().any(|k| k.key == "files") {
        faults.push(Fault::at(entry.key_span, "has no `files`: there is nothing to read"));
    }
    if loss_on == Some(LossOn::Assistant) && format == Format::Text {
        let fault = Fault::at(entry.key_span, "has `loss_on: assistant`, which needs chats");
        faults.push(fault.hint("set its `format: chat`, or leave `loss_on` out"));
    }
    let source = source(entry.key.clone(), weight, given.unwrap_or_default(), format, field, loss_on);
    Fault::all(faults).map_or(Ok(source), Err)
}

/// The values of one source, read one by one; wrong ones are collected.
struct Values<'n> {
    keys: &'n [Entry],
    faults: Vec<Fault>,
}

impl Values<'_> {
    fn read<T>(&mut self, name: &str, reader: impl Fn(&Node) -> Read<T>) -> Option<T> {
        let entry = self.keys.iter().find(|k| k.key == name)?;
        match reader(&entry.value) {
            Ok(value) => Some(value),
            Err(fault) => {
                self.faults.push(fault.of(&format!("`{name}`")));
                None
            }
        }
    }
}
