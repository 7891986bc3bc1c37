//! Decodes the data sources of `train.data`: one source, or a mixture of several.
use super::{
    decode::{JobDecoder, JobSection},
    readers::{
        ReadResult, choice_reader, find_nearest_name, list_reader, number_reader, out_of_range_error,
        read_text, wrong_type_error,
    },
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, make_excerpt},
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};

/// Files that are trained on, with their format, field and weight. A data source stands for
/// `data.files` or for one source of `data.mixture`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DataSource {
    /// The name in `data.mixture`; empty for the source that `data.files` defines.
    pub name: String,
    /// The relative share of the samples that come from this source. The share is this value
    /// divided by the sum of the weights of all sources.
    pub weight: f64,
    /// Paths and globs of the files, relative to the workdir.
    pub files: Vec<String>,
    /// Whether a record contains plain text or a chat.
    pub format: RecordFormat,
    /// The name of the field of a JSON lines or Parquet record that contains the text or the
    /// messages.
    pub field: String,
    /// Which tokens count for the loss.
    pub loss_on: LossTargets,
}

/// `format`: what the records of a data source contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordFormat {
    /// Plain text.
    Text,
    /// A list of messages, which a chat template renders as text.
    Chat,
}

impl RecordFormat {
    /// Returns the default of the key `field`, the name of the record field with the text or the
    /// messages.
    pub fn default_field(self) -> &'static str {
        match self {
            RecordFormat::Text => "text",
            RecordFormat::Chat => "messages",
        }
    }
}

/// `loss_on`: which tokens of a data source count for the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LossTargets {
    /// All tokens of the text.
    All,
    /// Only the tokens of the assistant's messages in a chat.
    Assistant,
}

/// The largest number of sources in a mixture.
const MAX_SOURCES: usize = 64;
/// The values of the key `format` in job.yaml, and what they mean.
const FORMATS: &[(&str, RecordFormat)] = &[("text", RecordFormat::Text), ("chat", RecordFormat::Chat)];
/// The values of the key `loss_on` in job.yaml, and what they mean.
const LOSS_ON: &[(&str, LossTargets)] = &[("assistant", LossTargets::Assistant), ("all", LossTargets::All)];
/// The path of the key that contains the mixture.
const MIXTURE: &str = "train.data.mixture";
/// The names of the keys of one source in a mixture.
const KEYS: [&str; 5] = ["files", "weight", "format", "field", "loss_on"];

/// Decodes the data sources of the section `t`, which is `train.data`. They come from `mixture` if
/// it is given, otherwise from `files`. Reports errors to `d`.
pub(super) fn decode_sources(d: &mut JobDecoder, t: &JobSection<'_>) -> Vec<DataSource> {
    let mixture = d.decode_optional(t, MIXTURE, read_mixture);
    let files = d.decode_optional(t, "train.data.files", read_files);
    let format = d.decode_value(t, "train.data.format", choice_reader(FORMATS));
    let field = d.decode_optional(t, "train.data.field", read_text);
    let loss_on = d.decode_optional(t, "train.data.loss_on", choice_reader(LOSS_ON));
    if loss_on == Some(LossTargets::Assistant) && format == RecordFormat::Text {
        d.report_error(
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
                d.report_error(codes::JOB_KEYS_CONFLICT, &key, message, help);
            }
        }
        return mixture.unwrap_or_default();
    }
    if !d.sources.is_given("train.data.files") {
        d.report_error(
            codes::JOB_KEY_REQUIRED,
            "train.data.files",
            "`train.data.files` is missing",
            "name the training text, for example `data: {files: [\"docs/**/*.md\"]}`",
        );
    }
    let files = files.unwrap_or_default();
    vec![build_data_source(String::new(), 1.0, files, format, field, loss_on)]
}

/// Builds a data source. An absent `field` or `loss_on` gets the default of the format.
fn build_data_source(
    name: String,
    weight: f64,
    files: Vec<String>,
    format: RecordFormat,
    field: Option<String>,
    loss_on: Option<LossTargets>,
) -> DataSource {
    let default = match format {
        RecordFormat::Text => LossTargets::All,
        RecordFormat::Chat => LossTargets::Assistant,
    };
    let field = field.unwrap_or_else(|| format.default_field().to_owned());
    DataSource { name, weight, files, format, field, loss_on: loss_on.unwrap_or(default) }
}

