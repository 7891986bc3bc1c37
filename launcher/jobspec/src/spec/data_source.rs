//! [`DataSource`]: training files with their format and weight, either all data of a job
//! (`train.data.files`) or one source of `train.data.mixture`.
use crate::{
    keys::{
        choice::{choice_type, choices},
        collections::described_list_type,
        decoder::{JobDecoder, JobSection},
        job_values::JobValues,
        key::Key,
        key_info::{Condition, KeyDefault, KeyInfo, Rule},
        numbers::positive_number_type,
        record::record_type,
        section::{
            FieldContext, FieldDeclaration, Section, extract_first_paragraph, field_without_key, section,
        },
        text::text_type,
        value_type::{ReadResult, ValueType, wrong_type_error},
    },
    yaml::{
        format::YamlText,
        tree::{YamlEntry, YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde_json::json;

section! {
    /// Files that are trained on, with their format, field and weight. A data source stands for
    /// `data.files` or for one source of `data.mixture`.
    pub struct DataSource at "";
    /// The name in `data.mixture`; empty for the source that `data.files` defines.
    pub name: String = field_without_key();
    /// The relative share of the samples that come from this source.
    ///
    /// The share is this value divided by the sum of the weights of all sources.
    pub weight: f64 = Key::new(positive_number_type(), "1");
    /// The training text.
    ///
    /// The items are paths and globs of files, relative to the workdir.
    pub files: Vec<String> = Key::required(
        described_list_type("list of paths and globs", "a list of files and globs", text_type()).not_empty(),
    );
    /// The content of a record.
    pub format: RecordFormat = Key::new(choice_type(), "text");
    /// The name of the field with the text or the messages.
    ///
    /// The field belongs to a JSON lines or Parquet record.
    pub field: String = Key::computed(text_type(), "`text`; `messages` for chats", |source: &DataSource, _| {
        source.format.default_field().to_owned()
    });
    /// The tokens that count for the loss.
    pub loss_on: LossTargets =
        Key::computed(choice_type(), "`assistant` for chats, else `all`", |source: &DataSource, _| {
            source.format.default_loss_targets()
        }).with_rules(LOSS_RULES);
}

/// The rule that `loss_on: assistant` requires `format: chat`, because only chats have messages of
/// an assistant.
const LOSS_RULES: &[Rule] =
    &[Rule::conflict(&[Condition::NoneOf("format", &["chat"]), Condition::OneOf("loss_on", &["assistant"])])
        .with_message("has `loss_on: assistant`, which requires `format: chat`")
        .with_help("set its `format: chat`, or remove `loss_on`")];

choices! {
    /// `format`: what the records of a data source contain.
    pub enum RecordFormat {
        /// Plain text.
        Text = "text",
        /// A list of messages, which a chat template renders as text.
        Chat = "chat",
    }
}

impl RecordFormat {
    /// Returns the default of the key `field`, which names the JSON field or column that contains a
    /// record's text (`text`) or its messages (`messages`).
    pub fn default_field(self) -> &'static str {
        match self {
            RecordFormat::Text => "text",
            RecordFormat::Chat => "messages",
        }
    }

    /// Returns the default of the key `loss_on`: the loss of plain text covers all tokens, and the
    /// loss of chats covers the assistant's tokens.
    fn default_loss_targets(self) -> LossTargets {
        match self {
            RecordFormat::Text => LossTargets::All,
            RecordFormat::Chat => LossTargets::Assistant,
        }
    }
}

choices! {
    /// `loss_on`: which tokens of a data source count for the loss.
    #[derive(Default)]
    pub enum LossTargets {
        /// Only the tokens of the assistant's messages in a chat.
        Assistant = "assistant",
        /// All tokens of the text.
        All = "all" is default,
    }
}

/// The largest number of data sources in `train.data.mixture`. A larger mixture is rejected.
const MAX_SOURCES: usize = 64;
/// The path of the key that lists the files of a single data source.
const FILES_KEY: &str = "train.data.files";
const MIXTURE_KEY: &str = "train.data.mixture";

/// The rule that the keys of a single data source, such as `train.data.files`, cannot be combined
/// with `train.data.mixture`.
const FILES_RULES: &[Rule] = &[Rule::conflict(&[Condition::Given(MIXTURE_KEY)])
    .with_help("move the key into the sources of the mixture")];
/// The rule that rejects `train.data.loss_on: assistant` unless the training data consists of chats
/// (`train.data.format: chat`). [`LOSS_RULES`] is the rule for sources of a mixture.
const FILES_LOSS_RULES: &[Rule] = &[Rule::conflict(&[
    Condition::NoneOf("train.data.format", &["chat"]),
    Condition::OneOf("train.data.loss_on", &["assistant"]),
])
.with_message("`train.data.loss_on: assistant` requires `train.data.format: chat`")
.with_help("set `train.data.format: chat`, or remove `loss_on`")];

/// The declaration of the job's list of data sources, which job.yaml contains as `train.data.files`
/// (one source) or `train.data.mixture` (several).
pub(crate) struct DataSourcesDeclaration;

/// Declares the keys of job.yaml that name the training data: `train.data.files` with its format
/// and related keys, and `train.data.mixture`.
pub(crate) fn declare_data_sources() -> DataSourcesDeclaration {
    DataSourcesDeclaration
}

impl<S> FieldDeclaration<S> for DataSourcesDeclaration {
    type Value = Vec<DataSource>;

    fn declare(&self, context: FieldContext, table: &mut Vec<KeyInfo>) {
        let mut keys = Vec::new();
        DataSource::declare(&mut keys);
        for key in keys.into_iter().filter(|key| key.path != "weight") {
            let loss_rules = if key.path == "loss_on" { FILES_LOSS_RULES } else { &[] };
            let default = match key.default {
                KeyDefault::Required => KeyDefault::Computed("required without `mixture`"),
                default => default,
            };
            let rules = FILES_RULES.iter().chain(loss_rules).copied().collect();
            table.push(KeyInfo { path: format!("{}.{}", context.section, key.path), default, rules, ..key });
        }
        let mixture = mixture_type();
        table.push(KeyInfo {
            path: MIXTURE_KEY.to_owned(),
            accepts: mixture.accepts,
            default: KeyDefault::Computed("none"),
            aliases: &[],
            meaning: extract_first_paragraph("The sources in place of `files`."),
            reloadable: false,
            deprecated: None,
            deprecated_values: &[],
            rules: Vec::new(),
            schema: mixture.schema,
        });
    }

    fn decode(
        &self,
        _context: FieldContext,
        d: &mut JobDecoder,
        section: &JobSection<'_>,
    ) -> Vec<DataSource> {
        let outer = std::mem::take(&mut d.unset);
        let mut source = DataSource::decode(d, section);
        let unset = std::mem::replace(&mut d.unset, outer);
        source.fill_defaults(&unset, &JobValues::default());
        let mixture = d.read_key(section, "mixture", &[], &mixture_type());
        if d.sources.is_key_given(MIXTURE_KEY) {
            return mixture.unwrap_or_default();
        }
        if !d.sources.is_key_given(FILES_KEY) {
            let help = "name the training text, for example `data: {files: [\"docs/**/*.md\"]}`";
            d.report_error(codes::JOB_KEY_REQUIRED, FILES_KEY, format!("`{FILES_KEY}` is missing"), help);
        }
        vec![source]
    }

    fn print(&self, context: FieldContext, _owner: &S, sources: &Vec<DataSource>, values: &mut JobValues) {
        match &sources[..] {
            [only] if only.name.is_empty() => {
                let lines = list_source_values(only).into_iter().filter(|(name, _)| name != "weight");
                lines.for_each(|(name, line)| values.add(format!("{}.{name}", context.section), line));
            }
            sources => {
                let block = sources
                    .iter()
                    .map(|source| (source.name.clone(), YamlText::Block(list_source_values(source))));
                values.add(MIXTURE_KEY.to_owned(), YamlText::Block(block.collect()));
            }
        }
    }
}

/// Lists the keys of the data source `source`, such as `files` and `format`, each with its value as
/// YAML.
fn list_source_values(source: &DataSource) -> Vec<(String, YamlText)> {
    let mut values = JobValues::default();
    source.print(&mut values);
    values.list_paths_and_values().into_iter().map(|(name, line)| (name, YamlText::Line(line))).collect()
}

/// Returns the parser and printer ([`ValueType`]) for `train.data.mixture`: a mapping of names to
/// data sources.
fn mixture_type() -> ValueType<Vec<DataSource>> {
    let source = record_type::<DataSource>("source", EXPECTED_SOURCE).schema;
    let schema = json!({
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z0-9._-]{1,64}$"},
        "additionalProperties": source,
        "minProperties": 1,
        "maxProperties": MAX_SOURCES,
    });
    let accepts = "mapping of names to `{files, weight, format, field, loss_on}`";
    ValueType::new(accepts, schema, read_mixture, |_| None)
}

/// The phrase by which error messages describe the values of a data source in `train.data.mixture`.
const EXPECTED_SOURCE: &str = "a mapping with `files`";

/// Reads the value of `train.data.mixture`, a mapping of names to data sources. The sources are
/// sorted by name, because the order of a mapping has no meaning.
fn read_mixture(node: &YamlNode) -> ReadResult<Vec<DataSource>> {
    let what = "a mapping of names to sources such as `{files: [\"a/*.jsonl\"], weight: 2}`";
    let YamlValue::Map(entries) = &node.value else { return Err(wrong_type_error(what, node)) };
    if entries.is_empty() || entries.len() > MAX_SOURCES {
        let message = format!("must have 1 to {MAX_SOURCES} sources, found {}", entries.len());
        return Err(ValueError::new(codes::JOB_VALUE_OUT_OF_RANGE, node.span, message));
    }
    let (mut read, mut errors) = (Vec::new(), Vec::new());
    for entry in entries {
        match read_named_source(entry) {
            Ok(source) => read.push(source),
            Err(error) => errors.push(error.with_part(&format!("source `{}`", make_excerpt(&entry.key)))),
        }
    }
    read.sort_by(|a: &DataSource, b| a.name.cmp(&b.name));
    ValueError::merge(errors).map_or(Ok(read), Err)
}

/// Reads one source of `train.data.mixture` and its name.
fn read_named_source(entry: &YamlEntry) -> ReadResult<DataSource> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if entry.key.is_empty() || entry.key.len() > 64 || !entry.key.chars().all(fits) {
        let error = ValueError::new(codes::JOB_VALUE_FORMAT, entry.key_span, "has an invalid name");
        return Err(error.with_help("names consist of up to 64 letters, digits, `.`, `_` and `-`"));
    }
    let source = record_type::<DataSource>("source", EXPECTED_SOURCE).read(&entry.value)?;
    Ok(DataSource { name: entry.key.clone(), ..source })
}
