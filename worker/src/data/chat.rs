//! Chats to text: a list of messages written out by the tokenizer's chat template, and which of it the assistant says.
//!
//! A template is Jinja as `transformers` sets it up: `trim_blocks`, `lstrip_blocks`, `raise_exception`, Python's string methods, and `tojson` as Python writes it.
//! `strftime_now` isn't there: what a template writes must not depend on the day.
//!
//! The assistant's part is what stands between `{% generation %}` and `{% endgeneration %}`. A template without these marks is asked again with fewer messages: what an
//! assistant message adds to the text up to its generation prompt is the assistant's. Where that isn't a prefix of the whole, the record is refused.
use super::{error::DataError, tokenize::TextTokenizer};
use contract::job::LossOn;
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Kwargs};
use regex::Regex;
use std::{collections::BTreeMap, fmt::Write as _, ops::Range, path::Path};

/// Largest template, bytes.
const MAX_TEMPLATE: usize = 1 << 20;
/// Most instructions that one rendering may take: a template that loops is an error.
const FUEL: u64 = 10_000_000;
/// Stand for the marks in what is rendered; private characters that no text has (one that does is refused).
const BEGIN: char = '\u{F70A1}';
const END: char = '\u{F70A2}';

/// A record of a chat.
#[derive(Clone, Debug)]
pub(crate) struct Chat {
    pub(crate) messages: Value,
    /// Tools that the assistant may call, for templates that write them.
    pub(crate) tools: Option<Value>,
}

/// A text and the byte ranges of it that are targets, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    pub(crate) targets: Vec<Range<usize>>,
}

/// How chats become text.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    /// Names and texts, as templates know them.
    special_tokens: Value,
    loss_on: LossOn,
    marks: bool,
    digest: [u8; 32],
}

impl ChatTemplate {
    /// The template of the job, else the tokenizer's own.
    pub(crate) fn open(
        path: Option<&Path>,
        tokenizer: &TextTokenizer,
        loss_on: LossOn,
        workdir: &Path,
    ) -> Result<Self, DataError> {
        let refuse = |why: String| DataError::Setting { key: "train.data.chat_template", why };
        let source = match path {
            Some(path) => {
                let path = workdir.join(path);
                super::tokenize::read_capped(&path, MAX_TEMPLATE as u64)?
                    .ok_or_else(|| refuse(format!("there is no file {}", path.display())))?
            }
            None => tokenizer.chat_template().map_err(refuse)?.ok_or_else(|| {
                refuse(
                    "the tokenizer has no chat template: name a Jinja file, or train on `format: text`"
                        .into(),
                )
            })?,
        };
        if source.len() > MAX_TEMPLATE {
            return Err(refuse(format!("the template is larger than {} MiB", MAX_TEMPLATE >> 20)));
        }
        Self::new(&source, tokenizer.special_tokens(), loss_on).map_err(|e| refuse(said(&e)))
    }

    pub(crate) fn new(
        source: &str,
        special_tokens: Vec<(String, String)>,
        loss_on: LossOn,
    ) -> Result<Self, Error> {
        let mut hasher = blake3::Hasher::new_derive_key("launch 2026 chat template v1");
        for text in [source].into_iter().chain(special_tokens.iter().flat_map(|(n, t)| [&**n, &**t])) {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        hasher.update(&[u8::from(loss_on == LossOn::Assistant)]);
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |why: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("the template refuses it: {why}")))
        });
        environment.add_filter("tojson", to_json);
        environment.add_template("generation", "\u{F70A1}")?;
        environment.add_template("endgeneration", "\u{F70A2}")?;
        let (template, marks) = with_marks(source);
        environment.add_template_owned("chat", template)?;
        let digest = *hasher.finalize().as_bytes();
        let special_tokens: BTreeMap<String, String> = special_tokens.into_iter().collect();
        Ok(ChatTemplate { environment, special_tokens: special_tokens.into(), loss_on, marks, digest })
    }

    /// Identity: equal digests write equal chats equally.
    pub(crate) fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// Are some tokens no targets?
    pub(crate) fn marks_targets(&self) -> bool {
        self.loss_on == LossOn::Assistant
    }

    /// A record's text and targets; or why it has none.
    pub(crate) fn write(&self, chat: &Chat) -> Result<Marked, String> {
        let messages = messages(&chat.messages)?;
        let whole = self.render(chat, &messages, false)?;
        let marked = match self.loss_on {
            LossOn::All => {
                let text: String = whole.chars().filter(|&c| c != BEGIN && c != END).collect();
                let all = 0..text.len();
                return Ok(Marked { text, targets: vec![all] });
            }
            LossOn::Assistant if self.marks => between_marks(&whole)?,
            LossOn::Assistant => self.by_prefixes(chat, &messages, whole)?,
        };
        match marked.targets.iter().any(|r| !r.is_empty()) {
            true => Ok(marked),
            false => Err("the assistant says nothing in it, so there is no target".into()),
        }
    }

    fn render(&self, chat: &Chat, messages: &[Value], prompt: bool) -> Result<String, String> {
        let context = context! {
            messages => messages, tools => chat.tools.clone(), documents => Value::from(()), add_generation_prompt => prompt, ..self.special_tokens.clone()
        };
        let template = self.environment.get_template("chat").map_err(|e| said(&e))?;
        template.render(context).map_err(|e| said(&e))
    }

    /// What each assistant message adds to the text.
    fn by_prefixes(&self, chat: &Chat, messages: &[Value], text: String) -> Result<Marked, String> {
        let mut targets = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            if role(message).as_deref() != Some("assistant") {
                continue;
            }
            let before = self.render(chat, &messages[..i], true)?;
            let after = self.render(chat, &messages[..=i], false)?;
            if !(text.starts_with(&after) && after.starts_with(&before)) {
                return Err(format!(
                    "what the assistant says in message {} can't be told from the rest: the template writes earlier messages differently \
                     when later ones follow; mark it in the template with {{% generation %}} and {{% endgeneration %}}, or set loss_on: all",
                    i + 1
                ));
            }
            targets.push(before.len()..after.len());
        }
        Ok(Marked { text, targets })
    }
}

