//! The training text in `train.data`: one source, or a mixture of several.
use super::{
    decode::{Decoder, Section},
    read::{ReadResult, choice, list, nearest_name, number, out_of_range, text, wrong_type},
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, excerpt},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};

/// Files that are read in the same way: those of `data.files`, or one source of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSource {
    /// The name in `data.mixture`; empty for `data.files`.
    pub name: String,
    /// The share of the samples, relative to the weights of the other sources.
    pub weight: f64,
    /// Files and globs, relative to the workdir.
    pub files: Vec<String>,
    /// What a record is.
    pub format: Format,
    /// The field of a record (JSON lines, Parquet) that contains the text or the messages.
    pub field: String,
    /// Which tokens are targets.
    pub loss_on: LossOn,
}

/// What a record of a source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// Plain text.
    Text,
    /// A list of messages, which a chat template turns into text.
    Chat,
}

impl Format {
    /// The default field of records.
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
    /// All tokens.
    All,
    /// The tokens of the assistant's messages in a chat.
    Assistant,
}

/// Most sources in a mixture.
const MAX_SOURCES: usize = 64;
const FORMATS: &[(&str, Format)] = &[("text", Format::Text), ("chat", Format::Chat)];
const LOSS_ON: &[(&str, LossOn)] = &[("assistant", LossOn::Assistant), ("all", LossOn::All)];
const MIXTURE: &str = "train.data.mixture";
/// The keys of a source of a mixture.
const KEYS: [&str; 5] = ["files", "weight", "format", "field", "loss_on"];

/// Decodes the sources of `train.data`: those of its mixture, or its files.
pub(super) fn decode_sources(d: &mut Decoder, t: &Section<'_>) -> Vec<DataSource> {
    let mixture = d.get_optional(t, MIXTURE, mixture);
    let files = d.get_optional(t, "train.data.files", files);
    let format = d.get(t, "train.data.format", choice(FORMATS));
    let field = d.get_optional(t, "train.data.field", text);
    let loss_on = d.get_optional(t, "train.data.loss_on", choice(LOSS_ON));
    if loss_on == Some(LossOn::Assistant) && format == Format::Text {
        d.reject(
            codes::JOB_KEYS_CONFLICT,
            "train.data.loss_on",
            "`train.data.loss_on: assistant` requires `train.data.format: chat`",
            "set `train.data.format: chat`, or remove `loss_on`",
        );
    }
    if d.sources.is_given(MIXTURE) {
        for key in ["files", "format", "field", "loss_on"].map(|k| format!("train.data.{k}")) {
            if d.sources.is_given(&key) {
                let message = format!("`{key}` and `{MIXTURE}` are both given");
                let help = "move the key into the sources of the mixture";
                d.reject(codes::JOB_KEYS_CONFLICT, &key, message, help);
            }
        }
        return mixture.unwrap_or_default();
    }
    if !d.sources.is_given("train.data.files") {
        d.reject(
            codes::JOB_KEY_REQUIRED,
            "train.data.files",
            "`train.data.files` is missing",
            "name the training text, for example `data: {files: [\"docs/**/*.md\"]}`",
        );
    }
    let files = files.unwrap_or_default();
    vec![with_defaults(String::new(), 1.0, files, format, field, loss_on)]
}