/// Reads a list of files and globs. Fails if the list is empty.
fn read_files(node: &YamlNode) -> ReadResult<Vec<String>> {
    let what = "a list of files and globs";
    let files = list_reader(what, read_text)(node)?;
    if files.is_empty() { Err(out_of_range_error(what, node)) } else { Ok(files) }
}

/// Reads `train.data.mixture`. The sources are sorted by name, so that their order in the file has
/// no effect.
fn read_mixture(node: &YamlNode) -> ReadResult<Vec<DataSource>> {
    let what = "a mapping of names to sources such as `{files: [\"a/*.jsonl\"], weight: 2}`";
    let YamlValue::Map(entries) = &node.value else { return Err(wrong_type_error(what, node)) };
    if entries.is_empty() || entries.len() > MAX_SOURCES {
        let message = format!("must have 1 to {MAX_SOURCES} sources, found {}", entries.len());
        return Err(ValueError::new(codes::JOB_VALUE_OUT_OF_RANGE, node.span, message));
    }
    let (mut read, mut errors) = (Vec::new(), Vec::new());
    for entry in entries {
        match read_mixture_source(entry) {
            Ok(source) => read.push(source),
            Err(error) => errors.push(error.in_part(&format!("source `{}`", make_excerpt(&entry.key)))),
        }
    }
    // The order of a mapping has no meaning, so the sources are sorted.
    read.sort_by(|a: &DataSource, b| a.name.cmp(&b.name));
    ValueError::merge(errors).map_or(Ok(read), Err)
}

/// Reads one source of a mixture. The error contains the mistakes of all keys of the source.
fn read_mixture_source(entry: &YamlEntry) -> ReadResult<DataSource> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if entry.key.is_empty() || entry.key.len() > 64 || !entry.key.chars().all(fits) {
        let error = ValueError::new(codes::JOB_VALUE_FORMAT, entry.key_span, "has an invalid name");
        return Err(error.with_help("names consist of up to 64 letters, digits, `.`, `_` and `-`"));
    }
    let YamlValue::Map(keys) = &entry.value.value else {
        return Err(wrong_type_error("a mapping with `files`", &entry.value));
    };
    let mut errors = Vec::new();
    for key in keys.iter().filter(|k| !KEYS.contains(&k.key.as_str())) {
        let message = format!("has the unknown key `{}`", make_excerpt(&key.key));
        let error = ValueError::new(codes::JOB_KEY_UNKNOWN, key.key_span, message);
        errors.push(match find_nearest_name(&key.key, KEYS.into_iter()) {
            Some(near) => error.with_help(format!("did you mean `{near}`?")),
            None => error.with_help(format!("the keys here are {}", KEYS.join(", "))),
        });
    }
    let mut values = SourceKeys { keys, errors };
    let given = values.read("files", read_files);
    let weight = values.read("weight", number_reader("a number above 0", |x| x > 0.0)).unwrap_or(1.0);
    let format = values.read("format", choice_reader(FORMATS)).unwrap_or(RecordFormat::Text);
    let field = values.read("field", read_text);
    let loss_on = values.read("loss_on", choice_reader(LOSS_ON));
    let mut errors = values.errors;
    if given.is_none() && !keys.iter().any(|k| k.key == "files") {
        let error = ValueError::new(codes::JOB_KEY_REQUIRED, entry.key_span, "has no `files`");
        errors.push(error.with_help("name the files that the source reads"));
    }
    if loss_on == Some(LossTargets::Assistant) && format == RecordFormat::Text {
        let message = "has `loss_on: assistant`, which requires `format: chat`";
        let error = ValueError::new(codes::JOB_KEYS_CONFLICT, entry.key_span, message);
        errors.push(error.with_help("set its `format: chat`, or remove `loss_on`"));
    }
    let source =
        build_data_source(entry.key.clone(), weight, given.unwrap_or_default(), format, field, loss_on);
    ValueError::merge(errors).map_or(Ok(source), Err)
}

/// The keys of one source of a mixture, and the errors that were found in them so far.
struct SourceKeys<'n> {
    keys: &'n [YamlEntry],
    errors: Vec<ValueError>,
}

impl SourceKeys<'_> {
    /// Reads the value of the key `name`. Returns `None` if the key is absent. If the value is
    /// wrong, records the error and returns `None`.
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