/// The messages of a record: objects with a role each, at least one.
fn messages(value: &Value) -> Result<Vec<Value>, String> {
    let bad = |why: &str| Err(format!("the messages {why}"));
    let Ok(items) = value.try_iter() else { return bad("aren't a list") };
    let items: Vec<Value> = items.collect();
    if value.as_str().is_some() || items.is_empty() {
        return bad("aren't a list of at least one");
    }
    for (i, message) in items.iter().enumerate() {
        if role(message).is_none() {
            return Err(format!(
                "message {} has no `role`: it must be an object such as {{\"role\": \"user\", \"content\": …}}",
                i + 1
            ));
        }
        if has_mark(message) {
            return Err(format!(
                "message {} holds a character that stands for a mark here (U+F70A1 or U+F70A2)",
                i + 1
            ));
        }
    }
    Ok(items)
}

fn role(message: &Value) -> Option<String> {
    message.get_attr("role").ok()?.as_str().map(str::to_owned)
}

fn has_mark(value: &Value) -> bool {
    value.to_string().contains([BEGIN, END])
}

/// The template with its marks as includes, which keep the tag's own handling of white space; and whether it had any.
fn with_marks(source: &str) -> (String, bool) {
    // can't fail: the pattern is fixed, and a test compiles it
    let Ok(tag) = Regex::new(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}") else {
        return (source.to_owned(), false);
    };
    let marked = tag.replace_all(source, r#"{%$1 include "$2" $3%}"#);
    let any = matches!(marked, std::borrow::Cow::Owned(_));
    (marked.into_owned(), any)
}

/// Text without marks, and what stood between them.
fn between_marks(marked: &str) -> Result<Marked, String> {
    let (mut text, mut targets, mut open) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match (c, open) {
            (BEGIN, None) => open = Some(text.len()),
            (END, Some(from)) => {
                targets.push(from..text.len());
                open = None;
            }
            (BEGIN | END, _) => return Err("the template's generation marks don't pair".into()),
            _ => text.push(c),
        }
    }
    match open {
        None => Ok(Marked { text, targets }),
        Some(_) => Err("the template's generation marks don't pair".into()),
    }
}

/// An error in one line, with the template's line.
fn said(e: &Error) -> String {
    let mut said = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
    if let (Some("chat"), Some(line)) = (e.name(), e.line()) {
        // writing to a string can't fail
        _ = write!(said, " (the chat template's line {line})");
    }
    said
}

/// `tojson` as `transformers` has it: Python's spacing, nothing escaped for HTML.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = String::new();
    write_json(&value, indent, 0, &mut out)?;
    Ok(out)
}

fn write_json(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) -> Result<(), Error> {
    use minijinja::value::ValueKind;
    let bad =
        |what: &str| Error::new(ErrorKind::BadSerialization, format!("{what} can't be written as JSON"));
    let line = |depth: usize, out: &mut String| {
        if let Some(n) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    let text = |s: &str| serde_json::to_string(s).map_err(|_| bad("text"));
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::String => out.push_str(&text(value.as_str().ok_or_else(|| bad("text"))?)?),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut any = false;
            for item in value.try_iter()? {
                out.push_str(if std::mem::replace(&mut any, true) { comma } else { "" });
                line(depth + 1, out);
                write_json(&item, indent, depth + 1, out)?;
            }
            if any {
                line(depth, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut any = false;
            for key in value.try_iter()? {
                out.push_str(if std::mem::replace(&mut any, true) { comma } else { "" });
                line(depth + 1, out);
                out.push_str(&text(&key.to_string())?);
                out.push_str(": ");
                write_json(&value.get_item(&key)?, indent, depth + 1, out)?;
            }
            if any {
                line(depth, out);
            }
            out.push('}');
        }
        other => return Err(bad(&other.to_string())),
    }
    Ok(())
}