/// A source with the defaults of its format.
fn with_defaults(
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

/// Reads a list of at least one file or glob.
fn files(node: &YamlNode) -> ReadResult<Vec<String>> {
    let what = "a list of files and globs";
    let files = list(what, text)(node)?;
    if files.is_empty() { Err(out_of_range(what, node)) } else { Ok(files) }
}

/// Reads `train.data.mixture`. The sources are sorted by name, because a mapping has no order.
fn mixture(node: &YamlNode) -> ReadResult<Vec<DataSource>> {
    let what = "a mapping of names to sources such as `{files: [\"a/*.jsonl\"], weight: 2}`";
    let YamlValue::Map(entries) = &node.value else { return Err(wrong_type(what, node)) };
    if entries.is_empty() || entries.len() > MAX_SOURCES {
        let message = format!("must have 1 to {MAX_SOURCES} sources, found {}", entries.len());
        return Err(ValueError::new(codes::JOB_VALUE_OUT_OF_RANGE, node.span, message));
    }
    let (mut read, mut errors) = (Vec::new(), Vec::new());
    for entry in entries {
        match mixture_source(entry) {
            Ok(source) => read.push(source),
            Err(error) => errors.push(error.in_part(&format!("source `{}`", excerpt(&entry.key)))),
        }
    }
    // The order of a mapping has no meaning, so nothing may depend on it.
    read.sort_by(|a: &DataSource, b| a.name.cmp(&b.name));
    ValueError::merge(errors).map_or(Ok(read), Err)
}

/// Reads one source of a mixture; reports the errors of all its keys.
fn mixture_source(entry: &YamlEntry) -> ReadResult<DataSource> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if entry.key.is_empty() || entry.key.len() > 64 || !entry.key.chars().all(fits) {
        let error = ValueError::new(codes::JOB_VALUE_FORMAT, entry.key_span, "has an invalid name");
        return Err(error.with_help("names consist of up to 64 letters, digits, `.`, `_` and `-`"));
    }
    let YamlValue::Map(keys) = &entry.value.value else {
        return Err(wrong_type("a mapping with `files`", &entry.value));
    };
    let mut errors = Vec::new();
    for key in keys.iter().filter(|k| !KEYS.contains(&k.key.as_str())) {
        let message = format!("has the unknown key `{}`", excerpt(&key.key));
        let error = ValueError::new(codes::JOB_KEY_UNKNOWN, key.key_span, message);
        errors.push(match nearest_name(&key.key, KEYS.into_iter()) {
            Some(near) => error.with_help(format!("did you mean `{near}`?")),
            None => error.with_help(format!("the keys here are {}", KEYS.join(", "))),
        });
    }
    let mut values = Values { keys, errors };
    let given = values.read("files", files);
    let weight = values.read("weight", number("a number above 0", |x| x > 0.0)).unwrap_or(1.0);
    let format = values.read("format", choice(FORMATS)).unwrap_or(Format::Text);
    let field = values.read("field", text);
    let loss_on = values.read("loss_on", choice(LOSS_ON));
    let mut errors = values.errors;
    if given.is_none() && !keys.iter().any(|k| k.key == "files") {
        let error = ValueError::new(codes::JOB_KEY_REQUIRED, entry.key_span, "has no `files`");
        errors.push(error.with_help("name the files that the source reads"));
    }
    if loss_on == Some(LossOn::Assistant) && format == Format::Text {
        let message = "has `loss_on: assistant`, which requires `format: chat`";
        let error = ValueError::new(codes::JOB_KEYS_CONFLICT, entry.key_span, message);
        errors.push(error.with_help("set its `format: chat`, or remove `loss_on`"));
    }
    let source = with_defaults(entry.key.clone(), weight, given.unwrap_or_default(), format, field, loss_on);
    ValueError::merge(errors).map_or(Ok(source), Err)
}

/// The keys of a source, and the errors of those that were read.
struct Values<'n> {
    keys: &'n [YamlEntry],
    errors: Vec<ValueError>,
}

impl Values<'_> {
    /// Reads the value of a key; `None` when it is absent or wrong.
    fn read<T>(&mut self, name: &str, reader: impl Fn(&YamlNode) -> ReadResult<T>) -> Option<T> {
        let entry = self.keys.iter().find(|k| k.key == name)?;
        match reader(&entry.value) {
            Ok(value) => Some(value),
            Err(error) => {
                self.errors.push(error.in_part(&format!("`{name}`")));
                None
            }
        }
    }
}
